"""A run that was stopped goes on as if it had not been, from a checkpoint that is whole or not there."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from conf.shapes import Layout, ModelError, read_shape
from rollout import checkpoint_files
from tests.trainer import jobs, namespaces, ranks
from trainer import process_groups
from trainer.megatron import checkpoint, shards

STRAIGHT = range(5)
RESUMED = range(3, 5)
UNEVEN = {"hidden_size": 48, "num_attention_heads": 4}  # the vocabulary's bucket does not end where the next may start


class Run:
    """Five steps with a checkpoint after the third, and what came of them."""

    def __init__(self, tmp: Path, family: str, layout: Layout, world_size: int, dtype: str, **changes: int) -> None:
        self.folder, self.checkpoints, self.dtype = str(tmp / "model"), str(tmp / "checkpoints"), dtype
        jobs.make_model(tmp / "model", family, **changes)
        job = partial(jobs.train, steps=STRAIGHT, checkpoints=self.checkpoints, save_at=(3,), dtype=dtype)
        self.results = ranks.run(job, world_size, self.folder, layout)

    def resume(self, layout: Layout, world_size: int) -> list[jobs.Trained]:
        """The last two steps again, from the checkpoint."""
        job = partial(jobs.train, steps=RESUMED, checkpoints=self.checkpoints, dtype=self.dtype)
        return ranks.run(job, world_size, self.folder, layout)

    def assert_same(self, resumed: list[jobs.Trained], *, weights_atol: float, loss_rtol: float) -> None:
        straight = self.results[0]
        torch.testing.assert_close(resumed[0].losses, straight.losses[3:], rtol=loss_rtol, atol=0)
        assert resumed[0].rates == straight.rates[3:]
        expected = jobs.merged(self.results)
        for key, values in jobs.merged(resumed).items():
            torch.testing.assert_close(values, expected[key], atol=weights_atol, rtol=0)


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory):
    """Tied embeddings and two stages: the layout whose gradient buffers have several buckets."""
    return Run(tmp_path_factory.mktemp("tied"), "qwen2-tied", Layout(pp=2), 2, "float32", **UNEVEN)


def test_resuming_in_the_same_layout_is_bit_identical(tied_run):
    resumed = tied_run.resume(Layout(pp=2), 2)
    tied_run.assert_same(resumed, weights_atol=0, loss_rtol=0)
    assert [result.loaded for result in resumed] == [checkpoint.Loaded(3, {"next_step": 3})] * 2
    assert [(saved.version, saved.failure) for saved in tied_run.results[1].saves] == [(3, None)]


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (Layout(), 1),
        (Layout(tp=2), 4),
        pytest.param(Layout(tp=4), 4, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, vpp=2), 4, marks=pytest.mark.slow),
        pytest.param(Layout(), 4, marks=pytest.mark.slow),
    ],
)
def test_resuming_in_another_layout_goes_on_alike(tied_run, layout, world_size):
    # Where a gradient is near zero AdamW divides rounding by rounding: at lr 1e-2 a weight may then differ by some 1e-6.
    tied_run.assert_same(tied_run.resume(layout, world_size), weights_atol=5e-6, loss_rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "qwen3"])
def test_resuming_is_bit_identical_with_tensor_pipeline_and_data_parallelism(tmp_path, family, dtype):
    for layout, world_size in ((Layout(tp=2, pp=2), 4), (Layout(tp=2, sequence_parallel=True), 4)):
        run = Run(tmp_path / f"{layout.pp}", family, layout, world_size, dtype)
        run.assert_same(run.resume(layout, world_size), weights_atol=0, loss_rtol=0)


def optimizer_state(state: checkpoint.TrainingState) -> dict[str, torch.Tensor]:
    """Every tensor of AdamW's state, by parameter and kind."""
    inner = state.optimizer.chained_optimizers[0].optimizer
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    return {
        f"{number} {kind}": value.clone()
        for number, parameter in enumerate(parameters)
        for kind, value in {"weight": parameter.detach(), **inner.state[parameter]}.items()
    }


def save_and_load_state(folder: str, checkpoints: str) -> tuple[dict, dict, int]:
    """Saves made-up optimizer state, wipes it, loads it."""
    mesh = process_groups.initialize(Layout(pp=2), seed=1, timeout_s=60)
    state = jobs.build_job(folder, mesh, load=True, dtype="float32")
    inner = state.optimizer.chained_optimizers[0].optimizer
    for parameter, values in inner.state.items():
        # A function of the weights, so that both copies of the tied embedding agree.
        values["step"].fill_(7)
        values["exp_avg"].copy_(2 * parameter.detach() + 1)
        values["exp_avg_sq"].copy_(parameter.detach() ** 2)
    saved = optimizer_state(state)
    store = checkpoint.Checkpoints(checkpoints, state, keep=1)
    store.begin_save(1, {})
    store.wait(timeout_s=60)
    for values in inner.state.values():
        for value in values.values():
            value.zero_()
    checkpoint.load(checkpoint.latest(checkpoints), state)
    separate_steps = len({values["step"].data_ptr() for values in inner.state.values()})
    loaded = optimizer_state(state)
    process_groups.shutdown()
    return saved, loaded, separate_steps


@pytest.fixture(scope="module")
def stored_states(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("state")
    jobs.make_model(tmp / "model", "qwen2-tied", **UNEVEN)
    return ranks.run(save_and_load_state, 2, str(tmp / "model"), str(tmp / "checkpoints"))


def test_every_parameter_gets_its_own_optimizer_state_back(stored_states):
    """With several buckets Megatron saves shifted state; with torch's AdamW it fails with KeyError: 'step'."""
    for saved, loaded, _ in stored_states:
        assert saved.keys() == loaded.keys()
        assert [key for key, values in saved.items() if not torch.equal(values, loaded[key])] == []


def test_parameters_do_not_share_a_step_counter_after_loading(stored_states):
    for saved, _, separate_steps in stored_states:
        assert separate_steps == sum(key.endswith("exp_avg") for key in saved)


def train_nothing_but_save(folder: str, checkpoints: str) -> dict:
    """What saves leave behind: versions kept, a failed write, a save over an old one."""
    mesh = process_groups.initialize(Layout(tp=2), seed=1, timeout_s=60)
    state = jobs.build_job(folder, mesh, load=True, dtype="float32")
    store = checkpoint.Checkpoints(checkpoints, state, keep=2)
    seen = {"first poll": store.poll()}
    for version in (1, 2, 3):
        store.begin_save(version, {})
    seen["third"] = store.wait(timeout_s=60)
    seen["kept"] = [version for version, _ in checkpoint_files.complete(checkpoints)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen["failed"] = []
    for victim, most_bytes in ((1, 10_000), (0, 10_000), (0, 100)):
        if mesh.rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
        store.begin_save(4, {})
        seen["failed"] += store.wait(timeout_s=60)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seen["after failure"] = sorted(path.name for path in Path(checkpoints).iterdir())
    store.begin_save(3, {"again": True})
    store.wait(timeout_s=60)
    seen["loaded"] = checkpoint.load(checkpoint.latest(checkpoints), state)
    process_groups.shutdown()
    return seen


def test_the_last_few_are_kept_and_a_failed_write_costs_only_that_save(tmp_path):
    jobs.make_model(tmp_path / "model", "qwen2")
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "version-9.partial").mkdir(parents=True)
    for seen in ranks.run(train_nothing_but_save, 2, str(tmp_path / "model"), str(checkpoints)):
        assert seen["first poll"] == []
        assert [(saved.version, saved.failure) for saved in seen["third"]] == [(3, None)]
        assert seen["kept"] == [2, 3]
        assert [saved.version for saved in seen["failed"]] == [4, 4, 4]
        for saved, rank in zip(seen["failed"], (1, 0, 0), strict=True):
            assert saved.failure.startswith(f"rank {rank}: ") and "File too large" in saved.failure
        assert seen["after failure"] == ["version-2", "version-3"]
        assert seen["loaded"] == checkpoint.Loaded(3, {"again": True})


def save_while_training_goes_on(folder: str, checkpoints: str) -> dict:
    """Changes the weights right after `begin_save` returns, before the writer can have read them."""
    mesh = process_groups.initialize(Layout(), seed=1, timeout_s=60)
    state = jobs.build_job(folder, mesh, load=True, dtype="float32")
    store = checkpoint.Checkpoints(checkpoints, state, keep=2)
    store.begin_save(1, {})
    with torch.no_grad():
        for parameter in state.chunks[0].parameters():
            parameter.zero_()
    store.wait(timeout_s=60)
    checkpoint.load(checkpoint.latest(checkpoints), state)
    weights = jobs.exported(list(state.chunks), read_shape(folder), mesh)
    process_groups.shutdown()
    return weights


def test_a_save_holds_the_weights_of_the_moment_it_began(tmp_path):
    made = jobs.make_model(tmp_path / "model", "qwen2")
    (weights,) = ranks.run(save_while_training_goes_on, 1, str(tmp_path / "model"), str(tmp_path / "checkpoints"))
    assert all(torch.equal(weights[key], values) for key, values in made.state_dict().items())


def save_with_a_slow_rank(folder: str, checkpoints: str, collective_s: float, slow_s: float) -> tuple[str, list[str | None]]:
    """What a wait that is too short says, and how the save ends all the same."""
    mesh = process_groups.initialize(Layout(), seed=1, timeout_s=collective_s)
    state = jobs.build_job(folder, mesh, load=True, dtype="float32")
    store = checkpoint.Checkpoints(checkpoints, state, keep=2)
    write = shards.Shards._write

    def write_late(self: shards.Shards, buckets: list) -> None:
        time.sleep(slow_s * mesh.rank)
        write(self, buckets)

    shards.Shards._write = write_late
    store.begin_save(1, {})
    with pytest.raises(TimeoutError) as too_short:
        store.wait(timeout_s=1)
    ended = [saved.failure for saved in store.wait(timeout_s=60)]
    process_groups.shutdown()
    return str(too_short.value), ended


@pytest.mark.slow
def test_a_rank_that_writes_for_longer_than_a_collective_may_take_is_waited_for(tmp_path):
    jobs.make_model(tmp_path / "model", "qwen2")
    outcomes = ranks.run(save_with_a_slow_rank, 2, str(tmp_path / "model"), str(tmp_path / "checkpoints"), 10.0, 16.0)
    for message, ended in outcomes:
        assert "version-1.partial was not written within 1 s" in message
        assert ended == [None]


def save_until_killed(folder: str, checkpoints: str, saves: float | None) -> int:
    """Goes on from the newest checkpoint, whose every value must be its version; is killed so many saves after its first."""
    mesh = process_groups.initialize(Layout(), seed=1, timeout_s=60)
    state = jobs.build_job(folder, mesh, load=True, dtype="float32")
    store = checkpoint.Checkpoints(checkpoints, state, keep=2)
    newest = checkpoint.latest(checkpoints)
    version = checkpoint.load(newest, state).version if newest else 0
    if newest:
        values = [*state.chunks[0].parameters(), *(v for v in optimizer_state(state).values() if v.dim())]
        assert all(torch.equal(value, torch.full_like(value, version)) for value in values)
    if saves is None:
        process_groups.shutdown()
        return version
    inner = state.optimizer.chained_optimizers[0].optimizer
    killer = None
    while True:
        version += 1
        with torch.no_grad():
            for value in (*state.chunks[0].parameters(), *(v for s in inner.state.values() for v in s.values())):
                value.fill_(version)
        began_s = time.monotonic()
        ended = store.begin_save(version, {})
        if killer is None:
            ended = store.wait(timeout_s=60)
            killer = threading.Timer(saves * (time.monotonic() - began_s), os.kill, (os.getpid(), signal.SIGKILL))
            killer.start()
        assert [saved.failure for saved in ended if saved.failure] == []


@pytest.mark.slow
def test_killed_at_any_moment_of_saving_a_job_goes_on_from_a_whole_checkpoint(tmp_path):
    jobs.make_model(tmp_path / "model", "qwen2")
    arguments = str(tmp_path / "model"), str(tmp_path / "checkpoints")
    chance = random.Random(5)
    for _ in range(6):
        with pytest.raises(ranks.RankFailed, match="died"):
            ranks.run(save_until_killed, 2, *arguments, chance.uniform(0.0, 2.0))
    left = {path.name.rpartition(".")[2] for path in (tmp_path / "checkpoints").iterdir()}
    assert "partial" in left  # some kill fell into a save
    versions = ranks.run(save_until_killed, 2, *arguments, None)
    assert versions[0] == versions[1] >= 6
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def save_on_a_disk_that_fills_up(folder: str, checkpoints: str) -> tuple[list[checkpoint.Saved], list[str], checkpoint.Loaded]:
    """Saves of version 2 with ever more room, from no page to what version 1 took; the file system is this process's own."""
    namespaces.own_tmpfs(checkpoints, size_bytes=64 << 20)
    mesh = process_groups.initialize(Layout(), seed=1, timeout_s=60)
    state = jobs.build_job(folder, mesh, load=True, dtype="float32")
    store = checkpoint.Checkpoints(checkpoints, state, keep=3)
    store.begin_save(1, {})
    store.wait(timeout_s=60)
    disk_usage, plenty = shutil.disk_usage, shutil.disk_usage(checkpoints)
    size = plenty.used
    checkpoint.shutil.disk_usage = lambda path: plenty  # so that the disk is full only when it is written to
    page = os.sysconf("SC_PAGE_SIZE")
    rooms = [n * page for n in range(6)] + [size // 2] + [size - n * page for n in range(12, 0, -1)]
    failed, left = [], set()
    for room in rooms:
        filler = os.open(f"{checkpoints}/filler", os.O_CREAT | os.O_RDWR)
        os.posix_fallocate(filler, 0, disk_usage(checkpoints).free - room)
        os.close(filler)
        store.begin_save(2, {})
        failed += store.wait(timeout_s=60)
        os.unlink(f"{checkpoints}/filler")
        left |= {path.name for path in Path(checkpoints).iterdir()}
    store.begin_save(3, {"after": "all"})
    store.wait(timeout_s=60)
    loaded = checkpoint.load(checkpoint.latest(checkpoints), state)
    process_groups.shutdown()
    return failed, sorted(left), loaded


def test_a_disk_that_is_full_at_any_point_of_a_save_costs_that_save_alone(tmp_path):
    jobs.make_model(tmp_path / "model", "qwen2")
    (tmp_path / "checkpoints").mkdir()
    arguments = str(tmp_path / "model"), str(tmp_path / "checkpoints")
    [(failed, left, loaded)] = ranks.run(save_on_a_disk_that_fills_up, 1, *arguments)
    assert len(failed) == 19
    assert [saved.failure for saved in failed if "No space left" not in (saved.failure or "")] == []
    assert left == ["version-1"]
    assert loaded == checkpoint.Loaded(3, {"after": "all"})


def test_no_space_is_found_out_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    assert "needs 2.0 GB, 1.0 GB are free" in checkpoint._make_folder(tmp_path / "version-1.partial", 2 * 10**9)
    assert not (tmp_path / "version-1.partial").exists()


def load_what_was_damaged(folder: str, path: str) -> tuple[str, bool]:
    """What loading raises, and whether it left the weights alone."""
    mesh = process_groups.initialize(Layout(), seed=1, timeout_s=60)
    state = jobs.build_job(folder, mesh, load=True, dtype="float32")
    before = {name: values.clone() for name, values in state.chunks[0].named_parameters()}
    with pytest.raises(checkpoint.DamagedCheckpoint) as refused:
        checkpoint.load(path, state)
    untouched = all(torch.equal(values, before[name]) for name, values in state.chunks[0].named_parameters())
    process_groups.shutdown()
    return str(refused.value), untouched


def flip_signs(path: Path) -> None:
    """200 values change their signs, which no format notices."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    for number in range(200):
        data[(middle // 4 + number) * 4 + 3] ^= 0x80
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("harm", [flip_signs, truncate, Path.unlink])
def test_damaged_weights_are_never_loaded(tied_run, tmp_path, harm):
    path = tmp_path / "version-3"
    shutil.copytree(checkpoint.latest(tied_run.checkpoints), path)
    victim = max(path.glob("__1_*.distcp"), key=lambda file: file.stat().st_size)
    harm(victim)
    for said, untouched in ranks.run(load_what_was_damaged, 2, tied_run.folder, str(path)):
        assert said.startswith(str(victim)) and untouched


def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(tmp_path):
    for version in (3, 4):
        (tmp_path / f"version-{version}").mkdir()
    (tmp_path / "version-4.damaged").mkdir()  # from an earlier time
    said = checkpoint.put_aside(tmp_path / "version-4", checkpoint.DamagedCheckpoint("a shard is damaged"))
    assert said.startswith("a shard is damaged. The run goes on from version-3") and "version-4.damaged" in said
    assert checkpoint.latest(tmp_path) == tmp_path / "version-3"
    with pytest.raises(ModelError, match=r"there is no other checkpoint\. Bring the checkpoint back"):
        checkpoint.put_aside(tmp_path / "version-3", checkpoint.DamagedCheckpoint("a shard is damaged"))
    assert checkpoint.latest(tmp_path) == tmp_path / "version-3"


def test_without_a_checkpoint_there_is_no_newest(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None


def test_keeping_none_is_refused():
    with pytest.raises(ModelError, match="checkpoints_kept=0"):
        checkpoint.Checkpoints("anywhere", None, keep=0)


@pytest.mark.parametrize("damage", ["{", "[]", '{"version": 3}', None])
def test_a_record_that_is_damaged_is_named_with_the_way_back(tmp_path, damage):
    if damage is not None:
        (tmp_path / "kestrel.json").write_text(damage)
    with pytest.raises(ModelError, match=r"kestrel.json .* Bring the checkpoint back"):
        checkpoint.read_record(tmp_path)
