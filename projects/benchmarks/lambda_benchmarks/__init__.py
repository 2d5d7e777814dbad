"""What projects/benchmarks/benchmark.py measures, and how."""
