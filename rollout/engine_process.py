"""One SGLang server as a subprocess: its command line, its environment, its start, its end.

The server runs in a process group of its own, whose leader is a guard (guard.py). No process of the group outlives the server,
the worker that started it, or `stop()`. The server starts without reading weights (`load_format="dummy"`) and receives its first
weights from the trainer. Until then it reports the version `UNPUSHED`.

SGLang is started by `patched/sglang_server.py`. On CPU the packages in `patched/cpu/` stand in for
what it imports but does not need.
"""

import asyncio
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from rollout.engine_client import UNPUSHED, EngineClient, EngineError
from rollout.guard import PARENT_VARIABLE, guarded

CPU_STAND_INS = Path(__file__).resolve().parent / "patched" / "cpu"
SGLANG = ("-m", "rollout.patched.sglang_server")
POLL_S = 0.2
GONE_S = 3.0  # the kernel needs this long at most to free the port of a killed server
SCRATCH_PREFIX = f"engine-{socket.gethostname()[:20]}-"
"""Prefix of a server's temporary folder, which holds its keys and its sockets. The worker's process id follows."""

CPU_FLAGS = (
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)
TORCHRUN_PREFIXES = (
    "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
)  # fmt: skip
"""Prefixes of the variables that torchrun sets. A server that inherits them would join the worker's rendezvous, and torch would
end it when a weight group breaks."""

NCCL_PORT = 1  # where SGLang's own ranks meet, counted from the server's port; SGLang would choose any free port


PROXY_EXCEPTIONS = ("no_proxy", "NO_PROXY")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ERROR_LINE = re.compile(r"(\[[^\]]*\] )?([\w.]*(Error|Exception|Exit|Interrupt)|[\w.]+\.\w*(Failure|Timeout)): \S")
CHAINED = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")
HOPELESS = re.compile(
    r"^\S+ ended with exit code 2$"  # as the guard says it; argparse's, for arguments that it cannot read
    r"|^(ModuleNotFoundError|ImportError): "
    r"|, in (prepare_server_args|resolve_once)$",  # where SGLang looks at arguments that it could read
    re.MULTILINE,
)
"""Finds, in the log of a server that ended before it listened, a reason that stays. A port or memory in use is no such reason."""


class EngineStartError(EngineError):
    """A server that did not start, or that died while starting; the message holds the tail of its log."""

    def __init__(self, message: str, *, hopeless: bool = False) -> None:
        """hopeless: another try would fail too."""
        super().__init__(message)
        self.hopeless = hopeless


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What one server is started with."""

    model: Path  # Hugging Face folder; with `load_format="dummy"` only its config.json is read
    port: int
    log_file: Path  # appended to; readable by the owner only
    host: str = "127.0.0.1"
    tp: int = 1  # GPUs, or CPU processes
    first_gpu: int = 0  # the server takes GPUs first_gpu .. first_gpu + tp - 1 of the visible ones
    device: str = "cuda"  # cuda | cpu
    dtype: str = "bfloat16"  # float32 | bfloat16; on CPU float32, else log-probs drift
    load_format: str = "dummy"  # dummy: random weights until the first push | auto: the model folder's weights
    tokenizer: bool = False  # it takes and gives text too; else token ids only
    weight_version: int = UNPUSHED  # version of the weights it starts with
    api_key: str = field(default="", repr=False)  # for generation; "": no key is asked for
    admin_api_key: str = field(default="", repr=False)  # for control calls; "": the api_key serves for both
    max_total_tokens: int = 0  # KV cache in tokens; 0: what the memory allows
    max_running_requests: int = 0  # 0: SGLang's choice
    seed: int | None = None  # sampling seed; None: SGLang chooses one
    threads: int = 1  # per process, on CPU
    weight_group_s: float = 30.0  # the longest that the server waits for other members of a weight group
    extra_args: tuple[str, ...] = ()  # further arguments of sglang.launch_server
    python: str = sys.executable  # interpreter of the environment that has sglang
    launcher: tuple[str, ...] = ()  # what `python` runs; (): SGLang's server

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def command_line(settings: EngineSettings, secrets_file: Path) -> list[str]:
    """The server's command; the keys are in `secrets_file`, since others can read a command line."""
    flags = [
        f"--model-path={settings.model}",
        f"--host={settings.host}",
        f"--port={settings.port}",
        f"--device={settings.device}",
        f"--dtype={settings.dtype}",
        f"--tp-size={settings.tp}",
        f"--load-format={settings.load_format}",
        f"--weight-version={settings.weight_version}",
        "--log-level=warning",  # at `info` the log would show the keys
    ]
    if not settings.tokenizer:
        flags.append("--skip-tokenizer-init")
    if settings.device == "cpu":
        flags += CPU_FLAGS
    else:
        flags += [f"--base-gpu-id={settings.first_gpu}", f"--nccl-port={settings.port + NCCL_PORT}"]
    if settings.max_total_tokens:
        flags.append(f"--max-total-tokens={settings.max_total_tokens}")
    if settings.max_running_requests:
        flags.append(f"--max-running-requests={settings.max_running_requests}")
    if settings.seed is not None:
        flags.append(f"--random-seed={settings.seed}")
    return [settings.python, *(settings.launcher or SGLANG), "--config", str(secrets_file), *flags, *settings.extra_args]


def environment(settings: EngineSettings, scratch: Path) -> dict[str, str]:
    """The caller's environment without torchrun's variables; on CPU with the stand-ins first on Python's path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_PREFIXES)}
    if env.get("OMP_NUM_THREADS") == "1":  # torchrun's default for several workers
        del env["OMP_NUM_THREADS"]
    env |= _without_proxy(env, settings.host)
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
    env |= {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    env["KESTREL_WEIGHT_GROUP_S"] = str(settings.weight_group_s)
    if settings.device == "cpu":
        path = [str(CPU_STAND_INS), *filter(None, [env.get("PYTHONPATH")])]
        env |= {
            "PYTHONPATH": os.pathsep.join(path),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(settings.threads),
        }
        if settings.tp > 1:
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(settings.tp))
        if settings.host in ("127.0.0.1", "localhost"):
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def _without_proxy(env: Mapping[str, str], host: str) -> dict[str, str]:
    """The server's first request goes to itself, and must not go through a proxy that the environment names for the internet."""
    named = [env.get(name, "") for name in PROXY_EXCEPTIONS]
    exceptions = ",".join(dict.fromkeys(filter(None, [*",".join(named).split(","), *LOOPBACK, host])))
    return dict.fromkeys(PROXY_EXCEPTIONS, exceptions)


def cause_of_death(log: str) -> str:
    """The line of a server's log that tells why it ended: the end of its first traceback, else its last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        follows = lines[number + 1] if number + 1 < len(lines) else ""
        if ERROR_LINE.match(line) and not CHAINED.match(follows):
            return line.strip()
    return lines[-1].strip() if lines else "it wrote nothing to its log"


def check(settings: EngineSettings) -> None:
    """Raises EngineStartError, before anything is started, if the server cannot start."""
    if not (settings.model / "config.json").is_file():
        raise EngineStartError(f"{settings.model} is no Hugging Face model folder: it holds no config.json", hopeless=True)
    a_socket = Path(tempfile.gettempdir(), f"{SCRATCH_PREFIX}{os.getpid()}-12345678", "tmp12345678")
    if (excess := len(os.fsencode(a_socket)) - zmq.IPC_PATH_MAX_LEN) > 0:
        raise EngineStartError(
            f"TMPDIR={tempfile.gettempdir()} is {excess} bytes too long for the sockets that an engine keeps there", hopeless=True
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: only listeners count
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            raise EngineStartError(f"cannot listen on {where} ({error.strerror}): choose another port") from error


class Engine:
    """One server: `start()`, `await wait_ready()`, `alive()`, `stop()`; it may be started again after its end."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def pid(self) -> int | None:
        """Process id of the guard; also the id of the process group."""
        return self._process.pid if self._process else None

    def client(self) -> EngineClient:
        return EngineClient(self.url, api_key=self.settings.api_key, admin_api_key=self.settings.admin_api_key)

    def start(self) -> None:
        """Starts the server and returns at once. Raises EngineStartError on what is wrong beforehand."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start an engine from the main thread: it dies together with the thread that started it")
        if self.alive():
            raise RuntimeError(f"engine {self.url} already runs as process {self.pid}")
        until = time.monotonic() + (GONE_S if self._process is not None else 0.0)
        self.stop()
        self._check_until(until)
        remove_left_scratch()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-"))
        command = command_line(self.settings, self._write_secrets(self._scratch))
        self.settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.settings.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                guarded(command, group=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.settings, self._scratch) | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    def _check_until(self, until: float) -> None:
        """Repeats `check` for a while: a killed server holds its port until the kernel has removed it."""
        while True:
            try:
                return check(self.settings)
            except EngineStartError:
                if time.monotonic() >= until:
                    raise
                time.sleep(POLL_S)

    def _write_secrets(self, folder: Path) -> Path:
        keys = {"api-key": self.settings.api_key, "admin-api-key": self.settings.admin_api_key}
        path = folder / "secrets.yaml"
        path.touch(mode=0o600)
        path.write_text(json.dumps({name: key for name, key in keys.items() if key}))  # JSON is YAML
        return path

    async def wait_ready(self, deadline_s: float) -> None:
        """Returns once the server has generated a token.

        Raises EngineStartError, and leaves nothing running, if the server dies or is late.
        """
        until = time.monotonic() + deadline_s
        async with self.client() as client:
            while not await client.healthy():
                if not self.alive():
                    self._fail("died while starting")
                if time.monotonic() > until:
                    self._fail(f"did not become ready within {deadline_s:g} s")
                await asyncio.sleep(POLL_S)
        if self._scratch:
            (self._scratch / "secrets.yaml").unlink(missing_ok=True)

    def _fail(self, what: str) -> None:
        hopeless = not self.alive() and HOPELESS.search(self.log_tail()) is not None
        self.stop()
        # Arguments that cannot be read are told last, below a usage of hundreds of lines.
        tail = self.log_tail(lines=3 if "ended with exit code 2" in self.log_tail(lines=1) else 40)
        why = self.cause_of_death()
        raise EngineStartError(
            f"engine {self.url} {what}: {why}; the end of {self.settings.log_file}:\n{tail}", hopeless=hopeless
        )

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that this start wrote to its log."""
        with open(self.settings.log_file, "rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 64 * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def cause_of_death(self) -> str:
        return cause_of_death(self.log_tail(lines=1000))

    def stop(self) -> None:
        """Kills the server's process group at once. On SIGTERM it would first finish its requests; paused, it never could."""
        if self._process is not None:
            kill_group(self._process)
            self._process = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


def remove_left_scratch() -> None:
    """Removes the temporary folders of workers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(SCRATCH_PREFIX)}*-*"):
        worker = folder.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
        if not Path("/proc", worker).exists():
            shutil.rmtree(folder, ignore_errors=True)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills every process in the group that `process` leads, the leader being dead or not, and reaps the leader."""
    with contextlib.suppress(ProcessLookupError):  # all of them are gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
