"""Turns a completion's tokens into text for the judges, without special tokens.

A completion stands behind its prompt, and so it is decoded: tokenizers such as Llama 2's take a blank away from the beginning of
a text, and a completion's first blank must not be lost.

The tokenizer is the one that transformers makes of the model's folder. A copy lies in the run's folder, so a process that starts
again does not need transformers: <run>/prompts/<digest of the model's small files>.tokenizer.json
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rollout.ledger.records import I32
from rollout.prompts.render import load_tokenizer

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")  # files of a model's folder that say nothing about text
TEXT_BEFORE = "a"  # stands for the prompt: any text will do that has a token of its own
Decode = Callable[[I32], str]


def decoder(model: str, folder: Path) -> Decode:
    """Decodes completions of the model in the folder `model`; copies of tokenizers lie in `folder`. Raises ProblemError."""
    path = folder / f"{digest_of_model(model)}.tokenizer.json"
    if path.is_file():
        return _fast(Tokenizer.from_file(str(path)))
    tokenizer = load_tokenizer(model)
    fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:  # one of the few that only transformers can run
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        before = tokenizer.encode(TEXT_BEFORE, add_special_tokens=False)
        return _behind(before, lambda tokens: str(tokenizer.decode(tokens, **options)))
    write_whole(path, fast.to_str().encode())
    return _fast(fast)


def _fast(tokenizer: Tokenizer) -> Decode:
    before = tokenizer.encode(TEXT_BEFORE, add_special_tokens=False).ids
    return _behind(before, lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))


def _behind(before: Sequence[int], decode: Callable[[list[int]], str]) -> Decode:
    """Decodes tokens as they stand behind the tokens `before`."""
    text_before = decode([*before])

    def text(tokens: I32) -> str:
        both = decode([*before, *tokens.tolist()])
        if both.startswith(text_before):
            return both[len(text_before) :]
        return decode(tokens.tolist())  # bytes that make no character have taken the text before with them

    return text


def digest_of_model(model: str) -> str:
    """It changes with any file that decides how text becomes tokens and tokens become text."""
    digest = hashlib.sha256()
    for file in sorted(Path(model).iterdir()) if Path(model).is_dir() else ():
        if file.is_file() and file.suffix not in WEIGHTS:
            digest.update(f"{file.name} {digest_of_file(file)}\n".encode())
    return digest.hexdigest()[:32]


def digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Writes the whole file or none: several processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
