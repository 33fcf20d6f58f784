"""The training loop: seeds, device, timing split, schedule, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from dlrm_core.capacity import require_memory
from dlrm_core.checkpoints import Checkpoint, CheckpointFolder
from dlrm_core.config import Parameters
from dlrm_core.data import Batch, batches
from dlrm_core.data.loader import make_generator
from dlrm_core.data.position import Followed, Resumable
from dlrm_core.embeddings.choose import resolve
from dlrm_core.embeddings.host_tables import Places
from dlrm_core.embeddings.split_batch import divided
from dlrm_core.errors import InputError
from dlrm_core.evaluation import Evaluation, HeldOut, evaluate
from dlrm_core.files import JsonLines, write_json, write_text
from dlrm_core.learner_state import optimizer_state, weights_of
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.parts import ITERATION_SPAN, span
from dlrm_core.precision import set_fp32_matmul, set_tf32
from dlrm_core.resuming import (
    changed_settings,
    checkpoint_place,
    checkpoint_to_resume,
    restore_position,
    restore_step,
    restore_weights,
    state_of,
    with_backend_of,
)
from dlrm_core.schedules import schedule_of, total_steps
from dlrm_core.step import TrainingStep, data_forward, optimizer_update, transfer_forward
from dlrm_core.training_host import (
    device_name,
    progress_bar,
    resolve_device,
    stop_requests,
)
from dlrm_core.training_results import Interval, Measurements, TrainingResult
from dlrm_core.training_run import Line, Run


class Trainer:
    """A model, its data and its step, ready to iterate.

    Args:
        checkpoint: to go on from, in place of initial weights.
        place: folder for checkpoints; None: none are written.

    Attributes:
        first: iterations behind the weights at the beginning: the checkpoint's.
        done: iterations done, ``first`` included.
        total: iterations at which :meth:`train` ends.

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
        self.device = resolve_device(config)
        self.notices: list[str] = []
        require_memory(parameters, self.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.notices += set_fp32_matmul(config.fp32_matmul, parameters.model, self.device)
        self.notices += set_tf32(config.tf32, self.device)
        huge_pages = config.embedding_backend != "torch"
        if checkpoint is not None:
            parameters = with_backend_of(checkpoint, parameters)
            self.notices += changed_settings(parameters, checkpoint)
        seed = config.seed if checkpoint is None else None
        self.places = Places(parameters, self.device)
        self.notices += self.places.notices
        make_tables = self.places.make_tables
        self.model = build_model(parameters.model, seed, self.device, huge_pages, make_tables)
        if checkpoint is not None:
            restore_weights(checkpoint, self.model)
        self.places.settle()
        self.loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(self.device)
        parameters, notices = resolve(parameters, self.device, self.model.embeddings)
        self.parameters = parameters
        self.notices += notices
        self.step = TrainingStep(self.model, self.loss, parameters.training)
        self.notices += self.step.dense.notices
        self.notices += getattr(self.model.embeddings.backend, "notices", [])
        generator = make_generator(parameters, self.device)
        if checkpoint is not None:
            restore_step(checkpoint, self.step)
            restore_position(checkpoint, generator)
        self.done = self.first = checkpoint.step if checkpoint is not None else 0
        self.total = total_steps(parameters.training, parameters.data.generator, generator)
        self._schedule = schedule_of(parameters.training)
        self._rate = parameters.training.learning_rate
        self._folder: CheckpointFolder | None = None
        self._followed: Followed | None = None
        self.checkpoint = checkpoint.folder if checkpoint is not None else None
        if place is not None:
            kept = parameters.training.keep_checkpoints
            self._folder = CheckpointFolder(place, kept, self.done)
            if isinstance(generator, Resumable):
                generator = self._followed = Followed(generator)
        source = divided(generator, self.places.placement)
        self.batches: Iterator[Batch] = batches(parameters, self.device, source)
        self.held_out = HeldOut(parameters, self.device)
        # with data made on the device there is nothing to copy
        self.transfers = self.device.type == "cuda" and parameters.data.place == "cpu"
        self._measured = Measurements(self.device)

    def iterate(self) -> torch.Tensor:
        """One iteration, data included; its loss, not waited for."""
        with span(ITERATION_SPAN):
            started = time.perf_counter()
            batch = data_forward(self.batches)
            self._measured.data_s.append(time.perf_counter() - started)
            if self._followed is not None:
                self._followed.used()
            if self.transfers:
                batch = transfer_forward(batch, self.device)
            rate = self._schedule.rate(self.done + 1)
            if rate != self._rate:
                self._rate = rate
                optimizer_update(lambda: self.step.set_learning_rate(rate))
            loss = self.step(batch)
            self.done += 1
            return loss

    def train(
        self,
        on_interval: Callable[[Interval], None] = lambda interval: None,
        on_iteration: Callable[[int], None] = lambda iteration: None,
        on_line: Callable[[Line], None] = lambda line: None,
    ) -> TrainingResult:
        """Run all iterations; Ctrl-C ends the run early and keeps what was computed.

        With checkpoints, Ctrl-C or SIGTERM lets the iteration finish and writes one more;
        a second one ends the run at once.

        Args:
            on_iteration: called with the number of iterations done by this process: with 0
                before the first, then after each.
            on_line: called after each evaluation and checkpoint.
        """
        # what a caller iterated before, to warm up, is not counted
        self.done = first = self.first
        total = self.total
        run = Run(self, on_interval, on_line)
        self._measured = measured = run.measured
        on_iteration(0)
        measured.mark()
        event = run.next_event()
        with stop_requests(self._folder is not None) as stop:
            try:
                while self.done < total:
                    measured.losses.append(self.iterate())
                    measured.mark()
                    on_iteration(self.done - first)
                    if self.done == event or stop.requested:
                        if run.after_iteration(stop.requested):
                            break
                        event = run.next_event()
            except KeyboardInterrupt:
                run.status = "interrupted"
                measured.settle()
                run.report()
        return run.result()

    def evaluate(self) -> Evaluation:
        """Predictions on the held-out data, with the weights as they are."""
        precision = self.step.dense.precision
        return evaluate(self.model, self.loss, self.held_out, precision, self.device, self.done)

    def save(self) -> Path:
        """Write a checkpoint of the run as it stands; only with a folder for them."""
        assert self._folder is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.checkpoint = self._folder.save(
            self.done,
            self.parameters.to_sections(),
            weights_of(self.model),
            optimizer_state(self.step)[0],
            state_of(self.step, self._followed, self.done),
        )
        return self.checkpoint

    @property
    def writes_checkpoints(self) -> bool:
        """Whether there is a folder for them."""
        return self._folder is not None

    @property
    def data_seconds(self) -> float:
        """In which the last iteration made its batch or waited for it."""
        return self._measured.data_s[-1]

    @property
    def learning_rate(self) -> float:
        """Of the last iteration, from the optimiser that used it."""
        return float(self.step.top_optimizer.param_groups[0]["lr"])

    def close(self) -> None:
        """End the prefetching thread, if there is one, and let go of the folder."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()
        if self._folder is not None:
            self._folder.close()
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
        bar = stack.enter_context(progress_bar(trainer.total, trainer.done, enabled=progress))

        def report(interval: Interval) -> None:
            if lines is not None:
                lines.write(asdict(interval))
            bar.set_postfix_str(
                f"{interval.samples_per_second:,.0f} samples/s, "
                f"{interval.ms_per_iteration:.1f} ms/iteration "
                f"(data {interval.data_ms_per_iteration:.1f}), loss {interval.loss:.6f}"
            )
            on_interval(interval)

        def write(line: Line) -> None:
            if lines is not None:
                lines.write(line)
            on_line(line)

        def count(done: int) -> None:
            bar.update(1 if done else 0)
            on_iteration(done)

        result = trainer.train(report, count, write)
    if folder is not None:
        write_json(folder / "result.json", asdict(result))
    return result


def metrics_lines(path: Path, checkpoint: Checkpoint | None) -> JsonLines:
    """metrics.jsonl, with the lines up to the checkpoint that the run goes on from."""
    if checkpoint is None or not path.exists():
        return JsonLines(path)
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by a kill
            if json.loads(line)["iteration"] <= checkpoint.step:
                kept.append(line + "\n")
    write_text(path, "".join(kept))
    return JsonLines(path, append=True)


def json_line(interval: Interval) -> str:
    """An interval as one line of JSON."""
    return json.dumps(asdict(interval))


__all__ = [
    "Evaluation",
    "InputError",
    "Interval",
    "Trainer",
    "TrainingResult",
    "device_name",
    "json_line",
    "metrics_lines",
    "resolve_device",
    "train",
]
