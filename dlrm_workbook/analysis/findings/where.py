"""The names under which time lies in a program, on every level, for any finding and any program.

A piece of time belongs to a context: a kernel, or what the host is in while the GPU is idle. Above
it stand a range that the program marks, operators, a Python function and a call of the GPU's
driver. No level serves for all faults: an evaluation shows in its range, a recomputation in a node
of autograd, a query of the driver in its call, a slow callback in its function. So all are said.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.parts import SPAN_PREFIX
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import Profile, nearest
from dlrm_workbook.recordings.torch.steps import STEP_LABEL

OWN_RANGES = rf"^$|^(?:{re.escape(STEP_LABEL)}|ProfilerStep#|Optimizer\.|{re.escape(SPAN_PREFIX)})"
"""Matches names of ranges that mark no more than a step or a part, and the empty one."""

LEVELS = {
    "range": "range",
    "outer": "operator",
    "inner": "operator within it",
    "python": "Python function",
    "call": "call",
}
"""Level to what a sentence calls it, from the outside in."""

LEAST_OF_ALL, LEAST_OF_STEP = 0.1, 0.04
"""Least share of a finding's time, or of the step, for a name to be listed."""

MOST_NAMES = 4
"""Names of one level that a sentence lists."""


def levels(profile: Profile) -> dict[str, np.ndarray]:
    """Row (n,) of what each context lies in on each of ``LEVELS``; -1 where there is none.

    The innermost range, Python function and call of the driver, the outermost operator and the
    innermost one. Ranges that torch makes by itself are left out: they say no more than a part.
    """
    parent = profile.contexts["parent"].to_numpy()
    # traces of 2021 write ranges as operators
    told = ~profile.which("name", lambda name: bool(re.match(OWN_RANGES, name)))
    inner = nearest(parent, profile.of_kind("operator") & told)
    # the call that launched a kernel or a copy says nothing about it
    call = np.where(
        profile.of_kind("kernel", "copy"), -1, nearest(parent, profile.of_kind("runtime"))
    )
    return {
        "range": nearest(parent, profile.of_kind("annotation") & told),
        "outer": outermost_row(parent, inner),
        "inner": inner,
        "python": nearest(parent, profile.of_kind("python")),
        "call": call,
    }


def outermost_row(parent: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Row (n,) of the outermost marked context above each, -1 where none is.

    Args:
        row: (n,) row of the nearest marked context at or above each, -1 for none.
    """
    found = row
    while True:
        over = parent[np.maximum(found, 0)]
        above = np.where((found >= 0) & (over >= 0), row[np.maximum(over, 0)], -1)
        if (above < 0).all():
            return found
        found = np.where(above >= 0, above, found)


def time_by_name(profile: Profile, context: Any, ms: Any) -> dict[str, pd.Series]:
    """Time by name on each of ``LEVELS``, ms, most first; what has no name there is left out.

    Args:
        context: (m,) contexts of pieces of time, -1 for none.
        ms: (m,) their time.
    """
    at, time = np.asarray(context), np.asarray(ms, dtype=float)
    each = np.bincount(at[at >= 0], time[at >= 0], len(profile.contexts))
    names = profile.contexts["name"].to_numpy()
    found = {}
    for level, row in levels(profile).items():
        own = pd.Series(each[row >= 0]).groupby(names[row[row >= 0]]).sum()
        found[level] = own[own > 0].sort_values(ascending=False)
    return found


def most_in_one(profile: Profile, context: Any, ms: Any) -> float:
    """The most time (ms) of the pieces, as in :func:`said`, that one name has on any level."""
    every = time_by_name(profile, context, ms).values()
    return max((float(times.iloc[0]) for times in every if len(times)), default=0.0)


def main_place(profile: Profile, context: Any, ms: Any) -> str:
    """The name that holds more than half of the time of the pieces, as in :func:`said`; of several
    the one with the least, which says most; "" where there is none."""
    every = pd.concat(list(time_by_name(profile, context, ms).values()))
    held = every[every > 0.5 * float(np.sum(ms))]
    return str(held.idxmin())[:70] if len(held) else ""


def in_place(profile: Profile, level: str, name: str) -> np.ndarray:
    """Which contexts (n,) lie in what has this name on one of ``LEVELS``."""
    row = levels(profile)[level]
    named = profile.contexts["name"].eq(name).to_numpy()
    return (row >= 0) & named[np.maximum(row, 0)]


def said(profile: Profile, context: Any, ms: Any, step_ms: float) -> str | None:
    """A sentence that lists the names in which pieces of time lie; None where none has any.

    Args:
        context: (m,) contexts of the pieces, -1 for none.
        ms: (m,) their time in a mean step.
        step_ms: the mean step.
    """
    total = float(np.sum(ms))
    least = min(LEAST_OF_ALL * total, LEAST_OF_STEP * step_ms)
    told: list[str] = []
    known = ""
    for level, times in time_by_name(profile, context, ms).items():
        times = times[times >= least][:MOST_NAMES]
        listed = ", ".join(f"{_shown(str(name))} {milliseconds(ms)}" for name, ms in times.items())
        if listed and listed != known:
            told.append(f"by {LEVELS[level]} {'' if told else 'it is '}{listed}")
        known = listed
    return f"B{'; '.join(told)[1:]}." if told else None


def _shown(name: str) -> str:
    """The name without what all nodes of autograd have in common, and no longer than a line."""
    return name.removeprefix("autograd::engine::evaluate_function: ")[:70]
