"""Scripts that make a model folder if it does not exist. The setting `model.prepare` names the script."""
