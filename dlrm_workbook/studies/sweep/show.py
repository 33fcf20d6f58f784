"""Figures, sentences and column formats of sweeps, and of the laws fitted to several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dlrm_core.parts import COMPONENTS, part_label
from dlrm_workbook.analysis.ensemble import WHOLE, Curve, short_leaf
from dlrm_workbook.show.tables import Column, Text
from dlrm_workbook.show.theme import (
    COLOURS,
    DASHES,
    INK,
    INSIDE,
    ROW,
    SYMBOLS,
    TEMPLATE,
    add_bars,
    figure,
    label_rows,
    lines_of,
    log_axis,
    log_ticks,
    wrapped,
)


def scaling_curves(curves: Sequence[Curve], leaf: str) -> go.Figure:
    """Time of each part along a parameter: points, fitted law, mean slope; both axes log.

    Args:
        curves: what :func:`dlrm_workbook.analysis.ensemble.scaling` gives.
    """
    parts = list(dict.fromkeys(curve.component for curve in curves))
    held = list(dict.fromkeys(curve.held for curve in curves))
    columns = min(3, max(len(parts), 1))
    height = max(math.ceil(len(parts) / columns), 1)
    cells = {
        name: {"row": place // columns + 1, "col": place % columns + 1}
        for place, name in enumerate(parts)
    }
    result = make_subplots(
        rows=height,
        cols=columns,
        subplot_titles=[f"<b>{part_label(name)}</b>" for name in parts],
        horizontal_spacing=0.09,
        vertical_spacing=0.16 / (height - 1) if height > 1 else 0.1,
    )
    result.update_layout(
        template=TEMPLATE,
        title={"text": f"Time of each part along {short_leaf(leaf)}"},
        height=140 + 250 * height,
        showlegend=len(held) > 1,
        legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        margin={"t": 80, "b": 90 if len(held) > 1 else 60},
    )
    for curve in curves:
        at = cells[curve.component]
        number = held.index(curve.held)
        colour = INK if curve.component == WHOLE else COLOURS.get(curve.component, INK)
        said = curve.law.sentence(short_leaf(leaf))
        grid = np.geomspace(curve.law.smallest, curve.law.largest, 41)
        result.add_trace(
            go.Scatter(
                x=grid,
                y=curve.law(grid),
                mode="lines",
                line={"color": colour, "width": 2, "dash": DASHES[number % len(DASHES)]},
                showlegend=False,
                hoverinfo="skip",
            ),
            **at,
        )
        result.add_trace(
            go.Scatter(
                x=curve.x,
                y=curve.time_ms,
                mode="markers+text",
                name=curve.held or "measured",
                legendgroup=curve.held,
                showlegend=curve.component == parts[0],
                marker={"color": colour, "size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
                text=[*[""] * (len(curve.x) - 1), f"{curve.law.slope:+.2f}"],
                textposition="top left",
                cliponaxis=False,
                hovertemplate=(
                    f"{short_leaf(leaf)} %{{x:,}}: %{{y:,.3f}} ms<br>{wrapped(said, 60)}"
                    "<extra></extra>"
                ),
            ),
            **at,
        )
    sizes = sorted({float(x) for curve in curves for x in curve.x})
    result.update_xaxes(
        **log_axis(sizes, lambda size: f"{size:,.0f}" if size >= 1 else f"{size:g}")
    )
    for name, at in cells.items():
        marks = log_ticks([t for curve in curves if curve.component == name for t in curve.time_ms])
        result.update_yaxes(**log_axis(marks), **at)
    result.update_xaxes(title=short_leaf(leaf), row=height)
    result.update_yaxes(title="ms", col=1)
    return result


def points_bars(summary: pd.DataFrame) -> go.Figure:
    """Samples a second of every finished point, in the order of the grid; the best stands out."""
    table = summary[summary["samples_per_second"].notna()]
    speeds = table["samples_per_second"]
    best = speeds.max()
    result = figure("Samples a second at each point", 120 + ROW * max(len(table), 3))
    add_bars(
        result,
        speeds.tolist(),
        list(range(len(table))),
        "",
        {"color": [COLOURS["embedding"] if speed == best else INK for speed in speeds]},
        "%{y}: %{x:,.0f} samples/s",
        text=[f"{speed:,.0f}" for speed in speeds],
        textposition="outside",
        cliponaxis=False,
    )
    result.update_xaxes(title="samples a second", range=[0, 1.2 * best if len(table) else 1])
    label_rows(result, [lines_of(label, 40) for label in table["label"]])
    return result


def parts_by_point(times: pd.DataFrame) -> go.Figure:
    """Share of each part in the step at every point, stacked to the whole.

    Args:
        times: what :func:`dlrm_workbook.analysis.ensemble.part_table` gives.
    """
    table = times[times["component"] != WHOLE].groupby(["run", "component"], sort=False)
    runs = list(dict.fromkeys(times["run"]))
    shares = table["time_ms"].sum().unstack(fill_value=0).reindex(runs)
    whole = shares.sum(axis=1)
    result = figure("Share of each part at each point", 150 + 34 * max(len(runs), 3), legend=True)
    for component in COMPONENTS:
        if component not in shares.columns:
            continue
        part = shares[component] / whole
        add_bars(
            result,
            part,
            list(range(len(runs))),
            part_label(component),
            COLOURS[component],
            f"{part_label(component)}: %{{customdata:,.3f}} ms, %{{x:.1%}}",
            customdata=shares[component],
            text=[f"{value:.0%}" if value >= 0.06 else "" for value in part],
            **INSIDE,
        )
    result.update_layout(barmode="stack", bargap=0.2)
    result.update_xaxes(title="share of the step", tickformat=".0%", range=[0, 1])
    label_rows(result, [lines_of(str(run), 40) for run in runs])
    return result


def sweep_verdict(summary: pd.DataFrame, failures: str) -> Text:
    """How many points there are, and which is best."""
    done = summary[summary["status"] == "finished"]
    lines = [f"**{len(done)} of {len(summary)} points finished.**"]
    speed = done["samples_per_second"].dropna() if len(done) else done
    if len(speed):
        best, worst = speed.idxmax(), speed.idxmin()
        lines.append(
            f"Most samples a second: **{done['label'][best]}**, {speed[best]:,.0f} samples/s, "
            f"{speed[best] / speed[worst]:.2f} times those of {done['label'][worst]} "
            f"({speed[worst]:,.0f})."
        )
    if failures:
        lines.append("```\n" + failures + "\n```")
    return Text("\n\n".join(lines))


LAWS: dict[str, str | Column] = {
    "leaf": Column("along", "text"),
    "part": "",
    "held": "with",
    "sentence": "law",
    "a_ms": "a",
    "slope": Column("slope", "digits"),
    "r2": Column("r²", "digits"),
}
POINTS: dict[str, str | Column] = {
    "number": "point",
    "label": Column("setting", "text"),
    "status": "status",
    "ms_per_iteration": Column("iteration", "number", unit="ms"),
    "samples_per_second": Column("samples/s", "count"),
    "of_best": Column("of the best", "share"),
    "top": Column("largest part", "component"),
    "top_share": "its share",
    "speedup": Column("measured speed-up", "ratio"),
}
"""Columns of the tables of fitted laws and of a sweep's points."""


def finding_columns(table: pd.DataFrame) -> dict[str, str | Column]:
    """Columns of a table of findings along the grid: a share at each point."""
    points = [str(name) for name in table.columns if str(name).startswith("at ")]
    return (
        {"finding": "finding"}
        | {name: Column(name, "share") for name in points}
        | {"along_the_grid": "along the grid"}
    )
