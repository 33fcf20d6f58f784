"""Confidence intervals from few repetitions, without assuming more than is known.

Formulas: Student's t by numerical integration of its density; batch means of
correlated observations (Schmeiser 1982, Operations Research 30); Welch's degrees of freedom
(Welch 1947); Holm's correction for several tests (Holm 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from dlrm_workbook.turns import CONFIDENCE, Interval, Numbers

BLOCK = 3


def standard_error(values: Numbers) -> tuple[float, float]:
    """(standard error of the mean, degrees of freedom); NaN and 0 of fewer than two values.

    Neighbouring iterations are alike (a busy moment spans several), so from 12 values on the
    unit is a block of at least 3 neighbours, at most 10 blocks: their means are nearly
    independent, and a drift shows as their scatter (batch means, Schmeiser 1982).
    """
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        return math.nan, 0.0
    if len(x) >= 4 * BLOCK:
        blocks = min(10, len(x) // BLOCK)
        x = np.array([block.mean() for block in np.array_split(x, blocks)])
    return float(x.std(ddof=1) / math.sqrt(len(x))), float(len(x) - 1)


def welch_degrees(se_a: float, df_a: float, se_b: float, df_b: float) -> float:
    """Degrees of freedom of the difference of two means (Welch-Satterthwaite)."""
    total = se_a**2 + se_b**2
    if total == 0:
        return df_a + df_b
    parts = sum(se**4 / df for se, df in ((se_a, df_a), (se_b, df_b)) if df > 0)
    return total**2 / parts if parts > 0 else math.inf


def t_interval(
    mid: float, standard_error: float, degrees: float, confidence: float = CONFIDENCE
) -> Interval:
    """mid ± t · standard error; without bounds (NaN) where the error is unknown."""
    if not math.isfinite(standard_error) or degrees <= 0:
        return Interval(math.nan, mid, math.nan, 0.0)
    reach = t_quantile(0.5 + confidence / 2, degrees) * standard_error
    return Interval(mid - reach, mid, mid + reach, confidence)


def p_value(difference: float, standard_error: float, degrees: float) -> float:
    """Two-sided probability of so large a difference by chance; NaN where it is unknown."""
    if not math.isfinite(standard_error) or degrees <= 0:
        return math.nan
    if standard_error == 0:
        return 1.0 if difference == 0 else 0.0
    return 2 * (1 - t_cdf(abs(difference) / standard_error, degrees))


def holm(p_values: Numbers) -> list[float]:
    """p-values of one family, corrected so that one false alarm in the family has p at most."""
    p = np.asarray(p_values, dtype=float)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    result = np.full(len(p), math.nan)
    worst = 0.0
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * p[index]))
        result[index] = worst
    return [float(value) for value in result]


def t_cdf(t: float, degrees: float) -> float:
    """Student's distribution function; the normal one for infinitely many degrees."""
    if not math.isfinite(degrees) or degrees > 1e6:
        return 0.5 * (1 + math.erf(t / math.sqrt(2)))
    # t = sqrt(v) tan(a) makes the density cos(a)^(v - 1) on a bounded range
    angle = math.atan(abs(t) / math.sqrt(degrees))
    nodes, weights = _GAUSS
    a = 0.5 * angle * (nodes + 1)
    area = 0.5 * angle * float(np.dot(weights, np.cos(a) ** (degrees - 1)))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    return min(1.0, 0.5 + scale * area) if t >= 0 else max(0.0, 0.5 - scale * area)


def t_quantile(probability: float, degrees: float) -> float:
    """The t below which Student's distribution has ``probability``.

    Raises:
        ValueError: the probability is not between 0 and 1, or there are no degrees.
    """
    if not 0 < probability < 1 or degrees <= 0:
        raise ValueError(f"no quantile of probability {probability}, {degrees} degrees")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


_GAUSS = np.polynomial.legendre.leggauss(96)


# A shared machine's slow periods, left out of what is repeated by one rule.


def undisturbed(table: pd.DataFrame, settings: Sequence[str], repetition: str) -> pd.DataFrame:
    """The rows of the faster half of the repetitions of each setting.

    Where other guests of a machine come and go, the same work takes up to twice as long for
    seconds (seen in a virtual machine that tells nothing of it: no stolen time, no process). A
    mean or a median then says which period a run fell into. What else runs only ever adds, so
    the slower half says more of that than of the program. The mean of the faster half is what
    we call a time: means of parts then add up to the mean of the whole.

    Args:
        settings: columns; what has the same values there is a repetition of the same thing.
        repetition: column that counts the repetitions. A repetition is as long as its rows'
            ``time_ms`` together. Where there is no such column, all rows are kept.
    """
    if table.empty or repetition not in table.columns:
        return table
    keys = [*settings, repetition]
    times = table.groupby(keys, sort=False)["time_ms"].sum()
    groups = times.groupby(level=list(range(len(settings))), sort=False)
    chosen = times.index[groups.rank(method="first") <= np.ceil(groups.transform("size") / 2)]
    return table[pd.MultiIndex.from_frame(table[keys]).isin(chosen)]
