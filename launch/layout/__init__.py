"""How one node with GPUs is shared between trainer and engines."""
