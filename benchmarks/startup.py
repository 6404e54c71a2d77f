"""How long from the command to the first generated token of the debug run, and whose CPU seconds that takes.

    .venv/bin/python -m benchmarks.startup [override …]

The debug model must be made already (`make run` makes it). CPU seconds over the number of cores bound the time from below,
whatever else the machine does. The run is ended as soon as an engine has tokens.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

DEADLINE_S = 400.0
EVERY_S = 0.2
ROLES = (  # words of a command line -> whose it is; the first that fits
    ("--model-path=", "engines"),
    ("sglang::", "engines"),  # as its own processes call themselves
    ("torch.distributed.run", "torchrun"),
    ("-m trainer ", "trainer ranks"),
    ("-m rollout ", "workers"),
    ("rollout.queue", "queue server"),
    ("-m reward ", "judges"),
)


def measure(output: Path, overrides: Sequence[str]) -> tuple[float, list[str], dict[str, float]]:
    """Seconds to the first tokens, what the launcher said, CPU seconds by role. Raises TimeoutError."""
    said = output / "said"
    words = ["experiment=debug", f"output={output}", "name=run", "data.heldout=[]", "trainer.steps=1", *overrides]
    began = time.monotonic()
    with said.open("wb") as out:
        launcher = subprocess.Popen([sys.executable, "-m", "launch", *words], stdout=out, stderr=subprocess.STDOUT)
    seconds: dict[int, tuple[str, float]] = {}
    try:
        while "first tokens after" not in said.read_text():
            if launcher.poll() is not None or time.monotonic() - began > DEADLINE_S:
                raise TimeoutError(f"no token within {DEADLINE_S:g} s:\n{said.read_text()[-2000:]}")
            look(launcher.pid, seconds)
            time.sleep(EVERY_S)
        took_s = time.monotonic() - began
        look(launcher.pid, seconds)
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
    by_role: dict[str, float] = defaultdict(float)
    for role, cpu_s in seconds.values():
        by_role[role] += cpu_s
    return took_s, said.read_text().splitlines(), by_role


def look(launcher: int, seconds: dict[int, tuple[str, float]]) -> None:
    """Notes what each process has used so far; one that has ended keeps its last figure."""
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        with suppress(psutil.Error):
            times, line = process.cpu_times(), " ".join(process.cmdline())
            role = next((role for word, role in ROLES if word in line), "launcher")
            seconds[process.pid] = (role, times.user + times.system)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="override", help="a setting of the run, as for python -m launch")
    overrides = parser.parse_args(arguments).overrides
    with tempfile.TemporaryDirectory() as folder:
        took_s, said, by_role = measure(Path(folder), overrides)
    print("\n".join(line for line in said if "after" in line))
    for role, cpu_s in sorted(by_role.items(), key=lambda item: -item[1]):
        print(f"{role:<14} {cpu_s:6.1f} CPU s")
    total = sum(by_role.values())
    print(f"{'in all':<14} {total:6.1f} CPU s, {total / (os.cpu_count() or 1):.1f} s on each of {os.cpu_count()} cores")
    print(f"{'command to first token':<14} {took_s:.1f} s, on a machine with a load of {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
