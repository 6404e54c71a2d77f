"""What is worked out before the fork, and what a job must not notice of it."""

import errno
import json

from reward.jail import confine
from reward.jail.limits import Allowance, Limits
from reward.sandbox.sandbox import Sandbox

FRESH = """
import json, linecache, random, sys, threading, atexit, gc
print(json.dumps({
    "left": sorted(sys.modules.keys() & {"solution", "tests", "pytest", "reward", "reward.jail.harness"}),
    "name": __name__,
    "argv": sys.argv,
    "random": random.random(),
    "threads": threading.active_count(),
    "main": threading.main_thread().is_alive() and threading.current_thread() is threading.main_thread(),
    "line": linecache.getline("solution.py", 2),
    "input": input(),
    "collects": gc.isenabled(),
}))
"""


def test_a_step_that_fails_is_named_and_ends_the_rest() -> None:
    steps = confine.Steps()
    steps.add("chdir", b"/nonexistent folder")
    steps.add("exit_group", 1)
    error = steps.take()
    assert error is not None and error.strerror == "chdir: No such file or directory" and error.errno == errno.ENOENT


def test_steps_without_a_failure_say_nothing() -> None:
    steps = confine.Steps()
    steps.add("getpid")
    assert steps.take() is None


def test_a_job_notices_nothing_of_the_warm_up(sandbox: Sandbox) -> None:
    for _ in range(2):
        job = sandbox.start(Limits(), stdin=b"first line\n")
        job.send({"kind": "stdio", "code": FRESH, "setup": "", "trim": False})
        found = json.loads(job.wait_end(Allowance(cpu_s=5)).output)
        assert found == {
            "left": [],
            "name": "__main__",
            "argv": ["solution.py"],
            "random": 0.8444218515250481,
            "threads": 1,
            "main": True,
            "line": "import json, linecache, random, sys, threading, atexit, gc\n",
            "input": "first line",
            "collects": True,
        }


def test_two_jobs_talk_over_their_link_and_over_nothing_else(sandbox: Sandbox) -> None:
    code = "import os\nfor fd in range(4, 64):\n    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)"
    job = sandbox.start(Limits())
    job.send({"kind": "stdio", "code": code, "setup": "", "trim": False})
    assert job.wait_end(Allowance(cpu_s=5)).output == b""
