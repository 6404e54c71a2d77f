"""Pushes into two real SGLang servers on CPU, which start with dummy weights. The test is the trainer: rank 0 of the group."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.engine_client import UNPUSHED, BadAnswer, EngineClient, EngineFleet, EngineTimeout, FleetError, Generated
from rollout.engine_process import Engine, EngineSettings
from tests.ports import free_port
from tests.rollout.engine_controls import reset_weights, slow_down, version_of
from trainer.push import weight_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
CALL_S = 60.0
PROMPT = [3, 141, 59, 26, 5]
CONFIG = Qwen2Config(
    vocab_size=500,  # no multiple of 64: the engine pads its embedding
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    architectures=["Qwen2ForCausalLM"],
)


def model(seed: int) -> Qwen2ForCausalLM:
    """A random model with large enough weights for its choices to be clear."""
    torch.manual_seed(seed)
    made = Qwen2ForCausalLM(CONFIG).float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return made


def named(made: Qwen2ForCausalLM) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in made.named_parameters()]


@torch.no_grad()
def greedy(made: Qwen2ForCausalLM, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The next `count` most likely tokens and their log-probs, by full recomputation."""
    tokens, logprobs = list(tokens), []
    for _ in range(count):
        scores = torch.log_softmax(made(torch.tensor([tokens])).logits[0, -1], dim=-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return tokens[-count:], logprobs


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    return folder


def make_engine(model_folder: Path, name: str) -> Engine:
    settings = EngineSettings(
        model=model_folder,
        port=free_port(),
        log_file=model_folder / f"{name}.log",
        device="cpu",
        dtype="float32",
        max_total_tokens=4096,
        max_running_requests=8,
        api_key="key-of-users",
        admin_api_key="key-of-admins",
    )
    return Engine(settings)


@pytest.fixture(scope="module")
def engines(model_folder: Path) -> Iterator[list[Engine]]:
    pair = [make_engine(model_folder, name) for name in ("first", "second")]

    async def ready() -> None:
        await asyncio.gather(*(engine.wait_ready(START_S) for engine in pair))

    try:
        for engine in pair:
            engine.start()
        asyncio.run(ready())
        yield pair
    finally:
        for engine in pair:
            engine.stop()


@pytest.fixture
def fleet(engines: list[Engine]) -> Iterator[EngineFleet]:
    with EngineFleet([engine.client() for engine in engines]) as made:
        yield made


@contextmanager
def joined(fleet: EngineFleet, name: str) -> Iterator[torch.distributed.ProcessGroup]:
    """A weight group of this process (rank 0) and every engine of the fleet."""
    port, world_size = free_port(), 1 + len(fleet.clients)
    offsets = {url: 1 + index for index, url in enumerate(fleet.clients)}
    calls = fleet.submit(
        lambda client: client.init_push_group(
            "127.0.0.1",
            port,
            rank_offset=offsets[client.url],
            world_size=world_size,
            group_name=name,
            backend="gloo",
            deadline_s=CALL_S,
        )
    )
    group = weight_group.join("127.0.0.1", port, rank=0, world_size=world_size, group_name=name, timeout_s=CALL_S)
    fleet.wait(calls)
    try:
        yield group
    finally:
        fleet.call(lambda client: client.destroy_push_group(name))
        weight_group.destroy(group)


def send(
    fleet: EngineFleet, group: torch.distributed.ProcessGroup, name: str, tensors: Sequence[tuple[str, torch.Tensor]]
) -> None:
    calls = fleet.submit(
        lambda client: client.receive_bucket(
            [tensor_name for tensor_name, _ in tensors],
            [weight_group.dtype_name(tensor.dtype) for _, tensor in tensors],
            [tensor.shape for _, tensor in tensors],
            group_name=name,
            deadline_s=CALL_S,
        )
    )
    weight_group.broadcast(weight_group.pack([tensor for _, tensor in tensors]), group)
    fleet.wait(calls)


@contextmanager
def update(fleet: EngineFleet, version: int) -> Iterator[None]:
    fleet.call(lambda client: client.pause())
    fleet.call(lambda client: client.flush_cache())
    fleet.call(lambda client: client.begin_weight_update())
    yield
    fleet.call(lambda client: client.end_weight_update(version))
    fleet.call(lambda client: client.continue_())


def push(fleet: EngineFleet, tensors: Sequence[tuple[str, torch.Tensor]], version: int, name: str = "weights") -> None:
    """A whole push, in buckets of three tensors: they cut the fused q, k, v apart."""
    with joined(fleet, name) as group, update(fleet, version):
        for start in range(0, len(tensors), 3):
            send(fleet, group, name, tensors[start : start + 3])


def complete(engine: Engine, count: int) -> Generated:
    async def ask() -> Generated:
        async with engine.client() as client:
            return await client.generate(
                PROMPT, {"temperature": 0.0}, rid="one", max_new_tokens=count, stop_token_ids=[], deadline_s=CALL_S
            )

    return asyncio.run(ask())


def checksums(fleet: EngineFleet) -> list[list[dict[str, str]]]:
    return list(fleet.call(lambda client: client.checksum()).values())


def test_engines_start_without_weights_and_say_so(engines: list[Engine], fleet: EngineFleet) -> None:
    assert set(fleet.call(version_of).values()) == {UNPUSHED}
    with pytest.raises(BadAnswer, match=f"version '{UNPUSHED}'"):  # it has sampled from no weights of this run
        complete(engines[0], 4)


def test_after_a_push_both_engines_hold_the_trainers_weights_bit_for_bit(engines: list[Engine], fleet: EngineFleet) -> None:
    made = model(seed=1)
    push(fleet, named(made), version=1)
    expected = weight_group.expected_checksums(named(made))
    assert checksums(fleet) == [expected, expected]
    tokens, logprobs = greedy(made, PROMPT, 24)
    for engine in engines:
        answer = complete(engine, 24)
        assert answer.tokens.tolist() == tokens
        assert np.abs(answer.logprobs - logprobs).max() < 1e-4
        assert set(answer.versions.tolist()) == {1}


def test_each_token_of_a_completion_that_spans_a_push_carries_the_version_that_sampled_it(
    fleet: EngineFleet,
) -> None:
    before, after = model(seed=2), model(seed=3)
    push(fleet, named(before), version=2)
    count = 40
    fleet.call(lambda client: slow_down(client, 0.05))
    calls = fleet.submit(
        lambda client: client.generate(
            PROMPT, {"temperature": 0.0}, rid="spans", max_new_tokens=count, stop_token_ids=[], deadline_s=CALL_S
        )
    )
    time.sleep(0.6)
    push(fleet, named(after), version=3)
    fleet.call(lambda client: slow_down(client, None))
    for answer in fleet.wait(calls).values():
        cut = int((answer.versions == 2).sum())
        assert 0 < cut < count
        assert answer.versions.tolist() == [2] * cut + [3] * (count - cut)
        old_tokens, old_logprobs = greedy(before, PROMPT, cut)
        new_tokens, new_logprobs = greedy(after, PROMPT + old_tokens, count - cut)
        assert answer.tokens.tolist() == old_tokens + new_tokens
        assert np.abs(answer.logprobs - (old_logprobs + new_logprobs)).max() < 1e-4


def test_abort_returns_what_was_sampled_and_a_stop_token_is_part_of_the_completion(
    engines: list[Engine], fleet: EngineFleet
) -> None:
    made = model(seed=3)
    push(fleet, named(made), version=3)
    tokens, _ = greedy(made, PROMPT, 60)
    stop = tokens[7]

    async def generate(client: EngineClient, rid: str, stop_token_ids: list[int]) -> Generated:
        return await client.generate(
            PROMPT,
            {"temperature": 0.0},
            rid=rid,
            max_new_tokens=400,
            stop_token_ids=stop_token_ids,
            deadline_s=CALL_S,
        )

    async def ask() -> tuple[Generated, Generated]:
        async with engines[0].client() as client:
            stopped = await generate(client, "stopped", [stop])
            await slow_down(client, 0.05)
            aborted = asyncio.create_task(generate(client, "aborted", []))
            await asyncio.sleep(0.6)
            await client.abort("aborted")
            await slow_down(client, None)
            return stopped, await aborted

    stopped, aborted = asyncio.run(ask())
    assert stopped.finish == "stop"
    assert stopped.tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert aborted.finish == "abort"
    assert 0 < len(aborted.tokens) < 60
    assert aborted.tokens.tolist() == tokens[: len(aborted.tokens)]


def test_two_stages_push_through_a_group_each(fleet: EngineFleet) -> None:
    made = model(seed=4)
    tensors = named(made)
    stages = [tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]]
    with joined(fleet, "stage-0") as first, joined(fleet, "stage-1") as second, update(fleet, 4):
        send(fleet, first, "stage-0", stages[0])
        send(fleet, second, "stage-1", stages[1])
    parts = [weight_group.expected_checksums(stage) for stage in stages]
    expected = [parts[0][0] | parts[1][0]]
    assert checksums(fleet) == [expected, expected]
    assert set(fleet.call(version_of).values()) == {4}


def test_one_bucket_may_mix_types(fleet: EngineFleet) -> None:
    made = model(seed=5)
    tensors = [(name, tensor if tensor.dim() > 1 else tensor.bfloat16()) for name, tensor in named(made)]
    tensors.sort(key=lambda item: -item[1].dtype.itemsize)
    with joined(fleet, "mixed") as group, update(fleet, 5):
        send(fleet, group, "mixed", tensors)
    expected = weight_group.expected_checksums((name, tensor.float()) for name, tensor in tensors)
    assert checksums(fleet) == [expected, expected]


def test_a_tensor_left_out_of_a_push_shows_in_the_checksums(fleet: EngineFleet) -> None:
    made = model(seed=6)
    expected = weight_group.expected_checksums(named(made))[0]
    fleet.call(reset_weights)
    push(fleet, [(name.replace("layers.1.mlp.down", "layers.1.mlp.dwon"), tensor) for name, tensor in named(made)], 6)
    for (found,) in checksums(fleet):
        assert {name for name in expected if found[name] != expected[name]} == {"model.layers.1.mlp.down_proj.weight"}


def test_a_wrong_shape_fails_and_the_engine_keeps_its_old_version(fleet: EngineFleet) -> None:
    push(fleet, named(model(seed=7)), version=7)
    with joined(fleet, "bad") as group:
        with pytest.raises(FleetError, match=r"receive|update"), update(fleet, 8):
            send(fleet, group, "bad", [("model.norm.weight", torch.ones(65))])
        fleet.call(lambda client: client.end_weight_update(7))
        fleet.call(lambda client: client.continue_())
    assert set(fleet.call(version_of).values()) == {7}


TRAINER = """
import sys, time
from trainer.push import weight_group
weight_group.join("127.0.0.1", int(sys.argv[1]), rank=0, world_size=2, group_name="doomed", timeout_s=60)
print("joined", flush=True)
time.sleep(1000)
"""


def test_an_engine_that_waits_for_a_bucket_is_free_again_when_the_trainer_dies(engines: list[Engine], fleet: EngineFleet) -> None:
    """Over gloo, where a broken connection is seen at once; what the engine held stays, and so does its version."""
    push(fleet, named(model(seed=9)), version=9)
    held, port = checksums(fleet), free_port()
    with EngineFleet([engines[0].client()]) as one:
        command = [sys.executable, "-c", TRAINER, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}) as trainer:
            one.call(
                lambda client: client.init_push_group(
                    "127.0.0.1", port, rank_offset=1, world_size=2, group_name="doomed", backend="gloo", deadline_s=CALL_S
                )
            )
            one.call(lambda client: client.pause())
            one.call(lambda client: client.begin_weight_update())
            calls = one.submit(
                lambda client: client.receive_bucket(
                    ["model.norm.weight"], ["float32"], [[64]], group_name="doomed", deadline_s=CALL_S
                )
            )
            time.sleep(0.5)
            assert not any(call.done() for call in calls.values())
            trainer.kill()
            with pytest.raises(FleetError, match="Connection closed by peer"):
                one.wait(calls)
        one.call(lambda client: client.destroy_push_group("doomed"))
        one.call(lambda client: client.end_weight_update(9))
        one.call(lambda client: client.continue_())
    assert checksums(fleet) == held


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_an_engine_whose_trainer_never_comes_is_stuck_until_it_is_stopped(engines: list[Engine]) -> None:
    engine = engines[0]

    async def ask() -> None:
        async with engine.client() as client:
            with pytest.raises(EngineTimeout):
                await client.init_push_group(
                    "127.0.0.1", free_port(), rank_offset=1, world_size=2, group_name="never", backend="gloo", deadline_s=2
                )
            assert not await client.healthy(deadline_s=2)

    asyncio.run(ask())
    assert engine.pid
    processes = children(engine.pid)
    engine.stop()
    _, left = psutil.wait_procs(processes, timeout=5)
    assert not left


def test_all_of_sglangs_processes_die_with_a_server_that_is_killed(engines: list[Engine]) -> None:
    engine = engines[1]
    assert engine.pid
    server, *others = children(engine.pid)
    assert any("scheduler" in " ".join(process.cmdline()) for process in others)
    server.kill()
    _, left = psutil.wait_procs([server, *others], timeout=10)
    assert not left
