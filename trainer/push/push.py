"""Sends weights from the Megatron ranks to the engines over one collective group per pipeline stage, never through storage.

The source rank of each stage (TP 0, DP 0) gathers the tensors of its stage bucket by bucket and broadcasts each bucket to every
engine rank. Meanwhile rank 0 tells the engines to receive them, in one conversation per engine (`trainer/push/engines.py`):

    engine      pause · flush │ begin ─ receive(stage 0, bucket 0) … receive(stage n, bucket m) ─ checksums ─ end · continue
    source s                  │         broadcast(bucket 0) … broadcast(bucket m), the next one gathered meanwhile

The source also computes which checksums an engine with exactly these weights has. An engine with others is lost.

One deadline holds for the whole push. If an engine breaks the groups, the part to the right of the line is repeated without it,
for the engines that do not hold the version yet. A lost engine does not hold the version: the report names it, its worker starts
it again, and it takes part in a later push. The groups are made again whenever the set of engines has changed.
"""

import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from conf.shapes import Layout, ModelShape
from rollout.ledger.records import EngineInfo
from rollout.patched.weight_groups import PREFIX
from rollout.queue.client import QueueClient
from trainer.megatron import hf_weights
from trainer.megatron.hf_weights import HfTensor
from trainer.megatron.policy import Policy
from trainer.push import weight_group
from trainer.push.broadcasts import LAST_CALL_S, Broadcasts, in_time
from trainer.push.engines import AttemptResult, Bucket, Checksums, Engines, WeightGroup
from trainer.ranks import Control

log = logging.getLogger("trainer")
GENERATIONS = 8
"""A group made again listens on another port, since the last one may still be closing; after these the first is reused."""

ATTEMPTS = 3
"""Attempts per push, while engines are left that can take part. Each gets half of the remaining time, the last one all of it."""


def plan_buckets(shape: ModelShape, layout: Layout, dtype: torch.dtype, bucket_bytes: int) -> list[list[Bucket]]:
    """The buckets that each stage sends, in order. Each tensor is in one; none exceeds `bucket_bytes` unless a tensor does."""
    plan: list[list[Bucket]] = []
    for stage in range(layout.pp):
        buckets: list[list[HfTensor]] = []
        room = 0
        for tensor in hf_weights.hf_manifest(shape, layout, stage, dtype):
            size = hf_weights.tensor_bytes(tensor)
            if not buckets or size > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(tensor)
            room -= size
        plan.append([tuple(bucket) for bucket in buckets])
    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """The result of one push, the same on every rank."""

    version: int
    engines: Sequence[str]  # ids of the engines that hold the version now
    failed: Mapping[str, str]  # id of an engine -> what went wrong
    bytes: int  # sent to each engine
    stall_s: float  # how long it kept the trainer busy
    pause_s: float  # how long the engines were paused


class Pusher:
    """The trainer's side of all pushes of a run. All ranks call `push` together; rank 0 talks to the queue and the engines."""

    def __init__(
        self,
        policy: Policy,
        control: Control,
        queue: QueueClient | None,
        *,
        address: str,
        first_port: int,
        bucket_bytes: int,
        deadline_s: float,
        engine_api_key: str,
    ) -> None:
        """address: where the engines reach the host of this rank; first_port: the first of GENERATIONS x stages ports."""
        self._policy, self._control, self._queue = policy, control, queue
        self._first_port, self._deadline_s, self._key = first_port, deadline_s, engine_api_key
        self._backend = "nccl" if policy.mesh.device.type == "cuda" else "gloo"
        dtype = next(policy.chunks[0].parameters()).dtype
        self._plan = plan_buckets(policy.shape, policy.mesh.layout, dtype, bucket_bytes)
        self._bytes = sum(hf_weights.tensor_bytes(t) for stage in self._plan for bucket in stage for t in bucket)
        # Ranks are numbered from the first stage to the last, so the addresses of the sources are in the order of the stages.
        self._addresses = [a for a in control.gather(address if policy.mesh.is_weight_source else "") if a]
        self._groups: list[WeightGroup] = []
        self._members: list[str] = []  # ids of the engines in the groups
        self._mine: dist.ProcessGroup | None = None  # on a source, its stage's group
        # An engine may still be in groups of an earlier trainer process, so a name is never used twice.
        self._life = control.share(str, lambda: secrets.token_hex(4))
        self._generation = 0

    def push(self, version: int) -> PushReport:
        """Sends `version` to every registered engine. An engine that fails does not raise an error: the report names it."""
        start = time.perf_counter()
        fleet: Sequence[EngineInfo] = self._control.share(Sequence[EngineInfo], self._registered)
        ends_s = time.monotonic() + self._deadline_s
        with Engines(fleet if self._control.is_leader else (), self._key, ends_s) as engines:
            present = waiting = self._control.share(Sequence[EngineInfo], engines.pause)
            paused = time.perf_counter()
            for attempt in range(1, ATTEMPTS + 1):
                if not waiting:
                    break
                left_s = ends_s - time.monotonic()
                attempt_s = left_s / 2 if attempt < ATTEMPTS else left_s
                waiting = self._attempt(engines, waiting, version, time.monotonic() + attempt_s)
            engines.give_up()
            failed: Mapping[str, str] = self._control.share(Mapping[str, str], lambda: engines.failed)
        end = time.perf_counter()
        return PushReport(
            version=version,
            engines=[e.id for e in present if e.id not in failed],
            failed=failed,
            bytes=self._bytes,
            stall_s=end - start,
            pause_s=end - paused,
        )

    def _attempt(self, engines: Engines, receivers: Sequence[EngineInfo], version: int, ends_s: float) -> Sequence[EngineInfo]:
        """Sends everything to the receivers; returns those that take part in the next attempt."""
        leave, join = self._regroup(receivers)
        engines.start_receiving(receivers, leave, join, self._groups, self._plan, ends_s)
        sent, expected = _all_stages(self._control.gather(json.dumps(self._send(join, receivers[0].tp, ends_s))))
        if not sent:
            self._forget_groups()  # this frees the engines that still wait for a bucket
        end: AttemptResult = self._control.share(AttemptResult, lambda: engines.finish_receiving(version, expected, sent=sent))
        if end.broken:
            self._forget_groups()
        return end.waiting

    def _registered(self) -> Sequence[EngineInfo]:
        assert self._queue is not None
        return sorted(self._queue.fleet(), key=lambda e: e.name)

    def _regroup(self, engines: Sequence[EngineInfo]) -> tuple[Sequence[str], bool]:
        """Makes new groups if the engines have changed. Returns the groups to leave, and whether the engines must join."""
        ids = [e.id for e in engines]
        if ids == self._members:
            return (), False
        leave = [group.name for group in self._groups]
        self._forget_groups()
        stages = self._policy.mesh.layout.pp
        first_port = self._first_port + self._generation % GENERATIONS * stages
        self._groups = [
            WeightGroup(
                name=f"{PREFIX}{self._life}-{self._generation}-stage-{stage}",
                address=self._addresses[stage],
                port=first_port + stage,
                world_size=1 + sum(e.tp for e in engines),
                backend=self._backend,
            )
            for stage in range(stages)
        ]
        self._members = ids
        self._generation += 1
        return leave, True

    def _forget_groups(self) -> None:
        if self._mine is not None:
            try:
                in_time(partial(weight_group.destroy, self._mine), time.monotonic(), self._policy.mesh.device)
            except weight_group.WeightGroupError as error:  # a call of it never returned, and still holds it
                log.warning("push: the weight group could not be left: %s", error)
        self._mine, self._groups, self._members = None, [], []

    def _send(self, join: bool, engine_tp: int, ends_s: float) -> tuple[bool, Checksums]:
        """This rank's part of the broadcasts. False if the group broke because some engine is gone.

        Returns also what each rank of an engine must hold of this stage. It is computed while a bucket is under way.
        """
        mesh, shape = self._policy.mesh, self._policy.shape
        if mesh.is_weight_source and join:
            self._mine = self._joined(self._groups[mesh.stage], ends_s)
        broadcasts = Broadcasts(self._mine, mesh.device, ends_s)
        sent = self._sent_tensors(broadcasts) if mesh.is_weight_replica_zero else ()
        device: Literal["cpu", "cuda"] = "cuda" if mesh.device.type == "cuda" else "cpu"
        checksums = weight_group.expected_checksums(sent, tp=engine_tp, kv_heads=shape.kv_heads, engine_device=device)
        return not mesh.is_weight_source or broadcasts.finish(), checksums

    def _sent_tensors(self, broadcasts: Broadcasts) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this rank's stage, each one as its bucket has been sent. On ranks other than the source there are none.

        All buckets are gathered even if the group is broken, because the ranks of the stage gather in lock-step.
        """
        tensors = hf_weights.hf_tensors(self._policy.chunks, self._policy.shape, self._policy.mesh)
        for bucket in self._plan[self._policy.mesh.stage]:
            values = [(name, value) for name, value in islice(tensors, len(bucket)) if value is not None]
            if self._policy.mesh.is_weight_source:
                broadcasts.send(weight_group.pack([value for _, value in values]))
            yield from values

    def _joined(self, group: WeightGroup, ends_s: float) -> dist.ProcessGroup | None:
        """The stage's group, once all engines are in it; None if some engine did not come."""
        left_s = max(ends_s - time.monotonic(), LAST_CALL_S)
        join = partial(
            weight_group.join,
            group.address,
            group.port,
            rank=0,
            world_size=group.world_size,
            group_name=group.name,
            timeout_s=left_s,
            backend=group.backend,
        )
        try:
            return in_time(join, ends_s, self._policy.mesh.device)
        except weight_group.WeightGroupError as error:
            log.warning("push: %s: %s", group.name, error)
            return None


def _all_stages(parts: Sequence[str]) -> tuple[bool, Checksums]:
    """Whether all ranks could send, and the checksums of the whole model, from what `_send` returned on each rank."""
    sent, stages = zip(*map(json.loads, parts), strict=True)
    return all(sent), [dict(chain.from_iterable(map(dict.items, rank))) for rank in zip(*stages, strict=True)]
