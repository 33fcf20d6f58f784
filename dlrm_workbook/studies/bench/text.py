"""A benchmark's results as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dlrm_workbook.studies.bench.cases import PEER


def describe(case: Mapping[str, Any]) -> str:
    """One case: times, ratios with intervals, losses, what failed."""
    width = max((len(name) for name in case["contestants"]), default=0) + 2
    threads = case.get("threads")
    title = f"{case.get('meaning', '')}{_threads(threads)}"
    lines = [title] if title else []
    if case["contestants"]:
        lines.append(f"{'':<{width}}{'step ms':>10}{'end to end ms':>16}")
    for name, figures in case["contestants"].items():
        lines.append(f"{name:<{width}}{figures['step_ms']:>10.1f}{figures['end_to_end_ms']:>16.1f}")
    for name, ratios in case["ratios"].items():
        step, whole = ratios["step_ms"], ratios["end_to_end_ms"]
        lines.append(
            f"{name} is {_times(step)} as fast as {case['against']} a step, {_times(whole)} "
            f"end to end; {_certainty(step)}"
        )
    lines.append(losses(case))
    lines += [f"{name} FAILED: {reason}" for name, reason in case.get("failures", {}).items()]
    for name, notices in case.get("notices", {}).items():
        lines += [f"{name}: {notice}" for notice in notices]
    return "\n".join(lines)


def losses(case: Mapping[str, Any]) -> str:
    """Whether all contestants train the same, in a sentence."""
    found = case["loss_difference"]
    if not found:
        return "losses: nothing to compare with"
    each = ", ".join(f"{name} {difference_text(value)}" for name, value in found.items())
    verdict = "the same training" if case["losses_agree"] else "NOT the same training"
    return f"largest difference of a loss from {case['loss_reference']}'s: {each}: {verdict}"


def describe_share(row: Mapping[str, Any]) -> str:
    """One share of a measured ceiling."""
    if row.get("share") is None:
        return f"{row['case']}{_threads(row['threads'])}: {row['what']}: not measured: " + str(
            row.get("reason", "")
        )
    ceiling = {
        "dense": "the measured matrix products' time",
        "embedding": "the time of as many random rows gathered",
    }[row["what"]]
    return (
        f"{row['case']}{_threads(row['threads'])}, {row['contestant']}: {row['what']} part "
        f"{row['ms']:.1f} ms, {ceiling} {row['ceiling_ms']:.1f} ms: {row['share']:.0%} of it"
    )


def missing_peer(failures: Mapping[str, str]) -> str:
    """What is lost when facebookresearch/dlrm was asked for and did not run."""
    return f"no comparison with facebookresearch/dlrm: {failures[PEER]}" if PEER in failures else ""


def _times(interval: Mapping[str, float]) -> str:
    if interval["rounds"] == 1:
        return f"{interval['mid']:.2f}x"
    return f"{interval['mid']:.2f}x ({interval['low']:.2f} to {interval['high']:.2f})"


def _certainty(interval: Mapping[str, float]) -> str:
    rounds = interval["rounds"]
    if rounds == 1:
        return "one round: no interval"
    return f"{rounds} rounds, {interval['confidence']:.0%} confidence"


def _threads(count: int | None) -> str:
    return "" if count is None else f", {count} thread{'s' if count != 1 else ''}"


def difference_text(value: float | None) -> str:
    """A difference of losses: ``3.0e-06``, and 0 where they are equal."""
    if value is None or math.isnan(value):
        return "not a number"
    return f"{value:.1e}" if value else "0"
