"""A process that runs users' reward functions and environments, one call after another, as its judge says.

    python -m reward.kinds.functions.worker RUN SOCKET

What a function prints is dropped. A function that ends this process, or that the judge ends, costs its own call only.
"""

import asyncio
import inspect
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import ConfigError
from conf.user_code import load
from reward.jail.linux import die_with_parent
from reward.kinds.functions.episodes import Episodes
from reward.kinds.functions.frames import PROGRESS, Frames
from reward.kinds.functions.returned import BadReward, read_returned

GIVEN = ("prompt", "completion", "answer", "prefill", "metadata", "finish", "tokens")
ERROR_CHARACTERS = 400
MAIN = os.getpid()
EPISODE = "episode"  # what an environment is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A user's function or environment, and the names of what it wants to be given; or why it cannot be called."""

    function: Callable[..., Any] | None = None
    episodes: Episodes | None = None  # set if this process runs an environment
    wanted: frozenset[str] = frozenset()
    refused: str = ""

    def call(self, given: Mapping[str, Any]) -> Any:
        if self.function is None:
            raise BadReward(self.refused)
        return self.function(**{key: value for key, value in given.items() if key in self.wanted})


def main(run_dir: str, fd: str) -> None:
    die_with_parent(signal.SIGKILL)
    end = socket.socket(fileno=int(fd))
    os.register_at_fork(after_in_child=end.close)  # a child must not answer in place of its parent
    frames = Frames(end)
    loop = asyncio.new_event_loop()
    known: dict[str, Loaded] = {}
    while True:
        try:
            calls = frames.receive()
        except EOFError:
            return
        for name, given in calls:
            if name not in known:
                known[name] = loaded(name, Path(run_dir), loop)
                frames.send(sorted(known[name].wanted))
            answer = answer_of(known[name], given, loop, lambda: frames.send(PROGRESS))
            if os.getpid() != MAIN:
                os._exit(0)  # a child that the function has forked, and that has come back from it
            frames.send(answer)


def answer_of(
    loaded: Loaded, given: Mapping[str, Any], loop: asyncio.AbstractEventLoop, progress: Callable[[], None]
) -> dict[str, Any]:
    cpu_s = time.process_time()
    try:
        if loaded.episodes is not None:
            return asdict(loaded.episodes.answer(given[EPISODE], progress))
        returned = loaded.call(given)
        if inspect.isawaitable(returned):
            returned = loop.run_until_complete(_awaited(returned))
        return asdict(replace(read_returned(returned), cpu_s=time.process_time() - cpu_s))
    except BadReward as error:
        return {"error": str(error)[:ERROR_CHARACTERS]}
    except BaseException as error:  # noqa: BLE001 - also SystemExit and KeyboardInterrupt cost one call only
        return {"error": _told(error)[:ERROR_CHARACTERS]}


def loaded(name: str, run_dir: Path, loop: asyncio.AbstractEventLoop) -> Loaded:
    """A function or an environment that can be called, or why it cannot."""
    try:
        function = load(name, run_dir, setting="reward.functions")
        if isinstance(function, type):
            if missing := [method for method in ("start", "step") if not callable(getattr(function, method, None))]:
                return Loaded(refused=f"is a class without the method {missing[0]}, and an environment has start and step")
            return Loaded(episodes=Episodes(function, loop), wanted=frozenset([EPISODE]))
        parameters = inspect.signature(function).parameters.values()
    except (ConfigError, ValueError) as error:  # ValueError: a function without a signature
        return Loaded(refused=str(error))
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return Loaded(function=function, wanted=frozenset(GIVEN))
    by_name = [one for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if missing := [one.name for one in by_name if one.name not in GIVEN and one.default is one.empty]:
        return Loaded(refused=f"wants an argument {missing[0]!r}, but a reward function is given {', '.join(GIVEN)}")
    return Loaded(function=function, wanted=frozenset(one.name for one in by_name if one.name in GIVEN))


async def _awaited(returned: Any) -> Any:
    return await returned


def _told(error: BaseException) -> str:
    """The error, with the last place in the traceback."""
    said = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {said}" if frames else said


if __name__ == "__main__":
    main(*sys.argv[1:])
