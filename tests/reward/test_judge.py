"""A judge against a queue that lives in this process: what it takes, what it reports, how it ends."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.grade import Reward, grade, printable
from reward.grading.grader import SANDBOX_TRIES
from reward.jail.limits import HostExhausted
from reward.judge import Judge, JudgeError
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.kind import Answer, Resources
from reward.kinds.turns import Turns
from reward.task import Defaults
from rollout.ledger.records import I32, Answered, Finish, GradingWork, Heard, Observation, Position, RecordError, Verdict
from rollout.queue.client import QueueTimeout
from tests.reward.http_server import serving
from tests.reward.kinds.test_environment import TURNS

SQUARE = {"kind": "calls", "entry_point": "f", "tests": [{"args": [x], "expected": x * x} for x in (1, 5)]}
RIGHT, WRONG = "    return x * x\n", "    return x\n"
GAMES = Path(__file__).parent / "kinds" / "functions"  # where environments for tests lie
SLEEPS = "    import time\n    time.sleep(600)\n"


def work(group: int, completion: str, task: dict[str, Any] = SQUARE, finish: Finish = Finish.STOP) -> GradingWork:
    return GradingWork(
        position=Position(group=group, trajectory=0, offset=9),
        prompt_id=f"p{group}",
        task=task,
        prefill="def f(x):\n",
        turns=[completion],
        ends=[0],
        tokens=9,
        finish=finish,
    )


class Queue:
    """The part of a queue server that a judge sees."""

    def __init__(self, *waiting: GradingWork) -> None:
        self.waiting = list(waiting)
        self.told: dict[int, Verdict] = {}
        self.observed: dict[int, Observation] = {}
        self.restarted: list[int] = []
        self.reports: list[int] = []  # the group of each verdict, in order
        self.messages = 0  # that brought them
        self.open = threading.Event()  # verdicts are taken in
        self.open.set()
        self.refused: dict[int, str] = {}
        self.cancel: set[Position] = set()
        self.held: set[Position] = set()
        self.closing = False
        self.away = False
        self.lock = threading.Lock()

    def lease_grading(self, holder: str, n: int, wait_s: float = 5.0) -> list[GradingWork]:
        self._answer()
        with self.lock:
            taken, self.waiting = self.waiting[:n], self.waiting[n:]
        if not taken:
            time.sleep(0.02)
        return taken

    def answer(self, holder: str, answers: Sequence[Answered]) -> list[str]:
        self._answer()
        assert self.open.wait(20.0)
        with self.lock:
            self.messages += 1
            self.reports += [one.position.group for one in answers]
            self.told |= {one.position.group: one.verdict for one in answers if one.verdict is not None}
            self.observed |= {one.position.group: one.observation for one in answers if one.observation is not None}
            self.restarted += [one.position.group for one in answers if one.verdict is None and one.observation is None]
        return ["recorded"] * len(answers)

    def refuse_task(self, group: int, reason: str) -> None:
        self.refused[group] = reason

    def heartbeat(self, holder: str, role: str, held: Sequence[Position] = ()) -> Heard:
        self._answer()
        assert role == "judge"
        self.held = set(held)
        return Heard(cancel=[position for position in held if position in self.cancel], closing=self.closing)

    def close(self) -> None:
        pass

    def _answer(self) -> None:
        if self.away:
            time.sleep(0.02)
            raise QueueTimeout("away")


def judge_for(queue: Queue, *, stall_s: float = 60.0, turns: Turns | None = None, **defaults: Any) -> Judge:
    return Judge(
        holder="judge-0",
        defaults=Defaults(**defaults),
        packages=(),
        functions=FunctionPool(Path.cwd(), 2, 1024),
        turns=turns or Turns(),
        slots=2,
        connect=lambda name: queue,
        lease_s=0.4,
        stall_s=stall_s,
    )


class Running:
    """A judge in a thread, ended at the end."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.judge.run()
        except (JudgeError, RuntimeError) as error:
            self.failure = error

    def __enter__(self) -> "Running":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.judge.close()
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def test_completions_are_graded_and_each_is_reported_once() -> None:
    queue = Queue(*(work(group, RIGHT if group % 2 else WRONG) for group in range(20)))
    with Running(judge_for(queue)):
        wait_for(lambda: len(queue.told) == 20)
    assert sorted(queue.reports) == list(range(20))
    assert [queue.told[group].reward for group in range(20)] == [0.0, 1.0] * 10
    assert queue.told[0].reason == "test 1: returned 5, expected 25"
    assert all(v.parts.keys() == queue.told[0].parts.keys() for v in queue.told.values())


EPISODE = {"kind": "environment", "environment": "games:Guess", "secret": 5}


def turn(group: int, *said: str, observations: Sequence[I32] = (), environment: str = "Guess", attempt: int = 0) -> GradingWork:
    task = EPISODE | {"environment": f"games:{environment}"}
    position = Position(group=group, trajectory=0, offset=90, attempt=attempt)
    ends = [7] * len(said)
    return replace(work(group, "", task), position=position, turns=said, ends=ends, observations=observations, prefill="")


def test_environment_answers_turns_by_observations_and_ends_the_episode_by_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GAMES)
    first = TURNS.tokens([{"content": "guess 1 of many is wrong"}], 7)
    queue = Queue(turn(0, "4"), turn(1, "4", "5", observations=[first]), turn(2, "4", "3", "2", observations=[first, first]))
    with Running(judge_for(queue, turns=TURNS, truncated_reward=-1.0)):
        wait_for(lambda: len(queue.reports) == 3)
    assert queue.observed[0].tokens.tolist() == first.tolist()
    assert queue.observed[0].parts == {"tool_calls": 1.0}
    assert queue.told[1].reward == 0.5
    assert queue.restarted == [2]  # its record differs from what the environment answers


def test_episode_whose_environment_is_lost_again_and_again_gets_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GAMES)
    queue = Queue(*(turn(i, "1", "2", observations=[np.ones(1, np.int32)], environment="Dice", attempt=3 * i) for i in range(2)))
    with Running(judge_for(queue, turns=TURNS)):
        wait_for(lambda: len(queue.reports) == 2)
    assert queue.restarted == [0]
    assert "its environment was lost 4 times" in queue.told[1].reason


def test_observation_that_leaves_no_room_ends_the_episode_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GAMES)
    queue = Queue(turn(0, "4"))
    with Running(judge_for(queue, turns=replace(TURNS, most_tokens=100), truncated_reward=-1.0)):
        wait_for(lambda: queue.told)
    assert queue.told[0].reward == -1.0
    assert "leaves no room for another turn (rollout.max_completion_tokens=100)" in queue.told[0].reason


def test_verdicts_that_come_while_a_report_is_on_its_way_travel_together() -> None:
    queue = Queue(*(work(group, RIGHT) for group in range(6)))
    queue.open.clear()
    with Running(judge_for(queue)):
        wait_for(lambda: not queue.waiting)
        time.sleep(0.5)  # for what the last slots still grade
        queue.open.set()
        wait_for(lambda: len(queue.told) == 6)
    assert sorted(queue.reports) == list(range(6)) and queue.messages < 6


def test_work_that_a_restarted_server_leases_again_is_graded_once() -> None:
    slow = "    import time\n    end = time.time() + 1\n    while time.time() < end: pass\n    return x * x\n"
    queue = Queue(work(1, slow), work(1, slow), work(2, WRONG))
    with Running(judge_for(queue)):
        wait_for(lambda: len(queue.told) == 2)
        time.sleep(0.2)
    assert sorted(queue.reports) == [1, 2]


def test_the_configuration_is_what_a_task_gets_where_it_is_silent() -> None:
    queue = Queue(work(0, WRONG))
    with Running(judge_for(queue, credit="fraction")):
        wait_for(lambda: queue.told)
    assert queue.told[0].reward == 0.5


def test_judge_of_two_slots_has_many_completions_at_a_slow_service_and_grades_code_meanwhile() -> None:
    meet = threading.Barrier(20, timeout=30.0)  # the service answers when 20 requests are there

    def answer(body: Any) -> tuple[int, Any]:
        meet.wait()
        return 200, {"items": [item["data"] for item in body["items"]]}

    with serving(answer) as server:
        asks = [work(group, "x", {"kind": "http", "url": server.url, "data": group, "batch": 1}) for group in range(20)]
        queue = Queue(*asks[:19], *(work(group, RIGHT) for group in range(20, 24)))
        with Running(judge_for(queue)):
            wait_for(lambda: len(queue.told) == 4)
            assert all(queue.told[group].reward == 1.0 for group in range(20, 24))
            queue.waiting.append(asks[19])
            wait_for(lambda: len(queue.told) == 24)
    assert [queue.told[group].reward for group in range(20)] == [float(group) for group in range(20)]


def test_a_truncated_completion_is_not_run() -> None:
    queue = Queue(work(0, RIGHT, finish=Finish.LENGTH))
    with Running(judge_for(queue, truncated_reward=-0.5)):
        wait_for(lambda: queue.told)
    assert queue.told[0].reward == -0.5
    assert queue.told[0].parts["truncated"] == 1.0


def test_a_task_that_cannot_be_graded_is_refused_with_its_problem() -> None:
    queue = Queue(work(7, RIGHT, task={"kind": "calls", "entry_point": "f", "tests": []}), work(8, RIGHT))
    with Running(judge_for(queue)):
        wait_for(lambda: queue.refused and queue.told)
    assert "p7: task.tests: must be a list of at least one test" in queue.refused[7]


@pytest.mark.parametrize("error", [RecursionError("too deep"), MemoryError(), KeyError("\ud83d\x1b[2J"), RecordError("NaN")])
def test_a_fault_of_the_grader_costs_one_verdict_and_never_the_judge(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def grade_or_fail(reward: Reward, answer: Answer, resources: Resources) -> Verdict:
        if answer.completion == WRONG:
            raise error
        return grade(reward, answer, resources)

    monkeypatch.setattr("reward.grading.grader.grade", grade_or_fail)
    queue = Queue(*(work(group, WRONG if group in (2, 3) else RIGHT) for group in range(6)))
    with Running(judge_for(queue)) as running:
        wait_for(lambda: len(queue.told) == 6)
    assert [queue.told[group].reward for group in range(6)] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert type(error).__name__ in queue.told[2].reason and queue.told[2].reason.isprintable()
    assert running.judge.figures.counts()["grader failures"] == 2


def test_host_without_room_for_a_job_makes_a_judge_wait_and_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = itertools.count()

    def grade_when_there_is_room(reward: Reward, answer: Answer, resources: Resources) -> Verdict:
        if next(failures) < 2 * SANDBOX_TRIES:
            raise HostExhausted("no memory")
        return grade(reward, answer, resources)

    monkeypatch.setattr("reward.grading.grader.grade", grade_when_there_is_room)
    monkeypatch.setattr("reward.grading.grader.EXHAUSTED_PAUSE_S", 0.01)
    queue = Queue(work(0, RIGHT), work(1, WRONG))
    with Running(judge_for(queue)):
        wait_for(lambda: len(queue.told) == 2)
    assert [queue.told[group].reward for group in range(2)] == [1.0, 0.0]


@given(st.text(st.characters()))
def test_a_printable_text_can_be_sent_and_shown_and_says_what_it_said(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and shown.encode().decode() == shown
    assert not text.isprintable() or shown == text


def test_a_cancelled_completion_stops_running_and_is_not_reported() -> None:
    queue = Queue(work(0, SLEEPS), work(1, SLEEPS))
    with Running(judge_for(queue)) as running:
        wait_for(lambda: len(queue.held) == 2)
        queue.cancel = set(queue.held)
        wait_for(lambda: not queue.held, timeout_s=5)
        queue.waiting.append(work(2, RIGHT))
        wait_for(lambda: queue.told)
    assert list(queue.told) == [2]
    assert running.judge.figures.counts()["cancelled"] == 2


def test_a_closing_run_ends_the_judge() -> None:
    queue = Queue()
    with Running(judge_for(queue)) as running:
        queue.closing = True
        running.thread.join(timeout=15)
        assert not running.thread.is_alive()
    assert running.failure is None


def test_a_judge_that_is_told_to_end_reports_what_it_has_begun() -> None:
    slow = "    import time\n    time.sleep(1)\n" + RIGHT
    queue = Queue(work(0, slow), work(1, slow), work(2, slow))
    with Running(judge_for(queue)):
        wait_for(lambda: len(queue.waiting) == 1)
    assert sorted(queue.told) == [0, 1]
    assert [item.position.group for item in queue.waiting] == [2]


def test_a_queue_server_that_is_away_for_a_while_is_only_a_pause() -> None:
    queue = Queue(*(work(group, RIGHT) for group in range(4)))
    queue.away = True
    with Running(judge_for(queue)):
        time.sleep(0.5)
        queue.away = False
        wait_for(lambda: len(queue.told) == 4)


def test_a_queue_server_that_stays_away_ends_the_judge() -> None:
    queue = Queue()
    queue.away = True
    with Running(judge_for(queue, stall_s=0.5)) as running:
        running.thread.join(timeout=20)
    assert isinstance(running.failure, JudgeError)


@pytest.mark.parametrize("completion", [RIGHT, "    import time\n    time.sleep(0.5)\n" + RIGHT])
def test_a_killed_zygote_costs_no_verdict(completion: str) -> None:
    queue = Queue(*(work(group, completion) for group in range(6)))
    others = set(_children("zygote.py"))  # zygotes that other tests left
    with Running(judge_for(queue)):
        wait_for(lambda: len(queue.told) >= 1)
        for pid in set(_children("zygote.py")) - others:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(queue.told) == 6)
    assert {verdict.reward for verdict in queue.told.values()} == {1.0}


def _children(word: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{entry}/cmdline") as file:
                if parent == os.getpid() and word in file.read():
                    found.append(int(entry))
        except (OSError, ValueError):
            continue
    return found
