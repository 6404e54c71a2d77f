"""The reports and leases of one step of the job through a Redis stream and through a Ray queue actor; `ledger.py peers` runs it.

One client puts each report (a segment of 2,500 tokens, 20 KB) and another gets it; leases (a prompt, 5 KB) work the same way. The
Redis reader acknowledges and deletes each message. Nothing is decided, checked or encrypted, and a lease has no version.
"""

import argparse
import contextlib
import importlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

REPORT_BYTES, LEASE_BYTES = 20_000, 5_000
TRAJECTORIES, STEP_S = 4096, 60.0
COUNT = 2048  # of each kind that are sent


def main() -> None:
    description = f"{__doc__}\nNeeds the packages redis and ray, and a redis-server on the PATH."
    argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, run in (("redis", redis), ("ray", ray)):
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"peers: {name} is not installed in this Python")
            continue
        try:
            run()
        except FileNotFoundError as error:
            print(f"peers: {name} is not there: {error}")


def redis() -> None:
    from redis import Redis  # type: ignore[import-not-found,unused-ignore]

    for fsync in ("always", "everysec"):
        with redis_server(fsync) as (port, pid):
            writer, reader = Redis(port=port), Redis(port=port)
            for stream in ("reports", "leases"):
                writer.xgroup_create(stream, "g", mkstream=True)

            def put(stream: str, data: bytes, writer: Any = writer) -> None:
                writer.xadd(stream, {"d": data})

            def get(stream: str, reader: Any = reader) -> None:
                ((_, ((entry, _),)),) = reader.xreadgroup("g", "c", {stream: ">"}, count=1)
                reader.xack(stream, "g", entry)
                reader.xdel(stream, entry)

            show(f"a Redis stream, appendfsync={fsync}", put, get, lambda pid=pid: cpu_s([pid]))


@contextlib.contextmanager
def redis_server(fsync: str) -> Iterator[tuple[int, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--appendonly", "yes", "--appendfsync", fsync, "--save", "", "--dir", folder, "--bind", "127.0.0.1"]
        process = subprocess.Popen(["redis-server", "--port", str(port), *options], stdout=subprocess.DEVNULL)
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(30.0)


def ray() -> None:
    import ray as r  # type: ignore[import-not-found,unused-ignore]
    from ray.util.queue import Queue  # type: ignore[import-not-found,unused-ignore]

    r.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    try:
        queues = {name: Queue(actor_options={"num_cpus": 0}) for name in ("reports", "leases")}
        pids = [r.get(q.actor.__ray_call__.remote(lambda _: __import__("os").getpid())) for q in queues.values()]
        show("a Ray queue actor (nothing on disk)", lambda name, data: queues[name].put(data), lambda name: queues[name].get(),
             lambda: cpu_s(pids))  # fmt: skip
    finally:
        r.shutdown()


def show(name: str, put: Callable[[str, bytes], None], get: Callable[[str], None], used: Callable[[], float]) -> None:
    latencies_s = []
    began_s, before_s = time.monotonic(), used()
    for _ in range(COUNT):
        put("leases", bytes(LEASE_BYTES))
        asked_s = time.monotonic()
        get("leases")
        latencies_s.append(time.monotonic() - asked_s)
        put("reports", bytes(REPORT_BYTES))
        get("reports")
    wall_s, cpu = time.monotonic() - began_s, used() - before_s
    worth = COUNT / (1.27 * TRAJECTORIES)
    p50, p99 = (1000 * sorted(latencies_s)[int(share * COUNT)] for share in (0.5, 0.99))
    print(
        f"peers: {name}: {cpu / worth:.2f} s of CPU for a step's reports and leases ({STEP_S * worth / cpu:.0f} times the "
        f"job's rate on one core), one client after another {STEP_S * worth / wall_s:.1f} times it; "
        f"a lease p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    )


def cpu_s(pids: list[int]) -> float:
    import psutil

    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


if __name__ == "__main__":
    main()
