"""A training step gives the same weights however the batch and the model are cut, and learns what it should."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from conf.schema import RunConfig
from conf.shapes import Layout
from rollout.ledger.records import Batch, Finish, Group, Trajectory
from tests.trainer import ranks

VOCAB = 64


def model_folder(path, layers: int = 4, seed: int = 0) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


def batch(step: int = 0, groups: int = 4, size: int = 4) -> Batch:
    rng = np.random.default_rng(step)

    def trajectory() -> Trajectory:
        prompt, completion = int(rng.integers(2, 8)), int(rng.integers(1, 20))
        sampled = np.arange(prompt + completion) >= prompt
        return Trajectory(
            tokens=rng.integers(0, VOCAB, prompt + completion).astype(np.int32),
            sampled=sampled,
            logprobs=np.where(sampled, -4.0, 0).astype(np.float32),
            versions=np.where(sampled, step, -1).astype(np.int32),
            reward=float(rng.integers(0, 2)),
            finish=Finish.STOP,
            segments=1,
        )

    return Batch(
        step=step,
        groups=[Group(prompt_id=str(g), index=g, trajectories=[trajectory() for _ in range(size)]) for g in range(groups)],
    )


def config(tokens_per_microbatch: int = 64) -> RunConfig:
    c = RunConfig()
    c.algo.groups_per_step, c.algo.completions_per_group, c.algo.minibatches = 4, 4, 2
    c.algo.kl_coef = 0.1
    c.trainer.tokens_per_microbatch = tokens_per_microbatch
    c.trainer.lr = 1e-3
    return c


def steps(folder: str, tp: int, pp: int, tokens_per_microbatch: int, out: str) -> dict[str, float]:
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron import hf_weights
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, train_step

    settings = config(tokens_per_microbatch)
    settings.model.path, settings.model.dtype = folder, "float32"
    mesh = process_groups.initialize(Layout(tp=tp, pp=pp), seed=0, timeout_s=60)
    policy = load_policy(settings, mesh)
    figures = {}
    for step in range(2):
        figures = train_step(policy, load_algorithm(settings.algo), batch(step), settings, Stopwatch())
    hf_weights.save(policy.chunks, policy.shape, mesh, out, description=folder)
    process_groups.shutdown()
    return figures


def steps_with(folder: str, layout: Layout, settings: RunConfig, out: str) -> dict[str, float]:
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron import hf_weights
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, train_step

    settings.model.path, settings.model.dtype = folder, "float32"
    mesh = process_groups.initialize(layout, seed=0, timeout_s=60)
    policy = load_policy(settings, mesh)
    for step in range(2):
        figures = train_step(policy, load_algorithm(settings.algo), batch(step), settings, Stopwatch())
    hf_weights.save(policy.chunks, policy.shape, mesh, out, description=folder)
    process_groups.shutdown()
    return figures


@pytest.mark.parametrize(
    ("layout", "minibatches", "settings"),
    [
        (Layout(), 1, {}),
        (Layout(tp=2), 2, {"behaviour_correction": "truncate", "behaviour_level": "sequence"}),
        (Layout(pp=2), 2, {"policy_loss": "gspo", "behaviour_correction": "mask", "behaviour_level": "geometric"}),
        (Layout(cp=2), 2, {"behaviour_correction": "truncate", "behaviour_level": "sequence", "kl_coef": 0.0}),
        pytest.param(Layout(tp=2, pp=2), 4, {"behaviour_correction": "truncate"}, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, cp=2), 1, {"policy_loss": "cispo"}, marks=pytest.mark.slow),
    ],
)
def test_old_logprobs_of_the_first_minibatch_come_from_its_own_pass_bit_for_bit(
    tmp_path: Path, layout: Layout, minibatches: int, settings: dict[str, object]
) -> None:
    folder = model_folder(tmp_path / "model")
    figures = []
    for reuse in (False, True):
        run = config()
        run.algo.minibatches, run.trainer.reuse_first_forward = minibatches, reuse
        for name, value in settings.items():
            setattr(run.algo, name, value)
        figures.append(ranks.run(steps_with, layout.ranks_per_replica, folder, layout, run, str(tmp_path / str(reuse))))
    without_times = [[{n: v for n, v in rank.items() if not n.startswith("time/")} for rank in of_run] for of_run in figures]
    assert without_times[0] == without_times[1]
    own_pass, reused = weights(tmp_path / "False"), weights(tmp_path / "True")
    assert all(torch.equal(own_pass[name], reused[name]) for name in own_pass)


def weights(folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "tokens"), [(1, 1, 1, 128), (1, 2, 1, 64), (2, 2, 1, 64), (1, 1, 2, 64), (2, 1, 1, 64)]
)
def test_two_steps_give_the_same_weights_in_every_layout_and_packing(tmp_path, tp: int, pp: int, dp: int, tokens: int) -> None:
    folder = model_folder(tmp_path / "model")
    [expected] = ranks.run(steps, 1, folder, 1, 1, 64, str(tmp_path / "one"))
    figures = ranks.run(steps, tp * pp * dp, folder, tp, pp, tokens, str(tmp_path / "other"))
    plain, other, start = weights(tmp_path / "one"), weights(tmp_path / "other"), weights(tmp_path / "model")
    assert max((plain[n] - start[n]).abs().max().item() for n in plain) > 1e-3
    # Adam divides by the gradient's own size, so where that is near zero its rounding shows, magnified, in the weights.
    assert max((plain[n] - other[n]).abs().max().item() for n in plain) < 1e-4
    for rank in figures:
        for name in ("loss/total", "kl/reference", "grad_norm", "clip/fraction", "entropy/mean"):
            assert rank[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
def test_a_group_of_equal_rewards_has_no_signal_however_its_mean_is_rounded(reward: float, size: int) -> None:
    from trainer.learn.batch_figures import batch_figures

    [group] = batch(groups=1, size=size).groups
    equal = Batch(step=0, groups=[replace(group, trajectories=[replace(t, reward=reward) for t in group.trajectories])])
    assert batch_figures(equal)["reward/groups_with_signal_fraction"] == 0


def step_of_each_preset(folder: str) -> dict[str, dict[str, float]]:
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, train_step

    mesh = process_groups.initialize(Layout(), seed=0, timeout_s=60)
    figures = {}
    for preset in sorted((Path(__file__).parents[3] / "conf" / "algo").glob("*.yaml")):
        settings = config()
        settings.model.path, settings.model.dtype, settings.algo.kl_coef = folder, "float32", 0.0
        settings.rollout.max_completion_tokens = 20
        for key, value in yaml.safe_load(preset.read_text()).items():
            setattr(settings.algo, key, value)
        policy = load_policy(settings, mesh)
        figures[preset.stem] = train_step(policy, load_algorithm(settings.algo), batch(), settings, Stopwatch())
    process_groups.shutdown()
    return figures


def test_every_preset_of_the_algorithms_trains_and_its_figures_stand_in_the_table(tmp_path) -> None:
    from trainer.metrics.table import find

    [figures] = ranks.run(step_of_each_preset, 1, model_folder(tmp_path))
    assert len(figures) >= 7
    for preset, found in figures.items():
        assert all(np.isfinite(value) for value in found.values()), preset
        assert found["grad_norm"] > 1e-4, preset
        assert [name for name in found if find(name) is None] == [], "describe them in trainer/metrics/table.py"
        assert ("kl/reference" in found) == (preset in ("default", "grpo", "rloo")), preset
    assert figures["gspo"]["clip/fraction"] > figures["grpo"]["clip/fraction"]  # its bounds are hundreds of times narrower


def taught_step(
    folder: str, teacher: str, tp: int, pp: int, asked: list[list[float]]
) -> tuple[dict[str, float], list[list[float]]]:
    """A step of pure distillation: its figures, and the teacher's log-probs of each trajectory, as this rank computes them.

    asked: the log-probs that a server gave instead; [] if the teacher is in the place of the reference.
    """
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, pack, train_step

    settings = config()
    settings.model.path, settings.model.dtype, settings.algo.kl_coef = folder, "float32", 0.0
    settings.algo.teacher, settings.algo.reward_weight = "http://server:1" if asked else teacher, 0.0
    mesh = process_groups.initialize(Layout(tp=tp, pp=pp), seed=0, timeout_s=60)
    policy = load_policy(settings, mesh)
    taken = batch()
    if asked:
        given = iter(asked)
        taken = replace(
            taken, groups=[replace(g, trajectories=[told(t, next(given)) for t in g.trajectories]) for g in taken.groups]
        )
    found: list[list[float]] = [[] for _ in taken.trajectories]
    if policy.reference is not None:
        for minibatch in pack(taken, settings, policy.shape, mesh.layout, mesh.dp):
            microbatches = minibatch.microbatches(0)
            with policy.reference.in_place():
                logprobs = policy.logprobs(microbatches, "reference log-prob")
            for microbatch, values in zip(microbatches, logprobs, strict=False):
                for sequence, value in zip(microbatch.sequences, values.tolist(), strict=True):
                    found[microbatch.trajectories[sequence]].append(value)
    figures = train_step(policy, load_algorithm(settings.algo), taken, settings, Stopwatch())
    process_groups.shutdown()
    return figures, found


def told(trajectory: Trajectory, logprobs: list[float]) -> Trajectory:
    teacher = np.zeros(len(trajectory.tokens), np.float32)
    teacher[trajectory.sampled] = logprobs
    return replace(trajectory, teacher=teacher)


def test_teacher_in_the_place_of_the_reference_and_one_on_a_server_teach_the_same_in_every_layout(tmp_path) -> None:
    student, teacher = model_folder(tmp_path / "student"), model_folder(tmp_path / "teacher", seed=1)
    [(alone, logprobs)] = ranks.run(taught_step, 1, student, teacher, 1, 1, [])
    assert abs(alone["kl/teacher"]) > 0.1 and alone["grad_norm"] > 0
    for figures in (
        *(figures for figures, _ in ranks.run(taught_step, 4, student, teacher, 2, 2, [])),
        *(figures for figures, _ in ranks.run(taught_step, 2, student, teacher, 2, 1, logprobs)),
    ):
        for name in ("kl/teacher", "loss/total", "grad_norm"):
            assert figures[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    [(itself, _)] = ranks.run(taught_step, 1, student, student, 1, 1, [])
    assert itself["kl/teacher"] == pytest.approx(0, abs=1e-6)


def test_teacher_of_another_depth_cannot_take_the_place_of_the_reference(tmp_path) -> None:
    student, teacher = model_folder(tmp_path / "student", layers=2), model_folder(tmp_path / "teacher")
    with pytest.raises(ranks.RankFailed, match=r"layers 4 for 2.*set algo.teacher_on=engine"):
        ranks.run(taught_step, 1, student, teacher, 1, 1, [])
