"""Predictions against a file of measured decode latencies. Nothing is fitted here: the stored calibration is read."""

from pathlib import Path

from launch.plan.calibration import relative_errors, stored, summary_of
from launch.plan.cost_lines import several
from launch.plan.points import predict, read_points
from launch.plan.table import table


def check_report(path: Path) -> str:
    """One row per point, and the errors. Raises ConfigError for a file that cannot be read."""
    points = read_points(path)
    calibration = stored()
    errors = relative_errors(points, calibration)
    rows = []
    for point, error in zip(points, errors, strict=True):
        said = predict(point, calibration.constants, calibration.protocol)
        waiting = f"{said.running:.0f}" if said.running < point.sequences else ""
        rows.append((
            f"TP{point.tp}", f"{point.prompt_tokens:g}", f"{point.output_tokens:g}", f"{point.sequences:g}", waiting,
            f"{point.tpot_s * 1e3:.2f}", f"{said.tpot_s * 1e3:.2f}", f"{said.step_s * 1e3:.2f}", f"{error:+.1%}",
        ))  # fmt: skip
    head = ("", "prompt", "output", "sequences", "that fit", "measured ms", "predicted ms", "step ms", "error")
    found = summary_of("", errors)
    return (
        f"{table(head, rows)}\n\n{several(len(points), 'point')}; time per output token: median error {found.median:.1%}, "
        f"90th percentile {found.p90:.1%}, largest {found.largest:.1%}"
    )
