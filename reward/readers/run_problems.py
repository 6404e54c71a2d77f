"""What a run trains on and what it is evaluated on, as its `data` settings say."""

import logging
from collections.abc import Iterator
from pathlib import Path

from conf.schema import DataConfig, RunConfig
from reward.readers.draft import Options
from reward.readers.heldout import is_held_out
from reward.readers.reading import Reading
from reward.readers.sources import HUB, Reader, files
from reward.task import defaults_of
from rollout.prompts.problems import HELD_OUT, Problem, ProblemError

FIRST_ROWS = 100

log = logging.getLogger("queue")


def run_problems(config: RunConfig, reader: Reader | None) -> Iterator[tuple[int, Problem]]:
    """Each problem with its part: the number of its source in data.train, or HELD_OUT. Raises ProblemError."""
    data, options = config.data, options_of(config)
    places: dict[str, str] = {}
    held_out = 0
    for part, source in enumerate(data.train):
        for problem in _read(source, options, reader, places):
            if is_held_out(problem, data.heldout_fraction):
                held_out += 1
                yield HELD_OUT, problem
            else:
                yield part, problem
    if data.heldout_fraction and not held_out:
        raise ProblemError(f"data.heldout_fraction={data.heldout_fraction} of {len(places)} problems holds out none: raise it")
    places = {}
    for source in data.heldout:
        for problem in _read(source, options, reader, places):
            yield HELD_OUT, problem


def _read(source: str, options: Options, reader: Reader | None, places: dict[str, str]) -> Iterator[Problem]:
    reading = Reading(source=source, options=options, reader=reader, strict=True)
    for found in reading.problems(places):
        yield found.problem
    if not reading.formats:
        raise ProblemError(f"no problem can be used: {reading}")
    log.info("%s", reading)


def files_of(data: DataConfig) -> list[Path]:
    """The files that the settings name. The reader of a user may read others. Raises ProblemError."""
    sources = [source for source in (*data.train, *data.heldout) if not source.startswith(HUB)]
    return [file for source in sources for file in files(source) if file.is_file()]


def grades_code(config: RunConfig) -> bool:
    """Whether one of the first rows of data.train is graded in a sandbox. Data sets of the hub and a reader of the user are not
    looked at."""
    sources = [] if config.data.reader else [source for source in config.data.train if not source.startswith(HUB)]
    readings = (Reading(source=source, options=options_of(config), most_rows=FIRST_ROWS) for source in sources)
    return any(reward.grades_code for reading in readings for found in reading.problems({}) for reward in found.rewards)


def options_of(config: RunConfig) -> Options:
    return Options(task=config.data.task, defaults=defaults_of(config))
