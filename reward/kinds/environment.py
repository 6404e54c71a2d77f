"""The kind `environment`: a class of the user's own, which answers the turns of an episode and gives its reward at the end.

    {"kind": "environment", "environment": "my_games:Guess", "deadline_s": 10, ...}

Further fields are the environment's own. The class has `async start(task)` and `async step(action)`; docs/episodes.md describes
them. It runs in a process of the judge's pool. A call that fails ends the episode with the reward 0 and the reason, and the part
`environment_failed` counts it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from reward.kinds.fields import read_positive
from reward.kinds.kind import Answer, Defaults, EpisodeLost, Reply, Resources, Task
from reward.kinds.python import DEADLINE_S, read_function
from reward.kinds.thoughts import Tags, answer_after
from rollout.ledger.records import Verdict

FIELDS = ("kind", "environment", "deadline_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTask(Task):
    grades_truncated: ClassVar[bool] = True
    is_environment: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, float]] = {"environment_failed": 0.0}

    environment: str  # module:Class
    deadline_s: float  # for one call
    data: Mapping[str, Any]  # the environment's own fields of the task
    reasoning: tuple[Tags, ...]

    def grade(self, answer: Answer, resources: Resources) -> Verdict | Reply:
        given = {
            "key": answer.episode.key,
            "task": {**self.data, "prompt": answer.prompt, "metadata": answer.metadata},
            "actions": self._actions(answer),
        }
        with resources.waiting():
            found = resources.functions.call(
                self.environment,
                {"episode": given},
                deadline_s=self.deadline_s,
                cancelled=resources.cancelled,
                home=answer.episode.key,
            )
        if found.lost or not self._replayed(found.replayed, answer, resources):
            raise EpisodeLost(f"{self.environment}: {answer.prompt:.80}")
        if found.messages is not None:
            return Reply(messages=found.messages, parts=found.parts)
        return Verdict(
            reward=found.reward,
            parts={"environment_failed": float(bool(found.error)), **found.parts},
            reason=f"{self.environment}: {found.error}" if found.error else "",
            cpu_s=found.cpu_s,
        )

    def _actions(self, answer: Answer) -> list[Mapping[str, Any]]:
        """All turns of the episode: an environment that does not know them yet is given them one after another."""
        episode = answer.episode
        texts = [*episode.turns, answer.completion]
        last = len(texts) - 1
        return [
            {
                "text": (text := (answer.prefill if turn == last else episode.prefill if turn else "") + said),
                "answer": answer_after(text, self.reasoning) or "",
                "turn": turn + 1,
                "last": turn == last and episode.last,
                "finish": answer.finish.value if turn == last else "stop",
            }
            for turn, said in enumerate(texts)
        ]

    def _replayed(self, replayed: Sequence[Sequence[Mapping[str, Any]]], answer: Answer, resources: Resources) -> bool:
        """Whether an environment that was built again has answered the earlier turns as it did the first time."""
        episode = answer.episode
        first = len(episode.observations) - len(replayed)
        return all(
            np.array_equal(resources.observe(messages, episode.ends[turn]), episode.observations[turn])
            for turn, messages in enumerate(replayed, first)
        )


def read_environment_task(data: Mapping[str, Any], defaults: Defaults) -> EnvironmentTask:
    return EnvironmentTask(
        environment=read_function(data.get("environment"), "environment", defaults),
        deadline_s=read_positive(data.get("deadline_s", DEADLINE_S), "deadline_s"),
        data={name: value for name, value in data.items() if name not in FIELDS},
        reasoning=defaults.reasoning,
    )
