"""What the system's counters hold: whether a file can be used, clocks, whose time it was."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

MAX_DEBT_TICKS = 4
"""Per CPU: how far the system's count, in ticks, may lag behind our own exact one."""


TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")


INTEGERS = {
    "minor_faults",
    "major_faults",
    "voluntary_switches",
    "involuntary_switches",
    "rss_bytes",
    "heap_bytes",
    "gpu_allocated_bytes",
    "read_bytes",
    "written_bytes",
}
"""Columns that are whole numbers."""


def unusable(name: str, text: bytes) -> str:
    """Why a file does not hold what is read from it; empty when it does."""
    checks: dict[str, Callable[[list[bytes]], bool]] = {
        "schedstat": lambda words: len(words) >= 3 and words[2] != b"0",
        "statm": lambda words: len(words) >= 2,
        "io": lambda words: b"read_bytes:" in words and b"write_bytes:" in words,
        "stat": lambda words: len(words) > 7 and words[0] == b"cpu",
    }
    return "" if checks[name](text.split()) else f"holds no such count here ({text[:40]!r})"


def thread_clock(tid: int) -> int:
    """The kernel's clock of a thread's CPU time (clock_getcpuclockid(3): ~id, then 4 | 2)."""
    return (~tid << 3) | 6


def gpu_allocated(device: torch.device) -> float:
    """Bytes that torch's tensors hold on a GPU; without the flattening of memory_stats()."""
    nested = torch.cuda.memory_stats_as_nested_dict(device)
    return nested["allocated_bytes"]["all"]["current"] if nested else 0


def without_ours(machine_ms: np.ndarray, process_ms: list[float]) -> list[float]:
    """CPU time of other processes (n,): the machine's less this process's, never below 0.

    The machine's is counted in ticks, so one iteration may be a tick short and the next
    one over; what is short is carried on, so that sums over iterations are right.
    """
    lag = MAX_DEBT_TICKS * TICK_MS * (os.cpu_count() or 1)
    rest, left = [], 0.0
    for busy, own in zip(machine_ms.tolist(), process_ms, strict=True):
        left = max(left + busy - own, -lag)
        rest.append(max(0.0, left))
        left -= rest[-1]
    return rest
