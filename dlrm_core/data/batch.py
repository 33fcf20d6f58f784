"""One batch of a DLRM, in the layout all generators and embeddings share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Share(NamedTuple):
    """One rank's equal share of samples or batches; of one process all of them."""

    rank: int = 0
    ranks: int = 1

    def samples(self, size: int) -> tuple[int, int]:
        """First sample of this rank's share of so many, and the one behind its last."""
        own = -(-size // self.ranks)
        return min(self.rank * own, size), min((self.rank + 1) * own, size)


WHOLE = Share()
"""The share of a process that trains alone: everything."""


@dataclass(frozen=True)
class Batch:
    """B samples of D dense features and T categorical features (one table each).

    The indices of all tables lie in one tensor, table after table, so that a
    batch moves to the GPU in four copies however many tables there are.

    Attributes:
        dense: (B, D) float32.
        indices: (N,) int64, rows looked up; table t owns
            ``indices[table_starts[t]:table_starts[t + 1]]``.
        offsets: (T, B) int64, where each sample's bag begins within its table's indices.
        table_starts: T + 1 host integers.
        targets: (B, 1) float32.
        extents: (2, T) int64 on the batch's device, where kernels read what
            ``table_starts`` tells the host: where each table's indices begin, and how
            many there are. None: not made.
        padded: a table has room for more indices than it holds, and only ``extents``
            knows how many are real: made on a GPU, so that the host need not wait to know.
    """

    dense: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor
    table_starts: tuple[int, ...]
    targets: torch.Tensor
    extents: torch.Tensor | None = None
    padded: bool = False

    @property
    def size(self) -> int:
        return self.dense.shape[0]

    @property
    def tables(self) -> int:
        return self.offsets.shape[0]

    def table_indices(self, table: int) -> torch.Tensor:
        """Rows looked up in one table, bag after bag: (N_t,) int64, a view.

        Of a padded batch the host waits for the device to know how many.
        """
        start, end = self.table_starts[table], self.table_starts[table + 1]
        if self.padded:
            assert self.extents is not None
            end = start + int(self.extents[1, table])
        return self.indices[start:end]

    def part(self, first: int, behind: int) -> Batch:
        """Samples ``first`` to ``behind``, which may be none, as a batch of their own."""
        if behind - first == self.size:
            return self
        indices, offsets, starts = [], [], [0]
        for t in range(self.tables):
            own, begins = self.table_indices(t), self.offsets[t]
            begin, end = (
                int(begins[place]) if place < self.size else own.numel()
                for place in (first, behind)
            )
            indices.append(own[begin:end])
            offsets.append(begins[first:behind] - begin)
            starts.append(starts[-1] + end - begin)
        return Batch(
            self.dense[first:behind],
            torch.cat(indices),
            torch.stack(offsets),
            tuple(starts),
            self.targets[first:behind],
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device, one copy a tensor; from pinned memory they do not block."""
        if self.dense.device == device or self.dense.device.type == device.type == "cuda":
            return self
        extents = self.extents
        if extents is None and device.type != "cpu":
            extents = extents_of(self.table_starts)
        # what else a batch of another kind holds stays where it is
        return dataclasses.replace(
            self,
            dense=self.dense.to(device, non_blocking=True),
            indices=self.indices.to(device, non_blocking=True),
            offsets=self.offsets.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            extents=None if extents is None else extents.to(device, non_blocking=True),
        )


def extents_of(table_starts: tuple[int, ...]) -> torch.Tensor:
    """(2, T) int64 on the host: where each table's indices begin, and how many there are."""
    at = torch.tensor(table_starts, dtype=torch.int64)
    return torch.stack([at[:-1], at.diff()])
