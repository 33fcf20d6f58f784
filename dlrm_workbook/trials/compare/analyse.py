"""What interleaved runs say: speed-up, parts and losses, compared within each round.

The unit of repetition is the round: runs of one round share the machine's mood, so their
ratio is free of it, and rounds are repeated processes, so their spread holds what differs
from one start of the program to the next. Iterations of one process do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.compare import difference_table, steady_rows
from dlrm_workbook.ground.intervals import Interval, median_interval, p_value, t_interval
from dlrm_workbook.trials.compare.measure import TimedRun

REST = "outside the parts"
"""The row of what the parts' means lack to add up to the times whose ratio is the speed-up."""

NOT_A_PART = "no part"
"""The verdict of that row."""

ROUNDING_SHARE = 1e-6
"""A share of the iteration that is rounding."""


def round_table(runs: Sequence[TimedRun]) -> pd.DataFrame:
    """Mean steady iteration of each run and of its parts.

    The row with neither component nor phase is the whole iteration, and without stragglers the
    parts add up to it. ``dlrm help columns`` describes the columns.
    """
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        steady = steady_rows(run.iteration_ms)
        times = np.asarray(run.iteration_ms)[steady]
        rows.append((run.round, run.setting, "", "", times.mean()))
        for (component, phase), each in run.parts.items():
            mean = np.asarray(each)[steady].mean()
            rows.append((run.round, run.setting, component, phase, mean))
    return pd.DataFrame(rows, columns=["round", "setting", "component", "phase", "time_ms"])


def whole_rounds(table: pd.DataFrame, before: str, after: str) -> pd.DataFrame:
    """Whole iterations: a row a round that has both, columns ``before`` and ``after``, ms."""
    whole = table[(table["component"] == "") & table["setting"].isin([before, after])]
    wide = whole.pivot(index="round", columns="setting", values="time_ms")
    wide = wide.reindex(columns=[before, after]).dropna()
    return wide.set_axis(["before", "after"], axis=1)


def gain(table: pd.DataFrame, before: str, after: str, samples: float = 1.0) -> Interval:
    """Median over rounds of the rounds' own ratios, with its order-statistics interval.

    Args:
        table: what :func:`round_table` gives.
        samples: samples of an iteration after over those before: time is compared a sample.

    Raises:
        ValueError: no round has both settings.
    """
    wide = whole_rounds(table, before, after)
    return median_interval((samples * wide["before"] / wide["after"]).tolist())


def pair_of_times_ms(table: pd.DataFrame, before: str, after: str) -> tuple[float, float]:
    """The one pair of times that a page states: their ratio is that of :func:`gain`.

    Returns:
        The rounds' median iteration before the change, and that over the median of the rounds'
        own ratios, ms.

    Raises:
        ValueError: no round has both settings.
    """
    base = float(whole_rounds(table, before, after)["before"].median())
    return base, base / gain(table, before, after).mid


def compare_settings(table: pd.DataFrame, before: str, after: str) -> pd.DataFrame:
    """Each part before and after, paired by round; columns as ``compare.compare_parts``.

    A slow moment of the machine lengthens everything, so each round's times are first
    scaled to the median round by its whole iteration before the change. Times are means over
    the rounds, and a little of an iteration lies between its parts' clocks. A row
    :data:`REST` holds both, so that the rows add up to :func:`pair_of_times_ms`.
    """
    base, changed = pair_of_times_ms(table, before, after)
    mood = base / whole_rounds(table, before, after)["before"]
    parts = table[(table["component"] != "") & table["setting"].isin([before, after])]
    rows = []
    for (component, phase), group in parts.groupby(["component", "phase"], sort=False):
        wide = group.pivot(index="round", columns="setting", values="time_ms")
        wide = wide.reindex(index=mood.index, columns=[before, after]).fillna(0.0)
        wide = wide.mul(mood, axis=0)
        differences = (wide[after] - wide[before]).to_numpy()
        count = len(differences)
        se = float(differences.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
        estimate = (float(differences.mean()), se, count - 1)
        means = (float(wide[before].mean()), float(wide[after].mean()))
        part = (str(component), str(phase))
        rows.append((*part, *means, t_interval(*estimate), p_value(*estimate)))
    parts_table = difference_table(rows)
    rest = (base - parts_table["before_ms"].sum(), changed - parts_table["after_ms"].sum())
    if parts_table.empty or max(map(abs, rest)) < ROUNDING_SHARE * min(base, changed):
        return parts_table
    row = {"before_ms": rest[0], "after_ms": rest[1], "difference_ms": rest[1] - rest[0]}
    row |= {"component": REST, "phase": "", "verdict": NOT_A_PART}
    return pd.concat([parts_table, pd.DataFrame([row])], ignore_index=True)


def compare_losses(runs: Sequence[TimedRun], before: str, after: str) -> dict[str, Any]:
    """Whether the change trains the same.

    Returns:
        of the first run of each: ``iterations`` compared, ``equal`` (bit for bit),
        ``largest_difference`` and ``first_difference`` (iteration from 0, None where equal),
        ``relative`` (largest difference over the mean loss); and ``repeatable``: setting to
        whether its own runs agree (None of a single one).
    """
    first, second = ([r.losses for r in runs if r.setting == name] for name in (before, after))
    repeatable = {
        name: all(losses == series[0] for losses in series[1:]) if len(series) > 1 else None
        for name, series in ((before, first), (after, second))
    }
    if not first or not second:
        return {"iterations": 0, "equal": None, "repeatable": repeatable}
    a, b = np.asarray(first[0]), np.asarray(second[0])
    count = min(len(a), len(b))
    gap = np.abs(a[:count] - b[:count])
    differs = np.flatnonzero(~(gap == 0))
    mean = float(np.abs(a[:count]).mean()) if count else math.nan
    largest = float(gap.max()) if count else math.nan
    return {
        "iterations": count,
        "equal": not len(differs),
        "largest_difference": largest,
        "relative": largest / mean if mean > 0 else math.nan,
        "first_difference": int(differs[0]) if len(differs) else None,
        "repeatable": repeatable,
    }
