"""What is checked before anything starts: the run's folder, the model's shape, the problems, the ports.

Reads files and tries ports; imports nothing heavy. Each failure is a ConfigError that says what to change.
"""

import errno
import fcntl
import importlib.util
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.schema import ConfigError, RunConfig
from reward.task import TaskError, parse_task
from rollout.prompts import ProblemError, read_problems

REMOTE_DATA = "hf://"
LOCK_FILE = ".lock"


def check_model(config: RunConfig) -> None:
    """The model's folder is complete, and the layouts divide it. Raises ConfigError."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path={config.model.path}: no such folder: give a Hugging Face folder (config.json, *.safetensors, "
            "tokenizer), or model=debug, which makes its own"
        )
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path={config.model.path}: holds no config.json, or no *.safetensors")
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(f"model.path={config.model.path}: holds no tokenizer.json")
    try:
        shape = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / 'config.json'} is broken: {error}") from error
    check_shape(config, shape)


def check_shape(config: RunConfig, shape: dict[str, Any]) -> None:
    """`shape` is the model's config.json."""
    trainer, rollout = config.trainer, config.rollout
    heads = shape.get("num_attention_heads", 0)
    kv_heads = shape.get("num_key_value_heads", heads)
    for key, degree, what, amount in (
        ("trainer.tp", trainer.tp, "attention heads", heads),
        ("trainer.tp", trainer.tp, "key-value heads", kv_heads),
        ("trainer.tp", trainer.tp, "feed-forward columns", shape.get("intermediate_size", 0)),
        ("trainer.pp", trainer.pp, "layers", shape.get("num_hidden_layers", 0)),
        ("rollout.engine_tp", rollout.engine_tp, "attention heads", heads),
    ):
        if amount % degree:
            raise ConfigError(f"{key}={degree} does not divide the {amount} {what} of {config.model.path}")
    longest = config.data.max_prompt_tokens + rollout.max_completion_tokens
    positions = shape.get("max_position_embeddings")
    if positions and longest > positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_completion_tokens = {longest}, but {config.model.path} has only "
            f"{positions} positions (max_position_embeddings)"
        )


def check_data(config: RunConfig) -> None:
    """Every line of every file is a problem that can be asked and graded. Raises ConfigError with file and line."""
    for key, sources in (("data.train", config.data.train), ("data.heldout", config.data.heldout)):
        if local := [source for source in sources if not source.startswith(REMOTE_DATA)]:
            _check_problems(key, local)


def _check_problems(key: str, sources: list[str]) -> None:
    try:
        problems = read_problems(sources)
    except ProblemError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not problems:
        raise ConfigError(f"{key}: no problems in {', '.join(sources)}")
    for problem in problems:
        try:
            parse_task(problem.task)
        except TaskError as error:
            raise ConfigError(f"{key}: problem {problem.id!r} cannot be graded: {error}") from error


def check_extras(config: RunConfig) -> None:
    """Optional packages that the configuration asks for are there. Raises ConfigError."""
    if config.trainer.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"trainer.wandb_project={config.trainer.wandb_project}: needs Weights & Biases: pip install wandb")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the port now; what is only closing does not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def check_run_dir(run_dir: Path, *, resumed: bool) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a folder: choose another name or output")
    if not resumed and run_dir.is_dir() and any(entry.name != LOCK_FILE for entry in run_dir.iterdir()):
        raise ConfigError(f"{run_dir} holds a run already: go on with it by resume={run_dir}, or choose another name")


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Holds the run's folder: two launchers on one run would tear it apart. Raises ConfigError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{run_dir} is being run by another launcher: end that one first") from error
        yield
