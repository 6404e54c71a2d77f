"""The law under every order of events that hypothesis finds, with crashes of everybody between any two of them."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.rollout.builders import prompt, rules
from tests.rollout.ledger_world import World

ENGINES = st.integers(0, 1)
SOME_ENGINES = st.sampled_from([[0], [1], [0, 1]])


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        p=st.integers(1, 3), s=st.integers(0, 3), window_share=st.floats(0, 1), segment_tokens=st.integers(1, 3),
        cap=st.integers(1, 5), drop_no_signal=st.booleans(),
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

    @rule()
    def finish_all(self):
        for engine in self.world.engines:
            while engine.held:
                self.world.finish(engine, 0, 2, "stop")

    @rule(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12))
    def grade(self, rewards):
        for reward in rewards:
            self.world.grade(reward)

    @precondition(lambda self: self.world.reports)
    @rule(data=st.data())
    def report_again(self, data):
        position, segment = data.draw(st.sampled_from(self.world.reports))
        assert self.world.ledger.report(position, segment)[0] in ("duplicate", "gone")

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
        ledger = self.world.ledger
        for eval_id in list(ledger.state.evals):
            result = ledger.eval_result(eval_id)
            if result is not None:
                assert result.version_min <= result.version_max <= ledger.state.steps_taken
                self.world.do(ledger.close_eval(eval_id))

    @invariant()
    def account_adds_up(self):
        if hasattr(self, "world"):
            self.world.check_account()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.restart_server()
            self.world.run_steps(2 + self.world.rules.max_staleness)
            self.world.check_account()


FAST = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=1500, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck))


class TestLaw(LedgerMachine.TestCase):
    settings = FAST


@pytest.mark.slow
class TestLawAtLength(LedgerMachine.TestCase):
    settings = LONG
