"""The constants that `benchmarks/calibrate.py` fitted to measurements, read from the stored file. Nothing is fitted here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.plan.points import Point, Protocol, predict
from launch.plan.speed import Constants

F64 = NDArray[np.float64]
DATA = Path(__file__).with_name("data")
STORED = DATA / "calibration.json"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    constants: Constants
    protocol: Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors of the predicted time per output token, as absolute values."""

    what: str
    median: float
    p90: float
    largest: float


@cache
def stored() -> Calibration:
    record = json.loads(STORED.read_text())
    return Calibration(constants=Constants(**record["constants"]), protocol=Protocol(**record["protocol"]))


def stored_errors() -> list[Errors]:
    """How well the calibration predicts measurements that were held back from the fit."""
    return [Errors(**record) for record in json.loads(STORED.read_text())["errors"]]


def relative_errors(points: Sequence[Point], calibration: Calibration) -> F64:
    return np.array([predict(p, calibration.constants, calibration.protocol).tpot_s / p.tpot_s - 1 for p in points])


def summary_of(what: str, relative: F64) -> Errors:
    size = np.abs(relative)
    return Errors(what=what, median=float(np.median(size)), p90=float(np.quantile(size, 0.9)), largest=float(size.max()))
