"""Where a run's processes go: nodes, GPUs and ports. Pure, but for the questions to this machine."""
