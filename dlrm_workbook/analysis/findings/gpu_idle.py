"""Why the GPU idles: what the host does, or waits for, meanwhile.

Idle time is charged to what the host does meanwhile (:mod:`dlrm_workbook.analysis.idleness`).
Rules with a cause (data, synchronisation, launches) take their part of it first; what is left is
one finding that names what the host did, or says that it was not measured.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import (
    IDLE,
    PART,
    host_is_traced,
    main_thread,
    recorded,
    windows,
)
from dlrm_workbook.analysis.context_tree import extent, running, scopes_of
from dlrm_workbook.analysis.findings.evidence import (
    MOST_LISTED,
    Evidence,
    joined,
    listed_times,
    stretches,
)
from dlrm_workbook.analysis.findings.finding import (
    LEAST_SHARE,
    MOSTLY_FIRST,
    Causes,
    Measured,
    bounded,
    largest,
    largest_part,
    predicted,
    rule,
    share_of_first_calls,
)
from dlrm_workbook.analysis.findings.gpu_copies import PREFETCH
from dlrm_workbook.analysis.findings.gpu_taken import BLOCKING, SYNC, without
from dlrm_workbook.analysis.findings.where import (
    LEAST_OF_STEP,
    OWN_RANGES,
    RECORD_MORE,
    in_place,
    levels,
    main_place,
    part_name,
    shown,
    time_by_name,
)
from dlrm_workbook.analysis.idleness import Stretches
from dlrm_workbook.analysis.launches import launch_cost_us, launched_operations
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.nesting import overlap, stretch_at
from dlrm_workbook.recordings.nsight import MIGRATED
from dlrm_workbook.recordings.profile import Profile, nearest
from dlrm_workbook.recordings.torch.steps import STEP_LABEL

MOST_LAUNCHES = 0.5
"""Share of all launches from which on the operator or part that makes them is named."""

SHORT_KERNEL_US = 10.0
"""A launch costs 3 to 10 µs of host time (NVIDIA, "Getting started with CUDA graphs",
2019): kernels shorter than this cannot hide it. The measured launch cost is used where
there is one."""

SHORT_GAPS = 50.0
"""Times a launch: gaps up to this length are what calling operators in turn costs (30 to 200 µs
from one kernel to the next in eager torch); in longer ones the host does something else."""

SYNC_SHARE = 0.03

RUNS_AHEAD = 0.9
"""Times the GPU's time in a step: a host whose own work takes less could run ahead of the GPU."""


LEAST_KERNELS = 20

BLOCKED = 0.8
"""Least share of launches that end after their kernels: in recordings of GPUs at work none do."""


@rule(
    "blocking_launches",
    title="Each launch waits for its kernel: the GPU is idle {share:.0%} of the step in between",
    evidence=(
        "{blocked:,.0f} of {launches:,.0f} calls per iteration that launch a kernel return only "
        "when it has ended; the host waits {waited:ms} in them, and the GPU idles {idle:ms}.",
    ),
    advice="Launch without waiting: unset CUDA_LAUNCH_BLOCKING, and leave out debuggers and tools "
    "that run kernels one at a time.",
    limit="synchronisation",
    timeline=True,
    concerns=(IDLE,),
)
def blocking_launches(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Launches return when their kernels have ended, so that the host never runs ahead.

    Without it the step would be shorter by the time that the host waits in the calls, but not
    by more than the GPU is idle.
    """
    if evidence.meta.get("serialised"):
        return None
    work = evidence.work
    kernels = work[work["kind"].eq("kernel") & work["launch_start_ns"].ge(0)]
    calls = evidence.spans(evidence.profile.of_kind("runtime"))
    ends = calls.groupby("start_ns")["end_ns"].max()
    returned = ends.reindex(kernels["launch_start_ns"]).to_numpy()
    blocked = returned >= kernels["end_ns"].to_numpy()  # NaN: no
    # a kernel that is shorter than a launch may end before any call returns
    blocked &= returned - kernels["launch_start_ns"].to_numpy() >= 1e3 * SHORT_KERNEL_US
    if len(kernels) < LEAST_KERNELS or blocked.mean() < BLOCKED:
        return None
    count = 1e6 * evidence.iterations
    waited = float((returned - kernels["start_ns"].to_numpy())[blocked].sum()) / count
    idle = max(evidence.idle_ms - ledger.idle_ms - _data_ms(evidence, ledger), 0.0)
    lost = min(waited, idle)
    return {
        "share": lost / evidence.total_ms,
        "least": SYNC_SHARE,
        "idle_ms": lost,
        "component": largest(kernels[blocked].groupby(PART).size())[0],
        "blocked": 1e6 * blocked.sum() / count,
        "launches": 1e6 * len(kernels) / count,
        "waited": waited,
        "idle": idle,
    }


@rule(
    "synchronisation",
    title="The host waits for the GPU {often} in each step{most}",
    evidence=(
        "The host calls {names} {count:,.4g} times per iteration{place}; it waits {waited:ms} "
        "there, and the GPU idles {idle:ms} {during}.",
        "The host waits below {operators}.",
        "{after}",
        "Its own work takes less time than the GPU's, so that it could run ahead but for the "
        "waits: without them up to {bound:ms} of idle time could be hidden.",
        "{doubt}",
    ),
    advice="Do not read values back in the loop (.item(), .cpu(), nonzero, a boolean mask, print "
    "of a tensor): keep losses on the GPU and read them now and then (training.log_every), and use "
    "torch.where or sizes that are known in place of masks.",
    limit="synchronisation",
    timeline=True,
    concerns=(IDLE,),
)
def synchronising(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The host waits for the GPU within the step, and the GPU then for the host.

    Without the call the host would go on sooner by what it waits in it, and the GPU would be at
    work for as much of the idle stretch that follows: the shorter of the two is lost.
    """
    calls = _synchronising_calls(evidence)
    if calls.empty:
        return None
    idle = _idle_around(evidence, calls, ledger)
    around = _operators_around(evidence, calls)
    calls = _with_idle_inside(evidence, calls, around, ledger)
    lost, waits = float(calls["lost_ms"].sum()), calls["gap"].nunique()
    idle = max(idle, lost)
    count = evidence.iterations
    waited, share = float(calls["waited_ms"].sum()), lost / evidence.total_ms
    bound, speedup = None, None
    # it explains no idle time before it, nor after the GPU's last work, nor in other long calls
    between = calls["start_ns"].min(), evidence.work["end_ns"].max()
    idle_after = evidence.idle[evidence.idle["start_ns"].between(*between)]
    later = float(idle_after.loc[~_in_long_calls(evidence, idle_after), "idle_ms"].sum())
    ahead = evidence.total_ms - waited < RUNS_AHEAD * evidence.device_ms
    if ahead and later > lost and len(calls) > 1:
        bound = min(later, waited)
        share = max(share, bound / evidence.total_ms)
        speedup = bounded(share)
    if share < SYNC_SHARE or waits < 0.5 * count:
        return None
    read = evidence.work[evidence.work["launch_start_ns"].isin(calls["start_ns"])]
    bulk = float((read["end_ns"] - read["start_ns"]).sum()) / 1e6 / count
    part = largest_part(calls, "lost_ms")
    ledger.explain(lost, part)
    ledger.idle_causes.add("synchronisation")
    ledger.waits = stretches(around)
    if bulk > BULKY * waited:
        ledger.copying_ms = lost
        return None
    by_level = time_by_name(evidence.profile, calls["context"], calls["waited_ms"])
    inner, line = (by_level[level][lambda ms: ms > 0.5 * waited] for level in ("inner", "python"))
    most = f", {milliseconds(inner.iloc[0])} in {shown(str(inner.index[0]))}" if len(inner) else ""
    if len(line) and (at := shown(str(line.index[0]))).startswith("`"):
        most += f" at {at}" if most else f", most at {at}"
    after, place = _worked_after(evidence, calls, ledger)
    if is_work := after > 0.5 * idle:
        most += f", then works {milliseconds(after)}{place and f' in {place}'} before it launches"
    return {
        "most": most,
        "after": "That work would run beside the GPU's if the next launches did not come after it: "
        "shorten it, or do it for the step before."
        if is_work
        else None,
        "operators": listed_times(by_level["outer"][:MOST_LISTED]) or None,
        "share": share,
        "least": SYNC_SHARE,
        "idle_ms": lost,
        "bound": bound,
        "speedup": speedup,
        "component": part[0],
        "names": ", ".join(sorted(calls["name"].unique())),
        "count": waits / count,
        "often": "once" if waits < 1.5 * count else f"{waits / count:,.0f} times",
        "place": _mostly_in(calls, "lost_ms"),
        "waited": waited,
        "idle": idle,
        "during": f"during and after it{', and in the operators around it' * bool(len(around))}",
        "it": "the idle time",
        "pieces": (calls["context"], calls["lost_ms"]),
    }


BULKY = 0.25
"""Share of waits from which on the copies to the host are so long themselves that they are no
values which are read: the waits are theirs."""

LONG_CALL_US = 1000.0
"""A call of the driver that waits for nothing and takes so long does work of its own: it takes or
gives back memory, or loads what is used for the first time."""


def _in_long_calls(evidence: Evidence, idle: pd.DataFrame) -> np.ndarray:
    """Rows (n,) of ``evidence.idle`` in a call of the driver that would take as long without any
    wait."""
    contexts, context = evidence.profile.contexts, idle["context"].to_numpy()
    waits = evidence.named(SYNC) | evidence.named(BLOCKING)
    at_work = contexts["kind"].eq("runtime").to_numpy() & ~waits
    length = idle["end_ns"].to_numpy() - idle["start_ns"].to_numpy()
    long = (length >= 1e3 * LONG_CALL_US) & at_work[context] & (context >= 0)
    return long | idle["cause"].eq("allocation").to_numpy()


READ_BACK = re.compile("DtoH|DeviceToHost")
"""Copies to the host, for which it waits if their target is pageable memory."""


def _synchronising_calls(evidence: Evidence) -> pd.DataFrame:
    """Calls in the step that wait for the GPU, copies to the host that return when they have ended
    among them: ``start_ns``, ``end_ns``, ``name``, ``component``, ``phase``, ``waited_ms`` (of a
    mean iteration)."""
    profile = evidence.profile
    parent = profile.contexts["parent"].to_numpy()
    work = evidence.work
    read = work[evidence.named(READ_BACK)[work["context"]] & work["launch_start_ns"].ge(0)]
    copying = np.isin(np.arange(len(parent)), parent[read["context"]])
    copies = evidence.spans(copying & profile.of_kind("runtime"))
    ended = read.groupby("launch_start_ns")["end_ns"].max().reindex(copies["start_ns"]).to_numpy()
    waits = copies["end_ns"].to_numpy() >= ended  # NaN: no
    calls = pd.concat([evidence.calls(SYNC), copies[waits]]).sort_values("start_ns")
    if profile.iterations.empty:  # what waits for the end holds nothing up
        launched = work["launch_start_ns"].where(work["launch_start_ns"].ge(0), work["start_ns"])
        calls = calls[calls["start_ns"].lt(launched.max())]
    calls = calls.reset_index(drop=True)
    if calls.empty:
        return calls
    names = profile.contexts[["name", *PART]].iloc[calls["context"]].reset_index(drop=True)
    calls = calls[["start_ns", "end_ns", "context"]].join(names)
    length = calls["end_ns"] - calls["start_ns"]
    return calls.assign(waited_ms=length / 1e6 / len(evidence.windows[0]))


def _mostly_in(rows: pd.DataFrame, column: str) -> str:
    """``, most in PART``; of a part with less than half of a column, ``the largest part``."""
    by_part = rows.groupby(PART)[column].sum()
    part = largest(by_part)
    word = "most" if by_part[part] > 0.5 * by_part.sum() else "the largest part"
    return f", {word} in {part_name(*part)}" if part[0] != "other" else ""


def _idle_around(evidence: Evidence, calls: pd.DataFrame, ledger: Causes) -> float:
    """Idle time from synchronising calls to the next work, ms of a mean iteration; what of it each
    call costs becomes ``lost_ms``, and ``gap`` is the same of calls between which no work begins.
    """
    busy = _busy_or_taken(evidence, ledger)
    first, last = evidence.windows
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    place = np.searchsorted(busy[0], end)  # the work after each call
    window_end = last[np.searchsorted(first, start, side="right") - 1]
    until = np.minimum(np.append(busy[0], window_end.max())[place], window_end)
    before = np.append(busy[1], start.min())[place - 1]
    since = np.maximum(before, start)
    running = stretch_at(*busy, end) >= 0
    idle = np.where(running, 0, np.maximum(until - since, 0))
    table = pd.DataFrame({"place": place, "idle": idle, "waited": end - start})
    groups = table.groupby("place")
    # calls in one gap share it
    gap, waited = groups["idle"].transform("max"), groups["waited"].transform("sum")
    lost = np.minimum(gap, waited) * table["waited"] / waited.where(waited > 0, 1)
    count = 1e6 * len(first)
    calls["lost_ms"] = np.maximum(lost.to_numpy() / count, _late_after(evidence, calls, ledger))
    calls["gap"] = place
    return float(groups["idle"].max().sum()) / count


def _worked_after(evidence: Evidence, calls: pd.DataFrame, ledger: Causes) -> tuple[float, str]:
    """Idle time of a mean step (ms) in which the host is at work of its own between a wait and its
    next launch, and where it is for most of that; "" for no one place."""
    idle, ends = evidence.idle, np.sort(calls["end_ns"])
    start, launches = idle["start_ns"].to_numpy(), _busy_or_taken(evidence, ledger)[0]
    last = np.searchsorted(ends, start, side="right") - 1
    follows = (last >= 0) & (
        np.searchsorted(launches, ends[last]) == np.searchsorted(launches, start)
    )
    working = idle[follows & idle["cause"].isin(["python", "operators", "data"])]
    place, _ = main_place(evidence.profile, working["context"], working["idle_ms"])
    return float(working["idle_ms"].sum()), place


def _late_after(evidence: Evidence, calls: pd.DataFrame, ledger: Causes) -> np.ndarray:
    """Idle time (n,) that each wait costs, ms of a mean step: later gaps in which the host does no
    more than launch, up to the time by which its waits so far have made it late."""
    late = _launching(evidence, ledger)
    after = np.searchsorted(calls["start_ns"], late["start_ns"], side="right")
    since = np.bincount(after, late["idle_ms"], len(calls) + 1)[1:]
    left, behind = calls["waited_ms"].to_numpy(copy=True), list[int]()
    for call, idle_ms in enumerate(since):
        behind.append(call)
        while behind and idle_ms > 0:
            idle_ms -= left[behind[-1]]
            left[behind[-1]] = max(-idle_ms, 0.0)
            if idle_ms >= 0:
                behind.pop()
    return calls["waited_ms"].to_numpy() - left


def _busy_or_taken(evidence: Evidence, ledger: Causes) -> Stretches:
    """Stretches in which the GPU works, or does nothing for no fault of this program."""
    return joined(stretches(evidence.work), ledger.taken)


OF_OPERATOR = 0.15
"""An operator counts as a wait for the GPU where this share of it, or more, is the wait."""

MOST_BESIDE = 2.0
"""Calls of an operator that do not wait, to each that does, up to which the operator counts as one
that waits for the GPU."""


def _operators_around(evidence: Evidence, calls: pd.DataFrame) -> pd.DataFrame:
    """The operators that a wait is a large part of, outermost of those that are little else.

    Returns:
        ``start_ns``, ``end_ns`` and ``call`` (row of ``calls`` in it), one row per call that
        lies in such an operator; ``aten::item`` around ``cudaStreamSynchronize``. Where many of
        an operator's calls wait, its other calls have rows too, with the wait before them.
    """
    profile = evidence.profile
    parent = profile.contexts["parent"].to_numpy()
    is_operator = profile.contexts["kind"].eq("operator").to_numpy()
    trace = profile.trace
    length = (trace["end_ns"] - trace["start_ns"]).to_numpy()
    total = np.bincount(trace["context"], length, len(parent))
    inner = nearest(parent, is_operator)
    waits = np.bincount(calls["context"], calls["end_ns"] - calls["start_ns"], len(parent))
    rows = []
    for context in np.unique(calls["context"]):
        operator = inner[context]
        if operator < 0:
            continue
        above = parent[operator]
        while above >= 0 and is_operator[above] and waits[context] >= OF_OPERATOR * total[above]:
            operator, above = above, parent[above]
        spans = trace[trace["context"].eq(operator)].sort_values("start_ns")
        own = calls.index[calls["context"].eq(context)]
        at = np.searchsorted(spans["start_ns"], calls.loc[own, "start_ns"], side="right") - 1
        start, end = spans[["start_ns", "end_ns"]].to_numpy()[np.maximum(at, 0)].T
        waited = (calls.loc[own, "end_ns"] - calls.loc[own, "start_ns"]).to_numpy()
        inside = (at >= 0) & (calls.loc[own, "end_ns"].to_numpy() <= end)
        inside &= waited >= OF_OPERATOR * (end - start)
        rows.append(pd.DataFrame({"start_ns": start, "end_ns": end, "call": own})[inside])
        others = spans.drop(spans.index[np.unique(at[inside])])
        others = others[evidence.inside(others["start_ns"].to_numpy())]
        if inside.any() and len(others) <= MOST_BESIDE * inside.sum():
            before = np.searchsorted(calls.loc[own, "start_ns"], others["start_ns"]) - 1
            rows.append(others[["start_ns", "end_ns"]].assign(call=own[np.maximum(before, 0)]))
    nothing = pd.DataFrame({"start_ns": [], "end_ns": [], "call": []}, dtype=np.int64)
    return pd.concat([nothing, *rows], ignore_index=True)


def _with_idle_inside(
    evidence: Evidence, calls: pd.DataFrame, around: pd.DataFrame, ledger: Causes
) -> pd.DataFrame:
    """``calls`` that lose no less than the GPU's idle time in the operators around, in one gap by
    how long each waits; all together no more than the idle time of which no cause is known yet."""
    busy = _busy_or_taken(evidence, ledger)
    around = around.drop_duplicates(["start_ns", "end_ns"])
    start, end = around["start_ns"].to_numpy(), around["end_ns"].to_numpy()
    idle = (end - start - overlap(start, end, *busy)) / 1e6 / evidence.iterations
    inside = pd.Series(idle).groupby(calls["gap"][around["call"]].to_numpy()).sum()
    gaps = calls.groupby("gap")[["lost_ms", "waited_ms"]].sum()
    lost = np.fmax(gaps["lost_ms"], inside.reindex(gaps.index))
    left = max(evidence.idle_ms - ledger.idle_ms, 0.0)
    lost *= min(1.0, left / max(lost.sum(), 1e-9)) / gaps["waited_ms"].clip(lower=1e-9)
    return calls.assign(lost_ms=lost[calls["gap"]].to_numpy() * calls["waited_ms"])


ALLOCATING = re.compile(r"^(?:cuda|cu|hip)(?:Malloc|Free|Mem(?:Alloc|Free)|Host(?:Alloc|Free))")
"""Calls that take memory from the driver or give it back."""


@rule(
    "allocation",
    title="The GPU is idle {share:.0%} of the step while the host takes or gives back memory",
    evidence=(
        "{names}: {count:,.1f} calls per iteration; the GPU idles {idle_ms:ms} in them{place}.",
        "{doubt}",
    ),
    advice="Keep memory and use it again: torch's caching allocator calls the driver only when it "
    "has none left, when blocks are too split (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) "
    "or after torch.cuda.empty_cache(); a smaller batch or buffers taken once leave it room.",
    limit="memory capacity",
    timeline=True,
    concerns=(IDLE,),
)
def allocation(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The GPU idles while the host is in calls that allocate or free its memory, again and again:
    the first such call makes a context."""
    idle = without(evidence.idle, ledger.taken)
    idle = idle[idle["cause"].eq("allocation")]
    left = evidence.idle_ms - ledger.idle_ms
    time = min(float(idle["idle_ms"].sum()), max(left, 0.0))
    first, *_ = share_of_first_calls(evidence, idle["context"].to_numpy())
    if time < LEAST_SHARE * evidence.total_ms or first > MOSTLY_FIRST:
        return None
    calls, steps = evidence.calls(ALLOCATING), evidence.iterations
    names = evidence.profile.contexts["name"].iloc[calls["context"]].to_numpy()
    ledger.idle_causes.add("allocation")
    return {
        "share": time / evidence.total_ms,
        "explains": largest_part(idle, "idle_ms"),
        "idle_ms": time,
        "names": ", ".join(sorted(set(names))) or "Calls of the driver",
        "count": len(calls) / steps,
        "place": _mostly_in(idle, "idle_ms"),
        "pieces": (idle["context"], idle["idle_ms"]),
    }


LAUNCH_SHARE = 0.2
"""Least share of the step in which the GPU waits for launches; below, they keep ahead of it."""

ONE_LAUNCHER_SHARE = 0.1
"""The same where most launches are those of one operator or part, of kernels shorter than a
launch: their count alone then says what to change."""

WAITS_FOR_LAUNCHES = "The GPU waits {share:.0%} of the time for launches{launched_by}"


@rule(
    "launch_bound",
    title="The GPU is idle {idle:.0%} of the time, most of it waiting for launches{launched_by}",
    evidence=(
        "There are {launches:,.0f} {what} per iteration of {usual_us:.1f} µs (median){left_out}, "
        "and a launch takes {launch}; in {waiting:.0%} of the time the GPU waits in gaps below "
        "{gap_us:.0f} µs while the host runs operators and launches them.",
        "{launches_by:,.0f} of them are launched by {by}.",
        "In other gaps, {rest:ms} in all, the host is longest in {host}.",
        "{doubt}",
    ),
    advice="Fewer and longer kernels: capture the step in a CUDA graph (training.cuda_graphs), "
    "compile it, a larger batch{fused}.",
    limit="launches",
    timeline=True,
    concerns=(IDLE,),
)
def launch_bound(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The GPU idles while the host prepares launches."""
    launch_us = _launch_us(evidence)
    idle = _launching(evidence, ledger)
    left = max(0.0, evidence.idle_ms - ledger.idle_ms - _data_ms(evidence, ledger))
    work = evidence.work[~evidence.is_exchange]
    work = work[
        ~evidence.named(re.compile(MIGRATED))[work["context"]]
    ]  # pages, which none launches
    # as many gaps as launches, each as long as one that counts as such
    possible = len(work) / evidence.iterations * SHORT_GAPS * launch_us / 1e3
    lost = min(float(idle["idle_ms"].sum()), left, possible)
    if not work["kind"].eq("kernel").any() or lost < ONE_LAUNCHER_SHARE * evidence.total_ms:
        return None
    launches = len(work)
    own, of_launches, most = _main_launcher(evidence, work)
    part = largest(own.groupby(PART).size())
    # the median: a few long kernels elsewhere in the step do not hide what short ones cost
    usual_us = float((work["end_ns"] - work["start_ns"]).median()) / 1e3
    if lost < LAUNCH_SHARE * evidence.total_ms or usual_us > 5 * launch_us:
        # few operators may be bound by launches in a step that otherwise is not
        own_us = float((own["end_ns"] - own["start_ns"]).median()) / 1e3
        if of_launches < MOST_LAUNCHES or own_us > launch_us:
            return None
    ledger.idle_causes.add("launches")
    cost = launch_cost_us(evidence.profile)
    graphs: dict[str, Any] = {"training.cuda_graphs": True}
    if evidence.parameter("training.embedding_backend", "torch") != "fused":
        # with any other the host waits for the GPU in every update: nothing to capture
        graphs["training.embedding_backend"] = "fused"
    steps = evidence.iterations
    rest = _unexplained(evidence, ledger)
    rest_ms = left - ledger.late_ms - lost
    waiting, most_of_it = lost, lost > 0.5 * evidence.idle_ms
    outer = time_by_name(evidence.profile, idle["context"], idle["idle_ms"])["outer"]
    place, _ = main_place(evidence.profile, rest["context"], rest["idle_ms"])
    same = place in map(shown, outer.index[:1])
    if most_of_it and same and rest_ms >= LEAST_SHARE * evidence.total_ms:
        # one cause: an operator in which the host is slow
        lost, idle = lost + rest_ms, pd.concat([idle, rest])
    # what has no part and is no single operator tells nothing
    by_one = of_launches >= MOST_LAUNCHES and bool(most)
    by_one &= part[0] != "other" or "," not in most
    place = f" in {part_name(*part)}" if part[0] != "other" else ""
    small = "copies " if own["kind"].eq("copy").mean() > MOST_LAUNCHES else ""
    if not by_one:
        part = largest_part(idle, "idle_ms")
    named = {"embedding": "embeddings", "optimizer": "optimiser"}
    fused = [name for key, name in named.items() if evidence.time(key) > 0]
    return {
        "share": lost / evidence.total_ms,
        "idle_ms": lost,
        "waiting": waiting / evidence.total_ms,
        "rest": lost - waiting if lost > waiting else None,
        "host": listed_times(_by_name(evidence, rest)),
        "fused": f", fused {' and '.join(fused)}" if fused else "",
        "component": part[0],
        "launched_by": f", {of_launches:.0%} of them {small}by {most}{place}" if by_one else "",
        "by": f"{most}{place}" if by_one else None,
        "launches_by": len(own) / steps,
        "idle": evidence.idle_ms / evidence.total_ms,
        "launches": launches / steps,
        "what": "kernels and copies" if work["kind"].eq("copy").any() else "kernels",
        "usual_us": usual_us,
        "launch": f"{cost:.1f} µs of the host here" if cost == cost else "3 to 10 µs of a host",
        "left_out": " (collectives left out)" if evidence.is_exchange.any() else "",
        "gap_us": SHORT_GAPS * launch_us,
        "pieces": (idle["context"], idle["idle_ms"]),
        "change": {} if evidence.parameter("training.cuda_graphs", False) else graphs,
        "speedup": predicted(evidence, graphs) or bounded(lost / evidence.total_ms),
        **({} if most_of_it else {"title": WAITS_FOR_LAUNCHES}),
    }


def _migrations(evidence: Evidence) -> np.ndarray:
    """Which rows of ``evidence.work`` move pages of unified memory."""
    return evidence.named(re.compile(MIGRATED))[evidence.work["context"].to_numpy()]


def _pages_outside_kernels(evidence: Evidence) -> int:
    """How many moves of pages begin while no kernel runs, which is who waits for the others."""
    work, moves = evidence.work, _migrations(evidence)
    is_kernel = evidence.profile.of_kind("kernel")[work["context"].to_numpy()] & ~moves
    kernels, moment = work[is_kernel].sort_values("start_ns"), work.loc[moves, "start_ns"]
    until = np.maximum.accumulate(kernels["end_ns"].to_numpy())
    before = np.searchsorted(kernels["start_ns"], moment, "right")
    return int((np.append(0, until)[before] <= moment).sum())


def _main_launcher(evidence: Evidence, kernels: pd.DataFrame) -> tuple[pd.DataFrame, float, str]:
    """Who launches most: one part's operator, or all of one part where it calls several.

    Returns:
        The rows of ``kernels`` that it launches, their share of all launches, its name: the range
        that the program marks around most of a part's launches by several operators, or else
        these operators; "" where no operator launches them.
    """
    own = max((rows for _, rows in kernels.groupby(PART, sort=False)), key=len)
    launches = time_by_name(evidence.profile, own["context"], np.ones(len(own)))
    operators, ranges = launches["outer"], launches["range"]
    name = ", ".join(map(str, operators.index[:3]))
    if len(operators) and operators.iloc[0] >= MOST_LAUNCHES * len(own):
        name = str(operators.index[0])
        own = own[in_place(evidence.profile, "outer", name)[own["context"]]]
    elif len(ranges) and ranges.iloc[0] >= MOST_LAUNCHES * len(own):
        name = f"the range '{str(ranges.index[0])[:70]}'"
    return own, len(own) / len(kernels), name


PYTHON_GAP = 10.0
"""Times a launch: longer gaps that are mostly one function of Python are no cost of launching."""

FAR_LONGER = 3.0
"""Times the median gap: in such a gap the host does something that it does not do in others."""

ONE_THING = 1 / 3
"""Least share of a gap in one operator or function for it to be no cost of launching."""

LAUNCHING = ("operators", "launching", "python", "start-up", "copies")
"""Causes of idleness that make up the cost of launching."""


def _launch_us(evidence: Evidence) -> float:
    """What a launch costs the host, measured where it could be."""
    return float(evidence.ceiling("launch_us") or SHORT_KERNEL_US)


def _launching(evidence: Evidence, ledger: Causes) -> pd.DataFrame:
    """Rows of ``evidence.idle`` in gaps so short that they are the cost of launching.

    Left out are operators that wait for the GPU, and gaps beyond the length of a few launches
    that the host spends for the most part in the body of one Python function, or, where the
    gap is far longer than the usual one, in any one operator or between two of them.
    """
    launch_us = _launch_us(evidence)
    idle = without(evidence.idle, ledger.taken)
    frames = evidence.profile.of_kind("python")[idle["context"]] & idle["context"].ge(0)
    own = (idle["end_ns"] - idle["start_ns"]).where(idle["cause"].isin(["python", "operators"]), 0)
    # pieces of one gap follow each other and share its length
    gap = idle["gap_ns"].ne(idle["gap_ns"].shift()).cumsum()
    usual = float(idle["gap_ns"].groupby(gap).first().median()) if len(idle) else 0.0
    stands_out = idle["gap_ns"].gt(FAR_LONGER * usual) | (frames & idle["cause"].eq("python"))
    by_one = own.where(stands_out, 0).groupby([gap, _doing(evidence, idle)]).transform("sum")
    longest = by_one.groupby(gap).transform("max")
    in_one = longest.gt(ONE_THING * idle["gap_ns"]) & idle["gap_ns"].gt(
        1e3 * PYTHON_GAP * launch_us
    )
    short = idle["gap_ns"].lt(1e3 * SHORT_GAPS * launch_us) & ~in_one & ~_long_calls(evidence, idle)
    return without(idle[short & idle["cause"].isin(LAUNCHING)], ledger.waits)


LONG_STAYS, LEAST_STAY_US = 5.0, 50.0
"""Times the usual stay of the host in one context, and at least so long, from which on a call or an
operator is no cost of launching: dispatching an operator takes 2 to 20 µs."""


def _long_calls(evidence: Evidence, idle: pd.DataFrame) -> pd.Series:
    """Rows of ``evidence.idle`` in what is no cost of launching, though gaps are short: a call that
    launches nothing, or the own body of an operator or a function in which the host stays far
    longer at a time than in others, with a listed share of the step."""
    contexts = evidence.profile.contexts
    context = idle["context"].to_numpy()
    has_context = context >= 0
    launches = np.zeros(len(contexts), dtype=bool)
    work = contexts["kind"].isin(["kernel", "copy"]) & contexts["parent"].ge(0)
    launches[contexts.loc[work, "parent"]] = True
    rows = idle.assign(
        name=evidence.profile.numbered("name")[0][np.maximum(context, 0)],
        stay=idle["context"].ne(idle["context"].shift()).cumsum().to_numpy(),
        length=idle["end_ns"] - idle["start_ns"],
    )[has_context & ~launches[np.maximum(context, 0)]]
    stays = rows.groupby(["name", "stay"])["length"].sum().groupby("name").agg(["median", "sum"])
    total = 1e6 * evidence.total_ms * evidence.iterations
    usual = float(rows.groupby("stay")["length"].sum().median()) if len(rows) else 0.0
    called = set(rows.loc[contexts["kind"].eq("runtime").to_numpy()[rows["context"]], "name"])
    long = stays["median"].gt(max(LONG_STAYS * usual, 1e3 * LEAST_STAY_US))
    long = stays[stays["sum"].gt(LEAST_OF_STEP * total) & (long | stays.index.isin(called))]
    return rows["name"].isin(long.index).reindex(idle.index, fill_value=False)


def _doing(evidence: Evidence, idle: pd.DataFrame) -> np.ndarray:
    """Row (n,) of the outermost operator that the host is in, or of what else it is in."""
    outer = levels(evidence.profile)["outer"]
    return np.where(outer >= 0, outer, np.arange(len(outer)))[idle["context"].to_numpy()]


def _data_ms(evidence: Evidence, ledger: Causes) -> float:
    """Idle time of a mean step that the rule for making batches has explained."""
    if not ledger.is_explained(("data", "forward")):
        return 0.0
    rows = evidence.attribution
    chosen = rows["component"].eq("data") & rows["where"].eq("host")
    return float(rows.loc[chosen, "time_ms"].sum()) - evidence.feeding_ms


@rule(
    "gpu_idle",
    title="The GPU is idle {idle} of the time{before}{meanwhile}",
    evidence=(
        "It does nothing in {idle_ms:ms} of {total_ms:ms} per iteration.",
        "{others}",
        "{gap}",
        "In {queued:ms} of it launched work waited: for other streams, or for work not recorded.",
        "{unknown}",
        "The host meanwhile: {host}.",
        "{beside}",
        "In {blocked:ms} of it the host was itself in a call that waits for the GPU.",
        "Meanwhile {pages:count} pieces of unified memory move: the host touches what lies on the "
        "GPU, or the GPU what lies on the host.",
        "{doubt}",
    ),
    advice="{remedy}",
    limit="dispatch",
    timeline=True,
    concerns=(IDLE,),
)
def gpu_idle(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The GPU does nothing, and no rule has said why."""
    explained = ledger.idle_ms + ledger.late_ms + _data_ms(evidence, ledger)
    left = evidence.idle_ms - explained
    share, idle = left / evidence.total_ms, evidence.idle_ms / evidence.total_ms
    if share < LEAST_SHARE:
        return None
    # all but 0.1% of it is not all of it
    part = "over 99.9%" if idle > 0.9995 else format(idle, ".1%" if idle > 0.99 else ".0%")
    figures: Measured = {
        "share": share,
        "explains": ("other", ""),
        "idle": f"for up to {part}" if evidence.has_graphs else part,
        "before": "",
        "meanwhile": "",
        "gap": _longest_gap(evidence),
        **dict.fromkeys(("others", "queued", "host", "beside", "blocked", "pages", "unknown")),
        "remedy": "Measure what the host does as well; then shorten it, overlap it with the GPU's "
        "work (a loader that runs ahead), or move it to the GPU.",
        # how much of it can go nothing tells: all of it at most
        "speedup": bounded(share) | {"mid": 1.0 / (1.0 - 0.5 * share)},
    }
    partly = explained > 0.02 * evidence.total_ms
    if partly:
        figures |= {
            "id": "gpu_idle_otherwise",
            "title": "The GPU is idle {idle} of the step{meanwhile}",
            "meanwhile": f", {share:.0%} for no single reason",
            "others": f"{milliseconds(left)} of it have no finding of their own.",
        }
    unexplained = _unexplained(evidence, ledger)
    if not host_is_traced(evidence.profile):
        how = "hpcrun -e CPUTIME -e gpu=nvidia -t measures it"
        figures["unknown"] = f"What the host did meanwhile was not measured ({how})."
    elif len(unexplained):
        figures |= _host_meanwhile(evidence, unexplained, partly)
    pieces = evidence.idle
    outside = {
        ("before it begins", START): pieces["end_ns"].le(evidence.work["start_ns"].min()),
        ("after its last work", END): pieces["start_ns"].ge(evidence.work["end_ns"].max()),
    }
    for (when, remedy), rows in outside.items():
        there = float(pieces.loc[rows, "idle_ms"].sum()) / evidence.idle_ms
        if evidence.profile.iterations.empty and there > 0.5:
            figures |= {"before": f", {there:.0%} of that {when}", "remedy": remedy}
    return figures


START = (
    "That is the start of the program: shorten what it loads, compiles and makes ready there, or "
    "record what comes after it."
)
END = (
    "That is the end of the program: shorten what it writes, unloads and gives back there, or end "
    "the recording before it."
)


def _unexplained(evidence: Evidence, ledger: Causes) -> pd.DataFrame:
    """Rows of ``evidence.idle`` whose cause no other finding names."""
    idle = without(without(evidence.idle, ledger.taken), ledger.waits)
    idle = idle[~idle["cause"].isin({"synchronisation", "allocation"} & ledger.idle_causes)]
    if "launches" in ledger.idle_causes:
        idle = idle.drop(_launching(evidence, ledger).index, errors="ignore")
    if _data_ms(evidence, ledger):
        making = idle["component"].eq("data")
        if evidence.feeding_ms:
            making &= idle["cause"].eq("data")
        idle = idle[~making]
    return idle


def _longest_gap(evidence: Evidence) -> str | None:
    """Where the longest gap of a usual step lies, if it is most of the idle time: between which
    parts, since what the host does there stands between them."""
    work = launched_operations(evidence.profile)
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    first = evidence.windows[0]
    begun = np.maximum.accumulate(end)[:-1]
    length = start[1:] - begun
    step = np.where(evidence.inside(begun), np.searchsorted(first, begun, side="right") - 1, -1)
    gaps = pd.DataFrame({"step": step, "length": length}).query("step >= 0")
    if gaps.empty:
        return None
    longest = gaps.loc[gaps.groupby("step")["length"].idxmax()]
    usual = float(longest["length"].median()) / 1e6
    if usual < 0.5 * evidence.idle_ms or len(longest) < 0.8 * evidence.iterations:
        return None  # iterations without work have none
    label = [part_name(*part) for part in zip(work["component"], work["phase"], strict=True)]
    row = longest.index.to_numpy()
    between = Counter((label[i], label[i + 1]) for i in row)
    (before, after), often = between.most_common(1)[0]
    where = f", between {before} and {after}" if often > 0.8 * len(row) else ""
    if where and before.startswith("optimizer") and after.startswith(("transfer", "data")):
        where += ": where a training loop fetches its next batch"
    return f"{milliseconds(usual)} of that are one gap in each iteration{where}."


def _by_name(evidence: Evidence, idle: pd.DataFrame) -> pd.Series:
    """Idle time by what the host is in, ms, most first."""
    return idle.groupby(_host_names(evidence, idle))["idle_ms"].sum().nlargest(MOST_LISTED)


def _host_meanwhile(evidence: Evidence, idle: pd.DataFrame, partly: bool) -> Measured:
    """What the host was in while the GPU did nothing: the parts or else the functions; ``partly``
    where the rest of the idle time has findings of its own."""
    by_part = idle.groupby(PART)["idle_ms"].sum().sort_values(ascending=False)
    named = by_part.drop("other", level="component", errors="ignore")
    total = float(idle["idle_ms"].sum())
    by_name = _by_name(evidence, idle)
    functions = listed_times(by_name)
    if by_name.iloc[0] < 0.5 * total:  # many operators: what calls them
        main, held = main_place(evidence.profile, idle["context"], idle["idle_ms"])
        by_name = pd.Series({main: held}) if main else by_name
    function = str(by_name.index[0])
    own = idle[_host_names(evidence, idle) == function]
    outer = time_by_name(evidence.profile, own["context"], own["idle_ms"])["outer"]
    if RUNTIME_CALL.match(function) and len(outer) and outer.iloc[0] > 0.5 * total:
        by_name = pd.Series({f"{function} of {shown(str(outer.index[0]))}": outer.iloc[0]})
    queued = float(idle.loc[idle["cause"].eq("dependency"), "idle_ms"].sum())
    blocked = evidence.named(BLOCKING)[idle["context"]] & idle["context"].ge(0).to_numpy()
    blocked_ms = float(idle.loc[blocked, "idle_ms"].sum())
    figures: Measured = {
        "host": functions,
        "in_place": by_name.index[0] != nowhere(evidence.profile),
        "pieces": (idle["context"], idle["idle_ms"]),
        "blocked": blocked_ms if blocked_ms > 0.1 * total else None,
        "queued": queued if queued > 0.1 * total else None,
        "remedy": "Shorten what the host does there, overlap it with the GPU's work (a loader "
        "that runs ahead, launches without waiting), or move it to the GPU.",
    }
    if figures["host"].startswith(NOT_RECORDED):
        pages = _pages_outside_kernels(evidence)
        if pages > MANY_PAGES and not evidence.named(re.compile("MemPrefetchAsync")).any():
            figures |= {"pages": pages, "remedy": PREFETCH}
        elif evidence.meta.get("engine") == "torch":
            figures["remedy"] = RECORD_MORE
    if named.sum() > 0.5 * total:
        places = ", ".join(
            f"{part_name(str(part[0]), str(part[1]))} {milliseconds(ms)}"
            for part, ms in zip(named.index[:3], named, strict=False)
        )
        figures |= {"host": places, "explains": named.index[0]}
    of_step = total / evidence.total_ms if partly else None
    if place := _in_title(by_name / total, named / total, of_step):
        figures["meanwhile"] = place
    if queued > 0.5 * total and not evidence.has_graphs:  # whose kernels may lack
        figures["meanwhile"] = f"{_while(queued / total, of_step)} launched work waits"
        figures["remedy"] = (
            "Find what that work waits for (another stream, an event), and whether the recording "
            "holds all work: what it lacks passes for idle time."
        )
    return figures | _awaited(evidence, idle, of_step)


MANY_PAGES = 100
"""Pieces of unified memory that move because somebody computes with them, one after the other."""

RUNTIME_CALL = re.compile(r"^(?:cu|hip)\w+")

TITLE_SHARE = 0.3
"""Least share of idle time by one function of the host for a title to name it."""


def _while(share: float, of_step: float | None) -> str:
    """Words of a title such as ``, most while``, for a share of all idle time; or such as
    ``, 31% while``, for a share of a part of it, which is itself this share of the step."""
    word = "most" if share > 0.5 else "above all"
    return f", {word if of_step is None else format(share * of_step, '.0%')} while"


def _in_title(functions: pd.Series, parts: pd.Series, of_step: float | None) -> str:
    """Words of a title on where the host is while the GPU is idle; "" if nowhere for long.

    Args:
        functions: share (0 to 1) of the idle time by function, most first; one at least.
        parts: the same by named part.
    """
    place, share = shown(str(functions.index[0])), float(functions.iloc[0])
    if share <= 0.5 and len(parts) and parts.iloc[0] > 0.5:
        above_all = f", above all {place}" if share > TITLE_SHARE else ""
        place, share = f"{part_name(*parts.index[0])}{above_all}", float(parts.iloc[0])
    return f"{_while(share, of_step)} the host is in {place}" if share > TITLE_SHARE else ""


def _awaited(evidence: Evidence, idle: pd.DataFrame, of_step: float | None) -> Measured:
    """Figures that name what the ranks exchange on another thread of the host while the stepping
    one is in no operator and no call; none where that is less than half of the idle time."""
    profile = evidence.profile
    # traces of 2021 write ranges as operators
    called = profile.of_kind("operator", "runtime") & ~evidence.named(OWN_RANGES)
    busy = called[idle["context"]] & idle["context"].ge(0)
    waits = stretches(idle[~busy])
    exchange = profile.contexts["component"].eq("communication").to_numpy()
    exchange &= profile.of_kind("operator", "annotation")
    exchanged = evidence.spans(exchange)
    exchanged = exchanged[exchanged["profile"].ne(main_thread(profile))]
    names = profile.contexts["name"].iloc[exchanged["context"]].to_numpy()
    times = {
        str(name): float(overlap(*waits, *stretches(rows)).sum())
        for name, rows in exchanged.groupby(names)
    }
    longest = max(times, key=lambda name: times[name], default="")
    time = times.get(longest, 0.0) / 1e6 / evidence.iterations
    beside = {"beside": f"{longest} takes {milliseconds(time)} of it on another thread."}
    share = time / max(float(idle["idle_ms"].sum()), 1e-9)
    if share <= 0.5:
        return beside if time > LEAST_OF_STEP * evidence.total_ms else {}
    return beside | {
        "meanwhile": f"{_while(share, of_step)} {shown(longest)} runs on another host thread",
        "explains": ("communication", ""),
        "limit": "network",
        "remedy": "Exchange gradients between the GPUs (NCCL), not between the hosts; or send "
        "fewer bytes, or begin earlier and let the exchange run beside computing.",
    }


def nowhere(profile: Profile) -> str:
    """Where the host is outside all that was recorded of it."""
    if profile.of_kind("operator", "annotation", "python").any():
        return "code outside every operator and range"
    return NOT_RECORDED


NOT_RECORDED = "code of which nothing was recorded"


def _host_names(evidence: Evidence, idle: pd.DataFrame) -> np.ndarray:
    """The innermost function, operator or range (n,) that the host is in."""
    contexts = evidence.profile.contexts
    owner = scopes_of(contexts)
    context = idle["context"].to_numpy()
    names = contexts["name"].to_numpy()[owner[np.maximum(context, 0)]]
    names = np.where(names == "cudaMemcpyAsync", _copies_below(evidence)[context], names)
    bare = contexts["kind"].isin(["thread", "root"]) | contexts["name"].eq(STEP_LABEL)
    bare = bare.to_numpy()[owner[np.maximum(context, 0)]]
    return np.where((context < 0) | bare, nowhere(evidence.profile), names)


def _copies_below(evidence: Evidence) -> np.ndarray:
    """The call (n,) of each context with the copy that it launches, such as
    ``cudaMemcpyAsync (Memcpy DtoH (Device -> Pageable))``: for a pageable one the host waits."""
    contexts = evidence.profile.contexts
    copied = contexts[contexts["kind"].eq("copy") & contexts["parent"].ge(0)]
    names = contexts["name"].to_numpy(dtype=object).copy()
    names[copied["parent"].to_numpy()] += " (" + copied["name"].to_numpy(dtype=object) + ")"
    return names


NAMED = 0.2
"""Least share of what is left out for the place that takes most of it to be named."""


def left_out(evidence: Evidence, least_ms: float) -> str:
    """Sentences on the time before and after what is explained, where they last so long and more:
    how long, and what the host is in for most of it."""
    profile, text = evidence.profile, ""
    start, end, context = running(profile, main_thread(profile))
    (first, last), (begin, finish) = extent(windows(profile)), recorded(profile)
    for since, until, where in ((begin, first, "before"), (last, finish, "after")):
        if (time := (until - since) / 1e6) > least_ms:
            ms = np.maximum(np.minimum(end, until) - np.maximum(start, since), 0) / 1e6
            place, held = main_place(profile, context, ms)
            of_it = f", {milliseconds(held)} of it in {place}" if held > NAMED * time else ""
            text += f"The {milliseconds(time)} {where} that are left out{of_it}. "
    return text
