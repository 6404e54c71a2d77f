"""Makes a new ledger for a run whose ledger is damaged, missing, or older than its newest checkpoint. Prints what was lost.

    python -m rollout.ledger.new_ledger --run outputs/x        # then resume as usual: make run resume=outputs/x

The new ledger starts at the newest checkpoint. Groups that were admitted before it but not trained on count as dropped
(`ledger_lost`), with their recorded tokens. Steps after the checkpoint are done again. No prompt that the checkpoint was
trained on is repeated. The old file is kept beside the new one. A ledger that the run can still use is not replaced.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conf.compose.load import read_run
from conf.compose.run_folder import CHECKPOINTS, LEDGER
from conf.schema import ConfigError
from rollout import checkpoint_files
from rollout.ledger.changes import DropKind, Durable, Totals
from rollout.ledger.journal import Journal, JournalError, JournalUnavailable
from rollout.ledger.ledger import Ledger
from rollout.ledger.rules import Rules, RulesError


class NewLedgerError(RuntimeError):
    """No new ledger is needed, or none can be made. The message says why."""


class Loss(NamedTuple):
    groups: int
    tokens: int


def totals_at(version: int, account: Mapping[str, Any], rules: Rules) -> tuple[Totals, Loss]:
    """The position of a ledger at the checkpoint of `version`, and what it has lost.

    account: `Ledger.summary()` at the time of the checkpoint, from the checkpoint's record.
    """
    dropped = Counter(account.get("dropped_groups", {}))
    trained = version * rules.groups_per_step
    loss = Loss(
        groups=max(int(account.get("admitted_groups", 0)) - dropped.total() - trained, 0),
        tokens=int(account.get("waiting_tokens", 0)),
    )
    dropped[DropKind.LEDGER_LOST] += loss.groups
    dropped_tokens = Counter(account.get("dropped_tokens", {}))
    dropped_tokens[DropKind.LEDGER_LOST] += loss.tokens
    totals = Totals(
        version=version,
        admitted=trained + dropped.total(),
        steps_taken=version,
        oldest_step=version,
        dropped_groups=dict(dropped),
        dropped_tokens=dict(dropped_tokens),
        lost_tokens=dict(account.get("lost_tokens", {})),
        trained_tokens=int(account.get("trained_tokens", 0)),
        eval_tokens=int(account.get("eval_tokens", 0)),
    )
    return totals, loss


def newest_checkpoint(run: Path) -> tuple[int, Mapping[str, Any]]:
    """The version of the newest undamaged checkpoint, and its account of the ledger. Raises NewLedgerError."""
    faults = []
    for version, checkpoint in reversed(checkpoint_files.complete(run / CHECKPOINTS)):
        try:
            if (fault := checkpoint_files.damage(checkpoint)) is None:
                return version, _account(checkpoint / "kestrel.json")
        except checkpoint_files.SumsError as error:
            raise NewLedgerError(str(error)) from error
        faults.append(fault)
    raise NewLedgerError("; ".join([*faults, f"{run / 'checkpoints'} holds no undamaged checkpoint: start a new run"]))


def _account(record: Path) -> Mapping[str, Any]:
    try:
        account: Mapping[str, Any] = json.loads(record.read_text())["extra"].get("ledger", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NewLedgerError(f"{record} has no account of the ledger ({error!r}): restore the checkpoint from a copy") from error
    return account


def renew(run: Path, rules: Rules) -> str:
    """Replaces the old ledger by a new one. Returns what was lost, as text. Raises NewLedgerError, JournalError."""
    version, account = newest_checkpoint(run)
    path = run / LEDGER
    if path.exists():
        _check_useless(path, rules, version, account)
    kept = _put_aside(path)
    totals, loss = totals_at(version, account, rules)
    with Journal(path, rules) as journal:
        journal.append([Durable(totals=totals, forgotten=())])
        journal.commit()
    return (
        f"{path} starts again at version {version}. {loss.groups} groups that were admitted but not trained on are lost, with "
        f"{loss.tokens} tokens; they count as dropped ({DropKind.LEDGER_LOST}). Steps after version {version} are done again"
        + (f". The old ledger is kept as {kept}" if kept else "")
        + f". Resume with: make run resume={run}"
    )


def _check_useless(path: Path, rules: Rules, version: int, account: Mapping[str, Any]) -> None:
    """Raises NewLedgerError if the run can resume with its present ledger, and JournalUnavailable if that is in use."""
    try:
        with Journal(path, rules) as journal:
            state = Ledger.replay(rules, journal.read()).state
    except JournalUnavailable:
        raise
    except JournalError:  # damaged, or written by another version of this software
        return
    if state.oldest_step <= version <= state.version and state.admitted >= int(account.get("admitted_groups", 0)):
        raise NewLedgerError(f"{path} is undamaged and fits the checkpoint of version {version}: the run needs no new ledger")


def _put_aside(path: Path) -> Path | None:
    """Renames the old ledger and keeps it. If it is a link, only the link is renamed."""
    kept = None
    for old in (path, path.with_name(f"{path.name}-journal")):  # SQLite makes the second file
        if old.is_symlink() or old.exists():
            number = sum(1 for _ in path.parent.glob(f"{old.name}.damaged-*"))
            aside = old.with_name(f"{old.name}.damaged-{number}")
            old.rename(aside)
            kept = kept or aside
    return kept


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rollout.ledger.new_ledger", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    options = parser.parse_args(arguments)
    try:
        print(renew(options.run, Rules.of(read_run(options.run))))
    except (ConfigError, RulesError, NewLedgerError, JournalError) as error:
        print(f"new ledger: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
