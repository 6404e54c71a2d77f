"""What the simulator costs: CPU seconds on one core for 600 steps of the 256-GPU job.

    python -m benchmarks.simulate [experiment=… overrides] [--steps 600]

It also times a loop of plain Python before and after. The ratio of the two depends far less on the machine than the seconds do.
"""

import argparse
import heapq
import sys
import time

from launch.simulate.__main__ import _config as composed
from launch.simulate.options import Options, scenario_of
from launch.simulate.simulation import simulate

EXPERIMENT = "experiment=kestrel_256"


def plain_python_s() -> float:
    """CPU seconds of a loop with the simulator's commonest operations: heap, dictionary, small objects."""
    began_s = time.process_time()
    heap: list[tuple[int, int]] = []
    seen: dict[int, tuple[int, int]] = {}
    for i in range(300_000):
        heapq.heappush(heap, (i * 7919 % 1000, i))
        if len(heap) > 1000:
            seen[i % 5000] = heapq.heappop(heap)
    return time.process_time() - began_s


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "overrides", nargs="*", metavar="override", help=f"an override of the configuration; default: {EXPERIMENT}"
    )
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args(arguments)
    steps: int = options.steps
    scenario = scenario_of(composed(options.overrides or [EXPERIMENT]), Options(steps=steps))
    loops_s = plain_python_s()
    result = simulate(scenario)
    loop_s = (loops_s + plain_python_s()) / 2
    completions = steps * scenario.rules.groups_per_step * scenario.rules.completions_per_group
    print(
        f"{steps} steps, {completions:,} completions, {result.seconds / 3600:.1f} simulated hours: {result.cpu_s:.1f} CPU s, "
        f"{result.cpu_s / completions * 1e6:.0f} us per completion; {result.cpu_s / steps / loop_s:.2f} plain loops of "
        f"{loop_s:.2f} s per step"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
