"""Figures and column labels of several ranks' traces: DataFrames in, figures out.

The tables come from :mod:`dlrm_workbook.analysis.rank_traces`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.parts import part_label
from dlrm_workbook.ground.units import NOTHING
from dlrm_workbook.show.tables import Column, chosen_columns, each_row
from dlrm_workbook.show.theme import COLOURS, stacked_bars

RANKS = chosen_columns(
    "rank iterations step_ms busy_ms idle_ms compute_ms communication_ms exposed_ms transfer_ms "
    "waiting_ms start_ms last_in others_wait_ms",
    busy_ms="GPU busy",
    idle_ms="GPU idle",
    compute_ms="compute kernels",
    exposed_ms="of it exposed",
    start_ms="not counted",
    last_in="comes last in",
    others_wait_ms="others wait for it",
)
COLLECTIVES = chosen_columns(
    "collective kind what ranks elements transfer_us wait_us longest_wait_us last_rank late_us "
    "component where longer_us counted",
    kind="collective",
    what=Column("asked for by", "function"),
    elements=Column("elements", "count"),
    transfer_us="transfer at most",
    wait_us="mean wait",
    last_rank=Column("last rank", "rank"),
    late_us="after the last but one",
    component=Column(
        "what it did longer",
        each_row(lambda part, phase: part_label(part, phase) if part else NOTHING, words=True),
        ("component", "phase"),
    ),
    longer_us="longer by",
)
"""Columns of the tables of ranks and of collectives."""


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
