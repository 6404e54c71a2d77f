"""Trains the policy on graded groups, with Megatron.

Importing the package lets megatron-core run where there is no GPU; that has to happen before the first megatron import.
"""

from trainer.megatron import cpu_device

cpu_device.install()
