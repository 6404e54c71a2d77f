"""The planner's command.

    python -m launch.plan experiment=kestrel_256 [overrides]          the whole report
    python -m launch.plan experiment=kestrel_256 plan.show=[splits]   some sections of it
    python -m launch.plan experiment=kestrel_256 plan.out=plan.json plan.figures=plan.html
    python -m launch.plan check=points.csv                            measured against predicted, nothing refitted

Exit codes: 0 · 2 it was asked for wrongly.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.compose.check import check, check_each
from conf.compose.fit import fit
from conf.compose.load import composed, unchecked
from conf.schema import ConfigError, RunConfig
from launch.plan.check_points import check_report
from launch.plan.figures import check_figures, write_figures
from launch.plan.plan_report import report
from launch.plan.record import study_record
from launch.plan.study import Study, make_study

ASKED_WRONGLY = 2
CHECK = "check"  # takes a file and no configuration


def run(arguments: Sequence[str]) -> str:
    """What is printed. Raises ConfigError."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == CHECK:
            if len(arguments) > 1:
                raise ConfigError(f"{key}= stands alone; leave out {next(a for a in arguments if a != argument)!r}")
            if not value:
                raise ConfigError(f"{key}= names nothing: give it a file")
            return check_report(Path(value))
    config = _configuration(arguments)
    check_each(config)
    fit(config)
    check_figures(config.plan.figures)
    study = make_study(config)
    check(config)  # last: a TP that the heads refuse also cuts the lengths into odd parts, and the heads say it better
    text = report(study, config.plan.show)
    if study.misfit:
        print(f"plan: {study.misfit}", file=sys.stderr)
    for where, write in ((config.plan.out, _write_json), (config.plan.figures, write_figures)):
        if where:
            _write(study, Path(where), write)
            text += f"\n\nwritten: {where}"
    return text


def _configuration(arguments: Sequence[str]) -> RunConfig:
    return unchecked(composed(["name=plan", *arguments]))


def _write_json(study: Study, path: Path) -> None:
    path.write_text(json.dumps(study_record(study), indent=2) + "\n")


def _write(study: Study, path: Path, write: Callable[[Study, Path], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(study, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def main() -> int:
    if not sys.argv[1:] or set(sys.argv[1:]) & {"-h", "--help"}:
        print(__doc__)
        return 0 if sys.argv[1:] else ASKED_WRONGLY
    try:
        print(run(sys.argv[1:]))
    except ConfigError as error:
        print(f"plan: {error}", file=sys.stderr)
        return ASKED_WRONGLY
    return 0


if __name__ == "__main__":
    sys.exit(main())
