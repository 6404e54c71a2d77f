"""Starts torchrun and SGLang's server, which are not ours, each with a fix for a fault that it has here."""
