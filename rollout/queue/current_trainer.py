"""One trainer at a time: over a network that stalled, what a killed trainer had sent may arrive after the next one has begun.

`Rewind` takes the seat, and whoever had it before is refused from then on. A request of the trainer in the seat that is
older than one it has already made is a copy that was overtaken: it must do nothing, since its sender has been answered.
"""

from rollout.ledger.ledger import LedgerError


class Overtaken(Exception):
    """A copy of a request that was answered before; nobody waits for it."""


class Seat:
    """In memory: the connections that late requests come over die with the server."""

    def __init__(self) -> None:
        self._client = ""
        self._newest_id = 0
        self._gone: set[str] = set()

    def check(self, client: str, request_id: int, *, begins: bool) -> None:
        """Raises LedgerError for a trainer that another one has followed, and Overtaken."""
        if client in self._gone:
            raise LedgerError(f"{client} is not the trainer of this run any more: {self._client} has begun after it")
        if client == self._client:
            if request_id < self._newest_id:
                raise Overtaken
        elif begins:
            if self._client:
                self._gone.add(self._client)
            self._client = client
        elif self._client:
            raise LedgerError(f"{client} has not begun with `rewind`, and {self._client} is the trainer of this run")
        self._newest_id = request_id
