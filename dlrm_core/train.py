"""The training loop, and training by one process.

:class:`TrainingLoop` is what one process and each of several ranks do alike around their
steps; :class:`Trainer` is one process with its model, wherever its tables lie, and its data.
Who wants to see, measure or log a run gives it an :class:`Observer`.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dlrm_core.base.files import JsonLines, locked, write_json
from dlrm_core.base.machine import (
    StopRequest,
    device_name,
    peak_memory,
    peak_memory_by_device,
    resolve_device,
    stop_requests,
    use_memory,
)
from dlrm_core.config import Parameters
from dlrm_core.data.batch import WHOLE, Batch, Share
from dlrm_core.data.epochs import Epoch
from dlrm_core.data.loader import Followed, Generator, batches, make_generator
from dlrm_core.dense import resolve_dense
from dlrm_core.embeddings import resolve_backend
from dlrm_core.memory import require_memory
from dlrm_core.model import DLRM, ClickLoss, build_model
from dlrm_core.parts import iteration
from dlrm_core.placement import places_of
from dlrm_core.precision import set_fp32_products
from dlrm_core.run.checkpoint import Checkpoint, CheckpointFolder
from dlrm_core.run.evaluate import Evaluation, HeldOut, evaluate, predict
from dlrm_core.run.reports import Line, Measurements, TrainingResult, due, metrics_lines
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

STOPPING = "ending after this iteration"

IMPORTING = threading.Lock()
"""Threads hold it while they import parts of torch beside the run: two at once may find halves."""


NO_POWER: Mapping[str, Any] = {
    "power_w": None,
    "samples_per_joule": None,
    "power": {
        "energy_j": None,
        "seconds": None,
        "readings": [],
        "not_measured": {"energy": "no meter was given; dlrm train of dlrm_workbook has one"},
    },
}
"""What :class:`TrainingResult` says of the energy of a run that nobody measured."""


class Observer:
    """Watches a run; the loop calls it as things happen. This one does nothing."""

    def begin(self, loop: TrainingLoop[Any]) -> None:
        """The run is about to start."""

    def iteration(self, done: int) -> None:
        """So many iterations are done by this process: 0 before the first, then after each."""

    def line(self, line: Line) -> None:
        """A line of metrics.jsonl, as it is written."""

    def power(self, samples: int) -> Mapping[str, Any]:
        """``power_w``, ``samples_per_joule`` and ``power`` of :class:`TrainingResult`, asked for
        at the end of a run that has trained so many samples."""
        return NO_POWER

    def end(self, result: TrainingResult) -> None:
        """The run has ended."""


@dataclass
class Prepared(Generic[StepT]):
    """What a loop trains, ready to iterate.

    Attributes:
        parameters: with every choice made.
        device: of the dense part.
        notices: what a reader must know of the run so far.
    """

    parameters: Parameters
    step: StepT
    loss: nn.Module
    device: torch.device
    notices: list[str]


@dataclass
class Feed:
    """Where a loop's batches come from.

    Attributes:
        generator: at its beginning; the loop brings it to where a checkpoint left it.
        made_on: the device that batches are made on, or copied to.
        divide: what becomes of each batch before it is copied anywhere; None: nothing.
        share: which of the held-out batches this process predicts.
    """

    generator: Generator
    made_on: torch.device
    divide: Callable[[Batch], Batch] | None = None
    share: Share = WHOLE


class TrainingLoop(abc.ABC, Generic[StepT]):
    """A step and its batches, ready to iterate; what a batch and a step are, subclasses say.

    Args:
        prepared: what is trained.
        feed: its batches.
        checkpoint: that the step was restored from.
        place: folder for checkpoints; None: none are written.
        writes: whether this process is the one that writes them.

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
        prepared: Prepared[StepT],
        feed: Feed,
        checkpoint: Checkpoint | None,
        place: Path | None,
        writes: bool = True,
    ) -> None:
        self.parameters, self.step, self.loss = prepared.parameters, prepared.step, prepared.loss
        self.device, self.notices = prepared.device, prepared.notices
        config, generator = self.parameters.training, feed.generator
        self.embedding_backend = config.embedding_backend
        if checkpoint is not None:
            restore_position(checkpoint, generator)
        else:
            self.notices = [*nothing_to_resume(config, place), *self.notices]
        self.done = self.first = checkpoint.step if checkpoint is not None else 0
        self.epoch: Epoch = getattr(generator, "epoch", Epoch(None, config.batch_size))
        source = self.parameters.data.generator
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
            generator = self._followed = Followed(generator)
        self.batches: Iterator[Batch] = batches(
            self.parameters, feed.made_on, generator, feed.divide
        )
        self.held_out = HeldOut(self.parameters, feed.made_on, feed.divide, feed.share)
        self._measured = Measurements(self.device)
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
        return float(self.step.top_optimizer.param_groups[0]["lr"])

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
        self, observer: Observer | None = None, lines: JsonLines | None = None
    ) -> TrainingResult:
        """Run all iterations; Ctrl-C or SIGTERM ends the run early and keeps what was computed.

        Args:
            observer: sees the run; None: nobody does.
            lines: metrics.jsonl; None: it is not written.
        """
        # what a caller iterated before, to warm up, is not counted
        self.done = first = self.first
        observer = observer or Observer()
        observer.begin(self)
        run = _Run(self, observer, lines)
        self._measured = measured = run.measured
        observer.iteration(0)
        measured.mark()
        event = run.next_event()
        with self.stop_requests() as self._stop:
            try:
                while self.done < self.total:
                    measured.losses.append(self.iterate())
                    measured.mark()
                    observer.iteration(self.done - first)
                    stop = self.is_to_stop()
                    if self.done == event or stop:
                        if run.after_iteration(stop):
                            break
                        event = run.next_event()
            except KeyboardInterrupt:
                if not self.ends_alone:
                    raise
                run.interrupt()
        result = run.result()
        observer.end(result)
        return result

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


class _Run:
    """One call of :meth:`TrainingLoop.train`: what happens between iterations, and its outcome."""

    def __init__(
        self, loop: TrainingLoop[Any], observer: Observer, lines: JsonLines | None
    ) -> None:
        self.loop, self.observer, self.lines = loop, observer, lines
        self.config = loop.parameters.training
        self.first = loop.done
        self.measured = Measurements(loop.device)
        self.status = "finished"
        self.last = math.nan
        self.evaluations: list[Evaluation] = []
        self.evaluation_lines: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.checkpoint_s = 0.0
        if loop.done >= loop.total:
            self.notices.append(
                f"nothing is left to do: the checkpoint is of iteration {loop.done:,}, and the "
                f"run ends at {loop.total:,} (training.batches, epochs, max_steps)"
            )

    def next_event(self) -> int:
        """The next iteration after which something is to be done: a multiple of a period,
        or the last one."""
        config, done = self.config, self.loop.done
        periods = [config.log_every, self.loop.eval_every]
        if self.loop.writes_checkpoints:
            periods.append(config.checkpoint_every)
        after = [done - done % period + period for period in periods if period]
        return min([self.loop.total, *after])

    def after_iteration(self, stop: bool) -> bool:
        """Report, evaluate, write a checkpoint as is due; whether the run ends here."""
        done, total, config = self.loop.done, self.loop.total, self.config
        self.measured.settle()
        check = getattr(self.loop.step.model.embeddings.backend, "check", None)
        if check is not None:
            check()  # a GPU tells late that it was asked for a row that is not there
        if stop or due(done, total, config.log_every):
            self.report()
        bad = self.measured.bad_iteration()
        if bad is not None or not self._weights_are_finite():
            self.report()
            self._diverge(bad)
            return True
        reached = False
        if not stop and self._evaluates() and due(done, total, self.loop.eval_every):
            reached = self._evaluate()
        if reached:
            self.report()
        if self.loop.writes_checkpoints and (
            stop or reached or due(done, total, config.checkpoint_every)
        ):
            self._save()
        if stop:
            self.status = "interrupted"
        self.measured.go_on()
        return stop or reached

    def interrupt(self) -> None:
        """The run ends here, in the middle of an iteration."""
        self.status = "interrupted"
        self.measured.settle()
        self.report()

    def report(self) -> None:
        """Close the interval."""
        interval = self.measured.interval(self.loop.epoch, self.first, self.loop.learning_rate)
        if interval is not None:
            self.last = interval.loss
            self._tell(asdict(interval))

    def result(self) -> TrainingResult:
        """What the run amounted to."""
        measured, loop, target = self.measured, self.loop, self.config.auc_target
        known = [found.auc for found in self.evaluations if found.auc is not None]
        count, epoch = len(measured.done_ms), loop.epoch
        samples = epoch.samples_before(self.first + count) - epoch.samples_before(self.first)
        notices = loop.notices + self.notices
        if self.evaluations:
            notices += self.evaluations[-1].notices()
        if self.status == "interrupted":
            notices.append(self._where_it_ended(self.first + count))
        return TrainingResult(
            status=self.status,
            iterations=count,
            first_iteration=self.first,
            samples=samples,
            loss=self.last,
            **measured.speed(epoch, self.first),
            elapsed_s=time.perf_counter() - measured.started,
            evaluation_s=sum(found.seconds for found in self.evaluations),
            checkpoint_s=self.checkpoint_s,
            auc=self.evaluations[-1].auc if self.evaluations else None,
            best_auc=max(known, default=None),
            reached_target=None if target is None else max(known, default=-1.0) >= target,
            checkpoint=str(loop.checkpoint) if loop.checkpoint else None,
            peak_memory_bytes=peak_memory(loop.device),
            peak_memory_by_device=peak_memory_by_device(loop.device),
            **self.observer.power(samples),
            device=device_name(loop.device),
            threads=torch.get_num_threads(),
            embedding_backend=loop.embedding_backend,
            notices=notices + loop.step.dense.precision.skipped_notice(self.first + count),
            iteration_ms=measured.done_ms,
            data_ms=[1e3 * seconds for seconds in measured.data_s],
            losses=measured.done_losses,
            evaluations=self.evaluation_lines,
        )

    def _tell(self, line: Line) -> None:
        """Write a line of metrics.jsonl, and show it to the observer."""
        if self.lines is not None:
            self.lines.write(line)
        self.observer.line(line)

    def _evaluates(self) -> bool:
        return self.loop.eval_every is not None or self.config.auc_target is not None

    def _evaluate(self) -> bool:
        """Evaluate; whether the target is reached."""
        found = self.loop.evaluate()
        self.evaluations.append(found)
        elapsed_s = time.perf_counter() - self.measured.started
        self.evaluation_lines.append(found.line() | {"elapsed_s": elapsed_s})
        self._tell(self.evaluation_lines[-1])
        target = self.config.auc_target
        return target is not None and found.auc is not None and found.auc >= target

    def _save(self) -> None:
        started = time.perf_counter()
        if self.lines is not None:
            # who goes on from the checkpoint expects the lines before it
            self.lines.sync()
        folder = self.loop.save()
        seconds = time.perf_counter() - started
        self.checkpoint_s += seconds
        if folder is None:  # another rank wrote it
            return
        self._tell(
            {
                "kind": "checkpoint",
                "iteration": self.loop.done,
                "folder": str(folder),
                "seconds": seconds,
                "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            }
        )

    def _where_it_ended(self, iteration: int) -> str:
        kept = self.loop.checkpoint
        begin = f"interrupted after iteration {iteration:,} of {self.loop.total:,}"
        if kept is None:
            return f"{begin}; there is no checkpoint (training.checkpoint_every)"
        return f"{begin}; --resume {kept} goes on from iteration {int(kept.name[5:]):,}"

    def _weights_are_finite(self) -> bool:
        """Whether the dense weights are finite: an overflow there shows before the next loss."""
        if not (self.loop.writes_checkpoints or self._evaluates()):
            return True
        totals = [weight.detach().sum() for weight in self.loop.step.dense.weights]
        return bool(torch.stack(totals).isfinite().all())

    def _diverge(self, place: int | None) -> None:
        """End the run with a sentence that says where and what remains."""
        self.status = "diverged"
        if place is None:
            what = f"the weights are not finite after iteration {self.loop.done}"
        else:
            loss = self.measured.done_losses[place]
            what = f"the loss is {loss} at iteration {self.first + place + 1}"
        kept = self.loop.checkpoint
        remains = f"the checkpoint {kept} is from before" if kept else "there is no checkpoint"
        self.notices.append(
            f"training diverged: {what} (training.learning_rate "
            f"{self.config.learning_rate:g}, training.precision {self.config.precision}); "
            f"choose a smaller learning rate; {remains}"
        )


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
    places = places_of(parameters, device)
    notices += places.notices
    seed = config.seed if checkpoint is None else None
    huge_pages = config.embedding_backend != "torch"
    with ThreadPoolExecutor(1) as beside:
        beside.submit(load_backward)
        model = build_model(parameters.model, seed, device, huge_pages, places.make_tables)
    if checkpoint is not None:
        restore_weights(checkpoint, model)
    parameters, chosen = resolve_backend(parameters, device, model.embeddings)
    return parameters, model, places.divide, notices + chosen


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
        require_memory(parameters, device)
        notices = []
        if checkpoint is not None:
            parameters = with_choices_of(checkpoint, parameters)
            notices = changed_settings(parameters, checkpoint)
        parameters, model, divide, chosen = prepare_model(parameters, device, checkpoint)
        loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(device)
        step = TrainingStep(model, loss, parameters.training)
        notices += chosen + step.dense.notices
        notices += getattr(model.embeddings.backend, "notices", [])
        if checkpoint is not None:
            restore_step(checkpoint, step)
        super().__init__(
            Prepared(parameters, step, loss, device, notices),
            Feed(make_generator(parameters, device), device, divide),
            checkpoint,
            place,
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
    parameters: Parameters, folder: Path | None = None, observer: Observer | None = None
) -> TrainingResult:
    """Train as the parameters say, from the beginning or from a checkpoint.

    Args:
        folder: gets ``metrics.jsonl`` (a line per interval, evaluation and checkpoint,
            written as it happens), ``result.json`` (written whole, at the end) and
            checkpoints where no other place is given for them.
        observer: sees the run; None: nobody does.

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
        result = trainer.train(observer, lines)
        if folder is not None:
            write_json(folder / "result.json", asdict(result))
    return result


def only_trainer(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder of a run, so that two runs do not mix their metrics and results.

    The lock ends with the process. It holds between hosts only where their file system passes
    locks on.
    """
    return locked(folder / ".train.lock", f"{folder}: another run is training into this folder")
