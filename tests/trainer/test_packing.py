"""Packing loses nothing, balances, and normalises the loss once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.types import Finish, Trajectory
from trainer.packing import PackingError, balanced_bins, deal, pack_minibatch


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


lengths = st.lists(st.integers(1, 64), min_size=1, max_size=60)


@given(lengths, st.sampled_from([1, 2, 3]), st.sampled_from([64, 100]))
def test_every_sequence_lands_in_exactly_one_bin_that_holds_it(sizes: list[int], dp: int, capacity: int) -> None:
    bins = balanced_bins(np.array(sizes), capacity=capacity, multiple_of=dp)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= capacity for members in bins)
    assert len(bins) % dp == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=20))
def test_a_packed_token_is_predicted_by_the_one_before_it(shapes: list[tuple[int, int]]) -> None:
    trajectories = [trajectory(p, c, start=100 * i) for i, (p, c) in enumerate(shapes)]
    numbers = np.arange(len(shapes))
    minibatch = pack_minibatch(trajectories, numbers + 0.5, numbers, tokens_per_microbatch=40, dp=2)
    seen = []
    for microbatch in (m for rank in minibatch.microbatches for m in rank):
        assert microbatch.boundaries[0] == 0 and microbatch.boundaries[-1] == len(microbatch.tokens) == 40
        assert np.array_equal(microbatch.tokens[microbatch.rows + 1], microbatch.targets)
        assert np.array_equal(microbatch.positions[microbatch.rows] + 1, microbatch.targets % 100)
        assert np.array_equal(microbatch.trajectories[microbatch.sequences], microbatch.targets // 100)
        assert np.array_equal(microbatch.weights, microbatch.targets // 100 + 0.5)
        assert np.array_equal(microbatch.sequences, np.searchsorted(microbatch.boundaries, microbatch.rows, side="right") - 1)
        assert np.array_equal(microbatch.behaviour_logprobs, -(microbatch.targets % 100) - 1.0)
        seen.extend(microbatch.targets.tolist())
    assert sorted(seen) == sorted(int(t) for x in trajectories for t in x.tokens[x.sampled])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=20), st.sampled_from([1, 2, 4]))
def test_every_rank_has_as_many_microbatches_as_the_others(shapes: list[tuple[int, int]], dp: int) -> None:
    trajectories = [trajectory(p, c) for p, c in shapes]
    minibatch = pack_minibatch(trajectories, np.ones(len(shapes)), np.arange(len(shapes)), tokens_per_microbatch=30, dp=dp)
    assert len({len(rank) for rank in minibatch.microbatches}) == 1
    packed = sorted(n for rank in minibatch.microbatches for m in rank for n in m.trajectories)
    assert packed == list(range(len(shapes)))


def test_a_trajectory_longer_than_a_microbatch_is_refused_with_its_length() -> None:
    with pytest.raises(PackingError, match="50 tokens"):
        pack_minibatch([trajectory(10, 40)], np.ones(1), np.zeros(1, int), tokens_per_microbatch=40, dp=1)


def test_dealing_gives_every_trajectory_to_one_minibatch() -> None:
    parts = deal(12, 4, seed=7)
    assert sorted(np.concatenate(parts).tolist()) == list(range(12))
    assert [len(p) for p in parts] == [3, 3, 3, 3]
    assert np.array_equal(parts[0], deal(12, 4, seed=7)[0])
