"""The headless subcommands that run the workload: train, evaluate.

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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from dlrm_core.base.engines import engine
from dlrm_core.base.files import plain
from dlrm_core.base.machine import terminate_like_interrupt
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.parts import log_spans
from dlrm_core.predict import Predictor, read_asked
from dlrm_core.run.reports import Line, Observer
from dlrm_core.run.resume import checkpoint_place, nothing_to_resume
from dlrm_core.train import train

EXIT_CODES = {"finished": 0, "diverged": 1, "refused": 2, "interrupted": 128 + signal.SIGINT}

TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables of a process that torchrun started as one of several ranks."""


def started_by_torchrun() -> bool:
    """Whether this process is one of several ranks."""
    return os.environ.keys() >= TORCHRUN


def first_rank() -> bool:
    """Whether this process is the one that writes and prints, alone or of several ranks."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def as_rank(command: str) -> Iterator[None]:
    """End this rank where the block refuses or is interrupted; one rank says which command, why."""
    said_once = engine("several ranks: watch").said_once
    ends = EXIT_CODES["refused"], EXIT_CODES["interrupted"]
    with said_once(*ends, command), terminate_like_interrupt():
        yield


CountsSamples = Callable[[bool], AbstractContextManager[Callable[[int], None]]]
"""Told whether this process prints, a context with what is called with each batch's samples."""


def command_evaluate(
    arguments: argparse.Namespace,
    counts: CountsSamples = lambda prints: nullcontext(lambda samples: None),
) -> int:
    """``dlrm evaluate``: the last line is one JSON object; under torchrun that of all ranks."""

    def work(predictor: Predictor) -> int:
        with counts(predictor.prints) as on_batch:
            evaluation = predictor.evaluate(on_batch)
        line = dataclasses.asdict(evaluation) | predictor.facts(evaluation.notices())
        if predictor.prints:
            print_line(line)
        return 0

    return do_predicting(work, arguments, "dlrm evaluate")


def do_predicting(
    work: Callable[[Predictor], int],
    arguments: argparse.Namespace,
    command: str,
    largest_batch: int = 0,
) -> int:
    """Do a command's work with the model asked for; a rank does it with the others, and ends."""
    if not started_by_torchrun():
        return work(Predictor(read_asked(arguments), largest_batch))
    with as_rank(command):
        engine("several ranks: predictor").run_as_rank(read_asked(arguments), command, work)
    raise AssertionError("a rank ends in run_as_rank")


class Printing(Observer):
    """Prints each line of metrics.jsonl, on the first rank; ``evidence`` goes into the last one."""

    def __init__(self) -> None:
        self.evidence: dict[str, Any] = {}

    def line(self, line: Line) -> None:
        if first_rank():
            print_line(line)


def print_line(line: Line) -> None:
    print(json.dumps(plain(line)), flush=True)


def command_train(arguments: argparse.Namespace, observer: Printing | None = None) -> int:
    """``dlrm train``: a JSON line per interval, and a last one with the result.

    ``observer`` prints them, and sees the run; on several ranks each has its own.
    """
    observer = observer or Printing()
    if started_by_torchrun():
        with as_rank("dlrm train"):
            parameters = _parameters_to_train(arguments)
            trainer = engine("several ranks: trainer")
            trainer.train(parameters, arguments, EXIT_CODES, observer)
    return _train_alone(_parameters_to_train(arguments), arguments, observer)


def _parameters_to_train(arguments: argparse.Namespace) -> Parameters:
    given = [f"training.resume={arguments.resume}"] if arguments.resume else []
    return load_parameters(arguments.file, [*arguments.parameter, *given])


def _train_alone(parameters: Parameters, arguments: argparse.Namespace, observer: Printing) -> int:
    folder = Path(arguments.output) if arguments.output else None
    early = nothing_to_resume(parameters.training, checkpoint_place(parameters.training, folder))
    for notice in early:  # at once: who waits for the end may never see it
        print(notice, file=sys.stderr, flush=True)
    with terminate_like_interrupt(), log_spans() if arguments.spans else nullcontext() as spans:
        result = train(parameters, folder, observer)
    for notice in result.notices:
        if notice not in early:
            print(notice, file=sys.stderr)
    evidence = ({} if spans is None else {"spans": spans}) | observer.evidence
    print_line(result.summary() | evidence)
    return EXIT_CODES[result.status]
