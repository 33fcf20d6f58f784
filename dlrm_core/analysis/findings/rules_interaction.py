"""The interaction of features: little arithmetic, many small moves of data."""

from __future__ import annotations

from collections.abc import Iterable

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.findings.finding import Finding, bounded, milliseconds
from dlrm_core.analysis.findings.gain import is_worthwhile, predicted
from dlrm_core.analysis.findings.ledger import Ledger

SHARE = 0.2
"""Of the step; the interaction has about 1 % of a DLRM's arithmetic."""

REACHED = 0.15
"""Of its ceiling. Ours reaches 0.25 to 0.6 in clean runs (benchmarks/planted_faults.py): cat,
product, selection and conversions each pass over the features once, the ceiling counts what
they must."""


def interaction_overhead(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The interaction takes long for the little that it computes."""
    share = evidence.share("interaction")
    table = evidence.roofline
    table = table[table["component"] == "interaction"]
    time, least = float(table["time_ms"].sum()), float(table["ceiling_ms"].sum())
    if share < SHARE or time <= 0 or not 0 < least < REACHED * time:
        return
    if ledger.explained_ms > 0.5 * time:
        return  # what was named already may well have been here
    if any(ledger.is_explained(("interaction", phase)) for phase in ("forward", "backward")):
        return
    operators = evidence.called[evidence.called["component"] == "interaction"]
    heavy = operators.groupby("name")["cpu_self_ms"].sum().nlargest(4)
    listed = ", ".join(f"{name} {milliseconds(ms)}" for name, ms in heavy.items() if ms > 0)
    compiled = predicted(evidence, {"training.compile": True})
    change = {"training.compile": True} if is_worthwhile(compiled) else {}
    excess = (time - least) / evidence.total_ms
    yield Finding(
        id="interaction_overhead",
        title=f"The interaction holds {share:.0%} of the step, most of it moving data",
        component="interaction",
        share_of_step=share,
        evidence=(
            f"It takes {milliseconds(time)}; by the ceilings measured here {milliseconds(least)} "
            f"would do ({least / time:.0%})." + (f" Most of it: {listed}." if listed else "")
        ),
        advice=(
            "Concatenate, multiply and pick the products in fewer passes: compile the dense part, "
            "use micro-batches that stay in cache, or fewer or narrower features."
        ),
        change=change,
        predicted_speedup=compiled if change and compiled else bounded(excess),
        limit="memory bandwidth",
    )


RULES = (interaction_overhead,)
