"""The simulator: engines in closed form, the real ledger under simulated time, failures; exact where arithmetic is."""

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import ConfigError
from launch.report.drawing import Dot
from launch.simulate.events import Events
from launch.simulate.plot import drawings
from launch.simulate.scenario import EngineGroup, Failures, PushMode, Scenario
from launch.simulate.segments import segment
from launch.simulate.simulated_engine import Flight, SimulatedEngine
from launch.simulate.simulated_trainer import SimulationError
from launch.simulate.simulation import Result, simulate
from launch.simulate.simulation_report import report_of, text
from launch.simulate.speeds import EngineSpeeds, TrainerSpeeds
from launch.simulate.workload import Workload
from rollout.ledger.ledger import Finish, Position, Rules, Segment

GROUPS, COMPLETIONS = 8, 4


def engine_speeds(concurrency: int = 64, **changes: object) -> EngineSpeeds:
    speeds = EngineSpeeds(
        decode_s=tuple(0.01 + 0.001 * n for n in range(concurrency + 1)),
        decode_s_per_context_token=1e-6,
        prefill_s_per_token=1e-4,
        kv_tokens=inf,
    )
    return replace(speeds, **changes)  # type: ignore[arg-type]


def scenario(*, steps: int = 6, staleness: int = 2, window: int = 0, segment_tokens: int = 64, **changes: object) -> Scenario:
    made = Scenario(
        name="test",
        rules=Rules(
            groups_per_step=GROUPS,
            completions_per_group=COMPLETIONS,
            max_staleness=staleness,
            window=window,
            segment_tokens=segment_tokens,
            max_completion_tokens=256,
            max_drops_per_step=4096,
            total_steps=steps,
        ),
        engine_groups=(EngineGroup(engines=3, gpus_per_engine=4, concurrency=6, speeds=engine_speeds(6)),),
        trainer=TrainerSpeeds(
            old_logprob_s_per_token=2e-4,
            ref_logprob_s_per_token=2e-4,
            train_s_per_token=6e-4,
            step_overhead_s=0.1,
            push_s=0.5,
            checkpoint_stall_s=0.05,
            checkpoint_write_s=1.0,
        ),
        trainer_gpus=8,
        sandboxes=8,
        workload=Workload(
            completions_per_group=COMPLETIONS,
            prompt_mean_tokens=30,
            prompt_cap_tokens=64,
            completion_mean_tokens=60,
            completion_cap_tokens=256,
            grading_mean_s=0.2,
        ),
        checkpoint_every=2,
        failures=Failures(node_mtbf_s=0.0, lease_s=0.5, engine_restart_s=3.0, trainer_restart_s=4.0),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def flight(tokens: int, *, group: int = 0, prompt: int = 100, offset: int = 0) -> Flight:
    return Flight(Position(group=group, trajectory=0, offset=offset), prompt, tokens, Finish.STOP)


def work_of(result: Result) -> int:
    """Tokens that the run's groups have, whoever generates them."""
    stream = result.scenario.workload.stream()
    return sum(sum(stream[index].completion_tokens) for index in range(GROUPS * result.scenario.steps))


# Engines.


def stepped_s(speeds: EngineSpeeds, lengths: list[int], prompt: int) -> list[float]:
    """When each sequence ends, one decode step after another. Context grows within a step, so half of it counts."""
    now_s = prompt * len(lengths) * speeds.prefill_s_per_token
    ends, left = {}, dict(enumerate(lengths))
    done = 0
    while left:
        context = len(left) * (prompt + done) + len(left) / 2
        now_s += speeds.decode_s[len(left)] + context * speeds.decode_s_per_context_token
        done += 1
        for i in [i for i, n in left.items() if n == done]:
            ends[i] = now_s
            del left[i]
    return [ends[i] for i in range(len(lengths))]


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_an_engine_in_closed_form_ends_sequences_when_a_step_by_step_one_does(lengths: list[int]) -> None:
    engine = SimulatedEngine("e", engine_speeds(8), concurrency=8, node=0)
    flights = [flight(n, group=i) for i, n in enumerate(lengths)]
    for one in flights:
        engine.join([one])
    ends: dict[int, float] = {}
    while engine.running:
        engine.advance(engine.due_s())
        ends |= {one.position.group: engine.now_s for one in engine.landed()}
    assert [ends[i] for i in range(len(lengths))] == pytest.approx(stepped_s(engine_speeds(8), lengths, 100))
    assert engine.tokens == pytest.approx(sum(lengths))
    assert engine.context_tokens == pytest.approx(0, abs=1e-6)


def test_a_push_keeps_the_tokens_with_their_versions_and_costs_their_prefill() -> None:
    speeds = engine_speeds(8, decode_s_per_context_token=0.0, prefill_s_per_token=0.001)
    engine = SimulatedEngine("e", speeds, concurrency=8, node=0)
    one = flight(100)
    engine.join([one])  # prefill: 0.1 s, then 0.011 s a token
    engine.advance(0.1 + 40.5 * 0.011)
    engine.push(version=1, resume_s=engine.now_s + 2.0)
    assert one.runs == [(0, 40)]
    assert engine.due_s() == pytest.approx(engine.now_s + 2.0 + 0.140 + 59.5 * 0.011)
    engine.advance(engine.due_s())
    assert engine.landed() == [one]
    assert one.runs == [(0, 40), (1, 60)]


def test_a_full_cache_retracts_the_youngest_and_all_end_with_their_tokens() -> None:
    engine = SimulatedEngine("e", engine_speeds(8, kv_tokens=2000), concurrency=8, node=0)
    flights = [flight(500, group=i) for i in range(6)]
    for one in flights:
        engine.join([one])
    assert engine.running < 6
    landed: list[Flight] = []
    while engine.in_flight:
        engine.advance(engine.due_s())
        landed += engine.landed()
        assert engine.context_tokens <= 2000 + 1e-3
    assert [sum(n for _, n in one.runs) for one in landed] == [500] * 6
    assert [one.position.group for one in landed] == sorted(one.position.group for one in landed)


def test_a_shared_prompt_is_prefilled_once_until_a_push() -> None:
    speeds = engine_speeds(8, prefill_s_per_token=0.01)
    engine = SimulatedEngine("e", speeds, concurrency=8, node=0)
    engine.join([flight(10, group=1)])
    engine.join([flight(10, group=1)])
    assert engine.resume_s == pytest.approx(1.0)
    engine.join([flight(10, group=2)])
    assert engine.resume_s == pytest.approx(2.0)
    engine.push(version=1, resume_s=5.0)
    assert engine.resume_s == pytest.approx(7.0)


def test_what_happens_at_the_same_time_happens_in_the_order_of_asking() -> None:
    events, seen = Events(), []
    for name in ("b", "a"):
        events.at(1.0, lambda _, what: seen.append(what), name)
    events.at(0.5, lambda _, what: seen.append(what), "first")
    assert not events.run()
    assert seen == ["first", "b", "a"]


def test_a_simulated_segment_is_one_that_the_records_accept() -> None:
    made = segment([(3, 5), (4, 2)], Finish.CUT, "e")
    whole = Segment(tokens=made.tokens, logprobs=made.logprobs, versions=made.versions, finish=made.finish, engine=made.engine)
    assert whole.versions.tolist() == [3, 3, 3, 3, 3, 4, 4]
    assert len(segment([], Finish.CUT, "e").tokens) == 0


# The workload.


def test_lengths_have_the_asked_mean_tail_and_cap() -> None:
    workload = Workload(
        completions_per_group=8,
        prompt_mean_tokens=1200,
        prompt_cap_tokens=4096,
        completion_mean_tokens=2500,
        completion_cap_tokens=16384,
    )
    stream = workload.stream()
    lengths = np.array([stream[i].completion_tokens for i in range(4096)])
    assert lengths.mean() == pytest.approx(2500, rel=0.02)
    assert lengths.max() == 16384
    assert np.quantile(lengths, 0.99) / np.median(lengths) == pytest.approx(10, rel=0.1)
    assert np.mean([stream[i].prompt_tokens for i in range(4096)]) == pytest.approx(1200, rel=0.02)
    assert np.mean([stream[i].grading_s for i in range(4096)]) == pytest.approx(8.0, rel=0.03)


def test_work_is_the_same_whoever_asks_and_when() -> None:
    workload = scenario().workload
    early, late = workload.stream(), workload.stream()
    wanted = [late[i] for i in (40_000, 3, 700)]
    assert [early[i] for i in (3, 700, 40_000)] == [wanted[1], wanted[2], wanted[0]]
    assert early[3] == late[3]


@pytest.mark.parametrize("changes", [{"prompt_mean_tokens": 0}, {"completion_mean_tokens": 400}, {"group_correlation": 1.5}])
def test_a_workload_that_does_not_exist_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"plan\.|simulate\."):
        replace(scenario().workload, **changes)


# Runs.


@settings(deadline=None, max_examples=25)
@given(
    staleness=st.integers(0, 3),
    window=st.sampled_from([0, 4, GROUPS]),
    segment_tokens=st.sampled_from([16, 64, 256]),
    mode=st.sampled_from(list(PushMode)),
    seed=st.integers(0, 5),
    failing=st.booleans(),
)
def test_every_run_trains_each_token_once_within_the_bound(
    staleness: int, window: int, segment_tokens: int, mode: PushMode, seed: int, failing: bool
) -> None:
    if -(-window // GROUPS) > staleness:
        window = 0
    base = scenario(staleness=staleness, window=window, segment_tokens=segment_tokens, push_mode=mode)
    failures = replace(base.failures, node_mtbf_s=120.0 if failing else 0.0, seed=seed)
    result = simulate(replace(base, failures=failures, workload=replace(base.workload, seed=seed)))
    lags: Counter[int] = Counter()
    for step in {step.step: step for step in result.steps}.values():
        lags += step.lag_tokens
    assert lags.total() == work_of(result)
    assert max(lags) <= staleness
    assert result.trained_tokens == work_of(result)
    assert sorted({step.step for step in result.steps}) == list(range(1, 7))


def test_staleness_zero_takes_turns_and_its_time_is_the_sum_of_both_sides() -> None:
    result = simulate(scenario(staleness=0, push_mode=PushMode.BATCH))
    for step in result.steps:
        assert set(step.lag_tokens) == {0}
        assert step.untaken_groups == 0
        trains_s = step.old_logprob_s + step.ref_logprob_s + step.train_s + step.checkpoint_s
        assert step.step_s == pytest.approx(step.wait_s + trains_s + step.push_s)
        assert step.wait_s > 0
    engine_s = sum(e.decode_s + e.stalled_s + e.idle_s for e in result.engines)
    assert engine_s == pytest.approx(3 * result.seconds)


def test_when_training_is_slow_the_step_is_what_training_takes() -> None:
    base = scenario(steps=12)
    result = simulate(replace(base, trainer=replace(base.trainer, train_s_per_token=0.02)))
    stream = base.workload.stream()
    for step in result.steps[2:]:
        groups = range((step.step - 1) * GROUPS, step.step * GROUPS)
        tokens = sum(sum(stream[i].completion_tokens) + COMPLETIONS * stream[i].prompt_tokens for i in groups)
        assert step.wait_s == pytest.approx(0, abs=1e-9)
        stalled_s = 0.05 if step.step % 2 == 0 else 0.0
        assert step.step_s == pytest.approx(tokens * (0.02 + 4e-4) + 0.1 + 0.5 + stalled_s)


def test_when_generation_is_slow_more_staleness_does_not_make_it_faster_than_the_engines() -> None:
    base = scenario(steps=12)
    slow = replace(
        base, engine_groups=tuple(replace(f, speeds=engine_speeds(6, prefill_s_per_token=0.0)) for f in base.engine_groups)
    )
    result = simulate(slow)
    busy_s = sum(e.decode_s for e in result.engines)
    fastest_s = work_of(result) / 6 * (0.016 + 0.0)  # full engines, no context
    assert busy_s > fastest_s


def test_an_interrupting_push_beats_one_that_waits_for_the_fleet() -> None:
    base = scenario(steps=12, segment_tokens=256)
    interrupt, drain = (simulate(replace(base, push_mode=mode)) for mode in (PushMode.INTERRUPT, PushMode.DRAIN))
    assert interrupt.seconds < drain.seconds
    assert sum(step.drain_s for step in interrupt.steps) == 0 < sum(step.drain_s for step in drain.steps)


def test_a_lost_rollout_node_loses_what_its_engines_had_and_no_step() -> None:
    base = scenario(steps=10)
    at_s = simulate(base).seconds / 2
    result = simulate(replace(base, failures=replace(base.failures, planned=((at_s, 0),))))
    assert [failure.of for failure in result.failures] == ["rollout"]
    assert [step.step for step in result.steps] == list(range(1, 11))
    assert result.redone_steps == 0
    assert result.engine_lost_tokens > 0
    dead = [engine for engine in result.engines if engine.down_s > 0]
    assert [engine.down_s for engine in dead] == pytest.approx([3.0] * 2)  # two engines of 4 GPUs on a node
    assert result.trained_tokens == work_of(result)


def test_a_lost_trainer_node_goes_back_to_the_checkpoint_and_generates_nothing_twice() -> None:
    base = scenario(steps=10)
    undisturbed = simulate(base)
    at_s = undisturbed.steps[5].end_s - 0.6  # step 6: trained, not pushed; the checkpoint of version 4 is safe
    result = simulate(replace(base, failures=replace(base.failures, planned=((at_s, 2),))))
    assert [failure.of for failure in result.failures] == ["trainer"]
    assert result.redone_steps == 1
    assert [step.step for step in result.steps] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]
    again = result.steps[5]
    assert again.lag_tokens == result.steps[4].lag_tokens  # the same batch
    assert again.wait_s == 0
    assert result.seconds > undisturbed.seconds + 4.0
    assert result.engine_lost_tokens == 0


def test_no_engine_is_idle_for_longer_than_a_step_whatever_fails() -> None:
    base = scenario(steps=12)
    result = simulate(replace(base, failures=replace(base.failures, node_mtbf_s=60.0, trainer_restart_s=40.0, seed=2)))
    assert {failure.of for failure in result.failures} == {"trainer", "rollout"}
    for step in result.steps:
        assert -1e-6 <= step.engine_idle_s <= len(result.engines) * step.step_s + 1e-6
        assert step.generated_tokens >= 0


def test_steps_done_again_are_drawn_once() -> None:
    base = scenario(steps=10)
    at_s = simulate(base).steps[5].end_s - 0.6
    result = simulate(replace(base, failures=replace(base.failures, planned=((at_s, 2),))))
    assert len(result.steps) == 11
    idle = drawings(result, report_of(result))[1]
    assert len([shape for shape in idle.shapes if isinstance(shape, Dot)]) == 2 * 10  # trainer and engines


def test_a_run_that_cannot_move_says_so_with_who_waits_for_what() -> None:
    base = scenario()
    gone = replace(base.failures, planned=((1.0, 0), (1.0, 1)), engine_restart_s=inf)
    said = r"no progress since 10 s .*the trainer, at version 0, is waiting for a batch; 0 of \d engines .*; 2 nodes were lost"
    with pytest.raises(SimulationError, match=said):
        simulate(replace(base, failures=gone))


@pytest.mark.parametrize(
    "slow", [{"workload": {"grading_mean_s": 20_000.0}}, {"failures": {"trainer_restart_s": 90_000.0, "planned": ((5.0, 2),)}}]
)
def test_what_takes_days_by_itself_is_waited_for(slow: dict[str, dict[str, Any]]) -> None:
    base = scenario()
    changed = {name: replace(getattr(base, name), **values) for name, values in slow.items()}
    result = simulate(replace(base, **changed))
    assert result.steps[-1].step == base.steps and result.seconds > 6 * 3600


def test_long_tail_engines_take_what_was_cut() -> None:
    base = scenario(steps=8, segment_tokens=32)
    plain = base.engine_groups[0]
    tail = EngineGroup(engines=1, gpus_per_engine=4, concurrency=2, speeds=engine_speeds(2), tail=True)
    result = simulate(replace(base, engine_groups=(replace(plain, engines=2), tail)))
    assert result.engines[-1].tokens > 0
    assert result.trained_tokens == work_of(result)


def test_a_report_adds_up() -> None:
    result = simulate(scenario(steps=10, failures=replace(scenario().failures, node_mtbf_s=150.0, seed=3)))
    report = report_of(result)
    assert sum(report.trainer.values()) == pytest.approx(1)
    assert sum(report.engines.values()) == pytest.approx(1)
    assert sum(report.lag_fractions.values()) == pytest.approx(1)
    assert 0 <= report.gpus_idle <= 1
    assert report.hours_for(10) == report.hours
    assert report.hours_for(1000) > 50 * report.hours
    assert "max_staleness" not in text(report, steps=10)
    assert f"{sum(report.failures.values())}" != "0"
