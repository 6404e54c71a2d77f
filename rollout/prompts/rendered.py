"""A run's prompts as token ids, kept in the run's folder: a queue server that starts again renders nothing.

    <run>/prompts/<key>.msgpack     the key is a digest of all that they are made from: problems, tokenizer, limit

A copy that is missing, damaged, or of other problems is made again. Rows of `hf://` datasets are read once a run.
"""

import hashlib
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import RunConfig
from rollout.ledger.records import Prompt
from rollout.ledger.wire import WireError, pack, unpack
from rollout.prompts.dataset import load_prompts, load_tokenizer
from rollout.prompts.decoder import digest_of_file, digest_of_model, write_whole

FORMAT = "kestrel-prompts-1"
CHECKSUM_BYTES = 4
log = logging.getLogger("queue")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    train: Sequence[Prompt]
    heldout: Sequence[Prompt]


def rendered(config: RunConfig, folder: Path) -> Rendered:
    """The prompts of a run: from `folder` if they are there, else rendered and written to it. Raises ProblemError."""
    path = folder / f"{_key(config)}.msgpack"
    kept = _read(path)
    if kept is not None:
        log.info("prompts as rendered before, from %s: %d train, %d held out", path, len(kept.train), len(kept.heldout))
        return kept
    tokenizer = load_tokenizer(config.model.path)
    made = Rendered(
        train=_render("train", config.data.train, tokenizer, config.data.max_prompt_tokens),
        heldout=_render("heldout", config.data.heldout, tokenizer, config.data.max_prompt_tokens),
    )
    body = pack(made)
    write_whole(path, zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "big") + body)
    return made


def _render(name: str, sources: Sequence[str], tokenizer: Any, max_prompt_tokens: int) -> Sequence[Prompt]:
    found = load_prompts(sources, tokenizer, max_prompt_tokens)
    log.info("%s: %d prompts, %d are too long", name, len(found.usable), len(found.too_long))
    return found.usable


def _key(config: RunConfig) -> str:
    return hashlib.sha256("\n".join(_made_from(config)).encode()).hexdigest()[:32]


def _made_from(config: RunConfig) -> Iterator[str]:
    yield FORMAT
    yield str(config.data.max_prompt_tokens)
    yield digest_of_model(config.model.path)
    for name, sources in (("train", config.data.train), ("heldout", config.data.heldout)):
        for source in sources:
            yield f"{name} {source} {digest_of_file(Path(source)) if Path(source).is_file() else ''}"


def _read(path: Path) -> Rendered | None:
    try:
        data = path.read_bytes()
        if zlib.crc32(data[CHECKSUM_BYTES:]).to_bytes(CHECKSUM_BYTES, "big") == data[:CHECKSUM_BYTES]:
            return unpack(Rendered, data[CHECKSUM_BYTES:])
        log.warning("%s is damaged: the prompts are rendered again", path)
    except FileNotFoundError:
        pass
    except WireError as error:
        log.warning("%s cannot be read (%s): the prompts are rendered again", path, error)
    return None
