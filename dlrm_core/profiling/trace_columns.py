"""Columns of contexts beside their times: allocations and floating point operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.profiling.spans import innermost

FLOP_OPERATORS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""torch counts elementwise operators too, by the dense shape even of sparse tensors:
an update of a few thousand rows would pass for one of a whole table."""

CURVE_POINTS = 2000
"""Points kept of the memory curve of a device."""


def allocated(memory: pd.DataFrame, host: pd.DataFrame, count: int) -> dict[str, np.ndarray]:
    """Bytes allocated in each context (count,), on host and GPU; frees are not subtracted.

    Args:
        memory: see :class:`~dlrm_core.profiling.chrome_trace.Events`.
        host: nested spans with line, start, end, parent (row), context; each thread's
            rows are together.

    Returns:
        ``allocated_bytes`` and ``gpu_allocated_bytes``, each only if recorded.
    """
    columns: dict[str, np.ndarray] = {}
    for line, events in memory[memory["bytes"].gt(0)].groupby("line"):
        spans = host[host["line"] == line]
        if spans.empty:
            continue
        parent = spans["parent"].to_numpy()
        inside = innermost(
            spans["start"].to_numpy(),
            spans["end"].to_numpy(),
            np.where(parent >= 0, parent - int(spans.index[0]), -1),
            events["start"].to_numpy(),
        )
        context = spans["context"].to_numpy()[inside]
        size = events["bytes"].to_numpy(dtype=float)
        on_host = events["device"].eq("cpu").to_numpy()
        for name, chosen in (("allocated_bytes", on_host), ("gpu_allocated_bytes", ~on_host)):
            counted = chosen & (inside >= 0)
            if counted.any():
                column = np.bincount(context[counted], size[counted], count)
                columns[name] = columns.get(name, 0) + column
    return columns


def curves(memory: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Device to its peak and its curve of allocated bytes over time."""
    found = {}
    for device, events in memory.sort_values("start").groupby("device"):
        total = events["total"].to_numpy(dtype=np.int64)
        # A point of the curve is the largest of its stretch, so the peak stays.
        cut = np.linspace(0, len(total), min(CURVE_POINTS, len(total)) + 1).astype(int)[:-1]
        found[str(device)] = {
            "peak_bytes": int(total.max()),
            "time_ms": (events["start"].to_numpy()[cut] / 1e6).tolist(),
            "bytes": np.maximum.reduceat(total, cut).tolist(),
        }
    return found


def matrix_flops(
    host: pd.DataFrame, count: int, averages: list[dict[str, Any]] | None
) -> np.ndarray | None:
    """Operations of each context (count,), NaN where none are known; None without any.

    Args:
        host: spans with name, shapes, context.
        averages: rows of ``key_averages.json``: they have the operations by name and
            shapes, a call's are the mean of those.
    """
    each = {
        (row["name"], row["shapes"]): row["flops"] / row["count"]
        for row in averages or []
        if row["flops"] and row["name"] in FLOP_OPERATORS
    }
    if not each:
        return None
    pairs = zip(host["name"], host["shapes"], strict=True)
    calls = np.array([each.get(pair, np.nan) for pair in pairs])
    # A context in which one call is unknown is unknown: NaN adds up to NaN.
    called = np.bincount(host["context"], minlength=count) > 0
    return np.where(called, np.bincount(host["context"], calls, count), np.nan)
