"""Training that knows no task: start, loop, step, checkpoints, exact resume, precision, log."""
