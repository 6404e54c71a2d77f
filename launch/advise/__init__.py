"""Advice on a run that exists: what limits it, and which setting to change first. `python -m launch.advise outputs/NAME`."""
