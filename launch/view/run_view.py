"""A run that is looked at: follows its files in the background, and answers the questions of the pages. It only reads."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.compose.run_folder import LEDGER, METRICS
from launch.report.metrics_file import read_metrics
from launch.view.group import GroupPage, Recorded, TokenPage, group_page, recorded, token_page
from launch.view.index import GroupRow, Index, PassRate, ProblemRow
from launch.view.overview import Overview, overview
from launch.view.token_text import token_text
from rollout.ledger.following import FollowedLedger, FollowError

POLL_S = 1.0
SLICE = 500  # changes that are read and indexed at once: a page waits at most for one slice
MOST_GROUPS, MOST_REASONS = 200, 20
LONGEST_TEXT = 20_000  # characters of a completion beside others; the page of its tokens shows all of it


class NotThere(LookupError):
    """What a page asks for does not exist, or exists no more. The message says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """How far the ledger has been read."""

    news: int  # grows whenever a file of the run has changed
    trajectories: int  # graded ones that have been seen
    steps: Sequence[int]  # whose batches have been seen
    problem: str  # why the ledger cannot be read; "" if it can


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemPage:
    row: ProblemRow
    pass_rates: Sequence[PassRate]
    reasons: dict[str, int]
    groups: Sequence[GroupRow]  # the newest


@dataclass(frozen=True, kw_only=True, slots=True)
class Problems:
    count: int
    first: int
    rows: Sequence[ProblemRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAnswer:
    row: GroupRow
    page: GroupPage


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAnswer:
    row: GroupRow
    page: TokenPage


class RunView:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.news = 0
        self._ledger = FollowedLedger(run_dir / LEDGER)
        self._inode = 0
        self._index = Index()
        self._metrics_time = 0
        self._problem = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="follow")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def catch_up(self) -> None:
        """Reads everything that is new."""
        path = self.run_dir / METRICS
        written = path.stat().st_mtime_ns if path.is_file() else 0
        if written != self._metrics_time:
            self._metrics_time = written
            self.news += 1
        try:
            self._read_ledger()
            problem = ""
        except FollowError as error:
            problem = str(error)
        if problem != self._problem:
            self._problem = problem
            self.news += 1

    def following(self) -> Following:
        index = self._index
        return Following(news=self.news, trajectories=index.trajectories, steps=index.steps(), problem=self._problem)

    def overview(self) -> Overview:
        return overview(self.run_dir, read_metrics(self.run_dir))

    def problems(self, *, search: str, sort: str, descending: bool, first: int, most: int) -> Problems:
        count, rows = self._index.problems(search=search, sort=sort, descending=descending, first=first, most=most)
        return Problems(count=count, first=first, rows=rows)

    def problem(self, problem: str) -> ProblemPage:
        row = self._index.problem(problem)
        if row is None:
            raise NotThere(f"no completion of problem {problem!r} has been graded yet")
        return ProblemPage(
            row=row,
            pass_rates=self._index.pass_rates(problem),
            reasons=self._index.reasons(problem, MOST_REASONS),
            groups=self._index.groups_of(problem, MOST_GROUPS),
        )

    def groups(self, step: int) -> list[GroupRow]:
        return self._index.groups_in(step, 0, MOST_GROUPS)

    def group(self, index: int) -> GroupAnswer:
        row, group = self._recorded(index)
        return GroupAnswer(row=row, page=group_page(group, token_text(self.run_dir), LONGEST_TEXT))

    def tokens(self, index: int, number: int) -> TokenAnswer:
        row, group = self._recorded(index)
        if not 0 <= number < len(group.attempts):
            raise NotThere(f"group {index} has no completion {number}; they are 0 to {len(group.attempts) - 1}")
        trained_at = None if row.step is None else row.step - 1  # step n takes the weights from version n - 1 to n
        return TokenAnswer(row=row, page=token_page(group, number, trained_at, token_text(self.run_dir)))

    def _recorded(self, index: int) -> tuple[GroupRow, Recorded]:
        row, group = self._index.group(index), recorded(self._ledger.group(index))
        if row is None or group is None:
            raise NotThere(f"the ledger holds no group {index}: it forgets batches that a checkpoint covers, and dropped groups")
        return row, group

    def _follow(self) -> None:
        while not self._closing.is_set():
            self.catch_up()
            self._closing.wait(POLL_S)

    def _read_ledger(self) -> None:
        inode = self._ledger.inode()
        if inode != self._inode or self._ledger.last() < self._index.seq:  # another ledger has taken its place
            self._inode, self._index = inode, Index()
            self.news += 1
        while not self._closing.is_set() and (changes := self._ledger.after(self._index.seq, SLICE)):
            self._index.add(changes)
            self.news += 1
