"""One call of the training loop: what is reported, evaluated and kept between iterations."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dlrm_core.base.files import JsonLines, write_text
from dlrm_core.base.machine import device_name, peak_memory, peak_memory_by_device
from dlrm_core.config import Parameters
from dlrm_core.data.epochs import Epoch
from dlrm_core.progress import Bar
from dlrm_core.run.checkpoint import Checkpoint
from dlrm_core.run.evaluate import Evaluation


@dataclass(frozen=True)
class Interval:
    """One line of metrics.jsonl: the iterations since the line before."""

    iteration: int
    """Iterations done so far, those before a resumed checkpoint included."""
    loss: float
    """Mean over the interval's samples."""
    ms_per_iteration: float
    """Median, data included."""
    mean_ms_per_iteration: float
    """Mean: what the two below add up to, and what ``samples_per_second`` goes by."""
    data_ms_per_iteration: float
    """Mean time in which the loop made, or waited for, its batch."""
    compute_ms_per_iteration: float
    """Mean of the rest: transfer, forward, backward, update."""
    samples_per_second: float
    elapsed_s: float
    learning_rate: float
    """Learning rate of the interval's last iteration."""


@dataclass(frozen=True)
class TrainingResult:
    """What a run amounted to; times are wall clock, without evaluations and checkpoints."""

    status: str
    """'finished', 'interrupted' (Ctrl-C, SIGTERM) or 'diverged' (the loss is not a number)."""
    iterations: int
    """Done by this process."""
    first_iteration: int
    """Done before, by those that wrote the checkpoint resumed from; 0 for a new run."""
    samples: int
    """Trained on by this process."""
    loss: float
    """Mean over the last interval, what facebookresearch/dlrm prints."""
    ms_per_iteration: float
    """Median over all iterations, data included."""
    mean_ms_per_iteration: float
    """Mean: what the two below add up to, and what ``samples_per_second`` goes by."""
    data_ms_per_iteration: float
    """Mean."""
    compute_ms_per_iteration: float
    """Mean."""
    samples_per_second: float
    """All samples over the time of all iterations."""
    elapsed_s: float
    """Seconds of everything, evaluations and checkpoints included."""
    evaluation_s: float
    checkpoint_s: float
    auc: float | None
    """AUC of the last evaluation; None if there was none."""
    best_auc: float | None
    reached_target: bool | None
    """Whether an evaluation reached ``training.auc_target``; None without a target."""
    checkpoint: str | None
    """The last checkpoint that is whole."""
    peak_memory_bytes: int | None
    """Peak memory: the process's resident set on the CPU, torch's allocator on a GPU."""
    peak_memory_by_device: dict[str, int]
    """``host``: of the process; on a GPU also ``gpu``: of torch's allocator."""
    power_w: float | None
    """Mean over ``elapsed_s`` of all devices that could be measured; None: see ``power``."""
    samples_per_joule: float | None
    """Samples/s per watt."""
    power: dict[str, Any]
    """``energy_j``, a reading a device, and ``not_measured`` with reasons."""
    device: str
    threads: int
    embedding_backend: str
    """The one that was used; where ``auto`` was asked for, what it chose."""
    notices: list[str]
    iteration_ms: list[float]
    data_ms: list[float]
    losses: list[float]
    evaluations: list[dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """Everything but the lists with one entry an iteration or evaluation."""
        lists = ("iteration_ms", "data_ms", "losses", "evaluations")
        return {name: value for name, value in asdict(self).items() if name not in lists}


@dataclass
class Measurements:
    """Times and losses of the iterations done, on a GPU without waiting for it.

    Attributes:
        data_s: seconds in which each iteration made or waited for its batch.
        losses: of each iteration, as tensors until :meth:`settle`.
        done_ms: of each settled iteration.
        done_losses: as many.
    """

    device: torch.device
    data_s: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    done_ms: list[float] = field(default_factory=list)
    done_losses: list[float] = field(default_factory=list)
    _marks: list[Any] = field(default_factory=list)
    _reported: int = 0
    _examined: int = 0
    started: float = field(default_factory=time.perf_counter)

    def mark(self) -> None:
        """An iteration ends here, or the first begins."""
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def settle(self) -> None:
        """Wait for the device; time and loss of every iteration so far are then known."""
        on_device = self.device.type == "cuda"
        if on_device:
            torch.cuda.synchronize(self.device)
        fresh = self._marks[:-1], self._marks[1:]
        for before, after in zip(*fresh, strict=True):
            self.done_ms.append(before.elapsed_time(after) if on_device else (after - before) * 1e3)
        if len(self._marks) > 1:
            # an iteration that was cut short has a loss without a mark
            whole = self.losses[: len(self._marks) - 1]
            self.done_losses += torch.stack(whole).tolist()
            del self._marks[:-1]
        self.losses.clear()
        del self.data_s[len(self.done_ms) :]

    def go_on(self) -> None:
        """The time since the last mark was for something else."""
        if self._marks:
            self._marks.pop()
        self.mark()

    def bad_iteration(self) -> int | None:
        """Place of the first iteration, settled since the last call, whose loss is no number."""
        begin, self._examined = self._examined, len(self.done_losses)
        fresh = range(begin, len(self.done_losses))
        return next((i for i in fresh if not math.isfinite(self.done_losses[i])), None)

    def interval(self, epoch: Epoch, before: int, rate: float) -> Interval | None:
        """What was settled since the interval before; None if nothing was.

        Args:
            epoch: says how many samples each iteration had.
            before: iterations done before this process.
            rate: learning rate of the last iteration.
        """
        if len(self.done_ms) == self._reported:
            return None
        losses = self.done_losses[self._reported :]
        sizes = [epoch.size(before + self._reported + i) for i in range(len(losses))]
        speed = self.speed(epoch, before, self._reported)
        self._reported = len(self.done_ms)
        return Interval(
            iteration=before + len(self.done_ms),
            loss=statistics.fmean(losses, sizes if len({*sizes}) > 1 else None),
            **speed,
            elapsed_s=time.perf_counter() - self.started,
            learning_rate=rate,
        )

    def speed(self, epoch: Epoch, before: int, first: int = 0) -> dict[str, Any]:
        """Speed of the iterations from the ``first`` on, by the names of
        :class:`TrainingResult`; NaN where there are none."""
        samples = epoch.samples_before(before + len(self.done_ms))
        samples -= epoch.samples_before(before + first)
        times = self.done_ms[first:] or [math.nan]
        data, mean = (
            1e3 * statistics.fmean(self.data_s[first:] or [math.nan]),
            statistics.fmean(times),
        )
        return {
            "ms_per_iteration": statistics.median(times),
            "mean_ms_per_iteration": mean,
            "data_ms_per_iteration": data,
            # NaN first: max keeps it
            "compute_ms_per_iteration": max(mean - data, 0.0),
            "samples_per_second": 1e3 * samples / sum(times),
        }


def due(iteration: int, total: int, period: int | None) -> bool:
    """Whether something of this period is to be done after an iteration, or at the end."""
    return iteration == total or (period is not None and iteration % period == 0)


Line = Mapping[str, Any]
"""A line of metrics.jsonl: an :class:`Interval`'s fields, or with ``kind`` an 'evaluation' or a
'checkpoint'."""


class Meter(Protocol):
    """Measures energy from ``start`` to ``stop``."""

    def start(self) -> Any:
        """The run begins."""

    def stop(self, samples: int) -> dict[str, Any]:
        """The run has trained so many samples: ``power_w``, ``samples_per_joule`` and ``power``
        of :class:`TrainingResult`."""


MeterOf = Callable[[torch.device], Meter]


class Loop(Protocol):
    """What a run asks of :class:`dlrm_core.train.TrainingLoop`; its attributes are said there."""

    parameters: Parameters
    device: torch.device
    step: Any
    done: int
    total: int
    epoch: Epoch
    eval_every: int | None
    notices: list[str]
    embedding_backend: str
    writes_checkpoints: bool
    checkpoint: Path | None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last iteration."""

    def evaluate(self) -> Evaluation:
        """Predict the held-out data."""

    def save(self) -> Path | None:
        """Write a checkpoint; where, if this process did."""


class Run:
    """One call of :meth:`dlrm_core.train.TrainingLoop.train`: its events and its outcome."""

    def __init__(
        self,
        trainer: Loop,
        bar: Bar,
        lines: JsonLines | None,
        on_line: Callable[[Line], None],
        meter: MeterOf | None,
    ) -> None:
        self.trainer = trainer
        self.config = trainer.parameters.training
        self.bar, self.lines, self.on_line = bar, lines, on_line
        self.first = trainer.done
        self.measured = Measurements(trainer.device)
        self.status = "finished"
        self.last = math.nan
        self.evaluations: list[Evaluation] = []
        self.evaluation_lines: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.checkpoint_s = 0.0
        self.meter = None if meter is None else meter(trainer.device)
        if self.meter is not None:
            self.meter.start()
        if trainer.done >= trainer.total:
            self.notices.append(
                f"nothing is left to do: the checkpoint is of iteration {trainer.done:,}, and the "
                f"run ends at {trainer.total:,} (training.batches, epochs, max_steps)"
            )

    def next_event(self) -> int:
        """The next iteration after which something is to be done: a multiple of a period,
        or the last one."""
        config, done = self.config, self.trainer.done
        periods = [config.log_every, self.trainer.eval_every]
        if self.trainer.writes_checkpoints:
            periods.append(config.checkpoint_every)
        after = [done - done % period + period for period in periods if period]
        return min([self.trainer.total, *after])

    def after_iteration(self, stop: bool) -> bool:
        """Report, evaluate, write a checkpoint as is due; whether the run ends here."""
        done, total, config = self.trainer.done, self.trainer.total, self.config
        self.measured.settle()
        check = getattr(self.trainer.step.model.embeddings.backend, "check", None)
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
        if not stop and self._evaluates() and due(done, total, self.trainer.eval_every):
            reached = self._evaluate()
        if reached:
            self.report()
        if self.trainer.writes_checkpoints and (
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
        interval = self.measured.interval(
            self.trainer.epoch, self.first, self.trainer.learning_rate
        )
        if interval is not None:
            self.last = interval.loss
            self.bar.say(
                f"{interval.mean_ms_per_iteration:.1f} ms each, "
                f"{interval.samples_per_second:,.0f} samples/s, "
                f"data {interval.data_ms_per_iteration:.1f} ms, loss {interval.loss:.6f}"
            )
            self._tell(asdict(interval))

    def result(self) -> TrainingResult:
        """What the run amounted to."""
        measured, trainer, target = self.measured, self.trainer, self.config.auc_target
        known = [found.auc for found in self.evaluations if found.auc is not None]
        count, epoch = len(measured.done_ms), trainer.epoch
        samples = epoch.samples_before(self.first + count) - epoch.samples_before(self.first)
        notices = trainer.notices + self.notices
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
            checkpoint=str(trainer.checkpoint) if trainer.checkpoint else None,
            peak_memory_bytes=peak_memory(trainer.device),
            peak_memory_by_device=peak_memory_by_device(trainer.device),
            **self._power(samples),
            device=device_name(trainer.device),
            threads=torch.get_num_threads(),
            embedding_backend=trainer.embedding_backend,
            notices=notices + trainer.step.dense.precision.skipped_notice(self.first + count),
            iteration_ms=measured.done_ms,
            data_ms=[1e3 * seconds for seconds in measured.data_s],
            losses=measured.done_losses,
            evaluations=self.evaluation_lines,
        )

    def _power(self, samples: int) -> dict[str, Any]:
        if self.meter is not None:
            return self.meter.stop(samples)
        reason = "no meter was given; dlrm train of dlrm_workbook has one"
        return {
            "power_w": None,
            "samples_per_joule": None,
            "power": {
                "energy_j": None,
                "seconds": None,
                "readings": [],
                "not_measured": {"energy": reason},
            },
        }

    def _tell(self, line: Line) -> None:
        """Write a line of metrics.jsonl, and hand it to who asked for lines."""
        if self.lines is not None:
            self.lines.write(line)
        self.on_line(line)

    def _evaluates(self) -> bool:
        return self.trainer.eval_every is not None or self.config.auc_target is not None

    def _evaluate(self) -> bool:
        """Evaluate; whether the target is reached."""
        found = self.trainer.evaluate()
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
        folder = self.trainer.save()
        seconds = time.perf_counter() - started
        self.checkpoint_s += seconds
        if folder is None:  # another rank wrote it
            return
        self._tell(
            {
                "kind": "checkpoint",
                "iteration": self.trainer.done,
                "folder": str(folder),
                "seconds": seconds,
                "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            }
        )

    def _where_it_ended(self, iteration: int) -> str:
        kept = self.trainer.checkpoint
        begin = f"interrupted after iteration {iteration:,} of {self.trainer.total:,}"
        if kept is None:
            return f"{begin}; there is no checkpoint (training.checkpoint_every)"
        return f"{begin}; --resume {kept} goes on from iteration {int(kept.name[5:]):,}"

    def _weights_are_finite(self) -> bool:
        """Whether the dense weights are finite: an overflow there shows before the next loss."""
        if not (self.trainer.writes_checkpoints or self._evaluates()):
            return True
        totals = [weight.detach().sum() for weight in self.trainer.step.dense.weights]
        return bool(torch.stack(totals).isfinite().all())

    def _diverge(self, place: int | None) -> None:
        """End the run with a sentence that says where and what remains."""
        self.status = "diverged"
        if place is None:
            what = f"the weights are not finite after iteration {self.trainer.done}"
        else:
            loss = self.measured.done_losses[place]
            what = f"the loss is {loss} at iteration {self.first + place + 1}"
        kept = self.trainer.checkpoint
        remains = f"the checkpoint {kept} is from before" if kept else "there is no checkpoint"
        self.notices.append(
            f"training diverged: {what} (training.learning_rate "
            f"{self.config.learning_rate:g}, training.precision {self.config.precision}); "
            f"choose a smaller learning rate; {remains}"
        )


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
