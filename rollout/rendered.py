"""A run's prompts as token ids, and its decoder, kept in the run's folder: a queue server that starts again renders nothing.

    <run>/prompts/<key>.msgpack            the key is a digest of all that they are made from: problems, tokenizer, limit
    <run>/prompts/<key>.tokenizer.json

A copy that is missing, damaged, or of other problems is made again. Rows of `hf://` datasets are read once a run.
"""

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from conf.schema import RunConfig
from rollout.prompts import Prompts, load_prompts, load_tokenizer
from rollout.types import I32, Prompt
from rollout.wire import WireError, pack, unpack

FORMAT = b"kestrel-prompts-1"
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")  # in a model's folder; they have no part in rendering
log = logging.getLogger("queue")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    decode: Callable[[I32], str]  # of a completion's tokens, special ones left out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    train: Sequence[Prompt]
    heldout: Sequence[Prompt]


def rendered(config: RunConfig, folder: Path) -> Rendered:
    """The prompts of a run: from `folder` if they are there, else rendered and written to it. Raises ProblemError."""
    path = folder / f"{_key(config)}.msgpack"
    words = path.with_suffix(".tokenizer.json")
    kept = _read(path)
    if kept is not None and words.is_file():
        log.info("prompts as rendered before, from %s: %d train, %d held out", path, len(kept.train), len(kept.heldout))
        return Rendered(train=kept.train, heldout=kept.heldout, decode=_decoder(Tokenizer.from_file(str(words))))
    tokenizer = load_tokenizer(config.model.path)
    limit = config.data.max_prompt_tokens
    train = _told("train", load_prompts(config.data.train, tokenizer, limit))
    heldout = _told("heldout", load_prompts(config.data.heldout, tokenizer, limit))
    fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:  # one of the few that only transformers can run
        return Rendered(train=train, heldout=heldout, decode=_slow_decoder(tokenizer))
    folder.mkdir(parents=True, exist_ok=True)
    body = pack(_Kept(train=train, heldout=heldout))
    _write(words, fast.to_str().encode())
    _write(path, zlib.crc32(body).to_bytes(4, "big") + body)
    return Rendered(train=train, heldout=heldout, decode=_decoder(fast))


def _told(name: str, found: Prompts) -> Sequence[Prompt]:
    log.info("%s: %d prompts, %d are too long", name, len(found.usable), len(found.too_long))
    return found.usable


def _decoder(tokenizer: Tokenizer) -> Callable[[I32], str]:
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def _slow_decoder(tokenizer: Any) -> Callable[[I32], str]:
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _key(config: RunConfig) -> str:
    digest = hashlib.sha256(FORMAT)
    for part in _made_from(config):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def _made_from(config: RunConfig) -> Iterator[bytes]:
    yield str(config.data.max_prompt_tokens).encode()
    for name, sources in (("train", config.data.train), ("heldout", config.data.heldout)):
        for source in sources:
            yield f"{name} {source}".encode()
            if Path(source).is_file():
                yield _digest(Path(source))
    model = Path(config.model.path)
    for file in sorted(model.iterdir()) if model.is_dir() else ():
        if file.is_file() and file.suffix not in WEIGHTS:
            yield file.name.encode()
            yield _digest(file)


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _read(path: Path) -> _Kept | None:
    try:
        data = path.read_bytes()
        if zlib.crc32(data[4:]).to_bytes(4, "big") == data[:4]:
            return unpack(_Kept, data[4:])
        log.warning("%s is damaged: the prompts are rendered again", path)
    except FileNotFoundError:
        pass
    except WireError as error:
        log.warning("%s cannot be read (%s): the prompts are rendered again", path, error)
    return None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
