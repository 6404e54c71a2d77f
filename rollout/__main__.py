"""One rank of the rollout fleet: an SGLang server and the worker that keeps it busy, or the server of a teacher or judge model.

    torchrun --nproc-per-node N -m -- rollout --run outputs/x --queue tcp://host:port --engine-port 20000

Each rank takes the visible GPUs of its server, one after the other, and PORTS_PER_ENGINE ports. It ends with 0 when the run is
over or on SIGTERM, with 1 when it cannot go on, with CANNOT_START when trying again would not help: the reason is on standard
error and in the run's `logs/worker-<n>.log`, what the server says in `logs/engine-<n>.log`.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from conf.compose.load import read_run
from conf.compose.model_description import description_of
from conf.compose.run_folder import LOGS
from conf.schema import ConfigError, RunConfig
from rollout.engine_client import EngineError
from rollout.engine_process import Engine, EngineSettings
from rollout.exit_codes import CANNOT_START
from rollout.queue.client import AsyncQueueClient, QueueError
from rollout.queue.keys import KeysError, RunKeys
from rollout.servers import address_file, servers
from rollout.worker.frozen_engine import serve
from rollout.worker.teacher import Teacher, TeacherError
from rollout.worker.worker import CannotStart, Worker, WorkerError

PORTS_PER_ENGINE = 8  # the server's port and those that follow from it
WEIGHT_GROUP_SHARE = 1 / 4
"""An engine waits for a weight group for this share of a push's deadline. The trainer gives an attempt up after half of the
deadline, so the engine answers again before that."""


def main(argv: list[str] | None = None, launcher: tuple[str, ...] = ()) -> int:
    """`launcher` stands in for SGLang's server, in tests."""
    arguments = read_arguments(argv)
    number = arguments.first_engine + int(os.environ.get("RANK", "0"))
    try:
        config, keys = read_run(arguments.run), RunKeys.load(arguments.run)
        log_to(arguments.run / LOGS / f"worker-{number}.log")
        settings = engine_settings(config, keys, arguments, number)
        engine = Engine(replace(settings, launcher=launcher) if launcher else settings)
        server = servers(config)[number]
        run = keep_serving if server.frozen else work
        asyncio.run(run(server.name, config, engine, arguments.run, arguments.queue, keys))
    except (ConfigError, KeysError, WorkerError, QueueError, TeacherError, EngineError) as error:
        logging.getLogger("rollout").error("engine-%d: %s", number, error)
        return CANNOT_START if isinstance(error, ConfigError | KeysError | CannotStart | TeacherError) else 1
    return 0


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollout", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--queue", required=True, help="endpoint of the queue server, tcp://host:port")
    parser.add_argument("--engine-port", type=int, required=True, help="first port of local rank 0's engine")
    parser.add_argument("--first-engine", type=int, default=0, help="number of rank 0's engine, unique in the fleet")
    return parser.parse_args(argv)


async def work(name: str, config: RunConfig, engine: Engine, run_dir: Path, endpoint: str, keys: RunKeys) -> None:
    """Runs one worker until the run is over or SIGTERM comes."""
    async with (
        AsyncQueueClient(endpoint, keys, name, timeout_s=config.trainer.stall_s) as queue,
        Teacher.of(config, run_dir, keys) or nullcontext() as teacher,
    ):
        if teacher is not None and config.algo.teacher_has_address:
            await teacher.check(config, description_of(config, run_dir))
        worker = Worker(name, config, engine, queue, teacher)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, worker.close)
        await worker.run()


async def keep_serving(name: str, config: RunConfig, engine: Engine, run_dir: Path, endpoint: str, keys: RunKeys) -> None:
    """Runs the server of a model with frozen weights until the run is over or SIGTERM comes."""
    async with AsyncQueueClient(endpoint, keys, name, timeout_s=config.trainer.stall_s) as queue:
        serving = asyncio.create_task(serve(name, engine, address_file(run_dir, name), config.rollout, queue))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving


def engine_settings(config: RunConfig, keys: RunKeys, arguments: argparse.Namespace, number: int) -> EngineSettings:
    """The server of this rank. Its GPUs come after those of the ranks before it."""
    *before, server = servers(config)[arguments.first_engine : number + 1]
    return EngineSettings(
        model=Path(server.frozen) if server.frozen else description_of(config, arguments.run),
        load_format="auto" if server.frozen else "dummy",
        tokenizer=server.speaks_text,
        host=own_address(arguments.queue),
        port=arguments.engine_port + PORTS_PER_ENGINE * len(before),
        log_file=arguments.run / LOGS / f"engine-{number}.log",
        tp=server.tp,
        first_gpu=sum(one.tp for one in before),
        device=device(config),
        dtype=config.model.dtype,
        api_key=keys.engine_api_key,
        max_total_tokens=config.rollout.max_total_tokens,
        max_running_requests=config.rollout.concurrency,
        weight_group_s=WEIGHT_GROUP_SHARE * config.trainer.push_s,
        extra_args=tuple(config.rollout.engine_args),
    )


def own_address(endpoint: str) -> str:
    """The address by which this machine reaches the queue server, and so by which the trainer reaches this machine."""
    target = urlsplit(endpoint)
    if target.scheme != "tcp" or not target.hostname or not target.port:
        raise ConfigError(f"--queue {endpoint}: must be tcp://host:port")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
            probe.connect((target.hostname, target.port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--queue {endpoint}: no way to {target.hostname} ({error.strerror})") from error


def device(config: RunConfig) -> str:
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[logging.FileHandler(path), _errors()],
    )


def _errors() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    return handler


if __name__ == "__main__":
    sys.exit(main())
