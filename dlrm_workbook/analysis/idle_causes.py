"""Where time goes when nothing computes.

On a GPU, nothing computes while no kernel runs. Each such instant has one cause: a copy runs;
or work is launched and waits (for the GPU to begin it, or for something it depends on); or
nothing is launched, and then it is what the host does at that instant. So the causes add up to
the idle time to the nanosecond. Gaps below 30 ns between kernels are the hardware's own
(HolisticTraceAnalysis draws the line there).

What the host does after a synchronising call ran the queue dry would otherwise have been hidden
behind kernels: that part of each cause is told as ``after_sync_ms``.

On a CPU the thread of the iterations computes, is ready but has no core, or sleeps; Linux
counts the three, and they add up to the iteration.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import host_segments, main_thread, parents, per_iteration
from dlrm_workbook.analysis.context_tree import (
    Bools,
    Ints,
    missing_reason,
    nearest,
    overlap,
    union,
    unmeasured,
)
from dlrm_workbook.analysis.launches import device_operations
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.spans import innermost

CAUSES: dict[str, str] = {
    "data": "the host made the batch",
    "python": "the host ran Python outside of operators",
    "operators": "the host ran operators: shapes, allocation, dispatch",
    "launching": "the host was in a CUDA call that launches work",
    "allocation": "the host was in a CUDA call that takes or gives back memory",
    "synchronisation": "the host waited for the GPU and had launched nothing for it",
    "copies": "a copy ran or was made ready, and no kernel",
    "start-up": "work was launched, and the GPU had not begun it yet",
    "dependency": "work was launched and waited for other work or an event",
    "kernel gap": "less than 30 ns between two kernels",
}
"""Cause to what it means; in this order in tables and figures."""

KERNEL_GAP_NS = 30

STATES: dict[str, str] = {
    "computing": "the iterating thread ran on a core",
    "waiting for a core": "it was ready, and another thread or program had its core",
    "blocked": "it slept: input, output, a lock, or other threads' part of the work",
    "off core": "it did not run; the system does not tell whether it slept or waited for a core",
}

IDLE = ["iteration", "cause", "idle_ms", "after_sync_ms"]
BY_CAUSE = ["cause", "meaning", "idle_ms", "share_of_idle", "share_of_iteration", "after_sync_ms"]
THREAD = ["iteration", "profiled", "state", "time_ms"]
OUTSIDE = ["component", "phase", "part_ms", "operators_ms", "outside_ms", "outside_share"]

_PREFIX = r"^(?:cuda|cu|hip)"
_CALLS = {
    "synchronisation": _PREFIX + r"\w*Synchronize",
    "copies": _PREFIX + r"\w*Memcpy",
    "allocation": _PREFIX + r"(?:Malloc|Free|MemAlloc|MemFree|HostAlloc|Host(?:Un)?[rR]egister)",
}
"""Kinds of CUDA call that are told apart; all others are part of launching."""

_LATENCY = 3.0
"""Launched work that waits longer than so many usual start-ups waits for something else."""


def idle_causes(profile: Profile) -> pd.DataFrame:
    """Time without a kernel in each iteration, by cause.

    Returns:
        ``iteration``, ``cause`` (of ``CAUSES``), ``idle_ms``, ``after_sync_ms`` (of it in gaps
        that began while the host waited in a synchronising call). ``idle_ms`` adds up to the
        iteration less the time in which a kernel ran. Empty, with the reason in
        ``attrs["not_measured"]``, without a GPU trace and iterations.
    """
    work = device_operations(profile)
    if work.empty:
        return unmeasured(IDLE, str(work.attrs.get("not_measured", "no GPU was traced")))
    if profile.iterations.empty:
        reason = "the profile does not say when its iterations ran"
        return unmeasured(IDLE, missing_reason(profile, ["iterations"], reason))
    pieces = _pieces(profile, work)
    pieces["idle_ms"] = (pieces["end_ns"] - pieces["start_ns"]) / 1e6
    pieces["after_sync_ms"] = pieces["idle_ms"].where(pieces["after_sync"], 0.0)
    table = pieces.groupby(["iteration", "cause"], as_index=False)[
        ["idle_ms", "after_sync_ms"]
    ].sum()
    order = table["cause"].map({name: row for row, name in enumerate(CAUSES)})
    return table.assign(order=order).sort_values(["iteration", "order"], ignore_index=True)[IDLE]


def idle_by_cause(profile: Profile, each: pd.DataFrame | None = None) -> pd.DataFrame:
    """Idle time of a mean iteration by cause, most first.

    Args:
        each: what :func:`idle_causes` gave, if it was made already.

    Returns:
        ``cause``, ``meaning``, ``idle_ms``, ``share_of_idle`` (adds up to 1),
        ``share_of_iteration``, ``after_sync_ms``. Empty, with the reason, like its source.
    """
    each = idle_causes(profile) if each is None else each
    if each.empty:
        return unmeasured(BY_CAUSE, str(each.attrs.get("not_measured", "no GPU was idle")))
    count = len(profile.iterations)
    wall = float((profile.iterations["end_ns"] - profile.iterations["start_ns"]).sum()) / 1e6
    table = each.groupby("cause", as_index=False)[["idle_ms", "after_sync_ms"]].sum()
    total = table["idle_ms"].sum()
    table["share_of_idle"] = table["idle_ms"] / total if total else np.nan
    table["share_of_iteration"] = table["idle_ms"] / wall
    table[["idle_ms", "after_sync_ms"]] /= count
    table["meaning"] = table["cause"].map(CAUSES)
    return table.sort_values("idle_ms", ascending=False, ignore_index=True)[BY_CAUSE]


def thread_states(profile: Profile) -> pd.DataFrame:
    """What the iterating thread did in each iteration: computing, waiting for a core, blocked.

    Returns:
        ``iteration`` (number in the run), ``profiled``, ``state`` (of ``STATES``), ``time_ms``;
        the states of an iteration add up to its wall time. Where the system does not count the
        run queue, ``off core`` stands for the last two. Empty, with the reason, without counters.
    """
    columns = profile.meta.get("counters") or {}
    if not {"wall_ms", "thread_cpu_ms"} <= columns.keys():
        reason = "the recording holds no counters of the iterating thread"
        return unmeasured(
            THREAD, missing_reason(profile, ["counters.thread_cpu_ms", "counters"], reason)
        )
    wall = np.asarray(columns["wall_ms"], dtype=float)
    # The clocks tick apart by microseconds: what is over is taken from the last state.
    computing = np.minimum(np.asarray(columns["thread_cpu_ms"], dtype=float), wall)
    states = {"computing": computing}
    if "run_queue_ms" in columns:
        waiting = np.asarray(columns["run_queue_ms"], dtype=float)
        states["waiting for a core"] = np.minimum(waiting, wall - computing)
        states["blocked"] = wall - computing - states["waiting for a core"]
    else:
        states["off core"] = wall - computing
    count = len(wall)
    frames = [
        pd.DataFrame(
            {
                "iteration": columns.get("iteration", list(range(count))),
                "profiled": columns.get("profiled", [True] * count),
                "state": state,
                "time_ms": times,
            }
        )
        for state, times in states.items()
    ]
    table = pd.concat(frames, ignore_index=True)
    return table.sort_values("iteration", kind="stable", ignore_index=True)[THREAD]


def outside_operators(profile: Profile) -> pd.DataFrame:
    """Time of each part on the iterating thread inside and outside of torch's operators.

    Outside is Python, NumPy and what surrounds each call; where it is most of a part, the
    interpreter is the limit, not the arithmetic.

    Returns:
        ``component``, ``phase``, ``part_ms``, ``operators_ms``, ``outside_ms`` (of a mean
        iteration; the two add up to ``part_ms``), ``outside_share``; most outside first.
        Empty, with the reason, where operators are not traced.
    """
    kinds = profile.contexts["kind"]
    if not kinds.eq("operator").any() or profile.iterations.empty:
        reason = "operators are not traced (HPCToolkit samples functions)"
        return unmeasured(OUTSIDE, missing_reason(profile, ["operators"], reason))
    pieces = host_segments(profile)
    context = pieces["context"].to_numpy()
    inside = nearest(profile.contexts["parent"].to_numpy(), kinds.eq("operator").to_numpy())
    in_operator = (context >= 0) & (inside[np.maximum(context, 0)] >= 0)
    part = profile.contexts[["component", "phase"]].iloc[np.maximum(context, 0)]
    length = (pieces["end_ns"] - pieces["start_ns"]).to_numpy() / 1e6 / len(profile.iterations)
    table = pd.DataFrame(
        {
            "component": np.where(context >= 0, part["component"].to_numpy(), "other"),
            "phase": np.where(context >= 0, part["phase"].to_numpy(), ""),
            "part_ms": length,
            "operators_ms": np.where(in_operator, length, 0.0),
            "outside_ms": np.where(in_operator, 0.0, length),
        }
    )
    table = table.groupby(["component", "phase"], as_index=False).sum()
    table["outside_share"] = table["outside_ms"] / table["part_ms"]
    return table.sort_values("outside_ms", ascending=False, ignore_index=True)[OUTSIDE]


def _pieces(profile: Profile, work: pd.DataFrame) -> pd.DataFrame:
    """The idle stretches, cut so that each has one cause."""
    iterations = profile.iterations.sort_values("start_ns")
    first, last = iterations["start_ns"].to_numpy(), iterations["end_ns"].to_numpy()
    is_kernel = work["kind"].eq("kernel").to_numpy()
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    kernels = union(start[is_kernel], end[is_kernel])
    copies = union(start[~is_kernel], end[~is_kernel])
    busy = union(start, end)
    waiting = _waiting(work)
    host = _host(profile)
    edges = [first, last, *kernels, *copies, *waiting, host[0], host[1]]
    cuts = np.unique(np.concatenate(edges))
    begin, finish = cuts[:-1], cuts[1:]
    which = np.searchsorted(first, begin, side="right") - 1
    some = (which >= 0) & (begin < last[np.maximum(which, 0)]) & ~_inside(begin, *kernels)
    begin, finish, which = begin[some], finish[some], which[some]

    doing = _activity(profile, host, begin)
    gap_start, gap_end = _gaps(busy, begin)
    cause = doing.copy()
    launched = _inside(begin, *waiting)
    late = launched & _long_wait(waiting, busy, begin, _usual_start_up(work))
    cause[launched] = "start-up"
    cause[late] = "dependency"
    cause[gap_end - gap_start < KERNEL_GAP_NS] = "kernel gap"
    cause[_inside(begin, *copies)] = "copies"
    dry = _activity(profile, host, gap_start) == "synchronisation"
    return pd.DataFrame(
        {
            "iteration": iterations["iteration"].to_numpy()[which],
            "start_ns": begin,
            "end_ns": finish,
            "cause": cause,
            "after_sync": dry & ~_inside(begin, *copies),
        }
    )


def _waiting(work: pd.DataFrame) -> tuple[Ints, Ints]:
    """Stretches in which something was launched and had not started."""
    known = work[(work["launch_end_ns"] >= 0) & (work["launch_end_ns"] < work["start_ns"])]
    return union(known["launch_end_ns"].to_numpy(), known["start_ns"].to_numpy())


def _usual_start_up(work: pd.DataFrame) -> float:
    """Median ns from a launch to its start when the GPU had nothing else to do; 0 if never."""
    reached = np.maximum.accumulate(work["end_ns"].to_numpy())
    before = np.append(np.iinfo(np.int64).min, reached[:-1])
    launch = work["launch_end_ns"].to_numpy()
    alone = (launch >= 0) & (launch >= before)
    delay = (work["start_ns"].to_numpy() - launch)[alone]
    return float(np.median(delay)) if len(delay) else 0.0


def _long_wait(
    waiting: tuple[Ints, Ints], busy: tuple[Ints, Ints], at: Ints, usual_ns: float
) -> Bools:
    """Whether what is launched at each moment waits far longer than a start-up takes."""
    if not len(waiting[0]):
        return np.zeros(len(at), dtype=bool)
    row = np.maximum(np.searchsorted(waiting[0], at, side="right") - 1, 0)
    gap_start, gap_end = _gaps(busy, at)
    length = np.minimum(waiting[1][row], gap_end) - np.maximum(waiting[0][row], gap_start)
    return length > max(_LATENCY * usual_ns, KERNEL_GAP_NS)


def _gaps(busy: tuple[Ints, Ints], at: Ints) -> tuple[Ints, Ints]:
    """(end of the work before, start of the work after) each moment; far away where none is."""
    start, end = busy
    before = np.searchsorted(start, at, side="right") - 1
    far = np.int64(1) << 60
    gap_start = np.where(before >= 0, end[np.maximum(before, 0)], -far)
    gap_end = np.append(start, far)[before + 1]
    return np.minimum(gap_start, at), gap_end


def _inside(at: Ints, start: Ints, end: Ints) -> Bools:
    """Whether each moment lies in one of the disjoint, ordered stretches."""
    if not len(start):
        return np.zeros(len(at), dtype=bool)
    row = np.searchsorted(start, at, side="right") - 1
    return (row >= 0) & (at < end[np.maximum(row, 0)])


def _host(profile: Profile) -> tuple[Ints, Ints, Ints, Ints]:
    """(start, end, parent, context) of the spans of the iterating thread."""
    trace = profile.trace
    spans = trace[
        (trace["profile"] == main_thread(profile)) & (trace["end_ns"] > trace["start_ns"])
    ].sort_values(["start_ns", "depth"])
    columns = [spans[name].to_numpy() for name in ("start_ns", "end_ns", "context")]
    return columns[0], columns[1], parents(spans["depth"].to_numpy()), columns[2]


def _activity(profile: Profile, host: tuple[Ints, Ints, Ints, Ints], at: Ints) -> np.ndarray:
    """What the iterating thread does at each moment, as the cause it would be."""
    start, end, parent, context = host
    span = innermost(start, end, parent, at)
    if not len(context):
        return np.full(len(at), "python", dtype=object)
    kind = _kinds(profile)
    return np.where(span >= 0, kind[context[np.maximum(span, 0)]], "python").astype(object)


def _kinds(profile: Profile) -> np.ndarray:
    """Cause (n,) that each context stands for while the host is in it."""
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    names = contexts["name"]
    call = np.full(len(contexts), "", dtype=object)
    call[contexts["kind"].eq("runtime").to_numpy()] = "launching"
    # HPCToolkit knows CUDA calls as functions
    call[names.str.contains(_PREFIX + r"\w*Launch").to_numpy()] = "launching"
    for cause, pattern in _CALLS.items():
        call[names.str.contains(pattern).to_numpy()] = cause
    over = nearest(parent, call != "")
    operator = nearest(parent, contexts["kind"].eq("operator").to_numpy()) >= 0
    kind = np.where(operator, "operators", "python").astype(object)
    kind[contexts["component"].eq("data").to_numpy()] = "data"
    return np.where(over >= 0, call[np.maximum(over, 0)], kind)


# What is hidden behind computing, and what is exposed: copies, communication, making data.

OVERLAP = ["what", "where", "total_ms", "hidden_ms", "exposed_ms", "exposed_share", "of_iteration"]

KINDS: dict[str, str] = {
    "copies": "copies between host and GPU, and on it",
    "communication": "exchange between ranks",
    "data": "making batches",
}

_COLLECTIVE = r"nccl|rccl|c10d::|gloo|all_?(?:to_?all|reduce|gather)"


def overlaps(profile: Profile) -> pd.DataFrame:
    """Copies, communication and making data against computing, in a mean iteration.

    Returns:
        ``what`` (of ``KINDS``), ``where`` (``device``, ``host`` or ``other threads``),
        ``total_ms``, ``hidden_ms`` (while something is computed), ``exposed_ms`` (the rest;
        the two add up), ``exposed_share`` and ``of_iteration`` (exposed time as a share of the
        iteration); most exposed first. What did not occur has no row. Empty, with the reason,
        where nothing of the kind ran or the profile does not say when its iterations ran.
    """
    if profile.iterations.empty or profile.trace.empty:
        return unmeasured(OVERLAP, "the profile does not say when its iterations ran")
    work = device_operations(profile)
    rows = _on_gpu(profile, work) if len(work) else _on_cpu(profile)
    rows = [row for row in rows if row["total_ms"] > 0]
    if not rows:
        return unmeasured(OVERLAP, "nothing was copied, exchanged or made in the iterations")
    table = pd.DataFrame(rows)
    iterations = profile.iterations
    wall = float((iterations["end_ns"] - iterations["start_ns"]).mean()) / 1e6
    table["hidden_ms"] = table["total_ms"] - table["exposed_ms"]
    table["exposed_share"] = table["exposed_ms"] / table["total_ms"]
    table["of_iteration"] = table["exposed_ms"] / wall
    return table.sort_values("exposed_ms", ascending=False, ignore_index=True)[OVERLAP]


def _on_gpu(profile: Profile, work: pd.DataFrame) -> list[dict[str, Any]]:
    names = profile.contexts["name"].iloc[work["context"]].str.lower()
    exchange = names.str.contains(_COLLECTIVE).to_numpy()
    exchange |= work["component"].eq("communication").to_numpy()
    is_copy = work["kind"].eq("copy").to_numpy() & ~exchange
    compute = ~exchange & ~is_copy
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    window = _window(profile)
    busy = union(start[compute], end[compute])
    rows = []
    for what, chosen in (("copies", is_copy), ("communication", exchange)):
        own = union(start[chosen], end[chosen])
        rows.append(_row(profile, what, "device", own, busy, window))
    host = _host_in(profile, "data")
    rows.append(_row(profile, "data", "host", host, busy, window))
    return rows


def _on_cpu(profile: Profile) -> list[dict[str, Any]]:
    """On a CPU the iterating thread hides nothing; other threads hide all of theirs."""
    each = per_iteration(profile)
    count = len(profile.iterations)
    own = each.groupby("component")["time_ms"].sum() / count
    rows = []
    for what, component in (("data", "data"), ("communication", "communication")):
        exposed = float(own.get(component, 0.0))
        rows.append({"what": what, "where": "host", "total_ms": exposed, "exposed_ms": exposed})
    loader = ((profile.meta.get("parameters") or {}).get("data") or {}).get("loader")
    if loader not in (None, "synchronous"):
        ahead = sum(
            float(thread.get("cpu_ms_per_iteration") or 0.0)
            for thread in profile.meta.get("threads_cpu") or []
            if thread.get("kind") == "python"
        )
        rows.append(
            {"what": "data", "where": "other threads", "total_ms": ahead, "exposed_ms": 0.0}
        )
    return rows


def _row(
    profile: Profile,
    what: str,
    where: str,
    own: tuple[Ints, Ints],
    busy: tuple[Ints, Ints],
    window: tuple[Ints, Ints],
) -> dict[str, Any]:
    """Milliseconds of ``own`` in the window, in all and outside of ``busy``."""
    start, end = _within(own, window)
    count = len(profile.iterations)
    total = float((end - start).sum()) / 1e6 / count
    hidden = float(overlap(start, end, *busy).sum()) / 1e6 / count
    return {"what": what, "where": where, "total_ms": total, "exposed_ms": total - hidden}


def _within(own: tuple[Ints, Ints], window: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The parts of disjoint, ordered stretches that lie in those of the window."""
    cuts = np.unique(np.concatenate([*own, *window]))
    if len(cuts) < 2:
        return cuts[:0], cuts[:0]
    begin, finish = cuts[:-1], cuts[1:]
    inside = (overlap(begin, finish, *own) > 0) & (overlap(begin, finish, *window) > 0)
    return begin[inside], finish[inside]


def _window(profile: Profile) -> tuple[Ints, Ints]:
    table = profile.iterations
    return union(table["start_ns"].to_numpy(), table["end_ns"].to_numpy())


def _host_in(profile: Profile, component: str) -> tuple[Ints, Ints]:
    """When the iterating thread was in a part, whatever the GPU did."""
    pieces = host_segments(profile)
    context = pieces["context"].to_numpy()
    part = profile.contexts["component"].to_numpy()[np.maximum(context, 0)]
    chosen = pieces[(context >= 0) & (part == component)]
    return union(chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy())
