"""One rank's training: the single process's loop, its decisions taken together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlrm_core.checkpoints import Checkpoint
from dlrm_core.config import Parameters
from dlrm_core.data import Batch
from dlrm_core.data.loader import make_generator
from dlrm_core.distributed.checkpointing import restore, save
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.local_batch import LocalBatch, local_batch
from dlrm_core.distributed.plan import describe
from dlrm_core.distributed.step import DistributedStep, config_of_rank
from dlrm_core.distributed.tables import ShardedTables
from dlrm_core.distributed.watch import Watch
from dlrm_core.distributed.world import World, agreed, gathered
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.evaluation import Evaluation, evaluate_by
from dlrm_core.model import (
    DLRM,
    ClickLoss,
    fill_dense_like_facebook,
    fill_dense_with_torch,
)
from dlrm_core.parts import part
from dlrm_core.training_host import StopRequest, stop_requests
from dlrm_core.training_loop import STOPPING, TrainingLoop, prepare

REPEATED_S = 2.0
"""A second signal within this time is the first once more: Ctrl-C reaches a rank from the
terminal and from torchrun."""

_HOST = torch.device("cpu")


class DistributedTrainer(TrainingLoop[DistributedStep]):
    """One rank's part of the model, its slice of the data, and its step.

    Every rank makes the whole global batch and takes its slice, so data and weights are
    those of one process with the same seed. A signal to any rank ends all of them after the
    same iteration.

    Args:
        place: folder for checkpoints; rank 0 writes them.
        watch: told which iteration is done; None: nobody watches.
    """

    ends_alone = False

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        collectives: Collectives,
        checkpoint: Checkpoint | None = None,
        place: Path | None = None,
        watch: Watch | None = None,
    ) -> None:
        config, left_out = config_of_rank(parameters.training)
        self.world, self._collectives, self._watch = world, collectives, watch
        notices = left_out + prepare(parameters, world.device, checkpoint, config)
        model = make_model(parameters, world.device)
        self.tables = ShardedTables(parameters, world, collectives)
        loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(world.device)
        step = DistributedStep(model, self.tables, loss, config, world.size, collectives)
        if checkpoint is None:
            fill(model, self.tables, parameters)
        else:
            restore(checkpoint, step, world, collectives)
        super().__init__(
            parameters,
            step,
            loss,
            world.device,
            notices + step.dense.notices,
            make_generator(parameters, _HOST),
            checkpoint,
            place,
            writes=world.first,
            made_on=_HOST,
        )
        self.embedding_backend = "torchrec"
        self._stops = 0.0

    def holdings(self) -> list[str]:
        """A line a rank: who it is, and which tables it has; every rank must ask."""
        own = f"host {self.world.host}, process {os.getpid()}"
        return describe(self.tables.shards, gathered(self.world, own))

    def next_batch(self) -> LocalBatch:
        """This rank's slice of the next global batch."""
        return data_forward(self.batches, self.world, self.parameters.model.table_rows)

    def learn(self, batch: LocalBatch) -> torch.Tensor:
        """Train on a slice; the loss of the global batch."""
        loss, stops = self.step(batch, self._stop.requested)
        self._stops = float(stops)
        return loss

    def iterate(self) -> torch.Tensor:
        """One iteration, data included; the loss of the global batch."""
        loss = super().iterate()
        if self._watch is not None:
            self._watch.iteration = self.done
        return loss

    def stop_requests(self) -> AbstractContextManager[StopRequest]:
        """What notes signals while the loop runs, for the next exchange."""
        said = f"{STOPPING}, with a checkpoint" if self.writes_checkpoints else STOPPING
        return stop_requests(True, said if self.world.first else "", REPEATED_S)

    def is_to_stop(self) -> bool:
        """Whether any rank was asked to stop before the iteration just done."""
        return bool(self._stops)

    def evaluate(self) -> Evaluation:
        """Predictions on the held-out data; every rank predicts its slice and has the result."""
        return evaluate_by(
            self.predict,
            self.loss,
            self.held_out,
            _HOST,
            self.done,
            # the clocks differ, and what follows must not
            agree=lambda seconds: agreed(self.world, seconds),
        )

    def predict(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) of a whole batch, on every rank; all must ask."""
        size = self.world.size
        own = local_batch(padded(batch, size), self.world, self.parameters.model.table_rows)
        predictions = self.step.predict(own)
        parts = [torch.empty_like(predictions) for _ in range(size)]
        dist.all_gather(parts, predictions)
        return torch.cat(parts)[: batch.size]

    def write_checkpoint(self, state: Mapping[str, Any]) -> Path | None:
        """Write what all ranks hold; its folder, on rank 0."""
        sections = self.parameters.to_sections()
        written = save(
            self._folder, self.done, sections, self.step, state, self.world, self._collectives
        )
        dist.barrier()
        return written


def make_model(parameters: Parameters, device: torch.device) -> DLRM:
    """MLPs and interaction; tables are elsewhere."""
    dim = parameters.model.embedding_dim
    return DLRM(parameters.model, make_tables=lambda: EmbeddingTables([], dim)).to(device)


def fill(model: DLRM, tables: ShardedTables, parameters: Parameters) -> None:
    """Initial weights, the ones that one process has."""
    seed = parameters.training.seed
    if parameters.model.init == "facebook":
        random = np.random.RandomState(seed)
        tables.fill_like_facebook(random)
        fill_dense_like_facebook(model, random)
        return
    device = model.top_mlp.linears[0].weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tables.fill_with_torch(generator)
    fill_dense_with_torch(model, generator)


@part("data", "forward")
def data_forward(stream: Iterator[Batch], world: World, table_rows: tuple[int, ...]) -> LocalBatch:
    """The next global batch, made or waited for, and this rank's slice of it."""
    return local_batch(next(stream), world, table_rows)


def padded(batch: Batch, ranks: int) -> Batch:
    """The batch, its last sample repeated until the ranks can share it evenly."""
    missing = -batch.size % ranks
    if not missing:
        return batch
    indices, offsets, starts = [], [], [0]
    for t in range(batch.tables):
        own, begins = batch.table_indices(t), batch.offsets[t]
        last = own[int(begins[-1]) :]
        indices.append(torch.cat([own, *[last] * missing]))
        more = own.numel() + last.numel() * torch.arange(missing)
        offsets.append(torch.cat([begins, more]))
        starts.append(starts[-1] + indices[-1].numel())
    return Batch(
        torch.cat([batch.dense, *[batch.dense[-1:]] * missing]),
        torch.cat(indices),
        torch.stack(offsets),
        tuple(starts),
        torch.cat([batch.targets, *[batch.targets[-1:]] * missing]),
    )
