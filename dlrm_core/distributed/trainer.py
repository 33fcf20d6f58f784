"""The training loop of one rank: the single process's, its decisions taken together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import torch.distributed as dist

from dlrm_core.auc import QualityMeter
from dlrm_core.checkpoints import Checkpoint, CheckpointFolder
from dlrm_core.config import Parameters
from dlrm_core.data import Batch, batches
from dlrm_core.data.loader import make_generator
from dlrm_core.data.position import Followed, Resumable
from dlrm_core.distributed.checkpointing import restore, save
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.local_batch import LocalBatch, local_batch
from dlrm_core.distributed.plan import describe
from dlrm_core.distributed.step import DistributedStep
from dlrm_core.distributed.tables import ShardedTables
from dlrm_core.distributed.watch import Watch
from dlrm_core.distributed.world import World, agreed, gathered
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.evaluation import Evaluation, HeldOut
from dlrm_core.model import (
    DLRM,
    ClickLoss,
    fill_dense_like_facebook,
    fill_dense_with_torch,
)
from dlrm_core.parts import ITERATION_SPAN, part, span
from dlrm_core.precision import set_fp32_matmul, set_tf32
from dlrm_core.resuming import changed_settings, restore_position, state_of
from dlrm_core.schedules import schedule_of, total_steps
from dlrm_core.step import optimizer_update
from dlrm_core.training import Trainer
from dlrm_core.training_results import Interval, Measurements, TrainingResult
from dlrm_core.training_run import Line, Run

REPEATED_S = 2.0
"""A second signal within this time is the first once more: Ctrl-C reaches a rank from the
terminal and from torchrun."""


class DistributedTrainer(Trainer):
    """One rank's part of the model, its slice of the data, and its step.

    Every rank makes the whole global batch and takes its slice, so data and weights are
    those of one process with the same seed.

    Args:
        place: folder for checkpoints; rank 0 writes them.
        watch: told which iteration is done; None: nobody watches.
    """

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        collectives: Collectives,
        checkpoint: Checkpoint | None = None,
        place: Path | None = None,
        watch: Watch | None = None,
    ) -> None:
        config = parameters.training
        # TorchRec's tables, whatever one process would use
        config = dataclasses.replace(config, embedding_backend="torch")
        self.world, self.device, self._watch = world, world.device, watch
        self._collectives = collectives
        self.parameters = parameters
        self.notices: list[str] = []
        self.notices += set_fp32_matmul(config.fp32_matmul, parameters.model, self.device)
        self.notices += set_tf32(config.tf32, self.device)
        if checkpoint is not None:
            self.notices += changed_settings(parameters, checkpoint)
        self.model = make_model(parameters, world.device)
        self.tables = ShardedTables(parameters, world, collectives)
        self.loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(self.device)
        self.dstep = DistributedStep(
            self.model, self.tables, self.loss, config, world.size, collectives
        )
        self.step = self.dstep  # type: ignore[assignment]
        self.notices += self.dstep.dense.notices
        generator = make_generator(parameters, torch.device("cpu"))
        if checkpoint is None:
            fill(self.model, self.tables, parameters)
        else:
            restore(checkpoint, self.dstep, world, collectives)
            restore_position(checkpoint, generator)
        self.done = self.first = checkpoint.step if checkpoint is not None else 0
        self.total = total_steps(config, parameters.data.generator, generator)
        self._schedule = schedule_of(config)
        self._rate = config.learning_rate
        self._folder: CheckpointFolder | None = None
        self._writes = place is not None
        self._followed: Followed | None = None
        self.checkpoint = checkpoint.folder if checkpoint is not None else None
        if place is not None:
            if world.first:
                self._folder = CheckpointFolder(place, config.keep_checkpoints, self.done)
            if isinstance(generator, Resumable):
                generator = self._followed = Followed(generator)
        self.batches: Iterator[Batch] = batches(parameters, torch.device("cpu"), generator)
        self.held_out = HeldOut(parameters, torch.device("cpu"))
        self.transfers = False
        self._measured = Measurements(self.device)
        self._stop = False
        self._stops = 0.0

    def holdings(self) -> list[str]:
        """A line a rank: who it is, and which tables it has; every rank must ask."""
        own = f"host {self.world.host}, process {os.getpid()}"
        return describe(self.tables.shards, gathered(self.world, own))

    def iterate(self) -> torch.Tensor:
        """One iteration, data included; the loss of the global batch."""
        with span(ITERATION_SPAN):
            started = time.perf_counter()
            batch = self.next_batch()
            self._measured.data_s.append(time.perf_counter() - started)
            return self.train_on(batch)

    def next_batch(self) -> LocalBatch:
        """This rank's slice of the next global batch."""
        batch = data_forward(self.batches, self.world, self.parameters.model.table_rows)
        if self._followed is not None:
            self._followed.used()
        return batch

    def train_on(self, batch: LocalBatch) -> torch.Tensor:
        """Train on a slice; the loss of the global batch."""
        rate = self._schedule.rate(self.done + 1)
        if rate != self._rate:
            self._rate = rate
            optimizer_update(lambda: self.dstep.set_learning_rate(rate))
        loss, stops = self.dstep(batch, self._stop)
        self._stops = float(stops)
        self.done += 1
        if self._watch is not None:
            self._watch.iteration = self.done
        return loss

    def train(
        self,
        on_interval: Callable[[Interval], None] = lambda interval: None,
        on_iteration: Callable[[int], None] = lambda iteration: None,
        on_line: Callable[[Line], None] = lambda line: None,
    ) -> TrainingResult:
        """Run all iterations; a signal to any rank ends all of them after the same one."""
        self.done = first = self.first
        run = Run(self, on_interval, on_line)
        self._measured = measured = run.measured
        on_iteration(0)
        measured.mark()
        event = run.next_event()
        with self._stop_requests():
            while self.done < self.total:
                measured.losses.append(self.iterate())
                measured.mark()
                on_iteration(self.done - first)
                stopped = bool(self._stops)
                if self.done == event or stopped:
                    if run.after_iteration(stopped):
                        break
                    event = run.next_event()
        return dataclasses.replace(run.result(), embedding_backend="torchrec")

    def evaluate(self) -> Evaluation:
        """Predictions on the held-out data; every rank predicts its slice and has the result."""
        return _evaluate(self)

    def save(self) -> Path:
        """Write a checkpoint of the run as it stands."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        state = state_of(self.step, self._followed, self.done)
        written = save(
            self._folder,
            self.done,
            self.parameters.to_sections(),
            self.dstep,
            state,
            self.world,
            self._collectives,
        )
        dist.barrier()
        if written is not None:
            self.checkpoint = written
        return written or Path()

    @property
    def writes_checkpoints(self) -> bool:
        """Whether there is a folder for them, on rank 0."""
        return self._writes

    def close(self) -> None:
        """End the prefetching thread, if there is one, and let go of the folder."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()
        if self._folder is not None:
            self._folder.close()

    @contextlib.contextmanager
    def _stop_requests(self) -> Iterator[None]:
        """Note a signal for the next exchange; one that comes later again interrupts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        asked_at = 0.0

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal asked_at
            now = time.monotonic()
            if self._stop and now - asked_at > REPEATED_S:
                raise KeyboardInterrupt
            if not self._stop:
                self._stop, asked_at = True, now

        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_model(parameters: Parameters, device: torch.device) -> DLRM:
    """MLPs and interaction; tables are elsewhere."""
    dim = parameters.model.embedding_dim
    return DLRM(parameters.model, make_tables=lambda: EmbeddingTables([], dim)).to(device)


def fill(model: DLRM, tables: ShardedTables, parameters: Parameters) -> None:
    """Initial weights, the ones that one process has."""
    seed = parameters.training.seed
    if parameters.model.init == "facebook":
        random = np.random.RandomState(seed)
        tables.fill_like_facebook(random)
        fill_dense_like_facebook(model, random)
        return
    device = model.top_mlp.linears[0].weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tables.fill_with_torch(generator)
    fill_dense_with_torch(model, generator)


@part("data", "forward")
def data_forward(stream: Iterator[Batch], world: World, table_rows: tuple[int, ...]) -> LocalBatch:
    """The next global batch, made or waited for, and this rank's slice of it."""
    return local_batch(next(stream), world, table_rows)


def _evaluate(trainer: DistributedTrainer) -> Evaluation:
    world, loss = trainer.world, trainer.loss
    times_s: list[float] = []
    data_s = weighted = 0.0
    started = begun = time.perf_counter()
    with QualityMeter() as meter:
        for batch in trainer.held_out:
            made = time.perf_counter()
            data_s += made - begun
            whole = _padded(batch, world.size)
            own = local_batch(whole, world, trainer.parameters.model.table_rows)
            predictions = trainer.dstep.predict(own)
            parts = [torch.empty_like(predictions) for _ in range(world.size)]
            dist.all_gather(parts, predictions)
            scores = torch.cat(parts)[: batch.size].cpu()
            weighted += float(loss(scores.to(world.device), batch.targets.to(world.device))) * (
                batch.size
            )
            meter.add(scores.numpy(), batch.targets.numpy())
            begun = time.perf_counter()
            times_s.append(begun - made)
        quality = meter.quality()
        # the clocks differ, and what follows must not
        seconds = agreed(world, time.perf_counter() - started)
        return Evaluation(
            iteration=trainer.done,
            samples=quality.samples,
            auc=quality.auc,
            loss=weighted / quality.samples,
            log_loss=quality.log_loss,
            accuracy=quality.accuracy,
            click_share=quality.click_share,
            seconds=seconds,
            data_seconds=data_s,
            samples_per_second=quality.samples / seconds,
            ms_per_iteration=1e3 * statistics.median(times_s),
            graded_targets=meter.graded,
        )


def _padded(batch: Batch, ranks: int) -> Batch:
    """The batch, its last sample repeated until the ranks can share it evenly."""
    missing = -batch.size % ranks
    if not missing:
        return batch
    indices, offsets, starts = [], [], [0]
    for t in range(batch.tables):
        own, begins = batch.table_indices(t), batch.offsets[t]
        last = own[int(begins[-1]) :]
        indices.append(torch.cat([own, *[last] * missing]))
        more = own.numel() + last.numel() * torch.arange(missing)
        offsets.append(torch.cat([begins, more]))
        starts.append(starts[-1] + indices[-1].numel())
    return Batch(
        torch.cat([batch.dense, *[batch.dense[-1:]] * missing]),
        torch.cat(indices),
        torch.stack(offsets),
        tuple(starts),
        torch.cat([batch.targets, *[batch.targets[-1:]] * missing]),
    )
