"""Puts the parts of the step into a sampled profile, by the clock.

hpcrun's timeline says at which instant each sample was taken; the workload's
span log (``parts.log_spans``) says which part ran then. So every sample belongs
to a part without any Python frame in its call path. The profile's tree is laid
out anew: iteration, part, and below each part the call paths sampled in it; the
interpreter's own frames, which would be most of every path, become one node.

The spans enter the timeline as well. What is attributed to a part is then the
clock's own figure, as exact as the workload's timer, and the samples say what
the part did.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.parts import ITERATION_SPAN, SpanRow, parse_span
from dlrm_workbook.recordings.profile import (
    SCHEMA,
    Profile,
    inclusive_from_exclusive,
    nearest,
    typed,
)

INTERPRETER = ("libpython", "python")
"""How the file names of the interpreter's binaries begin."""

DETAIL = ("line", "instruction", "loop")
"""Kinds of contexts that are places in a function."""

OUTSIDE = -1
"""The part of a sample taken outside every span: start-up, the end."""


def with_spans(profile: Profile, spans: list[SpanRow], warmup: int = 0) -> Profile:
    """The profile with iteration and part nodes, iterations, and spans in its timeline.

    Values of every metric are divided among the parts as the samples of their
    context are; totals per thread and metric are kept.

    Args:
        profile: of an HPCToolkit database measured with ``-t``.
        spans: the workload's log of the same run.
        warmup: iterations at the beginning that do not count; their samples are outside.

    Returns:
        A new profile; the same profile if it has no timeline or there are no spans.
    """
    parts = [row for row in spans if parse_span(row[0])]
    loops = sorted(row for row in spans if row[0] == ITERATION_SPAN)[warmup:]
    parts = [row for row in parts if loops and row[1] >= loops[0][1]]
    if profile.trace.empty or not parts or not loops:
        return profile
    log = _Log(parts, loops)
    samples = profile.trace[["profile", "start_ns", "end_ns", "context"]].copy()
    samples["span"] = log.span_at(samples["start_ns"].to_numpy())
    samples["part"] = np.where(
        samples["span"] >= 0, log.part[np.maximum(samples["span"].to_numpy(), 0)], OUTSIDE
    )
    exclusive = _divided(profile, samples)
    layout = _Layout(profile, log.names, exclusive, samples)
    values = layout.values(exclusive)
    meta = {**profile.meta, "spans": len(parts)}
    meta.pop("overlong", None)  # of the rows of the trace as it was
    meta["not_measured"] = {k: v for k, v in profile.not_measured.items() if k != "iterations"}
    return Profile.build(
        contexts=layout.contexts,
        metrics=profile.metrics,
        values=values,
        threads=profile.threads,
        trace=layout.trace(samples, log, _main_thread(profile, samples)),
        iterations={
            "iteration": np.arange(len(loops)),
            "start_ns": [row[1] for row in loops],
            "end_ns": [row[2] for row in loops],
        },
        meta=meta,
    )


class _Log:
    """The span log as arrays, part spans in order of time; they do not overlap."""

    def __init__(self, parts: list[SpanRow], loops: list[SpanRow]) -> None:
        parts = sorted(parts, key=lambda row: row[1])
        self.names = sorted({row[0] for row in parts}, key=[row[0] for row in parts].index)
        number = {name: i for i, name in enumerate(self.names)}
        self.part = np.array([number[row[0]] for row in parts])
        self.start = np.array([row[1] for row in parts])
        self.end = np.array([row[2] for row in parts])
        self.loop_start = np.array([row[1] for row in loops])
        self.loop_end = np.array([row[2] for row in loops])

    def span_at(self, time_ns: np.ndarray) -> np.ndarray:
        """Number of the part span that is open at each instant, or -1."""
        span = np.searchsorted(self.start, time_ns, side="right") - 1
        inside = (span >= 0) & (time_ns < self.end[np.maximum(span, 0)])
        return np.where(inside, span, OUTSIDE)


def _main_thread(profile: Profile, samples: pd.DataFrame) -> int:
    """The thread that ran the parts: thread 0, or else the one with the most samples in parts."""
    first = profile.threads.query("kind == 'cpu_thread' and thread == 0")["profile"]
    inside = samples.loc[samples["span"] >= 0, "profile"].value_counts()
    if len(first) and (inside.empty or first.iloc[0] in inside.index):
        return int(first.iloc[0])
    return int(inside.idxmax()) if len(inside) else int(profile.threads["profile"].iloc[0])


def _divided(profile: Profile, samples: pd.DataFrame) -> pd.DataFrame:
    """Exclusive values by profile, context, metric and part.

    A function's value, its lines' and loops' included, goes to the parts as its
    samples on that thread do: the timeline names a sample's function and line, but
    leaves out the loops between and functions inlined into it. So a value without a
    sample of its own function goes as those of the nearest function around it that
    has any; where none has (the last sample of a thread has no interval) it is outside.
    """
    parent = profile.contexts["parent"].to_numpy()
    detail = profile.contexts["kind"].isin(DETAIL).to_numpy()
    function = nearest(parent, ~detail | (parent < 0))
    samples = samples.assign(function=function[samples["context"].to_numpy()])
    keys = ["profile", "function", "part"]
    counted = samples.groupby(keys).size().rename("count").reset_index()
    total = counted.groupby(["profile", "function"])["count"].transform("sum")
    counted["weight"] = counted["count"] / total
    values = profile.values[profile.values["scope"] == "exclusive"]
    values = values.assign(function=_sampled_functions(profile, values, counted, function))
    merged = values.merge(counted[[*keys, "weight"]], on=["profile", "function"], how="left")
    merged["part"] = merged["part"].fillna(OUTSIDE).astype(int)
    merged["value"] = merged["value"] * merged["weight"].fillna(1.0)
    return merged[["profile", "context", "metric", "part", "value"]]


def _sampled_functions(
    profile: Profile, values: pd.DataFrame, counted: pd.DataFrame, function: np.ndarray
) -> np.ndarray:
    """The function (values,) at or above each value that has samples on its thread, or -1."""
    count = len(function)
    sampled = (counted["profile"] * count + counted["function"]).unique()
    parent = profile.contexts["parent"].to_numpy()
    thread = values["profile"].to_numpy() * count
    found = function[values["context"].to_numpy()]
    searched = np.flatnonzero(~np.isin(thread + found, sampled))
    while len(searched):
        above = parent[found[searched]]
        found[searched] = np.where(above >= 0, function[np.maximum(above, 0)], -1)
        searched = searched[found[searched] >= 0]
        searched = searched[~np.isin(thread[searched] + found[searched], sampled)]
    return found


class _Layout:
    """The new tree: what was outside as before, then iteration, parts, and their paths."""

    def __init__(
        self, profile: Profile, names: list[str], exclusive: pd.DataFrame, samples: pd.DataFrame
    ) -> None:
        self.old = profile.contexts
        parent = self.old["parent"].to_numpy()
        module = self.old["module"].map(lambda path: PurePath(path).name)
        # Entry points and the root are no frames of a part; what is below them is.
        outer = self.old["kind"].isin(["root", "thread"])
        skipped = (module.str.startswith(INTERPRETER) | outer).to_numpy()
        # Lines and instructions of a skipped function go with it.
        detail = (self.old["kind"].isin(DETAIL) & (module == "")).to_numpy()
        for row in np.flatnonzero(detail).tolist():
            skipped[row] = parent[row] >= 0 and skipped[parent[row]]
        used = pd.concat([exclusive[["context", "part"]], samples[["context", "part"]]])
        used = used.drop_duplicates()
        frames = [self.old.assign(component="other", phase="")]
        # Row of (part, old row) in the new tree; parts from 0, outside last.
        self.row = np.full((len(names) + 1, len(self.old)), -1)
        self.row[OUTSIDE] = np.arange(len(self.old))
        iteration = len(self.old)
        frames.append(_node("annotation", ITERATION_SPAN, 0, "other", ""))
        self.iteration = iteration
        self.part_node = []
        count = iteration + 1
        for number, name in enumerate(names):
            component, phase = parse_span(name) or ("other", "")
            self.part_node.append(count)
            rows = used.loc[used["part"] == number, "context"].to_numpy()
            kept = _with_ancestors(rows, parent) & ~skipped
            own = count + 1  # the interpreter's frames, one node
            nearest, first = self._merged(kept, own)
            frames.append(_node("annotation", name, iteration, component, phase))
            frames.append(_node("python", "Python interpreter", count, component, phase))
            copied = self.old.iloc[first].assign(component=component, phase=phase)
            copied["parent"] = nearest[parent[first]]
            frames.append(copied)
            self.row[number] = nearest
            count = own + 1 + len(first)
        contexts = pd.concat(frames, ignore_index=True)
        contexts["context"] = np.arange(len(contexts))
        self.contexts = typed("contexts", contexts)

    def _merged(self, kept: np.ndarray, interpreter: int) -> tuple[np.ndarray, list[int]]:
        """Where each old row goes in a part's tree, and the old row of each new one.

        A row that is left out stands for the nearest kept one above it, or for the
        interpreter's node. Rows that thereby become siblings of one name and place are one.
        """
        parent = self.old["parent"].tolist()
        columns = ["kind", "name", "file", "line", "module"]
        what = list(self.old[columns].itertuples(index=False, name=None))
        place = [interpreter] * len(parent)
        known: dict[tuple[int, tuple[str, ...]], int] = {}
        first: list[int] = []
        keep = kept.tolist()
        for row, above in enumerate(parent):
            at = place[above] if above >= 0 else interpreter
            if keep[row]:
                key = (at, what[row])
                if key not in known:
                    first.append(row)
                    known[key] = interpreter + len(first)
                at = known[key]
            place[row] = at
        return np.array(place), first

    def values(self, exclusive: pd.DataFrame) -> pd.DataFrame:
        """Exclusive values at their new contexts, and inclusive ones computed from them."""
        placed = exclusive.assign(
            context=self.row[exclusive["part"].to_numpy(), exclusive["context"].to_numpy()]
        )
        keys = ["profile", "metric", "context"]
        placed = pd.DataFrame(placed.groupby(keys, as_index=False, observed=True)["value"].sum())
        parent = self.contexts["parent"].to_numpy()
        frames: list[pd.DataFrame] = [placed.assign(scope="exclusive")]
        for (thread, metric), rows in placed.groupby(["profile", "metric"], observed=True):
            column = np.zeros(len(parent))
            column[rows["context"].to_numpy()] = rows["value"].to_numpy()
            inclusive = inclusive_from_exclusive(parent, column)
            reached = np.flatnonzero(_with_ancestors(rows["context"].to_numpy(), parent))
            added: dict[str, Any] = {"profile": thread, "metric": metric, "scope": "inclusive"}
            frames.append(pd.DataFrame(added | {"context": reached, "value": inclusive[reached]}))
        return pd.concat(frames, ignore_index=True)[list(SCHEMA["values"])]

    def trace(self, samples: pd.DataFrame, log: _Log, main: int) -> pd.DataFrame:
        """Samples at their new contexts; on the main thread inside the spans that hold them."""
        part = samples["part"].to_numpy()
        context = self.row[part, samples["context"].to_numpy()]
        start, end = samples["start_ns"].to_numpy(), samples["end_ns"].to_numpy().copy()
        on_main = samples["profile"].to_numpy() == main
        span = samples["span"].to_numpy()
        inside = on_main & (span >= 0)
        end[inside] = np.minimum(end[inside], log.end[span[inside]])
        # A sample outside the parts lasts until the next iteration or part begins at most.
        outside = on_main & (span < 0)
        for begun in (log.loop_start, log.start):
            following = np.searchsorted(begun, start[outside], side="right")
            bounds = np.append(begun, np.iinfo(np.int64).max)[following]
            end[outside] = np.minimum(end[outside], bounds)
        # How deep an interval lies in others of its thread: samples in parts in iterations.
        loop = np.searchsorted(log.loop_start, start, side="right") - 1
        in_loop = on_main & (loop >= 0) & (start < log.loop_end[np.maximum(loop, 0)])
        part_nodes = np.array(self.part_node)[log.part]
        columns = ["profile", "start_ns", "end_ns", "context", "depth"]
        intervals = (
            (samples["profile"], start, end, context, in_loop.astype(int) + inside),
            (main, log.start, log.end, part_nodes, 1),
            (main, log.loop_start, log.loop_end, self.iteration, 0),
        )
        frames = [pd.DataFrame(dict(zip(columns, each, strict=True))) for each in intervals]
        return pd.concat(frames).sort_values(["profile", "start_ns", "depth"], ignore_index=True)


def _node(kind: str, name: str, parent: int, component: str, phase: str) -> pd.DataFrame:
    """A row of ``contexts`` without a place in the source."""
    row = (0, parent, kind, name, "", "", 0, "", component, phase)
    return pd.DataFrame([row], columns=list(SCHEMA["contexts"]))


def _with_ancestors(rows: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Mask (n,) of the rows and all that is above them."""
    mask = np.zeros(len(parent), dtype=bool)
    rows = np.unique(rows)
    while len(rows):
        mask[rows] = True
        rows = np.unique(parent[rows])
        rows = rows[rows >= 0]
        rows = rows[~mask[rows]]
    return mask
