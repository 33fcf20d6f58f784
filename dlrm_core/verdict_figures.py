"""The verdict as a picture: the measured step, after each advised change, at the limit."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from dlrm_core.analysis.verdict import Stage
from dlrm_core.figure_axes import add_ends, label_rows, lines_of
from dlrm_core.figure_theme import COLOURS, figure, milliseconds, part_label, rows_of
from dlrm_core.page_tables import NOTHING, Table, Text, from_to
from dlrm_core.parts import COMPONENTS

ROW = 46
"""Height of a stage, in pixels."""


def way_bars(way: Sequence[Stage]) -> go.Figure | Text:
    """A bar a stage, each as long as its step and made of its parts, in the parts' colours."""
    if len(way) < 2:
        return Text(
            "No change was probed and no ceiling measured in this run, so there is nothing to "
            "set beside the measured step (`profiling.probes` measures both)."
        )
    result = figure(
        "From the measured step to the machine's limit", 150 + ROW * len(way), legend=True
    )
    places = list(range(len(way)))
    names = [stage.name for stage in way]
    for component in COMPONENTS:
        times = [_time(stage, component) for stage in way]
        if not any(times):
            continue
        label = part_label(component)
        result.add_trace(
            go.Bar(
                x=times,
                y=places,
                name=label,
                orientation="h",
                marker={"color": COLOURS.get(component, COLOURS["other"]), "line": {"width": 0}},
                hovertext=[
                    f"{name}<br>{label}: {milliseconds(time)}"
                    for name, time in zip(names, times, strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    ends = [stage.mid_ms for stage in way]
    add_ends(result, ends, places, [_total(stage, way[0]) for stage in way])
    result.update_layout(barmode="stack", bargap=0.35)
    result.update_xaxes(title="ms an iteration, without a profiler", range=[0, 1.4 * max(ends)])
    label_rows(result, [lines_of(name, 34) for name in names])
    return result


def way_table(way: Sequence[Stage]) -> Table:
    """The stages in a line each: time, range, how many times as fast as measured."""
    rows = []
    for stage in way:
        is_range = stage.low_ms != stage.high_ms
        spread = from_to(stage.low_ms, stage.high_ms, "{:,.1f}".format) if is_range else NOTHING
        parts = sorted(rows_of(stage.parts), key=lambda row: -row.time_ms)
        largest = (
            f"{part_label(parts[0].component)} {parts[0].time_ms:,.1f} ms" if parts else NOTHING
        )
        gain = way[0].mid_ms / stage.mid_ms
        rows.append((stage.name, f"{stage.mid_ms:,.1f}", spread, f"{gain:.2f}×", largest))
    return Table(["step", "ms", "range (ms)", "times as fast", "largest part"], rows)


def _time(stage: Stage, component: str) -> float:
    table = stage.parts
    return float(table.loc[table["component"].eq(component), "time_ms"].sum())


def _total(stage: Stage, first: Stage) -> str:
    text = f"<b>{milliseconds(stage.mid_ms)}</b>"
    if stage is first:
        return text
    text += f"  {first.mid_ms / stage.mid_ms:.2f}×"
    if stage.low_ms != stage.high_ms:
        text += f"  ({stage.low_ms:,.0f}–{stage.high_ms:,.0f})"
    return text
