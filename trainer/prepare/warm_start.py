"""Makes the model of the debug run: a tokenizer, and a Qwen2 model of 1.1M parameters that is trained on demonstrations.

    python -m trainer.prepare.warm_start --data DIR --out MODEL_DIR [--seed 0] [--threads 2]

It reads `DIR/demonstrations.jsonl` (see `reward/generated/`) and writes a Hugging Face folder that transformers, SGLang and our
Megatron loader can read: config.json, model.safetensors (fp32, untied), tokenizer files with a chat template, and
generation_config.json. The folder appears only when it is complete, so if it exists, this script has succeeded.

The chat template copies a message unchanged and starts the answer with one special token, so a prompt needs few tokens. The model
learns to continue directly after the prefill. The loss covers only the answer and the end token.
"""

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

PAD, EOS, ANSWER = "<pad>", "<eos>", "<answer>"
VOCABULARY_TOKENS = 512
CONTEXT_TOKENS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<answer>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<answer>' }}{% endif %}"
)

BATCH_EXAMPLES = 16
BUCKET_BATCHES = 40
LEARNING_RATE = 3e-3
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.01
GRADIENT_CLIP = 1.0
PROGRESS_EVERY_S = 10.0
MEAN_STEPS = 100  # the printed loss is the mean over this number of last steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    prompt: str
    prefill: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    tokens: list[int]
    answer_start: int


def read_demonstrations(path: Path) -> list[Demonstration]:
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; make it with: python -m reward.generated.code_problems --out {path.parent}")
    demonstrations = []
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                demonstrations.append(Demonstration(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise SystemExit(f"{path}:{number}: not a demonstration (prompt, prefill, answer): {error}") from error
    if not demonstrations:
        raise SystemExit(f"{path} is empty; make it with: python -m reward.generated.code_problems --out {path.parent}")
    return demonstrations


def train_tokenizer(demonstrations: list[Demonstration]) -> Qwen2Tokenizer:
    """Trains a byte-level BPE tokenizer with Qwen2's rules for splitting text, because transformers uses these rules for
    every qwen2 folder, whatever its files say. Each digit is a token of its own, which suits small arithmetic."""
    blank = Qwen2Tokenizer(
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        additional_special_tokens=[ANSWER],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    texts = (text for d in demonstrations for text in (d.prompt, d.prefill + d.answer))
    return blank.train_new_from_iterator(texts, VOCABULARY_TOKENS, show_progress=False)


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Every dimension is divisible by two, so that tensor and pipeline parallelism can split the model."""
    config = Qwen2Config(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.06,  # the usual 0.02 suits wider models; this small model learns far more slowly with it
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def encode(tokenizer: Qwen2Tokenizer, demonstrations: list[Demonstration]) -> list[Example]:
    """Encodes each prompt as a run does: rendered by the chat template, followed by the prefill."""
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": d.prompt}], tokenize=False, add_generation_prompt=True)
        + d.prefill
        for d in demonstrations
    ]
    prompts = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    answers = tokenizer([d.answer for d in demonstrations], add_special_tokens=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [
        Example(tokens=[*prompt, *answer, eos], answer_start=len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)
    ]


def batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """One pass over the file, in buckets of some batches. A bucket is sorted by length, so that examples of a batch have
    similar lengths and little padding."""
    size = BATCH_EXAMPLES * BUCKET_BATCHES
    for start in range(0, len(examples), size):
        bucket = sorted(examples[start : start + size], key=lambda example: len(example.tokens))
        cuts = list(range(0, len(bucket), BATCH_EXAMPLES))
        rng.shuffle(cuts)
        yield from (bucket[cut : cut + BATCH_EXAMPLES] for cut in cuts)


def answer_loss(model: Qwen2ForCausalLM, batch: list[Example], pad: int) -> torch.Tensor:
    """The mean cross entropy over the tokens of the answers. Padding is on the right, where a causal model needs no mask."""
    length = max(len(example.tokens) for example in batch)
    tokens = torch.tensor([example.tokens + [pad] * (length - len(example.tokens)) for example in batch])
    labels = torch.full_like(tokens, -100)
    for row, example in enumerate(batch):
        labels[row, example.answer_start : len(example.tokens)] = tokens[row, example.answer_start : len(example.tokens)]
    logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: Qwen2ForCausalLM, examples: list[Example], *, pad: int, seed: int) -> float:
    """Trains for one pass. Returns the mean loss over the last steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)
    steps = math.ceil(len(examples) / BATCH_EXAMPLES)
    begun = said_s = time.monotonic()
    losses, tokens, mean_loss = [], 0, math.nan
    model.train()
    for step, batch in enumerate(batches(examples, random.Random(seed))):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = answer_loss(model, batch, pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += sum(len(example.tokens) for example in batch)
        if time.monotonic() - said_s > PROGRESS_EVERY_S or step + 1 == steps:
            said_s = time.monotonic()
            recent, elapsed_s = losses[-MEAN_STEPS:], time.monotonic() - begun
            mean_loss = sum(recent) / len(recent)
            left_s = elapsed_s / (step + 1) * (steps - step - 1)
            print(
                f"warm start: step {step + 1:>5}/{steps}  loss {mean_loss:.3f}  {tokens / elapsed_s:,.0f} tokens/s  "
                f"{elapsed_s:.0f} s, about {left_s:.0f} s left",
                flush=True,
            )
    return mean_loss


def save(folder: Path, model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare.warm_start", description="Trains the debug run's model.")
    parser.add_argument("--data", type=Path, required=True, help="the folder with demonstrations.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the new model folder; it must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} exists; remove it or name another --out")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    demonstrations = read_demonstrations(arguments.data / "demonstrations.jsonl")
    tokenizer = train_tokenizer(demonstrations)
    examples = encode(tokenizer, demonstrations)
    model = make_model(tokenizer)
    train(model, examples, pad=tokenizer.pad_token_id, seed=arguments.seed)
    save(arguments.out, model, tokenizer)
    print(f"{arguments.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
