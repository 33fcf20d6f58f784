"""The training loop, and training by one process.

:class:`TrainingLoop` is what one process and each of several ranks do alike around their
steps; :class:`Trainer` is one process with its model, wherever its tables lie, and its data.
Who wants to see, measure or log a run gives it an :class:`Observer`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from dlrm_core.base.engines import engine, find_engine, optional_engine
from dlrm_core.base.machine import StopRequest, keep_freed_memory, resolve_device, stop_requests
from dlrm_core.config import Parameters
from dlrm_core.data.batch import WHOLE, Batch, Share
from dlrm_core.dense import resolve_dense, set_fp32_products
from dlrm_core.embeddings import resolve_backend
from dlrm_core.model import DLRM, ClickLoss, build_model
from dlrm_core.parts import iteration
from dlrm_core.step import Step, TrainingStep, data_forward, optimizer_update, transfer_forward

if TYPE_CHECKING:  # loaded where a run needs it
    from dlrm_core.base.files import JsonLines
    from dlrm_core.data.epochs import Epoch
    from dlrm_core.data.loader import Followed, Generator
    from dlrm_core.run.checkpoint import Checkpoint, CheckpointFolder
    from dlrm_core.run.evaluate import Evaluation
    from dlrm_core.run.reports import Observer, Report, TrainingResult

StepT = TypeVar("StepT", bound=Step)

STOPPING = "ending after this iteration"

IMPORTING = threading.Lock()
"""Threads hold it while they import parts of torch beside the run: two at once may find halves."""


@dataclass
class Feed:
    """Where a loop's batches come from."""

    generator: Generator
    """At its beginning; the loop brings it to where a checkpoint left it."""
    made_on: torch.device
    """The device that batches are made on, or copied to."""
    divide: Callable[[Batch], Batch] | None = None
    """What becomes of each batch before it is copied anywhere; None: nothing."""
    share: Share = WHOLE
    """Which of the held-out batches this process predicts."""


class TrainingLoop(abc.ABC, Generic[StepT]):
    """A step and its batches, ready to iterate; what a batch and a step are, subclasses say.

    Args:
        parameters: with every choice made.
        step: what is trained, ready to iterate.
        feed: its batches.
        checkpoint: that the step was restored from.
        place: folder for checkpoints; None: none are written.
        notices: what a reader must know of the run so far.
        writes: whether this process is the one that writes them.

    Attributes:
        first: iterations behind the weights at the beginning: the checkpoint's.
        done: iterations done, ``first`` included.
        total: iterations at which :meth:`train` ends.
        epoch: how the samples of a pass are cut into batches.
        eval_every: iterations between evaluations; None: none but one at the end.
        checkpoint: folder of the newest, as far as this process knows.
    """

    ends_alone = True
    """Whether a second signal may end this process in the middle of an iteration, and the
    result still be had; where others wait for it, it is an error."""

    def __init__(
        self,
        parameters: Parameters,
        step: StepT,
        feed: Feed,
        checkpoint: Checkpoint | None,
        place: Path | None,
        notices: list[str],
        writes: bool = True,
    ) -> None:
        from dlrm_core.data.epochs import Epoch
        from dlrm_core.data.loader import Followed, batches
        from dlrm_core.run.checkpoint import CheckpointFolder
        from dlrm_core.run.evaluate import HeldOut
        from dlrm_core.run.reports import Report
        from dlrm_core.run.resume import nothing_to_resume, restore_position
        from dlrm_core.run.schedules import evaluation_period, learning_rate, total_steps

        self.parameters, self.step, self.notices = parameters, step, notices
        self.device, self.loss = step.model.device, step.dense.loss
        config, generator = parameters.training, feed.generator
        self.embedding_backend = config.embedding_backend
        if checkpoint is not None:
            restore_position(checkpoint, generator)
        else:
            self.notices = [*nothing_to_resume(config, place), *self.notices]
        self.done = self.first = checkpoint.step if checkpoint is not None else 0
        self.checkpoint = checkpoint.folder if checkpoint is not None else None
        self.epoch: Epoch = getattr(generator, "epoch", Epoch(None, config.batch_size))
        source = parameters.data.generator
        self.total = total_steps(config, source, self.epoch)
        self.eval_every = evaluation_period(config, source, self.epoch)
        self._learning_rate, self._rate = learning_rate, config.learning_rate
        self._folder: CheckpointFolder | None = None
        self._followed: Followed | None = None
        self.writes_checkpoints = place is not None
        if place is not None:
            if writes:
                self._folder = CheckpointFolder(place, config.keep_checkpoints, self.done)
            generator = self._followed = Followed(generator)
        self.batches = batches(parameters, feed.made_on, generator, feed.divide)
        self.held_out = HeldOut(parameters, feed.made_on, feed.divide, feed.share)
        self._report = Report(self.device, self.first, self.epoch)
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
        return self.step.model

    @property
    def data_seconds(self) -> float:
        """Seconds the last iteration spent making its batch or waiting for it."""
        return self._report.data_s[-1]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last iteration, from the optimiser that used it."""
        return float(self.step.dense_optimizers[0].param_groups[0]["lr"])

    @iteration
    def iterate(self) -> torch.Tensor:
        """One iteration, data included; its loss, not waited for."""
        started = time.perf_counter()
        batch = self.next_batch()
        self._report.data_s.append(time.perf_counter() - started)
        if self._followed is not None:
            self._followed.used()
        rate = self._learning_rate(self.parameters.training, self.done + 1)
        if rate != self._rate:
            self._rate = rate
            optimizer_update(lambda: self.step.set_learning_rate(rate))
        loss = self.learn(batch)
        self.done += 1
        return loss

    def train(
        self, observer: Observer | None = None, lines: JsonLines | None = None
    ) -> TrainingResult:
        """Run all iterations; Ctrl-C or SIGTERM ends the run early and keeps what was computed.

        An ``observer`` sees the run; ``lines``, metrics.jsonl, get what happens.
        """
        from dlrm_core.run.reports import Observer, Report

        # what a caller iterated before, to warm up, is not counted
        self.done = first = self.first
        observer = observer or Observer()
        observer.begin(self)
        self._report = report = Report(self.device, first, self.epoch, observer, lines)
        observer.iteration(0)
        report.mark()
        event = self._next_event()
        with self.stop_requests() as self._stop:
            try:
                while self.done < self.total:
                    report.losses.append(self.iterate())
                    report.mark()
                    observer.iteration(self.done - first)
                    stop = self.is_to_stop()
                    if self.done == event or stop:
                        if self._event(report, stop):
                            break
                        event = self._next_event()
            except KeyboardInterrupt:
                if not self.ends_alone:
                    raise
                # in the middle of an iteration
                report.status = "interrupted"
                report.settle()
                report.interval(self.learning_rate)
        result = self._result(report)
        observer.end(result)
        return result

    def _next_event(self) -> int:
        """The next iteration after which something is to be done: a multiple of a period,
        or the last one."""
        config, done = self.parameters.training, self.done
        periods = [config.log_every, self.eval_every]
        if self.writes_checkpoints:
            periods.append(config.checkpoint_every)
        after = [done - done % period + period for period in periods if period]
        return min([self.total, *after])

    def _event(self, report: Report, stop: bool) -> bool:
        """Report, evaluate, write a checkpoint as is due; whether the run ends here."""
        config = self.parameters.training
        report.settle()
        check = getattr(self.step.model.embeddings.backend, "check", None)
        if check is not None:
            check()  # a GPU tells late that it was asked for a row that is not there
        if stop or self._is_due(config.log_every):
            report.interval(self.learning_rate)
        bad, target, reached = report.bad_iteration(), config.auc_target, False
        evaluates = self.eval_every is not None or target is not None
        checked = self.writes_checkpoints or evaluates
        if bad is not None or (checked and not self._weights_are_finite()):
            report.interval(self.learning_rate)
            report.status = "diverged"
            report.notices.append(self._divergence(report, bad))
            return True
        if not stop and evaluates and self._is_due(self.eval_every):
            evaluation = self.evaluate()
            report.evaluation(evaluation)
            auc = evaluation.auc
            reached = target is not None and auc is not None and auc >= target
            if reached:
                report.interval(self.learning_rate)
        if self.writes_checkpoints and (stop or reached or self._is_due(config.checkpoint_every)):
            report.checkpoint(self.done, self.save)
        if stop:
            report.status = "interrupted"
        report.go_on()
        return stop or reached

    def _is_due(self, period: int | None) -> bool:
        """Whether something of this period is to be done after the last iteration."""
        return self.done == self.total or (period is not None and self.done % period == 0)

    def _weights_are_finite(self) -> bool:
        """Whether the dense weights are finite: an overflow there shows before the next loss."""
        totals = [weight.detach().sum() for weight in self.step.dense.weights]
        return bool(torch.stack(totals).isfinite().all())

    def _divergence(self, report: Report, place: int | None) -> str:
        """Where the loss (None: a weight) was no number, and what remains, in a sentence."""
        config = self.parameters.training
        what = f"the weights are not finite after iteration {self.done}"
        if place is not None:
            loss = report.done_losses[place]
            what = f"the loss is {loss} at iteration {self.first + place + 1}"
        kept = self.checkpoint
        remains = f"the checkpoint {kept} is from before" if kept else "there is no checkpoint"
        return (
            f"training diverged: {what} (training.learning_rate {config.learning_rate:g}, "
            f"training.precision {config.precision}); choose a smaller learning rate; {remains}"
        )

    def _result(self, report: Report) -> TrainingResult:
        notices, kept = [*self.notices], self.checkpoint
        if self.first >= self.total:
            notices.append(
                f"nothing is left to do: the checkpoint is of iteration {self.first:,}, and the "
                f"run ends at {self.total:,} (training.batches, epochs, max_steps)"
            )
        notices += report.all_notices()
        if report.status == "interrupted":
            ended = f"interrupted after iteration {report.done:,} of {self.total:,}"
            notices.append(
                f"{ended}; --resume {kept} goes on from iteration {int(kept.name[5:]):,}"
                if kept
                else f"{ended}; there is no checkpoint (training.checkpoint_every)"
            )
        notices += self.step.dense.precision.skipped_notice(report.done)
        target = self.parameters.training.auc_target
        return report.result(target, kept, self.embedding_backend, notices)

    def stop_requests(self) -> AbstractContextManager[StopRequest]:
        """What notes signals while the loop runs; with checkpoints, the first writes one more."""
        return stop_requests(self.writes_checkpoints, f"{STOPPING}, with a checkpoint")

    def is_to_stop(self) -> bool:
        """Whether the run ends with the iteration just done."""
        return self._stop.requested

    def save(self) -> Path | None:
        """Write a checkpoint of the run as it stands; its folder, if this process wrote it."""
        from dlrm_core.run.resume import state_of

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        assert self._followed is not None, "there is a folder for checkpoints"
        written = self.write_checkpoint(state_of(self.step, self._followed))
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
    parameters: Parameters, checkpoint: Checkpoint | None, largest_batch: int = 0
) -> tuple[Parameters, DLRM, Callable[[Batch], Batch] | None, list[str]]:
    """A model with its weights, for training or for predictions, and how this process computes.

    Args:
        checkpoint: whose weights it gets; None: initial ones.
        largest_batch: for which there must be room; 0: ``training.batch_size``.

    Returns:
        the parameters with what was chosen in place of ``auto``, the model, what becomes of
        each batch before it is copied anywhere (None: nothing), and what a reader must know.

    Raises InputError if the device is not there, the run does not fit in its memory, the checkpoint
    is corrupted or of another model, or no back end works.
    """
    config = parameters.training
    device = resolve_device(config)
    if (forecast := find_engine("memory forecast")) is not None:
        largest = parameters.with_training(batch_size=largest_batch or config.batch_size)
        forecast.require_memory(largest, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    keep_freed_memory()
    parameters, chosen_dense = resolve_dense(parameters, device)
    config = parameters.training
    notices = chosen_dense + set_fp32_products(parameters, device)
    make_tables, divide, pages = None, None, optional_engine("pages of tables")
    if config.embeddings_on_gpu_bytes is not None:
        places = engine("tables in two places").places_of(parameters, device)
        make_tables, divide = places.make_tables, places.divide
        notices.append(places.notice)
    elif pages is not None and config.embedding_backend != "torch":
        shape = parameters.model
        sizes = shape.table_rows, shape.embedding_dim, shape.embedding_precision
        make_tables = functools.partial(pages.tables_on_huge_pages, *sizes)
    seed = config.seed if checkpoint is None else None
    touched = None if pages is None else pages.touched_beside
    with ThreadPoolExecutor(1) as beside:
        beside.submit(load_backward)
        model = build_model(parameters.model, seed, device, make_tables, touched)
    if checkpoint is not None:
        from dlrm_core.run.resume import restore_weights

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
    """One process with its model, its data and its step.

    ``checkpoint`` is gone on from, in place of initial weights; ``place`` as in
    :class:`TrainingLoop`. Raises InputError if the device is not there, the run does not fit in its
    memory, or a checkpoint does not fit the run.
    """

    def __init__(
        self,
        parameters: Parameters,
        checkpoint: Checkpoint | None = None,
        place: Path | None = None,
    ) -> None:
        from dlrm_core.data.loader import make_generator

        notices = []
        if checkpoint is not None:
            from dlrm_core.run.resume import changed_settings, restore_step, with_choices_of

            parameters = with_choices_of(checkpoint, parameters)
            notices = changed_settings(parameters, checkpoint)
        parameters, model, divide, chosen = prepare_model(parameters, checkpoint)
        loss = ClickLoss.of(parameters.model).to(model.device)
        step = TrainingStep(model, loss, parameters.training)
        notices += chosen + step.dense.notices
        notices += getattr(model.embeddings.backend, "notices", [])
        if checkpoint is not None:
            restore_step(checkpoint, step)
        feed = Feed(make_generator(parameters, model.device), model.device, divide)
        super().__init__(parameters, step, feed, checkpoint, place, notices)
        # with data made on the device there is nothing to copy
        self._transfers = self.device.type == "cuda" and parameters.data.place == "cpu"

    def next_batch(self) -> Batch:
        return data_forward(self.batches)

    def learn(self, batch: Batch) -> torch.Tensor:
        return self.step(transfer_forward(batch, self.device) if self._transfers else batch)

    def evaluate(self) -> Evaluation:
        from dlrm_core.run.evaluate import evaluate

        return evaluate(self.predict, self.loss, self.held_out, self.device, self.done)

    def predict(self, batch: Batch) -> torch.Tensor:
        from dlrm_core.run.evaluate import predict

        return predict(self.model, batch, self.step.dense.precision)

    def write_checkpoint(self, state: Mapping[str, Any]) -> Path:
        from dlrm_core.run.resume import optimizer_state, weights_of

        assert self._folder is not None
        tensors = weights_of(self.model), optimizer_state(self.step)[0]
        return self._folder.save(self.done, self.parameters.to_sections(), *tensors, state)


def train(
    parameters: Parameters, folder: Path | None = None, observer: Observer | None = None
) -> TrainingResult:
    """Train as the parameters say, from the beginning or a checkpoint; an ``observer`` sees it.

    The folder gets ``metrics.jsonl`` (a line per interval, evaluation and checkpoint, written as it
    happens), ``result.json`` (written whole, at the end) and checkpoints where no other place is
    given for them. Raises InputError if the device is not there, the run does not fit in memory,
    the folder cannot be written or is another run's, or the checkpoint cannot be resumed.
    """
    from dlrm_core.base.files import write_json
    from dlrm_core.run.reports import metrics_lines
    from dlrm_core.run.resume import checkpoint_place, checkpoint_to_resume

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
        result = trainer.train(observer, lines)
        if folder is not None:
            write_json(folder / "result.json", asdict(result))
    return result


def only_trainer(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder of a run, so that two runs do not mix their metrics and results.

    It holds between hosts only where their file system passes locks on.
    """
    from dlrm_core.base.files import locked

    return locked(folder / ".train.lock", f"{folder}: another run is training into this folder")
