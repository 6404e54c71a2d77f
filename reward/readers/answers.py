"""Prompts as text or messages, and the answer to compare with in a number, an expression or a whole solution."""

from typing import Any

from reward.kinds.final_answer import boxed
from reward.readers.draft import Row, RowRefused, text_of, user

PROMPTS = ("prompt", "messages")  # complete prompts, used as they are
QUESTIONS = ("question", "problem")  # the reader adds how to answer them
ASK_ANSWER = "Reason step by step, and put the final answer in \\boxed{}."
LONGEST_ANSWER = 300  # characters; a longer text is a solution in which nothing marks the answer


def prompt_of(row: Row) -> list[dict[str, str]]:
    """The prompt of a row, as messages. Raises RowRefused."""
    for name in PROMPTS:
        if row.get(name):
            return messages_of(row[name], name)
    return user(text_of(row, *QUESTIONS), ASK_ANSWER)


def messages_of(value: Any, column: str) -> list[dict[str, str]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
        raise RowRefused(f"`{column}` is neither text nor a list of messages with text")
    if value[-1]["role"] == "assistant":
        raise RowRefused(f"`{column}` ends with an answer of the assistant")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def math_task(value: Any, column: str) -> dict[str, Any]:
    """The task of an answer: what the last \\boxed{} holds (MATH), what follows #### (GSM8K), or all of it. Raises RowRefused."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowRefused(f"`{column}` is not the text of an answer", repr(value)[:80])
    answer = (boxed(str(value)) or str(value).rpartition("####")[2]).strip()
    if len(answer) > LONGEST_ANSWER or "\n" in answer:
        raise RowRefused(f"nothing marks the answer in `{column}`: neither #### nor \\boxed{{}}", answer[:80])
    return {"kind": "math", "answer": answer}
