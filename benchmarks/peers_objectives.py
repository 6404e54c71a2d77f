"""Our objectives beside verl's algorithms and TRL's GRPO loss: the largest difference in value and in gradient.

    make peers && .venv-peers/bin/python benchmarks/peers_objectives.py

All get the same log-probs, in float64, as 24 sequences of 1 to 40 tokens: the peers in rows padded to 40, ours packed without
padding. `random` inputs differ by some tenths between policies; `adversarial` ones lie at both sides of every clipping bound and
far outside, with advantages of zero and sequences of one token. Both peers run unchanged. A gradient is by the current log-probs,
its difference is given relative to its largest entry. Ends with 1 where a difference is above 1e-6.

Where conventions differ, it is said here and undone below: verl and TRL divide by the deviation with Bessel's correction, we do
not; TRL's epsilon_high of CISPO is the bound itself, ours is added to 1; TRL does not bound ratios at e^20, so its adversarial
inputs stay within; verl clamps k3 at 10, so its inputs stay below. For a teacher verl takes the policy's log-probs from the
current policy, we take them from the old one: the two are compared where they are the same, as in the first minibatch of a step.
"""

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

if {"-h", "--help"} & set(sys.argv[1:]):  # also where the peers are not installed
    print(__doc__)
    sys.exit()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from trl.trainer.grpo_trainer import GRPOTrainer
    from verl.trainer.distillation.losses import distillation_loss
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig
    from verl.workers.config.distillation import DistillationLossConfig
except ImportError as error:
    raise SystemExit(
        f"the peers are not installed here ({error}): run `make peers`, then .venv-peers/bin/python {__file__}"
    ) from error

from conf.schema import AlgoConfig
from rollout.ledger.records import Finish, Group, Trajectory
from trainer.learn.advantages import ADVANTAGES, loss_weights
from trainer.learn.losses import LOSSES, LossInputs
from trainer.learn.objective import behaviour_weights, kl, taught, token_losses
from trainer.learn.sequences import Sequences

SEQUENCES, LONGEST, LIMIT = 24, 40, 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Padded [n, LONGEST] log-probs and the mask of real tokens; advantages [n]."""

    current: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    entropies: Tensor
    mask: Tensor
    advantages: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    peer: str
    what: str
    inputs: str
    value: float
    gradient: float | None


def random_inputs() -> Inputs:
    make = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=make)
    current = -normal(SEQUENCES, LONGEST).abs()
    old, behaviour, reference = (current + 0.3 * normal(SEQUENCES, LONGEST) for _ in range(3))
    return Inputs(
        current=current, old=old, behaviour=behaviour, reference=reference, entropies=normal(SEQUENCES, LONGEST).abs(),
        mask=(torch.arange(LONGEST) < lengths[:, None]).double(), advantages=normal(SEQUENCES),
    )  # fmt: skip


def adversarial_inputs() -> Inputs:
    plain = random_inputs()
    bounds = torch.tensor([0.8, 1.28, 3.0, 2.0, 0.5, 5.0, 1.0], dtype=torch.float64).log()
    offsets = torch.cat([bounds, bounds - 1e-9, bounds + 1e-9, torch.tensor([-9.0, 9.0, -1e-12, 1e-12, -4.0, 4.0, 0.0])])
    difference = offsets[torch.arange(SEQUENCES * LONGEST) % len(offsets)].reshape(SEQUENCES, LONGEST)
    advantages = torch.tensor([1.0, -1.0, 0.0, 1e-8, -1e-8, 30.0, -30.0, -0.5], dtype=torch.float64).repeat(SEQUENCES // 8)
    lengths = torch.arange(SEQUENCES) * 7 % LONGEST + 1
    # Sequence means at both sides of the clipping bounds too: every third sequence has the same difference at all its tokens.
    difference[::3] = offsets[: (SEQUENCES + 2) // 3, None]
    return Inputs(
        current=plain.current, old=plain.current - difference, behaviour=plain.current - difference.roll(3, 1),
        reference=plain.current + difference.roll(1, 1).clamp(max=2.0), entropies=plain.entropies,
        mask=(torch.arange(LONGEST) < lengths[:, None]).double(), advantages=advantages,
    )  # fmt: skip


INPUTS = {"random": random_inputs(), "adversarial": adversarial_inputs()}


def ours(given: Inputs, algo: AlgoConfig, normalisation: str, *, teacher_weight: float = 0.0) -> tuple[float, Tensor]:
    """Loss and gradient [n, LONGEST], from packed tokens."""
    real = given.mask.bool()
    lengths = given.mask.sum(1).long()
    count, sizes = float(SEQUENCES), lengths.double()
    current = given.current.clone().requires_grad_()
    sequences = Sequences(index=torch.arange(SEQUENCES).repeat_interleave(lengths), count=SEQUENCES)
    weights, _ = behaviour_weights(given.old[real], given.behaviour[real], sequences, algo)
    advantages = taught(given.advantages[sequences.index], given.old[real], given.reference[real], teacher_weight, baseline=0.0)
    inputs = LossInputs(
        old=given.old[real], behaviour=given.behaviour[real], behaviour_weights=weights, sequences=sequences,
        advantages=advantages, reference=given.reference[real],
    )  # fmt: skip
    losses, _ = token_losses(
        LOSSES[algo.policy_loss], algo, current=current[real], entropies=given.entropies[real], inputs=inputs
    )
    exact = {
        "token": 1 / sizes.sum().expand(SEQUENCES),
        "sequence": 1 / (count * sizes),
        "constant": 1 / (count * LONGEST + 0 * sizes),
    }
    used = torch.from_numpy(loss_weights(lengths.numpy(), normalisation, LONGEST))
    torch.testing.assert_close(used, exact[normalisation].float())  # stored in float32, which would show below
    loss = (losses * exact[normalisation][sequences.index]).sum()
    loss.backward()
    return loss.item(), current.grad


VERL_AGGREGATION = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}


def verl(given: Inputs, loss: str, normalisation: str, low: float, high: float, dual: float, weights: Tensor | None):
    config = ActorConfig(
        strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual
    )
    current = given.current.clone().requires_grad_()
    value, _ = core_algos.get_policy_loss_fn(loss)(
        old_log_prob=given.old, log_prob=current, advantages=given.advantages[:, None].expand(-1, LONGEST),
        response_mask=given.mask, loss_agg_mode=VERL_AGGREGATION[normalisation], config=config, rollout_is_weights=weights,
    )  # fmt: skip
    value.backward()
    return value.item(), current.grad


def verl_with_teacher(given: Inputs, coefficient: float, *, with_reward: bool):
    """verl's policy gradient on -k1 of a teacher, and its GRPO loss beside it. The teacher's log-probs are `reference`."""
    prompts, responses = torch.ones(SEQUENCES, 1, dtype=torch.int64), given.mask.long()
    # verl reads a token's log-prob at the position before it, from sequences of one prompt token that are joined without padding.
    real = torch.cat([responses, torch.zeros_like(prompts)], dim=1).bool()
    real[:, 0] = True
    real[:, 1:] = given.mask.bool()
    shifted = [torch.cat([values, torch.zeros_like(values[:, :1])], dim=1) for values in (given.current, given.reference)]
    current = shifted[0][real].requires_grad_()
    data = {
        "prompts": prompts, "responses": responses, "attention_mask": torch.cat([prompts, responses], dim=1),
        "response_mask": given.mask, "old_log_probs": given.old, "teacher_logprobs": shifted[1][real][:, None],
        "dp_size": 1, "batch_num_tokens": given.mask.sum(), "global_batch_size": SEQUENCES,
    }  # fmt: skip
    actor = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e12)
    settings = SimpleNamespace(distillation_loss=DistillationLossConfig(loss_mode="k1", loss_max_clamp=None))
    taught_loss, _ = distillation_loss(actor, settings, {"log_probs": current}, data)
    loss = coefficient * taught_loss
    loss.backward()
    gradient = torch.zeros_like(shifted[0])
    gradient[real] = current.grad
    value, gradient = loss.item(), gradient[:, :LONGEST]
    if with_reward:
        reward_value, reward_gradient = verl(given, "vanilla", "token", 0.2, 0.2, 1e12, None)
        value, gradient = value + reward_value, gradient + reward_gradient
    return value, gradient


def trl(given: Inputs, **settings):
    """TRL's loss, on a trainer of which only what the loss reads is there."""
    trainer = object.__new__(GRPOTrainer)
    args = SimpleNamespace(delta=settings.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1)
    same = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x, sync_gradients=False
    )
    defaults = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28,
        "max_completion_length": LONGEST,
        "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "vllm_importance_sampling_correction": False,
    }  # fmt: skip
    for name, value in (defaults | settings).items():
        setattr(trainer, name, value)
    current, entropies = given.current.clone().requires_grad_(), given.entropies
    trainer.args, trainer.accelerator, trainer.model = args, same, SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (current, entropies, None)
    ids = torch.zeros(SEQUENCES, LONGEST, dtype=torch.int64)
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": given.mask,
            "advantages": given.advantages, "old_per_token_logps": given.old, "ref_per_token_logps": given.reference,
            "num_items_in_batch": given.mask.sum(),
        },
    )  # fmt: skip
    loss.backward()
    return loss.item(), current.grad


def compared(peer: str, what: str, our_way: Callable[[Inputs], tuple], their_way: Callable[[Inputs], tuple]) -> Iterator[Row]:
    for name, given in INPUTS.items():
        (value, gradient), (theirs, their_gradient) = our_way(given), their_way(given)
        real = given.mask.bool()
        largest = their_gradient[real].abs().max().clamp(min=1e-30)
        yield Row(
            peer=peer, what=what, inputs=name, value=abs(value - theirs) / max(1.0, abs(theirs)),
            gradient=((gradient - their_gradient)[real].abs().max() / largest).item(),
        )  # fmt: skip


def uncorrected(**settings) -> AlgoConfig:
    return AlgoConfig(behaviour_correction="none", **settings)


def group_of(size: int) -> Group:
    one = np.ones(1)
    trajectory = Trajectory(
        tokens=one.astype(np.int32), sampled=one.astype(np.bool_), logprobs=-one.astype(np.float32),
        versions=one.astype(np.int32), reward=0.0, finish=Finish.STOP, segments=1,
    )  # fmt: skip
    return Group(prompt_id="any", index=0, trajectories=[trajectory] * size)


def loss_rows() -> Iterator[Row]:
    never = 1e12  # verl always clips a second time
    table = (
        ("vanilla", "GRPO: ppo, sequence mean", {"clip_low": 0.2, "clip_high": 0.2}, "sequence", never),
        ("vanilla", "DAPO: ppo, clip-higher, token mean", {"clip_low": 0.2, "clip_high": 0.28}, "token", never),
        ("vanilla", "Dr. GRPO: ppo, constant", {"clip_low": 0.2, "clip_high": 0.2}, "constant", never),
        ("vanilla", "ppo, dual clip 3", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, "token", 3.0),
        ("gspo", "GSPO", {"policy_loss": "gspo", "clip_low": 0.2, "clip_high": 0.28}, "sequence", never),
        ("gspo", "GSPO, its own bounds", {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "sequence", never),
        ("cispo", "CISPO", {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}, "token", never),
        ("cispo", "CISPO, two bounds", {"policy_loss": "cispo", "clip_low": 0.2, "clip_high": 0.28}, "token", never),
    )
    for loss, what, settings, normalisation, dual in table:
        yield from compared(
            "verl", what,
            lambda x, s=settings, n=normalisation: ours(x, uncorrected(**s), n),
            lambda x, a=loss, s=settings, n=normalisation, d=dual: verl(x, a, n, s["clip_low"], s["clip_high"], d, None),
        )  # fmt: skip
    for what, settings, normalisation, theirs in (
        ("GRPO, KL k3", {"clip_high": 0.28, "kl_coef": 0.04}, "sequence", {"loss_type": "grpo", "beta": 0.04}),
        ("Dr. GRPO", {"clip_high": 0.28}, "constant", {"loss_type": "dr_grpo"}),
        ("DAPO", {"clip_high": 0.28}, "token", {"loss_type": "dapo"}),
        ("DAPO, dual clip 3", {"clip_high": 0.28, "dual_clip": 3.0}, "token", {"loss_type": "dapo", "delta": 3.0}),
        (
            "CISPO", {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}, "token",
            {"loss_type": "cispo", "epsilon_high": 5.0},
        ),
        (
            "DAPO, entropy bonus", {"clip_high": 0.28, "entropy_coef": 0.01}, "token",
            {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.01},
        ),
    ):  # fmt: skip
        yield from compared(
            "TRL", what,
            lambda x, s=settings, n=normalisation: ours(x, uncorrected(**s), n),
            lambda x, t=theirs: trl(x, **t),
        )  # fmt: skip
    yield from compared(
        "TRL", "GSPO",
        lambda x: ours(x, uncorrected(policy_loss="gspo", clip_high=0.28), "sequence"),
        lambda x: trl(x, loss_type="grpo", importance_sampling_level="sequence"),
    )  # fmt: skip


def correction_rows() -> Iterator[Row]:
    """verl's weights, and its loss under them."""
    for level, (kind, threshold) in itertools.product(("token", "sequence"), (("truncate", "2.0"), ("mask", "0.5_2.0"))):
        algo = AlgoConfig(
            clip_high=0.28, behaviour_correction=kind, behaviour_level=level, behaviour_cap=2.0, behaviour_floor=0.5
        )

        def theirs(given: Inputs, level: str = level, threshold: str = threshold):
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
                given.old - given.behaviour, given.mask, rollout_is=level, rollout_is_threshold=threshold
            )
            return verl(given, "vanilla", "token", 0.2, 0.28, 1e12, weights)

        yield from compared(
            "verl", f"behaviour {kind}, {level}",
            lambda x, a=algo: ours(x, a, "token"), theirs,
        )  # fmt: skip


def teacher_rows() -> Iterator[Row]:
    """Distillation alone, and with a reward."""
    for what, with_reward, weight in (("teacher alone", False, 1.0), ("teacher and reward", True, 0.3)):
        yield from compared(
            "verl", what,
            lambda x, r=with_reward, w=weight: ours(first_minibatch(x, r), uncorrected(), "token", teacher_weight=w),
            lambda x, r=with_reward, w=weight: verl_with_teacher(first_minibatch(x, r), w, with_reward=r),
        )  # fmt: skip


def first_minibatch(given: Inputs, with_reward: bool) -> Inputs:
    """The same inputs where current and old policy are one."""
    return replace(given, old=given.current, advantages=given.advantages if with_reward else 0 * given.advantages)


def estimator_rows() -> Iterator[Row]:
    for name, given in INPUTS.items():
        for estimator in ("k1", "k2", "k3"):
            current, other = given.current.clone().requires_grad_(), given.current.clone().requires_grad_()
            mine, theirs = kl(current, given.reference, estimator), core_algos.kl_penalty(other, given.reference, estimator)
            mine.sum().backward()
            theirs.sum().backward()
            difference = (mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)
            gradient = (current.grad - other.grad).abs().max() / other.grad.abs().max()
            yield Row(peer="verl", what=f"KL {estimator}", inputs=name, value=difference.item(), gradient=gradient.item())


def advantage_rows() -> Iterator[Row]:
    rng = np.random.default_rng(0)
    groups = {
        "random": [rng.random(8), rng.integers(0, 2, 8), rng.normal(size=5), rng.random(2)],
        "adversarial": [
            np.ones(8),
            np.zeros(4),
            np.eye(8)[0],
            1 - np.eye(6)[2],
            np.array([1.0, 1 + 1e-3]),
            np.array([-1e3, 1e3]),
        ],
    }
    for name, rewards in groups.items():
        index = np.concatenate([[str(i)] * len(r) for i, r in enumerate(rewards)])
        flat = torch.tensor(np.concatenate(rewards))[:, None]
        mask = torch.ones_like(flat)
        for kind, theirs in (
            ("grpo", lambda f, m, i: core_algos.compute_grpo_outcome_advantage(f, m, i, epsilon=1e-12)[0]),
            ("dr_grpo", lambda f, m, i: core_algos.compute_grpo_outcome_advantage(f, m, i, norm_adv_by_std_in_grpo=False)[0]),
            ("rloo", lambda f, m, i: core_algos.compute_rloo_outcome_advantage(f, m, i)[0]),
        ):
            expected = np.split(theirs(flat, mask, index)[:, 0].numpy(), np.cumsum([len(r) for r in rewards])[:-1])
            worst = 0.0
            for one, wanted in zip(rewards, expected, strict=True):
                got = ADVANTAGES[kind](one.astype(np.float64), group_of(len(one)), AlgoConfig(advantage_eps=1e-12))
                bessel = (len(one) / (len(one) - 1)) ** 0.5 if kind == "grpo" else 1.0
                worst = max(worst, float(np.abs(got - wanted * bessel).max() / max(1.0, np.abs(wanted).max())))
            yield Row(peer="verl", what=f"advantage {kind}", inputs=name, value=worst, gradient=None)


def main() -> int:
    rows = [*loss_rows(), *correction_rows(), *teacher_rows(), *estimator_rows(), *advantage_rows()]
    print(f"{'peer':6}{'what':40}{'inputs':14}{'value':>10}{'gradient':>11}")
    for row in rows:
        gradient = "" if row.gradient is None else f"{row.gradient:.1e}"
        print(f"{row.peer:6}{row.what:40}{row.inputs:14}{row.value:10.1e}{gradient:>11}")
    worst = max(max(row.value, row.gradient or 0.0) for row in rows)
    print(f"{len(rows)} comparisons, the largest difference {worst:.1e}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
