"""Tables and sentences of sweeps and of the laws fitted to several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from dlrm_core.analysis.ensemble import short_leaf
from dlrm_core.figure_theme import digits, part_label, percent
from dlrm_core.page_tables import NOTHING, Table, Text, column, known_or


def laws_table(laws: pd.DataFrame) -> Table | Text:
    """Fitted laws in words and numbers."""
    if laws.empty:
        return Text("*No law can be fitted: three runs or more that differ in a size are needed.*")
    cells = {
        "along": [short_leaf(leaf) for leaf in laws["leaf"]],
        "part": [part_label(c, p) for c, p in zip(laws["component"], laws["phase"], strict=True)],
        "with": [held or NOTHING for held in laws["held"]],
        "law": laws["sentence"].tolist(),
        "a (ms)": [digits(value) for value in laws["a_ms"]],
        "slope": [f"{value:.2f}" for value in laws["slope"]],
        "r²": [known_or(value, "{:.4f}".format) for value in laws["r2"]],
    }
    if set(cells["with"]) == {NOTHING}:
        del cells["with"]
    return Table.of(cells)


def sweep_verdict(summary: pd.DataFrame, failures: str) -> Text:
    """How many points there are, and which is best."""
    done = summary[summary["status"] == "finished"]
    lines = [f"**{len(done)} of {len(summary)} points finished.**"]
    speed = done["samples_per_second"].dropna() if len(done) else done
    if len(speed):
        best, worst = speed.idxmax(), speed.idxmin()
        lines.append(
            f"Most samples a second: **{done['label'][best]}**, {speed[best]:,.0f} samples/s, "
            f"{speed[best] / speed[worst]:.2f} times those of {done['label'][worst]} "
            f"({speed[worst]:,.0f})."
        )
    if failures:
        lines.append("```\n" + failures + "\n```")
    return Text("\n\n".join(lines))


def points_table(summary: pd.DataFrame) -> Table:
    """Every point of a sweep with its figures."""
    best = summary["samples_per_second"].max()
    cells: dict[str, list[str]] = {
        "point": [str(number) for number in summary["number"]],
        "setting": summary["label"].tolist(),
        "status": summary["status"].tolist(),
        "iteration (ms)": column(summary["ms_per_iteration"]),
        "samples/s": [known_or(value, "{:,.0f}".format) for value in summary["samples_per_second"]],
        "of the best": [known_or(value / best, percent) for value in summary["samples_per_second"]],
        "largest part": [part_label(str(name)) if name else NOTHING for name in summary["top"]],
        "its share": [known_or(value, percent) for value in summary["top_share"]],
        "measured speed-up": [known_or(value, "{:.2f}×".format) for value in summary["speedup"]],
    }
    if summary["speedup"].isna().all():
        del cells["measured speed-up"]
    return Table.of(cells)


def findings_matrix(found: pd.DataFrame) -> Table | Text:
    """Which finding is there at which point, with its share of the step.

    Args:
        found: index the rule, a column a point, NaN where it did not fire.
    """
    if found.empty:
        return Text("No rule found a bottleneck at any point.")
    rows = [
        (
            str(title),
            *(known_or(value, percent) for value in values),
            _appearance(values),
        )
        for title, values in zip(found.index, found.to_numpy().tolist(), strict=True)
    ]
    return Table(["finding", *(f"at {number}" for number in found.columns), "along the grid"], rows)


def _appearance(values: Sequence[float]) -> str:
    there = [math.isfinite(value) for value in values]
    if all(there):
        return "everywhere"
    if not there[0] and there[-1]:
        return "appears"
    return "disappears" if there[0] and not there[-1] else "at some points"
