"""Episodes of several turns in the trainer: no token of an observation has a gradient, under any loss."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import AlgoConfig
from conf.shapes import Layout
from rollout.ledger.records import Completion, Finish, Observation, Segment, Trajectory, Verdict
from trainer.learn.balance import Capacity, CostModel
from trainer.learn.logprobs import token_logprobs
from trainer.learn.losses import LOSSES, LossInputs
from trainer.learn.objective import token_losses
from trainer.learn.packing import Microbatch, pack_minibatch
from trainer.learn.sequences import Sequences

VOCABULARY, HIDDEN, LONGEST = 11, 5, 64
TURNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5)  # sampled tokens, observed tokens


def episode(turns: list[tuple[int, int]], random: np.random.Generator) -> Trajectory:
    def tokens(count: int) -> np.ndarray:
        return random.integers(0, VOCABULARY, count).astype(np.int32)

    segments = [
        Segment(
            tokens=tokens(sampled), logprobs=np.full(sampled, -2.0, np.float32), versions=np.zeros(sampled, np.int32),
            finish=Finish.STOP, engine="e",
        )
        for sampled, _ in turns
    ]  # fmt: skip
    observations = [Observation(tokens=tokens(observed)) for _, observed in turns[:-1]]
    completion = Completion(segments=segments, observations=observations, finish=Finish.STOP, verdict=Verdict(reward=1.0))
    return Trajectory.of(prompt=tokens(3), completion=completion)


def loss_of(microbatch: Microbatch, hidden: torch.Tensor, weight: torch.Tensor, loss: str) -> torch.Tensor:
    targets = torch.from_numpy(microbatch.targets)
    current, entropies = token_logprobs(
        hidden[torch.from_numpy(microbatch.rows)], weight, targets, temperature=1.0, vocab_size=VOCABULARY
    )
    behaviour = torch.from_numpy(microbatch.behaviour_logprobs).double()
    sequences = Sequences(index=torch.from_numpy(microbatch.sequences), count=int(microbatch.sequences.max()) + 1)
    inputs = LossInputs(
        old=current.detach() - 0.01, behaviour=behaviour, behaviour_weights=torch.ones_like(behaviour),
        advantages=torch.ones_like(behaviour), sequences=sequences, reference=behaviour,
    )  # fmt: skip
    algo = AlgoConfig(entropy_coef=0.1, kl_coef=0.1)
    losses, _ = token_losses(LOSSES[loss], algo, current=current, entropies=entropies, inputs=inputs)
    return (losses * torch.from_numpy(microbatch.weights)).sum()


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=25, deadline=None)
@given(episodes=st.lists(TURNS, min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_no_token_of_an_observation_ever_has_a_gradient(loss: str, episodes: list, seed: int) -> None:
    """Any change of what the model says before a token that it did not sample leaves the loss as it is, bit by bit."""
    random = np.random.default_rng(seed)
    trajectories = [episode(turns, random) for turns in episodes]
    minibatch = pack_minibatch(
        trajectories, np.ones(len(episodes), np.float32), np.arange(len(episodes)),
        capacity=Capacity.of(Layout(), LONGEST), dp=1, cost=CostModel(pair_cost=1e-3),
    )  # fmt: skip
    weight = torch.from_numpy(random.normal(size=(VOCABULARY, HIDDEN)))
    for microbatch in minibatch.microbatches(0):
        hidden = torch.from_numpy(random.normal(size=(len(microbatch.tokens), HIDDEN))).requires_grad_()
        total = loss_of(microbatch, hidden, weight, loss)
        total.backward()
        taught = hidden.grad.abs().sum(1).nonzero().flatten().tolist()
        assert taught == sorted(microbatch.rows.tolist())
        others = np.setdiff1d(np.arange(len(microbatch.tokens)), microbatch.rows)
        perturbed = hidden.detach().clone()
        perturbed[torch.from_numpy(others)] += 10.0
        assert loss_of(microbatch, perturbed, weight, loss).item() == total.item()
    sampled = sum(turn for turns in episodes for turn, _ in turns)
    assert sum(len(microbatch.rows) for microbatch in minibatch.microbatches(0)) == sampled
