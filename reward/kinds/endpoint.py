"""A service that a reward asks."""

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit


class ContractError(Exception):
    """A service has answered, but not as its contract says. The message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a service is asked, by POST with JSON."""

    url: str  # begins with "/" on the server of the run's own judge model
    token_env: str = ""  # the environment variable that holds the bearer token; "": none is sent
    timeout_s: float = 60.0  # how long one request may take
    batch: int = 0  # most items in one request, as {"items": […]}, answered likewise; 0: the item itself is the request

    @property
    def is_own(self) -> bool:
        """Whether it is the judge model that the run itself serves."""
        return self.url.startswith("/")

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")

    def __str__(self) -> str:
        return "the run's judge model" if self.is_own else self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    """The server of the judge model that the run itself serves."""

    address: Callable[[], str]  # where it listens now; raises OSError while it does not
    api_key: str
