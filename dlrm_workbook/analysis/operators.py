"""Which operators and kernels the time goes to, where they are called, and when.

All times are milliseconds a mean iteration unless a name says otherwise.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlrm_core.parts import parse_span, part_label
from dlrm_workbook.analysis.attribution import (
    PART,
    host_time,
    iteration_count,
    main_thread,
    parts_at,
    step_contexts,
)
from dlrm_workbook.analysis.context_tree import stretch_at
from dlrm_workbook.recordings.profile import Profile

SMALL = "(small)"
"""Label of what a pruned call tree no longer shows apart."""

MERGE_GAP_NS = 2_000
"""Kernels of one part closer than this are drawn as one span."""


def top_operators(profile: Profile, count: int = 20) -> pd.DataFrame:
    """Where the time is spent itself, callees excluded.

    A row of kind ``annotation`` is the part's own Python code, outside all operators.

    Returns:
        ``name``, ``kind``, ``shapes``, ``component``, ``phase``, ``calls``,
        ``cpu_self_ms``, ``gpu_ms`` (NaN if not measured), ``share`` (of all GPU time
        where there is any, else of all CPU time), ``gflops_per_second`` (callees
        included; NaN where torch counts no operations); largest share first.
    """
    steps = iteration_count(profile)
    table = profile.contexts[["name", "kind", "shapes", *PART]].copy()
    columns = {
        "calls": ("calls", "exclusive"),
        "cpu_self_ms": ("cpu_time_ms", "exclusive"),
        "gpu_ms": ("gpu_time_ms", "exclusive"),
        "cpu_all_ms": ("cpu_time_ms", "inclusive"),
        "gpu_all_ms": ("gpu_time_ms", "inclusive"),
    }
    for column, (metric, scope) in columns.items():
        table[column] = profile.value_table(metric, scope).to_numpy() / steps
    table["cpu_self_ms"] = host_time(profile).to_numpy() / steps
    counted = profile.values[profile.rows("flops")]
    flops = counted.groupby("context")["value"].sum()
    table["flops"] = flops.reindex(table.index).to_numpy() / steps
    table = table[step_contexts(profile) & table["kind"].ne("thread")]
    keys = ["name", "kind", "shapes", *PART]
    # min_count: a sum over nothing measured is not measured, not 0.
    table = table.groupby(keys, as_index=False, sort=False).sum(min_count=1)
    table = table[table["cpu_self_ms"].gt(0) | table["gpu_ms"].gt(0)]
    on_gpu = profile.has("gpu_time_ms")
    time = table["gpu_ms" if on_gpu else "cpu_self_ms"]
    table["share"] = time / time.sum() if time.sum() > 0 else np.nan
    busy = table["gpu_all_ms" if on_gpu else "cpu_all_ms"]
    table["gflops_per_second"] = table["flops"] / busy.where(busy > 0) / 1e6
    order = ["share", "cpu_self_ms"]
    table = table.sort_values(order, ascending=False, ignore_index=True).head(count)
    return table.drop(columns=["cpu_all_ms", "gpu_all_ms", "flops"])


def call_tree(
    profile: Profile, metric: str = "cpu_time_ms", smallest_share: float = 0.001
) -> pd.DataFrame:
    """The call tree of the step for an icicle or flame graph.

    Contexts below ``smallest_share`` of the whole are joined, parent by parent, in one
    row labelled ``(small)``, so what a row's children leave of it is still its own time.

    Args:
        metric: an additive time: ``cpu_time_ms`` or ``gpu_time_ms``.

    Returns:
        ``id`` and ``parent`` (str, "" above a root), ``label``, ``kind``, ``shapes``,
        ``component``, ``phase``, ``value_ms`` (inclusive), ``self_ms``, ``share`` (of the whole);
        parents first.
        Empty if ``metric`` was not measured.
    """
    columns = ["id", "parent", "label", "kind", "shapes", *PART, "value_ms", "self_ms", "share"]
    if not profile.has(metric):
        return pd.DataFrame(columns=columns)
    contexts, steps = profile.contexts, iteration_count(profile)
    parent, within = contexts["parent"].to_numpy(), step_contexts(profile)
    root = within & ((parent < 0) | ~within[parent])
    table = contexts.assign(
        id=contexts["context"].astype(str),
        parent=np.where(root, "", contexts["parent"].astype(str)),
        label=contexts["name"],
        value_ms=profile.value_table(metric, "inclusive") / steps,
        self_ms=profile.value_table(metric) / steps,
    )
    value = table["value_ms"].to_numpy()
    taken = within & (value > 0)
    # A child has at most its parent's value, so what is shown hangs together.
    shown = taken & (root | (value >= smallest_share * value[root].sum()))
    hidden = table[taken & ~shown & shown[parent]]
    rest = hidden["value_ms"].groupby(hidden["parent"].astype(int)).sum()
    above = table.loc[rest.index]
    small = above.assign(id="small-" + above["id"], parent=above["id"], label=SMALL)
    small = small.assign(kind="", shapes="", value_ms=rest, self_ms=rest)
    tree = pd.concat([table[shown], small], ignore_index=True)
    return tree.assign(share=tree["value_ms"] / value[root].sum())[columns]


def timeline(profile: Profile, iterations: int = 3) -> pd.DataFrame:
    """What each lane does during the first iterations, to be drawn.

    Host lanes show the parts' ranges; GPU lanes the kernels and copies, neighbours of
    one part joined.

    Args:
        iterations: how many.

    Returns:
        ``iteration``, ``lane``, ``label``, ``component``, ``phase``, ``start_ms`` (from the
        iteration's start), ``duration_ms``, ``spans`` (of the trace, joined in the row).
    """
    named = profile.which("name", lambda name: parse_span(name) is not None)
    is_range = profile.of_kind("annotation") & named
    spans = _lane_spans(profile, iterations, is_range)
    if spans.empty:
        return spans
    keys = ["thread", "iteration", *PART]
    same = (spans[keys] == spans[keys].shift()).all(axis=1)
    near = spans["start_ns"] - spans["end_ns"].shift() < MERGE_GAP_NS
    table = spans.groupby((~(spans["on_gpu"] & same & near)).cumsum()).agg(
        **{name: (name, "first") for name in ("iteration", "begin_ns", "lane", *PART, "start_ns")},
        end_ns=("end_ns", "max"),
        spans=("start_ns", "size"),
    )
    table["label"] = list(map(part_label, table["component"], table["phase"]))
    return _timed(table)


def operator_spans(profile: Profile, iterations: int = 3, most: int = 1500) -> pd.DataFrame:
    """What :func:`timeline` joins, one by one: outermost operators on the host, kernels on the GPU.

    Args:
        iterations: how many.
        most: at most so many spans, the longest ones.

    Returns:
        The columns of :func:`timeline`; ``label`` is the operator's or kernel's name.
    """
    contexts = profile.contexts
    is_operator = profile.of_kind("operator")
    parent = contexts["parent"].to_numpy()
    outermost = is_operator & ~((parent >= 0) & is_operator[np.maximum(parent, 0)])
    spans = _lane_spans(profile, iterations, outermost)
    if spans.empty:
        return spans
    spans["label"] = contexts["name"].to_numpy()[spans["context"]]
    length = spans["end_ns"] - spans["start_ns"]
    kept = spans.loc[length.sort_values(ascending=False, kind="stable").index[:most]].sort_index()
    return _timed(kept.assign(spans=1))


_TIMELINE = ["iteration", "lane", "label", *PART, "start_ms", "duration_ms", "spans"]


def _lane_spans(profile: Profile, iterations: int, wanted: np.ndarray) -> pd.DataFrame:
    """Spans of the first iterations: all on GPU lanes, on host lanes those of wanted contexts."""
    chosen = profile.iterations.sort_values("start_ns").head(iterations)
    first, last = chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy()
    trace = profile.trace[["profile", "context", "start_ns", "end_ns"]]
    spans = trace.merge(profile.threads[["profile", "kind", "name"]], on="profile")
    on_gpu = spans["kind"].eq("gpu_stream")
    place = stretch_at(first, last, spans["start_ns"].to_numpy())
    spans = spans.assign(place=place, on_gpu=on_gpu)
    spans = spans[(place >= 0) & (on_gpu | wanted[spans["context"].to_numpy()])]
    if spans.empty:
        return pd.DataFrame(columns=_TIMELINE)
    order = dict(zip(profile.threads["profile"], range(len(profile.threads)), strict=True))
    spans = spans.assign(thread=spans["profile"].map(order))
    spans = spans.sort_values(["thread", "place", "start_ns"], kind="stable", ignore_index=True)
    spans[PART] = parts_at(profile, spans["context"].to_numpy())
    is_main = ~spans["on_gpu"] & spans["profile"].eq(main_thread(profile))
    spans["lane"] = spans["name"].astype(str).mask(is_main, "main thread")
    place = spans["place"].to_numpy()
    return spans.assign(iteration=chosen["iteration"].to_numpy()[place], begin_ns=first[place])


def _timed(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans with times from their iteration's start, in milliseconds."""
    start_ms = (spans["start_ns"] - spans["begin_ns"]) / 1e6
    duration_ms = (spans["end_ns"] - spans["start_ns"]) / 1e6
    table = spans.assign(start_ms=start_ms, duration_ms=duration_ms)
    return table[_TIMELINE].reset_index(drop=True)


def memory(profile: Profile) -> pd.DataFrame:
    """Megabytes (10^6 B) that each part allocates through torch in a mean iteration.

    Returns:
        ``component``, ``phase``, ``device`` (``cpu`` or ``gpu``), ``allocated_mb``,
        largest first. Empty if memory was not recorded.
    """
    pieces = []
    for device, metric in (("cpu", "allocated_bytes"), ("gpu", "gpu_allocated_bytes")):
        if not profile.has(metric):
            continue
        table = profile.contexts[PART].copy()
        table["allocated_mb"] = profile.value_table(metric) / iteration_count(profile) / 1e6
        table = table[step_contexts(profile) & table["allocated_mb"].gt(0)]
        table = table.groupby(PART, as_index=False)[["allocated_mb"]].sum()
        pieces.append(table.assign(device=device))
    columns = [*PART, "device", "allocated_mb"]
    if not pieces:
        return pd.DataFrame(columns=columns)
    table = pd.concat(pieces, ignore_index=True)[columns]
    return table.sort_values("allocated_mb", ascending=False, ignore_index=True)


def memory_curve(profile: Profile) -> pd.DataFrame:
    """Memory allocated through torch over time, counted from the recording's start.

    Returns:
        ``device``, ``time_ms``, ``allocated_mb`` (10^6 B); empty if not recorded.
    """
    pieces = [
        pd.DataFrame(
            {
                "device": device,
                "time_ms": curve["time_ms"],
                "allocated_mb": np.array(curve["bytes"], dtype=float) / 1e6,
            }
        )
        for device, curve in profile.meta.get("memory", {}).items()
    ]
    if not pieces:
        return pd.DataFrame(columns=["device", "time_ms", "allocated_mb"])
    return pd.concat(pieces, ignore_index=True)
