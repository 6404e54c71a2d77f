"""The HTTP side: who may read, what an address may ask, and that answers are JSON."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from launch.view.run_view import RunView
from launch.view.server import PAGE, application
from tests.launch.view.recorded_run import make_run

TOKEN = "right-token"
HERE = "http://127.0.0.1:8501"


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[TestClient]:
    """Nobody has told it the token."""
    view = RunView(make_run(tmp_path / "small"))
    view.catch_up()
    with TestClient(application(view, TOKEN), base_url=HERE, follow_redirects=False) as client:
        yield client


@pytest.fixture
def reader(stranger: TestClient) -> TestClient:
    answer = stranger.get("/", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
    return stranger


@pytest.mark.parametrize(
    "path", ["/", "/?token=wrong", "/api/overview", "/api/events", "/page/main.js", "/api/group?token=right-token"]
)
def test_nothing_is_read_without_the_token(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 403
    assert "launch.view printed" in answer.text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8501", "evil.example:8501", ""])
def test_other_host_name_is_refused(reader: TestClient, host: str) -> None:
    assert reader.get("/api/overview", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "localhost"])
def test_names_of_this_machine_are_served_with_any_port(reader: TestClient, host: str) -> None:
    assert reader.get("/api/overview", headers={"host": host, "cookie": cookie(reader)}).status_code == 200


def cookie(reader: TestClient) -> str:
    return "; ".join(f"{name}={value}" for name, value in reader.cookies.items())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_page_only_reads(reader: TestClient, method: str) -> None:
    assert reader.request(method, "/api/overview").status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/overview", "/page/main.js", "/nowhere"])
def test_every_answer_forbids_foreign_and_inline_code(reader: TestClient, path: str) -> None:
    policy = reader.get(path).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "unsafe" not in policy


def test_page_itself_has_no_inline_code_and_names_no_other_host() -> None:
    for file in [*PAGE.glob("*.html"), *PAGE.glob("*.js"), *PAGE.glob("*.css")]:
        text = file.read_text()
        assert not [
            word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "https://") if word in text
        ]
    assert "style=" not in (PAGE / "index.html").read_text()


@pytest.mark.parametrize(
    "path", ["/page/../server.py", "/page/%2e%2e/server.py", "/page//etc/passwd", "/page/..%2f..%2f__main__.py"]
)
def test_no_file_outside_the_page_is_served(reader: TestClient, path: str) -> None:
    assert reader.get(path).status_code == 404


def test_answers_are_json_and_a_figure_that_is_no_number_is_null(reader: TestClient) -> None:
    overview = reader.get("/api/overview").json()
    norm = next(chart for chart in overview["charts"] if chart["title"] == "Gradient norm")
    assert norm["lines"] == [{"name": "mean", "values": [None, None]}]
    assert reader.get("/api/following").json()["steps"] == [1, 4]
    assert reader.get("/api/problems").json()["count"] == 3
    assert reader.get("/api/problem", params={"id": "p0"}).json()["row"]["attempts"] == 4
    assert [group["id"] for group in reader.get("/api/groups?step=4").json()] == [2, 3]
    assert reader.get("/api/group?group=0").json()["page"]["samples"][0]["text"] == "right"
    assert len(reader.get("/api/tokens?group=2&number=0").json()["page"]["texts"]) == 26


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/group?group=99", 404, "no group 99"),
        ("/api/tokens?group=0&number=7", 404, "no completion 7"),
        ("/api/problem?id=nobody", 404, "'nobody'"),
        ("/api/group?group=x", 400, "must be a whole number"),
        ("/api/groups?step=99999999999999999999", 400, "must be a whole number"),
        ("/api/problems?sort=1;DROP", 400, "must be one of"),
    ],
)
def test_question_without_an_answer_says_why(reader: TestClient, path: str, status: int, message: str) -> None:
    answer = reader.get(path)
    assert answer.status_code == status
    assert message in answer.json()["error"]
