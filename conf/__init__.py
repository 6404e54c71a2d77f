"""What a run is: Hydra groups in YAML, and the schema they are checked against. Imports nothing of ours."""
