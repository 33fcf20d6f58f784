"""Tables between ranks and checkpoints: a few rows at a time, in the single process's format.

Writing, rank 0 walks through all tensors in the order of the file, rows by rows; the ranks
that hold a piece send it as it comes up (:class:`Gathered`, :func:`send_pieces`), so nothing
is held twice. Reading, each rank takes its own rows and columns from the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_core.checkpoint_files import read_part, row_ranges
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.plan import Shard
from dlrm_core.distributed.world import World

Held = Sequence[tuple[Shard, torch.Tensor]]
"""This rank's shards and their memory."""


class Gathered:
    """A table (or its optimiser's sums) that lies on many ranks, as the writer of files sees it.

    Only rank 0 has one, and reads it once from the first row to the last; meanwhile every
    other rank is in :func:`send_pieces` for the same table.

    Args:
        shape: (R, d), or (R,) for a number a row.
        shards: of this table, on all ranks; of a replicated one rank 0's is read.
        held: rank 0's own.
    """

    dtype = torch.float32

    def __init__(
        self,
        shape: tuple[int, ...],
        shards: Sequence[Shard],
        held: Held,
        world: World,
        collectives: Collectives,
    ) -> None:
        self.shape = shape
        self._shards = _sources(shards)
        self._held = {shard: memory for shard, memory in held}
        self._world = world
        self._collectives = collectives

    def numel(self) -> int:
        """Numbers in all."""
        return torch.Size(self.shape).numel()

    def element_size(self) -> int:
        """Bytes of one."""
        return 4

    def dim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def detach(self) -> Gathered:
        """Itself: it is in no graph."""
        return self

    def __getitem__(self, rows: slice) -> torch.Tensor:
        piece = torch.empty((rows.stop - rows.start, *self.shape[1:]))
        for shard in self._shards:
            begin, end = _overlap(shard, rows)
            if begin >= end:
                continue
            place = piece[begin - rows.start : end - rows.start]
            if len(self.shape) > 1:
                place = place[:, shard.first_column : shard.first_column + shard.columns]
            if shard.rank == self._world.rank:
                own = self._held[shard]
                place.copy_(own[begin - shard.first_row : end - shard.first_row])
            else:
                arrived = torch.empty(place.shape, device=self._world.device)
                dist.recv(arrived, shard.rank)
                place.copy_(arrived)
            self._collectives.note_progress()
        return piece


def send_pieces(
    shape: tuple[int, ...],
    shards: Sequence[Shard],
    held: Held,
    world: World,
    collectives: Collectives,
) -> None:
    """Send rank 0 what this rank holds of a table, as its :class:`Gathered` asks for it."""
    mine = {shard: memory for shard, memory in held}
    for rows in row_ranges(shape, 4):
        for shard in _sources(shards):
            begin, end = _overlap(shard, rows)
            if shard.rank != world.rank or begin >= end:
                continue
            own = mine[shard][begin - shard.first_row : end - shard.first_row]
            dist.send(own.contiguous(), 0)
            collectives.note_progress()


def read_shards(
    path: Path, record: Mapping[str, Any], suffix: str, held: Held, collectives: Collectives
) -> None:
    """Fill this rank's shards from a checkpoint's file.

    Args:
        record: of the file, in the manifest.
        suffix: of the tensors' names behind the weight's: '' or '.sum'.

    Raises:
        InputError: the file is not what was written.
    """
    for shard, memory in held:
        name = table_name(shard.table) + suffix
        columns = range(shard.first_column, shard.first_column + shard.columns)
        for rows in row_ranges((shard.rows, *memory.shape[1:]), 4):
            read_part(
                path,
                record,
                name,
                memory[rows.start : rows.stop],
                range(shard.first_row + rows.start, shard.first_row + rows.stop),
                columns if memory.dim() > 1 else None,
            )
            collectives.note_progress()


def table_name(table: int) -> str:
    """The name of a table's weight in a model of one process."""
    return f"embeddings.tables.{table}.weight"


def _sources(shards: Sequence[Shard]) -> list[Shard]:
    """The shards that a table is read from: of a replicated one rank 0's."""
    return [shard for shard in shards if shard.kind != "replicated" or shard.rank == 0]


def _overlap(shard: Shard, rows: slice | range) -> tuple[int, int]:
    return max(shard.first_row, rows.start), min(shard.first_row + shard.rows, rows.stop)
