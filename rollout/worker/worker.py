"""A rollout worker: it keeps one engine busy with leases.

               leases, cancel, condemned, closing      tokens, log-probs, versions
    queue server ─────────────────────────▶  worker  ◀───────────────────────────── engine ◀── weights, from the trainer
                 ◀─────────────────────────          ─────────────────────────────▶
                  reports, heartbeats, epoch           token ids, aborts

    task         takes             gives                       waits for                     is woken by
    ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    _keep_engine settings          an engine that serves,      the engine's end              the clock, `ended`
                                   under a new epoch           (process, health, verdict)
    _fill        free slots        a flight for each lease     an engine; a slot; the        `ready`; `landed`; the
                                                               server's long poll            server
    _fly         one lease         one acknowledged report     the engine; the teacher;      the engine, the teacher,
                                                               the server                    `stop`, `request_s`;
                                                                                             the server
    _keep_heard  leases in flight  `stop`, `ended`, `closing`  a quarter of `lease_s`        the clock
    run          `closing`, or a   partial segments, the       the flights, DRAIN_S at       a heartbeat, a signal,
                 failed task       engine's end                most                          a failure

The only resource that tasks share is a flight's slot. It is free again when the server has acknowledged the report, which the
engine's deadline bounds. So the tasks cannot deadlock. Requests wait for a queue server that cannot be reached, so nothing
finished is lost. After `trainer.stall_s` the first request gives up, and the worker ends.

A fresh engine holds random weights. It registers under a new epoch, and the server leases nothing to an epoch until the trainer
has pushed to it. So the worker need not know about pushes; a request during a push takes longer. A lease of an earlier epoch is
never run by a later one. The worker returns it with an empty segment whose finish is `CUT`.
"""

import asyncio
import json
import logging
import secrets
import time
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from conf.schema import RunConfig
from rollout.engine_answer import LARGEST_VOCABULARY, Generated
from rollout.engine_client import BadAnswer, EngineCallError, EngineClient, EngineError
from rollout.engine_process import Engine, EngineStartError
from rollout.ledger.records import Finish, Position, RecordError, Segment, SegmentWork
from rollout.queue.client import AsyncQueueClient, QueueError, Refused
from rollout.worker.meter import Meter
from rollout.worker.teacher import Teacher, TeacherRefuses

HEARTBEAT_S = 2.0  # longest time between two heartbeats, which also carry figures for the metrics
LEASE_WAIT_S = 5.0  # duration of one long poll for leases
WATCH_S = 2.0  # between two health checks of the engine
HEALTH_S = 5.0  # deadline of a health check
ABORT_AGAIN_S = 1.0  # an abort may arrive before its request and then do nothing, so it is repeated
ABORT_GRACE_S = 30.0  # for an aborted request to return; an engine that needs longer counts as dead
RESTART_PAUSE_S = 1.0
FIRST_TRIES = 2  # tries of the first start: the engine of a killed worker before this one may still be ending
DRAIN_S = 5.0  # for all flights to come back and be reported when the worker ends
LEAVE_S = 1.5
EPOCH_BITS = 53  # so that it is exact as a float too

log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerError(RuntimeError):
    """The worker cannot go on."""


class CannotStart(WorkerError):
    """The worker cannot even begin, and starting it again would not help."""


class PromptRefused(Exception):
    """The engine will not run this prompt, or the teacher will not score it: it is too long, for instance. No other would."""


def stop_token_ids(model: Path) -> list[int]:
    """The tokens that end a completion, as the model folder says. Raises CannotStart if it names none."""
    for name in ("generation_config.json", "config.json"):
        if (ids := _stated(model / name, "eos_token_id")) is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    raise CannotStart(f"{model}: neither generation_config.json nor config.json says `eos_token_id`; add what ends an answer")


def vocabulary(model: Path) -> int:
    """How many tokens the model has; a sound engine samples no other. Raises CannotStart."""
    size = _stated(model / "config.json", "vocab_size")
    return size if isinstance(size, int) else LARGEST_VOCABULARY


def _stated(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text()).get(key) if path.is_file() else None
    except (ValueError, AttributeError) as error:
        raise CannotStart(f"{path} is no JSON object: {error}") from error


def finish_of(work: SegmentWork, generated: Generated, max_completion_tokens: int) -> Finish:
    """What the engine's reason to end means for the trajectory."""
    match generated.finish:
        case "stop":
            return Finish.STOP
        case "abort":
            return Finish.CUT
        case "length":
            tokens = len(generated.tokens)
            full = work.position.offset + tokens >= max_completion_tokens
            # An engine that ends before the segment is full has no room for more, and no other would have.
            return Finish.LENGTH if full or tokens < work.max_new_tokens else Finish.CUT


@dataclass(eq=False, slots=True)
class _Serving:
    """One start of the engine, from ready to its end."""

    client: EngineClient
    epoch: int
    ended: asyncio.Future[str]  # why it is no longer of use


@dataclass(eq=False, slots=True)
class _Flight:
    """One lease on its way through the engine."""

    work: SegmentWork
    serving: _Serving  # the start of the engine it was leased to
    rid: str
    stop: asyncio.Future[None]  # done: what there is so far shall be the segment


class Worker:
    """`await run()` returns when the run is over or after `close()`; it raises WorkerError when it cannot go on."""

    def __init__(
        self, name: str, config: RunConfig, engine: Engine, queue: AsyncQueueClient, teacher: Teacher | None = None
    ) -> None:
        self.name = name
        self._teacher = teacher
        self.meter = Meter()
        self._config = config.rollout
        self._stuck_s = config.trainer.push_s + HEALTH_S  # a push may stop an engine from answering for at most this time
        self._engine = engine
        self._queue = queue
        self._stop_tokens = stop_token_ids(engine.settings.model)
        self._vocabulary = vocabulary(engine.settings.model)
        self._rids = count()
        self._flights: dict[Position, _Flight] = {}
        self._flying: set[asyncio.Task[None]] = set()
        self._serving: _Serving | None = None
        self._ready = asyncio.Event()
        self._landed = asyncio.Event()
        self._closing = asyncio.Event()
        self._has_tokens = False  # since it was started

    def close(self) -> None:
        """Ends `run()` within DRAIN_S + LEAVE_S: running requests are cut and reported."""
        self._closing.set()

    async def run(self) -> None:
        fill = asyncio.create_task(self._fill())
        others = [asyncio.create_task(task) for task in (self._keep_engine(), self._keep_heard(), self._closed())]
        try:
            await asyncio.wait([fill, *others], return_when=asyncio.FIRST_COMPLETED)
            self._closing.set()
            fill.cancel()
            await self._land_all()
            await self._leave()
        finally:
            tasks = [fill, *others, *self._flying]
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    # The engine

    async def _keep_engine(self) -> None:
        """Starts the engine and, whenever it ends, starts it again."""
        try:
            for start in range(self._config.engine_restarts + 1):
                try:
                    await self._serve()
                except EngineStartError as error:
                    if not self.meter.engine_starts and (error.hopeless or start + 1 == FIRST_TRIES):
                        raise CannotStart(str(error)) from error
                    log.error("%s", error)
                except EngineError as error:
                    log.error("%s", error)
                if self._closing.is_set():
                    return
                await asyncio.sleep(RESTART_PAUSE_S)
        finally:
            self._engine.stop()
        restarts, log_file = self._config.engine_restarts, self._engine.settings.log_file
        raise WorkerError(f"{self.name} ended once more after {restarts} restarts (rollout.engine_restarts): see {log_file}")

    async def _serve(self) -> None:
        """One start of the engine, until it ends. Raises EngineStartError."""
        began_s = time.monotonic()
        epoch = secrets.randbits(EPOCH_BITS)  # differs from that of every other start, also of an earlier worker's
        self._engine.start()
        await self._engine.wait_ready(self._config.engine_start_s)
        self.meter.engine_starts += 1
        log.info("%s is ready after %.1f s, process %s", self.name, time.monotonic() - began_s, self._engine.pid)
        async with self._engine.client() as client:
            serving = _Serving(client, epoch, asyncio.get_running_loop().create_future())
            settings = self._engine.settings
            await self._queue.register_engine(self.name, settings.url, settings.tp, epoch)
            self._serving = serving
            self._ready.set()
            why = await self._end_of(serving)
            self._give_up(serving, why)
            log.error("%s %s; the end of its log:\n%s", self.name, why, self._engine.log_tail(10))
            self._engine.stop()

    def _give_up(self, serving: _Serving, why: str) -> None:
        """Nothing more is leased for this start of the engine, and `_end_of` is woken."""
        _set(serving.ended, why)
        if self._serving is serving:
            self._serving = None
            self._ready.clear()

    async def _end_of(self, serving: _Serving) -> str:
        """Why the engine is no longer of use."""
        healthy_s = time.monotonic()
        while self._engine.alive():
            if serving.ended.done():
                return serving.ended.result()
            if await serving.client.healthy(deadline_s=HEALTH_S):
                healthy_s = time.monotonic()
            elif time.monotonic() - healthy_s > self._stuck_s:
                return f"did nothing for {self._stuck_s:.0f} s, longer than any push may take"
            await asyncio.wait([serving.ended], timeout=WATCH_S)
        return f"died: {self._engine.cause_of_death()}"

    # Leases

    async def _fill(self) -> None:
        """Turns free slots into flights."""
        while True:
            await self._ready.wait()
            serving, free = self._serving, self._config.concurrency - len(self._flights)
            if serving is None:  # it ended while this task was being woken
                continue
            if free == 0:
                self._landed.clear()
                await self._landed.wait()
                continue
            try:
                leased = await self._queue.lease_segments(self.name, free, LEASE_WAIT_S)
            except Refused as error:  # a restarted server knows this engine again after the next heartbeat
                log.warning("%s", error)
                await asyncio.sleep(WATCH_S)
                continue
            for work in leased:
                self._launch(work, serving)

    def _launch(self, work: SegmentWork, serving: _Serving) -> None:
        if work.position in self._flights:  # a restarted server, which has not yet heard that we hold it
            return
        rid = f"{self.name}.{serving.epoch}.{next(self._rids)}"
        flight = _Flight(work, serving, rid, asyncio.get_running_loop().create_future())
        self._flights[work.position] = flight
        task = asyncio.create_task(self._fly(flight))
        self._flying.add(task)
        task.add_done_callback(self._flown)

    def _flown(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._flying.discard(task)
        else:  # the server is gone, or a defect: `run` ends and raises it
            self._closing.set()

    async def _fly(self, flight: _Flight) -> None:
        """Carries out one lease, until its report is acknowledged."""
        position = flight.work.position
        try:
            segment = await self._taught(await self._generate(flight), flight)
            outcome = await self._queue.report_segment(self.name, position, segment)
            if not self._has_tokens and len(segment.tokens):
                self._has_tokens = True
                log.info("%s has its first tokens", self.name)  # the launcher looks for this line
            if outcome not in ("recorded", "returned"):
                log.info("%d tokens at %s are not recorded: %s", len(segment.tokens), position, outcome)
        except PromptRefused as refusal:
            log.warning("the prompt of group %d is refused: %s", position.group, refusal)
            await self._queue.refuse_prompt(position.group, str(refusal))
        except Refused as error:  # as tokens of a version that no trainer has made
            log.error("what was sampled at %s is lost: %s", position, error)
            self._give_up(flight.serving, f"sampled what the ledger refuses ({error})")
        finally:
            del self._flights[position]
            self._landed.set()

    # Generation

    async def _generate(self, flight: _Flight) -> Segment:
        """The segment that the engine generates for a lease; empty if that engine is gone. Raises PromptRefused."""
        if self._serving is not flight.serving or self._closing.is_set():
            return self._nothing()
        tokens: int | None = None
        began_s = self.meter.request_began()
        try:
            generated = await self._call(flight)
            tokens = len(generated.tokens)
            return self._segment(flight.work, generated)
        except (EngineError, RecordError) as error:
            if isinstance(error, EngineCallError) and error.reason == "HTTP 400":
                tokens = 0
                raise PromptRefused(str(error)) from error
            self.meter.bad_answers += isinstance(error, BadAnswer | RecordError)
            log.warning("request %s at %s failed: %s", flight.rid, flight.work.position, error)
            self._give_up(flight.serving, f"failed a request ({error})")
            return self._nothing()
        finally:
            self.meter.request_ended(began_s, tokens)

    async def _call(self, flight: _Flight) -> Generated:
        """The engine's answer: whole, or after `stop` or `request_s` what there is by then."""
        request_s = self._config.request_s
        generate = flight.serving.client.generate(
            flight.work.input_tokens,
            {"temperature": self._config.temperature},
            rid=flight.rid,
            max_new_tokens=flight.work.max_new_tokens,
            stop_token_ids=self._stop_tokens,
            deadline_s=request_s + ABORT_GRACE_S,
            vocabulary=self._vocabulary,
        )
        call = asyncio.create_task(generate)
        either: list[asyncio.Future[Any]] = [call, flight.stop]
        try:
            await asyncio.wait(either, timeout=request_s, return_when=asyncio.FIRST_COMPLETED)
            while not call.done():
                await self._abort(flight)
                await asyncio.wait([call], timeout=ABORT_AGAIN_S)
            return call.result()
        finally:
            call.cancel()

    async def _abort(self, flight: _Flight) -> None:
        try:
            await flight.serving.client.abort(flight.rid, deadline_s=ABORT_AGAIN_S)
        except EngineError as error:  # the call that is to be aborted tells what is wrong
            log.debug("abort of %s: %s", flight.rid, error)

    def _segment(self, work: SegmentWork, generated: Generated) -> Segment:
        finish = finish_of(work, generated, self._config.max_completion_tokens)
        if finish is Finish.LENGTH and work.position.offset + len(generated.tokens) == 0:
            raise PromptRefused(f"after a prompt of {len(work.input_tokens)} tokens the engine has no room for one more")
        return Segment(
            tokens=generated.tokens,
            logprobs=generated.logprobs,
            versions=generated.versions,
            finish=finish,
            engine=self.name,
        )

    async def _taught(self, segment: Segment, flight: _Flight) -> Segment:
        """The segment with the log-probs of the teacher, if the run has one. Without its answer the lease is handed back.

        Raises PromptRefused.
        """
        if self._teacher is None or not len(segment.tokens):
            return segment
        try:
            logprobs = await self._teacher.logprobs(flight.work.input_tokens, segment.tokens, flight.stop)
        except TeacherRefuses as error:
            raise PromptRefused(str(error)) from error
        return self._nothing() if logprobs is None else replace(segment, teacher=logprobs)

    def _nothing(self) -> Segment:
        """Hands a lease back."""
        ints, floats = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        return Segment(tokens=ints, logprobs=floats, versions=ints, finish=Finish.CUT, engine=self.name)

    # Being heard, and the end

    async def _closed(self) -> None:
        await self._closing.wait()

    async def _keep_heard(self) -> None:
        while True:
            serving = self._serving
            answer = await self._queue.heartbeat(self.name, "worker", list(self._flights), self.meter.sums())
            for position in answer.cancel:
                if position in self._flights:
                    _set(self._flights[position].stop, None)
            if answer.condemned and serving is not None:
                self._give_up(serving, f"could not be pushed to ({answer.condemned})")
            if answer.closing:
                self._closing.set()
            await asyncio.sleep(min(self._config.lease_s / 4, HEARTBEAT_S))

    async def _land_all(self) -> None:
        """Cuts all requests, and waits until they are reported."""
        log.info("%s ends: %d requests in flight", self.name, len(self._flights))
        for flight in self._flights.values():
            _set(flight.stop, None)
        if self._flying:
            _, late = await asyncio.wait(self._flying, timeout=DRAIN_S)
            if late:
                log.warning("%d segments were not reported within %.0f s", len(late), DRAIN_S)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._queue.unregister_engine(self.name)
        except (TimeoutError, QueueError) as error:  # its leases return when it is no longer heard
            log.warning("%s leaves without a word: %r", self.name, error)


def _set(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)
