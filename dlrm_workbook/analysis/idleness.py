"""Where time goes when nothing computes, and what the CPU did meanwhile.

**Causes.** On a GPU, nothing computes while no kernel runs. Each such instant has one cause: a
copy runs; or work is launched and waits (for the GPU to begin it, or for something it depends
on); or nothing is launched, and then it is what the host does at that instant. So the causes add
up to the idle time to the nanosecond. Gaps below 30 ns between kernels are the hardware's own
(HolisticTraceAnalysis draws the line there). What the host does after a synchronising call ran
the queue dry would otherwise have been hidden behind kernels: that part of each cause is
``after_sync_ms``. On a CPU the thread of the iterations computes, is ready but has no core, or
sleeps; Linux counts the three, and they add up to the iteration.

**Blame** follows HPCToolkit's idleness analysis (Chabbi et al., "Effective sampling-driven
performance tools for GPU-accelerated supercomputers", SC 2013): each moment in which every
stream is idle, copies included, is charged to the code that the CPU runs then, shared evenly
among the threads that run; one that waits in ``backward`` for autograd's thread does not. Only
threads that launch GPU work are charged, where they are known: no other could have given the GPU
something to do. In a sampled trace (HPCToolkit) a thread is in the code of its last sample until
the next one, so a thread that sleeps is charged as long as one that runs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_workbook.analysis.attribution import (
    PART,
    basis,
    by_part,
    host_is_traced,
    iteration_times_ms,
    may_wait,
    of_steady,
    parts_at,
    per_iteration,
    segments,
    windows,
)
from dlrm_workbook.analysis.context_tree import (
    Lane,
    context_at,
    distinct,
    edges,
    extent,
    reason_of,
    running,
    scopes_of,
    unmeasured,
)
from dlrm_workbook.analysis.launches import NO_OPERATORS, exchanging, launched_operations
from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.recordings.nesting import overlap, start_and_end, stretch_at, stretches, union
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive, nearest

Stretches = tuple[Ints, Ints]
"""Starts and ends, ns, of disjoint stretches of time in order."""

# ---- idle time by cause --------------------------------------------------------------

CAUSES: dict[str, str] = {
    "data": "the host made the batch",
    "python": "the host ran neither an operator nor a CUDA call: Python, or other code",
    "operators": "the host ran operators: shapes, allocation, dispatch",
    "launching": "the host was in a CUDA call that launches work",
    "allocation": "the host was in a CUDA call that takes or gives back memory",
    "synchronisation": "the host waited for the GPU and had launched nothing for it",
    "copies": "a copy ran or was made ready, and no kernel",
    "start-up": "work was launched, and the GPU had not begun it yet",
    "dependency": "work was launched and waited for other work or an event",
    "kernel gap": "less than 30 ns between two kernels",
    "unknown": "the host was not measured, and nothing was known to be launched",
}
"""Cause to what it means; in this order in tables and figures."""

KERNEL_GAP_NS = 30

_PREFIX = r"^(?:cuda|cu|hip)"
_CALLS = {
    "synchronisation": _PREFIX + r"\w*Synchronize",
    "copies": _PREFIX + r"\w*Memcpy",
    "allocation": _PREFIX + r"(?:Malloc|Free|MemAlloc|MemFree|HostAlloc|Host(?:Un)?[rR]egister)",
}
"""Kinds of CUDA call that are told apart; all others are part of launching."""

_WAITING = ("synchronisation", "copies", "allocation")
"""Calls in which the host may wait for the GPU."""

_LATENCY = 3.0
"""Launched work that waits longer than so many usual start-ups waits for something else."""

IDLE_COLUMNS = ["iteration", "cause", "idle_ms", "after_sync_ms"]
PIECES = ["iteration", "start_ns", "end_ns", "idle_ms", "cause", "copying", "after_sync"]
PIECES += ["gap_ns", "context"]
BY_CAUSE = ["cause", "meaning", "idle_ms", "share_of_idle", "share_of_iteration", "after_sync_ms"]


def idle_causes(profile: Profile) -> pd.DataFrame:
    """Time without a kernel in each iteration, by cause (of ``CAUSES``).

    ``idle_ms`` adds up to the iteration less the time in which a kernel ran. Empty, with the
    reason in ``attrs["not_measured"]``, without a GPU trace and iterations.
    """
    if profile.iterations.empty and len(windows(profile)):
        reason = "the profile does not say when its iterations ran"
        return unmeasured(IDLE_COLUMNS, reason, profile, "iterations")
    pieces = idle_pieces(profile)
    if reason_of(pieces):
        return unmeasured(IDLE_COLUMNS, reason_of(pieces))
    pieces["after_sync_ms"] = pieces["idle_ms"].where(pieces["after_sync"], 0.0)
    pieces["cause"] = pd.Categorical(pieces["cause"], list(CAUSES))
    times = pieces.groupby(["iteration", "cause"], observed=True)[["idle_ms", "after_sync_ms"]]
    return times.sum().reset_index().astype({"cause": object})[IDLE_COLUMNS]


def idle_by_cause(profile: Profile, causes: pd.DataFrame) -> pd.DataFrame:
    """Idle time of a mean iteration by cause, most first; empty, with the reason, like its source.
    ``causes`` is what :func:`idle_causes` gave of the profile."""
    if causes.empty:
        return unmeasured(BY_CAUSE, reason_of(causes) or "no GPU was idle")
    count = len(profile.iterations)
    table = causes.groupby("cause", as_index=False)[["idle_ms", "after_sync_ms"]].sum()
    total = table["idle_ms"].sum()
    table["share_of_idle"] = table["idle_ms"] / total if total else np.nan
    table["share_of_iteration"] = table["idle_ms"] / iteration_times_ms(profile).sum()
    table[["idle_ms", "after_sync_ms"]] /= count
    table["meaning"] = table["cause"].map(CAUSES)
    return table.sort_values("idle_ms", ascending=False, ignore_index=True)[BY_CAUSE]


def idle_pieces(profile: Profile) -> pd.DataFrame:
    """Time without a kernel, cut so that each piece has one cause.

    Over the iterations, or from a GPU's first operation to its last where none is known.

    Returns:
        ``iteration``, ``start_ns``, ``end_ns``, ``idle_ms``, ``cause`` (of ``CAUSES``),
        ``copying`` (whether a copy runs), ``after_sync`` (bool), ``gap_ns`` (of the whole stretch
        in which nothing runs), ``context`` (what the host is in; −1 for nothing known). Empty,
        with the reason in ``attrs["not_measured"]``, without a GPU trace.
    """
    work = launched_operations(profile)
    if work.empty:
        return unmeasured(PIECES, reason_of(work))
    iterations = windows(profile)
    first, last = start_and_end(iterations)
    is_kernel = work["kind"].eq("kernel")
    kernels, copies = stretches(work[is_kernel]), stretches(work[~is_kernel])
    busy = stretches(work)
    launched = work[(work["launch_end_ns"] >= 0) & (work["launch_end_ns"] < work["start_ns"])]
    # what ends a gap tells what the GPU waited for: other work that was launched earlier and
    # waits longer may well depend on it
    launched = launched[launched["start_ns"].isin(busy[0])]
    waiting = union(launched["launch_end_ns"].to_numpy(), launched["start_ns"].to_numpy())
    host = _host(profile)
    cuts = distinct([first, last, *kernels, *copies, *waiting, *edges(host)])
    begin, finish = cuts[:-1], cuts[1:]
    which = stretch_at(first, last, begin)
    idle = (which >= 0) & (stretch_at(*kernels, begin) < 0)
    begin, finish, which = begin[idle], finish[idle], which[idle]

    nothing = "python" if host_is_traced(profile) else "unknown"
    activity = np.append(_activities(profile), nothing)
    in_copy = stretch_at(*copies, begin) >= 0
    gap_start, gap_end = _gaps(busy, begin)
    cause = activity[context_at(host, begin)]
    wait = stretch_at(*waiting, begin)
    cause[wait >= 0] = "start-up"
    if len(launched):
        lasts = np.minimum(waiting[1][wait], gap_end) - np.maximum(waiting[0][wait], gap_start)
        cause[(wait >= 0) & (lasts > max(_LATENCY * usual_start_up(work), KERNEL_GAP_NS))] = (
            "dependency"
        )
    cause[gap_end - gap_start < KERNEL_GAP_NS] = "kernel gap"
    cause[in_copy] = "copies"
    ran_dry = activity[context_at(host, gap_start)] == "synchronisation"
    return pd.DataFrame(
        {
            "iteration": iterations["iteration"].to_numpy()[which],
            "start_ns": begin,
            "end_ns": finish,
            "idle_ms": (finish - begin) / 1e6,
            "cause": cause,
            "copying": in_copy,
            "after_sync": ran_dry & ~in_copy,
            "gap_ns": gap_end - gap_start,
            "context": context_at(host, begin),
        }
    )


IN_CALL = 0.9
"""Part of an operation after which the call that launched it returns at the earliest, if it waits
for its end."""


def felt_share(profile: Profile, contexts: Ints) -> float:
    """Share of GPU operations' time (0 to 1) by which the step would be shorter without them.

    What the GPU does next begins no earlier than its launch: where the host launches it late, a
    stretch of work that ends sooner is followed by a longer wait. A stretch can be shorter by the
    time from the launch of what follows (and the usual start-up) to its end, or by all of it where
    the host waits for that end, also in the call that launched it. What is not known to be launched
    late counts in full. ``contexts`` (n,) are of kernels and copies.
    """
    work = launched_operations(profile)
    chosen = work[work["context"].isin(contexts)]
    if chosen.empty:
        return 1.0
    start, end = stretches(work)
    first = work.drop_duplicates("start_ns").set_index("start_ns")["launch_end_ns"]
    launched = np.append(first.reindex(start[1:]).to_numpy(), -1)
    waits = np.isin(np.append(_activities(profile), "")[context_at(_host(profile), end)], _WAITING)
    calls = profile.trace[profile.of_kind("runtime")[profile.trace["context"]]]
    returns = calls.groupby("start_ns")["end_ns"].max().reindex(work["launch_start_ns"]).to_numpy()
    lasts = returns - work["start_ns"] > IN_CALL * (work["end_ns"] - work["start_ns"])
    waits |= np.isin(end, work["end_ns"][lasts])
    late = end - launched - usual_start_up(work)
    slack = np.where(waits | (launched < 0), end - start, late).clip(0, end - start)
    # operations of several streams overlap: time counts once
    pieces = stretches(chosen)
    which = stretch_at(start, end, pieces[0])
    took = np.bincount(which, pieces[1] - pieces[0], minlength=len(start))
    return float(np.minimum(took, slack).sum() / took.sum())


def _host(profile: Profile) -> Lane:
    """What the iterating thread is in, whatever the GPU does."""
    lane = segments(profile, device=False)
    return *start_and_end(lane), lane["context"].to_numpy()


def usual_start_up(work: pd.DataFrame, since: str = "launch_end_ns") -> float:
    """Median ns from a launch (its end, or what column is given) to the start of its work when the
    GPU had nothing else to do; 0 if never."""
    reached = np.maximum.accumulate(work["end_ns"].to_numpy())
    before = np.append(np.iinfo(np.int64).min, reached[:-1])
    launch = work[since].to_numpy()
    alone = (launch >= 0) & (launch >= before)
    delay = (work["start_ns"].to_numpy() - launch)[alone]
    return float(np.median(delay)) if len(delay) else 0.0


def _gaps(busy: Stretches, at: Ints) -> Stretches:
    """(end of the work before, start of the work after) each moment; far away where none is."""
    start, end = busy
    before = np.searchsorted(start, at, side="right") - 1
    far = np.int64(1) << 60
    gap_start = np.where(before >= 0, end[np.maximum(before, 0)], -far)
    gap_end = np.append(start, far)[before + 1]
    return np.minimum(gap_start, at), gap_end


def _activities(profile: Profile) -> np.ndarray:
    """Cause (n,) of idleness that each context stands for while the host is in it."""
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
    is_operator = contexts["kind"].eq("operator").to_numpy()
    kind = np.where(nearest(parent, is_operator) >= 0, "operators", "python").astype(object)
    # an operator that launches feeds the GPU: it does not make the batch
    launches = inclusive_from_exclusive(parent, (call != "").astype(float)) > 0
    feeds = nearest(parent, is_operator & launches) >= 0
    kind[contexts["component"].eq("data").to_numpy() & ~feeds] = "data"
    return np.where(over >= 0, call[np.maximum(over, 0)], kind)


# ---- the iterating thread -------------------------------------------------------------

STATES: dict[str, str] = {
    "computing": "the iterating thread ran on a core",
    "waiting for a core": "it was ready, and another thread or program had its core",
    "blocked": "it slept: input, output, a lock, or other threads' part of the work",
    "off core": "it did not run; the system does not tell whether it slept or waited for a core",
}

THREAD = ["iteration", "profiled", "state", "time_ms"]
OUTSIDE_COLUMNS = [*PART, "part_ms", "operators_ms", "outside_ms", "outside_share"]


def thread_states(profile: Profile) -> pd.DataFrame:
    """What the iterating thread did in each iteration: computing, waiting for a core, blocked.

    The states (of ``STATES``) of an iteration add up to its wall time. Where the system does not
    count the run queue, ``off core`` stands for the last two. Empty, with the reason, without
    counters.
    """
    columns = profile.meta.get("counters") or {}
    if not {"wall_ms", "thread_cpu_ms"} <= columns.keys():
        reason = "the recording has no counters of the iterating thread"
        return unmeasured(THREAD, reason, profile, "counters.thread_cpu_ms", "counters")
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
    state_times = pd.DataFrame(states).assign(
        iteration=columns.get("iteration", range(len(wall))), profiled=columns.get("profiled", True)
    )
    table = state_times.melt(["iteration", "profiled"], var_name="state", value_name="time_ms")
    return table.sort_values("iteration", kind="stable", ignore_index=True)[THREAD]


def outside_operators(profile: Profile) -> pd.DataFrame:
    """Time of each part on the iterating thread inside and outside of torch's operators.

    Outside is Python, NumPy and what surrounds each call; where it is most of a part, the
    interpreter is the limit, not the arithmetic. Of a mean iteration, most outside first. Empty,
    with the reason, where operators are not traced.
    """
    kinds = profile.contexts["kind"]
    if not kinds.eq("operator").any() or profile.iterations.empty:
        return unmeasured(OUTSIDE_COLUMNS, NO_OPERATORS, profile, "operators")
    pieces = segments(profile, device=False)
    context = pieces["context"].to_numpy()
    inside = nearest(profile.contexts["parent"].to_numpy(), kinds.eq("operator").to_numpy())
    in_operator = np.append(inside, -1)[context] >= 0
    part_ms = (pieces["end_ns"] - pieces["start_ns"]) / 1e6 / len(profile.iterations)
    operators_ms = part_ms.where(in_operator, 0.0)
    times = {"operators_ms": operators_ms, "outside_ms": part_ms.where(~in_operator, 0.0)}
    table = pd.DataFrame({"part_ms": part_ms, **times})
    table = by_part(profile, pieces["context"], table).reset_index()
    table["outside_share"] = table["outside_ms"] / table["part_ms"]
    return table.sort_values("outside_ms", ascending=False, ignore_index=True)[OUTSIDE_COLUMNS]


# ---- copies, communication and data: hidden behind computing, or exposed ------------------

OVERLAP_COLUMNS = ["what", "where", "total_ms", "hidden_ms", "exposed_ms", "exposed_share"]
OVERLAP_COLUMNS += ["of_iteration"]


def overlaps(profile: Profile) -> pd.DataFrame:
    """Copies, exchanges and making the batch, alone or beside others, in a steady iteration.

    Most exposed first; what did not occur has no row. Empty, with the reason, where nothing of the
    kind ran or the profile does not say when its iterations ran.
    """
    if profile.iterations.empty or profile.trace.empty:
        return unmeasured(OVERLAP_COLUMNS, "the profile does not say when its iterations ran")
    work = launched_operations(profile)
    rows = _on_gpu(profile, work) if len(work) else _on_cpu(profile)
    table = pd.DataFrame(rows, columns=["what", "where", "total_ms", "exposed_ms"])
    table = table[table["total_ms"] > 0].copy()
    if table.empty:
        reason = "nothing was copied, exchanged or made in the iterations"
        return unmeasured(OVERLAP_COLUMNS, reason)
    table["hidden_ms"] = table["total_ms"] - table["exposed_ms"]
    table["exposed_share"] = table["exposed_ms"] / table["total_ms"]
    steady = of_steady(profile, profile.iterations)
    length = steady["end_ns"] - steady["start_ns"]
    table["of_iteration"] = table["exposed_ms"] / (length.mean() / 1e6)
    return table.sort_values("exposed_ms", ascending=False, ignore_index=True)[OVERLAP_COLUMNS]


def _on_gpu(profile: Profile, work: pd.DataFrame) -> list[tuple[str, str, float, float]]:
    exchange = exchanging(profile, work)
    is_copy = work["kind"].eq("copy")
    pieces = segments(profile, device=False)
    making = pieces[parts_at(profile, pieces["context"].to_numpy())["component"].eq("data")]
    steady = of_steady(profile, profile.iterations)
    window, count = stretches(steady), 1e6 * len(steady)
    rows = []
    for what, where, spans, beside in (
        ("copies", "device", work[is_copy], work[~is_copy]),
        ("communication", "device", work[exchange], work[~exchange]),
        ("data", "host", making, work),
    ):
        start, end = _intersection(stretches(spans), window)
        total = float((end - start).sum()) / count
        hidden = float(overlap(start, end, *stretches(beside)).sum()) / count
        rows.append((what, where, total, total - hidden))
    return rows


def _on_cpu(profile: Profile) -> list[tuple[str, str, float, float]]:
    """On a CPU the iterating thread hides nothing; other threads hide all of theirs."""
    part_ms = per_iteration(profile).groupby("component")["time_ms"].sum() / len(profile.iterations)
    exposed = {what: float(part_ms.get(what, 0.0)) for what in ("data", "communication")}
    rows = [(what, "host", ms, ms) for what, ms in exposed.items()]
    loader = ((profile.meta.get("parameters") or {}).get("data") or {}).get("loader")
    if loader not in (None, "synchronous"):
        ahead = sum(
            float(thread.get("cpu_ms_per_iteration") or 0.0)
            for thread in profile.meta.get("threads_cpu") or []
            if thread.get("kind") == "python"
        )
        rows.append(("data", "other threads", ahead, 0.0))
    return rows


def _intersection(one: Stretches, other: Stretches) -> Stretches:
    """The stretches that lie in both, cut at the edges of either."""
    cuts = distinct([*one, *other])
    begin, finish = cuts[:-1], cuts[1:]
    inside = (stretch_at(*one, begin) >= 0) & (stretch_at(*other, begin) >= 0)
    return begin[inside], finish[inside]


# ---- what the CPU did while the GPU was idle ---------------------------------------------

NOBODY = "(no thread that launches GPU work was running)"

IDLENESS = ["gpu", "rank", "streams", "span_ms", "busy_ms", "idle_ms", "idle_share"]
IDLENESS += ["gaps", "longest_gap_ms"]
BLAME = ["name", "kind", "file", "module", "component", "phase", "blamed_ms", "share"]
NO_STREAMS = "no GPU stream has a trace; measure with hpcrun -t"
GPU_NAMES = ("GPU times", "gpu_time_ms", "trace")
_GPU_METRICS = ("gpu_time_ms", "launches", "GKER:COUNT", "GXCOPY:COUNT")


def gpu_idleness(profile: Profile) -> pd.DataFrame:
    """How long each GPU ran something, on any of its streams, and how long nothing.

    Over the iterations if the profile has them, else from the first GPU operation to the last,
    so that start-up is not counted as idle: ``attrs["span"]`` says which. Empty, with the reason in
    ``attrs["not_measured"]``, without a trace of a GPU stream.
    """
    streams = _streams(profile)
    if streams.empty:
        return unmeasured(IDLENESS, NO_STREAMS, profile, *GPU_NAMES)
    first, last, span = _span(profile, streams)
    rows = []
    for (gpu, rank), group in streams.groupby(["gpu", "rank"], sort=True):
        start, end = _idle(profile, group["profile"].tolist(), first, last)
        idle = int((end - start).sum())
        times = np.array([last - first, last - first - idle, idle]) / 1e6
        share = idle / (last - first) if last > first else np.nan
        longest = (end - start).max(initial=0) / 1e6
        rows.append((gpu, rank, len(group), *times, share, len(start), longest))
    table = pd.DataFrame(rows, columns=IDLENESS)
    table.attrs["span"] = span
    return table


def idle_blame(profile: Profile) -> pd.DataFrame:
    """What the CPU ran while every stream of every GPU was idle, most first: the innermost
    function, operator or range, in the span of :func:`gpu_idleness`.

    Threads that launch GPU work are charged, or all CPU threads where none is known to. Times are
    of a mean iteration where iterations are marked (``attrs["per"]``), as of all parts of a page,
    and add up to the idle time; that in which no charged thread ran has a row of its own. Empty,
    with the reason in ``attrs["not_measured"]``, without traces of a GPU and of CPU threads.
    """
    streams = _streams(profile)
    if streams.empty:
        return unmeasured(BLAME, NO_STREAMS, profile, *GPU_NAMES)
    lanes = [running(profile, thread) for thread in _charged(profile)]
    lanes = [lane for lane in lanes if len(lane[0])]
    if not lanes:
        reason = "no CPU thread that launches GPU work has a trace; measure with "
        reason += "hpcrun -e CPUTIME -t"
        return unmeasured(BLAME, reason, profile, "cpu trace")
    first, last, span = _span(profile, streams)
    idle_start, idle_end = _idle(profile, streams["profile"].tolist(), first, last)
    waits = may_wait(profile) & np.append(profile.of_kind("annotation", "python"), True)
    blamed = _share_out(lanes, idle_start, idle_end, waits)
    table = _named(profile, blamed)
    table["blamed_ms"] /= max(len(profile.iterations), 1)
    total = float(table["blamed_ms"].sum())
    table["share"] = table["blamed_ms"] / total if total else np.nan
    table = table.sort_values("blamed_ms", ascending=False, ignore_index=True)[BLAME]
    per = "per iteration" if len(profile.iterations) else f"of {basis(profile)}"
    table.attrs |= {"span": span, "per": per}
    return table


def _streams(profile: Profile) -> pd.DataFrame:
    """``profile``, ``rank``, ``gpu`` of the streams with a trace."""
    threads = profile.threads
    traced = threads["kind"].eq("gpu_stream") & threads["profile"].isin(profile.trace["profile"])
    table = threads[traced]
    return table.assign(gpu=table["name"].str.replace(r" stream.*", "", regex=True))


def _span(profile: Profile, streams: pd.DataFrame) -> tuple[int, int, str]:
    """(start, end, in words) of the time in which a GPU's idleness counts, ns."""
    if len(profile.iterations):
        words = "from the first iteration's start to the last one's end"
        return *extent(profile.iterations), words
    work = extent(profile.trace[profile.trace["profile"].isin(streams["profile"])])
    first, last = extent(windows(profile))
    if last > first and (first < work[0] or last > work[1]):  # what lies around it is explained too
        return first, last, f"in {basis(profile)}"
    return *work, "from the first GPU operation's start to the last one's end"


def _idle(profile: Profile, streams: list[int], first: int, last: int) -> Stretches:
    """(start, end) of the stretches of the span in which none of the streams runs."""
    trace = profile.trace[profile.trace["profile"].isin(streams)]
    begin, finish = (edge.clip(first, last) for edge in stretches(trace))
    gap_start, gap_end = np.append(first, finish), np.append(begin, last)
    gap = gap_end > gap_start
    return gap_start[gap], gap_end[gap]


def _charged(profile: Profile) -> list[int]:
    threads = profile.threads
    cpu = threads.loc[threads["kind"].eq("cpu_thread"), "profile"]
    used = profile.values.loc[profile.values["metric"].isin(_GPU_METRICS), "profile"].unique()
    launching = cpu[cpu.isin(used)]
    return (cpu if launching.empty else launching).tolist()


def _share_out(
    lanes: list[Lane], idle_start: Ints, idle_end: Ints, waits: Bools
) -> npt.NDArray[np.float64]:
    """Idle ns of each context (n,), and last those with no lane running. A lane in one that
    ``waits`` (n + 1,) is charged where no other is in something else."""
    count = len(waits) - 1
    cuts = distinct([idle_start, idle_end, *edges(*lanes)])
    length = overlap(cuts[:-1], cuts[1:], idle_start, idle_end)
    moments = cuts[:-1][length > 0]
    length = length[length > 0]
    contexts = [context_at(lane, moments) for lane in lanes]
    works = np.any([~waits[context] for context in contexts], axis=0)
    contexts = [np.where(works & waits[context], -1, context) for context in contexts]
    active = np.sum([context >= 0 for context in contexts], axis=0)
    share_ns = length / np.maximum(active, 1)
    blamed = np.zeros(count + 1)
    for context in contexts:
        blamed[:count] += np.bincount(context[context >= 0], share_ns[context >= 0], count)
    blamed[count] = length[active == 0].sum()
    return blamed


def _named(profile: Profile, blamed: np.ndarray) -> pd.DataFrame:
    contexts = profile.contexts
    rows = np.flatnonzero(blamed[:-1])
    names = ["name", "kind", "file", "module"]
    # the part is the context's own: a helper function serves several
    parts = contexts.loc[rows, PART].reset_index(drop=True)
    table = contexts.loc[scopes_of(contexts)[rows], names].reset_index(drop=True).join(parts)
    table["blamed_ms"] = blamed[rows] / 1e6
    keys = [*names, *PART]
    table = table.groupby(keys, as_index=False, sort=False)[["blamed_ms"]].sum()
    if blamed[-1]:
        nobody = dict.fromkeys(keys, "") | {"name": NOBODY, "component": "other"}
        table.loc[len(table)] = nobody | {"blamed_ms": blamed[-1] / 1e6}
    return table
