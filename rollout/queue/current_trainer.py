"""Allows one trainer at a time: after a network stall, requests of a killed trainer may arrive when the next one has begun.

A trainer begins with `Rewind`. From then on it is the current trainer, and every other one is refused. A request that is older
than one that the same trainer has already made is a late copy. It must do nothing, because its sender has its answer.
"""

from rollout.ledger.ledger import LedgerError


class LateCopy(Exception):
    """A copy of a request that was answered before; nobody waits for it."""


class CurrentTrainer:
    """Kept in memory only: the connections over which late requests come die with the server."""

    def __init__(self) -> None:
        self._client = ""
        self._newest_id = 0
        self._gone: set[str] = set()

    def check(self, client: str, request_id: int, *, begins: bool) -> None:
        """Raises LedgerError for a trainer that another one has followed, and LateCopy for a late copy."""
        if client in self._gone:
            raise LedgerError(f"{client} is not the trainer of this run any more: {self._client} has begun after it")
        if client == self._client:
            if request_id < self._newest_id:
                raise LateCopy
        elif begins:
            if self._client:
                self._gone.add(self._client)
            self._client = client
        elif self._client:
            raise LedgerError(f"{client} has not begun with `rewind`, and {self._client} is the trainer of this run")
        self._newest_id = request_id
