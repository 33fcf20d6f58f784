"""Figures of a benchmark: contestants keep their colour, intervals are lines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dlrm_core.bench_cases import GROWTH, PEER, PLAIN, TORCHREC, TUNED
from dlrm_core.benchmark_presentation import (
    FIGURE_NAMES,
    contestant_label,
    option_label,
)
from dlrm_core.compare_figures import FASTER, SLOWER, SYMBOLS, lines_of
from dlrm_core.figure_theme import (
    COLOURS,
    GRID,
    INK,
    TEMPLATE,
    digits,
    figure,
    percent,
    rows_of,
)
from dlrm_core.notebook_parameters import value_text
from dlrm_core.sweep_figures import log_ticks

CONTESTANTS = {
    PEER: COLOURS["optimizer"],
    PLAIN: INK,
    TUNED: COLOURS["top_mlp"],
    f"{TUNED} bf16": COLOURS["bottom_mlp"],
    f"{TUNED} fp16": COLOURS["interaction"],
    TORCHREC: COLOURS["embedding"],
}
"""Contestant to colour."""

OUTLOOK = {"dense": {TUNED: 0.80, f"{TUNED} bf16": 0.75}}
"""Share of its matrix products that the dense part is to reach, by contestant."""


def colour_of(name: str) -> str:
    return CONTESTANTS.get(name, COLOURS["other"])


def times_bars(times: pd.DataFrame) -> go.Figure:
    """Whole iteration of every contestant and shape: the step, and the wait for data on top.

    Args:
        times: what :func:`dlrm_core.analysis.benchmark.times` gives.
    """
    step = times[times["figure"] == "step_ms"].reset_index(drop=True)
    whole = times[times["figure"] == "end_to_end_ms"].reset_index(drop=True)
    places, groups = _grouped(step)
    result = figure("Time of an iteration", 150 + 27 * (len(step) + 2 * len(groups)), legend=True)
    hover = [
        f"{contestant_label(a.contestant)}<br>step {digits(a.mid_ms)} ms "
        f"({digits(a.low_ms)} to {digits(a.high_ms)})<br>end to end {digits(b.mid_ms)} ms "
        f"({digits(b.low_ms)} to {digits(b.high_ms)})<br>{b.samples_per_second:,.0f} samples/s"
        for a, b in zip(rows_of(step), rows_of(whole), strict=True)
    ]
    result.add_trace(
        go.Bar(
            x=step["mid_ms"],
            y=places,
            orientation="h",
            marker={"color": [colour_of(name) for name in step["contestant"]]},
            showlegend=False,
            hovertext=hover,
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    data = (whole["mid_ms"] - step["mid_ms"]).clip(lower=0)
    result.add_trace(
        go.Bar(
            x=data,
            y=places,
            orientation="h",
            name="waiting for data; the rest of a bar is the step",
            marker={"color": COLOURS["data"]},
            error_x={
                "array": whole["high_ms"] - whole["mid_ms"],
                "arrayminus": whole["mid_ms"] - whole["low_ms"],
                "color": INK,
                "thickness": 1.5,
                "width": 4,
            },
            hovertext=hover,
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    for place, row in zip(places, rows_of(whole), strict=True):
        result.add_annotation(
            x=max(row.high_ms, row.mid_ms),
            y=place,
            text=f"{digits(row.mid_ms)} ms",
            showarrow=False,
            xanchor="left",
            xshift=6,
        )
    longest = float(whole["high_ms"].max()) if len(whole) else 1.0
    result.update_layout(barmode="stack", bargap=0.25)
    result.update_xaxes(title="ms of an iteration, shorter is better", range=[0, 1.35 * longest])
    _name_rows(result, places, [contestant_label(name) for name in step["contestant"]], groups)
    return result


def ratio_dots(ratios: pd.DataFrame) -> go.Figure:
    """Times as fast, with interval: a step, end to end, and the goals."""
    step = ratios[ratios["figure"] == "step_ms"].reset_index(drop=True)
    places, groups = _grouped(step)
    names = list(dict.fromkeys(ratios["against"]))
    against = " or ".join(contestant_label(name) for name in names)
    title = f"Times as fast as {against}"
    result = figure(title, 170 + 40 * (len(step) + len(groups)), legend=True)
    top = float(ratios[["high", "goal"]].max().max()) if len(ratios) else 1.0
    looks = (
        ("step_ms", "step", COLOURS["top_mlp"], "circle", -0.16),
        ("end_to_end_ms", "end to end, with data", COLOURS["data"], "diamond", 0.16),
    )
    for kind, name, colour, symbol, lift in looks:
        rows = ratios[ratios["figure"] == kind].reset_index(drop=True)
        result.add_trace(
            go.Scatter(
                x=rows["mid"],
                y=[place + lift for place in places],
                mode="markers",
                name=name,
                marker={"color": colour, "size": 11, "symbol": symbol},
                error_x={
                    "array": rows["high"] - rows["mid"],
                    "arrayminus": rows["mid"] - rows["low"],
                    "color": colour,
                    "thickness": 2.5,
                },
                customdata=[
                    (contestant_label(r.contestant), contestant_label(r.against), r.low, r.high)
                    for r in rows_of(rows)
                ],
                hovertemplate=(
                    f"{name}: %{{customdata[0]}} is %{{x:.2f}}× as fast as %{{customdata[1]}} "
                    "(%{customdata[2]:.2f} to %{customdata[3]:.2f})<extra></extra>"
                ),
            )
        )
        for place, row in zip(places, rows_of(rows), strict=True):
            # behind the goal where that would cross the figure
            crossed = math.isfinite(row.goal) and row.high <= row.goal < row.high + 0.14 * top
            result.add_annotation(
                x=row.goal if crossed else row.high,
                y=place + lift,
                text=f"{row.mid:.2f}×",
                showarrow=False,
                xanchor="left",
                xshift=9,
            )
        goals = rows[rows["goal"].notna()]
        if len(goals):
            result.add_trace(
                go.Scatter(
                    x=goals["goal"],
                    y=[places[i] + lift for i in goals.index],
                    mode="markers",
                    name=f"goal, {FIGURE_NAMES[kind]}",
                    marker={
                        "symbol": "line-ns-open",
                        "color": colour,
                        "size": 18,
                        "line": {"width": 2.5, "color": colour},
                    },
                    hovertemplate="goal %{x:g}×<extra></extra>",
                )
            )
    result.add_vline(x=1, line={"color": INK, "width": 1, "dash": "dot"})
    result.update_xaxes(title="times as fast (1 is no difference)", range=[0, 1.15 * top])
    _name_rows(result, places, [contestant_label(name) for name in step["contestant"]], groups)
    return result


def growth_curves(growth: pd.DataFrame, kind: str = "end_to_end_ms") -> go.Figure:
    """Time along batch, tables, dim and pooling, a line a contestant; both axes logarithmic.

    Args:
        growth: what :func:`dlrm_core.analysis.benchmark.growth` gives.
        kind: ``step_ms`` or ``end_to_end_ms``.
    """
    table = growth[growth["figure"] == kind]
    threads = sorted(table["threads"].unique())
    table = table[table["threads"] == threads[0]] if threads else table
    quantities = [name for name in GROWTH if name in set(growth["quantity"])]
    columns = min(2, max(len(quantities), 1))
    height = math.ceil(len(quantities) / columns) or 1
    result = make_subplots(
        rows=height,
        cols=columns,
        subplot_titles=[f"<b>{name}</b>" for name in quantities],
        horizontal_spacing=0.12,
        vertical_spacing=0.2 / max(height - 1, 1) if height > 1 else 0.1,
    )
    result.update_layout(
        template=TEMPLATE,
        title={"text": f"How an iteration grows, {FIGURE_NAMES[kind]}"},
        height=150 + 270 * height,
        legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        margin={"t": 80, "b": 100},
    )
    names = list(dict.fromkeys(table["contestant"]))
    for place, quantity in enumerate(quantities):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        curves = table[table["quantity"] == quantity]
        for number, name in enumerate(names):
            curve = curves[curves["contestant"] == name].sort_values("value")
            result.add_trace(
                go.Scatter(
                    x=curve["value"],
                    y=curve["time_ms"],
                    mode="lines+markers",
                    name=contestant_label(name),
                    legendgroup=name,
                    showlegend=place == 0,
                    line={
                        "color": colour_of(name),
                        "width": 2,
                        # often level with facebookresearch/dlrm, which it must not hide
                        "dash": "dash" if name == PLAIN else "solid",
                    },
                    marker={"size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
                    cliponaxis=False,
                    hovertemplate=(
                        f"{contestant_label(name)}, {quantity} %{{x:,}}: %{{y:,.2f}} ms"
                        "<extra></extra>"
                    ),
                ),
                **at,
            )
        sizes = sorted({float(x) for x in curves["value"]})
        result.update_xaxes(
            type="log", tickvals=sizes, ticktext=[f"{size:,.0f}" for size in sizes], **at
        )
        marks = log_ticks(curves["time_ms"].tolist()) if len(curves) else []
        result.update_yaxes(
            type="log", tickvals=marks, ticktext=[f"{mark:,g}" for mark in marks], **at
        )
        if place % columns == 0:
            result.update_yaxes(title="ms", **at)
    return result


def options_dots(without: pd.DataFrame) -> go.Figure:
    """How many times as fast the run is with each option as without it."""
    leaves = list(dict.fromkeys(without["leaf"]))
    result = figure("What each option brings", 150 + 46 * max(len(leaves), 2), legend=True)
    looks = (
        ("step_ms", "step", COLOURS["top_mlp"], "circle", -0.14),
        ("end_to_end_ms", "end to end, with data", COLOURS["data"], "diamond", 0.14),
    )
    for kind, name, colour, symbol, lift in looks:
        rows = without[without["figure"] == kind]
        result.add_trace(
            go.Scatter(
                x=rows["mid"],
                y=[leaves.index(leaf) + lift for leaf in rows["leaf"]],
                mode="markers",
                name=name,
                marker={"color": colour, "size": 11, "symbol": symbol},
                error_x={
                    "array": rows["high"] - rows["mid"],
                    "arrayminus": rows["mid"] - rows["low"],
                    "color": colour,
                    "thickness": 2.5,
                },
                hovertemplate=f"{name}: %{{x:.2f}}× as fast with it<extra></extra>",
            )
        )
    result.add_vline(x=1, line={"color": INK, "width": 1, "dash": "dot"})
    names = {row.leaf: option_label(row) for row in rows_of(without)}
    labels = [lines_of(names[leaf], 34) for leaf in leaves]
    result.update_xaxes(title="times as fast with the option as without it (1: it brings nothing)")
    result.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(leaves))),
        ticktext=labels,
        range=[len(leaves) - 0.4, -0.6],
        ticklabelstandoff=8,
        showgrid=False,
        zeroline=False,
    )
    return result


def ladder(rungs: pd.DataFrame, kind: str = "end_to_end_ms") -> go.Figure:
    """From the plain contestant to the tuned one, an option more at each column.

    Args:
        rungs: what :func:`dlrm_core.analysis.benchmark.ladder` gives.
        kind: ``step_ms`` or ``end_to_end_ms``.
    """
    rows = rows_of(rungs[rungs["figure"] == kind].sort_values("rung"))
    result = figure(f"From plain to tuned, {FIGURE_NAMES[kind]}", 170 + 40 * max(len(rows), 2))
    times = [float(row.time_ms) for row in rows]
    steps = [after - before for before, after in itertools.pairwise(times)]
    labels = ["plain"] + [
        lines_of(f"{row.leaf.partition('.')[2]}: {value_text(row.value)}", 26) for row in rows[1:]
    ]
    gain = f", {rows[-1].mid:.2f}× as fast" if len(rows) > 1 else ""
    shown = [f"{'+' if step > 0 else '−'}{digits(abs(step))} ms" for step in steps]
    places = list(range(len(times) + 1))
    result.add_trace(
        go.Waterfall(
            orientation="h",
            y=places,
            x=[*times[:1], *steps, *times[-1:]],
            measure=["absolute", *("relative" for _ in steps), "total"][: len(places)],
            text=[
                *(f"{digits(ms)} ms" for ms in times[:1]),
                *shown,
                *(f"{digits(ms)} ms{gain}" for ms in times[-1:]),
            ],
            textposition="outside",
            cliponaxis=False,
            connector={"line": {"color": GRID, "width": 1}},
            increasing={"marker": {"color": SLOWER}},
            decreasing={"marker": {"color": FASTER}},
            totals={"marker": {"color": INK}},
            hovertemplate="%{text}<extra></extra>",
        )
    )
    result.update_xaxes(title="ms of an iteration", range=[0, 1.25 * max(times, default=1.0)])
    _rows_axis(result, places, [*labels, "all"])
    return result


def share_bars(shares: pd.DataFrame) -> go.Figure:
    """How near each part comes to this machine's limit; the light mark is the goal."""
    rows = rows_of(shares[shares["share"].notna()])
    result = figure("Share of this machine's measured limits", 150 + 30 * max(len(rows), 2))
    labels = [
        f"{row.what}, {contestant_label(row.contestant)}<br>{row.case}, {row.threads} thread"
        f"{'s' if row.threads != 1 else ''}"
        for row in rows
    ]
    colours = {"dense": COLOURS["top_mlp"], "embedding": COLOURS["embedding"]}
    result.add_trace(
        go.Bar(
            x=[row.share for row in rows],
            y=list(range(len(rows))),
            orientation="h",
            marker={"color": [colours[row.what] for row in rows]},
            error_x={
                "array": [row.high - row.share for row in rows],
                "arrayminus": [row.share - row.low for row in rows],
                "color": INK,
                "thickness": 1.5,
            },
            text=[percent(row.share) for row in rows],
            textposition="inside",
            insidetextanchor="start",
            hovertext=[
                f"{digits(row.ms)} ms; the limit alone takes {digits(row.ceiling_ms)} ms"
                for row in rows
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    goals = [
        (place, OUTLOOK.get(row.what, {}).get(row.contestant))
        for place, row in enumerate(rows)
        if row.threads == 1
    ]
    result.add_trace(
        go.Scatter(
            x=[goal for _, goal in goals if goal],
            y=[place for place, goal in goals if goal],
            mode="markers",
            marker={
                "symbol": "line-ns-open",
                "color": INK,
                "size": 20,
                "line": {"width": 3, "color": INK},
            },
            hovertemplate="goal %{x:.0%}<extra></extra>",
        )
    )
    result.add_vline(x=1, line={"color": INK, "width": 1, "dash": "dot"})
    top = max([1.0, *(row.high for row in rows)])
    result.update_xaxes(title="share of the limit", tickformat=".0%", range=[0, 1.08 * top])
    _rows_axis(result, list(range(len(rows))), labels)
    return result


# ---- rows in groups ---------------------------------------------------------------


def _grouped(table: pd.DataFrame) -> tuple[list[float], list[tuple[float, str]]]:
    """A place for each row, with room for a heading above each case; and the headings."""
    places: list[float] = []
    groups: list[tuple[float, str]] = []
    place = 0.0
    last: tuple[str, int] | None = None
    many = table["threads"].nunique() > 1 if len(table) else False
    for row in rows_of(table):
        if (row.case, row.threads) != last:
            name = row.case if row.case != "given" else "as given"
            groups.append((place, name + (f", {row.threads} threads" if many else "")))
            last = (row.case, row.threads)
            place += 1.0
        places.append(place)
        place += 1.0
    return places, groups


def _name_rows(
    target: go.Figure,
    places: Sequence[float],
    labels: Sequence[str],
    groups: Sequence[tuple[float, str]],
) -> None:
    """Labels of the rows, and each group's heading above its first."""
    _rows_axis(target, places, labels)
    for place, name in groups:
        target.add_annotation(
            x=0,
            xref="paper",
            y=place,
            text=f"<b>{name}</b>",
            showarrow=False,
            xanchor="left",
            yshift=-3,
        )


def _rows_axis(target: go.Figure, places: Sequence[float], labels: Sequence[str]) -> None:
    last = max(places, default=0.0)
    target.update_yaxes(
        tickmode="array",
        tickvals=list(places),
        ticktext=list(labels),
        range=[last + 0.6, -0.6],
        ticklabelstandoff=6,
        showgrid=False,
        zeroline=False,
    )
