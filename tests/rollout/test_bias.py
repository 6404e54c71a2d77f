"""The lengths that are trained on are distributed as the lengths that are sampled, whatever the staleness."""

import pytest

from benchmarks.bias import CAP_TOKENS, COMPLETIONS, GROUPS, DiscardingByAge, ThroughTheLedger, p_value

FALSE_ALARM = 0.01  # of all comparisons together, under fixed seeds
STALENESS = [(s, 0) for s in range(9)] + [(2, GROUPS), (4, 2 * GROUPS)]


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "window"), STALENESS)
def test_trained_lengths_are_distributed_as_sampled_ones(staleness, window):
    trained = ThroughTheLedger(seed=3, steps=30, staleness=staleness, window=window).run()
    assert trained.lengths.shape == (30 * GROUPS, COMPLETIONS) and trained.lag <= staleness
    assert p_value(trained.lengths, seed=4) > FALSE_ALARM / len(STALENESS)


def test_the_comparison_tells_a_biased_sample():
    trained = DiscardingByAge(seed=3, steps=20, staleness=1).run()
    assert p_value(trained.lengths, seed=4) < 1e-6
    assert (trained.lengths == CAP_TOKENS).sum() == 0 and trained.discarded_tokens > 0.1
