"""Finished runs side by side: parts with intervals, the call trees' union, what else differs.

A difference without its uncertainty is an anecdote. Repeated iterations give each part a
mean and a standard error (neighbouring iterations correlate, so they count for fewer);
a sampled profile without iterations has the error of counting, 1/sqrt(samples). Whether a
difference is more than chance is decided over all parts together (Holm), so that twenty
parts do not make one false alarm by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from dlrm_core.analysis.attribution import iteration_count, per_iteration
from dlrm_core.analysis.intervals import (
    CONFIDENCE,
    Interval,
    Numbers,
    holm,
    p_value,
    standard_error,
    t_interval,
    welch_degrees,
)
from dlrm_core.analysis.steady import LEAST, steady_state
from dlrm_core.parts import COMPONENTS, PHASES
from dlrm_core.profiling.profile import Profile

PART = ["component", "phase"]
ALARM = 1 - CONFIDENCE


def steady_rows(times_ms: Numbers) -> np.ndarray:
    """Which iterations (n,) stand for a run: neither warm-up nor stragglers; all of a short one."""
    times = np.asarray(times_ms, dtype=float)
    if len(times) < LEAST:
        return np.ones(len(times), dtype=bool)
    steady = np.asarray(steady_state(times).steady)
    return steady if steady.sum() >= 2 else np.ones(len(times), dtype=bool)


def iteration_parts(profile: Profile) -> pd.DataFrame:
    """Milliseconds of each part (columns: component, phase) in each steady iteration (rows)."""
    each = per_iteration(profile)
    table = each.pivot_table(
        index="iteration", columns=PART, values="time_ms", aggfunc="sum", fill_value=0.0
    )
    return table[steady_rows(table.sum(axis=1).to_numpy(dtype=float))]


def part_estimates(profile: Profile) -> pd.DataFrame:
    """Mean time of each part with its standard error.

    Returns:
        ``component``, ``phase``, ``time_ms`` (steady iterations), ``se_ms`` (NaN where one
        observation is all there is), ``degrees`` (of freedom; infinite for counted samples),
        ``observations`` (iterations, or samples), ``of`` (``iterations`` or ``samples``);
        in the order of a step.
    """
    if profile.iterations.empty or profile.trace.empty:
        return _in_order(_counted(profile))
    table = iteration_parts(profile)
    rows = []
    for part, column in table.items():
        component, phase = cast(tuple[str, str], part)
        times = column.to_numpy(dtype=float)
        se, degrees = standard_error(times)
        rows.append((component, phase, times.mean(), se, degrees, len(times), "iterations"))
    return _in_order(_estimates(rows))


def step_estimate(profile: Profile) -> tuple[float, float, float]:
    """(mean iteration in ms, its standard error, degrees of freedom)."""
    if profile.iterations.empty or profile.trace.empty:
        table = _counted(profile)
        return float(table["time_ms"].sum()), float(np.hypot.reduce(table["se_ms"])), math.inf
    times = iteration_parts(profile).sum(axis=1).to_numpy(dtype=float)
    se, degrees = standard_error(times)
    return float(times.mean()), se, degrees


def _counted(profile: Profile) -> pd.DataFrame:
    """Parts of a sampled profile; the error of n samples is sqrt(n) of them."""
    parts = per_iteration(profile).groupby(PART, as_index=False)["time_ms"].sum()
    period = sampling_period_ms(profile) / iteration_count(profile)
    rows = []
    for component, phase, time in parts.itertuples(index=False):
        count = time / period if period > 0 else math.nan
        se = time / math.sqrt(count) if count > 0 else math.nan
        rows.append((component, phase, time, se, math.inf, count, "samples"))
    return _estimates(rows)


def sampling_period_ms(profile: Profile) -> float:
    """Time that one sample stands for: what the contexts with one sample hold.

    Most contexts of a sampled tree were met once, so the tenth of them with the least time
    tells the period; 0 if nothing was sampled.
    """
    metric = "cpu_time_ms" if profile.has("cpu_time_ms") else "gpu_time_ms"
    rows = profile.values[profile.rows(metric, "exclusive")]
    rows = rows[rows["value"] > 0]
    return float(rows["value"].quantile(0.1, interpolation="lower")) if len(rows) else 0.0


def _estimates(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    columns = [*PART, "time_ms", "se_ms", "degrees", "observations", "of"]
    return pd.DataFrame(rows, columns=columns)


def compare_parts(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Each part before and after, with the interval of the difference.

    Args:
        before, after: what :func:`part_estimates` gives.

    Returns:
        ``component``, ``phase``, ``before_ms``, ``after_ms``, ``difference_ms``, ``low_ms``,
        ``high_ms`` (95 %; NaN where unknown), ``p`` (corrected for the number of parts),
        ``verdict`` (see :func:`verdict`); a part that a run does not have counts as 0 ms.
    """
    table = before.merge(after, on=PART, how="outer", suffixes=("_a", "_b"))
    rows = []
    for row in table.to_dict("records"):
        a, b = (_or_zero(row, side) for side in ("_a", "_b"))
        se = math.hypot(a[1], b[1])
        degrees = welch_degrees(a[1], a[2], b[1], b[2]) if math.isfinite(se) else 0.0
        interval = t_interval(b[0] - a[0], se, degrees)
        chance = p_value(b[0] - a[0], se, degrees)
        rows.append((row["component"], row["phase"], a[0], b[0], interval, chance))
    return difference_table(rows)


def _or_zero(row: Mapping[Any, Any], side: str) -> tuple[float, float, float]:
    time = float(row[f"time_ms{side}"])
    if math.isnan(time):
        return 0.0, 0.0, 0.0
    return time, float(row[f"se_ms{side}"]), float(row[f"degrees{side}"])


def difference_table(
    rows: Sequence[tuple[str, str, float, float, Interval, float]],
) -> pd.DataFrame:
    """Columns of :func:`compare_parts` from (component, phase, before, after, interval, p)."""
    corrected = holm([row[5] for row in rows])
    table = pd.DataFrame(
        {
            "component": [row[0] for row in rows],
            "phase": [row[1] for row in rows],
            "before_ms": [row[2] for row in rows],
            "after_ms": [row[3] for row in rows],
            "difference_ms": [row[4].mid for row in rows],
            "low_ms": [row[4].low for row in rows],
            "high_ms": [row[4].high for row in rows],
            "p": corrected,
            "verdict": [verdict(row[4].mid, p) for row, p in zip(rows, corrected, strict=True)],
        }
    )
    return _in_order(table)


def verdict(difference: float, p: float) -> str:
    """``slower``, ``faster``, ``no difference shown``, or ``not known`` without repetitions."""
    if not math.isfinite(p):
        return "not known"
    if p > ALARM:
        return "no difference shown"
    return "slower" if difference > 0 else "faster"


def ratio_interval(
    before: tuple[float, float, float], after: tuple[float, float, float], samples: float = 1.0
) -> Interval:
    """Speed-up, before over after, with its interval (delta method on the logarithm).

    Args:
        before, after: (mean, standard error, degrees of freedom), as :func:`step_estimate`.
        samples: samples of an iteration after over those before; 1 compares iterations.
    """
    relative = [se / mean if mean > 0 else math.nan for mean, se, _ in (before, after)]
    se = math.hypot(*relative)
    degrees = welch_degrees(relative[0], before[2], relative[1], after[2])
    middle = math.log(samples * before[0] / after[0]) if min(before[0], after[0]) > 0 else math.nan
    found = t_interval(middle, se, degrees)
    low, mid, high = (math.exp(value) for value in (found.low, found.mid, found.high))
    return Interval(low, mid, high, found.confidence)


# ---- what differs besides ---------------------------------------------------------


def circumstances(profile: Profile) -> dict[str, dict[str, Any]]:
    """What a run was: ``parameters`` (dotted leaves), ``versions``, ``machine``, ``measuring``."""
    meta = profile.meta
    sections = meta.get("parameters") or {}
    leaves = {
        f"{section}.{leaf}": value
        for section, content in sections.items()
        if isinstance(content, Mapping)
        for leaf, value in content.items()
    }
    machine = dict(meta.get("machine") or {})
    machine |= {"device": meta.get("device_name") or meta.get("device")}
    machine |= {"threads used": meta.get("threads")}
    return {
        "parameters": leaves,
        "versions": dict(meta.get("versions") or {}),
        "machine": machine,
        "measuring": {"engine": meta.get("engine")},
    }


def differing(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """What is not the same in all runs.

    Args:
        runs: what :func:`circumstances` gives, one a run.

    Returns:
        ``kind``, ``name``, and ``values`` (a list, one entry a run; None where it has none).
    """
    rows = []
    kinds = list(dict.fromkeys(kind for run in runs for kind in run))
    for kind in kinds:
        for name in dict.fromkeys(name for run in runs for name in run.get(kind, {})):
            values = [run.get(kind, {}).get(name) for run in runs]
            if any(value != values[0] for value in values[1:]):
                rows.append({"kind": kind, "name": name, "values": values})
    return pd.DataFrame(rows, columns=["kind", "name", "values"])


# what these say varies from minute to minute, or only describes the run
INCIDENTAL = ("profiling.", "training.batches", "training.log_every", "available")


def mixed_causes(differences: pd.DataFrame) -> str:
    """A warning where more than the parameters differ, so that no one thing is the cause."""
    others = differences[differences["kind"] != "parameters"]
    if others.empty:
        return ""
    named = [
        f"{kind}: {', '.join(rows['name'])}" for kind, rows in others.groupby("kind", sort=False)
    ]
    changed = differences[differences["kind"].eq("parameters")]
    changed = changed[~changed["name"].str.startswith(INCIDENTAL)]
    also = f" besides {len(changed)} parameter(s)" if len(changed) else ""
    return (
        f"This comparison mixes causes: the runs differ in {'; '.join(named)}{also}. What is "
        "slower or faster cannot be put down to one of them."
    )


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    """In the order of a step."""
    component = {name: row for row, name in enumerate(COMPONENTS)}
    phase = {name: row for row, name in enumerate(PHASES)}
    rank = table["component"].map(component).fillna(len(component)) * 10
    rank = rank + table["phase"].map(phase).fillna(len(phase))
    return table.iloc[np.argsort(rank.to_numpy(dtype=float), kind="stable")].reset_index(drop=True)
