"""Reads a source: recognises its format, makes problems of its rows, and counts the rows that it refuses."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from reward.grade import Reward, printable
from reward.readers.draft import Draft, Options, RowRefused
from reward.readers.files import Rows
from reward.readers.formats import OWN, Format, recognised
from reward.readers.sources import Reader, parts
from reward.task import Defaults, TaskError, read_reward
from rollout.prompts.problems import Problem, ProblemError, problem_of

SHOWN_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradable:
    """A problem whose task was read."""

    problem: Problem
    draft: Draft
    rewards: Sequence[Reward]  # one for each of the draft's tasks; the problem has the first task


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    where: str
    reason: str  # rows that lack the same have the same reason
    message: str  # the reason, with what concerns this row alone
    in_own_format: bool

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.message}")


@dataclass(slots=True, kw_only=True)
class Reading:
    """What was found in a source so far."""

    source: str
    options: Options = field(default_factory=Options)
    reader: Reader | None = None
    most_rows: int | None = None  # at most so many rows of each file are read
    strict: bool = False  # a row of this project's own format that is refused is an error: somebody wrote it for this run
    formats: Counter[str] = field(default_factory=Counter)  # the problems of each format
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.formats.total() + len(self.refusals)

    def problems(self, places: dict[str, str]) -> Iterator[Gradable]:
        """The problems. `places` holds where an id was used. Raises ProblemError."""
        for rows in parts(self.source, self.reader):
            yield from self._problems(islice(rows, self.most_rows), places)

    def _problems(self, rows: Rows, places: dict[str, str]) -> Iterator[Gradable]:
        found: Format | None = None
        name = ""
        for where, row in rows:
            try:
                if not isinstance(row, Mapping):
                    raise RowRefused(f"a problem is a JSON object, got {type(row).__name__}")
                found = found or recognised(row, self.options, where)
                name = name or found.seen_in(row)
                gradable = _gradable(found.draft(row, self.options), where, self.options.defaults)
                problem_id = gradable.problem.id
                if first := places.get(problem_id):
                    raise RowRefused("an id that another row has", message=f"id {problem_id!r} was used before, at {first}")
            except RowRefused as error:
                refusal = Refusal(where=where, reason=error.reason, message=str(error), in_own_format=found in (OWN, None))
                if self.strict and refusal.in_own_format:
                    raise ProblemError(str(refusal)) from error
                self.refusals.append(refusal)
                continue
            places[problem_id] = where
            self.formats[name] += 1
            yield gradable

    def __str__(self) -> str:
        """One line: what was recognised, how many rows were refused, and the commonest reasons."""
        found = (f"{_counted(count, 'problem')} recognised as {name}" for name, count in self.formats.items())
        line = f"{self.source}: {', '.join(found) or 'no problem'}"
        if not self.refusals:
            return line
        reasons = Counter(refusal.reason for refusal in self.refusals)
        shown = "; ".join(f"{count:,}: {reason}" for reason, count in reasons.most_common(SHOWN_REASONS))
        more = "; others" if len(reasons) > SHOWN_REASONS else ""
        return f"{line}; {_counted(len(self.refusals), 'row')} refused ({shown}{more}), the first at {self.refusals[0].where}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _gradable(draft: Draft, where: str, defaults: Defaults) -> Gradable:
    """Raises RowRefused."""
    line = draft.line(draft.tasks[0])
    if line["id"] is None:
        line["id"] = where
    try:
        problem = problem_of(line, where)
    except ProblemError as error:
        raise RowRefused("a field that no problem can have", message=str(error).removeprefix(f"{where}: ")) from error
    try:
        rewards = [read_reward(task, defaults=defaults) for task in (problem.task, *draft.tasks[1:])]
    except TaskError as error:
        raise RowRefused("a task that cannot be graded", message=f"problem {problem.id!r} cannot be graded: {error}") from error
    return Gradable(problem=problem, draft=draft, rewards=rewards)
