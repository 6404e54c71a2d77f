"""Checks of the model's folder: it is complete, the layouts divide the model, and the trainer accepts it.

Only the headers of the weight files are read, so a model of any size takes milliseconds. The length of a file shows whether its
download was interrupted.
"""

import json
import struct
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

from conf.shapes import ModelError, ModelShape, layout_faults, layout_of, read_shape, tensor_parallel_faults
from launch.doctor.case import Case
from launch.doctor.finding import Check, Finding, failure, ok, skipped, worst

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
LONGEST_HEADER = 100 * 1024**2  # the limit of the safetensors format
ACCEPT_S = 300.0
DOWNLOAD = "download it again: hf download … --local-dir FOLDER"


class BrokenFolder(ValueError):
    """A file of the model is damaged. The message says how."""


def model_folder(case: Case) -> Finding:
    """Configuration, tokenizer, end token and every shard are there, and every shard has its full length."""
    folder = Path(case.config.model.path)
    if case.made_later(case.config.model.path):
        return skipped(f"{folder} is made at the launch (model.prepare={case.config.model.prepare})")
    if not folder.is_dir():
        return failure(
            f"model.path={case.config.model.path}: no such folder",
            "give a Hugging Face folder (config.json, *.safetensors, tokenizer), or choose model=debug, which makes its own",
        )
    if not (folder / CONFIG).is_file() or not list(folder.glob("*.safetensors")):
        return failure(f"model.path={folder}: holds no config.json, or no *.safetensors", "give a complete Hugging Face folder")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return failure(f"model.path={folder}: holds no tokenizer.json", "copy the tokenizer's files into it")
    if not _names_end_token(folder):
        return failure(
            f"model.path={folder}: generation_config.json and config.json have no eos_token_id, so completions would not end",
            "add the id of the token that ends an answer to generation_config.json",
        )
    try:
        tensors, shards = read_tensors(folder)
    except BrokenFolder as error:
        return failure(str(error), DOWNLOAD)
    size = sum((folder / shard).stat().st_size for shard in shards)
    return ok(f"{folder}: {len(tensors)} tensors in {len(shards)} file(s), {size / 1e9:.2f} GB")


def _names_end_token(folder: Path) -> bool:
    """Whether the folder names an end token, by the rule of rollout/worker/worker.py. Another check reports invalid JSON."""
    for name in ("generation_config.json", CONFIG):
        try:
            if json.loads((folder / name).read_text()).get("eos_token_id") is not None:
                return True
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            return True
    return False


def read_tensors(folder: Path) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The shape of every tensor by its name, and the files that hold them. Raises BrokenFolder."""
    index = folder / INDEX
    if not index.is_file():
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        return {name: shape for shard in shards for name, shape in read_header(folder / shard).items()}, shards
    try:
        shard_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise BrokenFolder(f"{index} is broken: {error}") from error
    shards = sorted(set(shard_of.values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise BrokenFolder(f"{folder}: {len(missing)} of {len(shards)} shards are missing, {missing[0]} first")
    headers = {shard: read_header(folder / shard) for shard in shards}
    if absent := [name for name, shard in shard_of.items() if name not in headers[shard]]:
        raise BrokenFolder(f"{folder / shard_of[absent[0]]} does not hold {absent[0]}, which {INDEX} says is there")
    return {name: headers[shard][name] for name, shard in shard_of.items()}, shards


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a safetensors file: 8 bytes give the length of a JSON header, then come the tensors. Raises BrokenFolder."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(LONGEST_HEADER, size - 8):
            raise BrokenFolder(f"{path} is no complete safetensors file: {size} bytes, with a header of {length}")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BrokenFolder(f"{path}: its header is broken: {error}") from error
    header.pop("__metadata__", None)
    needed = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != needed:
        raise BrokenFolder(f"{path} has {size} bytes, and should have {needed} by its header")
    return {name: tuple(tensor["shape"]) for name, tensor in header.items()}


def layout(case: Case) -> Finding:
    """The layouts of trainer and engines divide the model, and the model has enough positions."""
    folder = Path(case.config.model.path)
    if not (folder / CONFIG).is_file():
        return skipped("the model's shape is not known")
    try:
        return check_layout(case, read_shape(folder))
    except ModelError as error:
        return failure(str(error), "give the folder of a supported model, or download it again")


def check_layout(case: Case, shape: ModelShape) -> Finding:
    trainer, rollout = case.config.trainer, case.config.rollout
    of_trainer = layout_faults(shape, layout_of(trainer))
    of_engines = tensor_parallel_faults(shape, "rollout.engine_tp", rollout.engine_tp)
    faults = [failure(fault.said, fault.remedy) for fault in chain(of_trainer, of_engines)]
    longest = case.config.data.max_prompt_tokens + rollout.max_completion_tokens
    if longest > shape.max_positions:
        faults.append(
            failure(
                f"data.max_prompt_tokens + rollout.max_completion_tokens = {longest}, but {shape.name} has only "
                f"{shape.max_positions} positions (max_position_embeddings)",
                "lower one of them",
            )
        )
    return worst(faults, ok(f"TP{trainer.tp} PP{trainer.pp} DP{trainer.dp}, engines TP{rollout.engine_tp}"))


def trainer_accepts(case: Case) -> Finding:
    """The trainer, in its own environment, knows the model and finds every tensor."""
    if case.config.cluster.container:
        return skipped("the trainer's Python is in a container, and this check runs outside of it")
    if not Path(case.config.model.path).is_dir():
        return skipped("there is no model folder")
    python = next((python for python, roles in case.roles_of.items() if "trainer" in roles), None)
    if python is None:
        return skipped("no trainer is placed")
    trainer = case.config.trainer
    sizes = [f"--{size}={getattr(trainer, size)}" for size in ("tp", "pp", "cp", "vpp")]
    command = [python, "-m", "trainer.preview.accepts", case.config.model.path, *sizes]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ACCEPT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return failure(f"`{' '.join(command[:3])}` cannot be run: {error}", "mend the trainer's Python environment")
    if answer.returncode:
        said = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        return failure(said, "choose a model of a known family, or mend the trainer's Python environment")
    return ok(answer.stdout.strip())


CHECKS = (
    Check(name="model folder", run=model_folder),
    Check(name="layout", run=layout),
    Check(name="trainer accepts", run=trainer_accepts, fast=False),
)
