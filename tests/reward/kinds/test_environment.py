"""The kind `environment`: turns, live state, its rebuilding after a death, and faults of the user's class."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward.grade import NO_MORE_TURNS, grade, step
from reward.grading.resources import Lent, Sandboxes, Slots
from reward.grading.services import Services
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.kind import Answer, Episode, EpisodeLost, Reply
from reward.kinds.turns import NoRoom, Turns
from reward.task import Defaults, TaskError, read_reward
from rollout.ledger.records import I32, Finish, GradingWork, Position, Verdict
from rollout.prompts.problems import problem_of

PAGE = Path(__file__).parents[3] / "docs" / "episodes.md"
GAMES = Path(__file__).with_name("functions") / "games.py"


class Letters:
    """Renders messages as one token per character."""

    prefill = ""

    def tokens(self, messages: Sequence[Mapping[str, Any]], end: int) -> I32:
        return np.array([end, *(ord(char) for message in messages for char in message["content"])], np.int32)


TURNS = Turns(most=4, most_tokens=200, renderer=Letters())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("run")
    (found / "user_code").mkdir()
    shutil.copy(GAMES, found / "user_code" / "games.py")
    return found


def lent_by(run_dir: Path) -> Lent:
    return Lent(
        sandboxes=Sandboxes(1),
        functions=FunctionPool(run_dir, 2, memory_mb=300),
        services=Services(),
        slots=Slots(1, most_waiting=4),
        turns=TURNS,
        cancelled=lambda: False,
    )


@pytest.fixture
def lent(run_dir: Path) -> Iterator[Lent]:
    found = lent_by(run_dir)
    yield found
    found.functions.close()


class Play:
    """One episode, with its record as a ledger would keep it."""

    def __init__(self, lent: Lent, environment: str, key: str = "0/0/0", **task: Any) -> None:
        self.reward = read_reward({"kind": "environment", "environment": f"games:{environment}", "deadline_s": 1, **task})
        self.lent, self.key = lent, key
        self.turns: list[str] = []
        self.observations: list[I32] = []

    def say(self, text: str, *, lent: Lent | None = None, last: bool = False) -> Verdict | Reply:
        episode = Episode(
            key=self.key, turns=tuple(self.turns), observations=tuple(self.observations), ends=[7] * len(self.turns), last=last,
        )  # fmt: skip
        found = step(self.reward, Answer(completion=text, episode=episode), lent or self.lent)
        if isinstance(found, Reply):
            self.turns.append(text)
            self.observations.append(TURNS.tokens(found.messages, 7))
        return found

    def told(self, text: str, **more: Any) -> str:
        found = self.say(text, **more)
        assert isinstance(found, Reply), found
        return found.messages[0]["content"]


def test_state_lives_from_turn_to_turn_and_the_verdict_ends_the_episode(lent: Lent) -> None:
    play = Play(lent, "Guess", secret=5)
    assert play.told("3") == "guess 1 of many is wrong"
    assert play.told("4") == "guess 2 of many is wrong"
    found = play.say("5")
    assert isinstance(found, Verdict)
    assert found.reward == pytest.approx(1 / 3)
    assert found.parts["guesses"] == 3.0
    assert (found.reason, found.parts["environment_failed"]) == ("", 0.0)


def test_episodes_of_one_process_do_not_share_their_state(lent: Lent) -> None:
    plays = [Play(lent, "Guess", key=f"{i}/0/0", secret=5) for i in range(6)]
    for turn in (1, 2):
        assert {play.told("0") for play in plays} == {f"guess {turn} of many is wrong"}


def test_turn_that_is_asked_about_twice_is_played_once(lent: Lent) -> None:
    play = Play(lent, "Dice", secret=5)
    play.say("1")
    again = Play(lent, "Dice", secret=5)
    assert again.told("1") == "guess 1 of many is wrong"
    assert again.told("2") == "guess 2 of many is wrong"


def test_another_process_rebuilds_the_state_by_repeating_the_turns(lent: Lent, run_dir: Path) -> None:
    play = Play(lent, "Guess", secret=5)
    for turn in ("1", "2"):
        play.say(turn)
    other = lent_by(run_dir)
    try:
        assert play.told("3", lent=other) == "guess 3 of many is wrong"
        assert play.told("4") == "guess 4 of many is wrong"  # the first process has missed a turn
    finally:
        other.functions.close()


def test_killed_process_costs_an_episode_nothing(lent: Lent) -> None:
    play = Play(lent, "Guess", secret=5)
    pid = int(play.told("pid").split()[3])
    play.turns[0], play.observations[0] = "0", TURNS.tokens([{"content": "guess 1 of many is wrong"}], 7)
    os.kill(pid, signal.SIGKILL)
    assert play.told("1") == "guess 2 of many is wrong"


@pytest.mark.parametrize("environment", ["Dice", "Liar"])
def test_state_that_cannot_be_rebuilt_lets_the_episode_begin_again(lent: Lent, run_dir: Path, environment: str) -> None:
    play = Play(lent, environment, secret=5)
    play.say("1")
    other = lent_by(run_dir)
    try:
        with pytest.raises(EpisodeLost):
            play.say("2", lent=other)
    finally:
        other.functions.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang", "did not return within 1 s"),
        ("spin", "did not return within 1 s"),
        ("raise", "RuntimeError: broken"),
        ("megabytes", "returned messages of 8388608 characters"),
        ("nonsense", "must be a finite number"),
        ("no message", "returned no message"),
        ("leak", "more than 300 MiB of memory"),
        ("exit", "its process ended with 3"),
    ],
)
def test_fault_ends_its_episode_with_a_reason_and_another_goes_on(lent: Lent, fault: str, reason: str) -> None:
    other, play = Play(lent, "Guess", key="1/0/0", secret=5), Play(lent, "Faults")
    other.say("1")
    assert play.told("x") == "go on"
    found = play.say(fault)
    assert isinstance(found, Verdict)
    assert (found.reward, found.parts["environment_failed"]) == (0.0, 1.0)
    assert reason in found.reason
    assert other.told("2") == "guess 2 of many is wrong"


def test_class_without_the_methods_of_an_environment_is_named(lent: Lent) -> None:
    found = Play(lent, "NoStep").say("x")
    assert isinstance(found, Verdict)
    assert "without the method step" in found.reason


def test_other_parts_grade_the_end_of_an_episode_only(lent: Lent) -> None:
    play = Play(lent, "Guess", secret=5)
    play.reward = read_reward(
        [
            {"kind": "format", "pattern": "[0-9]+"},
            {"kind": "environment", "environment": "games:Guess", "secret": 5},
        ]
    )
    assert play.told("1")
    found = play.say("5")
    assert isinstance(found, Verdict)
    assert found.reward == pytest.approx(1 / 2 + 1)


def test_two_environments_are_refused() -> None:
    part = {"kind": "environment", "environment": "games:Guess"}
    with pytest.raises(TaskError, match="two parts are environments"):
        read_reward([{**part, "name": "a"}, {**part, "name": "b"}])


def test_examples_of_the_page_are_problems_and_its_classes_play(tmp_path: Path) -> None:
    page = PAGE.read_text()
    rows = sorted(re.findall(r'^ {4}({"id".*(?:\n {5}.*)*)', page, re.M))
    interpreter, basket, guess, repair = (problem_of(json.loads(row), "the page") for row in rows)
    assert all(read_reward(shipped.task).parts[0].task.is_environment for shipped in (interpreter, repair))
    (tmp_path / "user_code").mkdir()
    for name, code in zip(("my_games", "my_shop"), re.findall(r"```python\n(.*?)```", page, re.S), strict=True):
        (tmp_path / "user_code" / f"{name}.py").write_text(code)
    lent = lent_by(tmp_path)
    try:
        play = Play(lent, "Guess")
        play.reward = read_reward(guess.task)
        assert play.told("4") == "That is wrong. Guess again."
        found = play.say("5")
        shop = Play(lent, "Shop", key="0/1/0")
        shop.reward = read_reward(basket.task)
        check_tools(shop)
    finally:
        lent.functions.close()
    assert isinstance(found, Verdict)
    assert (found.reward, found.reason) == (0.5, "")


def check_tools(shop: Play) -> None:
    def call(name: str, **arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    found = shop.say(call("price", item="pen") + call("price", item="\ud800"))
    assert isinstance(found, Reply) and found.parts == {"tool_calls": 2.0, "tool_errors": 1.0}
    assert [message["content"] for message in found.messages] == ["2", "no price of '\\ud800': the shop sells pen, book"]
    assert shop.told(call("price")) == "price: missing a required argument: 'item'"
    assert shop.told(call("answer", action=1)) == "there is no tool 'answer': use one of price"
    assert "no JSON" in shop.told("<tool_call>price pen")
    assert shop.say("13").reward == 1.0
    assert shop.say(call("price", item="pen"), last=True).reward == 0.0


# Limits.


def work(turns: Sequence[str], offset: int, finish: Finish = Finish.STOP) -> GradingWork:
    return GradingWork(
        position=Position(3, 1, offset, 2), prompt_id="p", task={}, prefill="", turns=turns, ends=[7] * len(turns), tokens=9,
        finish=finish,
    )  # fmt: skip


@pytest.mark.parametrize(("turns", "finish", "last"), [(3, Finish.STOP, False), (4, Finish.STOP, True), (1, Finish.LENGTH, True)])
def test_turn_is_the_last_at_each_limit(turns: int, finish: Finish, last: bool) -> None:
    episode = TURNS.episode(work(["x"] * turns, 9, finish))
    assert (episode.last, episode.key, len(episode.turns)) == (last, "3/1/2", turns - 1)


def test_observation_that_leaves_no_room_ends_the_episode() -> None:
    reply = Reply(messages=[{"role": "user", "content": "x" * 99}])
    assert len(TURNS.observation(work(["x"], 99), reply, 0.0).tokens) == 100
    with pytest.raises(NoRoom, match="an observation of 100 tokens after 100 leaves no room"):
        TURNS.observation(work(["x"], 100), reply, 0.0)


def test_environment_that_asks_for_more_turns_than_there_are_gets_the_reward_of_a_truncated_completion(lent: Lent) -> None:
    reward = read_reward(
        {"kind": "environment", "environment": "games:Guess", "secret": 5}, defaults=Defaults(truncated_reward=-1.0)
    )
    found = grade(reward, Answer(completion="4"), lent)
    assert (found.reward, found.parts["truncated"], found.reason) == (-1.0, 1.0, NO_MORE_TURNS)
