"""Asynchrony is a schedule, not another algorithm: at `max_staleness=0` the ledger gives a plain synchronous loop's numbers."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from conf.schema import RunConfig
from rollout.ledger.ledger import Ledger
from rollout.ledger.records import Batch, Finish, Group, Prompt, Segment, Trajectory, Verdict
from rollout.ledger.rules import Rules
from tests.trainer import ranks
from tests.trainer.megatron.test_policy import VOCAB, model_folder

STEPS, GROUPS, COMPLETIONS, LONGEST, CUT = 6, 2, 3, 10, 4


def settings(folder: str, max_staleness: int) -> RunConfig:
    config = RunConfig()
    config.model.path, config.model.dtype = folder, "float32"
    config.algo.groups_per_step, config.algo.completions_per_group, config.algo.minibatches = GROUPS, COMPLETIONS, 2
    config.algo.kl_coef = 0.05
    config.rollout.max_staleness = max_staleness
    config.trainer.tokens_per_microbatch, config.trainer.lr = 64, 3e-3
    return config


def prompt(index: int) -> Prompt:
    tokens = np.random.default_rng(index).integers(0, VOCAB, 3).astype(np.int32)
    return Prompt(id=str(index), tokens=tokens, task={"kind": "parity"})


def sample(policy, tokens: Sequence[int], count: int, *, seed: Sequence[int], offset: int) -> tuple[list[int], list[float]]:
    """Continues `tokens`; each place of each completion has a random number of its own, wherever a cut falls."""
    from trainer.megatron import attention, model

    tokens, logprobs = list(tokens), []
    for place in range(offset, offset + count):
        packed = attention.pack([len(tokens)], policy.mesh.device)
        ids = torch.tensor([tokens])
        with torch.no_grad():
            hidden = model.forward(policy.chunks[0], ids, torch.arange(len(tokens))[None], packed)
            logits = hidden[0, -1] @ model.output_weight(policy.chunks[0]).t()
        log_softmax = torch.log_softmax(logits[:VOCAB], dim=-1)
        draw = np.random.default_rng([*seed, place]).random()
        token = min(int((log_softmax.exp().cumsum(0) < draw).sum()), VOCAB - 1)
        tokens.append(token)
        logprobs.append(float(log_softmax[token]))
        if token == 0:  # the stop token
            break
    return tokens[len(tokens) - len(logprobs) :], logprobs


def reward(completion: Sequence[int]) -> float:
    return float(sum(completion) % 2)


def synchronous(folder: str) -> tuple[list[dict], list[torch.Tensor]]:
    """generate, grade, train; generate, grade, train; …"""
    policy, step_on = load(settings(folder, 0))
    figures = []
    for step in range(STEPS):
        groups = []
        for index in range(step * GROUPS, (step + 1) * GROUPS):
            trajectories = []
            for number in range(COMPLETIONS):
                asked = prompt(index).tokens
                tokens, logprobs = sample(policy, asked.tolist(), LONGEST, seed=[index, number], offset=0)
                sampled = np.arange(len(asked) + len(tokens)) >= len(asked)
                trajectories.append(
                    Trajectory(
                        tokens=np.array([*asked, *tokens], dtype=np.int32),
                        sampled=sampled,
                        logprobs=np.array([0.0] * len(asked) + logprobs, dtype=np.float32),
                        versions=np.where(sampled, step, -1).astype(np.int32),
                        reward=reward(tokens),
                        finish=Finish.STOP if tokens[-1] == 0 else Finish.LENGTH,
                        segments=1,
                    )
                )
            groups.append(Group(prompt_id=str(index), index=index, trajectories=trajectories))
        figures.append(step_on(Batch(step=step, groups=groups)))
    return figures, [p.data.clone() for chunk in policy.chunks for p in chunk.parameters()]


def through_the_ledger(folder: str, max_staleness: int) -> tuple[list[dict], list[torch.Tensor]]:
    """The same parts, with the ledger to say what may be generated and trained; generation runs as far ahead as it lets it."""
    policy, step_on = load(settings(folder, max_staleness))
    rules = Rules(
        groups_per_step=GROUPS, completions_per_group=COMPLETIONS, max_staleness=max_staleness, segment_tokens=CUT,
        max_completion_tokens=LONGEST, max_drops_per_step=0, total_steps=STEPS,
    )  # fmt: skip
    ledger = Ledger(rules)
    ledger.apply(*ledger.published(0, ["engine"]))
    figures = []
    for step in range(STEPS):
        generate_all(ledger, policy)
        ledger.apply(*(ledger.take(step) or ()))
        figures.append(step_on(ledger.batch(step)))
        ledger.apply(*ledger.advance(step + 1, ["engine"]))
    return figures, [p.data.clone() for chunk in policy.chunks for p in chunk.parameters()]


def generate_all(ledger: Ledger, policy) -> None:
    while True:
        while ledger.may_admit():
            ledger.apply(*ledger.admit(prompt(ledger.admitted)))
        leases = ledger.lease_segments("engine", 3)
        if not leases:
            return
        for lease in leases:
            position = lease.position
            so_far = ledger.completion(position)
            asked = np.concatenate([ledger.prompt(position.group).tokens, *so_far]).tolist()
            count = min(CUT, LONGEST - position.offset)
            tokens, logprobs = sample(policy, asked, count, seed=[position.group, position.trajectory], offset=position.offset)
            full = position.offset + len(tokens) == LONGEST
            segment = Segment(
                tokens=np.array(tokens, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                versions=np.full(len(tokens), ledger.version, dtype=np.int32),
                finish=Finish.STOP if tokens[-1] == 0 else Finish.LENGTH if full else Finish.CUT,
                engine="engine",
            )
            ledger.apply(*ledger.report(position, segment, "engine")[1])
        for lease in ledger.lease_grading("judge", 100):
            completion = ledger.completion(lease.position)
            verdict = Verdict(reward=reward(np.concatenate(completion).tolist()))
            ledger.apply(*ledger.grade(lease.position, verdict)[1])


def load(config: RunConfig):
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.learn.batch_figures import batch_figures
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, train_step

    policy = load_policy(config, process_groups.initialize(Layout(), seed=0, timeout_s=60))
    algorithm = load_algorithm(config.algo)
    return policy, lambda batch: batch_figures(batch) | train_step(policy, algorithm, batch, config, Stopwatch())


def test_staleness_zero_is_the_synchronous_algorithm_number_for_number(tmp_path) -> None:
    folder = model_folder(tmp_path)
    [(plain, plain_weights)] = ranks.run(synchronous, 1, folder)
    [(ours, our_weights)] = ranks.run(through_the_ledger, 1, folder, 0)
    # The synchronous loop cuts nothing, and seconds are never the same.
    cut = {"trajectories/resumed", *(name for name in ours[0] if name.startswith("time/"))}
    assert [{k: v for k, v in f.items() if k not in cut} for f in ours] == [
        {k: v for k, v in f.items() if k not in cut} for f in plain
    ]
    assert sum(f["trajectories/resumed"] for f in ours) > 0
    assert len({f["reward/mean"] for f in ours}) > 1
    assert all(torch.equal(a, b) for a, b in zip(plain_weights, our_weights, strict=True))


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_bound_is_reached_and_never_passed(tmp_path, max_staleness: int) -> None:
    [(figures, _)] = ranks.run(through_the_ledger, 1, model_folder(tmp_path), max_staleness)
    assert max(f["lag/max_versions"] for f in figures) == max_staleness
