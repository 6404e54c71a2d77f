"""Where a run's processes go: nodes, GPUs and ports. Pure, except for the questions to this machine."""
