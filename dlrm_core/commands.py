"""The headless subcommands that run the workload: ``dlrm train`` and ``dlrm record``.

They import no notebook or plotting package, so they start fast, run on a bare
GPU node, and are what profilers are put around.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dlrm_core.config import SECTIONS, Parameters, load_parameters
from dlrm_core.files import plain
from dlrm_core.parent_process import end_with_starter

if TYPE_CHECKING:
    from dlrm_core.counters import IterationCounters

EXIT_CODES = {"finished": 0, "diverged": 1, "refused": 2, "interrupted": 128 + signal.SIGINT}

TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables of a process that torchrun started as one of several ranks."""


def train(arguments: argparse.Namespace) -> int:
    """``dlrm train``: a JSON line per interval, and a last one with the result."""
    end_with_starter()
    if os.environ.keys() >= TORCHRUN:
        from dlrm_core.distributed.refusal import said_once

        ends = EXIT_CODES["refused"], EXIT_CODES["interrupted"]
        with said_once(*ends), _terminate_like_interrupt():
            parameters = _parameters_to_train(arguments)
            from dlrm_core.distributed.command import train as train_rank

            train_rank(parameters, arguments, EXIT_CODES)
    return _train_alone(_parameters_to_train(arguments), arguments)


def _parameters_to_train(arguments: argparse.Namespace) -> Parameters:
    given = [f"training.resume={arguments.resume}"] if arguments.resume else []
    return load_parameters(arguments.file, [*arguments.parameter, *given])


def _train_alone(parameters: Parameters, arguments: argparse.Namespace) -> int:
    from dlrm_core import training
    from dlrm_core.counters import IterationCounters
    from dlrm_core.parts import log_spans
    from dlrm_core.resuming import checkpoint_place, nothing_to_resume

    folder = Path(arguments.output) if arguments.output else None
    early = nothing_to_resume(parameters.training, checkpoint_place(parameters.training, folder))
    for notice in early:  # at once: who waits for the end may never see it
        print(notice, file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminate_like_interrupt())
        spans = stack.enter_context(log_spans()) if arguments.spans else None
        counters = None
        # a profiler's own threads and signals would be counted as the run's
        if arguments.spans and "HPCRUN_EVENT_LIST" not in os.environ:
            device = training.resolve_device(parameters.training)
            counters = stack.enter_context(IterationCounters(device))
        result = training.train(
            parameters,
            folder,
            on_interval=lambda interval: print(training.json_line(interval), flush=True),
            progress=sys.stderr.isatty(),
            on_iteration=_counting(counters, parameters.profiling.warmup),
            on_line=lambda line: print(json.dumps(plain(line)), flush=True),
        )
        if counters is not None:
            counted = counters.evidence()
    for notice in result.notices:
        if notice not in early:
            print(notice, file=sys.stderr)
    summary = result.summary()
    if spans is not None:
        summary["spans"] = spans
    if counters is not None:
        summary |= counted
    print(json.dumps(plain(summary)), flush=True)
    return EXIT_CODES[result.status]


def _counting(counters: IterationCounters | None, warmup: int) -> Callable[[int], None]:
    """Counts each iteration after ``warmup`` ones, as it ends."""

    def count(done: int) -> None:
        if counters is None or done < warmup:
            return
        if done == warmup:
            counters.start()
        else:
            counters.snapshot(done - 1)

    return count


def record(arguments: argparse.Namespace) -> int:
    """``dlrm record``: measure with torch.profiler; the last line is the folder."""
    from dlrm_core.profiling.workload import print_progress, record_workload

    parameters = load_parameters(arguments.file, arguments.parameter)
    with _terminate_like_interrupt():
        folder = record_workload(parameters, Path(arguments.output), print_progress)
    print(folder, flush=True)
    return 0


def parameters(arguments: argparse.Namespace) -> int:
    """``dlrm parameters``: every parameter, its default and its meaning, as Markdown."""
    print(parameters_table())
    return 0


def parameters_table() -> str:
    """A Markdown table a section, from the fields' own metadata."""
    import dataclasses
    import typing

    from dlrm_core.settings import describe_type

    lines = []
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        lines += [f"## `{section}`", "", "| name | type | default | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for field in dataclasses.fields(kind):
            lines.append(
                f"| `{field.name}` | {describe_type(hints[field.name])} "
                f"| {_as_yaml(field.default)} | {field.metadata['meaning']} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def _as_yaml(default: object) -> str:
    """A default as one writes it in a parameters file; nothing for nothing."""
    if default is None or default == "":
        return ""
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


@contextlib.contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM (schedulers, our own time limits) end a run as Ctrl-C does: results kept."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
