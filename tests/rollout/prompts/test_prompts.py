"""Problems are read strictly, rendered through the model's template, and ordered without repeating or skipping any."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.prompts.dataset import ProblemError, PromptStream, load_prompts, load_tokenizer, read_problems, render
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
    (found,) = read_problems([write(tmp_path / "a.jsonl", problem())])
    with pytest.raises(ProblemError, match='set "raw": true'):
        render(found, bare)


def test_tokenizer_is_what_tokenizer_json_says_whatever_the_models_type(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert words(load_tokenizer(str(tmp_path)).encode("add two", add_special_tokens=False)) == "add two"


def test_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ProblemError, match="no tokenizer in"):
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
        (problem(messages=[]), "a problem has either `prompt` or `messages`"),
        (problem(prompt=""), "`prompt` must be a string that is not empty"),
        (problem(task=None), "`task` must be an object with a `kind`"),
        (problem(task={"kind": "calls"}), "`task.tests` must be a list of at least one test"),
        (problem(task={"kind": "calls", "tests": []}), "`task.tests` must be a list of at least one test"),
        (problem(prefill=1), "`prefill` must be a string"),
        (problem(raw="yes"), "`raw` must be true or false"),
        (problem(metadata=[]), "`metadata` must be an object"),
    ],
)
def test_broken_problem_is_refused_with_file_and_line(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", problem(id="fine"), "", row)
    with pytest.raises(ProblemError, match=rf"a.jsonl:3: {message}"):
        read_problems([file])


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
