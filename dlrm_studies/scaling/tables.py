"""Tables of the scaling page (columns of its DataFrames) and its sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_core.base.text import counted
from dlrm_core.config import Parameters
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
from dlrm_workbook.show.tables import Column, Text, each_row
from dlrm_workbook.show.theme import rows_of

Columns = dict[str, str | Column]

GOAL = 0.10
"""Geometric mean of errors that predictions of runs on this machine should keep."""


def _kinds(values: pd.Series) -> tuple[list[str], bool]:
    """Shardings, collectives and sentences about them as a reader calls them."""
    return [kind_label(value) if isinstance(value, str) else NOTHING for value in values], True


SHARDING = Column("sharding", _kinds)
COLLECTIVE = Column("collective", _kinds)
RANGE = Column("range", "range", ("low_ms", "high_ms"), "ms")
FULLEST_RANK = Column("fullest rank", "bytes")

STUDY_COLUMNS: Columns = {
    "name": Column("configuration", "text"),
    "ranks": "most ranks",
    "quoted_ranks": "quoted",
    "allreduce_mib": Column("all-reduce", "digits", unit="MiB"),
    "quoted_allreduce_mib": Column("quoted", "digits", unit="MiB"),
    "allreduce_error": Column("error", "signed_share"),
    "alltoall_mib": Column("all-to-all", "digits", unit="MiB"),
    "quoted_alltoall_mib": Column("quoted", "digits", unit="MiB"),
    "alltoall_error": Column("error", "signed_share"),
}
"""Bytes of the study's three configurations, computed and quoted."""

VOLUMES_COLUMNS: Columns = {
    "sharding": SHARDING,
    "collective": COLLECTIVE,
    "what": "what",
    "phase": "phase",
    "bytes": "payload per rank",
    "leaves_bytes": "sent per rank",
    "total_bytes": "all ranks",
}

MEMORY_COLUMNS: Columns = {
    "sharding": SHARDING,
    "place": Column("rank", "text"),
    "table_bytes": "tables",
    "dense_bytes": "MLPs",
    "state_bytes": "optimiser",
    "gradient_bytes": "gradients",
    "activation_bytes": "activations",
    "exchange_bytes": "exchanged",
    "total_bytes": "total",
}

LINKS_COLUMNS: Columns = {
    "name": Column("link", "text"),
    "alpha_us": Column("latency per step", "digits", unit="µs"),
    "alpha_range": Column("range", "range", ("alpha_us_low", "alpha_us_high"), "µs"),
    "gb_per_s": Column("rate per rank", "digits", unit="GB/s"),
    "rate_range": Column("range", "range", ("gb_per_s_low", "gb_per_s_high"), "GB/s"),
    "source": "source",
}

_SPEED = each_row(lambda speed: known_or(speed, thousands))
_SPEEDS = each_row(lambda low, high: from_to(low, high, thousands))

PREDICTED_COLUMNS: Columns = {
    "ranks": "ranks",
    "batch_size": "batch",
    "sharding": SHARDING,
    "mid_ms": Column("time", "digits", unit="ms"),
    "range": RANGE,
    "exposed_share": "exposed",
    "samples_per_second": Column("samples/s", _SPEED),
    "speedup": Column("speed-up", "ratio"),
    "efficiency": Column("efficiency", "share"),
    "memory_bytes": FULLEST_RANK,
    "why_not": Column("why not", _kinds),
}

CANDIDATES_COLUMNS: Columns = {
    "sharding": SHARDING,
    "mid_ms": Column("time", "digits", unit="ms"),
    "range": RANGE,
    "exposed_ms": Column("exposed", "digits", unit="ms"),
    "memory_bytes": FULLEST_RANK,
    "note": Column("why", _kinds),
}

MEASURED_COLUMNS: Columns = {
    "ranks": "ranks",
    "scaling": "scaling",
    "batch_size": "batch",
    "sharding": SHARDING,
    "time_ms": Column("time", "digits", unit="ms"),
    "range": Column("fastest to upper quartile", "range", ("low_ms", "high_ms"), "ms"),
    "samples_per_second": Column("samples/s", _SPEED),
    "speedup": Column("speed-up over 1 rank", "ratio"),
    "efficiency": Column("efficiency", "share"),
}

PREDICTED_AND_MEASURED: Columns = {
    "ranks": "ranks",
    "batch_size": "batch",
    "sharding": SHARDING,
    "measured_ms": Column("measured", "digits", unit="ms"),
    "predicted_ms": Column("predicted", "digits", unit="ms"),
    "range": RANGE,
    "error": Column("error", "signed_share"),
    "in_range": Column("in range", "judged"),
    "measured_exposed_ms": Column("communication, measured", "digits", unit="ms"),
    "predicted_exposed_ms": Column("communication, predicted", "digits", unit="ms"),
    "note": Column("note", _kinds),
}

IMBALANCE_COLUMNS: Columns = {
    "run": "run",
    "ranks": "ranks",
    "slowest_rank": "slowest rank",
    "slowest_ms": "its own work",
    "mean_ms": "mean",
    "share": "the others wait",
    "component": Column("most in", "component"),
}

EXCHANGES_COLUMNS: Columns = {
    "run": "run",
    "ranks": "ranks",
    "sharding": SHARDING,
    "kind": COLLECTIVE,
    "what": "what",
    "bytes": Column("payload per rank", "bytes"),
    "calls": "calls",
    "time_ms": "time",
    "exposed_ms": "exposed",
    "gb_per_s": Column("GB/s", "digits"),
    "share": "of the iteration",
}

STRAGGLERS_COLUMNS: Columns = {
    "ranks": "ranks",
    "even_ms": "equal ranks",
    "mean_ms": "mean",
    "p95_ms": "95th percentile",
    "waited_share": "waiting for the slowest",
    "slowdown": Column("slowdown", "signed_share"),
}

MLPERF_COLUMNS: Columns = {
    "hardware": "machine",
    "devices": "GPUs",
    "batch_size": "batch",
    "program": Column("predicted program", "text"),
    "sharding": SHARDING,
    "published": Column("published", _SPEED, unit="samples/s"),
    "predicted": Column("predicted", _SPEED, unit="samples/s"),
    "range": Column("range", _SPEEDS, ("predicted_low", "predicted_high"), "samples/s"),
    "error": Column("error", "signed_share"),
    "compute_ms": "computing",
    "exposed_ms": "exposed communication",
}


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
            return Text(f"Nothing was measured on several ranks: {why}.")
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
    """What this page lacks, and why; nothing where it lacks nothing."""
    if not reasons:
        return Text("")
    return Text(
        "\n".join(f"- {name}: {NOT_MEASURED}: {in_markdown(why)}" for name, why in reasons.items())
    )


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
    if record.link_probe.empty or record.compute_profile.empty or record.runs.empty:
        checked = "Predictions were not checked here: no ranks were measured."
    else:
        checked = check_sentence(predicted_and_measured(record, parameters)).markdown
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
