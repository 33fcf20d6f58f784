"""The embedding tables of a DLRM, and what a back end for them must offer.

Shapes: B samples, T tables of R rows, d embedding width, N lookups of a batch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from dlrm_core.data.batch import Batch

_HUGE_PAGE = 1 << 21
_PAIR_OF_LINES = 128
_MADV_HUGEPAGE = 14  # linux/mman.h


class Backend(Protocol):
    """Lookups, their gradients and the update of the tables, all of them in one place.

    ``forward`` gives tensors of a graph: their backward pass makes, or already
    applies, the tables' gradients. ``step`` applies what backward has only made.
    """

    name: str

    def forward(self, tables: EmbeddingTables, batch: Batch) -> list[torch.Tensor]:
        """T pooled vectors, each (B, d) float32."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that are kept between backward and step."""

    def step(self) -> None:
        """Update the tables with the gradients of the last backward pass."""


class EmbeddingTables(nn.Module):
    """T tables of rows x d; a bag of rows is summed into one vector a sample.

    Without a back end the lookups are torch's own, one call a table. Whatever the
    back end, the weights are the same parameters under the same names.

    Args:
        huge_pages: lay the tables one behind the other and ask the system for 2 MiB pages
            (Linux, CPU): random rows then miss the address cache less, and a back end that
            wants all tables in one piece can use them where they are. Before the weights
            are filled it costs nothing.
        memory: where the weights are to lie, (R, d) float32 each; left out, on the device
            that torch allocates on.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        dim: int,
        huge_pages: bool = False,
        memory: Sequence[torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        if memory is None:
            memory = empty_tables(table_rows, dim, huge_pages)
        self.tables = nn.ModuleList(
            # the weights are filled by the caller; the default filling costs seconds a table
            nn.EmbeddingBag(weight.shape[0], dim, mode="sum", sparse=True, _weight=weight)
            for weight in memory
        )
        self.backend: Backend | None = None

    @property
    def weights(self) -> list[nn.Parameter]:
        """The tables' weights, each (R, d) float32."""
        return list(self.parameters())

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        """T pooled vectors, each (B, d) float32."""
        if self.backend is not None:
            return self.backend.forward(self, batch)
        return [
            table(batch.table_indices(t), batch.offsets[t]) for t, table in enumerate(self.tables)
        ]


def empty_tables(table_rows: Sequence[int], dim: int, huge_pages: bool) -> list[torch.Tensor]:
    """Memory for tables (R, d) float32, in one piece where huge pages are asked for."""
    if not huge_pages:
        return [torch.empty(rows, dim) for rows in table_rows]
    return list(empty_table(sum(table_rows), dim, huge_pages).split(list(table_rows)))


def empty_table(rows: int, dim: int, huge_pages: bool) -> torch.Tensor:
    """Memory for a table (rows, dim) float32, on huge pages where asked for and offered."""
    if not huge_pages or torch.empty(0).device.type != "cpu" or sys.platform != "linux":
        return torch.empty(rows, dim)
    memory = torch.empty(rows * dim + _PAIR_OF_LINES // 4)
    _advise_huge_pages(memory)
    # a row of 64 floats is then two aligned pairs of cache lines, which CPUs fetch together
    skipped = -memory.data_ptr() % _PAIR_OF_LINES // 4
    return memory[skipped : skipped + rows * dim].view(rows, dim)


def _advise_huge_pages(weight: torch.Tensor) -> None:
    """Ask for huge pages behind a tensor's memory; where the kernel declines, nothing changes."""
    begin = -(-weight.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (weight.data_ptr() + weight.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if begin < end:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(begin, end - begin, _MADV_HUGEPAGE)
