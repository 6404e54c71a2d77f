"""One module for each kind of task, and what they share: code out of a completion, and what a completion has used."""
