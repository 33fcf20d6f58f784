"""What holds a training step back, each finding with its evidence and its remedy.

A rule looks at the evidence (:class:`Evidence`: a profile, its attribution, the system's
counters, probes of each part alone, the machine's ceilings) and either finds something or is
silent; nothing wrong is an empty list and a sentence (:func:`limit`). Rules run from the most
specific to the most general, and each enters what time it explains into a :class:`Ledger`, so
that a general rule speaks only of what no other has explained. What each rule looks at, its
threshold and why: docs/findings.md.

Gains are predicted by the what-if model where the change was probed on this machine;
elsewhere by Amdahl's law on the time in excess of what the part takes alone; where not even
that is known, only the bound is: the part's time gone entirely.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlrm_workbook.analysis.attribution import coverage
from dlrm_workbook.analysis.findings import (
    changes as rules_changes,
)
from dlrm_workbook.analysis.findings import (
    data as rules_data,
)
from dlrm_workbook.analysis.findings import (
    embedding as rules_embedding,
)
from dlrm_workbook.analysis.findings import (
    generic as rules_generic,
)
from dlrm_workbook.analysis.findings import (
    gpu as rules_gpu,
)
from dlrm_workbook.analysis.findings import (
    host as rules_memory,
)
from dlrm_workbook.analysis.findings import (
    host as rules_scheduling,
)
from dlrm_workbook.analysis.findings import (
    host as rules_thread,
)
from dlrm_workbook.analysis.findings import (
    operators as rules_interaction,
)
from dlrm_workbook.analysis.findings import (
    operators as rules_operators,
)
from dlrm_workbook.analysis.findings import (
    ranks as rules_communication,
)
from dlrm_workbook.analysis.findings import (
    ranks as rules_ranks,
)
from dlrm_workbook.analysis.findings.data import DATA_SHARE
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import (
    LIMITS,
    SEVERITIES,
    Finding,
    Ledger,
    Rule,
    plain,
    rank,
)
from dlrm_workbook.analysis.findings.limits import limit_sentence
from dlrm_workbook.recordings.profile import Profile

__all__ = [
    "DATA_SHARE",
    "LIMITS",
    "RULES",
    "SEVERITIES",
    "Evidence",
    "Finding",
    "Ledger",
    "Rule",
    "bottlenecks_json",
    "findings",
    "limit",
]

RULES: tuple[Rule, ...] = (
    *rules_memory.RULES,
    *rules_data.RULES,
    *rules_gpu.RULES,
    *rules_operators.RULES_RULES[:1],
    *rules_scheduling.RULES_SCHEDULING_RULES,
    *rules_thread.RULES_THREAD_RULES,
    *rules_operators.RULES_RULES[1:],
    *rules_embedding.RULES,
    *rules_interaction.RULES,
    *rules_changes.RULES,
    *rules_communication.RULES_COMMUNICATION_RULES,
    *rules_ranks.RULES,
    *rules_generic.RULES,
)
"""In the order in which they run: what leaves no doubt about its cause comes first."""


def findings(profile: Profile, attribution: pd.DataFrame) -> list[Finding]:
    """All bottlenecks that the rules see: what fails first, then by predicted time saved."""
    evidence = Evidence(profile, attribution)
    if evidence.total_ms <= 0:
        return []
    ledger = Ledger(evidence)
    return rank(finding for rule in RULES for finding in rule(evidence, ledger))


def limit(profile: Profile, attribution: pd.DataFrame) -> str:
    """One sentence: which part the step's time goes to most, and the limit it meets."""
    return limit_sentence(Evidence(profile, attribution))


def bottlenecks_json(
    profile: Profile, attribution: pd.DataFrame, found: list[Finding] | None = None
) -> dict[str, Any]:
    """What ``bottlenecks.json`` says; plain JSON values, None for what was not measured."""
    if found is None:
        found = findings(profile, attribution)
    keys = ["component", "phase"]
    parts = attribution.groupby(keys, as_index=False, sort=False)[["time_ms", "share"]].sum()
    passes = [{"dilation": None, **measured} for measured in profile.meta.get("passes", [])]
    document = {
        "findings": [finding.to_dict() for finding in found],
        "limit": limit(profile, attribution),
        "attribution": parts.to_dict("records"),
        "coverage": coverage(attribution),
        "ms_per_iteration": float(attribution["time_ms"].sum()) if len(attribution) else None,
        "profiler": profile.meta.get("engine"),
        "device": profile.meta.get("device"),
        "passes": passes,
        "not_measured": profile.not_measured,
    }
    return dict(plain(document))
