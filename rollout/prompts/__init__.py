"""Turns problems into prompts: reads them, renders them with the model's chat template, and puts them into an endless order."""
