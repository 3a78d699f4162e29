"""From a cell to texts: layouts, batches, the decode loop."""
