"""The trainer's weights reach the engines, whole and under their version."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from conf.shapes import Layout, read_shape
from rollout.engine_answer import Generated
from rollout.engine_process import Engine, EngineSettings
from rollout.ledger.records import EngineInfo
from tests.ports import free_port
from tests.trainer import ranks
from tests.trainer.megatron.test_policy import batch, config, model_folder
from trainer.push.push import PushReport, plan_buckets

KEY = "secret"


@pytest.mark.parametrize("bucket_bytes", [1, 5_000, 10**9])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_tensor_of_the_model_is_in_exactly_one_bucket(tmp_path: Path, pp: int, bucket_bytes: int) -> None:
    from safetensors import safe_open

    folder = model_folder(tmp_path)
    plan = plan_buckets(read_shape(folder), Layout(pp=pp), torch.float32, bucket_bytes)
    sent = [(t.name, t.shape) for stage in plan for bucket in stage for t in bucket]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        held = [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
    assert sorted(sent) == sorted(held)


class FixedFleet:
    """Stands for the queue: the engines that are there."""

    def __init__(self, engines: list[EngineInfo]) -> None:
        self._engines = engines

    def fleet(self) -> list[EngineInfo]:
        return self._engines


def train_and_push(folder: str, engines: list[EngineInfo], key: str, port: int, out: str) -> list[list[str]]:
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron import hf_weights
    from trainer.megatron.policy import load_policy
    from trainer.push.push import Pusher
    from trainer.ranks import Control
    from trainer.step import Stopwatch, train_step

    settings = config()
    settings.model.path, settings.model.dtype = folder, "float32"
    mesh = process_groups.initialize(Layout(tp=2, pp=2), seed=0, timeout_s=120)
    policy = load_policy(settings, mesh)
    control = Control(timeout_s=120)
    pusher = Pusher(
        policy, control, FixedFleet(engines), address="127.0.0.1", first_port=port, bucket_bytes=20_000, deadline_s=60,
        engine_api_key=key,
    )  # fmt: skip
    held = []
    for step in range(2):
        report = pusher.push(step)
        assert not report.failed, report.failed
        held.append(list(report.engines))
        train_step(policy, load_algorithm(settings.algo), batch(step), settings, Stopwatch())
    pusher.push(2)
    hf_weights.save(policy.chunks, policy.shape, mesh, out, description=folder)
    process_groups.shutdown()
    return held


class RefusingEngine(BaseHTTPRequestHandler):
    """Stands still when asked, and then will not join any group."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.path in ("/pause_generation", "/flush_cache") else 400)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def push_in_vain_and_train(folder: str, engine: EngineInfo, port: int) -> tuple[PushReport, float]:
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron.policy import load_policy
    from trainer.push.push import Pusher
    from trainer.ranks import Control
    from trainer.step import Stopwatch, train_step

    settings = config()
    settings.model.path, settings.model.dtype, settings.algo.kl_coef = folder, "float32", 0.0
    policy = load_policy(settings, process_groups.initialize(Layout(tp=2), seed=0, timeout_s=40))
    pusher = Pusher(
        policy, Control(timeout_s=40), FixedFleet([engine]), address="127.0.0.1", first_port=port, bucket_bytes=5_000,
        deadline_s=4, engine_api_key="",
    )  # fmt: skip
    report = pusher.push(0)
    figures = train_step(policy, load_algorithm(settings.algo), batch(0), settings, Stopwatch())
    process_groups.shutdown()
    return report, figures["grad_norm"]


def test_an_engine_that_will_not_join_is_named_and_stops_nothing(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingEngine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = EngineInfo(name="engine-0", url=f"http://127.0.0.1:{server.server_port}", tp=1, epoch=1)
        results = ranks.run(push_in_vain_and_train, 2, model_folder(tmp_path), engine, free_port(), deadline_s=90)
        server.shutdown()
    for report, grad_norm in results:
        assert list(report.engines) == [] and set(report.failed) == {"engine-0@1"}
        assert grad_norm > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_answer_greedily_what_transformers_does_with_the_exported_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    with real_engines(folder, tmp_path) as engines:
        fleet = as_registered(engines)
        held = ranks.run(train_and_push, 4, folder, fleet, KEY, free_port(), str(tmp_path / "hf"), deadline_s=300)
        assert held == [[["engine-0@1", "engine-1@1"]] * 2] * 4
        prompt = [5, 9, 33]
        expected = greedy(tmp_path / "hf", prompt, 24)
        for engine in engines:
            answer = asyncio.run(complete(engine, prompt, 24))
            assert answer.tokens.tolist() == expected
            assert set(answer.versions.tolist()) == {2}


@contextmanager
def real_engines(folder: str, logs: Path) -> Iterator[list[Engine]]:
    """Two of SGLang's, which hold no weights yet."""
    engines = [
        Engine(
            EngineSettings(
                model=Path(folder), port=free_port(), log_file=logs / f"engine-{n}.log", device="cpu", dtype="float32",
                api_key=KEY, max_total_tokens=2048, max_running_requests=4,
            )
        )
        for n in range(2)
    ]  # fmt: skip
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            asyncio.run(engine.wait_ready(240))
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def as_registered(engines: list[Engine]) -> list[EngineInfo]:
    return [EngineInfo(name=f"engine-{n}", url=e.url, tp=1, epoch=1) for n, e in enumerate(engines)]


async def complete(engine: Engine, prompt: list[int], count: int) -> Generated:
    async with engine.client() as client:
        return await client.generate(
            prompt, {"temperature": 0.0}, rid="1", max_new_tokens=count, stop_token_ids=[], deadline_s=60
        )  # fmt: skip


def greedy(folder: Path, tokens: list[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]
