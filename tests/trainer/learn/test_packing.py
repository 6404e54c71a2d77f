"""Packing loses nothing, keeps the capacity, and gives every rank as much to do as the others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.shapes import Layout
from rollout.ledger.records import Finish, Trajectory
from trainer.learn.balance import Capacity, CostModel, PackingError, balance
from trainer.learn.packing import deal, held_positions, pack_minibatch

COST = CostModel(pair_cost=1e-3)


def trajectory(prompt: int, completion: int, start: int = 0) -> Trajectory:
    length = prompt + completion
    sampled = np.arange(length) >= prompt
    return Trajectory(
        tokens=np.arange(start, start + length, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -np.arange(length) - 1, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        reward=1.0,
        finish=Finish.STOP,
        segments=1,
    )


LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60)
LAYOUTS = st.sampled_from(
    [
        Layout(),
        Layout(tp=2, sequence_parallel=True),
        Layout(cp=2),
        Layout(tp=2, cp=2, sequence_parallel=True),
        Layout(pp=2, vpp=2),
    ]
)
SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=20)  # (prompt, completion) tokens


@given(LENGTHS, st.sampled_from([1, 2, 3, 7]), st.sampled_from([64, 100]), LAYOUTS)
def test_every_sequence_is_in_one_microbatch_that_holds_it_and_all_ranks_have_as_many(sizes, dp, tokens, layout) -> None:
    capacity = Capacity.of(layout, tokens)
    dealt = balance(np.array(sizes), capacity=capacity, dp=dp, cost=COST)
    assert sorted(i for rank in dealt.members for members in rank for i in members) == list(range(len(sizes)))
    assert len(dealt.members) == dp and len({len(rank) for rank in dealt.members}) == 1
    assert dealt.tokens.shape == (dp, len(dealt.members[0]))
    assert dealt.tokens.max() <= capacity.tokens <= tokens
    assert (dealt.tokens % layout.token_multiple == 0).all() and (dealt.tokens > 0).all()
    assert dealt.tokens.shape[1] % (layout.pp if layout.vpp > 1 else 1) == 0
    assert dealt.tokens.sum() - dealt.padding.sum() == sum(sizes)
    per_microbatch = [[sum(sizes[i] for i in members) for members in rank] for rank in dealt.members]
    assert np.array_equal(dealt.tokens - dealt.padding, per_microbatch)


@given(LENGTHS, st.sampled_from([1, 2, 5]), st.randoms(use_true_random=False))
def test_who_is_whose_neighbour_does_not_change_how_well_a_minibatch_is_dealt(sizes, dp, random) -> None:
    """Groups are neighbours in a batch; only lengths count, so any order of the same lengths gives the same shares."""
    shuffled = random.sample(sizes, len(sizes))
    one, other = (balance(np.array(s), capacity=Capacity(tokens=100), dp=dp, cost=COST) for s in (sizes, shuffled))
    lengths_of = [
        [[[s[i] for i in members] for members in rank] for rank in dealt.members]
        for dealt, s in ((one, sizes), (other, shuffled))
    ]
    assert lengths_of[0] == lengths_of[1]


@given(LENGTHS, st.integers(1, 8))
def test_no_rank_does_more_than_the_mean_and_one_sequence(sizes, dp) -> None:
    """Graham's bound for the longest processing time first."""
    costs = COST(np.array(sizes))
    ranks = balance(np.array(sizes), capacity=Capacity(tokens=64), dp=dp, cost=CostModel(pair_cost=1e-3)).costs.sum(1)
    idle = COST(np.array([1])).item() * 64  # an empty microbatch is one token of padding
    assert ranks.max() <= costs.sum() / dp + costs.max() + idle


@pytest.mark.parametrize("dp", [12, 16, 17, 24])
def test_the_job_of_256_gpus_is_packed_without_waste_and_balanced(dp) -> None:
    """Four minibatches of 1,024: lognormal completions, mean 2,500 and cap 16,384, behind prompts of 1,200 (Qwen2.5-32B)."""
    random = np.random.default_rng(dp)
    completions = np.minimum(np.exp(random.normal(np.log(2500) - 0.46, 1.0, 4096)), 16384).astype(np.int64) + 1
    lengths = completions + np.clip(random.gamma(8, 150, 4096), 20, 4096).astype(np.int64)
    assert lengths.mean() == pytest.approx(3700, rel=0.05)
    for part in deal(4096, 4, seed=0):
        dealt = balance(lengths[part], capacity=Capacity(tokens=20480), dp=dp, cost=CostModel(pair_cost=64 * 5120 / 32e9))
        assert dealt.padding.sum() <= 0.02 * dealt.tokens.sum()
        ranks = dealt.costs.sum(1)
        assert ranks.max() <= 1.03 * ranks.mean()  # the busiest rank


@given(SHAPES, LAYOUTS)
def test_a_packed_token_is_predicted_by_the_one_before_it(shapes: list[tuple[int, int]], layout: Layout) -> None:
    trajectories = [trajectory(p, c, start=100 * i) for i, (p, c) in enumerate(shapes)]
    numbers = np.arange(len(shapes))
    capacity = Capacity.of(layout, 40)
    minibatch = pack_minibatch(trajectories, numbers + 0.5, numbers, capacity=capacity, dp=2, cost=COST)
    seen = []
    for microbatch in (m for rank in range(2) for m in minibatch.microbatches(rank)):
        assert microbatch.boundaries[0] == 0 and microbatch.boundaries[-1] == len(microbatch.tokens) <= 40
        assert np.array_equal(microbatch.tokens[microbatch.rows + 1], microbatch.targets)
        assert np.array_equal(microbatch.positions[microbatch.rows] + 1, microbatch.targets % 100)
        assert np.array_equal(microbatch.trajectories[microbatch.sequences], microbatch.targets // 100)
        assert np.array_equal(microbatch.weights, microbatch.targets // 100 + 0.5)
        assert np.array_equal(microbatch.sequences, np.searchsorted(microbatch.boundaries, microbatch.rows, side="right") - 1)
        assert np.array_equal(microbatch.behaviour_logprobs, -(microbatch.targets % 100) - 1.0)
        seen.extend(microbatch.targets.tolist())
    assert sorted(seen) == sorted(int(t) for x in trajectories for t in x.tokens[x.sampled])


@given(SHAPES, st.sampled_from([2, 3, 4]))
def test_context_parallel_ranks_hold_each_token_and_each_sampled_token_once(shapes, cp) -> None:
    trajectories = [trajectory(p, c, start=100 * i) for i, (p, c) in enumerate(shapes)]
    numbers = np.arange(len(shapes))
    capacity = Capacity.of(Layout(cp=cp), 48)
    minibatch = pack_minibatch(trajectories, numbers + 0.5, numbers, capacity=capacity, dp=1, cost=COST)
    held = [minibatch.microbatches(0, cp=cp, cp_rank=rank) for rank in range(cp)]
    for whole, *parts in zip(minibatch.microbatches(0), *held, strict=True):
        places = [held_positions(whole.boundaries, cp, rank) for rank in range(cp)]
        assert sorted(np.concatenate(places).tolist()) == list(range(len(whole.tokens)))
        rows = []
        for part, place in zip(parts, places, strict=True):
            assert np.array_equal(part.tokens, whole.tokens[place]) and np.array_equal(part.positions, whole.positions[place])
            assert np.array_equal(part.positions[part.rows] + 1, part.targets % 100)
            assert np.array_equal(part.trajectories[part.sequences], part.targets // 100)
            assert np.array_equal(part.weights, part.targets // 100 + 0.5)
            assert np.array_equal(part.behaviour_logprobs, -(part.targets % 100) - 1.0)
            rows.extend(place[part.rows].tolist())
        assert sorted(rows) == sorted(whole.rows.tolist())


def test_a_trajectory_longer_than_a_microbatch_is_refused_with_its_length() -> None:
    with pytest.raises(PackingError, match="50 tokens"):
        pack_minibatch([trajectory(10, 40)], np.ones(1), np.zeros(1, int), capacity=Capacity(tokens=40), dp=1, cost=COST)


def test_dealing_gives_every_trajectory_to_one_minibatch() -> None:
    parts = deal(12, 4, seed=7)
    assert sorted(np.concatenate(parts).tolist()) == list(range(12))
    assert [len(p) for p in parts] == [3, 3, 3, 3]
    assert np.array_equal(parts[0], deal(12, 4, seed=7)[0])
