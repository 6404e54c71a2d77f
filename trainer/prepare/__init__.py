"""Makes the models that `model.prepare` names, on a machine that has none."""
