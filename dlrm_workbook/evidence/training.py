"""``dlrm train``: the core's training, beside it what counts its energy and its iterations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from dlrm_core.parts import ITERATION_SPAN, SpanRow, parse_span
from dlrm_core.run import commands
from dlrm_workbook.evidence.counters import IterationCounters
from dlrm_workbook.evidence.power import power_meter


def train(arguments: argparse.Namespace) -> int:
    """``dlrm train``: a JSON line per interval, and a last one with the result."""
    return commands.train(arguments, power_meter, IterationCounters)


def iteration_part_times(
    spans: Sequence[SpanRow], warmup: int
) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each part in each iteration after warm-up, from a span log.

    A part inside another (which does not happen in one thread of the step, but may in a
    log) counts to itself alone. ``("other", "")`` is the iteration's rest.

    Args:
        spans: (name, start, end) in nanoseconds, in any order.
        warmup: iterations at the beginning that are left out.
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
