"""The page of a run, with its results beside the ground truth."""
