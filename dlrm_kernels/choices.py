"""One way to choose the fastest of several timed candidates, and to say why in one sentence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Candidate = TypeVar("Candidate")

EQUAL = 0.05
"""Times that differ by no more than this share are equally fast: the earlier candidate is taken."""

MOST_TIMINGS = 7
"""Timings of each candidate."""

HOPELESS = 2.0
"""A candidate this many times slower than the best is not timed again."""


def time_in_turns(
    timings: Mapping[Candidate, Callable[[int], float]],
    times_ms: dict[Candidate, list[float]],
    ends: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Candidate, float]:
    """Time candidates that may still be the fastest again; median milliseconds of all.

    Args:
        timings: each takes a number, another one than the timing before, and returns milliseconds.
        times_ms: what was timed before, at least once each; timings are added to it.
        ends: time of the clock after which no other round begins.
    """
    turn = max(map(len, times_ms.values()))
    for number in range(turn, MOST_TIMINGS):
        best = min(map(min, times_ms.values()))
        near = [name for name in timings if min(times_ms[name]) <= HOPELESS * best]
        if len(near) < 2 or clock() > ends:
            break
        # the first of a round is the last of the next
        for name in near[:: -1 if number % 2 else 1]:
            turn += 1
            times_ms[name].append(timings[name](turn))
    return {name: statistics.median(times) for name, times in times_ms.items()}


def fastest(times_ms: Mapping[Candidate, float]) -> Candidate:
    """Return the first candidate that is as fast as the fastest."""
    limit = (1 + EQUAL) * min(times_ms.values())
    return next(candidate for candidate, time_ms in times_ms.items() if time_ms <= limit)


def notice(
    asked: str,
    times_ms: Mapping[Candidate, float],
    refused: Mapping[Candidate, str],
    timed: str,
    label: Callable[[Candidate], str] = str,
) -> str:
    """Say what :func:`fastest` chose, beside which other times, and what was left out.

    Args:
        asked: the parameters that were ``auto``.
        times_ms: candidate to milliseconds.
        refused: candidate to the reason why it was not timed.
        timed: what was timed, and at which size.
        label: turns a candidate into the name that a reader knows.
    """
    chosen = fastest(times_ms)
    others = sorted((name for name in times_ms if name != chosen), key=lambda name: times_ms[name])
    times = [
        f"{times_ms[chosen]:.1f} ms",
        *(f"{label(name)} {times_ms[name]:.1f}" for name in others),
    ]
    text = f"{asked}: {label(chosen)}, {'; '.join(times)} ({timed})"
    left_out = "; ".join(f"{label(name)}: {why}" for name, why in refused.items())
    return f"{text}; left out: {left_out}" if left_out else text
