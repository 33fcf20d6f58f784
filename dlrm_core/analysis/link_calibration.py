"""A link from measured collectives: latency, rate and how far single measurements lie off.

Every collective at every number of ranks is fitted on its own (time = alpha + bytes / rate),
because a library's all-to-all is not its all-reduce and ranks that share cores are not two
nodes. One alpha and one beta over all of them, by the steps and bytes of each collective
(:func:`.links.steps_and_bytes`), say what to expect elsewhere.

Fits are of relative errors (a small message counts as much as a large one) with Huber's
weights, so that a few disturbed measurements change little (Huber 1964).
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pandas as pd

from dlrm_core.analysis.links import ALGORITHMS, Fit, Link, Range, steps_and_bytes
from dlrm_core.analysis.undisturbed import undisturbed
from dlrm_core.errors import InputError

PROBE_COLUMNS = ("collective", "ranks", "bytes", "time_ms")

EXCHANGE = ["collective", "ranks", "bytes"]

HUBER = 1.345
"""Residuals beyond so many standard deviations count less: 95 % efficient on a normal one."""

COVER = 1.64
"""Half width of a range in standard deviations: nine of ten of a normal distribution. The
deviation itself is 1.4826 times the median residual, which disturbed runs do not widen."""

LEAST_SCATTER = 0.05
"""No link is known better than this: two probes of one machine differ as much."""


def calibrate(probe: pd.DataFrame, name: str = "measured") -> Link:
    """A link from collectives that were timed alone.

    Args:
        probe: ``collective``, ``ranks``, ``bytes``, ``time_ms`` (see :mod:`.communication`),
            a row a repetition. Rows of one rank, of no bytes or no time are left out; of the
            repetitions the faster half counts (:mod:`.undisturbed`).
        name: the link's name.

    Raises:
        InputError: a column is missing, or fewer than two sizes were measured.
    """
    for column in PROBE_COLUMNS:
        if column not in probe.columns:
            raise InputError(
                f"link probe: column {column} is missing, expected {', '.join(PROBE_COLUMNS)}"
            )
    usable = probe[(probe["ranks"] > 1) & (probe["bytes"] > 0) & (probe["time_ms"] > 0)]
    usable = usable[usable["collective"].isin(list(ALGORITHMS))]
    if usable["bytes"].nunique() < 2:
        raise InputError(
            f"link probe: {usable['bytes'].nunique()} sizes measured on two ranks or more, "
            "expected at least 2: latency and rate cannot be told apart"
        )
    kept = undisturbed(usable, EXCHANGE, "repetition")
    fits = {}
    for key, rows in usable.groupby(["collective", "ranks"]):
        collective, ranks = cast(tuple[str, int], key)
        fitted = _fit(rows, kept.loc[kept.index.intersection(rows.index)])
        if fitted is not None:
            fits[(str(collective), int(ranks))] = fitted
    alpha, rate = _common(kept)
    most = int(usable["ranks"].max())
    source = f"measured: {len(usable)} collectives on up to {most} ranks"
    return Link(name, alpha, rate, source, True, fits)


def _fit(rows: pd.DataFrame, kept: pd.DataFrame) -> Fit | None:
    """Alpha and rate of one collective on one number of ranks, by what is undisturbed of it."""
    means = kept.groupby("bytes")["time_ms"].mean().sort_index()
    if len(means) < 2:
        return None
    fixed, slope = robust_line(kept["bytes"].to_numpy(float), kept["time_ms"].to_numpy(float))
    # more bytes do not take less time: a size that was disturbed throughout is held to the next
    bounded = means[::-1].cummin()[::-1]
    points = tuple(zip(bounded.index.astype(float), bounded.astype(float), strict=True))
    # what a range must hold are single measurements, the disturbed ones too
    own = np.log(rows["time_ms"].to_numpy(float) / rows["bytes"].map(means).to_numpy(float))
    scatter = max(LEAST_SCATTER, float(np.expm1(COVER * _deviation(own))))
    return Fit(1e3 * fixed, _rate(slope), scatter, points)


def _rate(ms_per_byte: float) -> float:
    # 1 ms a byte is 1e-6 GB/s; a slope of 0 would be a link without a limit
    return 1e-6 / max(ms_per_byte, 1e-12)


def robust_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope, neither negative, of y = a + b x by relative errors (Huber)."""
    design = np.column_stack([np.ones_like(x), x])
    solved = robust_least_squares(design, y)
    return float(solved[0]), float(solved[1])


def robust_least_squares(design: np.ndarray, y: np.ndarray, rounds: int = 40) -> np.ndarray:
    """Coefficients of 0 or more for ``design @ c = y``, by relative errors, Huber's weights.

    Shapes: design (n, k), y (n,), result (k,). A coefficient that would be negative is 0 and
    the others are fitted without it.
    """
    scaled = design / y[:, None]
    # columns of equal size: seconds a byte are 1e-9 of a latency
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    scaled = scaled / norms
    weights = np.ones(len(y))
    solved = np.zeros(design.shape[1])
    for _ in range(rounds):
        before, solved = solved, _nonnegative(scaled * weights[:, None], weights)
        # least absolute deviations at first, so that no outlier draws the start
        residual = scaled @ solved - 1
        spread = max(1.4826 * float(np.median(np.abs(residual))), 1e-9)
        weights = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual), 1e-12)))
        if np.allclose(before, solved, rtol=1e-9, atol=0):
            break
    return solved / norms


def _nonnegative(design: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of 0 or more (the active set, few columns)."""
    kept = list(range(design.shape[1]))
    while kept:
        part = np.linalg.lstsq(design[:, kept], y, rcond=None)[0]
        if (part >= 0).all():
            solved = np.zeros(design.shape[1])
            solved[kept] = part
            return solved
        kept.pop(int(np.argmin(part)))
    return np.zeros(design.shape[1])


def _common(rows: pd.DataFrame) -> tuple[Range, Range]:
    """One alpha and one rate over all collectives, with ranges from their own fits."""
    forms = np.array(
        [
            steps_and_bytes(str(kind), ALGORITHMS[str(kind)][0], int(ranks), float(size))
            for kind, ranks, size in rows[["collective", "ranks", "bytes"]].itertuples(index=False)
        ]
    )
    times = rows["time_ms"].to_numpy(float)
    step_ms, byte_ms = robust_least_squares(forms, times)
    predicted = forms @ np.array([step_ms, byte_ms])
    ratio = np.log(times / np.maximum(predicted, 1e-12))
    wide = max(1 + LEAST_SCATTER, float(np.exp(COVER * _deviation(ratio))))
    alpha_us, rate = 1e3 * float(step_ms), _rate(float(byte_ms))
    return (
        Range(alpha_us / wide, alpha_us, alpha_us * wide),
        Range(rate / wide, rate, rate * wide),
    )


def _deviation(residuals: np.ndarray) -> float:
    """Standard deviation around 0 by the median residual (Hampel 1974)."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def check(probe: pd.DataFrame, link: Link) -> pd.DataFrame:
    """A probe's times beside what a link says: how good a calibration is.

    Returns:
        ``collective``, ``ranks``, ``bytes``, ``measured_ms`` (mean of the faster half), ``low_ms``,
        ``mid_ms``, ``high_ms``, ``error`` (predicted over measured, less 1).
    """
    rows = []
    for key, times in undisturbed(probe, EXCHANGE, "repetition").groupby(EXCHANGE)["time_ms"]:
        kind, ranks, size = cast(tuple[str, int, float], key)
        expected = link.time_ms(str(kind), int(ranks), float(size))
        measured = float(times.mean())
        row = (kind, ranks, size, measured, *expected, expected.mid / measured - 1)
        rows.append(row)
    return pd.DataFrame(
        rows, columns=[*EXCHANGE, "measured_ms", "low_ms", "mid_ms", "high_ms", "error"]
    )
