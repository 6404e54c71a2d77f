"""Reads batches from the ledger of a run that is not running.

A ledger keeps all batches from the version of the oldest kept checkpoint on. So it has every batch that can be trained on again
from one of the run's own checkpoints.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from conf.compose.run_folder import LEDGER
from conf.schema import RunConfig
from rollout.ledger.changes import Change, Taken
from rollout.ledger.journal import Journal, JournalError
from rollout.ledger.ledger import Ledger
from rollout.ledger.records import Batch
from rollout.ledger.rules import Rules


class NoSuchBatch(RuntimeError):
    """A batch cannot be read. The message says why."""


def steps(run_dir: Path, config: RunConfig) -> list[int]:
    """The steps whose batches are kept, in order. Step s takes the weights from version s to s + 1. Raises NoSuchBatch."""
    with closing(_open(run_dir, config)) as journal:
        return sorted(change.step for change in _read(journal.read()) if isinstance(change, Taken))


def batches(run_dir: Path, config: RunConfig, wanted: Sequence[int]) -> list[Batch]:
    """The batches of these steps, in the order of `wanted`. Raises NoSuchBatch."""
    with closing(_open(run_dir, config)) as journal:
        taken = {change.step: change for change in _read(journal.read()) if isinstance(change, Taken)}
        if missing := [step for step in wanted if step not in taken]:
            raise NoSuchBatch(f"{journal.path} holds no batch of step {missing[0]}")
        ledger = Ledger.replay(Rules.of(config), [taken[step] for step in wanted])
        for group in (index for step in wanted for index in ledger.unloaded(step)):
            ledger.load(group, _read(journal.group(group)))
        return [ledger.batch(step) for step in wanted]


def _open(run_dir: Path, config: RunConfig) -> Journal:
    path = run_dir / LEDGER
    if not path.is_file():
        raise NoSuchBatch(f"{path} does not exist: this run has recorded no batch")
    try:
        return Journal(path, Rules.of(config))
    except JournalError as error:
        raise NoSuchBatch(f"{error}; read the run after its queue server has ended, or read a copy of its folder") from error


def _read(changes: Iterator[Change]) -> Iterator[Change]:
    try:
        yield from changes
    except JournalError as error:
        raise NoSuchBatch(str(error)) from error
