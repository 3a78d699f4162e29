"""From a cell to its texts: the plan, the one loop, the sampler; and given texts read instead."""
