"""The HTTP side of the page: questions to a `RunView` as addresses, its answers as JSON, and an event when a run has news."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from launch.view.guard import Guard
from launch.view.index import SORTS
from launch.view.run_view import NotThere, RunView
from rollout.ledger.following import FollowError

PAGE = Path(__file__).parent / "page"
ROWS = 50
EVENT_S, KEEP_ALIVE_S = 0.5, 15.0


class BadQuestion(ValueError):
    """An address that no page asks for. The message says what is wrong."""


def application(view: RunView, token: str) -> Guard:
    app = Starlette(
        routes=[
            Route("/", lambda request: FileResponse(PAGE / "index.html")),
            Route("/api/following", _answer(lambda request: view.following())),
            Route("/api/overview", _answer(lambda request: view.overview())),
            Route("/api/problems", _answer(lambda request: _problems(view, request))),
            Route("/api/problem", _answer(lambda request: view.problem(request.query_params.get("id", "")))),
            Route("/api/groups", _answer(lambda request: view.groups(_number(request, "step")))),
            Route("/api/group", _answer(lambda request: view.group(_number(request, "group")))),
            Route("/api/tokens", _answer(lambda request: view.tokens(_number(request, "group"), _number(request, "number")))),
            Route("/api/events", lambda request: StreamingResponse(_events(view), media_type="text/event-stream")),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
    )
    return Guard(app, token)


def _answer(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Starlette calls it in a thread, so that a slow disk does not hold up other pages."""

    def respond(request: Request) -> Response:
        try:
            return _json(answer(request), 200)
        except NotThere as error:
            return _json({"error": str(error)}, 404)
        except BadQuestion as error:
            return _json({"error": str(error)}, 400)
        except FollowError as error:
            return _json({"error": str(error)}, 503)

    return respond


def _problems(view: RunView, request: Request) -> Any:
    asked = request.query_params
    sort = asked.get("sort", "pass_rate")
    if sort not in SORTS:
        raise BadQuestion(f"sort={sort}: must be one of {', '.join(SORTS)}")
    return view.problems(
        search=asked.get("search", ""),
        sort=sort,
        descending=asked.get("order") == "descending",
        first=_number(request, "first"),
        most=ROWS,
    )


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise BadQuestion(f"{name}={text}: must be a whole number")
    return int(text)


def _json(value: Any, status: int) -> Response:
    data = json.dumps(_plain(value), allow_nan=False).encode()
    return Response(data, status_code=status, media_type="application/json")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


async def _events(view: RunView) -> AsyncIterator[bytes]:
    """One event at once, and one whenever the run has news."""
    told, silent_s = -1, 0.0
    while True:
        if view.news != told:
            told, silent_s = view.news, 0.0
            yield f"data: {told}\n\n".encode()
        elif silent_s >= KEEP_ALIVE_S:
            silent_s = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(EVENT_S)
        silent_s += EVENT_S
