"""Counters of iterations: what was planted shows in its own column and in no other."""

import gc
import mmap
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from dlrm_workbook.evidence import counters as evidence_counters
from dlrm_workbook.evidence.counters import IterationCounters
from dlrm_workbook.ground.machine import memory_limit
from dlrm_workbook.ground.processes import without_collection
from dlrm_workbook.ground.turns import threads_of

CPU = torch.device("cpu")


@pytest.fixture
def counters(monkeypatch):
    """Reads everything at each iteration: between two readings, a busy machine may do anything."""
    monkeypatch.setattr(evidence_counters, "SPARING", 0)
    with IterationCounters(CPU) as made:
        yield made


class Clocks:
    """Stands in for ``time``: all of its clocks stand still until they are moved."""

    def __init__(self) -> None:
        self.wall_ms, self.cpu_ms = 1000, 100

    def perf_counter_ns(self) -> int:
        return self.wall_ms * 1_000_000

    def perf_counter(self) -> float:
        return self.wall_ms / 1e3

    def thread_time_ns(self) -> int:
        return self.cpu_ms * 1_000_000

    process_time_ns = thread_time_ns

    def clock_gettime_ns(self, clock: int) -> int:
        return 0

    def sleep(self, seconds: float) -> None:
        pass


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(evidence_counters, "time", made)
    return made


def compute(ms: float) -> None:
    """Use that much CPU time of the calling thread, however long it takes."""
    until = time.thread_time() + ms / 1e3
    while time.thread_time() < until:
        pass


def test_an_iteration_s_time_is_computing_waiting_and_sleeping(counters):
    counters.start()
    compute(30)
    counters.snapshot(7)
    time.sleep(0.06)
    counters.snapshot(8, profiled=True)
    columns = counters.columns()
    assert columns["iteration"] == [7, 8] and columns["profiled"] == [False, True]
    assert columns["thread_cpu_ms"][0] >= 30 and columns["wall_ms"][1] >= 60
    assert columns["thread_cpu_ms"][1] < columns["wall_ms"][1]
    assert {"run_queue_ms", "blocked_ms"} <= columns.keys() | counters.not_measured.keys()
    assert columns["voluntary_switches"][1] >= 1


def test_what_is_neither_computing_nor_waiting_for_a_core_is_sleeping(
    tmp_path, monkeypatch, clocks
):
    queue = tmp_path / "self" / "task" / str(threading.get_native_id()) / "schedstat"
    queue.parent.mkdir(parents=True)
    queue.write_text("5 0 1\n")
    monkeypatch.setattr(evidence_counters, "PROC", tmp_path)
    with IterationCounters(CPU) as counters:
        counters.start()
        for number, (wall, cpu, waited) in enumerate([(60, 30, 10), (60, 0, 0), (60, 40, 25)]):
            clocks.wall_ms += wall
            clocks.cpu_ms += cpu
            before = int(queue.read_text().split()[1])
            queue.write_text(f"5 {before + 1_000_000 * waited} 1\n")
            counters.snapshot(number)
        columns = counters.columns()
    assert columns["wall_ms"] == [60, 60, 60] and columns["thread_cpu_ms"] == [30, 0, 40]
    assert columns["run_queue_ms"] == [10, 0, 25]
    # the system counts the waiting until the thread runs again: it may be more than the rest
    assert columns["blocked_ms"] == [20, 60, 0]


def test_what_happens_between_series_counts_to_no_iteration(counters):
    counters.start()
    counters.snapshot(0)
    compute(400)
    counters.start()
    counters.snapshot(1)
    assert sum(counters.columns()["thread_cpu_ms"]) < 200  # two snapshots take less than 1 ms


def test_another_python_thread_is_told_apart(counters):
    go, done = threading.Event(), threading.Event()

    def work():
        go.wait()
        compute(200)
        done.set()
        go.clear()
        go.wait()

    thread = threading.Thread(target=work, name="straggler", daemon=True)
    thread.start()
    counters.start()
    counters.snapshot(0)
    go.set()
    done.wait()
    counters.snapshot(1)
    columns = counters.columns()
    go.set()
    thread.join()
    assert columns["other_threads_cpu_ms"][0] < 100
    assert columns["other_threads_cpu_ms"][1] >= 199
    rows = {row["name"]: row for row in counters.threads()}
    assert rows["straggler"]["kind"] == "python"
    assert rows["straggler"]["cpu_ms_per_iteration"] >= 99  # mean of two iterations
    assert [row["kind"] for row in rows.values()].count("iterating") == 1


def test_work_of_a_thread_that_has_ended_is_not_lost(counters):
    counters.start()
    thread = threading.Thread(target=compute, args=(40,))
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # the kernel ends it a bit later
        time.sleep(0.001)
    counters.snapshot(0)
    assert counters.columns()["other_threads_cpu_ms"][0] >= 39


def test_torch_s_workers_are_a_pool(counters):
    a = torch.randn(800, 800)
    with threads_of(2):
        counters.start()
        for _ in range(10):
            a @ a
        counters.snapshot(0)
        counters.snapshot(1)
    columns = counters.columns()
    assert columns["pool_cpu_ms"][0] > columns["other_threads_cpu_ms"][0]
    assert any(row["kind"] == "pool" for row in counters.threads())


def test_memory_faults_and_collection(counters):
    gc.collect()  # what earlier tests left is not given back in the middle of this one
    with without_collection():
        counters.start()
        counters.snapshot(0)
        # of its own: an allocator may hand out memory that earlier tests gave back to it
        held = mmap.mmap(-1, 64 << 20)
        for _ in range(64):
            held.write(b"1" * (1 << 20))
        gc.collect()
        counters.snapshot(1)
    columns = counters.columns()
    assert len(held) and columns["rss_bytes"][1] - columns["rss_bytes"][0] > 32 << 20
    # with pages of 4 KiB 16384, of 2 MiB 32
    assert columns["minor_faults"][1] >= 30
    assert columns["gc_ms"][1] > columns["gc_ms"][0] == 0
    assert "gpu_allocated_bytes" in counters.not_measured


def test_what_the_kernel_does_not_tell_is_absent_with_a_reason(tmp_path, monkeypatch):
    proc = tmp_path / "proc"
    tid = threading.get_native_id()
    (proc / "self" / "task" / str(tid)).mkdir(parents=True)
    (proc / "self" / "task" / str(tid) / "schedstat").write_text("0 0 0\n")  # switched off
    (proc / "self" / "statm").write_text("10 7 1 1 0 1 0\n")
    monkeypatch.setattr("dlrm_workbook.evidence.counters.PROC", proc)
    with IterationCounters(CPU) as counters:
        counters.start()
        counters.snapshot(0)
        columns, evidence = counters.columns(), counters.evidence()
    assert columns["rss_bytes"] == [7 * os.sysconf("SC_PAGE_SIZE")]
    for name in ("run_queue_ms", "blocked_ms", "read_bytes", "other_processes_cpu_ms"):
        assert name not in columns
        assert "proc" in evidence["not_measured"][f"counters.{name}"]


def system(proc, ticks: float, stolen: int = 0) -> None:
    (proc / "stat").write_text(f"cpu  {ticks} 0 0 100 0 0 0 {stolen} 0 0\n")


def test_other_processes_are_the_machine_s_time_less_ours(tmp_path, monkeypatch, clocks):
    proc = tmp_path / "proc"
    (proc / "self" / "task").mkdir(parents=True)
    system(proc, 100)
    monkeypatch.setattr("dlrm_workbook.evidence.counters.PROC", proc)
    with IterationCounters(CPU) as counters:
        counters.start()
        clocks.wall_ms += 600
        clocks.cpu_ms += 30
        system(proc, 150, stolen=3)
        counters.snapshot(0)
        counters.start()
        clocks.wall_ms += 40
        clocks.cpu_ms += 30
        counters.snapshot(1)
        columns = counters.columns()
    tick = 1e3 / os.sysconf("SC_CLK_TCK")
    assert columns["process_cpu_ms"] == [30, 30]
    # the machine's count lags: it has not seen the second iteration, which is not below 0
    assert columns["other_processes_cpu_ms"] == pytest.approx([50 * tick - 30, 0])
    assert columns["stolen_ms"] == pytest.approx([3 * tick, 0])


def test_nothing_counted_is_no_columns(counters):
    assert counters.columns() == {} and counters.cost_ms() is None
    assert counters.evidence()["threads_cpu"] == []


def test_the_tightest_memory_limit_counts(tmp_path):
    group = tmp_path / "sys/fs/cgroup/batch/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000 kB\nMemFree: 5 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/batch/job\n")
    assert memory_limit(tmp_path) == 1024_000
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("700000\n")
    assert memory_limit(tmp_path) == 700_000
    (tmp_path / "proc/self/cgroup").write_text("9:cpu:/\n4:memory:/job\n")
    (tmp_path / "sys/fs/cgroup/memory/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes").write_text("300000\n")
    assert memory_limit(tmp_path) == 300_000


def test_this_machine_has_a_limit():
    assert (memory_limit() or 0) > 1 << 28


def test_other_ranks_of_a_launcher_are_no_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)
    with subprocess.Popen(["sleep", "60"]) as rank:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert rank.pid in set(evidence_counters.ranks())
        rank.kill()
