"""Shares of the wall time of the step's thread, as the host's rules count them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dlrm_core.parts import part_label
from dlrm_core.units import milliseconds
from dlrm_workbook.analysis.findings.evidence import Evidence, Part
from dlrm_workbook.analysis.findings.finding import (
    Finding,
    Ledger,
    bounded,
    largest,
    removed,
)

LOST_SHARE = 0.05
"""Of the step; below it a remedy gains less than a run's own scatter."""


def excess_share(evidence: Evidence, ledger: Ledger) -> float:
    """Share of the step that parts take beyond what they take alone, still unexplained."""
    left = float(ledger.left_ms.sum())
    return left / evidence.total_ms if evidence.total_ms > 0 else 0.0


def claimed_share(evidence: Evidence, ledger: Ledger) -> float:
    """Share of the step that rules have explained so far."""
    return ledger.explained_ms / evidence.total_ms if evidence.total_ms > 0 else 0.0


def blocked_share(evidence: Evidence, ledger: Ledger) -> float:
    """Share of the wall in which the step's thread waits, for its batch not counted."""
    blocked = evidence.share_of_wall("blocked_ms")
    waits_for_data = evidence.parameter("data.loader") == "prefetch"
    if waits_for_data or ledger.is_explained(("data", "forward")):
        blocked -= evidence.share("data")
    return max(0.0, blocked)


def waiting_said(evidence: Evidence) -> str:
    """A sentence on the time without a core; empty below 1 %."""
    queued = evidence.share_of_wall("run_queue_ms")
    if queued < 0.01:
        return ""
    return f" The step's thread was ready but had no core in {queued:.0%} of the time."


def switches_said(evidence: Evidence) -> str:
    """A sentence on how often the thread was taken off its core; empty if never."""
    switches = evidence.counted("involuntary_switches")
    return f" It was taken off its core {switches:,.1f} times an iteration." if switches else ""


# Memory that grows, and memory that is nearly full.

FULL_SHARE = 0.9
"""Of what the process may use; TensorBoard's former profiler plugin warned there too."""

LEAST_ITERATIONS = 6
SETTLING = 2
"""Iterations after start or profiler in which buffers may still grow."""

LEAST_GROWTH = 64 << 10
"""Bytes an iteration: below, what the counters themselves keep passes for a leak."""

FAR = 1_000_000
"""Iterations; memory that lasts longer is no failure of a run."""


def leak(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Memory grows from iteration to iteration."""
    name = "gpu_allocated_bytes" if evidence.on_gpu else "rss_bytes"
    levels, changes = _levels(evidence, name)
    if not evidence.on_gpu and "heap_bytes" in (evidence.meta.get("counters") or {}):
        # exact, where resident memory grows in the allocator's own steps
        changes = _levels(evidence, "heap_bytes")[1]
    if len(changes) < LEAST_ITERATIONS:
        return
    slope, steady = growth(changes)
    if not steady or slope < LEAST_GROWTH:
        return
    limit, used = _limit(evidence), float(levels[-1])
    planned = int(evidence.parameter("training.batches", 0) or 0)
    text = (
        f"In {(changes > 0).sum()} of {len(changes)} iterations without the profiler memory in "
        f"use grew, by {slope / 1e6:.2f} MB an iteration, to {used / 1e9:.3f} GB."
    )
    left = (limit - used) / slope if limit else None
    if limit and left is not None:
        at = len(levels) + max(left, 0.0)
        text += (
            f" At this rate the {limit / 1e9:.1f} GB that the process may use are full after "
            f"about {at:,.0f} iterations"
            + (f"; the run is to make {planned:,}." if planned else ".")
        )
    fails = left is None or left < max(FAR, planned)
    yield Finding(
        id="leak",
        title=f"Memory grows by {slope / 1e6:.2f} MB an iteration",
        component="other",
        share_of_step=0.0,
        evidence=text,
        advice=(
            "Look for what keeps tensors of past iterations: a list of losses that still hold "
            "their graph (use .detach() or .item()), a cache without an end, a hook."
        ),
        predicted_speedup={"low": 1.0, "mid": 1.0, "high": 1.0},
        severity="fails" if fails else "slows",
        limit="memory capacity",
    )


def nearly_full(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The process uses nearly all memory that it may."""
    name = "gpu_allocated_bytes" if evidence.on_gpu else "rss_bytes"
    levels, limit = _levels(evidence, name)[0], _limit(evidence)
    peak = float(levels.max()) if len(levels) else 0.0
    peak = max(peak, float(evidence.meta.get("gpu_peak_allocated_bytes") or 0.0))
    if not limit or peak < FULL_SHARE * limit:
        return
    yield Finding(
        id="memory_nearly_full",
        title=f"{peak / limit:.0%} of the memory is in use",
        component="other",
        share_of_step=0.0,
        evidence=(
            f"At its peak the process held {peak / 1e9:.2f} GB of the {limit / 1e9:.2f} GB that "
            "it may use."
        ),
        advice=(
            "A smaller batch, micro-batches (training.micro_batch), fewer rows or a smaller "
            "embedding dimension; a larger bag or one more process and the run is ended."
        ),
        predicted_speedup={"low": 1.0, "mid": 1.0, "high": 1.0},
        severity="fails",
        limit="memory capacity",
    )


def growth(changes: np.ndarray) -> tuple[float, bool]:
    """Bytes an iteration by which memory grows, and whether it is a leak.

    Args:
        changes: (n,) bytes by which memory grew in each iteration.

    A leak grows in most iterations, and goes on to the last of them, though it may first use
    up what was free; buffers that find their size grow in a few. Where an
    allocator takes memory in larger steps than a small leak needs, only many iterations tell:
    the sum then keeps to a line.
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
    changes = np.diff(levels)
    begins = np.flatnonzero(~profiled & np.concatenate([[True], profiled[:-1]]))
    since = (
        np.arange(len(levels))
        - begins[np.searchsorted(begins, np.arange(len(levels)), "right") - 1]
        if len(begins)
        else np.zeros(len(levels))
    )
    counted = ~profiled[1:] & ~profiled[:-1] & (since[1:] > SETTLING)
    return levels, changes[counted]


def _limit(evidence: Evidence) -> float | None:
    limit = evidence.meta.get("memory_limit_bytes")
    return float(limit) if limit else None


RULES = (leak, nearly_full)


# The cores: who takes them from the step, and whether the step uses them.

BUSY_CORES = 0.15
"""Cores that others may keep busy unnoticed: a quiet machine's daemons take below 0.05."""

GREEDY_CORES = 0.5
"""From here on others are reported even if no time is known to be lost to them: half a
core shifts clocks, caches and memory bandwidth."""

PREFETCHER = "prefetch"
"""In the name of the thread that makes batches ahead: expected to compute."""


def other_processes(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Processes beside ours use the cores."""
    cores = evidence.machine_share("other_processes_cpu_ms")
    queued = evidence.share_of_wall("run_queue_ms")
    lost = max(queued, min(excess_share(evidence, ledger), cores), _taken(evidence, cores))
    if _is_confined(evidence) and evidence.cores:
        # the machine's busy time is counted as a whole: only waiting for a core tells that
        # others were on ours
        ours = _busy_cores(evidence) >= BUSY_CORES or (evidence.threads or 1) > evidence.cores
        if ours or queued < LOST_SHARE:
            return
        lost = queued
    if cores < BUSY_CORES or (lost < LOST_SHARE and cores < GREEDY_CORES):
        return
    ledger.explain(lost * evidence.total_ms)
    wall = evidence.wall_ms
    evidence_text = (
        f"Other processes used {milliseconds(cores * wall)} of CPU time in each iteration of "
        f"{milliseconds(wall)} ({cores:.2f} cores of {evidence.cores or '?'})."
        + waiting_said(evidence)
        + switches_said(evidence)
    )
    yield Finding(
        id="other_processes",
        title=f"Other processes keep {cores:.1f} of the machine's cores busy",
        component="other",
        share_of_step=min(lost, 1.0),
        evidence=evidence_text,
        advice=(
            "End or move what else runs on this machine (see `top`), then measure again: "
            "every time in this profile was taken on a machine that was shared."
        ),
        predicted_speedup=removed(lost),
        limit="scheduling",
    )


def other_threads(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Threads of our own process that are not the step's compute beside it."""
    busy = _busy_threads(evidence)
    used = sum(time for _, time in busy)
    cores = _busy_cores(evidence)
    queued = evidence.share_of_wall("run_queue_ms")
    blocked = blocked_share(evidence, ledger)
    lost = max(queued + blocked, min(excess_share(evidence, ledger), cores))
    lost = max(lost, _taken(evidence, cores))
    if cores < BUSY_CORES or (lost < LOST_SHARE and cores < GREEDY_CORES):
        return
    ledger.explain(lost * evidence.total_ms)
    names = ", ".join(f"{name} {milliseconds(time)}" for name, time in busy[:3])
    yield Finding(
        id="other_threads",
        title=f"Another thread of this process computes beside the step ({cores:.1f} cores)",
        component="other",
        share_of_step=min(lost, 1.0),
        evidence=(
            f"Threads that are neither the step's nor its operators' used "
            f"{milliseconds(used)} of CPU time in each iteration of "
            f"{milliseconds(evidence.wall_ms)}: {names}."
            + waiting_said(evidence)
            + (
                f" It waited for other things, such as Python's lock, in {blocked:.0%} of it."
                if blocked > 0.01
                else ""
            )
        ),
        advice=(
            "Take that thread's work out of the training process, or let it sleep while the "
            "step runs: it takes a core, and Python's lock if it runs Python."
        ),
        predicted_speedup=removed(lost),
        limit="scheduling",
    )


def crowding_loader(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The thread that makes batches ahead takes a core that operators need."""
    threads, cores = evidence.threads, evidence.cores
    if evidence.parameter("data.loader") != "prefetch" or evidence.on_gpu:
        return
    if threads is None or cores is None or threads < cores:
        return
    alone = evidence.alone("data", "forward")
    lost = excess_share(evidence, ledger)
    saved = lost - (alone or 0.0) / evidence.step_ms + evidence.share("data")
    if alone is None or lost < LOST_SHARE or saved < LOST_SHARE:
        return
    ledger.explain(lost * evidence.total_ms)
    evidence_text = (
        f"Operators run on {threads} threads and a further one makes batches, on {cores} cores. "
        f"Parts take {milliseconds(lost * evidence.step_ms)} longer than alone; making a batch "
        f"takes {milliseconds(alone)} alone."
    )
    blocked = evidence.share_of_wall("blocked_ms")
    if blocked >= 0.01:
        evidence_text += f" The step's thread waits for its helpers in {blocked:.0%} of the time."
    yield Finding(
        id="crowding_loader",
        title=f"Making batches ahead slows the step: {threads + 1} threads share {cores} cores",
        component="data",
        share_of_step=min(lost, 1.0),
        evidence=evidence_text,
        advice=(
            "Make batches between the steps, or leave the loader a core of its own "
            f"(training.threads: {max(cores - 1, 1)}): an operator waits for the slowest of its "
            "threads."
        ),
        change={"data.loader": "synchronous"},
        predicted_speedup=removed(saved),
        limit="scheduling",
    )


def waiting_for_cores(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The step's thread waits for a core, and nobody else is known to have it."""
    queued = evidence.share_of_wall("run_queue_ms")
    threads, cores = evidence.threads, evidence.cores
    too_many = threads is not None and cores is not None and threads > cores
    if too_many:
        lost = max(queued, excess_share(evidence, ledger))
    else:
        lost = queued - claimed_share(evidence, ledger)
    if lost < LOST_SHARE and not too_many:
        return
    ledger.explain(lost * evidence.total_ms)
    change: dict[str, Any] = {"training.threads": cores} if too_many else {}
    title = (
        f"{threads} threads share {cores} cores"
        if too_many
        else f"The step waits for a core in {queued:.0%} of its time"
    )
    yield Finding(
        id="too_many_threads" if too_many else "waiting_for_cores",
        title=title,
        component="other",
        share_of_step=max(0.0, min(lost, 1.0)),
        evidence=(
            f"An operator runs on {threads or '?'} threads; the process may use "
            f"{cores or '?'} cores." + waiting_said(evidence) + switches_said(evidence)
        ),
        advice=(
            "Use no more threads than cores: the slowest of an operator's threads sets its time."
            if too_many
            else "Look at the affinity of the process (taskset, cpuset, the container's CPU "
            "limit): its threads get less than the cores they believe to have."
        ),
        change=change,
        predicted_speedup=removed(lost) if lost >= LOST_SHARE else bounded(0.05),
        limit="scheduling",
    )


def too_few_threads(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Cores of the machine have nothing to do."""
    threads, cores = evidence.threads, evidence.cores
    if evidence.on_gpu or threads is None or cores is None or threads >= cores:
        return
    used = evidence.share_of_wall("process_cpu_ms") if evidence.counter("process_cpu_ms") else None
    others = evidence.share_of_wall("other_processes_cpu_ms")
    idle = cores - (used if used is not None else threads) - others
    if idle < 0.5:
        return
    share = 1.0 - evidence.share("data") - evidence.share("other")
    high = 1.0 / max(1.0 - share + share * threads / (threads + idle), 1e-9)
    mid = 1.0 + 0.6 * (high - 1.0)
    said = (
        f"the process kept {used:.2f} of them busy" if used is not None else "the others were idle"
    )
    yield Finding(
        id="too_few_threads",
        title=f"{threads} of {cores} cores compute",
        component="other",
        share_of_step=share,
        evidence=(
            f"training.threads is {threads}, the process may use {cores} cores, and {said}. "
            f"Operators hold {share:.0%} of the step."
        ),
        advice=(
            f"Let operators run on {cores} threads. Matrix products and table look-ups split "
            "well; small operators do not, so the whole of the idle cores is the bound."
        ),
        change={"training.threads": cores},
        predicted_speedup={"low": 1.0 + 0.2 * (high - 1.0), "mid": mid, "high": high},
        limit="arithmetic",
    )


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


def _busy_threads(evidence: Evidence) -> list[tuple[str, float]]:
    """(name, CPU ms an iteration) of threads that are no part of the step, busiest first."""
    rows = evidence.meta.get("threads_cpu")
    if rows is None:
        total = evidence.counted("other_threads_cpu_ms")
        prefetching = evidence.parameter("data.loader") == "prefetch"
        return [("unnamed", total)] if total and not prefetching else []
    found = [
        (str(row.get("name") or "unnamed"), float(row.get("cpu_ms_per_iteration") or 0.0))
        for row in rows
        if row.get("kind") in ("python", "other") and PREFETCHER not in str(row.get("name") or "")
    ]
    return sorted(found, key=lambda row: -row[1])


RULES_SCHEDULING_RULES = (
    other_processes,
    other_threads,
    crowding_loader,
    waiting_for_cores,
    too_few_threads,
)


# The step's own thread: what it waits for, and what it computes that is no operator.

GC_SHARE = 0.02

FAULT_MS = 1e-3
"""A first touch of a 4 KiB page: trap, clearing, page tables. About 0.25 us on a server
itself; 2 us were measured in a virtual machine with nested page tables."""

FAULT_SHARE = 0.08

PYTHON_MS = 0.01
"""Of a part's own Python for each operator that it calls: 3 to 8 us were measured."""

WRITTEN_BYTES = 4096
"""Written to storage in an iteration: one block. Training writes nothing in its loop."""


def collecting_garbage(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Python's cyclic garbage collector runs in the loop."""
    share = evidence.share_of_wall("gc_ms")
    if share < GC_SHARE:
        return
    ledger.explain(share * evidence.total_ms)
    yield Finding(
        id="garbage_collection",
        title=f"Python's garbage collector takes {share:.0%} of the step",
        component="other",
        share_of_step=share,
        evidence=(
            f"Collections took {milliseconds(evidence.counted('gc_ms'))} of each iteration of "
            f"{milliseconds(evidence.wall_ms)}."
        ),
        advice=(
            "Stop making objects in cycles every iteration, do not call gc.collect() in the "
            "loop, or freeze and disable the collector while training (gc.freeze, gc.disable)."
        ),
        predicted_speedup=removed(share),
        limit="dispatch",
    )


def storage_in_loop(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The loop writes to or reads from storage and waits for it."""
    written, read = evidence.counted("written_bytes"), evidence.counted("read_bytes")
    blocked = blocked_share(evidence, ledger)
    if max(written, read) < WRITTEN_BYTES or blocked < GC_SHARE:
        return
    part, place_ms = _waiting_part(evidence)
    place = place_ms / evidence.total_ms if evidence.total_ms else 0.0
    # the system's own work on a write or a sync is time on a core, in the same place
    share = place if part is not None and 0.3 * place < blocked < place else blocked
    ledger.explain(share * evidence.total_ms, part)
    verb = "writes to" if written >= read else "reads from"
    where = f" in {part_label(*part)}" if part else ""
    yield Finding(
        id="storage_in_loop",
        title=f"The loop {verb} storage and waits for it{where}",
        component=part[0] if part else "other",
        share_of_step=share,
        evidence=(
            f"Each iteration {verb.split()[0]} {max(written, read) / 1e3:,.0f} kB and waits "
            f"{milliseconds(blocked * evidence.wall_ms)} of its "
            f"{milliseconds(evidence.wall_ms)} without a core or a need of one."
            + _python_time(evidence, part)
        ),
        advice=(
            "Take files out of the step: write less often, without fsync, or from another thread."
        ),
        predicted_speedup=removed(share),
        limit="synchronisation",
    )


def waiting(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The step's thread sleeps or waits for something that is no core."""
    blocked = blocked_share(evidence, ledger) - claimed_share(evidence, ledger)
    part, place_ms = _waiting_part(evidence)
    if (evidence.threads or 1) > 1:
        # an operator's threads wait for one another in it: no fault of the loop's
        blocked = min(blocked, place_ms / evidence.total_ms) if evidence.total_ms else 0.0
    if blocked < LOST_SHARE:
        return
    ledger.explain(blocked * evidence.total_ms, part)
    where = f" in {part_label(*part)}" if part else ""
    switches = evidence.counter("voluntary_switches")
    yield Finding(
        id="waiting",
        title=f"The step waits{where} for {blocked:.0%} of its time, and computes nothing then",
        component=part[0] if part else "other",
        share_of_step=blocked,
        evidence=(
            f"In {milliseconds(blocked * evidence.wall_ms)} of each iteration of "
            f"{milliseconds(evidence.wall_ms)} the step's thread neither ran nor asked for a core"
            + (f", giving its core up {switches:,.0f} times" if switches else "")
            + "."
            + _python_time(evidence, part)
        ),
        advice=(
            "Look for what sleeps, takes a lock, waits for a pipe, a socket or another thread"
            f"{where}, and take it out of the step."
        ),
        predicted_speedup=removed(blocked),
        limit="synchronisation",
    )


def page_faults(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Memory is given back to the system and asked for again, iteration by iteration."""
    minor, major = evidence.counted("minor_faults"), evidence.counted("major_faults")
    wall = evidence.wall_ms
    share = min(minor * FAULT_MS / wall, 1.0) if wall else 0.0
    if major >= 1 and evidence.counted("blocked_ms") > LOST_SHARE * wall:
        share = max(share, blocked_share(evidence, ledger))
    elif share < FAULT_SHARE:
        return
    part, place_ms = _waiting_part(evidence)
    place = place_ms / evidence.total_ms if evidence.total_ms else 0.0
    if part is not None and 0.3 * place < share < place:
        # most of that part's own code is the touching of new memory
        share = place
        ledger.explain(share * evidence.total_ms, part)
    else:
        part = None
        ledger.explain(share * evidence.total_ms)
    yield Finding(
        id="page_faults",
        title=f"The process asks the system for {minor * 4096 / 1e6:,.0f} MB of new pages a step",
        component="other",
        share_of_step=share,
        evidence=(
            f"{minor:,.0f} page faults an iteration"
            + (f", {major:,.1f} of them from storage" if major >= 1 else "")
            + f"; at about {1e3 * FAULT_MS:.1f} us each that is "
            f"{milliseconds(minor * FAULT_MS)} of {milliseconds(wall)}."
            + _python_time(evidence, part)
        ),
        advice=(
            "Keep buffers between iterations, or stop the allocator from returning memory: "
            "MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=1073741824, or "
            "huge pages (THP_MEM_ALLOC_ENABLE=1)."
        ),
        predicted_speedup=removed(share),
        limit="memory bandwidth",
    )


def python_in_part(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Code of a part's own computes, outside every operator, where parts only call operators."""
    if evidence.on_gpu or evidence.total_ms <= 0:
        return
    usual = 2.0 * PYTHON_MS * (5.0 + evidence.parts["calls"])
    own = (evidence.parts["python_ms"] - usual).dropna()
    own = own[[part[0] not in ("data", "other", "transfer") for part in own.index]]
    left = [
        (float(time) - ledger.explained_in(part), part)
        for part, time in zip(((str(c), str(p)) for c, p in own.index), own, strict=True)
    ]
    time, (component, phase) = max(left, default=(0.0, ("other", "")))
    # what has no place yet (a collector, waiting) may well have been here
    share = time / evidence.total_ms - ledger.anywhere_ms / evidence.total_ms
    if share < LOST_SHARE:
        return
    ledger.explain(share * evidence.total_ms, (component, phase))
    name = part_label(component, phase)
    yield Finding(
        id="python_in_part",
        title=f"Code outside every operator takes {share:.0%} of the step, in {name}",
        component=component,
        share_of_step=share,
        evidence=(
            f"{milliseconds(float(evidence.parts['python_ms'][(component, phase)]))} of {name} "
            f"({milliseconds(float(evidence.parts['traced_ms'][(component, phase)]))}) pass in its "
            "own code, not in operators that it calls, and the thread is on a core meanwhile."
        ),
        advice=(
            f"Look at what the Python code of {name} does: loops, conversions to lists or numpy, "
            "formatting, hooks. Express it in operators on whole tensors or take it out."
        ),
        predicted_speedup=removed(share),
        limit="dispatch",
    )


def _waiting_part(evidence: Evidence) -> tuple[Part | None, float]:
    """The part in which most time passes outside every operator, and that time."""
    python = evidence.parts["python_ms"].dropna()
    python = python[[part[0] != "data" for part in python.index]]
    if python.empty or python.max() < GC_SHARE * evidence.total_ms:
        return None, 0.0
    return largest(python), float(python.max())


def _python_time(evidence: Evidence, part: Part | None) -> str:
    if part is None:
        return ""
    python = float(evidence.parts["python_ms"][part])
    return f" {milliseconds(python)} of {part_label(*part)} pass outside every operator."


RULES_THREAD_RULES = (
    collecting_garbage,
    storage_in_loop,
    waiting,
    page_faults,
    python_in_part,
)
