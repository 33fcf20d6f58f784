"""How much of an iteration each part of the model takes.

Every instant of an iteration belongs to exactly one part and phase, so the times sum
to the iteration time. On a CPU it is the part that the iteration's thread is in. On a
GPU it is the part whose kernel runs (column ``where`` is ``device``; collectives and copies
have only the time in which nothing else runs) and, while the GPU idles, the part that the
host is in (``host``): what the GPU waits for then. Where the host was not measured, idle time
is one row of its own (``idle``). A recording of a GPU in which no iterations are known counts
as one, from its first GPU operation to its last.

Means are over the steady iterations: warm-up and outliers, as
:mod:`dlrm_workbook.analysis.steady` detects them, are left out, named, and explained by
:func:`what_differed`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.parts import COMPONENTS, ITERATION_SPAN, PHASES
from dlrm_workbook.analysis.context_tree import context_at, distinct, edges, extent, running
from dlrm_workbook.analysis.first_calls import FREEING
from dlrm_workbook.analysis.steady import SteadyState, listed, steady_state
from dlrm_workbook.ground.arrays import Bools, Floats, Ints
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import START_UP
from dlrm_workbook.recordings.hpctoolkit.parts import iteration_functions
from dlrm_workbook.recordings.nesting import overlap, start_and_end, stretch_at, stretches
from dlrm_workbook.recordings.profile import Profile, of_streams, once, true_trace

ITERATION_NAMES = (ITERATION_SPAN, "ProfilerStep*")
"""Contexts whose subtree is the training step, whichever the trace has."""

PART = ["component", "phase"]
KEYS = [*PART, "where"]

IDLE = "idle"
"""Component, and ``where``, of the time in which the GPU idles and the host was not measured."""

GPU_SPAN = 0.5
"""Share of a recording without iterations from which on its GPU's first and last operation bound
what is explained; below, what matters lies before or after them, unless the host waits there: for
what was launched before the recording, or for the profiler."""

WHOLE = 0.9
"""Share of the recording from which on what lies between these is called the recording."""

NO_THREAD = -1
"""Row of a thread that the recording does not have."""

DIFFERED = ["iteration", "why", "time_ms", "usual_ms", *KEYS, "part_ms", "usual_part_ms"]
DIFFERED += ["grew_ms", "share"]


def attribute(profile: Profile) -> pd.DataFrame:
    """Mean time of each part and phase in a steady iteration, in the order of a step.

    ``time_ms`` sums to the mean steady iteration, ``share`` to 1 (of what, :func:`basis` says).
    ``attrs["left_out"]`` says in sentences which iterations were left out and why. Empty if nothing
    was measured.
    """
    iteration_parts = of_steady(profile, per_iteration(profile))
    count = max(iteration_parts["iteration"].nunique(), 1)
    table = iteration_parts.groupby(KEYS, as_index=False, sort=False)[["time_ms"]].sum()
    table["time_ms"] /= count
    total = table["time_ms"].sum()
    table["share"] = table["time_ms"] / total if total > 0 else np.nan
    table = in_step_order(table)
    state = iteration_state(profile)
    table.attrs["left_out"] = _left_out(profile, state) if state else []
    return table


def iteration_times_ms(profile: Profile) -> Floats:
    """Wall time of every iteration (n,), ms.

    On a GPU an iteration lasts until its last kernel ends or the next one begins.
    """
    return (profile.iterations["end_ns"] - profile.iterations["start_ns"]).to_numpy() / 1e6


def iteration_state(profile: Profile) -> SteadyState | None:
    """Which of the profile's iterations (in their order) are steady; None without iterations."""
    return None if profile.iterations.empty else steady_state(iteration_times_ms(profile))


def of_steady(profile: Profile, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that are of steady iterations, by its column ``iteration``."""
    state = iteration_state(profile)
    if state is None:
        return table
    return table[table["iteration"].isin(profile.iterations["iteration"][state.steady])]


def what_differed(profile: Profile) -> pd.DataFrame:
    """Which parts grew in each iteration that :func:`attribute` leaves out, most growth first.

    ``grew_ms`` adds up to ``time_ms`` minus the mean steady time. Empty if none is left out.
    """
    state = iteration_state(profile)
    if state is None or state.steady.all():
        return pd.DataFrame({name: [] for name in DIFFERED})
    numbers = profile.iterations["iteration"].to_numpy()
    wide = per_iteration(profile).pivot_table(
        index="iteration", columns=KEYS, values="time_ms", aggfunc="sum", fill_value=0.0
    )
    wide = wide.reindex(numbers, fill_value=0.0)
    usual = wide[state.steady].mean()
    frames = []
    for place in np.flatnonzero(~state.steady):
        part = pd.DataFrame({"part_ms": wide.loc[numbers[place]], "usual_part_ms": usual})
        part["grew_ms"] = part["part_ms"] - part["usual_part_ms"]
        risen = part["grew_ms"].clip(lower=0)
        part["share"] = risen / risen.sum() if risen.sum() > 0 else 0.0
        why = "warm-up" if place < state.first else "short" if state.short[place] else "straggler"
        part = part.assign(iteration=numbers[place], why=why, time_ms=state.times_ms[place])
        frames.append(part.sort_values("grew_ms", ascending=False).reset_index())
    return pd.concat(frames, ignore_index=True).assign(usual_ms=float(usual.sum()))[DIFFERED]


def per_iteration(profile: Profile) -> pd.DataFrame:
    """Time of each part and phase in every iteration.

    A torch trace in which no iteration is found counts as one, from its first span to its last. Any
    other profile without iterations (sampled, without a trace) counts as one of mean length: its
    CPU time divided by how many iterations the measured pass ran. An InputError says that nothing
    in the recording lasts, so that it has no time to explain.
    """
    trace = profile.trace
    if len(trace) and not trace["end_ns"].gt(trace["start_ns"]).any():
        raise InputError("the recording has no time to explain: none of its spans lasts")
    if profile.trace.empty or windows(profile).empty:
        return _sampled(profile)
    return _traced(profile)


@once
def windows(profile: Profile) -> pd.DataFrame:
    """The iterations in order of time; where none is known, the whole recording as one.

    That is from the first operation of a GPU to the last, since start-up is recorded too; where
    that is little of a trace, from its first span to its last (of Nsight Systems, which records
    all of the process, from the first call of the driver, and not what it mostly gives back at
    its end). Empty without either. Columns as in ``profile.iterations``.
    """
    if len(profile.iterations):
        return profile.iterations.sort_values("start_ns")
    trace, engine = profile.trace, profile.meta.get("engine")
    (first, last), whole = extent(of_streams(profile)), recorded(profile)
    if engine == "nsight" and last > first:
        calls = profile.of_kind("runtime", "kernel", "copy")[trace["context"]]
        trace = trace[calls]
        begin, end = extent(trace)
        frees = profile.which("name", lambda name: bool(FREEING.search(name)))[trace["context"]]
        freed = overlap(np.array([last]), np.array([end]), *stretches(trace[frees])).sum()
        whole = begin, last if 2 * freed > end - last else end
    awaits = profile.which("name", lambda name: bool(re.search("[sS]ynchronize", name)))
    waits = stretches(trace[awaits[trace["context"]]])
    awaited = overlap(np.array([whole[0], last]), np.array([first, whole[1]]), *waits).sum()
    traced = engine in ("torch", "nsight")
    if traced and last - first < max(GPU_SPAN * (whole[1] - whole[0] - awaited), 1):
        first, last = whole
    if last <= first:
        return profile.iterations
    return pd.DataFrame([{"iteration": 0, "start_ns": first, "end_ns": last}])


OF_PROFILER = re.compile(r"torch/profiler/profiler\.py\(\d+\): (?:start|stop|__enter__|__exit__)$")
"""Matches Python's frames in which torch.profiler starts and stops."""


def recorded(profile: Profile) -> tuple[int, int]:
    """From when to when a program was recorded, ns: without the profiler's own start and stop,
    where Python's frames tell them."""
    trace = profile.trace
    begin, end = extent(trace)
    is_own = profile.which("name", lambda name: bool(OF_PROFILER.search(name)))
    profiling = trace[is_own[trace["context"]]]
    work = trace[profile.of_kind("operator", "kernel", "copy")[trace["context"]]]
    if len(work):
        first, last = extent(work)
        begin = max([begin, *profiling.loc[profiling["end_ns"].le(first), "end_ns"]])
        end = min([end, *profiling.loc[profiling["start_ns"].ge(last), "start_ns"]])
    return begin, end


def host_is_traced(profile: Profile) -> bool:
    """Whether the recording says what the iterating thread did when."""
    return bool(profile.trace["profile"].eq(main_thread(profile)).any())


@once
def _traced(profile: Profile) -> pd.DataFrame:
    pieces = segments(profile)
    if pieces.empty:
        return pd.DataFrame(columns=["iteration", *KEYS, "time_ms"])
    number, parts = _numbered_parts(profile)
    pieces["part"] = number[pieces["context"]]
    pieces["time_ms"] = (pieces["end_ns"] - pieces["start_ns"]) / 1e6
    if not host_is_traced(profile):
        unknown = pieces["where"].eq("host").to_numpy()
        pieces.loc[unknown, "part"], pieces.loc[unknown, "where"] = len(parts), IDLE
        parts.loc[len(parts)] = [IDLE, ""]
    times = pieces.groupby(["iteration", "part", "where"], as_index=False)[["time_ms"]].sum()
    table = times.join(parts, on="part").sort_values(["iteration", *KEYS], ignore_index=True)
    return table[["iteration", *KEYS, "time_ms"]]


def device_beside_host(profile: Profile) -> pd.DataFrame:
    """Time of the GPU in each part beside that of the iterating thread, whatever the GPU did.

    Of a mean steady iteration, in the order of a step. ``host_ms`` is NaN where the host was not
    measured. Empty without a timeline of a GPU.
    """
    columns = [*PART, "device_ms", "host_ms", "idle_ms"]
    iteration_parts = per_iteration(profile)
    if profile.trace.empty or not iteration_parts["where"].eq("device").any():
        return pd.DataFrame({name: [] for name in columns})
    iteration_parts = of_steady(profile, iteration_parts)
    count = iteration_parts["iteration"].nunique()
    table = iteration_parts.pivot_table("time_ms", PART, "where", aggfunc="sum", fill_value=0.0)
    table = table.reindex(columns=["device", "host", IDLE], fill_value=0.0) / count
    table["idle_ms"] = table["host"] + table[IDLE]
    pieces = segments(profile, device=False)
    pieces = pieces[pieces["iteration"].isin(iteration_parts["iteration"])]
    length = (pieces["end_ns"] - pieces["start_ns"]) / 1e6 / count
    host = by_part(profile, pieces["context"], pd.DataFrame({"host_ms": length}))
    table = table.rename(columns={"device": "device_ms"}).join(host, how="outer").fillna(0.0)
    if not host_is_traced(profile):
        table["host_ms"] = np.nan
        table = table.drop(index=("other", ""), errors="ignore")
    return in_step_order(table.reset_index())[columns]


def parts_at(profile: Profile, context: Ints) -> pd.DataFrame:
    """``component`` and ``phase`` of contexts (n,), row by row; ``other`` and "" for −1."""
    part = profile.contexts[PART].iloc[np.maximum(context, 0)].reset_index(drop=True)
    part.loc[context < 0, PART] = ["other", ""]
    return part


def by_part(profile: Profile, context: pd.Series, values: pd.DataFrame) -> pd.DataFrame:
    """Sums of values (n, columns) by ``component`` and ``phase`` (the index) of contexts (n,)."""
    number, parts = _numbered_parts(profile)
    table = values.groupby(number[context]).sum()
    table.index = pd.MultiIndex.from_frame(parts.loc[table.index])
    return table.sort_index()


def _numbered_parts(profile: Profile) -> tuple[Ints, pd.DataFrame]:
    """(number of each context's part, the parts); the last number (n + 1,) is that of context −1.

    Millions of spans are grouped by numbers in a fraction of the time that names take.
    """
    parts = pd.concat([profile.contexts[PART], pd.DataFrame([["other", ""]], columns=PART)])
    number = parts.groupby(PART, sort=False).ngroup().to_numpy().astype(np.int64)
    return number, parts.drop_duplicates().reset_index(drop=True)


def coverage(attribution: pd.DataFrame) -> float:
    """Share of the GPU's time that is in named parts; of the CPU's time where there is no GPU."""
    on_gpu = attribution["where"].eq("device")
    table = attribution[on_gpu] if on_gpu.any() else attribution
    total = float(table["time_ms"].sum())
    if total <= 0:
        return float("nan")
    return float(table.loc[table["component"] != "other", "time_ms"].sum()) / total


UNATTRIBUTED = ["name", "kind", "device_ms", "host_ms", "share"]

UNRECORDED = "time in no recorded call"
"""Name of the time in which the iterating thread is in nothing that was recorded."""


def unattributed(profile: Profile) -> pd.DataFrame:
    """What remains ``other``, by name: what a ``parts`` map could name; the largest share first.

    Of a GPU, and of samples, it is of the whole recording; of the timeline of a CPU what the
    iterating thread is in, in its steady iterations, with what lies between (:data:`UNRECORDED`).
    """
    contexts = profile.contexts
    device, host = map(profile.value_table, ("gpu_time_ms", "cpu_time_ms"))
    table = contexts[["name", "kind"]].assign(device_ms=device, host_ms=host)
    counted = "device_ms" if profile.has("gpu_time_ms") else "host_ms"
    is_sampled = profile.meta.get("engine") == "hpctoolkit" or profile.trace.empty
    if counted == "host_ms" and not (is_sampled or windows(profile).empty):
        pieces = of_steady(profile, segments(profile, device=False))
        length = (pieces["end_ns"] - pieces["start_ns"]) / 1e6
        # the row −1 stands for outside of every span
        table = pd.concat([table, pd.DataFrame({"name": [UNRECORDED], "kind": "thread"})])
        table["host_ms"] = np.bincount(pieces["context"] % len(table), length, len(table))
    total = table[counted].sum()
    table = table[np.append(contexts["component"], "other")[: len(table)] == "other"]
    times = ["device_ms", "host_ms"]
    table = table.groupby(["name", "kind"], as_index=False)[times].sum(min_count=1)
    table["share"] = table[counted] / total if total > 0 else np.nan
    table = table[table[times].gt(0).any(axis=1)]
    return table.sort_values([counted, "host_ms"], ascending=False, ignore_index=True)[UNATTRIBUTED]


@once
def segments(profile: Profile, device: bool = True) -> pd.DataFrame:
    """The iterations cut into stretches, each with the one context that owns it.

    Without iterations, the whole recording.

    Args:
        device: give the time in which the GPU runs to its kernels; else every stretch
            belongs to what the iterating thread is in, whatever the GPU does meanwhile.
            While that thread waits for autograd's, it is what autograd's thread is in.

    Returns:
        ``iteration``, ``start_ns``, ``end_ns``, ``where``, ``context`` (−1 outside every
        span). Without gaps or overlaps: they add up to the iterations.
    """
    host = running(profile, main_thread(profile))
    helpers = [running(profile, thread) for thread in _autograd_threads(profile)]
    busy = [_kernels_in_turn(profile, part) for part in (False, True)] if device else []
    iterations = windows(profile)
    first, last = start_and_end(iterations)
    cuts = distinct([first, last, *edges(host, *helpers, *busy)])
    begin, finish = cuts[:-1], cuts[1:]
    which = stretch_at(first, last, begin)
    begin, finish, which = begin[which >= 0], finish[which >= 0], which[which >= 0]
    owner = context_at(host, begin)
    for helper in helpers:
        context = context_at(helper, begin)
        owner = np.where(may_wait(profile)[owner] & (context >= 0), context, owner)
    kernel = np.full(len(begin), -1)
    for lane in busy:
        kernel = np.where(kernel >= 0, kernel, context_at(lane, begin))
    return pd.DataFrame(
        {
            "iteration": iterations["iteration"].to_numpy()[which],
            "start_ns": begin,
            "end_ns": finish,
            # two objects that all rows share: strings of their own are slow to compare and to group
            "where": np.array(["host", "device"], dtype=object)[(kernel >= 0).astype(int)],
            "context": np.where(kernel >= 0, kernel, owner),
        }
    )


def _autograd_threads(profile: Profile) -> list[int]:
    """CPU threads that run backward nodes for the thread of the iterations."""
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    on_top = np.append(contexts["kind"].eq("thread").to_numpy(), False)[parent]
    nodes = np.flatnonzero(on_top & contexts["phase"].eq("backward").to_numpy())
    threads = profile.trace.loc[profile.trace["context"].isin(nodes), "profile"].unique()
    return sorted(set(threads.tolist()) - {main_thread(profile)})


def may_wait(profile: Profile) -> Bools:
    """The contexts (n + 1,) in which a thread may wait: ranges and Python of no part, or none.

    ``backward`` returns when autograd's thread is done. The last row stands for context −1.
    """
    idle = profile.contexts["component"].eq("other").to_numpy()
    return np.append(idle & ~profile.of_kind("operator", "runtime", "kernel", "copy"), True)


BACKGROUND = ("communication", "transfer")
"""Parts whose time on a GPU counts where nothing else runs there: the rest of it is hidden."""


def _kernels_in_turn(profile: Profile, background: bool) -> tuple[Ints, Ints, Ints]:
    """(start, end, context) of the GPU's work without overlaps, in the background or not.

    Of kernels that run at once, the one that started first has the time.
    """
    work = of_streams(profile, true_trace(profile))
    is_background = profile.contexts["component"].isin(BACKGROUND).to_numpy()
    chosen = is_background[work["context"].to_numpy()] == background
    work = work[chosen & (work["end_ns"] > work["start_ns"])].sort_values("start_ns")
    start, end = work["start_ns"].to_numpy().copy(), _counted_ends(profile, work)
    start[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])
    counted = end > start
    return start[counted], end[counted], work["context"].to_numpy()[counted]


def _counted_ends(profile: Profile, work: pd.DataFrame) -> Ints:
    """Ends (n,) of operations of a GPU, no later than HPCToolkit's metrics allow.

    In its trace an operation can seem to run on until the next event, thousands of times as
    long as its like; the metric of its call path knows the sum. The longest are then cut to
    one length, so that the sum is right.
    """
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy().copy()
    if profile.meta.get("engine") != "hpctoolkit" or not profile.has("gpu_time_ms"):
        return end
    context, length = work["context"].to_numpy(), (end - start).astype(float)
    metric = 1e6 * profile.value_table("gpu_time_ms", "inclusive").to_numpy()
    traced = np.bincount(context, length, minlength=len(metric))
    for one in np.flatnonzero((metric > 0) & (traced > 1.001 * metric)):
        rows = np.flatnonzero(context == one)
        ordered = np.sort(length[rows])
        # all longer than the k shortest get what the metric leaves for each of them
        left = metric[one] - np.append(0.0, np.cumsum(ordered)[:-1])
        mean_left = left / np.arange(len(rows), 0, -1)
        longest = mean_left[np.argmax(mean_left <= ordered)]
        end[rows] = start[rows] + np.minimum(length[rows], longest).astype(np.int64)
    return end


def main_thread(profile: Profile) -> int:
    """The CPU thread (row of ``threads``) that runs the iterations.

    The one with iteration spans; failing that the one that the reader of the recording names,
    or the one with the most CPU time.
    """
    marked = np.flatnonzero(iteration_contexts(profile))
    spans = profile.trace[profile.trace["context"].isin(marked)]
    if len(spans):
        return int(spans["profile"].value_counts().idxmax())
    if "main_thread" in profile.meta:
        return int(profile.meta["main_thread"])
    rows = profile.values[profile.rows("cpu_time_ms", "exclusive")]
    if rows.empty:
        cpu = profile.threads.loc[profile.threads["kind"].eq("cpu_thread"), "profile"]
        return int(cpu.iloc[0]) if len(cpu) else NO_THREAD
    return int(rows.groupby("profile")["value"].sum().idxmax())


def iteration_count(profile: Profile) -> int:
    """How many iterations the values are summed over; 1 if that is unknown."""
    if len(profile.iterations):
        return len(profile.iterations)
    for measured in profile.meta.get("passes", []):
        if measured.get("iterations"):
            return int(measured["iterations"])
    config = (profile.meta.get("parameters") or {}).get("profiling") or {}
    if profile.meta.get("engine") == "hpctoolkit" and config.get("iterations"):
        # hpcrun measures a whole process, warm-up included (see recordings/measure.py)
        return int(config.get("warmup", 0)) + int(config["iterations"])
    return 1


def as_one(profile: Profile) -> Profile:
    """The whole recording as a single iteration, where it has a timeline."""
    iterations = profile.iterations.iloc[:0]
    if len(profile.trace):
        start, end = profile.trace["start_ns"].min(), profile.trace["end_ns"].max()
        iterations = pd.DataFrame({"iteration": [0], "start_ns": [start], "end_ns": [end]})
    counting = ("passes", "parameters", "iteration_name")
    meta = {name: value for name, value in profile.meta.items() if name not in counting}
    return replace(profile, iterations=iterations, meta=meta | {"whole": True}, _known={})


def time_unit(profile: Profile) -> str:
    """Of which time the tables give values: a mean iteration's, or the whole recording's."""
    unit = "ms in a mean iteration" if has_iterations(profile) else f"ms {per(profile)}"
    return unit + (", kernels serialised by PC sampling" if profile.meta.get("serialised") else "")


def has_iterations(profile: Profile) -> bool:
    """Whether times of a mean iteration can be told."""
    return iteration_count(profile) > 1 or bool(len(profile.iterations))


def per(profile: Profile) -> str:
    """The same after a figure: ``per iteration`` or ``in the whole recording``."""
    named = basis(profile)
    if has_iterations(profile):
        return "per iteration"
    return f"in {named if named == GPU_PART else 'the whole recording'}"


GPU_PART = "the recording's GPU part"
"""Name of what :func:`windows` gives of a recording that has far more."""


def basis(profile: Profile) -> str:
    """What the shares of :func:`attribute` are shares of, in words.

    A step where iterations are known; else the time from a GPU's first operation to its last;
    without a timeline the time that was sampled.
    """
    on_timeline = not profile.trace.empty and not windows(profile).empty
    if on_timeline or profile.device != "cuda" or not profile.has("gpu_time_ms"):
        if has_iterations(profile):
            return "the step"
        if not on_timeline:
            return "the CPU time"
        (first, last), whole = extent(windows(profile)), recorded(profile)
        return "the recording" if last - first > WHOLE * (whole[1] - whole[0]) else GPU_PART
    return "the GPU's time"


@once
def iteration_contexts(profile: Profile) -> np.ndarray:
    """Which contexts (n,) are an iteration: its range, or else its Python function."""
    marks = {*ITERATION_NAMES, profile.meta.get("iteration_name")}
    ranges = profile.which("name", marks.__contains__)
    if ranges.any():
        return ranges
    # HPCToolkit sees no ranges, only Python functions (``-a python``)
    return iteration_functions(profile.contexts, profile.values)


@once
def step_contexts(profile: Profile, other_threads: bool = True) -> np.ndarray:
    """Which contexts (n,) belong to the step.

    On a thread with iterations, those inside them: start-up and what follows are not the step.
    Where no iteration is marked, all but what is known to be start-up. ``other_threads`` also takes
    all contexts of threads without iterations.
    """
    inside = iteration_contexts(profile)
    if not inside.any():
        return profile.contexts["phase"].ne(START_UP).to_numpy()
    parent = profile.contexts["parent"].tolist()
    is_thread = profile.contexts["kind"].eq("thread").tolist()
    thread = np.arange(len(parent))
    # Parents come first, so one walk down suffices. A database has one root over all
    # threads, a trace a root for each.
    for row, above in enumerate(parent):
        if above >= 0:
            inside[row] |= inside[above]
            if not is_thread[row]:
                thread[row] = thread[above]
    # Where spans placed the samples, those of every thread are in the iterations already.
    if not other_threads or profile.meta.get("spans"):
        return inside
    kind = profile.contexts["kind"]
    root = kind.eq("root").to_numpy()
    # a torch trace has the Python frames of waiting threads too: they do nothing
    at_work = np.unique(thread[~kind.isin(["thread", "python", "root"]).to_numpy()])
    outside = np.isin(thread, np.unique(thread[inside])) | root | ~np.isin(thread, at_work)
    return inside | ~outside


def _left_out(profile: Profile, state: SteadyState) -> list[str]:
    """A sentence each for warm-up, stragglers and short iterations, where there are any."""
    numbers = profile.iterations["iteration"].to_numpy()
    sentences = []
    kinds = {"warm-up": state.warm_up, "stragglers": state.stragglers, "short": state.short}
    for why, rows in kinds.items():
        if rows.any():
            times = state.times_ms[rows]
            end = f"up to {milliseconds(times.max())}"
            if why == "short":
                end = f"from {milliseconds(times.min())}"
            sentences.append(
                f"{rows.sum()} of {len(numbers)} iterations are {why} and left out "
                f"({listed(numbers[rows])}; {end} against {milliseconds(state.mean_ms)} usually)"
            )
    return sentences


def host_time(profile: Profile) -> pd.Series:
    """CPU time of each context, ms, of the threads that run the step.

    Where no iteration is marked in a sampled profile, these are the main thread and those of
    which parts take most (autograd's); OpenMP's workers run, or spin, beside them.
    """
    exclusive = profile.values[profile.rows("cpu_time_ms", "exclusive")]
    sampled = profile.meta.get("engine") == "hpctoolkit" and not profile.meta.get("spans")
    if sampled and len(exclusive) and not iteration_contexts(profile).any():
        named = profile.contexts["component"].ne("other").to_numpy()[exclusive["context"]]
        share = exclusive["value"].where(named, 0.0).groupby(exclusive["profile"]).sum()
        share = share / exclusive.groupby("profile")["value"].sum()
        threads = {main_thread(profile), *share.index[share > 0.5]}
        exclusive = exclusive[exclusive["profile"].isin(threads)]
        total = np.bincount(exclusive["context"], exclusive["value"], len(profile.contexts))
        return pd.Series(total, profile.contexts.index)
    return profile.value_table("cpu_time_ms")


def _sampled(profile: Profile) -> pd.DataFrame:
    """One mean iteration from sampled CPU time, or from the operations of a GPU."""
    table = profile.contexts[["component", "phase"]].copy()
    on_host = profile.device != "cuda" or not profile.has("gpu_time_ms")
    time = host_time(profile) if on_host else profile.value_table("gpu_time_ms")
    table["time_ms"] = time / iteration_count(profile)
    # Worker threads run beside the thread of the step: their time is not the step's.
    table = table[step_contexts(profile, other_threads=False) & table["time_ms"].gt(0)]
    table = table.assign(iteration=0, where="host" if on_host else "device")
    return table.groupby(["iteration", *KEYS], as_index=False)[["time_ms"]].sum()


def in_step_order(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order in which a step meets its parts; a whole iteration comes first. The
    table has ``component``, ``phase`` and maybe ``where``: device before host."""
    component = {name: row for row, name in enumerate(("iteration", *COMPONENTS))}
    phase = {name: row for row, name in enumerate(PHASES)}
    rank = table["component"].map(component).fillna(len(component)) * 100
    rank += table["phase"].map(phase).fillna(len(phase)) * 10
    if "where" in table:
        rank += table["where"].eq("host")
    order = np.argsort(rank.to_numpy(dtype=float), kind="stable")
    return table.iloc[order].reset_index(drop=True)
