"""What surrounds a step in a run: the batches that come in, the evaluations, and the checkpoints."""
