"""Which Python lines the time outside of torch's operators is spent in.

Of a program that is not ours they are in the recording, from samples of its stack; of our own
workload they come from a few iterations that were sampled after the recorded ones. A line is one
of the program's own: what a library does is charged to the line that calls it.
"""

from __future__ import annotations

from pathlib import PurePath

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import PART, iteration_count
from dlrm_workbook.analysis.context_tree import missing_reason, unmeasured
from dlrm_workbook.analysis.idleness import outside_operators
from dlrm_workbook.recordings.profile import Profile, nearest
from dlrm_workbook.recordings.torch.stacks import LIBRARY

LINES = ["component", "phase", "function", "line", "time_ms", "share"]

MOSTLY = 0.5
"""Share of a part's time outside of operators from which on its lines are told, where samples
do not know operators."""


def python_lines(profile: Profile) -> pd.DataFrame:
    """Time by line of Python, outside of operators.

    Returns:
        ``component``, ``phase``, ``function``, ``line`` (FILE:LINE), ``time_ms`` (of a mean
        iteration) and ``share`` (of the iteration); most first. Of our own runs only for parts
        whose time is mostly outside of operators. Empty, with the reason, where no stack was
        sampled.
    """
    sampled = profile.meta.get("python_lines")
    table = _recorded(profile) if sampled is None else pd.DataFrame(sampled["rows"])
    if table.empty:
        reason = "no stack of Python code was sampled"
        return unmeasured(LINES, missing_reason(profile, ["python_lines"], reason))
    if sampled is not None:
        outside = outside_operators(profile)
        mostly = outside.loc[outside["outside_share"].gt(MOSTLY), PART]
        table = table.merge(mostly, on=PART)
        whole_ms = float(sampled["ms_per_iteration"])
    else:
        windows = profile.iterations
        whole_ms = float((windows["end_ns"] - windows["start_ns"]).mean()) / 1e6
    table = table.groupby([*PART, "function", "file", "at"]).sum().reset_index()
    table["line"] = [
        f"{PurePath(file).name}:{at}" for file, at in zip(table["file"], table["at"], strict=True)
    ]
    table["share"] = table["time_ms"] / whole_ms
    return table.sort_values("time_ms", ascending=False, ignore_index=True)[LINES]


def _recorded(profile: Profile) -> pd.DataFrame:
    """Own time of Python contexts by the line of the program that led there."""
    contexts = profile.contexts
    python = contexts["kind"].eq("python").to_numpy() & contexts["line"].gt(0).to_numpy()
    if not python.any() or not profile.has("cpu_time_ms"):
        return pd.DataFrame()
    own = python & ~contexts["file"].str.contains(LIBRARY).to_numpy()
    above = nearest(contexts["parent"].to_numpy(), own)
    above = np.where(above >= 0, above, np.arange(len(above)))
    time = profile.value_table("cpu_time_ms", "exclusive") / iteration_count(profile)
    chosen = python & (time > 0)
    place = contexts.iloc[above[chosen]]
    return pd.DataFrame(
        {
            "component": contexts["component"].to_numpy()[chosen],
            "phase": contexts["phase"].to_numpy()[chosen],
            "function": place["name"].str.rpartition(": ")[2].to_numpy(),
            "file": place["file"].to_numpy(),
            "at": place["line"].to_numpy(),
            "time_ms": time[chosen],
        }
    )
