"""Checks whether a run could start and reach its end, before it starts.

    python -m launch.doctor experiment=debug [overrides]            all checks
    python -m launch.doctor --fast experiment=debug                 the checks that every launch makes by itself
    python -m launch.doctor resume=outputs/NAME [overrides]         for a run that is to be resumed

Inside of a Slurm allocation every node of the run is asked, otherwise this machine alone.
Exit codes: 0 no check failed · 1 a check failed, or the nodes could not be asked · 2 the command is wrong.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conf.compose.load import composed, read_resumed, to_run_config
from conf.compose.presets import check_presets
from conf.schema import ConfigError, RunConfig
from launch.doctor.case import DoctorError, gather
from launch.doctor.examine import examine
from launch.doctor.finding import Finding, Level
from launch.placement.node_facts import port_is_free
from launch.placement.placement import place
from launch.placement.ports import choose_base_port
from launch.processes.run_dir import check_run_dir
from launch.slurm.allocation import nodes_at_hand, with_device
from launch.slurm.job import SlurmError

FAST = "--fast"
RESUME = "resume="
FAILED, ASKED_WRONGLY = 1, 2
WIDTH = 160
COLOURS = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.FAILURE: "bold red"}


def diagnose(config: RunConfig, *, fast: bool, console: Console) -> bool:
    """Shows every finding. Returns whether no check failed. Raises ConfigError, DoctorError, SlurmError."""
    config = with_device(config)
    run_dir = Path(config.output) / config.name
    check_run_dir(run_dir, resumed=True)  # a new run will have its own name
    base_port = choose_base_port(run_dir, config, port_is_free)
    case = gather(config, run_dir, place(config, run_dir, nodes_at_hand(config), base_port))
    with console.status("checking"):
        findings = list(examine(case, fast=fast))
    console.print(table(findings))
    worst = max((finding.level for _, finding in findings), default=Level.OK)
    counts = {level: sum(f.level is level for _, f in findings) for level in Level}
    console.print(", ".join(f"{n} {level}{'s' * (level >= Level.WARNING and n > 1)}" for level, n in counts.items() if n))
    return worst < Level.FAILURE


def table(findings: Sequence[tuple[str, Finding]]) -> Table:
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("check", "", "found", "what to do"):
        rows.add_column(title, overflow="fold")
    for name, finding in findings:
        # As Text: Rich reads [words] in a plain string as markup, and leaves them out.
        rows.add_row(name, Text(str(finding.level), COLOURS[finding.level]), Text(finding.message), Text(finding.remedy))
    return rows


def configuration(words: Sequence[str]) -> RunConfig:
    """The configuration of the run that a launch with these words would start or resume. Raises ConfigError."""
    if resumed := [word for word in words if word.startswith(RESUME)]:
        return read_resumed(Path(resumed[0].removeprefix(RESUME)), [word for word in words if word not in resumed])
    made = composed(["name=doctor", *words])
    check_presets(words, made)
    return to_run_config(made)


def main(arguments: Sequence[str]) -> int:
    words = [word for word in arguments if word != FAST]
    if not words or set(words) & {"-h", "--help"}:
        print(__doc__)
        return 0 if words else ASKED_WRONGLY
    # In a file, such as the output of a batch job, the table has a fixed width.
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH)
    try:
        return 0 if diagnose(configuration(words), fast=FAST in arguments, console=console) else FAILED
    except (DoctorError, SlurmError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return FAILED
    except ConfigError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return ASKED_WRONGLY


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
