"""What a process tells the launcher by its exit code, beside 0 (it is done) and 1 (it failed)."""

CANNOT_START = 2  # it was started wrongly: starting it again cannot help
NOT_NOW = 75  # it cannot go on until something passes, as a full disk
