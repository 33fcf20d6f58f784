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
from dlrm_workbook.analysis.context_tree import running_table, scopes_of
from dlrm_workbook.analysis.kernel_names import short_names
from dlrm_workbook.analysis.lanes import coarsened
from dlrm_workbook.recordings.nesting import start_and_end, stretch_at
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive, nearest

SMALL = "(small)"
"""Label of what a pruned call tree no longer shows apart."""

MERGE_GAP_NS, CALL_GAP_NS = 2_000, 20_000
"""Kernels, and operators, of one part closer than this are drawn as one span."""

MOST_SPANS = 400
"""Rows of a lane in an iteration of :func:`timeline`, where no ranges are drawn."""


def top_operators(profile: Profile, count: int = 20) -> pd.DataFrame:
    """List what takes time itself, callees excluded, a line as its function; the largest first.

    A row of kind ``annotation`` is the part's own Python code, outside all operators.
    ``gflops_per_second`` is NaN where torch counts no operations.
    """
    steps = iteration_count(profile)
    table = profile.contexts[["name", "kind", "shapes", *PART]].copy()
    table[["name", "kind"]] = table[["name", "kind"]].to_numpy()[scopes_of(profile.contexts)]
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
    profile: Profile, metric: str = "cpu_time_ms", smallest_share: float = 0.001, most: int = 300
) -> pd.DataFrame:
    """The call tree of the step for an icicle or flame graph, parents first.

    Contexts below ``smallest_share`` of the whole are joined, parent by parent, in one
    row labelled ``(small)``, so what a row's children leave of it is still its own time. Of a
    chain of calls that have no time of their own and call one function each, the first and the
    last are rows; the last one names those between in ``through``. Empty if ``metric`` was not
    measured.

    Args:
        metric: an additive time: ``cpu_time_ms`` or ``gpu_time_ms``.
        smallest_share: of the whole; it is raised until there are at most ``most`` rows, and
            ``attrs["smallest_share"]`` says to what.
        most: rows of the tree.
    """
    columns = ["id", "parent", "label", "kind", "shapes", *PART, "value_ms", "self_ms", "share"]
    columns.append("through")
    if not profile.has(metric):
        return pd.DataFrame(columns=columns)
    contexts, steps = profile.contexts, iteration_count(profile)
    parent, within = contexts["parent"].to_numpy(), step_contexts(profile)
    root = within & ((parent < 0) | ~within[parent])
    # what lies outside the step, such as start-up, is in no caller's time either
    self_ms = np.where(within, profile.value_table(metric).to_numpy() / steps, 0.0)
    table = contexts.assign(
        id=contexts["context"].astype(str),
        parent=np.where(root, "", contexts["parent"].astype(str)),
        label=contexts["name"],
        value_ms=inclusive_from_exclusive(parent, self_ms),
        self_ms=self_ms,
    )
    value = table["value_ms"].to_numpy()
    taken = within & (value > 0)
    # A child has at most its parent's value, so what is shown hangs together.
    whole = value[root].sum()
    while True:
        shown = taken & (root | (value >= smallest_share * whole))
        hidden = table[taken & ~shown & shown[parent]]
        rest = hidden["value_ms"].groupby(hidden["parent"].astype(int)).sum()
        above = table.loc[rest.index]
        small = above.assign(id="small-" + above["id"], parent=above["id"], label=SMALL)
        small = small.assign(kind="", shapes="", value_ms=rest, self_ms=rest)
        tree = _without_links(pd.concat([table[shown], small], ignore_index=True))
        if len(tree) <= most or smallest_share > 1:
            break
        smallest_share = max(1.25 * smallest_share, 0.001)
    tree = tree.assign(share=tree["value_ms"] / whole)[columns]
    tree.attrs["smallest_share"] = smallest_share
    return tree


def _without_links(tree: pd.DataFrame) -> pd.DataFrame:
    """The tree without calls that only hand on to one other, with ``through``; parents first."""
    callees = tree["parent"].value_counts()
    alone = tree["parent"].map(callees).eq(1) & tree["id"].map(callees).eq(1)
    hands_on = tree["self_ms"].abs() <= 1e-9 * tree["value_ms"]
    # ranges stay: they name the parts
    link = alone & hands_on & tree["kind"].ne("annotation") & tree["parent"].ne("")
    above = dict(zip(tree["id"], tree["parent"], strict=True))
    label = dict(zip(tree.loc[link, "id"], tree.loc[link, "label"], strict=True))
    parents, through = [], []
    for parent in tree.loc[~link, "parent"]:
        passed = []
        while parent in label:
            passed.append(label[parent])
            parent = above[parent]
        parents.append(parent)
        through.append(passed[::-1])
    kept = tree[~link].reset_index(drop=True)
    return kept.assign(parent=parents, through=pd.Series(through, dtype=object))


def timeline(profile: Profile, iterations: int = 3) -> pd.DataFrame:
    """What each lane does during the first iterations, to be drawn.

    Host lanes show the parts' ranges, of another program what its operators and named ranges are
    in, the innermost; GPU lanes the kernels and copies. Neighbours of one part are joined, but for
    our ranges. Where such a lane still has more than :data:`MOST_SPANS` of them in an iteration,
    time is cut into bins, narrower than a picture shows, in which each part has one row: their sums
    stay exact.
    """
    named = profile.which("name", lambda name: parse_span(name) is not None)
    wanted = profile.of_kind("annotation") & named
    if not (ours := wanted.any()):
        in_part = profile.contexts["component"].ne("other").to_numpy()
        called = profile.of_kind("operator") | (profile.of_kind("annotation") & in_part)
        parent = profile.contexts["parent"].to_numpy()
        wanted = nearest(parent, called) >= 0
    spans = _lane_spans(profile, iterations, wanted, innermost=not ours)
    if spans.empty:
        return spans
    spans["joined"] = spans["on_gpu"] | (not ours)
    keys = ["thread", "iteration", *PART]
    same = (spans[keys] == spans[keys].shift()).all(axis=1)
    closest = np.where(spans["on_gpu"], MERGE_GAP_NS, CALL_GAP_NS)
    near = spans["start_ns"] - spans["end_ns"].shift() < closest
    kept = ("joined", "thread", "iteration", "begin_ns", "lane", *PART, "start_ns")
    table = spans.groupby((~(spans["joined"] & same & near)).cumsum()).agg(
        **{name: (name, "first") for name in kept},
        end_ns=("end_ns", "max"),
        spans=("start_ns", "size"),
    )
    lane = ["thread", "iteration"]
    drawn = [
        _coarse(spans.query("thread == @key[0] and iteration == @key[1]"))
        if rows["joined"].iloc[0] and len(rows) > MOST_SPANS
        else rows
        for key, rows in table.groupby(lane, sort=False)
    ]
    table = pd.concat(drawn, ignore_index=True)
    table["label"] = list(map(part_label, table["component"], table["phase"]))
    return _timed(table)


def _coarse(spans: pd.DataFrame) -> pd.DataFrame:
    """Kernels of one lane and iteration as at most :data:`MOST_SPANS` rows with exact sums."""
    parts = spans.groupby(PART, sort=False)
    first = int(spans["start_ns"].min())
    start, end = (spans[name].to_numpy() - first for name in ("start_ns", "end_ns"))
    code = parts.ngroup().to_numpy().astype(np.int64)
    coarse = coarsened(start, end, code, MOST_SPANS)
    rows = parts.head(1).iloc[coarse["code"]].reset_index(drop=True)
    begin = first + coarse["start"]
    return rows.assign(start_ns=begin, end_ns=begin + coarse["length"], spans=coarse["spans"])


def operator_spans(profile: Profile) -> pd.DataFrame:
    """What :func:`timeline` joins of three iterations, one by one: outermost operators on the host,
    kernels on the GPU (``label`` is the short name), at most the longest 400.

    ``attrs["of"]`` is the number of spans of which these are the longest.
    """
    contexts = profile.contexts
    is_operator = profile.of_kind("operator")
    parent = contexts["parent"].to_numpy()
    outermost = is_operator & ~((parent >= 0) & is_operator[np.maximum(parent, 0)])
    spans = _lane_spans(profile, 3, outermost)
    if spans.empty:
        return spans
    length = spans["end_ns"] - spans["start_ns"]
    kept = spans.loc[length.sort_values(ascending=False, kind="stable").index[:400]].sort_index()
    name = pd.Series(contexts["name"].to_numpy()[kept["context"]], kept.index)
    short = short_names(name[kept["on_gpu"]])
    table = _timed(kept.assign(label=name.mask(kept["on_gpu"], name.map(short)), spans=1))
    table.attrs["of"] = len(spans)
    return table


_TIMELINE = ["iteration", "lane", "label", *PART, "start_ms", "duration_ms", "spans"]


def _lane_spans(
    profile: Profile, iterations: int, wanted: np.ndarray, innermost: bool = False
) -> pd.DataFrame:
    """Spans of the first iterations: all on GPU lanes, on host lanes those of wanted contexts, or
    the stretches in which the ``innermost`` is one of them."""
    chosen = profile.iterations.sort_values("start_ns").head(iterations)
    first, last = start_and_end(chosen)
    spans = profile.trace[["profile", "context", "start_ns", "end_ns"]]
    if innermost:
        is_host = profile.threads["kind"].eq("cpu_thread")
        hosts = profile.threads.loc[is_host, "profile"].tolist()
        within = [running_table(profile, host).assign(profile=host) for host in hosts]
        spans = pd.concat([spans[~spans["profile"].isin(hosts)], *within])
    place = stretch_at(first, last, spans["start_ns"].to_numpy())
    spans = spans.assign(place=place)[place >= 0]
    spans = spans.merge(profile.threads[["profile", "kind", "name"]], on="profile")
    spans["on_gpu"] = spans["kind"].eq("gpu_stream")
    spans = spans[spans["on_gpu"] | wanted[spans["context"].to_numpy()]]
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
    """Megabytes (10^6) that each part allocates through torch in a mean iteration, most first."""
    parts = profile.contexts.loc[step_contexts(profile), PART]
    table = pd.concat(
        parts.assign(device=device, allocated_mb=profile.value_table(metric))
        for device, metric in (("cpu", "allocated_bytes"), ("gpu", "gpu_allocated_bytes"))
    )
    table["allocated_mb"] = table["allocated_mb"] / iteration_count(profile) / 1e6
    table = table[table["allocated_mb"].gt(0)]
    table = table.groupby([*PART, "device"], as_index=False)[["allocated_mb"]].sum()
    return table.sort_values("allocated_mb", ascending=False, ignore_index=True)


def memory_curve(profile: Profile) -> pd.DataFrame:
    """Memory allocated through torch over time; empty if not recorded."""
    pieces = [
        pd.DataFrame({"device": device, "time_ms": curve["time_ms"], "bytes": curve["bytes"]})
        for device, curve in profile.meta.get("memory", {}).items()
    ]
    if not pieces:
        return pd.DataFrame(columns=["device", "time_ms", "allocated_mb"])
    table = pd.concat(pieces, ignore_index=True)
    return table.assign(allocated_mb=table.pop("bytes") / 1e6)
