"""The judge process of one CPU host.

    python -m reward --run outputs/x --queue tcp://host:port [--slots N] [--name judge-0]

Grades `reward.slots` completions at once (0: one per core) until the run is over or SIGTERM arrives: then it ends with 0. It ends
with 1 when it cannot go on, and with CANNOT_START when a restart would not help. The reason is on standard error. Sandboxes start
when a task first needs them.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
from pathlib import Path

from conf.compose.load import read_run
from conf.compose.model_description import description_of
from conf.compose.run_folder import PROMPTS
from conf.schema import ConfigError
from reward.jail.limits import SandboxError, SandboxUnavailable
from reward.judge import Judge, JudgeError
from reward.kinds.endpoint import OwnServer
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.turns import Turns
from reward.readers.run_problems import grades_code
from reward.sandbox.host import Settings
from reward.sandbox.sandbox import Sandbox
from reward.task import defaults_of
from rollout.exit_codes import CANNOT_START
from rollout.prompts.decoder import decoder
from rollout.prompts.problems import ProblemError
from rollout.prompts.suffix import SuffixRenderer
from rollout.queue.client import QueueClient, QueueError
from rollout.queue.keys import KeysError, RunKeys
from rollout.servers import JUDGE_MODEL, address_file

log = logging.getLogger("reward")


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config, keys = read_run(arguments.run), RunKeys.load(arguments.run)
        if grades_code(config):
            with Sandbox(Settings(packages=tuple(config.reward.packages))):  # refuses here, before any lease is taken
                pass
        model = str(description_of(config, arguments.run))
        decode_tokens = decoder(model, arguments.run / PROMPTS)
        turns = Turns(
            most=config.rollout.max_turns,
            most_tokens=config.rollout.max_completion_tokens,
            renderer=SuffixRenderer.of(model, config.data) if config.rollout.max_turns > 1 else None,
        )
        slots = arguments.slots or config.reward.slots or len(os.sched_getaffinity(0))
        holder = f"{arguments.name}-{secrets.token_hex(4)}"  # new at each start, so that the leases of a dead judge lapse
        judge = Judge(
            holder=holder,
            defaults=defaults_of(config),
            packages=config.reward.packages,
            functions=FunctionPool(arguments.run, slots, config.reward.function_memory_mb),
            judge_model=OwnServer(address=address_file(arguments.run, JUDGE_MODEL).read_text, api_key=keys.engine_api_key),
            turns=turns,
            slots=slots,
            connect=lambda thread: QueueClient(
                arguments.queue, keys, f"{holder}/{thread}", min(10.0, config.rollout.lease_s), decode_tokens
            ),
            lease_s=config.rollout.lease_s,
            stall_s=config.trainer.stall_s,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: judge.close())
        log.info("%s: %d slots, queue %s", holder, slots, arguments.queue)
        judge.run()
    except (ConfigError, KeysError, ProblemError, SandboxUnavailable) as error:
        log.error("%s: %s", arguments.name, error)
        return CANNOT_START
    except (JudgeError, SandboxError, QueueError) as error:
        log.error("%s: %s", arguments.name, error)
        return 1
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reward", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--queue", required=True, help="endpoint of the queue server, tcp://host:port")
    parser.add_argument("--slots", type=int, default=0, help="sandboxes; 0: as the run's reward.slots says")
    parser.add_argument("--name", default="judge", help="in logs and in the ledger's tables")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
