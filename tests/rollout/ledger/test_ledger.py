"""The law, clause by clause."""

import numpy as np
import pytest

from rollout.ledger.changes import DropKind, Extended, Graded
from rollout.ledger.ledger import Ledger, LedgerError
from rollout.ledger.records import Answered, Position, Verdict
from rollout.ledger.rules import RulesError
from tests.rollout.builders import at_end, observation, prompt, rules, segment, verdict

ENGINE = "e0@1"


def started(**changed) -> Ledger:
    ledger = Ledger(rules(**changed))
    ledger.apply(*ledger.published(0, [ENGINE]))
    return ledger


def admit(ledger: Ledger, groups: int) -> None:
    for _ in range(groups):
        ledger.apply(*ledger.admit(prompt(ledger.admitted)))


def finish(ledger: Ledger, group: int, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0) -> None:
    for i, reward in enumerate(rewards):
        ledger.apply(*report(ledger, group, i, 0, [version])[1])
        ledger.apply(*grade(ledger, group, i, verdict(reward))[1])


def report(ledger: Ledger, group: int, trajectory: int, offset: int, versions: list[int], finish: str = "stop"):
    return ledger.report(Position(group=group, trajectory=trajectory, offset=offset), segment(versions, finish), ENGINE)


def grade(ledger: Ledger, group: int, trajectory: int, verdict: Verdict):
    return ledger.grade(at_end(ledger, Position(group, trajectory, 0)), verdict)


def train(ledger: Ledger, steps: int = 1, engines: tuple[str, ...] = (ENGINE,)) -> None:
    for _ in range(steps):
        admit(ledger, ledger.rules.groups_per_step)
        for group in ledger.unready(ledger.rules.groups_per_step):
            finish(ledger, group, version=ledger.version)
        ledger.apply(*ledger.take(ledger.version))
        ledger.apply(*ledger.advance(ledger.version + 1, engines))


def positions(leases) -> list[tuple[int, int, int]]:
    return [(lease.position.group, lease.position.trajectory, lease.position.offset) for lease in leases]


# Rules.


def test_window_that_costs_more_lead_than_the_staleness_allows_is_refused():
    with pytest.raises(RulesError, match="decrease the window or increase the staleness"):
        rules(groups_per_step=4, max_staleness=1, window=5)
    assert rules(groups_per_step=4, max_staleness=2, window=5).lead == 0


@pytest.mark.parametrize(("name", "value"), [("groups_per_step", 0), ("completions_per_group", 1), ("max_staleness", -1)])
def test_rules_that_cannot_be_are_refused_with_their_value(name, value):
    with pytest.raises(RulesError, match=f"{name}={value}"):
        rules(**{name: value})


# Admission.


def test_admission_ends_lead_steps_beyond_the_published_version():
    ledger = started(groups_per_step=2, max_staleness=1)
    admit(ledger, 4)
    assert not ledger.may_admit()
    with pytest.raises(LedgerError, match="group 4 may not be admitted yet at version 0"):
        ledger.admit(prompt())


def test_staleness_zero_admits_exactly_the_groups_of_the_present_step():
    ledger = started(groups_per_step=2, max_staleness=0)
    train(ledger, steps=2)
    admit(ledger, 2)
    assert ledger.admitted == 6 and not ledger.may_admit()


def test_dropped_group_is_replaced():
    ledger = started(groups_per_step=2, max_staleness=0)
    admit(ledger, 2)
    ledger.apply(*ledger.drop(0, DropKind.BAD_PROMPT, "too long"))
    assert ledger.may_admit()
    admit(ledger, 1)
    assert not ledger.may_admit()


def test_nothing_is_generated_that_no_step_trains_on():
    ledger = started(groups_per_step=2, max_staleness=3, total_steps=2)
    admit(ledger, 4)
    assert not ledger.may_admit()


# Leases.


def test_only_an_engine_with_the_published_version_is_leased_to():
    ledger = started()
    admit(ledger, 1)
    assert not ledger.lease_segments("e1@1", 1)
    assert positions(ledger.lease_segments(ENGINE, 9)) == [(0, 0, 0), (0, 1, 0)]


def test_oldest_group_is_leased_first_and_evaluations_before_all():
    ledger = started()
    admit(ledger, 2)
    first, *_ = ledger.lease_segments(ENGINE, 3)
    ledger.apply(*ledger.report(first.position, segment([0], "cut"), ENGINE)[1])
    ledger.apply(*ledger.admit_eval("e", [prompt(9)], 1))
    assert positions(ledger.lease_segments(ENGINE, 9)) == [(-1, 0, 0), (0, 0, 1), (1, 1, 0)]


def test_lease_asks_for_a_segment_but_not_beyond_the_cap():
    ledger = started(segment_tokens=3, max_completion_tokens=5)
    admit(ledger, 1)
    asked = []
    for offset in (0, 3):
        lease = ledger.lease_segments(ENGINE, 1)[0]
        asked.append(lease.max_new_tokens)
        ledger.apply(*ledger.report(lease.position, segment([0] * lease.max_new_tokens, "cut"), ENGINE)[1])
        assert lease.position.offset == offset
    assert asked == [3, 2]
    assert positions(ledger.lease_grading("j", 1)) == [(0, 0, 5)]


def test_released_lease_is_free_for_another_engine():
    ledger = started()
    ledger.apply(*ledger.published(0, [ENGINE, "e1@1"]))
    admit(ledger, 1)
    taken = positions(ledger.lease_segments(ENGINE, 2))
    assert not ledger.lease_segments("e1@1", 2)
    assert ledger.release(ENGINE) == 2
    assert positions(ledger.lease_segments("e1@1", 2)) == taken


def test_empty_segment_gives_the_lease_back():
    ledger = started()
    admit(ledger, 1)
    lease = ledger.lease_segments(ENGINE, 1)[0]
    assert ledger.report(lease.position, segment([], "cut"), ENGINE) == ("returned", ())
    assert positions(ledger.lease_segments(ENGINE, 1)) == positions([lease])


def test_lease_is_adopted_only_where_the_ledger_stands_and_if_it_is_free():
    ledger = started()
    admit(ledger, 1)
    here, behind = Position(group=0, trajectory=0, offset=0), Position(group=0, trajectory=0, offset=1)
    assert not ledger.adopt("w0", behind)
    assert ledger.adopt("w0", here) and ledger.adopt("w0", here)
    assert not ledger.adopt("w1", here)
    assert positions(ledger.lease_segments(ENGINE, 9)) == [(0, 1, 0)]


def test_partial_trajectory_waits_after_a_rewind_until_its_version_is_published_again():
    ledger = started(groups_per_step=1, max_staleness=1)
    train(ledger, steps=2)
    admit(ledger, 1)
    lease = ledger.lease_segments(ENGINE, 1)[0]
    ledger.apply(*ledger.report(lease.position, segment([2, 2], "cut"), ENGINE)[1])
    ledger.apply(*ledger.rewind(0))
    assert not ledger.lease_segments(ENGINE, 9)  # its weights are not those of version 0
    ledger.apply(*ledger.published(0, [ENGINE]))
    assert not ledger.lease_segments(ENGINE, 9)
    for step in (0, 1):
        assert ledger.take(step) == ()
        ledger.apply(*ledger.advance(step + 1, [ENGINE]))
    assert positions(ledger.lease_segments(ENGINE, 9)) == [(2, 0, 2), (2, 1, 0)]


# Reports.


def test_trajectory_is_the_concatenation_of_its_segments():
    ledger = started(groups_per_step=1, segment_tokens=2, max_completion_tokens=9)
    admit(ledger, 1)
    parts = [segment([0, 0], "cut", first_token=20), segment([0, 0], "cut", first_token=30), segment([0], first_token=40)]
    for offset, part in zip((0, 2, 4), parts, strict=True):
        ledger.apply(*ledger.report(Position(group=0, trajectory=0, offset=offset), part)[1])
    ledger.apply(*report(ledger, 0, 1, 0, [0])[1])
    for i in (0, 1):
        ledger.apply(*grade(ledger, 0, i, verdict(i))[1])
    ledger.apply(*ledger.take(0))
    first = ledger.batch(0).groups[0].trajectories[0]
    assert first.tokens.tolist() == [7, 8, 0, 20, 21, 30, 31, 40]
    assert first.sampled.tolist() == [False] * 3 + [True] * 5
    assert first.versions.tolist() == [-1] * 3 + [0] * 5
    assert first.logprobs.tolist() == [0] * 3 + [x for part in parts for x in part.logprobs.tolist()]
    assert (first.segments, first.finish) == (3, "stop")


def test_other_sample_of_a_recorded_place_is_counted_and_not_recorded():
    ledger = started()
    admit(ledger, 1)
    ledger.apply(*report(ledger, 0, 0, 0, [0, 0], "cut")[1])
    outcome, changes = report(ledger, 0, 0, 0, [0, 0, 0], "cut")
    ledger.apply(*changes)
    assert outcome == "duplicate"
    assert ledger.summary()["lost_tokens"] == {"duplicate": 3}
    assert ledger.summary()["waiting_tokens"] == 2


def test_same_report_again_is_answered_as_the_first_time_and_loses_nothing():
    ledger = started()
    admit(ledger, 1)
    for finish_ in ("cut", "stop"):
        offset = 0 if finish_ == "cut" else 2
        ledger.apply(*report(ledger, 0, 0, offset, [0, 0], finish_)[1])
        assert report(ledger, 0, 0, offset, [0, 0], finish_) == ("recorded", ())


def test_tokens_older_than_the_trajectory_allows_are_refused_and_the_lease_returns():
    ledger = started(groups_per_step=1, max_staleness=1)
    train(ledger)
    admit(ledger, 1)
    lease = ledger.lease_segments(ENGINE, 1)[0]
    assert ledger.report(lease.position, segment([0, 0]), ENGINE)[0] == "stale"
    assert positions(ledger.lease_segments(ENGINE, 1)) == positions([lease])


@pytest.mark.parametrize(
    ("versions", "finish", "message"),
    [
        ([0] * 9, "cut", "exceeds max_completion_tokens=8"),
        ([], "stop", "without a token"),
        ([3], "stop", "only 0 steps were taken"),
    ],
)
def test_segment_that_cannot_be_is_an_error(versions, finish, message):
    ledger = started()
    admit(ledger, 1)
    with pytest.raises(LedgerError, match=message):
        report(ledger, 0, 0, 0, versions, finish)


@pytest.mark.parametrize(("group", "trajectory", "offset"), [(7, 0, 0), (-1, 0, 0), (0, 2, 0), (0, 0, 1)])
def test_report_about_what_never_was_is_an_error(group, trajectory, offset):
    ledger = started()
    admit(ledger, 1)
    with pytest.raises(LedgerError):
        report(ledger, group, trajectory, offset, [0])


def test_verdict_before_the_end_is_an_error_and_a_second_one_changes_nothing():
    ledger = started()
    admit(ledger, 1)
    with pytest.raises(LedgerError, match="not finished"):
        grade(ledger, 0, 0, verdict())
    ledger.apply(*report(ledger, 0, 0, 0, [0])[1])
    ledger.apply(*grade(ledger, 0, 0, verdict(1.0))[1])
    assert grade(ledger, 0, 0, verdict(0.0)) == ("duplicate", ())


# Turns.


def started_episode(**changed) -> tuple[Ledger, Position]:
    """A ledger whose first trajectory has ended its first turn."""
    ledger = started(**changed)
    admit(ledger, 1)
    ledger.apply(*report(ledger, 0, 0, 0, [0, 0])[1])
    return ledger, at_end(ledger, Position(0, 0, 0))


def test_observation_is_a_part_of_the_trajectory_that_nobody_sampled_and_the_next_turn_follows_it():
    ledger, position = started_episode()
    ledger.apply(*ledger.observe(position, observation(2, first_token=50))[1])
    lease = ledger.lease_segments(ENGINE, 9)[0]
    assert (lease.position, lease.max_new_tokens) == (Position(0, 0, 4), 4)
    assert np.concatenate(ledger.completion(lease.position)).tolist() == [0, 1, 50, 51]
    ledger.apply(*report(ledger, 0, 0, 4, [0])[1])
    ledger.apply(*report(ledger, 0, 1, 0, [0])[1])
    for i in (0, 1):
        ledger.apply(*grade(ledger, 0, i, verdict(i))[1])
    admit(ledger, 1)
    finish(ledger, 1)
    ledger.apply(*ledger.take(0))
    first = ledger.batch(0).groups[0].trajectories[0]
    assert first.tokens.tolist() == [7, 8, 0, 0, 1, 50, 51, 0]
    assert first.sampled.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert first.versions.tolist() == [-1] * 3 + [0, 0] + [-1] * 2 + [0]
    assert not first.logprobs[~first.sampled].any()
    assert (first.turns, first.segments, first.environment_s) == (2, 2, 0.5)
    assert first.reward_parts == {"tests": 0.0, "tool_calls": 1.0}
    assert ledger.summary()["waiting_tokens"] == 3 + 1 + 2


def test_observation_does_not_make_a_trajectory_younger():
    ledger = started(groups_per_step=1, max_staleness=1)
    train(ledger)
    admit(ledger, 1)
    ledger.apply(*report(ledger, 1, 0, 0, [1, 1])[1])
    ledger.apply(*ledger.observe(Position(1, 0, 2), observation(1))[1])
    assert report(ledger, 1, 0, 3, [0])[0] == "stale"


def test_answer_to_an_earlier_turn_changes_nothing():
    ledger, position = started_episode()
    seen = observation(1)
    ledger.apply(*ledger.observe(position, seen)[1])
    ledger.apply(*report(ledger, 0, 0, 3, [0])[1])
    for answered in (Answered(position, verdict()), Answered(position, observation=seen), Answered(position)):
        assert ledger.answer(answered) == ("duplicate", ())


@pytest.mark.parametrize(("tokens", "ending"), [(6, "stop"), (1, "length")])
def test_observation_that_leaves_no_room_for_a_turn_is_refused(tokens, ending):
    ledger = started()
    admit(ledger, 1)
    ledger.apply(*report(ledger, 0, 0, 0, [0, 0], ending)[1])
    with pytest.raises(LedgerError, match="leaves no room for a turn within max_completion_tokens=8"):
        ledger.observe(Position(0, 0, 2), observation(tokens))


def test_episode_begins_again_at_its_prompt_and_no_report_of_its_first_life_is_recorded():
    ledger, position = started_episode()
    ledger.apply(*ledger.restart(position)[1])
    assert ledger.summary()["lost_tokens"] == {"restarted": 2}
    assert ledger.summary()["waiting_tokens"] == 0
    assert ledger.lease_segments(ENGINE, 1)[0].position == Position(0, 0, 0, attempt=1)
    assert report(ledger, 0, 0, 0, [0, 0])[0] == "restarted"
    again = segment([0, 0], "cut")
    assert ledger.report(Position(0, 0, 0, attempt=1), again, ENGINE)[0] == "recorded"


def test_judge_that_keeps_the_state_of_an_episode_gets_it_again_unless_it_is_gone():
    ledger, position = started_episode()
    ledger.apply(*ledger.observe(position, observation(1), "j0")[1])
    ledger.apply(*report(ledger, 0, 0, 3, [0])[1])
    assert not ledger.lease_grading("j1", 1)
    lease = ledger.lease_grading("j0", 1)[0]
    assert ledger.release("j0") == 1
    assert positions(ledger.lease_grading("j1", 1)) == positions([lease])


# Dropping.


def test_group_without_signal_is_dropped_only_if_the_rules_say_so():
    for drop, ready in ((False, 1), (True, 0)):
        ledger = started(drop_no_signal=drop)
        admit(ledger, 1)
        finish(ledger, 0, rewards=(1.0, 1.0))
        summary = ledger.summary()
        assert summary["ready_groups"] == ready
        assert summary["dropped_groups"] == ({"no_signal": 1} if drop else {})
        assert summary["dropped_tokens"] == ({"no_signal": 2} if drop else {})


def test_too_many_drops_end_the_run_instead_of_spinning():
    ledger = started(drop_no_signal=True, max_drops_per_step=2, groups_per_step=1)
    for group in range(3):
        admit(ledger, 1)
        finish(ledger, group, rewards=(0.0, 0.0))
    assert not ledger.may_admit()
    with pytest.raises(LedgerError, match="too easy, too hard"):
        ledger.take(0)


def test_taken_group_is_not_dropped_and_what_it_still_gets_is_gone_once_it_is_dropped():
    ledger = started(groups_per_step=1, max_staleness=1)
    admit(ledger, 2)
    finish(ledger, 0)
    ledger.apply(*ledger.take(0))
    with pytest.raises(LedgerError, match="part of a batch"):
        ledger.drop(0, DropKind.UNRUNNABLE, "x")
    ledger.apply(*ledger.drop(1, DropKind.UNRUNNABLE, "x"))
    assert ledger.drop(1, DropKind.UNRUNNABLE, "x") == ()
    assert report(ledger, 1, 0, 0, [0])[0] == "gone"
    assert grade(ledger, 1, 0, verdict())[0] == "gone"


# Order.


def test_without_a_window_the_oldest_group_holds_up_the_batch():
    ledger = started(groups_per_step=2, max_staleness=1)
    admit(ledger, 4)
    for group in (1, 2, 3):
        finish(ledger, group)
    assert ledger.take(0) is None
    finish(ledger, 0)
    ledger.apply(*ledger.take(0))
    assert [g.index for g in ledger.batch(0).groups] == [0, 1]


def test_window_lets_so_many_groups_bypass_the_oldest_and_no_more():
    ledger = started(groups_per_step=2, max_staleness=2, window=2)
    admit(ledger, 4)
    for group in (1, 2, 3):
        finish(ledger, group)
    ledger.apply(*ledger.take(0))
    assert [g.index for g in ledger.batch(0).groups] == [1, 2]
    ledger.apply(*ledger.advance(1, [ENGINE]))
    admit(ledger, 2)
    for group in (4, 5):
        finish(ledger, group, version=1)
    assert ledger.take(1) is None  # 1 and 2 have bypassed group 0
    finish(ledger, 0)
    ledger.apply(*ledger.take(1))
    assert [g.index for g in ledger.batch(1).groups] == [0, 3]


# The trainer.


def test_take_asked_again_is_the_same_batch():
    ledger = started(groups_per_step=1)
    admit(ledger, 1)
    finish(ledger, 0)
    ledger.apply(*ledger.take(0))
    assert ledger.take(0) == ()
    assert [g.index for g in ledger.batch(0).groups] == [0]


@pytest.mark.parametrize("step", [-1, 1, 5])
def test_step_that_is_not_the_trainers_cannot_be_taken(step):
    with pytest.raises(LedgerError, match="cannot be taken"):
        started().take(step)


def test_version_needs_the_batch_that_it_was_trained_on():
    ledger = started()
    with pytest.raises(LedgerError, match="the batch of step 0 was never taken"):
        ledger.advance(1, [ENGINE])
    with pytest.raises(LedgerError, match="the ledger is at version 0"):
        ledger.published(1, [ENGINE])


def test_advance_asked_again_changes_nothing():
    ledger = started(groups_per_step=1)
    train(ledger)
    assert ledger.advance(1, [ENGINE]) == ()


def test_rewind_serves_the_batches_again_as_they_were_and_forgets_nothing_in_flight():
    ledger = started(groups_per_step=1, max_staleness=1)
    train(ledger, steps=3)
    admit(ledger, 1)
    ledger.apply(*report(ledger, 3, 0, 0, [3, 3], "cut")[1])
    before = {step: [g.index for g in ledger.batch(step).groups] for step in (1, 2)}
    ledger.apply(*ledger.durable(1))
    ledger.apply(*ledger.rewind(1))
    ledger.apply(*ledger.published(1, [ENGINE]))
    for step in (1, 2):
        assert ledger.take(step) == ()
        assert [g.index for g in ledger.batch(step).groups] == before[step]
        ledger.apply(*ledger.advance(step + 1, [ENGINE]))
    assert ledger.summary()["waiting_tokens"] == 2


def test_no_engine_is_leased_to_between_a_rewind_and_the_push_that_follows_it():
    ledger = started(groups_per_step=1, max_staleness=2)
    admit(ledger, 3)
    finish(ledger, 0)
    ledger.apply(*ledger.take(0))
    ledger.apply(*ledger.advance(1, [ENGINE]))
    ledger.apply(*ledger.rewind(0))
    assert not ledger.lease_segments(ENGINE, 1)
    ledger.apply(*ledger.published(0, [ENGINE]))
    assert positions(ledger.lease_segments(ENGINE, 1)) == [(1, 0, 0)]


def test_trainer_cannot_go_back_beyond_what_is_forgotten_or_forward():
    ledger = started(groups_per_step=1)
    train(ledger, steps=2)
    ledger.apply(*ledger.durable(2))
    for version in (1, 3):
        with pytest.raises(LedgerError, match=f"cannot go back to version {version}"):
            ledger.rewind(version)
    with pytest.raises(LedgerError, match="ahead of the ledger"):
        ledger.durable(3)


def test_durable_checkpoint_bounds_the_memory():
    ledger = started(groups_per_step=2, max_staleness=1)
    train(ledger, steps=5)
    ledger.apply(*ledger.durable(5))
    state = ledger.state
    assert not (state.groups or state.batches or state.taken or state.loaded)
    assert ledger.summary()["trained_tokens"] == 5 * 2 * 2


def test_group_that_is_read_again_must_be_what_was_taken():
    ledger = started(groups_per_step=1)
    changes = list(ledger.admit(prompt(0)))
    for i in range(2):
        changes += [Extended(0, i, segment([0, 0], "cut")), Extended(0, i, segment([0])), Graded(0, i, verdict())]
    ledger.apply(*changes)
    ledger.apply(*ledger.take(0))
    ledger.apply(*ledger.advance(1, [ENGINE]))
    ledger.unload_trained()
    assert ledger.unloaded(0) == [0]
    for lost in (2, 3, 5, 6):  # each second segment, the verdicts
        with pytest.raises(LedgerError, match="group 0 differs from the group"):
            ledger.load(0, changes[:lost] + changes[lost + 1 :])
    ledger.load(0, changes)
    assert [t.completion_tokens for t in ledger.batch(0).trajectories] == [3, 3]


# Evaluations.


def test_evaluation_tells_rewards_and_versions_and_leaves_training_alone():
    ledger = started()
    ledger.apply(*ledger.admit_eval("first", [prompt(1), prompt(2)], 1))
    assert ledger.eval_result("first") is None
    for group, reward in ((-1, 1.0), (-2, 0.0)):
        finish(ledger, group, rewards=(reward,))
    result = ledger.eval_result("first")
    assert (result.version_min, result.version_max, result.pass_rate) == (0, 0, 0.5)
    assert {p.prompt_id: p.rewards.tolist() for p in result.prompts} == {"p1": [1.0], "p2": [0.0]}
    assert ledger.admitted == 0 and ledger.admit_eval("first", [prompt(1)], 1) == ()
    ledger.apply(*ledger.close_eval("first"))
    with pytest.raises(LedgerError, match="no evaluation 'first'"):
        ledger.eval_result("first")


def test_summary_counts_the_graded_completions_of_a_running_evaluation():
    ledger = started()
    ledger.apply(*ledger.admit_eval("e", [prompt(1), prompt(2)], 1))
    assert ledger.summary()["evals"] == {"e": {"completions": 2, "graded": 0}}
    finish(ledger, -1, rewards=(1.0,))
    assert ledger.summary()["evals"] == {"e": {"completions": 2, "graded": 1}}
    ledger.apply(*ledger.drop(-2, DropKind.BAD_PROMPT, "too long"))
    assert ledger.summary()["evals"] == {"e": {"completions": 2, "graded": 2}}
    ledger.apply(*ledger.close_eval("e"))
    assert ledger.summary()["evals"] == {}


def test_prompt_refused_in_an_evaluation_counts_as_failed():
    ledger = started()
    ledger.apply(*ledger.admit_eval("e", [prompt(1), prompt(2)], 1))
    finish(ledger, -1, rewards=(1.0,))
    ledger.apply(*ledger.drop(-2, DropKind.BAD_PROMPT, "too long"))
    assert ledger.eval_result("e").pass_rate == 0.5
    assert ledger.summary()["dropped_groups"] == {}
