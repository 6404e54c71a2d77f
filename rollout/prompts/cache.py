"""Keeps a run's prompts as token ids in the run's folder, so that a restarted queue server need not render them again.

    <run>/prompts/<key>.msgpack     the key is a digest of the problems, the tokenizer and the settings

A file that is missing or damaged is made again. Rows of a user's reader and of `hf://` data sets are read once per run.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import RunConfig
from conf.user_code import load
from rollout.ledger.records import Prompt
from rollout.ledger.wire import WireError, pack, unpack
from rollout.prompts.decoder import digest_of_file, digest_of_model, write_whole
from rollout.prompts.render import Renderer
from rollout.prompts.sources import Reader, read_problems

FORMAT = "kestrel-prompts-4"
CHECKSUM_BYTES = 4
log = logging.getLogger("queue")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrompts:
    train: Sequence[Prompt]
    heldout: Sequence[Prompt]


def run_prompts(config: RunConfig, run_dir: Path) -> RunPrompts:
    """The prompts of a run, read from its folder, or rendered and stored there. Raises ProblemError, ConfigError."""
    path = run_dir / "prompts" / f"{_key(config)}.msgpack"
    kept = _read(path)
    if kept is not None:
        log.info("prompts were rendered before: %s has %d train, %d held out", path, len(kept.train), len(kept.heldout))
        return kept
    data = config.data
    reader: Reader | None = load(data.reader, run_dir, setting="data.reader") if data.reader else None
    problems = {"train": read_problems(data.train, reader), "heldout": read_problems(data.heldout, reader)}
    renderer, made = Renderer.of(config.model.path, data), dict[str, Sequence[Prompt]]()
    for split, found in problems.items():
        prompts = renderer.prompts(found)
        log.info("%s: %d prompts; %d others are too long", split, len(prompts.usable), len(prompts.too_long))
        made[split] = prompts.usable
    body = pack(made)
    write_whole(path, zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "big") + body)
    return RunPrompts(**made)


def _key(config: RunConfig) -> str:
    return hashlib.sha256("\n".join(_made_from(config)).encode()).hexdigest()[:32]


def _made_from(config: RunConfig) -> Iterator[str]:
    data = config.data
    yield FORMAT
    yield json.dumps([data.max_prompt_tokens, data.system_prompt, dict(data.chat_template_kwargs)], sort_keys=True)
    yield f"{data.reader} {config.user_code.get(data.reader, '')}"
    yield digest_of_model(config.model.path)
    for split, sources in (("train", data.train), ("heldout", data.heldout)):
        for source in sources:
            yield f"{split} {source} {digest_of_file(Path(source)) if Path(source).is_file() else ''}"


def _read(path: Path) -> RunPrompts | None:
    try:
        data = path.read_bytes()
        if zlib.crc32(data[CHECKSUM_BYTES:]).to_bytes(CHECKSUM_BYTES, "big") == data[:CHECKSUM_BYTES]:
            return unpack(RunPrompts, data[CHECKSUM_BYTES:])
        log.warning("%s is damaged: the prompts are rendered again", path)
    except FileNotFoundError:
        pass
    except WireError as error:
        log.warning("%s cannot be read (%s): the prompts are rendered again", path, error)
    return None
