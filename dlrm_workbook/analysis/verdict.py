"""The page's first answer: what limits the run, and how far its changes would take it.

The advised changes are taken one on top of the other, best first, and predicted together
(:mod:`.whatif`), down to the least time that the machine's measured ceilings allow
(:mod:`.roofline`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from dlrm_core.errors import InputError
from dlrm_core.parts import part_label
from dlrm_core.units import from_to, milliseconds, ratio
from dlrm_workbook.analysis.findings import (
    SERIALISED,
    bottlenecks_json,
    can_show_bottlenecks,
    limit,
)
from dlrm_workbook.analysis.findings.finding import Finding, plain
from dlrm_workbook.analysis.roofline import least_step, profile_parameters
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.analysis.whatif import measured_parts, predict
from dlrm_workbook.recordings.profile import Profile

LEAST = "least by this machine's ceilings, as configured"
"""Name of the last stage: at the precision and with the back ends of the measured run."""


@dataclass(frozen=True)
class Stage:
    """A step as it is, as it would be, or as the machine allows at best."""

    name: str
    low_ms: float
    mid_ms: float
    high_ms: float
    parts: pd.DataFrame
    """``component``, ``time_ms``: they sum to ``mid_ms``."""
    change: dict[str, Any] = field(default_factory=dict)
    """All parameters changed up to here."""


def stages(
    profile: Profile, found: Sequence[Finding], roofline: pd.DataFrame | None = None
) -> list[Stage]:
    """The way from the measured step down to the machine's limit.

    Args:
        found: findings, worst first; those whose change cannot be predicted from this
            profile's probes are left out.
        roofline: what :func:`dlrm_workbook.analysis.roofline.roofline` gives.

    Returns:
        The measured step, a stage for each advised change on top of those before, and
        the least time of the machine at the run's own precision, where known. Empty if
        the profile names no parts or no parameters.
    """
    try:
        profile_parameters(profile)
        parts = measured_parts(profile)
    except InputError:
        return []
    now = float(parts["now_ms"].sum())
    result = [Stage("as measured", now, now, now, _by_component(parts, "now_ms"))]
    change: dict[str, Any] = {}
    for finding in found:
        if change | finding.change == change:
            continue
        try:
            then = predict(profile, change | finding.change)
        except InputError:
            continue  # the finding itself says how its gain was estimated
        # another batch is another step: its time does not compare
        if then.samples_then != then.samples_now or then.mid_ms >= result[-1].mid_ms:
            continue
        change = change | finding.change
        name = " and ".join(f"{n.partition('.')[2]}: {v}" for n, v in finding.change.items())
        shown = _fitted(_by_component(then.parts, "then_ms"), then.mid_ms)
        result.append(Stage(f"+ {name}", then.low_ms, then.mid_ms, then.high_ms, shown, change))
    if roofline is not None and len(roofline):
        least = least_step(roofline)["least_ms"]
        if least:
            parts = _by_component(roofline[roofline["ceiling_ms"] > 0], "ceiling_ms")
            result.append(Stage(LEAST, least, least, least, parts))
    return result


def table(way: Sequence[Stage]) -> pd.DataFrame:
    """A row for each stage.

    Returns:
        ``step``, ``mid_ms``, ``low_ms``, ``high_ms``, ``speedup`` over the measured step,
        ``largest_part`` and ``largest_part_ms``.
    """
    rows = []
    for stage in way:
        row: dict[str, Any] = {"step": stage.name, "mid_ms": stage.mid_ms}
        row |= {"low_ms": stage.low_ms, "high_ms": stage.high_ms}
        row["speedup"] = way[0].mid_ms / stage.mid_ms
        for _, part in stage.parts.nlargest(1, "time_ms").iterrows():
            row["largest_part"] = part_label(str(part["component"]))
            row["largest_part_ms"] = float(part["time_ms"])
        rows.append(row)
    return pd.DataFrame(rows)


def verdict(
    profile: Profile,
    attribution: pd.DataFrame,
    findings: Sequence[Finding],
    way: Sequence[Stage],
) -> str:
    """The headline of a profile, with a caution where its times are distorted."""
    limit_sentence = limit(profile, attribution)
    if findings or can_show_bottlenecks(profile, attribution):
        text = headline(findings, way, limit_sentence)
    else:
        text = "**This recording cannot show what holds the program back.** "
        text += in_markdown(limit_sentence)
    return text + (
        f"\n\n**Caution:** {in_markdown(SERIALISED)}" if profile.meta.get("serialised") else ""
    )


def headline(findings: Sequence[Finding], way: Sequence[Stage], limit_sentence: str) -> str:
    """The verdict in a few sentences of Markdown: what limits, what to change, what it brings.

    Args:
        findings: worst first.
        way: what :func:`stages` gives.
        limit_sentence: what :func:`dlrm_workbook.analysis.findings.limit` gives.
    """
    if not findings:
        return f"**No known bottleneck found.** {in_markdown(limit_sentence)}"
    worst = findings[0]
    text = f"**{in_markdown(worst.title)}.** {in_markdown(limit_sentence)}"
    gain = worst.predicted_speedup
    if worst.change and gain:
        options = " ".join(f"-p {name}={value}" for name, value in worst.change.items())
        low, mid, high = (ratio(gain[end], figures=2) for end in ("low", "mid", "high"))
        text += f"\n\nStart with `{options}`: predicted {mid} faster ({low} to {high})."
    changed = [stage for stage in way if stage.change]
    if len(changed) > 1:
        last, now = changed[-1], way[0].mid_ms
        text += (
            f" All {len(changed)} probed changes together: {milliseconds(now)} become "
            f"{milliseconds(last.mid_ms)} ({from_to(last.low_ms, last.high_ms)}), "
            f"{ratio(now / last.mid_ms, figures=2)} faster."
        )
    if way and way[-1].name == LEAST:
        text += (
            " Hardware limit for this configuration, from ceilings measured on this machine: "
            f"{milliseconds(way[-1].mid_ms)}."
        )
    return text


def document(
    profile: Profile,
    attribution: pd.DataFrame,
    found: list[Finding],
    way: Sequence[Stage],
    roofline: pd.DataFrame,
    changes: pd.DataFrame,
) -> dict[str, Any]:
    """``bottlenecks.json``: findings and attribution, with what stands behind the verdict.

    Args:
        way: what :func:`stages` gives.
        roofline: what :func:`dlrm_workbook.analysis.roofline.roofline` gives.
        changes: what :func:`dlrm_workbook.analysis.whatif.what_if_table` gives.
    """
    more = {
        "headline": verdict(profile, attribution, found, way),
        "stages": [
            {
                "name": stage.name,
                "change": stage.change,
                "ms": {"low": stage.low_ms, "mid": stage.mid_ms, "high": stage.high_ms},
                "parts_ms": dict(
                    zip(stage.parts["component"], stage.parts["time_ms"], strict=True)
                ),
            }
            for stage in way
        ],
        "roofline": roofline.to_dict("records"),
        "what_if": changes.to_dict("records"),
    }
    return bottlenecks_json(profile, attribution, found) | dict(plain(more))


def _by_component(parts: pd.DataFrame, column: str) -> pd.DataFrame:
    table = parts.groupby("component", as_index=False, sort=False)[[column]].sum()
    return table.rename(columns={column: "time_ms"})


def _fitted(parts: pd.DataFrame, whole_ms: float) -> pd.DataFrame:
    """The parts so that they sum to the step.

    Batches made by another thread are in the step only for as long as it waits for them.
    """
    is_data = parts["component"].eq("data")
    rest = float(parts.loc[~is_data, "time_ms"].sum())
    if math.isclose(float(parts["time_ms"].sum()), whole_ms, rel_tol=1e-6):
        return parts
    parts = parts.copy()
    parts.loc[is_data, "time_ms"] = max(0.0, whole_ms - rest)
    if whole_ms < rest:
        parts["time_ms"] *= whole_ms / rest
    return parts
