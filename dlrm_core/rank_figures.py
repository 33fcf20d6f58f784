"""Figures of ranks beside each other: an iteration over time, its parts, who has more to do."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.figure_theme import (
    COLOURS,
    FASTER,
    SAME,
    SLOWER,
    add_phase_key,
    difference_colour,
    figure,
    markers,
    milliseconds,
    part_label,
    rows_of,
    step_order,
    text_on,
)
from dlrm_core.parts import COMPONENTS


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


def _lane_order(label: str) -> tuple[int, bool]:
    number = label.removeprefix("rank ").partition(",")[0]
    return int(number) if number.isdigit() else 0, label.endswith(("exchanges", "communication"))


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
            colorscale=[[0, FASTER], [0.5, SAME], [1, SLOWER]],
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
                result.add_annotation(
                    x=column,
                    y=row,
                    text=f"{value:+.2g}".replace("-", "−") if abs(value) >= 0.005 * most else "·",
                    showarrow=False,
                    font={"size": 11, "color": text_on(difference_colour(value / most))},
                    hovertext=part,
                )
    result.update_xaxes(showgrid=False)
    result.update_yaxes(autorange="reversed", showgrid=False)
    return result
