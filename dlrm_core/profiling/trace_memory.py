"""What a trace with ``profile_memory`` tells of allocations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.profiling.spans import innermost

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
