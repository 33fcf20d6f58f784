"""One way to choose the fastest of several timed candidates, and to say why in one sentence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

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


@dataclass(frozen=True)
class Choice(Generic[Candidate]):
    """What was chosen, and from what.

    Attributes:
        times_ms: candidate to its median milliseconds; empty where nothing was open.
        refused: candidate to the reason why it was not timed.
        notice: all of it as one sentence.
    """

    chosen: Candidate
    times_ms: Mapping[Candidate, float]
    refused: Mapping[Candidate, str]
    notice: str


def choice_of(
    asked: str,
    times_ms: Mapping[Candidate, float],
    refused: Mapping[Candidate, str],
    timed: str,
    label: Callable[[Candidate], str] = str,
) -> Choice[Candidate]:
    """Choose the first candidate that is as fast as the fastest.

    Args:
        asked: the parameters that were ``auto``.
        timed: what was timed, and at which size.
        label: turns a candidate into the name that a reader knows.
    """
    chosen = fastest(times_ms)
    others = sorted((name for name in times_ms if name != chosen), key=lambda name: times_ms[name])
    times = [f"{times_ms[chosen]:.1f} ms", *(f"{label(o)} {times_ms[o]:.1f}" for o in others)]
    text = f"{asked}: {label(chosen)}, {'; '.join(times)} ({timed})"
    if refused:
        text += "; left out: " + "; ".join(f"{label(name)}: {refused[name]}" for name in refused)
    return Choice(chosen, times_ms, refused, text)
