"""The client against the fake server, which speaks SGLang's dialect over real HTTP."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollout import engine_client
from rollout.engine_answer import Generated
from rollout.engine_client import (
    BadAnswer,
    EngineCallError,
    EngineClient,
    EngineFleet,
    EngineGone,
    EngineTimeout,
    FleetError,
)
from tests.ports import free_port
from tests.rollout.engine_controls import version_of
from tests.rollout.fake_engine import FakeEngine, next_token

PROMPT = [3, 1, 4, 1, 5]


def expected(prompt: list[int], count: int, version: int = 0) -> tuple[list[int], list[float]]:
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        token, logprob = next_token(tokens, version)
        tokens.append(token)
        logprobs.append(logprob)
    return tokens[len(prompt) :], logprobs


def with_fake(test: Callable[[FakeEngine, EngineClient], Awaitable[Any]], **settings: Any) -> Any:
    """Runs `test(server, client)` against a server of its own."""

    async def run() -> Any:
        engine = FakeEngine(port=free_port(), **settings)
        await engine.start()
        try:
            keys = {name: settings[name] for name in ("api_key", "admin_api_key") if name in settings}
            async with EngineClient(engine.url, **keys) as client:
                return await test(engine, client)
        finally:
            await engine.stop()

    return asyncio.run(run())


async def ask(
    client: EngineClient, count: int, *, stop_token_ids: Sequence[int] = (), deadline_s: float = 10.0, **more: Any
) -> Generated:
    return await client.generate(
        PROMPT,
        {"temperature": 1.0},
        rid="a",
        max_new_tokens=count,
        stop_token_ids=stop_token_ids,
        **more,
        deadline_s=deadline_s,
    )


def test_generate_returns_each_tokens_logprob_and_version() -> None:
    answer = with_fake(lambda _, client: ask(client, 12), version="7")
    tokens, logprobs = expected(PROMPT, 12, version=7)
    assert answer.tokens.tolist() == tokens
    assert answer.tokens.dtype == np.int32
    assert np.allclose(answer.logprobs, logprobs)
    assert answer.logprobs.dtype == np.float32
    assert answer.versions.tolist() == [7] * 12
    assert answer.versions.dtype == np.int32
    assert answer.finish == "length"


def test_a_stop_token_ends_the_completion_and_is_part_of_it() -> None:
    tokens, _ = expected(PROMPT, 4)
    answer = with_fake(lambda _, client: ask(client, 12, stop_token_ids=[tokens[3]]))
    assert answer.tokens.tolist() == tokens
    assert answer.finish == "stop"


def test_abort_returns_the_tokens_sampled_so_far() -> None:
    async def test(engine: FakeEngine, client: EngineClient) -> Generated:
        call = asyncio.create_task(ask(client, 100_000))
        while not engine.requests or len(engine.requests["a"].scored) < 3:
            await asyncio.sleep(0.001)
        await client.abort("a")
        await client.abort("of nobody")
        return await call

    answer = with_fake(test)
    assert answer.finish == "abort"
    assert answer.tokens.tolist() == expected(PROMPT, len(answer.tokens))[0]


def test_a_pause_holds_requests_and_a_version_set_meanwhile_shows_from_the_next_token_on() -> None:
    async def test(engine: FakeEngine, client: EngineClient) -> Generated:
        call = asyncio.create_task(ask(client, 40))
        while not engine.requests or len(engine.requests["a"].scored) < 3:
            await asyncio.sleep(0.001)
        await client.pause()
        await client.flush_cache()
        await client.begin_weight_update()
        held = len(engine.requests["a"].scored)
        await asyncio.sleep(0.05)
        assert len(engine.requests["a"].scored) == held
        await client.end_weight_update(1)
        await client.continue_()
        answer = await call
        assert answer.versions.tolist() == [0] * held + [1] * (40 - held)
        return answer

    answer = with_fake(test)
    cut = int((answer.versions == 0).sum())
    old, _ = expected(PROMPT, cut, version=0)
    new, _ = expected(PROMPT + old, 40 - cut, version=1)
    assert answer.tokens.tolist() == old + new


def test_a_failure_that_the_server_reports_names_server_call_and_answer() -> None:
    async def test(engine: FakeEngine, client: EngineClient) -> None:
        with pytest.raises(EngineCallError) as caught:
            await client.end_weight_update(1)
        assert caught.value.url == engine.url
        assert caught.value.call == "/end_weight_update"
        assert "no weight-update session is open" in str(caught.value)

    with_fake(test)


def test_an_update_that_a_dead_trainer_left_open_is_begun_anew() -> None:
    async def test(engine: FakeEngine, client: EngineClient) -> None:
        await client.begin_weight_update()
        await client.begin_weight_update()
        assert engine.updating and engine.calls.count("/end_weight_update") == 1
        await client.leave_push_group("one that it never was in")

    with_fake(test)


def test_flush_is_refused_while_requests_run() -> None:
    async def test(engine: FakeEngine, client: EngineClient) -> None:
        call = asyncio.create_task(ask(client, 100_000))
        while not engine.requests:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineCallError, match="running"):
            await client.flush_cache()
        call.cancel()

    with_fake(test)


def test_a_dead_server_and_a_slow_one_are_told_apart() -> None:
    async def test(engine: FakeEngine, client: EngineClient) -> None:
        with pytest.raises(EngineTimeout, match=r"within 0\.05 s"):
            await ask(client, 100_000, deadline_s=0.05)
        await engine.stop()
        with pytest.raises(EngineGone):
            await ask(client, 3)
        assert not await client.healthy()

    with_fake(test)


def test_users_key_generates_but_does_not_control() -> None:
    async def test(engine: FakeEngine, client: EngineClient) -> None:
        await ask(client, 2)
        await client.pause()
        await client.continue_()
        async with EngineClient(engine.url, api_key="user") as user:
            await ask(user, 2)
            with pytest.raises(EngineCallError, match="401"):
                await user.pause()
        async with EngineClient(engine.url) as stranger:
            with pytest.raises(EngineCallError, match="401"):
                await ask(stranger, 2)

    with_fake(test, api_key="user", admin_api_key="admin")


def test_health_waits_while_paused_but_the_version_is_told() -> None:
    async def test(_: FakeEngine, client: EngineClient) -> None:
        assert await client.healthy()
        await client.pause()
        assert not await client.healthy(deadline_s=0.1)
        assert await version_of(client) == 5

    with_fake(test, version="5")


def sound(tokens: list[int]) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
        "finish_reason": {"type": "length"},
    }
    return {"output_ids": tokens, "meta_info": meta}


HEADERS = {"Content-Type": "application/json"}
UNSOUND = {
    "another shape": lambda: web.json_response({"text": "hello", "meta_info": {"finish_reason": None}}),
    "more than asked": lambda: web.json_response(sound([1, 2])),
    "a token beyond the vocabulary": lambda: web.json_response(sound([7])),
    "a list": lambda: web.json_response([]),
    "no JSON": lambda: web.Response(text="hello", headers=HEADERS),
    "broken UTF-8": lambda: web.Response(body=json.dumps(sound([1])).encode()[:-1] + b', "text": "\xff"}', headers=HEADERS),
    "UTF-16": lambda: web.Response(body=json.dumps(sound([1])).encode("utf-16"), headers=HEADERS),
    "a huge integer": lambda: web.Response(text='{"output_ids": [' + "9" * 5000 + "]}", headers=HEADERS),
    "deep": lambda: web.Response(text="[" * 100_000, headers=HEADERS),
    "too large": lambda: web.Response(body=b" " * (engine_client.MOST_ANSWER_BYTES + 1), headers=HEADERS),
    "compressed": lambda: web.Response(body=gzip.compress(b" " * (1 << 26)), headers=HEADERS | {"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("answer", UNSOUND.values(), ids=UNSOUND.keys())
def test_answer_that_no_sound_engine_gives_is_refused(answer: Callable[[], web.Response]) -> None:
    with pytest.raises(BadAnswer):
        answered_by(answer)


@pytest.mark.parametrize("status", [307, 500])
def test_other_status_than_200_is_an_error_whose_text_cannot_change_the_terminal(status: int) -> None:
    headers = {"Location": "http://127.0.0.1:1/"} if status == 307 else {}
    with pytest.raises(EngineCallError, match=rf"HTTP {status}: \\x1b\[2J") as caught:
        answered_by(lambda: web.Response(status=status, text="\x1b[2J", headers=headers))
    assert caught.value.answered and "\x1b" not in str(caught.value)


def test_sound_answer_is_taken() -> None:
    assert answered_by(lambda: web.json_response(sound([3]))).tokens.tolist() == [3]


def answered_by(answer: Callable[[], web.Response]) -> Generated:
    """What the client makes of this answer to a request for one token of five."""

    async def handle(_: web.Request) -> web.Response:
        return answer()

    async def run() -> Generated:
        app = web.Application()
        app.add_routes([web.post("/generate", handle)])
        runner, port = web.AppRunner(app), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with EngineClient(f"http://127.0.0.1:{port}") as client:
                return await ask(client, 1, vocabulary=5)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_fleet_calls_all_engines_at_once_and_names_those_that_failed() -> None:
    present = 0

    async def meet(client: EngineClient) -> int:
        nonlocal present
        present += 1
        while present < 3:  # ends only if all three calls run together
            await asyncio.sleep(0.001)
        return await version_of(client)

    async def run() -> None:
        engines = [FakeEngine(port=free_port(), version=str(version)) for version in range(3)]
        for engine in engines:
            await engine.start()
        with EngineFleet([EngineClient(engine.url) for engine in engines]) as fleet:
            assert await asyncio.to_thread(fleet.call, meet) == {engine.url: int(engine.version) for engine in engines}
            await engines[1].stop()
            with pytest.raises(FleetError) as caught:
                await asyncio.to_thread(fleet.call, lambda client: client.pause())
            assert set(caught.value.failures) == {engines[1].url}
            assert [engine.calls[-1] for engine in (engines[0], engines[2])] == ["/pause_generation"] * 2
            fleet.remove(engines[1].url)
            assert len(await asyncio.to_thread(fleet.call, lambda client: client.continue_())) == 2
        for engine in engines:
            await engine.stop()

    asyncio.run(run())
