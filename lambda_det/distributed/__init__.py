"""The processes of a run: how they start, meet, are asked to stop, and end together."""
