"""Makes a model with random weights and another depth: the student of the distillation run (`experiment=debug_distill`).

    python -m trainer.prepare.untrained --data MODEL_DIR --out STUDENT_DIR [--layers 2] [--seed 0]

Everything but the depth is as in MODEL_DIR: the width, the tokenizer with its chat template, and the generation settings.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging


def make(source: Path, target: Path, *, layers: int, seed: int) -> None:
    """Writes the folder of the untrained model."""
    torch.manual_seed(seed)
    stated = json.loads((source / "config.json").read_text())
    stated.pop("layer_types", None)  # one per layer; transformers fills them in
    target.mkdir(parents=True)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**stated | {"num_hidden_layers": layers}), dtype=torch.float32
    ).save_pretrained(target)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and not (target / path.name).exists():
            shutil.copy(path, target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare.untrained", description="Makes a model with random weights.")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the model that it resembles")
    parser.add_argument("--out", type=Path, required=True, help="the new model folder; it must not exist")
    parser.add_argument("--layers", type=int, default=2, help="its number of decoder layers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} exists; remove it or name another --out")
    make(arguments.data, arguments.out, layers=arguments.layers, seed=arguments.seed)
    print(f"{arguments.out}: {arguments.layers} layers with random weights")


if __name__ == "__main__":
    main()
