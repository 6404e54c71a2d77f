"""What the pages ask of a ledger, in tables: groups, trajectories, and sums per problem.

The index lives in a temporary SQLite database of this process. It takes each change once, so a page never reads the whole ledger.
It keeps its figures about what the ledger forgets meanwhile.
"""

import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollout.ledger.changes import Admitted, Change, Dropped, Extended, Graded, Restarted, Taken
from rollout.ledger.following import Numbered
from rollout.ledger.records import Verdict

FULL_REWARD = 1.0
TABLES = """
CREATE TABLE problems (
    id TEXT PRIMARY KEY, text TEXT, attempts INTEGER DEFAULT 0, passed INTEGER DEFAULT 0, rewards REAL DEFAULT 0,
    tokens INTEGER DEFAULT 0, best REAL, best_group INTEGER, best_number INTEGER, worst REAL, worst_group INTEGER,
    worst_number INTEGER) WITHOUT ROWID;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, problem TEXT, version INTEGER, eval_id TEXT, completions INTEGER, step INTEGER,
    dropped TEXT DEFAULT '', graded INTEGER DEFAULT 0, rewards REAL DEFAULT 0);
CREATE INDEX groups_by_problem ON groups (problem);
CREATE INDEX groups_by_step ON groups (step);
CREATE TABLE trajectories (
    group_id INTEGER, number INTEGER, reward REAL, tokens INTEGER, PRIMARY KEY (group_id, number)) WITHOUT ROWID;
CREATE TABLE reasons (problem TEXT, reason TEXT, count INTEGER, PRIMARY KEY (problem, reason)) WITHOUT ROWID;
"""
GRADED = """
UPDATE problems SET attempts = attempts + 1, passed = passed + :passed, rewards = rewards + :reward, tokens = tokens + :tokens,
    best_group = iif(best IS NULL OR :reward > best, :group, best_group),
    best_number = iif(best IS NULL OR :reward > best, :number, best_number), best = max(ifnull(best, :reward), :reward),
    worst_group = iif(worst IS NULL OR :reward < worst, :group, worst_group),
    worst_number = iif(worst IS NULL OR :reward < worst, :number, worst_number), worst = min(ifnull(worst, :reward), :reward)
WHERE id = :problem
"""
SORTS = {
    "problem": "id",
    "attempts": "attempts",
    "pass_rate": "1.0 * passed / attempts",
    "reward": "rewards / attempts",
    "tokens": "1.0 * tokens / attempts",
}
PROBLEM = """SELECT id, substr(text, 1, 300) AS text, attempts, 1.0 * passed / attempts AS pass_rate,
    rewards / attempts AS reward, 1.0 * tokens / attempts AS tokens,
    best, best_group, best_number, worst, worst_group, worst_number FROM problems"""
GROUP = """SELECT id, problem, version, eval_id, completions, step, dropped, graded, rewards / nullif(graded, 0) AS reward
    FROM groups"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRow:
    """A problem over all its attempts that were graded."""

    id: str
    text: str  # its beginning
    attempts: int
    pass_rate: float  # the share with the full reward
    reward: float  # mean
    tokens: float  # mean length of a completion
    best: float
    best_group: int
    best_number: int
    worst: float
    worst_group: int
    worst_number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    id: int
    problem: str
    version: int  # published when the group was admitted
    eval_id: str
    completions: int
    step: int | None  # the step that trained on it, numbered as in metrics.jsonl; None before that
    dropped: str  # why; "" if it was not
    graded: int
    reward: float | None  # mean over what is graded


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRate:
    """One problem at one version."""

    version: int
    attempts: int
    pass_rate: float
    reward: float


class Index:
    def __init__(self) -> None:
        self.seq = 0  # the last change that is in the index
        self.trajectories = 0  # graded ones
        self._db = sqlite3.connect("", check_same_thread=False, isolation_level=None)  # "" is a temporary file
        self._db.executescript(TABLES)
        self._lock = threading.Lock()  # one thread follows the ledger, others answer pages
        self._tokens: dict[tuple[int, int], int] = {}  # sampled so far, of trajectories without a verdict

    def add(self, changes: Iterable[Numbered]) -> None:
        with self._lock:
            self._db.execute("BEGIN")
            for seq, change in changes:
                self._apply(change)
                self.seq = seq
            self._db.execute("COMMIT")

    def problems(self, *, search: str, sort: str, descending: bool, first: int, most: int) -> tuple[int, list[ProblemRow]]:
        """How many problems match, and a page of them."""
        where = "WHERE attempts > 0 AND (instr(lower(id), lower(?)) OR instr(lower(text), lower(?)))"
        order = f"ORDER BY {SORTS[sort]} {'DESC' if descending else 'ASC'}, id"
        count = self._rows(f"SELECT count(*) AS n FROM problems {where}", search, search)[0]["n"]
        rows = self._rows(f"{PROBLEM} {where} {order} LIMIT ? OFFSET ?", search, search, most, first)
        return count, [ProblemRow(**row) for row in rows]

    def problem(self, problem: str) -> ProblemRow | None:
        rows = self._rows(f"{PROBLEM} WHERE id = ? AND attempts > 0", problem)
        return ProblemRow(**rows[0]) if rows else None

    def pass_rates(self, problem: str) -> list[PassRate]:
        rows = self._rows(
            f"""SELECT version, count(*) AS attempts, avg(reward >= {FULL_REWARD}) AS pass_rate, avg(reward) AS reward
            FROM groups JOIN trajectories ON group_id = id WHERE problem = ? GROUP BY version ORDER BY version""",
            problem,
        )
        return [PassRate(**row) for row in rows]

    def reasons(self, problem: str, most: int) -> dict[str, int]:
        rows = self._rows("SELECT reason, count FROM reasons WHERE problem = ? ORDER BY count DESC LIMIT ?", problem, most)
        return {row["reason"]: row["count"] for row in rows}

    def groups_of(self, problem: str, most: int) -> list[GroupRow]:
        """The newest first."""
        return [
            GroupRow(**row) for row in self._rows(f"{GROUP} WHERE problem = ? ORDER BY version DESC, id LIMIT ?", problem, most)
        ]

    def groups_in(self, step: int, first: int, most: int) -> list[GroupRow]:
        rows = self._rows(f"{GROUP} WHERE step = ? ORDER BY id LIMIT ? OFFSET ?", step, most, first)
        return [GroupRow(**row) for row in rows]

    def group(self, index: int) -> GroupRow | None:
        rows = self._rows(f"{GROUP} WHERE id = ?", index)
        return GroupRow(**rows[0]) if rows else None

    def steps(self) -> list[int]:
        """The steps whose batches have been seen."""
        return [row["step"] for row in self._rows("SELECT DISTINCT step FROM groups WHERE step IS NOT NULL ORDER BY step")]

    def _rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        with self._lock:
            cursor = self._db.execute(query, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _apply(self, change: Change) -> None:
        match change:
            case Extended(group, number, segment):
                self._tokens[group, number] = self._tokens.get((group, number), 0) + len(segment.tokens)
            case Restarted(group, number):
                self._tokens.pop((group, number), None)
            case Graded(group, number, verdict):
                self._graded(group, number, verdict)
            case Admitted():
                self._admitted(change)
            case Dropped(group=group, kind=kind, reason=reason):
                self._db.execute("UPDATE groups SET dropped = ? WHERE id = ?", (storable(reason or kind.value), group))
                self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] != group}
            case Taken(step=step, groups=groups):
                trained = [(step + 1, account.group) for account in groups]
                self._db.executemany("UPDATE groups SET step = ? WHERE id = ?", trained)

    def _admitted(self, change: Admitted) -> None:
        prompt = change.prompt
        self._db.execute("INSERT OR IGNORE INTO problems (id, text) VALUES (?, ?)", (storable(prompt.id), storable(prompt.text)))
        self._db.execute(
            "INSERT OR REPLACE INTO groups (id, problem, version, eval_id, completions) VALUES (?, ?, ?, ?, ?)",
            (change.group, storable(prompt.id), change.version, change.eval_id, change.completions),
        )

    def _graded(self, group: int, number: int, verdict: Verdict) -> None:
        (problem,) = self._db.execute("SELECT problem FROM groups WHERE id = ?", (group,)).fetchone()
        self.trajectories += 1
        tokens = self._tokens.pop((group, number), 0)
        values = {"passed": verdict.reward >= FULL_REWARD, "reward": verdict.reward, "tokens": tokens}
        self._db.execute(GRADED, {**values, "group": group, "number": number, "problem": problem})
        self._db.execute("INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?)", (group, number, verdict.reward, tokens))
        self._db.execute("UPDATE groups SET graded = graded + 1, rewards = rewards + ? WHERE id = ?", (verdict.reward, group))
        if verdict.reason:
            self._db.execute(
                "INSERT INTO reasons VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
                (problem, storable(verdict.reason)),
            )


def storable(text: str) -> str:
    """SQLite and JSON take no lone surrogate, and a record may hold one."""
    return text.encode("utf-8", "replace").decode()
