"""Training for any task: start, loop, step, checkpoints, exact resume, precision, log."""
