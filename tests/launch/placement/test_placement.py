from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout.__main__
from conf.schema import (
    AlgoConfig,
    ClusterConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from launch.placement.gpus import gpus_found
from launch.placement.placement import Node, Restart, TooFewNodes, describe, place
from launch.placement.ports import ENGINE_PORTS, FIRST_PORT, PORT_LIMIT, PUSH_PORTS, Ports, choose_base_port
from launch.slurm.allocation import local_nodes
from rollout.queue.keys import RunKeys

HERE = [Node(name="here", address="127.0.0.1")]
RUN = Path("outputs/r")


def config(
    *, device: str = "cpu", tp: int = 2, pp: int = 2, dp: int = 1, engines: int = 2, engine_tp: int = 1, base_port: int = 0
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(train=["t"]),
        trainer=TrainerConfig(tp=tp, pp=pp, dp=dp),
        rollout=RolloutConfig(engines=engines, engine_tp=engine_tp),
        cluster=ClusterConfig(device=device, base_port=base_port),
    )


def test_one_machine_without_gpus_holds_every_role() -> None:
    processes = place(config(), RUN, HERE, 20_000, python="py")
    assert [p.name for p in processes] == ["queue-0", "trainer-0", "rollout-0", "judge-0"]
    assert {p.name: p.restart for p in processes} == {
        "queue-0": Restart.ALWAYS,
        "trainer-0": Restart.NEVER,
        "rollout-0": Restart.ON_FAILURE,
        "judge-0": Restart.ON_FAILURE,
    }
    by_name = {p.name: p for p in processes}
    assert by_name["queue-0"].argv == ("py", "-m", "rollout.queue", "--run", "outputs/r", "--bind", "tcp://127.0.0.1:20000")
    trainer = " ".join(by_name["trainer-0"].argv)
    assert "--nproc-per-node 4" in trainer
    assert trainer.endswith("py -m trainer --run outputs/r --queue tcp://127.0.0.1:20000 --push-port 20008")
    rollout = " ".join(by_name["rollout-0"].argv)
    assert "--nproc-per-node 2" in rollout
    assert rollout.endswith("py -m rollout --run outputs/r --queue tcp://127.0.0.1:20000 --engine-port 20024 --first-engine 0")
    assert by_name["judge-0"].argv[-2:] == ("--name", "judge-0")
    assert all(p.env["CUDA_VISIBLE_DEVICES"] == "" for p in processes)


def test_placement_is_a_function_of_its_arguments() -> None:
    assert place(config(), RUN, HERE, 20_000) == place(config(), RUN, HERE, 20_000)


def test_trainer_and_engines_share_one_machine_with_gpus_without_overlap() -> None:
    processes = place(config(device="cuda", engine_tp=2), RUN, [Node(name="n", address="n", gpus=8)], 20_000)
    gpus = {p.role: p.gpus for p in processes}
    assert gpus["trainer"] == (0, 1, 2, 3)
    assert gpus["rollout"] == (4, 5, 6, 7)
    assert {p.role: p.env["CUDA_VISIBLE_DEVICES"] for p in processes}["rollout"] == "4,5,6,7"


def test_only_the_gpus_of_the_launcher_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that others use too, or in a Slurm job with a part of its node."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,GPU-5a,7,-1,6")  # CUDA reads no further than -1
    run = config(device="cuda", tp=2, pp=1, engines=2)
    (node,) = local_nodes(run)
    placed = {p.role: p.env["CUDA_VISIBLE_DEVICES"] for p in place(run, RUN, [node], 20_000)}
    assert placed == {"queue": "", "trainer": "2,3", "rollout": "GPU-5a,7", "judge": ""}
    run.cluster.gpus_per_node = 8
    with pytest.raises(ConfigError, match=r"gpus_per_node=8, but CUDA_VISIBLE_DEVICES=2,3,GPU-5a,7 names 4"):
        local_nodes(run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_found() == 0


def test_trainer_larger_than_a_node_fills_nodes_and_engines_follow() -> None:
    nodes = [Node(name=f"n{n}", address=f"10.0.0.{n}", gpus=8) for n in range(4)]
    processes = place(config(device="cuda", tp=8, pp=2, engines=4, engine_tp=4), RUN, nodes, 20_000)
    trainers = [p for p in processes if p.role == "trainer"]
    assert [p.node for p in trainers] == ["n0", "n1"]
    assert [p.argv[p.argv.index("--node-rank") + 1] for p in trainers] == ["0", "1"]
    assert all(p.argv[p.argv.index("--master-addr") + 1] == "10.0.0.0" for p in trainers)
    rollouts = [p for p in processes if p.role == "rollout"]
    assert [p.node for p in rollouts] == ["n2", "n3"]
    assert [p.argv[-1] for p in rollouts] == ["0", "2"]  # --first-engine
    assert all("tcp://10.0.0.0:20000" in p.argv for p in processes)


def test_teacher_and_judge_model_get_gpus_and_ports_of_their_own() -> None:
    wanted = config(device="cuda", tp=2, pp=1, engines=2)
    wanted = replace(
        wanted,
        algo=AlgoConfig(teacher="folder", teacher_on="engine", teacher_tp=2),
        reward=RewardConfig(judge_model="judge", judge_model_tp=4),
    )
    nodes = [Node(name=f"n{n}", address=f"n{n}", gpus=8) for n in range(2)]
    first, second = (p for p in place(wanted, RUN, nodes, 20_000) if p.role == "rollout")
    assert (first.gpus, second.gpus) == ((2, 3, 4, 5), (0, 1, 2, 3))
    assert first.ports == {"rendezvous": 20048, "engine-0": 20016, "engine-1": 20024, "teacher": 20032}
    assert second.ports == {"rendezvous": 20051, "judge-model": 20040}
    assert second.argv[-1] == "3"  # --first-engine
    with pytest.raises(ConfigError, match=r"the engines 2 \(.*\) and the teacher 2 and the judge-model 4, which do not fit"):
        place(wanted, RUN, nodes[:1], 20_000)


def test_rank_of_the_fleet_takes_the_gpus_behind_those_of_the_ranks_before_it(tmp_path: Path) -> None:
    wanted = config(engines=2, engine_tp=2)
    wanted = replace(wanted, reward=RewardConfig(judge_model="judge", judge_model_tp=4))
    keys = RunKeys.create(tmp_path)
    given = ["--run", str(tmp_path), "--queue", "tcp://127.0.0.1:1", "--engine-port", "20000", "--first-engine", "1"]
    arguments = rollout.__main__.read_arguments(given)
    engine, judge = (rollout.__main__.engine_settings(wanted, keys, arguments, number) for number in (1, 2))
    assert (engine.first_gpu, engine.tp, engine.port, engine.load_format, engine.tokenizer) == (0, 2, 20000, "dummy", False)
    assert (judge.first_gpu, judge.tp, judge.port, judge.load_format, judge.tokenizer) == (2, 4, 20008, "auto", True)
    assert judge.model == Path("judge")


def test_reserved_ports_are_those_that_the_processes_use() -> None:
    assert ENGINE_PORTS == rollout.__main__.PORTS_PER_ENGINE
    source = Path(__file__).parents[3] / "trainer/push/push.py"  # read: importing it takes seconds
    assert f"\nGENERATIONS = {PUSH_PORTS}\n" in source.read_text()


@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.integers(1, 4), dp=st.integers(1, 4), engines=st.integers(1, 12),
    engine_tp=st.sampled_from([1, 2, 4, 8]), nodes=st.integers(1, 12),
)  # fmt: skip
def test_no_gpu_is_missing_or_used_twice(tp: int, pp: int, dp: int, engines: int, engine_tp: int, nodes: int) -> None:
    machines = [Node(name=f"n{n}", address=f"n{n}", gpus=8) for n in range(nodes)]
    wanted = config(device="cuda", tp=tp, pp=pp, dp=dp, engines=engines, engine_tp=engine_tp)
    try:
        processes = place(wanted, RUN, machines, 20_000)
    except ConfigError as error:
        assert "GPUs" in str(error)
        return
    held = [(p.node, gpu) for p in processes for gpu in p.gpus]
    assert len(held) == len(set(held)) == tp * pp * dp + engines * engine_tp
    assert all(gpu < 8 for _, gpu in held)
    listening = [(p.node, port) for p in processes for port in p.ports.values()]
    assert len(listening) == len(set(listening))
    assert all(20_000 <= port < 20_000 + Ports.count(wanted) for _, port in listening)


@pytest.mark.parametrize(("tp", "engines", "gpus"), [(4, 2, 4), (8, 1, 8), (12, 1, 8)])
def test_machine_that_is_too_small_is_refused_with_what_is_needed(tp: int, engines: int, gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"the trainer needs {tp} GPUs"):
        place(config(device="cuda", tp=tp, pp=1, engines=engines), RUN, [Node(name="n", address="n", gpus=gpus)], 20_000)


def test_fixed_base_without_room_above_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="65000: the run needs 924 ports, and 65535 is the highest port"):
        choose_base_port(RUN, config(base_port=65_000, engines=100), lambda port: True)


def test_ports_are_the_same_for_the_same_folder_and_differ_between_folders() -> None:
    free = lambda port: True  # noqa: E731
    assert choose_base_port(RUN, config(), free) == choose_base_port(RUN, config(), free)
    assert len({choose_base_port(Path(f"outputs/{n}"), config(), free) for n in range(20)}) > 10


@given(st.text(min_size=1, max_size=20), st.integers(1, 64))
def test_ports_lie_below_the_ephemeral_range(name: str, engines: int) -> None:
    wanted = config(engines=engines)
    base = choose_base_port(Path("outputs") / name.replace("\0", ""), wanted, lambda port: True)
    assert base >= FIRST_PORT
    assert base + Ports.count(wanted) <= PORT_LIMIT


def test_block_with_a_port_in_use_is_skipped() -> None:
    first = choose_base_port(RUN, config(), lambda port: True)
    second = choose_base_port(RUN, config(), lambda port: port != first + 3)
    assert abs(second - first) >= Ports.count(config())


def test_port_in_use_in_a_fixed_block_is_named() -> None:
    with pytest.raises(ConfigError, match="port 20003 is in use"):
        choose_base_port(RUN, config(base_port=20_000), lambda port: port != 20_003)


def test_description_shows_every_process_with_its_command() -> None:
    processes = place(config(), RUN, HERE, 20_000)
    text = describe(processes)
    assert all(p.name in text and " ".join(p.argv) in text for p in processes)


def test_every_judge_gets_a_name_and_a_node() -> None:
    wanted = config()
    wanted = replace(wanted, reward=replace(wanted.reward, judges=3))
    assert [p.name for p in place(wanted, RUN, HERE, 20_000) if p.role == "judge"] == ["judge-0", "judge-1", "judge-2"]


@given(
    pp=st.integers(1, 3), engines=st.integers(1, 6), spares=st.integers(0, 2), lost=st.sets(st.integers(1, 10), max_size=6)
)  # fmt: skip
def test_after_losses_the_trainer_is_complete_and_processes_that_keep_their_node_are_unchanged(
    pp: int, engines: int, spares: int, lost: set[int]
) -> None:
    wanted = config(device="cuda", tp=8, pp=pp, engines=engines, engine_tp=8)
    nodes = [Node(name=f"n{n}", address=f"n{n}", gpus=8) for n in range(pp + engines + spares)]
    names = {f"n{n}" for n in lost}
    before = place(wanted, RUN, nodes, 20_000)
    try:
        after = place(wanted, RUN, nodes, 20_000, lost=names)
    except TooFewNodes as error:
        assert len(names & {node.name for node in nodes}) >= engines + spares
        assert "too few are left" in str(error) or "none is left" in str(error)
        return
    assert not {p.node for p in after} & names
    assert [p.name for p in after if p.role == "trainer"] == [f"trainer-{n}" for n in range(pp)]
    held = [(p.node, gpu) for p in after for gpu in p.gpus]
    assert len(held) == len(set(held))
    untouched = {p.name for p in before if p.node not in names}
    moved = [p.name for p in after if p not in before]
    taken = {p.node for p in after if p.name in moved and p.role == "trainer"}
    assert all(name not in untouched for name in moved if not name.startswith("judge"))
    gone = {p.name: p for p in before if p.name not in {q.name for q in after}}
    assert all(p.role == "rollout" and (p.node in names or p.node in taken) for p in gone.values())
    fleet = sum(p.role == "rollout" for p in after)
    assert fleet == min(
        engines, len(nodes) - len(names & {n.name for n in nodes}) - pp
    )  # no living node is idle while a share has no node


def test_spare_takes_over_before_a_rollout_node_must() -> None:
    wanted = config(device="cuda", tp=8, pp=2, engines=2, engine_tp=8)
    nodes = [Node(name=f"n{n}", address=f"n{n}", gpus=8) for n in range(5)]
    at = {p.name: p.node for p in place(wanted, RUN, nodes, 20_000, lost={"n1"})}
    assert (at["trainer-1"], at["rollout-0"], at["rollout-1"]) == ("n4", "n2", "n3")
    at = {p.name: p.node for p in place(wanted, RUN, nodes, 20_000, lost={"n1", "n4"})}
    assert (at["trainer-1"], at["rollout-0"]) == ("n3", "n2") and "rollout-1" not in at


def test_on_cpus_a_run_spreads_over_its_nodes() -> None:
    nodes = [Node(name=f"n{n}", address=f"10.0.0.{n}") for n in range(4)]
    processes = place(config(), RUN, nodes, 20_000)
    assert [p.node for p in processes] == ["n0", "n0", "n1", "n2", "n2"]  # queue, two trainers, rollout, judge: n3 is spare
    assert not any(p.gpus for p in processes)


def test_no_port_is_used_twice_in_a_run() -> None:
    wanted = config(device="cuda", tp=8, pp=1, engines=12, engine_tp=4)
    nodes = [Node(name=f"n{n}", address="same", gpus=8) for n in range(7)]
    ports = [port for p in place(wanted, RUN, nodes, 20_000) for port in p.ports.values()]
    assert len(ports) == len(set(ports))


@given(first=st.integers(1, 60), second=st.integers(1, 60), job=st.integers(1, 10**6))
def test_jobs_with_neighbouring_numbers_never_share_a_port(first: int, second: int, job: int) -> None:
    ranges = []
    for engines, number in ((first, job), (second, job + 1)):
        base = choose_base_port(RUN, config(engines=engines), lambda port: True, job=number)
        ranges.append(range(base, base + Ports.count(config(engines=engines))))
    assert not set(ranges[0]) & set(ranges[1]) or Ports.count(config(engines=max(first, second))) > 512


def test_trainer_and_fleet_may_run_in_different_environments() -> None:
    wanted = config()
    cluster = replace(wanted.cluster, trainer_python="/t/python", rollout_python="/r/python")
    pythons = {p.role: p.argv[0] for p in place(replace(wanted, cluster=cluster), RUN, HERE, 20_000, python="py")}
    assert pythons == {"queue": "/r/python", "trainer": "/t/python", "rollout": "/r/python", "judge": "/r/python"}
