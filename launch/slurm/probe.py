"""What a Slurm job finds on a node; a script of its own, run on every node by a step.

python launch/slurm/probe.py     ->  {"node": "n2", "taken": [21000, …], "gpus": "4,5"}

taken: the TCP ports that somebody listens on. gpus: CUDA_VISIBLE_DEVICES as Slurm set it for the step, the GPUs that are the
job's; null if Slurm hands out none.
"""

import json
import os
from pathlib import Path

LISTEN = "0A"  # a socket's state in /proc/net/tcp


def listening(tables: list[Path]) -> set[int]:
    """The ports that somebody listens on, from tables like /proc/net/tcp."""
    ports = set()
    for table in tables:
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            _, local, _, state, *_ = line.split()
            if state == LISTEN:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


if __name__ == "__main__":
    taken = sorted(listening([Path("/proc/net/tcp"), Path("/proc/net/tcp6")]))
    said = {"node": os.environ["SLURMD_NODENAME"], "taken": taken, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    print(json.dumps(said), flush=True)
