"""The training loop: seeds, device, timing split, one JSON line per interval."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlrm_core.capacity import require_memory
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.data import Batch, batches
from dlrm_core.embeddings.choose import resolve
from dlrm_core.errors import InputError
from dlrm_core.files import JsonLines, write_json
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.parts import ITERATION_SPAN, span
from dlrm_core.precision import set_fp32_matmul, set_tf32
from dlrm_core.step import TrainingStep, data_forward, transfer_forward


@dataclass(frozen=True)
class Interval:
    """One line of metrics.jsonl: the iterations since the line before."""

    iteration: int
    """Iterations done so far."""
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


@dataclass(frozen=True)
class TrainingResult:
    """What a run amounted to; times are wall clock."""

    status: str
    """'finished', 'interrupted' (Ctrl-C) or 'diverged' (the loss is not a number)."""
    iterations: int
    loss: float
    """Mean over the last interval, what facebookresearch/dlrm prints."""
    ms_per_iteration: float
    """Median over all iterations, data included."""
    data_ms_per_iteration: float
    """Mean."""
    compute_ms_per_iteration: float
    """Mean."""
    samples_per_second: float
    """All samples over the loop's whole time."""
    elapsed_s: float
    peak_memory_bytes: int | None
    """Of the process (resident set) on the CPU, of torch's allocator on a GPU."""
    device: str
    threads: int
    embedding_backend: str
    """The one that was used; where ``auto`` was asked for, what it chose."""
    notices: list[str]
    iteration_ms: list[float]
    data_ms: list[float]
    losses: list[float]

    def summary(self) -> dict[str, Any]:
        """Everything but the lists with one entry an iteration."""
        lists = ("iteration_ms", "data_ms", "losses")
        return {name: value for name, value in asdict(self).items() if name not in lists}


@dataclass
class _Measured:
    """Raw figures of the iterations done, before a device is waited for."""

    marks: list[Any] = field(default_factory=list)
    data_s: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


class Trainer:
    """A model, its data and its step, ready to iterate.

    Raises:
        InputError: the device is not there, or the run does not fit in its memory.
    """

    def __init__(self, parameters: Parameters) -> None:
        config = parameters.training
        self.parameters = parameters
        self.device = resolve_device(config)
        self.notices: list[str] = []
        require_memory(parameters, self.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.notices += set_fp32_matmul(config.fp32_matmul, parameters.model, self.device)
        self.notices += set_tf32(config.tf32, self.device)
        huge_pages = config.embedding_backend != "torch"
        self.model = build_model(parameters.model, config.seed, self.device, huge_pages)
        loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(self.device)
        parameters, notices = resolve(parameters, self.device, self.model.embeddings)
        self.parameters = parameters
        self.notices += notices
        self.step = TrainingStep(self.model, loss, parameters.training)
        self.notices += self.step.dense.notices
        self.notices += getattr(self.model.embeddings.backend, "notices", [])
        self.batches: Iterator[Batch] = batches(parameters, self.device)
        # with data made on the device there is nothing to copy
        self.transfers = self.device.type == "cuda" and parameters.data.place == "cpu"
        self._measured = _Measured()

    def iterate(self) -> torch.Tensor:
        """One iteration, data included; its loss, not waited for."""
        with span(ITERATION_SPAN):
            started = time.perf_counter()
            batch = data_forward(self.batches)
            self._measured.data_s.append(time.perf_counter() - started)
            if self.transfers:
                batch = transfer_forward(batch, self.device)
            return self.step(batch)

    def train(
        self,
        on_interval: Callable[[Interval], None] = lambda interval: None,
        on_iteration: Callable[[int], None] = lambda iteration: None,
    ) -> TrainingResult:
        """Run all iterations; Ctrl-C ends the run early and keeps what was computed.

        ``on_iteration`` is called with the number of iterations done: with 0 before the
        first, then after each.
        """
        config = self.parameters.training
        self._measured = measured = _Measured()
        done: list[float] = []
        losses: list[float] = []
        status = "finished"
        last = math.nan
        started = time.perf_counter()
        on_iteration(0)
        measured.marks.append(self._mark())
        try:
            for iteration in range(1, config.batches + 1):
                measured.losses.append(self.iterate())
                measured.marks.append(self._mark())
                on_iteration(iteration)
                if iteration % config.log_every == 0 or iteration == config.batches:
                    interval = self._close_interval(done, losses, started)
                    last = interval.loss
                    on_interval(interval)
                    if not math.isfinite(last):
                        status = "diverged"
                        break
        except KeyboardInterrupt:
            status = "interrupted"
            # an iteration cut short has a data time or a loss without its mark
            whole = len(measured.marks) - 1
            del measured.losses[whole:], measured.data_s[whole:]
            if len(done) < whole:
                last = self._close_interval(done, losses, started).loss
        elapsed = time.perf_counter() - started
        return self._result(status, done, losses, last, elapsed)

    def close(self) -> None:
        """End the prefetching thread, if there is one."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()

    def _mark(self) -> Any:
        """A point in time: the host's on the CPU, the device's own on a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _close_interval(self, done: list[float], losses: list[float], started: float) -> Interval:
        """Wait for the device and account for the iterations since the last interval."""
        measured, first = self._measured, len(done)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for before, after in itertools.pairwise(measured.marks[first:]):
            done.append(
                before.elapsed_time(after) if self.device.type == "cuda" else (after - before) * 1e3
            )
        losses += torch.stack(measured.losses[first:]).tolist()
        times = done[first:]
        data = 1e3 * statistics.fmean(measured.data_s[first:])
        return Interval(
            iteration=len(done),
            loss=statistics.fmean(losses[first:]),
            ms_per_iteration=statistics.median(times),
            data_ms_per_iteration=data,
            compute_ms_per_iteration=max(0.0, statistics.fmean(times) - data),
            samples_per_second=1e3 * self.parameters.training.batch_size * len(times) / sum(times),
            elapsed_s=time.perf_counter() - started,
        )

    def _result(
        self, status: str, done: list[float], losses: list[float], last: float, elapsed: float
    ) -> TrainingResult:
        data = [1e3 * seconds for seconds in self._measured.data_s[: len(done)]]
        mean = statistics.fmean(done) if done else math.nan
        data_mean = statistics.fmean(data) if data else math.nan
        return TrainingResult(
            status=status,
            iterations=len(done),
            loss=last,
            ms_per_iteration=statistics.median(done) if done else math.nan,
            data_ms_per_iteration=data_mean,
            compute_ms_per_iteration=max(0.0, mean - data_mean) if done else math.nan,
            samples_per_second=(
                1e3 * self.parameters.training.batch_size * len(done) / sum(done)
                if done
                else math.nan
            ),
            elapsed_s=elapsed,
            peak_memory_bytes=peak_memory(self.device),
            device=device_name(self.device),
            threads=torch.get_num_threads(),
            embedding_backend=self.parameters.training.embedding_backend,
            notices=self.notices + self.step.dense.precision.skipped_notice(len(done)),
            iteration_ms=done,
            data_ms=data,
            losses=losses,
        )


def train(
    parameters: Parameters,
    folder: Path | None = None,
    on_interval: Callable[[Interval], None] = lambda interval: None,
    progress: bool = True,
    on_iteration: Callable[[int], None] = lambda iteration: None,
) -> TrainingResult:
    """Train as the parameters say.

    Args:
        folder: gets ``metrics.jsonl`` (a line per interval, written as it
            happens) and ``result.json`` (written whole, at the end).
        on_interval: called with each interval.
        progress: show a progress bar.
        on_iteration: called with the number of iterations done, 0 before the first.

    Raises:
        InputError: the device is not there, the run does not fit in memory, or
            the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        lines = None
        if folder is not None:
            lines = stack.enter_context(JsonLines(folder / "metrics.jsonl"))
        trainer = Trainer(parameters)
        stack.callback(trainer.close)
        bar = stack.enter_context(_progress_bar(parameters, enabled=progress))

        def report(interval: Interval) -> None:
            if lines is not None:
                lines.write(asdict(interval))
            bar.set_postfix_str(
                f"{interval.samples_per_second:,.0f} samples/s, "
                f"{interval.ms_per_iteration:.1f} ms/iteration "
                f"(data {interval.data_ms_per_iteration:.1f}), loss {interval.loss:.6f}"
            )
            on_interval(interval)

        def count(done: int) -> None:
            bar.update(1 if done else 0)
            on_iteration(done)

        result = trainer.train(report, count)
    if folder is not None:
        write_json(folder / "result.json", asdict(result))
    return result


def resolve_device(config: TrainingConfig) -> torch.device:
    """The device that ``training.device`` means on this machine.

    Raises:
        InputError: CUDA is asked for and torch sees no GPU.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        built = torch.version.cuda or "none"
        raise InputError(
            f"training.device is 'cuda', but torch {torch.__version__} sees no GPU "
            f"(its CUDA: {built}); use training.device: cpu or auto"
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def device_name(device: torch.device) -> str:
    """'cpu', or 'cuda (NVIDIA H100 80GB HBM3)'."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return "cpu"


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the highest point so far; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # not getrusage's ru_maxrss: that survives exec, so a child would start with its parent's peak
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


class _NoBar:
    """Stands in where tqdm is not installed (bare GPU nodes)."""

    def set_postfix_str(self, text: str) -> None:
        """Nothing to show."""

    def update(self, count: int) -> None:
        """Nothing to show."""


@contextlib.contextmanager
def _progress_bar(parameters: Parameters, enabled: bool) -> Iterator[Any]:
    if not enabled:
        yield _NoBar()
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        print("no progress bar: tqdm is not installed", file=sys.stderr)
        yield _NoBar()
        return
    with tqdm(total=parameters.training.batches, unit="it", desc="training") as bar:
        yield bar


def json_line(interval: Interval) -> str:
    """An interval as one line of JSON."""
    return json.dumps(asdict(interval))


__all__ = [
    "InputError",
    "Interval",
    "Trainer",
    "TrainingResult",
    "device_name",
    "json_line",
    "resolve_device",
    "train",
]
