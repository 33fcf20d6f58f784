"""One rank's training: the single process's loop, its decisions taken together.

:func:`train` is ``dlrm train`` as one of several ranks: rank 0 writes and prints, the others
take part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_core.base.machine import StopRequest, stop_requests
from dlrm_core.commands import print_line
from dlrm_core.config import Parameters
from dlrm_core.data.batch import Batch, Share
from dlrm_core.data.loader import make_generator
from dlrm_core.parts import run_part
from dlrm_core.run import resume
from dlrm_core.run.checkpoint import Checkpoint
from dlrm_core.run.evaluate import Evaluation
from dlrm_core.run.reports import Observer, metrics_lines
from dlrm_core.train import STOPPING, Feed, TrainingLoop, only_trainer
from dlrm_ranks.checkpointing import filled_step, save
from dlrm_ranks.collectives import Collectives
from dlrm_ranks.plan import describe, require_possible, require_torchrec, with_whole_batches
from dlrm_ranks.predictor import HOST, RankPredictions
from dlrm_ranks.step import DistributedStep
from dlrm_ranks.tables import LocalBatch, about_rank, local_batch
from dlrm_ranks.watch import Watch, leave, tell_launcher, watched_ranks
from dlrm_ranks.world import World, gathered

REPEATED_S = 2.0
"""A second signal within this time is the first once more: Ctrl-C reaches a rank from the
terminal and from torchrun."""


class DistributedTrainer(TrainingLoop[DistributedStep]):
    """One rank's part of the model, its slice of the data, and its step.

    Every rank makes or reads its slice of the batches that one process with the same seed would
    have, and holds its part of that process's weights. A signal to any rank ends all of them
    after the same iteration.

    Args:
        place: folder for checkpoints; rank 0 writes them.
        watch: told which iteration is done; None: nobody watches.
    """

    ends_alone = False

    def __init__(
        self,
        parameters: Parameters,
        world: World,
        collectives: Collectives,
        checkpoint: Checkpoint | None = None,
        place: Path | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.world, self._collectives, self._watch = world, collectives, watch
        if checkpoint is not None:
            parameters = resume.with_choices_of(checkpoint, parameters)
        step = filled_step(parameters, world, collectives, checkpoint)
        parameters, notices = step.parameters, step.dense.notices
        if checkpoint is not None:
            notices = notices + resume.changed_settings(parameters, checkpoint)
        self.tables = step.tables
        self._predictions = RankPredictions(step, world)
        share = Share(world.rank, world.size)
        feed = Feed(make_generator(parameters, HOST, share), HOST, share=share)
        super().__init__(parameters, step, feed, checkpoint, place, notices, writes=world.first)
        self.embedding_backend = self.tables.backend
        self._stops = 0.0

    def holdings(self) -> list[str]:
        """A line a rank: who it is, and which tables it has; every rank must ask."""
        bound = f", bound to {self.world.bound_to}" if self.world.bound_to else ""
        process = f"host {self.world.host}, process {os.getpid()}{bound}"
        return describe(self.tables.shards, gathered(self.world, process))

    def next_batch(self) -> LocalBatch:
        """This rank's slice of the next global batch."""
        rows = self.parameters.model.table_rows
        return run_part(
            "data", "forward", lambda: local_batch(next(self.batches), self.world, rows)
        )

    def learn(self, batch: LocalBatch) -> torch.Tensor:
        """Train on a slice; the loss of the global batch."""
        loss, stops = self.step(batch, self._stop.requested)
        self._stops = float(stops)
        return loss

    def iterate(self) -> torch.Tensor:
        """One iteration, data included; the loss of the global batch."""
        loss = super().iterate()
        if self._watch is not None:
            self._watch.iteration = self.done
        return loss

    def stop_requests(self) -> AbstractContextManager[StopRequest]:
        """What notes signals while the loop runs, for the next exchange."""
        notice = f"{STOPPING}, with a checkpoint" if self.writes_checkpoints else STOPPING
        return stop_requests(True, notice if self.world.first else "", REPEATED_S)

    def is_to_stop(self) -> bool:
        """Whether any rank was asked to stop before the iteration just done."""
        return bool(self._stops)

    def evaluate(self) -> Evaluation:
        """Predictions on the held-out data; every rank predicts some and has the result."""
        room = self.parameters.training.batch_size
        return self._predictions.evaluate(self.held_out, room, self.loss, self.done)

    def agree(self, seconds: float) -> float:
        """Rank 0's seconds, of all who train together."""
        return self._predictions.agree(seconds)

    def predict(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) of a whole batch, on every rank; all must ask."""
        return self._predictions.of_slices(batch)

    def write_checkpoint(self, state: Mapping[str, Any]) -> Path | None:
        """Write what all ranks hold; its folder, on rank 0."""
        sections = self.parameters.to_sections()
        written = save(
            self._folder, self.done, sections, self.step, state, self.world, self._collectives
        )
        dist.barrier()
        return written


def train(
    parameters: Parameters,
    arguments: argparse.Namespace,
    exit_codes: Mapping[str, int],
    observer: Observer,
) -> NoReturn:
    """Train as one rank, and end the process; prints what ``dlrm train`` prints, on rank 0.

    Args:
        exit_codes: of the process, by the run's status.
        observer: sees this rank's run; the first rank's prints its lines.

    Raises:
        InputError: as :func:`dlrm_core.train.train`, on every rank that finds it.
    """
    require_torchrec()
    require_possible(parameters, int(os.environ["WORLD_SIZE"]))
    parameters, left_out = with_whole_batches(parameters)
    if arguments.spans:
        raise InputError("--spans is for a run of one process; see docs/scaling.md")
    if getattr(arguments, "mllog", None):
        raise InputError("--mllog is for a run of one process; see docs/training.md")
    folder = Path(arguments.output) if arguments.output else None
    place = resume.checkpoint_place(parameters.training, folder)
    checkpoint = resume.checkpoint_to_resume(parameters, place)
    early = resume.nothing_to_resume(parameters.training, place)
    with contextlib.ExitStack() as stack:
        meeting = watched_ranks(parameters.training, "dlrm train")
        world, collectives, watch = stack.enter_context(meeting)
        if folder is not None and world.first:
            stack.enter_context(only_trainer(folder))
        require_same_start(gathered(world, checkpoint.step if checkpoint else 0))
        trainer = DistributedTrainer(parameters, world, collectives, checkpoint, place, watch)
        stack.callback(trainer.close)
        trainer.notices += left_out
        _introduce(trainer, early)
        lines, first = None, world.first
        if folder is not None and first:
            lines = stack.enter_context(metrics_lines(folder / "metrics.jsonl", checkpoint))
        result = trainer.train(observer, lines)
        ranks = gathered(
            world, about_rank(world, trainer.tables) | {"ms_per_iteration": result.ms_per_iteration}
        )
        if folder is not None and first:
            write_json(folder / "result.json", asdict(result) | {"ranks": ranks})
        for notice in result.notices if first else ():
            if notice not in early:
                print(notice, file=sys.stderr)
        if first:
            print_line(result.summary() | {"ranks": ranks})
    if result.status != "finished":
        tell_launcher("; ".join(result.notices))
    leave(exit_codes[result.status])


@contextlib.contextmanager
def rank_trainer(parameters: Parameters, command: str) -> Iterator[DistributedTrainer]:
    """One rank's trainer from initial weights, for who only measures: no folder, no checkpoint.

    Raises:
        InputError: as :class:`DistributedTrainer`.
    """
    require_torchrec()
    require_possible(parameters, int(os.environ["WORLD_SIZE"]))
    parameters, left_out = with_whole_batches(parameters)
    with watched_ranks(parameters.training, command) as (world, collectives, watch):
        trainer = DistributedTrainer(parameters, world, collectives, watch=watch)
        trainer.notices += left_out
        yield trainer


def require_same_start(steps: Sequence[int]) -> None:
    """Every rank goes on from the same checkpoint, or all begin anew.

    Args:
        steps: of each rank's checkpoint, in their order; 0: it found none.

    Raises:
        InputError: they see different folders, as hosts without a shared file system do.
    """
    if len(set(steps)) == 1:
        return
    other = next(rank for rank, step in enumerate(steps) if step != steps[0])
    first, second = (
        f"the checkpoint of step {step:,}" if step else "no checkpoint"
        for step in (steps[0], steps[other])
    )
    raise InputError(
        f"training.resume: rank 0 finds {first}, but rank {other} {second}; the folder of "
        "checkpoints must be one that all hosts share"
    )


def _introduce(trainer: DistributedTrainer, early: list[str]) -> None:
    """Print who takes part and what each rank holds, on standard error."""
    world, holdings = trainer.world, trainer.holdings()
    if not world.first:
        return
    training = trainer.parameters.training
    print(
        f"{world.size} ranks ({world.backend}), {world.local_size} on this node, "
        f"{world.threads} {'thread' if world.threads == 1 else 'threads'} each, "
        f"{training.batch_size // world.size:,} of {training.batch_size:,} samples an iteration "
        f"each, sharding {training.sharding}",
        file=sys.stderr,
    )
    for line in [*early, *holdings]:
        print(line, file=sys.stderr, flush=True)
