"""What a finding is, how findings are ranked, and what ``bottlenecks.json`` says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

LIMITS = (
    "launches",
    "dispatch",
    "memory bandwidth",
    "random rows",
    "arithmetic",
    "copies",
    "synchronisation",
    "data generation",
    "scheduling",
    "load imbalance",
    "memory capacity",
    "network",
)
"""What can hold a step back. ``dispatch`` is the host's cost of calling operators,
``random rows`` the latency of reading rows of a table, ``scheduling`` other work that
takes the machine's cores."""

SEVERITIES = ("fails", "slows")
"""``fails``: the run will end, or its result is worth nothing; always before ``slows``."""


@dataclass(frozen=True)
class Finding:
    """One bottleneck. ``share_of_step`` is the share that it holds (0 to 1)."""

    id: str
    title: str
    component: str
    share_of_step: float
    evidence: str
    advice: str
    change: dict[str, Any] = field(default_factory=dict)
    """Parameter to the value to try, for ``compare``; empty if no parameter of ours helps."""
    predicted_speedup: dict[str, float] = field(default_factory=dict)
    """``low``, ``mid``, ``high``: step time now over step time after ``change``."""
    severity: str = "slows"
    limit: str = ""
    """The limit that it meets, one of ``LIMITS``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rank(found: Iterable[Finding]) -> list[Finding]:
    """Worst first: what fails, then by the predicted time saved, then by the share held."""
    return sorted(
        found,
        key=lambda finding: (
            SEVERITIES.index(finding.severity),
            -finding.predicted_speedup.get("mid", 1.0),
            -finding.share_of_step,
        ),
    )


def amdahl(share: float, gain: float) -> float:
    """Speed-up of a step of which ``share`` (0 to 1) becomes ``gain`` times as fast.

    Amdahl, "Validity of the single processor approach", AFIPS 1967.
    """
    return 1.0 / max(1.0 - share + share / gain, 1e-9)


def bounded(share: float) -> dict[str, float]:
    """Speed-up when only the bound is known: the share's time gone entirely.

    The middle is the geometric mean of doing nothing and that bound.
    """
    high = 1.0 / max(1.0 - share, 1e-9)
    return {"low": 1.0, "mid": math.sqrt(high), "high": high}


def removed(share: float) -> dict[str, float]:
    """Speed-up when ``share`` of the step is known to be waste that can go entirely.

    Half of it going is the least that is claimed, a tenth more than measured the most:
    the two clocks (with and without the profiler) agree no better.
    """
    share = min(max(share, 0.0), 0.99)
    return {
        "low": 1.0 / (1.0 - 0.5 * share),
        "mid": 1.0 / (1.0 - share),
        "high": 1.0 / (1.0 - min(1.1 * share, 0.995)),
    }


def milliseconds(value: float) -> str:
    """``0.031 ms``, ``4.2 ms``, ``512 ms``: three significant digits at most."""
    if value >= 100:
        return f"{value:,.0f} ms"
    if value >= 10:
        return f"{value:.1f} ms"
    return f"{value:.2g} ms" if value < 1 else f"{value:.2f} ms"


def largest(by_part: pd.Series) -> tuple[str, str]:
    """The (component, phase) with the largest value of a series indexed by both."""
    component, phase = by_part.index[int(np.argmax(by_part.to_numpy()))]
    return str(component), str(phase)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def plain(value: Any) -> Any:
    """JSON values only: NaN (not measured) becomes None, numpy scalars Python's own."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
