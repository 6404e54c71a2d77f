"""The processes of a run: how they start, restart and end."""
