"""Are long completions trained on as often as they are sampled? The real ledger, in simulated time, against discarding by age.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bias.py [--steps 60] [--png bias.png]

A fleet of equal slots samples completions with log-normal lengths (the 99th percentile is ten medians; the longest take as
long as 3.4 batches), and a trainer takes a batch whenever one is ready. For each `max_staleness` the lengths that were trained on
are compared with a fresh sample of the same distribution, one completion per group, by the two-sample Kolmogorov-Smirnov test.

Systems that admit groups without a bound discard by age: all slots are always busy, and a ready group with a token older than
`max_staleness` versions is thrown away.
"""

import argparse
import heapq
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy.stats import ks_2samp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rollout.ledger.ledger import Lease, Ledger
from rollout.ledger.records import Finish, Prompt, Segment, Verdict
from rollout.ledger.rules import Rules

GROUPS, COMPLETIONS, SLOTS = 64, 4, 128
MEDIAN_TOKENS, CAP_TOKENS, SEGMENT_TOKENS = 150.0, 1640, 410  # a tenth of the job's, so that it is quick
STEP_S, TOKENS_S = 2.0, 180.0  # a trainer's step; of one slot. Sampling a batch takes 2.7 s, the longest completion 9.1 s
Lengths = npt.NDArray[np.int64]


def lengths_of(seed: int, groups: int) -> Lengths:
    """What the policy would sample for so many groups, [groups, COMPLETIONS]; half of the variance lies between prompts."""
    rng = np.random.default_rng(seed)
    z = (rng.standard_normal((groups, 1)) + rng.standard_normal((groups, COMPLETIONS))) / np.sqrt(2)
    return np.clip(np.rint(MEDIAN_TOKENS * np.exp(z)), 1, CAP_TOKENS).astype(np.int64)


@dataclass(kw_only=True)
class Trained:
    """The groups that a run was trained on."""

    lengths: Lengths  # [trained groups, COMPLETIONS]
    lag: int  # the largest lag of any token
    discarded_tokens: float = 0.0  # share of what was sampled
    hours: float = 0.0


@dataclass
class Clock:
    now_s: float = 0.0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), act))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now_s, _, act = heapq.heappop(self._due)
            act()


class ThroughTheLedger:
    """Engine, judge and trainer around a real ledger."""

    def __init__(self, seed: int, steps: int, staleness: int, window: int = 0) -> None:
        self.ledger = Ledger(
            Rules(
                groups_per_step=GROUPS, completions_per_group=COMPLETIONS, max_staleness=staleness, window=window,
                segment_tokens=SEGMENT_TOKENS, max_completion_tokens=CAP_TOKENS, max_drops_per_step=0,
            )
        )  # fmt: skip
        self.steps, self.clock, self.free, self.training = steps, Clock(), SLOTS, False
        self.sampled = lengths_of(seed, GROUPS * (steps + staleness + 2))
        self.pushes_s = [0.0]
        self.trained: list[int] = []
        self.lag = 0

    def run(self) -> Trained:
        self.ledger.apply(*self.ledger.published(0, ["engine"]))
        self.go_on()
        self.clock.run(lambda: len(self.pushes_s) > self.steps)
        return Trained(lengths=self.sampled[self.trained], lag=self.lag, hours=self.clock.now_s / 3600)

    def go_on(self) -> None:
        ledger = self.ledger
        while self.free:
            leases = ledger.lease_segments("engine", self.free)
            if not leases and not ledger.may_admit():
                break
            if not leases:
                ledger.apply(*ledger.admit(Prompt(id=str(ledger.admitted), tokens=np.ones(1, np.int32), task={})))
            for lease in leases:
                self.generate(lease)
        if self.training or ledger.version == self.steps:
            return
        if (changes := ledger.take(ledger.version)) is not None:
            ledger.apply(*changes)
            self.train(ledger.version)

    def generate(self, lease: Lease) -> None:
        self.free -= 1
        group, trajectory, offset = lease.position
        left = int(self.sampled[group, trajectory]) - offset
        tokens = min(left, lease.max_new_tokens)
        began_s = self.clock.now_s

        def done() -> None:
            self.free += 1
            made_s = began_s + np.arange(tokens) / TOKENS_S
            versions = np.searchsorted(self.pushes_s, made_s, side="right").astype(np.int32) - 1
            finish = Finish.STOP if tokens == left else Finish.CUT
            zeros = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
            segment = Segment(tokens=zeros[0], logprobs=zeros[1], versions=versions, finish=finish, engine="engine")
            self.ledger.apply(*self.ledger.report(lease.position, segment)[1])
            for graded in self.ledger.lease_grading("judge", 1):
                verdict = Verdict(reward=float(graded.position.trajectory % 2))
                self.ledger.apply(*self.ledger.grade(graded.position, verdict)[1])
            self.go_on()

        self.clock.after(tokens / TOKENS_S, done)

    def train(self, step: int) -> None:
        self.training = True
        batch = self.ledger.batch(step)
        self.trained += [group.index for group in batch.groups]
        self.lag = max(self.lag, *(t.lag(step) for t in batch.trajectories))

        def done() -> None:
            self.training = False
            self.pushes_s.append(self.clock.now_s)
            self.ledger.apply(*self.ledger.advance(step + 1, ["engine"]))
            self.ledger.apply(*self.ledger.durable(step + 1))
            self.go_on()

        self.clock.after(STEP_S, done)


class DiscardingByAge:
    """All slots are always busy; what is too old when it is ready is thrown away."""

    def __init__(self, seed: int, steps: int, staleness: int) -> None:
        self.steps, self.staleness, self.clock, self.training = steps, staleness, Clock(), False
        self.sampled = lengths_of(seed, GROUPS * steps * 12)
        self.work = iter((group, i) for group in range(len(self.sampled)) for i in range(COMPLETIONS))
        self.pushes_s = [0.0]
        self.born: dict[int, int] = {}  # group -> version at its first token
        self.left: dict[int, int] = {}  # group -> completions that are not ready
        self.ready: list[int] = []
        self.trained: list[int] = []
        self.made = self.thrown = self.lag = 0

    def run(self) -> Trained:
        for _ in range(SLOTS):
            self.generate()
        self.clock.run(lambda: len(self.pushes_s) > self.steps)
        return Trained(
            lengths=self.sampled[self.trained],
            lag=self.lag,
            discarded_tokens=self.thrown / self.made,
            hours=self.clock.now_s / 3600,
        )

    def generate(self) -> None:
        group, i = next(self.work)
        self.born.setdefault(group, len(self.pushes_s) - 1)

        def done() -> None:
            self.made += int(self.sampled[group, i])
            self.left[group] = self.left.get(group, COMPLETIONS) - 1
            if not self.left[group]:
                self.ready.append(group)
            self.generate()
            self.train()

        self.clock.after(self.sampled[group, i] / TOKENS_S, done)

    def train(self) -> None:
        version = len(self.pushes_s) - 1
        old = [group for group in self.ready if version - self.born[group] > self.staleness]
        self.thrown += int(self.sampled[old].sum())
        self.ready = [group for group in self.ready if version - self.born[group] <= self.staleness]
        if self.training or len(self.ready) < GROUPS:
            return
        batch, self.ready = self.ready[:GROUPS], self.ready[GROUPS:]
        self.trained += batch
        self.lag = max(self.lag, *(version - self.born[group] for group in batch))
        self.training = True

        def done() -> None:
            self.training = False
            self.pushes_s.append(self.clock.now_s)
            self.train()

        self.clock.after(STEP_S, done)


def p_value(trained: Lengths, seed: int) -> float:
    """The p-value of the hypothesis that these lengths have the sampled distribution. One completion per group is independent."""
    fresh = lengths_of(seed, 4 * len(trained))
    return float(ks_2samp(trained[:, 0], fresh[:, 0]).pvalue)


def plot(path: Path, curves: Sequence[tuple[str, str, Lengths]]) -> None:
    """Share of completions that are longer than x, both axes logarithmic."""
    width, height, left, bottom = 900, 560, 70, 50
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    low, high, least = 20.0, 1800.0, 5e-4

    def at(tokens: float, share: float) -> tuple[float, float]:
        x = left + (width - left - 20) * np.log(tokens / low) / np.log(high / low)
        return x, 20 + (height - bottom - 20) * np.log(max(share, least)) / np.log(least)

    for share in (1.0, 0.1, 0.01, 0.001):
        draw.line([at(low, share), at(high, share)], fill="#dddddd")
        draw.text((8, at(low, share)[1] - 6), f"{100 * share:g}%", fill="black")
    for tokens in (20, 50, 100, 200, 500, 1000):
        draw.line([at(tokens, 1.0), at(tokens, least)], fill="#dddddd")
        draw.text((at(tokens, least)[0] - 8, height - bottom + 8), str(tokens), fill="black")
    draw.text((width // 2 - 60, height - 20), "tokens of a completion", fill="black")
    for number, (name, colour, lengths) in enumerate(curves):
        values = np.sort(lengths.ravel())
        shares = 1 - np.arange(len(values)) / len(values)
        points = [at(max(v, low), s) for v, s in zip(values[::4], shares[::4], strict=True)]
        draw.line(points, fill=colour, width=2)
        draw.text((left + 20, height - bottom - 110 + 18 * number), name, fill=colour)
    draw.text((left + 8, 4), "share of completions that are longer", fill="black")
    image.save(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    sampled = lengths_of(arguments.seed + 1, 20_000)
    print(f"sampled: mean {sampled.mean():.0f} tokens, at the cap {100 * (sampled == CAP_TOKENS).mean():.2f}%")
    print("                        the ledger                          discarding by age")
    print("max_staleness   mean  at cap  largest lag  p       mean  at cap  largest lag  p        thrown away")
    kept: dict[int, tuple[Lengths, Lengths]] = {}
    for staleness in range(9):
        ours = ThroughTheLedger(arguments.seed, arguments.steps, staleness).run()
        theirs = DiscardingByAge(arguments.seed, arguments.steps, staleness).run()
        kept[staleness] = ours.lengths, theirs.lengths
        rows = [
            f"{t.lengths.mean():5.0f} {100 * (t.lengths == CAP_TOKENS).mean():6.2f}% {t.lag:10d}   {p_value(t.lengths, 77):<8.2g}"
            for t in (ours, theirs)
        ]
        print(f"{staleness:13d}  {'  '.join(rows)} {100 * theirs.discarded_tokens:8.1f}%", flush=True)
    if arguments.png:
        curves = [("sampled", "black", sampled), ("trained, the ledger, max_staleness=1", "#1b7837", kept[1][0])]
        for staleness, colour in ((0, "#b2182b"), (1, "#d6604d"), (2, "#f4a582")):
            curves.append((f"trained, discarding by age, max_staleness={staleness}", colour, kept[staleness][1]))
        plot(arguments.png, curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
