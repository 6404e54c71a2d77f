"""A service outside of the run that a reward asks: where it is, and how a task names it.

{"url": "http://127.0.0.1:9000/score", "token_env": "SCORE_TOKEN", "timeout_s": 60}
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

FIELDS = ("url", "token_env", "timeout_s")
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
LONGEST_TIMEOUT_S = 3600.0


class ContractError(Exception):
    """A service has answered, but not as its contract says. The message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a service is asked, by POST with JSON."""

    url: str
    token_env: str = ""  # the environment variable that holds the bearer token; "": none is sent
    timeout_s: float = 60.0  # of one request
    batch: int = 0  # most items in one request, as {"items": […]}, answered likewise; 0: the item itself is the request

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")


def read_endpoint(data: Mapping[str, Any], *, path: str = "", batch: int = 0, timeout_s: float = 60.0) -> Endpoint:
    """The endpoint that a task names, with `path` behind its URL. Raises ValueError, whose message starts with the field."""
    url, token_env = data.get("url"), data.get("token_env", "")
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: {url!r:.80} must be a URL such as http://127.0.0.1:9000/score")
    if parts.username or parts.password:
        raise ValueError("url: it holds a password, which would stand in every log: name an environment variable in token_env")
    if not isinstance(token_env, str) or (token_env and not VARIABLE.fullmatch(token_env)):
        raise ValueError(f"token_env: {token_env!r:.80} must be the name of an environment variable")
    if token_env and not os.environ.get(token_env):
        raise ValueError(f"token_env: the environment variable {token_env} is not set here: export it before the launch")
    timeout = data.get("timeout_s", timeout_s)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout_s: must be a number of seconds up to {LONGEST_TIMEOUT_S:g}, got {timeout!r:.80}")
    return Endpoint(
        url=f"{url}".rstrip("/") + path if path else f"{url}", token_env=token_env, timeout_s=float(timeout), batch=batch
    )
