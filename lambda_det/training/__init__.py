"""Checkpoints of a run: written beside training, found whole again, read without running them."""
