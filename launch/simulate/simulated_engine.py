"""A simulated engine with continuous batching: all running sequences advance together by one token per decode step.

Between two events no sequence joins or leaves. So a step of n sequences with c context tokens takes `a + b c`, and c grows by n
per step. Time is a quadratic function of the number of steps, solved in closed form. A trajectory of any length costs a few
events.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from math import inf, sqrt

from launch.simulate.speeds import EngineSpeeds
from rollout.ledger.ledger import Finish, Position

Run = tuple[int, int]  # (version, how many tokens it sampled)
KV_RESERVE_TOKENS = 512  # kept free for each running sequence when another is to join
EPSILON_STEPS = 1e-6
CUT = Finish.CUT  # looking up an enum member costs as much as a call


class Flight:
    """A leased segment in an engine."""

    __slots__ = ("context_tokens", "finish", "made_tokens", "position", "prompt_tokens", "runs", "start_step", "tokens")

    def __init__(self, position: Position, prompt_tokens: int, tokens: int, finish: Finish) -> None:
        self.position = position
        self.prompt_tokens = prompt_tokens
        self.context_tokens = prompt_tokens + position.offset  # when the segment began
        self.tokens = tokens  # that it will have
        self.finish = finish
        self.made_tokens = 0  # that `runs` hold
        self.runs: list[Run] = []
        self.start_step = 0.0  # the engine's step at which it had none


class SimulatedEngine:
    def __init__(self, name: str, speeds: EngineSpeeds, *, concurrency: int, node: int, tail: bool = False) -> None:
        self.name = name
        self.concurrency = concurrency
        self.node = node
        self.tail = tail  # takes only completions that were cut
        self.id = f"{name}@0"  # another one after each restart
        self.alive = True
        self.version = 0  # version of its weights
        self.event = -1  # the number of the event that is due; any other is out of date
        self.now_s = 0.0
        self.resume_s = 0.0  # until then it prefills, or waits out a push
        self.step = 0.0  # decode steps since it began
        self.context_tokens = 0.0  # summed over all running sequences
        self.idle_s = self.decode_s = self.stalled_s = self.down_s = self.sequence_s = 0.0
        self.tokens = 0.0  # sampled
        self._decode_s = speeds.decode_s
        self._context_s = speeds.decode_s_per_context_token
        self._prefill_s = speeds.prefill_s_per_token
        self._kv_tokens = speeds.kv_tokens
        self._running: list[tuple[float, int, Flight]] = []  # a heap, by the step at which each ends
        self._waiting: deque[Flight] = deque()  # for KV cache
        self._joined = 0
        self._prompts: set[int] = set()  # groups whose prompt is in the prefix cache
        self._kept: set[tuple[int, int]] = set()  # trajectories that were cut here and are in the prefix cache

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    def advance(self, now_s: float) -> None:
        """Lets time pass."""
        elapsed_s = now_s - self.now_s
        if not elapsed_s:
            return
        running = len(self._running)
        if not self.alive:
            self.down_s += elapsed_s
        elif not running:
            self.idle_s += elapsed_s
        else:
            start_s = self.resume_s if self.resume_s > self.now_s else self.now_s
            decoding_s = now_s - start_s
            if decoding_s > 0:
                a = self._decode_s[running] + self._context_s * self.context_tokens
                steps = 2 * decoding_s / (a + sqrt(a * a + 2 * self._context_s * running * decoding_s))
                tokens = running * steps
                self.step += steps
                self.context_tokens += tokens
                self.tokens += tokens
                self.decode_s += decoding_s
                self.sequence_s += decoding_s * running
                elapsed_s -= decoding_s
            self.stalled_s += elapsed_s
        self.now_s = now_s

    def due_s(self) -> float:
        """When the next segment ends or the KV cache is full, if nothing happens before."""
        running = len(self._running)
        if not running or not self.alive:
            return inf
        steps, context_tokens = self._running[0][0] - self.step, self.context_tokens
        if context_tokens + running * steps > self._kv_tokens and running > 1:
            steps = (self._kv_tokens - context_tokens) / running
        if steps < 0.0:
            steps = 0.0
        start_s = self.resume_s if self.resume_s > self.now_s else self.now_s
        a = self._decode_s[running] + self._context_s * context_tokens
        return start_s + steps * (a + self._context_s * running * steps / 2)

    def join(self, flights: Iterable[Flight]) -> None:
        """Segments begin, now."""
        self._waiting.extend(flights)
        self._admit()

    def landed(self) -> list[Flight]:
        """The segments that have ended by now, their runs complete."""
        ended, running = [], self._running
        by_step = self.step + EPSILON_STEPS
        while running and running[0][0] <= by_step:
            flight = heapq.heappop(running)[2]
            if flight.made_tokens:
                self._note(flight, flight.tokens)
            else:
                flight.runs.append((self.version, flight.tokens))
            self.context_tokens -= flight.context_tokens + flight.tokens
            if flight.finish is CUT:
                self._kept.add(flight.position[:2])
            ended.append(flight)
        if not ended and len(running) > 1 and self.context_tokens >= self._kv_tokens - 1:
            self._retract_youngest()
        if self._waiting:
            self._admit()
        return ended

    def push(self, version: int, resume_s: float) -> None:
        """All that runs is retracted, the weights change, and from `resume_s` on all is prefilled again."""
        tokens, prompts = 0, self._prompts
        prompts.clear()
        self._kept.clear()
        self.context_tokens = 0.0
        for _, _, flight in self._running:
            self._note(flight, int(self.step - flight.start_step + EPSILON_STEPS))
            context = flight.context_tokens + flight.made_tokens
            self.context_tokens += context
            tokens += context - (flight.prompt_tokens if flight.position.group in prompts else 0)
            prompts.add(flight.position.group)
        self.resume_s = resume_s + tokens * self._prefill_s
        self.version = version

    def give_up(self) -> list[Flight]:
        """All flights leave, with the tokens that they have."""
        for _, _, flight in self._running:
            self._note(flight, int(self.step - flight.start_step + EPSILON_STEPS))
        flights = [flight for _, _, flight in self._running] + list(self._waiting)
        self._running.clear()
        self._waiting.clear()
        self._prompts.clear()
        self._kept.clear()
        self.context_tokens = 0.0
        self.resume_s = self.now_s
        return flights

    def _note(self, flight: Flight, tokens: int) -> None:
        """So many tokens of a flight exist by now: the new ones are of the present version."""
        if tokens > flight.made_tokens:
            flight.runs.append((self.version, tokens - flight.made_tokens))
            flight.made_tokens = tokens

    def _admit(self) -> None:
        waiting, running, kv_tokens = self._waiting, self._running, self._kv_tokens
        while waiting:
            flight = waiting[0]
            context = flight.context_tokens + flight.made_tokens
            needed = self.context_tokens + context + KV_RESERVE_TOKENS * (len(running) + 1)
            if needed > kv_tokens and running:
                return
            waiting.popleft()
            self._prefill(flight, context)
            flight.start_step = self.step - flight.made_tokens
            self._joined += 1
            heapq.heappush(running, (flight.start_step + flight.tokens, self._joined, flight))
            self.context_tokens += context

    def _prefill(self, flight: Flight, context: int) -> None:
        group, trajectory, offset, _ = flight.position
        if offset and (group, trajectory) in self._kept:
            return
        if group in self._prompts:
            context -= flight.prompt_tokens
        else:
            self._prompts.add(group)
        start_s = self.resume_s if self.resume_s > self.now_s else self.now_s
        self.resume_s = start_s + context * self._prefill_s

    def _retract_youngest(self) -> None:
        last = max(self._running, key=lambda entry: entry[1])
        self._running.remove(last)
        heapq.heapify(self._running)
        flight = last[2]
        self._note(flight, int(self.step - flight.start_step + EPSILON_STEPS))
        self.context_tokens -= flight.context_tokens + (self.step - flight.start_step)
        self._waiting.appendleft(flight)
