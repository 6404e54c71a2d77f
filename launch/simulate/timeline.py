"""A simulated run as a trace that https://ui.perfetto.dev and chrome://tracing open."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.simulate.simulated_trainer import SimulatedStep
from launch.simulate.simulation import Result

TRAINER, QUEUE, ENGINES, LONG = 1, 2, 3, 4
PROCESSES = {TRAINER: "trainer", QUEUE: "queue and judges", ENGINES: "engines: running sequences", LONG: "long completions"}
Event = dict[str, Any]


def write_timeline(result: Result, path: Path, *, detail_s: float) -> None:
    """The whole run, and its first `detail_s` engine by engine with each long completion."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": list(trace_events(result, detail_s=detail_s)), "displayTimeUnit": "ms"}))


def trace_events(result: Result, *, detail_s: float) -> Iterator[Event]:
    for process, name in PROCESSES.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for step in result.steps:
        yield from _phases(step)
    for failure in result.failures:
        name = f"node {failure.node} ({failure.of}) fails"
        yield {"ph": "i", "s": "g", "name": name, "pid": TRAINER, "tid": 0, "ts": _us(failure.time_s)}
    yield from _counters(result, detail_s)
    for number, (begin_s, end_s, name) in enumerate(result.long_spans):
        if begin_s < detail_s:
            common = {"cat": "long", "id": number, "name": name, "pid": LONG, "tid": 0}
            yield {"ph": "b", "ts": _us(begin_s), **common}
            yield {"ph": "e", "ts": _us(end_s), **common}


def _phases(step: SimulatedStep) -> Iterator[Event]:
    """The phases of a step in order. The first one is the wait for the batch."""
    lag = sum(lag * n for lag, n in step.lag_tokens.items()) / max(step.lag_tokens.total(), 1)
    yield _slice(
        f"step {step.step}", step.begin_s, step.step_s, {"trained_tokens": step.trained_tokens, "mean_lag": round(lag, 3)}
    )
    at_s = step.begin_s
    phases = (
        ("wait for a batch", step.wait_s), ("old log-probs", step.old_logprob_s), ("reference log-probs", step.ref_logprob_s),
        ("train", step.train_s), ("wait for the fleet", step.drain_s), ("push", step.push_s), ("checkpoint", step.checkpoint_s),
    )  # fmt: skip
    for name, seconds in phases:
        if seconds > 0:
            yield _slice(name, at_s, seconds, {})
        at_s += seconds


def _counters(result: Result, detail_s: float) -> Iterator[Event]:
    for sample in result.samples:
        values = {
            "running sequences": sum(sample.running),
            "ready groups": sample.ready_groups,
            "being graded": sample.grading,
            "waiting for a sandbox": sample.to_grade,
        }
        for name, value in values.items():
            yield _counter(QUEUE, name, sample.time_s, value)
        if sample.time_s < detail_s:
            for engine, running in zip(result.engines, sample.running, strict=True):
                yield _counter(ENGINES, engine.name, sample.time_s, running)


def _counter(process: int, name: str, time_s: float, value: int) -> Event:
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": _us(time_s), "args": {"value": value}}


def _slice(name: str, begin_s: float, seconds: float, arguments: dict[str, Any]) -> Event:
    return {
        "ph": "X", "name": name, "pid": TRAINER, "tid": 0, "ts": _us(begin_s), "dur": _us(seconds), "args": arguments,
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
