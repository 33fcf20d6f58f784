"""Checkpoints of a run on several ranks: the files of one process, whatever wrote them.

Tables go between ranks and files a few rows at a time, in the single process's format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from dlrm_core.checkpoint import (
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    CheckpointFolder,
)
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.plan import Shard
from dlrm_core.distributed.step import DistributedStep
from dlrm_core.distributed.tables import ShardedTables
from dlrm_core.distributed.world import World, agreed
from dlrm_core.errors import InputError
from dlrm_core.resume import make_room, optimizer_state, weights_of
from dlrm_core.tensor_files import read_part, read_tensors, row_ranges

Held = Sequence[tuple[Shard, torch.Tensor]]
"""This rank's shards and their memory."""


@dataclass(frozen=True)
class StoredTable:
    """A tensor of the files that lies on many ranks: a table's weight, or its Adagrad sums.

    Attributes:
        name: in a model of one process.
        shape: (R, d), or (R,) for a number a row.
        sources: the shards that it is read from, on all ranks; of a replicated table rank 0's.
        held: this rank's shards and their memory.
    """

    name: str
    shape: tuple[int, ...]
    sources: Sequence[Shard]
    held: Mapping[Shard, torch.Tensor]


def table_name(table: int) -> str:
    """The name of a table's weight in a model of one process."""
    return f"embeddings.tables.{table}.weight"


def stored_tables(tables: ShardedTables) -> tuple[list[StoredTable], list[StoredTable]]:
    """All tables' weights and all their Adagrad sums (none with SGD), in the files' order."""

    def all_tables(suffix: str, row_shape: tuple[int, ...], held: Held) -> list[StoredTable]:
        return [
            StoredTable(
                table_name(table) + suffix,
                (rows, *row_shape),
                [
                    shard
                    for shard in tables.shards
                    if shard.table == table and (shard.kind != "replicated" or shard.rank == 0)
                ],
                {shard: memory for shard, memory in held if shard.table == table},
            )
            for table, rows in enumerate(tables.table_rows)
        ]

    weights = all_tables("", (tables.dim,), tables.local)
    if tables.optimizer == "sgd":
        return weights, []
    a_row = () if tables.optimizer == "rowwise_adagrad" else (tables.dim,)
    return weights, all_tables(".sum", a_row, tables.sums)


class Gathered:
    """A table that lies on many ranks, as the writer of files sees it.

    Only rank 0 has one, and reads it once from the first row to the last; meanwhile every
    other rank is in :func:`send_pieces` for the same table.
    """

    dtype = torch.float32

    def __init__(self, stored: StoredTable, world: World, collectives: Collectives) -> None:
        self.shape = stored.shape
        self._stored = stored
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
        for shard in self._stored.sources:
            begin, end = _overlap(shard, rows)
            if begin >= end:
                continue
            place = piece[begin - rows.start : end - rows.start]
            if len(self.shape) > 1:
                place = place[:, shard.first_column : shard.first_column + shard.columns]
            if shard.rank == self._world.rank:
                own = self._stored.held[shard]
                place.copy_(own[begin - shard.first_row : end - shard.first_row])
            else:
                arrived = torch.empty(place.shape, device=self._world.device)
                dist.recv(arrived, shard.rank)
                place.copy_(arrived)
            self._collectives.note_progress()
        return piece


def send_pieces(stored: StoredTable, world: World, collectives: Collectives) -> None:
    """Send rank 0 what this rank holds of a table, as its :class:`Gathered` asks for it."""
    for rows in row_ranges(stored.shape, 4):
        for shard in stored.sources:
            begin, end = _overlap(shard, rows)
            if shard.rank != world.rank or begin >= end:
                continue
            own = stored.held[shard][begin - shard.first_row : end - shard.first_row]
            dist.send(own.contiguous(), 0)
            collectives.note_progress()


def _overlap(shard: Shard, rows: slice | range) -> tuple[int, int]:
    return max(shard.first_row, rows.start), min(shard.first_row + shard.rows, rows.stop)


def save(
    folder: CheckpointFolder | None,
    done: int,
    sections: Mapping[str, Any],
    step: DistributedStep,
    state: Mapping[str, Any],
    world: World,
    collectives: Collectives,
) -> Path | None:
    """Write a checkpoint; rank 0 does, the others send it what they hold.

    Args:
        folder: rank 0's.
        done: iterations.

    Returns:
        the checkpoint's folder on rank 0.

    Raises:
        InputError: on rank 0, if it cannot be written; the ones before it stay.
    """
    weights, sums = stored_tables(step.tables)
    there = folder.folder / f"step-{done:08d}" if folder is not None else None
    if agreed(world, float(there is not None and there.exists())):
        return there
    if folder is None:
        for stored in [*weights, *sums]:
            send_pieces(stored, world, collectives)
        return None

    def gathered(tables: list[StoredTable]) -> dict[str, torch.Tensor]:
        found = {stored.name: Gathered(stored, world, collectives) for stored in tables}
        # the writer of files reads a tensor by rows, as a Gathered can be read
        return cast(dict[str, torch.Tensor], found)

    dense_state, _ = optimizer_state(step)
    return folder.save(
        done,
        sections,
        gathered(weights) | weights_of(step.model),
        gathered(sums) | dense_state,
        state,
    )


def restore(
    checkpoint: Checkpoint, step: DistributedStep, world: World, collectives: Collectives
) -> None:
    """Fill this rank's weights and sums; all ranks together check every byte of the files.

    Raises:
        InputError: a file is corrupted, or of another optimiser.
    """
    files = {WEIGHTS: (weights_of(step.model), "", step.tables.local)}
    if OPTIMIZER in checkpoint.files:
        dense = make_room(step, checkpoint.shapes(OPTIMIZER), checkpoint.state["counts"])
        files[OPTIMIZER] = dense, ".sum", step.tables.sums
    for file, (dense, suffix, held) in files.items():
        path, record = checkpoint.folder / file, checkpoint.files[file]
        shapes = checkpoint.shapes(file)
        for name in [*dense, *(table_name(shard.table) + suffix for shard, _ in held)]:
            if name not in shapes:
                raise InputError(f"{path}: does not hold {name}, which this run has")
        # each rank checks some of the tables, all read the dense part
        others = sorted(shapes.keys() - dense.keys())
        checked = dict.fromkeys(others[world.rank :: world.size])
        read_tensors(path, record, {**dense, **checked})
        read_shards(path, record, suffix, held, collectives)


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
