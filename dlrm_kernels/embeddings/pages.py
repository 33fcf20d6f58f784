"""Memory of tables on large pages, and touched by another thread while it is filled."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence

import torch

from dlrm_core.base.machine import numa_nodes
from dlrm_core.embeddings import ROW_DTYPES, EmbeddingTables

_HUGE_PAGE = 1 << 21
_PAIR_OF_LINES = 128
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # linux/mman.h
_TOUCHED_AT_ONCE = 1 << 24
_WORTH_A_THREAD = 1 << 28


def tables_on_huge_pages(
    table_rows: Sequence[int], dim: int, precision: str = "fp32"
) -> EmbeddingTables:
    """Tables (R, d) one behind the other, on pages of 2 MiB where the system has them.

    Random rows then miss the address cache less, and a back end that wants all tables in one
    piece can use them where they are. Before the weights are filled it costs nothing.

    Args:
        precision: of the numbers (``model.embedding_precision``).
    """
    memory = empty_tables(table_rows, dim, ROW_DTYPES[precision])
    return EmbeddingTables(table_rows, dim, memory)


def empty_tables(
    table_rows: Sequence[int], dim: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    return list(empty_table(sum(table_rows), dim, dtype).split(list(table_rows)))


def empty_table(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory for a table (rows, dim), on huge pages where the system offers them."""
    if torch.empty(0).device.type != "cpu" or sys.platform != "linux":
        return torch.empty(rows, dim, dtype=dtype)
    memory = torch.empty(rows * dim + _PAIR_OF_LINES // dtype.itemsize, dtype=dtype)
    begin, end = _whole_pages(memory, _HUGE_PAGE)
    if begin < end:
        _advise(begin, end, _MADV_HUGEPAGE)  # where the kernel declines, nothing changes
    # a row of 64 floats is then two aligned pairs of cache lines, which CPUs fetch together
    skipped = -memory.data_ptr() % _PAIR_OF_LINES // dtype.itemsize
    return memory[skipped : skipped + rows * dim].view(rows, dim)


def _whole_pages(weight: torch.Tensor, page: int) -> tuple[int, int]:
    """First and last address of the pages that a tensor fills."""
    begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    return -(-begin // page) * page, end // page * page


def _advise(begin: int, end: int, advice: int) -> bool:
    """Advise the system about memory; whether it took the advice. Other threads run meanwhile."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(advise(begin, end - begin, advice) == 0)


@contextlib.contextmanager
def touched_beside(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Another thread touches the weights' memory, from its end, while the caller fills them.

    The system clears memory at its first touch, which takes longer than drawing the weights. On
    several NUMA nodes memory lies where it is touched first, so there the caller touches all.
    """
    large = sum(weight.nbytes for weight in weights) >= _WORTH_A_THREAD
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    if not (large and on_cpu) or sys.platform != "linux" or len(numa_nodes()) > 1:
        yield
        return
    stop = threading.Event()

    def touch() -> None:
        for weight in reversed(weights):
            first, end = _whole_pages(weight, mmap.PAGESIZE)
            while end > first:
                begin = max(first, end - _TOUCHED_AT_ONCE)
                # kernels before 5.14 refuse
                if stop.is_set() or not _advise(begin, end, _MADV_POPULATE_WRITE):
                    return
                end = begin

    thread = threading.Thread(target=touch, name="dlrm-touch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
