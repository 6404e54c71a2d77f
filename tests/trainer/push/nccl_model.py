"""A process-group backend that behaves as NCCL does, over TCP, for tests without a GPU: `register()`, then backend="model".

A collective enqueues a kernel on the group's stream and returns. Here the stream is a thread.
The first collective makes the communicator, which waits for all ranks without a limit.
`wait` returns at once and never raises. If the group was made with TORCH_NCCL_BLOCKING_WAIT, it waits for the kernel up to
the group's limit, and then aborts the group and raises.
A kernel whose peer has died or left runs forever.
Destroying a group waits for its kernels; only `abort` ends them.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "model"
PART_BYTES = 1 << 20


class Aborted(RuntimeError):
    """What blocking waits raise."""


class Kernel:
    """One collective on the stream; it stands for torch's Work."""

    def __init__(self, group: "Group", run: Callable[[], None]) -> None:
        self._group, self.run, self.done = group, run, threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._group.blocking_wait:
            return True
        if not self.done.wait((timeout or self._group.limit).total_seconds()):
            self._group.abort()
            raise Aborted("the collective took longer than the limit of its group")
        return True


class Group(dist.ProcessGroup):
    """One rank's side. Rank 0 is connected with every other rank."""

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.limit, self.blocking_wait = options.timeout, os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self._store, self._name = options.store, options.group_id
        self._peers: list[socket.socket] | None = None
        self._aborted = threading.Event()
        self._stream: queue.Queue[Kernel] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def broadcast(self, tensors: list[torch.Tensor], _: Any = None) -> Kernel:  # type: ignore[override]
        if self._peers is None:
            self._peers = self._connect()
        return self.enqueue(lambda: self._transfer(tensors[0]))

    def enqueue(self, run: Callable[[], None]) -> Kernel:
        """Anything that runs on the stream behind the collectives, such as a copy of what they bring."""
        kernel = Kernel(self, run)
        self._stream.put(kernel)
        return kernel

    def synchronize(self) -> None:
        """Waits until the stream is empty, without a limit."""
        self.enqueue(lambda: None).done.wait()

    def shutdown(self) -> None:
        self.synchronize()
        self.abort()

    def abort(self) -> None:
        self._aborted.set()
        for peer in self._peers or ():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return str(self._name)

    def getBackendName(self) -> str:
        return NAME

    def _run(self) -> None:
        while True:
            kernel = self._stream.get()
            try:
                kernel.run()
            except OSError:
                self._aborted.wait()  # NCCL does not see that a peer is gone
            if self._aborted.is_set():
                return  # nothing more is done on this stream
            kernel.done.set()

    def _connect(self) -> list[socket.socket]:
        if self.rank() == 0:
            with socket.create_server(("127.0.0.1", 0), backlog=self.size()) as server:
                self._store.set("port", str(server.getsockname()[1]))
                return [server.accept()[0] for _ in range(self.size() - 1)]
        self._store.wait(["port"], timedelta(hours=1))
        return [socket.create_connection(("127.0.0.1", int(self._store.get("port"))))]

    def _transfer(self, tensor: torch.Tensor) -> None:
        assert self._peers is not None
        data = memoryview(tensor.numpy())
        for peer in self._peers:
            if self.rank() == 0:
                peer.sendall(data)
                continue
            at = 0
            while at < len(data):
                received = peer.recv_into(data[at : at + PART_BYTES])
                if not received:
                    raise ConnectionResetError
                at += received


def register() -> None:
    """Makes the backend known to this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Group, extended_api=True, devices=["cpu"])
