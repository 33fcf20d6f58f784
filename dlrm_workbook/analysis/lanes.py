"""What every thread and GPU stream did over the run, few enough spans to draw.

A trace has a span for each event or sample, up to millions. A picture shows some hundred
a lane. Here time is cut into equal bins where it must be, and what a bin held is kept to
the nanosecond by label: the drawing is coarser, the shares are exact.

In a sampled trace (HPCToolkit) a thread counts as running the code of its last sample until
the next one, also while it sleeps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import PART
from dlrm_workbook.analysis.context_tree import (
    Ints,
    distinct,
    missing_reason,
    running,
    scopes_of,
    unmeasured,
)
from dlrm_workbook.recordings.profile import Profile

LANE = ["lane", "kind", "profile"]
SPANS = [*LANE, "label", *PART, "start_ms", "duration_ms", "spans"]
LANE_COLUMNS = [*LANE, "rank", "spans", "start_ms", "end_ms", "running_ms", "running_share"]
LANE_COLUMNS += ["largest", "largest_share"]

MOST_SPANS, MOST_OF_ALL = 200, 3000
"""Rows of a lane, and of all lanes; where a trace has more spans, time is cut into bins."""

MOST_LABELS = 12
"""Functions a lane tells apart; the others share one label."""
OTHERS = "(others)"


def thread_timeline(profile: Profile, by: str = "component") -> pd.DataFrame:
    """Spans of each CPU thread and each GPU stream, ready to draw.

    Args:
        by: ``component`` (part and phase) or ``function`` (the innermost one).

    Returns:
        ``lane``, ``kind`` (``cpu_thread`` or ``gpu_stream``), ``profile``, ``label``,
        ``component``, ``phase``, ``start_ms`` (from the start of the trace),
        ``duration_ms``, ``spans`` (of the trace, that are joined in the row). Without
        overlaps in a lane; nothing runs between rows. The durations of a label in a lane
        add up to what the trace has. CPU threads first. Empty, with the reason in
        ``attrs["not_measured"]``, without a trace.

    Raises:
        InputError: ``by`` is unknown.
    """
    if by not in ("component", "function"):
        raise InputError(f"a timeline is by component or function, not by '{by}'")
    trace = profile.trace
    if trace.empty:
        return unmeasured(SPANS, _why(profile))
    first, last = int(trace["start_ns"].min()), int(trace["end_ns"].max())
    label, names = _labels(profile, by)
    frames, lanes = [], _lanes(profile)
    most = min(MOST_SPANS, MOST_OF_ALL // max(len(lanes), 1))
    for lane in lanes:
        start, end, context = running(profile, lane["profile"])
        if not len(start):
            continue
        code, shown = label[context], names
        if by == "function":
            code, shown = _largest(code, end - start, names)
        spans = coarsened(start - first, end - first, code, last - first, most)
        rows = shown.iloc[spans["code"]].reset_index(drop=True)
        rows = rows.assign(
            **{name: lane[name] for name in LANE},
            start_ms=spans["start"] / 1e6,
            duration_ms=spans["length"] / 1e6,
            spans=spans["spans"],
        )
        frames.append(rows[SPANS])
    if not frames:
        return unmeasured(SPANS, "nothing ran on any thread of the trace")
    return pd.concat(frames, ignore_index=True)


def trace_summary(profile: Profile, by: str = "component") -> pd.DataFrame:
    """How much of the traced time each thread and stream ran, and what most.

    Args:
        by: ``component`` or ``function``: what ``largest`` names.

    Returns:
        ``lane``, ``kind``, ``profile``, ``rank``, ``spans`` (in the trace), ``start_ms``
        and ``end_ms`` (from the start of the whole trace), ``running_ms``,
        ``running_share`` (of the whole trace's time), ``largest`` (label) and
        ``largest_share`` (of the lane's running time). Empty, with the reason in
        ``attrs["not_measured"]``, without a trace.
    """
    trace = profile.trace
    if trace.empty:
        return unmeasured(LANE_COLUMNS, _why(profile))
    first, last = int(trace["start_ns"].min()), int(trace["end_ns"].max())
    label, names = _labels(profile, by)
    rows = []
    for lane in _lanes(profile):
        start, end, context = running(profile, lane["profile"])
        length = end - start
        held = np.bincount(label[context], length, len(names))
        largest = int(np.argmax(held))
        total = float(length.sum())
        rows.append(
            {
                **{name: lane[name] for name in [*LANE, "rank"]},
                "spans": int(trace["profile"].eq(lane["profile"]).sum()),
                "start_ms": (int(start[0]) - first) / 1e6 if len(start) else np.nan,
                "end_ms": (int(end.max()) - first) / 1e6 if len(start) else np.nan,
                "running_ms": total / 1e6,
                "running_share": total / (last - first) if last > first else np.nan,
                "largest": names["label"].iloc[largest] if total else "",
                "largest_share": held[largest] / total if total else np.nan,
            }
        )
    return pd.DataFrame(rows, columns=LANE_COLUMNS)


def _why(profile: Profile) -> str:
    return missing_reason(profile, ["trace"], "no trace was recorded; measure with hpcrun -t")


def _lanes(profile: Profile) -> list[dict[str, Any]]:
    """Threads with a trace, CPU first, each with a name of its own (``lane``)."""
    table = profile.threads[profile.threads["profile"].isin(profile.trace["profile"])]
    name = table["name"].astype(str)
    if table["rank"].nunique() > 1:
        name = "rank " + table["rank"].astype(str) + " " + name
    twice = name.duplicated(keep=False)
    name = name.where(~twice, name + " (" + table["profile"].astype(str) + ")")
    table = table.assign(lane=name).sort_values(["kind", "rank", "thread"], kind="stable")
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _labels(profile: Profile, by: str) -> tuple[Ints, pd.DataFrame]:
    """(label of each context (n,), the labels with ``component`` and ``phase``)."""
    contexts = profile.contexts
    if by == "component":
        number = contexts.groupby(PART, sort=False).ngroup().to_numpy().astype(np.int64)
        names = contexts[PART].drop_duplicates().reset_index(drop=True)
        label = [part_label(component, phase) for component, phase in names.to_numpy()]
        return number, names.assign(label=label)
    number, labels = pd.factorize(contexts["name"].to_numpy()[scopes_of(contexts)])
    # a function's colour is that of the part that it is most often seen in
    part = contexts[PART].assign(number=number)
    part = part.value_counts().reset_index().drop_duplicates("number").sort_values("number")
    part = part[PART].reset_index(drop=True)
    return number.astype(np.int64), part.assign(label=labels)


def _largest(code: Ints, length: Ints, names: pd.DataFrame) -> tuple[Ints, pd.DataFrame]:
    """(codes renumbered by time, their names); the small ones become ``OTHERS``."""
    held = np.bincount(code, length, len(names))
    order = np.argsort(-held, kind="stable")
    kept = order[:MOST_LABELS][held[order[:MOST_LABELS]] > 0]
    renumber = np.full(len(names), len(kept), dtype=np.int64)
    renumber[kept] = np.arange(len(kept))
    others = pd.DataFrame({"label": [OTHERS], "component": ["other"], "phase": [""]})
    return renumber[code], pd.concat([names.iloc[kept], others], ignore_index=True)


def _joined(start: Ints, end: Ints, code: Ints) -> pd.DataFrame:
    """Neighbours of one label that touch, as one span."""
    new = np.concatenate([[True], (code[1:] != code[:-1]) | (start[1:] > end[:-1])])
    first = np.flatnonzero(new)
    number = np.diff(np.append(first, len(start)))
    length = np.add.reduceat(end - start, first)
    return pd.DataFrame(
        {"code": code[first], "start": start[first], "length": length, "spans": number}
    )


def coarsened(start: Ints, end: Ints, code: Ints, length: int, most: int) -> pd.DataFrame:
    """At most so many spans ``code``, ``start``, ``length``, ``spans``, in order.

    Args:
        start, end: ns since the time that is drawn begins (small numbers: floats keep them).
        code: number of each span's label; the sum of each is kept to the nanosecond.
        length: of the time that is drawn, ns.
        most: rows; where there are more, time is cut into bins.
    """
    spans = _joined(start, end, code)
    most = max(most, len(np.unique(code)))  # each label has a row of its own
    bins = most
    while len(spans) > most:
        edges = np.linspace(0, length, bins + 1).astype(np.int64)
        spans = _binned(start, end, code, np.unique(edges))
        bins = max(1, min(bins - 1, bins * most // (len(spans) + 1)))
    return spans


def _binned(start: Ints, end: Ints, code: Ints, edges: Ints) -> pd.DataFrame:
    """One span a label and bin, in the order in which the labels lie in the bin."""
    inner = edges[1:-1]
    # cut the spans at the edges of the bins
    cut_start = distinct([start, inner])
    owner = np.searchsorted(start, cut_start, side="right") - 1
    cut_end = np.append(cut_start[1:], end[-1])
    cut_end = np.minimum(cut_end, end[np.maximum(owner, 0)])
    real = (owner >= 0) & (cut_end > cut_start)
    cut_start, cut_end, owner = cut_start[real], cut_end[real], owner[real]
    place = np.searchsorted(inner, cut_start, side="right")
    table = pd.DataFrame(
        {
            "bin": place,
            "code": code[owner],
            "length": cut_end - cut_start,
            "moment": (cut_end - cut_start) * (cut_start + cut_end) / 2,
            "spans": (cut_start == start[owner]).astype(int),
        }
    )
    table = table.groupby(["bin", "code"], as_index=False).sum()
    table["middle"] = table["moment"] / table["length"]
    table = table.sort_values(["bin", "middle"], ignore_index=True)
    # within a bin the labels lie side by side from its start; what is left of it is idle
    before = table.groupby("bin")["length"].cumsum() - table["length"]
    table["start"] = edges[table["bin"]] + before
    begin, length = table["start"].to_numpy(), table["length"].to_numpy()
    new = np.ones(len(table), dtype=bool)
    same = table["code"].to_numpy()[1:] == table["code"].to_numpy()[:-1]
    new[1:] = ~(same & (begin[1:] <= (begin + length)[:-1]))
    rows = table.assign(run=np.cumsum(new)).groupby("run", as_index=False)
    return rows.agg(
        code=("code", "first"),
        start=("start", "first"),
        length=("length", "sum"),
        spans=("spans", "sum"),
    )
