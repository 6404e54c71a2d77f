"""Problems are read strictly, rendered through the model's template, and ordered without repeating or skipping any."""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conf.compose.presets import with_quoted_addresses
from rollout.prompts.problems import ProblemError, parse_line, problem_of
from rollout.prompts.render import Renderer, load_tokenizer
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


def problems_in(file):
    return [problem_of(json.loads(line), f"{file}:{i}") for i, line in enumerate(Path(file).read_text().splitlines(), 1)]


def load_prompts(file, tokenizer, **settings):
    return [Renderer(tokenizer=tokenizer, **settings).render(problem) for problem in problems_in(file)]


def words(tokens) -> str:
    return " ".join(WORDS[t] for t in tokens)


def test_prompt_goes_through_the_models_template_and_the_prefill_begins_the_answer(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(prefill="return"))
    (found,) = load_prompts(file, tokenizer)
    assert words(found.tokens) == "<user> add two numbers <end> <assistant> return"
    assert (found.id, found.prefill, found.task) == ("p", "return", TASK)


def test_raw_prompt_goes_to_the_model_verbatim(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(raw=True, prefill=" return"))
    assert words(load_prompts(file, tokenizer)[0].tokens) == "add two numbers return"


def test_messages_are_a_conversation(tmp_path, tokenizer):
    row = problem(messages=[{"role": "user", "content": "add"}, {"role": "user", "content": "two"}])
    del row["prompt"]
    file = write(tmp_path / "a.jsonl", row)
    assert words(load_prompts(file, tokenizer)[0].tokens) == "<user> add <end> <user> two <end> <assistant>"


def test_model_without_a_template_says_what_to_do(tmp_path, tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    with pytest.raises(ProblemError, match=r"""a.jsonl:1: problem 'p' needs a chat template.*set "raw": true"""):
        load_prompts(write(tmp_path / "a.jsonl", problem()), bare)


def test_tokenizer_is_what_tokenizer_json_says_whatever_the_models_type(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert words(load_tokenizer(str(tmp_path)).encode("add two", add_special_tokens=False)) == "add two"


def test_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ProblemError, match="cannot load the tokenizer in"):
        load_tokenizer(str(tmp_path))


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
        load_prompts(file, refusing)


ROLES = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}{% if thinks %}return{% endif %}"


def test_system_prompt_of_the_settings_goes_before_problems_that_have_none(tmp_path, tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    tokenizer.chat_template = ROLES.replace("<{{ m['role'] }}>", "{{ m['role'] }}")
    file = write(tmp_path / "a.jsonl", with_messages(*CONVERSATION), problem(id="q"), problem(id="r", raw=True))
    found = load_prompts(file, tokenizer, system_prompt="numbers")
    assert [words(p.tokens) for p in found] == ["system add ? two", "system numbers ? add two numbers", "add two numbers"]


def test_settings_of_the_chat_template_reach_it(tmp_path, tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    tokenizer.chat_template = ROLES
    (found,) = load_prompts(write(tmp_path / "a.jsonl", problem()), tokenizer, template_kwargs={"thinks": True})
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
    (found,) = load_prompts(write(tmp_path / "a.jsonl", problem(prefill="return")), tokenizer)
    assert found.prefill == prefill


def test_text_of_a_prompt_is_what_the_problem_asks(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(), with_messages(*CONVERSATION) | {"id": "q"}, problem(id="r", raw=True))
    first, conversation, raw = (one.text for one in problems_in(file))
    assert first == raw == "add two numbers"
    assert conversation.startswith("system: ") and "\n\nuser: " in conversation
    assert load_prompts(file, tokenizer)[0].text == first


def test_list_of_kinds_is_one_task(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", problem(task=[TASK, TASK]))
    assert load_prompts(file, tokenizer)[0].task == {"parts": [TASK, TASK]}


@settings(deadline=None)
@given(n=st.integers(1, 20), seed=st.integers(0, 100), epochs=st.integers(1, 4))
def test_every_epoch_shows_every_prompt_once(n, seed, epochs):
    stream = PromptStream([[prompt(i) for i in range(n)]], seed)
    for epoch in range(epochs):
        assert Counter(stream.at(epoch * n + i).id for i in range(n)) == Counter(f"p{i}" for i in range(n))


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1))
def test_position_alone_says_which_prompt_it_is(positions):
    prompts = [[prompt(i) for i in range(7)]]
    going = PromptStream(prompts, seed=3)
    assert [going.at(p).id for p in positions] == [PromptStream(prompts, seed=3).at(p).id for p in positions]


def test_epochs_and_seeds_have_orders_of_their_own():
    prompts = [[prompt(i) for i in range(30)]]
    orders = {tuple(PromptStream(prompts, seed).at(epoch * 30 + i).id for i in range(30)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


MIXTURES = st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=4)  # (prompts, weight) of each part


def mixture(parts, seed=0):
    made = [[prompt(100 * part + i) for i in range(count)] for part, (count, _) in enumerate(parts)]
    return PromptStream(made, seed, [weight for _, weight in parts])


def part_of(found) -> int:
    return int(found.id[1:]) // 100


@settings(deadline=None)
@given(MIXTURES, st.integers(1, 300))
def test_each_part_of_a_mixture_has_its_share_of_any_beginning(parts, length):
    stream = mixture(parts)
    counts = Counter(part_of(stream.at(i)) for i in range(length))
    total = sum(weight for _, weight in parts)
    for part, (_, weight) in enumerate(parts):
        assert abs(counts[part] - length * weight / total) <= len(parts)


@settings(deadline=None)
@given(MIXTURES, st.lists(st.integers(0, 150), min_size=1, max_size=20), st.integers(0, 3))
def test_position_in_a_mixture_alone_says_which_prompt_it_is(parts, positions, seed):
    going = mixture(parts, seed)
    assert [going.at(p).id for p in positions] == [mixture(parts, seed).at(p).id for p in positions]


@settings(deadline=None)
@given(MIXTURES)
def test_each_part_of_a_mixture_shows_all_its_prompts_before_it_repeats_one(parts):
    stream = mixture(parts)
    shown = [[] for _ in parts]
    for i in range(200):
        found = stream.at(i)
        shown[part_of(found)].append(found.id)
    for (count, _), ids in zip(parts, shown, strict=True):
        for start in range(0, len(ids) - count + 1, count):
            assert len(set(ids[start : start + count])) == count


def test_weights_are_part_of_what_the_journal_is_bound_to():
    digests = {mixture([(3, 1.0), (3, weight)]).digest for weight in (1.0, 2.0)}
    assert len(digests) == 2


def test_no_prompts_at_all_is_an_error():
    with pytest.raises(ProblemError, match="no prompt to train on"):
        PromptStream([[]], 0)


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
