"""One more engine of the fleet, with weights that no push changes: a teacher (`algo.teacher_on=engine`) or a judge model.

It is started again when it ends. Whoever asks it finds it by its address, which lies in the run's folder while it serves.
"""

import asyncio
import logging
import time
from pathlib import Path

from conf.schema import RolloutConfig
from rollout.engine_client import EngineError
from rollout.engine_process import Engine
from rollout.queue.client import AsyncQueueClient

BEAT_S = 2.0
HEALTH_S = 30.0
STUCK_S = 120.0  # a server that is silent for this long is started again
RESTART_PAUSE_S = 1.0

log = logging.getLogger(__name__)


async def serve(name: str, engine: Engine, address_file: Path, config: RolloutConfig, queue: AsyncQueueClient) -> None:
    """Serves until the run is over. Raises EngineError when the server cannot be kept alive."""
    closing = asyncio.create_task(_closing(name, queue))
    try:
        for restarts_left in reversed(range(config.engine_restarts + 1)):
            keeping = asyncio.create_task(_serve_once(name, engine, address_file, config.engine_start_s))
            await asyncio.wait([closing, keeping], return_when=asyncio.FIRST_COMPLETED)
            keeping.cancel()
            if closing.done():
                return closing.result()
            if restarts_left == 0 or not isinstance(keeping.exception(), EngineError):
                return keeping.result()
            log.error("%s", keeping.exception())
            engine.stop()
            await asyncio.sleep(RESTART_PAUSE_S)
    finally:
        closing.cancel()
        address_file.unlink(missing_ok=True)
        engine.stop()


async def _serve_once(name: str, engine: Engine, address_file: Path, start_s: float) -> None:
    """One start of the server. Raises EngineError when it ends."""
    engine.start()
    await engine.wait_ready(start_s)
    unfinished = address_file.with_suffix(".unfinished")
    unfinished.write_text(engine.url)
    unfinished.replace(address_file)
    log.info("the %s listens on %s", name, engine.url)
    healthy_s = time.monotonic()
    async with engine.client() as client:
        while engine.alive() and time.monotonic() - healthy_s < STUCK_S:
            if await client.healthy(deadline_s=HEALTH_S):
                healthy_s = time.monotonic()
            await asyncio.sleep(BEAT_S)
    why = f"was silent for {STUCK_S:.0f} s" if engine.alive() else f"died: {engine.cause_of_death()}"
    raise EngineError(f"the server of the {name} {why}; the end of its log:\n{engine.log_tail(10)}")


async def _closing(name: str, queue: AsyncQueueClient) -> None:
    """Returns when the run is over."""
    while not (await queue.heartbeat(name, name, [], {})).closing:
        await asyncio.sleep(BEAT_S)
