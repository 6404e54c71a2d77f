"""The queue server: one process that hosts a run's ledger.

    python -m rollout.queue --run outputs/<run> --bind tcp://host:port

It reads the run's configuration, rebuilds the ledger from `ledger.db`, and serves until it is told to end (SIGTERM: exit
code 0). Killed and started again on the same run, it goes on with everything that it ever acknowledged.
"""

import argparse
import gc
import logging
import signal
import socket
import sys
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from conf.compose.load import read_run
from conf.compose.run_folder import LEDGER
from conf.schema import ConfigError, RunConfig
from conf.user_code import load
from reward.readers.run_problems import files_of, run_problems
from rollout.exit_codes import CANNOT_START, NOT_NOW
from rollout.ledger.journal import Journal, JournalError, JournalUnavailable
from rollout.ledger.ledger import Ledger
from rollout.ledger.rules import Rules, RulesError
from rollout.prompts.cache import RunPrompts, run_prompts
from rollout.prompts.problems import ProblemError
from rollout.prompts.stream import PromptStream
from rollout.queue.keys import KeysError, RunKeys
from rollout.queue.server import LONGEST_MESSAGE_BYTES, QueueServer

log = logging.getLogger("queue")
TURN_S = 0.2  # longest time between two checks of leases and deadlines
MESSAGES_A_TURN = 256  # at most this many messages share one commit of the journal
COLLECT = (50_000, 20, 50)  # gc's thresholds: a batch is some hundred thousand records, and they make no cycles
NOW, MORE_NOW = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
LARGE_BYTES = 1 << 22  # an answer above that is not copied to be sent
LINGER_S = 1.0  # to send the last answers when ending


class StartError(RuntimeError):
    """The server cannot start; the message says what to do."""


class PortTaken(StartError):
    """Another program has the port, or a server of this run that has not ended yet."""


class Door:
    """The server's socket. Only a client with the run's key gets through the handshake."""

    def __init__(self, endpoint: str, keys: RunKeys) -> None:
        self._context = zmq.Context()
        self._guard = self._context.socket(zmq.REP)  # ZeroMQ asks it about every handshake (ZAP, RFC 27)
        self._guard.bind("inproc://zeromq.zap.01")
        self._allowed = z85.decode(keys.client_public)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, int(1000 * LINGER_S))
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * LONGEST_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server_secret.encode()
        self._socket.zap_domain = b"kestrel"
        try:
            self._socket.bind(numeric(endpoint))
        except zmq.ZMQError as error:
            kind = PortTaken if error.errno == zmq.EADDRINUSE else StartError
            raise kind(f"cannot listen at {endpoint}: {error.strerror}; choose another port, or end what uses it") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._guard, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[tuple[bytes, bytes]]:
        """The messages that have arrived, with their routes; none if nothing comes within `wait_s`."""
        ready = dict(self._poller.poll(int(1000 * wait_s)))
        if self._guard in ready:
            self._admit()
        messages: list[tuple[bytes, bytes]] = []
        while self._socket in ready and len(messages) < MESSAGES_A_TURN:
            try:
                route = self._socket.recv(NOW)
            except zmq.Again:
                break
            frame = self._socket.recv(NOW, copy=False)
            data = frame.bytes
            while frame.more:
                frame = self._socket.recv(NOW, copy=False)
                data += frame.bytes
            messages.append((route, data))
        return messages

    def send(self, route: bytes, data: bytes) -> None:
        """An answer to a client that is gone is dropped."""
        self._socket.send(route, MORE_NOW)
        self._socket.send(data, NOW, copy=len(data) < LARGE_BYTES)

    def close(self) -> None:
        self._socket.close()
        self._guard.close()
        self._context.term()

    def _admit(self) -> None:
        version, request_id, _domain, _address, _identity, mechanism, *credentials = self._guard.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._allowed]
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._guard.send_multipart([version, request_id, code, text, b"", b""])


def numeric(endpoint: str) -> str:
    """ZeroMQ binds to addresses, not to names of hosts."""
    parts = urlsplit(endpoint)
    host, _, port = parts.netloc.rpartition(":")
    if parts.scheme != "tcp" or not host or not (port.isdigit() or port == "*"):
        raise StartError(f"--bind {endpoint!r}: expected tcp://host:port")
    if host == "*":
        return endpoint
    try:
        return f"tcp://{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise StartError(f"--bind {endpoint!r}: the host {host!r} is not known: {error}") from error


def read_prompts(config: RunConfig, run: Path) -> RunPrompts:
    """The prompts of the problems that `data` names. Raises ProblemError, ConfigError."""
    name = config.data.reader
    reader = load(name, run, setting="data.reader") if name else None
    return run_prompts(config, run, lambda: run_problems(config, reader), files_of(config.data))


def open_server(config: RunConfig, run: Path, journal: Journal, rules: Rules) -> QueueServer:
    """The server with everything that is on disk. Raises ProblemError, JournalError."""
    prompts = read_prompts(config, run)
    stream = PromptStream(prompts.train, config.data.seed, config.data.weights)
    journal.belong_to(stream.digest)
    began = time.monotonic()
    ledger = Ledger.replay(rules, journal.read())
    log.info("%s replayed in %.1f s: version %d", journal.path, time.monotonic() - began, ledger.version)
    return QueueServer(
        ledger=ledger,
        journal=journal,
        stream=stream,
        evals={"heldout": prompts.heldout},
        lease_s=config.rollout.lease_s,
        stall_s=config.trainer.stall_s,
        now=time.monotonic(),
    )


class _Signals:
    """Set by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.ending = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, _number: int, _frame: object) -> None:
        self.ending = True


def serve(server: QueueServer, door: Door, signals: _Signals) -> None:
    """Runs turns until a signal ends it: reads messages, decides, commits once, answers. Raises JournalError."""
    while not signals.ending:
        for route, data in door.receive(TURN_S):
            server.receive(route, data, time.monotonic())
        for route, data in server.settle(time.monotonic()):
            door.send(route, data)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rollout.queue", description="The queue server of a run.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with config.yaml and keys/")
    parser.add_argument("--bind", required=True, help="where to listen, as tcp://host:port")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stdout)
    signals = _Signals()
    gc.disable()  # while the journal is replayed, which makes records and no cycles
    try:
        config = read_run(options.run)
        rules = Rules.of(config)
        with (
            closing(Door(options.bind, RunKeys.load(options.run))) as door,
            closing(Journal(options.run / LEDGER, rules)) as journal,
        ):
            server = open_server(config, options.run, journal, rules)
            gc.freeze()  # what was replayed stays; a full collection would look at all of it
            gc.set_threshold(*COLLECT)
            gc.enable()
            log.info("listens at %s", door.endpoint)
            serve(server, door, signals)
    except (JournalUnavailable, PortTaken) as error:
        log.error("%s", error)  # a log on a full disk raises nothing, so the exit code stays
        return NOT_NOW
    except (ConfigError, KeysError, RulesError, StartError, ProblemError, JournalError) as error:
        print(f"queue server: {error}", file=sys.stderr)
        return CANNOT_START
    log.info("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
