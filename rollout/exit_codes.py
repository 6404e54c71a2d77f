"""The exit codes by which a process tells the launcher what to do, besides 0 (done) and 1 (failed)."""

CANNOT_START = 2  # the cause stays: starting it again cannot help
NOT_NOW = 75  # the cause may pass, such as a full disk: starting it again later may help
