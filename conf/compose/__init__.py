"""Composes a configuration from presets and the command line, checks it, writes it to the run's folder and reads it back."""
