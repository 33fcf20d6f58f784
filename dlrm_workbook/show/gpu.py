"""Plotly figures of what ran on the GPU and on every thread: DataFrames in, figures out.

The tables come from :mod:`dlrm_workbook.analysis.gpu`, ``idleness`` and ``lanes``. A table that
holds nothing says why (``attrs["not_measured"]``); its figure is not asked for.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.parts import parse_span, part_label
from dlrm_workbook.analysis.gpu import ISSUED, REASONS
from dlrm_workbook.analysis.idleness import NOBODY
from dlrm_workbook.analysis.kernel_names import short_names
from dlrm_workbook.ground.units import known_or, milliseconds, percent
from dlrm_workbook.recordings.hpctoolkit.metrics import STALLS
from dlrm_workbook.show.tables import TABLES, Column, function_name, table_bars
from dlrm_workbook.show.theme import (
    COLOURS,
    GRID,
    INK,
    ROW,
    SPAN_GAP,
    add_bars,
    add_part_spans,
    add_spans,
    figure,
    label_rows,
    plotly_text,
    rows_of,
    stacked_bars,
)

FUNCTION_COLOURS = [COLOURS[name] for name in COLOURS if name != "other"]
LANE_ROW = 34

MOST_KERNELS, MOST_STALLED, MOST_BLAMED = 15, 12, 12
"""Bars that are drawn: the first rows of their tables."""


def kernel_bars(kernels: pd.DataFrame) -> go.Figure:
    """The kernels of :func:`~dlrm_workbook.analysis.gpu.kernel_table` with the most time."""
    several = len(kernels[["component", "phase"]].drop_duplicates()) > 1
    caution = kernels.attrs.get("caution")

    def label(row: Any) -> str:
        name = _middle_cut(row.short_name, 38)
        return f"{name} · {part_label(row.component, row.phase)}" if several else name

    return table_bars(
        kernels.head(MOST_KERNELS),
        "GPU kernels by time" + (f" ({caution})" if caution else ""),
        "ms over the whole recording (share of GPU time)",
        "time_ms",
        label,
        share="share_of_device",
        columns=TABLES["kernels"]
        | TABLES["kernel_launches"]
        | {"short_name": Column("kernel", "text", ("kernel",))},  # the whole name
    )


def _middle_cut(name: str, limit: int) -> str:
    """A name without its middle: kernels of one library differ at their ends."""
    if len(name) <= limit:
        return name
    end = limit // 3
    return f"{name[: limit - end - 1].rstrip()}…{name[-end:].lstrip()}"


def stall_bars(stalls: pd.DataFrame) -> go.Figure:
    """Why warps waited, a bar a kernel or source line, the most sampled on top; of
    :func:`~dlrm_workbook.analysis.gpu.stall_table` by kernel or line."""
    by_line = "place" in stalls
    keys = ["kernel", "file", "line", "place"] if by_line else ["kernel"]
    places = stalls[keys].drop_duplicates().head(MOST_STALLED).reset_index(drop=True)
    places["row"] = places.index
    drawn = stalls.merge(places, on=keys)
    one_kernel = stalls["kernel"].nunique() == 1
    short = short_names(stalls["kernel"])
    labels = [_middle_cut(short[kernel], 26 if by_line else 46) for kernel in places["kernel"]]
    if by_line:
        kernels = [""] * len(labels) if one_kernel else [f" · {label}" for label in labels]
        lines = map(_line_label, places["place"])
        labels = [line + kernel for line, kernel in zip(lines, kernels, strict=True)]
    title = f"What warps waited for, by {'source line' if by_line else 'kernel'}"
    result = figure(title, 196 + ROW * max(len(places), 3), legend=True)
    order = drawn.groupby("reason")["warp_cycles"].sum().sort_values(ascending=False).index
    for reason in sorted(order, key=lambda name: name == ISSUED):
        part = drawn[drawn["reason"] == reason]
        issued = reason == ISSUED
        shares = [known_or(share, percent) for share in part["share_of_stalls"]]
        data = [labels[row] for row in part["row"]], part["warp_cycles"], shares
        hover = (
            f"%{{customdata[0]}}<br>{STALLS.get(reason, reason)}<br>"
            "%{x:.2f}% of all samples, %{customdata[2]} of all stalls<br>"
            "%{customdata[1]:,.3s} warp-cycles"
        )
        legend = REASONS.get(reason, {"words": reason, "colour": "other"})
        colour = GRID if issued else COLOURS[legend["colour"]]
        add_bars(
            result,
            100 * part["share_of_samples"],
            part["row"],
            legend["words"],
            {"color": colour, "line": {"width": 1 if issued else 0, "color": INK}},
            hover,
            customdata=list(zip(*data, strict=True)),
        )
    result.update_layout(barmode="stack")
    result.update_xaxes(title="% of all warp-cycles sampled")
    label_rows(result, labels, places["row"].tolist())
    return result


DRAWN_LANES = 32
"""Threads and streams of a timeline that can be read; the frame has the others."""


def lane_timeline(spans: pd.DataFrame, title: str = "Threads and GPU streams") -> go.Figure:
    """What every thread and stream ran when, a row each; drag to zoom.

    Args:
        spans: of :func:`dlrm_workbook.analysis.lanes.thread_timeline`. By component the colours
            are those of the parts; by function the largest ones have a colour each.
    """
    counters, spans = spans.attrs.get("counters"), spans.copy()
    spans.attrs = {}  # pandas compares those of what it joins, and one is a table
    held = spans.groupby("lane", sort=False)["duration_ms"].sum()
    lanes = [lane for lane in held.index if lane in held.nlargest(DRAWN_LANES).index]
    if len(lanes) < len(held):
        title += f" (the {len(lanes)} of {len(held)} that run longest)"
        spans = spans[spans["lane"].isin(lanes)]
    rows = {lane: row for row, lane in enumerate(lanes)}
    result = figure(title, 220 + LANE_ROW * len(lanes), legend=True)
    parts = zip(spans["component"], spans["phase"], strict=True)
    if spans["label"].tolist() == [part_label(*part) for part in parts]:
        add_part_spans(result, spans, rows, "outside the model's parts")
    else:
        held = spans.groupby("label")["duration_ms"].sum().sort_values(ascending=False)
        named = [label for label in held.index if label != "(others)"][: len(FUNCTION_COLOURS)]
        for label, colour in zip(named, FUNCTION_COLOURS, strict=False):
            of_label = spans[spans["label"] == label]
            add_spans(result, of_label, rows, function_name(label, 28), colour)
        rest = spans[~spans["label"].isin(named)]
        if len(rest):
            add_spans(result, rest, rows, "other functions", COLOURS["other"])
    result.update_layout(barmode="overlay", bargap=SPAN_GAP)
    last = float((spans["start_ms"] + spans["duration_ms"]).max())
    result.update_xaxes(title="ms since the trace began", range=[0, last * 1.005])
    label_rows(result, list(map(plotly_text, lanes)))
    if counters is not None and len(counters):
        _draw_counters(result, counters)
    return result


def _draw_counters(timeline: go.Figure, counters: pd.DataFrame) -> None:
    """The curves of :func:`~dlrm_workbook.analysis.device_counters.counter_curves` under a
    timeline, on an axis of their own."""
    height = timeline.layout.height + COUNTER_HEIGHT
    share = COUNTER_HEIGHT / height
    for (gpu, name), points in counters.groupby(["gpu", "counter"]):
        timeline.add_scatter(
            x=points["time_ms"],
            y=points["value"],
            yaxis="y2",
            mode="lines",
            line={"width": 1},
            name=plotly_text(f"{name} ({gpu})" if gpu else str(name)),
        )
    timeline.update_layout(
        height=height,
        yaxis={"domain": [share, 1.0]},
        yaxis2={"domain": [0.0, 0.7 * share], "title": "counters", "anchor": "x"},
        xaxis={"anchor": "y2"},
    )


COUNTER_HEIGHT = 160
"""Pixels under a timeline for hardware counters."""


def idleness_bars(idleness: pd.DataFrame) -> go.Figure:
    """A bar for each GPU of :func:`~dlrm_workbook.analysis.idleness.gpu_idleness`."""
    several = idleness["rank"].nunique() > 1
    labels = [(f"rank {row.rank}, " if several else "") + row.gpu for row in rows_of(idleness)]
    looks = {
        f"{name}_ms": (f"{name}: {milliseconds(idleness[f'{name}_ms'].sum())}", COLOURS[colour])
        for name, colour in (("busy", "embedding"), ("idle", "other"))
    }
    table = idleness[list(looks)].set_axis(labels)
    result = stacked_bars("GPU busy and idle", table, looks, "ms", texts=True)
    result.update_xaxes(title="ms " + str(idleness.attrs.get("span", "")))
    return result


def blame_bars(blame: pd.DataFrame) -> go.Figure:
    """What the CPU ran while every stream was idle, by
    :func:`~dlrm_workbook.analysis.idleness.idle_blame`."""
    return table_bars(
        blame.head(MOST_BLAMED),
        "What the CPU ran while the GPU was idle",
        f"ms of GPU idle time {blame.attrs.get('per', '')}".rstrip(),
        "blamed_ms",
        lambda row: _blamed(row, part_label(row.component, row.phase)),
        columns=TABLES["blame"] | {"file": ""},
    )


def _blamed(row: Any, part: str) -> str:
    """What ran, and its part; once where it is the part's own function or range."""
    if row.kind == "part" or parse_span(row.name) == (row.component, row.phase):
        return part
    name = "no launching thread ran" if row.name == NOBODY else function_name(row.name, 30)
    return f"{name} · {part}"


def _line_label(place: str) -> str:
    """A source line as it is; a function (no line known) in a few characters."""
    file, colon, line = place.rpartition(":")
    return place if colon and line.isdigit() and file else function_name(place, 28)
