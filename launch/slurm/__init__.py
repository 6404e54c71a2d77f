"""A run on the nodes of one Slurm job. host.py turns the launcher's decisions into steps; the rest asks and tells Slurm."""
