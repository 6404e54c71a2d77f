"""The job's messages to a queue server, from one thread: engines, judges and a trainer, as fast as it goes or at a given rate."""

import heapq
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zmq

from rollout.ledger.records import Answered, Finish, Position, Segment, Verdict
from rollout.ledger.rules import Rules
from rollout.ledger.wire import pack, unpack
from rollout.queue import messages as m
from rollout.queue.keys import RunKeys

ENGINES, JUDGE_HOSTS = 64, 16  # 1,024 sandboxes: 64 a host
ENGINE_SLOTS, JUDGE_SLOTS = 16, 64  # of each; the job's engines have 64, and here each is done at once
HELD = 64  # positions a heartbeat lists
REPORTS_A_HEARTBEAT = 2.5  # 64 engines every 2 s, 4,096 x 1.2 reports in 60 s
VERDICTS_A_HEARTBEAT = 32.0  # 16 hosts every 7.5 s
WAIT_S = 30.0
GRADING_S = 8.0  # of a sandbox, in the mean
SPEED_UP = 20.0  # of the sandboxes, where the rest goes as fast as it can: they would carry 37 times the job's rate
JOB_TRAJECTORIES_S = 4096 / 60.0
MEAN_TOKENS, SIGMA = 2500.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one run of the load saw."""

    steps: int
    wall_s: float
    messages: Counter[str]
    tokens: int
    graded: int  # trajectories
    latencies_s: dict[str, list[float]]  # by request, of those that found work waiting or had it at once


class Client:
    """One process of the run: a socket, and what to do with each answer."""

    def __init__(self, context: zmq.Context, endpoint: str, keys: RunKeys, name: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.curve_serverkey = keys.server_public.encode()
        self.socket.curve_publickey = keys.client_public.encode()
        self.socket.curve_secretkey = keys.client_secret.encode()
        self.socket.connect(endpoint)
        self.held: dict[Position, None] = {}
        self.owed = 0.0  # heartbeats
        self.asks = self.tells = False  # a request for leases, a report of verdicts is on its way
        self.outcomes: list[Position] = []  # of a judge, to be told
        self._ids = itertools.count(1)
        self.waiting: dict[int, tuple[type, float, Callable[[Any], None]]] = {}

    def ask(self, request: Any, then: Callable[[Any], None] = lambda _: None) -> None:
        request_id = next(self._ids)
        self.waiting[request_id] = (type(request), time.monotonic(), then)
        envelope = {"client": self.name, "id": request_id, "op": type(request).__name__, "fields": request}
        self.socket.send(pack(envelope))


class Generator:
    def __init__(self, endpoint: str, keys: RunKeys, rules: Rules, *, seed: int = 0) -> None:
        self.rules, self.chance = rules, random.Random(seed)
        self.context = zmq.Context(io_threads=1)
        self.engines = [Client(self.context, endpoint, keys, f"engine-{n}") for n in range(ENGINES)]
        self.judges = [Client(self.context, endpoint, keys, f"judge-{n}") for n in range(JUDGE_HOSTS)]
        self.trainer = Client(self.context, endpoint, keys, "trainer")
        self.clients = {c.socket: c for c in (*self.engines, *self.judges, self.trainer)}
        self.messages: Counter[str] = Counter()
        self.latencies_s: dict[str, list[float]] = defaultdict(list)
        self.tokens = self.graded = 0
        self.version = 0
        self.checkpoint_every = 0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.pace_s = 0.0  # between the end of a slot's segment and that of its next one; 0: at once
        self.grading_s = GRADING_S / SPEED_UP
        self._mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2

    def close(self) -> None:
        self.context.destroy(linger=0)

    def run(
        self,
        *,
        warm_steps: int,
        steps: int,
        on_warm: Callable[[], None],
        warm_s: float = 0.0,
        seconds: float = math.inf,
        trajectories_s: float = 0.0,
        checkpoint_every: int = 2,
    ) -> Load:
        """So many steps, or seconds of them, after a warm-up; with a rate, no faster than it."""
        slots = ENGINES * ENGINE_SLOTS
        if trajectories_s:
            self.pace_s = slots / (1.2 * trajectories_s)
            self.grading_s = GRADING_S * JOB_TRAJECTORIES_S / trajectories_s
        self.checkpoint_every = checkpoint_every
        for engine in self.engines:
            engine.ask(m.RegisterEngine(name=engine.name, url="http://x", tp=4, epoch=1))
        self._until(lambda: not any(c.waiting for c in self.engines), 60.0)
        self.trainer.ask(m.Published(version=0, engines=tuple(f"{e.name}@1" for e in self.engines)))
        self._until(lambda: not self.trainer.waiting, 60.0)
        for engine in self.engines:
            self._lease(engine)
        for judge in self.judges:
            self._grade(judge)
        self._take()
        self._until(lambda: self.version >= warm_steps, math.inf)
        self._until(lambda: False, warm_s)
        on_warm()
        self.messages.clear()
        self.latencies_s.clear()
        self.tokens = self.graded = 0
        began_s = time.monotonic()
        self._until(lambda: self.version >= warm_steps + steps, seconds)
        return Load(
            steps=self.version - warm_steps,
            wall_s=time.monotonic() - began_s,
            messages=self.messages,
            tokens=self.tokens,
            graded=self.graded,
            latencies_s=dict(self.latencies_s),
        )

    # Everybody's part.

    def _lease(self, engine: Client) -> None:
        """As a worker does it: one request at a time, for all slots that are free."""
        free = ENGINE_SLOTS - len(engine.held)
        if engine.asks or not free:
            return
        engine.asks = True

        def work(answer: dict[str, Any]) -> None:
            engine.asks = False
            for item in answer["work"]:
                self.latencies_s["lease"].append(self._took_s)
                position = Position(*item["position"])
                engine.held[position] = None
                self._later(self.pace_s, partial(self._report, engine, position, item["max_new_tokens"]))
            self._lease(engine)

        engine.ask(m.LeaseSegments(holder=engine.name, count=free, wait_s=WAIT_S), work)

    def _report(self, engine: Client, position: Position, room: int) -> None:
        left = self._length(position) - position.offset
        tokens = min(left, room)
        finish = Finish.CUT if left > room else Finish.STOP
        self.tokens += tokens
        versions = np.full(tokens, self.version, np.int32)
        logprobs = np.linspace(-2.0, -0.1, tokens, dtype=np.float32)
        sampled = np.arange(position.group, position.group + tokens, dtype=np.int32)
        segment = Segment(tokens=sampled, logprobs=logprobs, versions=versions, finish=finish, engine=engine.name)

        def done(_: Any) -> None:
            self.latencies_s["report"].append(self._took_s)
            engine.held.pop(position, None)
            self._lease(engine)

        engine.ask(m.ReportSegment(holder=engine.name, position=position, segment=segment), done)
        self._beat(engine, "worker", 1 / REPORTS_A_HEARTBEAT)

    def _grade(self, judge: Client) -> None:
        """As a judge does it: one request for all free slots."""
        free = JUDGE_SLOTS - len(judge.held)
        if judge.asks or not free:
            return
        judge.asks = True

        def work(answer: dict[str, Any]) -> None:
            judge.asks = False
            for item in answer["work"]:
                self.latencies_s["grading lease"].append(self._took_s)
                position = Position(*item["position"])
                judge.held[position] = None
                self._later(self.grading_s, partial(self._graded, judge, position))
            self._grade(judge)

        judge.ask(m.LeaseGrading(holder=judge.name, count=free, wait_s=WAIT_S), work)

    def _graded(self, judge: Client, position: Position) -> None:
        judge.outcomes.append(position)
        self._tell(judge)

    def _tell(self, judge: Client) -> None:
        """As a judge does it: one report at a time, of all verdicts that are there."""
        if judge.tells or not judge.outcomes:
            return
        judge.tells = True
        told, judge.outcomes = judge.outcomes, []
        parts = {"tests_passed": 0.5, "all_passed": 0.0, "truncated": 0.0, "timed_out": 0.0}
        graded = [
            Answered(p, Verdict(reward=float(p.trajectory % 2), parts=parts, reason="", cpu_s=1.0, wall_s=1.0)) for p in told
        ]

        def done(_: Any) -> None:
            self.graded += len(told)
            judge.tells = False
            for position in told:
                judge.held.pop(position, None)
            self._tell(judge)
            self._grade(judge)

        judge.ask(m.ReportAnswers(holder=judge.name, answers=graded), done)
        self._beat(judge, "judge", len(told) / VERDICTS_A_HEARTBEAT)

    def _beat(self, client: Client, role: str, share: float) -> None:
        client.owed += share
        if client.owed < 1.0:
            return
        client.owed -= 1.0
        held = tuple(itertools.islice(itertools.cycle(client.held), HELD)) if client.held else ()
        client.ask(m.Heartbeat(holder=client.name, role=role, held=held, sums={"up_s": 1.0, "idle_s": 0.0}))

    def _take(self) -> None:
        def taken(answer: dict[str, Any]) -> None:
            if answer["groups"] is None:
                self._take()
                return
            self.latencies_s["take"].append(self._took_s)
            self.version += 1
            engines = tuple(f"{e.name}@1" for e in self.engines)
            self.trainer.ask(m.Advance(version=self.version, engines=engines), lambda _: self._take())
            if self.checkpoint_every and self.version % self.checkpoint_every == 0:
                self.trainer.ask(m.Durable(version=self.version))

        self.trainer.ask(m.Take(step=self.version, wait_s=WAIT_S), taken)

    # Time.

    def _later(self, mean_s: float, act: Callable[[], None]) -> None:
        if not mean_s:
            act()
            return
        due_s = time.monotonic() + self.chance.expovariate(1 / mean_s)
        heapq.heappush(self.due, (due_s, next(self._order), act))

    def _until(self, true: Callable[[], bool], seconds: float) -> None:
        poller = zmq.Poller()
        for socket in self.clients:
            poller.register(socket, zmq.POLLIN)
        ends_s = time.monotonic() + seconds
        while not true() and (now := time.monotonic()) < ends_s:
            while self.due and self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()
            wait_s = min(0.05, max(0.0, self.due[0][0] - now)) if self.due else 0.05
            for socket, _ in poller.poll(1000 * wait_s):
                self._hear(self.clients[socket])

    def _hear(self, client: Client) -> None:
        while True:
            try:
                data = client.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            answer = unpack(m.Answer, data)
            kind, asked_s, then = client.waiting.pop(answer.id)
            if answer.error:
                raise RuntimeError(f"{client.name}: {kind.__name__}: {answer.value}")
            self._took_s = time.monotonic() - asked_s
            self.messages[kind.__name__] += 1
            then(answer.value)

    def _length(self, position: Position) -> int:
        z = random.Random(position.group * 1009 + position.trajectory).gauss(0.0, 1.0)
        return min(max(1, int(math.exp(self._mu + SIGMA * z))), self.rules.max_completion_tokens)
