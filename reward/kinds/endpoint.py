"""A service outside of the run that a reward asks."""

from dataclasses import dataclass
from urllib.parse import urlsplit


class ContractError(Exception):
    """A service has answered, but not as its contract says. The message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a service is asked, by POST with JSON."""

    url: str
    token_env: str = ""  # the environment variable that holds the bearer token; "": none is sent
    timeout_s: float = 60.0  # how long one request may take
    batch: int = 0  # most items in one request, as {"items": […]}, answered likewise; 0: the item itself is the request

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
