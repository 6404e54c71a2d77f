"""The broadcasts of a source rank in one attempt of a push: all of them end by its deadline, whatever torch does."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.push import weight_group

LAST_CALL_S = 1.0  # the time for a call when the deadline has passed

log = logging.getLogger("trainer")
T = TypeVar("T")


def in_time(call: Callable[[], T], ends_s: float, device: torch.device) -> T:
    """Waits a little longer than torch's own timeout, which frees the engines as well. Raises WeightGroupError."""
    return weight_group.within(call, max(ends_s - time.monotonic(), LAST_CALL_S) + LAST_CALL_S, device)


class Broadcasts:
    """Sends buckets one after the other; after a failure it sends nothing more."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, ends_s: float) -> None:
        """group: None if it could not be joined. ends_s: the deadline, by the monotonic clock."""
        self._group, self._device, self._ends_s = group, device, ends_s
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def send(self, bucket: Tensor) -> None:
        """Begins to send a bucket, u8 [n], once the one before has left."""
        if not self.finish():
            return
        assert self._group is not None
        try:
            weight_group.limit(self._group, self._ends_s - time.monotonic())
            begin = partial(dist.broadcast, bucket, group_src=0, group=self._group, async_op=True)
            self._under_way = in_time(begin, self._ends_s, self._device), bucket
        except RuntimeError as error:  # gloo's and NCCL's
            self._break(error)

    def finish(self) -> bool:
        """Waits for the bucket under way. False if the group is broken, because some engine is gone."""
        if self._under_way is not None:
            work, _ = self._under_way
            self._under_way = None
            try:
                in_time(work.wait, self._ends_s, self._device)
            except RuntimeError as error:  # gloo's and NCCL's
                self._break(error)
        return self._group is not None

    def _break(self, error: RuntimeError) -> None:
        log.warning("push: a broadcast failed: %s", error)
        self._group = None
