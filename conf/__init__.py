"""The configuration of a run: presets in YAML, and the schema that they are checked against."""
