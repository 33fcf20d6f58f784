"""The roofline: the model's parts under the ceilings of their machine.

DataFrames of :mod:`dlrm_workbook.analysis.roofline` and ``gpu_limits`` in, figures out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.base.text import format_bytes
from dlrm_core.parts import part_label
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.ground.units import NOT_MEASURED, digits, milliseconds, percent
from dlrm_workbook.show.profile import product_peaks
from dlrm_workbook.show.theme import (
    DASHES,
    GRID,
    INK,
    LETTER,
    OUTLINE,
    PLOT_WIDTH,
    ROW,
    add_bars,
    add_points,
    colour_of,
    error_bars,
    figure,
    label_rows,
    line_look,
    log_axis,
    paled,
    rows_of,
    step_order,
    with_room,
)

LABELLED_SHARE = 0.02
"""Parts that hold less of the step have no label in the chart, only hover text."""

HEIGHT = 560
"""Pixels of the chart, by which labels are placed."""

ROOF = "roof"
"""Name of annotations along horizontal lines."""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels from the plot's lower left corner."""


@dataclass(frozen=True)
class Frame:
    """What the axes show, in log10, and where a point is in pixels."""

    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def around(
        cls, points: pd.DataFrame, roofs: Mapping[str, float], slopes: Mapping[str, float]
    ) -> Frame:
        x = list(points["intensity_flop_per_byte"]) or [1.0]
        if roofs and slopes:
            # where the slowest slope meets the highest roof
            x.append(max(roofs.values()) / min(slopes.values()))
        y = [*points["gflops"], *roofs.values()] or [1.0]
        left, right = math.log10(min(x)) - 0.35, math.log10(max(x)) + 1.05
        return cls(left, right, math.log10(min(y)) - 0.35, math.log10(max(y)) + 0.35)

    def pixels(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.left) / (self.right - self.left) * PLOT_WIDTH
        up = (y - self.bottom) / (self.top - self.bottom) * (HEIGHT - 110)
        return across, up


PLACES = {"middle right": (1, 0), "middle left": (-1, 0), "bottom center": (0, -1)}
PLACES |= {"top center": (0, 1), "bottom right": (1, -1), "top left": (-1, 1)}
"""Where a label may stand beside its marker, the best place first."""


def label_place(x: float, y: float, radius: float, label: str, taken: list[Box]) -> str:
    """Where the label of a marker, in pixels, is free of the boxes of markers and labels that are
    taken, to which its own is added; '' for nowhere."""
    half = LETTER * len(label) / 2
    for place, (across, up) in PLACES.items():
        middle, height = x + across * (radius + 4 + half), y + up * (radius + 11)
        box = (middle - half, height - 8, middle + half, height + 8)
        if box[2] < PLOT_WIDTH and not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
            for other in taken
            if not other[0] <= x <= other[2] or not other[1] <= y <= other[3]
        ):
            taken.append(box)
            return place
    return ""


def marker_radius(time_ms: float, total_ms: float) -> float:
    """Pixels of a marker whose area is as its share of the step."""
    share = max(time_ms / total_ms, 0.0) if total_ms > 0 else 0.0
    return max(4.5, 31 * math.sqrt(share))


PHASE_SYMBOLS = {"forward": "circle", "backward": "diamond", "update": "square"}
"""Phase to the shape of its marker."""


def roofline_chart(table: pd.DataFrame, ceilings: Mapping[str, Any] | None) -> go.Figure:
    """Rate against intensity of each part, under the measured ceilings, both axes in logs.

    Args:
        table: of :func:`dlrm_workbook.analysis.roofline.roofline`.
        ceilings: ``meta["ceilings"]``; without it only the parts are drawn.
    """
    title = "Roofline: what the parts reach of what the machine allows"
    return _roofline(table, ceilings or {}, title, "of the step")


MOST_OPERATORS = 40
"""Operators of a GPU in its chart, those with the most time."""


def operator_roofline(rates: pd.DataFrame) -> go.Figure:
    """Products and lookups on a GPU under the limits of its data sheet, both axes in logs.

    Args:
        rates: of :func:`dlrm_workbook.analysis.gpu_limits.operator_rates`. Where no data sheet
            of its GPU is listed, no limits are drawn, and the title says so.
    """
    name = rates.attrs.get("device")
    table = rates[rates["intensity_flop_per_byte"].notna()].head(MOST_OPERATORS)
    sizes = [re.findall(r"\[(\d[\d, ]*)\]", shapes) for shapes in table["shapes"]]
    table = table.assign(
        label=[
            " ".join([operator.rpartition("::")[2], *(s.replace(", ", "×") for s in shapes[-2:])])
            for operator, shapes in zip(table["name"], sizes, strict=True)
        ],
        time_ms=table["gpu_ms"],
        flops=1e9 * table["call_gflop"] * table["calls"],
        bytes=table["call_bytes"] * table["calls"],
        gflops=1e3 * table["tflops_per_s"],
        ceiling_ms=table["least_us"] * table["calls"] / 1e3,
        ceiling=f"data sheet of {name}" if name else "no data sheet",
    )
    against = f"the data sheet of {name}" if name else str(rates.attrs.get("device_reason", ""))
    ceilings = device(name).ceilings() if name else {}
    return _roofline(table, ceilings, f"Operators on the GPU: {against}", "of these operators")


def _roofline(
    table: pd.DataFrame, ceilings: Mapping[str, Any], title: str, basis: str
) -> go.Figure:
    points = table[(table["flops"] > 0) & (table["gflops"] > 0)]
    result = figure(title, HEIGHT)
    beside = {"x": 1.01, "y": 1, "xanchor": "left", "yanchor": "top"}
    beside |= {"tracegroupgap": 14, "traceorder": "grouped"}
    result.update_layout(showlegend=True, legend=beside, margin={"r": 190})
    roofs, slopes = product_peaks(ceilings), _slopes(ceilings)
    frame = Frame.around(points, roofs, slopes)
    total = float(table["time_ms"].sum())
    _draw_slopes(result, roofs, slopes, frame)
    _draw_roofs(result, roofs, slopes, frame)
    _draw_points(result, points, total, frame, basis)
    _log_axes(result, frame, _unplotted(table))
    return result


def _slopes(ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Kind of access to its bandwidth, GB/s."""
    streams = [row for row in ceilings.get("stream") or [] if row.get("read_gb_per_s")]
    streams = sorted(streams, key=lambda row: row.get("bytes") or 0)
    slopes = {}
    if len(streams) > 1:
        slopes["cache"] = _stream_rate(streams[0])
    if streams:
        slopes["memory"] = _stream_rate(streams[-1])
    rows = [row for row in ceilings.get("gather") or [] if row.get("gb_per_s")]
    if rows:
        slowest = min(rows, key=lambda row: float(row["gb_per_s"]))
        slopes["random rows"] = float(slowest["gb_per_s"])
    return slopes


def _stream_rate(row: Mapping[str, Any]) -> float:
    names = ("read_gb_per_s", "copy_gb_per_s", "triad_gb_per_s")
    return max(float(row[name]) for name in names if row.get(name))


def _draw_roofs(
    result: go.Figure, roofs: Mapping[str, float], slopes: Mapping[str, float], frame: Frame
) -> None:
    fastest = max(slopes.values(), default=math.inf)
    labels: list[tuple[float, list[str]]] = []
    for name, rate in sorted(roofs.items(), key=lambda item: -item[1]):
        start = max(10**frame.left, rate / fastest)
        text = f"{name}, {digits(rate)} GFLOP/s"
        line = _line([start, 10**frame.right], [rate, rate], text, "solid")
        # on a narrow page these are in the legend too (charts.js)
        result.add_trace(line.update(**_heading("matrix products")))
        # roofs of nearly the same height share a label
        if labels and rate > 0.8 * labels[-1][0]:
            labels[-1][1].append(text)
        else:
            labels.append((rate, [text]))
    for rate, texts in labels:
        place = {"x": frame.right, "y": math.log10(rate), "xanchor": "right", "yanchor": "bottom"}
        look = {"name": ROOF, "showarrow": False, "font": {"size": 12}}
        result.add_annotation(text="<br>".join(texts), **place, **look)


def _draw_slopes(
    result: go.Figure, roofs: Mapping[str, float], slopes: Mapping[str, float], frame: Frame
) -> None:
    highest = max(roofs.values(), default=10**frame.top)
    for number, (name, rate) in enumerate(slopes.items(), 1):
        x = [max(10**frame.left, 10**frame.bottom / rate), highest / rate]
        dash = DASHES[number % len(DASHES)]
        # named in the legend: the angle of a text along it would fit one width of the page only
        line = _line(x, [rate * value for value in x], f"{name}, {digits(rate)} GB/s", dash)
        result.add_trace(line.update(showlegend=True, **_heading("bandwidth")))


def _line(x: Sequence[float], y: Sequence[float], name: str, dash: str) -> go.Scatter:
    look = {"mode": "lines", "line": {"color": INK, "width": 1.5, "dash": dash}}
    return go.Scatter(x=x, y=y, name=name, hoverinfo="name", showlegend=False, **look)


def _draw_points(
    result: go.Figure, points: pd.DataFrame, total_ms: float, frame: Frame, basis: str
) -> None:
    # small markers on top of large ones
    rows = sorted(rows_of(points), key=lambda row: -row.time_ms)
    placed = []
    for row in rows:
        x, y = frame.pixels(math.log10(row.intensity_flop_per_byte), math.log10(row.gflops))
        placed.append((x, y, marker_radius(row.time_ms, total_ms)))
    taken = [(x - r, y - r, x + r, y + r) for x, y, r in placed]
    look = {"opacity": 0.88, "line": {"width": 1, "color": "rgba(255, 255, 255, 0.7)"}}
    for row, (x, y, radius) in zip(rows, placed, strict=True):
        share = row.time_ms / total_ms if total_ms > 0 else 0.0
        part = part_label(row.component, row.phase)
        label, symbol = getattr(row, "label", part), PHASE_SYMBOLS.get(row.phase, "circle")
        place = label_place(x, y, radius, label, taken) if share >= LABELLED_SHARE else ""
        add_points(
            result,
            [row.intensity_flop_per_byte],
            [row.gflops],
            label,
            [_hover(label if label == part else f"{label}, {part}", row, share, basis)],
            mode="markers+text" if place else "markers",
            text=[label] if place else None,
            textposition=place or None,
            textfont={"size": 12},
            cliponaxis=False,
            showlegend=False,
            marker={"color": colour_of(row.component), "symbol": symbol, "size": 2 * radius} | look,
        )
    for component in sorted(dict.fromkeys(points["component"]), key=step_order):
        _key(result, part_label(component), colour_of(component), "circle", "part")
    for phase in sorted(set(points["phase"]) & set(PHASE_SYMBOLS), key=list(PHASE_SYMBOLS).index):
        _key(result, phase, INK, PHASE_SYMBOLS[phase], "phase")


def _key(result: go.Figure, name: str, colour: str, symbol: str, group: str) -> None:
    look = {"color": colour, "symbol": symbol, "size": 11}
    add_points(result, [None], [None], name, "", marker=look, hoverinfo="skip", **_heading(group))


def _heading(group: str) -> dict[str, Any]:
    return {"legendgroup": group, "legendgrouptitle": {"text": group}}


def _hover(label: str, row: Any, share: float, basis: str) -> str:
    lines = [
        f"<b>{label}</b>",
        f"{milliseconds(row.time_ms)}, {percent(share)} {basis}",
        f"{digits(row.gflops)} GFLOP/s, {digits(row.gb_per_s)} GB/s",
        f"{digits(row.intensity_flop_per_byte)} operations per byte",
    ]
    if math.isfinite(row.ceiling_ms):
        lines += [
            f"least time {milliseconds(row.ceiling_ms)}: {percent(row.share_of_ceiling)} "
            "of the ceiling",
            f"limit: {row.limit} ({row.ceiling})",
        ]
    else:
        lines.append(f"ceiling: {row.ceiling or NOT_MEASURED}")
    return "<br>".join(lines)


def _unplotted(table: pd.DataFrame) -> str:
    """Which parts are not in the chart, since they compute nothing."""
    rest = table[(table["flops"] <= 0) & (table["bytes"] > 0) & (table["time_ms"] > 0)]
    names = [part_label(row.component, row.phase) for row in rows_of(rest)]
    return f"<br>without arithmetic, not shown: {', '.join(names)}" if names else ""


def _log_axes(result: go.Figure, frame: Frame, note: str) -> None:
    common = {"type": "log", "dtick": 1, "exponentformat": "none", "gridcolor": GRID}
    title = f"intensity, operations per byte{note}"
    result.update_xaxes(title=title, range=[frame.left, frame.right], **common)
    height = [frame.bottom, frame.top]
    result.update_yaxes(title="rate, GFLOP/s", range=height, zeroline=False, **common)


def least_time_bars(table: pd.DataFrame) -> go.Figure:
    """The times measured (pale) and the least times that the machine allows (full), of
    :func:`~dlrm_workbook.analysis.roofline.roofline`."""
    shown = table[table["time_ms"] > 0].sort_values("time_ms", ascending=False)
    rows = rows_of(shown)
    title = "Time of each part, and the least time that the machine allows"
    result = figure(title, 110 + ROW * max(len(rows), 3))
    places = list(range(len(rows)))
    colours = [colour_of(row.component) for row in rows]
    full = {"color": colours, "line": {"width": 0}}
    outline = {"width": OUTLINE, "color": colours}
    pale = {"color": list(map(paled, colours)), "line": outline}
    labels = [part_label(row.component, row.phase) for row in rows]
    texts = [_gap(row) for row in rows]
    hover = [f"{label}: {text}" for label, text in zip(labels, texts, strict=True)]
    behind: dict[str, Any] = {"text": texts, "textposition": "outside", "cliponaxis": False}
    add_bars(result, shown["time_ms"], places, "", pale, hover, **behind)
    least = shown["ceiling_ms"].clip(upper=shown["time_ms"])
    add_bars(result, least, places, "", full, hover, cliponaxis=False)
    result.update_layout(barmode="overlay")
    result.update_xaxes(title="ms in a mean iteration", range=with_room(shown["time_ms"], texts))
    label_rows(result, labels)
    return result


def _gap(row: Any) -> str:
    measured = milliseconds(row.time_ms)
    if not math.isfinite(row.ceiling_ms):
        return f"{measured}, least time {NOT_MEASURED}"
    if row.ceiling_ms == 0:
        return f"{measured}, least 0: nothing of it is the machine's work"
    least = f"{measured}, least {milliseconds(row.ceiling_ms)}"
    return f"{least} ({percent(row.share_of_ceiling)}): {row.limit}"


def _size(count: float) -> str:
    """Bytes at a mark of an axis: ``64 KiB``."""
    return format_bytes(count).replace(".00 ", " ")


def cache_curve(hits: pd.DataFrame, last_level_bytes: float | None = None) -> go.Figure:
    """Share of the lookups that a cache answers, over its size.

    Args:
        hits: of :func:`dlrm_workbook.analysis.reuse.cache_hit_shares`.
        last_level_bytes: size of the machine's last-level cache, marked if it is in sight.
    """
    result = figure("Lookups that a cache of rows answers (least recently used)", 340)
    hover = [
        f"{format_bytes(row.cache_bytes)}, {row.rows:,} rows: {percent(row.hit_share)}"
        for row in rows_of(hits)
    ]
    look = line_look(colour_of("embedding"))
    look["error_y"] = error_bars(hits["low"], hits["hit_share"], hits["high"])
    add_points(result, hits["cache_bytes"], hits["hit_share"], "", hover, **look)
    if last_level_bytes and last_level_bytes <= hits["cache_bytes"].max():
        text = f"last-level cache, {format_bytes(last_level_bytes)}"
        result.add_vline(x=last_level_bytes, line={"color": INK, "dash": "dot"})
        above = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        result.add_annotation(x=math.log10(last_level_bytes), text=text, **above)
    marks = hits["cache_bytes"].iloc[:: max(1, len(hits) // 5)]
    result.update_xaxes(title="size of the cache", **log_axis(list(marks), _size))
    result.update_yaxes(title="of the lookups", tickformat=".0%", rangemode="tozero")
    return result
