"""Finds the usual mistakes before GPUs are used: facts about every node, checked by small functions."""
