"""Processes of a run: how they start, connect, receive signals and end."""
