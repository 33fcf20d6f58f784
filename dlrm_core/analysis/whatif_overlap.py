"""Batches made by another thread: how long the step then takes.

While both run, on cores and a Python lock that they share, the step takes ``s`` times as
long and a batch ``g`` times. If the batch is done first, the rest of the step runs at its
own pace; if the step is done first, it waits for the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_core.config import Parameters
from dlrm_core.profiling.profile import Profile


@dataclass(frozen=True)
class Overlap:
    """How making a batch and the step share an iteration."""

    beside: bool = False
    """Whether batches are made in another thread after the change."""
    step_slowdown: float = 1.0
    """s: the step's time while batches are made, over its time alone."""
    data_slowdown: float = 1.0
    """g: a batch's time while the step runs, over its time alone."""
    data_ms: float | None = None
    """Making a batch alone after the change, where the profile's own time is a wait."""

    @classmethod
    def of(
        cls, profile: Profile, probe: Mapping[str, Any], base: Parameters, changed: Parameters
    ) -> Overlap:
        """What the probe of a change says about it."""
        found = probe.get("overlap")
        if changed.data.loader != "prefetch" or not found:
            return cls()
        halves = found["halves"].values()
        alone = sum(half["alone_ms"] for half in halves)
        beside = sum(half["beside_ms"] for half in halves)
        weighted = sum(
            found["data_beside_ms"][name] * half["beside_ms"]
            for name, half in found["halves"].items()
        )
        return cls(
            beside=True,
            step_slowdown=beside / alone,
            data_slowdown=weighted / beside / found["data_alone_ms"],
            data_ms=found["data_alone_ms"],
        )


def step_ms(overlap: Overlap, data_ms: float, rest_ms: float) -> tuple[float, float, float]:
    """An iteration: expected, least and most.

    Args:
        data_ms: making a batch, alone.
        rest_ms: all else of the step, alone.

    Least is a perfect overlap, most none at all, for the case without its own thread
    both equal the sum.
    """
    total = data_ms + rest_ms
    if not overlap.beside:
        return total, total, total
    data = overlap.data_ms if overlap.data_ms is not None else data_ms
    expected = overlapped(data, rest_ms, overlap.data_slowdown, overlap.step_slowdown)
    return expected, expected, expected


def overlapped(data_ms: float, rest_ms: float, data_slow: float, rest_slow: float) -> float:
    """Time until both a batch is made and the step is done, started together, in ms."""
    data_slow, rest_slow = max(1.0, data_slow), max(1.0, rest_slow)
    if data_ms * data_slow <= rest_ms * rest_slow:
        together = data_ms * data_slow
        return together + rest_ms - together / rest_slow
    together = rest_ms * rest_slow
    return together + data_ms - together / data_slow
