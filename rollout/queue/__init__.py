"""The queue server, which hosts a run's ledger, and the clients that speak to it. `python -m rollout.queue` starts it."""
