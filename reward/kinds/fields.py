"""Reading the fields of a task. Each function raises TaskError with the place of what is wrong."""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from reward.kinds.endpoint import Endpoint
from reward.kinds.kind import TaskError

ENDPOINT = ("url", "token_env", "timeout_s")
LONGEST_TIMEOUT_S = 3600.0
MOST = 1e9  # for any limit: no run takes so many seconds, and no host has so many MiB
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def refuse_unknown(data: Mapping[str, Any], *known: str) -> None:
    fields = {"kind", *known}
    if unknown := sorted(set(data) - fields):
        raise TaskError(f"task.{unknown[0]}: no such field in a {data['kind']!r} task: it has {', '.join(sorted(fields))}")


def read_text(value: object, where: str) -> str:
    """A string that a program can read or print."""
    if not isinstance(value, str):
        raise TaskError(f"{where}: must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair at position {error.start}"
        raise TaskError(f"{where}: holds {half}, which is no character: mend the text") from None
    return value


def read_positive(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        raise TaskError(f"task.{name}: must be a number above 0, got {value!r:.50} (at most {MOST:g})")
    return float(value)


def read_count(value: object, name: str, *, at_least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise TaskError(f"task.{name}: must be a whole number of at least {at_least}, got {value!r:.80}")
    return value


def read_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TaskError(f"task.{name}: must be true or false, got {value!r:.80}")
    return value


def read_endpoint(data: Mapping[str, Any], *, path: str = "", batch: int = 0, timeout_s: float = 60.0) -> Endpoint:
    """The endpoint that a task names, with `path` behind its URL:

    {"url": "http://127.0.0.1:9000/score", "token_env": "SCORE_TOKEN", "timeout_s": 60}
    """
    url, token_env = data.get("url"), data.get("token_env", "")
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise TaskError(f"task.url: {url!r:.80} must be a URL such as http://127.0.0.1:9000/score")
    if parts.username or parts.password:
        raise TaskError(
            "task.url: it holds a password, which would stand in every log: name an environment variable in token_env"
        )
    if not isinstance(token_env, str) or (token_env and not VARIABLE.fullmatch(token_env)):
        raise TaskError(f"task.token_env: {token_env!r:.80} must be the name of an environment variable")
    if token_env and not os.environ.get(token_env):
        raise TaskError(f"task.token_env: the environment variable {token_env} is not set here: export it before the launch")
    return Endpoint(
        url=f"{url}".rstrip("/") + path if path else f"{url}",
        token_env=token_env,
        timeout_s=read_timeout(data, timeout_s),
        batch=batch,
    )


def read_timeout(data: Mapping[str, Any], usual_s: float) -> float:
    """How long one request may take."""
    timeout = data.get("timeout_s", usual_s)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST_TIMEOUT_S:
        raise TaskError(f"task.timeout_s: must be a number of seconds up to {LONGEST_TIMEOUT_S:g}, got {timeout!r:.80}")
    return float(timeout)
