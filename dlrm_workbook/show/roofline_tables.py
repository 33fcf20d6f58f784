"""The roofline as tables and sentences: DataFrames of :mod:`dlrm_workbook.analysis.roofline` in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_core.parts import part_label
from dlrm_core.units import NOTHING, digits, format_bytes, known_or, milliseconds, percent
from dlrm_workbook.analysis.roofline import COPIES, LAUNCHES, Limits, least_step
from dlrm_workbook.show.tables import Table, Text, column
from dlrm_workbook.show.theme import rows_of

PRECISIONS = {
    "fp32": "fp32",
    "fp32_onednn": "fp32 by oneDNN",
    "fp32_bf16x2": "fp32 as bf16x2 on tiles",
    "fp32_bf16x3": "fp32 as bf16x3 on tiles",
    "tf32": "TF32",
    "bf16": "bf16",
    "bf16_tiles": "bf16 on tiles",
    "fp16": "fp16",
}


def roofline_table(table: pd.DataFrame) -> Table:
    """Each part's work, rates, least time and limit; the slowest part first."""
    shown = table.sort_values("time_ms", ascending=False)
    return Table(
        [
            "part",
            "time (ms)",
            "least time (ms)",
            "least / time",
            "limit",
            "GFLOP",
            "MB",
            "operations a byte",
            "GFLOP/s",
            "GB/s",
        ],
        zip(
            [part_label(row.component, row.phase) for row in rows_of(shown)],
            column(shown["time_ms"]),
            column(shown["ceiling_ms"]),
            [known_or(s, percent) for s in shown["share_of_ceiling"]],
            [row.limit or row.ceiling or NOTHING for row in rows_of(shown)],
            column(shown["flops"] / 1e9),
            column(shown["bytes"] / 1e6),
            column(shown["intensity_flop_per_byte"]),
            column(shown["gflops"]),
            column(shown["gb_per_s"]),
            strict=True,
        ),
    )


def product_peaks(ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Precision, as a reader calls it, to the best rate of its matrix products, GFLOP/s."""
    limits = Limits(ceilings)
    peaks = {name: rate for name in PRECISIONS if (rate := limits.peak_gflops([name]))}
    # another library for the same precision is worth a line only where it is the faster one
    for name in PRECISIONS:
        if peaks.get(name, 0.0) <= peaks.get(name.partition("_")[0], 0.0) and "_" in name:
            peaks.pop(name, None)
    return {PRECISIONS[name]: rate for name, rate in peaks.items()}


def ceilings_table(ceilings: Mapping[str, Any] | None) -> Table:
    """The machine's ceilings, each with its unit; no rows where none were measured."""
    known = ceilings or {}
    rows: list[tuple[str, str]] = []
    limits = Limits(known)
    for label, rate in product_peaks(known).items():
        rows.append((f"matrix products, {label}", f"{rate:,.0f} GFLOP/s at best"))
    for row in sorted(known.get("stream") or [], key=lambda row: row.get("bytes") or 0):
        rates = [
            f"{kind} {digits(float(row[f'{kind}_gb_per_s']))}"
            for kind in ("read", "copy", "triad")
            if row.get(f"{kind}_gb_per_s")
        ]
        rows.append((f"streaming {format_bytes(row['bytes'])}", ", ".join(rates) + " GB/s"))
    for row in known.get("gather") or []:
        what = f"random rows of {row['row_bytes']:,} B in {format_bytes(row['table_bytes'])}"
        rows.append((what, f"{digits(float(row['gb_per_s']))} GB/s"))
    for name, label in (("dispatch_us", "one torch operator"), ("launch_us", "one launch")):
        if known.get(name):
            rows.append((label, f"{digits(float(known[name]))} µs"))
    for row in known.get("copy") or []:
        way = {"h2d": "to the GPU", "d2h": "from the GPU"}.get(row["direction"], row["direction"])
        rows.append((f"copy {way}, {row['kind']}", f"{digits(float(row['gb_per_s']))} GB/s"))
    if cache := known.get("last_level_cache_bytes"):
        rows.append(("last-level cache", format_bytes(float(cache))))
    source = "measured" if limits.measured else str(known["source"])
    return Table(["ceiling", source], rows)


def roofline_verdict(table: pd.DataFrame, doubts: Sequence[str] = ()) -> Text:
    """How fast this step could be on its machine, and where the most can be gained.

    Args:
        doubts: what :func:`dlrm_workbook.analysis.roofline.doubts` says.
    """
    step = least_step(table)
    if step["least_ms"] is None or not step["share"]:
        names = [part_label(component, phase) for component, phase in step["unknown"]]
        of = f" of {', '.join(names)}" if names else ""
        return Text(f"*The ceilings{of} were not measured, so the least time is not known.*")
    limits = ", ".join(
        f"{milliseconds(time)} {_WHILE.get(limit, limit)}"
        for limit, time in step["limits"].items()
        if time > 0.005 * step["least_ms"]
    )
    sentences = [
        f"**The step takes {milliseconds(step['time_ms'])}. At this shape and precision, and "
        f"with these back ends, the machine needs at least {milliseconds(step['least_ms'])} "
        f"({step['share']:.0%})**: {limits}."
    ]
    gaps = (table["time_ms"] - table["ceiling_ms"]).clip(lower=0.0)
    most = table.assign(gap=gaps).sort_values("gap", ascending=False).head(3)
    gains = [
        f"{part_label(row.component, row.phase)} ({milliseconds(row.gap)})"
        for row in rows_of(most)
        if row.gap > 0.01 * step["time_ms"]
    ]
    if gains:
        sentences.append(f"The most time above its least: {', '.join(gains)}.")
    else:
        sentences.append("No part has more than 1 % of the step to gain: its limits are met.")
    return Text("\n\n".join([" ".join(sentences), *doubts]))


_WHILE = {LAUNCHES: "launching kernels", COPIES: "copying"}
"""Limits that do not read as what time is spent on."""
