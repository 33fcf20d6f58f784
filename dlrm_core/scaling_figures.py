"""Figures of the scaling page: predicted and measured iterations over numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.compare_figures import SYMBOLS, lines_of
from dlrm_core.figure_theme import (
    COLOURS,
    COMPUTE,
    INK,
    ROW,
    add_phase_key,
    digits,
    figure,
    markers,
    milliseconds,
    part_label,
    percent,
    rows_of,
    step_order,
    text_on,
)
from dlrm_core.parts import COMPONENTS
from dlrm_core.sweep_figures import DASHES, log_ticks

TALK = COLOURS["communication"]

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
        f"{row.ranks:,} ranks, batch {row.batch_size:,}, {row.sharding}<br>"
        f"{milliseconds(row.mid_ms)} ({milliseconds(row.low_ms)} to {milliseconds(row.high_ms)})"
        f"<br>{percent(row.exposed_ms / row.mid_ms)} exposed communication"
        f"<br>{row.samples_per_second:,.0f} samples/s"
        for row in rows
    ]
    for name, colour, column in (
        ("computing", COMPUTE, "compute_ms"),
        ("exposed communication", TALK, "exposed_ms"),
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
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": known["high_ms"] - known["mid_ms"],
                    "arrayminus": known["mid_ms"] - known["low_ms"],
                    "color": INK,
                    "thickness": 1.5,
                    "width": 4,
                }
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
                customdata=known[["speedup", "sharding", "mid_ms"]],
                hovertemplate=(
                    "%{x:,} ranks: %{y:.1%}<br>%{customdata[0]:,.1f}× as fast as one, "
                    "%{customdata[1]}, %{customdata[2]:,.3g} ms<extra></extra>"
                ),
            )
        )
    if measured is not None:
        known = measured[measured["efficiency"].notna() & (measured["ranks"] > 1)]
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
    _ranks_axis(result, sorted(counts))
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
                name="best, tables of different kinds" if is_best else name.replace("_", "-"),
                mode="lines+markers",
                line={
                    "color": SHARDING_COLOURS[name],
                    "width": 1.5 if is_best else 2.5,
                    "dash": "dot" if is_best else DASHES[number % len(DASHES)],
                },
                marker={"size": 6, "symbol": SYMBOLS[number % len(SYMBOLS)]},
                customdata=known[["exposed_ms", "sharding"]],
                hovertemplate=(
                    "%{x:,} ranks: %{y:,.3g} ms, %{customdata[0]:,.3g} ms exposed<br>"
                    "%{customdata[1]}<extra></extra>"
                ),
            )
        )
    result.update_layout(margin={"b": 110})
    counts = sorted({int(n) for table in [best, *tables.values()] for n in table["ranks"]})
    _ranks_axis(result, counts)
    marks = log_ticks(times) if times else [1.0]
    result.update_yaxes(
        title="ms an iteration",
        type="log",
        tickmode="array",
        tickvals=marks,
        ticktext=[f"{mark:,g}" for mark in marks],
    )
    return result


def exchange_lanes(events: Sequence[tuple[str, str, str, float, float]], title: str) -> go.Figure:
    """One iteration of the slowest rank: what computes, and what is on its way meanwhile.

    Args:
        events: lane ("compute" or "communication"), name, phase, start and end in ms.
    """
    return _lanes(title, [(event[0], *event) for event in events])


def rank_lanes(table: pd.DataFrame, title: str) -> go.Figure:
    """One measured iteration of all ranks: two lanes a rank, as in :func:`exchange_lanes`.

    Args:
        table: what :func:`dlrm_core.analysis.scaling_record.shown_iteration` gives.
    """
    shown = {"compute": "step", "communication": "exchanges"}
    return _lanes(
        title,
        [
            (
                *(f"rank {row.rank}, {shown[row.lane]}", row.lane, row.name, row.phase),
                *(row.start_ms, row.end_ms),
            )
            for row in rows_of(table)
        ],
    )


def _lanes(title: str, events: Sequence[tuple[str, str, str, str, float, float]]) -> go.Figure:
    """Bars over time: label of a lane, its kind, name, phase, start and end in ms."""
    lanes = list(dict.fromkeys(event[0] for event in events))
    result = figure(title, 180 + 34 * max(len(lanes), 2), legend=True)
    shown: set[str] = set()
    for label, kind, name, phase, start, end in sorted(events, key=lambda event: event[4]):
        own = kind == "compute"
        look = markers([(name if own else "communication", phase if own else "")])
        part = part_label(name) if own else "communication"
        what = part_label(name, phase) if own else f"{name}, {phase}".removesuffix(", ")
        result.add_trace(
            go.Bar(
                x=[end - start],
                base=[start],
                y=[label],
                orientation="h",
                name=part,
                legendgroup=part,
                legendrank=step_order(name)[0] if own else 900,
                showlegend=part not in shown,
                marker=look,
                hovertext=f"{what}: {milliseconds(end - start)}<br>from {milliseconds(start)}",
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
        shown.add(part)
    add_phase_key(result, [event[3] for event in events if event[1] == "compute"])
    result.update_layout(barmode="overlay", bargap=0.3, margin={"b": 110})
    result.update_xaxes(title="ms since the iteration's start")
    result.update_yaxes(
        categoryorder="array",
        # step above exchanges, rank below rank
        categoryarray=sorted(lanes, key=_lane_order, reverse=True),
        showgrid=False,
        ticklabelstandoff=5,
    )
    return result


def rank_bars(parts: pd.DataFrame, title: str) -> go.Figure:
    """All ranks of a run in one view: the parts of each rank's mean iteration, stacked.

    Args:
        parts: what :func:`dlrm_core.analysis.scaling_record.parts_by_rank` gives.
    """
    ranks = sorted(parts["rank"].unique())
    result = figure(title, 170 + 34 * max(len(ranks), 2), legend=True)
    wide = parts.pivot_table("time_ms", "rank", "component", aggfunc="sum", fill_value=0.0)
    for component in COMPONENTS:
        if component not in wide.columns:
            continue
        times = wide[component].reindex(ranks)
        result.add_trace(
            go.Bar(
                x=times,
                y=[f"rank {rank}" for rank in ranks],
                orientation="h",
                name=part_label(component),
                marker={"color": COLOURS[component], "line": {"width": 0}},
                hovertemplate=f"%{{y}}, {part_label(component)}: %{{x:,.3g}} ms<extra></extra>",
            )
        )
    result.update_layout(barmode="stack", bargap=0.25, margin={"b": 96})
    result.update_xaxes(title="ms an iteration")
    result.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=5)
    return result


def imbalance_map(parts: pd.DataFrame) -> go.Figure:
    """How far each rank is from the mean in each part: a row a part, a column a rank."""
    wide = parts.pivot_table("time_ms", "component", "rank", aggfunc="sum", fill_value=0.0)
    wide = wide.reindex([name for name in COMPONENTS if name in wide.index])
    above = wide.sub(wide.mean(axis=1), axis=0)
    most = float(above.abs().to_numpy().max(initial=0.0)) or 1.0
    result = figure("Above and below the mean of all ranks", 150 + 30 * max(len(wide), 3))
    result.add_trace(
        go.Heatmap(
            z=above.to_numpy(float),
            x=[f"rank {rank}" for rank in above.columns],
            y=[part_label(name) for name in above.index],
            zmin=-most,
            zmax=most,
            # red is more than the mean, blue less, as in the differences of a comparison
            colorscale=[[0, "#2B7BBA"], [0.5, "rgba(128, 134, 142, 0.18)"], [1, "#C8431A"]],
            colorbar={"title": {"text": "ms"}, "thickness": 12},
            customdata=wide.to_numpy(),
            hovertemplate="%{x}, %{y}: %{customdata:,.3g} ms, %{z:+,.3g} from the mean"
            "<extra></extra>",
        )
    )
    numbers = above.to_numpy(float)
    if above.size <= 160:
        for row, part in enumerate(above.index):
            for column in range(len(above.columns)):
                value = float(numbers[row, column])
                strong = abs(value) > 0.55 * most
                dark = "#2B7BBA" if value < 0 else "#C8431A"
                result.add_annotation(
                    x=column,
                    y=row,
                    text=f"{value:+.2g}" if abs(value) >= 0.005 * most else "·",
                    showarrow=False,
                    font={"size": 11, "color": text_on(dark) if strong else INK},
                    hovertext=part,
                )
    result.update_xaxes(showgrid=False)
    result.update_yaxes(autorange="reversed", showgrid=False)
    return result


def predicted_measured_dots(table: pd.DataFrame) -> go.Figure:
    """Predicted iterations with their range over measured ones, a row a run.

    Args:
        table: what :func:`dlrm_core.analysis.scaling_check.predicted_and_measured` gives.
    """
    known = table[table["predicted_ms"].notna()]
    rows = rows_of(known)
    labels = [
        f"{row.ranks} ranks, batch {row.batch_size:,}, {row.sharding.replace('_', '-')}"
        for row in rows
    ]
    result = figure("Predicted and measured iterations", 130 + ROW * max(len(rows), 3), legend=True)
    places = list(range(len(rows)))
    result.add_trace(
        go.Scatter(
            x=known["predicted_ms"],
            y=places,
            name="predicted, with range",
            mode="markers",
            marker={"symbol": "diamond", "size": 9, "color": TALK},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": known["high_ms"] - known["predicted_ms"],
                "arrayminus": known["predicted_ms"] - known["low_ms"],
                "thickness": 1.5,
                "color": TALK,
            },
            hovertext=[
                f"{label}<br>predicted {milliseconds(row.predicted_ms)}, "
                f"{milliseconds(row.low_ms)} to {milliseconds(row.high_ms)}"
                for label, row in zip(labels, rows, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    result.add_trace(
        go.Scatter(
            x=known["measured_ms"],
            y=places,
            name="measured",
            mode="markers",
            marker={"symbol": "circle-open", "size": 11, "color": INK, "line": {"width": 2}},
            hovertext=[
                f"{label}<br>measured {milliseconds(row.measured_ms)}"
                for label, row in zip(labels, rows, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    for place, row in zip(places, rows, strict=True):
        result.add_annotation(
            x=max(row.high_ms, row.measured_ms),
            y=place,
            text=f"{row.error:+.1%}".replace("-", "−"),
            showarrow=False,
            xanchor="left",
            xshift=10,
        )
    ends = pd.concat([known["high_ms"], known["measured_ms"]])
    result.update_layout(margin={"b": 96})
    result.update_xaxes(title="ms an iteration", range=[0, 1.12 * float(ends.max() or 1)])
    result.update_yaxes(
        tickmode="array",
        tickvals=places,
        ticktext=[lines_of(label, 44) for label in labels],
        range=[len(places) - 0.4, -0.8],
        ticklabelstandoff=5,
        showgrid=False,
        zeroline=False,
    )
    return result


def _lane_order(label: str) -> tuple[int, bool]:
    number = label.removeprefix("rank ").partition(",")[0]
    return int(number) if number.isdigit() else 0, label.endswith(("exchanges", "communication"))


def _ranks_axis(result: go.Figure, counts: Sequence[int]) -> None:
    """Ranks on a logarithmic axis, each with its number."""
    result.update_xaxes(
        title="ranks",
        type="log",
        tickmode="array",
        tickvals=list(counts),
        ticktext=[f"{count:,}" for count in counts],
    )
