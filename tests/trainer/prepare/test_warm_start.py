"""A very short warm start on few demonstrations: what is saved is what others load."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from reward.generated import files
from reward.generated.code_problems import draw_demonstrations, draw_problems
from trainer.prepare.warm_start import (
    BATCH_EXAMPLES,
    VOCABULARY_TOKENS,
    Demonstration,
    answer_loss,
    batches,
    encode,
    main,
    make_model,
    read_demonstrations,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    counts = {"train": 100, "heldout": 8, "demonstrations": 480}
    files.generate(folder, seed=0, **counts, draw_problems=draw_problems, draw_demonstrations=draw_demonstrations)
    return folder


@pytest.fixture(scope="module")
def demonstrations(data: Path) -> list[Demonstration]:
    return read_demonstrations(data / "demonstrations.jsonl")


@pytest.fixture(scope="module")
def tokenizer(demonstrations: list[Demonstration]) -> Qwen2Tokenizer:
    return train_tokenizer(demonstrations)


@pytest.fixture(scope="module")
def saved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    command = [sys.executable, "-m", "trainer.prepare.warm_start", "--data", str(data), "--out", str(folder), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "step    30/30" in done.stdout and "1,116,288 parameters" in done.stdout
    return folder


def test_the_folder_loads_as_a_qwen2_model_that_two_by_two_ranks_can_share(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    config = model.config
    assert config.model_type == "qwen2" and not config.tie_word_embeddings
    for size in (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size):
        assert size % 2 == 0
    assert config.num_attention_heads % 2 == 0 and config.num_key_value_heads % 2 == 0
    assert config.eos_token_id == model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(saved).eos_token_id


def test_the_saved_tokenizer_cuts_text_as_the_trained_one_did(
    saved: Path, tokenizer: Qwen2Tokenizer, demonstrations: list[Demonstration]
) -> None:
    """transformers rebuilds a qwen2 folder's tokenizer by its own rules; a vocabulary made by others would fall apart."""
    loaded = AutoTokenizer.from_pretrained(saved)
    assert len(loaded) == VOCABULARY_TOKENS
    for demonstration in demonstrations[:100]:
        text = demonstration.prefill + demonstration.answer
        tokens = loaded(text, add_special_tokens=False)["input_ids"]
        assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert loaded.decode(tokens) == text


def test_a_prompt_is_its_sentence_one_special_token_and_the_prefill(tokenizer: Qwen2Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Sum."}], tokenize=False, add_generation_prompt=True)
    assert text == "Sum.<answer>"
    [example] = encode(tokenizer, [Demonstration(prompt="Sum.", prefill="def f(xs):\n", answer="    return sum(xs)")])
    whole = tokenizer("Sum.<answer>def f(xs):\n    return sum(xs)<eos>", add_special_tokens=False)["input_ids"]
    assert example.tokens == whole
    assert tokenizer.decode(example.tokens[example.answer_start :]) == "    return sum(xs)<eos>"


def test_the_loss_sees_the_answer_only_and_no_padding(tokenizer: Qwen2Tokenizer, demonstrations: list[Demonstration]) -> None:
    torch.manual_seed(0)
    model = make_model(tokenizer)
    examples = encode(tokenizer, demonstrations[:6])
    with torch.no_grad():
        together = answer_loss(model, examples, tokenizer.pad_token_id)
        alone = [
            (answer_loss(model, [example], tokenizer.pad_token_id), len(example.tokens) - example.answer_start)
            for example in examples
        ]
    tokens = sum(count for _, count in alone)
    torch.testing.assert_close(together, sum(loss * count for loss, count in alone) / tokens, rtol=1e-5, atol=1e-5)


def test_one_pass_takes_every_example_once_and_clean_ones_first(
    tokenizer: Qwen2Tokenizer, demonstrations: list[Demonstration]
) -> None:
    examples = encode(tokenizer, demonstrations)
    taken = list(batches(examples * 4, random.Random(0)))
    assert sorted(id(e) for batch in taken for e in batch) == sorted(id(e) for e in examples * 4)
    assert all(len(batch) == BATCH_EXAMPLES for batch in taken)
    spread = [max(len(e.tokens) for e in batch) - min(len(e.tokens) for e in batch) for batch in taken]
    assert sorted(spread)[len(spread) // 2] <= 2


def test_a_missing_or_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"demonstrations\.jsonl does not exist; make it with: python -m reward\.generated\.code"
    ):
        read_demonstrations(tmp_path / "demonstrations.jsonl")
    (tmp_path / "demonstrations.jsonl").write_text(
        json.dumps({"prompt": "a", "prefill": "b", "answer": "c"}) + "\n" + json.dumps({"prompt": "a"}) + "\n"
    )
    with pytest.raises(SystemExit, match=r"demonstrations\.jsonl:2: not a demonstration"):
        read_demonstrations(tmp_path / "demonstrations.jsonl")


def test_an_existing_folder_is_not_overwritten(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["warm_start", "--data", str(data), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"{tmp_path} exists; remove it or name another --out"):
        main()
