"""Services that are slow, down, late, or talk nonsense: what the judge's connections make of them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import reward.grading.services
from reward.grading.services import TRIES, Services
from reward.jail.limits import Cancelled
from reward.kinds.endpoint import ContractError, Endpoint
from tests.ports import free_port
from tests.reward.http_server import scores, serving


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    monkeypatch.setattr(reward.grading.services, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(reward.grading.services, "LONGEST_PAUSE_S", 0.2)
    found = Services()
    yield found
    found.close()


GARBAGE: list[Any] = [b"<html>", b"\xff\xfe", b"", b"[" * 100_000, {"items": "no"}, {"items": [1, 2, 3]}, "text", None]


def number(answer: Any) -> float:
    if not isinstance(answer, int | float):
        raise ContractError(f"no number: {answer!r}")
    return float(answer)


def ask(services: Services, endpoint: Endpoint, value: Any) -> float:
    return services.ask(endpoint, {"value": value}, number, lambda: False)


def ask_all(services: Services, endpoint: Endpoint, values: range) -> list[float | str]:
    def one(value: int) -> float | str:
        try:
            return ask(services, endpoint, value)
        except ContractError as error:
            return str(error)

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(one, values))


def test_items_asked_at_once_go_in_batches_and_each_gets_its_own_answer(services: Services) -> None:
    with serving(scores(lambda item: 2 * item["value"])) as server:
        answers = ask_all(services, Endpoint(url=server.url, batch=16), range(64))
        assert answers == [2.0 * value for value in range(64)]
        assert len(server.requests) < 32
        assert max(len(body["items"]) for body in server.requests) <= 16


def test_token_of_the_environment_is_sent_and_never_logged(
    services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SCORE_TOKEN", "s3cret")
    with serving(lambda body: (401, b"") if len(server.requests) == 1 else (200, 1)) as server:
        assert ask(services, Endpoint(url=server.url, token_env="SCORE_TOKEN"), 1) == 1.0
        assert server.headers["Authorization"] == "Bearer s3cret"
    assert "401" in caplog.text and "s3cret" not in caplog.text


def test_service_that_is_down_is_waited_for_and_nobody_scores_nothing(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    endpoint = Endpoint(url=f"http://127.0.0.1:{port}/score", batch=4)
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(ask, services, endpoint, value) for value in range(12)]
        time.sleep(0.5)
        assert not any(one.done() for one in waiting)
        with serving(scores(lambda item: item["value"]), port) as server:
            assert [one.result(20.0) for one in waiting] == [float(value) for value in range(12)]
            assert any(len(body["items"]) > 1 for body in server.requests)
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be reached" in line and "completions wait" in line for line in said) == 1
    assert sum("answers again" in line for line in said) == 1


@pytest.mark.parametrize("status", [301, 403, 404, 429, 500, 503])
def test_http_error_is_asked_again_until_the_service_answers(services: Services, status: int) -> None:
    with serving(lambda body: (status, b"not now") if len(server.requests) <= 6 else (200, 7)) as server:
        assert ask(services, Endpoint(url=server.url), 1) == 7.0


def test_answer_that_comes_too_late_is_dropped_and_asked_for_again(services: Services) -> None:
    def slow_once(body: Any) -> tuple[int, Any]:
        if len(server.requests) == 1:
            time.sleep(0.6)
            return 200, 1
        return 200, 2

    with serving(slow_once) as server:
        assert ask(services, Endpoint(url=server.url, timeout_s=0.2), 1) == 2.0


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("batch", [0, 8])
def test_item_that_only_gets_garbage_is_given_up_with_the_garbage_as_the_reason(
    services: Services, garbage: Any, batch: int
) -> None:
    with serving(lambda body: (200, garbage)) as server:
        with pytest.raises(ContractError, match=rf"\({TRIES} times\)"):
            ask(services, Endpoint(url=server.url, batch=batch), 1)
        assert len(server.requests) == TRIES


@pytest.mark.parametrize("fault", ["status 500", "garbage", "hangs", "too long"])
def test_one_poisoned_item_costs_one_verdict_and_the_others_get_theirs(services: Services, fault: str) -> None:
    def reply(body: Any) -> tuple[int, Any]:
        if any(item["value"] == 5 for item in body["items"]):
            if fault == "hangs":
                time.sleep(1.0)
            return {"status 500": (500, b"boom"), "garbage": (200, b"?"), "too long": (200, b"1" * (40 << 20))}.get(
                fault, (200, 0)
            )
        return scores(lambda item: item["value"])(body)

    with serving(reply) as server, ThreadPoolExecutor(1) as pool:
        endpoint, done = Endpoint(url=server.url, batch=8, timeout_s=0.5), threading.Event()
        others = pool.submit(lambda: [ask(services, endpoint, 1) for _ in iter(done.is_set, True)])  # a run has more of them
        answers = ask_all(services, endpoint, range(24))
        done.set()
        assert set(others.result(10.0)) == {1.0}
    assert [index for index, answer in enumerate(answers) if isinstance(answer, str)] == [5]
    assert answers[:5] + answers[6:] == [float(value) for value in range(24) if value != 5]


def test_item_that_always_fails_is_given_up_without_other_traffic_if_the_service_answers_again_what_it_answered_before(
    services: Services,
) -> None:
    with serving(lambda body: (200, body["value"]) if body["value"] else (500, b"boom")) as server:
        endpoint = Endpoint(url=server.url)
        assert ask(services, endpoint, 7) == 7.0
        with ThreadPoolExecutor(2) as pool:  # one such item does not save the other
            reasons = [str(asked.exception(20.0)) for asked in [pool.submit(ask, services, endpoint, 0) for _ in range(2)]]
        assert reasons == [f"it answers 500: boom ({TRIES} times)"] * 2
        assert ask(services, endpoint, 8) == 8.0


def test_item_that_fails_while_the_service_answers_nothing_else_waits(services: Services) -> None:
    broken = threading.Event()
    with (
        serving(lambda body: (500, b"boom") if broken.is_set() else (200, body["value"])) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        endpoint = Endpoint(url=server.url)
        assert ask(services, endpoint, 7) == 7.0
        broken.set()
        asked = pool.submit(ask, services, endpoint, 8)
        until = time.monotonic() + 20.0
        while len(server.requests) < 6 * TRIES and time.monotonic() < until:
            time.sleep(0.05)
        assert not asked.done()
        broken.clear()
        assert asked.result(20.0) == 8.0


def test_question_that_nobody_wants_any_more_ends_while_the_service_is_down(services: Services) -> None:
    wanted = threading.Event()
    threading.Timer(0.3, wanted.set).start()
    with pytest.raises(Cancelled):
        services.ask(Endpoint(url=f"http://127.0.0.1:{free_port()}"), {}, number, wanted.is_set)


def test_closing_ends_the_thread_whatever_the_service_does() -> None:
    services = Services()
    with serving(lambda body: (time.sleep(30), (200, 1))[1]) as server, ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        asked = pool.submit(services.ask, Endpoint(url=server.url), {}, number, stop.is_set)
        time.sleep(0.2)
        stop.set()
        with pytest.raises(Cancelled):
            asked.result(5.0)
        services.close()
    assert not any(thread.name == "services" for thread in threading.enumerate())
