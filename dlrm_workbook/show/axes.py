"""Axes of figures: labelled rows, rows in groups, round numbers on a logarithmic scale."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_workbook.show.theme import INK, ROW, escaped, figure

Numbers = Sequence[float] | pd.Series


def lines_of(text: str, width: int) -> str:
    """A label broken into lines between words; a longer word keeps a line of its own."""
    pieces = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return "<br>".join(escaped(piece) for piece in pieces)


def label_rows(
    target: go.Figure,
    labels: Sequence[str],
    places: Sequence[float] | None = None,
    *,
    above: float = 0.6,
) -> None:
    """Label rows from the top down; two may have one label, so places are numbers.

    Args:
        places: of the rows, downwards; 0, 1, ... where they are not given.
        above: room over the first row, in rows.
    """
    at = list(range(len(labels))) if places is None else list(places)
    target.update_yaxes(
        tickmode="array",
        tickvals=at,
        ticktext=list(labels),
        range=[max(at, default=0.0) + 0.6, -above],
        ticklabelstandoff=6,
        showgrid=False,
        zeroline=False,
    )


def ranked_bars(
    title: str,
    unit: str,
    labels: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    hover: Sequence[str],
    marker: dict[str, Any],
    row: int = ROW,
) -> go.Figure:
    """Horizontal bars, the first on top, each with its label before and its value behind it."""
    result = figure(title, 110 + row * max(len(labels), 3))
    result.add_trace(
        go.Bar(
            x=list(values),
            y=list(range(len(labels))),
            orientation="h",
            marker=marker,
            text=list(texts),
            textposition="outside",
            cliponaxis=False,
            hovertext=list(hover),
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    # room for the text behind the longest bar
    longest = max(values, default=0.0)
    result.update_xaxes(title=unit, range=[0, 1.42 * longest if longest > 0 else 1])
    label_rows(result, labels)
    return result


def in_groups(headings: Iterable[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Places of rows with room for a heading above each group.

    Args:
        headings: of each row's group; rows of one group follow each other.

    Returns:
        A place for each row, and each heading with its own.
    """
    places: list[float] = []
    groups: list[tuple[float, str]] = []
    place = 0.0
    for heading in headings:
        if not groups or heading != groups[-1][1]:
            groups.append((place, heading))
            place += 1.0
        places.append(place)
        place += 1.0
    return places, groups


def add_headings(target: go.Figure, groups: Iterable[tuple[float, str]]) -> None:
    """Headings of :func:`in_groups`, at the left end of the plot."""
    for place, text in groups:
        target.add_annotation(
            x=0, xref="paper", y=place, text=f"<b>{text}</b>", showarrow=False, xanchor="left"
        )


def add_ends(
    target: go.Figure,
    ends: Numbers,
    places: Sequence[float] | Sequence[str],
    texts: Sequence[str],
    log: bool = False,
) -> None:
    """A text behind the end of each bar or range, which it does not cover.

    Args:
        log: whether the axis is logarithmic, where plotly wants an annotation's exponent.
    """
    for end, place, text in zip(ends, places, texts, strict=True):
        at = math.log10(end) if log else end
        target.add_annotation(x=at, y=place, text=text, showarrow=False, xanchor="left", xshift=10)


def mark_one(
    target: go.Figure, at: float = 1.0, groups: Sequence[tuple[float, str]] = (), last: float = 0.0
) -> None:
    """A dotted line where nothing is gained or lost, or at another value that others meet.

    Args:
        groups: headings of :func:`in_groups`, which the line does not cross.
        last: place of the last row, where there are groups.
    """
    look = {"color": INK, "width": 1, "dash": "dot"}
    if not groups:
        target.add_vline(x=at, line=look)
        return
    starts = [place for place, _ in groups]
    for start, end in zip(starts, [*starts[1:], last + 1.0], strict=True):
        target.add_shape(
            type="line", x0=at, x1=at, y0=start + 0.45, y1=end - 0.45, line=look, layer="above"
        )


def error_bars(
    low: Numbers, mid: Numbers, high: Numbers, colour: str = INK, thickness: float = 1.5
) -> dict[str, Any]:
    """``error_x`` or ``error_y`` from ``low`` to ``high``; no bar where an end is not known."""
    beyond = [_reach(end - middle) for end, middle in zip(high, mid, strict=True)]
    short = [_reach(middle - end) for end, middle in zip(low, mid, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": beyond,
        "arrayminus": short,
        "color": colour,
        "thickness": thickness,
        "width": 4,
    }


def _reach(length: float) -> float:
    return float(length) if math.isfinite(length) else 0.0


def log_axis(
    marks: Sequence[float], text: Callable[[float], str] = "{:,g}".format
) -> dict[str, Any]:
    """A logarithmic axis with these marks, for ``update_xaxes`` or ``update_yaxes``."""
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": list(marks),
        "ticktext": [text(mark) for mark in marks],
    }


def log_ticks(values: Sequence[float]) -> list[float]:
    """Two to six round numbers over the range of positive values; 1 where there are none."""
    if not len(values):
        return [1.0]
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    marks: list[float] = []
    for steps in ((1, 10), (1, 3, 10), (1, 2, 5, 10), (1, 1.5, 2, 3, 4, 5, 7, 10)):
        every = {round(step * 10.0**power, 12) for power in range(first, last) for step in steps}
        marks = sorted(mark for mark in every if 0.8 * low <= mark <= 1.25 * high)
        if len(marks) >= 3:
            return marks
    return marks if len(marks) >= 2 else sorted({float(f"{low:.2g}"), float(f"{high:.2g}")})
