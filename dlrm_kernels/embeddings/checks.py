"""What back ends with kernels share: checks before addresses go to machine code, torch's node."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from dlrm_core.base.errors import InputError
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables

NO_FAULT, BAD_INDEX, BAD_OFFSET = 0, 1, 2
"""What a forward kernel notes of a batch that it refuses."""

ADAGRAD, ROWWISE, SGD = 0, 1, 2
KINDS = {"adagrad": ADAGRAD, "rowwise_adagrad": ROWWISE, "sgd": SGD}
"""``training.optimizer`` to the kind of an update that changes a row once."""


def check_batch(batch: Batch, tables: int, device: str = "cpu") -> None:
    """Refuse what the kernels of that kind of device would misread."""
    for name, tensor in (("indices", batch.indices), ("offsets", batch.offsets)):
        if tensor.dtype != torch.int64 or tensor.device.type != device:
            raise InputError(
                f"batch.{name} is {tensor.dtype} on {tensor.device}, expected torch.int64 on "
                f"{device}"
            )
        if not tensor.is_contiguous():
            raise InputError(
                f"batch.{name} has strides {tuple(tensor.stride())}, expected a contiguous tensor"
            )
    if batch.offsets.dim() != 2 or batch.offsets.shape[0] != tables:
        raise InputError(
            f"batch.offsets has shape {tuple(batch.offsets.shape)}, expected {tables} tables "
            "x samples"
        )
    starts = batch.table_starts
    if (
        len(starts) != tables + 1
        or starts[0] != 0
        or starts[-1] != batch.indices.numel()
        or any(a > b for a, b in itertools.pairwise(starts))
    ):
        raise InputError(
            f"batch.table_starts is {starts}, expected {tables + 1} rising numbers from 0 to "
            f"{batch.indices.numel()} (batch.indices)"
        )


def describe_fault(kind: int, place: int, batch: Batch, rows: np.ndarray) -> str:
    """What is wrong with a batch, from the kind and place that the forward kernel noted."""
    if kind == BAD_INDEX:
        table = int(np.searchsorted(batch.table_starts, place, side="right")) - 1
        lookup, value = place - batch.table_starts[table], int(batch.indices[place])
        return describe_values(kind, table, lookup, value, int(rows[table]))
    table, bag = divmod(place, batch.offsets.shape[1])
    size = batch.table_starts[table + 1] - batch.table_starts[table]
    return describe_values(kind, table, bag, int(batch.offsets[table, bag]), 0, f"{size} ")


def describe_values(
    kind: int, table: int, place: int, value: int, rows: int, lookups: str = ""
) -> str:
    """What is wrong: an index ``value`` at a table's lookup ``place``, or a sample's offset."""
    if kind == BAD_INDEX:
        return (
            f"embedding table {table} has {rows:,} rows, but lookup {place} of the batch asks for "
            f"row {value}, expected 0 to {rows - 1}"
        )
    return (
        f"batch.offsets of embedding table {table} is {value} at sample {place}, expected offsets "
        f"that begin with 0, do not fall and stay below or at its {lookups}lookups"
    )


def check_rows(table: int, weight: torch.Tensor) -> None:
    """Refuse a table whose rows do not lie one behind the other."""
    if not weight.is_contiguous():
        raise InputError(
            f"embedding table {table} has strides {tuple(weight.stride())}, expected "
            f"({weight.shape[1]}, 1): its rows one behind the other"
        )


class InBackward:
    """A back end that updates the tables while backward runs.

    Every ``backward()`` is a step; nothing is kept between the two. A subclass has
    ``pool(tables, batch)``, the pooled vectors (T, B, d) outside of any graph; ``extents(batch)``,
    what backward is to know of a batch beside its indices and offsets; and ``backpropagate(tables,
    indices, offsets, extents, gradients)``, the update by the gradients (B, d) of these vectors.
    It is made for tables, an optimiser and a learning rate; InputError where it cannot work on
    them, MissingToolError where what it needs is not installed.
    """

    states: list[torch.Tensor]
    """For each table Adagrad's (R, d), or row-wise Adagrad's (R, 1), sums of squares, float32."""
    updates: int
    """Number of updates so far, which the random words depend on; where there are such."""
    notices: list[str]
    """What had to be fallen back to, and why."""
    _anchor: torch.Tensor
    """A graph needs a leaf: the tables are none, they have no gradient."""
    _known: tuple[int, ...] = ()

    def note_tables(self, tables: EmbeddingTables) -> None:
        """Check the tables and note where they lie, now and whenever one has moved."""
        addresses = tuple(weight.data_ptr() for weight in tables.weights)
        if addresses != self._known:
            self._note(tables.weights)
            self._known = tuple(weight.data_ptr() for weight in tables.weights)

    def _note(self, weights: list[torch.nn.Parameter]) -> None:
        """Check tables (R, d) and note where they lie."""
        raise NotImplementedError

    def forward(self, tables: EmbeddingTables, batch: Batch) -> list[torch.Tensor]:
        """T pooled vectors, each (B, d).

        Raises:
            InputError: a batch laid out otherwise, or an index outside its table; on a GPU it
                may be that of an earlier batch.
        """
        return list(Lookup.apply(self._anchor, self, tables, batch))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the tables have no gradient."""

    def step(self) -> None:
        """Do nothing: the update is done when backward is."""


class Lookup(torch.autograd.Function):
    """Pooling as a node of torch's graph whose backward updates the tables."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, backend: Any, tables: EmbeddingTables, batch: Batch
    ) -> tuple[torch.Tensor, ...]:
        pooled = backend.pool(tables, batch)
        # saved, so that torch notices indices changed in place before backward
        ctx.save_for_backward(batch.indices, batch.offsets)
        ctx.rest = (backend, tables, backend.extents(batch))
        return tuple(pooled[t] for t in range(pooled.shape[0]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        indices, offsets = ctx.saved_tensors
        backend, tables, extents = ctx.rest
        backend.backpropagate(tables, indices, offsets, extents, list(gradients))
        return None, None, None, None
