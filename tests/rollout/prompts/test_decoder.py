"""A completion is decoded as it stands behind its prompt: what was encoded there comes back, its first blanks too."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rollout.prompts.decoder import Decode, decoder

CORPUS = ["def f(x):\n    return x\n", "for i in range(10):\n        print(i)\n", "Write add", "if a != b:\n"] * 50
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PREFILL = "f("  # no token of these tokenizers reaches over its end


def metaspace() -> Tokenizer:
    """As Llama 2's and Mistral's: a text's first blank is put before it and taken away again."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *BYTES]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    return made


def byte_level() -> Tokenizer:
    """As GPT-2's, Qwen's and Llama 3's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return made


@pytest.fixture(scope="module", params=[metaspace, byte_level], ids=["metaspace", "byte level"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Decode]:
    make: Callable[[], Tokenizer] = request.param
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = make()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return tokenizer, decoder(str(folder), folder / "copy")


def behind_the_prefill(tokenizer: Tokenizer, text: str) -> np.ndarray:
    whole, prefix = (tokenizer.encode(t, add_special_tokens=False).ids for t in (PREFILL + text, PREFILL))
    assert whole[: len(prefix)] == prefix
    return np.array(whole[len(prefix) :], np.int32)


@pytest.mark.parametrize("text", ["    return x\n", " return", "return x", "", "   ", "\n\n  print(i)"])
def test_first_blanks_of_a_completion_come_back(pair: tuple[Tokenizer, Decode], text: str) -> None:
    tokenizer, decode = pair
    assert decode(behind_the_prefill(tokenizer, text)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), max_size=30))
def test_any_tokens_are_text(pair: tuple[Tokenizer, Decode], tokens: list[int]) -> None:
    _, decode = pair
    assert isinstance(decode(np.array(tokens, np.int32)), str)
