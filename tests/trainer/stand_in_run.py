"""A whole run with the real queue server and real trainer ranks; worker, engine and judge are the tests' own.

The engine is `FakeEngine` behind its HTTP port, so pushes are real. What it samples is a pure function of the prompt, the number
of the trajectory (which takes the place of a seed) and the version; the judge's verdict is one of the completion. So with
`max_staleness=0` two runs give the same weights, whatever happened to their processes on the way; with more, the clock decides
which version samples a token, unless `sampled_by` does.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from conf.compose.check import check
from conf.compose.load import write_run
from conf.compose.model_description import keep_description
from conf.compose.run_folder import METRICS
from conf.schema import RunConfig
from launch.report.metrics_file import Metrics, MetricsFile
from rollout.engine_client import EngineClient
from rollout.ledger.records import I32, Answered, Finish, Position, Segment, SegmentWork, Verdict
from rollout.queue.client import AsyncQueueClient, QueueClient
from rollout.queue.keys import RunKeys
from tests.rollout.fake_engine import VOCABULARY, FakeEngine, serve
from tests.trainer import ranks

REPOSITORY = Path(__file__).resolve().parents[2]
STOP_TOKENS = list(range(0, VOCABULARY, 29))
WAIT_S = 60.0
CONCURRENCY = 16
Strike = tuple[int, float, signal.Signals]  # so many seconds after the line of a step came, rank 0 gets a signal


def make_run(folder: Path, first_port: int, **settings: Any) -> "Run":
    """A small run, with changes to its settings as `trainer__steps=3`."""
    config = RunConfig(name="run", output=str(folder))
    config.model.path, config.model.dtype = str(_model(folder / "model")), "float32"
    config.data.train, config.data.heldout = [_problems(folder / "train.jsonl", 7)], [_problems(folder / "heldout.jsonl", 3)]
    config.data.max_prompt_tokens = 8
    algo, rollout, trainer = config.algo, config.rollout, config.trainer
    algo.groups_per_step, algo.completions_per_group, algo.minibatches, algo.kl_coef = 2, 4, 2, 0.05
    algo.ess_floor = 0.0  # the engine samples what no policy would
    rollout.max_staleness, rollout.max_completion_tokens, rollout.segment_tokens, rollout.lease_s = 0, 20, 4, 5.0
    rollout.engine_start_s = 20.0
    trainer.pp, trainer.tokens_per_microbatch, trainer.lr, trainer.steps = 2, 64, 1e-2, 6
    trainer.push_s, trainer.stall_s, trainer.collective_s = 20.0, 40.0, 50.0
    trainer.checkpoint_every, trainer.checkpoints_kept = 2, 100
    for key, value in settings.items():
        section, name = key.split("__")
        assert hasattr(getattr(config, section), name), key
        setattr(getattr(config, section), name, value)
    check(config)
    run = Run(path=folder / "run", config=config, first_port=first_port)
    write_run(config, run.path)
    keep_description(config, run.path)
    RunKeys.create(run.path)
    return run


def _model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return folder


def _problems(path: Path, count: int) -> str:
    task = {"kind": "calls", "entry_point": "f", "tests": [{"args": [1], "expected": 1}]}
    lines = [{"id": f"{path.stem}-{i}", "prompt": f"t{i + 1} t{i + 2}", "raw": True, "task": task} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@dataclass(kw_only=True)
class Run:
    path: Path
    config: RunConfig
    first_port: int
    generated: list[tuple[Position, tuple[int, ...]]] = field(default_factory=list)  # every call: where, and its input tokens
    token_s: float = 0.0005
    dies_in_push: Path | None = None  # a file with the id of the process that does
    hold: Callable[[Position], Awaitable[None]] | None = None  # awaited before a segment is sampled
    sampled_by: Callable[[Position], int] | None = None  # the version that does; the push of the next one waits for it

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.first_port}"

    def metrics(self) -> list[Metrics]:
        return MetricsFile(self.path / METRICS, from_start=True).new_lines()

    def weights(self) -> dict[str, torch.Tensor]:
        """The last ones, from hf/."""
        from safetensors.torch import load_file

        return {name: value for file in (self.path / "hf").glob("*.safetensors") for name, value in load_file(file).items()}

    @contextlib.contextmanager
    def queue(self):
        """The queue server, as a process."""
        command = [sys.executable, "-m", "rollout.queue", "--run", str(self.path), "--bind", self.endpoint]
        with (self.path / "queue.log").open("a") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
            (self.path / "queue.pid").write_text(str(process.pid))
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def train(self, *, strike: Strike | None = None, deadline_s: float = 120.0) -> None:
        """The trainer's ranks with a fleet of their own, until they end well."""
        with _Fleet(self):
            size = self.config.trainer.tp * self.config.trainer.pp * self.config.trainer.dp
            codes = ranks.run(_trainer, size, str(self.path), self.endpoint, self.first_port + 2, strike, deadline_s=deadline_s)
            assert codes == [0] * size


def _trainer(run: str, endpoint: str, push_port: int, strike: Strike | None) -> int:
    from trainer.__main__ import main

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # of every thread, as the launcher's guard does
    (Path(run) / f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    if strike is not None and os.environ["RANK"] == "0":
        threading.Thread(target=_strike, args=(Path(run) / "metrics.jsonl", *strike), daemon=True).start()
    return main(["--run", run, "--queue", endpoint, "--push-port", str(push_port)])


def _strike(metrics: Path, step: int, after_s: float, signum: signal.Signals) -> None:
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        time.sleep(0.005)
    time.sleep(after_s)
    os.kill(os.getpid(), signum)


class DeadlyEngine(FakeEngine):
    """In its third push, between two buckets, it kills the process whose id stands in this file. Once: the file goes too."""

    victim = Path()
    _pushes = _buckets = 0

    async def _begin(self, http: web.Request) -> web.Response:
        self._pushes, self._buckets = self._pushes + 1, 0
        return await super()._begin(http)

    async def _receive(self, http: web.Request) -> web.Response:
        self._buckets += 1
        if (self._pushes, self._buckets) == (3, 2) and self.victim.exists():
            pid = int(self.victim.read_text())
            self.victim.unlink()
            os.kill(pid, signal.SIGKILL)
        return await super()._receive(http)


class PatientEngine(FakeEngine):
    """Lets a push begin when its worker has noted, in this file, that all is sampled that the version it holds is to sample."""

    finished = Path()

    async def _pause(self, http: web.Request) -> web.Response:
        while self.weights and not (self.finished.exists() and self.finished.read_text() == self.version):
            await asyncio.sleep(0.01)
        return await super()._pause(http)


def _engine(port: int, key: str, token_s: float, victim: Path | None, finished: Path | None) -> None:
    engine = FakeEngine(port=port, api_key=key, token_s=token_s)
    if victim is not None:
        engine = DeadlyEngine(port=port, api_key=key, token_s=token_s)
        engine.victim = victim
    elif finished is not None:
        engine = PatientEngine(port=port, api_key=key, token_s=token_s)
        engine.finished = finished
    asyncio.run(serve(engine))


class _Fleet:
    """One engine with its worker, and a judge, in threads of the test's process. Entered when the engine has joined."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._keys = RunKeys.load(run.path)
        self._finished, self._version = run.path / "finished", -1
        self._joined, self._ending = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._guard, args=(part,)) for part in (self._work, self._judge)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        self._joined.wait(WAIT_S)

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _guard(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            self._failure = error
            self._joined.set()

    def _judge(self) -> None:
        def decode(tokens: I32) -> str:
            return str(tokens.tolist())

        with QueueClient(self._run.endpoint, self._keys, "judge", timeout_s=WAIT_S, decode_tokens=decode) as client:
            while not self._ending.is_set():
                for work in client.lease_grading("judge", 64, wait_s=0.05):
                    digest = hashlib.sha256(work.turns[-1].encode()).digest()
                    client.answer("judge", [Answered(work.position, Verdict(reward=float(digest[0] % 2)))])

    def _work(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        # A process of its own: engine and trainer join groups by the same names, and a process can use a name once.
        port, key = self._run.first_port + 1, self._keys.engine_api_key
        self._finished.unlink(missing_ok=True)
        finished = self._finished if self._run.sampled_by else None
        engine = ranks.start(_engine, port, key, self._run.token_s, self._run.dies_in_push, finished)
        try:
            await self._lease(f"http://127.0.0.1:{port}", key)
        finally:
            engine.kill()
            engine.join()

    async def _lease(self, url: str, key: str) -> None:
        async with (
            AsyncQueueClient(self._run.endpoint, self._keys, "worker", timeout_s=WAIT_S) as queue,
            EngineClient(url, api_key=key) as client,
        ):
            while not await client.healthy():
                await asyncio.sleep(0.05)
            await queue.register_engine("engine-0", url, 1, time.time_ns() // 1_000_000)
            self._joined.set()
            flights: dict[asyncio.Task[None], Position] = {}
            while not self._ending.is_set():
                await queue.heartbeat("engine-0", "worker", list(flights.values()))
                free = CONCURRENCY - len(flights)
                if self._run.sampled_by:
                    self._version = await _held_version(queue)
                busy = not free or any(map(self._is_due, flights.values()))
                works = await queue.lease_segments("engine-0", free, wait_s=0.05) if free else []
                if self._version >= 0 and not busy and not works:
                    self._finished.write_text(str(self._version))
                flights |= {asyncio.create_task(self._fly(queue, client, work)): work.position for work in works}
                done, _ = await asyncio.wait(flights, timeout=0.05) if flights else (set(), set())
                for task in done:
                    del flights[task]
                    task.result()
            for task in flights:
                task.cancel()
            await asyncio.gather(*flights, return_exceptions=True)

    def _is_due(self, position: Position) -> bool:
        return self._run.sampled_by is None or self._run.sampled_by(position) <= self._version

    async def _fly(self, queue: AsyncQueueClient, client: EngineClient, work: SegmentWork) -> None:
        position = work.position
        if self._run.hold is not None:
            await self._run.hold(position)
        while not self._is_due(position):
            await asyncio.sleep(0.01)
        self._run.generated.append((position, tuple(work.input_tokens.tolist())))
        generated = await client.generate(
            [position.trajectory, *work.input_tokens.tolist()],
            {"temperature": 1.0},
            rid=f"{position.group}.{position.trajectory}.{position.offset}",
            max_new_tokens=work.max_new_tokens,
            stop_token_ids=STOP_TOKENS,
            deadline_s=WAIT_S,
        )
        full = position.offset + len(generated.tokens) >= self._run.config.rollout.max_completion_tokens
        stopped = int(generated.tokens[-1]) in STOP_TOKENS
        segment = Segment(
            tokens=np.array(generated.tokens, np.int32),
            logprobs=np.array(generated.logprobs, np.float32),
            versions=np.array(generated.versions, np.int32),
            finish=Finish.STOP if stopped else Finish.LENGTH if full else Finish.CUT,
            engine="engine-0",
        )
        await queue.report_segment("engine-0", position, segment)


async def _held_version(queue: AsyncQueueClient) -> int:
    """That of which the ledger knows that the engine holds it; -1 while it knows of none."""
    ledger = (await queue.status())["ledger"]
    return int(ledger["version"]) if ledger["engines"] else -1
