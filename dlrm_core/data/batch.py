"""One batch of a DLRM, in the layout all generators and embeddings share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """

    dense: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor
    table_starts: tuple[int, ...]
    targets: torch.Tensor

    @property
    def size(self) -> int:
        """Number of samples B."""
        return self.dense.shape[0]

    @property
    def tables(self) -> int:
        """Number of tables T."""
        return self.offsets.shape[0]

    def table_indices(self, table: int) -> torch.Tensor:
        """Rows looked up in one table, bag after bag: (N_t,) int64, a view."""
        return self.indices[self.table_starts[table] : self.table_starts[table + 1]]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; copies from pinned memory do not block."""
        return Batch(
            self.dense.to(device, non_blocking=True),
            self.indices.to(device, non_blocking=True),
            self.offsets.to(device, non_blocking=True),
            self.table_starts,
            self.targets.to(device, non_blocking=True),
        )

    def pin(self) -> Batch:
        """The same batch in page-locked host memory, for copies that overlap."""
        return Batch(
            self.dense.pin_memory(),
            self.indices.pin_memory(),
            self.offsets.pin_memory(),
            self.table_starts,
            self.targets.pin_memory(),
        )
