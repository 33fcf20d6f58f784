"""Probes in turns: run until their times are known well enough, and how well they are known."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_core.config import Parameters
from dlrm_core.probe_loops import Times, apply_settings, waited_ns

MIN_ROUNDS, MAX_ROUNDS = 4, 40
PRECISION = 0.008
"""Relative standard error of a half's time at which probing it ends."""

TRIES, DISTURBED = 3, 0.05
"""A run that waited for a core more than this share of its time is repeated, so often."""


def interleave(loops: Sequence[Any], seconds: float) -> list[list[Times]]:
    """Run loops in turns until their times are known well enough or time is up.

    The first run of each is not counted. Where the loops need different settings of
    torch, a run after a switch is not counted either.
    """
    runs: list[list[Times]] = [[] for _ in loops]
    settings = [_settings(loop.parameters) for loop in loops]
    switching = any(s != settings[0] for s in settings)
    for loop in loops:
        apply_settings(loop.parameters)
        loop.run()
    started = time.perf_counter()
    while len(runs[0]) < MAX_ROUNDS:
        for loop, kept in zip(loops, runs, strict=True):
            if switching:
                apply_settings(loop.parameters)
                loop.run()
            kept.append(_undisturbed(loop, deadline=started + 2 * seconds))
        if len(runs[0]) >= MIN_ROUNDS:
            if time.perf_counter() - started > seconds:
                break
            if len(runs[0]) >= 8 and all(_error(kept) < PRECISION for kept in runs):
                break
    return runs


def _undisturbed(loop: Any, deadline: float) -> Times:
    """A run during which nobody else had the core, or the last of a few tries."""
    for _ in range(TRIES):
        waited, started = waited_ns(), time.perf_counter_ns()
        times: Times = loop.run()
        whole = time.perf_counter_ns() - started
        if waited_ns() - waited < DISTURBED * whole or time.perf_counter() > deadline:
            break
    return times


def medians(runs: list[Times]) -> Times:
    """Median of each part's time over the runs, ms."""
    return {
        component: {
            phase: statistics.median([run.get(component, {}).get(phase, 0.0) for run in runs])
            for phase in phases
        }
        for component, phases in runs[-1].items()
    }


def ratio_errors(before: list[Times], after: list[Times]) -> dict[str, dict[str, float]]:
    """Relative standard error of each part's ratio of medians."""
    return {
        component: {
            phase: math.hypot(
                _relative_error([run.get(component, {}).get(phase, 0.0) for run in before]),
                _relative_error([run.get(component, {}).get(phase, 0.0) for run in after]),
            )
            for phase in phases
        }
        for component, phases in after[-1].items()
    }


def _error(runs: list[Times]) -> float:
    return _relative_error([total(run) for run in runs])


def _relative_error(values: list[float]) -> float:
    """Standard error of the median over the median, from the quartiles."""
    middle = statistics.median(values)
    if len(values) < 2 or middle <= 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    # of a normal distribution: sigma = IQR / 1.349; the median's error is 1.253 sigma / sqrt(n)
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(values)) / middle


def total(times: Mapping[str, Mapping[str, float]]) -> float:
    """All parts together, ms."""
    return sum(ms for phases in times.values() for ms in phases.values())


def _settings(parameters: Parameters) -> tuple[Any, ...]:
    training = parameters.training
    return (training.threads, training.fp32_matmul, getattr(training, "tf32", None))
