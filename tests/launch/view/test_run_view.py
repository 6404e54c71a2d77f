"""What the pages learn from the files of a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.view.run_view import NotThere, RunView
from launch.view.token_text import TokenizerText
from rollout.ledger.changes import DropKind, Dropped, Extended, Graded, Restarted
from rollout.ledger.records import Verdict
from tests.launch.view.recorded_run import TOKENIZER, admitted, group_of, make_run, piece, taken, tokens, write_changes


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    view = RunView(make_run(tmp_path / "small"))
    view.catch_up()
    return view


def problems(view: RunView, search: str = "", sort: str = "pass_rate", descending: bool = False) -> list[str]:
    return [row.id for row in view.problems(search=search, sort=sort, descending=descending, first=0, most=10).rows]


def test_problem_has_its_attempts_its_best_and_worst_sample_and_its_reasons(view: RunView) -> None:
    page = view.problem("p0")
    assert (page.row.attempts, page.row.pass_rate, page.row.reward) == (4, 0.75, 0.75)
    assert (page.row.best, page.row.best_group, page.row.best_number) == (1.0, 0, 0)
    assert (page.row.worst, page.row.worst_group, page.row.worst_number) == (0.0, 0, 1)
    assert page.row.tokens == sum(map(len, ["right", "wrong answer", "right", "right too"])) / 4
    assert [(rate.version, rate.pass_rate) for rate in page.pass_rates] == [(0, 0.5), (2, 1.0)]
    assert page.reasons == {"wrong answer": 1}


def test_problems_are_sorted_and_searched(view: RunView) -> None:
    assert problems(view, sort="reward") == ["p1", "p2", "p0"]
    assert problems(view, sort="attempts", descending=True) == ["p0", "p1", "p2"]
    assert problems(view, search="SOLVE P2") == ["p2"]
    assert problems(view, search="%") == []


def test_samples_of_a_group_stand_side_by_side_with_their_verdicts(view: RunView) -> None:
    answer = view.group(0)
    assert (answer.row.step, answer.page.prompt) == (1, "Solve p0:")
    assert [(s.text, s.reward, s.reason, s.parts) for s in answer.page.samples] == [
        ("right", 1.0, "", {"tests": 1.0}),
        ("wrong answer", 0.0, "wrong answer", {"tests": 0.0}),
    ]


def test_token_page_tells_the_version_the_lag_and_the_part_of_each_token(view: RunView) -> None:
    page = view.tokens(2, 0).page
    assert "".join(page.texts) == "Solve p2:first said ülast"
    assert [(p.kind, p.end - p.begin, p.engine, p.finish) for p in page.parts] == [
        ("prompt", 9, "", ""),
        ("segment", 3, "engine-0", "cut"),
        ("segment", 2, "engine-1", "stop"),
        ("observation", 8, "", ""),
        ("segment", 4, "engine-0", "stop"),
    ]
    assert page.versions == [None] * 9 + [1] * 3 + [2] * 2 + [None] * 8 + [2] * 4
    assert page.lags == [None] * 9 + [2] * 3 + [1] * 2 + [None] * 8 + [1] * 4  # trained with version 3, in step 4
    assert page.logprobs == [None if version is None else -0.5 for version in page.versions]
    assert (page.sample.turns, page.sample.segments, page.sample.sampled, page.sample.versions) == (2, 3, 9, (1, 2))


def test_completion_that_is_not_finished_is_shown_as_far_as_it_goes(view: RunView) -> None:
    sample = view.group(2).page.samples[1]
    assert (sample.text, sample.reward, sample.versions) == ("", None, None)


def test_run_is_followed_while_it_goes(view: RunView) -> None:
    before = view.news
    write_changes(view.run_dir, [*group_of(4, "p4", ["new", "newer"], [0.0, 1.0], version=3), taken(4, [4])])
    view.catch_up()
    assert view.news > before
    assert view.problem("p4").row.attempts == 2
    assert [group.id for group in view.groups(5)] == [4]


def test_episode_that_began_again_counts_only_its_last_attempt(view: RunView) -> None:
    again = [
        Extended(4, 0, piece("lost", 3)),
        Restarted(4, 0),
        Extended(4, 0, piece("kept", 3)),
        Graded(4, 0, Verdict(reward=1.0)),
    ]
    write_changes(view.run_dir, [admitted(4, "p4", 3), *again])
    view.catch_up()
    assert view.group(4).page.samples[0].text == "kept"
    assert view.problem("p4").row.tokens == 4


def test_dropped_group_says_why(view: RunView) -> None:
    write_changes(view.run_dir, [admitted(4, "p0", 3), Dropped(group=4, kind=DropKind.BAD_PROMPT, reason="too long")])
    view.catch_up()
    assert view.problem("p0").groups[0].dropped == "too long"


def test_replaced_ledger_is_read_from_its_start(view: RunView) -> None:
    (view.run_dir / "ledger.db").unlink()
    write_changes(view.run_dir, group_of(0, "other", ["a", "b"], [0.0, 1.0]))
    view.catch_up()
    assert problems(view) == ["other"]


def test_what_is_not_there_is_named(view: RunView) -> None:
    with pytest.raises(NotThere, match="no group 77"):
        view.group(77)
    with pytest.raises(NotThere, match="no completion 9"):
        view.tokens(0, 9)
    with pytest.raises(NotThere, match="'p9'"):
        view.problem("p9")


def test_overview_has_the_charts_and_the_configuration(view: RunView) -> None:
    told = view.overview()
    reward = next(chart for chart in told.charts if chart.title == "Reward")
    assert (told.steps, told.configuration, reward.steps) == (2, "name: small\n", [1, 2])
    assert [(line.name, line.values) for line in reward.lines] == [("reward, mean", [0.1, 0.2])]


@given(text=st.text(), extra=st.lists(st.integers(0, 255), max_size=12))
def test_texts_of_the_tokens_are_together_the_text(text: str, extra: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where the model wrote bytes that are no character, apart from how many signs stand for them."""
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    if not path.exists():
        TOKENIZER.save(str(path))
    reader, ids = TokenizerText(path), tokens(text).tolist()
    assert "".join(reader.each(ids)) == text
    damaged = [*ids, *extra, *ids]
    assert len(reader.each(damaged)) == len(damaged)
    assert "".join(reader.each(damaged)).replace("\ufffd", "").endswith(text[-1:].replace("\ufffd", ""))
