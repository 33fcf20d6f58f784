"""What the system counted in each iteration: CPU time, waiting, faults, memory, disk.

Times of a step say how long; these say what the thread did meanwhile: computed, stood
in the run queue because something else had its core, or slept. Linux's own counters,
read at an iteration's end from files that stay open. That takes about a tenth of a
millisecond, most of it because an iteration has driven the kernel's code out of the
caches, so counting can stay on while the times that matter are taken.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_workbook.ground.heap import heap_bytes
from dlrm_workbook.ground.machine import ranks_here

NO_GPU_USED = "the run used no GPU"
"""Reason for everything that only a GPU has."""

PROC = Path("/proc")

TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")
"""In which the system counts the time of its CPUs."""

MAX_DEBT_TICKS = 4
"""Per CPU: how far the system's count, in ticks, may lag behind our own exact one."""

SPARING = 1000
"""What may be interpolated is read once in so many times its own cost: 0.1 % of the time."""

FEW_THREADS_S = 60e-6
"""Clocks of all threads read faster than this are read at every iteration."""

POOL_NAMES = ("pt_", "omp", "OMP")
"""How the names of native worker threads begin, besides the process's own name."""

STOCKS = ("rss_bytes", "heap_bytes", "gpu_allocated_bytes")
"""Counters that say how much there is, not how much was added."""

INTEGERS = {
    *("minor_faults", "major_faults", "voluntary_switches", "involuntary_switches"),
    *("read_bytes", "written_bytes", *STOCKS),
}
"""Columns that are whole numbers."""


def ranks() -> Iterator[int]:
    """Numbers of the other processes that a launcher started on this machine beside this one."""
    tasks = (PROC / str(os.getppid()) / "task").glob("*/children") if ranks_here() > 1 else ()
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread that ended, or another user's launcher
            yield from {*map(int, task.read_text().split())} - {os.getpid()}


def children() -> Iterator[int]:
    """Numbers of the processes that multiprocessing started here and that run."""
    processes = sys.modules.get("multiprocessing.process")
    for child in list(getattr(processes, "_children", ())):
        if child.pid is not None:
            yield int(child.pid)


USABLE: dict[str, Callable[[list[bytes]], bool]] = {
    "schedstat": lambda words: len(words) >= 3 and words[2] != b"0",
    "statm": lambda words: len(words) >= 2,
    "io": lambda words: b"read_bytes:" in words and b"write_bytes:" in words,
    "stat": lambda words: len(words) > 7 and words[0] == b"cpu",
}
"""Whether the words of a file of the kernel's hold what is read from it."""


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
    for busy, process in zip(machine_ms.tolist(), process_ms, strict=True):
        left = max(left + busy - process, -lag)
        rest.append(max(0.0, left))
        left -= rest[-1]
    return rest


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
    (iterating thread), ``rss_bytes``, ``heap_bytes`` (asked of the allocator and not given
    back), ``gpu_allocated_bytes``, ``gc_ms`` (Python's collector), ``read_bytes``,
    ``written_bytes`` (storage), ``other_processes_cpu_ms`` (of the whole machine less ours;
    the kernel counts it in ticks of 10 ms) and ``stolen_ms`` (a hypervisor gave our cores to
    others). The GPU's memory is that of ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        self.not_measured: dict[str, str] = {}
        self.cost_s: list[float] = []
        """Seconds that each snapshot took."""
        self._device = device if device.type == "cuda" else None
        if self._device is None:
            self.not_measured["gpu_allocated_bytes"] = NO_GPU_USED
        self._own = threading.get_native_id()
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._files: dict[str, int] = {}
        self._open(f"self/task/{self._own}/schedstat", "run_queue_ms", "blocked_ms")
        self._open("self/statm", "rss_bytes")
        if heap_bytes() is None:
            reason = "the C library does not count it (glibc 2.33 does)"
            self.not_measured["heap_bytes"] = reason
        self._open("self/io", "read_bytes", "written_bytes")
        self._open("stat", "other_processes_cpu_ms", "stolen_ms")
        self._gc_s = 0.0
        self._gc_began = 0.0
        gc.callbacks.append(self._collected)
        self._process_name = self._thread_name(os.getpid())
        self._names: dict[int, tuple[str, str]] = {}
        """Name and kind of each thread seen, by native id."""
        self._clocks: dict[int, int] = {}
        """Of the threads that live, native id to the kernel's clock."""
        self._fleeting: set[int] = set()
        """Threads that ended right after they were found."""
        self._threads: list[tuple[float, dict[int, int]]] = []
        """Moment in ms, CPU nanoseconds of each thread."""
        self._listed_ms: list[float] = []
        """When the threads were listed."""
        self._system: list[tuple[float, float, float]] = []
        """Moment in ms, busy ms of all CPUs, stolen ms."""
        self._children: dict[int, int] = {}
        """Ticks of each process that this one started, by its number."""
        self._due_ms = {"listing": 0.0, "clocks": 0.0, "system": 0.0}
        """When each is to be read again."""
        self._before: dict[str, float] = {}
        self._rows: list[dict[str, Any]] = []
        self._ends_ms: list[float] = []

    def __enter__(self) -> IterationCounters:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        for number in self._files.values():
            os.close(number)
        self._files = {}

    def start(self) -> None:
        """An iteration begins now; what happened since the last one counts to none."""
        self._due_ms = dict.fromkeys(self._due_ms, 0.0)
        self._read_sparingly(time.perf_counter_ns() / 1e6)
        self._before = self._read()

    def snapshot(self, iteration: int, profiled: bool = False) -> None:
        """The iteration of this number in the run ended now, and the next one begins."""
        began = time.perf_counter()
        now = self._read()
        before = self._before or now
        self._rows.append(
            {"iteration": iteration, "profiled": profiled}
            | {name: value - (0 if name in STOCKS else before[name]) for name, value in now.items()}
        )
        self._ends_ms.append(now["wall_ms"])
        self._before = now
        self._read_sparingly(now["wall_ms"])
        self.cost_s.append(time.perf_counter() - began)

    def cost_ms(self) -> float | None:
        """Median milliseconds of a snapshot; None before the first."""
        return 1e3 * statistics.median(self.cost_s) if self.cost_s else None

    def columns(self) -> dict[str, list[Any]]:
        """One list a counter, one entry an iteration, in the order in which they ran."""
        if not self._rows:
            return {}
        columns = {name: [row[name] for row in self._rows] for name in self._rows[0]}
        for name in INTEGERS & columns.keys():
            columns[name] = [round(value) for value in columns[name]]
        if "run_queue_ms" in columns:
            times = (columns[name] for name in ("wall_ms", "thread_cpu_ms", "run_queue_ms"))
            columns["blocked_ms"] = [
                max(0.0, wall - cpu - queue) for wall, cpu, queue in zip(*times, strict=True)
            ]
        self._read_last()
        moments, tids, used = self._thread_times()
        pool = used[:, [self._kind(tid) == "pool" for tid in tids]].sum(axis=1)
        pool_ms = self._in_iterations(moments, pool) / 1e6
        attributed_ms = pool_ms + columns["thread_cpu_ms"]
        columns["pool_cpu_ms"] = pool_ms.tolist()
        columns["other_threads_cpu_ms"] = np.maximum(
            0.0, columns["process_cpu_ms"] - attributed_ms
        ).tolist()
        if len(self._system) > 1:
            moments, busy, stolen = np.array(self._system).T
            columns["other_processes_cpu_ms"] = without_ours(
                self._in_iterations(moments, busy), columns["process_cpu_ms"]
            )
            columns["stolen_ms"] = self._in_iterations(moments, stolen).tolist()
        return columns

    def threads(self) -> list[dict[str, Any]]:
        """CPU time of every thread, per iteration, most first; means over the iterations without a
        profiler, where there are any.

        Each has ``name``, ``tid``, ``cpu_ms_per_iteration`` and ``kind``: 'iterating', 'python',
        'pool' (a nameless native thread or one of torch's: it works for whoever calls an operator)
        or 'other' (a driver's, say).
        """
        if not self._rows:
            return []
        self._read_last()
        plain = np.array([not row["profiled"] for row in self._rows])
        chosen = plain if plain.any() else ~plain
        moments, tids, used = self._thread_times()
        rows = []
        for tid, cpu_ns in zip(tids, used.T, strict=True):
            mean_ms = float(self._in_iterations(moments, cpu_ns)[chosen].mean() / 1e6)
            row = {"name": self._names[tid][0], "tid": tid, "cpu_ms_per_iteration": mean_ms}
            rows.append(row | {"kind": self._kind(tid)})
        return sorted(rows, key=lambda row: -row["cpu_ms_per_iteration"])

    def evidence(self) -> dict[str, Any]:
        """``counters``, ``threads_cpu``, ``counters_cost_ms``, ``not_measured``: for a record."""
        return {
            "counters": self.columns(),
            "threads_cpu": self.threads(),
            "counters_cost_ms": self.cost_ms(),
            "not_measured": {f"counters.{name}": why for name, why in self.not_measured.items()},
        }

    # ---- reading ------------------------------------------------------------------

    def _read(self) -> dict[str, float]:
        """What is read at every iteration: the clocks first and together."""
        values = {
            "wall_ms": time.perf_counter_ns() / 1e6,
            "thread_cpu_ms": time.thread_time_ns() / 1e6,
            "process_cpu_ms": time.process_time_ns() / 1e6,
        }
        if "schedstat" in self._files:
            values["run_queue_ms"] = int(self._pread("schedstat").split()[1]) / 1e6
        mine = resource.getrusage(resource.RUSAGE_THREAD)
        ours = resource.getrusage(resource.RUSAGE_SELF)
        values |= {"minor_faults": ours.ru_minflt, "major_faults": ours.ru_majflt}
        values |= {"voluntary_switches": mine.ru_nvcsw, "involuntary_switches": mine.ru_nivcsw}
        values["gc_ms"] = 1e3 * self._gc_s
        if "statm" in self._files:
            values["rss_bytes"] = int(self._pread("statm").split()[1]) * self._page
        if (heap := heap_bytes()) is not None:
            values["heap_bytes"] = heap
        if "io" in self._files:
            counted = self._pread("io").split()
            values["read_bytes"] = int(counted[counted.index(b"read_bytes:") + 1])
            values["written_bytes"] = int(counted[counted.index(b"write_bytes:") + 1])
        if self._device is not None:
            values["gpu_allocated_bytes"] = gpu_allocated(self._device)
        return values

    def _read_sparingly(self, moment_ms: float) -> None:
        """What may be interpolated: the threads' clocks, the list of threads, the machine.

        With few threads their clocks are read every time.
        """
        if moment_ms >= self._due_ms["listing"]:
            began = time.perf_counter()
            self._clocks |= self._new_threads()
            self._listed_ms.append(moment_ms)
            self._put_off("listing", began)
        if moment_ms >= self._due_ms["clocks"]:
            began = time.perf_counter()
            self._threads.append((moment_ms, self._read_clocks()))
            if time.perf_counter() - began > FEW_THREADS_S:
                self._put_off("clocks", began)
        if moment_ms >= self._due_ms["system"] and "stat" in self._files:
            began = time.perf_counter()
            ticks = [int(word) for word in self._pread("stat").split(b"\n", 1)[0].split()[1:9]]
            # user, nice, system, irq, softirq (guests are in user); idle, iowait are not busy
            busy = sum(ticks[i] for i in (0, 1, 2, 5, 6)) - self._of_children()
            self._system.append((moment_ms, TICK_MS * busy, TICK_MS * ticks[7]))
            self._put_off("system", began)

    def _of_children(self) -> int:
        """Ticks of processes that this one started, those that ended too, and of other ranks."""
        for pid in (*children(), *ranks()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                self._children[pid] = int(words[11]) + int(words[12])
        return sum(self._children.values())

    def _put_off(self, what: str, began: float) -> None:
        """Read it again when that takes a small share of the time since."""
        now = time.perf_counter()
        self._due_ms[what] = 1e3 * (now + SPARING * (now - began))

    def _read_last(self) -> None:
        """One reading more, so that every iteration lies between two."""
        before = len(self._names)
        self._due_ms = dict.fromkeys(self._due_ms, 0.0)
        self._read_sparingly(time.perf_counter_ns() / 1e6)
        if len(self._names) > before:  # is a thread found just now one that stays?
            time.sleep(0.002)
            self._threads.append((time.perf_counter_ns() / 1e6, self._read_clocks()))

    def _read_clocks(self) -> dict[int, int]:
        clocks = {}
        for tid, clock in list(self._clocks.items()):
            try:
                clocks[tid] = time.clock_gettime_ns(clock)
            except OSError:  # it has ended
                del self._clocks[tid]
                if sum(tid in used for _, used in self._threads[-2:]) < 2:
                    self._fleeting.add(tid)
        return clocks

    def _new_threads(self) -> dict[int, int]:
        """Clocks of the threads that were not there before."""
        # iterdir would build a Path for every thread
        listed = (int(entry) for entry in os.listdir(PROC / "self" / "task"))  # noqa: PTH208
        # a thread's clock of CPU time is (~id, then 4 | 2), says clock_getcpuclockid(3)
        new = {tid: (~tid << 3) | 6 for tid in listed if tid not in self._clocks}
        self._names |= {tid: self._describe(tid) for tid in new}
        return new

    def _thread_times(self) -> tuple[np.ndarray, list[int], np.ndarray]:
        """Moments (r,) in ms, threads (t,), and their CPU nanoseconds (r, t), cumulative.

        A thread that was found late is taken to have worked evenly since it was not there.
        """
        moments = np.array([moment for moment, _ in self._threads])
        tids = list(self._names)
        used = np.zeros((len(moments), len(tids)))
        for column, tid in enumerate(tids):
            seen = [row for row, (_, read) in enumerate(self._threads) if tid in read]
            if not seen:
                continue
            at, values = moments[seen], [float(self._threads[row][1][tid]) for row in seen]
            absent = [moment for moment in self._listed_ms if moment < at[0]]
            if absent:
                at, values = np.concatenate([absent[-1:], at]), [0.0, *values]
            used[:, column] = np.interp(moments, at, values)
        return moments, tids, used

    def _in_iterations(self, moments_ms: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """How much a cumulative count (r,) grew in each iteration, evenly between readings."""
        ends = np.array(self._ends_ms)
        starts = ends - [row["wall_ms"] for row in self._rows]
        return np.interp(ends, moments_ms, counted) - np.interp(starts, moments_ms, counted)

    def _describe(self, tid: int) -> tuple[str, str]:
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
        return "other" if kind == "pool" and tid in self._fleeting else kind

    def _thread_name(self, tid: int) -> str:
        try:
            return (PROC / "self" / "task" / str(tid) / "comm").read_text().strip()
        except OSError:
            return ""

    def _collected(self, phase: str, information: dict[str, int]) -> None:
        """Called by Python's collector as it begins and ends."""
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            self._gc_s += time.perf_counter() - self._gc_began

    # ---- files --------------------------------------------------------------------

    def _open(self, path: str, *columns: str) -> None:
        """Keep a file of the kernel's open, or note why its columns are missing."""
        name = Path(path).name
        try:
            self._files[name] = os.open(PROC / path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.not_measured |= dict.fromkeys(columns, f"{PROC / path}: {error.strerror}")
            return
        text = self._pread(name)
        if not USABLE[name](text.split()):
            os.close(self._files.pop(name))
            reason = f"{PROC / path} holds no such count here ({text[:40]!r})"
            self.not_measured |= dict.fromkeys(columns, reason)

    def _pread(self, name: str) -> bytes:
        return os.pread(self._files[name], 4096, 0)
