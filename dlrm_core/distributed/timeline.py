"""All ranks in one view: a Chrome trace (chrome://tracing, ui.perfetto.dev) of a measured run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP, EXCHANGES = 0, 1
"""Rows of a rank: its step's thread, and what it exchanges meanwhile."""


def ranks_trace(record: Mapping[str, Any], run: int) -> dict[str, Any]:
    """The last iterations of a run, rank below rank, on the node's one clock.

    Args:
        record: see :mod:`dlrm_core.distributed.scaling`; its ``spans`` say when an iteration
            began on each rank.

    Returns:
        a trace with a process a rank; times in microseconds since the first one's start.
    """
    spans = [row for row in record["spans"] if row["run"] == run]
    begins = {
        (row["rank"], row["iteration"]): row["node_start_s"] - 1e-3 * row["start_ms"]
        for row in spans
    }
    first = min(begins.values(), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in begins}):
        names = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": names})
        for lane, name in ((STEP, "step"), (EXCHANGES, "exchanges")):
            about = {"pid": rank, "tid": lane, "args": {"name": name}}
            events.append({"ph": "M", "name": "thread_name", **about})
    for row in spans:
        zero = begins[row["rank"], row["iteration"]]
        name = f"{row['component']} {row['phase']}"
        events.append(_event(row, STEP, name, zero - first, row["start_ms"], row["end_ms"]))
    for row in record["collectives"]:
        begun = begins.get((row["rank"], row["iteration"])) if row["run"] == run else None
        if begun is None:
            continue
        end_ms = row["start_ms"] + row["time_ms"]
        event = _event(
            row, EXCHANGES, f"{row['kind']}: {row['what']}", begun - first, row["start_ms"], end_ms
        )
        events.append(event | {"args": {"bytes": row["bytes"], "exposed_ms": row["exposed_ms"]}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    row: Mapping[str, Any], lane: int, name: str, zero_s: float, start_ms: float, end_ms: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": row["rank"],
        "tid": lane,
        "ts": 1e6 * zero_s + 1e3 * start_ms,
        "dur": 1e3 * (end_ms - start_ms),
        "args": {"iteration": row["iteration"]},
    }
