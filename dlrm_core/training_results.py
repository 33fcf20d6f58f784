"""What the training loop measures and hands back: intervals, evaluations, the result."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Interval:
    """One line of metrics.jsonl: the iterations since the line before."""

    iteration: int
    """Iterations done so far, those before a resumed checkpoint included."""
    loss: float
    """Mean over the interval."""
    ms_per_iteration: float
    """Median, data included."""
    data_ms_per_iteration: float
    """Mean time in which the loop made, or waited for, its batch."""
    compute_ms_per_iteration: float
    """Mean of the rest: transfer, forward, backward, update."""
    samples_per_second: float
    elapsed_s: float
    learning_rate: float
    """Of the interval's last iteration."""


@dataclass(frozen=True)
class TrainingResult:
    """What a run amounted to; times are wall clock, without evaluations and checkpoints."""

    status: str
    """'finished', 'interrupted' (Ctrl-C, SIGTERM) or 'diverged' (the loss is not a number)."""
    iterations: int
    """Done by this process."""
    first_iteration: int
    """Done before, by those that wrote the checkpoint resumed from; 0 for a new run."""
    loss: float
    """Mean over the last interval, what facebookresearch/dlrm prints."""
    ms_per_iteration: float
    """Median over all iterations, data included."""
    data_ms_per_iteration: float
    """Mean."""
    compute_ms_per_iteration: float
    """Mean."""
    samples_per_second: float
    """All samples over the time of all iterations."""
    elapsed_s: float
    """Of everything, evaluations and checkpoints included."""
    evaluation_s: float
    checkpoint_s: float
    auc: float | None
    """Of the last evaluation; None if there was none."""
    best_auc: float | None
    reached_target: bool | None
    """Whether an evaluation reached ``training.auc_target``; None without a target."""
    checkpoint: str | None
    """The last checkpoint that is whole."""
    peak_memory_bytes: int | None
    """Of the process (resident set) on the CPU, of torch's allocator on a GPU."""
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

    def interval(self, batch_size: int, before: int, rate: float) -> Interval | None:
        """What was settled since the interval before; None if nothing was.

        Args:
            before: iterations done before this process.
            rate: learning rate of the last iteration.
        """
        times = self.done_ms[self._reported :]
        if not times:
            return None
        losses = self.done_losses[self._reported :]
        data = 1e3 * statistics.fmean(self.data_s[self._reported :])
        self._reported = len(self.done_ms)
        return Interval(
            iteration=before + len(self.done_ms),
            loss=statistics.fmean(losses),
            ms_per_iteration=statistics.median(times),
            data_ms_per_iteration=data,
            compute_ms_per_iteration=max(0.0, statistics.fmean(times) - data),
            samples_per_second=1e3 * batch_size * len(times) / sum(times),
            elapsed_s=time.perf_counter() - self.started,
            learning_rate=rate,
        )

    def overall(self, batch_size: int) -> dict[str, Any]:
        """Speed of all iterations, by the names of :class:`TrainingResult`."""
        done = self.done_ms
        if not done:
            names = ("ms", "data_ms", "compute_ms")
            return {f"{name}_per_iteration": math.nan for name in names} | {
                "samples_per_second": math.nan
            }
        data = 1e3 * statistics.fmean(self.data_s)
        return {
            "ms_per_iteration": statistics.median(done),
            "data_ms_per_iteration": data,
            "compute_ms_per_iteration": max(0.0, statistics.fmean(done) - data),
            "samples_per_second": 1e3 * batch_size * len(done) / sum(done),
        }


def next_event(done: int, total: int, periods: tuple[int | None, ...]) -> int:
    """The first iteration after ``done`` that is a multiple of a period, or the last one."""
    after = [done - done % period + period for period in periods if period]
    return min([total, *after])


def due(iteration: int, total: int, period: int | None) -> bool:
    """Whether something of this period is to be done after an iteration, or at the end."""
    return iteration == total or (period is not None and iteration % period == 0)


__all__ = ["Interval", "Measurements", "TrainingResult", "due", "next_event"]
