"""What tools/benchmark.py measures: a module for each preset, with add_arguments and run."""
