"""Figures of a training run: DataFrames in, ``go.Figure`` out."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_workbook.ground.units import digits
from dlrm_workbook.show.theme import (
    COLOURS,
    COMPUTE_COLOUR,
    INK,
    add_bars,
    add_points,
    figure,
    markers,
    ranked_bars,
    rows_of,
)

MIB = 1 << 20


def memory_bars(forecast: pd.DataFrame) -> go.Figure:
    """What a run will allocate, by :func:`~dlrm_workbook.analysis.training.memory_forecast`."""
    rows = rows_of(forecast.sort_values("bytes", ascending=False, kind="stable"))
    shapes = [f"<br>shape {row.shape}" if row.shape else "" for row in rows]
    return ranked_bars(
        "Memory that the run will need",
        "MiB (2²⁰ B)",
        [row.name for row in rows],
        [row.bytes / MIB for row in rows],
        [f"{digits(row.bytes / MIB)} MiB" for row in rows],
        [f"{row.name}: {row.bytes:,} B{shape}" for row, shape in zip(rows, shapes, strict=True)],
        markers([(row.component, "") for row in rows]),
    )


def _add_line(
    target: go.Figure,
    table: pd.DataFrame,
    column: str,
    name: str,
    colour: str,
    hover: str,
    **more: Any,
) -> None:
    """A column of the table over its iterations; ``hover`` is plotly's template."""
    more = {"mode": "lines+markers", "line": {"color": colour, "width": 2.5}} | more
    more["marker"] = {"color": colour, "size": 7}
    add_points(target, table["iteration"], table[column], name, hover, **more)


BELOW = {"row": 2, "col": 1}
"""The lower plot of :func:`_two_rows`."""


def _two_rows(title: str, above: str, below: str) -> go.Figure:
    """Two plots over the same iterations, with the titles of their axes."""
    result = figure(title, 520, legend=True)
    result.set_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    result.update_yaxes(title=above, row=1, col=1)
    result.update_yaxes(title=below, **BELOW)
    result.update_xaxes(title="iteration", **BELOW)
    return result


def loss_curve(iterations: pd.DataFrame, intervals: pd.DataFrame) -> go.Figure:
    """Loss of every iteration and the mean over each interval, whose ``iteration`` is its last."""
    result = figure("Loss over the run", 380, legend=True)
    hover = "iteration %{x}: loss %{y:.6f}"
    _add_line(result, iterations, "loss", "each iteration", COMPUTE_COLOUR, hover, mode="lines")
    result.data[0].line.width = 1.3
    name, hover = "mean since the mark before", "up to iteration %{x}: mean loss %{y:.6f}"
    _add_line(result, intervals, "loss", name, COLOURS["optimizer"], hover)
    result.update_xaxes(title="iteration")
    result.update_yaxes(title="loss")
    return result


def learning_rate(planned: pd.DataFrame, intervals: pd.DataFrame) -> go.Figure:
    """The schedule of the learning rate, and what the last update of each interval used."""
    result = figure("Learning rate", 320, legend=True)
    hover = "iteration %{x:,}: learning rate %{y:.4g}"
    used = "used by the last update of an interval"
    _add_line(result, planned, "learning_rate", "planned", COMPUTE_COLOUR, hover, mode="lines")
    colour = COLOURS["optimizer"]
    _add_line(result, intervals, "learning_rate", used, colour, hover, mode="markers")
    result.update_xaxes(title="iteration")
    result.update_yaxes(title="learning rate", rangemode="tozero")
    return result


def learning_curve(
    evaluations: pd.DataFrame,
    intervals: pd.DataFrame,
    target: float | None = None,
    best: float | None = None,
) -> go.Figure:
    """AUC of every evaluation; below it the loss on test data beside that on training data.

    Args:
        evaluations: ``iteration``, ``auc``, ``loss``, ``samples``.
        intervals: ``iteration``, ``loss`` (mean of the training since the row before).
        target: AUC at which the run was to end.
        best: AUC of the teacher that drew the labels, which no model can exceed but by luck.
    """
    result = _two_rows("Quality on test data", "AUC", "loss")
    hover = "iteration %{x:,}: AUC %{y:.5f} of %{customdata:,} samples"
    _add_line(result, evaluations, "auc", "AUC", COLOURS["embedding"], hover)
    result.data[0].customdata = evaluations["samples"]
    for value, text, side in (
        (target, "target", "bottom right"),
        (best, "best possible, the teacher's own:", "top right"),
    ):
        if value is not None:
            result.add_hline(
                y=value,
                line={"color": INK, "dash": "dash", "width": 1.3},
                annotation={"text": f"{text} {value:.5f}", "font": {"color": INK}},
                annotation_position=side,
                row=1,
                col=1,
            )
    for table, name, colour in (
        (intervals, "loss on training data, mean of an interval", COMPUTE_COLOUR),
        (evaluations, "loss on test data", COLOURS["loss"]),
    ):
        hover = f"iteration %{{x:,}}: {name} %{{y:.5f}}"
        _add_line(result, table, "loss", name, colour, hover, at=BELOW)
    return result


def training_speed(intervals: pd.DataFrame) -> go.Figure:
    """Milliseconds per iteration of each interval, data and compute stacked, and samples per
    second."""
    result = _two_rows("Speed over the run", "ms per iteration", "samples per second")
    for column, name, colour in (
        ("compute_ms_per_iteration", "compute", COMPUTE_COLOUR),
        ("data_ms_per_iteration", "data", COLOURS["data"]),
    ):
        hover = f"up to iteration %{{x}}: {name} %{{y:,.2f}} ms"
        add_bars(result, intervals["iteration"], intervals[column], name, colour, hover, flat=False)
    rate, hover = "samples_per_second", "up to iteration %{x}: %{y:,.0f} samples/s"
    _add_line(result, intervals, rate, "samples per second", COLOURS["embedding"], hover, at=BELOW)
    result.update_layout(barmode="stack")
    result.update_yaxes(rangemode="tozero")
    return result
