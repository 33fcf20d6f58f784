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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import JsonLines, plain
from dlrm_core.base.machine import resolve_device, terminate_like_interrupt
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.inference import POOL_BATCHES, measure_latency, pool_of
from dlrm_core.mllog import PREFIX, MLPerfLog
from dlrm_core.parts import log_spans
from dlrm_core.progress import Bar
from dlrm_core.run.evaluate import held_out_batches
from dlrm_core.run.predictor import Predictor, read_asked
from dlrm_core.run.reports import MeterOf
from dlrm_core.run.resume import checkpoint_place, nothing_to_resume
from dlrm_core.train import train as train_model


def evaluate(arguments: argparse.Namespace) -> int:
    """``dlrm evaluate``: the last line is one JSON object; under torchrun that of all ranks."""
    if started_by_torchrun():
        return _predict_as_rank(arguments, "dlrm evaluate", _evaluate)
    return _evaluate(Predictor(read_asked(arguments)))


def _predict_as_rank(
    arguments: argparse.Namespace, command: str, work: Callable[[Predictor], int]
) -> NoReturn:
    with as_rank(command):
        asked = read_asked(arguments)
        from dlrm_ranks.predictor import run_as_rank

        run_as_rank(asked, command, work)


def _evaluate(predictor: Predictor) -> int:
    shown = predictor.prints and sys.stderr.isatty()
    with Bar("evaluating", "samples", shown=shown, unit_scale=True) as bar:
        found = predictor.evaluate(bar.add)
    line = dataclasses.asdict(found) | predictor.facts(found.notices())
    if predictor.prints:
        print(json.dumps(plain(line)), flush=True)
    return 0


def infer(arguments: argparse.Namespace) -> int:
    """``dlrm infer``: a JSON line for each batch size, and a last one with all of them.

    Under torchrun all ranks answer each batch together, each a slice of it.
    """
    sizes = batch_sizes(arguments.batch_sizes)
    if arguments.steps < 1:
        raise InputError(f"--steps is {arguments.steps}, expected at least 1")
    time_limit(arguments.seconds)

    def work(predictor: Predictor) -> int:
        return _infer(predictor, arguments, sizes)

    if started_by_torchrun():
        return _predict_as_rank(arguments, "dlrm infer", work)
    return work(Predictor(read_asked(arguments), max(sizes, default=0)))


def _infer(predictor: Predictor, arguments: argparse.Namespace, sizes: list[int]) -> int:
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
            arguments.seconds,
            arguments.protocol,
            predictor.agree,
        )
        measured.append(latency)
        if predictor.prints:
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
    line |= predictor.facts([])
    if predictor.prints:
        print(json.dumps(plain(line)), flush=True)
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


def started_by_torchrun() -> bool:
    """Whether this process is one of several ranks."""
    return os.environ.keys() >= TORCHRUN


@contextlib.contextmanager
def as_rank(command: str) -> Iterator[None]:
    """End this rank where the block refuses or is interrupted; one of all ranks says why.

    Args:
        command: as it is named in sentences.
    """
    from dlrm_ranks.watch import said_once

    ends = EXIT_CODES["refused"], EXIT_CODES["interrupted"]
    with said_once(*ends, command), terminate_like_interrupt():
        yield


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
    if started_by_torchrun():
        with as_rank("dlrm train"):
            parameters = _parameters_to_train(arguments)
            from dlrm_ranks.trainer import train as train_rank

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
        mllog = None
        if arguments.mllog:
            lines = JsonLines(Path(arguments.mllog), prefix=PREFIX)
            mllog = MLPerfLog(stack.enter_context(lines))
        result = train_model(
            parameters,
            folder,
            progress=sys.stderr.isatty(),
            on_line=lambda line: print(json.dumps(plain(line)), flush=True),
            on_iteration=_counting(counting, parameters.profiling.warmup),
            meter=meter,
            mllog=mllog,
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
