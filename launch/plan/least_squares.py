"""Levenberg-Marquardt for a handful of parameters, with priors, in numpy: scipy would be a dependency for one call."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def minimise(residuals: Callable[[F64], F64], start: F64, *, iterations: int = 200, tolerance: float = 1e-10) -> F64:
    """Parameters that make the sum of squared residuals smallest, from `start` downhill."""
    x, r = start.astype(np.float64), residuals(start)
    damping = 1e-3
    for _ in range(iterations):
        jacobian = _jacobian(residuals, x, r)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ r
        while True:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -gradient)
            tried = residuals(x + step)
            if tried @ tried < r @ r:
                break
            damping *= 4
            if damping > 1e12:
                return x
        gained, x, r = r @ r - tried @ tried, x + step, tried
        damping = max(damping / 3, 1e-12)
        if gained <= tolerance * (r @ r):
            return x
    return x


def soft(residuals: F64, scale: float) -> F64:
    """Residuals whose squares grow only linearly beyond `scale`: one odd measurement must not bend the rest."""
    z = (residuals / scale) ** 2
    return np.sign(residuals) * scale * np.sqrt(2 * (np.sqrt(1 + z) - 1))


def _jacobian(residuals: Callable[[F64], F64], x: F64, r: F64) -> F64:
    columns = []
    for i in range(len(x)):
        step = 1e-6 * max(abs(x[i]), 1e-3)
        moved = x.copy()
        moved[i] += step
        columns.append((residuals(moved) - r) / step)
    return np.stack(columns, axis=1)
