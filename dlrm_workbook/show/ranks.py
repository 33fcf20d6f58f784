"""Figures of several ranks' traces: DataFrames in, figures out.

The tables come from :mod:`dlrm_workbook.analysis.rank_traces`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from dlrm_workbook.show.theme import COLOURS, stacked_bars


def rank_bars(ranks: pd.DataFrame) -> go.Figure:
    """Each rank's step: GPU at work, communication that nothing hides, idle; of
    :func:`~dlrm_workbook.analysis.rank_traces.rank_table`."""
    looks = {
        "work_ms": ("kernels and copies", COLOURS["bottom_mlp"]),
        "exposed_ms": ("exposed communication", COLOURS["communication"]),
        "idle_ms": ("idle", COLOURS["other"]),
    }
    work = ranks["busy_ms"] - ranks["exposed_ms"]
    return _bars("What each rank's GPU does", ranks.assign(work_ms=work), looks)


def waiting_bars(ranks: pd.DataFrame) -> go.Figure:
    """Each rank's time in matched collectives: transfer, and waiting for the last rank."""
    uncounted = "not counted: the first collective, or ends that do not meet"
    looks = {
        "transfer_ms": ("transfer, at most", COLOURS["transfer"]),
        "waiting_ms": ("waiting for the last rank", COLOURS["optimizer"]),
        "start_ms": (uncounted, COLOURS["other"]),
    }
    return _bars("Time in collectives", ranks, looks)


def _bars(title: str, ranks: pd.DataFrame, looks: Mapping[str, tuple[str, str]]) -> go.Figure:
    table = ranks[list(looks)].set_index("rank " + ranks["rank"].astype(str))
    title = f"{title}, {ranks.attrs.get('per', '')}".rstrip(", ")
    return stacked_bars(title, table, looks, "ms")
