"""The probes that a recording carries, found by change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dlrm_core.profiling.profile import Profile

MODEL_ERROR = 0.06
"""Relative error of a part's ratio that probes make however often they are repeated."""


def find_probe(profile: Profile, change: Mapping[str, Any]) -> dict[str, Any] | None:
    """The probe of exactly this change, one put together from its leaves' own, or None."""
    probes = probes_of(profile)
    exact = _among(probes, change)
    if exact is not None or len(change) < 2:
        return exact
    single = [_among(probes, {name: value}) for name, value in change.items()]
    found = [probe for probe in single if probe is not None and not probe.get("refused")]
    if len(found) < len(change) or sum("overlap" in probe for probe in found) > 1:
        return None
    return _joined(dict(change), found)


def _among(probes: Iterable[dict[str, Any]], change: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = {name: _plain(value) for name, value in change.items()}
    for probe in probes:
        if {name: _plain(value) for name, value in probe["change"].items()} == wanted:
            return probe
    return None


def _joined(change: dict[str, Any], probes: list[dict[str, Any]]) -> dict[str, Any]:
    """Several changes at once: the ratios of a part that more than one touches multiply."""
    parts: dict[str, dict[str, float]] = {}
    spread: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"change": change, "notices": ["put together from single probes"]}
    for probe in probes:
        result |= {key: probe[key] for key in ("overlap", "overlap_base") if key in probe}
        result["notices"] += probe.get("notices", [])
        for component, phases in probe["parts"].items():
            for phase, then in phases.items():
                now = probe["base"].get(component, {}).get(phase)
                if not now:
                    continue
                ratios, errors = parts.setdefault(component, {}), spread.setdefault(component, {})
                error = probe.get("spread", {}).get(component, {}).get(phase, 0.0)
                if phase in ratios:
                    error = math.hypot(error, errors[phase], MODEL_ERROR)
                ratios[phase] = ratios.get(phase, 1.0) * then / now
                errors[phase] = error
    base = {component: dict.fromkeys(phases, 1.0) for component, phases in parts.items()}
    return result | {"parts": parts, "base": base, "spread": spread}


def probes_of(profile: Profile) -> list[dict[str, Any]]:
    """All of them; none where the recording was made without."""
    return list((profile.meta.get("part_probes") or {}).get("changes") or [])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
