"""The simulator's command.

    python -m launch.simulate experiment=kestrel_256 [overrides] [simulate.failures=false …]    one run
    python -m launch.simulate compare=true experiment=kestrel_256            systems and knobs: a table (or systems, variants)
    python -m launch.simulate from_run=outputs/NAME         predicts the second half of a real run from its first

One run writes report.json, timeline.json (for https://ui.perfetto.dev) and plot.html into `simulate.out`.

Exit codes: 0 · 1 the simulated run cannot go on, or a prediction is off by more than it may be · 2 it was asked for wrongly.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.compose.hydra_errors import in_one_line, kinds
from conf.compose.load import composed, to_run_config
from conf.schema import ConfigError, RunConfig
from launch.simulate.compare_systems import BOTH, SYSTEMS, VARIANTS, compare_and_show, to_json
from launch.simulate.measured_run import read_measured_run
from launch.simulate.options import Options, scenario_of, split_arguments
from launch.simulate.plot import write_page
from launch.simulate.prediction import predict_second_half, table
from launch.simulate.simulated_trainer import SimulationError
from launch.simulate.simulation import simulate
from launch.simulate.simulation_report import HOUR_S, report_of, text
from launch.simulate.timeline import write_timeline

FAILED, ASKED_WRONGLY = 1, 2
OWN = ("compare", "from_run")
DEFAULT_OUT = "outputs/simulate"


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__, _settings(), sep="\n")
        return 0
    own, others = split_arguments(arguments, OWN)
    try:
        options = _options(own)
        if "from_run" in own:
            comparison = predict_second_half(read_measured_run(Path(own["from_run"])), seed=options.seed)
            print(table(comparison))
            return 0 if comparison.within else FAILED
        config = _config(others)
        out = Path(options.out or DEFAULT_OUT)
        what = own.get("compare", "false").lower()
        if what not in ("false", SYSTEMS, VARIANTS, BOTH):
            raise ConfigError(f"compare={what}: choose {SYSTEMS}, {VARIANTS}, or {BOTH} for both")
        return _one_run(config, options, out) if what == "false" else _compare(config, options, what, out)
    except SimulationError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return FAILED
    except ConfigError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return ASKED_WRONGLY


def _one_run(config: RunConfig, options: Options, out: Path) -> int:
    scenario = scenario_of(config, options, name=f"{config.name}, {options.assumptions}")
    steps = options.steps or config.trainer.steps
    print(f"simulating {steps} steps (hundreds take minutes; simulate.steps=16 is a first look)", file=sys.stderr, flush=True)
    result = simulate(scenario)
    report = report_of(result)
    print(text(report, steps=config.trainer.steps))
    _write_json(out / "report.json", {**report.to_json(), "hours_for_all_steps": report.hours_for(config.trainer.steps)})
    write_timeline(result, out / "timeline.json", detail_s=options.timeline_hours * HOUR_S)
    write_page(result, report, out / "plot.html", steps=config.trainer.steps)
    made = f"{out}/report.json, timeline.json (open in https://ui.perfetto.dev), plot.html"
    print(f"{made}; simulated in {result.cpu_s:.0f} CPU s", file=sys.stderr)
    return 0


def _compare(config: RunConfig, options: Options, what: str, out: Path) -> int:
    rows = compare_and_show(config, options, what, lambda line: print(line, flush=True))
    _write_json(out / "compare.json", [to_json(row) for row in rows])
    print(f"{out}/compare.json", file=sys.stderr)
    return 0


def _config(overrides: Sequence[str]) -> RunConfig:
    made = composed(overrides)
    if not made.name:
        experiment = [o.removeprefix("experiment=") for o in overrides if o.startswith("experiment=")]
        made.name = experiment[-1] if experiment else "run"
    return to_run_config(made)


def _options(own: Mapping[str, str]) -> Options:
    known = {field.name for field in fields(Options)}
    values = {key.removeprefix("simulate."): value for key, value in own.items() if key not in OWN}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"simulate.{unknown[0]}: no such setting; there are {', '.join(sorted(known))}")
    schema = OmegaConf.create({"simulate": OmegaConf.structured(Options)})
    with in_one_line(kinds(Options, "simulate.")):
        options = OmegaConf.to_object(OmegaConf.merge(schema, {"simulate": values}).simulate)
    assert isinstance(options, Options)
    return options


def _settings() -> str:
    return "simulate.* and their defaults: " + ", ".join(f"{field.name}={field.default!r}" for field in fields(Options))


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
