"""Before any test module here can import megatron, `trainer` prepares it for a machine without a GPU."""

from hypothesis import settings

import trainer  # noqa: F401

# A law is not about time, and a busy machine stops any process for longer than hypothesis allows an example by default.
settings.register_profile("trainer", deadline=None)
settings.load_profile("trainer")
