"""What the system counted in each iteration: CPU time, waiting, faults, memory, disk.

Times of a step say how long; these say what the thread did meanwhile: computed, stood
in the run queue because something else had its core, or slept. Linux's own counters,
read at an iteration's end from files that stay open (about 30 microseconds in all),
so they can stay on while the times that matter are taken.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

PROC = Path("/proc")

MAX_SYSTEM_COST_S = 40e-6
"""A reading of /proc/stat dearer than this (it grows with the machine) is taken rarely."""

SYSTEM_INTERVAL = 200
"""... at most every so many times its own cost, so it takes no more than 0.5 % of the time."""

MAX_DEBT_TICKS = 4
"""Per CPU: how far the system's count, in ticks, may lag behind our own exact one."""

POOL_NAMES = ("pt_", "omp", "OMP")
"""How the names of native worker threads begin, besides the process's own name."""

_TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Reading:
    """All counters at one moment; cumulative but for the bytes in use."""

    values: dict[str, float]
    threads_ns: dict[int, int]
    """CPU time of each thread by its native id."""


class IterationCounters:
    """Counters of each iteration, by the thread that makes this object.

    ``start()`` before the first iteration, ``snapshot()`` at the end of each; use it as
    a context manager, or ``close()`` it. What the system does not tell is left out, and
    ``not_measured`` says why.

    Columns (``columns()``): ``wall_ms``, ``thread_cpu_ms`` (the iterating thread),
    ``run_queue_ms`` (it was ready to run and another had its core), ``blocked_ms`` (the
    rest: it slept), ``process_cpu_ms``, ``pool_cpu_ms`` (worker threads of torch and its
    libraries), ``other_threads_cpu_ms`` (the process less those two), ``minor_faults``,
    ``major_faults`` (process), ``voluntary_switches``, ``involuntary_switches``
    (iterating thread), ``rss_bytes``, ``gpu_allocated_bytes``, ``gc_ms`` (Python's
    collector), ``read_bytes``, ``written_bytes`` (storage), ``other_processes_cpu_ms``
    (of the whole machine less ours; the kernel counts it in ticks of 10 ms) and
    ``stolen_ms`` (a hypervisor gave our cores to others).

    Args:
        device: whose memory is counted.
        proc: where the kernel's files are.
    """

    def __init__(self, device: torch.device | None = None, proc: Path = PROC) -> None:
        self.not_measured: dict[str, str] = {}
        self.cost_s: list[float] = []
        """Seconds that each snapshot took."""
        self._proc = proc
        self._device = device if device is not None and device.type == "cuda" else None
        if self._device is None:
            self._missing("gpu_allocated_bytes", "the run used no GPU")
        self._own = threading.get_native_id()
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._files: dict[str, int] = {}
        self._open("schedstat", f"self/task/{self._own}/schedstat", ("run_queue_ms", "blocked_ms"))
        self._open("statm", "self/statm", ("rss_bytes",))
        self._open("io", "self/io", ("read_bytes", "written_bytes"))
        self._open("stat", "stat", ("other_processes_cpu_ms", "stolen_ms"))
        self._gc_s = 0.0
        self._gc_began = 0.0
        gc.callbacks.append(self._collected)
        self._names: dict[int, tuple[str, str]] = {}
        """Name and kind of each thread seen, by native id."""
        self._seen: dict[int, int] = {}
        """How many readings each thread was in."""
        self._process_name = self._thread_name(os.getpid())
        self._system: list[tuple[float, float, float]] = []
        """Readings of /proc/stat: moment in ms, busy ms of all CPUs, stolen ms."""
        self._system_cost_s = 0.0
        self._ends_ms: list[float] = []
        self._before: _Reading | None = None
        self._rows: list[dict[str, float]] = []
        self._threads_ns: list[dict[int, int]] = []
        self._labels: list[tuple[int, bool]] = []

    def __enter__(self) -> IterationCounters:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; what was counted stays."""
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        for number in self._files.values():
            os.close(number)
        self._files = {}

    def start(self) -> None:
        """An iteration begins now; what happened since the last one counts to none."""
        self._before = self._read()

    def snapshot(self, iteration: int, profiled: bool = False) -> None:
        """An iteration ended now, and the next one begins.

        Args:
            iteration: its number in the run.
            profiled: whether a profiler was on.
        """
        began = time.perf_counter()
        now = self._read()
        before = self._before or now
        row = {
            name: value if name in _LEVELS else value - before.values[name]
            for name, value in now.values.items()
            if name in before.values
        }
        self._rows.append(row)
        self._threads_ns.append(
            {tid: ns - before.threads_ns.get(tid, 0) for tid, ns in now.threads_ns.items()}
        )
        self._labels.append((iteration, profiled))
        self._ends_ms.append(now.values["wall_ms"])
        self._before = now
        self.cost_s.append(time.perf_counter() - began)

    def cost_ms(self) -> float | None:
        """Median milliseconds of a snapshot; None before the first."""
        return 1e3 * statistics.median(self.cost_s) if self.cost_s else None

    def columns(self) -> dict[str, list[Any]]:
        """One list a counter, one entry an iteration, in the order in which they ran."""
        if not self._rows:
            return {}
        names = [name for name in self._rows[0] if all(name in row for row in self._rows)]
        columns: dict[str, list[Any]] = {
            "iteration": [iteration for iteration, _ in self._labels],
            "profiled": [profiled for _, profiled in self._labels],
        }
        columns |= {name: [row[name] for row in self._rows] for name in names}
        for name in _INTEGERS:
            if name in columns:
                columns[name] = [round(value) for value in columns[name]]
        pool = [
            sum(ns for tid, ns in threads.items() if self._kind(tid) == "pool") / 1e6
            for threads in self._threads_ns
        ]
        columns["pool_cpu_ms"] = pool
        columns["other_threads_cpu_ms"] = [
            max(0.0, process - own - workers)
            for process, own, workers in zip(
                columns["process_cpu_ms"], columns["thread_cpu_ms"], pool, strict=True
            )
        ]
        if "run_queue_ms" in columns:
            columns["blocked_ms"] = [
                max(0.0, wall - cpu - queue)
                for wall, cpu, queue in zip(
                    columns["wall_ms"],
                    columns["thread_cpu_ms"],
                    columns["run_queue_ms"],
                    strict=True,
                )
            ]
        return columns | self._system_columns(columns)

    def threads(self) -> list[dict[str, Any]]:
        """CPU time of every thread, per iteration, most first.

        Means over the iterations without a profiler, where there are any.

        Returns:
            ``name``, ``tid``, ``cpu_ms_per_iteration`` and ``kind``: 'iterating', 'python',
            'pool' (a nameless native thread or one of torch's: it works for whoever calls
            an operator) or 'other' (a driver's, say).
        """
        plain = [
            threads
            for threads, (_, profiled) in zip(self._threads_ns, self._labels, strict=True)
            if not profiled
        ] or self._threads_ns
        total: dict[int, int] = {}
        for threads in plain:
            for tid, ns in threads.items():
                total[tid] = total.get(tid, 0) + ns
        rows = [
            {
                "name": self._names[tid][0],
                "tid": tid,
                "cpu_ms_per_iteration": ns / 1e6 / len(plain),
                "kind": self._kind(tid),
            }
            for tid, ns in total.items()
        ]
        return sorted(rows, key=lambda row: -row["cpu_ms_per_iteration"])

    def evidence(self) -> dict[str, Any]:
        """``counters``, ``threads_cpu``, ``counters_cost_ms``, ``not_measured``: for a record."""
        columns = self.columns()
        return {
            "counters": columns,
            "threads_cpu": self.threads() if columns else [],
            "counters_cost_ms": self.cost_ms(),
            "not_measured": {f"counters.{name}": why for name, why in self.not_measured.items()},
        }

    # ---- reading ------------------------------------------------------------------

    def _read(self, new_series: bool = False) -> _Reading:
        """Everything at one moment: the clocks first and together, the dear files last."""
        values = {
            "wall_ms": time.perf_counter_ns() / 1e6,
            "thread_cpu_ms": time.thread_time_ns() / 1e6,
            "process_cpu_ms": time.process_time_ns() / 1e6,
        }
        if "schedstat" in self._files:
            values["run_queue_ms"] = int(self._pread("schedstat").split()[1]) / 1e6
        mine = resource.getrusage(resource.RUSAGE_THREAD)
        ours = resource.getrusage(resource.RUSAGE_SELF)
        values["minor_faults"] = ours.ru_minflt
        values["major_faults"] = ours.ru_majflt
        values["voluntary_switches"] = mine.ru_nvcsw
        values["involuntary_switches"] = mine.ru_nivcsw
        values["gc_ms"] = 1e3 * self._gc_s
        if "statm" in self._files:
            values["rss_bytes"] = int(self._pread("statm").split()[1]) * self._page
        if "io" in self._files:
            counted = self._pread("io").split()
            values["read_bytes"] = int(counted[counted.index(b"read_bytes:") + 1])
            values["written_bytes"] = int(counted[counted.index(b"write_bytes:") + 1])
        if self._device is not None:
            values["gpu_allocated_bytes"] = _gpu_allocated(self._device)
        self._read_system(values["wall_ms"])
        return _Reading(values, self._read_threads())

    def _read_system(self, moment_ms: float) -> None:
        """Busy and stolen time of all CPUs; on a large machine not at every iteration."""
        dear = self._system_cost_s > MAX_SYSTEM_COST_S
        held_ms = 1e3 * SYSTEM_INTERVAL * self._system_cost_s if dear else 0.0
        if "stat" not in self._files or (
            self._system and moment_ms - self._system[-1][0] < held_ms
        ):
            return
        began = time.perf_counter()
        ticks = [int(word) for word in self._pread("stat").split(b"\n", 1)[0].split()[1:9]]
        # user, nice, system, irq, softirq; guests are in user already; idle, iowait are not busy
        busy = sum(ticks[i] for i in (0, 1, 2, 5, 6))
        self._system.append((moment_ms, _TICK_MS * busy, _TICK_MS * ticks[7]))
        self._system_cost_s = time.perf_counter() - began

    def _system_columns(self, columns: dict[str, list[Any]]) -> dict[str, list[float]]:
        """What the whole machine did in each iteration, beside this process.

        Between two readings the machine is taken to have done evenly what it did.
        """
        if "stat" in self._files:
            self._system_cost_s = 0.0  # one reading more, so that all iterations lie before one
            self._read_system(time.perf_counter_ns() / 1e6)
        if len(self._system) < 2:
            return {}
        moments, busy, stolen = np.array(self._system).T
        ends = np.array(self._ends_ms)
        starts = ends - columns["wall_ms"]
        machine, lost = (
            np.interp(ends, moments, counted) - np.interp(starts, moments, counted)
            for counted in (busy, stolen)
        )
        return {
            "other_processes_cpu_ms": _without_ours(machine, columns["process_cpu_ms"]),
            "stolen_ms": lost.tolist(),
        }

    def _read_threads(self) -> dict[int, int]:
        """CPU nanoseconds of every thread by its clock, which is exact at any moment."""
        found = {}
        # iterdir would build a Path for every thread at every iteration
        for entry in os.listdir(self._proc / "self" / "task"):  # noqa: PTH208
            tid = int(entry)
            try:
                found[tid] = time.clock_gettime_ns(_thread_clock(tid))
            except OSError:
                continue  # it ended meanwhile
            if tid not in self._names:
                self._names[tid] = self._describe(tid)
            self._seen[tid] = self._seen.get(tid, 0) + 1
        return found

    def _describe(self, tid: int) -> tuple[str, str]:
        """Name and kind of a thread."""
        if tid == self._own:
            return threading.current_thread().name, "iterating"
        for thread in threading.enumerate():
            if thread.native_id == tid:
                return thread.name, "python"
        name = self._thread_name(tid)
        pool = name == self._process_name or name.startswith(POOL_NAMES)
        return name, "pool" if pool else "other"

    def _kind(self, tid: int) -> str:
        kind = self._names[tid][1]
        # a Python thread that is just ending is unknown to Python already; a pool stays
        return "other" if kind == "pool" and self._seen[tid] < 2 else kind

    def _thread_name(self, tid: int) -> str:
        try:
            return (self._proc / "self" / "task" / str(tid) / "comm").read_text().strip()
        except OSError:
            return ""

    def _collected(self, phase: str, information: dict[str, int]) -> None:
        """Called by Python's collector as it begins and ends."""
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            self._gc_s += time.perf_counter() - self._gc_began

    # ---- files --------------------------------------------------------------------

    def _open(self, name: str, path: str, columns: tuple[str, ...]) -> None:
        """Keep a file of the kernel's open, or note why its columns are missing."""
        try:
            number = os.open(self._proc / path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            for column in columns:
                self._missing(column, f"{self._proc / path}: {error.strerror}")
            return
        self._files[name] = number
        why = _unusable(name, self._pread(name))
        if why:
            os.close(self._files.pop(name))
            for column in columns:
                self._missing(column, f"{self._proc / path} {why}")

    def _pread(self, name: str) -> bytes:
        return os.pread(self._files[name], 4096, 0)

    def _missing(self, column: str, why: str) -> None:
        self.not_measured[column] = why


_LEVELS = ("rss_bytes", "gpu_allocated_bytes")
"""Counters that say how much there is, not how much was added."""

_INTEGERS = (
    "minor_faults",
    "major_faults",
    "voluntary_switches",
    "involuntary_switches",
    "rss_bytes",
    "gpu_allocated_bytes",
    "read_bytes",
    "written_bytes",
)


def _unusable(name: str, text: bytes) -> str:
    """Why a file does not hold what is read from it; empty when it does."""
    checks: dict[str, Callable[[list[bytes]], bool]] = {
        "schedstat": lambda words: len(words) >= 3 and words[2] != b"0",
        "statm": lambda words: len(words) >= 2,
        "io": lambda words: b"read_bytes:" in words and b"write_bytes:" in words,
        "stat": lambda words: len(words) > 7 and words[0] == b"cpu",
    }
    return "" if checks[name](text.split()) else f"holds no such count here ({text[:40]!r})"


def _thread_clock(tid: int) -> int:
    """The kernel's clock of a thread's CPU time (clock_getcpuclockid(3): ~id, then 4 | 2)."""
    return (~tid << 3) | 6


def _gpu_allocated(device: torch.device) -> float:
    """Bytes that torch's tensors hold on a GPU; without the flattening of memory_stats()."""
    nested = torch.cuda.memory_stats_as_nested_dict(device)
    return nested["allocated_bytes"]["all"]["current"] if nested else 0


def _without_ours(machine_ms: np.ndarray, process_ms: list[float]) -> list[float]:
    """CPU time of other processes (n,): the machine's less this process's, never below 0.

    The machine's is counted in ticks, so one iteration may be a tick short and the next
    one over; what is short is carried on, so that sums over iterations are right.
    """
    lag = MAX_DEBT_TICKS * _TICK_MS * (os.cpu_count() or 1)
    rest, left = [], 0.0
    for busy, own in zip(machine_ms.tolist(), process_ms, strict=True):
        left = max(left + busy - own, -lag)
        rest.append(max(0.0, left))
        left -= rest[-1]
    return rest
