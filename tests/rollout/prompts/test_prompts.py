"""Problems are read strictly, rendered through the model's template, and ordered without repeating or skipping any."""

import importlib.util
import json
import sys
import types
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conf.compose.presets import with_quoted_addresses
from rollout.prompts.problems import ProblemError, parse_line, problem_of
from rollout.prompts.render import Renderer, load_tokenizer
from rollout.prompts.sources import read_problems
from rollout.prompts.stream import PromptStream
from tests.rollout.builders import prompt

TASK = {"kind": "calls", "tests": [{"args": [1], "expected": 1}]}
WORDS = ["?", "<user>", "<end>", "<assistant>", "add", "two", "numbers", "return", "system"]
TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    found.chat_template = TEMPLATE
    return found


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def problem(**changed: object) -> dict:
    return {"id": "p", "prompt": "add two numbers", "task": TASK} | changed


def load_prompts(sources, tokenizer, max_prompt_tokens, **settings):
    renderer = Renderer(tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens, **settings)
    return renderer.prompts(read_problems(sources))


def words(tokens) -> str:
    return " ".join(WORDS[t] for t in tokens)


def test_prompt_goes_through_the_models_template_and_the_prefill_begins_the_answer(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(prefill="return"))
    (found,) = load_prompts([file], tokenizer, 100).usable
    assert words(found.tokens) == "<user> add two numbers <end> <assistant> return"
    assert (found.id, found.prefill, found.task) == ("p", "return", TASK)


def test_raw_prompt_goes_to_the_model_verbatim(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(raw=True, prefill=" return"))
    assert words(load_prompts([file], tokenizer, 100).usable[0].tokens) == "add two numbers return"


def test_messages_are_a_conversation(tmp_path, tokenizer):
    row = problem(messages=[{"role": "user", "content": "add"}, {"role": "user", "content": "two"}])
    del row["prompt"]
    file = write(tmp_path / "a.jsonl", row)
    assert words(load_prompts([file], tokenizer, 100).usable[0].tokens) == "<user> add <end> <user> two <end> <assistant>"


def test_model_without_a_template_says_what_to_do(tmp_path, tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    with pytest.raises(ProblemError, match=r"""a.jsonl:1: problem 'p' needs a chat template.*set "raw": true"""):
        load_prompts([write(tmp_path / "a.jsonl", problem())], bare, 100)


def test_tokenizer_is_what_tokenizer_json_says_whatever_the_models_type(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert words(load_tokenizer(str(tmp_path)).encode("add two", add_special_tokens=False)) == "add two"


def test_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ProblemError, match="cannot load the tokenizer in"):
        load_tokenizer(str(tmp_path))


def test_prompt_that_is_too_long_is_refused_and_counted(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(id="long", prompt="add " * 50), problem())
    found = load_prompts([file], tokenizer, 20)
    assert [p.id for p in found.usable] == ["p"]
    assert found.too_long == (("long", 53),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"id": "p", "prompt"', "broken JSON at column"),
        ([1, 2], "a problem is a JSON object, got list"),
        (problem(id=5), "`id` must be a string"),
        (problem(messages=[]), "problem 'p': a problem has either `prompt` or `messages`"),
        (problem(prompt=""), "problem 'p': `prompt` must be a string that is not empty"),
        (problem(task=None), "problem 'p': `task` must be an object with a `kind`"),
        (problem(task=[]), "problem 'p': `task` must be an object with a `kind`, or a list of such objects"),
        (problem(task=[{"kind": "calls"}, {}]), "problem 'p': `task` must be an object with a `kind`, or a list of such objects"),
        (problem(prefill=1), "problem 'p': `prefill` must be a string"),
        (problem(raw="yes"), "problem 'p': `raw` must be true or false"),
        (problem(metadata=[]), "problem 'p': `metadata` must be an object"),
    ],
)
def test_broken_problem_is_refused_with_file_and_line(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", problem(id="fine"), "", row)
    with pytest.raises(ProblemError, match=rf"a.jsonl:3: {message}"):
        read_problems([file])


def line(**changed: str) -> str:
    """A problem as JSON, some of its fields given as JSON."""
    fields = {name: json.dumps(value) for name, value in problem().items()} | changed
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def task_of(test: str) -> str:
    return '{"kind": "calls", "tests": [' + test + "]}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (line(prompt=r'"half \ud83d"'), r"`prompt` holds '\\ud83d'"),
        (line(task=task_of(r'{"input": "\ud83d"}')), r"`task.tests\[0\].input` holds '\\ud83d'"),
        (line(task=task_of(r'{"\ud83d": 1}')), r"`task.tests\[0\]` holds '\\ud83d'"),
        (line(task=task_of("1" * 4301)), "an integer has more than 4300 digits"),
        (line(task=task_of('{"a": ' * 150 + "1" + "}" * 150)), r"`task.tests\[0\].a.a.* is nested too deep"),
        (line(metadata="[" * 100_000), "lists and objects are nested too deep"),
    ],
    ids=["prompt", "input", "key", "integer", "deep", "deeper"],
)
def test_problem_that_no_run_can_carry_is_refused_with_file_line_and_problem(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", problem(id="fine"), row)
    with pytest.raises(ProblemError, match=f"a.jsonl:2: problem .p.: {message}"):
        read_problems([file])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(JSON_VALUES)
def test_whatever_a_row_holds_it_is_a_problem_or_a_problem_error(value):
    for row in (value, problem(task=value), problem(messages=value), problem(metadata=value), {"id": "p", "prompt": value}):
        with suppress(ProblemError):
            assert problem_of(row, "x:1").where == "x:1"


@settings(deadline=None)
@given(st.text(max_size=200))
def test_whatever_a_line_holds_it_is_read_or_refused_with_its_place(line):
    with suppress(ProblemError):
        parse_line(line, "x:1")


REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m['content'] }} {% endfor %}"
)
CONVERSATION = [{"role": "system", "content": "add"}, {"role": "user", "content": "two"}]


def with_messages(*messages) -> dict:
    return {"id": "p", "messages": list(messages), "task": TASK}


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, "{{ messages[7]['content'] + 1 }}", "{{ 1 // 0 }}", "{% if %}"])
def test_template_that_refuses_a_conversation_names_file_line_and_problem(tmp_path, tokenizer, template):
    refusing = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    refusing.chat_template = template
    file = write(tmp_path / "a.jsonl", problem(id="fine", raw=True), with_messages(*CONVERSATION))
    with pytest.raises(
        ProblemError, match=r"a.jsonl:2: problem 'p': the model's chat template refuses it \(roles: system, user\)"
    ):
        load_prompts([file], refusing, 100)


ROLES = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}{% if thinks %}return{% endif %}"


def test_system_prompt_of_the_settings_goes_before_problems_that_have_none(tmp_path, tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    tokenizer.chat_template = ROLES.replace("<{{ m['role'] }}>", "{{ m['role'] }}")
    file = write(tmp_path / "a.jsonl", with_messages(*CONVERSATION), problem(id="q"), problem(id="r", raw=True))
    found = load_prompts([file], tokenizer, 100, system_prompt="numbers").usable
    assert [words(p.tokens) for p in found] == ["system add ? two", "system numbers ? add two numbers", "add two numbers"]


def test_settings_of_the_chat_template_reach_it(tmp_path, tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    tokenizer.chat_template = ROLES
    (found,) = load_prompts([write(tmp_path / "a.jsonl", problem())], tokenizer, 100, template_kwargs={"thinks": True}).usable
    assert words(found.tokens).endswith("numbers return")


@pytest.mark.parametrize(
    ("end", "prefill"),
    [
        ("<think>\n", "<think>\nreturn"),
        ("<think>\n\n</think>\n\n", "return"),
        ("<|assistant|>\n", "return"),
        ("[THINK]", "[THINK]return"),
    ],
)
def test_reasoning_that_the_template_opens_begins_the_answer_for_the_judge(tmp_path, tokenizer, end, prefill):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    tokenizer.chat_template = TEMPLATE + "{{ " + json.dumps(end) + " }}"
    (found,) = load_prompts([write(tmp_path / "a.jsonl", problem(prefill="return"))], tokenizer, 100).usable
    assert found.prefill == prefill


def test_text_of_a_prompt_is_what_the_problem_asks(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(), with_messages(*CONVERSATION) | {"id": "q"}, problem(id="r", raw=True))
    first, conversation, raw = (one.text for one in read_problems([file]))
    assert first == raw == "add two numbers"
    assert conversation.startswith("system: ") and "\n\nuser: " in conversation
    assert load_prompts([file], tokenizer, 100).usable[0].text == first


def test_list_of_kinds_is_one_task(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(task=[TASK, TASK]))
    assert load_prompts([file], tokenizer, 100).usable[0].task == {"parts": [TASK, TASK]}


def test_users_own_reader_gives_the_rows(tokenizer):
    def rows(source):
        yield problem(id=f"{source}-1", task={"kind": "calls", "tests": ({"args": (np.int64(3),), "expected": np.float32(0.5)},)})

    (found,) = read_problems(["any thing"], rows)
    assert (found.where, found.id) == ("any thing row 1", "any thing-1")
    assert found.task == {"kind": "calls", "tests": [{"args": [3], "expected": 0.5}]}


def test_error_of_the_users_reader_is_told_with_its_place_and_not_raised(tokenizer):
    def rows(source):
        yield problem()
        raise KeyError("question")

    with pytest.raises(ProblemError, match=r"data.reader failed at x after 1 rows: .*test_prompts.py:\d+: KeyError: 'question'"):
        read_problems(["x"], rows)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", {3: 4}, 10**5000, [[float]]], ids="abcdef")
def test_row_of_a_reader_with_what_json_does_not_have_is_refused_by_its_name(value):
    with pytest.raises(ProblemError, match=r"x row 1: problem 'p': `metadata.a"):
        read_problems(["x"], lambda _: [problem(metadata={"a": value})])


def test_data_set_of_the_hub_is_read_as_its_address_says(monkeypatch):
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        return [problem(id=path, task=json.dumps(TASK), prefill=None)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = read_problems(["hf://name?split=train", "hf://org/Name?name=main&split=test[:9%]", "hf://plain"])
    assert asked == [
        ("name", {"split": "train"}),
        ("org/Name", {"name": "main", "split": "test[:9%]"}),
        ("plain", {"split": "train"}),
    ]
    assert [p.task for p in found] == [TASK, TASK, TASK]


def test_id_that_is_used_twice_is_refused_with_both_places(tmp_path):
    first, second = write(tmp_path / "a.jsonl", problem()), write(tmp_path / "b.jsonl", problem())
    with pytest.raises(ProblemError, match=r"b.jsonl:1: id 'p' was used before, at .*a.jsonl:1"):
        read_problems([first, second])


def test_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ProblemError, match="No such file"):
        read_problems([str(tmp_path / "none.jsonl")])


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="`datasets` is installed")
def test_dataset_without_the_package_says_what_to_install():
    with pytest.raises(ProblemError, match="pip install datasets"):
        read_problems(["hf://some/name?split=train"])


@settings(deadline=None)
@given(n=st.integers(1, 20), seed=st.integers(0, 100), epochs=st.integers(1, 4))
def test_every_epoch_shows_every_prompt_once(n, seed, epochs):
    stream = PromptStream([prompt(i) for i in range(n)], seed)
    for epoch in range(epochs):
        assert Counter(stream.at(epoch * n + i).id for i in range(n)) == Counter(f"p{i}" for i in range(n))


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1))
def test_position_alone_says_which_prompt_it_is(positions):
    prompts = [prompt(i) for i in range(7)]
    going = PromptStream(prompts, seed=3)
    assert [going.at(p).id for p in positions] == [PromptStream(prompts, seed=3).at(p).id for p in positions]


def test_epochs_and_seeds_have_orders_of_their_own():
    prompts = [prompt(i) for i in range(30)]
    orders = {tuple(PromptStream(prompts, seed).at(epoch * 30 + i).id for i in range(30)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_no_prompts_at_all_is_an_error():
    with pytest.raises(ProblemError, match="no prompt to train on"):
        PromptStream([], 0)


@pytest.mark.parametrize(
    ("given", "sources"),
    [
        ("[hf://name?split=train]", ["hf://name?split=train"]),
        ("[hf://org/Name?name=main&split=test[:9%],b.jsonl]", ["hf://org/Name?name=main&split=test[:9%]", "b.jsonl"]),
        ("['hf://name?split=train',\"hf://b?split=c\"]", ["hf://name?split=train", "hf://b?split=c"]),
        ("[a.jsonl]", ["a.jsonl"]),
    ],
)
def test_address_of_a_data_set_is_taken_from_the_command_line_as_it_is_written(given, sources):
    (word,) = with_quoted_addresses([f"data.train={given}"])
    assert OverridesParser.create().parse_override(word).value() == sources
