"""What every thread and GPU stream did over the run, few enough spans to draw.

A trace has a span for each event or sample, up to millions; a picture shows some thousand. The
long ones, such as those of every step, are drawn as they were. Of short ones between them those of
one label are joined where there are too many, and the row says how many it stands for: the
drawing is coarser, the shares are exact to the nanosecond.

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
from dlrm_workbook.analysis.context_tree import running, scopes_of, unmeasured
from dlrm_workbook.analysis.device_counters import counter_curves
from dlrm_workbook.ground.arrays import Ints
from dlrm_workbook.recordings.profile import Profile

LANE = ["lane", "kind", "profile"]
SPANS = [*LANE, "label", *PART, "start_ms", "duration_ms", "spans"]

MOST_OF_ALL = 3000
"""Rows of all lanes together; a lane that needs fewer than its share leaves them to the others."""

MOST_LANES = 300
"""Threads and streams that are looked at one by one, those that ran longest."""

MOST_LABELS = 12
"""Functions a lane tells apart; the others share one label."""
OTHERS = "(others)"


def thread_timeline(profile: Profile, by: str = "component") -> pd.DataFrame:
    """Spans of each CPU thread and each GPU stream, ready to draw; CPU threads first.

    Rows of a lane do not overlap, and nothing runs between them. The durations of a label in a lane
    add up to what the trace has. Sampled hardware counters are in ``attrs["counters"]``. Empty,
    with the reason in ``attrs["not_measured"]``, without a trace. They are ``by`` ``component``
    (part and phase) or ``function`` (the innermost one); an InputError refuses others.
    """
    if by not in ("component", "function"):
        raise InputError(f"a timeline is by component or function, not by '{by}'")
    trace = profile.trace
    if trace.empty:
        return unmeasured(SPANS, "no trace was recorded; measure with hpcrun -t", profile, "trace")
    first = int(trace["start_ns"].min())
    label, names = _labels(profile, by)
    frames, left = {}, MOST_OF_ALL
    lanes = [(lane, *running(profile, lane["profile"])) for lane in _lanes(profile)]
    by_size = sorted(range(len(lanes)), key=lambda row: len(lanes[row][1]))
    for done, row in enumerate(by_size):
        lane, start, end, context = lanes[row]
        if not len(start):
            continue
        code, shown = label[context], names
        if by == "function":
            code, shown = _largest(code, end - start, names)
        most = left // (len(lanes) - done)
        spans = coarsened(start - first, end - first, code, most)
        left -= len(spans)
        rows = shown.iloc[spans["code"]].reset_index(drop=True)
        rows = rows.assign(
            **{name: lane[name] for name in LANE},
            start_ms=spans["start"] / 1e6,
            duration_ms=spans["length"] / 1e6,
            spans=spans["spans"],
        )
        frames[row] = rows[SPANS]
    if not frames:
        return unmeasured(SPANS, "nothing ran on any thread of the trace")
    table = pd.concat([frames[row] for row in sorted(frames)], ignore_index=True)
    counters = counter_curves(profile)
    table.attrs["counters"] = counters.assign(time_ms=counters["time_ms"] - first / 1e6)
    return table


def _lanes(profile: Profile) -> list[dict[str, Any]]:
    """Threads with a trace, CPU first, each with a name of its own (``lane``).

    At most :data:`MOST_LANES`; :func:`~dlrm_workbook.analysis.findings.cautions` says so.
    """
    table = profile.threads[profile.threads["profile"].isin(profile.trace["profile"])]
    if len(table) > MOST_LANES:
        trace = profile.trace
        ran = (trace["end_ns"] - trace["start_ns"]).groupby(trace["profile"]).sum()
        table = table[table["profile"].isin(ran.nlargest(MOST_LANES).index)]
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


def coarsened(start: Ints, end: Ints, code: Ints, most: int) -> pd.DataFrame:
    """At most so many spans ``code``, ``start``, ``length``, ``spans``, in order.

    The longest stay as they are; of the short ones between two of them those of one label are
    joined, the labels side by side from where they began. More of them are joined until all fit.
    ``start`` and ``end`` are ns since the time that is drawn begins (small numbers: floats keep
    them), ``code`` is the number of each span's label; the sum of each is kept to the nanosecond.
    """
    real = _joined(start, end, code)
    spans, kept = real, max(most, len(np.unique(code)))  # each label has a row of its own
    most = kept
    longest = real["length"].to_numpy().argsort(kind="stable")[::-1]
    while len(spans) > most:
        kept = min(kept - 1, kept * most // len(spans))
        spans = _short_joined(real, longest[: max(kept, 0)])
    return spans


def _short_joined(spans: pd.DataFrame, kept: Ints) -> pd.DataFrame:
    """Join the spans of a label that lie between the same two rows ``kept``, which stay."""
    alone = np.zeros(len(spans), dtype=bool)
    alone[kept] = True
    numbers = np.cumsum(alone) * 2 - alone  # odd for a row that is kept, even for what follows it
    table = spans.assign(group=numbers).groupby(["group", "code"], as_index=False, sort=False)
    rows = table.agg(start=("start", "first"), length=("length", "sum"), spans=("spans", "sum"))
    # a label begins where its first span does, or where the joined ones before it end
    group = rows["group"]
    before = rows.groupby("group", sort=False)["length"].cumsum() - rows["length"]
    rows["start"] = (rows["start"] - before).groupby(group, sort=False).cummax() + before
    return rows[["code", "start", "length", "spans"]]
