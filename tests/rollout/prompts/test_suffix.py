"""What follows a turn: rendered by the template of each family, and never made from the tokens before it."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.ledger.records import NOT_SAMPLED
from rollout.prompts.problems import ProblemError
from rollout.prompts.suffix import SuffixError, SuffixRenderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONING = (  # like Qwen3: reasoning of answers before the last question is dropped, and tools answer inside a user's message
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ '<|im_start|>assistant\n' }}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
HEADERS = (  # like Llama 3
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
BRACKETS = (  # like Llama 2 and Mistral: roles must alternate, and there is no generation prompt
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TURNS = (  # like Gemma
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "  # no token ends a turn
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>"),
    "reasoning": (REASONING, "<|im_end|>"),
    "headers": (HEADERS, "<|eot_id|>"),
    "brackets": (BRACKETS, "</s>"),
    "turns": (TURNS, "<end_of_turn>"),
    "plain": (PLAIN, "</s>"),
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|endoftext|>",
]  # fmt: skip
TEXT = [
    "def add(a, b):\n    return a + b\n",
    "Write a function. user assistant tool model [INST] <think>\n",
    "é 漢字 🙂 \t  \n\n x",
]
WORDS = st.text(max_size=30) | st.sampled_from(["", " a", "\n", "a\n\n", "🙂🙂", "é", "<think>\nno\n</think>\n\nyes", "a </s"])
CONTENTS = WORDS.map(lambda text: "".join(c for c in text if not 0xD800 <= ord(c) < 0xE000))


@cache
def tokenizer(family: str, kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE, or one that writes a space at the beginning of a text."""
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    if kind == "bytes":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        found = Tokenizer(models.BPE(unk_token="<|endoftext|>", byte_fallback=True))
        found.normalizer = normalizers.Replace(" ", "▁")
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        alphabet = []
        special += [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(TEXT * 20, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>")
    made.chat_template = FAMILIES[family][0]
    return made


def encode(family: str, kind: str, text: str) -> list[int]:
    return tokenizer(family, kind).encode(text, add_special_tokens=False)


def render(family: str, kind: str, messages) -> str:
    return tokenizer(family, kind).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(content=CONTENTS)
def test_what_follows_a_turn_is_what_the_template_writes_there(family, kind, content):
    messages, ending = [{"role": "user", "content": content}], FAMILIES[family][1]
    end = tokenizer(family, kind).convert_tokens_to_ids(ending)
    conversation = [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "ok"}]
    whole = render(family, kind, [*conversation, *messages])
    _, _, rest = whole.partition("ok")
    found = SuffixRenderer(tokenizer(family, kind), {}).tokens(messages, end)
    if family == "plain":  # the token that ended the turn is no part of the template
        assert [end, *found] == encode(family, kind, ending + rest)
    else:
        whole_tokens = encode(family, kind, whole)
        assert whole_tokens[-len(found) - 1 :] == [end, *found]


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(["chatml", "headers", "turns"]), turns=st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=6)
)
def test_turns_that_are_joined_token_by_token_are_the_whole_conversation(family, turns):
    """True for templates that keep what they are given, and turns that are tokenised as the tokenizer would do it."""
    suffixes, ending = SuffixRenderer(tokenizer(family, "bytes"), {}), FAMILIES[family][1]
    conversation = [{"role": "user", "content": "hm"}]
    tokens = encode(family, "bytes", render(family, "bytes", conversation))
    for said, answered in turns:
        said = said.strip()
        turn = encode(family, "bytes", said + ending)
        before, tokens = tokens, [*tokens, *turn]
        messages = [{"role": "user", "content": answered}]
        tokens += suffixes.tokens(messages, turn[-1]).tolist()
        conversation += [{"role": "assistant", "content": said}, *messages]
        assert tokens[: len(before) + len(turn)] == [*before, *turn]
        written = tokenizer(family, "bytes").decode(tokens)
        assert written == tokenizer(family, "bytes").decode(encode(family, "bytes", render(family, "bytes", conversation)))


@settings(max_examples=60, deadline=None)
@given(turn=CONTENTS, content=CONTENTS)
def test_earlier_reasoning_is_never_dropped_because_no_earlier_turn_is_rendered(turn, content):
    """The template would write an earlier answer without its reasoning. The suffix does not depend on the answer at all."""
    suffixes = SuffixRenderer(tokenizer("reasoning", "bytes"), {})
    end = tokenizer("reasoning", "bytes").convert_tokens_to_ids("<|im_end|>")
    sampled = encode("reasoning", "bytes", f"<think>\n{turn}</think>\n\nx<|im_end|>")
    found = suffixes.tokens([{"role": "user", "content": content}], end)
    assert tokenizer("reasoning", "bytes").decode(np.array([*sampled, *found])).startswith("<think>\n")
    assert suffixes.prefill == "<think>\n"


def test_answers_of_tools_are_grouped_as_the_template_groups_them():
    suffixes = SuffixRenderer(tokenizer("reasoning", "bytes"), {})
    found = suffixes.tokens([{"role": "tool", "content": text} for text in ("one", "two")], NOT_SAMPLED)
    one, two = (f"\n<tool_response>\n{text}\n</tool_response>" for text in ("one", "two"))
    expected = f"<|im_end|>\n<|im_start|>user{one}{two}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer("reasoning", "bytes").decode(found) == expected


def test_turn_that_another_token_ended_gets_the_whole_ending_of_the_template():
    end = tokenizer("chatml", "bytes").convert_tokens_to_ids("<|endoftext|>")
    found = SuffixRenderer(tokenizer("chatml", "bytes"), {}).tokens([{"role": "user", "content": "x"}], end)
    assert tokenizer("chatml", "bytes").decode(found) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{{ messages[0].content }}{% endfor %}", "depends on the turn itself"),
        ("{{ messages[-1].content }}", "does not show the answer"),
        ("{{ raise_exception('one question only') if messages | length > 1 }}x", "one question only"),
    ],
)
def test_template_that_allows_no_second_turn_is_refused_at_the_start(template, message):
    one = tokenizer("plain", "bytes")
    one.chat_template = template
    try:
        with pytest.raises(ProblemError, match=message):
            SuffixRenderer(one, {})
    finally:
        one.chat_template = PLAIN


def test_message_that_the_template_refuses_is_named_by_its_role():
    with pytest.raises(SuffixError, match="roles: tool"):
        SuffixRenderer(tokenizer("brackets", "bytes"), {}).tokens([{"role": "tool", "content": "x"}], NOT_SAMPLED)


def test_tools_that_the_template_is_told_of_change_nothing_behind_a_turn():
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer("chatml", "bytes").backend_tokenizer)
    made.chat_template = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
    answer = [{"role": "tool", "name": "python", "content": "57"}]
    end = made.convert_tokens_to_ids("<|im_end|>")
    plain, told = (SuffixRenderer(made, options).tokens(answer, end) for options in ({}, {"tools": [{"name": "python"}]}))
    assert plain.tolist() == told.tolist() == made.encode("\n<|im_start|>tool\n57<|im_end|>\n<|im_start|>assistant\n")
