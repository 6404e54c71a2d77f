"""The live environments of one process: objects of users' classes, which keep the state of their episodes."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reward.kinds.functions.returned import BadReward, Returned, read_answer

MOST_LIVE = 1024  # the environment that was used least recently makes place for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model did in one turn."""

    text: str  # what it wrote
    answer: str  # the same without reasoning; empty if the reasoning never ends
    turn: int  # 1, 2, ...
    last: bool  # no further turn may follow, so the environment must give a verdict
    finish: str  # stop, or length: the completion reached its cap


@dataclass(slots=True)
class _Live:
    environment: Any
    steps: int = 0
    returned: Returned | None = None  # by the last step


class Episodes:
    """The episodes of one environment class."""

    def __init__(self, kind: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._kind = kind
        self._loop = loop
        self._live: OrderedDict[str, _Live] = OrderedDict()

    def answer(self, given: Mapping[str, Any], progress: Callable[[], None]) -> Returned:
        """The answer to the last action. If the state of the episode is not here, the earlier actions are repeated first.

        progress: called before each call of the environment, whose deadline begins then.
        """
        cpu_s = time.process_time()
        key, actions = given["key"], [Action(**action) for action in given["actions"]]
        live = self._live.pop(key, None)  # an environment that fails is not used again
        if live is None or live.steps > len(actions):
            if len(actions) > 1 and not getattr(self._kind, "deterministic", True):
                return Returned(lost=True)
            progress()
            live = _Live(self._kind())
            self._run(live.environment.start(given["task"]))
        replayed: list[Sequence[Mapping[str, Any]]] = []
        if live.returned is not None and live.returned.messages is not None and live.steps < len(actions):
            replayed.append(live.returned.messages)
        for action in actions[live.steps :]:
            progress()
            live.returned = read_answer(self._run(live.environment.step(action)))
            live.steps += 1
            if live.steps < len(actions):
                if live.returned.messages is None:
                    return Returned(lost=True)  # it went on when these turns were played first
                replayed.append(live.returned.messages)
        if live.returned is None:
            raise BadReward("was asked about no action")
        if live.returned.messages is not None and key:
            self._live[key] = live
            if len(self._live) > MOST_LIVE:
                self._live.popitem(last=False)
        return replace(live.returned, replayed=replayed, cpu_s=time.process_time() - cpu_s)

    def _run(self, call: Any) -> Any:
        return self._loop.run_until_complete(_awaited(call)) if hasattr(call, "__await__") else call


async def _awaited(call: Any) -> Any:
    return await call
