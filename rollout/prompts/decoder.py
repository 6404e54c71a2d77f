"""A model's tokens as text, for the judges: what a completion says, special tokens left out.

The tokenizer is the one that transformers makes of the model's folder. A copy lies in the run's folder, from which a process that
starts again has it without transformers: <run>/prompts/<digest of the model's small files>.tokenizer.json
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from rollout.ledger.records import I32
from rollout.prompts.dataset import load_tokenizer

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")  # in a model's folder; they say nothing about text
Decode = Callable[[I32], str]


def decoder(model: str, folder: Path) -> Decode:
    """Of the model in this folder, with the copies in `folder`. Raises ProblemError."""
    path = folder / f"{digest_of_model(model)}.tokenizer.json"
    if path.is_file():
        return _decoder(Tokenizer.from_file(str(path)))
    tokenizer = load_tokenizer(model)
    fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:  # one of the few that only transformers can run
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return lambda tokens: str(tokenizer.decode(tokens.tolist(), **options))
    write_whole(path, fast.to_str().encode())
    return _decoder(fast)


def _decoder(tokenizer: Tokenizer) -> Decode:
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def digest_of_model(model: str) -> str:
    """Of all that decides how text becomes tokens and tokens become text."""
    digest = hashlib.sha256()
    for file in sorted(Path(model).iterdir()) if Path(model).is_dir() else ():
        if file.is_file() and file.suffix not in WEIGHTS:
            digest.update(f"{file.name} {digest_of_file(file)}\n".encode())
    return digest.hexdigest()[:32]


def digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """The file, or none: several processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
