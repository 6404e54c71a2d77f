"""The command that says what limits a run and which setting to change first.

    python -m launch.advise outputs/NAME [plan.peak_tflops=… …]

A run does not store what only the planner reads. So `plan.*` tells of the hardware here, where it differs from the defaults.

Exit codes: 0 · 2 the folder is no run's, or the run is too short to learn from.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.schema import ConfigError
from launch.advise.advice import run_report

ASKED_WRONGLY = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="launch.advise", description="Says what limits a run and which setting to change first."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("overrides", nargs="*", metavar="plan.KEY=VALUE", help="what the planner shall assume of the hardware")
    asked = parser.parse_args(arguments)
    try:
        print(run_report(asked.run, asked.overrides))
    except ConfigError as error:
        print(f"advise: {error}", file=sys.stderr)
        return ASKED_WRONGLY
    return 0


if __name__ == "__main__":
    sys.exit(main())
