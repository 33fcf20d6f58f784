"""Confidence intervals from few repetitions, without assuming more than is known.

Formulas: the interval of a median by order statistics (Conover, Practical Nonparametric
Statistics, 3rd ed., section 3.2); Student's t by numerical integration of its density; batch
means of correlated observations (Schmeiser 1982, Operations Research 30); Welch's degrees of
freedom (Welch 1947); Holm's correction for several tests (Holm 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95

Values = Sequence[float] | npt.NDArray[np.float64]

ITERATIONS_TOGETHER = 3
"""Neighbouring iterations that count as one observation."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; ``confidence`` is what it really covers."""

    low: float
    mid: float
    high: float
    confidence: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def median_interval(values: Values, confidence: float = CONFIDENCE) -> Interval:
    """The median and two of the values that enclose the true one.

    With n values the j-th smallest and j-th largest enclose the median with probability
    1 − 2 P(Binomial(n, 1/2) < j), whatever the distribution. The largest j that reaches
    ``confidence`` is taken; where not even the extremes do (n < 6 for 95 %), the extremes,
    and ``confidence`` of the result is lower, 0 for one value.

    Raises:
        ValueError: there is no value.
    """
    ordered = sorted(map(float, values))
    n = len(ordered)
    if n == 0:
        raise ValueError("no values, so no median")
    rank, covered = 1, 1 - 2 * 0.5**n
    for j in range(2, n // 2 + 1):
        reach = 1 - 2 * sum(math.comb(n, i) for i in range(j)) * 0.5**n
        if reach < confidence:
            break
        rank, covered = j, reach
    return Interval(
        ordered[rank - 1], float(np.median(ordered)), ordered[n - rank], max(covered, 0)
    )


def standard_error(values: Values) -> tuple[float, float]:
    """(standard error of the mean, degrees of freedom); NaN and 0 of fewer than two values.

    Neighbouring iterations are alike (a busy moment spans several), so from 12 values on the
    unit is a block of at least 3 neighbours, at most 10 blocks: their means are nearly
    independent, and a drift shows as their scatter.
    """
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        return math.nan, 0.0
    if len(x) >= 4 * ITERATIONS_TOGETHER:
        blocks = min(10, len(x) // ITERATIONS_TOGETHER)
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


def holm(p_values: Values) -> list[float]:
    """p-values of one family, corrected so that one false alarm in the family has p at most."""
    p = np.asarray(p_values, dtype=float)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    result = np.full(len(p), math.nan)
    tests_left = np.arange(len(order), 0, -1)
    result[order] = np.minimum(np.maximum.accumulate(tests_left * p[order]), 1.0)
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
    """The t below which Student's distribution has ``probability``; a ValueError says that this is
    not between 0 and 1, or that there are no degrees."""
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
