"""Figures of speeds by named protocols: latencies, and ours beside published ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.units import NOT_MEASURED, NOTHING, counted, format_bytes, thousands
from dlrm_workbook.evidence.published import NOT_SAID, NVIDIA_AUC, PUBLISHED
from dlrm_workbook.show.tables import Table, Text, column
from dlrm_workbook.show.theme import (
    COLOURS,
    add_headings,
    figure,
    in_groups,
    label_rows,
    lines_of,
    log_axis,
    rows_of,
)
from dlrm_workbook.studies.bench.show_tables import best_speeds, contestant_label
from dlrm_workbook.studies.stability.measure import Stability

# Tables of figures by named protocols, ours and, beside them, what others have published.

COUNTED = {
    "steady": "ours: whole iterations, warm-up found in the times",
    "nvidia": "NVIDIA's: whole iterations, the first half left out",
    "facebook": "facebookresearch/dlrm's ms/it: without the making of data",
    "deepspark": "DeepSpark's FPS: without the loader's time",
}
"""Protocol to what it counts."""

GROUPS = {
    "ours": "Contestants of this run, whole iterations",
    "training nvidia": "Training, NVIDIA's protocol",
    "training deepspark": "Training, DeepSpark's FPS",
    "training facebook": "Training, ms/it without data",
    "inference nvidia": "Inference, NVIDIA's protocol, batch 2,048",
}
"""What can be compared, by the key of :class:`Speed`."""

PUBLISHED_BATCH = 2048
"""Of the published inference."""


@dataclass(frozen=True)
class Speed:
    """One speed, ours or published, in the group it can be compared within."""

    group: str
    ours: bool
    source: str
    on: str
    model: str
    precision: str
    samples_per_second: float
    latency_ms: float | None = None
    power_w: float | None = None
    memory: str = NOTHING
    auc: float | None = None


def speeds(
    document: Mapping[str, Any] | None,
    times: pd.DataFrame,
    stability: Mapping[str, Stability] | None = None,
) -> list[Speed]:
    """Ours first, then the published ones, group by group.

    Args:
        document: of ``dlrm protocols``, if it was measured.
        times: of the benchmark's contestants (:func:`dlrm_workbook.studies.bench.analyse.times`).
        stability: runs whose mean AUC is ours.
    """
    found = [
        Speed("ours", True, "this run", contestant_label(r.contestant), _case(r.case), "", speed)
        for r in rows_of(best_speeds(times))
        if math.isfinite(speed := float(r.samples_per_second))
    ]
    found += _of_protocols(document, stability or {}) if document else []
    found += [
        Speed(
            f"{p.mode} {p.protocol}",
            False,
            f"{p.source.split()[0]} (other hardware)",
            p.hardware,
            p.model + ("" if p.batch is None else f", batch {p.batch:,}"),
            p.precision,
            p.samples_per_second,
            p.latency_ms,
            p.power_w,
            NOTHING if p.memory_gb is None else f"{p.memory_gb:g} GB a device",
            p.auc,
        )
        for p in PUBLISHED
    ]
    order = list(GROUPS)
    return sorted(found, key=lambda s: (order.index(s.group), not s.ours, -s.samples_per_second))


def _of_protocols(document: Mapping[str, Any], stability: Mapping[str, Stability]) -> list[Speed]:
    measured = document["measured"]
    given = document["parameters"]
    batch = given["training"]["batch_size"]
    aucs = [
        one.spreads["auc"].mean
        for one in stability.values()
        # of this very training, not of another model or other data
        if "auc" in one.spreads and all(one.parameters[s] == given[s] for s in ("model", "data"))
    ]
    common = {
        "ours": True,
        "source": "this run",
        "on": device_of(document),
        "precision": measured["precision"],
    }
    memory = ", ".join(
        f"{format_bytes(size)} ({device})"
        for device, size in measured["peak_memory_by_device"].items()
    )
    title = document["title"]
    found = [
        Speed(
            group=f"training {one['protocol']}",
            model=f"{title}, batch {batch:,}",
            samples_per_second=one["samples_per_second"],
            power_w=measured["power_w"],
            memory=memory,
            auc=aucs[0] if aucs else None,
            **common,
        )
        for one in measured["training"]
        if f"training {one['protocol']}" in GROUPS
    ]
    return found + [
        Speed(
            group="inference nvidia",
            model=f"{title}, batch {one['batch_size']:,}",
            samples_per_second=one["samples_per_second"],
            latency_ms=one["mean"],
            memory=memory,
            **common,
        )
        for one in measured["inference"]
        if one["protocol"] == "nvidia" and one["batch_size"] == PUBLISHED_BATCH
    ]


def _case(name: str) -> str:
    return "the model as given" if name == "given" else name


def device_of(document: Mapping[str, Any]) -> str:
    """The GPU, or the processor and how many of its threads."""
    measured = document["measured"]
    if measured["device"] != "cpu":
        return str(measured["device"])
    return f"{document['machine'].get('cpu') or 'CPU'}, {counted(measured['threads'], 'thread')}"


def published_table(found: list[Speed]) -> Table:
    """Every speed with what else is known of it."""
    return Table(
        [
            *("counted as", "source", "on", "model", "samples/s"),
            *("mean (ms)", "power (W)", "memory", "AUC"),
        ],
        [
            (
                GROUPS[one.group].removesuffix(", whole iterations"),
                one.source,
                one.on + (f", {one.precision}" if one.precision not in ("", NOT_SAID) else ""),
                one.model,
                f"{one.samples_per_second:,.0f}",
                NOTHING if one.latency_ms is None else f"{one.latency_ms:.3g}",
                _watts(one),
                one.memory,
                NOTHING if one.auc is None else f"{one.auc:.4g}",
            )
            for one in found
        ],
    )


def sources() -> Text:
    """Where the published figures are from, in full."""
    named = "; ".join(dict.fromkeys(one.source for one in PUBLISHED))
    least, most = NVIDIA_AUC
    return Text(
        f"Published by: {named}. A dash is what a source does not say. NVIDIA's full trainings on "
        f"Criteo Terabyte end with AUC {least:g} to {most:g}; power is of all devices together."
    )


def _watts(one: Speed) -> str:
    if one.power_w is not None:
        return f"{one.power_w:,.0f}"
    return NOT_MEASURED if one.ours and one.group != "ours" else NOTHING


def training_table(document: Mapping[str, Any]) -> Table:
    """One training, counted in each protocol's way."""
    measured = document["measured"]
    found = measured["training"]
    times = column([one["ms_per_iteration"] for one in found])
    return Table(
        ["protocol", "what it counts", "ms/it", "samples/s", "iterations", "left out"],
        [
            (
                one["protocol"],
                COUNTED[one["protocol"]],
                ms,
                f"{one['samples_per_second']:,.0f}",
                f"{one['iterations']:,}",
                f"{one['left_out']:,}",
            )
            for one, ms in zip(found, times, strict=True)
        ],
    )


def latency_table(document: Mapping[str, Any]) -> Table:
    """Latencies by batch size and protocol."""
    found = document["measured"]["inference"]
    names = ("mean", "p50", "p90", "p95", "p99")
    cells = [[f"{one[name]:,.3f}" for name in names] for one in found]
    return Table(
        [
            "batch",
            "protocol",
            *(f"{name} (ms)" for name in names),
            "samples/s",
            "steps",
            "left out",
        ],
        [
            (
                f"{one['batch_size']:,}",
                one["protocol"],
                *figures,
                f"{one['samples_per_second']:,.0f}",
                f"{one['steps']:,}",
                f"{one['warm_up_steps']:,}",
            )
            for one, figures in zip(found, cells, strict=True)
        ],
    )


def device_table(document: Mapping[str, Any]) -> Table:
    """Power, samples a joule, and the memory of each device."""
    measured = document["measured"]
    rows = []
    for reading in measured["power"]["readings"]:
        rows.append((f"power, {reading['device']}", f"{reading['power_w']:,.1f} W"))
    for device, why in measured["power"]["not_measured"].items():
        rows.append((f"power, {device}", f"{NOT_MEASURED}: {why}"))
    per_watt = measured["samples_per_joule"]
    shown = NOT_MEASURED if per_watt is None else f"{per_watt:,.1f}"
    rows.append(("samples/s per watt", shown))
    for device, size in measured["peak_memory_by_device"].items():
        rows.append((f"peak memory, {device}", format_bytes(size)))
    rows += [
        ("device", device_of(document)),
        ("precision", measured["precision"]),
        ("embeddings' back end", measured["embedding_backend"]),
        ("command", document["command"]),
    ]
    return Table(["", "value"], rows)


QUANTILES = {"p99": 1.2, "p95": 1.6, "p90": 2.0, "p50": 3.0}
"""Percentile to the width of its line."""


def latency_lines(document: Mapping[str, Any]) -> go.Figure:
    """Percentiles of an inference step over its batch size; both axes are logarithmic.

    Args:
        document: of ``dlrm protocols``.
    """
    found = [one for one in document["measured"]["inference"] if one["protocol"] == "nvidia"]
    result = figure("Latency of a prediction, by batch size", 400, legend=True)
    sizes = [one["batch_size"] for one in found]
    for name, width in QUANTILES.items():
        result.add_trace(
            go.Scatter(
                x=sizes,
                y=[one[name] for one in found],
                name=name,
                mode="lines+markers",
                line={"color": COLOURS["bottom_mlp"], "width": width},
                marker={"size": 6},
                hovertemplate=f"batch %{{x:,}}: {name} %{{y:.3f}} ms<extra></extra>",
            )
        )
    theirs = [one for one in PUBLISHED if one.latency_ms is not None]
    result.add_trace(
        go.Scatter(
            x=[one.batch for one in theirs],
            y=[one.latency_ms for one in theirs],
            name="published mean, other hardware",
            mode="markers",
            marker={"color": COLOURS["other"], "symbol": "diamond", "size": 9},
            customdata=[f"{one.hardware}, {one.precision}" for one in theirs],
            hovertemplate="%{customdata}, batch %{x:,}: mean %{y:.2f} ms<extra></extra>",
        )
    )
    marks = sorted({*sizes, PUBLISHED_BATCH})
    result.update_xaxes(title="batch size", **log_axis(marks, "{:,}".format))
    result.update_yaxes(type="log", title="ms", dtick="D2", tickformat="~g")
    return result


def published_bars(found: Sequence[Speed]) -> go.Figure:
    """Ours beside published speeds of other hardware, in groups counted the same way."""
    places, headings = in_groups(GROUPS[one.group] for one in found)
    result = figure("Samples a second, beside other hardware's", 130, legend=True)
    result.update_layout(height=190 + 30 * (len(found) + len(headings)))
    for ours, name, colour in (
        (True, "this run, this machine", COLOURS["top_mlp"]),
        (False, "published: other hardware, mostly other models", COLOURS["other"]),
    ):
        rows = [(place, one) for place, one in zip(places, found, strict=True) if one.ours is ours]
        result.add_trace(
            go.Bar(
                x=[one.samples_per_second for _, one in rows],
                y=[place for place, _ in rows],
                orientation="h",
                width=0.72,
                name=name,
                marker={"color": colour},
                text=[thousands(one.samples_per_second) for _, one in rows],
                textposition="outside",
                cliponaxis=False,
                customdata=[f"{one.on}: {one.model}" for _, one in rows],
                hovertemplate="%{customdata}: %{x:,.0f} samples/s<extra></extra>",
            )
        )
    _axes(result, found, places)
    add_headings(result, headings)
    return result


def _axes(result: go.Figure, found: Sequence[Speed], places: Sequence[float]) -> None:
    values = [one.samples_per_second for one in found] or [1.0]
    first, last = math.floor(math.log10(min(values))), math.log10(max(values)) + 0.7
    marks = [10.0**power for power in range(first, math.ceil(last))]
    result.update_xaxes(title="samples a second", range=[first, last], **log_axis(marks, thousands))
    label_rows(result, [_label(one) for one in found], list(places))


def _label(one: Speed) -> str:
    if one.ours:
        return lines_of(f"ours, {one.precision}" if one.precision else f"{one.on}, {one.model}", 40)
    precision = "" if one.precision == NOT_SAID else f", {one.precision}"
    return f"{one.on}, {one.model.split(', batch')[0]}{precision}"
