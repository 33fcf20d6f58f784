"""Shapes and memory that were recorded in other iterations than times.

Recording them slows a program down, so a session records them in some iterations of their own
(``trace_details.json.gz``). An iteration runs the same operators as the next one: the k-th call of
an operator on a thread is that of the other iteration. Where an iteration calls it more or less
often, its calls have shapes if all of them in the other iteration have the same.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Floats, Ints
from dlrm_workbook.ground.marks import STEP_MARK
from dlrm_workbook.recordings.nesting import innermost, nest
from dlrm_workbook.recordings.torch.chrome_trace import Events

TEXTS = ["shapes", "types", "values"]
"""Columns of spans that torch fills where it records shapes."""

ALLOCATIONS = ["allocated_bytes", "gpu_allocated_bytes"]
"""Columns of spans for the bytes that are allocated in them and in no span inside."""

MOST_UNKNOWN = 0.01
"""Operators may find no counterpart up to this share before the page says so."""

_CALL = ["turn", "line", "name"]


def join_details(events: Events, details: Events) -> None:
    """Give the spans of one trace what the ``details`` of another one of the same process say,
    :data:`TEXTS` and, where memory was recorded, :data:`ALLOCATIONS`; and its memory curve.

    Each iteration takes the details of one of the other trace's, in turns, so that sizes which
    differ between iterations still do.
    """
    columns = TEXTS.copy()
    if len(details.memory):
        columns += ALLOCATIONS
        details.host = details.host.assign(**allocated(details.host, details.memory))
    given, wanted = _calls(details.host), _calls(events.host)
    if given.empty or wanted.empty:
        return
    wanted["turn"] %= int(given["turn"].max()) + 1
    given = given.join(details.host[columns])
    each = given.groupby(_CALL, sort=False)
    alike = each[columns].transform("nunique").eq(1).all(axis=1)
    number = [*_CALL, "number"]
    joined = wanted.reset_index().merge(given, "left", number, suffixes=("", "_given"))
    same = joined["often"].eq(joined["often_given"])
    steady = given[alike].drop_duplicates(_CALL)[[*_CALL, *columns]]
    any_call = joined[_CALL].merge(steady, "left", _CALL)
    for column in columns:
        found = joined[column].where(same, any_call[column])
        missing = "" if column in TEXTS else 0.0
        whole = pd.Series(missing, index=events.host.index)
        whole.loc[joined["index"].to_numpy()] = found.fillna(missing).to_numpy()
        events.host[column] = whole
    unknown = float((~same & any_call["shapes"].isna()).mean())
    if unknown > MOST_UNKNOWN:
        events.cautions.append(
            f"{unknown:.1%} of the calls of operators have no counterpart in the iterations in "
            "which shapes and memory were recorded; their bytes and operations are not counted."
        )
    events.memory = details.memory


def _calls(host: pd.DataFrame) -> pd.DataFrame:
    """The operators and ranges within iterations, with the row's index in ``host``: turn (number of
    the iteration), line, name, number (of the call among those of its name in its iteration and
    thread), often (how many those are)."""
    marks = np.sort(host.loc[host["name"].eq(STEP_MARK), "start"].to_numpy())
    turn = np.searchsorted(marks, host["start"].to_numpy(), side="right") - 1
    chosen = host["kind"].isin(["operator", "annotation"]).to_numpy()
    chosen &= (turn >= 0) & (turn < len(marks) - 1)
    calls = host.loc[chosen, ["line", "name", "start", "duration"]].assign(turn=turn[chosen])
    calls = calls.sort_values(["start", "duration"], ascending=[True, False], kind="stable")
    each = calls.groupby(_CALL, sort=False)["start"]
    calls["number"], calls["often"] = each.cumcount(), each.transform("size")
    return calls.drop(columns=["start", "duration"])


def allocated(host: pd.DataFrame, memory: pd.DataFrame) -> dict[str, Floats]:
    """:data:`ALLOCATIONS` of each span (n,); frees are not subtracted. ``host`` has spans with
    line, start, end, and parent (row) where they are nested."""
    amounts = {name: np.zeros(len(host)) for name in ALLOCATIONS}
    lines = host["line"].to_numpy()
    for line, events in memory[memory["bytes"].gt(0)].groupby("line", observed=True):
        rows: Ints = np.flatnonzero(lines == line)
        spans = host.iloc[rows]
        start, end = spans["start"].to_numpy(), spans["end"].to_numpy()
        if "parent" in spans:
            parent = np.where(spans["parent"] >= 0, np.searchsorted(rows, spans["parent"]), -1)
        else:
            start, end, parent, _ = nest(start, end, np.zeros(len(rows), dtype=bool))
        inside = innermost(start, end, parent, events["start"].to_numpy())
        on_host = events["device"].eq("cpu").to_numpy()
        for name, chosen in zip(ALLOCATIONS, (on_host, ~on_host), strict=True):
            counted = chosen & (inside >= 0)
            size = events["bytes"].to_numpy(dtype=float)[counted]
            np.add.at(amounts[name], rows[inside[counted]], size)
    return amounts
