"""Starts jobs on a host that lacks namespaces for a while, and prints how each ended.

    unshare --user --map-root-user python tests/reward/sandbox/exhausted.py

Only the user namespace that this runs in is limited.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from reward.jail.limits import Allowance, HostExhausted, Limits
from reward.sandbox.sandbox import Sandbox

LIMITS = ("pid", "mnt")  # a job's fork takes one, and its confinement the other


def main() -> None:
    with Sandbox() as sandbox:
        print(ending(sandbox))
        for kind in LIMITS:
            limit = Path(f"/proc/sys/user/max_{kind}_namespaces")
            before = limit.read_text()
            limit.write_text("0")
            print(ending(sandbox))
            limit.write_text(before)
            print(ending(sandbox))


def ending(sandbox: Sandbox) -> str:
    try:
        job = sandbox.start(Limits())
        job.send({"kind": "stdio", "code": "print(7)", "setup": "", "trim": False})
        return job.wait_end(Allowance(cpu_s=8.0)).output.decode().strip()
    except HostExhausted:
        return "exhausted"


if __name__ == "__main__":
    main()
