"""A user's own reward service, in a thread of the test, whose mood changes: it dies, hangs, errs, or talks nonsense."""

import json
import threading
import time
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.chaos.words import NONSENSE, score

TIMEOUT_S = 1.0  # that a judge waits for an answer


class Mood(StrEnum):
    FAIR = "fair"
    DEAD = "dead"  # nobody listens
    LATE = "late"  # answers come when nobody waits for them any more
    ERRING = "erring"  # HTTP 503
    NONSENSE = "nonsense"  # 200, and no score


class ScoreService:
    def __init__(self, port: int) -> None:
        self._port = port
        self.mood = Mood.FAIR
        self._http: ThreadingHTTPServer | None = None
        self._listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/score"

    def change(self, mood: Mood) -> None:
        if mood is Mood.DEAD:
            self.close()
        elif self._http is None:
            self._listen()
        self.mood = mood

    def close(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def answer(self, items: list[dict[str, Any]]) -> tuple[int, Any]:
        mood = self.mood
        if mood is Mood.LATE:
            time.sleep(1.5 * TIMEOUT_S)
        if mood is Mood.ERRING:
            return 503, {}
        return 200, {"items": [NONSENSE if mood is Mood.NONSENSE else score(item["tokens"]) for item in items]}

    def _listen(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                status, answer = service.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"])
                if service.mood is Mood.DEAD:  # on a connection from before its death
                    self.close_connection = True
                    return
                body = json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the judge waits no longer, or was killed
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
