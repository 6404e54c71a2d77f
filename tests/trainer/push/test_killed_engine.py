"""A real SGLang server that is killed inside a push is lost; the other one gets through, and trains on with the trainer."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from conf.shapes import Layout
from rollout.engine_client import EngineClient
from rollout.ledger.records import EngineInfo
from tests.ports import free_port
from tests.trainer import ranks
from tests.trainer.megatron.test_policy import batch, config, model_folder
from tests.trainer.push.test_push import KEY, FixedFleet, as_registered, complete, real_engines
from trainer.push.broadcasts import Broadcasts
from trainer.push.push import Pusher, PushReport

BUCKET_BYTES = 20_000
PUSH_S = 60.0


class DeadlyPusher(Pusher):
    """In the push of version 1, between its second bucket and its third, it kills the processes of this group."""

    victim = 0  # 0: none

    def _sent_tensors(self, broadcasts: Broadcasts) -> Iterator[tuple[str, Tensor]]:
        send, sent = broadcasts.send, itertools.count()

        def send_after_the_kill(bucket: Tensor) -> None:
            if next(sent) == 2:
                os.killpg(self.victim, signal.SIGKILL)
            send(bucket)

        if self.victim:
            broadcasts.send = send_after_the_kill  # type: ignore[method-assign]
        return super()._sent_tensors(broadcasts)


def three_pushes(folder: str, engines: list[EngineInfo], port: int, victim: int) -> tuple[list[PushReport], list[bool]]:
    """Versions 0, 1 and 2, one training step apart: the reports, and whether the first engine then had this stage's weights."""
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron import hf_weights
    from trainer.megatron.policy import load_policy
    from trainer.push import weight_group
    from trainer.ranks import Control
    from trainer.step import Stopwatch, train_step

    settings = config()
    settings.model.path, settings.model.dtype, settings.algo.kl_coef = folder, "float32", 0.0
    mesh = process_groups.initialize(Layout(pp=2), seed=0, timeout_s=120)
    policy = load_policy(settings, mesh)
    pusher = DeadlyPusher(
        policy, Control(timeout_s=120), FixedFleet(engines), address="127.0.0.1", first_port=port, bucket_bytes=BUCKET_BYTES,
        deadline_s=PUSH_S, engine_api_key=KEY,
    )  # fmt: skip
    reports, held = [], []
    for version in range(3):
        pusher.victim = victim if version == 1 and mesh.is_first_stage else 0
        reports.append(pusher.push(version))
        engines[:] = [e for e in engines if e.id in reports[-1].engines]
        assert engines, reports[-1].failed
        tensors = ((name, value) for name, value in hf_weights.hf_tensors(policy.chunks, policy.shape, mesh) if value is not None)
        (mine,) = weight_group.expected_checksums(tensors)
        theirs = asyncio.run(checksums(engines[0]))
        held.append({name: theirs[name] for name in mine} == mine)
        if version < 2:
            train_step(policy, load_algorithm(settings.algo), batch(version), settings, Stopwatch())
    process_groups.shutdown()
    return reports, held


async def checksums(engine: EngineInfo) -> dict[str, str]:
    async with EngineClient(engine.url, api_key=KEY) as client:
        (found,) = await client.checksum()
        return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_engine_killed_between_two_buckets_is_the_only_one_lost(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    with real_engines(folder, tmp_path) as engines:
        fleet = as_registered(engines)
        assert engines[1].pid
        results = ranks.run(three_pushes, 2, folder, fleet, free_port(), engines[1].pid, deadline_s=300)
        for (first, second, third), held in results:
            assert list(first.engines) == ["engine-0@1", "engine-1@1"] and not first.failed
            assert list(second.engines) == ["engine-0@1"] and set(second.failed) == {"engine-1@1"}, second.failed
            assert list(third.engines) == ["engine-0@1"] and not third.failed
            assert held == [True] * 3
            assert second.stall_s < PUSH_S
            print(f"the push that lost an engine took {second.stall_s:.1f} s, the next one {third.stall_s:.1f} s")
        assert not engines[1].alive()
        answer = asyncio.run(complete(engines[0], [5, 9, 33], 8))
        assert len(answer.tokens) == 8 and set(answer.versions.tolist()) == {2}
