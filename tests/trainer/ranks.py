"""Runs a function on N gloo ranks, each a process of its own, and ends them all at a deadline.

The ranks are forked from a server that has imported megatron once, so a start costs milliseconds instead of seconds.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.ports import free_port

ONE_WAS_KILLED = r"died|Connection (closed|reset) by peer"
"""What `RankFailed` says then: its own pipe tells of it first, or a rank that talked to it."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["trainer", "trainer.megatron.checkpoint", "tests.trainer.jobs"])


class RankFailed(AssertionError):
    """A rank raised, died, or was not done in time."""


def run(function: Callable[..., Any], world_size: int, *args: Any, deadline_s: float = 60.0) -> list[Any]:
    """Calls `function(*args)` on every rank, with torchrun's variables set, and returns the results by rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(theirs, function, args, rank, world_size, port), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _collect(pipes, time.monotonic() + deadline_s, deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def start(function: Callable[..., Any], *args: Any) -> BaseProcess:
    """Another process beside the ranks, forked like them; the caller ends it."""
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _collect(pipes: list[Connection], deadline: float, deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} were not done after {deadline_s} s")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died") from None
            if not ok:
                raise RankFailed(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        answer = (True, function(*args))
    except BaseException:  # noqa: BLE001 - every failure of a rank belongs to the test
        answer = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would hand tensors over in shared memory that ends with this process.
    pipe.send_bytes(pickle.dumps(answer))
