"""Keeps a run's prompts as token ids in the run's folder, so that a restarted queue server need not render them again.

    <run>/prompts/<key>.msgpack     the key is a digest of the problems, the tokenizer and the settings

A file that is missing or damaged is made again. Rows of a user's reader and of `hf://` data sets are read once per run.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.compose.run_folder import PROMPTS
from conf.schema import RunConfig
from rollout.ledger.records import Prompt
from rollout.ledger.wire import WireError, pack, unpack
from rollout.prompts.decoder import digest_of_file, digest_of_model, write_whole
from rollout.prompts.problems import HELD_OUT, Problem
from rollout.prompts.render import Renderer

FORMAT = "kestrel-prompts-5"
CHECKSUM_BYTES = 4
Read = Callable[[], Iterable[tuple[int, Problem]]]  # reads the problems, each with its part: a source of data.train, or HELD_OUT
log = logging.getLogger("queue")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrompts:
    train: Sequence[Sequence[Prompt]]  # by the source in data.train, where these have weights, else all in one
    heldout: Sequence[Prompt]


def run_prompts(config: RunConfig, run_dir: Path, read: Read, files: Sequence[Path]) -> RunPrompts:
    """The prompts of a run, read from its folder, or rendered and stored there. Raises ProblemError."""
    path = run_dir / PROMPTS / f"{_key(config, files)}.msgpack"
    kept = _read(path)
    if kept is not None:
        count = sum(map(len, kept.train))
        log.info("prompts were rendered before: %s has %d train, %d held out", path, count, len(kept.heldout))
        return kept
    renderer = Renderer.of(config.model.path, config.data)
    train: list[list[Prompt]] = [[] for _ in config.data.weights or [1.0]]
    heldout: list[Prompt] = []
    too_long = 0
    for part, problem in read():
        prompt = renderer.render(problem)
        if len(prompt.tokens) > config.data.max_prompt_tokens:
            too_long += 1
        elif part == HELD_OUT:
            heldout.append(prompt)
        else:
            train[part if config.data.weights else 0].append(prompt)
    count = sum(map(len, train))
    log.info("%d prompts to train on, %d held out; %d others are too long", count, len(heldout), too_long)
    made = RunPrompts(train=tuple(map(tuple, train)), heldout=tuple(heldout))
    body = pack(made)
    write_whole(path, zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "big") + body)
    return made


def _key(config: RunConfig, files: Sequence[Path]) -> str:
    return hashlib.sha256("\n".join(_made_from(config, files)).encode()).hexdigest()[:32]


def _made_from(config: RunConfig, files: Sequence[Path]) -> Iterator[str]:
    yield FORMAT
    yield json.dumps(asdict(config.data), sort_keys=True)
    yield config.user_code.get(config.data.reader, "")
    yield digest_of_model(config.model.path)
    for file in files:
        yield f"{file} {digest_of_file(file)}"


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
