"""Hardware counters that a recording has: how busy the device's units and its memory were."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.ground.units import thousands
from dlrm_workbook.recordings.nesting import stretch_at, stretches
from dlrm_workbook.recordings.profile import Profile

COUNTERS = ["kernel", "gpu", "counter", "count", "mean", "most"]
NO_COUNTERS = (
    "no hardware counters: Kineto records them with CUPTI's range profiler or its sampling "
    "(experimental_config of torch.profiler)"
)

BUSY, IDLE = 60.0, 30.0
"""Percent from which on a unit is the limit, and below which it waits for something else."""

CURVES = ["gpu", "counter", "time_ms", "value"]
_EXECUTED = re.compile(r"inst_executed_op_[hfd](?P<what>add|mul|fma)_")
_PERCENT = re.compile(r"pct|percent|%|utili[sz]ation", re.I)
_UNITS = (
    ("memory", re.compile(r"dram|hbm|fbpa|mem\w*_(?:bandwidth|util)", re.I)),
    ("arithmetic", re.compile(r"tensor|\bsm_|sm__|sm_active|sms?_|gr_engine", re.I)),
)


def counter_table(profile: Profile) -> pd.DataFrame:
    """Counters of samples over time, then of profiled ranges by kernel, most ranges first.

    Empty, with the reason in ``attrs["not_measured"]``, where none were recorded.
    """
    found = profile.meta.get("device_counters") or {}
    rows: list[tuple[Any, ...]] = [
        ("", row["gpu"], row["counter"], row["samples"], row["mean"], row["most"])
        for row in found.get("samples") or []
    ]
    order = sorted(
        found.get("ranges") or [], key=lambda row: (-row["ranges"], row["kernel"], -row["sum"])
    )
    for row in order:
        short, count = kernel_name(row["kernel"]).short, row["ranges"]
        rows.append((short, "", row["counter"], count, row["sum"] / count, np.nan))
    reason = profile.not_measured.get("gpu_time_ms", NO_COUNTERS)
    return pd.DataFrame(rows, columns=COUNTERS) if rows else unmeasured(COUNTERS, reason)


def counter_curves(profile: Profile) -> pd.DataFrame:
    """``gpu``, ``counter``, ``time_ms`` (from the start of the trace) and ``value`` of samples."""
    frames = [
        pd.DataFrame({name: row[name] for name in CURVES})
        for row in (profile.meta.get("device_counters") or {}).get("samples") or []
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=CURVES)


def counted_sentence(profile: Profile) -> str:
    """What counters over ranges tell of the operations that kernels executed; "" without any."""
    ranges = (profile.meta.get("device_counters") or {}).get("ranges") or []
    operations: dict[str, float] = {}
    for row in ranges:
        if match := _EXECUTED.search(row["counter"]):
            short = kernel_name(row["kernel"]).short or row["kernel"]
            each = 2 if match["what"] == "fma" else 1
            operations[short] = operations.get(short, 0.0) + each * row["sum"]
    if not ranges:
        return ""
    most = max(operations, key=lambda name: operations[name], default="")
    text = f" Hardware counters were recorded over {len({row['kernel'] for row in ranges})} kernels"
    if not operations or not operations[most]:
        return f"{text}."
    share = operations[most] / sum(operations.values())
    return (
        f"{text}: of {thousands(sum(operations.values()))} floating-point operations outside of "
        f"tensor cores {most} executed {share:.0%}."
    )


def counters_during(profile: Profile, kernel: str) -> dict[str, float]:
    """Mean of each sampled counter while a kernel of this full name runs; none without samples."""
    curves = counter_curves(profile)
    if curves.empty:
        return {}
    trace = profile.trace[profile.which("name", kernel.__eq__)[profile.trace["context"]]]
    at = (1e6 * curves["time_ms"].to_numpy(dtype=float)).astype(np.int64)
    inside = curves[stretch_at(*stretches(trace), at) >= 0]
    means = inside.groupby("counter")["value"].mean()
    return {str(name): float(value) for name, value in means.items()}


def limit_by_counters(profile: Profile, kernel: str) -> str | None:
    """What sampled counters in percent say of the limit that a kernel meets, as a sentence.

    None where neither memory nor the multiprocessors were sampled while it ran.
    """
    during = counters_during(profile, kernel)
    units: dict[str, tuple[str, float]] = {}
    for unit, pattern in _UNITS:
        if values := {n: v for n, v in during.items() if pattern.search(n) and _PERCENT.search(n)}:
            name = max(values, key=lambda name: values[name])
            units[unit] = name, values[name]
    if not units:
        return None
    told = ", ".join(f"{name.partition('.')[0]} {value:.0f}%" for name, value in units.values())
    most = max(units, key=lambda unit: units[unit][1])
    if units[most][1] >= BUSY:
        what = "memory bandwidth limits it" if most == "memory" else "its arithmetic limits it"
    elif len(units) == len(_UNITS) and units[most][1] < IDLE:
        what = "neither is busy: it waits (for latency, or too few blocks are there)"
    else:
        what = "they name no one limit"
    return f"By hardware counters while it runs ({told}), {what}."
