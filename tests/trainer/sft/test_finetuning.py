"""Fine-tuning learns, gives the same losses in every layout, and goes on after a kill as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer import ranks
from tests.trainer.megatron.test_policy import VOCAB, model_folder

PROJECT = Path(__file__).parents[3]


def make_model(folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model_folder(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}w1 {% endif %}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", chat_template=template).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    return str(folder)


def write_chats(path: Path, count: int) -> str:
    """The answer repeats the last word of the question, so it can be learned."""
    rows = [{"prompt": f"w{2 + i % 7} w{2 + i % 11}", "completion": f"w{2 + i % 11}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(folder: Path, **settings: Any) -> list[str]:
    train, heldout = write_chats(folder / "train.jsonl", 40), write_chats(folder / "heldout.jsonl", 12)
    given = {
        "model": "folder", "model.path": make_model(folder / "model"), "model.dtype": "float32", "output": folder, "name": "run",
        "data": "files", "data.train": f"[{train}]", "data.heldout": f"[{heldout}]", "data.max_prompt_tokens": 16,
        "rollout.max_completion_tokens": 16, "sft.epochs": 4, "sft.examples_per_step": 8, "trainer.lr": 3e-3,
        "trainer.checkpoint_every": 2, "trainer.tokens_per_microbatch": 64, **settings,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in given.items()]


def train(run_dir: str) -> None:
    from conf.compose.load import read_run
    from trainer.sft.__main__ import read
    from trainer.sft.run import Finetuning

    config = read_run(Path(run_dir))
    Finetuning(config, Path(run_dir), *read(config, Path(run_dir))).run()


def losses(run_dir: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line.get("sft/loss", 0.0), line.get("sft/heldout_loss", 0.0)) for line in lines]


@pytest.mark.timeout(900)
def test_tensor_parallel_ranks_and_one_rank_learn_the_same(tmp_path: Path) -> None:
    from trainer.sft.__main__ import begin

    found = []
    for number, (size, layout) in enumerate([(1, {}), (2, {"trainer.tp": 2}), (4, {"trainer.pp": 2, "trainer.dp": 2})]):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_dir = begin(words(folder, **layout))
        ranks.run(train, size, str(run_dir), deadline_s=240)
        found.append(losses(run_dir))
        assert (run_dir / "hf" / "model.safetensors.index.json").exists() or (run_dir / "hf" / "model.safetensors").exists()
    alone = found[0]
    assert len(alone) == 1 + 4 * 5 and alone[-1][1] < 0.5 * alone[0][1]
    for other in found[1:]:
        for (loss, heldout), (expected, expected_heldout) in zip(other, alone, strict=True):
            assert loss == pytest.approx(expected, rel=2e-3, abs=1e-4) and heldout == pytest.approx(
                expected_heldout, rel=2e-3, abs=1e-4
            )


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_killed_run_is_resumed_as_if_nothing_had_happened(tmp_path: Path) -> None:
    from trainer.sft.__main__ import begin

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    ranks.run(train, 1, str(begin(words(straight))), deadline_s=240)
    command = [sys.executable, "-m", "trainer.sft"]
    process = subprocess.Popen([*command, *words(killed)], cwd=PROJECT, start_new_session=True)
    run_dir = killed / "run"
    deadline_s = time.monotonic() + 240
    while not list((run_dir / "checkpoints").glob("version-[0-9]")) and process.poll() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run([*command, f"resume={run_dir}"], cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    np.testing.assert_allclose(losses(run_dir), losses(straight / "run"), rtol=1e-5)


def test_mistake_is_told_before_any_rank_starts(tmp_path: Path) -> None:
    from conf.schema import ConfigError
    from conf.shapes import ModelError
    from trainer.sft.__main__ import begin, main

    with pytest.raises(ModelError, match=r"trainer.tp=3"):
        begin(words(tmp_path, **{"trainer.tp": 3}))
    with pytest.raises(ConfigError, match=r"name it in data\.heldout"):
        begin(words(tmp_path, **{"data.heldout": "[]", "data.heldout_fraction": 0.1}))
    assert main([*words(tmp_path), "sft.epochs=0"]) == 1
