"""Turns a completion's tokens into text for the judges, without special tokens.

A completion is decoded together with some text before it, because tokenizers such as Llama 2's remove a space at the beginning of
a text. The first space of a completion must not be lost.

The tokenizer is the one that transformers loads from the model's folder. A copy is kept in the run's folder, so that a restarted
process does not need transformers: <run>/prompts/<digest of the model's small files>.tokenizer.json
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rollout.ledger.records import I32
from rollout.prompts.render import load_tokenizer

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")  # files that do not affect how text is decoded
TEXT_BEFORE = "a"  # stands for the prompt; any text that is a token by itself will do
Decode = Callable[[I32], str]


def decoder(model: str, folder: Path) -> Decode:
    """A decoder for completions of the model in the folder `model`. It keeps a copy of the tokenizer in `folder`.

    Raises ProblemError.
    """
    path = folder / f"{digest_of_model(model)}.tokenizer.json"
    if path.is_file():
        return _fast(Tokenizer.from_file(str(path)))
    tokenizer = load_tokenizer(model)
    fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:  # one of the few tokenizers that only transformers can run
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        before = tokenizer.encode(TEXT_BEFORE, add_special_tokens=False)
        return _behind(before, lambda tokens: str(tokenizer.decode(tokens, **options)))
    write_whole(path, fast.to_str().encode())
    return _fast(fast)


def _fast(tokenizer: Tokenizer) -> Decode:
    before = tokenizer.encode(TEXT_BEFORE, add_special_tokens=False).ids
    return _behind(before, lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))


def _behind(before: Sequence[int], decode: Callable[[list[int]], str]) -> Decode:
    """A decoder for tokens that follow the tokens `before`."""
    text_before = decode([*before])

    def text(tokens: I32) -> str:
        both = decode([*before, *tokens.tolist()])
        if both.startswith(text_before):
            return both[len(text_before) :]
        return decode(tokens.tolist())  # invalid bytes in the completion have changed the text before it

    return text


def digest_of_model(model: str) -> str:
    """A digest over all files of the model that affect how text is encoded or decoded."""
    digest = hashlib.sha256()
    for file in sorted(Path(model).iterdir()) if Path(model).is_dir() else ():
        if file.is_file() and file.suffix not in WEIGHTS:
            digest.update(f"{file.name} {digest_of_file(file)}\n".encode())
    return digest.hexdigest()[:32]


def digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically, because several processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
