"""The ledger: what is generated, graded and trained, how stale it may be, and the journal that keeps it on disk."""
