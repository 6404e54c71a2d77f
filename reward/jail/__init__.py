"""What runs inside a jail, beside or around code that nobody trusts. Standard library only: the jail holds nothing else."""
