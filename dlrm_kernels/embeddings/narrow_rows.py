"""Rows of 2 bytes a number by torch's operators."""

from __future__ import annotations

import torch

from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.optimizers import EPSILON, OPTIMIZERS
from dlrm_kernels.embeddings.checks import InBackward
from dlrm_kernels.rounding import GROUP_BITS, round_rows, words


class TorchRows(InBackward):
    """Lookups and updates of rows of 2 bytes a number by torch's operators, the oracle of others.

    Each row that a batch looked up is updated once, with the float32 sum of its gradients.

    Args:
        tables: bfloat16 or float16.
        seed: of the random numbers.
    """

    name = "torch"

    def __init__(
        self, tables: EmbeddingTables, optimizer: str, learning_rate: float, seed: int
    ) -> None:
        self.optimizer, self.learning_rate = optimizer, learning_rate
        self.seed, self.updates = seed, 0
        self._tables = tables
        width = OPTIMIZERS[optimizer].row_state(tables.weights[0].shape[1])
        self.states = [
            torch.zeros(weight.shape[0] if width else 0, width, device=weight.device)
            for weight in tables.weights
        ]
        self._anchor = torch.zeros(0, requires_grad=True)
        self._made: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def pool(self, tables: EmbeddingTables, batch: Batch) -> torch.Tensor:
        weights, offsets = tables.weights, batch.offsets
        pooled = torch.empty(*offsets.shape, weights[0].shape[1], device=offsets.device)
        for t, weight in enumerate(weights):
            rows = weight[batch.table_indices(t)].float()
            each = torch.arange(len(rows), device=rows.device)
            pooled[t] = torch.nn.functional.embedding_bag(each, rows, offsets[t], mode="sum")
        return pooled

    def extents(self, batch: Batch) -> Batch:
        """The batch, which backward looks at once more."""
        return batch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that have not been applied."""
        self._made.clear()

    @torch.no_grad()
    def step(self) -> None:
        if not self._made:
            return
        for table, rows, gradient in self._made:
            self._update(table, rows, gradient)
        self.updates += 1
        self._made.clear()

    def backpropagate(
        self,
        tables: EmbeddingTables,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        batch: Batch,
        gradients: list[torch.Tensor],
    ) -> None:
        for table, gradient in enumerate(gradients):
            ends = torch.tensor([len(batch.table_indices(table))], device=gradient.device)
            sizes = torch.diff(torch.cat([batch.offsets[table], ends]))
            rows, place = torch.unique(batch.table_indices(table), return_inverse=True)
            bags = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
            total = torch.zeros(len(rows), gradient.shape[1], device=gradient.device)
            self._made.append((table, rows, total.index_add_(0, place, gradient.float()[bags])))

    def _update(self, table: int, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        weight = self._tables.weights[table]
        change = self.learning_rate * gradient
        if self.states[table].shape[1]:
            by_row = OPTIMIZERS[self.optimizer].per_row
            squares = gradient.square()
            total = self.states[table].index_add_(
                0, rows, squares.mean(dim=1, keepdim=True) if by_row else squares
            )
            root = total[rows].sqrt() + EPSILON
            change = gradient * (self.learning_rate / root) if by_row else change / root
        groups, members = rows >> GROUP_BITS, rows & ((1 << GROUP_BITS) - 1)
        number = self._tables.numbers[table]
        drawn = words(self.seed, self.updates, number, groups, members, weight.shape[1])
        weight[rows] = round_rows(weight[rows].float() - change, drawn, weight.dtype)
