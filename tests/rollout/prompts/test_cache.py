"""A run's prompts are rendered once; a server that starts again reads the copy, and never one of something else."""

import json

import numpy as np
import pytest

from conf.schema import DataConfig, ModelConfig, RunConfig
from rollout.prompts.decoder import decoder
from rollout.prompts.render import load_tokenizer
from rollout.queue import __main__ as module
from rollout.queue.__main__ import read_prompts
from tests.rollout.stage import write_model


@pytest.fixture
def config(tmp_path):
    write_problems(tmp_path, 5)
    data = DataConfig(train=[str(tmp_path / "problems.jsonl")], heldout=[str(tmp_path / "problems.jsonl")], max_prompt_tokens=8)
    return RunConfig(model=ModelConfig(path=str(write_model(tmp_path / "model"))), data=data)


def write_problems(folder, count):
    task = {"kind": "calls", "entry_point": "f", "tests": [{"args": [1], "expected": 1.5}]}
    lines = [{"id": f"p{i}", "prompt": f"t{i} t{i + 1}", "raw": True, "prefill": " t3", "task": task} for i in range(count)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def renderings(monkeypatch):
    """How often problems were read."""
    calls = []
    true = module.run_problems
    monkeypatch.setattr(module, "run_problems", lambda *given: calls.append(given) or true(*given))
    return calls


def same(a, b):
    return repr(a) == repr(b)


def test_second_start_reads_the_copy(config, tmp_path, renderings):
    first = read_prompts(config, tmp_path)
    count = len(renderings)
    second = read_prompts(config, tmp_path)
    assert same(first, second) and len(renderings) == count and len(second.train[0]) == 5


def test_other_problems_other_limit_and_another_tokenizer_are_rendered(config, tmp_path, renderings):
    read_prompts(config, tmp_path)
    write_problems(tmp_path, 6)
    assert len(read_prompts(config, tmp_path).train[0]) == 6
    config.data.max_prompt_tokens = 2
    assert len(read_prompts(config, tmp_path).train[0]) == 0
    count = len(renderings)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    read_prompts(config, tmp_path)
    assert len(renderings) > count


def test_damaged_copy_is_made_again(config, tmp_path, renderings):
    first = read_prompts(config, tmp_path)
    (file,) = (tmp_path / "prompts").glob("*.msgpack")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    count = len(renderings)
    assert same(read_prompts(config, tmp_path), first) and len(renderings) > count
    assert same(read_prompts(config, tmp_path), first) and len(renderings) == count + 1


def test_text_is_what_transformers_makes_of_tokens_also_from_the_copy(config, tmp_path):
    tokens = np.array([3, 0, 4, 511], np.int32)
    tokenizer = load_tokenizer(config.model.path)
    expected = tokenizer.decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert [decoder(config.model.path, tmp_path / "prompts")(tokens) for _ in range(2)] == [expected, expected]
    assert expected == "t3 t4 t511" and len(list((tmp_path / "prompts").iterdir())) == 1
