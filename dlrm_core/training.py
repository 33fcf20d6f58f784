"""Training by one process: its model, wherever its tables lie, and its data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dlrm_core.capacity import require_memory
from dlrm_core.checkpoints import Checkpoint
from dlrm_core.config import Parameters
from dlrm_core.data import Batch
from dlrm_core.data.loader import make_generator
from dlrm_core.embeddings.choose import resolve
from dlrm_core.embeddings.host_tables import Places
from dlrm_core.embeddings.split_batch import divided
from dlrm_core.errors import InputError
from dlrm_core.evaluation import Evaluation, evaluate
from dlrm_core.files import write_json
from dlrm_core.learner_state import optimizer_state, weights_of
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.resuming import (
    checkpoint_place,
    checkpoint_to_resume,
    restore_step,
    restore_weights,
    with_backend_of,
)
from dlrm_core.step import TrainingStep, data_forward, transfer_forward
from dlrm_core.training_host import device_name, resolve_device
from dlrm_core.training_loop import (
    TrainingLoop,
    json_line,
    metrics_lines,
    prepare,
    train_with_reports,
)
from dlrm_core.training_results import Interval, TrainingResult
from dlrm_core.training_run import Line


class Trainer(TrainingLoop[TrainingStep]):
    """A model, its data and its step, ready to iterate.

    Args:
        checkpoint: to go on from, in place of initial weights.
        place: folder for checkpoints; None: none are written.

    Raises:
        InputError: the device is not there, the run does not fit in its memory, or a
            checkpoint does not fit the run.
    """

    def __init__(
        self,
        parameters: Parameters,
        checkpoint: Checkpoint | None = None,
        place: Path | None = None,
    ) -> None:
        config = parameters.training
        device = resolve_device(config)
        require_memory(parameters, device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if checkpoint is not None:
            parameters = with_backend_of(checkpoint, parameters)
        notices = prepare(parameters, device, checkpoint)
        self.places = places = Places(parameters, device)
        notices += places.notices
        seed = config.seed if checkpoint is None else None
        huge_pages = config.embedding_backend != "torch"
        model = build_model(parameters.model, seed, device, huge_pages, places.make_tables)
        if checkpoint is not None:
            restore_weights(checkpoint, model)
        places.settle()
        loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(device)
        parameters, more = resolve(parameters, device, model.embeddings)
        step = TrainingStep(model, loss, parameters.training)
        notices += more + step.dense.notices
        notices += getattr(model.embeddings.backend, "notices", [])
        if checkpoint is not None:
            restore_step(checkpoint, step)
        super().__init__(
            parameters,
            step,
            loss,
            device,
            notices,
            make_generator(parameters, device),
            checkpoint,
            place,
            divide=lambda source: divided(source, places.placement),
        )
        # with data made on the device there is nothing to copy
        self._transfers = device.type == "cuda" and parameters.data.place == "cpu"

    def next_batch(self) -> Batch:
        """The next batch, made or waited for."""
        return data_forward(self.batches)

    def learn(self, batch: Batch) -> torch.Tensor:
        """Train on a batch; its loss, not waited for."""
        return self.step(transfer_forward(batch, self.device) if self._transfers else batch)

    def evaluate(self) -> Evaluation:
        """Predictions on the held-out data, with the weights as they are."""
        precision = self.step.dense.precision
        return evaluate(self.model, self.loss, self.held_out, precision, self.device, self.done)

    def write_checkpoint(self, state: Mapping[str, Any]) -> Path:
        """Write the weights and all state; only with a folder for them."""
        assert self._folder is not None
        return self._folder.save(
            self.done,
            self.parameters.to_sections(),
            weights_of(self.model),
            optimizer_state(self.step)[0],
            state,
        )

    def close(self) -> None:
        """End the prefetching thread, if there is one, and let go of all files."""
        super().close()
        self.places.close()


def train(
    parameters: Parameters,
    folder: Path | None = None,
    on_interval: Callable[[Interval], None] = lambda interval: None,
    progress: bool = True,
    on_iteration: Callable[[int], None] = lambda iteration: None,
    on_line: Callable[[Line], None] = lambda line: None,
) -> TrainingResult:
    """Train as the parameters say, from the beginning or from a checkpoint.

    Args:
        folder: gets ``metrics.jsonl`` (a line per interval, evaluation and checkpoint,
            written as it happens), ``result.json`` (written whole, at the end) and
            checkpoints where no other place is given for them.
        on_interval: called with each interval.
        progress: show a progress bar.
        on_iteration: called with the number of iterations done, 0 before the first.
        on_line: called with each evaluation and checkpoint, as metrics.jsonl has them.

    Raises:
        InputError: the device is not there, the run does not fit in memory, the folder
            cannot be written, or the checkpoint cannot be resumed.
    """
    with contextlib.ExitStack() as stack:
        place = checkpoint_place(parameters.training, folder)
        checkpoint = checkpoint_to_resume(parameters, place)
        lines = None
        if folder is not None:
            lines = stack.enter_context(metrics_lines(folder / "metrics.jsonl", checkpoint))
        trainer = Trainer(parameters, checkpoint, place)
        stack.callback(trainer.close)
        result = train_with_reports(trainer, lines, on_interval, on_iteration, on_line, progress)
    if folder is not None:
        write_json(folder / "result.json", asdict(result))
    return result


__all__ = [
    "Evaluation",
    "InputError",
    "Interval",
    "Trainer",
    "TrainingResult",
    "device_name",
    "json_line",
    "resolve_device",
    "train",
]
