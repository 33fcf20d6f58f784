"""The step's own thread: what it waits for, and what it computes that is no operator."""

from __future__ import annotations

from collections.abc import Iterable

from dlrm_core.analysis.findings.evidence import Evidence, Part
from dlrm_core.analysis.findings.finding import (
    Finding,
    largest,
    milliseconds,
    removed,
)
from dlrm_core.analysis.findings.host_shares import LOST_SHARE, blocked_share, claimed_share
from dlrm_core.analysis.findings.ledger import Ledger
from dlrm_core.parts import part_label

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


# ---- helpers ---------


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


RULES = (
    collecting_garbage,
    storage_in_loop,
    waiting,
    page_faults,
    python_in_part,
)
