"""A new ledger for a run whose own is damaged, gone, or older than its newest checkpoint; and what that costs.

    python -m rollout.ledger.new_ledger --run outputs/x        # then go on as usual: make run resume=outputs/x

It stands where the checkpoint does. Groups that had been admitted by then and were not trained on are counted as dropped
(`ledger_lost`), with the tokens that were recorded of them; what came after the checkpoint is done again. No prompt that the
checkpoint's weights were trained on comes twice. The old file is kept beside the new one; a ledger that is whole is left alone.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conf.compose.load import read_run
from conf.schema import ConfigError
from rollout import checkpoint_files
from rollout.ledger.changes import DropKind, Durable, Totals
from rollout.ledger.journal import Journal, JournalError, JournalUnavailable
from rollout.ledger.ledger import Ledger
from rollout.ledger.rules import Rules, RulesError


class NewLedgerError(RuntimeError):
    """There is nothing to be done, or nothing to do it with; the message says why."""


class Loss(NamedTuple):
    groups: int
    tokens: int


def totals_at(version: int, account: Mapping[str, Any], rules: Rules) -> tuple[Totals, Loss]:
    """Where a ledger stands at the checkpoint of `version`, and what it has lost.

    account: `Ledger.summary()` when the checkpoint was made, as its record has it.
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
    """The version of the newest checkpoint whose files are whole, and what it says of the ledger. Raises NewLedgerError."""
    faults = []
    for version, checkpoint in reversed(checkpoint_files.complete(run / "checkpoints")):
        try:
            if (fault := checkpoint_files.damage(checkpoint)) is None:
                return version, _account(checkpoint / "kestrel.json")
        except checkpoint_files.SumsError as error:
            raise NewLedgerError(str(error)) from error
        faults.append(fault)
    raise NewLedgerError("; ".join([*faults, f"{run / 'checkpoints'} holds no whole checkpoint to go on from: begin a new run"]))


def _account(record: Path) -> Mapping[str, Any]:
    try:
        account: Mapping[str, Any] = json.loads(record.read_text())["extra"].get("ledger", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NewLedgerError(f"{record} does not say where the ledger stood ({error!r}): bring the checkpoint back") from error
    return account


def renew(run: Path, rules: Rules) -> str:
    """Puts a new ledger in the place of the old one; says what was lost. Raises NewLedgerError, JournalError."""
    version, account = newest_checkpoint(run)
    path = run / "ledger.db"
    if path.exists():
        _check_useless(path, rules, version, account)
    kept = _put_aside(path)
    totals, loss = totals_at(version, account, rules)
    with Journal(path, rules) as journal:
        journal.append([Durable(totals=totals, forgotten=())])
        journal.commit()
    return (
        f"{path} begins anew at version {version}. Lost are {loss.groups} groups that were admitted and not trained on, with "
        f"{loss.tokens} tokens, counted as dropped ({DropKind.LEDGER_LOST}); what was done after version {version} is done again"
        + (f". The old ledger is kept as {kept}" if kept else "")
        + f". Go on with: make run resume={run}"
    )


def _check_useless(path: Path, rules: Rules, version: int, account: Mapping[str, Any]) -> None:
    """Raises NewLedgerError if the run can go on with the ledger that it has, JournalUnavailable if that is in use."""
    try:
        with Journal(path, rules) as journal:
            state = Ledger.replay(rules, journal.read()).state
    except JournalUnavailable:
        raise
    except JournalError:  # damaged, or written by another version of this software
        return
    if state.oldest_step <= version <= state.version and state.admitted >= int(account.get("admitted_groups", 0)):
        raise NewLedgerError(f"{path} is whole and belongs to the checkpoint of version {version}: there is nothing to mend")


def _put_aside(path: Path) -> Path | None:
    """Also where it is a link: the file stays, under another name beside the link's."""
    kept = None
    for old in (path, path.with_name(f"{path.name}-journal")):  # the second is SQLite's own
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
