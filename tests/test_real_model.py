"""`experiment=smollm2` as README has it: real weights, a real tokenizer, HumanEval and MBPP, one step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_step_on_real_problems_trains_on_every_token_that_was_sampled(tmp_path: Path) -> None:
    overrides = ["experiment=smollm2", "trainer.steps=1", "rollout.max_completion_tokens=32", "rollout.segment_tokens=32"]
    ran = subprocess.run(
        [sys.executable, "-m", "launch", *overrides, f"output={tmp_path}", "name=run"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    ledger = json.loads((tmp_path / "run" / "summary.json").read_text())["queue"]["ledger"]
    assert ledger["trained_tokens"] > 0 and ledger["waiting_tokens"] == 0 and ledger["lost_tokens"] == {}
