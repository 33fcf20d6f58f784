"""Rules of last resort: time that nobody else explained, wherever it is.

Each part has been timed alone, in the same process, before the run. A part that takes much
longer in the run than alone is held back by something, whether or not a rule knows what.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dlrm_core.parts import part_label
from dlrm_core.units import milliseconds
from dlrm_workbook.analysis.findings.evidence import PROFILER_MS, Evidence
from dlrm_workbook.analysis.findings.finding import Finding, Ledger, largest, removed
from dlrm_workbook.analysis.steady import steady_state

SLOWER = 1.5
"""Times its probe. Parts take up to 1.5 times theirs in clean runs, since in the run others
have emptied the caches (measured: tests/campaigns/planted_faults.py)."""

WORTH_SHARE = 0.08
"""Of the step, lost to the excess."""

OTHER_SHARE = 0.03
"""Of the step outside every part, beyond what our own loop takes there."""

OWN_LOOP_MS, OWN_TABLE_MS = 1.0, 0.05
"""Of our own loop between the parts, and of it for each table, under a profiler; 0.7 and
0.02 were measured. The part's probe is used where there is one."""

IRREGULAR_SHARE = 0.15
"""Of the run's time, lost in iterations far above the usual one."""

DISTURBED = 1.4
"""Times what the step and the profiler's greatest cost come to."""

CEILING_SHARE = 0.08
FAR_SHARE = 0.3


def slower_than_alone(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Parts take much longer in the run than alone, and nothing explains it."""
    left = ledger.left_ms
    parts = evidence.parts
    if left.empty or evidence.total_ms <= 0:
        return
    alone = parts["alone_ms"].reindex(left.index)
    ratio = (alone + left) / alone.where(alone > 0)
    slow = left[(ratio >= SLOWER) & (left >= 0.01 * evidence.total_ms)]
    slow = slow[[_is_significant(evidence, part) for part in slow.index]]
    lost = float(slow.sum())
    if lost < WORTH_SHARE * evidence.total_ms:
        return
    share = lost / evidence.total_ms
    slow = slow.sort_values(ascending=False)
    for part, milliseconds_lost in slow.items():
        ledger.explain(float(milliseconds_lost), (str(part[0]), str(part[1])))  # type: ignore[index]
    component, phase = slow.index[0]
    everywhere = len(slow) >= 4 and slow.iloc[0] < 0.6 * lost
    listed = "; ".join(
        f"{part_label(*part)} {milliseconds(float(parts['time_ms'][part]))}, alone "
        f"{milliseconds(float(alone[part]))}"
        for part in slow.index[:5]
    )
    text = f"In the run and alone: {listed}."
    heavy = evidence.operators
    heavy = heavy[(heavy["component"] == component) & (heavy["phase"] == phase)]
    if not heavy.empty:
        top = heavy.groupby("name")["cpu_self_ms"].sum().nlargest(4)
        held = ", ".join(f"{name} {milliseconds(ms)}" for name, ms in top.items() if ms > 0)
        text += f" In {part_label(component, phase)} the time is in {held}."
    text += _counted(evidence)
    yield Finding(
        id="slower_than_alone",
        title=(
            "Every part is slower in the run than alone"
            if everywhere
            else f"{part_label(component, phase).capitalize().replace('mlp', 'MLP')} takes "
            f"{float(ratio[(component, phase)]):.1f} times as long in the run as alone"
        ),
        component="other" if everywhere else str(component),
        share_of_step=share,
        evidence=text,
        advice=(
            "Something in the run slows the machine or every part: a hook, a debugging mode, "
            "clocks, memory placement, contention for caches or memory."
            if everywhere
            else f"Compare what {part_label(component, phase)} calls in the run with what it "
            "needs: a hook, a debugging mode, extra work, tensors that left the cache."
        ),
        predicted_speedup=removed(share),
        limit="memory bandwidth" if not everywhere else "scheduling",
    )


def outside_parts(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Time of the iteration that is in no part of the model."""
    if evidence.share("other") > 0.98 or ledger.is_explained(("other", "")):
        return
    parts = evidence.parts["time_ms"]
    time = float(parts[parts.index.get_level_values("component") == "other"].sum())
    tables = int(evidence.parameter("model.tables", 0) or 0)
    alone = evidence.alone("other", "")
    own = 1.5 * alone if alone is not None else OWN_LOOP_MS + OWN_TABLE_MS * tables
    share = (time - own) / evidence.step_ms if evidence.step_ms else 0.0
    if share < OTHER_SHARE:
        return
    ledger.explain(share * evidence.total_ms, ("other", ""))
    heavy = evidence.operators
    heavy = heavy[(heavy["component"] == "other") & (heavy["kind"] != "thread")]
    top = heavy.groupby("name")["cpu_self_ms"].sum().nlargest(4)
    held = ", ".join(f"{name} {milliseconds(ms)}" for name, ms in top.items() if ms > 0)
    yield Finding(
        id="outside_parts",
        title=f"{share:.0%} of the step is outside the model: the loop's own code",
        component="other",
        share_of_step=share,
        evidence=(
            f"{milliseconds(evidence.time('other'))} of {milliseconds(evidence.total_ms)} an "
            f"iteration lie in no part." + (f" Most of it: {held}." if held else "")
        ),
        advice=(
            "Look at what the loop does between the parts: logging, metrics, progress, "
            "checkpoints, callbacks. Do it every training.log_every iterations."
        ),
        predicted_speedup=removed(share),
        limit="dispatch",
    )


def irregular(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Some iterations take far longer than the usual one."""
    steps = evidence.steps
    if len(steps) < 8:
        return
    totals = steps.sum(axis=1)
    state = steady_state(totals.to_numpy())
    slow = state.outliers
    share = state.straggler_share
    if share < IRREGULAR_SHARE or int(slow.sum()) < 2:
        return
    usual = steps[state.steady].median()
    extra = (steps[slow] - usual).mean().clip(lower=0.0)
    component, phase = largest(extra)
    yield Finding(
        id="irregular_iterations",
        title=f"{int(slow.sum())} of {len(steps)} iterations take far longer than the others",
        component=str(component),
        share_of_step=share,
        evidence=(
            f"They took {milliseconds(float(totals[slow].mean()))}, the usual one "
            f"{milliseconds(state.usual_ms)}; {share:.0%} of the run's time is lost in them. "
            f"Most of it is in {part_label(str(component), str(phase)) or 'the loop'} "
            f"({milliseconds(float(extra.max()))} more)." + _counted(evidence)
        ),
        advice=(
            "Look for what happens every few iterations: checkpoints, evaluation, garbage "
            "collection, refilled buffers, other work on the machine."
        ),
        predicted_speedup=removed(share),
        limit="scheduling",
    )


def disturbed_profile(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The profiled iterations took far longer than a profiler can make them."""
    plain, total = evidence.step_ms, evidence.total_ms
    cost = PROFILER_MS * float(evidence.parts["calls"].sum())
    if evidence.on_gpu or plain + cost <= 0 or total < DISTURBED * (plain + cost):
        return
    yield Finding(
        id="disturbed_profile",
        title=f"The profiled iterations took {total / plain:.1f} times as long as the others",
        component="other",
        share_of_step=0.0,
        evidence=(
            f"{milliseconds(total)} with the profiler, {milliseconds(plain)} without; recording "
            f"{evidence.parts['calls'].sum():,.0f} operators costs {milliseconds(cost)} at most. "
            "Something else used the machine while the profiler was on."
        ),
        advice=(
            "Measure again on a quiet machine: shares of the step are those of the disturbed "
            "iterations."
        ),
        predicted_speedup={"low": 1.0, "mid": 1.0, "high": 1.0},
        limit="scheduling",
    )


def far_from_ceiling(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """A large part reaches little of what the machine allows, alone as in the run."""
    table = evidence.roofline
    if table.empty:
        return
    table = table[~table["component"].isin(["data", "other", "transfer"])]
    table = table.assign(lost_ms=table["time_ms"] - table["ceiling_ms"])
    table = table[(table["share_of_ceiling"] < CEILING_SHARE) & table["lost_ms"].gt(0)]
    table = table[
        [
            not ledger.is_explained((str(row.component), str(row.phase)))
            for row in table.itertuples()
        ]
    ]
    if table.empty:
        return
    worst = table.loc[table["lost_ms"].idxmax()]
    share = float(worst["lost_ms"]) / evidence.total_ms - ledger.explained_ms / evidence.total_ms
    if share < FAR_SHARE:
        return
    name = part_label(str(worst["component"]), str(worst["phase"]))
    yield Finding(
        id="far_from_ceiling",
        title=f"{name[:1].upper() + name[1:]} reaches {worst['share_of_ceiling']:.0%} of what "
        "this machine allows",
        component=str(worst["component"]),
        share_of_step=float(worst["time_ms"]) / evidence.total_ms,
        evidence=(
            f"It takes {milliseconds(float(worst['time_ms']))}; by the ceilings measured here for "
            f"{worst['limit']} {milliseconds(float(worst['ceiling_ms']))} would do."
        ),
        advice=(
            "Look at its operators for work that the model does not need, strided or tiny "
            "accesses, and a library that misses the machine's instructions."
        ),
        predicted_speedup={
            "low": 1.0,
            "mid": 1.0 / (1.0 - 0.4 * share),
            "high": 1.0 / max(1.0 - share, 0.02),
        },
        limit=str(worst["limit"]),
    )


def _is_significant(evidence: Evidence, part: tuple[str, str]) -> bool:
    """Whether the part was slow in nearly all iterations, not in a few."""
    if part not in evidence.steps:
        return True
    alone = evidence.parts["alone_ms"][part]
    times = evidence.steps[part].to_numpy()
    return bool(np.mean(times > 1.2 * alone) >= 0.75)


def _counted(evidence: Evidence) -> str:
    """What the system counted meanwhile, as far as it is unusual."""
    said = []
    for name, label in (
        ("run_queue_ms", "waited for a core"),
        ("blocked_ms", "waited for something else"),
        ("gc_ms", "collected garbage"),
    ):
        share = evidence.share_of_wall(name)
        if share >= 0.01:
            said.append(f"{label} in {share:.0%} of the time")
    faults = evidence.counted("minor_faults")
    if faults >= 1000:
        said.append(f"met {faults:,.0f} page faults an iteration")
    return f" Meanwhile the step's thread {', '.join(said)}." if said else ""


RULES = (disturbed_profile, outside_parts, irregular, slower_than_alone, far_from_ceiling)
