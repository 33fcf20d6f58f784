"""What each change is predicted to bring, as a figure and as a table."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.figure_axes import add_ends, error_bars, label_rows, lines_of, mark_one
from dlrm_core.figure_theme import (
    COLOURS,
    INK,
    escaped,
    figure,
    milliseconds,
    part_label,
    rows_of,
)
from dlrm_core.page_tables import NOTHING, Table, Text
from dlrm_core.parts import COMPONENTS

ROW = 44
"""Height of a change, in pixels."""

AS_IT_IS = "as it is"
FURTHEST = 1.5
"""Ranges are drawn to this many times the longest bar; beyond it their end is written."""


def what_if_bars(table: pd.DataFrame, parts: pd.DataFrame) -> go.Figure | Text:
    """A bar a change, made of its parts, with the range it is predicted in.

    Bars are times of as many samples as an iteration has now, so that another batch size
    compares with the rest.

    Args:
        table: what :func:`dlrm_core.analysis.whatif.what_if_table` gives.
        parts: what :func:`dlrm_core.analysis.whatif.what_if_parts` gives.
    """
    known = table[table["mid_ms"].notna()]
    if known.empty:
        return Text("No change was probed in this run (`profiling.probes` turns the probes on).")
    names = [AS_IT_IS, *known["change"]]
    places = dict(zip(names, range(len(names)), strict=True))
    now = float(known["now_ms"].iloc[0])
    result = figure(
        "Predicted time of a step after each change", 160 + ROW * len(names), legend=True
    )
    for component in COMPONENTS:
        drawn = parts[parts["component"].eq(component) & parts["change"].isin(names)]
        some = drawn.groupby("change", sort=False)["time_ms"].sum()
        if not some.any():
            continue
        label = part_label(component)
        result.add_trace(
            go.Bar(
                x=some.tolist(),
                y=[places[change] for change in some.index],
                name=label,
                orientation="h",
                marker={"color": COLOURS.get(component, COLOURS["other"]), "line": {"width": 0}},
                hovertext=[
                    f"{escaped(str(change))}<br>{label}: {milliseconds(time)}"
                    for change, time in some.items()
                ],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    middle = now / known["speedup_mid"]
    least, highest = now / known["speedup_high"], now / known["speedup_low"]
    # one change of which little is known must not flatten all the others
    furthest = FURTHEST * max(now, float(middle.max()))
    most = highest.clip(upper=furthest)
    result.add_trace(
        go.Scatter(
            x=middle,
            y=[places[change] for change in known["change"]],
            mode="markers",
            marker={"color": INK, "size": 7, "symbol": "line-ns", "line": {"width": 2}},
            error_x=error_bars(least, middle, most, thickness=2),
            name="predicted range",
            hoverinfo="skip",
        )
    )
    # behind the dotted line, which would cross them
    ends = [max(now, end) for end in (now, *most)]
    texts = [milliseconds(now)] + [
        f"{milliseconds(time)}  ({ratio:.2f}×)"
        + (f", up to {milliseconds(end)} →" if end > furthest else "")
        for time, ratio, end in zip(middle, known["speedup_mid"], highest, strict=True)
    ]
    add_ends(result, ends, list(places.values()), texts)
    mark_one(result, now)
    result.update_layout(barmode="stack", bargap=0.35)
    result.update_xaxes(
        title="ms for the samples of one iteration now, without a profiler",
        # room for the texts, which are longer where they say how far a range reaches
        range=[0, (1.65 if highest.max() > furthest else 1.35) * max(ends)],
    )
    label_rows(result, [lines_of(name, 36) for name in names])
    return result


def what_if_rows(table: pd.DataFrame) -> Table:
    """The predictions in a line each; what cannot be predicted says why."""
    rows = []
    for row in rows_of(table):
        if row.mid_ms != row.mid_ms:
            rows.append([row.change, *[NOTHING] * 5, row.note])
            continue
        rows.append(
            [
                row.change,
                f"{row.now_ms:,.1f}",
                f"{row.mid_ms:,.1f}",
                f"{row.low_ms:,.1f} to {row.high_ms:,.1f}",
                f"{row.speedup_mid:.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f})",
                row.method,
                row.note,
            ]
        )
    return Table(
        [
            "change",
            "iteration now, ms",
            "predicted, ms",
            "range, ms",
            "times as fast, a sample",
            "from",
            "note",
        ],
        rows,
    )
