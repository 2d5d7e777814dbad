"""What projects/benchmarks/benchmark.py measures, and how.

presets: tables of the cases that are compared. measure: their times, in turns. memory: what they
take, exactly. session: a preset from its options to the table, the JSON file and the plot.
"""
