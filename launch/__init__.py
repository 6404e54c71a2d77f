"""Where a run runs: placement, the processes of one machine, what they print, and what a run left behind."""
