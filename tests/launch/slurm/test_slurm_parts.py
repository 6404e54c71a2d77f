"""The parts of the Slurm backend that need no Slurm: commands, scripts, and reading their output."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, ConfigError, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from launch.placement.placement import Node, ProcessSpec, place
from launch.slurm.job import ProbeResult, SlurmError, parse_addresses, parse_duration_s, read_probe, with_assigned_gpus
from launch.slurm.nodes import NodeWatch
from launch.slurm.probe import listening
from launch.slurm.step import (
    WATCHDOG,
    StepContext,
    everywhere_command,
    exit_code,
    heartbeat_command,
    step_command,
    step_id,
    watchdog_command,
)

BATCH_SCRIPT = WATCHDOG.parent.with_name("kestrel_256.sh")


def process(code: str = "pass", **env: str) -> ProcessSpec:
    return ProcessSpec(role="trainer", name="trainer-1", node="n2", argv=(sys.executable, "-c", code), env=env)


def where(**cluster: object) -> StepContext:
    return StepContext(cluster=ClusterConfig(device="cuda", **cluster), folders=(Path("/work"), Path("/work"), Path("/runs/a")))  # type: ignore[arg-type]


def ran(step: ProcessSpec, its: StepContext, path: str = "/usr/bin:/bin") -> tuple[int, list[str]]:
    """What the step's script does, run here without srun."""
    command = step_command(step, its, "token")
    script = command[command.index("bash") :]
    env = {"PATH": path, "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURMD_NODENAME": "n2"}
    done = subprocess.run(script, capture_output=True, text=True, timeout=20, env=env)
    return done.returncode, done.stdout.splitlines()


def test_step_runs_alone_on_its_node_and_survives_the_death_of_others() -> None:
    command = step_command(process(), where(srun_args=["--mem=0"]), "token")
    assert command[0] == "srun"
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--nodelist=n2", "--mem=0"} <= set(command)
    assert not [word for word in command if "container" in word]


def test_script_writes_its_step_and_the_exit_code_of_its_process() -> None:
    code, lines = ran(process("import os; print(os.environ['A']); raise SystemExit(7)", A="x y"), where())
    assert code == 7
    assert lines[1] == "x y"
    assert step_id(lines) == "12.3"
    assert exit_code(lines, "token") == 7
    assert exit_code(lines, "of an earlier start") is None


def test_killed_process_is_distinguished_from_one_that_failed() -> None:
    _, lines = ran(process("import os; os.kill(os.getpid(), 9)"), where())
    assert exit_code(lines, "token") == -9


def test_unfinished_last_line_does_not_hide_the_exit_code() -> None:
    _, lines = ran(process("print('100%', end='')"), where())
    assert lines[-1].startswith("100%")
    assert exit_code(lines, "token") == 0


def test_setup_lines_run_first_and_one_that_fails_is_named_and_final() -> None:
    _, lines = ran(process("import os; print(os.environ['MODULE'])"), where(setup=["export MODULE=cuda", "true"]))
    assert "cuda" in lines
    _, lines = ran(process("print('never')"), where(setup=["false 'it''s'"]))
    assert "never" not in lines
    assert "cluster.setup: this line failed: false 'it''s'" in lines
    assert exit_code(lines, "token") == 2


@pytest.mark.parametrize("line", ["export MODULE=cuda  # as the site says", "export MODULE=cuda;", "false || export MODULE=cuda"])
def test_comment_in_a_setup_line_does_not_hide_the_next_line(line: str) -> None:
    _, lines = ran(process("import os; print(os.environ['MODULE'])"), where(setup=[line, "true"]))
    assert "cuda" in lines
    _, lines = ran(process("print('never')"), where(setup=["false  # as the site says"]))
    assert "never" not in lines and exit_code(lines, "token") == 2
    asked = everywhere_command(["n1"], where(setup=[line, "true"]), ["printenv", "MODULE"])
    assert subprocess.run(asked[asked.index("bash") :], capture_output=True, text=True, timeout=20).stdout == "cuda\n"


def test_save_signal_is_blocked_in_processes_that_do_not_read_it() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print(signal.SIGUSR1 in signal.sigpending())"
    _, lines = ran(process(code), where())
    assert "True" in lines


def test_process_whose_step_ended_before_its_guard_started_does_not_run(tmp_path: Path) -> None:
    """The shell is killed by the last thing that runs before the guard; what it leaves behind has its pipe."""
    (tmp_path / "env").write_text('#!/bin/sh\nkill -9 $PPID\nexec /usr/bin/env "$@"\n')
    (tmp_path / "env").chmod(0o755)
    code, lines = ran(process("print('ran')"), where(), path=f"{tmp_path}:/usr/bin:/bin")
    assert code == -9
    assert "ran" not in lines


def test_srun_gets_the_pyxis_container_with_its_folders() -> None:
    command = step_command(process(), where(container="nvcr.io/x:1", container_mounts=["/data:/data"]), "token")
    assert "--container-image=nvcr.io/x:1" in command
    assert "--container-mounts=/work:/work,/runs/a:/runs/a,/data:/data" in command
    assert "--container-workdir=/work" in command


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
@pytest.mark.parametrize("folder", ["/runs/lr=1,2", "/runs/12:30"])
def test_folder_with_a_comma_or_a_colon_is_refused_for_a_container(runtime: str, folder: str) -> None:
    its = replace(where(container="image", container_runtime=runtime), folders=(Path("/work"), Path(folder)))
    with pytest.raises(ConfigError, match=f"{folder} cannot be mounted into a container"):
        step_command(process(), its, "token")


def test_apptainer_starts_in_the_step_after_the_setup_lines() -> None:
    its = where(container="/x.sif", container_runtime="apptainer", setup=["module load apptainer"])
    script = step_command(process(A="1"), its, "token")[-1]
    line = next(line for line in script.splitlines() if line.startswith("apptainer"))
    assert line.startswith("apptainer exec --nv --bind /work:/work --bind /runs/a:/runs/a --pwd /work /x.sif env A=1 ")
    assert script.index("module load apptainer") < script.index(line)


def test_process_in_a_container_gets_its_environment_and_reports_its_exit_code(tmp_path: Path) -> None:
    """With a stand-in for apptainer that runs the command where it is."""
    fake = tmp_path / "apptainer"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != /x.sif ]; do shift; done\nshift\nINSIDE=yes exec "$@"\n')
    fake.chmod(0o755)
    step = process("import os; print(os.environ['INSIDE'], os.environ['A']); raise SystemExit(3)", A="it's here")
    code, lines = ran(step, where(container="/x.sif", container_runtime="apptainer"), f"{tmp_path}:/usr/bin:/bin")
    assert code == 3 and exit_code(lines, "token") == 3
    assert lines[1] == "yes it's here"


def test_heartbeat_prints_each_node() -> None:
    command = heartbeat_command(["n1", "n2"])
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n2"} <= set(command)
    beat = subprocess.Popen(command[command.index("bash") :], stdout=subprocess.PIPE, text=True, env={"SLURMD_NODENAME": "n1"})
    assert beat.stdout is not None and beat.stdout.readline() == "n1\n"
    beat.kill()
    beat.wait()


ALL_WELL = {"squeue": "echo 'n[1-3]'", "scontrol": "echo n1; echo n2; echo n3"}


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("squeue", "scontrol", "lost"),
    [
        ("echo 'n[1,3]'", 'echo "${3/n\\[1,3\\]/n1 n3}" | tr " " "\\n"', ["n2"]),
        ("echo 'n[1-3]'", ALL_WELL["scontrol"], []),
        ("true", "echo n1", []),  # the job does not run: suspended, or about to end and handing back its nodes
        ("echo Invalid job id specified; exit 1", "echo n1", []),
        ("echo 'n[1,3]'", "echo n1; exit 1", []),
    ],
)
def test_node_that_slurm_took_from_the_running_job_is_lost(
    squeue: str, scontrol: str, lost: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, srun="exec sleep 60", squeue=f"echo . >>{tmp_path}/asked; {squeue}", scontrol=scontrol)
    monkeypatch.setattr("launch.slurm.nodes.ASK_EVERY_S", 0.1)
    watch, found = NodeWatch(7, ["n1", "n2", "n3"], silence_s=60.0), dict[str, str]()
    deadline = time.monotonic() + 20
    try:
        while not found and not ((tmp_path / "asked").exists() and len((tmp_path / "asked").read_text()) > 6):
            assert time.monotonic() < deadline
            found = watch.poll(time.monotonic())
            time.sleep(0.05)
    finally:
        watch.end()
    assert found == dict.fromkeys(lost, "Slurm took it from the job")


def test_node_whose_heartbeat_stops_is_lost_but_not_one_that_never_had_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n2 speaks once, n3 never; Slurm says that all are well."""
    stand_in(tmp_path, monkeypatch, srun="echo n1; echo n2; while sleep 0.1; do echo n1; done", **ALL_WELL)
    watch, lost = NodeWatch(7, ["n1", "n2", "n3"], silence_s=1.0), dict[str, str]()
    deadline = time.monotonic() + 20
    try:
        while not lost and time.monotonic() < deadline:
            lost = watch.poll(time.monotonic())
            time.sleep(0.05)
        assert list(lost) == ["n2"] and lost["n2"].startswith("silent for")
        assert watch.last_heartbeat_s("n1") > watch.last_heartbeat_s("n2")
        assert watch.heartbeat_s() == watch.last_heartbeat_s("n3") > float("-inf")  # Slurm's word
        assert watch.poll(time.monotonic()) == {}
    finally:
        watch.end()


def test_time_in_which_the_whole_job_was_suspended_counts_for_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        srun=f"while sleep 0.1; do [ -e {tmp_path}/suspended ] || echo n1; [ -e {tmp_path}/dead ] || echo n2; done",
        **ALL_WELL,
    )
    watch, suspended_s = NodeWatch(7, ["n1", "n2"], silence_s=30.0), 0.0

    def look() -> dict[str, str]:
        time.sleep(0.05)
        return watch.poll(time.monotonic() + suspended_s)

    try:
        deadline = time.monotonic() + 20
        while watch.heartbeat_s() == float("-inf") or not watch._heartbeat_works():
            assert look() == {} and time.monotonic() < deadline
        for name in ("suspended", "dead"):
            (tmp_path / name).touch()
        time.sleep(0.5)
        look()  # their output so far
        suspended_s = 3600.0
        resumed_s = time.monotonic() + suspended_s
        assert look() == {}
        (tmp_path / "suspended").unlink()
        deadline = time.monotonic() + 20
        while not watch._heartbeats_s["n1"] > resumed_s:
            assert look() == {} and time.monotonic() < deadline
        for _ in range(10):  # another half minute, in steps that are no pause
            suspended_s += 4.0
            lost = look()
            if lost:
                break
        assert list(lost) == ["n2"]
    finally:
        watch.end()


def test_heartbeat_that_slurm_restarts_slowly_loses_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun's first step ends soon, and the second never speaks; Slurm says that all are well."""
    stand_in(
        tmp_path,
        monkeypatch,
        srun=f"[ -e {tmp_path}/second ] && exec sleep 60; touch {tmp_path}/second; echo n1; echo n2; sleep 0.2",
        **ALL_WELL,
    )
    monkeypatch.setattr("launch.slurm.nodes.RESTART_HEARTBEAT_S", 0.1)
    monkeypatch.setattr("launch.slurm.nodes.ASK_EVERY_S", 0.5)
    watch = NodeWatch(7, ["n1", "n2"], silence_s=0.5)
    happened = time.monotonic() + 2.0  # the second step is silent by then
    try:
        while watch.heartbeat_s() <= happened and time.monotonic() < happened + 20:
            assert watch.poll(time.monotonic()) == {}
            time.sleep(0.05)
        assert watch.heartbeat_s() > happened, "nobody ever knows whether a node was the cause of what happened"
    finally:
        watch.end()


@pytest.mark.parametrize(
    ("hostnames", "restarts", "requeues", "did"),
    [
        ("yes spare | head -n 20000 | sed 1s/.*/n1/", 2, 5, ""),  # the first of a list that does not fit into a pipe
        ("exit 1", 2, 5, ""),
        ("echo n2; echo n10", 2, 5, "requeue 7"),
        ("echo n2; echo n10", 2, 2, "cancel 7"),
        ("echo n2; echo n10", 1, 5, ""),  # a watchdog from before the last requeue
    ],
)
def test_watchdog_requeues_only_for_a_node_that_was_lost_since_the_last_requeue_and_within_bounds(
    hostnames: str, restarts: int, requeues: int, did: str, tmp_path: Path
) -> None:
    """With stand-ins for Slurm's commands. After the second question the job is over."""
    job = "JobId=7 Requeue=1 Restarts=2 BatchFlag=1 ReqNodeList=(null) ExcNodeList=(null) NodeList=nodes BatchHost=n1"
    show_job = f'[ -e {tmp_path}/looked ] && kill $PPID; touch {tmp_path}/looked; echo "{job}"'
    for name, script in (
        ("scontrol", f'case "$1 $2" in requeue*) echo -n "$@" > {tmp_path}/did;; *job) {show_job};; *) {hostnames};; esac'),
        ("scancel", f'echo -n cancel "$@" > {tmp_path}/did'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "did").touch()
    command = watchdog_command(7, ["n1", "n2"], restarts=restarts, requeues=requeues)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WATCHDOG_POLL_S": "0.1"}
    subprocess.run(command[command.index(str(WATCHDOG)) :], env=env, timeout=20)
    assert (tmp_path / "did").read_text() == did


@pytest.mark.parametrize("moment", ["in the shell", "before it listens", "never"])
def test_signal_to_save_that_comes_before_the_launcher_listens_waits_for_it(moment: str, tmp_path: Path) -> None:
    """Slurm signals the batch script's process, which the stand-in for the launcher becomes."""
    signal_it = "read -r _ _ _ _ leader _ </proc/$$/stat; kill -USR1 $leader\n"
    look = "import signal; print(signal.SIGUSR1 in signal.sigpending())"
    scontrol = f"echo '   Command={BATCH_SCRIPT}'\n"
    python = f"exec {sys.executable} -c '{look}'\n"
    for name, text in (
        ("scontrol", (signal_it if moment == "in the shell" else "") + scontrol),
        (
            "python",
            f'[ "$1" = -S ] && exec {sys.executable} "$@"\n' + (signal_it if moment == "before it listens" else "") + python,
        ),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "KESTREL_PYTHON": str(tmp_path / "python")}
    script = ["bash", str(BATCH_SCRIPT)]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=20, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, f"{moment != 'never'}\n"), done.stderr


def test_batch_script_finds_its_project_in_a_folder_with_spaces(tmp_path: Path) -> None:
    project = tmp_path / "my runs" / "kestrel"
    (project / "launch").mkdir(parents=True)
    (project / "launch/__main__.py").touch()
    script = shutil.copy(BATCH_SCRIPT, project / "launch")
    for name, text in (
        ("scontrol", f"echo '   Command={script} a.b=[x, y] name=z'"),
        ("python", f'[ "$1" = -S ] && exec {sys.executable} "$@"; echo "$PYTHONPATH" "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "KESTREL_PYTHON": str(tmp_path / "python")}
    done = subprocess.run(["bash", script, "a.b=[x, y]", "name=z"], env=env, capture_output=True, text=True, timeout=20)
    assert done.stdout == f"{project} -m launch cluster.kind=slurm experiment=kestrel_256 a.b=[x, y] name=z\n", done.stderr


def test_batch_script_outside_of_slurm_says_how_to_use_it() -> None:
    done = subprocess.run(["bash", BATCH_SCRIPT], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (2, "") and "sbatch launch/kestrel_256.sh" in done.stderr


@pytest.mark.parametrize("said", ["(null)", "/gone/launch/kestrel_256.sh name=z", "/bin/sh"])  # the last as in salloc
def test_batch_script_that_is_not_where_it_was_submitted_says_so(tmp_path: Path, said: str) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '   Command={said}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", BATCH_SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (2, "") and "submit the file by sbatch" in done.stderr


def test_addresses_are_read_from_scontrol() -> None:
    text = "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=vm Version=22.05\nNodeName=n2 NodeAddr=n2.ib State=IDLE\n\n"
    assert parse_addresses(text) == {"n1": "10.0.0.1", "n2": "n2.ib"}


def probed(**gpus: str | None) -> ProbeResult:
    lines = [json.dumps({"node": node, "ports_in_use": [5, n], "gpus": said}) for n, (node, said) in enumerate(gpus.items())]
    return read_probe("Welcome to n1\n" + "\n".join(lines), list(gpus))


def test_ports_in_use_on_any_node_are_known_and_a_node_without_an_answer_is_named() -> None:
    assert probed(n1=None, n2=None).ports_in_use == {0, 1, 5}
    with pytest.raises(SlurmError, match="no answer from n3"):
        read_probe('{"node": "n1", "ports_in_use": [], "gpus": null}', ["n1", "n3"])


def test_processes_get_the_gpus_that_slurm_assigned_on_their_node() -> None:
    nodes = [Node(name=f"n{n}", address=f"10.0.0.{n}", gpus=4) for n in (1, 2, 3)]
    given = with_assigned_gpus(nodes, probed(n1="4,5,6,7", n2="0,2,4,6,7", n3=None))
    config = RunConfig(
        model=ModelConfig(path="m"), data=DataConfig(train=["t"]), trainer=TrainerConfig(tp=2, pp=2),
        rollout=RolloutConfig(engines=6), cluster=ClusterConfig(kind="slurm", device="cuda"),
    )  # fmt: skip
    placed = place(config, Path("/run"), given, 20_000)
    seen = {p.name: p.env["CUDA_VISIBLE_DEVICES"] for p in placed}
    assert (seen["trainer-0"], seen["rollout-0"], seen["rollout-1"]) == ("4,5,6,7", "0,2,4,6", "0,1")


def test_run_that_needs_more_gpus_than_slurm_assigned_is_refused() -> None:
    nodes = [Node(name=f"n{n}", address=f"10.0.0.{n}", gpus=8) for n in (1, 2)]
    with pytest.raises(ConfigError, match=r"8 GPUs on n2, but Slurm assigned 2 .*=4,5\).*cluster.gpus_per_node=2"):
        with_assigned_gpus(nodes, probed(n1="0,1,2,3,4,5,6,7", n2="4,5"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("9:59\n", 599), ("0:00", 0), ("1:00:05", 3605), ("2-00:00:01", 172_801), ("UNLIMITED", inf), ("INVALID", inf), ("", inf)],
)
def test_time_left_is_read_in_every_format_of_slurm(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


def test_only_listening_sockets_use_a_port(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    rows = ["0: 00000000:2710 00000000:0000 0A 0", "1: 0100007F:2711 0100007F:9999 01 0", "2: 00000000:2712 00000000:0000 0A 0"]
    table.write_text("\n".join(["  sl  local_address rem_address st", *rows]) + "\n")
    assert listening([table, tmp_path / "none"]) == {10_000, 10_002}
