"""One way to choose the fastest of several timed candidates, and to say why in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Candidate = TypeVar("Candidate")

EQUAL = 0.05
"""Times that differ by no more than this share are equally fast: the earlier candidate is taken."""


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
    others = sorted((each for each in times_ms if each != chosen), key=lambda each: times_ms[each])
    times = [
        f"{times_ms[chosen]:.1f} ms",
        *(f"{label(each)} {times_ms[each]:.1f}" for each in others),
    ]
    text = f"{asked}: {label(chosen)}, {'; '.join(times)} ({timed})"
    left_out = "; ".join(f"{label(each)}: {why}" for each, why in refused.items())
    return f"{text}; left out: {left_out}" if left_out else text
