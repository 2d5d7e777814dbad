"""What tools/benchmark.py measures.

A module for each preset, with add_arguments and run: local, layer, attention_networks, placement,
networks, families, size, data. Layers of self-attention to compare
with are in attention. What presets share: options, session, measure, memory, machine, report, plot.
"""
