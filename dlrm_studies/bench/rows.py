"""Bare accesses to the rows of a batch: what the memory allows its embeddings at best."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dlrm_core.config import Parameters
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables
from dlrm_kernels.native import why_no_numba
from dlrm_workbook.evidence.ceilings import last_level_cache
from dlrm_workbook.ground.turns import CPU, CacheFlush, elapsed_ms

FLUSH_BYTES = (64 << 20, 512 << 20)
"""Least and most that is streamed over to empty the caches."""

LINE_BYTES = 64
"""Bytes of a vector and of a cache line."""

PREFETCHES = ((0, 64), (16, 128), (32, 128), (16, 64), (32, 64))
"""Ways to access rows: lookups ahead of which a row is asked for (0: none is), and the bytes from
one line asked for to the next; some CPUs bring a line and its neighbour."""


def why_no_accesses(parameters: Parameters) -> str:
    """Why the model's rows cannot be accessed by the kernels here; empty if they can."""
    if why := why_no_numba():
        return why
    row_bytes = parameters.model.row_bytes
    if row_bytes % LINE_BYTES:
        return f"a row has {row_bytes} bytes, which {LINE_BYTES} do not divide"
    return ""


def cache_flush(table_bytes: int) -> CacheFlush:
    """What pushes the tables out of the caches, as far as a program can."""
    least, most = FLUSH_BYTES
    size = min(max(last_level_cache(CPU) or least, least), most)
    return CacheFlush(min(size, table_bytes))


def row_access_ms(tables: EmbeddingTables, batch: Batch, flush: CacheFlush) -> tuple[float, float]:
    """Milliseconds of reading every looked-up row, and of reading and writing it.

    Nothing but the accesses, with prefetches and without, whichever is faster: what the
    machine's memory allows a forward pass and an SGD update at best. No weight changes.

    Args:
        tables: of rows whose bytes :data:`LINE_BYTES` divide.
    """
    best = []
    for writes in (False, True):
        kernel, times = _row_kernel(tables.weights[0][0].nbytes, writes), []
        for prefetch in PREFETCHES:
            flush()
            times.append(
                elapsed_ms(functools.partial(_over_tables, kernel, tables, batch, prefetch))
            )
        best.append(min(times))
    return best[0], best[1]


def _over_tables(
    kernel: Any, tables: EmbeddingTables, batch: Batch, prefetch: tuple[int, int]
) -> None:
    threads, count = torch.get_num_threads(), len(tables.weights)

    def work(table: int) -> None:
        indices = batch.table_indices(table)
        kernel(tables.weights[table].data_ptr(), indices.data_ptr(), indices.numel(), *prefetch)

    if threads == 1:
        for table in range(count):
            work(table)
    else:
        list(_pool(threads).map(work, range(count)))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@functools.cache
def _row_kernel(size: int, writes: bool) -> Any:
    """A kernel that reads, or reads and writes, rows of so many bytes, as float32 numbers."""
    from numba import njit

    from dlrm_kernels import vectors as v

    @njit(nogil=True, error_model="numpy")
    def access(table, indices, count, ahead, step):  # type: ignore[no-untyped-def]
        # no number changes, and a compiler cannot know it: it would leave the writing out
        nothing = v.splat(np.float32(min(ahead, 0)))
        total = v.zeros()
        for i in range(count):
            if ahead > 0:
                soon = table + v.load_int(indices + 8 * min(i + ahead, count - 1)) * size
                for line in range(0, size, step):
                    v.prefetch(soon + line)
            p = table + v.load_int(indices + 8 * i) * size
            for line in range(0, size, 64):
                if writes:
                    v.store_vector(p + line, v.subtract(v.load_vector(p + line), nothing))
                else:
                    total = v.add(total, v.load_vector(p + line))
        return v.lane_sum(total)

    return access
