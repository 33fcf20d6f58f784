"""Figures of the scaling page: predicted and measured iterations over numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.figure_axes import error_bars, log_axis, log_ticks
from dlrm_core.figure_theme import (
    COLOURS,
    COMPUTE,
    DASHES,
    INK,
    SYMBOLS,
    digits,
    figure,
    milliseconds,
    percent,
    rows_of,
)
from dlrm_core.scaling_model_presentation import kind_label

SHARDING_COLOURS = {
    "best": INK,
    "table_wise": COLOURS["bottom_mlp"],
    "row_wise": COLOURS["optimizer"],
    "column_wise": COLOURS["embedding"],
    "replicated": COLOURS["data"],
    "mixed": COLOURS["interaction"],
}


def iteration_bars(table: pd.DataFrame, title: str) -> go.Figure:
    """Predicted iterations: computing and exposed communication stacked, with the range.

    Args:
        table: what :func:`dlrm_core.analysis.sharding_choice.scaling_table` gives.
    """
    known = table[table["mid_ms"].notna()]
    rows = rows_of(known)
    result = figure(title, 420, legend=True)
    places = list(range(len(rows)))
    hover = [
        f"{row.ranks:,} ranks, batch {row.batch_size:,}, {kind_label(row.sharding)}<br>"
        f"{milliseconds(row.mid_ms)} ({milliseconds(row.low_ms)} to {milliseconds(row.high_ms)})"
        f"<br>{percent(row.exposed_ms / row.mid_ms)} exposed communication"
        f"<br>{row.samples_per_second:,.0f} samples/s"
        for row in rows
    ]
    for name, colour, column in (
        ("computing", COMPUTE, "compute_ms"),
        ("exposed communication", COLOURS["communication"], "exposed_ms"),
    ):
        last = column == "exposed_ms"
        result.add_trace(
            go.Bar(
                x=places,
                y=known[column],
                name=name,
                marker={"color": colour, "line": {"width": 0}},
                hovertext=hover,
                hovertemplate="%{hovertext}<extra></extra>",
                error_y=error_bars(known["low_ms"], known["mid_ms"], known["high_ms"])
                if last
                else None,
            )
        )
    for place, row in zip(places, rows, strict=True):
        result.add_annotation(
            x=place, y=row.high_ms, text=digits(row.mid_ms), showarrow=False, yshift=12
        )
    top = float(known["high_ms"].max()) if len(known) else 1.0
    result.update_layout(barmode="stack", margin={"b": 96})
    result.update_xaxes(
        title="ranks",
        tickmode="array",
        tickvals=places,
        ticktext=[f"{row.ranks:,}" for row in rows],
        showgrid=False,
    )
    result.update_yaxes(title="ms an iteration", range=[0, 1.14 * top])
    return result


def efficiency_lines(
    tables: Mapping[str, pd.DataFrame], measured: pd.DataFrame | None = None
) -> go.Figure:
    """Efficiency over ranks: a line a kind of scaling, points where it was measured.

    Args:
        tables: "strong", "weak" to :func:`scaling_table`'s result.
        measured: what :func:`dlrm_core.analysis.scaling_record.measured_iterations` gives.
    """
    result = figure("Efficiency: speed-up over ranks", 400, legend=True)
    colours = {"strong": COLOURS["top_mlp"], "weak": COLOURS["optimizer"]}
    counts: set[int] = set()
    for number, (name, table) in enumerate(tables.items()):
        known = table[table["efficiency"].notna()]
        counts |= set(known["ranks"].astype(int))
        result.add_trace(
            go.Scatter(
                x=known["ranks"],
                y=known["efficiency"],
                name=f"{name} scaling, predicted",
                mode="lines+markers",
                line={"color": colours[name], "width": 2, "dash": DASHES[number]},
                marker={"size": 7, "symbol": SYMBOLS[number]},
                cliponaxis=False,
                customdata=_named(known)[["speedup", "sharding", "mid_ms"]],
                hovertemplate=(
                    "%{x:,} ranks: %{y:.1%}<br>%{customdata[0]:,.1f}× as fast as one, "
                    "%{customdata[1]}, %{customdata[2]:,.3g} ms<extra></extra>"
                ),
            )
        )
    if measured is not None:
        known = _named(measured[measured["efficiency"].notna() & (measured["ranks"] > 1)])
        counts |= set(known["ranks"].astype(int))
        for name in tables:
            own = known[known.get("scaling", "strong") == name]
            if own.empty:
                continue
            result.add_trace(
                go.Scatter(
                    x=own["ranks"],
                    y=own["efficiency"],
                    name=f"{name}, measured here",
                    mode="markers",
                    marker={"size": 11, "symbol": "x", "color": colours[name]},
                    customdata=own[["sharding", "batch_size"]],
                    hovertemplate=(
                        "%{x} ranks on this machine: %{y:.1%}<br>%{customdata[0]}, batch "
                        "%{customdata[1]:,}<extra></extra>"
                    ),
                )
            )
    result.update_layout(margin={"b": 96})
    result.update_xaxes(**ranks_axis(sorted(counts)))
    result.update_yaxes(title="efficiency", tickformat=".0%", range=[0, 1.08])
    return result


def sharding_lines(tables: Mapping[str, pd.DataFrame], best: pd.DataFrame) -> go.Figure:
    """Predicted iterations of each sharding over ranks, the best of all on top.

    Args:
        tables: sharding to :func:`scaling_table`'s result for it.
        best: the same with the best sharding at each number of ranks.
    """
    result = figure("Iteration by sharding", 440, legend=True)
    times: list[float] = []
    for number, (name, table) in enumerate([*tables.items(), ("best", best)]):
        known = table[table["mid_ms"].notna()]
        if known.empty:
            continue
        times += known["mid_ms"].tolist()
        is_best = name == "best"
        result.add_trace(
            go.Scatter(
                x=known["ranks"],
                y=known["mid_ms"],
                name="best, tables of different kinds" if is_best else kind_label(name),
                mode="lines+markers",
                line={
                    "color": SHARDING_COLOURS[name],
                    "width": 1.5 if is_best else 2.5,
                    "dash": "dot" if is_best else DASHES[number % len(DASHES)],
                },
                marker={"size": 6, "symbol": SYMBOLS[number % len(SYMBOLS)]},
                customdata=_named(known)[["exposed_ms", "sharding"]],
                hovertemplate=(
                    "%{x:,} ranks: %{y:,.3g} ms, %{customdata[0]:,.3g} ms exposed<br>"
                    "%{customdata[1]}<extra></extra>"
                ),
            )
        )
    result.update_layout(margin={"b": 110})
    counts = sorted({int(n) for table in [best, *tables.values()] for n in table["ranks"]})
    result.update_xaxes(**ranks_axis(counts))
    result.update_yaxes(title="ms an iteration", **log_axis(log_ticks(times)))
    return result


def ranks_axis(counts: Iterable[int]) -> dict[str, Any]:
    """Ranks on a logarithmic axis, each with its number; for ``update_xaxes``."""
    return {"title": "ranks", **log_axis(list(counts), "{:,}".format)}


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """The table with shardings as a reader calls them."""
    return table.assign(sharding=table["sharding"].map(kind_label))
