"""The law under every order of events that hypothesis finds, with crashes of everybody between any two of them."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.rollout.builders import prompt, rules
from tests.rollout.ledger.ledger_world import JUDGES, Walk, World

ENGINES = st.integers(0, 1)
SOME_ENGINES = st.sampled_from([[0], [1], [0, 1]])
SOME_JUDGE = st.sampled_from(JUDGES)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        p=st.integers(1, 3), s=st.integers(0, 3), window_share=st.floats(0, 1), segment_tokens=st.integers(1, 3),
        cap=st.integers(1, 12), drop_no_signal=st.booleans(),
    )  # fmt: skip
    def start(self, p, s, window_share, segment_tokens, cap, drop_no_signal):
        self.world = World(
            rules(
                groups_per_step=p, max_staleness=s, window=int(window_share * s * p), segment_tokens=segment_tokens,
                max_completion_tokens=cap, drop_no_signal=drop_no_signal,
            )
        )  # fmt: skip
        self.evals = 0

    @rule(engine=ENGINES, count=st.integers(1, 6))
    def lease(self, engine, count):
        self.world.lease(self.world.engines[engine], count)

    @precondition(lambda self: any(e.held for e in self.world.engines))
    @rule(data=st.data(), tokens=st.integers(0, 3), finish=st.sampled_from(["cut", "cut", "stop"]))
    def finish_segment(self, data, tokens, finish):
        engine = data.draw(st.sampled_from([e for e in self.world.engines if e.held]))
        self.world.finish(engine, data.draw(st.integers(0, len(engine.held) - 1)), tokens, finish)

    @rule(chance=st.randoms(use_true_random=False), stragglers=st.floats(0, 0.6))
    def everybody_works(self, chance, stragglers):
        for _ in range(3):
            for engine in chance.sample(self.world.engines, 2):
                self.world.lease(engine, chance.randint(1, 6))
                for i in reversed(range(len(engine.held))):
                    if chance.random() >= stragglers:
                        self.world.finish(engine, i, chance.randint(1, 3), chance.choice(["cut", "stop"]))
        while chance.random() >= stragglers / 3 and self.world.grade(chance.choice(JUDGES), chance.choice([0.0, 1.0])):
            pass

    @rule(chance=st.randoms(use_true_random=False), steps=st.integers(1, 4))
    def some_steps_go_well(self, chance, steps):
        for _ in range(steps):
            self.everybody_works(chance, stragglers=0.2)
            self.world.step([0, 1])

    @precondition(lambda self: self.world.reports)
    @rule(data=st.data())
    def report_again(self, data):
        position, segment = data.draw(st.sampled_from(self.world.reports))
        outcome, changes = self.world.ledger.report(position, segment)
        assert outcome == "gone" or (outcome, changes) == ("recorded", ())

    @rule(judge=SOME_JUDGE, tokens=st.integers(1, 3))
    def environment_answers(self, judge, tokens):
        self.world.observe(tokens, judge)

    @rule(judge=SOME_JUDGE)
    def episode_begins_again(self, judge):
        self.world.restart(judge)

    @rule(judge=SOME_JUDGE)
    def judge_dies(self, judge):
        self.world.ledger.release(judge)

    @precondition(lambda self: self.world.answers)
    @rule(data=st.data(), judge=SOME_JUDGE)
    def answer_again(self, data, judge):
        outcome, changes = self.world.ledger.answer(data.draw(st.sampled_from(self.world.answers)), judge)
        assert outcome in ("duplicate", "gone") and not changes

    @rule()
    def refuse_prompt(self):
        self.world.drop_oldest()

    @rule(engine=ENGINES)
    def lease_expires_but_the_worker_lives(self, engine):
        self.world.ledger.release(self.world.engines[engine].name)

    @rule(engine=ENGINES)
    def worker_dies(self, engine):
        self.world.engines[engine].held.clear()
        self.world.ledger.release(self.world.engines[engine].name)

    @rule(engines=SOME_ENGINES)
    def train_a_step(self, engines):
        self.world.step(engines)

    @rule(engines=SOME_ENGINES)
    def trainer_dies_after_its_push(self, engines):
        if self.world.step(engines, dies_before_advance=True):
            self.world.restart_trainer([0, 1])

    @rule()
    def save_checkpoint(self):
        self.world.save()

    @rule(engines=SOME_ENGINES)
    def trainer_dies(self, engines):
        self.world.restart_trainer(engines)

    @rule()
    def server_dies(self):
        self.world.restart_server()

    @rule(completions=st.integers(1, 2))
    def start_eval(self, completions):
        self.evals += 1
        prompts = [prompt(1000 + i) for i in range(2)]
        self.world.do(self.world.ledger.admit_eval(f"eval-{self.evals}", prompts, completions))

    @rule()
    def collect_evals(self):
        self.world.collect_evals()

    @invariant()
    def account_adds_up(self):
        if hasattr(self, "world"):
            self.world.check_account()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.restart_server()
            self.world.run_steps(2 + self.world.rules.max_staleness)
            self.world.check_account()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_law_holds_in_long_random_histories(seed):
    Walk(random.Random(seed)).run(events=150)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_law_holds_in_many_longer_random_histories(seed):
    Walk(random.Random(seed)).run(events=400)


FAST = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


class TestLaw(LedgerMachine.TestCase):
    settings = FAST


@pytest.mark.slow
class TestLawAtLength(LedgerMachine.TestCase):
    settings = LONG
