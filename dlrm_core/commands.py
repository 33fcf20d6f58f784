"""The headless subcommands that run the workload: train, evaluate, infer.

They import no notebook or plotting package, so they start fast, run on a bare
GPU node, and are what profilers are put around.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from dlrm_core.checkpoint import Checkpoint, find_checkpoint, read_checkpoint
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import attach
from dlrm_core.errors import InputError
from dlrm_core.evaluate import HeldOut, held_out_batches, predict
from dlrm_core.evaluate import evaluate as evaluate_batches
from dlrm_core.files import plain
from dlrm_core.inference import POOL_BATCHES, measure_latency, pool_of
from dlrm_core.machine import (
    device_name,
    resolve_device,
    terminate_like_interrupt,
)
from dlrm_core.memory import require_memory
from dlrm_core.model import ClickLoss
from dlrm_core.parts import log_spans
from dlrm_core.precision import DensePrecision
from dlrm_core.progress import Bar
from dlrm_core.reports import MeterOf
from dlrm_core.resume import (
    checkpoint_place,
    nothing_to_resume,
    require_same_model,
    with_backend_of,
)
from dlrm_core.train import prepare_model
from dlrm_core.train import train as train_model


class Predictor:
    """The model of ``--file`` with the weights of ``--checkpoint``, without what training needs.

    Args:
        largest_batch: for which there must be room; 0: training.batch_size.

    Raises:
        InputError: the checkpoint is corrupted or of another model, or there is no room.
    """

    def __init__(self, arguments: argparse.Namespace, largest_batch: int = 0) -> None:
        parameters = load_parameters(arguments.file, arguments.parameter)
        self.checkpoint: Checkpoint | None = None
        notices = []
        if arguments.checkpoint:
            place = parameters.training.checkpoint_folder
            folder = find_checkpoint(arguments.checkpoint, Path(place) if place else None)
            self.checkpoint = read_checkpoint(folder)
            require_same_model(parameters.model, self.checkpoint)
            parameters = with_backend_of(self.checkpoint, parameters)
        else:
            notices.append("no --checkpoint was given: these are the model's initial weights")
        # nothing is updated: no optimiser's state is to take memory
        training = dataclasses.replace(
            parameters.training, optimizer="sgd", embedding_update="race_free"
        )
        parameters = dataclasses.replace(parameters, training=training)
        self.device = resolve_device(training)
        largest = dataclasses.replace(training, batch_size=largest_batch or training.batch_size)
        require_memory(dataclasses.replace(parameters, training=largest), self.device)
        self.parameters, model, self.divide, said = prepare_model(
            parameters, self.device, self.checkpoint
        )
        self.model = model.eval()
        attach(model.embeddings, self.parameters.training)
        self.precision = DensePrecision(self.parameters.training, self.device)
        notices += said + self.precision.notices
        self.notices = notices + getattr(model.embeddings.backend, "notices", [])
        shape = parameters.model
        self.loss = ClickLoss(shape.loss, shape.loss_weights).to(self.device)

    def predict(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) of a batch on the device."""
        return predict(self.model, batch, self.precision)

    @property
    def iteration(self) -> int:
        """Iterations of training behind the weights."""
        return self.checkpoint.step if self.checkpoint else 0

    def facts(self, notices: list[str]) -> dict[str, Any]:
        """What the last line says of the model; all notices are printed on standard error.

        Args:
            notices: more of them, of the figures.
        """
        notices = self.notices + notices
        for notice in notices:
            print(notice, file=sys.stderr)
        return {
            "iteration": self.iteration,
            "checkpoint": str(self.checkpoint.folder) if self.checkpoint else None,
            "precision": self.parameters.training.precision,
            "embedding_backend": self.parameters.training.embedding_backend,
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "notices": notices,
        }


def evaluate(arguments: argparse.Namespace) -> int:
    """``dlrm evaluate``: the last line is one JSON object."""
    predictor = Predictor(arguments)
    device = predictor.device
    with Bar("evaluating", "samples", shown=sys.stderr.isatty(), unit_scale=True) as bar:
        found = evaluate_batches(
            predictor.predict,
            predictor.loss,
            HeldOut(predictor.parameters, device, predictor.divide),
            device,
            predictor.iteration,
            bar.add,
        )
    line = dataclasses.asdict(found) | predictor.facts(found.notices())
    print(json.dumps(plain(line)), flush=True)
    return 0


def infer(arguments: argparse.Namespace) -> int:
    """``dlrm infer``: a JSON line for each batch size, and a last one with all of them."""
    sizes = batch_sizes(arguments.batch_sizes)
    if arguments.steps < 1:
        raise InputError(f"--steps is {arguments.steps}, expected at least 1")
    seconds = time_limit(arguments.seconds)
    predictor = Predictor(arguments, max(sizes, default=0))
    measured = []
    for size in sizes or [predictor.parameters.training.batch_size]:
        training = dataclasses.replace(predictor.parameters.training, batch_size=size)
        parameters = dataclasses.replace(predictor.parameters, training=training)
        stream = held_out_batches(parameters, predictor.device, POOL_BATCHES)
        pool = pool_of(stream, arguments.steps, pin=predictor.device.type == "cuda")
        latency = measure_latency(
            predictor.predict,
            predictor.loss,
            pool,
            predictor.device,
            arguments.steps,
            seconds,
            arguments.protocol,
        )
        measured.append(latency)
        print(json.dumps(plain(dataclasses.asdict(latency))), flush=True)
    first = measured[0]
    line = {
        "protocol": arguments.protocol,
        "batch_size": first.batch_size,
        "samples_per_second": first.samples_per_second,
        "ms_per_iteration": first.p50,
        "loss": first.loss,
        "latency_ms": first.percentiles(),
        "batch_sizes": [
            dataclasses.asdict(latency) | {"latency_ms": latency.percentiles()}
            for latency in measured
        ],
    }
    print(json.dumps(plain(line | predictor.facts([]))), flush=True)
    return 0


def time_limit(seconds: float) -> float:
    """``--seconds``, checked.

    Raises:
        InputError: it is no positive number.
    """
    if not seconds > 0:
        raise InputError(f"--seconds is {seconds:g}, expected a number above 0")
    return seconds


def batch_sizes(given: str | None) -> list[int]:
    """Batch sizes of ``--batch-sizes``.

    Raises:
        InputError: one is no whole number above 0.
    """
    if not given:
        return []
    try:
        sizes = [int(word) for word in given.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise InputError(
            f"--batch-sizes is {given!r}, expected whole numbers above 0, as 1,64,2048"
        )
    return sizes


EXIT_CODES = {"finished": 0, "diverged": 1, "refused": 2, "interrupted": 128 + signal.SIGINT}

TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables of a process that torchrun started as one of several ranks."""


class IterationCounters(Protocol):
    """What counts each iteration: a context, opened by the thread that iterates."""

    def start(self) -> None:
        """Called before the first counted iteration."""

    def snapshot(self, number: int) -> None:
        """Called after the iteration of this number, from 0."""

    def evidence(self) -> dict[str, Any]:
        """What was counted, for the last line of ``dlrm train``."""


CountersOf = Callable[[torch.device], AbstractContextManager[IterationCounters]]


def train(
    arguments: argparse.Namespace,
    meter: MeterOf | None = None,
    counters: CountersOf | None = None,
) -> int:
    """``dlrm train``: a JSON line per interval, and a last one with the result.

    Args:
        meter: measures the run's energy; None: nobody does.
        counters: with ``--spans``, count each iteration after the warm-up; None: nobody does.
    """
    if os.environ.keys() >= TORCHRUN:
        from dlrm_core.distributed.watch import said_once

        ends = EXIT_CODES["refused"], EXIT_CODES["interrupted"]
        with said_once(*ends), terminate_like_interrupt():
            parameters = _parameters_to_train(arguments)
            from dlrm_core.distributed.trainer import train as train_rank

            train_rank(parameters, arguments, EXIT_CODES, meter)
    return _train_alone(_parameters_to_train(arguments), arguments, meter, counters)


def _parameters_to_train(arguments: argparse.Namespace) -> Parameters:
    given = [f"training.resume={arguments.resume}"] if arguments.resume else []
    return load_parameters(arguments.file, [*arguments.parameter, *given])


def _train_alone(
    parameters: Parameters,
    arguments: argparse.Namespace,
    meter: MeterOf | None,
    counters: CountersOf | None,
) -> int:
    folder = Path(arguments.output) if arguments.output else None
    early = nothing_to_resume(parameters.training, checkpoint_place(parameters.training, folder))
    for notice in early:  # at once: who waits for the end may never see it
        print(notice, file=sys.stderr, flush=True)
    evidence: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminate_like_interrupt())
        counting = None
        if arguments.spans:
            evidence["spans"] = stack.enter_context(log_spans())
            # a profiler's own threads and signals would be counted as the run's
            if counters is not None and "HPCRUN_EVENT_LIST" not in os.environ:
                counting = stack.enter_context(counters(resolve_device(parameters.training)))
        result = train_model(
            parameters,
            folder,
            progress=sys.stderr.isatty(),
            on_line=lambda line: print(json.dumps(plain(line)), flush=True),
            on_iteration=_counting(counting, parameters.profiling.warmup),
            meter=meter,
        )
        if counting is not None:
            evidence |= counting.evidence()
    for notice in result.notices:
        if notice not in early:
            print(notice, file=sys.stderr)
    print(json.dumps(plain(result.summary() | evidence)), flush=True)
    return EXIT_CODES[result.status]


def _counting(counters: IterationCounters | None, warmup: int) -> Callable[[int], None]:
    """Counts each iteration after ``warmup`` ones, as it ends."""

    def count(done: int) -> None:
        if counters is None:
            return
        if done == warmup:
            counters.start()
        elif done > warmup:
            counters.snapshot(done - 1)

    return count
