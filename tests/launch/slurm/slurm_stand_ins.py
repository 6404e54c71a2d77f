"""Stand-ins for what a run under Slurm starts: torchrun, trainer, fleet, queue server, judges. The launcher, its placement, its
steps and Slurm are real.

The nodes of the trainer depend on each other as ranks in a collective do: a byte goes round at every step, and when one node is
gone the others fail. The trainer writes checkpoints and metrics like the real one, saves when it is asked to, and writes down on
which nodes it runs. While the file HOLD is in the folder of the submission, it does all but the last step, so that a test finds
the run alive on a slow machine too. Every process listens on its ports, and exits with 0 when the run is over.
"""

import os
import stat
import sys
from pathlib import Path

from tests.launch.stand_ins import write_model, write_problems

PROJECT = Path(__file__).parents[3]
HOLD = "hold"

TORCHRUN = """
import os, subprocess, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
command = words[words.index("--") + 1:]
env = os.environ | {"MASTER_ADDR": value("--master-addr"), "MASTER_PORT": value("--master-port")}
env |= {"GROUP_RANK": value("--node-rank"), "NODES": value("--nnodes"), "LOCAL_WORLD_SIZE": value("--nproc-per-node")}
sys.exit(min(1, abs(subprocess.call(command, env=env))))
"""

COMMON = """
import hashlib, json, os, pathlib, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
value = lambda name: sys.argv[sys.argv.index(name) + 1]
run, here = pathlib.Path(value("--run")), os.environ["SLURMD_NODENAME"]
def note(name, text):
    with (run / name).open("a") as file:
        print(text, file=file)
def serve_until_closed(address, port):
    with socket.create_server((address, port)):
        while not (run / "closed").exists():
            time.sleep(0.1)
"""

QUEUE = """
from stand_in import *
host, port = value("--bind").removeprefix("tcp://").split(":")
with socket.create_server((host, int(port))):
    time.sleep(600)
"""

ROLLOUT = """
from stand_in import *
first = int(value("--first-engine"))
note("fleet", f"{first} {here}")
serve_until_closed("127.0.0.1", int(value("--engine-port")))
"""

JUDGE = """
from stand_in import *
note("judges", f"{value('--name')} {here}")
while not (run / "closed").exists():
    time.sleep(0.1)
"""

TRAINER = """
from stand_in import *
import yaml
steps = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["steps"]
rank, nodes = int(os.environ["GROUP_RANK"]), int(os.environ["NODES"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
folder = run / "checkpoints"

def version():
    return max((int(p.name.removeprefix("version-")) for p in folder.glob("version-*")), default=0)

def save(step):
    path = folder / f"version-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "shard").write_text("weights")
    (path / "SHA256SUMS").write_text(hashlib.sha256(b"weights").hexdigest() + "  shard\\n")

def say(peers, word):
    for peer in peers:
        peer.sendall(word)
    if not all(peer.recv(1) for peer in peers):
        sys.exit("a peer is gone")

if rank > 0:
    deadline = time.monotonic() + 60
    while True:
        try:
            link = socket.create_connection(address, timeout=60)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    link.sendall(here.encode().ljust(16))
    while word := link.recv(1):
        link.sendall(word)
        if word == b"e":
            sys.exit(0)
    sys.exit("rank 0 is gone")

with socket.create_server(address) as server:
    peers = [server.accept()[0] for _ in range(nodes - 1)]
    names = [peer.recv(16).decode().strip() for peer in peers]
note("trainer", " ".join([here, *sorted(names)]))
step = version()
while step < steps and signal.SIGUSR1 not in signal.sigpending():
    time.sleep(0.2)
    held = step == steps - 1 and pathlib.Path("hold").exists()
    say(peers, b"s")  # afterwards, so that a process that died before is missed in the last step
    if held:
        continue
    step += 1
    line = {"step": step, "time": time.time(), "reward/mean": 0.5, "time/step_s": 0.2, "node": here}
    note("metrics.jsonl", json.dumps(line))
    if step % 5 == 0:
        save(step)
save(step)
say(peers, b"e")
if step == steps:
    (run / "closed").touch()
"""


def write_stand_ins(folder: Path) -> list[str]:
    """Writes everything that a run needs into a folder; the overrides that have it used, from there."""
    modules = {
        "rollout/patched/torchrun.py": TORCHRUN, "rollout/queue/__main__.py": QUEUE, "rollout/__main__.py": ROLLOUT,
        "reward/__main__.py": JUDGE, "trainer/__main__.py": TRAINER, "stand_in.py": COMMON,
    }  # fmt: skip
    for name, source in modules.items():
        path = folder / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for package in path.relative_to(folder / "modules").parents[:-1]:
            (folder / "modules" / package / "__init__.py").touch()
    python = folder / "python"  # another environment, which has the stand-ins
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/modules exec {sys.executable} -P "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    write_model(folder / "model")
    write_problems(folder / "train.jsonl")
    return [
        "experiment=debug", "model.path=model", "model.prepare=", "data.train=[train.jsonl]",
        "data.heldout=[]",
        f"cluster.trainer_python={python}", f"cluster.rollout_python={python}", "cluster.device=cpu", "cluster.heartbeat_s=15",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """For sbatch: the launcher is this project's, with this Python."""
    return {"KESTREL_PYTHON": sys.executable, "PYTHONPATH": str(PROJECT), "PYTHONSAFEPATH": "1", "PATH": os.environ["PATH"]}
