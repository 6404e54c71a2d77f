"""Each check of the doctor passes on healthy nodes, and fails, by its name, when its subject is wrong."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from rich.console import Console

from conf.compose.load import write_run
from conf.schema import AlgoConfig, ClusterConfig, ConfigError, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from launch.doctor import machine, model_folder, pins, problems, storage
from launch.doctor.__main__ import ASKED_WRONGLY, configuration, main, table
from launch.doctor.case import Case, NodeReport, gather
from launch.doctor.examine import CHECKS, check_before_start, examine
from launch.doctor.finding import Finding, Level, failure, ok, warning, worst
from launch.placement import node_facts as node
from launch.placement.placement import Node as Place
from launch.placement.placement import place
from rollout import checkpoint_files
from tests.launch.stand_ins import PROBLEM, SHAPE, write_model, write_problems

GPU = {"name": "H100", "memory_mb": 81_559, "used_mb": 4}
PYTHON = sys.executable
FIRST_PORT = 20_000


def lowest(specifier: SpecifierSet) -> str:
    return next(part.version for part in specifier if part.operator in ("==", ">="))


def healthy(name: str) -> NodeReport:
    packages = {r.name: lowest(r.specifier) for r in pins.of_roles(["trainer", "rollout"], gpus=True)}
    packages["nvidia-nccl-cu13"] = "2.28.3"
    return NodeReport(
        node=name, time_s=1000.5, python=PYTHON, python_version="3.11.4", packages=packages, env={},
        limits={"nofile": 65_536, "nproc": -1, "memlock": -1}, shm_bytes=64 * 1024**3, memory_bytes=10**12, overcommit=0,
        ephemeral_from=32_768, interfaces=["ib0", "lo"], gpus=[GPU] * 4, canary={}, unseen=[], busy_ports=[],
    )  # fmt: skip


@dataclass
class World:
    """Two healthy nodes of four GPUs, and a run on them: four trainer ranks, four engines."""

    folder: Path
    config: RunConfig
    nodes: list[NodeReport]
    asked_s: tuple[float, float] = (1000.0, 1001.0)
    lost_canaries: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()  # of the engines alone

    @property
    def case(self) -> Case:
        gpus = 4 if self.config.cluster.device == "cuda" else 0
        places = [Place(name=f"n{n}", address=f"n{n}", gpus=gpus) for n in (1, 2)][: self.config.cluster.nodes]
        placed = [
            replace(p, env={**p.env, **dict(self.env)}) if p.role == "rollout" else p
            for p in place(self.config, self.folder / "run", places, FIRST_PORT)
        ]
        return Case(
            config=self.config, run_dir=self.folder / "run", processes=placed, nodes=self.nodes, asked_s=self.asked_s,
            lost_canaries=self.lost_canaries,
        )  # fmt: skip

    def on_each(self, **changes: Any) -> None:
        self.nodes = [replace(node, **changes) for node in self.nodes]

    def on_second(self, **changes: Any) -> None:
        self.nodes[1] = replace(self.nodes[1], **changes)

    def find(self, check: str) -> Finding:
        return next(c for c in CHECKS if c.name == check).run(self.case)


@pytest.fixture
def world(tmp_path: Path) -> World:
    write_model(tmp_path / "model", shards=2)
    write_problems(tmp_path / "train.jsonl")
    write_problems(tmp_path / "heldout.jsonl", {**PROBLEM, "prompt": "another"})
    config = RunConfig(
        output=str(tmp_path),
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(train=[str(tmp_path / "train.jsonl")], heldout=[str(tmp_path / "heldout.jsonl")], max_prompt_tokens=128),
        algo=AlgoConfig(kl_coef=0.1),
        rollout=RolloutConfig(engines=4, max_completion_tokens=96),
        trainer=TrainerConfig(tp=4),
        cluster=ClusterConfig(device="cuda", nodes=2, gpus_per_node=4),
    )
    return World(tmp_path, config, [healthy("n1"), healthy("n2")])


def package(world: World, name: str, version: str) -> None:
    world.on_second(packages={**world.nodes[1].packages, name: version})


def without(world: World, name: str) -> None:
    world.on_second(packages={n: v for n, v in world.nodes[1].packages.items() if n != name})


def limit(world: World, name: str, value: int) -> None:
    world.on_second(limits={**world.nodes[1].limits, name: value})


def cut_short(world: World) -> None:
    shard = world.folder / "model/model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])


def remove(world: World, name: str) -> None:
    (world.folder / "model" / name).unlink()


def misindexed(world: World) -> None:
    index = world.folder / "model" / model_folder.INDEX
    index.write_text(index.read_text().replace('"tensor.1"', '"tensor.9"'))


def bad_header(world: World) -> None:
    shard = world.folder / "model/model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:8] + b"?" + shard.read_bytes()[9:])


def quantised(world: World) -> None:
    (world.folder / "model/config.json").write_text(json.dumps({**SHAPE, "quantization_config": {"quant_method": "fp8"}}))


def without_end_token(world: World) -> None:
    (world.folder / "model/config.json").write_text(json.dumps({**SHAPE, "eos_token_id": None}))


def with_checkpoints(world: World, *versions: int) -> Path:
    """The newest of some complete checkpoints in the run's folder."""
    for version in versions:
        folder = world.folder / f"run/checkpoints/version-{version}"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(bytes(range(256)))
        checkpoint_files.write_sums(folder, {})
    return folder


def flip_a_bit(world: World, *versions: int) -> None:
    shard = with_checkpoints(world, *versions) / "__0_0.distcp"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 128]) + shard.read_bytes()[1:])


def save_as_parquet(world: World) -> None:
    (world.folder / "train.jsonl").write_bytes(b"PAR1\x15\x04\x15")


def public_set(world: World) -> None:
    """Rows of another project, the last of which has no answer."""
    rows = [{"prompt": f"Write f{i}.", "ground_truth": [f"assert f{i}(1) == 2"]} for i in range(2)]
    rows.append({"prompt": "Write f.", "ground_truth": None})
    (world.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines(world: World, *added: str) -> None:
    with (world.folder / "train.jsonl").open("a") as file:
        file.write("\n".join(added) + "\n")


def setting(world: World, key: str, value: object) -> None:
    section, name = key.split(".")
    setattr(getattr(world.config, section), name, value)


def deeper_teacher(world: World) -> None:
    write_model(world.folder / "teacher")
    config = json.loads((world.folder / "teacher" / "config.json").read_text())
    (world.folder / "teacher" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    setting(world, "algo.teacher", str(world.folder / "teacher"))


def missing_judge_model(world: World) -> None:
    world.config.rollout.engines = 3  # the judge model takes the place of the fourth
    setting(world, "reward.judge_model", "elsewhere")


def engines(world: World, tp: int) -> None:
    world.config.rollout.engines, world.config.rollout.engine_tp = 1, tp


def engines_env(world: World, name: str, value: str) -> None:
    world.env = ((name, value),)


def trained_on(world: World) -> None:
    write_problems(world.folder / "heldout.jsonl", {**PROBLEM, "id": "other"})


def broken_user_code(world: World) -> None:
    (kept := world.folder / "run/user_code").mkdir(parents=True)
    (kept / "mine.py").write_text("1 / 0")
    setting(world, "algo.advantage", "mine:f")


BAD_KIND = json.dumps({**PROBLEM, "id": "b", "task": {"kind": "magic", "tests": [1]}})
F, W = Level.FAILURE, Level.WARNING
WRONG: list[tuple[str, Level, str, Callable[[World], None]]] = [
    ("model folder", F, "no such folder", lambda w: setting(w, "model.path", "elsewhere")),
    ("model folder", F, "holds no config.json", lambda w: remove(w, "config.json")),
    ("model folder", F, "holds no tokenizer.json", lambda w: remove(w, "tokenizer.json")),
    ("model folder", F, "1 of 2 shards are missing, model-00002", lambda w: remove(w, "model-00002-of-00002.safetensors")),
    ("model folder", F, r"model-00002-of-00002.safetensors has \d+ bytes, and should have \d+ by its header", cut_short),
    ("model folder", F, "does not hold tensor.9", misindexed),
    ("model folder", F, "its header is broken", bad_header),
    ("model folder", F, "generation_config.json and config.json have no eos_token_id", without_end_token),
    ("layout", F, "trainer.tp=3 does not divide the 8 attention heads", lambda w: setting(w, "trainer.tp", 3)),
    ("layout", F, "rollout.engine_tp=3 does not divide", lambda w: engines(w, tp=3)),
    ("layout", F, "max_position_embeddings", lambda w: setting(w, "data.max_prompt_tokens", 500)),
    ("teacher", F, "algo.teacher=elsewhere: no such model folder", lambda w: setting(w, "algo.teacher", "elsewhere")),
    ("teacher", F, r"has another shape than model.path \(layers 7 for", deeper_teacher),
    ("judge model", F, "reward.judge_model=elsewhere: no such model", missing_judge_model),
    ("problems", F, "train.jsonl:2: broken JSON", lambda w: lines(w, '{"id": "b", ')),
    ("problems", F, "train.jsonl:2: problem 'b' cannot be graded: task.kind: 'magic'", lambda w: lines(w, BAD_KIND)),
    ("problems", F, "id 'a' was used before", lambda w: lines(w, json.dumps(PROBLEM))),
    ("problems", F, "cannot read the problems", lambda w: (w.folder / "train.jsonl").unlink()),
    ("problems", F, "no problem can be used", lambda w: (w.folder / "train.jsonl").write_text("\n")),
    ("problems", F, "is not UTF-8", lambda w: (w.folder / "train.jsonl").write_bytes(b"\xff\n")),
    ("problems", F, "needs the package `datasets`", lambda w: setting(w, "data.train", ["hf://x"])),
    ("problems", F, "train.jsonl: a broken Parquet file", lambda w: save_as_parquet(w)),
    ("all problems", F, r"train.jsonl:2: a problem is a JSON object, got list \(and 1 more\)", lambda w: lines(w, "[1]", "2")),
    ("problems", W, r"2 problems recognised as TRL.*; 1 row refused \(1: no answer\)", public_set),
    ("checkpoint", F, "__0_0.distcp is missing, and there is no older checkpoint",
     lambda w: (with_checkpoints(w, 4) / "__0_0.distcp").unlink()),
    ("checkpoint", F, "SHA256SUMS cannot be read", lambda w: (with_checkpoints(w, 4, 8) / "SHA256SUMS").unlink()),
    ("checkpoint digests", F, "__0_0.distcp is damaged", lambda w: flip_a_bit(w, 4)),
    ("checkpoint digests", W, "version-8/__0_0.distcp is damaged", lambda w: flip_a_bit(w, 4, 8)),
    ("layout", F, "config.json has a quantization_config .method 'fp8'.: these weights are quantised", quantised),
    ("held-out problems", W, "1 of 1 held-out problems are trained on too, 'other' first", trained_on),
    ("user code", F, "algo.advantage=mine:f: there is no mine.py", lambda w: setting(w, "algo.advantage", "mine:f")),
    ("user code", F, r"mine.py:1: ZeroDivisionError", broken_user_code),
    ("disk space", F, "GB needed", lambda w: setting(w, "trainer.checkpoints_kept", 10**12)),
    ("nodes", W, "1 of 2 nodes were asked, n2 was not", lambda w: w.nodes.pop()),
    ("GPUs", F, "n2 sees 3 GPUs, but the run places processes on 4", lambda w: w.on_second(gpus=[GPU] * 3)),
    ("GPUs", W, "70000 MB of a H100 on n2 are in use", lambda w: w.on_second(gpus=[GPU | {"used_mb": 70_000}] * 4)),
    ("GPUs", W, "different GPUs: A100, H100", lambda w: w.on_second(gpus=[GPU | {"name": "A100"}] * 4)),
    ("shared folder", F, "n2 cannot write .*: Permission denied", lambda w: w.on_second(canary={"error": "Permission denied"})),
    ("shared folder", F, "the file that n2 wrote to .* is not visible here", lambda w: setattr(w, "lost_canaries", ("n2",))),
    ("inputs", F, "n2 does not see /data/m", lambda w: w.on_second(unseen=["/data/m"])),
    ("ports", F, "port 20001 is in use on n2", lambda w: w.on_second(busy_ports=[20_001])),
    ("ports", W, "n2 assigns ports from 15000", lambda w: w.on_second(ephemeral_from=15_000)),
    ("open files", F, "n2 allows 256 open files", lambda w: limit(w, "nofile", 256)),
    ("open files", W, "n2 allows 4096 open files", lambda w: limit(w, "nofile", 4096)),
    ("user processes", F, "n2 allows 100 processes", lambda w: limit(w, "nproc", 100)),
    ("locked memory", W, "n2 allows 64 KiB of locked memory", lambda w: limit(w, "memlock", 65_536)),
    ("shared memory", F, "n2: 0.1 GiB free in /dev/shm", lambda w: w.on_second(shm_bytes=64 * 1024**2)),
    ("memory", W, "n1: 0.0 GB of memory available", lambda w: w.on_each(memory_bytes=1000)),
    ("overcommit", W, "vm.overcommit_memory=2 on n2", lambda w: w.on_second(overcommit=2)),
    ("clocks", W, "clock of n2 is off by 9.0 s", lambda w: w.on_second(time_s=1010.0)),
    ("clocks", F, "clock of n2 is off by 900.0 s", lambda w: w.on_second(time_s=100.0)),
    ("python environments", F, "is Python 3.10.1", lambda w: w.on_second(python_version="3.10.1")),
    ("python environments", F, "lacks megatron-core", lambda w: without(w, "megatron-core")),
    ("versions", F, "has sglang 0.4.0", lambda w: package(w, "sglang", "0.4.0")),
    ("versions", F, "has transformer-engine 1.0", lambda w: package(w, "transformer-engine", "1.0")),
    ("same everywhere", F, "torch is 2.99 on n2 and 2.9 on n1", lambda w: package(w, "torch", "2.99")),
    ("NCCL", F, "NCCL_CUMEM_ENABLE is 0 for trainer-0 and 1 for rollout-0", lambda w: engines_env(w, "NCCL_CUMEM_ENABLE", "1")),
    ("NCCL", F, "NCCL_ALGO is unset for trainer-0 and Ring for", lambda w: w.on_second(env={"NCCL_ALGO": "Ring"})),
    ("NCCL", F, "different NCCLs", lambda w: package(w, "nvidia-nccl-cu13", "2.27.0")),
    ("interfaces", F, "NCCL_SOCKET_IFNAME=eth, but n2 has ib0, lo", lambda w: w.on_second(env={"NCCL_SOCKET_IFNAME": "eth"})),
    ("Weights & Biases", F, "needs the package of Weights & Biases", lambda w: setting(w, "trainer.wandb_project", "p")),
]  # fmt: skip
TESTED_BELOW = {"trainer accepts", "prompts", "sandbox"}  # with real processes and a real tokenizer


@pytest.mark.parametrize(("check", "level", "said", "wrong"), WRONG)
def test_what_is_wrong_is_found_by_name(
    world: World, check: str, level: Level, said: str, wrong: Callable[[World], object]
) -> None:
    assert world.find(check).level <= Level.SKIPPED
    wrong(world)
    found = world.find(check)
    assert (found.level, bool(re.search(said, found.message))) == (level, True), found
    assert found.remedy


def test_every_check_has_a_case_in_which_it_fails() -> None:
    assert {check.name for check in CHECKS} == {name for name, *_ in WRONG} | TESTED_BELOW
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_interface_names_are_matched_as_nccl_does(world: World) -> None:
    for fine in ("ib", "eth,ib", "^docker", "=ib0", ""):
        world.on_each(env={"NCCL_SOCKET_IFNAME": fine})
        assert world.find("interfaces").level is Level.OK
    world.on_each(env={"NCCL_SOCKET_IFNAME": "=ib"})
    assert world.find("interfaces").level is Level.FAILURE


def test_checkpoint_of_the_kestrel_model_is_448_gb() -> None:
    one, needed = storage.needed_bytes(RunConfig(), 32e9)
    assert one == 32e9 * 14
    assert needed == 3 * one + 64e9


def test_on_a_cpu_neither_gpus_nor_transformer_engine_are_asked_for(world: World) -> None:
    world.config.cluster = ClusterConfig(device="cpu", nodes=1)
    world.nodes = [replace(world.nodes[0], gpus=[])]
    without_engine = {n: v for n, v in world.nodes[0].packages.items() if n != "transformer-engine"}
    world.on_each(packages=without_engine)
    assert {check.name for check in CHECKS if check.fast and check.run(world.case).level >= Level.WARNING} == set()
    assert world.find("GPUs").level is Level.SKIPPED


def test_files_that_the_launch_will_make_are_not_missing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setting(world, "model.prepare", "debug")
    setting(world, "model.path", "cache/debug/model")
    setting(world, "data.train", ["cache/debug/data/train.jsonl"])
    assert {world.find(name).level for name in ("model folder", "problems", "all problems")} == {Level.SKIPPED}
    Path("cache/debug/data").mkdir(parents=True)  # it was made, without this one
    assert {world.find(name).level for name in ("problems", "all problems")} == {Level.FAILURE}


def test_file_that_nothing_makes_is_missing_although_another_one_will_be_made(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    setting(world, "model.prepare", "debug")
    for key in ("data.train", "data.heldout"):
        setting(world, key, ["cache/debug/data/train.jsonl", "nofile.jsonl"])
        assert f"{key}: cannot read the problems nofile.jsonl" in world.find("problems").message
        setting(world, key, ["cache/debug/data/train.jsonl"])
    assert world.find("problems").level is Level.SKIPPED


def test_more_tensor_parallel_ranks_than_key_value_heads_are_fine(world: World) -> None:
    """Trainer and engines replicate key-value heads when the number of ranks is a multiple of theirs."""
    (world.folder / "model/config.json").write_text(json.dumps({**SHAPE, "num_key_value_heads": 2}))
    engines(world, tp=4)
    assert world.config.trainer.tp == 4 and world.find("layout").level is Level.OK


def test_end_token_may_stand_in_the_generation_config(world: World) -> None:
    without_end_token(world)
    (world.folder / "model/generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    assert world.find("model folder").level is Level.OK


def test_limits_of_memory_on_a_cpu_grow_with_the_ranks(world: World) -> None:
    world.config.cluster = ClusterConfig(device="cpu", nodes=1)
    world.nodes = [replace(world.nodes[0], memory_bytes=5 * 10**9)]
    assert world.find("memory").level is Level.WARNING
    world.config.rollout.engines = world.config.trainer.tp = 1
    assert world.find("memory").level is Level.OK


def test_memory_that_a_save_gathers_counts_on_gpus(world: World) -> None:
    """Each rank gathers 12 bytes per parameter of its share in the host's memory, and more without buckets."""
    trainer = world.config.trainer
    trainer.overlap_grad_reduce, world.config.algo.kl_coef = True, 0.0
    gathered = 12 * world.case.parameters / (trainer.tp * trainer.pp) * 4  # ranks on the first node
    world.on_each(memory_bytes=int(gathered) + 1)
    assert world.find("memory").level is Level.OK
    world.on_each(memory_bytes=int(gathered) - 1)
    assert world.find("memory").level is Level.WARNING
    world.on_each(memory_bytes=int(1.5 * gathered))
    assert world.find("memory").level is Level.OK
    trainer.overlap_grad_reduce = False
    assert world.find("memory").level is Level.WARNING


def test_each_node_needs_memory_for_its_own_processes(world: World) -> None:
    """The trainer is on the first node. The second one, with engines, needs less. Other machines do not count."""
    world.on_second(memory_bytes=1)
    assert world.find("memory").level is Level.OK
    world.on_each(node="login")
    found = world.find("memory")
    assert found.level is Level.SKIPPED and "a node needs about" in found.message


def test_checks_of_nodes_that_were_not_asked_are_skipped(world: World) -> None:
    world.on_each(node="login")
    assert {world.find(name).level for name in ("GPUs", "shared folder", "inputs", "memory")} == {Level.SKIPPED}


def test_missing_inputs_are_not_reported_as_seen(world: World) -> None:
    setting(world, "model.path", "elsewhere")
    found = world.find("inputs")
    assert found.level is Level.SKIPPED and "elsewhere" in found.message


def test_missing_packages_are_installed_for_gpus_or_for_cpus(world: World) -> None:
    without(world, "transformer-engine")
    assert "make install-gpu" in world.find("python environments").remedy
    world.config.cluster = ClusterConfig(device="cpu", nodes=2)
    without(world, "megatron-core")
    assert "make install," in world.find("python environments").remedy


def test_this_machine_answers_and_a_good_run_passes(world: World) -> None:
    world.config.cluster = ClusterConfig(device="cpu", nodes=1)
    case = world.case
    here = replace(case, processes=[replace(p, node="x") for p in case.processes])
    found = gather(here.config, here.run_dir, here.processes)
    assert [node.python for node in found.nodes] == [PYTHON]
    assert not found.lost_canaries and not list(world.folder.glob(".canary-*"))
    assert abs(found.nodes[0].time_s - found.asked_s[0]) < 60
    named = replace(found, processes=[replace(p, node=found.nodes[0].node) for p in case.processes])
    assert [(name, f.message) for name, f in examine(named, fast=True) if f.level is Level.FAILURE] == []


def test_answers_belong_to_the_python_as_the_run_names_it(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that is found in PATH, or by a relative path, reports another path for itself."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/my-python").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (tmp_path / "bin/my-python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    world.config.cluster = ClusterConfig(device="cpu", nodes=1, trainer_python="my-python")
    found = gather(world.config, world.case.run_dir, world.case.processes)
    assert {node.python for node in found.nodes} == {"my-python", PYTHON} == set(found.roles_of)
    bare = replace(found, nodes=[replace(asked, packages={}) for asked in found.nodes if asked.python == "my-python"])
    said = next(check for check in CHECKS if check.name == "python environments").run(bare).message
    assert "my-python" in said and "(trainer) lacks" in said and "megatron-core" in said


def test_run_that_is_resumed_needs_no_room_for_the_checkpoints_that_it_has(world: World) -> None:
    free = shutil.disk_usage(world.folder).free
    one, _ = storage.needed_bytes(world.config, world.case.parameters)
    setting(world, "trainer.checkpoints_kept", int(2 * free / one))
    assert world.find("disk space").level is Level.FAILURE
    (world.folder / "run/checkpoints/version-4").mkdir(parents=True)
    with (world.folder / "run/checkpoints/version-4/shard").open("wb") as shard:
        shard.truncate(2 * free)  # takes no room
    assert world.find("disk space").level is Level.OK


def test_gpu_that_reports_no_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 4'; echo 'NVIDIA GB10, [N/A], [N/A]'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [(gpu["memory_mb"], gpu["used_mb"]) for gpu in node.gpus()] == [(143_771, 4), (0, 0)]


@pytest.mark.parametrize("check", ["trainer accepts", "sandbox"])
def test_checks_that_need_the_container_are_skipped_outside_of_it(world: World, check: str) -> None:
    world.config.cluster.container, world.config.cluster.trainer_python = "image", "/opt/python-of-the-image"
    world.config.cluster.rollout_python = world.config.cluster.trainer_python
    assert world.find(check).level is Level.SKIPPED


def test_folder_that_cannot_be_written_is_a_failure_of_the_real_canary(world: World) -> None:
    assert "error" in node._write_canary(Path("/proc"))


def test_launch_is_refused_with_every_failure_and_its_remedy(world: World) -> None:
    world.config.cluster = ClusterConfig(device="cpu", nodes=1)
    setting(world, "trainer.tp", 3)
    lines(world, "{")
    said: list[str] = []
    with pytest.raises(ConfigError) as caught:
        check_before_start(world.config, world.folder / "run", world.case.processes, said.append)
    assert "trainer.tp=3 does not divide" in str(caught.value) and "train.jsonl:2: broken JSON" in str(caught.value)
    assert "choose one of 1, 2, 4, 8" in str(caught.value)


def test_worst_finding_counts_the_others() -> None:
    good = ok("fine")
    assert worst([good], good) is good
    found = worst([warning("a", "x"), failure("b", "y"), warning("c", "z")], good)
    assert (found.message, found.remedy, found.level) == ("b (and 2 more)", "y", Level.FAILURE)


def test_table_shows_words_in_brackets() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table([("a", failure("no [data] in /x[/y]", "pip install 'kestrel[data]'"))]))
    assert "no [data] in /x[/y]" in (said := console.export_text()) and "kestrel[data]" in said


def test_failure_without_a_remedy_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="remedy"):
        failure("broken", "")
    with pytest.raises(ValueError, match="remedy"):
        Finding(level=Level.OK, message="fine", remedy="do")


class Tokenizer:
    """The parts of a tokenizer that the checks use."""

    def __init__(self, tokens: int, eos_token_id: int | None = 0) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id

    def __len__(self) -> int:
        return self.tokens


@pytest.mark.parametrize(
    ("tokenizer", "lengths", "level", "said"),
    [
        (Tokenizer(256), [10, 128], Level.OK, "256 tokens; 2 prompts of up to 128 of 128"),
        (Tokenizer(257), [10], F, "257 tokens, but the model's embedding has 256 rows"),
        (Tokenizer(256, None), [10], F, "no end-of-sequence token"),
        (Tokenizer(256), [129, 500], F, "all of 2 prompts are longer"),
        (Tokenizer(256), [129, 10], W, "1 of 2 prompts are longer"),
    ],
)
def test_tokenizer_must_fit_the_model_and_the_prompts(
    world: World, tokenizer: Tokenizer, lengths: list[int], level: Level, said: str
) -> None:
    found = problems.judge_prompts(world.case, tokenizer, lengths)
    assert found.level is level and said in found.message


def test_missing_sandbox_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("import sys; sys.exit('user namespaces are forbidden')")
    found = problems.run_tiny_job([sys.executable, str(judge)])
    assert found.level is Level.FAILURE and "user namespaces are forbidden" in found.message
    assert problems.run_tiny_job([str(tmp_path / "nothing")]).level is Level.FAILURE


def test_real_sandbox_passes_the_tiny_job(world: World) -> None:
    assert world.find("sandbox").level is Level.OK


@pytest.mark.slow
def test_trainer_refuses_a_model_without_its_tensors(world: World) -> None:
    found = world.find("trainer accepts")
    assert found.level is Level.FAILURE
    assert "lacks the tensor 'model.embed_tokens.weight'" in found.message
    config = world.folder / "model/config.json"
    config.write_text(json.dumps({key: value for key, value in SHAPE.items() if key != "rms_norm_eps"}))
    assert "rms_norm_eps" in world.find("trainer accepts").message
    config.write_text(json.dumps(SHAPE | {"architectures": ["GPT2LMHeadModel"]}))
    assert "architecture 'GPT2LMHeadModel' is unknown" in world.find("trainer accepts").message


@pytest.mark.slow
def test_tokenizer_that_does_not_load_is_a_failure(world: World) -> None:
    found = world.find("prompts")
    assert found.level is Level.FAILURE


def test_number_of_ranks_is_read_from_the_command() -> None:
    assert machine._ranks(("python", "--nproc-per-node", "3")) == 3


def test_resumed_run_is_examined_with_its_stored_configuration_and_in_its_folder(tmp_path: Path) -> None:
    written = RunConfig(
        name="before",
        output="elsewhere",
        model=ModelConfig(path="m"),
        data=DataConfig(train=["t"]),
        trainer=TrainerConfig(tokens_per_microbatch=20_480),
    )
    write_run(written, tmp_path / "one")
    resume = f"resume={tmp_path / 'one'}"
    here = replace(written, name="one", output=str(tmp_path), resume=str(tmp_path / "one"))
    assert configuration([resume, "trainer.lr=0.5"]) == replace(here, trainer=replace(written.trainer, lr=0.5))
    with pytest.raises(ConfigError, match=r"max_staleness=9: the run was begun with"):
        configuration([resume, "rollout.max_staleness=9"])
    with pytest.raises(ConfigError, match="nowhere is not the folder of a run"):
        configuration(["resume=nowhere"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("output=/dev/null", "/dev/null is not a folder"),
        ("output=/proc/outputs", "/proc cannot be written"),
        ("cluster.nodes=3", "cluster.nodes=3: with cluster.kind=local a run has this machine only"),
    ],
)
def test_doctor_refuses_what_a_launch_would_refuse(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fast", "experiment=debug", word]) == ASKED_WRONGLY
    assert said in capsys.readouterr().err
