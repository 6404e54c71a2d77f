"""Supervised fine-tuning on chats, with the trainer's layouts, checkpoints and saved model.

    python -m trainer.sft model=folder model.path=FOLDER data=files data.train=[chats.jsonl] [sft.epochs=3 trainer.tp=2 …]
    python -m trainer.sft resume=outputs/NAME

It takes the settings of a run (docs/settings.md); those of rollout, reward and algo have no effect. It starts all ranks of the
layout on this machine. The fine-tuned model is outputs/NAME/hf: begin a run from it with model=folder model.path=outputs/NAME/hf.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conf.compose.fit import fit
from conf.compose.load import composed, read_resumed, read_run, to_run_config, write_run
from conf.compose.model_description import description_of, keep_description
from conf.compose.run_folder import CONFIG
from conf.schema import AlgoConfig, ConfigError, RunConfig
from conf.shapes import check_layout, layout_of, read_shape
from rollout.ledger.records import Trajectory
from rollout.prompts.problems import ProblemError
from rollout.prompts.render import load_tokenizer
from rollout.worker.worker import CannotStart, stop_token_ids
from trainer.learn.balance import Capacity, PackingError
from trainer.learn.health import TrainingError
from trainer.ranks import FirstFailure, LeaderFailed
from trainer.sft import examples
from trainer.sft.run import Finetuning, total_steps

RUN = "--run"  # how a rank is told the run's folder
EXPECTED = (ConfigError, PackingError, ProblemError, CannotStart, TimeoutError, TrainingError)


def begin(words: Sequence[str]) -> Path:
    """Checks everything that can be checked, and makes the run's folder. Raises ConfigError."""
    resumed = [word.partition("=")[2] for word in words if word.startswith("resume=")]
    if resumed:
        config = read_resumed(Path(resumed[0]), [word for word in words if not word.startswith("resume=")])
    else:
        named = any(word.startswith("name=") for word in words)
        config = to_run_config(composed(words if named else [*words, f"name=sft-{time.strftime('%Y%m%d-%H%M%S')}"]))
    run_dir = Path(config.output) / config.name
    if not resumed and (run_dir / CONFIG).exists():
        raise ConfigError(f"{run_dir} holds a run already: choose another name=…, or go on with resume={run_dir}")
    if config.data.heldout_fraction:
        raise ConfigError("data.heldout_fraction: fine-tuning takes held-out examples from a file: name it in data.heldout")
    check_layout(read_shape(config.model.path), layout_of(config.trainer))
    train, _ = read(config, run_dir)
    config.trainer.steps = total_steps(config, len(train))
    # What a run with rewards would need beside the model, or would do with the log-probs.
    config.algo, config.rollout = AlgoConfig(minibatches=1), replace(config.rollout, temperature=1.0)
    fit(config)
    write_run(config, run_dir)
    keep_description(config, run_dir)
    print(f"{run_dir}: {len(train)} examples, {config.sft.epochs} epochs, {config.trainer.steps} steps", flush=True)
    return run_dir


def read(config: RunConfig, run_dir: Path) -> tuple[list[Trajectory], list[Trajectory]]:
    """The examples to learn from, and the held-out ones. Raises ConfigError."""
    model = description_of(config, run_dir)
    tokenizer, ends = load_tokenizer(str(model)), stop_token_ids(model)
    longest = Capacity.of(layout_of(config.trainer), config.trainer.tokens_per_microbatch).tokens
    longest = min(longest, read_shape(model).max_positions)
    files = (config.data.train, config.data.heldout)
    train, heldout = (examples.read(of_split, tokenizer, ends, longest=longest) for of_split in files)
    if not train:
        raise ConfigError(f"data.train={config.data.train} holds no example")
    return train, heldout


def start_ranks(run_dir: Path) -> None:
    """Replaces this process by torchrun, which starts all ranks."""
    trainer = read_run(run_dir).trainer
    ranks = layout_of(trainer).ranks_per_replica * trainer.dp
    torchrun = [sys.executable, "-m", "rollout.patched.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning")
    os.execv(sys.executable, [*torchrun, "--no-python", "--", sys.executable, "-m", "trainer.sft", RUN, str(run_dir)])


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0 if words else 2
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("trainer").setLevel(logging.INFO)
    try:
        if words[0] != RUN:
            start_ranks(begin(words))
        run_dir = Path(words[1])
        with FirstFailure(run_dir, expected=EXPECTED):
            config = read_run(run_dir)
            Finetuning(config, run_dir, *read(config, run_dir)).run()
    except LeaderFailed:  # rank 0 prints the reason
        return 1
    except EXPECTED as error:
        print(f"sft: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
