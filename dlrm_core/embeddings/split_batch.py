"""Batches whose lookups are sorted by where their table lies (:mod:`dlrm_core.placement`).

Divided on the host before anything is copied, lookups of tables on the host never cross.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dlrm_core.data.batch import Batch
from dlrm_core.placement import Placement


@dataclass(frozen=True)
class SplitBatch(Batch):
    """A batch whose lookups are those of the GPU's tables.

    The host's are in ``host``, and stay there when the batch moves to a device.
    """

    host: Batch | None = None


def divide(batch: Batch, placement: Placement) -> SplitBatch:
    """A batch of all tables, its lookups sorted by the side of their table."""
    if isinstance(batch, SplitBatch):
        return batch
    gpu = _lookups(batch, placement.on_gpu)
    host = _lookups(batch, placement.on_host)
    if host.indices.device.type != "cpu":
        host = host.to(torch.device("cpu"))
    return SplitBatch(gpu.dense, gpu.indices, gpu.offsets, gpu.table_starts, gpu.targets, host=host)


def _lookups(batch: Batch, ids: Sequence[int]) -> Batch:
    """The same samples with the lookups of some tables only."""
    pieces = [batch.table_indices(t) for t in ids]
    starts = [0, *itertools.accumulate(len(piece) for piece in pieces)]
    indices = torch.cat(pieces) if pieces else batch.indices[:0]
    return Batch(batch.dense, indices, batch.offsets[list(ids)], tuple(starts), batch.targets)


class BatchSource(Protocol):
    """Anything that makes batches."""

    def next_batch(self) -> Batch:
        """The next batch of the stream."""


class Divided:
    """A stream of batches, each divided by where its tables lie, before any is copied."""

    def __init__(self, source: BatchSource, placement: Placement) -> None:
        self._source, self._placement = source, placement

    def next_batch(self) -> Batch:
        """The next batch of the stream."""
        return divide(self._source.next_batch(), self._placement)


def divided(source: BatchSource, placement: Placement) -> BatchSource:
    """The stream as the tables' places want it: itself where all lie in one."""
    return Divided(source, placement) if placement.split else source
