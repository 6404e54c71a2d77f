"""Chats become examples: tokens, and which of them are learned. Only what the assistant says is learned, with its end token.

A line of a JSONL file is `{"messages": [{"role": …, "content": …}, …]}` or `{"prompt": …, "completion": …}`, where both are texts
or lists of messages. Chat templates rarely mark what the assistant says, so it is found by a difference: the chat up to the
answer, with the header of an answer, must be the beginning of the chat with the answer. A template for which that does not hold,
because it rewrites earlier turns, is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import ConfigError
from rollout.ledger.records import Finish, Trajectory

Message = Mapping[str, Any]


class ExampleError(ConfigError):
    """A line that is no chat, or a chat template that cannot be learned from. The message names file and line."""


def read(paths: Sequence[str], tokenizer: Any, end_tokens: Sequence[int], *, longest: int) -> list[Trajectory]:
    """All examples of the files, in their order. Raises ExampleError.

    end_tokens: what ends an answer. longest: the number of tokens that an example may have.
    """
    ends = [tokenizer.decode([token]) for token in end_tokens]
    found = []
    for path in paths:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise ExampleError(f"data: {path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(_example(line, tokenizer, ends, longest, f"{path}:{number}"))
    return found


def _example(line: str, tokenizer: Any, ends: Sequence[str], longest: int, where: str) -> Trajectory:
    tokens: list[int] = []
    learned: list[bool] = []
    for text, is_answer in pieces(_messages(line, where), tokenizer, ends, where):
        of_piece = tokenizer.encode(text, add_special_tokens=False)
        tokens += of_piece
        learned += [is_answer] * len(of_piece)
    if len(tokens) > longest:
        raise ExampleError(f"{where}: {len(tokens)} tokens do not fit into a microbatch: raise trainer.tokens_per_microbatch")
    return example(tokens, learned)


def example(tokens: Sequence[int], learned: Sequence[bool]) -> Trajectory:
    """An example in the form that packing takes: the learned tokens stand where the sampled ones do."""
    mask = np.array(learned, dtype=np.bool_)
    return Trajectory(
        tokens=np.array(tokens, dtype=np.int32),
        sampled=mask,
        logprobs=np.zeros(len(mask), dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=0.0,
        finish=Finish.STOP,
        segments=1,
    )


def pieces(messages: Sequence[Message], tokenizer: Any, ends: Sequence[str], where: str) -> Iterator[tuple[str, bool]]:
    """The text of a chat, cut where learning begins and ends: each piece, and whether it is learned. Raises ExampleError."""
    whole, position = _rendered(messages, tokenizer, where), 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(messages[:number], tokenizer, where, add_generation_prompt=True)
        after = _rendered(messages[: number + 1], tokenizer, where)
        if not (whole.startswith(after) and after.startswith(before)):
            raise ExampleError(
                f"{where}: the chat template renders message {number + 1} in another way once more messages follow, so what the "
                "assistant said cannot be told apart: cut the chat after its first answer, or change the template"
            )
        stop = max((after.rfind(end) + len(end) for end in ends if end in after[len(before) :]), default=0)
        if not stop:
            listed = ", ".join(map(repr, ends))
            raise ExampleError(f"{where}: the chat template ends no answer with an end token of the model ({listed})")
        yield whole[position : len(before)], False
        yield whole[len(before) : stop], True
        position = stop


def _rendered(messages: Sequence[Message], tokenizer: Any, where: str, **options: Any) -> str:
    if not tokenizer.chat_template:
        raise ExampleError(f"{where}: the tokenizer has no chat template: add one to the model's folder")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ExampleError(f"{where}: the chat template cannot render this chat: {error}") from error


def _messages(line: str, where: str) -> list[Message]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ExampleError(f"{where}: no JSON: {error}") from error
    if isinstance(row, dict) and "messages" in row:
        messages = row["messages"]
    elif isinstance(row, dict) and {"prompt", "completion"} <= row.keys():
        messages = [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]
    else:
        raise ExampleError(f'{where}: expected {{"messages": […]}} or {{"prompt": …, "completion": …}}')
    if not (isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)):
        raise ExampleError(f"{where}: a chat is a list of messages, each with a role and a content")
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise ExampleError(f"{where}: the assistant says nothing after a first message, so there is nothing to learn")
    return messages


def _as_messages(said: Any, role: str) -> list[Any]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said if isinstance(said, list) else [said]
