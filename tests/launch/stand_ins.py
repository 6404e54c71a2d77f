"""A model folder and problems that pass every check at a launch and that nobody reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512,
    "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
PROBLEM = {"id": "a", "prompt": "p", "task": {"kind": "stdio", "tests": [{"input": "", "output": ""}]}}


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
