"""What a run's folder, `outputs/NAME`, holds: the name of each file and folder, for those who write it and those who read it.

`conf/user_code.py` alone reads and writes `user_code/`, the copies of the user's files that settings name.
"""

CONFIG = "config.yaml"  # every setting of the run
KEYS = "keys"  # the keys of the queue server and its clients
MODEL_DESCRIPTION = "model_description"  # the model folder without its weights
PROMPTS = "prompts"  # the rendered prompts and the tokenizer
LEDGER = "ledger.db"
LOGS = "logs"  # one file per process
CHECKPOINTS = "checkpoints"  # one folder per version
HF = "hf"  # the last weights, in the format of Hugging Face
METRICS = "metrics.jsonl"  # one line per step
TENSORBOARD = "tensorboard"
SUMMARY = "summary.json"  # what became of all tokens
RECOVERIES = "recoveries.jsonl"  # each interruption of training, and how long it took
TRAINER_FAILURE = "trainer_failure.txt"  # why the first trainer rank failed
REPORT = "report.html"
TRACE = "trace.json"  # the timeline, for ui.perfetto.dev
