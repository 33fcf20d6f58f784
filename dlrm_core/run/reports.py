"""What a run of the training loop measures and reports."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.files import JsonLines, write_text
from dlrm_core.base.machine import device_name, peak_memory, peak_memory_by_device
from dlrm_core.data.epochs import Epoch
from dlrm_core.run.checkpoint import Checkpoint
from dlrm_core.run.evaluate import Evaluation

NO_METER: Mapping[str, Any] = {
    "energy_j": None,
    "seconds": None,
    "readings": [],
    "not_measured": {"energy": "no meter was given; dlrm train of dlrm_workbook has one"},
}


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run amounted to; times are wall clock.

    How fast it was comes first, without evaluations and checkpoints; a line of metrics.jsonl has
    the same of the iterations since the line before.
    """

    loss: float
    """Mean over the samples of an interval, here the last; facebookresearch/dlrm prints it."""
    ms_per_iteration: float
    """Median, data included."""
    mean_ms_per_iteration: float
    """Mean: what the two below add up to, and what ``samples_per_second`` goes by."""
    data_ms_per_iteration: float
    """Mean time in which the loop made, or waited for, its batch."""
    compute_ms_per_iteration: float
    """Mean of the rest: transfer, forward, backward, update."""
    samples_per_second: float
    status: str
    """'finished', 'interrupted' (Ctrl-C, SIGTERM) or 'diverged' (the loss is not a number)."""
    iterations: int
    """Done by this process."""
    first_iteration: int
    """Done before, by those that wrote the checkpoint resumed from; 0 for a new run."""
    samples: int
    """Trained on by this process."""
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
    power_w: float | None = None
    """Mean over ``elapsed_s`` of all devices that could be measured; None: see ``power``."""
    samples_per_joule: float | None = None
    """Samples/s per watt."""
    power: dict[str, Any] = field(default_factory=lambda: dict(NO_METER))
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


Line = Mapping[str, Any]
"""A line of metrics.jsonl: the first fields of :class:`TrainingResult` of an interval, with its
last ``iteration`` (those before a resumed checkpoint included) and the ``learning_rate`` there; or
with ``kind`` an 'evaluation' or a 'checkpoint'."""


class Observer:
    """Watches a run; the loop calls it as things happen. This one does nothing."""

    def begin(self, loop: Any) -> None:
        """The run of a :class:`dlrm_core.train.TrainingLoop` is about to start."""

    def iteration(self, done: int) -> None:
        """So many iterations are done by this process: 0 before the first, then after each."""

    def line(self, line: Line) -> None:
        """A line of metrics.jsonl, as it is written."""

    def power(self, samples: int) -> Mapping[str, Any]:
        """``power_w``, ``samples_per_joule`` and ``power`` of :class:`TrainingResult`, asked for
        at the end of a run that has trained so many samples."""
        return {}

    def end(self, result: TrainingResult) -> None:
        """The run has ended."""


class Report:
    """One run of a loop, as far as it has come: what iterations took, and what was told of it.

    On a GPU nothing waits for the device until :meth:`settle`. Before it were ``first`` iterations;
    ``observer`` is shown each line, and ``lines``, metrics.jsonl, gets it, where there are any.

    Attributes:
        data_s: seconds in which each iteration made or waited for its batch.
        losses: of the iterations since :meth:`settle`, as tensors.
        done_ms: of each settled iteration.
        done_losses: as many.
    """

    def __init__(
        self,
        device: torch.device,
        first: int,
        epoch: Epoch,
        observer: Observer | None = None,
        lines: JsonLines | None = None,
    ) -> None:
        self.data_s: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.done_ms: list[float] = []
        self.done_losses: list[float] = []
        self.status = "finished"
        self.notices: list[str] = []
        self._device, self._first, self._epoch = device, first, epoch
        self._observer, self._lines = observer or Observer(), lines
        self._marks: list[Any] = []
        self._reported = self._examined = 0
        self._started = time.perf_counter()
        self._loss = math.nan
        self._last_evaluation: Evaluation | None = None
        self._evaluations: list[dict[str, Any]] = []
        self._checkpoint_s = 0.0

    @property
    def done(self) -> int:
        """Iterations whose time is known, and those before this run."""
        return self._first + len(self.done_ms)

    @property
    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def mark(self) -> None:
        """An iteration ends here, or the first begins."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
        else:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    def settle(self) -> None:
        """Wait for the device; time and loss of every iteration so far are then known."""
        on_device = self._device.type == "cuda"
        if on_device:
            torch.cuda.synchronize(self._device)
        for before, after in itertools.pairwise(self._marks):
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
        fresh, self._examined = range(self._examined, len(self.done_losses)), len(self.done_losses)
        return next((i for i in fresh if not math.isfinite(self.done_losses[i])), None)

    def interval(self, rate: float) -> None:
        """Tell of what was settled since the last interval; ``rate`` is the last learning rate."""
        begin, self._reported = self._reported, len(self.done_ms)
        losses = self.done_losses[begin:]
        if not losses:
            return
        sizes = [self._epoch.size(batch) for batch in range(self._first + begin, self.done)]
        self._loss = statistics.fmean(losses, sizes if len({*sizes}) > 1 else None)
        line = {"iteration": self.done, "elapsed_s": self._elapsed_s, "learning_rate": rate}
        self._tell(self._speed(begin) | line)

    def _speed(self, begin: int = 0) -> dict[str, Any]:
        """Speed from the ``begin``-th iteration on, by the names of the result; NaN of none."""
        times = self.done_ms[begin:] or [math.nan]
        mean = statistics.fmean(times)
        data = 1e3 * statistics.fmean(self.data_s[begin:] or [math.nan])
        return {
            "loss": self._loss,
            "ms_per_iteration": statistics.median(times),
            "mean_ms_per_iteration": mean,
            "data_ms_per_iteration": data,
            # NaN first: max keeps it
            "compute_ms_per_iteration": max(mean - data, 0.0),
            "samples_per_second": 1e3 * self._samples(begin) / sum(times),
        }

    def _samples(self, begin: int = 0) -> int:
        """Samples of the iterations from the ``begin``-th on."""
        before = self._epoch.samples_before(self._first + begin)
        return self._epoch.samples_before(self.done) - before

    def evaluation(self, evaluation: Evaluation) -> None:
        """Tell of an evaluation that was made just now."""
        self._last_evaluation = evaluation
        line = {"kind": "evaluation"} | asdict(evaluation)
        self._evaluations.append(line | {"elapsed_s": self._elapsed_s})
        self._tell(self._evaluations[-1])

    def checkpoint(self, iteration: int, save: Callable[[], Path | None]) -> None:
        """Have a checkpoint written, and tell of it unless another rank wrote it."""
        started = time.perf_counter()
        if self._lines is not None:
            # who goes on from the checkpoint expects the lines before it
            self._lines.sync()
        folder = save()
        seconds = time.perf_counter() - started
        self._checkpoint_s += seconds
        if folder is not None:
            size = sum(file.stat().st_size for file in folder.rglob("*"))
            line = {"kind": "checkpoint", "iteration": iteration, "folder": str(folder)}
            self._tell(line | {"seconds": seconds, "bytes": size})

    def all_notices(self) -> list[str]:
        """What a reader must know of the run, and of its last evaluation."""
        return self.notices + (self._last_evaluation.notices() if self._last_evaluation else [])

    def result(
        self,
        target: float | None,
        checkpoint: Path | None,
        embedding_backend: str,
        notices: list[str],
    ) -> TrainingResult:
        """What the run amounted to; ``target`` is the AUC that was to be reached, if any."""
        aucs = [line["auc"] for line in self._evaluations if line["auc"] is not None]
        best, last, samples = max(aucs, default=None), self._last_evaluation, self._samples()
        return TrainingResult(
            status=self.status,
            iterations=len(self.done_ms),
            first_iteration=self._first,
            samples=samples,
            **self._speed(),
            elapsed_s=self._elapsed_s,
            evaluation_s=sum(line["seconds"] for line in self._evaluations),
            checkpoint_s=self._checkpoint_s,
            auc=last.auc if last else None,
            best_auc=best,
            reached_target=None if target is None else best is not None and best >= target,
            checkpoint=str(checkpoint) if checkpoint else None,
            peak_memory_bytes=peak_memory(self._device),
            peak_memory_by_device=peak_memory_by_device(self._device),
            **self._observer.power(samples),
            device=device_name(self._device),
            threads=torch.get_num_threads(),
            embedding_backend=embedding_backend,
            notices=notices,
            iteration_ms=self.done_ms,
            data_ms=[1e3 * seconds for seconds in self.data_s],
            losses=self.done_losses,
            evaluations=self._evaluations,
        )

    def _tell(self, line: Line) -> None:
        if self._lines is not None:
            self._lines.write(line)
        self._observer.line(line)


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
