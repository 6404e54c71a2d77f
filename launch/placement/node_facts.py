"""The facts about one node, printed as JSON in short lines. Each Python of the run (3.11 or newer) runs it on every node:

    python launch/placement/node_facts.py '{"node": "", "canary": "/shared/out", "paths": [], "ports": [], "packages": ["torch"]}'

It imports the standard library only, so that an environment without any package still answers.
"""

import errno
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

REPORTED_VARIABLES = ("NCCL_", "CUDA_", "GLOO_", "NVIDIA_", "TORCH_NCCL_")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits")
NVIDIA_SMI_S = 20.0
UNLIMITED = -1
PIECE = 800  # characters of a line; srun mixes up the lines of several nodes that are longer than 1,024 bytes
LINE = re.compile(r"^facts ([0-9a-f]{32}) (\d+)/(\d+) (.*)$", re.MULTILINE)


def lines(report: dict[str, Any]) -> list[str]:
    """The report in lines, which `read` puts together again although lines of other nodes stand between them."""
    text, key = json.dumps(report), uuid.uuid4().hex
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    return [f"facts {key} {number}/{len(pieces)} {piece}" for number, piece in enumerate(pieces, 1)]


def read(output: str) -> list[dict[str, Any]]:
    """The reports of all nodes that are whole, in the output of a step."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for key, number, count, piece in LINE.findall(output):
        found.setdefault((key, int(count)), {})[int(number)] = piece
    whole = (pieces for (_, count), pieces in found.items() if len(pieces) == count)
    return [json.loads("".join(piece for _, piece in sorted(pieces.items()))) for pieces in whole]


def facts(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "node": request["node"] or os.environ.get("SLURMD_NODENAME") or platform.node(),
        "time_s": time.time(),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "packages": {name: found for name in request["packages"] if (found := _version(name))},
        "env": {name: value for name, value in os.environ.items() if name.startswith(REPORTED_VARIABLES)},
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0] for name in ("nofile", "nproc", "memlock")
        },
        "shm_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "memory_bytes": _available_memory(),
        "overcommit": int(_read("/proc/sys/vm/overcommit_memory") or 0),
        "ephemeral_from": int((_read("/proc/sys/net/ipv4/ip_local_port_range") or "32768").split()[0]),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "gpus": gpus(),
        "canary": _write_canary(Path(request["canary"])),
        "unseen": [path for path in request["paths"] if not os.path.exists(path)],
        "busy_ports": [port for port in request["ports"] if not port_is_free(port)],
    }


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the port now. A connection that is only closing does not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: str) -> str:
    return Path(path).read_text() if os.path.isfile(path) else ""


def _available_memory() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    return int(found[1]) * 1024 if found else 0


def gpus() -> list[dict[str, Any]]:
    """Name, memory and used memory of each GPU; empty when nvidia-smi is missing or does not answer."""
    try:
        answer = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    return [{"name": name, "memory_mb": _megabytes(total), "used_mb": _megabytes(used)} for name, total, used in rows]


def _megabytes(cell: str) -> int:
    """0 for `[N/A]`, which nvidia-smi prints when GPU and host share memory, or when the GPU is partitioned."""
    return int(cell) if cell.isdigit() else 0


def _write_canary(folder: Path) -> dict[str, str]:
    """Writes a file and reads it back. The process that asked looks for the file from its own node, and removes it."""
    path, word = folder / f".canary-{uuid.uuid4().hex}", uuid.uuid4().hex
    try:
        path.write_text(word)
        if path.read_text() != word:
            return {"error": f"{path} was written, but reads back differently"}
    except OSError as error:
        return {"error": f"{error.strerror} ({folder})"}
    return {"path": str(path), "word": word}


if __name__ == "__main__":
    print("\n".join(lines(facts(json.loads(sys.argv[1])))), flush=True)
