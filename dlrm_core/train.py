"""The training loop, and training by one process.

:class:`TrainingLoop` is what one process and each of several ranks do alike around their
steps; :class:`Trainer` is one process with its model, wherever its tables lie, and its data.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dlrm_core.base.engines import engine, find_engine, optional_engine
from dlrm_core.base.files import JsonLines, locked, write_json
from dlrm_core.base.machine import StopRequest, resolve_device, stop_requests, use_memory
from dlrm_core.config import Parameters
from dlrm_core.data.batch import WHOLE, Batch, Share
from dlrm_core.data.epochs import Epoch
from dlrm_core.data.loader import Followed, Generator, Resumable, batches, make_generator
from dlrm_core.dense import resolve_dense
from dlrm_core.embeddings import resolve_backend
from dlrm_core.mllog import MLPerfLog
from dlrm_core.model import DLRM, ClickLoss, build_model
from dlrm_core.parts import iteration
from dlrm_core.progress import Bar
from dlrm_core.run.checkpoint import Checkpoint, CheckpointFolder
from dlrm_core.run.evaluate import Evaluation, HeldOut, evaluate, predict
from dlrm_core.run.precision import set_fp32_products
from dlrm_core.run.reports import Line, Measurements, MeterOf, Run, TrainingResult, metrics_lines
from dlrm_core.run.resume import (
    changed_settings,
    checkpoint_place,
    checkpoint_to_resume,
    nothing_to_resume,
    optimizer_state,
    restore_position,
    restore_step,
    restore_weights,
    state_of,
    weights_of,
    with_choices_of,
)
from dlrm_core.run.schedules import evaluation_period, learning_rate, total_steps
from dlrm_core.step import Step, TrainingStep, data_forward, optimizer_update, transfer_forward

StepT = TypeVar("StepT", bound=Step)
T = TypeVar("T")

STOPPING = "ending after this iteration"

IMPORTING = threading.Lock()
"""Threads hold it while they import parts of torch beside the run: two at once may find halves."""


class TrainingLoop(abc.ABC, Generic[StepT]):
    """A step and its batches, ready to iterate; what a batch and a step are, subclasses say.

    Args:
        parameters: with every choice made.
        device: of the dense part.
        notices: what a reader must know of the run so far.
        generator: of batches, at its beginning; brought to where the checkpoint left it.
        checkpoint: that the step was restored from.
        place: folder for checkpoints; None: none are written.
        writes: whether this process is the one that writes them.
        made_on: where batches are made; ``device`` unless told.
        divide: what becomes of each batch before it is copied anywhere; None: nothing.
        share: which of the held-out batches this process predicts.

    Attributes:
        first: iterations behind the weights at the beginning: the checkpoint's.
        done: iterations done, ``first`` included.
        total: iterations at which :meth:`train` ends.
        epoch: how the samples of a pass are cut into batches.
        eval_every: iterations between evaluations; None: none but one at the end.
        embedding_backend: the one that is used.
        writes_checkpoints: whether there is a folder for them.
        checkpoint: folder of the newest, as far as this process knows.
    """

    ends_alone = True
    """Whether a second signal may end this process in the middle of an iteration, and the
    result still be had; where others wait for it, it is an error."""

    def __init__(
        self,
        parameters: Parameters,
        step: StepT,
        loss: nn.Module,
        device: torch.device,
        notices: list[str],
        generator: Generator,
        checkpoint: Checkpoint | None,
        place: Path | None,
        *,
        writes: bool = True,
        made_on: torch.device | None = None,
        divide: Callable[[Batch], Batch] | None = None,
        share: Share = WHOLE,
    ) -> None:
        config = parameters.training
        self.parameters, self.step, self.loss = parameters, step, loss
        self.device, self.notices = device, notices
        self.embedding_backend = config.embedding_backend
        if checkpoint is not None:
            restore_position(checkpoint, generator)
        else:
            self.notices = [*nothing_to_resume(config, place), *notices]
        self.done = self.first = checkpoint.step if checkpoint is not None else 0
        self.epoch: Epoch = getattr(generator, "epoch", Epoch(None, config.batch_size))
        source = parameters.data.generator
        self.total = total_steps(config, source, self.epoch)
        self.eval_every = evaluation_period(config, source, self.epoch)
        self._rate = config.learning_rate
        self._folder: CheckpointFolder | None = None
        self._followed: Followed | None = None
        self.checkpoint = checkpoint.folder if checkpoint is not None else None
        self.writes_checkpoints = place is not None
        if place is not None:
            if writes:
                self._folder = CheckpointFolder(place, config.keep_checkpoints, self.done)
            if isinstance(generator, Resumable):
                generator = self._followed = Followed(generator)
        place_of_data = made_on or device
        self.batches: Iterator[Batch] = batches(parameters, place_of_data, generator, divide)
        self.held_out = HeldOut(parameters, place_of_data, divide, share)
        self._measured = Measurements(device)
        self._stop = StopRequest()

    @abc.abstractmethod
    def next_batch(self) -> Any:
        """What :meth:`learn` takes; the time of this is that of data."""

    @abc.abstractmethod
    def learn(self, batch: Any) -> torch.Tensor:
        """Train on a batch; its loss, not waited for."""

    @abc.abstractmethod
    def evaluate(self) -> Evaluation:
        """Predictions on the held-out data, with the weights as they are."""

    @abc.abstractmethod
    def write_checkpoint(self, state: Mapping[str, Any]) -> Path | None:
        """Write weights, optimiser state and ``state``; where, if this process did."""

    @abc.abstractmethod
    def predict(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) of a batch on the model's device."""

    def agree(self, seconds: float) -> float:
        """Seconds of all who train together, of these here."""
        return seconds

    @property
    def model(self) -> DLRM:
        """The model being trained."""
        return self.step.model

    @property
    def data_seconds(self) -> float:
        """Seconds the last iteration spent making its batch or waiting for it."""
        return self._measured.data_s[-1]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last iteration, from the optimiser that used it."""
        return float(self.step.dense_optimizers[0].param_groups[0]["lr"])

    @iteration
    def iterate(self) -> torch.Tensor:
        """One iteration, data included; its loss, not waited for."""
        started = time.perf_counter()
        batch = self.next_batch()
        self._measured.data_s.append(time.perf_counter() - started)
        if self._followed is not None:
            self._followed.used()
        rate = learning_rate(self.parameters.training, self.done + 1)
        if rate != self._rate:
            self._rate = rate
            optimizer_update(lambda: self.step.set_learning_rate(rate))
        loss = self.learn(batch)
        self.done += 1
        return loss

    def train(
        self,
        on_line: Callable[[Line], None] = lambda line: None,
        on_iteration: Callable[[int], None] = lambda iteration: None,
        meter: MeterOf | None = None,
        lines: JsonLines | None = None,
        progress: bool = False,
    ) -> TrainingResult:
        """Run all iterations; Ctrl-C or SIGTERM ends the run early and keeps what was computed.

        Args:
            on_line: called with each line of metrics.jsonl, as it is written.
            on_iteration: called with the number of iterations done by this process: with 0
                before the first, then after each.
            meter: measures the run's energy; None: nobody does.
            lines: metrics.jsonl; None: it is not written.
            progress: show a progress bar.
        """
        # what a caller iterated before, to warm up, is not counted
        self.done = first = self.first
        bar = Bar("training", "it", self.total, shown=progress, done=first)
        run = Run(self, bar, lines, on_line, meter)
        self._measured = measured = run.measured
        on_iteration(0)
        measured.mark()
        event = run.next_event()
        with bar, self.stop_requests() as self._stop:
            try:
                while self.done < self.total:
                    measured.losses.append(self.iterate())
                    measured.mark()
                    bar.add(1)
                    on_iteration(self.done - first)
                    stop = self.is_to_stop()
                    if self.done == event or stop:
                        if run.after_iteration(stop):
                            break
                        event = run.next_event()
            except KeyboardInterrupt:
                if not self.ends_alone:
                    raise
                run.interrupt()
        return run.result()

    def stop_requests(self) -> AbstractContextManager[StopRequest]:
        """What notes signals while the loop runs.

        With checkpoints, the first lets the iteration finish and writes one more.
        """
        return stop_requests(self.writes_checkpoints, f"{STOPPING}, with a checkpoint")

    def is_to_stop(self) -> bool:
        """Whether the run ends with the iteration just done."""
        return self._stop.requested

    def save(self) -> Path | None:
        """Write a checkpoint of the run as it stands; its folder, if this process wrote it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        written = self.write_checkpoint(state_of(self.step, self._followed, self.done))
        self.checkpoint = written or self.checkpoint
        return written

    def close(self) -> None:
        """End the prefetching thread, if there is one, and let go of the folder."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()
        if self._folder is not None:
            self._folder.close()


def prepare_model(
    parameters: Parameters, device: torch.device, checkpoint: Checkpoint | None
) -> tuple[Parameters, DLRM, Callable[[Batch], Batch] | None, list[str]]:
    """A model with its weights, for training or for predictions, and how this process computes.

    Args:
        checkpoint: whose weights it gets; None: initial ones.

    Returns:
        the parameters with what was chosen in place of ``auto``, the model, what becomes of
        each batch before it is copied anywhere (None: nothing), and what a reader must know.

    Raises:
        InputError: the checkpoint is corrupted or of another model, or no back end works.
    """
    config = parameters.training
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    notices = use_memory(config)
    parameters, chosen_dense = resolve_dense(parameters, device)
    config = parameters.training
    notices += chosen_dense + set_fp32_products(config, parameters.model, device)
    make_tables, divide, pages = None, None, optional_engine("pages of tables")
    if config.embeddings_on_gpu_bytes is not None:
        places = engine("tables in two places").places_of(parameters, device)
        make_tables, divide = places.make_tables, places.divide
        notices += places.notices
    elif pages is not None and config.embedding_backend != "torch":
        shape = parameters.model
        make_tables = functools.partial(
            pages.tables_on_huge_pages,
            shape.table_rows,
            shape.embedding_dim,
            shape.embedding_precision,
        )
    seed = config.seed if checkpoint is None else None
    touched = None if pages is None else pages.touched_beside
    with ThreadPoolExecutor(1) as beside:
        beside.submit(load_backward)
        model = build_model(parameters.model, seed, device, make_tables, touched)
    if checkpoint is not None:
        restore_weights(checkpoint, model)
    parameters, chosen = resolve_backend(parameters, device, model.embeddings)
    return parameters, model, divide, notices + chosen


def load_backward() -> None:
    """Import what torch imports at the first backward pass that starts from a gradient.

    It takes 0.4 s, while memory is cleared and weights are drawn on another core.
    """
    with IMPORTING:
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


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
        device = resolve_device(parameters.training)
        if (forecast := find_engine("memory forecast")) is not None:
            forecast.require_memory(parameters, device)
        notices = []
        if checkpoint is not None:
            parameters = with_choices_of(checkpoint, parameters)
            notices = changed_settings(parameters, checkpoint)
        parameters, model, divide, said = prepare_model(parameters, device, checkpoint)
        loss = ClickLoss.of(parameters.model).to(device)
        step = TrainingStep(model, loss, parameters.training)
        notices += said + step.dense.notices
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
            divide=divide,
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
        return evaluate(self.predict, self.loss, self.held_out, self.device, self.done)

    def predict(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) of a batch on the model's device."""
        return predict(self.model, batch, self.step.dense.precision)

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


def train(
    parameters: Parameters,
    folder: Path | None = None,
    progress: bool = True,
    on_line: Callable[[Line], None] = lambda line: None,
    on_iteration: Callable[[int], None] = lambda iteration: None,
    meter: MeterOf | None = None,
    mllog: MLPerfLog | None = None,
) -> TrainingResult:
    """Train as the parameters say, from the beginning or from a checkpoint.

    Args:
        folder: gets ``metrics.jsonl`` (a line per interval, evaluation and checkpoint,
            written as it happens), ``result.json`` (written whole, at the end) and
            checkpoints where no other place is given for them.
        progress, on_line, on_iteration, meter: see :meth:`TrainingLoop.train`.
        mllog: MLPerf's log of the run; None: none is written.

    Raises:
        InputError: the device is not there, the run does not fit in memory, the folder
            cannot be written or is another run's, or the checkpoint cannot be resumed.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(only_trainer(folder))
        place = checkpoint_place(parameters.training, folder)
        checkpoint = checkpoint_to_resume(parameters, place)
        trainer = Trainer(parameters, checkpoint, place)
        stack.callback(trainer.close)
        lines = None
        if folder is not None:
            # a run that is refused leaves the lines of the one before
            lines = stack.enter_context(metrics_lines(folder / "metrics.jsonl", checkpoint))
        if mllog is not None:
            mllog.begin(trainer)
            on_line, on_iteration = both(on_line, mllog.line), both(on_iteration, mllog.iteration)
        result = trainer.train(on_line, on_iteration, meter, lines, progress)
        if mllog is not None:
            mllog.end(bool(result.reached_target))
        if folder is not None:
            write_json(folder / "result.json", asdict(result))
    return result


def both(one: Callable[[T], None], other: Callable[[T], None]) -> Callable[[T], None]:
    """Call one function and then the other."""

    def call(value: T) -> None:
        one(value)
        other(value)

    return call


def only_trainer(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder of a run, so that two runs do not mix their metrics and results.

    The lock ends with the process. It holds between hosts only where their file system passes
    locks on.
    """
    return locked(folder / ".train.lock", f"{folder}: another run is training into this folder")
