"""An example of a service that gives rewards: it prefers short answers that hold the row's answer.

python score_server.py 9000
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(item: dict[str, Any]) -> dict[str, Any]:
    text, expected = item["answer"] or "", str(item["data"]["expected"])
    found, brief = float(expected in text), 1 / (1 + len(text) / 1000)
    return {"reward": found * brief, "parts": {"found": found, "brief": brief}, "reason": "" if found else f"no {expected}"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        answer = json.dumps({"items": [score(item) for item in items]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
