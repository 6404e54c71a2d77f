"""Rewards: a task and a completion in, a verdict out."""
