"""Figures of a benchmark: contestants keep their colour, intervals are lines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dlrm_core.units import (
    counted,
    digits,
    milliseconds,
    percent,
    ratio,
    signed_milliseconds,
    value_text,
)
from dlrm_workbook.evidence.contestants import PEER
from dlrm_workbook.show.theme import (
    COLOURS,
    INK,
    SYMBOLS,
    TEMPLATE,
    WATERFALL,
    add_ends,
    add_headings,
    error_bars,
    figure,
    in_groups,
    label_rows,
    lines_of,
    log_axis,
    log_ticks,
    mark_one,
    rows_of,
)
from dlrm_workbook.studies.bench.cases import GROWTH, PLAIN, TORCHREC, TUNED
from dlrm_workbook.studies.bench.show_tables import (
    FIGURE_NAMES,
    contestant_label,
    interval_text,
    option_label,
)

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

LOOKS = {
    "step_ms": ("step", COLOURS["top_mlp"], "circle", -0.22),
    "end_to_end_ms": ("end to end, with data", COLOURS["data"], "diamond", 0.22),
}
"""Of a ratio: its name, colour, marker, and how far from the middle of its row."""


def colour_of(name: str) -> str:
    """A contestant's colour."""
    return CONTESTANTS.get(name, COLOURS["other"])


def times_bars(times: pd.DataFrame) -> go.Figure:
    """Whole iteration of every contestant and shape: the step, and the wait for data on top.

    Args:
        times: what :func:`dlrm_workbook.studies.bench.analyse.times` gives.
    """
    places, groups = _in_cases(times)
    height = 150 + 27 * (len(times) + 2 * len(groups))
    result = figure("Time of an iteration", height, legend=True)
    hover = [
        f"{contestant_label(row.contestant)}<br>step {_with_interval(row, 'step')}<br>"
        f"end to end {_with_interval(row, 'end_to_end')}<br>{row.samples_per_second:,.0f} samples/s"
        for row in rows_of(times)
    ]
    result.add_trace(
        go.Bar(
            x=times["step_ms"],
            y=places,
            orientation="h",
            marker={"color": [colour_of(name) for name in times["contestant"]]},
            showlegend=False,
            hovertext=hover,
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    low, mid, high = (times[f"end_to_end_{end}"] for end in ("low_ms", "ms", "high_ms"))
    result.add_trace(
        go.Bar(
            x=(times["end_to_end_ms"] - times["step_ms"]).clip(lower=0),
            y=places,
            orientation="h",
            name="waiting for data; the rest of a bar is the step",
            marker={"color": COLOURS["data"]},
            error_x=error_bars(low, mid, high),
            hovertext=hover,
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    texts = list(map(milliseconds, times["end_to_end_ms"]))
    add_ends(result, times["end_to_end_high_ms"], places, texts)
    longest = float(times["end_to_end_high_ms"].max()) if len(times) else 1.0
    result.update_layout(barmode="stack", bargap=0.25)
    result.update_xaxes(title="ms per iteration, shorter is better", range=[0, 1.35 * longest])
    label_rows(result, [contestant_label(name) for name in times["contestant"]], places)
    add_headings(result, groups)
    return result


def _with_interval(row: Any, figure: str) -> str:
    mid, low, high = (getattr(row, f"{figure}_{end}") for end in ("ms", "low_ms", "high_ms"))
    return f"{digits(mid)} ms ({interval_text(row.confidence, digits(low), digits(high))})"


def ratio_dots(ratios: pd.DataFrame) -> go.Figure:
    """Times as fast, with interval: a step, end to end, and the goals."""
    step = ratios[ratios["figure"] == "step_ms"].reset_index(drop=True)
    places, groups = _in_cases(step)
    names = list(dict.fromkeys(ratios["against"]))
    against = " or ".join(contestant_label(name) for name in names)
    title = f"Times as fast as {against}"
    result = figure(title, 170 + 40 * (len(step) + len(groups)), legend=True)
    top = float(ratios[["high", "goal"]].max().max()) if len(ratios) else 1.0
    for kind, (_, colour, _, lift) in LOOKS.items():
        rows = ratios[ratios["figure"] == kind].reset_index(drop=True)
        result.add_trace(_dots(rows, kind, places, _faster))
        ends = []
        for row in rows_of(rows):
            # behind the goal where that would cross the figure
            crossed = math.isfinite(row.goal) and row.high <= row.goal < row.high + 0.14 * top
            ends.append(row.goal if crossed else row.high)
        lifted = [place + lift for place in places]
        add_ends(result, ends, lifted, list(map(ratio, rows["mid"])))
        goals = [
            (goal, place)
            for goal, place in zip(rows["goal"], lifted, strict=True)
            if math.isfinite(goal)
        ]
        if goals:
            marks = _goals(goals, colour, "%{x:g}x")
            result.add_trace(marks.update(name=f"goal, {FIGURE_NAMES[kind]}"))
    mark_one(result, 1.0, groups, max(places, default=0.0))
    result.update_xaxes(title="times as fast (1 is no difference)", range=[0, 1.15 * top])
    label_rows(result, [contestant_label(name) for name in step["contestant"]], places)
    add_headings(result, groups)
    return result


def growth_curves(growth: pd.DataFrame, kind: str = "end_to_end_ms") -> go.Figure:
    """Time along batch, tables, dim and pooling, a line a contestant; both axes logarithmic.

    Args:
        growth: what :func:`dlrm_workbook.studies.bench.analyse.growth` gives.
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
        result.update_xaxes(**log_axis(sizes, "{:,.0f}".format), **at)
        result.update_yaxes(**log_axis(log_ticks(curves["time_ms"].tolist())), **at)
        if place % columns == 0:
            result.update_yaxes(title="ms", **at)
    return result


def options_dots(without: pd.DataFrame) -> go.Figure:
    """How many times as fast the run is with each option as without it."""
    leaves = list(dict.fromkeys(without["leaf"]))
    result = figure("What each option brings", 150 + 46 * max(len(leaves), 2), legend=True)
    for kind in LOOKS:
        rows = without[without["figure"] == kind]
        places = [leaves.index(leaf) for leaf in rows["leaf"]]
        result.add_trace(_dots(rows, kind, places, lambda row: f"{ratio(row.mid)} as fast with it"))
    mark_one(result)
    names = {row.leaf: option_label(row) for row in rows_of(without)}
    labels = [lines_of(names[leaf], 34) for leaf in leaves]
    result.update_xaxes(title="times as fast with the option as without it (1: it brings nothing)")
    label_rows(result, labels)
    return result


def ladder(rungs: pd.DataFrame, kind: str = "end_to_end_ms") -> go.Figure:
    """From the plain contestant to the tuned one, an option more at each column.

    Args:
        rungs: what :func:`dlrm_workbook.studies.bench.analyse.ladder` gives.
        kind: ``step_ms`` or ``end_to_end_ms``.
    """
    rows = rows_of(rungs[rungs["figure"] == kind].sort_values("rung"))
    result = figure(f"From plain to tuned, {FIGURE_NAMES[kind]}", 170 + 40 * max(len(rows), 2))
    times = [float(row.time_ms) for row in rows]
    steps = [after - before for before, after in itertools.pairwise(times)]
    labels = ["plain"] + [
        lines_of(f"{row.leaf.partition('.')[2]}: {value_text(row.value)}", 26) for row in rows[1:]
    ]
    gain = f", {ratio(rows[-1].mid)} as fast" if len(rows) > 1 else ""
    places = list(range(len(times) + 1))
    result.add_trace(
        go.Waterfall(
            orientation="h",
            y=places,
            x=[*times[:1], *steps, *times[-1:]],
            measure=["absolute", *("relative" for _ in steps), "total"][: len(places)],
            text=[
                *map(milliseconds, times[:1]),
                *map(signed_milliseconds, steps),
                *(f"{milliseconds(ms)}{gain}" for ms in times[-1:]),
            ],
            **WATERFALL,
        )
    )
    result.update_xaxes(title="ms per iteration", range=[0, 1.25 * max(times, default=1.0)])
    label_rows(result, [*labels, "all"])
    return result


def share_bars(shares: pd.DataFrame) -> go.Figure:
    """How near each part comes to this machine's limit; the light mark is the goal."""
    rows = rows_of(shares[shares["share"].notna()])
    result = figure("Share of this machine's measured limits", 150 + 30 * max(len(rows), 2))
    labels = [
        f"{row.what}, {contestant_label(row.contestant)}<br>"
        f"{row.case}, {counted(row.threads, 'thread')}"
        for row in rows
    ]
    colours = {"dense": COLOURS["top_mlp"], "embedding": COLOURS["embedding"]}
    result.add_trace(
        go.Bar(
            x=[row.share for row in rows],
            y=list(range(len(rows))),
            orientation="h",
            marker={"color": [colours[row.what] for row in rows]},
            error_x=error_bars(
                [row.low for row in rows],
                [row.share for row in rows],
                [row.high for row in rows],
            ),
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
        (goal, place)
        for place, row in enumerate(rows)
        if row.threads == 1 and (goal := OUTLOOK.get(row.what, {}).get(row.contestant))
    ]
    if goals:
        result.add_trace(_goals(goals, INK, "%{x:.0%}"))
    mark_one(result)
    top = max([1.0, *(row.high for row in rows)])
    result.update_xaxes(title="share of the limit", tickformat=".0%", range=[0, 1.08 * top])
    label_rows(result, labels)
    return result


def _in_cases(table: pd.DataFrame) -> tuple[list[float], list[tuple[float, str]]]:
    """Places of a table's rows, and the heading of each case with its own."""
    many = table["threads"].nunique() > 1
    return in_groups(
        ("as given" if row.case == "given" else row.case)
        + (f", {counted(row.threads, 'thread')}" if many else "")
        for row in rows_of(table)
    )


def _dots(
    rows: pd.DataFrame, kind: str, places: Sequence[float], said: Callable[[Any], str]
) -> go.Scatter:
    """Ratios of one kind with their intervals, a little above or below the middle of a row.

    Args:
        said: a row's sentence, without the interval.
    """
    name, colour, symbol, lift = LOOKS[kind]
    return go.Scatter(
        x=rows["mid"],
        y=[place + lift for place in places],
        mode="markers",
        name=name,
        marker={"color": colour, "size": 11, "symbol": symbol},
        error_x=error_bars(rows["low"], rows["mid"], rows["high"], colour, 2.5),
        hovertext=[
            f"{name}: {said(row)} "
            f"({interval_text(row.confidence, ratio(row.low), ratio(row.high))})"
            for row in rows_of(rows)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _faster(row: Any) -> str:
    names = contestant_label(row.contestant), contestant_label(row.against)
    return f"{names[0]} is {ratio(row.mid)} as fast as {names[1]}"


def _goals(goals: Sequence[tuple[float, float]], colour: str, text: str) -> go.Scatter:
    """Goals as upright marks: each with its place."""
    return go.Scatter(
        x=[goal for goal, _ in goals],
        y=[place for _, place in goals],
        mode="markers",
        marker={
            "symbol": "line-ns-open",
            "color": colour,
            "size": 16,
            "line": {"width": 3, "color": colour},
        },
        hovertemplate=f"goal {text}<extra></extra>",
    )
