"""A piece of network that can be cut: a TCP proxy in a thread of its own, between some clients and the queue server."""

import asyncio
import contextlib
import socket
import struct
import threading
from enum import StrEnum

CHUNK_BYTES = 1024


class Weather(StrEnum):
    FAIR = "fair"
    STALLED = "stalled"  # bytes wait, in both directions; nobody is told
    SWALLOWING = "swallowing"  # bytes are taken and lost; the connections break when the weather is fair again
    CUT = "cut"  # connections break in the middle of whatever they carry, and new ones with them


class Proxy:
    def __init__(self, port: int, target_port: int) -> None:
        self.port, self._target_port = port, target_port
        self._weather = Weather.FAIR
        self._fair = asyncio.Event()
        self._fair.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{port}", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10.0)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def change(self, weather: Weather) -> None:
        self._loop.call_soon_threadsafe(self._change, weather)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=CHUNK_BYTES)

    def _change(self, weather: Weather) -> None:
        if weather is Weather.CUT or self._weather is Weather.SWALLOWING:
            for writer in self._writers:
                _reset(writer)
        self._weather = weather
        if weather is Weather.FAIR:
            self._fair.set()
        else:
            self._fair.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            if self._weather is Weather.CUT:
                return
            back, there = await asyncio.open_connection("127.0.0.1", self._target_port, limit=CHUNK_BYTES)
            self._writers.add(there)
            ways = [asyncio.ensure_future(self._carry(a, b)) for a, b in ((reader, there), (back, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:  # nobody listens there, just now
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    self._writers.discard(end)
                    end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self._weather is Weather.SWALLOWING:
                    continue
                await self._fair.wait()
                writer.write(data)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Breaks a connection at once: what is on the way is lost."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
