"""Megatron-core's side: the model on this rank, its weights to and from Hugging Face folders, and its checkpoints."""
