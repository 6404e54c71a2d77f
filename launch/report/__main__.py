"""Makes the report of a run, also of one that failed.

python -m launch.report outputs/NAME
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.compose.run_folder import METRICS, REPORT, TRACE
from launch.report.run_report import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.report", description="Makes report.html and trace.json of a run.")
    parser.add_argument("run", type=Path, help="the run's folder")
    run_dir = parser.parse_args(arguments).run
    if not (run_dir / METRICS).is_file():
        why = "it is no run's folder, or of a run that ended before its first step"
        print(f"launch.report: {run_dir} holds no {METRICS}: {why}", file=sys.stderr)
        return 2
    if not write_report(run_dir):
        print(f"launch.report: {run_dir} has no finished step yet", file=sys.stderr)
        return 1
    print(f"{run_dir / REPORT}\n{run_dir / TRACE}   (open it in ui.perfetto.dev)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
