"""Memory that grows, and memory that is nearly full."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.findings.finding import Finding
from dlrm_core.analysis.findings.ledger import Ledger

FULL_SHARE = 0.9
"""Of what the process may use; TensorBoard's former profiler plugin warned there too."""

LEAST_ITERATIONS = 8

LEAST_GROWTH = 16 << 10
"""Bytes an iteration: below, an allocator's own bookkeeping passes for a leak."""

FAR = 1_000_000
"""Iterations; memory that lasts longer is no failure of a run."""


def leak(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Memory grows from iteration to iteration."""
    name = "gpu_allocated_bytes" if evidence.on_gpu else "rss_bytes"
    levels = _levels(evidence, name)
    if len(levels) < LEAST_ITERATIONS:
        return
    slope, steady = growth(levels)
    if not steady or slope < LEAST_GROWTH:
        return
    limit, used = _limit(evidence), float(levels[-1])
    planned = int(evidence.parameter("training.batches", 0) or 0)
    text = (
        f"Memory in use grew from {levels[0] / 1e9:.3f} to {used / 1e9:.3f} GB over "
        f"{len(levels)} iterations, {slope / 1e6:.2f} MB an iteration, and did not come back."
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
    levels, limit = _levels(evidence, name), _limit(evidence)
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


def growth(levels: np.ndarray) -> tuple[float, bool]:
    """Bytes an iteration by which memory grows, and whether it does so steadily.

    Args:
        levels: (n,) bytes in use at the end of each iteration.

    The slope is the median of all pairs' (Theil 1950, Sen 1968): one large allocation does
    not make it. Steadily means that the second half, when caches are full and pools have
    their size, still grows, in most of its quarters and about as fast as the whole.
    """
    count = len(levels)
    first, second = np.triu_indices(count, 1)
    slope = float(np.median((levels[second] - levels[first]) / (second - first)))
    late = levels[count // 2 :].astype(float)
    a, b = np.triu_indices(len(late), 1)
    slope_late = float(np.median((late[b] - late[a]) / (b - a)))
    quarters = np.array_split(levels.astype(float), 4)
    means = np.array([quarter.mean() for quarter in quarters])
    steady = bool((np.diff(means) > 0).all()) and slope_late > 0.5 * slope > 0
    return min(slope, slope_late) if steady else slope, steady


def _levels(evidence: Evidence, name: str) -> np.ndarray:
    """Bytes in use (n,) at the end of each iteration without the profiler, in run order.

    The profiler keeps what it records and lets go of it afterwards: what memory did while
    it was on, and from before to after, is left out.
    """
    counters = evidence.meta.get("counters") or {}
    values = np.asarray(counters.get(name) or [], dtype=float)
    profiled = np.asarray(counters.get("profiled") or [False] * len(values), dtype=bool)
    if len(values) < 2 or len(profiled) != len(values):
        return values
    change = np.diff(values)
    # the first iteration after the profiler also differs from the one before by its leaving
    counted = ~profiled[1:] & ~profiled[:-1]
    if not counted.any():
        return values
    first = int(np.flatnonzero(counted)[0])
    return np.concatenate([[values[first]], values[first] + np.cumsum(change[counted])])


def _limit(evidence: Evidence) -> float | None:
    limit = evidence.meta.get("memory_limit_bytes")
    return float(limit) if limit else None


RULES = (leak, nearly_full)
