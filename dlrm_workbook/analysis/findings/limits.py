"""The limit that a step meets: one sentence, whether or not anything is wrong."""

from __future__ import annotations

import pandas as pd

from dlrm_core.parts import part_label
from dlrm_core.units import milliseconds, percent
from dlrm_workbook.analysis.findings.evidence import Evidence

PRODUCTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def limit_sentence(evidence: Evidence) -> str:
    """Which part the step's time goes to most, and how near its ceiling that is."""
    named = evidence.attribution[evidence.attribution["time_ms"] > 0]
    if named.empty:
        return "Nothing was measured, so nothing can be said about limits."
    if named["component"].eq("other").all():
        return (
            "This profile names no part of a model: it is of another program, or was measured "
            "without Python frames. The call tree and the operators say where its time goes."
        )
    parts = named.groupby(["component", "phase"], as_index=False)[["time_ms", "share"]].sum()
    top = parts.loc[parts["time_ms"].idxmax()]
    name = part_label(str(top["component"]), str(top["phase"]))
    total = float(named["time_ms"].sum())
    said = (
        f"The largest part of the step is {name}: {milliseconds(float(top['time_ms']))} of "
        f"{milliseconds(total)} an iteration ({top['share']:.0%})"
    )
    return f"{said}{_met(evidence, str(top['component']), str(top['phase']))}."


def _met(evidence: Evidence, component: str, phase: str) -> str:
    """``, at 83 % of what bf16 matrix products reach here: arithmetic``."""
    if component in ("data", "other"):
        return ""  # made by Python or numpy: no ceiling of the machine is near
    table = evidence.roofline
    row = table[(table["component"] == component) & (table["phase"] == phase)]
    if row.empty:
        return ""
    found = row.iloc[0]
    return f", at {percent(found['share_of_ceiling'])} of {_reached(evidence, found)}"


def _reached(evidence: Evidence, row: pd.Series) -> str:
    limit = str(row["limit"])
    if limit == "arithmetic":
        precision = str(evidence.parameter("training.precision", "fp32"))
        return f"what {precision} matrix products reach here: {limit}"
    if limit == "random rows":
        return f"what random rows of its tables reach here: {limit}"
    if limit == "memory bandwidth":
        return f"what this machine's memory gives: {limit}"
    if limit in ("dispatch", "launches"):
        return f"what calling its operators allows: {limit}"
    return f"what this machine allows: {limit}"
