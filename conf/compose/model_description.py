"""The model's folder without its weights, copied into the run's folder when the run starts.

Engines, judges and the last save read it there, so they do not need the model's folder again: engines get their weights by push.
"""

import shutil
from pathlib import Path

from conf.compose.run_folder import MODEL_DESCRIPTION
from conf.schema import RunConfig

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def copy_description(source: Path, target: Path) -> None:
    """Copies every file of a model's folder but its weights: configuration, tokenizer, chat template, generation settings."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)


def keep_description(config: RunConfig, run_dir: Path) -> None:
    """Copies the description, unless the run has it already. It is complete or absent, whenever this process is killed."""
    target, unfinished = run_dir / MODEL_DESCRIPTION, run_dir / f".{MODEL_DESCRIPTION}"
    if not target.exists():
        copy_description(Path(config.model.path), unfinished)
        unfinished.replace(target)


def description_of(config: RunConfig, run_dir: Path) -> Path:
    """The run's copy, or the model's folder itself for a process that was started without the launcher."""
    kept = run_dir / MODEL_DESCRIPTION
    return kept if kept.is_dir() else Path(config.model.path)
