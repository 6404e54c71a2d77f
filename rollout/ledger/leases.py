"""Which process works on which trajectory. Leases are kept in memory only, and heartbeats restore them after a restart."""

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rollout.ledger.records import Position
from rollout.ledger.rules import Rules
from rollout.ledger.state import LedgerState, TrajectoryState

Key = tuple[int, int]  # (group, trajectory)
_new = tuple.__new__  # takes half the time of the named tuple's own constructor


class Lease(NamedTuple):
    position: Position
    holder: str
    max_new_tokens: int  # 0 for a lease to grade


class Leases:
    """Leases on open trajectories. A lease is to generate the next segment, or to grade.

    Both kinds are granted from heaps, oldest group first. An entry is checked when it reaches the top, because removing outdated
    entries from the middle of a heap would be slow.
    """

    def __init__(self, rules: Rules, state: LedgerState) -> None:
        self._cap_tokens, self._segment_tokens = rules.max_completion_tokens, rules.segment_tokens
        self._state = state
        self._leases: dict[Key, Lease] = {}
        self._by_holder: dict[str, dict[Key, Lease]] = {}  # the same leases
        self._to_generate: list[Key] = []
        self._to_grade: list[Key] = []
        self._homes: dict[Key, str] = {}  # the holder that keeps the state of an episode
        self._to_grade_at: dict[str, list[Key]] = {}  # by holder: the episodes whose state it keeps

    def grant_segments(self, holder: str, count: int) -> list[Lease]:
        return self._grant(self._to_generate, holder, count, grading=False)

    def grant_grading(self, holder: str, count: int) -> list[Lease]:
        """The holder that keeps the state of an episode gets it again. Nobody else gets it while this holder is there."""
        own = self._to_grade_at.get(holder)
        granted = self._grant(own, holder, count, grading=True) if own else []
        return granted + self._grant(self._to_grade, holder, count - len(granted), grading=True)

    def stay(self, key: Key, holder: str) -> None:
        """The holder keeps the state of this episode."""
        self._homes[key] = holder

    def leave(self, holder: str) -> None:
        """The holder is gone, and with it the state of its episodes."""
        for key in [key for key, home in self._homes.items() if home == holder]:
            del self._homes[key]
        for key in self._to_grade_at.pop(holder, []):
            heapq.heappush(self._to_grade, key)

    def adopt(self, holder: str, position: Position) -> bool:
        """Returns whether the holder may keep this lease: its position is the current one, and nobody else has the lease."""
        trajectory = self.open_trajectory(position.group, position.trajectory)
        if trajectory is None or trajectory.verdict is not None:
            return False
        if (trajectory.length, trajectory.attempt) != (position.offset, position.attempt):
            return False
        key = (position.group, position.trajectory)
        if key not in self._leases:
            self._begin(key, holder, trajectory)
        return self._leases[key].holder == holder

    def held(self, holder: str) -> list[Position]:
        return [lease.position for lease in self._by_holder.get(holder, {}).values()]

    def counts(self) -> Counter[str]:
        return Counter({holder: len(leases) for holder, leases in self._by_holder.items()})

    @property
    def to_generate(self) -> bool:
        """False if there is no segment to lease. If True, there may be one."""
        return bool(self._to_generate)

    def to_grade(self, holder: str) -> bool:
        return bool(self._to_grade or self._to_grade_at.get(holder))

    def release(self, holder: str, position: Position) -> bool:
        key = (position.group, position.trajectory)
        lease = self._leases.get(key)
        if lease is None or lease.holder != holder or lease.position != position:
            return False
        self.moved(key)
        return True

    def begin(self, group: int, trajectories: int) -> None:
        """Makes the trajectories of a new group available to generate."""
        for i in range(trajectories):
            heapq.heappush(self._to_generate, (group, i))

    def moved(self, key: Key) -> None:
        """Ends the lease on a trajectory that was extended or given back, and makes it available again."""
        self.over(key)
        group = self._state.groups.get(key[0])
        if group is not None:
            heapq.heappush(self._to_generate if group.trajectories[key[1]].finish is None else self._grading_heap(key), key)

    def graded(self, key: Key) -> None:
        self.over(key)
        self._homes.pop(key, None)

    def over(self, key: Key) -> None:
        """Ends the lease on a trajectory. It is not made available again."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            held = self._by_holder[lease.holder]
            del held[key]
            if not held:
                del self._by_holder[lease.holder]

    def end(self, groups: Iterable[int]) -> None:
        """Ends all leases on these groups, which were dropped or forgotten."""
        gone = set(groups)
        for key in [key for key in self._leases if key[0] in gone]:
            self.over(key)
        for key in [key for key in self._homes if key[0] in gone]:
            del self._homes[key]

    def reconsider(self) -> None:
        """Makes trajectories available that waited for a version which is published now."""
        self._to_generate = [
            key
            for index, group in self._state.groups.items()
            if group.ungraded and not group.dropped
            for i, t in enumerate(group.trajectories)
            if t.finish is None and (key := (index, i)) not in self._leases
        ]
        heapq.heapify(self._to_generate)

    def open_trajectory(self, group: int, trajectory: int) -> TrajectoryState | None:
        found = self._state.groups.get(group)
        if found is None or found.dropped or not 0 <= trajectory < len(found.trajectories):
            return None
        return found.trajectories[trajectory]

    def phases(self, group: int) -> Counter[str]:
        """The number of a group's trajectories in each phase: to_generate, generating, to_grade, grading, graded."""
        return Counter(self._phase((group, i), t) for i, t in enumerate(self._state.groups[group].trajectories))

    def holders(self, group: int) -> set[str]:
        """The holders of leases on trajectories of a group."""
        count = len(self._state.groups[group].trajectories)
        return {lease.holder for i in range(count) if (lease := self._leases.get((group, i))) is not None}

    def _grading_heap(self, key: Key) -> list[Key]:
        home = self._homes.get(key)
        return self._to_grade if home is None else self._to_grade_at.setdefault(home, [])

    def _grant(self, heap: list[Key], holder: str, count: int, *, grading: bool) -> list[Lease]:
        granted: list[Lease] = []
        groups, leases, version = self._state.groups, self._leases, self._state.version
        while heap and len(granted) < count:
            key = heapq.heappop(heap)
            group = groups.get(key[0])
            if group is None or group.dropped or key in leases:
                continue
            trajectory = group.trajectories[key[1]]
            if grading:
                if trajectory.verdict is not None or trajectory.finish is None or self._homes.get(key, holder) != holder:
                    continue
            elif trajectory.finish is not None or trajectory.floor > version:
                continue  # after a rewind its version must be published again first; `reconsider` then restores it
            granted.append(self._begin(key, holder, trajectory))
        return granted

    def _begin(self, key: Key, holder: str, trajectory: TrajectoryState) -> Lease:
        length, new_tokens = trajectory.length, 0
        if trajectory.finish is None:
            new_tokens = self._cap_tokens - length
            if new_tokens > self._segment_tokens:
                new_tokens = self._segment_tokens
        lease = _new(Lease, (_new(Position, (key[0], key[1], length, trajectory.attempt)), holder, new_tokens))
        self._leases[key] = lease
        held = self._by_holder.get(holder)
        if held is None:
            self._by_holder[holder] = {key: lease}
        else:
            held[key] = lease
        return lease

    def _phase(self, key: Key, trajectory: TrajectoryState) -> str:
        if trajectory.verdict is not None:
            return "graded"
        if trajectory.finish is not None:
            return "grading" if key in self._leases else "to_grade"
        return "generating" if key in self._leases else "to_generate"
