"""From a grading lease to its outcome: reads the task, grades the completion or takes the next turn of its episode, and tries
again where the machine and not the completion is at fault."""

import logging
import threading
import time
from dataclasses import dataclass

from reward.grade import Reward, grade, printable, step
from reward.grading.figures import Figures
from reward.grading.resources import Lent, Sandboxes, Slots
from reward.grading.services import Services
from reward.jail.limits import Cancelled, HostExhausted, SandboxError, SandboxUnavailable
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.kind import Answer, Episode, EpisodeLost
from reward.kinds.turns import MOST_RESTARTS, NoRoom, Turns
from reward.task import Defaults, TaskError, read_reward
from rollout.ledger.records import Answered, GradingWork, Observation, Verdict

log = logging.getLogger("reward")

EXHAUSTED_PAUSE_S = 2.0  # before a judge tries again to start a job on a host that had no room for one
SANDBOX_TRIES = 3  # a completion that loses this many sandboxes scores 0, because it may be what breaks them


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one lease: an answer, or why its task cannot be graded, or neither if it was cancelled."""

    work: GradingWork
    answered: Answered | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """What all leases of a judge are graded with. Any number of threads may use it at once."""

    defaults: Defaults
    sandboxes: Sandboxes
    functions: FunctionPool
    services: Services
    slots: Slots
    turns: Turns
    figures: Figures
    patience_s: float  # how long a host without room for a job is waited for

    def outcome(self, work: GradingWork, unwanted: threading.Event) -> Outcome:
        """`unwanted` is set when nobody wants the result any more. Raises SandboxUnavailable and HostExhausted."""
        try:
            return self._graded(read_reward(work.task, defaults=self.defaults), work, unwanted)
        except TaskError as error:
            return Outcome(work=work, refused=printable(f"{work.prompt_id}: {error}"))
        except (SandboxUnavailable, HostExhausted):
            raise
        except Exception as error:  # a fault of the reader costs one group, never the judge
            log.exception("%s: the task cannot be read", printable(work.prompt_id))
            return Outcome(work=work, refused=printable(f"{work.prompt_id}: {type(error).__name__}: {error}"))

    def _graded(self, reward: Reward, work: GradingWork, unwanted: threading.Event) -> Outcome:
        began_s = time.monotonic()
        try:
            found = self._with_retries(work, reward, unwanted)
            if isinstance(found, Verdict):
                self.figures.add(found)
                return Outcome(work=work, answered=Answered(work.position, verdict=found))
            self.figures.add_observation()
            return Outcome(work=work, answered=Answered(work.position, observation=found))
        except EpisodeLost as error:
            if work.position.attempt < MOST_RESTARTS:
                log.warning("%s, completion %s begins again: %s", printable(work.prompt_id), work.position, printable(str(error)))
                self.figures.add_restart()
                return Outcome(work=work, answered=Answered(work.position))
            verdict = reward.ungraded(f"its environment was lost {MOST_RESTARTS + 1} times", wall_s=time.monotonic() - began_s)
            return Outcome(work=work, answered=Answered(work.position, verdict=verdict))
        except Cancelled:
            self.figures.add_cancelled()
            return Outcome(work=work)
        except (TaskError, SandboxUnavailable, HostExhausted):
            raise
        except Exception as error:  # a fault of the grader costs one verdict, never the judge
            log.exception("%s, completion %s: the grader failed", printable(work.prompt_id), work.position)
            self.figures.add_failed()
            reason = f"the grader failed: {type(error).__name__}: {error}"
            verdict = reward.ungraded(reason, wall_s=time.monotonic() - began_s)
            return Outcome(work=work, answered=Answered(work.position, verdict=verdict))

    def _with_retries(self, work: GradingWork, reward: Reward, unwanted: threading.Event) -> Verdict | Observation:
        """Raises EpisodeLost, Cancelled, TaskError, SandboxUnavailable and HostExhausted."""
        began_s, lost_sandboxes = time.monotonic(), 0
        while lost_sandboxes < SANDBOX_TRIES:
            try:
                return self._answer_to(work, reward, unwanted)
            except SandboxUnavailable:
                raise
            except HostExhausted as error:
                if time.monotonic() - began_s > self.patience_s:
                    raise
                log.warning("%s, completion %s waits: %s", printable(work.prompt_id), work.position, error)
                if unwanted.wait(EXHAUSTED_PAUSE_S):
                    raise Cancelled from error
            except SandboxError as error:
                lost_sandboxes += 1
                log.warning("%s, completion %s: try %d: %s", printable(work.prompt_id), work.position, lost_sandboxes, error)
                self.figures.add_lost_sandbox()
        return reward.ungraded(f"{SANDBOX_TRIES} sandboxes were lost while it ran", wall_s=time.monotonic() - began_s)

    def _answer_to(self, work: GradingWork, reward: Reward, unwanted: threading.Event) -> Verdict | Observation:
        lent = Lent(
            sandboxes=self.sandboxes, functions=self.functions, services=self.services, slots=self.slots, turns=self.turns,
            cancelled=unwanted.is_set,
        )  # fmt: skip
        began_s, episode = time.monotonic(), self.turns.episode(work)
        answer = answer_of(work, episode)
        if episode.last:
            return grade(reward, answer, lent)
        found = step(reward, answer, lent)
        if isinstance(found, Verdict):
            return found
        try:
            return self.turns.observation(work, found, time.monotonic() - began_s)
        except NoRoom as error:
            return reward.cut_short(str(error), wall_s=time.monotonic() - began_s)


def answer_of(work: GradingWork, episode: Episode) -> Answer:
    return Answer(
        completion=work.turns[-1],
        prefill=episode.prefill if episode.turns else work.prefill,
        prompt=work.prompt,
        metadata=work.metadata,
        finish=work.finish,
        tokens=work.tokens,
        episode=episode,
    )
