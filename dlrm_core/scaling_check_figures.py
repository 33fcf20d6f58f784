"""Predictions held against what was measured here, and against published throughputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.figure_axes import add_ends, error_bars, label_rows, lines_of, log_axis, log_ticks
from dlrm_core.figure_theme import (
    COLOURS,
    INK,
    figure,
    milliseconds,
    rows_of,
    signed_percent,
    thousands,
)
from dlrm_core.scaling_model_presentation import kind_label


def predicted_measured_dots(table: pd.DataFrame) -> go.Figure:
    """Predicted iterations with their range over measured ones, a row a run.

    Args:
        table: what :func:`dlrm_core.analysis.scaling_check.predicted_and_measured` gives.
    """
    known = table[table["predicted_ms"].notna()]
    labels = [
        f"{row.ranks} ranks, batch {row.batch_size:,}, {kind_label(row.sharding)}"
        for row in rows_of(known)
    ]
    furthest = max(known[["high_ms", "measured_ms"]].to_numpy(float).ravel(), default=1.0)
    return _dots(
        "Predicted and measured iterations",
        labels,
        known[["low_ms", "predicted_ms", "high_ms"]],
        ("measured", known["measured_ms"], known["error"]),
        milliseconds,
        {"title": "ms an iteration", "range": [0, 1.15 * furthest]},
    )


def published_dots(table: pd.DataFrame) -> go.Figure:
    """Published throughputs and our predictions of them; other people's machines.

    Args:
        table: what :func:`dlrm_core.analysis.published_scaling.published_scaling` gives.
    """
    known = table[table["published"].notna()]
    labels = [
        f"{row.hardware}, {row.devices} devices, {row.precision}, {_short(row.source)}, "
        f"from {row.basis}"
        for row in rows_of(known)
    ]
    ranges = known[["predicted_low", "predicted", "predicted_high"]]
    shown = [*known["published"], *ranges.to_numpy().ravel()]
    ends = [math.log10(0.85 * min(shown, default=1e6)), math.log10(1.45 * max(shown, default=1e7))]
    return _dots(
        "Published throughput, predicted",
        labels,
        ranges,
        ("published", known["published"], known["error"]),
        lambda speed: f"{speed:,.0f} samples/s",
        {"title": "samples a second", "range": ends} | log_axis(log_ticks(shown), thousands),
    )


def _dots(
    title: str,
    labels: Sequence[str],
    predicted: pd.DataFrame,
    held: tuple[str, pd.Series, pd.Series],
    text: Callable[[float], str],
    axis: Mapping[str, Any],
) -> go.Figure:
    """A row a prediction: its range, what it is held against, and how far off it is.

    Args:
        predicted: least, middle and most of each row, in this order.
        held: what the predictions are held against: its name, its values, their errors.
        text: a value as a reader wants it.
        axis: the values' own.
    """
    name, values, errors = held
    low, mid, high = (predicted[column] for column in predicted.columns)
    result = figure(title, 150 + 30 * max(len(labels), 3), legend=True)
    places = list(range(len(labels)))
    foretold = [
        f"{label}<br>predicted {text(b)}, {text(a)} to {text(c)}"
        for label, a, b, c in zip(labels, low, mid, high, strict=True)
    ]
    found = [f"{label}<br>{name} {text(v)}" for label, v in zip(labels, values, strict=True)]
    talk = COLOURS["communication"]
    diamond = {"symbol": "diamond", "size": 9, "color": talk}
    ring = {"symbol": "circle-open", "size": 11, "color": INK, "line": {"width": 2}}
    common = {"y": places, "mode": "markers", "hovertemplate": "%{hovertext}<extra></extra>"}
    result.add_trace(
        go.Scatter(
            x=mid,
            name="predicted, with range",
            marker=diamond,
            error_x=error_bars(low, mid, high, talk),
            hovertext=foretold,
            **common,
        )
    )
    result.add_trace(go.Scatter(x=values, name=name, marker=ring, hovertext=found, **common))
    ends = [max(pair) for pair in zip(high, values, strict=True)]
    add_ends(result, ends, places, list(map(signed_percent, errors)), axis.get("type") == "log")
    result.update_xaxes(**axis)
    label_rows(result, [lines_of(label, 52) for label in labels], above=0.8)
    result.update_layout(margin={"b": 96})
    return result


def _short(source: str) -> str:
    names = ("TensorFlow2", "PyTorch", "DeepSparkHub", "Kalamkar")
    return next((name for name in names if name in source), source)
