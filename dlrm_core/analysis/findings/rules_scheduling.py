"""The cores: who takes them from the step, and whether the step uses them.

The wall time of the step's thread is the sum of its time on a core, its time ready
without a core, and its time waiting (Linux: ``schedstat``, the kernel's
Documentation/scheduler/sched-stats.rst). The second is somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.findings.finding import Finding, bounded, milliseconds, removed
from dlrm_core.analysis.findings.host_shares import (
    LOST_SHARE,
    blocked_share,
    claimed_share,
    excess_share,
    switches_said,
    waiting_said,
)
from dlrm_core.analysis.findings.ledger import Ledger

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


# ---- helpers ---------


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


RULES = (
    other_processes,
    other_threads,
    crowding_loader,
    waiting_for_cores,
    too_few_threads,
)
