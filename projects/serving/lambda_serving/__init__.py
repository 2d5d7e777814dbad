"""A detector behind HTTP: batches, limits, metrics, and a shutdown that loses nothing."""
