"""The algorithm: rewards become advantages, trajectories become microbatches, and log-probs become a loss."""
