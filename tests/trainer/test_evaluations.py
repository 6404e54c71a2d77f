"""When the trainer evaluates."""

from typing import Any

import pytest

from conf.schema import RunConfig
from rollout.ledger.records import EvalResult
from trainer.between_steps.evaluation import Evaluations


class Feed:
    version = 0

    def __init__(self) -> None:
        self.begun: list[str] = []

    def start_evaluation(self, name: str, completions: int) -> None:
        self.begun.append(name)

    def evaluation(self, name: str, *, wait: bool) -> EvalResult:
        return EvalResult(eval_id=name, version_min=0, version_max=0, tokens=9, prompts=[])


@pytest.mark.parametrize(
    ("data", "evaluations"), [({"heldout": ["h.jsonl"]}, ["version-0"]), ({"heldout_fraction": 0.1}, ["version-0"]), ({}, [])]
)
def test_run_evaluates_on_held_out_problems_wherever_they_come_from(data: dict[str, Any], evaluations: list[str]) -> None:
    config, feed = RunConfig(), Feed()
    config.data.heldout = []
    for name, value in data.items():
        setattr(config.data, name, value)
    figures = Evaluations(feed, config, owed=False).begin()  # type: ignore[arg-type]
    assert feed.begun == evaluations
    assert ("eval/pass_rate" in figures) == bool(evaluations)
