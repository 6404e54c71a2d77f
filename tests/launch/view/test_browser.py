"""The page in a real headless Chromium, served by the command itself."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.stand_ins import ENV, PROJECT
from tests.launch.view.browser import browser
from tests.launch.view.recorded_run import HISTORY, group_of, make_run, taken, write_changes

pytestmark = [pytest.mark.slow, pytest.mark.browser]

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>\u202eesrever\u202c\x1b[31mred\x07\x00"
)
LONG_LINE = "x" * 1_000_000
HOSTILE_GROUP = group_of(4, "<b onmouseover=alert(4)>", [HOSTILE, LONG_LINE], [0.0, 1.0], version=3)


def chromium() -> str:
    return shutil.which("chromium") or pytest.fail(
        "this test needs Chromium: run `apt-get install chromium` as root, or leave such tests out by `-m 'not browser'`"
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "small", [*HISTORY, *HOSTILE_GROUP, taken(4, [4])])


@pytest.fixture
def address(run_dir: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "launch.view", str(run_dir)]
    with subprocess.Popen(command, cwd=PROJECT, env={**os.environ, **ENV}, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def test_hostile_completion_is_shown_as_text_and_runs_nothing(address: str, tmp_path: Path) -> None:
    async def look() -> None:
        async with browser(chromium(), tmp_path / "profile") as tab:
            await tab.open(f"{address}#/group/4", "document.querySelectorAll('article').length === 2")
            shown = await tab.value("document.querySelector('.completion').textContent")
            assert shown == HOSTILE.translate(
                {0x202E: "⟨U+202E⟩", 0x202C: "⟨U+202C⟩", 0x1B: "⟨U+001B⟩", 7: "⟨U+0007⟩", 0: "⟨U+0000⟩"}
            )
            assert await tab.value("document.querySelectorAll('main img, main script, main b, main [onmouseover]').length") == 0
            assert await tab.value("document.querySelectorAll('.completion')[1].textContent.length") == 20_000
            assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth")
            await tab.value("location.hash = '#/tokens/4/0'")
            await tab.wait("document.querySelectorAll('.segment .token').length > 100")
            assert await tab.value("document.querySelectorAll('main img, main script').length") == 0
            assert (tab.dialogs, tab.console) == (0, [])

    asyncio.run(look())


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False), (400, True)])
def test_every_view_fits_its_window_and_breaks_no_rule(address: str, tmp_path: Path, width: int, dark: bool) -> None:
    views = {
        "overview": ".uplot", "problems": "tbody tr", "problem/p0": ".uplot", "samples": "tbody tr", "group/2": "article",
        "tokens/2/0": ".observation .token",
    }  # fmt: skip

    async def look() -> None:
        async with browser(chromium(), tmp_path / "profile") as tab:
            await tab.look(width=width, height=900, dark=dark)
            await tab.open(address, "document.querySelector('.uplot')")
            for view, sign in views.items():
                await tab.value(f"location.hash = '#/{view}'")
                await tab.wait(f"document.querySelector('main {sign}')")
                await tab.screenshot(tmp_path / f"{view.replace('/', '-')}.png")
                assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth"), view
            assert tab.console == []

    asyncio.run(look())


def test_page_follows_the_run_and_the_keyboard_goes_from_token_to_token(address: str, run_dir: Path, tmp_path: Path) -> None:
    async def look() -> None:
        async with browser(chromium(), tmp_path / "profile") as tab:
            await tab.open(f"{address}#/problems", "document.querySelectorAll('tbody tr').length === 4")
            write_changes(run_dir, group_of(5, "p5", ["new", "newer"], [0.0, 1.0], version=4))
            await tab.wait("document.querySelectorAll('tbody tr').length === 5")
            await tab.value("location.hash = '#/tokens/2/0'")
            await tab.wait("document.querySelector('.observation .token')")
            await tab.value("document.querySelector('.tokens').focus()")
            await tab.press("End", 35)
            await tab.wait("document.querySelector('.detail').textContent.includes('version 2 · lag 1 · log-prob -0.5')")
            for _ in range(4):
                await tab.press("ArrowLeft", 37)
            await tab.wait("document.querySelector('.detail').textContent.includes('observation: no policy sampled it')")

    asyncio.run(look())
