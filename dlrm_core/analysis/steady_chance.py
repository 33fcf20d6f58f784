"""What chance alone does to the times of a run: critical values for each number of iterations.

Each is a quantile of a statistic's own distribution over runs without what it looks for,
simulated once for a length and kept; :mod:`dlrm_core.analysis.steady` judges by them.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


FALSE_ALARM = 0.01
"""Chance of each judgement (warm-up, drift, two levels) on a run without any."""


STRAGGLER_ALARM = 0.025
"""The same of stragglers where scatter has exponential tails; far less where it is normal."""


_DRAWS = 4000


LONGEST = 1000
"""Critical values of longer runs are those of this length: they grow with log log n."""


def critical_rank(count: int) -> float:
    """What the largest standardised rank sum of a beginning exceeds in 1 of 100 runs.

    Of ``count`` independent times in any order; it depends on no distribution.
    """
    return _critical_rank(tabulated(count))


def critical_deviation(count: int) -> float:
    """What the largest of ``count`` ordinary deviations exceeds in 1 of 40 runs.

    In units of the upper spread (see :func:`upper_spreads`), for double-exponential scatter.
    """
    # Beyond the simulated length the largest of n grows with log n, as exponential tails do.
    known = _critical_deviation(tabulated(count))
    return known + (math.log(count / LONGEST) / math.log(2) if count > LONGEST else 0.0)


def rank_sums(ranks: Floats) -> Floats:
    """Standardised rank sum of every beginning (runs, n−1): |z| of Mann-Whitney's test.

    Args:
        ranks: (runs, n) ranks 1..n.
    """
    count = ranks.shape[1]
    size = np.arange(1, count)
    sums = np.cumsum(ranks, axis=1)[:, :-1]
    deviation = np.sqrt(size * (count - size) * (count + 1) / 12)
    return np.abs(sums - size * (count + 1) / 2) / deviation


@functools.lru_cache(maxsize=64)
def _critical_rank(count: int) -> float:
    random = np.random.default_rng(count)
    largest = [
        rank_sums(random.permuted(np.tile(np.arange(1.0, count + 1), (rows, 1)), axis=1)).max(1)
        for rows in _portions(count)
    ]
    return float(np.quantile(np.concatenate(largest), 1 - FALSE_ALARM))


def beginnings(times: Floats, most: int) -> Floats:
    """How far all of the first 1, 2, ... iterations are above the rest (runs, most).

    In units of the rest's spread above its median (see :func:`upper_spreads`).
    """
    heights = np.empty((len(times), most))
    for size in range(1, most + 1):
        rest = times[:, size:]
        usual = np.median(rest, axis=1, keepdims=True)
        spread = upper_spreads(rest - usual)
        heights[:, size - 1] = (times[:, :size].min(axis=1) - usual[:, 0]) / spread
    return heights


@functools.lru_cache(maxsize=64)
def critical_beginnings(count: int) -> Floats:
    random = np.random.default_rng(count)
    most = min(MOST_SLOW, count // 3)
    heights = np.concatenate(
        [beginnings(random.laplace(size=(rows, count)), most) for rows in _portions(count)]
    )
    return np.quantile(heights, 1 - FALSE_ALARM / most, axis=0)


MOST_SLOW = 6
"""Beginnings of up to this many iterations are judged by their size, longer ones by ranks."""


def upper_spreads(away: Floats) -> Floats:
    """Scale (runs,) of how far the slower half is above the median, from (runs, n) distances.

    The mean excess of an exponential tail whose largest three tenths are known only to be
    large (type II censoring; Epstein and Sobel 1953): stragglers among them do not widen it.
    """
    half = away.shape[1] // 2
    above = np.sort(away, axis=1)[:, -half:]
    unknown = math.ceil(_CENSORED * half)
    known = half - unknown
    scale = (above[:, :known].sum(axis=1) + unknown * above[:, known - 1]) / known
    return np.maximum(scale, np.finfo(float).tiny)


_CENSORED = 0.3


@functools.lru_cache(maxsize=64)
def _critical_deviation(count: int) -> float:
    random = np.random.default_rng(count)
    largest = []
    for rows in _portions(count):
        values = random.laplace(size=(rows, count))
        away = values - np.median(values, axis=1, keepdims=True)
        largest.append(away.max(axis=1) / upper_spreads(away))
    return float(np.quantile(np.concatenate(largest), 1 - STRAGGLER_ALARM))


def variance_left(ordered: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """(share of the variance that the best split in two leaves, its place) of each row."""
    count = ordered.shape[1]
    ordered = ordered - ordered.mean(axis=1, keepdims=True)
    least = max(count // 5, 2)
    size = np.arange(least, count - least + 1)
    sums = np.cumsum(ordered, axis=1)[:, size - 1]
    between = sums**2 / size + sums**2 / (count - size)
    total = np.maximum((ordered**2).sum(axis=1), np.finfo(float).tiny)
    best = between.argmax(axis=1)
    return 1 - between.max(axis=1) / total, size[best]


@functools.lru_cache(maxsize=64)
def critical_split(count: int) -> float:
    random = np.random.default_rng(count)
    left = [
        variance_left(np.sort(random.random((rows, count)), axis=1))[0] for rows in _portions(count)
    ]
    return float(np.quantile(np.concatenate(left), FALSE_ALARM))


def ranks_of(times: Floats) -> Floats:
    """Ranks 1..n (n,); equal times share the mean of theirs."""
    _, place, count = np.unique(times, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[place].astype(np.float64)


def tabulated(count: int) -> int:
    """The length whose critical values serve a run of ``count``: within 12 % of it.

    They change with the logarithm of the length at most, and each takes a simulation.
    """
    coarse = max(1 << max(count.bit_length() - 4, 0), 1)
    return min(count - count % coarse, LONGEST)


def _portions(count: int) -> list[int]:
    """Rows of each simulated portion: 2 million values at most at once."""
    rows = max(1, min(_DRAWS, 2_000_000 // count))
    return [rows] * max(1, _DRAWS // rows)
