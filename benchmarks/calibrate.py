"""Fits the calibrated constants to measurements, and says how well they predict what was held back.

    python -m launch.plan.calibrate           refits, prints the constants and the errors on held-back groups
    python -m launch.plan.calibrate --write   and stores them in launch/plan/data/calibration.json

Generation: eleven numbers on 56 latencies of SGLang on H100s, each with a prior of what is physically plausible, so that
what the measurements do not say stays where it was. Every prediction afterwards reads the stored file; nothing is
refitted then.
"""

import argparse
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from launch.plan.least_squares import F64, minimise, soft
from launch.plan.points import Point, Protocol, predict, read_points
from launch.plan.speed import Constants
from launch.plan.training_points import fit_train_fraction

DATA = Path(__file__).with_name("data")
POINTS = DATA / "qwen3_32b_h100_decode.csv"
STORED = DATA / "calibration.json"
NOISE = 0.03  # relative, of a measurement: a residual beyond it counts linearly
PUSH_BYTES_S = 64e9 / 2.67  # the slower of the NCCL pushes at 30-32B that were published (miles)
# name -> (prior median, relative spread): all are positive. One of the two measured output lengths cannot tell the exponent, so
# when the other is held back its prior speaks: outputs drift out of step, never into it, and slowly.
PRIORS = {
    "decode_step_s": (5e-3, 0.3),
    "sequence_s": (30e-6, 0.5),
    "weight_fraction": (0.9, 0.12),
    "kv_fraction": (0.8, 0.15),
    "prefill_fraction": (0.6, 0.2),
    "exchange_fraction": (0.75, 0.3),
    "engine_memory_fraction": (0.85, 0.025),
    "prefill_share": (0.5, 0.2),
    "chunk_loss": (1.0, 0.4),
    "retraction": (0.2, 0.5),
    "output_exponent": (0.1, 0.5),
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    constants: Constants
    protocol: Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative, of predicted time per output token; absolute values."""

    what: str
    median: float
    p90: float
    largest: float

    @classmethod
    def of(cls, what: str, relative: F64) -> "Errors":
        size = np.abs(relative)
        return cls(what=what, median=float(np.median(size)), p90=float(np.quantile(size, 0.9)), largest=float(size.max()))


def _unpack(x: F64) -> dict[str, float]:
    return {name: float(median * np.exp(spread * z)) for (name, (median, spread)), z in zip(PRIORS.items(), x, strict=True)}


def _calibration(values: dict[str, float], train_fraction: float) -> Calibration:
    protocol = Protocol(**{name: values[name] for name in Protocol.__dataclass_fields__})
    engine = {name: value for name, value in values.items() if name in Constants.__dataclass_fields__}
    constants = Constants(
        name="calibrated", skips_embedding=True, train_fraction=train_fraction,
        decode_compute_fraction=values["prefill_fraction"], network_fraction=0.75, push_bytes_s=PUSH_BYTES_S,
        sources="SGLang on H100 (56 points), NeMo-RL's training rate, the push of miles", **engine,
    )  # fmt: skip
    return Calibration(constants=constants, protocol=protocol)


def fit(points: Sequence[Point]) -> Calibration:
    """Residuals: the log of TPOT and, where nothing waited for the cache, of a request's whole turn. The turn holds all the
    prefill whatever its share in TPOT, so it tells the step's speed and the prefill's apart."""

    def residuals(x: F64) -> F64:
        calibration = _calibration(_unpack(x), 1.0)
        errors = []
        for point in points:
            said = predict(point, calibration.constants, calibration.protocol)
            errors.append(np.log(said.tpot_s / point.tpot_s))
            held = point.ttft_s > 0 and said.running >= point.sequences
            errors.append(np.log(said.turn_s / point.turn_s) if held else 0.0)
        return np.concatenate([soft(np.array(errors), NOISE), NOISE * x])

    values = _unpack(minimise(residuals, np.zeros(len(PRIORS))))
    return _calibration(values, fit_train_fraction(_calibration(values, 1.0).constants))


@cache
def stored() -> Calibration:
    record = json.loads(STORED.read_text())
    return Calibration(constants=Constants(**record["constants"]), protocol=Protocol(**record["protocol"]))


def stored_errors() -> list[Errors]:
    return [Errors(**record) for record in json.loads(STORED.read_text())["errors"]]


def relative_errors(points: Sequence[Point], calibration: Calibration) -> F64:
    return np.array([predict(p, calibration.constants, calibration.protocol).tpot_s / p.tpot_s - 1 for p in points])


def leave_groups_out(points: Sequence[Point], what: str, key: Callable[[Point], Hashable]) -> Errors:
    """Every point predicted from those that do not share its value."""
    errors = [
        relative_errors([p for p in points if key(p) == value], fit([p for p in points if key(p) != value]))
        for value in dict.fromkeys(key(p) for p in points)
    ]
    return Errors.of(f"each {what} held back", np.concatenate(errors))


def fifths(points: Sequence[Point], seed: int = 0) -> Errors:
    """Every point predicted from the other four fifths, in random order."""
    order = np.random.default_rng(seed).permutation(len(points))
    errors = []
    for held in np.array_split(order, 5):
        inside = set(held.tolist())
        fitted = fit([p for i, p in enumerate(points) if i not in inside])
        errors.append(relative_errors([points[i] for i in held], fitted))
    return Errors.of("a random fifth held back", np.concatenate(errors))


GROUPS: dict[str, Callable[[Point], Hashable]] = {
    "TP": lambda p: p.tp,
    "concurrency": lambda p: p.sequences,
    "prompt length": lambda p: p.prompt_tokens,
    "output length": lambda p: p.output_tokens,
    "TP and concurrency": lambda p: (p.tp, p.sequences),
    "point alone": lambda p: (p.tp, p.sequences, p.prompt_tokens, p.output_tokens),
}


def all_errors(points: Sequence[Point], calibration: Calibration) -> list[Errors]:
    fitted = Errors.of("nothing held back", relative_errors(points, calibration))
    return [fitted, fifths(points), *(leave_groups_out(points, what, key) for what, key in GROUPS.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the constants in {STORED}")
    write = parser.parse_args().write
    points = read_points(POINTS)
    calibration = fit(points)
    errors = all_errors(points, calibration)
    for name, value in {**asdict(calibration.constants), **asdict(calibration.protocol)}.items():
        print(f"{name:<24} {value:.6g}" if isinstance(value, float) else f"{name:<24} {value}")
    for error in errors:
        print(f"{error.what:<28} median {error.median:6.1%}  p90 {error.p90:6.1%}  largest {error.largest:6.1%}")
    if write:
        STORED.write_text(json.dumps({**asdict(calibration), "errors": [asdict(error) for error in errors]}, indent=2) + "\n")
        print(f"written to {STORED}")


if __name__ == "__main__":
    main()
