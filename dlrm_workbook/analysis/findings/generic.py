"""Rules of last resort: time that nobody else explained, wherever it is.

Each part has been timed alone, in the same process, before the run. A part that takes much
longer in the run than alone is held back by something, whether or not a rule knows what.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import (
    PART,
    host_time,
    iteration_count,
    iteration_state,
    main_thread,
    segments,
    step_contexts,
    windows,
)
from dlrm_workbook.analysis.context_tree import scopes_of, stretch_at
from dlrm_workbook.analysis.findings.evidence import (
    PROFILER_MS,
    Evidence,
    Part,
    heaviest,
)
from dlrm_workbook.analysis.findings.finding import (
    Finding,
    Ledger,
    Measured,
    bounded,
    capitalised,
    largest,
    rule,
)
from dlrm_workbook.analysis.findings.where import main_place
from dlrm_workbook.analysis.idleness import idle_pieces
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.analysis.launches import launched_operations
from dlrm_workbook.analysis.steady import (
    LEAST_OF_SPLIT,
    LEAST_TO_JUDGE,
    SPLIT_TIMES,
    lasting_rise,
    steady_state,
)
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import node_key
from dlrm_workbook.recordings.profile import nearest

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

ONE_IRREGULAR_SHARE = 0.3
"""The same of a single iteration: one straggler of ten is chance at four times the usual time."""

GPU_IRREGULAR_SHARE = 0.05
"""The same of both where a GPU's timeline shows the iterations, enough to judge by their scatter:
the GPU sets their pace, which other programs on the processor disturb less."""

MOST_GROWN, LEAST_GROWN = 4, 0.05
"""Names that a sentence lists of what takes longer in slow iterations, and the least share of all
that does."""

FAR_MORE, NOW_AND_THEN_SHARE = 3.0, 0.05
"""Times its usual time in an iteration, and least share of all iterations, for a name whose time
lies in few of them."""

MOST_NUMBERS = 6
"""Iterations that a sentence lists."""

DISTURBED = 1.4
"""Times what the step and the profiler's greatest cost come to."""

OPENMP = re.compile(r"lib(?:gomp|iomp5|omp)\b")
SPINNING_SHARE = 0.2
"""Least share of the CPU time of all threads."""

CEILING_SHARE = 0.08
FAR_SHARE = 0.3

DOMINANT_SHARE = 0.4
"""Least share of CPU time in one part and phase of a foreign program; less is ordinary for the
largest."""

PIECE_SHARE = 0.04
"""Least share of CPU time for a function to be listed among those that no finding names."""

MEANWHILE = "Meanwhile the step's thread {meanwhile}."


@rule(
    "slower_than_alone",
    title="{name} takes {ratio:.1f}x as much time in the run as alone",
    evidence=(
        "In the run and alone: {times}.",
        "In {worst} the time is in {heaviest}.",
        MEANWHILE,
    ),
    advice="Compare what {worst} calls in the run with what it needs: a hook, a debugging mode, "
    "extra work, tensors that left the cache.",
    limit="memory bandwidth",
)
def slower_than_alone(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Parts take much longer in the run than alone, and nothing explains it."""
    left, parts = ledger.left_ms, evidence.parts
    if left.empty:
        return None
    alone = parts["alone_ms"].reindex(left.index)
    ratio = (alone + left) / alone.where(alone > 0)
    slow = left[(ratio >= SLOWER) & (left >= 0.01 * evidence.total_ms)]
    slow = slow[[_is_significant(evidence, part) for part in slow.index]]
    slow = slow.sort_values(ascending=False)
    lost = float(slow.sum())
    if lost < WORTH_SHARE * evidence.total_ms:
        return None
    places = [(str(component), str(phase)) for component, phase in slow.index]
    for part, time in zip(places, slow, strict=True):
        ledger.explain(float(time), part)
    worst = part_label(*places[0])
    figures: Measured = {
        "share": lost / evidence.total_ms,
        "component": places[0][0],
        "concerns": sorted({component for component, _ in places}),
        "name": worst.capitalize().replace("mlp", "MLP"),
        "worst": worst,
        "ratio": float(ratio[places[0]]),
        "times": "; ".join(
            f"{part_label(*part)} {milliseconds(float(parts['time_ms'][part]))}, alone "
            f"{milliseconds(float(alone[part]))}"
            for part in places[:5]
        ),
        "heaviest": heaviest(evidence.of_part(*places[0])),
        "meanwhile": _meanwhile(evidence),
    }
    if len(slow) >= 4 and slow.iloc[0] < 0.6 * lost:
        figures |= {
            "title": "Every part is slower in the run than alone",
            "component": "other",
            "advice": "Something in the run slows the machine or every part: a hook, a debugging "
            "mode, clocks, memory placement, contention for caches or memory.",
            "limit": "scheduling",
        }
    return figures


@rule(
    "spinning_threads",
    title="OpenMP's threads wait for {of_all:.0%} of the CPU time of all threads",
    evidence=(
        "{waits:ms} of {all:ms} of CPU time, sampled on {count} threads, pass inside {library}, "
        "which is where threads spin until the others are done or new work comes.",
        "Of the thread that steps it is {share:.0%}; what the others' spinning costs it (cores, "
        "clocks, memory bandwidth) was not measured: a sampled recording of one run does not tell.",
    ),
    advice="Fewer threads (OMP_NUM_THREADS), or let them sleep while they wait "
    "(OMP_WAIT_POLICY=PASSIVE).",
    limit="scheduling",
)
def spinning_threads(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Threads of OpenMP burn CPU time without work, in a sampled recording of all threads."""
    profile = evidence.profile
    rows = profile.values[profile.rows("cpu_time_ms", "exclusive")]
    if evidence.meta.get("engine") != "hpctoolkit" or rows.empty:
        return None
    waits = profile.which("name", lambda name: bool(OPENMP.search(name)))
    waits |= profile.which("module", lambda name: bool(OPENMP.search(name)))
    here = rows[waits[rows["context"].to_numpy()]]
    total = float(rows["value"].sum())
    if float(here["value"].sum()) < SPINNING_SHARE * total:
        return None
    names = profile.contexts[["module", "name"]].iloc[here["context"]].agg(" ".join, axis=1)
    library = OPENMP.search(str(names.iloc[0]))
    stepping = main_thread(profile)
    own = float(rows.loc[rows["profile"].eq(stepping), "value"].sum())
    waited = float(here.loc[here["profile"].eq(stepping), "value"].sum())
    share = waited / own if own > 0 else 0.0
    return {
        "share": share,
        "of_all": float(here["value"].sum()) / total,
        "waits": float(here["value"].sum()),
        "all": total,
        "count": rows["profile"].nunique(),
        "library": library[0] if library else "OpenMP's library",
        "speedup": bounded(share),
    }


@rule(
    "outside_parts",
    title="{share:.0%} of the step is outside the model: the loop's own code",
    evidence=(
        "{time:ms} of {total:ms} per iteration lie in no part.",
        "Most of it: {heaviest}.",
    ),
    advice="Look at what the loop does between the parts: logging, metrics, progress, "
    "checkpoints, callbacks. Do it every training.log_every iterations.",
    limit="dispatch",
)
def outside_parts(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Time of the iteration that is in no part of the model."""
    if evidence.share("other") > 0.98 or ledger.is_explained(("other", "")):
        return None
    if not evidence.is_ours:
        return None  # of another program it is what no name told, not the loop's own code
    parts = evidence.parts["time_ms"]
    time = float(parts[parts.index.get_level_values("component") == "other"].sum())
    tables = int(evidence.parameter("model.tables", 0) or 0)
    alone = evidence.alone("other", "")
    own = 1.5 * alone if alone is not None else OWN_LOOP_MS + OWN_TABLE_MS * tables
    share = (time - own) / evidence.step_ms if evidence.step_ms else 0.0
    if share < OTHER_SHARE:
        return None
    ledger.explain(share * evidence.total_ms, ("other", ""))
    operators = evidence.of_part("other")
    return {
        "share": share,
        "time": evidence.time("other"),
        "heaviest": heaviest(operators[operators["kind"] != "thread"]),
    }


@rule(
    "irregular_iterations",
    title="{slow} of {count} iterations {take} far longer than the others{most}",
    evidence=(
        "Such an iteration took {slow_ms:ms} (mean), the usual one {usual_ms:ms}; {share:.0%} of "
        "the run's time is lost so.",
        "Most of it is in {place} ({extra:ms} more).",
        "What takes longer there: {longer}.",
        MEANWHILE,
        "Every share of the step here is of all iterations.",
    ),
    advice="Look for what happens every few iterations: checkpoints, evaluation, garbage "
    "collection, refilled buffers, other work on the machine.",
    limit="scheduling",
)
def irregular(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Some iterations take far longer than the usual one."""
    steps = evidence.steps
    if len(steps) < LEAST_OF_SPLIT:
        return None
    totals = steps.sum(axis=1)
    state = steady_state(totals.to_numpy())
    slow, share = state.stragglers, state.straggler_share
    if ledger.slower_from is not None and not slow[: ledger.slower_from].any():
        return None  # the slow ones are those in which the GPU is slower
    # a single one may be chance, unless it takes a third of the run
    least = IRREGULAR_SHARE if int(slow.sum()) > 1 else ONE_IRREGULAR_SHARE
    if evidence.has_timeline and len(steps) >= LEAST_TO_JUDGE:
        least = GPU_IRREGULAR_SHARE
    if share < least:
        return None
    ledger.told_slow = True
    extra = (steps[slow] - steps[state.steady].median()).mean().clip(lower=0.0)
    part = largest(extra)
    grown = _grown(evidence, slow, state.steady)
    by_one = float(totals[slow].mean() - state.usual_ms)
    more = _extra_pieces(evidence, slow, state.steady)
    named = [str(name) for name in grown.index[grown > 0.5 * by_one]]
    named += [name for name in [main_place(evidence.profile, *more)] if name not in (*named, "")]
    return {
        "share": share,
        "component": part[0],
        "slow": int(slow.sum()),
        "take": "take" if int(slow.sum()) > 1 else "takes",
        "count": len(steps),
        "slow_ms": float(totals[slow].mean()),
        "usual_ms": state.mean_ms,
        "place": part_label(*part) or "the loop",
        "extra": float(extra.max()),
        "most": f", most of it in {' of '.join(named)}" if named else "",
        "longer": ", ".join(f"{name} {milliseconds(ms)} more" for name, ms in grown.items())
        or None,
        "pieces": more,
        "meanwhile": _meanwhile(evidence),
    }


def _grown(evidence: Evidence, slow: np.ndarray, steady: np.ndarray) -> pd.Series:
    """Time by which a slow iteration exceeds a steady one, ms by name, most first: kernels, copies
    and what the host is in while the GPU is idle. Empty without a GPU's timeline."""
    if not evidence.has_timeline:
        return pd.Series(dtype=float)
    table = _by_iteration(evidence)
    growth = table.loc[:, slow].mean(axis=1) - table.loc[:, steady].mean(axis=1)
    return growth[growth > LEAST_GROWN * growth.clip(lower=0.0).sum()].nlargest(MOST_GROWN)


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
    done = names.copy()
    for row in np.flatnonzero(profile.of_kind("kernel")):
        done[row] = kernel_name(names[row]).short or names[row]
    for row in np.flatnonzero(profile.of_kind("copy")):
        done[row] = f"copies ({names[row]})"
    pieces = idle_pieces(profile)
    pieces = pieces[~pieces["copying"]]
    place = pd.Series(np.arange(len(spans)), index=spans["iteration"])
    host = np.append(names[scopes_of(contexts)], "code outside every operator and range")
    number, told = pd.factorize(np.concatenate([done, host]))
    times = pd.DataFrame(
        {
            "name": number[np.append(work["context"], pieces["context"] % len(host) + len(done))],
            "step": np.append(step, place.reindex(pieces["iteration"]).to_numpy()),
            "ms": np.append((work["end_ns"] - work["start_ns"]) / 1e6, pieces["idle_ms"]),
        }
    )
    table = times[times["step"] >= 0].pivot_table(
        "ms", "name", "step", aggfunc="sum", fill_value=0.0
    )
    table = table.set_axis(pd.Index(told[table.index], name="name")).sort_index()
    return table.reindex(columns=range(len(spans)), fill_value=0.0)


@rule(
    "now_and_then",
    title="{few} of {count} iterations {do} what the others do not: {first}, {share:.0%} of all "
    "time",
    evidence=(
        "In iterations {which} (the first is 1) these take far longer than in the usual one: "
        "{longer}.",
        "Together that is {extra:ms} in such an iteration.",
    ),
    advice="Look for what happens every few iterations: checkpoints, evaluation, compiling, "
    "garbage collection, refilled buffers, other work on the machine.",
    limit="scheduling",
    gpu=True,
)
def now_and_then(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Something takes much time in few iterations, though these may not stand out as a whole."""
    if not evidence.has_timeline or len(evidence.steps) < LEAST_OF_SPLIT:
        return None
    state = iteration_state(evidence.profile)
    table = _by_iteration(evidence)
    if state is None or table.shape[1] != len(evidence.steps):
        return None
    usual = table.median(axis=1)
    extra = table.sub(usual, axis=0).where(table.gt(FAR_MORE * usual, axis=0), 0.0)
    by_step = extra.sum()
    length = evidence.steps.sum(axis=1).to_numpy()
    few = (by_step > NOW_AND_THEN_SHARE * length.mean()).to_numpy()
    few &= state.steady | (not ledger.told_slow)
    few &= ~np.logical_and.accumulate(few)  # the first ones are a warm-up
    share = float(by_step[few].sum()) / float(length.sum())
    if not 0 < few.sum() <= len(few) / 3 or share < NOW_AND_THEN_SHARE:
        return None
    most = extra.loc[:, few].mean(axis=1).nlargest(MOST_GROWN)
    most = most[most > LEAST_GROWN * most.sum()]
    return {
        "share": share,
        "few": int(few.sum()),
        "do": "do" if few.sum() > 1 else "does",
        "count": len(few),
        "which": ", ".join(str(place + 1) for place in np.flatnonzero(few)[:MOST_NUMBERS]),
        "first": str(most.index[0])[:70],
        "longer": ", ".join(f"{name} {milliseconds(ms)} more" for name, ms in most.items()),
        "extra": float(by_step[few].mean()),
        "pieces": _extra_pieces(evidence, few, state.steady & ~few),
    }


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


@rule(
    "slower_later",
    title="Iterations are {factor:.1f}x slower from iteration {first} of {count} on",
    evidence=(
        "They took {before:ms} before and {after:ms} since; most of the difference is in {place} "
        "({extra:ms}).",
        MEANWHILE,
    ),
    advice="Look for what began then: another program on the machine, a change of the input, "
    "memory that ran short, a callback that was switched on.",
    limit="scheduling",
)
def slower_later(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """All iterations from some one on take longer, and it is not the GPU that became slower."""
    steps = evidence.steps
    if ledger.slower_from is not None or len(steps) < LEAST_OF_SPLIT:
        return None
    totals = steps.sum(axis=1).to_numpy()
    cut = lasting_rise(totals, SPLIT_TIMES)
    if cut is None:
        return None
    state = steady_state(totals)
    counted = state.steady if state.steady[cut:].any() else np.ones(len(totals), dtype=bool)
    extra = np.maximum(totals - np.median(totals[:cut]), 0.0)
    extra[:cut] = 0.0
    share = float(extra[counted].sum() / totals[counted].sum())
    if share < IRREGULAR_SHARE:
        return None
    growth = (steps.iloc[cut:].median() - steps.iloc[:cut].median()).clip(lower=0.0)
    part = largest(growth)
    return {
        "share": share,
        "component": part[0],
        "factor": float(np.median(totals[cut:]) / np.median(totals[:cut])),
        "first": cut + 1,
        "count": len(totals),
        "before": float(np.median(totals[:cut])),
        "after": float(np.median(totals[cut:])),
        "place": part_label(*part) or "the loop",
        "extra": float(growth.max()),
        "meanwhile": _meanwhile(evidence),
    }


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


@rule(
    "disturbed_profile",
    title="The profiled iterations took {times:.1f}x the time of the others",
    evidence=(
        "{recorded:ms} with the profiler, {step:ms} without; recording {calls:,.0f} operators "
        "costs {cost:ms} at most.",
        "Something else used the machine while the profiler was on.",
    ),
    advice="Measure again on a quiet machine: shares of the step are those of the disturbed "
    "iterations.",
    limit="scheduling",
    gpu=False,
)
def disturbed_profile(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The profiled iterations took far longer than a profiler can make them."""
    plain, recorded = evidence.step_ms, evidence.recorded_ms
    calls = float(evidence.parts["calls"].sum())
    cost = PROFILER_MS * calls
    if plain + cost <= 0 or recorded < DISTURBED * (plain + cost):
        return None
    times = recorded / plain
    return {"share": 0.0, "times": times, "calls": calls, "cost": cost, "recorded": recorded}


@rule(
    "far_from_ceiling",
    title="{name} reaches {reached:.0%} of what this machine allows",
    evidence=("It takes {time:ms}; the ceilings measured here for {limit} allow {ceiling:ms}.",),
    advice="Look at its operators for work that the model does not need, strided or tiny "
    "accesses, and a library that misses the machine's instructions.",
    limit="",
)
def far_from_ceiling(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """A large part reaches little of what the machine allows, alone as in the run."""
    table = evidence.roofline
    if table.empty:
        return None
    table = table[~table["component"].isin(["data", "other", "transfer"])]
    table = table[table["ceiling_ms"] > 0]  # what is Python's in another program has no limit
    table = table.assign(lost_ms=table["time_ms"] - table["ceiling_ms"])
    table = table[(table["share_of_ceiling"] < CEILING_SHARE) & table["lost_ms"].gt(0)]
    parts = zip(table["component"], table["phase"], strict=True)
    table = table[[not ledger.is_explained((str(name), str(phase))) for name, phase in parts]]
    if table.empty:
        return None
    worst = table.loc[table["lost_ms"].idxmax()]
    lost = (float(worst["lost_ms"]) - ledger.explained_ms) / evidence.total_ms
    if lost < FAR_SHARE:
        return None
    return {
        "share": float(worst["time_ms"]) / evidence.total_ms,
        "component": str(worst["component"]),
        "name": capitalised(part_label(str(worst["component"]), str(worst["phase"]))),
        "reached": worst["share_of_ceiling"],
        "time": worst["time_ms"],
        "ceiling": worst["ceiling_ms"],
        "limit": str(worst["limit"]),
        "speedup": {
            "low": 1.0,
            "mid": 1.0 / (1.0 - 0.4 * lost),
            "high": 1.0 / max(1.0 - lost, 0.02),
        },
    }


@rule(
    "dominant_part",
    title="{name} takes {share:.0%} of the step",
    evidence=(
        "{what} takes {time:ms} of {total:ms} per iteration, without what builds the model.",
        "Most of it: {heaviest}.",
        "By the Python function that calls these: {callers}.",
        "No rule found why: how short it could be, and what would help, was not measured.",
    ),
    advice="Look first at the functions named here: what they compute, with which types, shapes "
    "and threads, and whether each iteration needs it.",
    limit="",
    gpu=False,
)
def dominant_part(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """One part of another program, or one function in no part, takes much of the CPU's time.

    Of our own programs, probes and ceilings tell more.
    """
    if not _is_sampled(evidence):
        return None  # without parts, another finding names the largest function
    table = _at_work(evidence)
    groups = ["component", "phase", "function"]
    times = table.groupby(groups)["time_ms"].sum()
    if times.empty:
        return None
    row = int(np.argmax(times.to_numpy()))
    component, phase, function = map(str, times.index[row])
    time = float(times.max())
    if time - ledger.anywhere_ms < DOMINANT_SHARE * evidence.total_ms:
        return None
    if ledger.is_explained((component, phase)):
        return None
    name = function if component == "other" else capitalised(part_label(component, phase))
    own = table[table.groupby(groups).ngroup().eq(row).to_numpy()]
    itself = heaviest(own, column="time_ms")
    callers = heaviest(_callers(evidence, own), column="time_ms")
    return {
        "share": time / evidence.total_ms,
        "component": component,
        "concerns": (component,) if component != "other" else (),
        "name": name,
        "what": f"{name} (samples in no named part)" if component == "other" else "It",
        "time": time,
        "heaviest": itself,
        "callers": callers if callers != itself else None,
        "speedup": {},
    }


def _callers(evidence: Evidence, own: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`_at_work` under the name of the innermost Python function at or above
    each; rows without one are left out."""
    contexts = evidence.profile.contexts
    above = nearest(contexts["parent"].to_numpy(), evidence.profile.of_kind("python"))[own.index]
    return own.assign(name=contexts["name"].to_numpy()[above])[above >= 0]


def _at_work(evidence: Evidence, builds: bool = False) -> pd.DataFrame:
    """Sampled functions of the step's threads, without those that build the model or those alone:
    ``name``, ``component``, ``phase``, ``function`` and ``time_ms`` of its own.

    Time in no part has the autograd node above it as its ``function``, or else the Python
    function; without either it is left out. Elsewhere ``function`` is "".
    """
    profile = evidence.profile
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    python = np.asarray(profile.of_kind("python"))
    is_node = np.asarray(profile.which("name", lambda name: node_key(name) is not None))
    building = nearest(parent, python & contexts["name"].eq("__init__").to_numpy()) >= 0
    # where a library has no lines, its functions are named
    called = nearest(parent, contexts["kind"].isin(["function", "python"]).to_numpy())
    unnamed = contexts["name"].str.startswith("[").to_numpy() & (called >= 0)
    table = contexts[["name", "component", "phase"]].assign(
        name=contexts["name"].iloc[np.where(unnamed, called, np.arange(len(contexts)))].to_numpy(),
        time_ms=np.asarray(host_time(profile)) / iteration_count(profile),
        function="",
    )
    above = nearest(parent, is_node | python)
    rows = np.unique(above[above >= 0])
    labels = {
        row: f"The backward of {node_key(name)}" if of_node else name
        for row, name, of_node in zip(rows, contexts["name"].iloc[rows], is_node[rows], strict=True)
    }
    placed = contexts["component"].ne("other").to_numpy()
    table.loc[~placed, "function"] = pd.Series(above[~placed], table.index[~placed]).map(labels)
    table = table[step_contexts(profile, other_threads=False) & (building == builds)]
    table = table[table["time_ms"].gt(0)]
    return table if builds else table.dropna(subset=["function"])


@rule(
    "start_up",
    title="Building the model takes {share:.0%} of the step, most in {most}",
    evidence=(
        "{time:ms} of {total:ms} per iteration lie below an __init__, before any step; without "
        "iterations in the recording it cannot be left out of other shares.",
        "Most of it: {heaviest}.",
        "By the Python function that calls these: {callers}.",
    ),
    advice="It does not slow the steps. Record more steps of one run, so that it is a smaller "
    "share, or shorten what is named here (weights made on the device and in their type, not made "
    "on the host and converted).",
    limit="",
    gpu=False,
)
def start_up(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Building the model takes much of a recording that does not say when its iterations ran."""
    if not _is_sampled(evidence) or len(evidence.profile.iterations):
        return None
    table = _at_work(evidence, builds=True)
    time = float(table["time_ms"].sum())
    if time < DOMINANT_SHARE * evidence.total_ms:
        return None
    itself = heaviest(table, column="time_ms")
    by_caller = _callers(evidence, table)
    callers = heaviest(by_caller, column="time_ms")
    return {
        "share": time / evidence.total_ms,
        "time": time,
        "most": str(by_caller.groupby("name")["time_ms"].sum().idxmax()),
        "heaviest": itself,
        "callers": callers if callers != itself else None,
        "speedup": {},
    }


@rule(
    "largest_functions",
    title="{count} take {share:.0%} of the step: {functions}",
    evidence=(
        "Of the sampled time that no finding above names, these take most: {listed}.",
        "How short they could be was not measured.",
    ),
    advice="Look at what calls them, with which types, shapes and threads, and whether each "
    "iteration needs it.",
    limit="",
    gpu=False,
)
def largest_functions(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Python functions, or nodes of autograd, that take much of a sampled program, each by what it
    and all that it calls in no other such function take."""
    if not _is_sampled(evidence):
        return None
    contexts = evidence.profile.contexts
    table = _at_work(evidence)
    marked = evidence.profile.of_kind("python")
    marked |= evidence.profile.which("name", lambda name: node_key(name) is not None)
    above = nearest(contexts["parent"].to_numpy(), marked)[table.index]
    table = table.assign(name=contexts["name"].to_numpy()[above])[above >= 0]
    parts = zip(table["component"], table["phase"], strict=True)
    table = table[[not ledger.is_explained(part) for part in parts]]
    times = table.groupby(["name", *PART])["time_ms"].sum().sort_values(ascending=False)
    times = times[times >= PIECE_SHARE * evidence.total_ms]
    told = " ".join(text for _, text in ledger.told).lower()
    names = [str(name) for name in times.index.get_level_values("name")]
    times = times[[_short_node(name).lower() not in told for name in names]]
    if times.empty:
        return None
    rows = times.reset_index(name="ms")
    named = {
        f"{_short_node(name)}{f' in {part_label(part, phase)}' if part != 'other' else ''}": ms
        for name, part, phase, ms in rows[["name", *PART, "ms"]].itertuples(index=False)
    }
    return {
        "share": float(times.sum()) / evidence.total_ms,
        "component": str(times.index[0][1]),
        "count": "One function" if len(times) == 1 else f"{len(times)} functions",
        "functions": ", ".join(list(named)[:2]) + (", ..." if len(named) > 2 else ""),
        "listed": ", ".join(f"{name} {milliseconds(time)}" for name, time in named.items()),
        "speedup": {},
    }


def _short_node(name: str) -> str:
    """The name of a function, or of the backward that a node of autograd is."""
    key = node_key(name)
    return f"the backward of {key}" if key else name[:70]


def _is_sampled(evidence: Evidence) -> bool:
    """Whether the recording holds samples of another program, and parts of it."""
    if evidence.is_ours or evidence.meta.get("engine") != "hpctoolkit":
        return False
    return not evidence.attribution["component"].eq("other").all()


def _is_significant(evidence: Evidence, part: Part) -> bool:
    """Whether the part was slow in nearly all iterations, not in a few."""
    if part not in evidence.steps:
        return True
    alone = evidence.parts["alone_ms"][part]
    times = evidence.steps[part].to_numpy()
    return bool(np.mean(times > 1.2 * alone) >= 0.75)


def _meanwhile(evidence: Evidence) -> str | None:
    """What the system counted of the step's thread, as far as it is unusual."""
    told = []
    for name, label in (
        ("run_queue_ms", "waited for a core"),
        ("blocked_ms", "waited for something else"),
        ("gc_ms", "collected garbage"),
    ):
        share = evidence.share_of_wall(name)
        if share >= 0.01:
            told.append(f"{label} in {share:.0%} of the time")
    faults = evidence.counted("minor_faults")
    if faults >= 1000:
        told.append(f"met {faults:,.0f} page faults per iteration")
    return ", ".join(told) or None
