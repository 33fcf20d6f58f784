"""Plotly figures of a training run: DataFrames in, ``go.Figure`` out."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dlrm_core.units import digits
from dlrm_workbook.show.theme import (
    COLOURS,
    COMPUTE,
    INK,
    add_bars,
    figure,
    markers,
    ranked_bars,
    rows_of,
)

MIB = 1 << 20


def memory_forecast(forecast: pd.DataFrame) -> go.Figure:
    """What a run will allocate, largest on top.

    Args:
        forecast: ``name``, ``shape``, ``component``, ``bytes``.
    """
    rows = rows_of(forecast.sort_values("bytes", ascending=False, kind="stable"))
    return ranked_bars(
        "Memory that the run will need",
        "MiB (2²⁰ B)",
        [row.name for row in rows],
        [row.bytes / MIB for row in rows],
        [f"{digits(row.bytes / MIB)} MiB" for row in rows],
        [f"{row.name} ({row.shape}): {row.bytes:,} B" for row in rows],
        markers([(row.component, "") for row in rows]),
    )


def loss_curve(iterations: pd.DataFrame, intervals: pd.DataFrame) -> go.Figure:
    """Loss of every iteration and the mean over each interval.

    Args:
        iterations: ``iteration``, ``loss``.
        intervals: ``iteration`` (the last one of the interval), ``loss``.
    """
    result = figure("Loss over the run", 380, legend=True)
    result.add_trace(
        go.Scatter(
            x=iterations["iteration"],
            y=iterations["loss"],
            name="each iteration",
            mode="lines",
            line={"color": COMPUTE, "width": 1.3},
            opacity=0.85,
            hovertemplate="iteration %{x}: %{y:.6f}<extra></extra>",
        )
    )
    result.add_trace(
        go.Scatter(
            x=intervals["iteration"],
            y=intervals["loss"],
            name="mean since the mark before",
            mode="lines+markers",
            line={"color": COLOURS["optimizer"], "width": 2.5},
            hovertemplate="up to iteration %{x}: mean %{y:.6f}<extra></extra>",
        )
    )
    result.update_xaxes(title="iteration")
    result.update_yaxes(title="loss")
    return result


def learning_rate(planned: pd.DataFrame, intervals: pd.DataFrame) -> go.Figure:
    """The schedule of the learning rate, and what the updates used.

    Args:
        planned: ``iteration``, ``learning_rate``.
        intervals: ``iteration``, ``learning_rate`` of each interval's last update.
    """
    result = figure("Learning rate", 320, legend=True)
    result.add_trace(
        go.Scatter(
            x=planned["iteration"],
            y=planned["learning_rate"],
            name="planned",
            mode="lines",
            line={"color": COMPUTE, "width": 2.5},
            hovertemplate="iteration %{x:,}: %{y:.4g}<extra></extra>",
        )
    )
    result.add_trace(
        go.Scatter(
            x=intervals["iteration"],
            y=intervals["learning_rate"],
            name="used by the last update of an interval",
            mode="markers",
            marker={"color": COLOURS["optimizer"], "size": 7},
            hovertemplate="iteration %{x:,}: %{y:.4g}<extra></extra>",
        )
    )
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
    result = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    result.update_layout(figure("Quality on test data", 520, legend=True).layout)
    result.add_trace(
        go.Scatter(
            x=evaluations["iteration"],
            y=evaluations["auc"],
            name="AUC",
            mode="lines+markers",
            line={"color": COLOURS["embedding"], "width": 2.5},
            customdata=evaluations["samples"],
            hovertemplate="iteration %{x:,}: AUC %{y:.5f} of %{customdata:,} samples"
            "<extra></extra>",
        ),
        row=1,
        col=1,
    )
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
        (intervals, "loss on training data, mean of an interval", COMPUTE),
        (evaluations, "loss on test data", COLOURS["loss"]),
    ):
        result.add_trace(
            go.Scatter(
                x=table["iteration"],
                y=table["loss"],
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2},
                hovertemplate=f"iteration %{{x:,}}: {name} %{{y:.5f}}<extra></extra>",
            ),
            row=2,
            col=1,
        )
    result.update_yaxes(title="AUC", row=1, col=1)
    result.update_yaxes(title="loss", row=2, col=1)
    result.update_xaxes(title="iteration", row=2, col=1)
    return result


def training_speed(intervals: pd.DataFrame) -> go.Figure:
    """Milliseconds an iteration, data and compute stacked, and samples a second, over the run.

    Args:
        intervals: ``iteration``, ``data_ms_per_iteration``, ``compute_ms_per_iteration``,
            ``samples_per_second``.
    """
    result = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    base = figure("Speed over the run", 520, legend=True)
    result.update_layout(base.layout)
    for column, name, colour in (
        ("compute_ms_per_iteration", "compute", COMPUTE),
        ("data_ms_per_iteration", "data", COLOURS["data"]),
    ):
        hover = f"up to iteration %{{x}}: {name} %{{y:,.2f}} ms"
        add_bars(result, intervals["iteration"], intervals[column], name, colour, hover, flat=False)
    result.add_trace(
        go.Scatter(
            x=intervals["iteration"],
            y=intervals["samples_per_second"],
            name="samples per second",
            mode="lines+markers",
            line={"color": COLOURS["embedding"], "width": 2.5},
            hovertemplate="up to iteration %{x}: %{y:,.0f} samples/s<extra></extra>",
        ),
        row=2,
        col=1,
    )
    result.update_layout(barmode="stack")
    result.update_yaxes(title="ms per iteration", rangemode="tozero", row=1, col=1)
    result.update_yaxes(title="samples per second", rangemode="tozero", row=2, col=1)
    result.update_xaxes(title="iteration", row=2, col=1)
    return result
