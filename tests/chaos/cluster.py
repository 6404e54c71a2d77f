"""The debug run as processes that may be killed, frozen and cut off: queue server, workers with engines, a judge, a trainer.

Real are the queue server, the workers and the judge with its sandboxes; engines and trainer are stand-ins that start in an
instant. The last worker keeps the server of a teacher. A service of the user's gives a part of each reward, and may fail in many
ways. What dies is started again, as the launcher does it.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from conf.compose.load import write_run
from conf.schema import AlgoConfig, DataConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig, TrainerConfig
from rollout.exit_codes import NOT_NOW
from rollout.prompts.decoder import decoder
from rollout.queue.__main__ import read_prompts
from rollout.queue.client import QueueClient, QueueError
from rollout.queue.keys import RunKeys
from tests.chaos.disk import Disk
from tests.chaos.proxy import Proxy, Weather
from tests.chaos.score_service import TIMEOUT_S, Mood, ScoreService
from tests.chaos.words import DEADLINE_S, USER_CODE, write_problems, write_tokenizer
from tests.rollout.stage import QWEN2, REPOSITORY, WORKER, free_ports

ENGINES = 2
WORKERS = ENGINES + 1  # the last one keeps the teacher's server
PORTS = 40
KILLED = -signal.SIGKILL
PROBLEMS = 12
FAR_S = 4e8  # the wall clock jumps by at most so much

_transformers = threading.Lock()
"""Its names are imported where they are first used, and two threads that do so at once get an ImportError."""


class ChaosError(AssertionError):
    """Something happened that must not, whatever is killed."""


@dataclass(kw_only=True)
class Member:
    """One process of the run."""

    name: str
    argv: Sequence[str]
    rank: int = 0
    forgiven: tuple[int, ...] = (KILLED,)  # exit codes after which it is started again
    process: subprocess.Popen[bytes] | None = None
    start_s: float = 0.0  # when it is to be started
    starts: int = 0


@dataclass(order=True)
class _Later:
    due_s: float
    act: Callable[[], None] = field(compare=False)


def run_config(folder: Path, *, steps: int, score_url: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        data=DataConfig(train=[str(folder / "problems.jsonl")], max_prompt_tokens=32),
        algo=AlgoConfig(
            groups_per_step=2, completions_per_group=2, minibatches=1, teacher=str(folder / "model"), teacher_on="engine",
        ),
        rollout=RolloutConfig(
            max_staleness=1, max_completion_tokens=48, segment_tokens=12, concurrency=4, lease_s=1.5, request_s=20.0,
            engines=ENGINES, engine_start_s=20.0, engine_restarts=1000, engine_args=["--pace-s=0.01"],
        ),
        trainer=TrainerConfig(steps=steps, checkpoint_every=2, checkpoints_kept=2, push_s=2.0, stall_s=60.0),
        reward=RewardConfig(
            slots=1, cpu_limit_s=2.0,
            parts={
                "bonus": {"kind": "python", "function": "chaos_rewards:bonus", "deadline_s": DEADLINE_S},
                "score": {"kind": "http", "url": score_url, "batch": 4, "timeout_s": TIMEOUT_S},
            },
        ),
    )  # fmt: skip


class Cluster:
    def __init__(self, folder: Path, chance: random.Random, *, steps: int) -> None:
        self.run, self._chance = folder / "run", chance
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(QWEN2))
        write_problems(folder / "problems.jsonl", PROBLEMS)
        port = free_ports(PORTS)
        self.service = ScoreService(port + 4)
        self.config = run_config(folder, steps=steps, score_url=self.service.url)
        (self.run / "user_code").mkdir(parents=True)
        (self.run / "user_code" / "chaos_rewards.py").write_text(USER_CODE)
        write_run(self.config, self.run)
        (self.run / "logs").mkdir(exist_ok=True)
        with _transformers:  # used up here, so that no process of the run has to load it
            write_tokenizer(folder / "model")
            read_prompts(self.config, self.run)
            decoder(self.config.model.path, self.run / "prompts")
        self.keys = RunKeys.create(self.run)
        self.disk = Disk(folder / "disk")
        (self.run / "ledger.db").symlink_to(self.disk.folder / "ledger.db")
        self.clock = folder / "clock"
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.links = {name: Proxy(port + 1 + i, port) for i, name in enumerate(("workers", "judge", "trainer"))}
        self.members = {member.name: member for member in self._members(port + 8)}
        self._later: list[_Later] = []
        self.watch = Watch(self.endpoint, self.keys)

    def _members(self, engine_port: int) -> list[Member]:
        run = ("--run", str(self.run), "--queue")
        port = ("--engine-port", str(engine_port))
        workers = [
            Member(name=f"worker-{n}", argv=("-c", WORKER, *run, self.links["workers"].endpoint, *port), rank=n)
            for n in range(WORKERS)
        ]
        return [
            # It ends by itself where its disk is full.
            Member(
                name="queue",
                argv=("-m", "rollout.queue", "--run", str(self.run), "--bind", self.endpoint),
                forgiven=(KILLED, NOT_NOW),
            ),
            *workers,
            Member(name="judge", argv=("-m", "reward", *run, self.links["judge"].endpoint)),
            Member(name="trainer", argv=("-m", "tests.chaos.stand_in_trainer", *run, self.links["trainer"].endpoint)),
        ]

    def close(self) -> None:
        self.watch.close()
        for member in self.members.values():
            if member.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(member.process.pid, signal.SIGKILL)
                member.process.wait()
        for link in self.links.values():
            link.close()
        self.service.close()
        self.disk.close()

    # Faults.

    def kill(self, name: str) -> None:
        for process in self._find(name):
            process.send_signal(signal.SIGKILL)

    def freeze(self, name: str, seconds: float) -> None:
        for process in self._find(name):
            process.send_signal(signal.SIGSTOP)
            self.after(seconds, lambda process=process: _thaw(process))

    def fill_disk(self, seconds: float) -> None:
        queue = self.members["queue"]
        if queue.process is not None:
            self.disk.fill(queue.process.pid)
        self.after(seconds, self.disk.clear)

    def change_weather(self, link: str, weather: Weather, seconds: float) -> None:
        self.links[link].change(weather)
        self.after(seconds, lambda: self.links[link].change(Weather.FAIR))

    def change_mood(self, mood: Mood, seconds: float) -> None:
        self.service.change(mood)
        self.after(seconds, lambda: self.service.change(Mood.FAIR))

    def jump(self) -> None:
        self.clock.write_text(str(self._chance.uniform(-FAR_S, FAR_S)))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append(_Later(time.monotonic() + seconds, act))

    # Care.

    def tend(self) -> None:
        """Ends what is to end by now, starts what is to be started. Raises ChaosError where a process ended that must not."""
        now = time.monotonic()
        for later in sorted(self._later):
            if later.due_s <= now:
                self._later.remove(later)
                later.act()
        for member in self.members.values():
            if member.process is None:
                if member.start_s <= now:
                    self._start(member)
            elif (code := member.process.poll()) is not None and code != 0:
                if code not in member.forgiven:
                    raise ChaosError(f"{member.name} ended with exit code {code}")
                member.process = None
                member.start_s = now + self._chance.uniform(0.0, 0.5)
        self.watch.check()

    def quiet(self) -> bool:
        """No fault lasts any more."""
        return not self._later

    def done(self, name: str) -> bool:
        process = self.members[name].process
        return process is not None and process.poll() == 0

    def said(self, lines: int = 12) -> str:
        """The end of what each process said."""
        logs = sorted((self.run / "logs").glob("*"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) for log in logs)

    def _start(self, member: Member) -> None:
        environment = os.environ | {
            "RANK": str(member.rank), "LOCAL_RANK": str(member.rank), "OMP_NUM_THREADS": "1", "CHAOS_CLOCK": str(self.clock),
            "PYTHONPATH": str(REPOSITORY / "tests" / "chaos" / "clock"),
        }  # fmt: skip
        with open(self.run / "logs" / f"{member.name}.out", "ab") as log:
            member.process = subprocess.Popen(
                [sys.executable, *member.argv], cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        member.starts += 1

    def _find(self, name: str) -> list[psutil.Process]:
        """The process of this name; `engine-0` is what worker-0 started."""
        member = self.members[name.replace("engine", "worker")]
        if member.process is None or member.process.poll() is not None:
            return []
        try:
            process = psutil.Process(member.process.pid)
            if not name.startswith("engine"):
                return [process]
            return [
                p for p in process.children(recursive=True) if "--weight-version=-1" in p.cmdline() and "-I" not in p.cmdline()
            ]
        except psutil.Error:
            return []


class Watch(threading.Thread):
    """Asks the queue server all the time how much is recorded: it may never become less."""

    def __init__(self, endpoint: str, keys: RunKeys) -> None:
        super().__init__(name="watch", daemon=True)
        self._endpoint, self._keys = endpoint, keys
        self._over = threading.Event()
        self._wrong = ""
        self.looks = 0
        self.last: dict[str, Any] = {}
        self.start()

    def check(self) -> None:
        if self._wrong:
            raise ChaosError(self._wrong)

    def close(self) -> None:
        self._over.set()
        self.join(10.0)

    def run(self) -> None:
        most = 0
        while not self._over.wait(0.2):
            with QueueClient(self._endpoint, self._keys, "watch", timeout_s=1.0) as client, contextlib.suppress(QueueError):
                self.last = client.status()
                self.looks += 1
                counts = self.last["ledger"]
                recorded = counts["trained_tokens"] + counts["waiting_tokens"] + sum(counts["dropped_tokens"].values())
                if recorded < most:
                    self._wrong = f"{most} tokens were recorded, and later {recorded}: {counts}"
                most = max(most, recorded)


def _thaw(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)
