"""The host: its memory, its cores, and what the step's own thread waits for and computes.

Shares are of the wall time of the step's thread, as the system counted it.
"""

from __future__ import annotations

import statistics

import numpy as np

from dlrm_workbook.analysis.findings.data import FASTER, FASTER_ADVICE
from dlrm_workbook.analysis.findings.evidence import Evidence, Part
from dlrm_workbook.analysis.findings.finding import (
    LEAST_SHARE,
    Causes,
    Measured,
    amdahl,
    bounded,
    is_worthwhile,
    largest,
    predicted,
    removed,
    rule,
)
from dlrm_workbook.analysis.findings.generic import PLACE_SHARE
from dlrm_workbook.analysis.findings.program import LINE_SHARE, computed
from dlrm_workbook.analysis.findings.where import (
    RECORD_MORE,
    line_name,
    part_name,
    shown,
    time_by_name,
)
from dlrm_workbook.analysis.lines import lines
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.lines import MAIN

NO_CORE = "The thread of the step was ready to run but had no core in {queued:.0%} of the time."
PREEMPTED = "It was preempted {switches:count} times per iteration."
OWN_CODE = "{own:ms} of {in_part} pass outside every operator."


def excess_share(evidence: Evidence, ledger: Causes) -> float:
    """Share of the step that parts take beyond what they take alone, still unexplained."""
    return float(ledger.left_ms.sum()) / evidence.total_ms


def blocked_share(evidence: Evidence, ledger: Causes) -> float:
    """Share of the wall in which the step's thread waits, for its batch not counted."""
    blocked = evidence.share_of_wall("blocked_ms")
    waits_for_data = evidence.parameter("data.loader") == "prefetch"
    if waits_for_data or ledger.is_explained(("data", "forward")):
        blocked -= evidence.share("data")
    return max(0.0, blocked)


def _without_core(evidence: Evidence) -> Measured:
    """Figures of ``NO_CORE`` (from 1 % on) and of ``PREEMPTED`` (if ever)."""
    queued = evidence.share_of_wall("run_queue_ms")
    return {
        "queued": queued if queued >= 0.01 else None,
        "switches": evidence.counted("involuntary_switches") or None,
    }


# Memory that grows, and memory that is nearly full.

FULL_SHARE = 0.9
"""Of what the process may use; TensorBoard's former profiler plugin warned there too."""

LEAK_ITERATIONS = 6
SETTLING = 2
"""Iterations after start or profiler in which buffers may still grow."""

LEAST_GROWTH = 64 << 10
"""Bytes per iteration: below, what the counters themselves keep passes for a leak."""

FAR = 1_000_000
"""Iterations; memory that lasts longer is no failure of a run."""


@rule(
    "leak",
    title="Memory grows by {slope_mb:.2f} MB per iteration",
    evidence=(
        "In {grew} of {count} iterations without the profiler memory in use grew, by "
        "{slope_mb:.2f} MB per iteration, to {used_gb:.3f} GB.",
        "At this rate the {limit_gb:.1f} GB that the process may use are full after about "
        "{full_after:,.0f} iterations{planned}.",
    ),
    advice="Look for what keeps tensors of past iterations: a list of losses that still hold "
    "their graph (use .detach() or .item()), a cache without an end, a hook.",
    limit="memory capacity",
)
def leak(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Memory grows from iteration to iteration."""
    levels, changes, limit = _memory(evidence)
    if not evidence.on_gpu and "heap_bytes" in (evidence.meta.get("counters") or {}):
        # exact, where resident memory grows in the allocator's own steps
        changes = _levels(evidence, "heap_bytes")[1]
    if len(changes) < LEAK_ITERATIONS:
        return None
    slope, lasting = growth(changes)
    if not lasting or slope < LEAST_GROWTH:
        return None
    used = float(levels[-1])
    planned = int(evidence.parameter("training.batches", 0) or 0)
    left = (limit - used) / slope if limit else None
    return {
        "share": 0.0,
        "least": 0.0,
        "slope_mb": slope / 1e6,
        "grew": int((changes > 0).sum()),
        "count": len(changes),
        "used_gb": used / 1e9,
        "limit_gb": limit / 1e9 if limit else None,
        "full_after": len(levels) + max(left, 0.0) if left is not None else None,
        "planned": f"; the run is to make {planned:,}" if planned else "",
        "severity": "fails" if left is None or left < max(FAR, planned) else "slows",
    }


@rule(
    "memory_nearly_full",
    title="{used:.0%} of the memory is in use",
    evidence=(
        "At its peak the process held {peak_gb:.2f} GB of the {limit_gb:.2f} GB that it may use.",
    ),
    advice="A smaller batch, micro-batches (training.micro_batch), fewer rows or a smaller "
    "embedding dimension; a larger bag or one more process and the run is ended.",
    limit="memory capacity",
)
def nearly_full(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The process uses nearly all memory that it may."""
    levels, _, limit = _memory(evidence)
    peak = max([*levels, float(evidence.meta.get("gpu_peak_allocated_bytes") or 0.0)])
    if not limit or peak < FULL_SHARE * limit:
        return None
    sizes = {"peak_gb": peak / 1e9, "limit_gb": limit / 1e9}
    return {"share": 0.0, "least": 0.0, "used": peak / limit, "severity": "fails", **sizes}


def growth(changes: np.ndarray) -> tuple[float, bool]:
    """Bytes per iteration by which memory grows, and whether it is a leak.

    A leak grows in most iterations, and goes on to the last of them, though it may first use
    up what was free; buffers that find their size grow in a few. Where an allocator takes
    memory in larger steps than a small leak needs, only many iterations tell: the sum then
    keeps to a line.

    Args:
        changes: (n,) bytes by which memory grew in each iteration.
    """
    slope = float(np.mean(changes))
    usual = float(np.median(changes))
    late = changes[-max(4, len(changes) // 2) :]
    lasts = float(np.mean(late >= LEAST_GROWTH)) >= 0.8
    if lasts and usual > 0.1 * slope > 0:
        return min(slope, 4 * usual), True
    line = np.arange(len(changes) + 1) * slope
    total = np.concatenate([[0.0], np.cumsum(changes)])
    away = np.abs(total - line).max()
    return slope, bool(len(changes) >= 40 and slope > 0 and away < 0.1 * line[-1])


def _memory(evidence: Evidence) -> tuple[np.ndarray, np.ndarray, float | None]:
    """The :func:`_levels` of the memory in use, and the bytes that the process may use."""
    limit = evidence.meta.get("memory_limit_bytes")
    levels = _levels(evidence, "gpu_allocated_bytes" if evidence.on_gpu else "rss_bytes")
    return *levels, float(limit) if limit else None


def _levels(evidence: Evidence, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes in use at the end of each iteration, changes in the iterations that count).

    The profiler keeps what it records and lets go of it afterwards, so iterations with it
    are left out; so are the first ones of a stretch without it, when buffers find their size.
    """
    counters = evidence.meta.get("counters") or {}
    levels = np.asarray(counters.get(name) or [], dtype=float)
    profiled = np.asarray(counters.get("profiled") or [False] * len(levels), dtype=bool)
    if len(levels) < 2 or len(profiled) != len(levels):
        return levels, np.zeros(0)
    begins = np.flatnonzero(~profiled & np.concatenate([[True], profiled[:-1]]))
    places = np.arange(len(levels))
    begin = np.append(begins, 0)[np.searchsorted(begins, places, "right") - 1]
    since = places - begin
    counted = ~profiled[1:] & ~profiled[:-1] & (since[1:] > SETTLING)
    return levels, np.diff(levels)[counted]


# The cores: who takes them from the step, and whether the step uses them.

BUSY_CORES = 0.15
"""Cores that others may keep busy unnoticed: a quiet machine's daemons take below 0.05."""

GREEDY_CORES = 0.5
"""From here on others are reported even if no time is known to be lost to them: half a
core shifts clocks, caches and memory bandwidth."""

PREFETCHER = "prefetch"
"""In the name of the thread that makes batches ahead: expected to compute."""


@rule(
    "other_processes",
    title="Other processes keep {busy:.1f} of the machine's cores busy",
    evidence=(
        "Other processes kept {busy:.2f} cores of {cores} busy during the iterations.",
        NO_CORE,
        PREEMPTED,
    ),
    advice="End or move what else runs on this machine (see `top`), then measure again: every "
    "time in this profile was taken on a machine that was shared.",
    limit="scheduling",
)
def other_processes(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Processes beside ours use the cores."""
    cores = evidence.machine_share("other_processes_cpu_ms")
    queued = evidence.share_of_wall("run_queue_ms")
    lost = max(queued, min(excess_share(evidence, ledger), cores), _taken(evidence, cores))
    if _is_confined(evidence) and evidence.cores:
        # the machine's busy time is counted as a whole: only waiting for a core tells that
        # others were on ours
        ours = _busy_cores(evidence) >= BUSY_CORES or (evidence.threads or 1) > evidence.cores
        if ours or queued < LEAST_SHARE:
            return None
        lost = queued
    if cores < BUSY_CORES or (lost < LEAST_SHARE and cores < GREEDY_CORES):
        return None
    return {"share": lost, "least": 0.0, "explains": None, "busy": cores, **_without_core(evidence)}


@rule(
    "other_threads",
    title="Another thread of this process{at} computes beside the step ({busy:.1f} cores)",
    evidence=(
        "Threads that are neither the step's nor its operators' used {used:ms} of CPU time in "
        "each iteration of {wall_ms:ms}: {names}.",
        NO_CORE,
        "It waited for other things, such as Python's lock, in {blocked:.0%} of it.",
    ),
    advice="Take that thread's work out of the training process, or let it sleep while the step "
    "runs: it takes a core, and Python's lock if it runs Python.",
    limit="scheduling",
)
def other_threads(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Threads of our own process that are not the step's compute beside it."""
    busy, cores = _busy_threads(evidence), _busy_cores(evidence)
    blocked = blocked_share(evidence, ledger)
    lost = max(
        evidence.share_of_wall("run_queue_ms") + blocked,
        min(excess_share(evidence, ledger), cores),
        _taken(evidence, cores),
    )
    if cores < BUSY_CORES or (lost < LEAST_SHARE and cores < GREEDY_CORES):
        return None
    return {
        "share": lost,
        "least": 0.0,
        "explains": None,
        "busy": cores,
        "used": sum(time for _, time in busy),
        "names": ", ".join(f"{name} {milliseconds(time)}" for name, time in busy[:3]),
        "at": _line_of_thread(evidence),
        "blocked": blocked if blocked > 0.01 else None,
        **_without_core(evidence),
    }


CORES_TAKEN_SHARE = 0.1
"""Least share of the step; some of a core is what a batch takes, wherever it is made."""

CORES_TAKEN = "Batches made beside the step take its cores, {share:.0%} of its time{beside}"


@rule(
    "waiting_for_cores",
    title="The step waits for a core in {all_queued:.0%} of its time{beside}",
    evidence=(
        "An operator runs on {threads} threads; the process may use {cores} cores.",
        "Threads or processes that make batches ahead compute {workers:ms} per iteration of "
        "{step_ms:ms}, most of it at {lines}.",
        NO_CORE,
        PREEMPTED,
    ),
    advice="Look at the affinity of the process (taskset, cpuset, the container's CPU limit): "
    "its threads get less than the cores they believe to have.",
    limit="scheduling",
)
def waiting_for_cores(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The step's thread waits for a core, and nobody else is known to have it."""
    queued = evidence.share_of_wall("run_queue_ms")
    threads, cores = evidence.threads, evidence.cores
    too_many = threads is not None and cores is not None and threads > cores
    if too_many:
        lost = max(queued, excess_share(evidence, ledger))
    else:
        lost = queued - ledger.explained_ms / evidence.total_ms
    figures: Measured = {
        "share": lost,
        "explains": None,
        "all_queued": queued,
        **dict.fromkeys(("workers", "lines"), None),
        "beside": "",
        **_without_core(evidence),
        "speedup": removed(lost) if lost >= LEAST_SHARE else bounded(0.05),
    }
    made = evidence.lines_of("data")
    made = made[made["thread"].ne(MAIN)]
    workers = float(made["time_ms"].sum())
    if workers > queued * evidence.step_ms:
        batches = ": batches are made beside it"
        if threads is not None and cores is not None and threads >= cores:
            # an operator waits for that of its threads whose core somebody else has
            taken = float(made.groupby("thread")["time_ms"].sum().max()) / evidence.step_ms
            if taken > max(lost, CORES_TAKEN_SHARE):
                figures |= {"share": taken, "speedup": removed(taken), "title": CORES_TAKEN}
                batches = ""
        figures |= {
            "workers": workers,
            "lines": evidence.said_lines("data"),
            "beside": f"{batches}, most of it in {line_name(made.iloc[0])}",
            "advice": "Make a sample with less work, whole batches at once, or with what was "
            "prepared before the training; else leave who makes them cores of their own "
            "(fewer workers, or fewer threads of operators).",
        }
        change = {"data.generator": FASTER.get(evidence.parameter("data.generator"))}
        if is_worthwhile(gain := predicted(evidence, change)):
            advice = f"{FASTER_ADVICE[0].upper()}{FASTER_ADVICE[1:]}."
            figures |= {"change": change, "speedup": gain, "advice": advice}
    if too_many:
        figures |= {
            "id": "too_many_threads",
            "least": 0.0,
            "title": "{threads} threads share {cores} cores",
            "advice": "Use no more threads than cores: the slowest of an operator's threads sets "
            "its time.",
            "change": {"training.threads": cores},
        }
    return figures


PARALLEL_MS = 0.05
"""Of one call of an operator: a shorter one is done before other threads have begun."""


@rule(
    "too_few_threads",
    title="Operators run on {threads} of {cores} cores",
    evidence=(
        "torch computes with {threads} of the {cores} cores that the process may use, and {busy}.",
        "Operators long enough to be divided take {divided:.0%} of the step; with all idle cores "
        "at work on them {share:.0%} of it would go.",
    ),
    advice="Let operators run on {cores} threads (torch.set_num_threads, OMP_NUM_THREADS, "
    "training.threads). Matrix products and table look-ups split well; small operators do not.",
    limit="arithmetic",
    gpu=False,
)
def too_few_threads(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Cores of the machine have nothing to do."""
    threads, cores = evidence.threads, evidence.cores
    if threads is None or cores is None or threads >= cores:
        return None
    used = evidence.share_of_wall("process_cpu_ms") if evidence.counter("process_cpu_ms") else None
    others = evidence.share_of_wall("other_processes_cpu_ms")
    idle = cores - (used if used is not None else threads) - others
    if idle < 0.5:
        return None
    divided = 1.0 - evidence.share("data") - evidence.share("other")
    called = evidence.called[
        evidence.called["component"].ne("data") & evidence.called["calls"].gt(0)
    ]
    if len(called):
        long = called["cpu_self_ms"] >= PARALLEL_MS * called["calls"]
        divided = min(float(called.loc[long, "cpu_self_ms"].sum()) / evidence.total_ms, 1.0)
    share = divided * idle / (threads + idle)
    return {
        "share": share,
        "least": 0.0,
        "divided": divided,
        "busy": "the others were idle"
        if used is None
        else f"the process kept {used:.2f} of them busy",
        "change": {"training.threads": cores},
        "speedup": {
            "low": amdahl(0.2 * share, 1e9),
            "mid": amdahl(0.7 * share, 1e9),
            "high": amdahl(share, 1e9),
        },
    }


def _taken(evidence: Evidence, others: float) -> float:
    """Share of the step lost to others who keep ``others`` cores busy, if none is idle.

    Operators that run on all cores then have that many fewer: a thread of theirs waits for
    its core, and the others for it.
    """
    threads, cores = evidence.threads, evidence.cores
    if threads is None or cores is None or threads < cores:
        return 0.0
    ours = evidence.share_of_wall("process_cpu_ms")
    if ours < 0.1 or ours + others < 0.85 * cores:
        return 0.0
    return min(others / cores, 0.9)


def _is_confined(evidence: Evidence) -> bool:
    """Whether the process may use some of the machine's cores only."""
    total = (evidence.meta.get("machine") or {}).get("cores")
    return bool(total and evidence.cores and evidence.cores < int(total))


def _busy_cores(evidence: Evidence) -> float:
    """Cores that our own threads beside the step keep busy."""
    used = sum(time for _, time in _busy_threads(evidence))
    return used / evidence.wall_ms if evidence.wall_ms else 0.0


def _line_of_thread(evidence: Evidence) -> str:
    """The line that another thread of the program runs most, in a title's words; "" where no other
    thread was sampled."""
    table = lines(evidence.profile)
    table = table[table["thread"].ne(MAIN) & table["file"].ne("") & table["time_ms"].gt(0)]
    return f", in {line_name(table.loc[table['time_ms'].idxmax()])}," if len(table) else ""


def _busy_threads(evidence: Evidence) -> list[tuple[str, float]]:
    """(name, CPU ms per iteration) of threads that are no part of the step, busiest first."""
    rows = evidence.meta.get("threads_cpu")
    if rows is None:
        total = evidence.counted("other_threads_cpu_ms")
        prefetching = evidence.parameter("data.loader") == "prefetch"
        return [("unnamed", total)] if total and not prefetching else []
    busy = [
        (str(row.get("name") or "unnamed"), float(row.get("cpu_ms_per_iteration") or 0.0))
        for row in rows
        if row.get("kind") in ("python", "other") and PREFETCHER not in str(row.get("name") or "")
    ]
    return sorted(busy, key=lambda row: -row[1])


# The step's own thread: what it waits for, and what it computes that is no operator.

GC_SHARE = 0.02

FAULT_MS = 1e-3
"""A first touch of a 4 KiB page: trap, clearing, page tables. About 0.25 µs on a server
itself; 2 µs were measured in a virtual machine with nested page tables."""

FAULT_SHARE = 0.1

FAULTS_ADDED = 0.01
"""Share of an iteration that the faults a profiler adds must take to be worth a caution."""

PYTHON_MS = 0.01
"""Of a part's own Python for each operator that it calls: 3 to 8 µs were measured."""

WRITTEN_BYTES = 4096
"""Written to storage in an iteration: one block. Training writes nothing in its loop."""


@rule(
    "garbage_collection",
    title="Python's garbage collector takes {share:.0%} of the step",
    evidence=("Collections took {collected:ms} of each iteration of {wall_ms:ms}.",),
    advice="Stop making objects in cycles every iteration, do not call gc.collect() in the loop, "
    "or freeze and disable the collector while training (gc.freeze, gc.disable).",
    limit="dispatch",
)
def collecting_garbage(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Python's cyclic garbage collector runs in the loop."""
    collected, share = evidence.counted("gc_ms"), evidence.share_of_wall("gc_ms")
    return {"share": share, "least": GC_SHARE, "explains": None, "collected": collected}


@rule(
    "storage_in_loop",
    title="The loop {verb} storage and waits for it{where}",
    evidence=(
        "Each iteration {does} {kilobytes:,.0f} kB and waits {waits:ms} of its {wall_ms:ms} "
        "without a core or a need of one.",
        OWN_CODE,
    ),
    advice="Take files out of the step: write less often, without fsync, or from another thread.",
    limit="synchronisation",
)
def storage_in_loop(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The loop writes to or reads from storage and waits for it."""
    written, read = evidence.counted("written_bytes"), evidence.counted("read_bytes")
    blocked = blocked_share(evidence, ledger)
    if max(written, read) < WRITTEN_BYTES or blocked < GC_SHARE:
        return None
    part, place = _waiting_part(evidence)
    # the system's own work on a write or a sync is time on a core, in the same place
    share = place if part is not None and 0.3 * place < blocked < place else blocked
    return {
        "share": share,
        "least": 0.0,
        "verb": "writes to" if written >= read else "reads from",
        "does": "writes" if written >= read else "reads",
        "kilobytes": max(written, read) / 1e3,
        "waits": blocked * evidence.wall_ms,
        **_place(evidence, part),
    }


EXCHANGE_SHARE = 0.15
"""Least share of the step that another program waits in communication for it to be named."""


@rule(
    "waiting",
    title="The step waits{where} for {share:.0%} of its time, and computes nothing then",
    evidence=(
        "In {waits:ms} of each iteration of {wall_ms:ms} the step's thread neither ran nor asked "
        "for a core{gave_up}.",
        OWN_CODE,
    ),
    advice="{look}.",
    limit="synchronisation",
)
def waiting(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The step's thread sleeps or waits for something that is no core."""
    explained = ledger.explained_ms / evidence.total_ms + ledger.some_share
    blocked = blocked_share(evidence, ledger) - explained
    part, place = _waiting_part(evidence)
    if (evidence.threads or 1) > 1:
        # an operator's threads wait for one another in it: no fault of the loop's
        blocked = min(blocked, place)
    exchanges = part is not None and part[0] == "communication"
    switches, figures = evidence.counter("voluntary_switches"), _place(evidence, part)
    return figures | {
        "share": blocked,
        # ranks that share a machine always wait a little for each other
        "least": EXCHANGE_SHARE if exchanges and not evidence.is_ours else LEAST_SHARE,
        "waits": blocked * evidence.wall_ms,
        "gave_up": f", giving its core up {switches:,.0f} times" if switches else "",
        "look": "Give every rank as much to do as the others (a recording of each, read together, "
        "tells which one is late), exchange less (gradients in 16 bits, fewer and larger pieces), "
        "or compute meanwhile"
        if exchanges
        else f"Look for what sleeps, takes a lock, waits for a pipe, a socket or another thread"
        f"{figures['where']}, and take it out of the step",
    }


@rule(
    "page_faults",
    title="The process asks the system for {megabytes:,.0f} MB of new pages per step{made}",
    evidence=(
        "{minor:,.0f} page faults per iteration{from_storage}; at about {each_us:.1f} µs each that "
        "is {cost:ms} of {wall_ms:ms}.",
        OWN_CODE,
    ),
    advice="Keep buffers between iterations, or stop the allocator from returning memory: "
    "MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=1073741824, or huge pages "
    "(THP_MEM_ALLOC_ENABLE=1).",
    limit="memory bandwidth",
)
def page_faults(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Memory is given back to the system and asked for again, iteration by iteration."""
    minor, major = evidence.counted("minor_faults"), evidence.counted("major_faults")
    wall = evidence.wall_ms
    share = min(minor * FAULT_MS / wall, 1.0) if wall else 0.0
    if major >= 1 and evidence.counted("blocked_ms") > LEAST_SHARE * wall:
        share = max(share, blocked_share(evidence, ledger))
    elif share < FAULT_SHARE:
        return None
    part, place = _waiting_part(evidence)
    if part is not None and 0.3 * place < share < place:
        share = place  # most of that part's own code is the touching of new memory
    else:
        part = None
    return {
        "share": share,
        "least": 0.0,
        "megabytes": minor * 4096 / 1e6,
        "made": _largest_made(evidence),
        "minor": minor,
        "from_storage": f", {major:,.1f} of them from storage" if major >= 1 else "",
        "each_us": 1e3 * FAULT_MS,
        "cost": minor * FAULT_MS,
        **_place(evidence, part),
        "component": "other",
    }


def _largest_made(evidence: Evidence) -> str:
    """Words that name the line of the model with most bytes of results; "" where none has half."""
    table = computed(evidence)
    if table.empty:
        return ""
    size = (table["own_elements"] + table["own_double"]).where(table["role"].eq("model"), 0)
    if size.max() < 0.5 * size.sum() or not size.any():
        return ""
    name = line_name(table.loc[size.idxmax()])
    return f": most bytes that the model computes are made at {name}"


def faults_of_profiler(profile: Profile) -> str | None:
    """The sentence about page faults that came with the profiler; None where they hardly matter.

    A profiler keeps what it records in the heap of the program, so that the allocator finds less
    memory that was used before. Parts of our own runs are timed without a profiler too, and so
    are laps of other programs.
    """
    columns = profile.meta.get("counters") or {}
    recorded, faults = columns.get("profiled") or [], columns.get("minor_faults") or []
    walls = columns.get("wall_ms") or []
    timed_alone = profile.meta.get("parameters") or profile.meta.get("laps_ms")
    if timed_alone or not len(recorded) == len(faults) == len(walls):
        return None
    rows = list(zip(recorded, faults, walls, strict=True))
    plain = [count for with_profiler, count, _ in rows if not with_profiler]
    more = [count for with_profiler, count, _ in rows if with_profiler]
    if not plain or not more:
        return None
    with_it, without = statistics.median(more), statistics.median(plain)
    wall_ms = statistics.median(wall for _, _, wall in rows)
    if with_it < 1.5 * without or (with_it - without) * FAULT_MS < FAULTS_ADDED * wall_ms:
        return None
    return (
        f"The recorded iterations have {with_it:,.0f} page faults each, those without the profiler "
        f"{without:,.0f}. Parts that take new memory, such as large results and gradients, last "
        "longer in the recording than in the step."
    )


@rule(
    "python_in_part",
    title="Code outside every operator takes {share:.0%} of the step, in {name}",
    evidence=(
        "{own:ms} of {name} ({whole:ms}) pass outside the operators that it calls{meanwhile}.",
        "The Python lines that take most of it: {lines}.",
    ),
    advice="Look at what the Python code of {name} does: loops, conversions to lists or numpy, "
    "formatting, hooks. Express it in operators on whole tensors or take it out.",
    limit="dispatch",
    gpu=False,
)
def python_in_part(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Code of a part's own computes, outside every operator, where parts only call operators."""
    if (by_line := _without_operators(evidence)) is not None:
        return by_line
    usual = 2.0 * PYTHON_MS * (5.0 + evidence.parts["calls"])
    own = (evidence.parts["python_ms"] - usual).dropna()
    # of another program's code that no name places, the lines are named all the same
    # and whoever communicates waits for other ranks
    left_out = ["data", "transfer", "communication"]
    if evidence.is_ours or len(lines(evidence.profile)):  # what has lines has findings by line
        left_out.append("other")
    own = own.drop(left_out, level="component", errors="ignore")
    left = [
        (float(time) - ledger.explained_in(part), part)
        for part, time in zip(((str(c), str(p)) for c, p in own.index), own, strict=True)
    ]
    time, part = max(left, default=(0.0, ("other", "")))
    # what has no place yet (a collector, waiting) may well have been here
    share = time / evidence.total_ms - ledger.anywhere_ms / evidence.total_ms
    if share < LEAST_SHARE:
        return None
    figures: Measured = {
        "share": share,
        "name": part_name(*part) if part[0] != "other" else "no named part",
        "own": float(evidence.parts["python_ms"][part]),
        "lines": evidence.said_lines(*part),
        "whole": float(evidence.parts["traced_ms"][part]),
        "component": part[0],
        "meanwhile": ", and the thread is on a core meanwhile" if len(evidence.counters) else "",
    }
    if not (evidence.is_ours or len(evidence.counters) or evidence.profile.of_kind("python").any()):
        # nothing tells whether the thread computes
        figures["share"] = share = figures["own"] / evidence.total_ms
        if share < PLACE_SHARE:
            return None
        within = evidence.profile.contexts[["component", "phase"]].eq(list(part)).all(axis=1)
        within &= evidence.profile.of_kind("annotation")
        rows = evidence.pieces[np.append(within, False)[evidence.pieces["context"]]]
        ranges = time_by_name(evidence.profile, rows["context"], rows["ms"])["range"]
        if len(ranges):
            share = float(ranges.iloc[0]) / evidence.total_ms
            figures |= {"name": shown(str(ranges.index[0])), "own": ranges.iloc[0], "share": share}
            figures["evidence"] = (
                "In {name} {own:ms} of {total_ms:ms} pass outside of operators{meanwhile}.",
            )
        figures |= {
            "title": "{share:.0%} of the step passes in {name}, in no recorded operator",
            "meanwhile": "; the recording does not show whether the thread computes or waits then",
            **{"advice": RECORD_MORE, "limit": "", "speedup": {}},
        }
    ledger.explain(share * evidence.total_ms, part)
    return figures


def _without_operators(evidence: Evidence) -> Measured | None:
    """The function of the model whose lines take most without calling an operator, if these have
    most of its time."""
    table = computed(evidence).query("role == 'model'")
    calls_none = table["own_calls"].eq(0) & table["operators"].astype(str).eq("")
    whole = table.groupby(["file", "function"])["share_of_step"].transform("sum")
    table = table[calls_none]
    own = table.groupby(["file", "function"])["share_of_step"].transform("sum")
    share = whole[table.index].where(own > 0.5 * whole[table.index], own)
    if table.empty or share.max() < LINE_SHARE:
        return None
    row = table.loc[share.idxmax()]
    return {
        "share": float(share.max()),
        "explains": None,
        "title": "{name} takes {share:.0%} of each step, outside every operator",
        "evidence": ("`{source}` takes {own:ms} of {step_ms:ms}, and calls no operator.",),
        "name": line_name(row),
        "source": str(row["source"])[:80],
        "own": float(row["time_ms"]),
        "advice": "Express it in operators on whole tensors, do it now and then, or take it out.",
    }


def _waiting_part(evidence: Evidence) -> tuple[Part | None, float]:
    """The part in which most time passes outside every operator, and that share of the step."""
    python = evidence.parts["python_ms"].dropna().drop("data", level="component", errors="ignore")
    if python.empty or python.max() < GC_SHARE * evidence.total_ms:
        return None, 0.0
    return largest(python), float(python.max()) / evidence.total_ms


def _place(evidence: Evidence, part: Part | None) -> Measured:
    """Where the step waits: the part, " in PART" or nothing, and the figures of ``OWN_CODE``."""
    if part is None:
        return {"explains": None, "where": "", "own": None, "in_part": None}
    label = part_name(*part)
    own = float(evidence.parts["python_ms"][part])
    return {"explains": part, "where": f" in {label}", "own": own, "in_part": label}
