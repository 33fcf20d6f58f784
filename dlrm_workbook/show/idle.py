"""Plotly figures of time in which nothing computes: DataFrames in, figures out.

The tables come from :mod:`dlrm_workbook.analysis.idleness` and ``launches``; an empty one says
why, and its figure is not asked for.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_workbook.analysis.idleness import CAUSES, STATES
from dlrm_workbook.ground.units import milliseconds, percent
from dlrm_workbook.show.theme import COLOURS, add_points, figure, stacked_bars, stacked_iterations

CAUSE_COLOURS = {
    "data": COLOURS["data"],
    "python": COLOURS["interaction"],
    "operators": COLOURS["bottom_mlp"],
    "launching": COLOURS["top_mlp"],
    "allocation": COLOURS["loss"],
    "synchronisation": COLOURS["optimizer"],
    "copies": COLOURS["transfer"],
    "start-up": COLOURS["embedding"],
    "dependency": COLOURS["communication"],
    "kernel gap": COLOURS["other"],
    "unknown": "#8B9097",
}
"""Cause to colour, of the parts' set; data keeps the colour it has everywhere."""

STATE_COLOURS = {
    "computing": COLOURS["bottom_mlp"],
    "waiting for a core": COLOURS["optimizer"],
    "blocked": COLOURS["communication"],
    "off core": COLOURS["other"],
}


def idle_each(causes: pd.DataFrame) -> go.Figure:
    """The causes of :func:`~dlrm_workbook.analysis.idleness.idle_causes` in every iteration."""
    looks = {name: (name, colour, CAUSES[name]) for name, colour in CAUSE_COLOURS.items()}
    title = "GPU idle time of each iteration"
    return stacked_iterations(title, causes, "cause", "idle_ms", looks)


def thread_state_bars(states: pd.DataFrame) -> go.Figure:
    """The states of :func:`~dlrm_workbook.analysis.idleness.thread_states` in every iteration."""
    title = "What the iterating thread did in each iteration"
    looks = {name: (name, colour, STATES[name]) for name, colour in STATE_COLOURS.items()}
    result = stacked_iterations(title, states, "state", "time_ms", looks)
    # recorded iterations lie between those counted before and after: no gap for them
    result.update_xaxes(type="category", nticks=14, tickangle=0)
    return result


def idle_shares(summary: pd.DataFrame) -> go.Figure:
    """One bar: the causes of :func:`~dlrm_workbook.analysis.idleness.idle_by_cause`."""
    total = milliseconds(summary["idle_ms"].sum())
    share = percent(summary["share_of_iteration"].sum())
    title = f"Time without a kernel: {total} per iteration ({share}), by cause"
    shares = summary.set_index("cause")[["idle_ms"]].T.set_axis([""])
    looks = {cause: (cause, CAUSE_COLOURS[cause]) for cause in summary["cause"]}
    result = stacked_bars(title, shares, looks, "ms", texts=True)
    result.update_layout(height=250)
    result.update_xaxes(title="ms in a mean iteration")
    return result


def queue_line(depth: pd.DataFrame) -> go.Figure:
    """:func:`~dlrm_workbook.analysis.launches.queue_depth` over time; at 0 the GPU has nothing to
    do."""
    result = figure("Work queued for the GPU", 320)
    line = {"shape": "hv", "width": 1.5, "color": COLOURS["bottom_mlp"]}
    look: dict[str, Any] = {"mode": "lines", "line": line, "fill": "tozeroy"}
    hover = "%{x:,.3f} ms: %{y:,.1f} queued"
    add_points(result, depth["time_ms"], depth["depth"], "", hover, **look)
    result.update_xaxes(title="ms from the first iteration's start")
    result.update_yaxes(title="launched, not finished", rangemode="tozero")
    return result
