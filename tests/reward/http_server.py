"""An HTTP server in a thread of the test, which answers as the test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]  # status; an object to send as JSON, or bytes to send as they are


class Server:
    """Its `reply` may be changed at any time. `requests` holds the bodies that arrived, `headers` those of the latest."""

    def __init__(self, reply: Callable[[Any], Reply], port: int = 0) -> None:
        self.reply = reply
        self.requests: list[Any] = []
        self.headers: dict[str, str] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                server.headers = dict(self.headers)
                status, answer = server.reply(body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                try:
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/score"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def serving(reply: Callable[[Any], Reply], port: int = 0) -> Iterator[Server]:
    server = Server(reply, port)
    try:
        yield server
    finally:
        server.close()


def scores(of: Callable[[Any], Any]) -> Callable[[Any], Reply]:
    """Answers each item of a batch by a function of it."""
    return lambda body: (200, {"items": [of(item) for item in body["items"]]})
