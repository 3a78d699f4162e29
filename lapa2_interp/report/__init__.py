"""The page of a run, and the viewer."""
