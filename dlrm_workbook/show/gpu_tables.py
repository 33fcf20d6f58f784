"""Tables of the call-tree views and of the GPU as a reader of a notebook wants them.

Nothing is analysed here. An empty table is shown as the sentence why it is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pandas as pd

from dlrm_core.parts import part_label
from dlrm_core.units import NOTHING, known_or, percent
from dlrm_workbook.analysis.context_tree import reason_of
from dlrm_workbook.analysis.gpu import stall_reasons
from dlrm_workbook.show.gpu import REASON_NAMES, function_name
from dlrm_workbook.show.tables import Table, Text, column

Drawn = TypeVar("Drawn")

INDENT = "\u2003"
"""An em space: HTML would drop ordinary ones."""

METRIC_NAMES = {"cpu_time_ms": "CPU time", "gpu_time_ms": "GPU time"}

CHAIN = 0.999
"""A callee with this share of its caller is the next link of a chain of calls."""


def shown(draw: Callable[[pd.DataFrame], Drawn], table: pd.DataFrame) -> Drawn | Text:
    """What ``draw`` makes of the table; the reason in its place if the table is empty."""
    return draw(table) if len(table) else absent(table)


def absent(table: pd.DataFrame) -> Text:
    """The sentence in the place of a table or figure that cannot be shown."""
    reason = reason_of(table) or "there is nothing to show"
    return Text(f"*Not measured: {reason}.*" if reason_of(table) else f"*{reason.capitalize()}.*")


def top_down_table(view: pd.DataFrame, count: int = 40) -> Table | Text:
    """The call tree, indented; chains of calls that only hand on are one row.

    Args:
        view: what :func:`dlrm_workbook.analysis.views.top_down` gives.
        count: how many rows are shown, those with most first.
    """
    if view.empty:
        return absent(view)
    table = _largest_rows(_folded(view), count)
    others = [name for name in view.columns if name.endswith(" (inc)")]
    unit = _unit(view)
    names = zip(table["level"], table["folded"], table["name"], table["hot"], strict=True)
    cells = {
        "call": [
            INDENT * level
            + ("▸ " if hot else "")
            + (f"… {folded} call{'s' * (folded > 1)} … " if folded else "")
            + function_name(name, 60)
            for level, folded, name, hot in names
        ],
        **_part_column(table),
        f"{_metric(view)} with callees{unit}": column(table["inclusive"]),
        "share": list(map(percent, table["share"])),
        f"itself{unit}": column(table["exclusive"]),
        **{_titled(name): column(table[name]) for name in others},
    }
    return Table.of(cells)


def bottom_up_table(view: pd.DataFrame, count: int = 40) -> Table | Text:
    """Functions, and indented below each the callers it comes through.

    Args:
        view: what :func:`dlrm_workbook.analysis.views.bottom_up` gives.
        count: how many rows are shown.
    """
    if view.empty:
        return absent(view)
    table = view.head(count)
    unit = _unit(view)
    arrows = [INDENT * depth + ("← " if depth else "") for depth in table["depth"]]
    cells = {
        "function, and below it its callers": [
            arrow + function_name(name, 60)
            for arrow, name in zip(arrows, table["name"], strict=True)
        ],
        "in": [
            _base(module or file)
            for module, file in zip(table["module"], table["file"], strict=True)
        ],
        f"itself{unit}": column(table["exclusive"]),
        "share": list(map(percent, table["share"])),
        f"with callees{unit}": column(table["inclusive"]),
    }
    return Table.of(cells)


def flat_table(view: pd.DataFrame, count: int = 15) -> Table | Text:
    """Functions, files, modules or lines, over all call paths.

    Args:
        view: what :func:`dlrm_workbook.analysis.views.flat` gives.
        count: how many rows are shown.
    """
    if view.empty:
        return absent(view)
    table = view.head(count)
    unit = _unit(view)
    cells: dict[str, list[str]] = {}
    if "name" in table:
        cells["function"] = [function_name(name, 60) for name in table["name"]]
    if "file" in table and "name" not in table:
        cells["file"] = [_base(name) or "(not known)" for name in table["file"]]
    if "line" in table:
        cells["line"] = [str(line) if line else NOTHING for line in table["line"]]
    # torch knows no modules: the column stays only where it says something, or is asked for
    if "module" in table and (table["module"].ne("").any() or "name" not in table):
        cells["module"] = [_base(name) or "(not known)" for name in table["module"]]
    cells |= {
        f"itself{unit}": column(table["exclusive"]),
        "share": list(map(percent, table["share"])),
        f"with callees{unit}": column(table["inclusive"]),
        "share with callees": list(map(percent, table["inclusive_share"])),
    }
    return Table.of(cells)


def kernels_table(kernels: pd.DataFrame, count: int = 20) -> Table | Text:
    """Kernels; columns of what was measured of no kernel are left out."""
    if kernels.empty:
        return absent(kernels)
    table = kernels.head(count)
    numbers = {
        "launches": "launches",
        "time_ms": "time (ms)",
        "mean_us": "mean (µs)",
        "registers": "registers a thread",
        "blocks": "blocks",
        "threads_per_block": "threads a block",
        "shared_memory_bytes": "shared memory a block (B)",
        "occupancy_percent": "occupancy (%)",
    }
    cells = {
        "kernel": [function_name(name, 48) for name in table["kernel"]],
        **_part_column(table),
        "share": list(map(percent, table["share"])),
    }
    cells |= {
        title: _counted(table[name])
        for name, title in numbers.items()
        if not kernels[name].isna().all()
    }
    return Table.of(cells)


def copies_table(copies: pd.DataFrame) -> Table | Text:
    """GPU copies and memory sets by direction."""
    if copies.empty:
        return absent(copies)
    cells = {
        "copy": list(copies["direction"]),
        "count": _counted(copies["count"]),
        "MB": column(copies["bytes"] / 1e6),
        "time (ms)": column(copies["time_ms"]),
        "GB/s": column(copies["gb_per_s"]),
    }
    return Table.of(cells)


def stalls_table(stalls: pd.DataFrame) -> Table | Text:
    """Stall reasons over all kernels: what each means, and what usually helps."""
    if stalls.empty:
        return absent(stalls)
    table = stall_reasons(stalls)
    cells = {
        "reason": [REASON_NAMES.get(reason, reason) for reason in table["reason"]],
        "share of samples": list(map(percent, table["share_of_samples"])),
        "share of stalls": [known_or(s, percent) for s in table["share_of_stalls"]],
        "meaning": list(table["meaning"]),
        "what usually helps": list(table["advice"]),
    }
    return Table.of(cells)


def idleness_table(idleness: pd.DataFrame) -> Table | Text:
    """Busy and idle time of each GPU."""
    if idleness.empty:
        return absent(idleness)
    cells = {
        "GPU": [
            f"{gpu}, rank {rank}" if rank >= 0 else gpu
            for gpu, rank in zip(idleness["gpu"], idleness["rank"], strict=True)
        ],
        "streams": _counted(idleness["streams"]),
        "measured (ms)": column(idleness["span_ms"]),
        "busy (ms)": column(idleness["busy_ms"]),
        "idle (ms)": column(idleness["idle_ms"]),
        "idle": list(map(percent, idleness["idle_share"])),
        "gaps": _counted(idleness["gaps"]),
        "longest gap (ms)": column(idleness["longest_gap_ms"]),
    }
    return Table.of(cells)


def blame_table(blame: pd.DataFrame, count: int = 15) -> Table | Text:
    """What the CPU ran while every stream was idle."""
    if blame.empty:
        return absent(blame)
    table = blame.head(count)
    cells = {
        "CPU ran": [n if n.startswith("(") else function_name(n, 60) for n in table["name"]],
        "part": list(map(part_label, table["component"], table["phase"])),
        "GPU idle (ms)": column(table["blamed_ms"]),
        "share of idle time": list(map(percent, table["share"])),
    }
    return Table.of(cells)


def lanes_table(summary: pd.DataFrame) -> Table | Text:
    """Threads and streams: how long they ran, and what most."""
    if summary.empty:
        return absent(summary)
    cells = {
        "thread or stream": list(summary["lane"]),
        "spans": _counted(summary["spans"]),
        "running (ms)": column(summary["running_ms"]),
        "of the trace": list(map(percent, summary["running_share"])),
        "most": [function_name(name, 48) for name in summary["largest"]],
        "its share": list(map(percent, summary["largest_share"])),
    }
    return Table.of(cells)


def _folded(view: pd.DataFrame) -> pd.DataFrame:
    """Without the inner links of chains; ``level`` to indent, ``folded`` links left out."""
    callees: dict[int, int] = {}
    for parent in view["parent"]:
        callees[parent] = callees.get(parent, 0) + 1
    value = dict(zip(view["context"], view["inclusive"], strict=True))
    parts = zip(view["component"], view["phase"], strict=True)
    part = dict(zip(view["context"], parts, strict=True))
    rows = list(zip(view["context"].tolist(), view["parent"].tolist(), strict=True))
    links = {
        context
        for context, parent in rows
        if callees.get(parent) == 1
        and value.get(parent, np.inf) * CHAIN <= value[context]
        and part[parent] == part[context]
    }
    # the last link of a chain stays: it is where the calls part again, or end
    following = {parent for context, parent in rows if context in links}
    level: dict[int, int] = {}
    folded: dict[int, int] = {}
    kept = []
    for context, parent in rows:
        if context in links and context in following:
            level[context] = level.get(parent, -1)
            folded[context] = folded.get(parent, 0) + 1
            kept.append(False)
        else:
            level[context] = level.get(parent, -1) + 1
            folded[context] = 0
            kept.append(True)
    passed = [
        folded.get(parent, 0) if keep else 0 for (_, parent), keep in zip(rows, kept, strict=True)
    ]
    table = view.assign(level=[level[context] for context, _ in rows], folded=passed)
    return table[kept]


def _largest_rows(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """The ``count`` rows with most, in their order; a callee has at most its caller's."""
    order = table["inclusive"].sort_values(ascending=False, kind="stable").index[:count]
    return table.loc[sorted(order)]


def _part_column(table: pd.DataFrame) -> dict[str, list[str]]:
    """The column of parts, where any row has one."""
    if table["component"].eq("other").all():
        return {}
    return {"part": list(map(part_label, table["component"], table["phase"]))}


def _metric(view: pd.DataFrame) -> str:
    return METRIC_NAMES.get(view.attrs.get("metric", ""), str(view.attrs.get("metric", "")))


def _titled(column_name: str) -> str:
    """Title of a column ``x (inc)``."""
    metric = column_name.removesuffix(" (inc)")
    if metric not in METRIC_NAMES:
        return f"{metric} with callees"
    return f"{METRIC_NAMES[metric]} with callees (ms)"


def _unit(view: pd.DataFrame) -> str:
    unit = view.attrs.get("unit", "")
    return f" ({unit})" if unit else ""


def _base(path: object) -> str:
    return str(path).rpartition("/")[2]


def _counted(values: pd.Series) -> list[str]:
    """Whole numbers without decimals."""
    if values.dropna().mod(1).eq(0).all():
        return [known_or(value, "{:,.0f}".format) for value in values]
    return column(values)
