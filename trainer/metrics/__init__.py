"""The figures of a run: the table of all of them, and the places that they are written to."""
