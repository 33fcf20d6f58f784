"""Puts the parts of the step into a sampled profile, by the clock.

hpcrun's timeline says at which instant each sample was taken; the workload's
span log (``parts.log_spans``) says which part ran then. So every sample belongs
to a part without any Python frame in its call path. The profile's tree is laid
out anew: iteration, part, and below each part the call paths sampled in it; the
interpreter's own frames, which would be most of every path, become one node.

The spans enter the timeline as well. What is attributed to a part is then the
clock's own figure, as exact as the workload's timer, and the samples say what
the part did.

The work of a GPU runs later than the host's part that launched it, so the clock does not
place it. Its iteration and part come from its order (:mod:`dlrm_workbook.recordings.alignment`);
without a recording to align with it has its iteration alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dlrm_core.parts import ITERATION_SPAN, SpanRow, parse_span, span_name
from dlrm_workbook.ground.arrays import Ints
from dlrm_workbook.recordings.alignment import (
    CLOCKS_APART_NS,
    NO_ITERATION,
    align_profiles,
    operations_by_stream,
)
from dlrm_workbook.recordings.hpctoolkit.parts import DETAIL, is_count, scopes, shares_of_parts
from dlrm_workbook.recordings.nesting import last_ends, stretch_at
from dlrm_workbook.recordings.profile import (
    SCHEMA,
    Profile,
    inclusive_from_exclusive,
    nearest,
    typed,
)

INTERPRETER = ("libpython", "python")
"""How the file names of the interpreter's binaries begin."""

OUTSIDE_SPANS = -1
"""The part of a sample taken outside every span: start-up, the end."""

UNPLACED_WORK = "GPU work of no part"
"""Range of the GPU operations of an iteration whose part is not known."""


def with_spans(
    profile: Profile, spans: list[SpanRow], warmup: int = 0, other: Profile | str = ""
) -> Profile:
    """The profile with iteration and part nodes, iterations, and spans in its timeline.

    Values of every metric are divided among the parts as the samples of their
    context are, those of GPU work as its operations are; totals per thread and metric are kept.

    Args:
        profile: of an HPCToolkit database measured with ``-t``.
        spans: the workload's log of the same run.
        warmup: iterations at the beginning that do not count; their samples are outside.
        other: torch.profiler's recording of the same workload, which knows the part of each GPU
            operation; or why there is none.

    Returns:
        A new profile; the same profile if it has no timeline or there are no spans.
    """
    loops = sorted(row for row in spans if row[0] == ITERATION_SPAN)[warmup:]
    parts = [row for row in spans if parse_span(row[0]) and loops and row[1] >= loops[0][1]]
    if profile.trace.empty or not parts:
        return profile
    parts.sort(key=lambda row: row[1])
    part, names = pd.factorize(np.array([row[0] for row in parts], dtype=object))
    start, end = np.array([row[1:] for row in parts]).T
    log = Log([(_part_node(name),) for name in names], part, start, end, loops, interpreter=True)

    def place(work: pd.DataFrame, meta: dict[str, Any]) -> pd.DataFrame:
        placed = _placed(profile, work, spans, other, meta)
        chains = [
            (_part_node(UNPLACED_WORK if component == "other" else span_name(component, phase)),)
            for component, phase in placed[["component", "phase"]].itertuples(index=False)
        ]
        placed = placed.assign(iteration=placed["iteration"] - warmup, part=log.numbered(chains))
        return placed[placed["iteration"] >= 0]

    return laid_out(profile, log, place)


def laid_out(profile: Profile, log: Log, place: Place) -> Profile:
    """The profile with its samples below the iterations and the parts of a log. ``place`` is given
    the GPU's operations and the meta of the new profile, and says the ``iteration`` and the
    ``part`` (a number of the log) of those that are in iterations."""
    samples = profile.trace[["profile", "start_ns", "end_ns", "context"]].copy()
    samples["span"] = stretch_at(log.start, log.end, samples["start_ns"].to_numpy())
    # what was noticed was how iterations and parts were told without spans
    meta = {**profile.meta, "spans": len(log.part), "notices": []}
    meta.pop("overlong", None)  # of the rows of the trace as it was
    meta["not_measured"] = {k: v for k, v in profile.not_measured.items() if k != "iterations"}
    ends = log.loop_end
    work = operations_by_stream(profile)
    samples.loc[work.index, "span"] = OUTSIDE_SPANS
    samples.loc[work.index, "end_ns"] = work["end_ns"]
    span = samples["span"].to_numpy()
    samples["part"] = np.where(span >= 0, log.part[span], OUTSIDE_SPANS)
    if len(work):
        placed = place(work, meta)
        row, end = placed["iteration"].to_numpy(), placed["end_ns"].to_numpy()
        ends = last_ends(log.loop_start, ends, row, end)
        samples.loc[placed.index, "part"] = placed["part"]
    exclusive = _divided(profile, samples, work.index)
    layout = _Layout(profile, log, exclusive, samples)
    return Profile.build(
        contexts=layout.contexts,
        metrics=profile.metrics,
        values=layout.values(exclusive),
        threads=profile.threads,
        trace=layout.trace(samples, log, _main_thread(profile, samples)),
        iterations={
            "iteration": np.arange(len(log.loops)),
            "start_ns": log.loop_start,
            "end_ns": ends,
        },
        meta=meta,
    )


def _placed(
    profile: Profile,
    work: pd.DataFrame,
    spans: list[SpanRow],
    other: Profile | str,
    meta: dict[str, Any],
) -> pd.DataFrame:
    """Iteration and part of GPU operations; how they were found goes into ``meta``."""
    loops = sorted(row for row in spans if row[0] == ITERATION_SPAN)
    begins, ends = (np.array([row[place] for row in loops]) for place in (1, 2))
    reason = other if isinstance(other, str) else ""
    if not work["start_ns"].between(begins[0], ends[-1]).any():
        reason = "no GPU operation lies in the time of the iterations: the clocks differ"
    elif isinstance(other, Profile):
        alignment = align_profiles(profile, other, begins, ends)
        reason = alignment.reason
        meta["alignment"] = {"share": alignment.share, "time_share": alignment.time_share}
        if not reason:
            meta["notices"] = [
                "parts of GPU work come from its order: it was aligned with a torch.profiler "
                f"recording of the same workload; {alignment.share:.1%} of the operations of the "
                f"iterations ({alignment.time_share:.1%} of their time) have a twin there"
            ]
            early = _earliest(alignment.operations, spans, begins)
            if early > CLOCKS_APART_NS:
                caution = (
                    f"GPU operations begin up to {early / 1e6:.1f} ms before the host began the "
                    "part that launched them: the clocks differ, or the parts of GPU work are wrong"
                )
                meta["cautions"] = [*meta.get("cautions", []), caution]
            return alignment.operations
    number, how = launched_in(profile, work, begins, ends)
    meta["notices"] = [f"iterations are those of the workload's span log; {how}"]
    meta["not_measured"]["parts of GPU work"] = (
        reason or "there is no recording of torch.profiler to align it with"
    )
    return work.assign(iteration=number, component="other", phase="")


def _earliest(operations: pd.DataFrame, spans: list[SpanRow], begins: np.ndarray) -> int:
    """How long before the host began their part GPU operations begin at most, in nanoseconds."""
    rows = [(*part, start) for name, start, _ in spans if (part := parse_span(name))]
    parts = pd.DataFrame(rows, columns=["component", "phase", "begun"])
    parts["iteration"] = np.searchsorted(begins, parts["begun"], side="right") - 1
    keys = ["iteration", "component", "phase"]
    first = parts.groupby(keys)["begun"].min().reset_index()
    matched = operations[operations["matched"]].merge(first, on=keys)
    return int((matched["begun"] - matched["start_ns"]).max()) if len(matched) else 0


def launched_in(
    profile: Profile, work: pd.DataFrame, begins: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, str]:
    """Which iteration launched each GPU operation (operations,), −1 for none, and how it is known.

    The repeating sequence of launches tells iterations on the GPU. The last of them is the
    last of the host's, and none begins before the host's; where that does not hold, the clock
    decides: then an operation counts to the iteration that the host is in when it begins.
    ``begins`` and ``ends`` are of the host's iterations, in order.
    """
    start = work["start_ns"].to_numpy()
    on_gpu = profile.iterations.sort_values("start_ns")
    first = len(begins) - len(on_gpu)
    gpu_begins = on_gpu["start_ns"].to_numpy()
    if len(gpu_begins) and first >= 0 and (gpu_begins >= begins[first:] - CLOCKS_APART_NS).all():
        number = stretch_at(gpu_begins, on_gpu["end_ns"].to_numpy(), start)
        how = "GPU work counts to them by the repeating sequence of its launches"
        return np.where(number >= 0, number + first, NO_ITERATION), how
    how = (
        "GPU work counts to the one that the host was in when it began, which may be later than "
        "the one that launched it"
    )
    return stretch_at(begins, np.append(begins[1:], ends[-1]), start), how


class Node(NamedTuple):
    """A context of the new tree, as in the table of contexts."""

    kind: str
    name: str
    file: str = ""
    line: int = 0
    module: str = ""
    component: str = "other"
    phase: str = ""


Place = Callable[[pd.DataFrame, dict[str, Any]], pd.DataFrame]


@dataclass
class Log:
    """When each part of the program ran, in the order of time; parts do not overlap.

    Attributes:
        chains: the contexts of each part, outermost first, below those of the iteration.
        part: number of the part (stretches,) that ran from ``start`` to ``end`` (stretches,), ns.
        loops: the iterations.
        interpreter: whether frames of the interpreter are one node below each part.
    """

    chains: list[tuple[Node, ...]]
    part: Ints
    start: Ints
    end: Ints
    loops: list[SpanRow]
    interpreter: bool

    def __post_init__(self) -> None:
        self.loop_start, self.loop_end = np.array([row[1:] for row in self.loops]).T

    def numbered(self, chains: Sequence[tuple[Node, ...]]) -> list[int]:
        """Numbers of parts given by their contexts; new ones are added."""
        numbers = {chain: number for number, chain in enumerate(self.chains)}
        result = [numbers.setdefault(chain, len(numbers)) for chain in chains]
        self.chains = list(numbers)
        return result


def _part_node(name: str) -> Node:
    component, phase = parse_span(name) or ("other", "")
    return Node("annotation", name, component=component, phase=phase)


def _main_thread(profile: Profile, samples: pd.DataFrame) -> int:
    """The thread that ran the parts: thread 0, or else the one with the most samples in parts."""
    first = profile.threads.query("kind == 'cpu_thread' and thread == 0")["profile"]
    inside = samples.loc[samples["span"] >= 0, "profile"].value_counts()
    if len(first) and (inside.empty or first.iloc[0] in inside.index):
        return int(first.iloc[0])
    return int(inside.idxmax()) if len(inside) else int(profile.threads["profile"].iloc[0])


def _divided(profile: Profile, samples: pd.DataFrame, work: pd.Index) -> pd.DataFrame:
    """Exclusive values by profile, context, metric and part, which ``samples`` have of each row of
    the trace; ``work`` is the index of those that are GPU operations.

    A function's value, its lines' and loops' included, goes to the parts as its
    samples on that thread do: the timeline names a sample's function and line, but
    leaves out the loops between and functions inlined into it. So a value without a
    sample of its own function goes as those of the nearest function around it that
    has any; where none has (the last sample of a thread has no interval) it is outside.
    """
    parent = profile.contexts["parent"].to_numpy()
    function = scopes(profile.contexts)
    time = samples["end_ns"] - samples["start_ns"]
    samples = samples.assign(function=function[samples["context"].to_numpy()], time=time)
    values = profile.values[profile.values["scope"] == "exclusive"]
    values = values.assign(function=function[values["context"].to_numpy()])
    of_gpu = (nearest(parent, profile.of_kind("kernel", "copy")) >= 0)[values["context"].to_numpy()]
    # values of kernels lie on the thread that launched them, their operations on the streams
    device = _by_part(values[of_gpu], shares_of_parts(samples.loc[work], ["function"]))
    sampled = shares_of_parts(samples.drop(index=work).assign(time=1), ["profile", "function"])
    values = values[~of_gpu].copy()
    for thread, rows in values.groupby("profile"):
        marked = np.zeros(len(parent), dtype=bool)
        marked[sampled.loc[sampled["profile"] == thread, "function"]] = True
        values.loc[rows.index, "function"] = nearest(parent, marked)[rows["context"]]
    return pd.concat([_by_part(values, sampled), device], ignore_index=True)


def _by_part(values: pd.DataFrame, shares: pd.DataFrame) -> pd.DataFrame:
    """Values divided by the shares of parts: counts as operations are, the rest as their time."""
    on = [name for name in ("profile", "function") if name in shares]
    merged = values.merge(shares, on=on, how="left")
    counts = merged["metric"].astype(object).map(is_count).to_numpy(dtype=bool)
    weight = merged["count"].where(counts, merged["time"]).fillna(1.0)
    part = merged["part"].fillna(OUTSIDE_SPANS).astype(int)
    merged = merged.assign(part=part, value=merged["value"] * weight)
    return merged[["profile", "context", "metric", "part", "value"]]


class _Layout:
    """The new tree: what was outside as before, then iteration, parts, and their paths."""

    def __init__(
        self, profile: Profile, log: Log, exclusive: pd.DataFrame, samples: pd.DataFrame
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
        self.nodes: dict[tuple[int, Node], int] = {}
        self.iteration = self._node(0, Node("annotation", ITERATION_SPAN))
        self.part_node = []
        at: list[Ints] = []
        columns = ["kind", "name", "file", "line", "module"]
        what = [Node(*row) for row in self.old[columns].itertuples(index=False, name=None)]
        groups = dict(iter(used.groupby("part")["context"]))
        for number, chain in enumerate(log.chains):
            above = self.iteration
            for node in chain:
                above = self._node(above, node)
            self.part_node.append(above)
            component, phase = (chain[-1].component, chain[-1].phase) if chain else ("other", "")
            if log.interpreter:
                inner = Node("python", "Python interpreter", component=component, phase=phase)
                above = self._node(above, inner)
            rows = groups[number].to_numpy() if number in groups else np.zeros(0, dtype=np.int64)
            # A row that is left out stands for the nearest kept one above it, or for the last
            # context of the part. Rows that thereby become siblings of one name and place are one.
            place = {-1: above}
            for row in np.flatnonzero(_with_ancestors(rows, parent)).tolist():
                over = place[int(parent[row])]
                if not skipped[row]:
                    node = what[row]._replace(component=component, phase=phase)
                    over = self._node(over, node)
                place[row] = over
            at.append(np.array([(number, row, place[row]) for row in rows.tolist()]).reshape(-1, 3))
        added = [(above, *node) for above, node in self.nodes]
        new = pd.DataFrame(added, columns=["parent", *Node._fields]).assign(shapes="", context=0)
        contexts = pd.concat([self.old.assign(component="other", phase=""), new])
        self.contexts = typed("contexts", contexts.assign(context=np.arange(len(contexts))))
        table = np.concatenate([np.zeros((0, 3), dtype=np.int64), *at])
        key = table[:, 0] * len(self.old) + table[:, 1]
        order = np.argsort(key)
        self._key, self._row = key[order], table[order, 2]

    def _node(self, above: int, node: Node) -> int:
        """Row of a context below another, which is added where it is new."""
        return self.nodes.setdefault((above, node), len(self.old) + len(self.nodes))

    def rows(self, part: Ints, context: Ints) -> Ints:
        """Row (n,) in the new tree of contexts of the old one in parts."""
        inside = part != OUTSIDE_SPANS
        rows = context.copy()
        key = part[inside] * len(self.old) + context[inside]
        rows[inside] = self._row[np.searchsorted(self._key, key)]
        return rows

    def values(self, exclusive: pd.DataFrame) -> pd.DataFrame:
        """Exclusive values at their new contexts, and inclusive ones computed from them."""
        part, context = exclusive["part"].to_numpy(), exclusive["context"].to_numpy()
        placed = exclusive.assign(context=self.rows(part, context))
        keys = ["profile", "metric", "context"]
        placed = pd.DataFrame(placed.groupby(keys, as_index=False, observed=True)["value"].sum())
        parent = self.contexts["parent"].to_numpy()
        frames: list[pd.DataFrame] = [placed.assign(scope="exclusive")]
        for (thread, metric), rows in placed.groupby(["profile", "metric"], observed=True):
            contexts = rows["context"].to_numpy()
            inclusive = inclusive_from_exclusive(
                parent, np.bincount(contexts, rows["value"], minlength=len(parent))
            )
            reached = np.flatnonzero(_with_ancestors(contexts, parent))
            added: dict[str, Any] = {"profile": thread, "metric": metric, "scope": "inclusive"}
            frames.append(pd.DataFrame(added | {"context": reached, "value": inclusive[reached]}))
        return pd.concat(frames, ignore_index=True)[list(SCHEMA["values"])]

    def trace(self, samples: pd.DataFrame, log: Log, main: int) -> pd.DataFrame:
        """Samples at their new contexts; on the main thread inside the spans that hold them."""
        part = samples["part"].to_numpy()
        context = self.rows(part, samples["context"].to_numpy())
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
        in_loop = on_main & (stretch_at(log.loop_start, log.loop_end, start) >= 0)
        part_nodes = np.array(self.part_node)[log.part]
        columns = ["profile", "start_ns", "end_ns", "context", "depth"]
        intervals = (
            (samples["profile"], start, end, context, in_loop.astype(int) + inside),
            (main, log.start, log.end, part_nodes, 1),
            (main, log.loop_start, log.loop_end, self.iteration, 0),
        )
        frames = [pd.DataFrame(dict(zip(columns, cells, strict=True))) for cells in intervals]
        return pd.concat(frames).sort_values(["profile", "start_ns", "depth"], ignore_index=True)


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
