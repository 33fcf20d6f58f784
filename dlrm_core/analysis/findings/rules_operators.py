"""Operators that the model does not need, and operators too small for what calling one costs.

Which operators a step needs follows from its shapes (:mod:`dlrm_core.analysis.work`);
a trace says which were called. What is called beyond that is named here by what it does,
whatever put it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.findings.finding import (
    Finding,
    largest,
    milliseconds,
    removed,
)
from dlrm_core.analysis.findings.gain import is_worthwhile, predicted
from dlrm_core.analysis.findings.ledger import Ledger
from dlrm_core.analysis.findings.unneeded import (
    KINDS,
    TINY,
    are_tiny,
    extra_table,
    names_lead,
)
from dlrm_core.parts import part_label

EXTRA_SHARE = 0.04
"""Of the step, held by operators that do not belong: half of what a finding is worth."""


TINY_SHARE = 0.35
"""Of the step in operators so small, and in Python between them: bound by dispatch."""

LARGER_PAYS = 1.25
"""Samples a second gained by twice the batch from which the batch is too small: two fifths of
the step or more are then the same for any batch."""


def extra_operators(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Operators are called that the model's shapes do not ask for."""
    extra = extra_table(evidence)
    if extra.empty or evidence.total_ms <= 0:
        return
    left = extra
    for kind in KINDS:
        own = extra["name"].str.match(kind.names)
        if not own.any():
            continue
        # what came with them: a conversion's copy_, a check's item, in the same parts
        parts = extra.loc[own, ["component", "phase"]].drop_duplicates()
        group = left.merge(parts, on=["component", "phase"])
        share = float(group["time_ms"].sum()) / evidence.total_ms
        is_it = kind.unmistakable or not are_tiny(evidence, group)
        if share >= EXTRA_SHARE and is_it and names_lead(group, kind):
            told = (kind.id, kind.title, kind.advice, kind.limit)
            yield _extra(evidence, ledger, group, *told, change=dict(kind.change))
            left = left[
                ~left.set_index(["component", "phase"]).index.isin(pd.MultiIndex.from_frame(parts))
            ]
    for (component, phase), group in left.groupby(["component", "phase"]):
        share = float(group["time_ms"].sum()) / evidence.total_ms
        if share < EXTRA_SHARE:
            continue
        calls = float(group["calls"].sum())
        where = part_label(str(component), str(phase))
        many = are_tiny(evidence, group)
        yield _extra(
            evidence,
            ledger,
            group,
            "tiny_operators" if many else "foreign_operators",
            f"{calls:,.0f} operators in {where} that the model does not need"
            if many
            else f"{where[:1].upper() + where[1:]} calls operators that the model does not need",
            "Merge them into a few operators on whole tensors, or take them out of the step: each "
            "costs its dispatch however little it computes."
            if many
            else "Take them out of the step, or merge them into its own operators.",
            "dispatch" if many else "memory bandwidth",
        )


def dispatch_bound(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The whole step is made of operators too small for what calling one costs."""
    dispatch = evidence.dispatch_ms
    if evidence.on_gpu or dispatch is None or evidence.total_ms <= 0:
        return
    table = evidence.called
    table = table[(table["calls"] > 0) & ~table["component"].isin(["data", "other"])]
    tiny = table[table["cpu_self_ms"] / table["calls"] < TINY * dispatch]
    parts = evidence.parts
    model = ~parts.index.get_level_values("component").isin(["data", "other"])
    # what a part's own code takes beyond calling its operators is no cost of calling them
    between = parts["python_ms"].clip(upper=20.0 * dispatch * (5.0 + parts["calls"]))
    python = float(between[model].sum())
    undilated = evidence.step_ms / evidence.total_ms
    small = (float(tiny["cpu_self_ms"].sum()) + python) * undilated
    share = min(small / evidence.step_ms - ledger.explained_ms / evidence.total_ms, 1.0)
    size = int(evidence.parameter("training.batch_size", 0) or 0)
    larger = predicted(evidence, {"training.batch_size": 2 * size}) if size else None
    if share < TINY_SHARE:
        if larger and larger["mid"] >= LARGER_PAYS and larger["low"] > 1.0:
            yield _small_batch(evidence, size, larger)
        return
    compiled = predicted(evidence, {"training.compile": True})
    use_compile = is_worthwhile(compiled)
    gain = compiled if use_compile else larger
    change: dict[str, Any] = {"training.compile": True} if use_compile else {}
    bound = {"low": 1.0, "mid": 1.0 / (1.0 - 0.5 * share), "high": 1.0 / max(1.0 - share, 0.02)}
    calls = float(table["calls"].sum())
    worst = between[model].fillna(0.0) + tiny.groupby(["component", "phase"])[
        "cpu_self_ms"
    ].sum().reindex(parts.index[model]).fillna(0.0)
    component, _ = largest(worst)
    yield Finding(
        id="dispatch_bound",
        title=f"Calling operators, not computing, takes {share:.0%} of the step",
        component=component,
        share_of_step=share,
        evidence=(
            f"{calls:,.0f} operators an iteration; {float(tiny['calls'].sum()):,.0f} of them take "
            f"less than {TINY * 1e3 * dispatch:.1f} us, {TINY:.0f} times what calling an empty one "
            f"costs here. With Python between them they hold {milliseconds(small)} of "
            f"{milliseconds(evidence.step_ms)}. A batch has {size:,} samples."
        ),
        advice=(
            "Give each operator more to do: a larger batch (training.batch_size; check the "
            "learning rate), or fewer operators (training.compile, training.embedding_backend: "
            "fused, training.fused_optimizer)."
        ),
        change=change,
        predicted_speedup=gain if gain and gain["mid"] > 1.0 else bound,
        limit="dispatch",
    )


def _small_batch(evidence: Evidence, size: int, larger: dict[str, float]) -> Finding:
    parts = evidence.parts["time_ms"].drop(index=("other", ""), errors="ignore")
    component, phase = largest(parts)
    share = 2.0 * (1.0 - 1.0 / larger["mid"])
    return Finding(
        id="small_batch",
        title=f"A batch of {size:,} is too small for this machine",
        component=component,
        share_of_step=min(share, 1.0),
        evidence=(
            f"Twice the batch is predicted to take {2.0 / larger['mid']:.2f} times as long, not "
            f"2: about {min(share, 1.0):.0%} of the step does not grow with the batch (weights "
            f"read and updated, operators called). Most time is in {part_label(component, phase)}, "
            f"{milliseconds(float(parts.max()))} of {milliseconds(evidence.total_ms)}."
        ),
        advice=(
            "Raise training.batch_size, and check the learning rate with it; the speed-up is of "
            "the time a sample takes."
        ),
        predicted_speedup=larger,
        limit="memory bandwidth",
    )


# ---- what does not belong ---------------------------------------------------------


def _extra(
    evidence: Evidence,
    ledger: Ledger,
    group: pd.DataFrame,
    id_: str,
    title: str,
    advice: str,
    limit: str,
    change: dict[str, Any] | None = None,
) -> Finding:
    by_part = group.groupby(["component", "phase"])["time_ms"].sum()
    places = [(str(component), str(phase)) for component, phase in by_part.index]
    total = float(group["time_ms"].sum())
    # operators beyond need also evict what the others had in cache: the whole excess is theirs
    excess = evidence.excess_ms.reindex(by_part.index).fillna(0.0)
    lost = max(total, min(float(excess.sum()), 2.0 * total))
    for place, time in zip(places, by_part, strict=True):
        ledger.explain(max(float(time), min(float(excess[place]), 2.0 * float(time))), place)
    share = min(lost / evidence.total_ms, 0.98)
    component = str(by_part.groupby("component").sum().idxmax())
    speedup = removed(share)
    better = predicted(evidence, change) if change else None
    if better is not None and better["mid"] > speedup["mid"]:
        speedup = better
    names = group.groupby("name")[["calls", "time_ms"]].sum().nlargest(4, "time_ms")
    listed = ", ".join(
        f"{row['calls']:,.0f} of {name} ({milliseconds(row['time_ms'])})"
        for name, row in names.iterrows()
    )
    parts = ", ".join(
        part_label(*part) for part in sorted(places, key=lambda place: -by_part[place])[:3]
    )
    return Finding(
        id=id_,
        title=title,
        component=component,
        share_of_step=share,
        evidence=(
            f"Beyond what the model's shapes ask for, {parts} call an iteration: {listed}; "
            f"{milliseconds(total)} of {milliseconds(evidence.total_ms)} in all."
        ),
        advice=advice,
        change=change or {},
        predicted_speedup=speedup,
        limit=limit,
    )


RULES = (extra_operators, dispatch_bound)
