"""What people see of a run: progress while it lives, its report and summary, and the report of a sweep."""
