"""Before any test module here can import megatron, `trainer` prepares it for a machine without a GPU."""

import trainer  # noqa: F401
