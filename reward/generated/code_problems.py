"""Generated Python problems for the debug run: small functions over ints, lists and strings, each with unit tests.

    python -m reward.generated.code_problems --out DIR [--seed 0]

writes `train.jsonl` (4,000 problems), `heldout.jsonl` (256) and `demonstrations.jsonl` (22,400 answers to train problems).
A problem is drawn as a `Spec`: a family and its steps. Sentence, code, tests and id follow from it. The hash of a specification
decides which file it goes to, so train and held-out problems are disjoint for every seed.

The user message is one sentence, the prefill is the signature with its newline, and a completion is the indented body that
follows, so that `prefill + completion` is the whole program:

    prompt       Keep even, add 3, sum.
    prefill      def f(xs):\\n
    completion       return sum([x + 3 for x in xs if x % 2 == 0])<eos>

The demonstrations are in the order of training: clean ones first, because they teach the language quickly, then noisy ones. A
model trained on them in one pass solves most problems when it decodes greedily and about a third when it samples, so
reinforcement learning has room to improve it. A noisy answer may solve a mutated specification (another constant, another
operation, a dropped step), and it may ramble first, sometimes beyond the length cap. Some prompts ask for an explanation, and
their answers have comments, so that lengths vary.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from reward.generated.files import CLEAN_SHARE, HELDOUT_ONE_IN, command

ENTRY_POINT = "f"
EXPLAIN_SUFFIX = ", and explain"
EXPLAIN_SHARE = 0.16
BUG_SHARE = 0.5
RAMBLE_SHARE = 0.12
STEPWISE_SHARE = 0.5

SMALL = tuple(range(2, 10))
LETTERS = tuple("abcdest")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemRule:
    """One operation in words and in code. In `code`, {v} is the operand, {t} the operand in parentheses if it needs them, and
    {k} the constant. `loose`: the code itself needs parentheses when it becomes an operand."""

    say: str
    code: str
    constants: tuple[int | str, ...] = ()
    loose: bool = False


CONDITIONS = {
    "even": ProblemRule(say="even", code="{t} % 2 == 0"),
    "odd": ProblemRule(say="odd", code="{t} % 2 == 1"),
    "positive": ProblemRule(say="positive", code="{t} > 0"),
    "negative": ProblemRule(say="negative", code="{t} < 0"),
    "above": ProblemRule(say="above {k}", code="{t} > {k}", constants=SMALL),
    "below": ProblemRule(say="below {k}", code="{t} < {k}", constants=SMALL),
    "divisible": ProblemRule(say="divisible by {k}", code="{t} % {k} == 0", constants=SMALL[1:]),
}

INT_STEPS = {
    "add": ProblemRule(say="add {k}", code="{t} + {k}", constants=SMALL, loose=True),
    "subtract": ProblemRule(say="subtract {k}", code="{t} - {k}", constants=SMALL, loose=True),
    "multiply": ProblemRule(say="multiply by {k}", code="{t} * {k}", constants=SMALL, loose=True),
    "divide": ProblemRule(say="divide by {k}", code="{t} // {k}", constants=SMALL, loose=True),
    "remainder": ProblemRule(say="remainder by {k}", code="{t} % {k}", constants=SMALL, loose=True),
    "square": ProblemRule(say="square", code="{t} ** 2", loose=True),
    "negate": ProblemRule(say="negate", code="-{t}", loose=True),
    "absolute": ProblemRule(say="absolute value", code="abs({v})"),
    "at_least": ProblemRule(say="at least {k}", code="max({v}, {k})", constants=SMALL),
    "at_most": ProblemRule(say="at most {k}", code="min({v}, {k})", constants=SMALL),
}

REDUCTIONS = {
    "sum": ProblemRule(say="sum", code="sum({v})"),
    "count": ProblemRule(say="count", code="len({v})"),
    "largest": ProblemRule(say="largest or 0", code="max({v}, default=0)"),
    "smallest": ProblemRule(say="smallest or 0", code="min({v}, default=0)"),
    "sort": ProblemRule(say="sort", code="sorted({v})"),
    "reverse_list": ProblemRule(say="reverse", code="{v}[::-1]"),
}

STRING_STEPS = {
    "upper": ProblemRule(say="upper case", code="{t}.upper()"),
    "lower": ProblemRule(say="lower case", code="{t}.lower()"),
    "reverse": ProblemRule(say="reverse", code="{t}[::-1]"),
    "first": ProblemRule(say="first {k} letters", code="{t}[:{k}]", constants=SMALL),
    "last": ProblemRule(say="last {k} letters", code="{t}[-{k}:]", constants=SMALL),
    "drop_first": ProblemRule(say="drop first {k} letters", code="{t}[{k}:]", constants=SMALL),
    "drop_last": ProblemRule(say="drop last {k} letters", code="{t}[:-{k}]", constants=SMALL),
    "repeat": ProblemRule(say="repeat {k} times", code="{t} * {k}", constants=SMALL[:4], loose=True),
    "append": ProblemRule(say='append "{k}"', code='{t} + "{k}"', constants=LETTERS, loose=True),
    "prepend": ProblemRule(say='prepend "{k}"', code='"{k}" + {t}', constants=LETTERS, loose=True),
    "remove": ProblemRule(say='remove "{k}"', code='{t}.replace("{k}", "")', constants=LETTERS),
}

STRING_ENDS = {
    "length": ProblemRule(say="length", code="len({v})"),
    "count_letter": ProblemRule(say='count "{k}"', code='{t}.count("{k}")', constants=LETTERS),
}

TABLES = (CONDITIONS, INT_STEPS, REDUCTIONS, STRING_STEPS, STRING_ENDS)
FAMILY_SHARES = {"list": 0.34, "pipeline": 0.20, "branch": 0.21, "string": 0.25}
ARGUMENT = {"list": "xs", "pipeline": "n", "branch": "n", "string": "s"}

RAMBLES = (
    "let me think about this first",
    "there are several ways to do it",
    "we could also use a loop here",
    "the input may be empty",
    "so check every step again",
    "maybe it is simpler than that",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    name: str
    constant: int | str | None = None

    @property
    def table(self) -> dict[str, ProblemRule]:
        return next(table for table in TABLES if self.name in table)

    @property
    def rule(self) -> ProblemRule:
        return self.table[self.name]

    def say(self) -> str:
        return self.rule.say.format(k=self.constant)

    def code(self, operand: str, *, operand_is_loose: bool = False) -> str:
        tight = f"({operand})" if operand_is_loose else operand
        return self.rule.code.format(v=operand, t=tight, k=self.constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a function does. `list`: an optional filter, map and reduction. `pipeline` and `string`: steps in sequence.
    `branch`: a condition, the step if it holds, and the step otherwise."""

    family: str
    steps: tuple[Step, ...]

    def digest(self) -> str:
        text = json.dumps([self.family, [[step.name, step.constant] for step in self.steps]])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def is_heldout(self) -> bool:
        return int(self.digest()[:8], 16) % HELDOUT_ONE_IN == 0

    @property
    def signature(self) -> str:
        return f"def {ENTRY_POINT}({ARGUMENT[self.family]}):\n"


# Sentences


def sentence(spec: Spec) -> str:
    if spec.family == "branch":
        condition, then, otherwise = (step.say() for step in spec.steps)
        text = f"if {condition} {then}, else {otherwise}"
    else:
        text = ", ".join(_say_step(step) for step in spec.steps)
    return text[0].upper() + text[1:]


def _say_step(step: Step) -> str:
    return f"keep {step.say()}" if step.table is CONDITIONS else step.say()


# Code: each style is a list of (comment, line) pairs; the comment is written only where the prompt asks to explain.

Lines = list[tuple[str, str]]


def one_liner(spec: Spec) -> Lines:
    if spec.family == "list":
        expression = _list_expression(spec)
    elif spec.family == "branch":
        condition, then, otherwise = (step.code("n") for step in spec.steps)
        expression = f"{then} if {condition} else {otherwise}"
    else:
        expression, loose = ARGUMENT[spec.family], False
        for step in spec.steps:
            expression, loose = step.code(expression, operand_is_loose=loose), step.rule.loose
    return [(sentence(spec).lower(), f"    return {expression}")]


def _list_parts(spec: Spec) -> tuple[Step | None, Step | None, Step | None]:
    def find(table: dict[str, ProblemRule]) -> Step | None:
        return next((step for step in spec.steps if step.table is table), None)

    return find(CONDITIONS), find(INT_STEPS), find(REDUCTIONS)


def _list_expression(spec: Spec) -> str:
    keep, change, reduce = _list_parts(spec)
    items = "xs"
    if keep or change:
        condition = f" if {keep.code('x')}" if keep else ""
        items = f"[{change.code('x') if change else 'x'} for x in xs{condition}]"
    return reduce.code(items) if reduce else items


def stepwise(spec: Spec) -> Lines:
    if spec.family == "list":
        return _list_loop(spec)
    if spec.family == "branch":
        condition, then, otherwise = spec.steps
        return [
            (f"if {condition.say()}", f"    if {condition.code('n')}:"),
            (then.say(), f"        return {then.code('n')}"),
            (f"else {otherwise.say()}", f"    return {otherwise.code('n')}"),
        ]
    name = ARGUMENT[spec.family]
    lines = [(step.say(), f"    {name} = {step.code(name)}") for step in spec.steps]
    return [*lines, ("", f"    return {name}")]


def _list_loop(spec: Spec) -> Lines:
    keep, change, reduce = _list_parts(spec)
    lines: Lines = [("", "    out = []"), ("", "    for x in xs:")]
    indent = " " * 8
    if keep:
        lines.append((_say_step(keep), f"{indent}if {keep.code('x')}:"))
        indent += "    "
    lines.append((change.say() if change else "", f"{indent}out.append({change.code('x') if change else 'x'})"))
    lines.append((reduce.say() if reduce else "", f"    return {reduce.code('out') if reduce else 'out'}"))
    return lines


def body(lines: Lines, *, explain: bool = False) -> str:
    """The text that follows the signature."""
    written = []
    for comment, line in lines:
        if explain and comment:
            indent = line[: len(line) - len(line.lstrip())]
            written.append(f"{indent}# {comment}")
        written.append(line)
    return "\n".join(written)


def solution(spec: Spec) -> str:
    return spec.signature + body(one_liner(spec))


# Drawing specifications, mutations and inputs


def draw_step(rng: random.Random, table: dict[str, ProblemRule]) -> Step:
    name = rng.choice(sorted(table))
    constants = table[name].constants
    return Step(name=name, constant=rng.choice(constants) if constants else None)


def draw_spec(rng: random.Random) -> Spec:
    family = rng.choices(list(FAMILY_SHARES), weights=list(FAMILY_SHARES.values()))[0]
    if family == "list":
        tables = [table for table in (CONDITIONS, INT_STEPS, REDUCTIONS) if rng.random() < 0.75]
        if len(tables) < 2:
            tables = [CONDITIONS, INT_STEPS]
    elif family == "pipeline":
        tables = [INT_STEPS] * rng.choice((2, 2, 2, 3))
    elif family == "branch":
        tables = [CONDITIONS, INT_STEPS, INT_STEPS]
    else:
        tables = [STRING_STEPS] * rng.choice((2, 2, 2, 3))
        if rng.random() < 0.3:
            tables[-1] = STRING_ENDS
    return Spec(family=family, steps=tuple(draw_step(rng, table) for table in tables))


def mutate(rng: random.Random, spec: Spec) -> Spec:
    """A specification that looks like this one: one step has another constant or operation, or is missing."""
    at = rng.randrange(len(spec.steps))
    step = spec.steps[at]
    kinds = ["operation"]
    if step.constant is not None:
        kinds += ["constant", "constant"]
    if spec.family != "branch" and len(spec.steps) > 1:
        kinds.append("drop")
    kind = rng.choice(kinds)
    if kind == "drop":
        return replace(spec, steps=spec.steps[:at] + spec.steps[at + 1 :])
    if kind == "constant":
        changed = replace(step, constant=rng.choice([k for k in _neighbours(step) if k != step.constant]))
    else:
        changed = draw_step(rng, {name: rule for name, rule in step.table.items() if name != step.name})
    return replace(spec, steps=(*spec.steps[:at], changed, *spec.steps[at + 1 :]))


def _neighbours(step: Step) -> tuple[int | str, ...]:
    if isinstance(step.constant, int):
        return (step.constant - 1, step.constant + 1)
    return step.rule.constants


def draw_input(rng: random.Random, spec: Spec) -> Any:
    if spec.family == "string":
        return "".join(rng.choice("abcdestABCDEST  ") for _ in range(rng.randrange(15)))
    if spec.family == "list":
        return [rng.randint(-12, 20) for _ in range(rng.randrange(9))]
    return rng.randint(-30, 40) if rng.random() < 0.6 else rng.randint(-2, 12)


def make_tests(rng: random.Random, spec: Spec) -> list[dict[str, Any]]:
    """8 to 18 distinct inputs, each with what the specification's own code returns. That code is ours and trusted."""
    namespace: dict[str, Any] = {}
    exec(solution(spec), namespace)
    function: Callable[[Any], Any] = namespace[ENTRY_POINT]
    count = rng.randint(8, 18)
    inputs: list[Any] = []
    while len(inputs) < count:
        value = draw_input(rng, spec)
        if value not in inputs:
            inputs.append(value)
    return [{"args": [value], "expected": function(value)} for value in inputs]


# Problems and demonstrations


def make_problem(rng: random.Random, spec: Spec) -> dict[str, Any] | None:
    """The problem's JSON line, or None if the tests hardly tell one answer from another."""
    tests = make_tests(rng, spec)
    if len({json.dumps(test["expected"]) for test in tests}) < 4 or all(test["args"][0] == test["expected"] for test in tests):
        return None
    explain = rng.random() < EXPLAIN_SHARE
    return {
        "id": f"{spec.family}-{spec.digest()[:12]}",
        "prompt": sentence(spec) + (EXPLAIN_SUFFIX if explain else "") + ".",
        "prefill": spec.signature,
        "task": {"kind": "calls", "entry_point": ENTRY_POINT, "tests": tests},
        "solution": solution(spec),
    }


def draw_problems(rng: random.Random, count: int, *, heldout: bool) -> Iterator[tuple[Spec, dict[str, Any]]]:
    seen: set[str] = set()
    while len(seen) < count:
        spec = draw_spec(rng)
        if spec.is_heldout != heldout or spec.digest() in seen:
            continue
        problem = make_problem(rng, spec)
        if problem is not None:
            seen.add(spec.digest())
            yield spec, problem


def demonstrate(rng: random.Random, spec: Spec, *, explain: bool, noisy: bool) -> str:
    if noisy and rng.random() < BUG_SHARE:
        spec = mutate(rng, spec)
    style = stepwise if rng.random() < STEPWISE_SHARE else one_liner
    answer = body(style(spec), explain=explain)
    if noisy and rng.random() < RAMBLE_SHARE:
        answer = "".join(f"    # {rng.choice(RAMBLES)}\n" for _ in range(rng.randint(1, 8))) + answer
    return answer


def draw_demonstrations(rng: random.Random, problems: list[tuple[Spec, dict[str, Any]]], count: int) -> Iterator[dict[str, str]]:
    for number in range(count):
        spec, problem = problems[number % len(problems)]
        explain = problem["prompt"].endswith(EXPLAIN_SUFFIX + ".")
        answer = demonstrate(rng, spec, explain=explain, noisy=number >= CLEAN_SHARE * count)
        yield {"prompt": problem["prompt"], "prefill": problem["prefill"], "answer": answer}


if __name__ == "__main__":
    command("python -m reward.generated.code_problems", draw_problems, draw_demonstrations)
