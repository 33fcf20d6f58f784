"""A model for predictions, as ``dlrm evaluate`` and ``dlrm infer`` use it: no state of training.

:class:`Predictor` is one process's; :class:`dlrm_ranks.predictor.RankPredictor` is one
rank's, which holds its part of the tables only.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlrm_core.base.machine import device_name
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import attach
from dlrm_core.model import ClickLoss
from dlrm_core.precision import DensePrecision
from dlrm_core.run.checkpoint import Checkpoint, find_checkpoint, read_checkpoint
from dlrm_core.run.evaluate import Evaluation, HeldOut, evaluate, predict
from dlrm_core.run.resume import require_same_model, with_choices_of
from dlrm_core.train import prepare_model


@dataclasses.dataclass(frozen=True)
class Asked:
    """The model that ``--file``, ``-p`` and ``--checkpoint`` ask to predict with.

    Without a checkpoint it has initial weights; ``notices`` are what a reader must know of them.
    """

    parameters: Parameters
    checkpoint: Checkpoint | None
    notices: list[str]


def read_asked(arguments: argparse.Namespace) -> Asked:
    """The parameters and the checkpoint of a command line, without an optimiser's state.

    Raises InputError if the checkpoint is corrupted or of another model.
    """
    parameters = load_parameters(arguments.file, arguments.parameter)
    checkpoint, notices = None, []
    if arguments.checkpoint:
        place = parameters.training.checkpoint_folder
        folder = find_checkpoint(arguments.checkpoint, Path(place) if place else None)
        checkpoint = read_checkpoint(folder)
        require_same_model(parameters.model, checkpoint)
        parameters = with_choices_of(checkpoint, parameters)
    else:
        notices.append("no --checkpoint was given: these are the model's initial weights")
    # nothing is updated: no optimiser's state is to take memory
    return Asked(parameters.with_training(optimizer="sgd"), checkpoint, notices)


class Predictor:
    """The model asked for, in this process, with room for the ``largest_batch`` if one is given.

    ``device`` is where batches are to lie; the process that ``prints`` says what was found. Raises
    InputError if the checkpoint is corrupted or of another model, or there is no room.
    """

    prints = True

    def __init__(self, asked: Asked, largest_batch: int = 0) -> None:
        self.checkpoint = asked.checkpoint
        self.parameters, model, self._divide, notices = prepare_model(
            asked.parameters, self.checkpoint, largest_batch
        )
        self._model, self.device = model.eval(), model.device
        attach(model.embeddings, self.parameters.training)
        self._precision = DensePrecision(self.parameters.training, self.device)
        self.notices = asked.notices + notices + self._precision.notices
        self.notices += getattr(model.embeddings.backend, "notices", [])
        self.loss: nn.Module = ClickLoss.of(self.parameters.model).to(self.device)

    def predict(self, batch: Batch) -> torch.Tensor:
        return predict(self._model, batch, self._precision)

    def evaluate(self, on_batch: Callable[[int], None]) -> Evaluation:
        """Predict the test data; ``on_batch`` is called with the samples of each batch."""
        held_out = HeldOut(self.parameters, self.device, self._divide)
        return evaluate(self.predict, self.loss, held_out, self.device, self.iteration, on_batch)

    def agree(self, seconds: float) -> float:
        return seconds

    @property
    def iteration(self) -> int:
        """Iterations of training behind the weights."""
        return self.checkpoint.step if self.checkpoint else 0

    def facts(self, notices: list[str]) -> dict[str, Any]:
        """The last line's facts about the model; its notices, and those given, are printed."""
        notices = self.notices + notices
        for notice in notices if self.prints else ():
            print(notice, file=sys.stderr)
        return {
            "iteration": self.iteration,
            "checkpoint": str(self.checkpoint.folder) if self.checkpoint else None,
            "precision": self.parameters.training.precision,
            "embedding_backend": self.parameters.training.embedding_backend,
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "notices": notices,
        }
