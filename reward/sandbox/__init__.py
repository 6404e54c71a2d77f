"""The judge's side of the jail: a sandbox starts jobs, watches them and keeps what they say."""

from reward.sandbox.sandbox import Sandbox

__all__ = ["Sandbox"]
