"""Figures of speeds by named protocols: latencies, and ours beside published ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dlrm_core.figure_axes import add_headings, in_groups, label_rows, lines_of, log_axis
from dlrm_core.figure_theme import COLOURS, figure, thousands
from dlrm_core.protocol_presentation import GROUPS, PUBLISHED_BATCH, Speed
from dlrm_core.published import NOT_SAID, PUBLISHED

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
