"""``dlrm train``: the core's training, beside it what counts its energy and its iterations."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core import commands
from dlrm_core.base.files import JsonLines
from dlrm_core.commands import Printing, first_rank, started_by_torchrun
from dlrm_core.parts import ITERATION_SPAN, SpanRow, parse_span
from dlrm_core.run.reports import Line, TrainingResult
from dlrm_core.train import TrainingLoop
from dlrm_workbook.evidence.counters import IterationCounters
from dlrm_workbook.evidence.mllog import PREFIX, MLPerfLog
from dlrm_workbook.evidence.power import power_meter
from dlrm_workbook.ground.bar import Bar


class MeteredRun(Printing):
    """Shows how far a run is (with a bar where it is ``shown``), measures its energy and, where
    asked, ``prints`` each line of metrics.jsonl, writes MLPerf's log and ``counts`` each iteration
    after the warm-up."""

    def __init__(
        self,
        prints: bool = False,
        shown: bool = True,
        mllog: MLPerfLog | None = None,
        counts: bool = False,
    ) -> None:
        super().__init__()
        self._prints, self._shown, self._mllog, self._counts = prints, shown, mllog, counts
        self._counters: IterationCounters | None = None
        self._warmup = 0

    def begin(self, loop: TrainingLoop[Any]) -> None:
        self._bar = Bar("training", "it", loop.total, shown=self._shown, done=loop.done)
        self._meter = power_meter(loop.device)
        self._meter.start()
        if self._mllog is not None:
            self._mllog.begin(loop)
        if self._counts:
            self._counters = IterationCounters(loop.device)
            self._warmup = loop.parameters.profiling.warmup

    def iteration(self, done: int) -> None:
        if done:
            self._bar.add(1)
        if self._mllog is not None:
            self._mllog.iteration(done)
        if self._counters is None:
            return
        if done == self._warmup:
            self._counters.start()
        elif done > self._warmup:
            self._counters.snapshot(done - 1)

    def line(self, line: Line) -> None:
        """Print a line, and say an interval's figures behind the bar."""
        if "kind" not in line:
            self._bar.say(
                f"{line['mean_ms_per_iteration']:.1f} ms each, "
                f"{line['samples_per_second']:,.0f} samples/s, "
                f"data {line['data_ms_per_iteration']:.1f} ms, loss {line['loss']:.6f}"
            )
        if self._prints:
            super().line(line)
        if self._mllog is not None:
            self._mllog.line(line)

    def power(self, samples: int) -> Mapping[str, Any]:
        return self._meter.stop(samples)

    def end(self, result: TrainingResult) -> None:
        self._bar.close()
        if self._mllog is not None:
            self._mllog.end(bool(result.reached_target))
        if self._counters is not None:
            self.evidence = self._counters.evidence()
            self._counters.close()


def command_train(arguments: argparse.Namespace) -> int:
    """``dlrm train``: a JSON line per interval, and a last one with the result."""
    alone = not started_by_torchrun()
    with contextlib.ExitStack() as stack:
        mllog = None
        if arguments.mllog and alone:
            lines = JsonLines(Path(arguments.mllog), prefix=PREFIX)
            mllog = MLPerfLog(stack.enter_context(lines))
        observer = MeteredRun(
            prints=True,
            shown=first_rank() and sys.stderr.isatty(),
            mllog=mllog,
            # a profiler's own threads and signals would be counted as the run's
            counts=arguments.spans and alone and "HPCRUN_EVENT_LIST" not in os.environ,
        )
        return commands.command_train(arguments, observer)


def command_evaluate(arguments: argparse.Namespace) -> int:
    """``dlrm evaluate``: the last line is one JSON object; under torchrun that of all ranks."""
    return commands.command_evaluate(arguments, _samples_bar)


@contextlib.contextmanager
def _samples_bar(prints: bool) -> Iterator[Callable[[int], None]]:
    shown = prints and sys.stderr.isatty()
    with Bar("evaluating", "samples", shown=shown, unit_scale=True) as bar:
        yield bar.add


def iteration_part_times(
    spans: Sequence[SpanRow], warmup: int
) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each part in each iteration after ``warmup`` ones, from a log of spans (name,
    start, end) in nanoseconds, in any order.

    A part inside another (which does not happen in one thread of the step, but may in a log) counts
    to itself alone. ``("other", "")`` is the iteration's rest.
    """
    loops = sorted((row[1], row[2]) for row in spans if row[0] == ITERATION_SPAN)[warmup:]
    if not loops:
        return {}
    starts, ends = np.array(loops).T
    times: dict[tuple[str, str], np.ndarray] = {}
    open_parts: list[tuple[tuple[str, str], int, int]] = []
    inside = [(row[1], -row[2], part) for row in spans if (part := parse_span(row[0]))]
    for start, negative_end, part in sorted(inside):
        end = -negative_end
        which = int(np.searchsorted(starts, start, side="right")) - 1
        if which < 0 or start >= ends[which]:
            continue
        part_ms = times.setdefault(part, np.zeros(len(loops)))
        part_ms[which] += (end - start) / 1e6
        while open_parts and open_parts[-1][1] <= start:
            open_parts.pop()
        if open_parts:
            outer, outer_end, outer_which = open_parts[-1]
            times[outer][outer_which] -= (min(end, outer_end) - start) / 1e6
        open_parts.append((part, end, which))
    rest = (ends - starts) / 1e6 - sum(times.values(), np.zeros(len(loops)))
    times["other", ""] = np.maximum(rest, 0.0)
    return {part: values.tolist() for part, values in times.items()}
