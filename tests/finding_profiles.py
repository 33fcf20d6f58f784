"""Made profiles for the rules of ``analysis/findings``: one thread, one mean iteration."""

import math
from typing import Any

from dlrm_core.parts import span_name
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.recordings.profile import Profile

Operators = dict[tuple[str, str, str], float | tuple[float, float]]
"""(component, phase, name) to self ms, or to (self ms, calls), of a mean iteration. An empty
name is the part's own Python."""


def made(
    parts: Operators, parameters: dict[str, Any] | None = None, kind: str = "operator", **meta: Any
) -> Profile:
    """One sampled iteration without a trace."""
    rows = [
        (part, value if isinstance(value, tuple) else (value, 1.0)) for part, value in parts.items()
    ]
    names = [
        (name or span_name(component, phase), kind if name else "annotation")
        for (component, phase, name), _ in rows
    ]
    metrics = ("cpu_time_ms", "calls")
    return Profile.build(
        contexts={
            "context": range(len(rows)),
            "parent": -1,
            "kind": [made_kind for _, made_kind in names],
            "name": [name for name, _ in names],
            "shapes": "",
            "file": "",
            "line": 0,
            "module": "",
            "component": [component for (component, _, _), _ in rows],
            "phase": [phase for (_, phase, _), _ in rows],
        },
        metrics=[{"metric": m, "unit": "", "meaning": "", "source": ""} for m in metrics],
        values=[
            {"profile": 0, "context": row, "metric": metric, "scope": scope, "value": value}
            for row, (_, values) in enumerate(rows)
            for metric, value in zip(metrics, values, strict=True)
            for scope in ("exclusive", "inclusive")
        ],
        threads=[{"profile": 0, "kind": "cpu_thread", "name": "main", "rank": 0, "thread": 1}],
        meta={"device": "cpu", "parameters": parameters or {}, **meta},
    )


def counters(
    wall_ms: float = 100.0, count: int = 12, **columns: float | list[float]
) -> dict[str, Any]:
    """A run of equal iterations; each column one figure for all, or a list."""
    given = {name: v if isinstance(v, list) else [v] * count for name, v in columns.items()}
    return {
        "iteration": list(range(count)),
        "profiled": [False] * count,
        "wall_ms": [wall_ms] * count,
        **given,
    }


def listed(profile: Profile) -> list[Finding]:
    return findings(profile, attribute(profile))


def found(profile: Profile) -> dict[str, Finding]:
    return {finding.id: finding for finding in listed(profile)}


def ordered(speedup: dict[str, float]) -> bool:
    low, mid, high = speedup["low"], speedup["mid"], speedup["high"]
    return 1 <= low <= mid <= high and math.isfinite(high)
