import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from conf.schema import ConfigError, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from launch.preflight import check_data, check_model, check_run_dir, check_shape, held, port_is_free

SHAPE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
TASK = {"kind": "calls", "entry_point": "f", "tests": [{"args": [1], "expected": 2}]}
PROBLEM: dict[str, Any] = {"id": "a", "prompt": "Add.", "task": TASK}


def config(tmp_path: Path, *, tp: int = 1, pp: int = 1, engine_tp: int = 1, prompt: int = 128) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(train=[str(tmp_path / "train.jsonl")], max_prompt_tokens=prompt),
        rollout=RolloutConfig(engine_tp=engine_tp, max_completion_tokens=96),
        trainer=TrainerConfig(tp=tp, pp=pp),
    )


def write_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()


def test_layout_that_divides_the_model_passes(tmp_path: Path) -> None:
    write_model(tmp_path)
    check_model(config(tmp_path, tp=4, pp=4, engine_tp=8))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "trainer.tp=3 does not divide the 8 attention heads"),
        ({"tp": 8}, "trainer.tp=8 does not divide the 4 key-value heads"),
        ({"pp": 3}, "trainer.pp=3 does not divide the 4 layers"),
        ({"engine_tp": 3}, "rollout.engine_tp=3 does not divide the 8 attention heads"),
        ({"prompt": 500}, "max_position_embeddings"),
    ],
)
def test_layout_that_does_not_divide_the_model_is_refused(tmp_path: Path, layout: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_shape(config(tmp_path, **layout), SHAPE)


def test_model_folder_must_exist_and_be_complete(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check_model(config(tmp_path))
    write_model(tmp_path)
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (tmp_path / "model" / name).unlink()
        with pytest.raises(ConfigError, match="holds no"):
            check_model(config(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b", ', "train.jsonl:2: broken JSON"),
        ("[1]", "train.jsonl:2: a problem is a JSON object"),
        (json.dumps({**PROBLEM, "id": ""}), "train.jsonl:2: `id` must be a string"),
        (json.dumps({**PROBLEM, "id": 7}), "train.jsonl:2: `id` must be a string"),
        (json.dumps(PROBLEM), "train.jsonl:2: id 'a' was used before"),
        (json.dumps({**PROBLEM, "prompt": ""}), "train.jsonl:2: `prompt` must be a string that is not empty"),
        (json.dumps({**PROBLEM, "task": {**TASK, "tests": []}}), "train.jsonl:2: `task.tests` must be a list of at least one"),
        (json.dumps({**PROBLEM, "task": {"tests": [1]}}), "train.jsonl:2: `task` must be an object with a `kind`"),
        (
            json.dumps({**PROBLEM, "id": "b", "task": {**TASK, "kind": "magic"}}),
            "problem 'b' cannot be graded: task.kind: 'magic'",
        ),
    ],
)
def test_bad_problem_is_refused_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(PROBLEM)}\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_data(config(tmp_path))


def test_good_problems_pass_and_remote_ones_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(PROBLEM) + "\n\n")
    wanted = config(tmp_path)
    wanted.data.heldout = ["hf://problems?split=test"]
    check_data(wanted)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.train: cannot read .*train.jsonl: No such file"):
        check_data(config(tmp_path))
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(ConfigError, match="no problems in"):
        check_data(config(tmp_path))


def test_port_that_another_process_listens_on_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)


def test_folder_of_another_run_is_refused_unless_resumed(tmp_path: Path) -> None:
    check_run_dir(tmp_path, resumed=False)
    (tmp_path / "config.yaml").touch()
    check_run_dir(tmp_path, resumed=True)
    with pytest.raises(ConfigError, match=f"resume={tmp_path}"):
        check_run_dir(tmp_path, resumed=False)


def test_second_launcher_on_one_folder_is_refused(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(ConfigError, match="another launcher"), held(tmp_path):
        pass
    with held(tmp_path):
        pass
