"""Checkpoints of a run on several ranks: the files of one process, whatever wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from dlrm_core.checkpoint import (
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    CheckpointFolder,
    read_part,
    read_tensors,
    row_ranges,
)
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.plan import Shard
from dlrm_core.distributed.step import DistributedStep
from dlrm_core.distributed.tables import ShardedTables
from dlrm_core.distributed.world import World, agreed
from dlrm_core.errors import InputError
from dlrm_core.resume import make_room, optimizer_state, weights_of

# Tables between ranks and checkpoints: a few rows at a time, in the single process's format.

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


Stored = tuple[str, tuple[int, ...], Held]
"""Name and shape of a tensor that lies on the ranks, and this rank's part of it."""


def sharded_weights(tables: ShardedTables, table_rows: Sequence[int], dim: int) -> list[Stored]:
    """All tables' weights, in the order of the file."""
    return [
        (table_name(t), (rows, dim), [held for held in tables.local if held[0].table == t])
        for t, rows in enumerate(table_rows)
    ]


def sharded_sums(
    tables: ShardedTables, table_rows: Sequence[int], dim: int, optimizer: str
) -> list[Stored]:
    """All tables' Adagrad sums; none with SGD."""
    if optimizer == "sgd":
        return []
    return [
        (
            f"{table_name(t)}.sum",
            (rows,) if optimizer == "rowwise_adagrad" else (rows, dim),
            [held for held in tables.sums if held[0].table == t],
        )
        for t, rows in enumerate(table_rows)
    ]


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

    Returns:
        the checkpoint's folder on rank 0.

    Raises:
        InputError: on rank 0, if it cannot be written; the ones before it stay.
    """
    model, training = sections["model"], sections["training"]
    tables = step.tables
    weights = sharded_weights(tables, model["table_rows"], model["embedding_dim"])
    sums = sharded_sums(tables, model["table_rows"], model["embedding_dim"], training["optimizer"])
    exists = folder is not None and (folder.folder / f"step-{done:08d}").exists()
    if agreed(world, float(exists)):
        return folder.folder / f"step-{done:08d}" if folder is not None else None
    if folder is None:
        for name, shape, held in [*weights, *sums]:
            table = int(name.split(".")[2])
            shards = [shard for shard in tables.shards if shard.table == table]
            send_pieces(shape, shards, held, world, collectives)
        return None

    def gathered(stored: list[Stored]) -> dict[str, torch.Tensor]:
        found: dict[str, Gathered] = {}
        for name, shape, held in stored:
            table = int(name.split(".")[2])
            shards = [shard for shard in tables.shards if shard.table == table]
            found[name] = Gathered(shape, shards, held, world, collectives)
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
    dense = weights_of(step.model)
    targets = {WEIGHTS: dense}
    held = {WEIGHTS: ("", step.tables.local)}
    saved = checkpoint.shapes(OPTIMIZER)
    if OPTIMIZER in checkpoint.files:
        own = make_room(step, saved, checkpoint.state["counts"])
        targets[OPTIMIZER] = own
        held[OPTIMIZER] = (".sum", step.tables.sums)
    for file, tensors in targets.items():
        path, record = checkpoint.folder / file, checkpoint.files[file]
        shapes = checkpoint.shapes(file)
        for name in tensors.keys() - shapes.keys():
            raise InputError(f"{path}: does not hold {name}, which this run has")
        # each rank checks some of the tables, all read the dense part
        others = sorted(shapes.keys() - tensors.keys())
        checked = dict.fromkeys(others[world.rank :: world.size])
        read_tensors(path, record, {**tensors, **checked})
        suffix, shards = held[file]
        for shard, _ in shards:
            if table_name(shard.table) + suffix not in shapes:
                raise InputError(
                    f"{path}: does not hold {table_name(shard.table) + suffix}, which this run has"
                )
        read_shards(path, record, suffix, shards, collectives)
