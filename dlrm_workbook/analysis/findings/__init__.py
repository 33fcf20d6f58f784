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

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlrm_core.parts import part_label
from dlrm_core.units import milliseconds, percent
from dlrm_workbook.analysis.attribution import coverage
from dlrm_workbook.analysis.findings import (
    changes,
    data,
    embedding,
    generic,
    gpu,
    host,
    operators,
    ranks,
)
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import Finding, Ledger, Rule, plain, rank
from dlrm_workbook.recordings.profile import Profile

RULES: tuple[Rule, ...] = (
    host.leak,
    host.nearly_full,
    data.data_generation,
    gpu.synchronising,
    gpu.copies,
    gpu.exposed_communication,
    gpu.launch_bound,
    gpu.gpu_idle,
    gpu.float64,
    gpu.tensor_cores,
    gpu.occupancy,
    gpu.stalls,
    operators.extra_operators,
    host.other_processes,
    host.other_threads,
    host.crowding_loader,
    host.waiting_for_cores,
    host.too_few_threads,
    host.collecting_garbage,
    host.storage_in_loop,
    host.waiting,
    host.page_faults,
    host.python_in_part,
    operators.dispatch_bound,
    embedding.skewed_indices,
    embedding.contended_update,
    embedding.giant_table,
    embedding.bound_by_rows,
    embedding.embedding_update,
    operators.interaction_overhead,
    changes.faster_settings,
    ranks.waiting_for_last_rank,
    ranks.load_imbalance,
    ranks.replicate_small_tables,
    generic.disturbed_profile,
    generic.outside_parts,
    generic.irregular,
    generic.slower_than_alone,
    generic.far_from_ceiling,
)
"""In the order in which they run: what leaves no doubt about its cause comes first."""


def findings(
    profile: Profile, attribution: pd.DataFrame, ranks: Mapping[int, Profile] | None = None
) -> list[Finding]:
    """All bottlenecks that the rules see: what fails first, then by predicted time saved.

    Args:
        ranks: every rank's profile, where the recording holds several; ``profile`` is one.
    """
    evidence = Evidence(profile, attribution, ranks)
    if evidence.total_ms <= 0:
        return []
    ledger = Ledger(evidence)
    return rank(finding for rule in RULES for finding in rule(evidence, ledger))


def limit(profile: Profile, attribution: pd.DataFrame) -> str:
    """One sentence: which part the step's time goes to most, and the limit it meets."""
    named = attribution[attribution["time_ms"] > 0]
    if named.empty:
        return "Nothing was measured, so nothing can be said about limits."
    if named["component"].eq("other").all():
        return (
            "This profile names no part of a model: it is of another program, or was measured "
            "without Python frames. The call tree and the operators say where its time goes."
        )
    parts = named.groupby(["component", "phase"], as_index=False)[["time_ms", "share"]].sum()
    top = parts.loc[parts["time_ms"].idxmax()]
    name = part_label(str(top["component"]), str(top["phase"]))
    times = f"{milliseconds(float(top['time_ms']))} of {milliseconds(named['time_ms'].sum())}"
    reached = _reached(Evidence(profile, attribution), str(top["component"]), str(top["phase"]))
    share = f"{top['share']:.0%}"
    return f"The largest part of the step is {name}: {times} per iteration ({share}){reached}."


def _reached(evidence: Evidence, component: str, phase: str) -> str:
    """``, at 83% of what bf16 matrix products reach here: arithmetic``."""
    if component in ("data", "other"):
        return ""  # made by Python or numpy: no ceiling of the machine is near
    table = evidence.roofline
    row = table[(table["component"] == component) & (table["phase"] == phase)]
    if row.empty:
        return ""
    limit = str(row["limit"].iloc[0])
    ceilings = {
        "arithmetic": f"{evidence.parameter('training.precision', 'fp32')} matrix products reach "
        "here",
        "random rows": "random rows of its tables reach here",
        "memory bandwidth": "this machine's memory gives",
        "dispatch": "calling its operators allows",
        "launches": "calling its operators allows",
    }
    what = ceilings.get(limit, "this machine allows")
    return f", at {percent(row['share_of_ceiling'].iloc[0])} of what {what}: {limit}"


def bottlenecks_json(
    profile: Profile, attribution: pd.DataFrame, found: list[Finding] | None = None
) -> dict[str, Any]:
    """The content of ``bottlenecks.json``; plain JSON values, None for what was not measured."""
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
