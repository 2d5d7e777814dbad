"""What tools/benchmark.py measures.

A module for each preset, with add_arguments and run: local, layer, attention_networks, placement,
networks, families, size, data. What they share: options, measure, memory, machine, report, plot.
"""
