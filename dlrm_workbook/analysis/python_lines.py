"""Which Python lines the time outside of torch's operators is spent in.

Of a program that is not ours they are in the recording, from samples of its stack; of our own
workload they come from a few iterations that were sampled after the recorded ones. A line is one
of the program's own: what a library does is charged to the line that calls it.
"""

from __future__ import annotations

from pathlib import PurePath

import pandas as pd

from dlrm_workbook.analysis.attribution import PART
from dlrm_workbook.analysis.context_tree import missing_reason, unmeasured
from dlrm_workbook.analysis.idleness import outside_operators
from dlrm_workbook.recordings.profile import Profile

LINES = ["component", "phase", "function", "line", "time_ms", "share"]

MOSTLY_OUTSIDE = 0.5
"""Share of a part's time outside of operators from which on its lines are told, where samples
do not know operators."""


def python_lines(profile: Profile) -> pd.DataFrame:
    """Time by line of Python, outside of operators.

    Returns:
        ``component``, ``phase``, ``function``, ``line`` (FILE:LINE), ``time_ms`` (of a mean
        iteration; of the page's step, where the profile is at its reference) and ``share`` (of
        the iteration); most first. Of our own runs only for parts whose time is mostly outside
        of operators. Empty, with the reason, where no stack was sampled.
    """
    sampled = profile.meta.get("python_lines") or {}
    table = pd.DataFrame(sampled.get("rows"))
    if table.empty:
        reason = "no stack of Python code was sampled"
        return unmeasured(LINES, missing_reason(profile, ["python_lines"], reason))
    if sampled["operators"]:
        outside = outside_operators(profile)
        table = table.merge(outside.loc[outside["outside_share"].gt(MOSTLY_OUTSIDE), PART], on=PART)
    table["line"] = [
        f"{PurePath(file).name}:{at}" for file, at in zip(table["file"], table["at"], strict=True)
    ]
    table["share"] = table["time_ms"] / sampled["ms_per_iteration"]
    if step := profile.meta.get("reference"):  # sampling costs time of its own
        table["time_ms"] = table["share"] * step["ms"]
    return table.sort_values("time_ms", ascending=False, ignore_index=True)[LINES]
