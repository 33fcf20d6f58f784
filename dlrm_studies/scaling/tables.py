"""The scaling page in words: the columns of its tables, and its sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_core.base.text import counted
from dlrm_core.config import Parameters
from dlrm_studies.columns import columns_of
from dlrm_studies.scaling.model.choice import Choice
from dlrm_studies.scaling.model.communication import kind_label
from dlrm_studies.scaling.model.published import GPUS_PER_NODE
from dlrm_studies.scaling.model.record import ScalingRecord, predicted_and_measured, typical_error
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.units import (
    NOT_MEASURED,
    NOTHING,
    from_to,
    known_or,
    milliseconds,
    percent,
    signed_percent,
    thousands,
)
from dlrm_workbook.ground.units import ratio as times
from dlrm_workbook.show.tables import Text, each_row
from dlrm_workbook.show.theme import rows_of

GOAL = 0.10
"""Geometric mean of errors that predictions of runs on this machine should keep."""


def _kinds(values: pd.Series) -> tuple[list[str], bool]:
    """Shardings, collectives and sentences about them as a reader calls them."""
    return [kind_label(value) if isinstance(value, str) else NOTHING for value in values], True


COLUMNS = columns_of(
    "scaling",
    {
        "kind": _kinds,
        "speed": each_row(lambda speed: known_or(speed, thousands)),
        "speeds": each_row(lambda low, high: from_to(low, high, thousands)),
    },
)


def mlperf_sentence(table: pd.DataFrame) -> Text:
    """How near predictions of MLPerf's machines are, and what explains the far ones."""
    first, last = (table.drop_duplicates("hardware", keep=keep) for keep in ("first", "last"))
    lines = [
        f"- {plain.hardware}: {signed_percent(near.error)} for a program that does what the "
        f"submitted one says it does, {signed_percent(plain.error)} for one that trains as this "
        "workbook does."
        for plain, near in zip(rows_of(first), rows_of(last), strict=True)
    ]
    gains = table["predicted"] / table.groupby("hardware")["predicted"].shift()
    several = table.assign(gain=gains)[table["devices"] > GPUS_PER_NODE].dropna(subset="gain")
    most = several.sort_values("gain").drop_duplicates("hardware", keep="last")["program"].unique()
    lines.append(
        "- Over several nodes the difference is mostly this: "
        f"{' and '.join(name.removeprefix('and ') for name in most)}."
    )
    return Text(
        f"Published: {table.attrs['source']}. Predicted from data sheets of the GPUs, NVLink 4 and "
        "a port of InfiniBand NDR per GPU; no figure of a run is used.\n\n" + "\n".join(lines)
    )


def choice_text(choice: Choice, ranks: int) -> Text:
    """The best sharding on so many ranks, and why."""
    if choice.prediction is None or ranks == 1:
        return Text(choice.reason)
    return Text(f"On {ranks:,} ranks, {choice.reason}")


def check_sentence(table: pd.DataFrame) -> Text:
    """How good the predictions of this machine's runs are."""
    predicted = table[table["error"].notna()]
    if predicted.empty:
        return Text("No run was predicted.")
    error = typical_error(predicted)
    inside = int(predicted["in_range"].sum())
    goal = f"{'within' if error <= GOAL else 'above'} the goal of {GOAL:.0%}"
    times_in = f"{inside} of {counted(len(predicted), 'measured time')}"
    return Text(
        f"**Predictions of {counted(len(predicted), 'run')} on this machine are off by "
        f"{percent(error)} (geometric mean), {goal}; {times_in} "
        f"{'lies' if inside == 1 else 'lie'} in the predicted range.** The largest error is "
        f"{signed_percent(max(predicted['error'].tolist(), key=abs))}."
    )


def findings_text(findings: Sequence[Finding], record: ScalingRecord) -> Text:
    """What the record shows; nothing wrong is a sentence, too."""
    if not findings:
        if record.parts.empty:
            why = in_markdown(record.reasons.get("parts"))
            return Text(f"Parts of ranks were {NOT_MEASURED}: {why}.")
        if not (record.runs["ranks"] > 1).any():
            return Text("Nothing was measured on several ranks: one was asked for.")
        return Text(
            "No run spends 10% of an iteration in exposed communication, and no rank works 10% "
            "longer than the mean."
        )
    paragraphs = []
    for finding in findings:
        more = in_markdown(f"{finding.evidence} {finding.advice}")
        text = f"**{in_markdown(finding.title)}.** {more}"
        gain = finding.predicted_speedup
        for name, value in finding.change.items():
            low, high = (times(gain[end], figures=2) for end in ("low", "high"))
            text += f" (`-p {name}={value}`: {low} to {high} faster)"
        paragraphs.append(text)
    return Text("\n\n".join(paragraphs))


def not_measured_text(reasons: Mapping[str, str]) -> Text:
    """What this page lacks, by the reasons; nothing where it lacks nothing."""
    lacking: dict[str, list[str]] = {}
    for name, why in reasons.items():
        lacking.setdefault(in_markdown(why), []).append(name.replace("_", " "))
    lines = [f"- {', '.join(names)}: {NOT_MEASURED}: {why}" for why, names in lacking.items()]
    return Text("\n".join(lines))


def launch_text(lines: Mapping[str, Any]) -> Text:
    """How the same training is started on one node, on several, under Slurm."""
    titles = {
        "one_node": "On this node",
        "each_node": "On every node (FIRST_NODE is the first one's name)",
        "slurm": "Under Slurm",
    }
    listed = [f"{titles[name]}:\n\n```\n{lines[name]}\n```" for name in titles if name in lines]
    return Text("\n\n".join(listed))


def scaling_verdict(
    network: str,
    strong: pd.DataFrame,
    weak: pd.DataFrame,
    record: ScalingRecord,
    parameters: Parameters,
) -> Text:
    """Where scaling stops paying, what limits it there, and how sure that is."""
    checked = "Predictions were not checked here: no ranks were measured."
    if len(runs := predicted_and_measured(record, parameters)):
        checked = check_sentence(runs).markdown
    paragraphs = [_strong_verdict(strong, network), _weak_verdict(weak), checked]
    return Text("\n\n".join(text for text in paragraphs if text))


def _strong_verdict(table: pd.DataFrame, network: str) -> str:
    predicted = table[table["mid_ms"].notna()]
    if predicted.empty:
        return ""
    # ranks that gain less than a hundredth are nobody's advice
    fast = predicted[predicted["mid_ms"] <= predicted["mid_ms"].min() * 1.01]
    best = rows_of(fast.nsmallest(1, "ranks"))[0]
    text = (
        f"**Strong scaling over {network} gains up to {best.ranks:,} ranks: predicted "
        f"{times(best.speedup, figures=2)} faster than one rank.** An iteration would take "
        f"{milliseconds(best.mid_ms)} ({from_to(best.low_ms, best.high_ms)}), of which "
        f"{percent(best.exposed_share)} exposed communication."
    )
    half = predicted[predicted["efficiency"] >= 0.5]
    if len(half):
        text += f" Its efficiency stays at 50% or more up to {half['ranks'].max():,} ranks."
    return text


def _weak_verdict(table: pd.DataFrame) -> str:
    predicted = table[table["mid_ms"].notna()]
    if len(predicted) < 2:
        return ""
    last = rows_of(predicted.nlargest(1, "ranks"))[0]
    return (
        f"Weak scaling is predicted to have an efficiency of {percent(last.efficiency)} on "
        f"{last.ranks:,} ranks ({thousands(last.samples_per_second)} samples/s)."
    )
