"""Weights from the Megatron ranks to the engines, over a collective group a pipeline stage: never through storage.

The source rank of each stage (TP 0, DP 0) gathers its stage's tensors bucket by bucket and broadcasts each to every engine rank,
while rank 0 has the engines receive them, each through one conversation (`trainer/push/engines.py`):

    engine      pause · flush │ begin ─ receive(stage 0, bucket 0) … receive(stage n, bucket m) ─ end(version) · continue
    source s                  │         broadcast(bucket 0) … broadcast(bucket m), the next one gathered meanwhile

One deadline holds for all of it. Where an engine breaks the groups, what lies right of the line is done again without it, for
those that did not get through. An engine that is lost does not hold the version: the report names it, its worker starts it again,
and it takes part in a later push. The groups are made again whenever the set of engines has changed.
"""

import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from conf.shapes import Layout, ModelShape
from rollout.ledger.records import EngineInfo
from rollout.queue.client import QueueClient
from trainer.control import Control
from trainer.megatron import hf_weights
from trainer.megatron.hf_weights import HfTensor
from trainer.megatron.policy import Policy
from trainer.push import weight_group
from trainer.push.engines import LAST_CALL_S, Bucket, Ended, Engines, Group

log = logging.getLogger("trainer")
GENERATIONS = 8
"""A group made again listens on another port, since the last one may still be closing; after so many the first serves again."""

ATTEMPTS = 3
"""Of a push, as long as engines are left that may get through. Each has half of the time that is left, the last one all of it."""


def plan_buckets(shape: ModelShape, layout: Layout, dtype: torch.dtype, bucket_bytes: int) -> list[list[Bucket]]:
    """For each stage the buckets it sends, in order: every tensor in one, none above `bucket_bytes` unless a tensor is."""
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
    """What one push did; the same on every rank."""

    version: int
    engines: Sequence[str]  # ids of the engines that hold the version now
    failed: Mapping[str, str]  # id of an engine -> what went wrong
    bytes: int  # sent to each engine
    stall_s: float  # how long the trainer was busy with it
    pause_s: float  # how long the engines stood still


class Pusher:
    """The trainer's end of all pushes of a run. Every rank calls `push` together; rank 0 speaks to queue and engines."""

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
        """address: of this rank's host, as the engines reach it; first_port: of GENERATIONS x stages ports."""
        self._policy, self._control, self._queue = policy, control, queue
        self._first_port, self._deadline_s, self._key = first_port, deadline_s, engine_api_key
        self._backend = "nccl" if policy.mesh.device.type == "cuda" else "gloo"
        dtype = next(policy.chunks[0].parameters()).dtype
        self._plan = plan_buckets(policy.shape, policy.mesh.layout, dtype, bucket_bytes)
        self._bytes = sum(hf_weights.tensor_bytes(t) for stage in self._plan for bucket in stage for t in bucket)
        # Ranks run from the first stage to the last, so the sources' addresses come in order of stage.
        self._addresses = [a for a in control.gather(address if policy.mesh.is_weight_source else "") if a]
        self._groups: list[Group] = []
        self._members: list[str] = []  # ids of the engines in the groups
        self._mine: dist.ProcessGroup | None = None  # on a source, its stage's group
        # An engine outlives its trainer and may still be in that one's groups: a name is never used twice.
        self._life = control.share(str, lambda: secrets.token_hex(4))
        self._generation = 0
        self._verified: set[str] = set()  # ids of the engines whose first push was compared

    def push(self, version: int) -> PushReport:
        """Gives `version` to every registered engine. An engine that fails is no error: the report names it."""
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
            failed = self._failed(engines)
            self._verify(engines, [e for e in present if e.id not in failed])
            failed = self._failed(engines)
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
        """Sends everything to the receivers; those to try again with."""
        leave, join = self._regroup(receivers)
        engines.start_receiving(receivers, leave, join, self._groups, self._plan, version, ends_s)
        sent = self._control.agree(self._send(join, ends_s))
        if not sent:
            self._forget_groups()  # which frees the engines that still wait for a bucket
        end: Ended = self._control.share(Ended, lambda: engines.finish_receiving(sent=sent))
        if end.broken:
            self._forget_groups()
        return end.waiting

    def _failed(self, engines: Engines) -> Mapping[str, str]:
        """By id, on every rank."""
        failed: Mapping[str, str] = self._control.share(Mapping[str, str], lambda: engines.failed)
        return failed

    def _registered(self) -> Sequence[EngineInfo]:
        assert self._queue is not None
        return sorted(self._queue.fleet(), key=lambda e: e.name)

    def _regroup(self, engines: Sequence[EngineInfo]) -> tuple[Sequence[str], bool]:
        """New groups if the engines are not those of the last push: which ones to leave, and whether all have to join."""
        ids = [e.id for e in engines]
        if ids == self._members:
            return (), False
        leave = [group.name for group in self._groups]
        self._forget_groups()
        stages = self._policy.mesh.layout.pp
        first_port = self._first_port + self._generation % GENERATIONS * stages
        self._groups = [
            Group(
                name=f"push-{self._life}-{self._generation}-stage-{stage}",
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
            weight_group.destroy(self._mine)
        self._mine, self._groups, self._members = None, [], []

    def _send(self, join: bool, ends_s: float) -> bool:
        """This rank's part of the broadcasts. False where the group broke: some engine is gone."""
        mesh = self._policy.mesh
        if not mesh.is_weight_replica_zero:
            return True
        if mesh.is_weight_source and join:
            self._mine = self._joined(self._groups[mesh.stage], ends_s)
        broken = mesh.is_weight_source and self._mine is None
        broadcast: dist.Work | None = None
        # All buckets are gathered even when the group is broken: the ranks of the stage gather in lock-step.
        for bucket in self._flat_buckets():
            broken = broken or not _arrived(broadcast)
            broadcast = None
            if bucket is not None and not broken and self._mine is not None:
                try:
                    weight_group.limit(self._mine, ends_s - time.monotonic())
                    broadcast = dist.broadcast(bucket, group_src=0, group=self._mine, async_op=True)
                except RuntimeError as error:
                    log.warning("push: a broadcast failed: %s", error)
                    broken = True
        return _arrived(broadcast) and not broken

    def _joined(self, group: Group, ends_s: float) -> dist.ProcessGroup | None:
        try:
            return weight_group.join(
                group.address,
                group.port,
                rank=0,
                world_size=group.world_size,
                group_name=group.name,
                timeout_s=max(ends_s - time.monotonic(), LAST_CALL_S),
                backend=group.backend,
            )
        except weight_group.WeightGroupError as error:  # some engine did not come
            log.warning("push: %s", error)
            return None

    def _verify(self, engines: Engines, present: Sequence[EngineInfo]) -> None:
        """The first push to an engine is believed only once its checksums are those of the trainer's weights."""
        fresh = [e for e in present if e.id not in self._verified]
        if not fresh:
            return
        mine = ""
        mesh, shape = self._policy.mesh, self._policy.shape
        if mesh.is_weight_replica_zero:
            tensors = hf_weights.hf_tensors(self._policy.chunks, shape, mesh)
            if mesh.is_weight_source:
                device: Literal["cpu", "cuda"] = "cuda" if mesh.device.type == "cuda" else "cpu"
                values = ((name, value) for name, value in tensors if value is not None)
                mine = json.dumps(
                    weight_group.expected_checksums(values, tp=fresh[0].tp, kv_heads=shape.kv_heads, engine_device=device)
                )
            else:
                deque(tensors, maxlen=0)  # takes part in the gathering
        stages = [json.loads(text) for text in self._control.gather(mine) if text]
        expected = [{k: v for stage in stages for k, v in stage[rank].items()} for rank in range(fresh[0].tp)]
        engines.compare(expected, fresh)
        self._verified |= {e.id for e in fresh}

    def _flat_buckets(self) -> Iterator[Tensor | None]:
        """Each bucket of this rank's stage as bytes u8 [n] on the source; None on the ranks that only take part in gathering."""
        tensors = hf_weights.hf_tensors(self._policy.chunks, self._policy.shape, self._policy.mesh)
        for bucket in self._plan[self._policy.mesh.stage]:
            values = [next(tensors)[1] for _ in bucket]
            if self._policy.mesh.is_weight_source:
                yield weight_group.pack([v for v in values if v is not None])
            else:
                yield None


def _arrived(broadcast: dist.Work | None) -> bool:
    """Waits for a broadcast; False when the group broke under it, since some engine is gone."""
    if broadcast is None:
        return True
    try:
        broadcast.wait()
    except RuntimeError as error:  # gloo's and NCCL's
        log.warning("push: a broadcast failed: %s", error)
        return False
    return True
