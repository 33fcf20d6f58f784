"""What a batch must be before its addresses go to machine code."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from dlrm_core.data.batch import Batch
from dlrm_core.errors import InputError

NO_FAULT, BAD_INDEX, BAD_OFFSET = 0, 1, 2
"""What a forward kernel notes of a batch that it refuses."""


def check_batch(batch: Batch, tables: int) -> None:
    """Refuse what the kernels would misread.

    Raises:
        InputError: naming the tensor, and what was found and expected.
    """
    for name, tensor in (("indices", batch.indices), ("offsets", batch.offsets)):
        if tensor.dtype != torch.int64 or tensor.device.type != "cpu":
            raise InputError(
                f"batch.{name} is {tensor.dtype} on {tensor.device}, expected torch.int64 on cpu"
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
        return (
            f"embedding table {table} has {int(rows[table]):,} rows, but lookup "
            f"{place - batch.table_starts[table]} of the batch asks for row "
            f"{int(batch.indices[place])}, expected 0 to {int(rows[table]) - 1}"
        )
    table, bag = divmod(place, batch.offsets.shape[1])
    size = batch.table_starts[table + 1] - batch.table_starts[table]
    return (
        f"batch.offsets of embedding table {table} is {int(batch.offsets[table, bag])} at sample "
        f"{bag}, expected offsets that begin with 0, do not fall and stay below or at its "
        f"{size} lookups"
    )


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient (B, d) whose rows are float32, each without gaps."""
    if gradient.dtype != torch.float32 or (gradient.shape[1] > 1 and gradient.stride(1) != 1):
        return gradient.to(torch.float32).contiguous()
    return gradient
