"""What turns without and with a remedy say of its speed-up: a range, and a word for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dlrm_workbook.ground.intervals import median_interval, t_interval

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


def speed_range(logs: Sequence[float]) -> tuple[float, float, float]:
    """Low, mid and high of a speed-up, that hold nine of ten, from the logarithm of each turn's.

    The median, and between which of the sorted turns it lies in nine of ten cases whatever their
    distribution is; of fewer than five turns, Student's interval.
    """
    interval, count = median_interval(logs, 0.9), len(logs)
    if count < 5:
        error = statistics.stdev(logs) / math.sqrt(count)
        interval = t_interval(interval.mid, error, count - 1, 0.9)
    low, high = interval.low - BETWEEN_RUNS, interval.high + BETWEEN_RUNS
    return math.exp(low), math.exp(interval.mid), math.exp(high)


def status_of(low: float, high: float) -> str:
    if low > PAID:
        return "paid"
    if high < 1 / PAID:
        return "slower"
    return "no difference" if low > 1 / NARROW and high < NARROW else "unclear"
