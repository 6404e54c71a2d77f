"""The judge's side of a jail: starts jobs in it, watches their clocks, and reads what they say."""
