"""What happens between two steps of a run: the next batch comes in, and evaluations and checkpoints begin and end."""
