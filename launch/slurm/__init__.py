"""A run on the nodes of one Slurm job. backend.py turns the lifecycle's actions into steps; the other files ask Slurm."""
