"""The holders of leases and the engines that have sent heartbeats. It is kept in memory only: heartbeats rebuild it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rollout.ledger.records import EngineInfo, Position


@dataclass(slots=True, kw_only=True)
class Holder:
    role: str
    heard_s: float
    unclaimed: frozenset[Position] = frozenset()  # leases that its last heartbeat did not list
    sums: Mapping[str, float] = field(default_factory=dict)
    hungry_s: float | None = None  # since when it has asked for work and got none


class Roster:
    def __init__(self, lease_s: float) -> None:
        self.holders: dict[str, Holder] = {}
        self.condemned: dict[str, str] = {}  # engine id -> why
        self._lease_s = lease_s
        self._engines: dict[str, EngineInfo] = {}  # by name
        self._told: frozenset[str] = frozenset()  # ids that the trainer has seen in the fleet

    # Engines. A condemned one is not part of the fleet, until it comes back with another epoch.

    def register(self, engine: EngineInfo) -> bool:
        """Whether it is another engine than the one that had its name."""
        before = self._engines.get(engine.name)
        self._engines[engine.name] = engine
        return before is not None and before.id != engine.id

    def unregister(self, name: str) -> None:
        self._engines.pop(name, None)

    def condemn(self, engine_id: str, reason: str) -> str | None:
        """The name of the engine, if it is the one that has it."""
        name = engine_id.rpartition("@")[0] or engine_id
        engine = self._engines.get(name)
        if engine is None or engine_id not in (engine.id, name):
            return None
        self.condemned[engine.id] = reason
        return name

    def condemned_now(self) -> list[tuple[str, str]]:
        """Engines that must start again and have not yet, with the reason."""
        return [(e.id, self.condemned[e.id]) for e in self._engines.values() if e.id in self.condemned]

    def why_condemned(self, name: str) -> str:
        engine = self._engines.get(name)
        return self.condemned.get(engine.id, "") if engine else ""

    def engine_id(self, name: str) -> str:
        """The id of the engine that has this name now, or "" if it may not get leases."""
        engine = self._engines.get(name)
        return engine.id if engine is not None and engine.id not in self.condemned else ""

    def fleet(self, version: int, holding: Iterable[str]) -> list[EngineInfo]:
        engines = [e for e in self._engines.values() if e.id not in self.condemned]
        return [replace(e, version=version if e.id in holding else None) for e in engines]

    def tell(self) -> None:
        self._told = frozenset(e.id for e in self._engines.values())

    def newcomers(self, holding: Iterable[str]) -> bool:
        """Whether an engine without the published version is there that the trainer has not seen."""
        known = self._told.union(holding, self.condemned)
        return not known.issuperset(e.id for e in self._engines.values())

    # Holders.

    def heard(self, name: str, now: float, role: str = "") -> Holder:
        holder = self.holders.get(name)
        if holder is None:
            holder = self.holders[name] = Holder(role=role, heard_s=now)
        holder.heard_s = now
        holder.role = role or holder.role
        return holder

    def expired(self, now: float) -> list[str]:
        """Removes the holders that sent nothing for `lease_s`, with their engines, and returns their names."""
        gone = [name for name, holder in self.holders.items() if now - holder.heard_s > self._lease_s]
        for name in gone:
            del self.holders[name]
            self.unregister(name)
        return gone

    def pause(self, seconds: float) -> None:
        """Ignores this time when holders expire, because the server itself was stopped and could hear nobody."""
        for holder in self.holders.values():
            holder.heard_s += seconds
