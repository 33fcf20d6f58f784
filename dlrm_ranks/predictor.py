"""Predictions by all ranks: of one batch in slices, or of a batch on each rank.

Slices answer one batch as soon as can be, so latencies are theirs. An evaluation gives every
rank batches of its own: the dense part then multiplies matrices of one process's shapes, so a
score's bits are those of one process wherever the pooled vectors' are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from dlrm_core.base.machine import device_name
from dlrm_core.data.batch import Batch, Share
from dlrm_core.predict import Asked, Predictor
from dlrm_core.run.evaluate import Evaluation, HeldOut, evaluate
from dlrm_ranks.checkpointing import filled_step
from dlrm_ranks.collectives import Collectives
from dlrm_ranks.plan import require_shape, require_torchrec
from dlrm_ranks.step import DistributedStep
from dlrm_ranks.tables import about_rank, local_batch
from dlrm_ranks.watch import leave, watched_ranks
from dlrm_ranks.world import World, gathered

HOST = torch.device("cpu")
"""The device on which every rank's batches are made."""


class RankPredictions:
    """Predictions with a step's model, asked for by all ranks at once."""

    def __init__(self, step: DistributedStep, world: World) -> None:
        self._step, self._world = step, world

    def of_slices(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) of a batch that all ranks have, each predicting its slice."""
        share = Share(self._world.rank, self._world.size)
        room = -(-batch.size // share.ranks)
        slice_scores = self._predict(batch.part(*share.samples(batch.size)), room)
        padded = slice_scores.new_zeros(room, 1)
        padded[: len(slice_scores)] = slice_scores
        parts = [torch.empty_like(padded) for _ in range(share.ranks)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[: batch.size]

    def evaluate(
        self,
        batches: Iterable[Batch],
        room: int,
        loss: nn.Module,
        iteration: int,
        on_batch: Callable[[int], None] = lambda samples: None,
    ) -> Evaluation:
        """Predict batches of which each rank has its own; every rank has the result.

        Args:
            batches: this rank's, as many as the others'.
            room: samples of the largest batch.
            on_batch: called with the samples of each batch of any rank.
        """

        def together(own: torch.Tensor, targets: torch.Tensor) -> list[Any]:
            told = own.new_full((room, 3), -1.0)
            told[: len(own)] = torch.cat([own, targets, torch.ones_like(own)], dim=1)
            parts = [torch.empty_like(told) for _ in range(self._world.size)]
            dist.all_gather(parts, told)
            real = [part[part[:, 2] > 0] for part in parts]
            return [(part[:, :1].clone(), part[:, 1:2].clone()) for part in real if len(part)]

        return evaluate(
            lambda batch: self._predict(batch, room),
            loss,
            batches,
            HOST,
            iteration,
            on_batch,
            agree=self.agree,
            together=together,
        )

    def agree(self, seconds: float) -> float:
        """Rank 0's seconds: the clocks differ, and what follows must not."""
        return float(gathered(self._world, seconds)[0])

    def _predict(self, batch: Batch, room: int) -> torch.Tensor:
        """Click probability (b, 1) of this rank's samples, ``room`` at most on any rank."""
        rows = self._step.tables.table_rows
        return self._step.predict(local_batch(batch, self._world, rows, room))


class RankPredictor(Predictor):
    """One rank's part of the model asked for, without what training needs.

    Raises:
        InputError: the tables cannot be divided, or the checkpoint is corrupted.
    """

    def __init__(self, asked: Asked, world: World, collectives: Collectives) -> None:
        self.checkpoint, self.device, self.prints = asked.checkpoint, HOST, world.first
        self._world = world
        self._step = filled_step(asked.parameters, world, collectives, self.checkpoint, True)
        self.parameters = self._step.parameters
        self.notices = asked.notices + self._step.dense.notices
        self.loss = self._step.dense.loss
        self._predictions = RankPredictions(self._step, world)

    def predict(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) on the host of a batch that all ranks have; all must ask."""
        return self._predictions.of_slices(batch).cpu()

    def evaluate(self, on_batch: Callable[[int], None]) -> Evaluation:
        """Predict the test data, each rank every R-th batch; every rank has the result."""
        held_out = HeldOut(self.parameters, HOST, share=Share(self._world.rank, self._world.size))
        room = self.parameters.training.batch_size
        return self._predictions.evaluate(held_out, room, self.loss, self.iteration, on_batch)

    def agree(self, seconds: float) -> float:
        """Rank 0's seconds, of all who predict together."""
        return self._predictions.agree(seconds)

    def facts(self, notices: list[str]) -> dict[str, Any]:
        """The facts that one process gives, and what each rank holds; all must ask."""
        about = gathered(self._world, about_rank(self._world, self._step.tables))
        alone = {
            "embedding_backend": self._step.tables.backend,
            "device": device_name(self._world.device),
        }
        return super().facts(notices) | alone | {"ranks": about}


def run_as_rank(asked: Asked, command: str, work: Callable[[Predictor], int]) -> NoReturn:
    """Do a command's work with the other ranks, and end the process with its status.

    Args:
        command: as it is named in sentences.

    Raises:
        InputError: as :class:`RankPredictor`, or as ``work``.
    """
    require_torchrec()
    # of one process only: the planner places the tables
    parameters = asked.parameters.with_training(embeddings_on_gpu_bytes=None)
    asked = dataclasses.replace(asked, parameters=parameters)
    require_shape(parameters)
    with watched_ranks(parameters.training, command) as (world, collectives, _):
        status = work(RankPredictor(asked, world, collectives))
    leave(status)
