"""Fits the planner's calibrated constants to measurements, and says how well they predict what was held back.

    python -m benchmarks.calibrate           fits, and prints the constants and the errors on held-back groups
    python -m benchmarks.calibrate --write   also stores them in launch/plan/data/calibration.json

For generation it fits eleven numbers to 56 latencies of SGLang on H100s. Each number has a prior of what is physically
plausible, so a number that the measurements say nothing about stays where it was. The planner reads the stored file and fits
nothing.
"""

import argparse
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from scipy.optimize import brentq, least_squares

from conf.schema import ConfigError
from launch.plan.calibration import F64, STORED, Calibration, Errors, relative_errors, summary_of
from launch.plan.points import Point, Protocol, predict, read_points
from launch.plan.speed import Constants
from launch.plan.training_points import PACKED_FLOPS, training_flops

POINTS = Path(__file__).parent / "data/qwen3_32b_h100_decode.csv"
NOISE = 0.03  # relative error of a measurement; the cost of a larger residual grows linearly, not with its square
PUSH_BYTES_S = 64e9 / 2.67  # the slower of the published NCCL pushes at 30-32B (miles)
# name -> (median of the prior, relative spread). All numbers are positive. One output length alone does not determine the
# exponent, so its prior decides when the other length is held back.
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
    """The residuals are the log of TPOT and, where no request waited for the cache, the log of a request's whole turn. The turn
    holds all the prefill, whatever its share in TPOT, so it separates the speed of prefill from that of a decode step."""

    def residuals(x: F64) -> F64:
        calibration = _calibration(_unpack(x), 1.0)
        errors = []
        for point in points:
            said = predict(point, calibration.constants, calibration.protocol)
            errors.append(np.log(said.tpot_s / point.tpot_s))
            held = point.ttft_s > 0 and said.running >= point.sequences
            errors.append(np.log(said.turn_s / point.turn_s) if held else 0.0)
        return np.concatenate([soft(np.array(errors), NOISE), NOISE * x])

    values = _unpack(least_squares(residuals, np.zeros(len(PRIORS)), method="lm", xtol=1e-10, ftol=1e-10).x)
    return _calibration(values, fit_train_fraction(_calibration(values, 1.0).constants))


def soft(residuals: F64, scale: float) -> F64:
    """Residuals whose squares grow only linearly beyond `scale`, so one odd measurement does not bend the fit."""
    z = (residuals / scale) ** 2
    return np.sign(residuals) * scale * np.sqrt(2 * (np.sqrt(1 + z) - 1))


def fit_train_fraction(constants: Constants) -> float:
    """The share of peak compute at which a busy pipeline stage runs, such that the published training rate comes out."""

    def flops(fraction: float) -> float:
        return training_flops(replace(constants, train_fraction=fraction))

    low, high = 0.2, 1.0
    if flops(high) < PACKED_FLOPS:
        raise ConfigError(f"no rate of a busy stage gives {PACKED_FLOPS / 1e12:.0f} TFLOP/s: exchange alone takes longer")
    return float(brentq(lambda fraction: flops(fraction) - PACKED_FLOPS, low, high))


def leave_groups_out(points: Sequence[Point], what: str, key: Callable[[Point], Hashable]) -> Errors:
    """Every point predicted from those that do not share its value."""
    errors = [
        relative_errors([p for p in points if key(p) == value], fit([p for p in points if key(p) != value]))
        for value in dict.fromkeys(key(p) for p in points)
    ]
    return summary_of(f"each {what} held back", np.concatenate(errors))


def fifths(points: Sequence[Point], seed: int = 0) -> Errors:
    """Every point predicted from the other four fifths, in random order."""
    order = np.random.default_rng(seed).permutation(len(points))
    errors = []
    for held in np.array_split(order, 5):
        inside = set(held.tolist())
        fitted = fit([p for i, p in enumerate(points) if i not in inside])
        errors.append(relative_errors([points[i] for i in held], fitted))
    return summary_of("a random fifth held back", np.concatenate(errors))


GROUPS: dict[str, Callable[[Point], Hashable]] = {
    "TP": lambda p: p.tp,
    "concurrency": lambda p: p.sequences,
    "prompt length": lambda p: p.prompt_tokens,
    "output length": lambda p: p.output_tokens,
    "TP and concurrency": lambda p: (p.tp, p.sequences),
    "point alone": lambda p: (p.tp, p.sequences, p.prompt_tokens, p.output_tokens),
}


def all_errors(points: Sequence[Point], calibration: Calibration) -> list[Errors]:
    fitted = summary_of("nothing held back", relative_errors(points, calibration))
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
