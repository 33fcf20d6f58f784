"""The measured step that a prediction starts from: its parts, without the profiler's cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlrm_core.analysis.attribution import attribute
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.parts import ITERATION_SPAN, parse_span
from dlrm_core.profiling.profile import Profile

KEYS = ["component", "phase"]

LEAST_ITERATIONS = 5
"""Undisturbed ones, fewer than which say less than all together."""

DISTURBED = 0.05
"""Share of an iteration spent waiting for a core above which others disturbed it."""


def profile_parameters(profile: Profile) -> Parameters:
    """The parameters that the profiled run had.

    Raises:
        InputError: the profile does not say.
    """
    sections = profile.meta.get("parameters")
    if not sections:
        raise InputError("the profile does not say with which parameters it ran")
    return parameters_from_sections(sections)


def unprofiled_ms(profile: Profile) -> float | None:
    """Median time of an iteration without the profiler, data included; None if unknown."""
    calm = _undisturbed_ms(profile.meta.get("counters") or {})
    if len(calm) >= LEAST_ITERATIONS:
        return statistics.median(calm)
    each = profile.meta.get("unprofiled_iteration_ms")
    if each:
        return statistics.median(each)
    for made in profile.meta.get("passes", []):
        if made.get("name") == "unprofiled" and made.get("ms_per_iteration"):
            return float(made["ms_per_iteration"])
        if made.get("unprofiled_ms_per_iteration"):
            return float(made["unprofiled_ms_per_iteration"])
    return None


def _undisturbed_ms(counters: Mapping[str, list[Any]]) -> list[float]:
    """Unprofiled iterations during which the thread hardly waited for a core, in ms."""
    columns = [counters.get(name) for name in ("profiled", "wall_ms", "run_queue_ms")]
    if not all(columns):
        return []
    return [
        float(wall)
        for profiled, wall, waited in zip(*columns, strict=False)
        if not profiled and wall and waited is not None and waited < DISTURBED * wall
    ]


def _plain_parts(each: list[dict[str, float]]) -> dict[tuple[str, str], float]:
    """Median of each part over the iterations without a profiler; ``other`` is what is left."""
    known: dict[tuple[str, str], float] = {}
    if not each or ITERATION_SPAN not in each[0]:
        return known
    for name in dict.fromkeys(name for times in each for name in times):
        part = parse_span(name)
        if part is not None:
            known[part] = statistics.median(times.get(name, 0.0) for times in each)
    whole = statistics.median(times[ITERATION_SPAN] for times in each)
    known["other", ""] = max(0.0, whole - sum(known.values()))
    return known


def measured_parts(profile: Profile) -> pd.DataFrame:
    """``component``, ``phase``, ``now_ms``, ``device_ms``: parts of the unprofiled iteration.

    ``device_ms`` is the part of ``now_ms`` in which the GPU computed.

    Raises:
        InputError: the profile names no part of a model.
    """
    found = attribute(profile)
    if found.empty or found["component"].eq("other").all():
        raise InputError("the profile names no part of a model, so no change can be predicted")
    found["device_ms"] = found["time_ms"].where(found["where"].eq("device"), 0.0)
    parts = found.groupby(KEYS, as_index=False, sort=False)[["time_ms", "device_ms"]].sum()
    parts = parts.rename(columns={"time_ms": "now_ms"})
    plain = _plain_parts(profile.meta.get("unprofiled_parts_ms") or [])
    if plain:
        named = [plain.get((c, p)) for c, p in parts[KEYS].to_numpy().tolist()]
        parts["now_ms"] = [0.0 if ms is None else ms for ms in named]
    whole = unprofiled_ms(profile)
    if whole is not None:
        parts[["now_ms", "device_ms"]] *= whole / parts["now_ms"].sum()
    return parts
