"""The ``fused`` back end on the CPU: one call for all tables, the update inside backward.

Every ``backward()`` is a step: the tables get no ``.grad``, their weights change while
backward runs. Nothing flows below the tables.
Addresses go to machine code without bounds checks, so everything is checked here
first, and every index by the forward kernel before it is used.

Shapes: B samples, T tables of R rows, d embedding width, N lookups of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dlrm_core.base.errors import InputError
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.optimizers import EPSILON, OPTIMIZERS
from dlrm_kernels.embeddings import kernels as k
from dlrm_kernels.embeddings import kernels_narrow, kernels_sorted
from dlrm_kernels.embeddings.checks import (
    KINDS,
    InBackward,
    check_batch,
    check_rows,
    describe_fault,
)
from dlrm_kernels.embeddings.pages import empty_table
from dlrm_kernels.native import compile_kernel, require_numba
from dlrm_kernels.vectors import Job

ROWS_AHEAD = 16
"""Lookups between a row's prefetch and its use: 16 to 32 were equally fast, 64 floats a row."""

NARROW_ROWS_AHEAD, LINE = 32, 64
"""The same for rows of 2 bytes a number, and the bytes between their prefetches: each line of a
row of 128 bytes is named, which took less time than naming one of a pair."""

FORMATS = {
    torch.float32: kernels_narrow.FLOAT,
    torch.bfloat16: kernels_narrow.BF16,
    torch.float16: kernels_narrow.HALF,
}
"""Type of the tables' numbers to the kernels' name of it."""


class FusedCpu(InBackward):
    """Tables on the CPU by kernels of our own.

    Args:
        tables: float32, bfloat16 or float16.
        seed: of the random words by which numbers of 2 bytes are rounded.
    """

    name = "fused"

    def __init__(
        self, tables: EmbeddingTables, optimizer: str, learning_rate: float, seed: int = 0
    ) -> None:
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.seed, self.updates = seed, 0
        self._format = FORMATS.get(tables.weights[0].dtype, kernels_narrow.FLOAT)
        self._numbers = np.array(tables.numbers, np.int64)
        self._weights = np.empty(0, np.int64)
        self._rows = np.empty(0, np.int64)
        self._dim = 0
        self.note_tables(tables)
        width = OPTIMIZERS[optimizer].row_state(self._dim)
        self.states = [
            empty_table(weight.shape[0] if width else 0, width).zero_() for weight in tables.weights
        ]
        self.notices: list[str] = []
        require_numba()
        for kernel in self._kernels():
            notice = compile_kernel(kernel)[1]
            if notice and notice not in self.notices:
                self.notices.append(notice)
        self._anchor = torch.zeros(0, requires_grad=True)
        self._scratch = np.empty(0, np.int64)

    def pool(self, tables: EmbeddingTables, batch: Batch) -> torch.Tensor:
        self.note_tables(tables)
        check_batch(batch, len(self._rows))
        pooled = torch.empty(batch.tables, batch.offsets.shape[1], self._dim)
        threads = torch.get_num_threads()
        # several units a thread, so that a table with longer bags does not hold one thread up
        units = 8 * threads if threads > 1 else 1
        job = self._job(batch.indices, batch.offsets, batch.table_starts)
        faults = job.array(np.zeros((units, 2), np.int64))
        job.fields[k.POOLED] = pooled.data_ptr()
        job.fields[k.FAULTS] = faults.ctypes.data
        job.run(k.forward, units, threads)
        if faults[:, 0].any():
            kind, place = faults[faults[:, 0] != 0][0]
            raise InputError(describe_fault(int(kind), int(place), batch, self._rows))
        return pooled

    def extents(self, batch: Batch) -> tuple[int, ...]:
        return batch.table_starts

    def backpropagate(
        self,
        tables: EmbeddingTables,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        starts: tuple[int, ...],
        gradients: list[torch.Tensor],
    ) -> None:
        self.note_tables(tables)
        gradients = [_rows_of(gradient) for gradient in gradients]
        job = self._job(indices, offsets, starts)
        job.set_rows(k.GRADIENTS, k.STRIDES, gradients)
        job.fields[k.STATES] = job.integers([state.data_ptr() for state in self.states])
        threads = torch.get_num_threads()
        job.fields[k.WORDS] = job.array(
            np.empty(threads * kernels_narrow.words_bytes(self._dim), np.int8)
        ).ctypes.data
        plan = share_out(starts, threads)
        sorts = self._sorts(starts)[plan[:, 0]]
        _run_plan(job, k.sgd_owned, plan[~sorts], threads)
        if sorts.any():
            self._make_room_to_sort(job, starts, plan[sorts], threads)
            _run_plan(job, kernels_sorted.adagrad_owned, plan[sorts], threads)
        self.updates += 1

    def sorts(self, batch: Batch) -> bool:
        """Whether the update of a batch sorts the lookups of a table."""
        return bool(self._sorts(batch.table_starts).any())

    def sort_alone(self, batch: Batch) -> None:
        """Sort a batch's lookups as their update does, and update nothing: to be timed apart.

        The batch must have been pooled: its indices are used unchecked.
        """
        threads, starts = torch.get_num_threads(), batch.table_starts
        plan = share_out(starts, threads)
        plan = plan[self._sorts(starts)[plan[:, 0]]]
        job = self._job(batch.indices, batch.offsets, starts)
        self._make_room_to_sort(job, starts, plan, threads)
        _run_plan(job, kernels_sorted.sort_alone, plan, threads)

    def _sorts(self, starts: tuple[int, ...]) -> np.ndarray:
        """For each table, whether a row is updated once with the sum of its gradients.

        Both Adagrads need the sum. With SGD it is taken of rows of 2 bytes where a table has
        fewer rows than lookups: a row that is looked up often would be rounded as often.
        """
        if not OPTIMIZERS[self.optimizer].adds:
            return np.ones(len(self._rows), bool)
        narrow = self._format != kernels_narrow.FLOAT
        return narrow & (np.diff(np.array(starts, np.int64)) > self._rows)

    def _make_room_to_sort(
        self, job: Job, starts: tuple[int, ...], plan: np.ndarray, threads: int
    ) -> None:
        of_thread = kernels_sorted.thread_bytes(self._dim) // 8
        region = key_region(starts, plan, threads)
        keys = threads * region if region else 2 * starts[-1]
        needed = threads * of_thread + keys
        if self._scratch.size < needed:
            self._scratch = np.empty(needed, np.int64)
        job.fields[k.SCRATCH] = self._scratch.ctypes.data
        job.fields[k.KEYS] = self._scratch.ctypes.data + 8 * threads * of_thread
        job.fields[k.REGION] = 8 * region
        job.fields[k.KIND] = KINDS[self.optimizer]

    def _kernels(self) -> list[Callable[[int], None]]:
        """The kernels that this optimiser needs."""
        if not OPTIMIZERS[self.optimizer].adds:
            return [k.forward, kernels_sorted.adagrad_owned]
        narrow = self._format != kernels_narrow.FLOAT
        return [k.forward, k.sgd_owned, *([kernels_sorted.adagrad_owned] if narrow else [])]

    def _note(self, weights: list[torch.nn.Parameter]) -> None:
        allowed = [dtype for dtype in FORMATS if FORMATS[dtype] == self._format]
        for t, weight in enumerate(weights):
            if weight.device.type != "cpu" or weight.dtype not in allowed:
                raise InputError(
                    f"embedding table {t} is {weight.dtype} on {weight.device}; "
                    f"the fused back end of the CPU works on {allowed[0]} on cpu"
                )
            check_rows(t, weight)
        self._weights = np.array([weight.data_ptr() for weight in weights], np.int64)
        self._rows = np.array([weight.shape[0] for weight in weights], np.int64)
        self._dim = weights[0].shape[1]

    def _job(self, indices: torch.Tensor, offsets: torch.Tensor, starts: tuple[int, ...]) -> Job:
        job = Job(k.FIELDS)
        fields = job.fields
        fields[k.TABLES] = len(self._rows)
        fields[k.DIM] = self._dim
        fields[k.WEIGHTS] = self._weights.ctypes.data
        fields[k.ROWS] = self._rows.ctypes.data
        fields[k.INDICES] = indices.data_ptr()
        fields[k.BAGS] = offsets.shape[1]
        fields[k.OFFSETS] = offsets.data_ptr()
        fields[k.STARTS] = job.integers(starts)
        rates = job.array(np.array([self.learning_rate, EPSILON], np.float32))
        fields[k.RATES] = rates.ctypes.data
        narrow = self._format != kernels_narrow.FLOAT
        fields[k.AHEAD] = NARROW_ROWS_AHEAD if narrow else ROWS_AHEAD
        fields[k.STEP] = LINE if narrow else prefetch_step()
        fields[k.FORMAT] = self._format
        fields[k.SEED], fields[k.UPDATE] = self.seed, self.updates
        fields[k.NUMBERS] = self._numbers.ctypes.data
        return job


def _run_plan(job: Job, kernel: Callable[[int], None], plan: np.ndarray, threads: int) -> None:
    """Do the units of a plan (U, 3) on at most so many threads."""
    if len(plan):
        job.fields[k.PLAN] = job.integers(plan)
        job.run(kernel, len(plan), threads)


@functools.cache
def prefetch_step() -> int:
    """Bytes from one prefetch to the next: two cache lines where the CPU fetches pairs.

    Intel's second-level cache completes the aligned pair of a line that it fetches
    (Optimization Reference Manual, "spatial prefetcher"), and a core has few buffers
    for lines on their way. Naming one line of each pair, rows aligned to pairs, pooled
    8 x 102,400 rows of 64 floats in 26 ms instead of 33; unaligned it gained nothing.
    """
    try:
        return 128 if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else 64
    except OSError:
        return 64


def share_out(starts: tuple[int, ...], threads: int) -> np.ndarray:
    """Units of work of a race-free update: (U, 3) int64 of table, slice, number of slices.

    A table is one unit while the tables keep the threads evenly busy. Else it is cut
    into slices, each of which owns a hashed share of the rows; a slice still reads all
    of its table's indices, so tables are cut no finer than needed. Largest units first.
    """
    lookups = np.diff(np.array(starts, np.int64))
    tables, total = len(lookups), int(starts[-1])
    slices = np.ones(tables, np.int64)
    if threads > 1 and total > 0:
        # T equal tables on P threads take ceil(T/P) rounds; 1.25 times the ideal is even enough
        uneven = -(-tables // threads) * threads > 1.25 * tables
        shares = lookups * threads / total * (2 if uneven else 1)
        slices = np.clip(np.ceil(np.subtract(shares, 0.25)), 1, threads).astype(np.int64)
    order = np.argsort(-lookups / slices, kind="stable")
    rows = [(t, s, slices[t]) for t in order for s in range(slices[t])]
    return np.array(rows, np.int64).reshape(-1, 3)


def key_region(starts: tuple[int, ...], plan: np.ndarray, threads: int) -> int:
    """Numbers in a thread's own region of sort keys, twice its longest table's lookups.

    0, for regions by table, where a table is cut (its slices share one) or where threads'
    regions would take more memory than the tables'.
    """
    longest = int(np.diff(np.array(starts, np.int64)).max())
    cut = bool((plan[:, 2] > 1).any())
    return 0 if cut or threads * longest > starts[-1] else 2 * longest


def _rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient (B, d) whose rows are float32, each without gaps."""
    if gradient.dtype != torch.float32 or (gradient.shape[1] > 1 and gradient.stride(1) != 1):
        return gradient.to(torch.float32).contiguous()
    return gradient
