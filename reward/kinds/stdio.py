"""The kind `stdio`: a program, run once per test; what it prints must be the expected output.

{"kind": "stdio", "tests": [{"input": "2\\n", "output": "4\\n"}], "tolerance": 1e-6}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward.jail import codec
from reward.jail.limits import OUTPUT_BYTES
from reward.kinds.code_task import CodeTask, read_object, read_shared, read_tolerance
from reward.kinds.compare_output import same_output
from reward.kinds.extract import Extracted
from reward.kinds.fields import read_text
from reward.kinds.kind import Defaults
from reward.kinds.usage import Usage, bad_end, json_object, run_to_end
from reward.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTest:
    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTask(CodeTask):
    tests: tuple[StdioTest, ...]
    tolerance: float | None  # relative and absolute; None: exact

    def count_passed(self, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> int:
        passed = 0
        for index, test in enumerate(self.tests):
            if reason := usage.used_up():
                usage.fail(f"test {index}: {reason}")
                break
            if reason := self._why_not(test, extracted, sandbox, usage):
                usage.fail(f"test {index}: {reason}")
                if self.credit == "all":
                    break
            else:
                passed += 1
        return passed

    def _why_not(self, test: StdioTest, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> str:
        """Why the test does not pass, or nothing."""
        job, end, allowance = run_to_end(
            sandbox,
            usage,
            self.program(extracted, "stdio"),
            test_cpu_limit_s=self.test_cpu_limit_s,
            stdin=test.input.encode(),
            output_bytes=OUTPUT_BYTES + len(test.output.encode()),
        )
        if reason := bad_end(end, allowance, usage) or _reported_error(job.take_frame()):
            return reason
        output = end.output.decode("utf-8", "replace")
        if same_output(output, test.output, self.tolerance):
            return ""
        return f"printed {codec.shorten(output)}, expected {codec.shorten(test.output)}"


def read_stdio_task(data: Mapping[str, Any], defaults: Defaults) -> StdioTask:
    shared = read_shared(data, defaults, "tolerance")
    tests = tuple(_read_test(test, f"task.tests[{index}]") for index, test in enumerate(data["tests"]))
    return StdioTask(tests=tests, tolerance=read_tolerance(data), **shared)


def _read_test(test: object, where: str) -> StdioTest:
    fields = read_object(test, where, required=("input", "output"))
    return StdioTest(**{name: read_text(value, f"{where}.{name}") for name, value in fields.items()})


def _reported_error(frame: bytes | None) -> str:
    """What the job says it died of. It may lie, but only to its cost: nothing said here makes a test pass."""
    if frame is None:
        return ""
    try:
        error = json_object(frame).get("error")
    except codec.CodecError:
        return ""
    return str(error)[:400] if error else ""
