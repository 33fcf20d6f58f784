"""What turns without and with a remedy say of its speed-up: a range, and a word for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dlrm_workbook.ground.intervals import median_interval

FILE = "trials.json"
"""In a recording's folder: what was tried on the program."""

FEWEST, MOST = 3, 24
"""Turns of a remedy; a turn is a block without it and one with it."""

NARROW = 1.05
"""The turns end when the highest speed-up in the range is no more than this times the lowest."""

BETWEEN_RUNS = 0.01
"""Each end of a range is so much wider: two runs of one program differ by that."""

PAID = 1.02
"""What pays is faster by more than that."""

_T90 = {2: 6.31, 3: 2.92, 4: 2.35}
"""Student's t for 90 % of the mean of so many values."""


def speed_range(logs: Sequence[float]) -> tuple[float, float, float]:
    """Low, mid and high of a speed-up, that hold nine of ten, from the logarithm of each turn's.

    The median, and between which of the sorted turns it lies in nine of ten cases whatever their
    distribution is; of fewer than five turns, Student's interval.
    """
    interval, count = median_interval(logs, 0.9), len(logs)
    low, mid, high = interval.low, interval.mid, interval.high
    if count < 5:
        half = _T90.get(count, 6.31) * statistics.stdev(logs) / math.sqrt(count)
        low, high = mid - half, mid + half
    return math.exp(low - BETWEEN_RUNS), math.exp(mid), math.exp(high + BETWEEN_RUNS)


def status_of(low: float, high: float) -> str:
    if low > PAID:
        return "paid"
    if high < 1 / PAID:
        return "slower"
    return "no difference" if low > 1 / NARROW and high < NARROW else "unclear"
