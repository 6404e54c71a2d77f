"""A real headless Chromium, driven over its debugging protocol."""

import asyncio
import base64
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_S, ANSWER_S, WAIT_S = 60.0, 60.0, 30.0
FLAGS = ("--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-port=0")


class Browser:
    """One tab. `console` collects errors, such as what the page's policy has blocked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.console: list[str] = []
        self.dialogs = 0

    async def call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        while True:
            message = await self._socket.receive_json(timeout=ANSWER_S)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.console.append(json.dumps(message["params"]["entry"]))
            case "Page.javascriptDialogOpening":
                self.dialogs += 1

    async def value(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, address: str, until: str) -> None:
        """Opens the address and waits until the script is true."""
        await self.call("Page.navigate", url=address)
        await self.wait(until)

    async def wait(self, until: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not await self.value(f"Boolean({until})"):
            shown = await self.value("document.body?.innerText")
            assert time.monotonic() < deadline_s, f"never true: {until}; the page shows {str(shown)[:2000]!r}"
            await asyncio.sleep(0.1)

    async def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def look(self, *, width: int, height: int, dark: bool) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser(program: str, profile: Path) -> AsyncIterator[Browser]:
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [program, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port = await _port(profile)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tab = next(found for found in await answer.json() if found["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    driven = Browser(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await driven.call(f"{domain}.enable")
                    yield driven
        finally:
            process.terminate()


async def _port(profile: Path) -> str:
    deadline_s = time.monotonic() + START_S
    told = profile / "DevToolsActivePort"
    while not (told.is_file() and told.read_text().count("\n")):
        assert time.monotonic() < deadline_s, "Chromium does not start"
        await asyncio.sleep(0.1)
    return told.read_text().splitlines()[0]
