"""Memory that grows, and memory that is nearly full."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.findings.finding import Finding
from dlrm_core.analysis.findings.ledger import Ledger

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
