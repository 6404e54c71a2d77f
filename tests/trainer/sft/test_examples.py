"""What is learned of a chat: the answers and their end tokens, nothing else, whatever the template puts around them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.sft.examples import ExampleError, read

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<answer>{{ m['content'] }}<|im_end|>"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
REWRITES = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'] | replace('think', '') }}")


def tokenizer(template: str) -> Any:
    bare = Tokenizer(models.WordLevel({chr(c): c for c in range(128)}, unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="?", chat_template=template)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<answer>"]})
    return made


def learned(tmp_path: Path, template: str, *rows: Any, longest: int = 1000) -> list[str]:
    """The learned texts of each example, joined by |."""
    file, reader = tmp_path / "chats.jsonl", tokenizer(template)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for example in read([str(file)], reader, [reader.convert_tokens_to_ids("<|im_end|>")], longest=longest):
        shown = [
            reader.decode([token]) if is_learned else "|"
            for token, is_learned in zip(example.tokens, example.sampled, strict=True)
        ]
        found.append("|".join(part for part in "".join(shown).split("|") if part))
    return found


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


@pytest.mark.parametrize("template", [CHATML, BARE])
def test_only_answers_and_their_end_tokens_are_learned(tmp_path: Path, template: str) -> None:
    rows = [chat("hi", "yes"), chat("a", "one", "b", "two"), {"prompt": "hi", "completion": "yes"}]
    end = "<|im_end|>".replace("|", "")
    assert [text.replace("|", "") for text in learned(tmp_path, template, *rows)] == [
        f"yes{end}".replace("|", ""), f"one{end}two{end}", f"yes{end}",
    ]  # fmt: skip


def test_template_that_rewrites_earlier_turns_is_refused_only_where_it_does(tmp_path: Path) -> None:
    assert len(learned(tmp_path, REWRITES, chat("hi", "think yes"))) == 1
    with pytest.raises(ExampleError, match=r"chats.jsonl:1: the chat template renders message 2 in another way"):
        learned(tmp_path, REWRITES, chat("a", "think one", "b", "two"))


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHATML, chat("hi"), "the assistant says nothing"),
        (CHATML, {"text": "hi"}, "expected"),
        (CHATML, {"messages": ["hi"]}, "a chat is a list of messages"),
        (CHATML.replace("<|im_end|>", ""), chat("hi", "yes"), "ends no answer with an end token"),
        (CHATML, chat("hi", "y" * 2000), "do not fit into a microbatch"),
        ("", chat("hi", "yes"), "no chat template"),
    ],
)
def test_line_that_cannot_be_learned_from_is_named(tmp_path: Path, template: str, row: Any, message: str) -> None:
    with pytest.raises(ExampleError, match=message):
        learned(tmp_path, template, row)
