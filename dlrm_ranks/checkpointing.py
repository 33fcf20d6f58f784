"""Checkpoints of a run on several ranks: the files of one process, whatever wrote them.

Tables go between ranks and files a few rows at a time, in the single process's format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlrm_core.config import Parameters
from dlrm_core.model import fill_dense
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_core.run.checkpoint import OPTIMIZER, WEIGHTS, Checkpoint, CheckpointFolder
from dlrm_core.run.resume import make_room, optimizer_state, weights_of
from dlrm_core.run.tensor_files import row_ranges
from dlrm_ranks.collectives import Collectives
from dlrm_ranks.plan import Shard
from dlrm_ranks.step import DistributedStep
from dlrm_ranks.tables import ShardedTables
from dlrm_ranks.world import World, gathered

Held = Sequence[tuple[Shard, torch.Tensor]]
"""This rank's shards and their memory."""


def table_name(table: int) -> str:
    """The name of a table's weight in a model of one process."""
    return f"embeddings.tables.{table}.weight"


class SharedTensor:
    """A tensor of the files that lies on many ranks: a table's weight, or its Adagrad sums.

    All ranks read it at the same time, the same rows one after the other: rank 0, which writes
    the files, has the rows then, and the other ranks have sent what they hold of them.

    Args:
        shape: (R, d), or (R,) for a number a row.
        sources: the shards that it is read from, on all ranks; of a replicated table rank 0's.
        held: this rank's shards and their memory.
    """

    dtype = torch.float32

    def __init__(
        self,
        shape: tuple[int, ...],
        sources: Sequence[Shard],
        held: Mapping[Shard, torch.Tensor],
        world: World,
        collectives: Collectives,
    ) -> None:
        self.shape = shape
        self._sources, self._held = sources, held
        self._world, self._collectives = world, collectives

    def __getitem__(self, rows: slice) -> torch.Tensor:
        piece = torch.empty((rows.stop - rows.start, *self.shape[1:]))
        for shard in self._sources:
            begin = max(shard.first_row, rows.start)
            end = min(shard.first_row + shard.rows, rows.stop)
            is_ours = shard.rank == self._world.rank
            if begin >= end or not (is_ours or self._world.first):
                continue
            place = piece[begin - rows.start : end - rows.start]
            if len(self.shape) > 1:
                place = place[:, shard.first_column : shard.first_column + shard.columns]
            if is_ours:
                rows_of_shard = self._held[shard][begin - shard.first_row : end - shard.first_row]
            else:
                rows_of_shard = torch.empty(place.shape, device=self._world.device)
                dist.recv(rows_of_shard, shard.rank)
            if self._world.first:
                place.copy_(rows_of_shard)
            else:
                dist.send(rows_of_shard.contiguous(), 0)
            self._collectives.note_progress()
        return piece


def shared_tensors(
    tables: ShardedTables, world: World, collectives: Collectives
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tables' weights and all their Adagrad sums (none with SGD) by name, in the files' order.

    The writer of files takes each in place of a tensor.
    """

    def all_tables(suffix: str, row_shape: tuple[int, ...], held: Held) -> dict[str, Any]:
        tensors = {}
        for table, rows in enumerate(tables.table_rows):
            sources = [
                shard
                for shard in tables.shards
                if shard.table == table and (shard.kind != "replicated" or shard.rank == 0)
            ]
            ours = {shard: memory for shard, memory in held if shard.table == table}
            tensors[table_name(table) + suffix] = SharedTensor(
                (rows, *row_shape), sources, ours, world, collectives
            )
        return tensors

    weights = all_tables("", (tables.dim,), tables.local)
    kind = OPTIMIZERS[tables.optimizer]
    if not kind.row_state(tables.dim):
        return weights, {}
    row_shape = () if kind.per_row else (tables.dim,)
    return weights, all_tables(".sum", row_shape, tables.sums)


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
    weights, sums = shared_tensors(step.tables, world, collectives)
    there = folder.folder / f"step-{done:08d}" if folder is not None else None
    if gathered(world, there is not None and there.exists())[0]:
        return there
    if folder is None:
        for tensor in [*weights.values(), *sums.values()]:
            for rows in row_ranges(tensor.shape, tensor.dtype.itemsize):
                tensor[rows.start : rows.stop]
        return None
    dense_state, _ = optimizer_state(step)
    return folder.save(done, sections, weights | weights_of(step.model), sums | dense_state, state)


def filled_step(
    parameters: Parameters,
    world: World,
    collectives: Collectives,
    checkpoint: Checkpoint | None,
    weights_only: bool = False,
) -> DistributedStep:
    """A rank's part of the model with a checkpoint's weights, or the initial ones of one process.

    Raises:
        InputError: the tables cannot be divided, or the checkpoint is corrupted.
    """
    step = DistributedStep(parameters, world, collectives)
    if checkpoint is not None:
        restore(checkpoint, step, world, collectives, weights_only)
        return step
    seed = parameters.training.seed
    if parameters.model.init == "facebook":
        random = np.random.RandomState(seed)
        step.tables.fill_like_facebook(random)
        fill_dense(step.model, random)
    else:
        device = step.model.device
        generator = torch.Generator(device).manual_seed(seed)
        step.tables.fill_with_torch(generator)
        fill_dense(step.model, generator)
    return step


def restore(
    checkpoint: Checkpoint,
    step: DistributedStep,
    world: World,
    collectives: Collectives,
    weights_only: bool = False,
) -> None:
    """Fill this rank's weights and sums; all ranks together check every byte of the files.

    Args:
        weights_only: for predictions: no optimiser's state is read.

    Raises:
        InputError: a file is corrupted, or of another optimiser.
    """
    weights, sums = shared_tensors(step.tables, world, collectives)
    files = {WEIGHTS: (weights_of(step.model), weights, "", step.tables.local)}
    if not weights_only:
        step.dense.precision.skipped = int(checkpoint.state["skipped_steps"])
        files[OPTIMIZER] = make_room(step, checkpoint), sums, ".sum", step.tables.sums
    for group, (dense, shared, suffix, held) in files.items():
        checkpoint.require_same_tensors(group, {**shared, **dense})
        stored = checkpoint.tensors[group]
        # each rank checks some of the tables, all read the dense part
        checked = dict.fromkeys(sorted(shared)[world.rank :: world.size])
        for name, target in {**dense, **checked}.items():
            stored[name].check(target)
        for shard, memory in held:
            source = stored[table_name(shard.table) + suffix]
            columns = slice(shard.first_column, shard.first_column + shard.columns)
            for rows in row_ranges(tuple(memory.shape), memory.itemsize):
                first, last = (shard.first_row + row for row in (rows.start, rows.stop))
                piece = source.read(range(first, last))
                with torch.no_grad():
                    memory[rows.start : rows.stop] = piece[:, columns] if piece.dim() > 1 else piece
                collectives.note_progress()
