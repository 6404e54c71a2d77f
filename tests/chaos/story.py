"""One run of the debug job under faults, drawn by a seed; and what must be true of it in the end.

.venv/bin/python -m tests.chaos.story --seed 7 [--faults 12] [--steps 10]        tells one again
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout.ledger.journal import Journal
from rollout.ledger.ledger import Ledger
from rollout.ledger.records import Prompt
from rollout.ledger.rules import Rules
from rollout.prompts.stream import PromptStream
from tests.chaos.cluster import PROBLEMS, WORKERS, ChaosError, Cluster
from tests.chaos.proxy import Weather
from tests.chaos.score_service import Mood

VICTIMS = ("queue", "trainer", "judge", *(f"{kind}-{n}" for kind in ("worker", "engine") for n in range(WORKERS)))
LINKS = ("workers", "judge", "trainer")
LONGER_THAN_A_LEASE = (1.7, 2.6)  # seconds; a lease lasts 1.5
TURN_S = 0.03
LEAVING_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    what: str
    whom: str
    seconds: float  # that it lasts
    pause_s: float  # until the next one

    def __str__(self) -> str:
        return f"{self.what} {self.whom} for {self.seconds:.1f} s" if self.seconds else f"{self.what} {self.whom}"


def draw(chance: random.Random) -> Fault:
    weathers, moods = [w for w in Weather if w is not Weather.FAIR], [m for m in Mood if m is not Mood.FAIR]
    weights = [10, 6, 2, 1, *([2] * len(weathers)), *([1] * len(moods))]
    what = chance.choices(["kill", "freeze", "full", "clock", *weathers, *moods], weights)[0]
    lasts_s = 0.0 if what in ("kill", "clock") else chance.uniform(*LONGER_THAN_A_LEASE)
    elsewhere = {"full": "disk", "clock": "everywhere", **dict.fromkeys(moods, "service")}
    whom = elsewhere.get(what) or chance.choice(VICTIMS if what in ("kill", "freeze") else LINKS)
    return Fault(what=what, whom=whom, seconds=lasts_s, pause_s=chance.uniform(0.1, 1.5))


def inflict(cluster: Cluster, fault: Fault) -> None:
    match fault.what:
        case "kill":
            cluster.kill(fault.whom)
        case "freeze":
            cluster.freeze(fault.whom, fault.seconds)
        case "full":
            cluster.fill_disk(fault.seconds)
        case "clock":
            cluster.jump()
        case mood if mood in list(Mood):
            cluster.change_mood(Mood(mood), fault.seconds)
        case weather:
            cluster.change_weather(fault.whom, Weather(weather), fault.seconds)


def tell(folder: Path, *, seed: int, faults: int, steps: int, deadline_s: float) -> Counter[str]:
    """Runs it to its end; how many faults of each kind it met. Raises ChaosError, with the seed and what was said."""
    chance = random.Random(seed)
    cluster = Cluster(folder, chance, steps=steps)
    met: list[Fault] = []
    ends_s = time.monotonic() + deadline_s

    def wait(until: Callable[[], bool], what: str, by_s: float) -> None:
        while not until():
            if time.monotonic() > by_s:
                raise ChaosError(f"{what} did not come in time: it hangs\n{json.dumps(cluster.watch.last, indent=1)[:3000]}")
            cluster.tend()
            time.sleep(TURN_S)

    try:
        wait(lambda: cluster.watch.looks > 0, "the queue server", ends_s)
        for _ in range(faults):
            fault = draw(chance)
            pause_ends_s = time.monotonic() + fault.pause_s
            wait(lambda until=pause_ends_s: time.monotonic() > until or cluster.done("trainer"), "the next fault", ends_s)
            if cluster.done("trainer"):
                break
            inflict(cluster, fault)
            met.append(fault)
        wait(lambda: cluster.done("trainer") and cluster.quiet(), "the last step", ends_s)
        leave_s = time.monotonic() + LEAVING_S
        wait(lambda: all(cluster.done(n) for n in cluster.members if n != "queue"), "the end of workers and judge", leave_s)
        queue = cluster.members["queue"].process
        if queue is None:
            raise ChaosError("the queue server died when the run was over")
        queue.terminate()
        wait(lambda: cluster.done("queue"), "the end of the queue server", time.monotonic() + LEAVING_S)
        audit(cluster)
    except ChaosError as error:
        told = "\n".join(map(str, met))
        raise ChaosError(f"seed {seed}, after {len(met)} faults: {error}\n{told}\n{cluster.said()}") from error
    finally:
        cluster.close()
    return Counter(f"{fault.what} {fault.whom}" for fault in met)


def audit(cluster: Cluster) -> None:
    """Nothing lost, nothing twice, the account exact, the end the same whatever was done again."""
    config = cluster.config
    lines = [json.loads(line) for line in (cluster.run / "trained.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines}
    need(sorted(steps) == list(range(config.trainer.steps)), f"steps {sorted(steps)}")
    for line in lines:
        need(line == steps[line["step"]], f"step {line['step']} was another one when it was done again")
    groups = [group for line in steps.values() for group in line["groups"]]
    indices = sorted(group["index"] for group in groups)
    need(indices == list(range(config.trainer.steps * config.algo.groups_per_step)), f"groups {indices}")
    prompts = [Prompt(id=f"p{8 + i}", tokens=np.ones(1, np.int32), task={}) for i in range(PROBLEMS)]
    stream = PromptStream([prompts], config.data.seed)
    need(all(group["prompt"] == stream.at(group["index"]).id for group in groups), "the stream skipped or repeated a prompt")
    summary = json.loads((cluster.run / "summary.json").read_text())
    need(summary["weights"] == lines[-1]["weights"], "other weights at the end than after the last step")
    told = summary["queue"]["ledger"]
    rules = Rules.of(config)
    with Journal(cluster.run / "ledger.db", rules) as journal:
        replayed = Ledger.replay(rules, journal.read()).summary()
    for counts in (told, replayed):
        need(counts["trained_tokens"] == sum(group["tokens"] for group in groups), f"trained tokens: {counts}")
        need(counts["waiting_tokens"] == 0 and not counts["dropped_groups"], f"the account: {counts}")
        need(counts["admitted_groups"] == len(groups), f"admitted: {counts}")


def need(condition: bool, what: str) -> None:
    if not condition:
        raise ChaosError(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        met = tell(Path(folder) / "story", seed=arguments.seed, faults=arguments.faults, steps=arguments.steps, deadline_s=150.0)
    print(f"seed {arguments.seed}: {met.total()} faults in {time.monotonic() - began_s:.0f} s: {dict(sorted(met.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
