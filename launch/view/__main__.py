"""Serves a page about a run, while it goes or afterwards, on this machine only.

python -m launch.view outputs/NAME [--port 8501]

The page only reads. From another machine: ssh -L 8501:127.0.0.1:8501 HOST, then the printed address.
"""

import argparse
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import uvicorn

from conf.compose.run_folder import CONFIG
from launch.view.run_view import RunView
from launch.view.server import application

LOOPBACK = "127.0.0.1"
CLOSE_S = 1  # a page that is open keeps its connection for events


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="launch.view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--port", type=int, default=0, help="by default any free port")
    options = parser.parse_args(arguments)
    if not (options.run / CONFIG).is_file():
        print(f"launch.view: {options.run} is not the folder of a run: it holds no {CONFIG}", file=sys.stderr)
        return 2
    with closing(socket.socket()) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((LOOPBACK, options.port))
        except (OSError, OverflowError) as error:
            print(f"launch.view: cannot listen at {LOOPBACK}:{options.port}: {error}; choose another --port", file=sys.stderr)
            return 2
        _serve(options.run, door)
    return 0


def _serve(run_dir: Path, door: socket.socket) -> None:
    """Until Ctrl-C."""
    token = secrets.token_urlsafe(24)
    view = RunView(run_dir)
    app = application(view, token)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=CLOSE_S)
    print(f"http://{LOOPBACK}:{door.getsockname()[1]}/?token={token}", flush=True)
    view.start()
    try:
        uvicorn.Server(config).run(sockets=[door])
    finally:
        view.close()


if __name__ == "__main__":
    sys.exit(main())
