"""A small HTTP server that speaks SGLang's dialect, for tests of worker and trainer that need no SGLang.

    python -m tests.rollout.fake_engine --port 31000 [--config FILE.yaml] [any other argument of SGLang's, ignored]

Its "model" is `next_token`: a pure function of the tokens so far and the weights' version, with the log-prob that
goes with it, so a test can compute what any request must return. It stops at a stop token, keeps a version a token,
retracts on pause, asks for the keys, and joins real collective groups: what it receives it keeps, by name. As in
SGLang an update needs begin/end, and while a bucket is awaited no other weight call is answered.

`Engine` starts it as `EngineSettings(launcher=FAKE_LAUNCHER, …)`; in a test's own process, use `FakeEngine` directly.
"""

import argparse
import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCABULARY = 512
FAKE_LAUNCHER = ("-m", "tests.rollout.fake_engine")
TOKEN_S = 0.001
CONTEXT_TOKENS = 1 << 20
OPINION = 7  # the score in every answer to a chat


def next_token(tokens: Sequence[int], version: int) -> tuple[int, float]:
    """What the pseudo-model samples after `tokens`, and its log-prob."""
    digest = hashlib.sha256(json.dumps([list(tokens), version]).encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCABULARY, -1e-3 * (1 + digest[4])


def prompt_logprob(tokens: Sequence[int], at: int) -> float:
    """The log-prob of the prompt's token `at` under the pseudo-model, whatever its version."""
    return next_token(tokens[: at + 1], 0)[1]


@dataclass
class Request:
    tokens: list[int]
    scored: list[tuple[float, int, None]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False


class FakeEngine:
    """One server; `await start()`, `await stop()`. `weights` holds what pushes brought, by name (torch tensors)."""

    def __init__(
        self,
        *,
        port: int,
        host: str = "127.0.0.1",
        version: str = "0",
        api_key: str = "",
        admin_api_key: str = "",
        context_length: int = CONTEXT_TOKENS,
        token_s: float = TOKEN_S,
        weight_group_s: float = 600.0,
    ) -> None:
        self.host, self.port, self.version = host, port, version
        self.api_key, self.admin_api_key = api_key, admin_api_key or api_key
        self.token_s = token_s
        self.weight_group_s = weight_group_s
        self.context_length = context_length
        self.calls: list[str] = []
        self.weights: dict[str, Any] = {}
        self.updating = False
        self.requests: dict[str, Request] = {}
        self._groups: dict[str, Any] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._weight_calls = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._authorise], client_max_size=1 << 28)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.post("/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._flush_cache),
                web.post("/slow_down", self._slow_down),
                web.post("/init_weights_update_group", self._init_group),
                web.post("/destroy_weights_update_group", self._destroy_group),
                web.post("/begin_weight_update", self._begin),
                web.post("/update_weights_from_distributed", self._receive),
                web.post("/end_weight_update", self._end),
                web.post("/update_weight_version", self._set_version),
                web.post("/weights_checker", self._checksum),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, shutdown_timeout=0.1).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Any) -> web.StreamResponse:
        open_to_users = request.path in ("/generate", "/v1/chat/completions", "/model_info", "/server_info", "/health")
        key = self.api_key if open_to_users else self.admin_api_key
        if key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.calls.append(request.path)
        response: web.StreamResponse = await handler(request)
        return response

    # Generation

    async def _health(self, _: web.Request) -> web.Response:
        await self._running.wait()
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.version})

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("logprob_start_len") is not None:
            return web.json_response({"output_ids": [], "meta_info": {"input_token_logprobs": self._scored(body)}})
        parameters, rid = body["sampling_params"], body["rid"]
        if len(body["input_ids"]) + parameters["max_new_tokens"] > self.context_length:
            return web.Response(status=400, text="Requested token count exceeds the model's maximum context length")
        request = self.requests[rid] = Request(list(body["input_ids"]))
        try:
            finish = await self._run(request, parameters["max_new_tokens"], set(parameters["stop_token_ids"]))
        finally:
            del self.requests[rid]
        meta = {
            "id": rid,
            "finish_reason": {"type": finish},
            "weight_version": self.version,
            "output_token_logprobs": request.scored,
            "weight_versions": spans(request.versions),
        }
        return web.json_response({"output_ids": [token for _, token, _ in request.scored], "meta_info": meta})

    async def _chat(self, http: web.Request) -> web.Response:
        assert (await http.json())["messages"]
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": f"Score: {OPINION}"}}]})

    def _scored(self, body: dict[str, Any]) -> list[list[Any]]:
        """The first of the scored tokens has no log-prob, as in SGLang."""
        start, tokens = body["logprob_start_len"], body["input_ids"]
        with_text = body.get("return_text_in_logprobs", False)
        return [
            [None if at == start else prompt_logprob(tokens, at), tokens[at], f"t{tokens[at]}" if with_text else None]
            for at in range(start, len(tokens))
        ]

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"max_req_input_len": self.context_length})

    async def _run(self, request: Request, max_new_tokens: int, stop_tokens: set[int]) -> str:
        while True:
            await asyncio.sleep(self.token_s)
            await self._running.wait()
            if request.aborted:
                return "abort"
            token, logprob = next_token(request.tokens, int(self.version))
            request.tokens.append(token)
            request.scored.append((logprob, token, None))
            request.versions.append(self.version)
            if token in stop_tokens:
                return "stop"
            if len(request.scored) == max_new_tokens:
                return "length"

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        for rid, request in self.requests.items():
            request.aborted |= body.get("abort_all", False) or rid == body.get("rid")
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        self._running.clear()
        if (await http.json()).get("mode", "abort") == "abort":
            for request in self.requests.values():
                request.aborted = True
            self._running.set()
            await asyncio.sleep(2 * self.token_s)
            self._running.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"status": "ok"})

    async def _flush_cache(self, _: web.Request) -> web.Response:
        if self._running.is_set() and self.requests:
            return web.Response(status=400, text="Flush cache failed: requests are running.")
        return web.Response(text="Cache flushed.")

    async def _slow_down(self, http: web.Request) -> web.Response:
        self.token_s = (await http.json())["forward_sleep_time"] or TOKEN_S
        return web.Response()

    # Weights

    async def _init_group(self, http: web.Request) -> web.Response:
        from trainer.push.weight_group import WeightGroupError, join  # only pushes need torch

        body = await http.json()
        async with self._weight_calls:
            try:
                self._groups[body["group_name"]] = await asyncio.to_thread(
                    join,
                    body["master_address"],
                    body["master_port"],
                    rank=body["rank_offset"],
                    world_size=body["world_size"],
                    group_name=body["group_name"],
                    timeout_s=self.weight_group_s,
                    backend=body["backend"],
                )
            except WeightGroupError as error:
                return answer(False, f"Failed to initialize custom process group: {error}.")
        return answer(True)

    async def _destroy_group(self, http: web.Request) -> web.Response:
        from trainer.push.weight_group import destroy

        name = (await http.json())["group_name"]
        async with self._weight_calls:
            if name not in self._groups:
                return answer(False, "The group to be destroyed does not exist.")
            destroy(self._groups.pop(name))
        return answer(True)

    async def _begin(self, _: web.Request) -> web.Response:
        if self.updating:
            return answer(False, "a weight-update session is already open")
        self.updating = True
        return answer(True)

    async def _receive(self, http: web.Request) -> web.Response:
        from trainer.push.weight_group import WeightGroupError

        body = await http.json()
        if not self.updating:
            return answer(False, "must run between begin_weight_update() and end_weight_update()")
        if body["group_name"] not in self._groups:
            return answer(False, f"Group {body['group_name']} not in {list(self._groups)}")
        async with self._weight_calls:
            group = self._groups[body["group_name"]]
            try:
                self.weights |= await asyncio.to_thread(receive, group, body["names"], body["dtypes"], body["shapes"])
            except WeightGroupError as error:
                return answer(False, f"Failed to receive weights: {error}")
        return answer(True)

    async def _end(self, _: web.Request) -> web.Response:
        if not self.updating:
            return answer(False, "no weight-update session is open")
        self.updating = False
        return answer(True)

    async def _set_version(self, http: web.Request) -> web.Response:
        self.version = (await http.json())["new_version"]
        return answer(True)

    async def _checksum(self, _: web.Request) -> web.Response:
        from trainer.push.weight_group import expected_checksums

        checksums = expected_checksums(self.weights.items())[0] if self.weights else {}
        rank = {"checksums": checksums, "parallelism_info": [{"tp_rank": 0}]}
        return web.json_response({"success": True, "message": "Success.", "ranks": [rank]})


def answer(success: bool, message: str = "Success") -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)


def spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """One version a token, as SGLang's spans [start, end)."""
    out: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if not out or out[-1]["version"] != version:
            out.append({"version": version, "start": index, "end": index})
        out[-1]["end"] = index + 1
    return out


def receive(group: Any, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Takes part in the broadcast of one bucket, and cuts it into tensors."""
    import torch

    from trainer.push.weight_group import broadcast

    types = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)]
    bucket = torch.empty(sum(sizes), dtype=torch.uint8)
    broadcast(bucket, group)
    parts = zip(names, bucket.split(sizes), types, shapes, strict=True)
    return {name: part.clone().view(dtype).view(shape) for name, part, dtype, shape in parts}


async def serve(engine: FakeEngine) -> None:
    await engine.start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--context-length", type=int, default=CONTEXT_TOKENS)
    parser.add_argument("--pace-s", type=float, default=TOKEN_S, help="time that one token takes")
    parser.add_argument("--config", help="a file with the keys, as `Engine` writes it")
    arguments, _ = parser.parse_known_args()
    keys: dict[str, str] = {}
    if arguments.config:
        with open(arguments.config) as file:
            keys = json.load(file)
    engine = FakeEngine(
        host=arguments.host,
        port=arguments.port,
        version=arguments.weight_version,
        context_length=arguments.context_length,
        token_s=arguments.pace_s,
        api_key=keys.get("api-key", ""),
        admin_api_key=keys.get("admin-api-key", ""),
    )
    asyncio.run(serve(engine))


if __name__ == "__main__":
    main()
