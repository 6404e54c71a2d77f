"""A run's configuration: composed from YAML groups and the command line, checked, written to the run's folder, read back."""
