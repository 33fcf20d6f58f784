"""The tables a profile is made of: their columns, and sums over the call tree.

See docs/architecture.md; :class:`dlrm_core.profiling.profile.Profile` holds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.errors import InputError

SCHEMA: dict[str, dict[str, str]] = {
    "contexts": {
        "context": "int64",
        "parent": "int64",
        "kind": "object",
        "name": "object",
        "shapes": "object",
        "file": "object",
        "line": "int64",
        "module": "object",
        "component": "object",
        "phase": "object",
    },
    "metrics": {"metric": "object", "unit": "object", "meaning": "object", "source": "object"},
    "values": {
        "profile": "int64",
        "context": "int64",
        "metric": "category",
        "scope": "category",
        "value": "float64",
    },
    "threads": {
        "profile": "int64",
        "kind": "object",
        "name": "object",
        "rank": "int64",
        "thread": "int64",
    },
    "trace": {
        "profile": "int64",
        "start_ns": "int64",
        "end_ns": "int64",
        "context": "int64",
        "depth": "int64",
    },
    "iterations": {"iteration": "int64", "start_ns": "int64", "end_ns": "int64"},
}
"""Table to column to dtype; ``object`` and ``category`` columns hold str. Column order is kept.

``values`` has up to ten million rows of a few names: categories are compared as numbers."""

KINDS = (
    "root",
    "thread",
    "function",
    "annotation",
    "operator",
    "kernel",
    "copy",
    "runtime",
    "python",
    "line",
    "loop",
    "instruction",
)
SCOPES = ("exclusive", "inclusive")
THREAD_KINDS = ("cpu_thread", "gpu_stream")

STANDARD_METRICS: dict[str, tuple[str, str]] = {
    "cpu_time_ms": ("ms", "time on a CPU thread"),
    "gpu_time_ms": ("ms", "time of GPU kernels, copies and memory sets"),
    "calls": ("", "how often the context was entered"),
}
"""Metrics with one name in every engine: name to (unit, meaning)."""


def typed(table: str, rows: Any) -> pd.DataFrame:
    """A frame with the columns and dtypes of ``table``; ``rows`` may be None for none.

    Raises:
        InputError: a column is missing or cannot be of its dtype.
    """
    schema = SCHEMA[table]
    frame = pd.DataFrame(rows if rows is not None else {name: [] for name in schema})
    if frame.empty and not len(frame.columns):
        frame = pd.DataFrame({name: [] for name in schema})
    missing = [name for name in schema if name not in frame.columns]
    if missing:
        raise InputError(f"profile table '{table}' lacks the column(s) {', '.join(missing)}")
    try:
        frame = frame[list(schema)].astype(schema, copy=False)
        plain = isinstance(frame.index, pd.RangeIndex) and frame.index.equals(
            pd.RangeIndex(len(frame))
        )
        return frame if plain else frame.reset_index(drop=True)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"profile table '{table}' has a value of the wrong type: {error}"
        ) from None


def depths(parent: np.ndarray) -> np.ndarray:
    """Depth of every context, roots 0.

    Args:
        parent: (n,) row of the parent, −1 for a root; in any order.

    Pointer doubling: log2(deepest) passes over whole columns, no recursion.
    """
    ancestor = np.asarray(parent, dtype=np.int64).copy()
    depth = (ancestor >= 0).astype(np.int64)
    while (linked := ancestor >= 0).any():
        here = ancestor[linked]
        # The right-hand sides are complete copies before either is written.
        steps, beyond = depth[here], ancestor[here]
        depth[linked] += steps
        ancestor[linked] = beyond
    return depth


def inclusive_from_exclusive(parent: np.ndarray, exclusive: np.ndarray) -> np.ndarray:
    """Add every context's exclusive value to all its ancestors.

    Args:
        parent: (n,) row of the parent, −1 for a root.
        exclusive: (n,) or (n, metrics) values that belong to the row alone.

    Returns:
        Inclusive values, shaped as ``exclusive``. One pass a tree level.
    """
    parent = np.asarray(parent, dtype=np.int64)
    total = np.array(exclusive, dtype=np.float64, copy=True)
    depth = depths(parent)
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(depth.max(initial=0) + 2))
    for level in range(len(bounds) - 2, 0, -1):
        rows = order[bounds[level] : bounds[level + 1]]
        np.add.at(total, parent[rows], total[rows])
    return total
