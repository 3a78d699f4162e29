"""From a cell to its texts: the plan, the decode loop and the sampler; and the reading of given
texts."""
