"""What tasks are graded with, whoever asks: a judge for a lease, or `reward.check` for a line of a file."""
