"""What a change is predicted to bring: from the what-if model where it can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.whatif import predict
from dlrm_core.errors import InputError

WORTHWHILE = 1.05
"""Least predicted speed-up that makes a finding: a run's own scatter is a few percent."""


def predicted(evidence: Evidence, change: Mapping[str, Any]) -> dict[str, float] | None:
    """``low``, ``mid``, ``high`` speed-up (time a sample), or None where nothing can tell."""
    try:
        return predict(evidence.profile, change).speedup
    except InputError:
        return None


def probed(evidence: Evidence) -> list[dict[str, Any]]:
    """The changes whose parts were timed beside the run: see ``dlrm_core.part_probes``."""
    results = (evidence.meta.get("part_probes") or {}).get("changes") or []
    return [result for result in results if not result.get("refused")]


def probe_of(evidence: Evidence, change: Mapping[str, Any]) -> dict[str, Any] | None:
    """The probe of exactly this change."""
    for result in probed(evidence):
        if result.get("change") == dict(change):
            return result
    return None


def is_worthwhile(speedup: Mapping[str, float] | None) -> bool:
    """Whether a prediction is a gain beyond doubt: by its middle, and not lost at its low."""
    return speedup is not None and speedup["mid"] >= WORTHWHILE and speedup["low"] > 1.0
