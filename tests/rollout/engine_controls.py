"""What tests ask of an engine's server, and no run does."""

from rollout.engine_client import CONTROL_S, EngineClient


async def version_of(client: EngineClient) -> int:
    """The version that the server reports. It answers while paused, too."""
    body = await client._json("GET", "/model_info", None, deadline_s=CONTROL_S, headers=client._headers)
    return int(body["weight_version"])


async def reset_weights(client: EngineClient) -> None:
    """Fills every parameter with random numbers: what a push then leaves untouched shows in the checksums."""
    await client._checked("/weights_checker", {"action": "reset_tensors"}, deadline_s=CONTROL_S)


async def slow_down(client: EngineClient, sleep_s: float | None) -> None:
    """Makes each forward pass take longer, so that a test can act in the middle of a completion."""
    await client._control("/slow_down", {"forward_sleep_time": sleep_s}, deadline_s=CONTROL_S)
