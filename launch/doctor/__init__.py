"""What usually goes wrong, found before GPUs are burned: facts of every node, judged by small functions."""
