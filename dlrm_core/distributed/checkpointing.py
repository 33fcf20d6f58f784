"""Checkpoints of a run on several ranks: the files of one process, whatever wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from dlrm_core.checkpoint_files import read_tensors, row_ranges
from dlrm_core.checkpoints import OPTIMIZER, WEIGHTS, Checkpoint, CheckpointFolder
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.pieces import Gathered, Held, read_shards, send_pieces, table_name
from dlrm_core.distributed.step import DistributedStep
from dlrm_core.distributed.tables import ShardedTables
from dlrm_core.distributed.world import World, agreed
from dlrm_core.errors import InputError
from dlrm_core.learner_state import make_room, optimizer_state, weights_of

Stored = tuple[str, tuple[int, ...], Held]
"""Name and shape of a tensor that lies on the ranks, and this rank's part of it."""

__all__ = ["restore", "row_ranges", "save", "sharded_sums", "sharded_weights"]


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
