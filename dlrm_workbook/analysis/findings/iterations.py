"""Iterations that are not like the others: slower ones, some or all from a time on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import iteration_state, segments, windows
from dlrm_workbook.analysis.context_tree import scopes_of
from dlrm_workbook.analysis.findings.data import STARTED_ADVICE
from dlrm_workbook.analysis.findings.evidence import Evidence, listed_times
from dlrm_workbook.analysis.findings.finding import Causes, Finding, Measured, largest, rule
from dlrm_workbook.analysis.findings.gpu_idle import nowhere
from dlrm_workbook.analysis.findings.where import line_name, main_place, part_name, shown
from dlrm_workbook.analysis.idleness import idle_pieces
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.analysis.launches import launched_operations
from dlrm_workbook.analysis.lines import line_table, lines
from dlrm_workbook.analysis.steady import (
    LEAST_OF_SPLIT,
    LEAST_TO_JUDGE,
    SPLIT_TIMES,
    lasting_rise,
    steady_state,
)
from dlrm_workbook.ground.arrays import Bools
from dlrm_workbook.recordings.nesting import stretch_at
from dlrm_workbook.recordings.torch.lines import MAIN

IRREGULAR_SHARE = 0.15
"""Of the run's time, lost in iterations far above the usual one."""

MOST_GROWN, LEAST_GROWN = 4, 0.05
"""Names that a sentence lists of what takes longer in slow iterations, and the least share of all
that does."""


ONE_IRREGULAR_SHARE = 0.3
"""The same of a single iteration: one straggler of ten is chance at four times the usual time."""

GPU_IRREGULAR_SHARE = 0.05
"""The same of both where a GPU's timeline shows the iterations, enough to judge by their scatter:
the GPU sets their pace, which other programs on the processor disturb less."""

FAR_MORE = 3.0
"""Times its usual time in an iteration for a name whose time lies in few of them."""

MOST_NUMBERS = 6
"""Iterations that a sentence lists."""


@rule(
    "irregular_iterations",
    title="{slow} of {count} iterations {take} far longer than the others{most}",
    evidence=(
        "Such an iteration took {slow_ms:ms} (mean), the usual one {usual_ms:ms}; {share:.0%} of "
        "the run's time is lost so.",
        "The first of them are iterations {which} (counted from 1).",
        "Most of it is in {place} ({extra:ms} more).",
        "What takes longer there: {longer}.",
        "{meanwhile}",
        "{basis}",
        "{started}",
    ),
    advice="Look for what happens or begins there: checkpoints, evaluation, compiling, garbage "
    "collection, refilled buffers, a change of the input, other work on the machine.",
    limit="scheduling",
)
def irregular(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Some iterations, or all from some one on, take far longer than the usual one or do what the
    others do not."""
    steps = evidence.steps
    if len(steps) < LEAST_OF_SPLIT:
        return None
    totals = steps.sum(axis=1)
    kinds = (find(evidence, ledger) for find in (_stragglers, _later, _now_and_then))
    odd = next((kind for kind in kinds if kind and kind["share"] >= kind["least"]), None)
    if odd is None:
        return None
    slow: Bools = odd["odd"]
    usual: Bools = odd["usual"]
    extra = (steps[slow] - steps[usual].median()).mean().clip(lower=0.0)
    part = largest(extra)
    grown, by_one = pd.Series(dtype=float), float(totals[slow].mean() - totals[usual].median())
    if evidence.has_timeline:
        table = _by_iteration(evidence)
        grown = table.loc[:, slow].mean(axis=1) - table.loc[:, usual].mean(axis=1)
        grown = grown[grown > LEAST_GROWN * grown.clip(lower=0.0).sum()].nlargest(MOST_GROWN)
    more = _extra_pieces(evidence, slow, usual)
    named = [shown(str(name)) for name in grown.index[grown > 0.5 * by_one]]
    named += [name for name in main_place(evidence.profile, *more)[:1] if name not in (*named, "")]
    places = np.flatnonzero(slow)
    table = lines(evidence.profile)
    now_and_then = table["in_iterations"].sub(slow.mean()).abs().le(1.5 / len(steps))
    table = table[table["thread"].eq(MAIN) & now_and_then & table["in_iterations"].lt(0.75)]
    runs = f", those in which {line_name(table.iloc[0])} runs" if len(table) else ""
    known = line_table(evidence.profile)
    if known is not None and known.marked_ms("started") > 0:
        odd, runs = odd | _STARTED, ", in which a DataLoader starts its workers"
    return (
        {"started": None}
        | odd
        | {
            # what lines take in some iterations only has findings of its own
            "least": odd["least"] + ledger.some_share,
            "component": part[0],
            "slow": len(places),
            "take": "take" if len(places) > 1 else "takes",
            "does": "do" if len(places) > 1 else "does",
            "count": len(steps),
            "which": ", ".join(str(place + 1) for place in places[:MOST_NUMBERS]),
            "slow_ms": float(totals[slow].mean()),
            "usual_ms": float(np.median(totals[usual])),
            "factor": float(totals[slow].median() / totals[usual].median()),
            "first": int(places[0]) + 1,
            "place": part_name(*part) or "the loop",
            "extra": float(extra.max()),
            "names": shown(str(grown.index[0])) if len(grown) else "",
            "most": runs or (f", most of it in {' of '.join(named)}" if named else ""),
            "longer": listed_times(grown, " more") or None,
            "pieces": more,
            "odd_share": float(slow.mean()),
        }
    )


_STARTED: Measured = {
    "started": "Each start of workers copies the process, and the pages of its memory as either of "
    "the two writes to them: iterations after it are slower as well.",
    "advice": f"{STARTED_ADVICE}.",
}


def _stragglers(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Figures of some iterations that take far longer than the usual one: which (n,) are ``odd``,
    the ``share`` of the run's time that they take beyond the ``usual`` ones (n,), and the least."""
    state = steady_state(evidence.steps.sum(axis=1).to_numpy())
    slow = state.stragglers
    if ledger.slower_from is not None and not slow[: ledger.slower_from].any():
        return None  # the slow ones are those in which the GPU is slower
    least = IRREGULAR_SHARE if slow.sum() > 1 else ONE_IRREGULAR_SHARE
    if evidence.has_timeline and len(slow) >= LEAST_TO_JUDGE:
        least = GPU_IRREGULAR_SHARE
    return {
        "share": state.straggler_share,
        "least": least,
        "odd": slow,
        "usual": state.steady,
        "basis": "Every share of the step here is of all iterations.",
    }


def _later(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The same of all iterations from some one on, where it is not the GPU that became slower."""
    totals = evidence.steps.sum(axis=1).to_numpy()
    cut = lasting_rise(totals, SPLIT_TIMES) if ledger.slower_from is None else None
    if cut is None:
        return None
    state, later = steady_state(totals), np.arange(len(totals)) >= cut
    counted = state.steady if state.steady[cut:].any() else np.ones(len(totals), dtype=bool)
    extra = np.maximum(totals - np.median(totals[:cut]), 0.0) * later
    return {
        "id": "slower_later",
        "title": "Iterations are {factor:.1f}x slower from iteration {first} of {count} on{most}",
        "share": float(extra[counted].sum() / totals[counted].sum()),
        "least": IRREGULAR_SHARE,
        "odd": later,
        "usual": ~later,
        "basis": None,
    }


def _now_and_then(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The same where something takes much time in few iterations, though these may not stand out as
    a whole."""
    state = iteration_state(evidence.profile)
    if state is None or not evidence.has_timeline:
        return None
    table = _by_iteration(evidence)
    if table.shape[1] != len(evidence.steps):
        return None
    usual = table.median(axis=1)
    by_step = table.sub(usual, axis=0).where(table.gt(FAR_MORE * usual, axis=0), 0.0).sum()
    length = evidence.steps.sum(axis=1).to_numpy()
    few = (by_step > GPU_IRREGULAR_SHARE * length.mean()).to_numpy()
    few &= ~np.logical_and.accumulate(few)  # the first ones are a warm-up
    if not 0 < few.sum() <= len(few) / 3:
        return None
    return {
        "id": "now_and_then",
        "title": "{slow} of {count} iterations {does} what the others do not: {names}",
        "share": float(by_step[few].sum()) / float(length.sum()),
        "least": GPU_IRREGULAR_SHARE,
        "odd": few,
        "usual": state.steady & ~few,
        "basis": None,
    }


def _by_iteration(evidence: Evidence) -> pd.DataFrame:
    """Time (ms) by name (rows) in each iteration (columns, from 0): kernels, copies, and what the
    host is in while the GPU is idle."""
    profile = evidence.profile
    spans = windows(profile)
    work = launched_operations(profile)
    step = stretch_at(
        spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy(), work["start_ns"].to_numpy()
    )
    contexts = profile.contexts
    # by context first: of a long recording these are few beside its spans
    names = contexts["name"].to_numpy(dtype=object)
    work_names = names.copy()
    for row in np.flatnonzero(profile.of_kind("kernel")):
        work_names[row] = kernel_name(names[row]).short or names[row]
    for row in np.flatnonzero(profile.of_kind("copy")):
        work_names[row] = f"copies ({names[row]})"
    pieces = idle_pieces(profile)
    pieces = pieces[~pieces["copying"]]
    place = pd.Series(np.arange(len(spans)), index=spans["iteration"])
    host = np.append(names[scopes_of(contexts)], nowhere(profile))
    number, names_of_numbers = pd.factorize(np.concatenate([work_names, host]))
    times = pd.DataFrame(
        {
            "name": number[
                np.append(work["context"], pieces["context"] % len(host) + len(work_names))
            ],
            "step": np.append(step, place.reindex(pieces["iteration"]).to_numpy()),
            "ms": np.append((work["end_ns"] - work["start_ns"]) / 1e6, pieces["idle_ms"]),
        }
    )
    table = times[times["step"] >= 0].pivot_table(
        "ms", "name", "step", aggfunc="sum", fill_value=0.0
    )
    table = table.set_axis(pd.Index(names_of_numbers[table.index], name="name")).sort_index()
    return table.reindex(columns=range(len(spans)), fill_value=0.0)


def _extra_pieces(evidence: Evidence, slow: np.ndarray, steady: np.ndarray) -> tuple[Any, Any]:
    """Contexts of the GPU's work and of the host while the GPU is idle (of the host alone, without
    a GPU's timeline), and the time (ms) that each takes more in a slow iteration than in others."""
    pieces = segments(evidence.profile)
    order = windows(evidence.profile)["iteration"]
    step = pieces["iteration"].map(pd.Series(np.arange(len(order)), index=order)).to_numpy()
    length = (pieces["end_ns"] - pieces["start_ns"]) / 1e6

    def mean(chosen: np.ndarray) -> pd.Series:
        return length[chosen[step]].groupby(pieces["context"]).sum() / max(chosen.sum(), 1)

    more = mean(slow).sub(mean(steady), fill_value=0.0)
    more = more[more > 0]
    return more.index.to_numpy(), more.to_numpy()


def of_all_iterations(found: list[Finding]) -> list[Finding]:
    """Findings whose shares have one basis where some iterations take far longer than others.

    Rules look at the usual iterations. What those lose is a smaller share of all of them: of the
    time that :func:`irregular` has not named.
    """
    lost = sum(each.share_of_step for each in found if each.id == "irregular_iterations")
    if lost <= 0:
        return found
    return [_of_all(each, 1.0 - lost) for each in found]


_STEP = re.compile(r"\b(each|the|its|their) step\b")


def _of_all(finding: Finding, usual: float) -> Finding:
    if finding.id == "irregular_iterations" or finding.severity != "slows":
        return finding
    saved = {end: (1 - 1 / gain) * usual for end, gain in finding.predicted_speedup.items()}
    title, named = _STEP.subn("a usual step", finding.title, count=1)
    return replace(
        finding,
        title=title if named else f"{title}, in a usual iteration",
        share_of_step=finding.share_of_step * usual,
        in_one=finding.in_one * usual,
        predicted_speedup={end: 1 / (1 - share) for end, share in saved.items()},
    )
