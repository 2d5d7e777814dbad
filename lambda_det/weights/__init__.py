"""A file of weights: read safely, with its names, its provenance and its formats."""
