"""Stand-ins for what a launch needs: a model and problems that no process reads, and the processes of a run.

`python -P` keeps the working folder off the launcher's own path, so the launcher is the real one. The processes that it starts
there find the stand-ins first.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PROJECT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(PROJECT)}  # the launcher of this tree, wherever another one is installed from

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512,
    "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 256, "max_position_embeddings": 512,
    "eos_token_id": 0, "rms_norm_eps": 1e-5,
}  # fmt: skip
PROBLEM = {"id": "a", "prompt": "p", "task": {"kind": "stdio", "tests": [{"input": "", "output": ""}]}}


LIVES_UNTIL_CLOSED = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
while not (run / "closed").exists():
    time.sleep(0.05)
"""
# A job of a sweep imports the launcher with this folder first on its path. What has no stand-in comes from the project.
REST_IS_REAL = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
TRAINER = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
assert (run / "config.yaml").exists()
if os.environ["RANK"] == "0":
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 4):
            line = {"step": step, "time": time.time(), "reward/mean": step / 4, "time/step_s": 0.1}
            print(json.dumps(line), file=file, flush=True)
            time.sleep(0.1)
    (run / "summary.json").write_text(json.dumps({"queue": {"trained_tokens": 42}}))
    (run / "closed").touch()
"""


def write_model(folder: Path, shards: int = 1) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "tokenizer.json").write_text("{}")
    names = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)] if shards > 1 else ["model.safetensors"]
    for n, name in enumerate(names):
        save_file({f"tensor.{n}": np.zeros((2, 3), np.float32)}, folder / name)
    if shards > 1:
        index = {"weight_map": {f"tensor.{n}": name for n, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_problems(file: Path, *problems: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems or (PROBLEM,)))


def write_project(folder: Path) -> None:
    """A folder in which `launch` below runs with stand-ins for the queue, the engines, the judges and the trainer."""
    for name, source in {
        "rollout/queue/__main__.py": LIVES_UNTIL_CLOSED,
        "rollout/__main__.py": LIVES_UNTIL_CLOSED,
        "reward/__main__.py": LIVES_UNTIL_CLOSED,
        "trainer/__main__.py": TRAINER,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").write_text(REST_IS_REAL)
        path.write_text(source)
    write_model(folder / "model")
    write_problems(folder / "train.jsonl")


def command(*arguments: str) -> list[str]:
    own = ["model.path=model", "model.prepare=", "data.train=[train.jsonl]", "data.heldout=[]", "trainer.tp=1", "trainer.steps=3"]
    given = [] if any(a.startswith("resume=") for a in arguments) else own
    return [sys.executable, "-P", "-m", "launch", *arguments, "experiment=debug", *given]


def launch(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=project, env=ENV, capture_output=True, text=True, timeout=120)
