"""Prints what a Slurm job finds on a node. A script of its own, which a step runs on every node.

    python launch/slurm/probe.py     ->  {"node": "n2", "ports_in_use": [21000, …], "gpus": "4,5"}

ports_in_use: the TCP ports on which a process listens. gpus: the CUDA_VISIBLE_DEVICES that Slurm set for the step, which are the
job's GPUs; null if Slurm assigns no GPUs.
"""

import json
import os
from pathlib import Path

LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp


def listening(tables: list[Path]) -> set[int]:
    """The ports of the listening sockets in tables such as /proc/net/tcp."""
    ports = set()
    for table in tables:
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            _, local, _, state, *_ = line.split()
            if state == LISTEN:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


if __name__ == "__main__":
    in_use = sorted(listening([Path("/proc/net/tcp"), Path("/proc/net/tcp6")]))
    facts = {"node": os.environ["SLURMD_NODENAME"], "ports_in_use": in_use, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    print(json.dumps(facts), flush=True)
