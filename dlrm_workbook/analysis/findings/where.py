"""The names under which time lies in a program, on every level, for any finding and any program.

A piece of time belongs to a context: a kernel, or what the host is in while the GPU is idle. Above
it stand a range that the program marks, operators, a Python function and a call of the GPU's
driver. No level serves for all faults: an evaluation shows in its range, a recomputation in a node
of autograd, a query of the driver in its call, a slow callback in its function. So all are named.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.parts import COMPONENTS, SPAN_PREFIX, part_label
from dlrm_workbook.ground.marks import GROUP_PREFIX
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import Profile, depths, inclusive_from_exclusive, nearest
from dlrm_workbook.recordings.torch.steps import STEP_LABEL

OWN_RANGES = re.compile(
    rf"^$|^(?:{re.escape(STEP_LABEL)}|ProfilerStep#|Optimizer\.|{re.escape(SPAN_PREFIX)}|"
    r"Torch-Compiled Region|## Call CompiledFxGraph)"
)
"""Matches names of ranges that mark no more than a step, a part or compiled code, and the empty
one."""

PLACE_LEVELS = {
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

RECORD_MORE = (
    "Record what runs or waits there: operators (ProfilerActivity.CPU), Python's stack "
    "(with_stack=True), or CPU samples."
)
"""The advice where a recording does not say what takes the time."""

SAMPLE_MORE = (
    "Record what runs or waits there: CPU samples and system calls (nsys profile "
    "--sample=process-tree --trace=cuda,nvtx,osrt), or NVTX ranges around it."
)
"""As :data:`RECORD_MORE`, of an export of Nsight Systems."""


def part_name(component: str, phase: str = "") -> str:
    """A part as a sentence names it; modules of a program's own are in backticks."""
    label = part_label(component, phase)
    return label if component in COMPONENTS else label.replace(component, f"`{component}`", 1)


def code_line(function: str, file: str, line: int) -> str:
    """`FUNCTION` (`FILE:LINE`), as a sentence names a line."""
    at = f"`{PurePath(file).name}:{line}`"
    return at if function in ("", "<module>") else f"`{function}` ({at})"


def line_name(row: Any) -> str:
    """The :func:`code_line` of a row with ``function``, ``file`` and ``line``."""
    return code_line(str(row["function"]), str(row["file"]), int(row["line"]))


def main_function(table: pd.DataFrame) -> str:
    """The function with more than half of the time of lines (rows with ``time_ms``, most first), by
    its line with most of it; "" where none has so much."""
    times = table.groupby(["file", "function"])["time_ms"].transform("sum")
    of_one = table[times > 0.5 * table["time_ms"].sum()]
    return line_name(of_one.iloc[0]) if len(of_one) else ""


OF_TORCH = re.compile(r"(?:.*/)?torch/|<frozen ")
"""Matches names of Python's frames that call what the program or another library hands to them."""

FRAME = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
"""A name that torch.profiler gives to a frame of Python."""


def shown(name: str) -> str:
    """A name of the program's as a sentence has it: no prefix of ours or of all nodes of autograd,
    modules and lines in backticks, and no longer than a line."""
    if name.startswith(GROUP_PREFIX):
        return f"`{name.removeprefix(GROUP_PREFIX)}`"
    if frame := FRAME.match(name):
        return code_line(frame["function"][:50], frame["file"], int(frame["line"]))
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return name if len(name) <= 70 else f"{name[:70]}…"


def merged(times: pd.Series) -> pd.Series:
    """Times by name, those together whose names are the same as :func:`shown`."""
    return times.groupby([shown(str(name)) for name in times.index], sort=False).sum()


def levels(profile: Profile) -> dict[str, np.ndarray]:
    """Row (n,) of what each context lies in on each of ``PLACE_LEVELS``; -1 where there is none.

    The innermost range, Python function and call of the driver, the outermost operator and the
    innermost one. Ranges that torch makes by itself are left out: they say no more than a part.
    """
    parent = profile.contexts["parent"].to_numpy()
    # traces of 2021 write ranges as operators
    telling = ~profile.which("name", lambda name: bool(OWN_RANGES.match(name)))
    inner = nearest(parent, profile.of_kind("operator") & telling)
    # the call that launched a kernel or a copy says nothing about it
    call = np.where(
        profile.of_kind("kernel", "copy"), -1, nearest(parent, profile.of_kind("runtime"))
    )
    return {
        "range": nearest(parent, profile.of_kind("annotation") & telling),
        "outer": outermost_row(parent, inner),
        "inner": inner,
        "python": nearest(parent, profile.of_kind("python")),
        "call": call,
    }


MOST_WITHIN = 100
"""Operators that one operator calls: more are a loop of its own."""


def loops_of(profile: Profile) -> set[str]:
    """Names of operators whose every call runs a loop over others, such as those of recurrent
    layers: these loops are not the program's."""
    table = _outermost(profile)
    return set(table.index[table["within"] > MOST_WITHIN * table["calls"]])


def called_most(profile: Profile) -> tuple[str, float]:
    """The operator that the program itself calls most, and how often in all; "" where none is."""
    calls = _outermost(profile)["calls"]
    return (str(calls.idxmax()), float(calls.max())) if len(calls) else ("", 0.0)


def _outermost(profile: Profile) -> pd.DataFrame:
    """Calls of each operator that lies in no other (the index), and of all ``within`` it."""
    outer, names = levels(profile)["outer"], profile.contexts["name"].to_numpy()
    calls = profile.value_table("calls").fillna(0.0).to_numpy() * profile.of_kind("operator")
    rows = np.flatnonzero(outer == np.arange(len(outer)))
    within = np.bincount(outer[outer >= 0], calls[outer >= 0], len(outer))[rows]
    return pd.DataFrame({"calls": calls[rows], "within": within}).groupby(names[rows]).sum()


def outermost_row(parent: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Row (n,) of the outermost marked context above each, -1 where none is.

    Args:
        row: (n,) row of the nearest marked context at or above each, -1 for none.
    """
    over = np.where(parent >= 0, row[parent], -1)
    own = np.arange(len(row))
    upper = np.where((row == own) & (over >= 0), over, own)
    while (upper[upper] != upper).any():  # each time twice as far up
        upper = upper[upper]
    return np.where(row >= 0, upper[row], -1)


def _time_of_contexts(profile: Profile, context: Any, ms: Any) -> np.ndarray:
    """Time (contexts,) of pieces, see :func:`time_by_name`."""
    at, time = np.asarray(context), np.asarray(ms, dtype=float)
    return np.bincount(at[at >= 0], time[at >= 0], len(profile.contexts))


def time_by_name(profile: Profile, context: Any, ms: Any) -> dict[str, pd.Series]:
    """Time by name on each of ``PLACE_LEVELS``, ms, most first; what has no name there is left out.

    Args:
        context: (m,) contexts of pieces of time, -1 for none.
        ms: (m,) their time.
    """
    time_of_context = _time_of_contexts(profile, context, ms)
    names = profile.contexts["name"].to_numpy()
    times = {}
    for level, row in levels(profile).items():
        time_by = pd.Series(time_of_context[row >= 0]).groupby(names[row[row >= 0]]).sum()
        times[level] = time_by[time_by > 0].sort_values(ascending=False)
    return times


def most_in_one(profile: Profile, context: Any, ms: Any) -> float:
    """The most time (ms) of pieces (see :func:`place_sentence`) that one name has on any level."""
    every = time_by_name(profile, context, ms).values()
    return max((float(times.iloc[0]) for times in every if len(times)), default=0.0)


def main_place(profile: Profile, context: Any, ms: Any) -> tuple[str, float]:
    """The name that holds more than half of the time of pieces, as in :func:`place_sentence`, and
    that time (ms); of several the one with the least, which says most; where there is none, the
    Python function that holds as much with all that it calls; "" without either."""
    every = pd.concat(list(time_by_name(profile, context, ms).values()))
    held = every[every > 0.5 * float(np.sum(ms))]
    if len(held):
        return shown(str(held.idxmin())), float(held.min())
    parent = profile.contexts["parent"].to_numpy()
    whole = inclusive_from_exclusive(parent, _time_of_contexts(profile, context, ms))
    calls = profile.of_kind("python") & ~profile.which("name", lambda n: bool(OF_TORCH.match(n)))
    rows = np.flatnonzero(calls & (whole > 0.5 * float(np.sum(ms))))
    if not len(rows):
        return "", 0.0
    row = rows[np.lexsort((-depths(parent)[rows], whole[rows]))[0]]
    return shown(str(profile.contexts["name"].iloc[row])), float(whole[row])


def in_place(profile: Profile, level: str, name: str) -> np.ndarray:
    """Which contexts (n,) lie in what has this name on one of ``PLACE_LEVELS``."""
    row = levels(profile)[level]
    named = profile.contexts["name"].eq(name).to_numpy()
    return (row >= 0) & named[np.maximum(row, 0)]


def place_sentence(
    profile: Profile, context: Any, ms: Any, step_ms: float, it: str = "it"
) -> str | None:
    """A sentence that lists the names in which pieces of time lie; None where none has any.

    Args:
        context: (m,) contexts of the pieces, -1 for none.
        ms: (m,) their time in a mean step.
        step_ms: the mean step.
        it: what the pieces are of.
    """
    total = float(np.sum(ms))
    least = min(LEAST_OF_ALL * total, LEAST_OF_STEP * step_ms)
    clauses: list[str] = []
    names_before: list[str] = []
    for level, times in time_by_name(profile, context, ms).items():
        times = times[times >= least][:MOST_NAMES]
        named = merged(times)
        listed = ", ".join(f"{name} {milliseconds(ms)}" for name, ms in named.items())
        if listed and list(named.index) != names_before:
            clauses.append(f"by {PLACE_LEVELS[level]} {'' if clauses else f'{it} is '}{listed}")
        names_before = list(named.index)
    return f"B{'; '.join(clauses)[1:]}." if clauses else None
