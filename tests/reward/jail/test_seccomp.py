"""The system call filter, read as data and run in a small interpreter of BPF."""

import errno
import re
from pathlib import Path

import pytest

from reward.jail import seccomp

HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "aarch64": Path("/usr/include/asm-generic/unistd.h")}
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM = 0x00050000 | errno.EPERM


def run(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """What a job gets, whichever way it is confined: the whole at once, or the zygote's filter and one of its own."""
    whole = run_program(seccomp.program(machine), machine, number, *args, arch=arch)
    parts = [run_program(code, machine, number, *args, arch=arch) for code in layers(machine)]
    refusals = [part for part in parts if part != ALLOW]
    assert (refusals[0] if refusals else ALLOW) == whole, (number, args)
    return whole


def layers(machine: str) -> tuple[list[seccomp.Instruction], list[seccomp.Instruction]]:
    return seccomp.zygote_program(machine), seccomp.job_program(machine)


def run_program(code: list[seccomp.Instruction], machine: str, number: int, *args: int, arch: int | None = None) -> int:
    data = {0: number, 4: ARCH[machine] if arch is None else arch}
    data |= {16 + 8 * i: args[i] if i < len(args) else 0 for i in range(6)}
    at, accumulator = 0, 0
    while True:
        op, if_true, if_false, constant = code[at]
        at += 1
        if op == 0x20:
            accumulator = data[constant]
        elif op == 0x15:
            at += if_true if accumulator == constant else if_false
        elif op == 0x35:
            at += if_true if accumulator >= constant else if_false
        elif op == 0x45:
            at += if_true if accumulator & constant else if_false
        else:
            return constant


@pytest.mark.parametrize("machine", ARCH)
def test_every_jump_fits_its_byte_and_ends_in_a_return(machine: str) -> None:
    for code in (seccomp.program(machine), *layers(machine)):
        for at, (op, if_true, if_false, _) in enumerate(code):
            assert 0 <= if_true < 256
            assert 0 <= if_false < 256
            if op != 0x06:
                assert at + 1 + max(if_true, if_false) < len(code)


@pytest.mark.parametrize("machine", ARCH)
def test_numbers_agree_with_the_kernel_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("no kernel headers here")
    pattern = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    known = {m[1]: int(m[2]) for m in re.finditer(pattern, HEADERS[machine].read_text())}
    known.setdefault("newfstatat", known.get("fstatat", -1))
    for name, number in seccomp.numbers(machine).items():
        assert known.get(name) == number, name


@pytest.mark.parametrize("machine", ARCH)
def test_listed_calls_pass_and_the_others_do_not(machine: str) -> None:
    allowed = set(seccomp.allowed(machine).values())
    special = {numbers[0 if machine == "x86_64" else 1] for numbers, *_ in seccomp._CHOSEN.values()}
    special |= {56, 220, 435, 9, 222}
    for number in set(range(600)) - special:
        assert run(machine, number) == (ALLOW if number in allowed else EPERM), number


@pytest.mark.parametrize("machine", ARCH)
def test_record_locks_seem_to_be_taken_and_reach_no_other_job(machine: str) -> None:
    fcntl = seccomp.numbers(machine)["fcntl"]
    succeeds_without_the_kernel = 0x00050000
    for command in (6, 7):  # F_SETLK, F_SETLKW
        assert run(machine, fcntl, 3, command) == succeeds_without_the_kernel
    for command in (5, 36, 37, 38, 1024, 1026, 1033):  # F_GETLK, F_OFD_*, F_SETLEASE, F_NOTIFY, F_ADD_SEALS
        assert run(machine, fcntl, 3, command) == EPERM


def test_threads_may_be_made_and_processes_may_not() -> None:
    pthread_flags, fork_flags, new_user = 0x3D0F00, 17, 0x10000000
    assert run("x86_64", 56, pthread_flags) == ALLOW
    assert run("x86_64", 56, fork_flags) == EPERM
    assert run("x86_64", 56, pthread_flags | new_user) == EPERM
    assert run("x86_64", 435) == 0x00050000 | errno.ENOSYS


def test_a_zygote_may_start_jobs_and_cannot_leave_its_filter_behind() -> None:
    code = seccomp.zygote_program("x86_64")
    for name, number in seccomp.only_zygotes("x86_64").items():
        assert run_program(code, "x86_64", number) == ALLOW, name
        assert run("x86_64", number) == EPERM, name
    assert run_program(code, "x86_64", 56, 17) == ALLOW  # fork
    assert run_program(code, "x86_64", 59) == EPERM  # execve
    assert run("x86_64", 157, 22) == EPERM  # prctl(PR_SET_SECCOMP)


def test_another_architecture_is_killed_and_x32_refused() -> None:
    assert run("x86_64", 1, arch=0x40000003) == KILL
    assert run("x86_64", 0x40000000 + 57) == EPERM
    assert run("x86_64", 0x40000000 + 1) == EPERM


@pytest.mark.parametrize(
    ("number", "argument", "value", "result"),
    [(72, 1, 3, ALLOW), (72, 1, 1024, EPERM), (53, 0, 1, ALLOW), (53, 0, 2, EPERM), (16, 1, 0x5412, 0x50000 | errno.ENOTTY)],
)
def test_some_calls_depend_on_an_argument(number: int, argument: int, value: int, result: int) -> None:
    assert run("x86_64", number, *([0] * argument), value) == result


def test_memory_is_shared_through_a_file_only() -> None:
    private, shared, validated, anonymous = 0x02, 0x01, 0x03, 0x20
    for flags, result in ((private, ALLOW), (private | anonymous, ALLOW), (shared, ALLOW)):
        assert run("x86_64", 9, 0, 0, 0, flags) == result
    for flags in (shared | anonymous, validated | anonymous):
        assert run("x86_64", 9, 0, 0, 0, flags) == EPERM


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(seccomp.UnsupportedArch, match="riscv64"):
        seccomp.program("riscv64")
