"""Launches runs: checks and placement before the start, processes and recovery while a run lives, reports and planning."""
