"""The placement of every experiment is as it was recorded, so that no change of it goes unseen.

A change that is meant is recorded by `python -m tests.launch.placement.test_recorded_placement`; the diff shows what moved.
"""

import io
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from conf.compose.load import register, to_run_config
from conf.schema import RunConfig
from launch.placement.placement import Node, describe, place
from launch.run import dry_run
from launch.slurm.allocation import planned_nodes

PROJECT = Path(__file__).parents[3]
RECORDED = Path(__file__).parent / "placements"
EXPERIMENTS = sorted(path.stem for path in (PROJECT / "conf/experiment").glob("*.yaml"))
BASE_PORT = 20_000


def configuration(experiment: str, *overrides: str) -> RunConfig:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return to_run_config(compose("config", overrides=[f"experiment={experiment}", f"name={experiment}", *overrides]))


def placement(experiment: str) -> str:
    """The same on every machine: no path, port or name of this one is in it."""
    config = configuration(experiment)
    nodes = planned_nodes(config)
    if config.cluster.nodes == 1:
        nodes = [Node(name="this", address="127.0.0.1", gpus=config.cluster.gpus_per_node)]
    placed = place(config, Path("outputs", experiment), nodes, BASE_PORT, python="python")
    return describe(placed).replace(f"{PROJECT}/", "") + "\n"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_placement_is_as_recorded(experiment: str) -> None:
    told = "meant? then record it: python -m tests.launch.placement.test_recorded_placement"
    assert placement(experiment) == (RECORDED / f"{experiment}.txt").read_text(), told


def test_every_recorded_placement_belongs_to_an_experiment() -> None:
    assert sorted(path.stem for path in RECORDED.iterdir()) == EXPERIMENTS


def shown(config: RunConfig) -> str:
    out = io.StringIO()
    dry_run(config, out)
    return out.getvalue()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_dry_run_shows_placement_disk_and_time(experiment: str) -> None:
    text = shown(configuration(experiment))
    for said in ("queue-0", "trainer-0", "rollout-0", "judge-0", "\nmodel  ", "\ndisk  ", "\nstep  "):
        assert said in text
    assert "no estimate" not in text


def test_dry_run_says_why_there_is_no_estimate() -> None:
    assert "no estimate  model.shape.layers=0" in shown(configuration("kestrel_256", "model.shape.layers=0"))
    text = shown(configuration("kestrel_256", "trainer.tokens_per_microbatch=400000"))
    assert "no estimate  trainer.tp=" in text and "are usable" in text


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    for experiment in EXPERIMENTS:
        (RECORDED / f"{experiment}.txt").write_text(placement(experiment))


if __name__ == "__main__":
    main()
