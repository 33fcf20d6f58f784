"""Figures, sentences and column formats of sweeps, and of the laws fitted to several runs."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dlrm_core.base.text import counted
from dlrm_core.parts import COMPONENTS, part_label
from dlrm_workbook.analysis.ensemble import WHOLE_STEP, Curve, short_leaf, swept_runs
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.units import ratio
from dlrm_workbook.show import theme
from dlrm_workbook.show.tables import QUALITY_LEVELS, Column, Text


def scaling_curves(curves: Sequence[Curve], leaf: str) -> go.Figure:
    """Time of each part along a parameter, of :func:`~dlrm_workbook.analysis.ensemble.scaling`:
    points, fitted law, mean slope; both axes log."""
    parts = list(dict.fromkeys(curve.component for curve in curves))
    held = sorted({curve.held for curve in curves}, key=_in_numbers)
    curves = sorted(curves, key=lambda curve: held.index(curve.held))
    short = short_leaf(leaf)
    title = f"Time of each part along {short}"
    result, cells = theme.panels(title, list(map(part_label, parts)), 3, legend=len(held) > 1)
    for curve in curves:
        at = cells[parts.index(curve.component)]
        # the whole step has none
        colour = theme.COLOURS.get(curve.component, theme.INK)
        look = theme.line_look(colour, held.index(curve.held))
        said = theme.lines_of(curve.law.sentence(short), 60)
        name = ", ".join(filter(None, [part_label(curve.component), curve.held]))
        grid = np.geomspace(curve.law.smallest, curve.law.largest, 41)
        fitted = {"mode": "lines", "line": look["line"], "hoverinfo": "skip"}
        theme.add_points(result, grid, curve.law(grid), "", "", at=at, showlegend=False, **fitted)
        theme.add_points(
            result,
            curve.x,
            curve.time_ms,
            curve.held or "measured",
            f"{name}<br>{short} %{{x:,}}: %{{y:,.3f}} ms<br>{said}",
            at=at,
            mode="markers+text",
            marker=look["marker"],
            legendgroup=curve.held,
            showlegend=curve.component == parts[0],
            text=[*[""] * (len(curve.x) - 1), f"{curve.law.slope:+.2f}".replace("-", "−")],
            textposition="top left",
            cliponaxis=False,
        )
    sizes = sorted({float(x) for curve in curves for x in curve.x})
    result.update_xaxes(
        **theme.log_axis(sizes, lambda size: f"{size:,.0f}" if size >= 1 else f"{size:g}")
    )
    for name, at in zip(parts, cells, strict=True):
        times = [t for curve in curves if curve.component == name for t in curve.time_ms]
        result.update_yaxes(**theme.log_axis(theme.log_ticks(times)), **at)
    result.update_xaxes(title=short, row=cells[-1]["row"] if cells else 1)
    result.update_yaxes(title="ms", col=1)
    return result


def _in_numbers(held: str) -> list[tuple[str, float]]:
    """Sort key of ``dim 32, batch 256``: its numbers by size."""
    words = re.split(r"(\d+(?:\.\d+)?)", held)
    return [
        (text, float(number))
        for text, number in itertools.zip_longest(words[::2], words[1::2], fillvalue="0")
    ]


def short_setting(label: str) -> str:
    """The label of a point as figures write it: ``batch 256, dim 16``."""
    return re.sub(r"(\w+\.\w+) = ", lambda leaf: f"{short_leaf(leaf[1])} ", label)


def _marked(label: str, level: str) -> str:
    """The label of a point in a figure, with a mark where it is in doubt."""
    mark = "" if level in ("", "green") else f" ({QUALITY_LEVELS[level].lower()})"
    return short_setting(label) + mark


def points_bars(table: pd.DataFrame) -> go.Figure:
    """Samples a second of every point that has one, in the order of the grid; the best stands out.

    Points in doubt are marked, and unreliable ones are pale and never the best.
    """
    speeds = table["samples_per_second"]
    rates = [f"{speed:,.0f}" for speed in speeds]
    fills = table["quality"].map({"red": theme.paled(theme.INK)}).fillna(theme.INK)
    fills = fills.mask(table["of_best"] == 1, theme.COLOURS["embedding"])
    names = [theme.lines_of(_marked(*row), 46) for row in table[["label", "quality"]].to_numpy()]
    return theme.ranked_bars(
        "Samples per second at each point",
        "samples per second",
        names,
        speeds.tolist(),
        rates,
        [f"{label}: {rate} samples/s" for label, rate in zip(table["label"], rates, strict=True)],
        {"color": fills.tolist()},
        row=theme.ROW + 12 * max((name.count("<br>") for name in names), default=0),
    )


def parts_by_point(times: pd.DataFrame) -> go.Figure:
    """Share of each part in the step at every point, stacked to the whole, of
    :func:`~dlrm_workbook.analysis.ensemble.part_table`."""
    table = times[times["component"] != WHOLE_STEP].groupby(["run", "component"], sort=False)
    spent = table["time_ms"].sum().unstack(fill_value=0).reindex(list(dict.fromkeys(times["run"])))
    levels = times.attrs.get("quality", {})
    spent = spent.rename(index=lambda run: _marked(run, levels.get(run, "")))
    looks = {name: (part_label(name), theme.COLOURS[name]) for name in COMPONENTS}
    result = theme.stacked_bars("Share of each part at each point", spent, looks, "ms", shares=True)
    result.update_xaxes(title="share of the step")
    return result


def sweep_verdict(summary: pd.DataFrame, failures: str) -> Text:
    """How many points there are, and which is best."""
    done = summary[summary["status"] == "finished"]
    lines = [f"**{len(done)} of {len(summary)} points finished.**"]
    unreliable = done[done["quality"] == "red"]
    done = done.drop(index=unreliable.index)
    if len(unreliable):
        names = ", ".join(short_setting(str(label)) for label in unreliable["label"])
        which = f"Unreliable, and not counted below: {names}."
        lines.append(which if len(done) else "All are unreliable: measure again.")
    timed = done[done["samples_per_second"].notna()]
    if len(timed) > 1:
        ranked = timed.astype({"samples_per_second": float}).sort_values("samples_per_second")
        rates = ranked["samples_per_second"].to_numpy()
        slowest, *_, fastest = (short_setting(str(label)) for label in ranked["label"])
        lines.append(
            f"Most samples per second: **{fastest}**, {rates[-1]:,.0f} samples/s, which is "
            f"{ratio(rates[-1] / rates[0])} faster than {slowest} ({rates[0]:,.0f})."
        )
    if said := _largest_parts(done):
        lines.append(f"Largest part of the step: {said}.")
    if failures:
        lines.append("```\n" + failures + "\n```")
    return Text("\n\n".join(lines))


def _largest_parts(points: pd.DataFrame) -> str:
    """Which part is the largest at how many points: ``embedding at 4 of 6 points (29% to 41%)``."""
    known = points[points["top_share"].notna()]
    said: list[str] = []
    for name in known["top"].value_counts().index:
        shares = known.loc[known["top"] == name, "top_share"]
        low, high = f"{shares.min():.0%}", f"{shares.max():.0%}"
        of = f" of {counted(len(known), 'point')}" if not said else ""
        span = low if low == high else f"{low} to {high}"
        said.append(f"{part_label(name)} at {len(shares)}{of} ({span})")
    return ", ".join(said)


def sweep_source(folder: Path) -> Text:
    return Text(
        in_markdown(
            f"This page shows the sweep in `{folder}`: `sweep.json`, `summary.json` with the "
            "numbers of this page, and a folder for each point."
        )
    )


def point_commands(folder: Path, points: pd.DataFrame) -> Text:
    """Commands that explain the fastest point, and that show all points side by side."""
    place = "POINT"
    speeds = points["samples_per_second"].where(points["quality"] != "red")
    if speeds.notna().any():
        best = str(points.loc[speeds.idxmax(), "label"])
        place = str(swept_runs(folder, "profile").get(best, place))
    explain = shlex.join(["dlrm", "run", "bottlenecks", "-p", f"profile_run={place}"])
    beside = shlex.join(["dlrm", "run", "compare", "-p", f"runs=[{folder}]"])
    return Text(
        in_markdown(
            f"`{explain}` explains the fastest point: the operator and line of each bottleneck, "
            "what to change first, what changes gain together, and the hardware limit. "
            f"`{beside}` shows the points side by side."
        )
    )


def finding_columns(table: pd.DataFrame) -> dict[str, str | Column]:
    """Columns of a table of findings along the grid: a share at each point."""
    points = [str(name) for name in table.columns if str(name).startswith("at ")]
    return (
        {"finding": "finding"}
        | {name: Column(name, "share") for name in points}
        | {"along_the_grid": "along the grid"}
    )
