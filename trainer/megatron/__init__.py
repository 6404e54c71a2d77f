"""What is built on Megatron-core: the model on this rank, its weights to and from Hugging Face folders, and its checkpoints."""
