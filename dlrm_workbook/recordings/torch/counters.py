"""Hardware counters in a trace: what CUPTI counted over kernels, or sampled over time.

Kineto writes a range that was profiled (usually a kernel that was run again) as a span of category
``cuda_profiler_range`` whose arguments are counters, and samples as events of phase ``C``, an
argument for each series. A value that is no finite number is left out, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

RANGES = "cuda_profiler_range"

MOST_SERIES = 32
"""Series of samples that are kept."""

MOST_POINTS = 5_000
"""Points of a series that are kept: each the mean of its stretch."""

MOST_VALUES = 2_000_000
"""Values that are read at most."""

Series = tuple[str, str]
"""GPU or process, and the name of a counter."""


class Counters:
    """The counters of one trace, as they are read."""

    def __init__(self) -> None:
        self.samples: dict[Series, list[tuple[float, float]]] = {}
        self.ranges: dict[tuple[str, str], list[float]] = {}
        """Kernel and counter to the number of ranges and the sum of the values."""
        self.refused = 0
        self.beyond = 0
        self.taken = 0

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take samples (phase ``C``), and spans of category ``cuda_profiler_range``."""
        for event in events:
            name = str(event.get("name", ""))
            if event.get("ph") == "C":
                self._sample(event, name)
                continue
            for counter, given in event["args"].items():
                if (value := self._value(given)) is not None:
                    sums = self.ranges.setdefault((name, str(counter)), [0.0, 0.0])
                    sums[0], sums[1] = sums[0] + 1, sums[1] + value

    def _sample(self, event: Mapping[str, Any], name: str) -> None:
        time = _number(event.get("ts"))
        for part, given in event["args"].items():
            value = self._value(given)
            if value is None or time is None:
                continue
            title = name if len(event["args"]) == 1 else f"{name} {part}"
            series = str(event.get("pid", "")), title
            if series not in self.samples and len(self.samples) >= MOST_SERIES:
                self.beyond += 1
                continue
            self.samples.setdefault(series, []).append((time, value))

    def _value(self, given: Any) -> float | None:
        self.taken += 1
        if self.taken > MOST_VALUES:
            self.beyond += 1
            return None
        value = _number(given)
        self.refused += value is None
        return value

    def table(self, zero: int, nanoseconds: bool) -> dict[str, Any]:
        """What a profile's ``meta`` says of them; empty where there are none. The first event is at
        ``zero`` ns; ``nanoseconds`` says whether the times of the trace are such."""
        if not self.taken:
            return {}
        samples = []
        for (gpu, name), points in sorted(self.samples.items()):
            time, value = np.array(sorted(points)).T
            cut = np.linspace(0, len(time), min(MOST_POINTS, len(time)) + 1).astype(int)[:-1]
            count = np.diff(np.append(cut, len(time)))
            time_ms = (time if nanoseconds else 1e3 * time) / 1e6 - zero / 1e6
            row: dict[str, Any] = {"gpu": gpu, "counter": name, "samples": len(time)}
            row |= {"mean": float(value.mean()), "most": float(value.max())}
            row["time_ms"] = time_ms[cut].tolist()
            row["value"] = (np.add.reduceat(value, cut) / count).tolist()
            samples.append(row)
        ranges = [
            {"kernel": kernel, "counter": name, "ranges": int(count), "sum": total}
            for (kernel, name), (count, total) in self.ranges.items()
        ]
        return {"samples": samples, "ranges": ranges}


def _number(given: Any) -> float | None:
    """A finite number; None for text, flags and what is no number."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    value = float(given) if abs(given) < 1e300 else math.inf
    return value if math.isfinite(value) else None
