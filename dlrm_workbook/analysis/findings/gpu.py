"""The GPU: why it idles, what it copies, which of its units it leaves unused.

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

from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import (
    IDLE,
    PART,
    host_is_traced,
    iteration_count,
    main_thread,
    parts_at,
)
from dlrm_workbook.analysis.context_tree import overlap, scopes_of, stretch_at, union
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import (
    Ledger,
    Measured,
    amdahl,
    bounded,
    capitalised,
    largest,
    predicted,
    rule,
)
from dlrm_workbook.analysis.findings.gpu_taken import SYNC, without
from dlrm_workbook.analysis.findings.where import (
    LEAST_OF_STEP,
    LEVELS,
    OWN_RANGES,
    in_place,
    main_place,
    outermost_row,
    time_by_name,
)
from dlrm_workbook.analysis.gpu import kernel_table, sampled_profile, stall_reasons, stall_table
from dlrm_workbook.analysis.idleness import Stretches
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.analysis.launches import launch_cost_us, launched_operations
from dlrm_workbook.analysis.steady import LEAST_OF_SPLIT
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.hpctoolkit.metrics import STALLS
from dlrm_workbook.recordings.open import COMMUNICATION
from dlrm_workbook.recordings.profile import nearest
from dlrm_workbook.recordings.torch.chrome_trace import GRAPH_LAUNCH
from dlrm_workbook.recordings.torch.steps import STEP_LABEL

FEW_TIMES = 2.0
"""Idle time of an iteration, in that of the usual one, from which on something else happens."""

IDLE_SHARE = 0.05
"""Least share of the step in which the GPU does nothing for no cause that another rule names."""

ALLOCATION_SHARE = 0.05
"""Least share of the step that is idle while the host takes or returns memory of the driver."""

OF_OPERATOR = 0.15
"""An operator counts as a wait for the GPU where this share of it, or more, is the wait."""

MOST_BESIDE = 2.0
"""Calls of an operator that do not wait, to each that does, up to which the operator counts as one
that waits for the GPU."""

PYTHON_GAP = 10.0
"""Times a launch: longer gaps that are mostly one function of Python are no cost of launching."""

LAUNCH_SHARE = 0.2
"""Least share of the step in which the GPU waits for launches; below, they keep ahead of it."""

ONE_LAUNCHER_SHARE = 0.1
"""The same where most launches are those of one operator or part, of kernels shorter than a
launch: their count alone then says what to change."""

MOST_LAUNCHES = 0.5
"""Share of all launches from which on the operator or part that makes them is named."""

SHORT_KERNEL_US = 10.0
"""A launch costs 3 to 10 µs of host time (NVIDIA, "Getting started with CUDA graphs",
2019): kernels shorter than this cannot hide it. The measured launch cost is used where
there is one."""

MOST_NAMES = 5
"""Names that a sentence lists of what the host was in."""

NOWHERE = "code outside every operator and range"

MOSTLY = 0.3
"""Least share of idle time by one function of the host for a title to name it."""

FAR_LONGER = 3.0
"""Times the median gap: in such a gap the host does something that it does not do in others."""

ONE_THING = 1 / 3
"""Least share of a gap in one operator or function for it to be no cost of launching."""

LONG_STAYS, LEAST_STAY_US = 5.0, 50.0
"""Times the usual stay of the host in one context, and at least so long, from which on a call or an
operator is no cost of launching: dispatching an operator takes 2 to 20 µs."""

SHORT_GAPS = 50.0
"""Times a launch: gaps up to this length are what calling operators in turn costs (30 to 200 µs
from one kernel to the next in eager torch); in longer ones the host does something else."""

LAUNCHING = ("operators", "launching", "python", "start-up", "copies")
"""Causes of idleness that make up the cost of launching."""

SYNC_SHARE = 0.03

LEAST_LAUNCHES = 20
BLOCKED = 0.8
"""Least share of launches that end after their kernels: in recordings of GPUs at work none do."""

COPY_SHARE = 0.05
COMMUNICATION_SHARE = 0.1
OVER_LINK = re.compile("HtoD|DtoH|HostToDevice|DeviceToHost|copyin|copyout")

LINKS_GB_PER_S = {6: 12, 7: 12, 8: 25, 9: 50, 10: 50, 12: 50}
"""What pinned copies reach over PCIe x16 (generations 3, 4 and 5) by the first figure of the
compute capability of NVIDIA's GPUs of that time."""

GEMM_SHARE = 0.05

DOUBLE = re.compile(r"\bdouble\b|dgemm|_f64|_d884|float64", re.IGNORECASE)
DOUBLE_OPERATIONS = "operations:fp64"
NO_DOUBLE = re.compile(r"distribution_|pow_tensor_scalar|curand|philox|random", re.IGNORECASE)
"""Kernels with a scalar or a generator of random numbers in float64, and tensors in fp32."""
DOUBLE_SHARE = 0.03

COPYING = re.compile(
    r"(?:elementwise )?(?:\w*float\d+ )?copy\b|nchw to|nhwc to|transpose", re.IGNORECASE
)
LAYOUT_SHARE = 0.05
"""Least share of the step for copies to another type or layout; real recordings: 0 to 2.4 %."""

POINTWISE = re.compile("elementwise")
POINTWISE_SHARE = 0.05
"""Least share of the step for kernels of one operation a value; real recordings: 1 to 14 %."""

LEAST_KINDS = 3
"""Different kernels that take a twentieth of such time each; fewer are judged one by one."""

HEAVY_SHARE = 0.2
"""Least share of the GPU's time that one kernel takes."""
HEAVY_STEP_SHARE = 0.1
COPY_ON_GPU_SHARE = 0.05
"""Of the step, by copies or memory sets that stay on GPUs while no kernel runs."""
FAR_FROM_LIMIT = 0.25
NEAR_LIMIT = 0.5
DOMINANT_SHARE = 0.25
"""Least share of the step in one range, operator or function for that to be a finding."""

TOLD = 0.5
"""A finding that takes more than this part of that share and names the place tells it already."""

SAME_PLACE = 0.8
"""Least part of a name's time for an inner name that has it to be named instead."""

PIECE_SHARE = 0.04
"""Least share of the step for a kernel to be listed among those that no other finding names."""
UNKNOWN_SHARE = 0.3
"""Of the step: from here on a kernel is named even if its limits are not known."""

LOW_OCCUPANCY = 25.0
OCCUPANCY_SHARE = 0.05
STALL_SHARE = 0.3
"""Of the samples, by one reason."""

UNAVOIDABLE_STALLS = ("NONE", "NSEL", "HID", "INV", "OTHR")

STALL_LIMITS = {"SYNC": "synchronisation", "PIPE": "arithmetic"}
"""Stall reason to the limit that it shows; of all others, memory bandwidth."""

SERIALISED = "PC sampling slowed the launches, so it caused part of this time itself."
UPPER_BOUND = (
    "CUDA graphs were launched, of whose kernels a profiler may record only some: it is an upper "
    "bound."
)
HOST_UNKNOWN = (
    "What the host did meanwhile was not measured (hpcrun -e CPUTIME -e gpu=nvidia -t measures it)."
)


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
    gpu=True,
    concerns=(IDLE,),
)
def blocking_launches(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Launches return when their kernels have ended, so that the host never runs ahead.

    Without it the step would be shorter by the time that the host waits in the calls, but not
    by more than the GPU is idle.
    """
    if not evidence.has_timeline or evidence.meta.get("serialised"):
        return None
    work, trace = evidence.work, evidence.profile.trace
    kernels = work[work["kind"].eq("kernel") & work["launch_start_ns"].ge(0)]
    calls = trace[evidence.profile.of_kind("runtime")[trace["context"].to_numpy()]]
    ends = calls.groupby("start_ns")["end_ns"].max()
    returned = ends.reindex(kernels["launch_start_ns"]).to_numpy()
    blocked = returned >= kernels["end_ns"].to_numpy()  # NaN: no
    # a kernel that is shorter than a launch may end before any call returns
    blocked &= returned - kernels["launch_start_ns"].to_numpy() >= 1e3 * SHORT_KERNEL_US
    if len(kernels) < LEAST_LAUNCHES or blocked.mean() < BLOCKED:
        return None
    count = 1e6 * max(len(evidence.windows[0]), 1)
    waited = float((returned - kernels["start_ns"].to_numpy())[blocked].sum()) / count
    idle = max(evidence.idle_ms - ledger.idle_ms - _data_ms(evidence, ledger), 0.0)
    lost = min(waited, idle)
    if lost < SYNC_SHARE * evidence.total_ms:
        return None
    ledger.idle_ms += lost
    return {
        "share": lost / evidence.total_ms,
        "component": largest(kernels[blocked].groupby(PART).size())[0],
        "blocked": 1e6 * blocked.sum() / count,
        "launches": 1e6 * len(kernels) / count,
        "waited": waited,
        "idle": idle,
    }


@rule(
    "synchronisation",
    title="The host waits for the GPU {count:,.0f} times in each step",
    evidence=(
        "{names} is called {count:,.1f} times per iteration, most in {place}; the host waits "
        "{waited:ms} in it, and the GPU idles {idle:ms} {during}.",
        "{reads} read values back.",
        "{doubt}",
    ),
    advice="Do not read values back in the loop (.item(), .cpu(), nonzero, print of a tensor): "
    "keep losses on the GPU and read them every training.log_every iterations.",
    limit="synchronisation",
    gpu=True,
    concerns=(IDLE,),
)
def synchronising(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The host waits for the GPU within the step, and the GPU then for the host.

    Without the call the host would go on sooner by what it waits in it, and the GPU would be at
    work for as much of the idle stretch that follows: the shorter of the two is lost.
    """
    calls = _synchronising_calls(evidence)
    if calls.empty:
        return None
    idle, lost = _idle_around(evidence, calls, ledger)
    around = _operators_around(evidence, calls)
    calls = _with_idle_inside(evidence, calls, around, ledger)
    lost = float(calls["lost_ms"].sum())
    idle = max(idle, lost)
    count = max(len(evidence.windows[0]), 1)
    if lost < SYNC_SHARE * evidence.total_ms or len(calls) < 0.5 * count:
        return None
    part = largest(calls.groupby(PART)["lost_ms"].sum())
    ledger.explain(lost, part)
    ledger.idle_ms += lost
    ledger.idle_causes.add("synchronisation")
    ledger.waits = union(around["start_ns"].to_numpy(), around["end_ns"].to_numpy())
    called = evidence.called["name"]
    reads = sorted(called[called.isin(["aten::_local_scalar_dense", "aten::nonzero"])].unique())
    return {
        "share": lost / evidence.total_ms,
        "component": part[0],
        "names": ", ".join(sorted(calls["name"].unique())),
        "count": len(calls) / count,
        "place": part_label(*part) or "the loop",
        "waited": float(calls["waited_ms"].sum()),
        "idle": idle,
        "during": "during and after it, and in the operators around it"
        if len(around)
        else "during and after it",
        "reads": ", ".join(reads) or None,
        "doubt": _doubt(evidence),
        "pieces": (calls["context"], calls["lost_ms"]),
    }


@rule(
    "copies_not_overlapped",
    title="Copies that no kernel overlaps take {share:.0%} of the step",
    evidence=(
        "Copies of {megabytes:,.1f} MB per iteration take {time:ms}{rate}, {alone:ms} of it while "
        "no kernel runs and work or the host waits for them.",
        "{pageable:ms} are from or to pageable memory, which the driver copies twice.",
        "Pinned copies reach {pinned:.1f} GB/s here.",
        "Pinned copies over this GPU's link reach about {link:.0f} GB/s (PCIe x16).",
        "{doubt}",
    ),
    advice="The prefetching loader pins its batches, so that copies are asynchronous and run "
    "beside kernels; uniform and zipf batches can be made on the GPU (data.place: device).",
    limit="copies",
    gpu=True,
)
def copies(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Copies between host and GPU hold the step up: pageable memory, or not overlapped."""
    found = _copies(evidence)
    if found.empty:
        return None
    kernels = evidence.work[evidence.work["kind"].eq("kernel")]
    time, alone = evidence.alone_ms(found, kernels)
    alone = _delaying_ms(evidence, found, kernels)
    share = alone / evidence.total_ms
    if share < COPY_SHARE:
        return None
    part = largest(found.groupby(PART)["ms"].sum())
    ledger.explain(alone, part)
    is_pageable = found["name"].str.contains("Pageable", case=False)
    pageable, size = float(found.loc[is_pageable, "ms"].sum()), float(found["bytes"].sum())
    summed = float(found["ms"].sum())
    pinned = [row for row in evidence.ceiling("copy") or [] if row.get("kind") == "pinned"]
    best = max((row["gb_per_s"] for row in pinned), default=None)
    synchronous = evidence.parameter("data.loader") == "synchronous"
    on_device = evidence.parameter("data.place") == "device"
    change: dict[str, Any] = {}
    if synchronous and not on_device:
        change = {"data.loader": "prefetch"}
    known = size > 0
    figures: Measured = {
        "share": share,
        "component": part[0],
        "megabytes": size / 1e6 if known else None,
        "time": time,
        "rate": f" ({size / summed / 1e6:.1f} GB/s)",
        "alone": alone,
        "pageable": None,
        "pinned": best,
        "link": None if best else _link_gb_per_s(evidence),
        "doubt": _doubt(evidence),
        "pieces": (found["context"], found["ms"]),
        "change": change,
        "speedup": (predicted(evidence, change) if change else None) or bounded(share),
    }
    if not known:
        figures["evidence"] = (
            "Copies take {time:ms} per iteration, {alone:ms} of it while no kernel runs and work "
            "or the host waits for them; their bytes were not measured.",
        )
    if not evidence.is_ours:
        figures["advice"] = (
            "Pin the batches (DataLoader(pin_memory=True)) and copy them ahead with "
            "non_blocking=True on a stream of their own, or copy fewer bytes."
        )
    if pageable > 0.3 * summed:
        figures["id"] = "pageable_copies"
        figures["title"] = "Copies from pageable memory take {share:.0%} of the step"
        figures["pageable"] = pageable
    return figures


@rule(
    "exposed_communication",
    title="Communication that no computing hides takes {share:.0%} of the step",
    evidence=(
        "Collectives run {time:ms} per iteration, {exposed:ms} of it while nothing else does: "
        "{kinds}.",
        "Up to {waiting:ms} of that is waiting for other ranks, which has a finding of its own.",
        "{unknown}",
    ),
    advice="Start collectives earlier and let them run beside computing (a pipeline over batches, "
    "larger buckets of gradients), send fewer bytes (bf16, smaller tables replicated), and even "
    "out the ranks.",
    limit="network",
    component="communication",
    gpu=True,
)
def exposed_communication(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Collectives hold the step up."""
    work = evidence.work
    if work.empty:
        return None
    is_exchange = _is_exchange(evidence)
    exchange = work[is_exchange]
    time, alone = evidence.alone_ms(exchange, work[~is_exchange])
    exposed = alone
    alone = max(exposed - ledger.waiting_ms, 0.0)
    if alone < COMMUNICATION_SHARE * evidence.total_ms:
        return None
    ledger.explain(alone, ("communication", largest(exchange.groupby(PART).size())[1]))
    names = (
        evidence.profile.contexts["name"]
        .iloc[exchange["context"]]
        .map(lambda name: kernel_name(name).short)
    )
    length = (exchange["end_ns"] - exchange["start_ns"]) / 1e6 / max(len(evidence.windows[0]), 1)
    by_kind = length.groupby(names.to_numpy()).agg(["sum", "size"]).nlargest(MOST_NAMES, "sum")
    return {
        "share": alone / evidence.total_ms,
        "time": time,
        "exposed": exposed,
        "waiting": min(ledger.waiting_ms, exposed) or None,
        "unknown": None
        if len(evidence.ranks) > 1
        else "The recording of one rank does not show how much of it is waiting for another rank.",
        "kinds": ", ".join(f"{name} {milliseconds(ms)}" for name, ms in by_kind["sum"].items()),
        "pieces": (exchange["context"], length),
        "speedup": bounded(alone / evidence.total_ms),
    }


@rule(
    "launch_bound",
    title="The GPU is idle {idle:.0%} of the time, most of it waiting for launches{launched_by}",
    evidence=(
        "There are {launches:,.0f} {what} per iteration of {usual_us:.1f} µs (median){left_out}, "
        "and a launch takes {launch}; in {share:.0%} of the time the GPU waits in gaps below "
        "{gap_us:.0f} µs while the host runs operators and launches them.",
        "{most_by}",
        "{doubt}",
    ),
    advice="Fewer and longer kernels: capture the step in a CUDA graph (training.cuda_graphs), "
    "compile it, a larger batch, fused embeddings and optimiser.",
    limit="launches",
    gpu=True,
    concerns=(IDLE,),
)
def launch_bound(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The GPU idles while the host prepares launches."""
    if not evidence.has_timeline:
        return None
    launch_us = float(evidence.ceiling("launch_us") or SHORT_KERNEL_US)
    idle = _launching(evidence, ledger, launch_us)
    lost = float(idle["idle_ms"].sum())
    left = max(0.0, evidence.idle_ms - ledger.idle_ms - _data_ms(evidence, ledger))
    lost = min(lost, left)
    work = evidence.work[~_is_exchange(evidence)]
    if not work["kind"].eq("kernel").any() or lost < ONE_LAUNCHER_SHARE * evidence.total_ms:
        return None
    launches = len(work)
    own, of_launches, most = _main_launcher(evidence, work)
    part = (str(own["component"].iloc[0]), str(own["phase"].iloc[0]))
    # the median: a few long kernels elsewhere in the step do not hide what short ones cost
    usual_us = float((work["end_ns"] - work["start_ns"]).median()) / 1e3
    if lost < LAUNCH_SHARE * evidence.total_ms or usual_us > 5 * launch_us:
        # few operators may be bound by launches in a step that otherwise is not
        own_us = float((own["end_ns"] - own["start_ns"]).median()) / 1e3
        if of_launches < MOST_LAUNCHES or own_us > launch_us:
            return None
    ledger.idle_ms += lost
    ledger.idle_causes.add("launches")
    cost = launch_cost_us(evidence.profile)
    graphs: dict[str, Any] = {"training.cuda_graphs": True}
    if evidence.parameter("training.embedding_backend", "torch") != "fused":
        # with any other the host waits for the GPU in every update: nothing to capture
        graphs["training.embedding_backend"] = "fused"
    title = {} if lost > 0.5 * evidence.idle_ms else {"title": WAITS_FOR_LAUNCHES}
    steps = max(len(evidence.windows[0]), 1)
    # what has no part and is no single operator tells nothing
    by_one = of_launches >= MOST_LAUNCHES and bool(most)
    by_one &= part[0] != "other" or "," not in most
    place = f" in {part_label(*part)}" if part[0] != "other" else ""
    small = "copies by " if own["kind"].eq("copy").mean() > MOST_LAUNCHES else ""
    if not by_one:
        part = largest(idle.groupby(PART)["idle_ms"].sum())
    return {
        "share": lost / evidence.total_ms,
        "component": part[0],
        "launched_by": f" of {small}{most}{place}" if by_one else "",
        "most_by": f"{len(own) / steps:,.0f} of them are launched by {most}{place}."
        if by_one
        else None,
        "idle": evidence.idle_ms / evidence.total_ms,
        "launches": launches / steps,
        "what": "kernels and copies" if work["kind"].eq("copy").any() else "kernels",
        "usual_us": usual_us,
        "launch": f"{cost:.1f} µs of the host here" if cost == cost else "3 to 10 µs of a host",
        "left_out": " (collectives left out)" if _is_exchange(evidence).any() else "",
        "gap_us": SHORT_GAPS * launch_us,
        "pieces": (idle["context"], idle["idle_ms"]),
        "doubt": _doubt(evidence),
        "change": {} if evidence.parameter("training.cuda_graphs", False) else graphs,
        "speedup": predicted(evidence, graphs) or bounded(lost / evidence.total_ms),
        **title,
    }


WAITS_FOR_LAUNCHES = "The GPU waits {share:.0%} of the time for launches{launched_by}"


def _main_launcher(evidence: Evidence, kernels: pd.DataFrame) -> tuple[pd.DataFrame, float, str]:
    """Who launches most: one part's operator, or all of one part where it calls several.

    Returns:
        The rows of ``kernels`` that it launches, their share of all launches, its name: the range
        that the program marks around most of a part's launches by several operators, or else
        these operators; "" where no operator launches them.
    """
    contexts = evidence.profile.contexts
    operator = nearest(contexts["parent"].to_numpy(), contexts["kind"].eq("operator").to_numpy())
    outer = outermost_row(contexts["parent"].to_numpy(), operator)[kernels["context"].to_numpy()]
    names = np.where(outer >= 0, contexts["name"].to_numpy()[outer], "")
    table = kernels.assign(by=names)
    own = _largest_group(table, PART)
    most = _largest_group(own, ["by"])
    if len(most) >= MOST_LAUNCHES * len(own) and most["by"].iloc[0]:
        return most, len(most) / len(kernels), str(most["by"].iloc[0])
    marked = nearest(contexts["parent"].to_numpy(), evidence.profile.of_kind("annotation"))
    ranges = contexts["name"].iloc[marked[own["context"]]].where(marked[own["context"]] >= 0, "")
    # ranges that torch makes by itself say no more than the part does
    ranges = ranges[~ranges.str.contains(OWN_RANGES)]
    share = ranges.value_counts() / len(own)
    if len(share) and share.iloc[0] >= MOST_LAUNCHES:
        return own, len(own) / len(kernels), f"the range '{str(share.index[0])[:70]}'"
    listed = own["by"][own["by"].ne("")].value_counts().index[:3]
    return own, len(own) / len(kernels), ", ".join(map(str, listed))


def _largest_group(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The rows of the largest group by some columns."""
    return max((rows for _, rows in table.groupby(keys, sort=False)), key=len)


@rule(
    "gpu_idle",
    title="The GPU is idle {idle} of the time{few_iterations}{meanwhile}",
    evidence=(
        "It does nothing in {idle_time:ms} of {total:ms} per iteration.",
        "{others}",
        "{few}",
        "{gap}",
        "{host_unknown}",
        "The host meanwhile: {host}.",
        "{beside}",
        "In {blocked:ms} of it the host was itself in a call that waits for the GPU.",
        "{doubt}",
    ),
    advice="{remedy}",
    limit="dispatch",
    gpu=True,
    concerns=(IDLE,),
)
def gpu_idle(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The GPU does nothing, and no rule has said why."""
    explained = ledger.idle_ms + ledger.late_ms + _data_ms(evidence, ledger)
    left = evidence.idle_ms - explained
    if left < IDLE_SHARE * evidence.total_ms:
        return None
    unexplained = without(evidence.idle, ledger.taken)
    if "synchronisation" in ledger.idle_causes:
        unexplained = unexplained[unexplained["cause"].ne("synchronisation")]
        unexplained = unexplained[~_in_waits(unexplained, ledger)]
    if "allocation" in ledger.idle_causes:
        unexplained = unexplained[unexplained["cause"].ne("allocation")]
    if "launches" in ledger.idle_causes:
        launch_us = float(evidence.ceiling("launch_us") or SHORT_KERNEL_US)
        names = _launching(evidence, ledger, launch_us).index
        unexplained = unexplained.drop(names, errors="ignore")
    if _data_ms(evidence, ledger):
        made = unexplained["component"].eq("data")
        if evidence.feeding_ms:
            made &= unexplained["cause"].eq("data")
        unexplained = unexplained[~made]
    traced = host_is_traced(evidence.profile)
    upto = "for up to " if _has_graphs(evidence) else ""
    figures: Measured = {
        "share": left / evidence.total_ms,
        "idle": upto + _precise(evidence.idle_ms / evidence.total_ms),
        "meanwhile": "",
        "idle_time": evidence.idle_ms,
        "others": None,
        "few": None,
        "few_iterations": "",
        "gap": _longest_gap(evidence),
        "host_unknown": None if traced else HOST_UNKNOWN,
        "host": None,
        "beside": None,
        "blocked": None,
        "doubt": _doubt(evidence),
        "remedy": "Measure what the host does as well; then shorten it, overlap it with the GPU's "
        "work (a loader that runs ahead), or move it to the GPU.",
        # how much of it can go nothing tells: all of it at most
        "speedup": bounded(left / evidence.total_ms)
        | {"mid": 1.0 / (1.0 - 0.5 * left / evidence.total_ms)},
    }
    if explained > 0.02 * evidence.total_ms:
        figures["id"] = "gpu_idle_otherwise"
        figures["title"] = "The GPU is idle {share:.0%} of the step{few_iterations}{meanwhile}"
        figures["meanwhile"] = " for no single reason"
        figures["others"] = "The rest of its idle time has findings of its own."
    if traced and len(unexplained):
        figures |= _host_meanwhile(evidence, unexplained)
    figures |= _in_few_iterations(evidence, unexplained, left)
    ledger.explain(left, (str(figures.get("component", "other")), ""))
    return figures


def _in_few_iterations(evidence: Evidence, idle: pd.DataFrame, left_ms: float) -> Measured:
    """Figures that tell in how many iterations most of the idle time is; none where these are more
    than a third.

    Args:
        left_ms: of a mean iteration; not all of its pieces need to be known.
    """
    first = evidence.windows[0]
    if len(first) < LEAST_OF_SPLIT or idle.empty:
        return {}
    step = np.searchsorted(first, idle["start_ns"].to_numpy(), side="right") - 1
    # the pieces' times are of a mean iteration
    each = np.bincount(step, idle["idle_ms"] * len(first), minlength=len(first))
    usual = float(np.median(each))
    many = each > FEW_TIMES * usual
    extra = float((each[many] - usual).sum()) / len(first)
    count = int(many.sum())
    if not 0 < count <= len(first) / 3 or extra < 0.5 * left_ms:
        return {}
    return {
        "few_iterations": f", most of that in {count} of {len(first)} iterations",
        "few": f"In {'that iteration' if count == 1 else 'those iterations'} it does nothing for "
        f"{milliseconds(float(each[many].mean()))}, in a usual one for {milliseconds(usual)}: "
        "something that happens now and then, such as a checkpoint, an evaluation or a callback.",
    }


def _longest_gap(evidence: Evidence) -> str | None:
    """Where the longest gap of a usual step lies, if it is most of the idle time: between which
    parts, since what the host does there stands between them."""
    work = launched_operations(evidence.profile)
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    first = evidence.windows[0]
    if len(start) < 2 or len(first) < 3:
        return None
    begun = np.maximum.accumulate(end)[:-1]
    length = start[1:] - begun
    step = np.where(evidence.inside(begun), np.searchsorted(first, begun, side="right") - 1, -1)
    gaps = pd.DataFrame({"step": step, "length": length}).query("step >= 0")
    longest = gaps.loc[gaps.groupby("step")["length"].idxmax()]
    usual = float(longest["length"].median()) / 1e6
    if usual < 0.5 * evidence.idle_ms:
        return None
    label = [part_label(*part) for part in zip(work["component"], work["phase"], strict=True)]
    row = longest.index.to_numpy()
    between = Counter((label[i], label[i + 1]) for i in row)
    (before, after), often = between.most_common(1)[0]
    where = f", between {before} and {after}" if often > 0.8 * len(row) else ""
    if where and before.startswith("optimizer") and after.startswith(("transfer", "data")):
        where += ": where a training loop fetches its next batch"
    return f"{milliseconds(usual)} of that are one gap in each iteration{where}."


def _host_meanwhile(evidence: Evidence, idle: pd.DataFrame) -> Measured:
    """What the host was in while the GPU did nothing: the parts or else the functions."""
    by_part = idle.groupby(PART)["idle_ms"].sum().sort_values(ascending=False)
    named = by_part.drop("other", level="component", errors="ignore")
    total = float(idle["idle_ms"].sum())
    by_name = idle.groupby(_host_names(evidence, idle, python=False))["idle_ms"].sum()
    by_name = by_name.nlargest(MOST_NAMES)
    functions = ", ".join(f"{name} {milliseconds(ms)}" for name, ms in by_name.items())
    if by_name.iloc[0] < 0.5 * total:  # many operators: what calls them
        main = main_place(evidence.profile, idle["context"], idle["idle_ms"])
        by_name = pd.Series({main: total}) if main else by_name
    calls = evidence.profile.which("name", lambda name: bool(BLOCKING.match(name)))
    blocked = calls[idle["context"]] & idle["context"].ge(0).to_numpy()
    blocked_ms = float(idle.loc[blocked, "idle_ms"].sum())
    figures: Measured = {
        "host": functions,
        "pieces": (idle["context"], idle["idle_ms"]),
        "blocked": blocked_ms if blocked_ms > 0.1 * total else None,
        "remedy": "Shorten what the host does there, overlap it with the GPU's work (a loader "
        "that runs ahead, launches without waiting), or move it to the GPU.",
    }
    if named.sum() > 0.5 * total:
        places = ", ".join(
            f"{part_label(str(part[0]), str(part[1]))} {milliseconds(ms)}"
            for part, ms in zip(named.index[:3], named, strict=False)
        )
        figures["host"] = f"{places}; by function {functions}"
        figures["component"] = str(named.index[0][0])
    if by_name.iloc[0] > 0.5 * total:
        figures["meanwhile"] = f", most while the host is in {by_name.index[0][:70]}"
    elif len(named) and named.iloc[0] > 0.5 * total:
        figures["meanwhile"] = f", most while the host is in {part_label(*named.index[0])}"
        if by_name.iloc[0] > MOSTLY * total:
            figures["meanwhile"] += f", above all {by_name.index[0][:70]}"
    elif by_name.iloc[0] > MOSTLY * total:
        figures["meanwhile"] = f", above all while the host is in {by_name.index[0][:70]}"
    return figures | _awaited(evidence, idle)


def _awaited(evidence: Evidence, idle: pd.DataFrame) -> Measured:
    """Figures that name what the ranks exchange on another thread of the host while the stepping
    one is in no operator and no call; none where that is less than half of the idle time."""
    profile = evidence.profile
    # traces of 2021 write ranges as operators
    ranges = profile.which("name", lambda name: bool(re.match(OWN_RANGES, name)))
    called = profile.of_kind("operator", "runtime") & ~ranges
    busy = called[idle["context"]] & idle["context"].ge(0)
    waits = union(idle.loc[~busy, "start_ns"].to_numpy(), idle.loc[~busy, "end_ns"].to_numpy())
    exchange = profile.contexts["component"].eq("communication").to_numpy()
    exchange &= profile.of_kind("operator", "annotation")
    beside = profile.trace[exchange[profile.trace["context"].to_numpy()]]
    beside = beside[beside["profile"].ne(main_thread(profile))]
    names = profile.contexts["name"].iloc[beside["context"]].to_numpy()
    times = {
        str(name): float(
            overlap(*waits, *union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())).sum()
        )
        for name, rows in beside.groupby(names)
    }
    longest = max(times, key=lambda name: times[name], default="")
    time = times.get(longest, 0.0) / 1e6 / max(len(evidence.windows[0]), 1)
    beside = {"beside": f"{longest} takes {milliseconds(time)} of it on another thread."}
    if time <= 0.5 * float(idle["idle_ms"].sum()):
        return beside if time > LEAST_OF_STEP * evidence.total_ms else {}
    return beside | {
        "meanwhile": f", most while {longest[:70]} runs on another thread of the host",
        "component": "communication",
        "limit": "network",
        "remedy": "Exchange gradients between the GPUs (NCCL), not between the hosts; or send "
        "fewer bytes, or begin earlier and let the exchange run beside computing.",
    }


def _host_names(evidence: Evidence, idle: pd.DataFrame, python: bool) -> np.ndarray:
    """The innermost function, operator or range (n,) that the host is in, or the innermost of
    Python where one is known."""
    contexts = evidence.profile.contexts
    frame = nearest(contexts["parent"].to_numpy(), evidence.profile.of_kind("python"))
    owner = np.where(python & (frame >= 0), frame, scopes_of(contexts))
    context = idle["context"].to_numpy()
    names = contexts["name"].to_numpy()[owner[np.maximum(context, 0)]]
    names = np.where(names == "cudaMemcpyAsync", _copies_below(evidence)[context], names)
    bare = contexts["kind"].isin(["thread", "root"]) | contexts["name"].eq(STEP_LABEL)
    bare = bare.to_numpy()[owner[np.maximum(context, 0)]]
    return np.where((context < 0) | bare, NOWHERE, names)


def _copies_below(evidence: Evidence) -> np.ndarray:
    """The call (n,) of each context with the copy that it launches, such as
    ``cudaMemcpyAsync (Memcpy DtoH (Device -> Pageable))``: for a pageable one the host waits."""
    contexts = evidence.profile.contexts
    copied = contexts[contexts["kind"].eq("copy") & contexts["parent"].ge(0)]
    said = contexts["name"].to_numpy(dtype=object).copy()
    said[copied["parent"].to_numpy()] += " (" + copied["name"].to_numpy(dtype=object) + ")"
    return said


def _is_exchange(evidence: Evidence) -> pd.Series:
    """Which rows of ``evidence.work`` are kernels that exchange data between ranks."""
    named = evidence.profile.which("name", lambda name: bool(COMMUNICATION.search(name)))
    return evidence.work["kind"].eq("kernel") & named[evidence.work["context"].to_numpy()]


def _launching(evidence: Evidence, ledger: Ledger, launch_us: float) -> pd.DataFrame:
    """Rows of ``evidence.idle`` in gaps so short that they are the cost of launching.

    Left out are operators that wait for the GPU, and gaps beyond the length of a few launches
    that the host spends for the most part in the body of one Python function, or, where the
    gap is far longer than the usual one, in any one operator or between two of them.
    """
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
    return idle[short & idle["cause"].isin(LAUNCHING) & ~_in_waits(idle, ledger)]


def _long_calls(evidence: Evidence, idle: pd.DataFrame) -> pd.Series:
    """Rows of ``evidence.idle`` in what is no cost of launching, though gaps are short: a call that
    launches nothing, or the own body of an operator or a function in which the host stays far
    longer at a time than in others, with a listed share of the step."""
    contexts = evidence.profile.contexts
    context = idle["context"].to_numpy()
    known = context >= 0
    launches = np.zeros(len(contexts), dtype=bool)
    work = contexts["kind"].isin(["kernel", "copy"]) & contexts["parent"].ge(0)
    launches[contexts.loc[work, "parent"]] = True
    rows = idle.assign(
        name=np.where(known, contexts["name"].to_numpy()[np.maximum(context, 0)], ""),
        stay=idle["context"].ne(idle["context"].shift()).cumsum().to_numpy(),
        length=idle["end_ns"] - idle["start_ns"],
    )[known & ~launches[np.maximum(context, 0)]]
    stays = rows.groupby(["name", "stay"])["length"].sum().groupby("name").agg(["median", "sum"])
    total = 1e6 * evidence.total_ms * max(len(evidence.windows[0]), 1)
    usual = float(rows.groupby("stay")["length"].sum().median()) if len(rows) else 0.0
    called = set(rows.loc[contexts["kind"].eq("runtime").to_numpy()[rows["context"]], "name"])
    long = stays["median"].gt(max(LONG_STAYS * usual, 1e3 * LEAST_STAY_US))
    long = stays[stays["sum"].gt(LEAST_OF_STEP * total) & (long | stays.index.isin(called))]
    return rows["name"].isin(long.index).reindex(idle.index, fill_value=False)


def _doing(evidence: Evidence, idle: pd.DataFrame) -> np.ndarray:
    """Row (n,) of the outermost operator that the host is in, or of what else it is in."""
    contexts = evidence.profile.contexts
    parent = contexts["parent"].to_numpy()
    operator = nearest(parent, contexts["kind"].eq("operator").to_numpy())
    outer = outermost_row(parent, operator)
    return np.where(outer >= 0, outer, np.arange(len(outer)))[idle["context"].to_numpy()]


def _in_waits(idle: pd.DataFrame, ledger: Ledger) -> np.ndarray:
    """Which rows of ``evidence.idle`` lie in operators that wait for the GPU."""
    return stretch_at(*ledger.waits, idle["start_ns"].to_numpy()) >= 0


def _data_ms(evidence: Evidence, ledger: Ledger) -> float:
    """Idle time of a mean step that the rule for making batches has explained."""
    if not ledger.is_explained(("data", "forward")):
        return 0.0
    rows = evidence.attribution
    chosen = rows["component"].eq("data") & rows["where"].eq("host")
    return float(rows.loc[chosen, "time_ms"].sum()) - evidence.feeding_ms


def _has_graphs(evidence: Evidence) -> bool:
    runtime = evidence.profile.contexts.loc[evidence.profile.of_kind("runtime"), "name"]
    return bool(runtime.str.match(GRAPH_LAUNCH).any())


def _doubt(evidence: Evidence) -> str | None:
    """Why idle time and gaps of this recording are not to be taken at their word."""
    said = [SERIALISED] if evidence.meta.get("serialised") else []
    said += [UPPER_BOUND] if _has_graphs(evidence) else []
    return " ".join(said) or None


def _precise(share: float) -> str:
    """A share with a digit after the point where it is close to all."""
    return f"{share:.1%}" if share > 0.99 else f"{share:.0%}"


@rule(
    "tensor_cores_unused",
    title="{what} take {share:.0%} of the step and use no tensor cores",
    evidence=("They take {time:ms} per iteration, in kernels such as {names}.",),
    advice="{units} run on tensor cores, 4 to 16 times the fp32 rate (data sheets in "
    "docs/roofline.md).",
    limit="arithmetic",
    gpu=True,
)
def tensor_cores(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Matrix products in fp32 without tensor cores, on a GPU that has them."""
    capability = _capability(evidence)
    if capability is not None and capability < 7:
        return None
    kernels = _kernels(evidence)
    slow = kernels[kernels["tensor_cores"].eq("no") & kernels["precision"].isin(["fp32", ""])]
    slow = slow[~slow["kernel"].isin(ledger.device_work)]
    time = float(slow["ms"].sum())
    share = time / evidence.total_ms
    if share < GEMM_SHARE:
        return None
    lowest = evidence.parameter("training.lowest_precision", "bf16")
    if evidence.parameter("training.precision", "fp32") == "fp32" and lowest != "fp32":
        change: dict[str, Any] = {"training.precision": "bf16"}
    elif not evidence.parameter("training.tf32", False):
        change = {"training.tf32": True}
    else:
        return None
    guess = {"low": amdahl(share, 1.5), "mid": amdahl(share, 3.0), "high": amdahl(share, 8.0)}
    volta = capability is not None and capability < 8
    ledger.device_work |= set(slow["kernel"])
    return {
        "share": share,
        "component": str(slow.groupby("component")["ms"].sum().idxmax()),
        "time": time,
        "names": ", ".join(slow.nlargest(2, "ms")["short_name"]),
        "pieces": evidence.of_kernels(slow["kernel"]),
        "what": "Convolutions and matrix products"
        if slow["kernel"].str.contains("conv", case=False).any()
        else "Matrix products",
        "units": "fp16 products by autocast"
        if volta
        else "bf16 by autocast (training.precision) or TF32 (training.tf32)",
        "change": {} if volta else change,
        "speedup": predicted(evidence, change) or guess,
    }


@rule(
    "float64",
    title="Arithmetic in float64 takes {share:.0%} of the step",
    evidence=("It takes {time:ms} per iteration, in {names}.",),
    advice="Find what makes float64 (a NumPy array or a Python constant made into a tensor, "
    ".double(), a default type) and make it float32: GPUs compute float64 at a half to a 64th of "
    "the rate of float32, and it takes twice the bytes.",
    limit="arithmetic",
)
def float64(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Kernels or operators compute in float64, which no part of such a model needs."""
    profile = evidence.profile
    metric = "gpu_time_ms" if evidence.on_gpu else "cpu_time_ms"
    chosen = profile.which(
        "name", lambda name: bool(DOUBLE.search(name)) and not NO_DOUBLE.search(name)
    )
    chosen &= profile.of_kind("kernel")
    if profile.has(DOUBLE_OPERATIONS):
        chosen |= profile.value_table(DOUBLE_OPERATIONS, "exclusive").gt(0).to_numpy()
    # of an operator and its kernel the operator counts
    above = nearest(profile.contexts["parent"].to_numpy(), chosen)
    parent = profile.contexts["parent"].to_numpy()
    chosen &= (parent < 0) | (above[np.maximum(parent, 0)] < 0)
    time = profile.value_table(metric, "inclusive")[chosen] / iteration_count(profile)
    share = float(time.sum()) / evidence.total_ms
    if not share >= DOUBLE_SHARE:
        return None
    rows = profile.contexts.loc[time.index]
    part = largest(time.groupby([rows["component"], rows["phase"]]).sum())
    ledger.explain(float(time.sum()), part)
    heaviest = time.groupby(rows["name"]).sum().nlargest(2)
    ledger.device_work |= set(rows["name"])
    return {
        "share": share,
        "component": part[0],
        "time": float(time.sum()),
        "names": ", ".join(
            f"{str(name)[:70]} ({milliseconds(ms)})" for name, ms in heaviest.items()
        ),
        "speedup": {"low": 1.0, "mid": amdahl(share, 2.0), "high": amdahl(share, 64.0)},
    }


@rule(
    "layout_copies",
    title="Conversions and copies of layout take {share:.0%} of the step, most by {by}",
    evidence=(
        "Kernels that only convert or copy tensors, to another type or layout, run {time:ms} per "
        "iteration, in {launches:count} launches: {names}.",
    ),
    advice="Convert once and keep the result (weights, constants), let autocast or the model keep "
    "one type, keep the layout that the next operator wants (channels_last, no transposed views "
    "that are made contiguous), and make tensors on the GPU in their type.",
    limit="memory bandwidth",
    gpu=True,
)
def layout_copies(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Kernels that copy tensors to another type or layout take much of the step."""
    return _work_of(evidence, ledger, COPYING, LAYOUT_SHARE)


@rule(
    "pointwise_operators",
    title="Pointwise operators take {share:.0%} of the step",
    evidence=(
        "Each reads its operands from memory and writes its result back: {time:ms} per iteration "
        "in {launches:count} launches of {kinds} kernels, most in {names}.",
    ),
    advice="Fuse them, so that values stay in registers from one to the next: compile the model "
    "(training.compile), or use fused operators (torch.nn.functional, a fused optimiser).",
    limit="memory bandwidth",
    gpu=True,
)
def pointwise_operators(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Many kernels that do one operation for each value take much of the step together."""
    measured = _work_of(evidence, ledger, POINTWISE, POINTWISE_SHARE)
    return measured if measured is None or measured["kinds"] >= LEAST_KINDS else None


def _work_of(
    evidence: Evidence, ledger: Ledger, kind: re.Pattern[str], least: float
) -> Measured | None:
    """Time and launches of the kernels whose short names match, if they take the share."""
    kernels = _kernels(evidence)
    chosen = kernels[
        kernels["short_name"].str.match(kind) & ~kernels["kernel"].isin(ledger.device_work)
    ]
    time = min(float(chosen["ms"].sum()), evidence.device_ms)
    if time < least * evidence.total_ms:
        return None
    by_kernel = chosen.groupby("short_name")["ms"].sum().sort_values(ascending=False)
    kinds = int(by_kernel.gt(0.05 * by_kernel.sum()).sum())
    places = chosen.groupby(PART)["ms"].sum()
    pieces = evidence.of_kernels(chosen["kernel"])
    operators = time_by_name(evidence.profile, *pieces)["outer"].index
    if kinds >= LEAST_KINDS or kind is COPYING:
        ledger.device_work |= set(chosen["kernel"])
        ledger.explain(time, largest(places))
    return {
        "share": time / evidence.total_ms,
        "component": largest(places)[0],
        "time": time,
        "launches": float(chosen["launches"].sum()) / iteration_count(evidence.profile),
        "kinds": kinds,
        "names": ", ".join(f"{name} ({milliseconds(ms)})" for name, ms in by_kernel[:3].items()),
        "by": operators[0] if len(operators) else by_kernel.index[0],
        "pieces": pieces,
        "speedup": bounded(time / evidence.total_ms),
    }


@rule(
    "low_occupancy",
    title="Kernels of low occupancy take {share:.0%} of the step{most}",
    evidence=(
        "{kernel} keeps {occupancy:.0f}% of the warps that fit on a multiprocessor"
        "{because}; such kernels take {of_kernels:.0%} of all kernels' time.",
    ),
    advice="More and smaller blocks (a larger batch), fewer registers or less shared memory per "
    "block, so that other warps run while one waits for memory.",
    limit="memory bandwidth",
    gpu=True,
)
def occupancy(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Kernels that take much of the step leave most of the GPU's warps empty."""
    kernels = _kernels(evidence)
    low = kernels[kernels["occupancy_percent"] < LOW_OCCUPANCY]
    # products live from registers, not from warps; collectives wait for the network
    low = low[low["tensor_cores"].eq("") & ~low["kernel"].str.contains(COMMUNICATION)]
    low = low[~low["kernel"].isin(ledger.device_work)]
    share = min(float(low["ms"].sum()), evidence.device_ms) / evidence.total_ms
    if share < OCCUPANCY_SHARE:
        return None
    worst = low.loc[low["ms"].idxmax()]
    by_name = low.groupby("short_name")["ms"].sum().sort_values(ascending=False)
    ledger.device_work |= set(low["kernel"])
    ledger.explain(share * evidence.total_ms, (str(worst["component"]), str(worst["phase"])))
    properties = [
        f"{worst[name]:.0f} {label}"
        for name, label in (("registers", "registers per thread"), ("blocks", "blocks per launch"))
        if worst[name] == worst[name]
    ]
    return {
        "share": share,
        "of_kernels": float(low["ms"].sum()) / float(kernels["ms"].sum()),
        "component": str(worst["component"]),
        "kernel": str(worst["short_name"]),
        "pieces": evidence.of_kernels(low["kernel"]),
        "most": f", most of it {by_name.index[0]}"
        if float(by_name.iloc[0]) > 0.5 * float(low["ms"].sum())
        else f", such as {' and '.join(map(str, by_name.index[:2]))}",
        "occupancy": worst["occupancy_percent"],
        "because": f" ({', '.join(properties)})" if properties else "",
        "speedup": bounded(0.5 * share),
    }


@rule(
    "heavy_kernel",
    title="One kernel takes {share:.0%} of the step: {kernel}",
    evidence=(
        "It takes {time:ms} per iteration, {of_device:.0%} of the GPU's time, in {launches:,.0f} "
        "launches of {mean_us:,.1f} µs.",
        "By its operator's shapes {reached:.0%} of that would do at the limits of this GPU's data "
        "sheet.",
        "Its grid fills {waves:.0%} of the GPU.",
        "{unknown}",
    ),
    advice="Look at its shapes and at what calls it: operands that are tiny, strided or padded, "
    "work that could be batched, a library or a data type with faster kernels.",
    limit="",
    gpu=True,
)
def heavy_kernel(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """A kernel takes much of the GPU's time far from its limits, or most of it at unknown ones."""
    kernels = _kernels(evidence)
    # by name: kernels that compute are launched within an exchange's annotation too
    kernels = kernels[~kernels["kernel"].str.contains(COMMUNICATION)]
    kernels = kernels[~kernels["kernel"].isin(ledger.device_work)]
    share = kernels["ms"] / evidence.total_ms
    heavy = (kernels["ms"] >= HEAVY_SHARE * evidence.device_ms) & (share >= HEAVY_STEP_SHARE)
    far = kernels["share_of_ceiling"].lt(FAR_FROM_LIMIT) | kernels["waves"].lt(FAR_FROM_LIMIT)
    # products are judged by their units (tensor_cores), as far as their names tell
    unknown = kernels["share_of_ceiling"].isna() & kernels["tensor_cores"].eq("")
    chosen = kernels[heavy & (far | (unknown & share.ge(UNKNOWN_SHARE)))]
    if chosen.empty:
        return None
    worst = chosen.loc[chosen["ms"].idxmax()]
    ledger.device_work.add(str(worst["kernel"]))
    reached, waves = float(worst["share_of_ceiling"]), float(worst["waves"])
    taken = min(float(worst["ms"]) / evidence.total_ms, 1.0)
    known = reached == reached
    return {
        "share": taken,
        "component": str(worst["component"]),
        "kernel": str(worst["short_name"]),
        "pieces": evidence.of_kernels([str(worst["kernel"])]),
        "time": float(worst["ms"]),
        "of_device": min(float(worst["ms"]) / evidence.device_ms, 1.0),
        "launches": float(worst["launches"]) / iteration_count(evidence.profile),
        "mean_us": float(worst["mean_us"]),
        "reached": reached if known else None,
        "waves": waves if waves < 1 else None,
        "unknown": None
        if known or waves < 1
        else "The recording does not show how close it is to the GPU's limits.",
        "speedup": bounded(taken * (1 - reached)) if known else bounded(0.5 * taken),
    }


@rule(
    "largest_kernels",
    title="{what} {take} {share:.0%} of the step: {kernels}",
    evidence=(
        "Of what the GPU does and no finding above names, these take most: {listed}.",
        "{unknown}",
    ),
    advice="Look at what calls them, at their shapes and types, and whether each iteration needs "
    "them; compare with another recording of the same model (dlrm run compare) if they took less.",
    limit="",
    gpu=True,
)
def largest_kernels(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The largest pieces of another program's work on the GPU that no rule has named.

    Kernels that are known to reach half of the GPU's limits are left out: there is little to gain.
    """
    if evidence.is_ours or not evidence.has_timeline:
        return None
    table = _kernels(evidence)
    table = table[~table["kernel"].str.contains(COMMUNICATION)]
    table = table[~table["kernel"].isin(ledger.device_work)]
    table = table[~table["share_of_ceiling"].ge(NEAR_LIMIT)]
    by_name = table.groupby("short_name")["ms"].sum().sort_values(ascending=False)
    by_name = by_name[by_name >= PIECE_SHARE * evidence.total_ms]
    if by_name.empty:
        return _kernels_of_one_place(evidence, table)
    chosen = table[table["short_name"].isin(by_name.index)]
    time = min(float(by_name.sum()), evidence.device_ms)
    part = largest(chosen.groupby(PART)["ms"].sum())
    places = {
        name: largest(rows.groupby(PART)["ms"].sum())
        for name, rows in chosen.groupby(chosen["short_name"].astype(str))
    }
    said = {
        name: f" in {part_label(*place)}" if place[0] != "other" else ""
        for name, place in places.items()
    }
    return {
        "share": time / evidence.total_ms,
        "component": part[0],
        "what": "One kernel" if len(by_name) == 1 else f"{len(by_name)} kernels",
        "take": "takes" if len(by_name) == 1 else "take",
        "kernels": ", ".join(map(str, by_name.index[:2])) + (", ..." if len(by_name) > 2 else ""),
        "listed": ", ".join(
            f"{name} {milliseconds(ms)}{said[str(name)]}" for name, ms in by_name.items()
        ),
        "pieces": evidence.of_kernels(chosen["kernel"]),
        "unknown": "The recording does not show how close they are to the GPU's limits."
        if chosen["share_of_ceiling"].isna().all()
        else None,
        "speedup": bounded(0.5 * time / evidence.total_ms),
    }


def _kernels_of_one_place(evidence: Evidence, table: pd.DataFrame) -> Measured | None:
    """Figures of :func:`largest_kernels` for kernels none of which is large, but all those of one
    operator, function or range are; None without one.

    Args:
        table: rows of :func:`_kernels`.
    """
    pieces = evidence.of_kernels(table["kernel"])
    most = {
        str(times.index[0]): (float(times.iloc[0]), level)
        for level, times in time_by_name(evidence.profile, *pieces).items()
        if len(times)
    }
    name = max(most, key=lambda each: most[each][0], default="")
    time, level = most.get(name, (0.0, ""))
    if time < PIECE_SHARE * evidence.total_ms:
        return None
    inside = in_place(evidence.profile, level, name)[pieces[0]]
    own = evidence.profile.contexts.iloc[pieces[0][inside]]
    short = own["name"].map(lambda kernel: kernel_name(kernel).short or kernel)
    by_kernel = pd.Series(pieces[1][inside]).groupby(short.to_numpy()).sum().nlargest(MOST_NAMES)
    return {
        "share": time / evidence.total_ms,
        "component": largest(
            pd.Series(pieces[1][inside]).groupby([own[each].to_numpy() for each in PART]).sum()
        )[0],
        "what": f"Kernels in {name[:70]}",
        "take": "take",
        "kernels": ", ".join(map(str, by_kernel.index[:2])),
        "listed": ", ".join(f"{each} {milliseconds(ms)}" for each, ms in by_kernel.items()),
        "pieces": (pieces[0][inside], pieces[1][inside]),
        "unknown": None,
        "speedup": bounded(0.5 * time / evidence.total_ms),
    }


@rule(
    "dominant_place",
    title="{name} takes {share:.0%} of the step",
    evidence=(
        "In {what} {name} the GPU works {busy:ms} and is idle {idle:ms} of {total:ms} per "
        "iteration{place}.",
        "Its kernels: {kernels}.",
        "No rule found why: how short it could be, and what would help, was not measured.",
    ),
    advice="Look first at what is named here: what calls it, with which types and shapes, and "
    "whether each iteration needs it.",
    limit="",
    gpu=True,
)
def dominant_place(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """One range, operator or function of another program takes much of the step: the GPU's work in
    it and the GPU's idle time together, whatever the kernels and the causes are."""
    if evidence.is_ours or not evidence.has_timeline:
        return None
    profile, pieces = evidence.profile, evidence.pieces
    exchanges = profile.which("name", lambda name: bool(COMMUNICATION.search(name)))
    exchange = np.append(exchanges, False)[pieces["context"]] & pieces["where"].eq("device")
    rows = pieces[~exchange]
    places = time_by_name(profile, rows["context"], rows["ms"])
    del places["call"]  # of idle time, which another finding tells
    most = max((float(times.iloc[0]) for times in places.values() if len(times)), default=0.0)
    if most < DOMINANT_SHARE * evidence.total_ms:
        return None
    # of nested names with nearly the same time the innermost
    level = [
        key for key, times in places.items() if len(times) and times.iloc[0] > SAME_PLACE * most
    ][-1]
    name = str(places[level].index[0])
    if any(share > TOLD * most / evidence.total_ms and name in text for share, text in ledger.told):
        return None
    inside = in_place(profile, level, name)
    own = rows[inside[rows["context"]] & rows["context"].ge(0)]
    busy = own[own["where"].eq("device")]
    by_context = busy.groupby("context")["ms"].sum()
    names = profile.contexts["name"].iloc[by_context.index]
    short = [kernel_name(kernel).short or kernel for kernel in names]
    kernels = by_context.groupby(short).sum().nlargest(MOST_NAMES)
    parts = parts_at(profile, own["context"].to_numpy())
    part = largest(own["ms"].groupby([parts[each].to_numpy() for each in PART]).sum())
    time = float(own["ms"].sum())
    return {
        "share": time / evidence.total_ms,
        "component": part[0],
        "name": name[:90],
        "what": f"the {LEVELS[level].removesuffix(' within it')}",
        "busy": float(busy["ms"].sum()),
        "idle": time - float(busy["ms"].sum()),
        "place": f", most in {part_label(*part)}" if part[0] != "other" else "",
        "kernels": ", ".join(f"{each} {milliseconds(ms)}" for each, ms in kernels.items()) or None,
        "pieces": (own["context"], own["ms"]),
        "speedup": bounded(0.5 * time / evidence.total_ms),
    }


@rule(
    "heavy_copy",
    title="{what} {where} take {share:.0%} of the step",
    evidence=(
        "{names}: {count:,.0f} per iteration, {time:ms}, {alone:ms} of it while no kernel runs"
        "{rate}.",
    ),
    advice="Avoid them: work in place or on views, write results where they are needed (out=), "
    "keep the layout that the next operator wants, and clear one large buffer and not many.",
    limit="memory bandwidth",
    gpu=True,
)
def heavy_copy(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Copies and memory sets that never cross the link take much of the step."""
    work = evidence.work
    if work.empty:
        return None
    profile = evidence.profile
    over_link = profile.which("name", lambda name: bool(OVER_LINK.search(name)))
    found = work[work["kind"].eq("copy") & ~over_link[work["context"]]]
    found = found.assign(name=profile.contexts["name"].iloc[found["context"]].to_numpy())
    if found.empty:
        return None
    time, alone = evidence.alone_ms(found, work[work["kind"].eq("kernel")])
    share = alone / evidence.total_ms
    if share < COPY_ON_GPU_SHARE:
        return None
    length = found["end_ns"] - found["start_ns"]
    by_name = length.groupby(found["name"]).sum().nlargest(2)
    is_set = found["name"].str.contains("memset|<gpu set>", case=False)
    peer = found["name"].str.contains("PtoP|peer", case=False)
    sets = float(length[is_set].sum()) / float(length.sum())
    steps = max(len(evidence.windows[0]), 1)
    every = np.bincount(profile.trace["context"], minlength=len(profile.contexts))
    size = profile.value_table("copy_bytes").to_numpy()
    moved = float(np.nan_to_num((size / np.maximum(every, 1))[found["context"]]).sum())
    part = largest(length.groupby([found["component"], found["phase"]]).sum())
    ledger.explain(alone, part)
    return {
        "share": share,
        "component": part[0],
        "what": "Memory sets" if sets > 0.9 else "Copies" if sets < 0.1 else "Copies and sets",
        "where": "between GPUs" if float(length[peer].sum()) > 0.5 * length.sum() else "on the GPU",
        "names": ", ".join(str(name) for name in by_name.index),
        "count": len(found) / steps,
        "time": time,
        "alone": alone,
        "rate": f"; {moved / steps / 1e6:,.1f} MB per iteration" if moved > 0 else "",
        "pieces": (found["context"], length / 1e6 / steps),
        "speedup": bounded(share),
    }


@rule(
    "allocation",
    title="The GPU is idle {share:.0%} of the step while the host takes or gives back memory",
    evidence=(
        "{names}: {count:,.1f} calls per iteration; the GPU idles {time:ms} in them, most in "
        "{place}.",
        "{doubt}",
    ),
    advice="Keep memory: torch's caching allocator calls the driver only when it has none left, "
    "when blocks are too split (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) or after "
    "torch.cuda.empty_cache(); a smaller batch or buffers taken once leave it room.",
    limit="memory capacity",
    gpu=True,
    concerns=(IDLE,),
)
def allocation(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The GPU idles while the host is in calls that allocate or free its memory."""
    if not evidence.has_timeline:
        return None
    idle = without(evidence.idle, ledger.taken)
    idle = idle[idle["cause"].eq("allocation")]
    left = evidence.idle_ms - ledger.idle_ms
    time = min(float(idle["idle_ms"].sum()), max(left, 0.0))
    if time < ALLOCATION_SHARE * evidence.total_ms:
        return None
    profile = evidence.profile
    asked = profile.which("name", lambda name: bool(ALLOCATING.match(name)))
    trace = profile.trace[asked[profile.trace["context"].to_numpy()]]
    calls = trace[evidence.inside(trace["start_ns"].to_numpy())]
    names = profile.contexts["name"].iloc[calls["context"]]
    part = largest(idle.groupby(PART)["idle_ms"].sum())
    ledger.explain(time, part)
    ledger.idle_ms += time
    ledger.idle_causes.add("allocation")
    return {
        "share": time / evidence.total_ms,
        "component": part[0],
        "names": ", ".join(sorted(names.unique())) or "Calls of the driver",
        "count": len(calls) / max(len(evidence.windows[0]), 1),
        "time": time,
        "place": part_label(*part) or "the loop",
        "doubt": _doubt(evidence),
        "pieces": (idle["context"], idle["idle_ms"]),
    }


@rule(
    "stall",
    title="{of_samples:.0%} of the GPU's samples are stalls by one reason: {meaning}",
    evidence=(
        "{reason}: {of_samples:.0%} of all warp samples, {of_stalls:.0%} of the stalls, most in "
        "{kernel}{line}.",
        "{quality}",
        "Kernels take {kernels:.1%} of the step, so that these stalls are {share:.1%} of it.",
    ),
    advice="{remedy}.",
    limit="memory bandwidth",
    gpu=True,
)
def stalls(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """One reason stops most warps, by PC samples."""
    sampled = sampled_profile(evidence.profile)
    table = stall_table(sampled)
    if table.empty:
        return None
    reasons = stall_reasons(table)
    reasons = reasons[~reasons["reason"].isin(UNAVOIDABLE_STALLS)]
    if reasons.empty:
        return None
    top = reasons.loc[reasons["share_of_samples"].idxmax()]
    reason, of_samples = str(top["reason"]), float(top["share_of_samples"])
    if of_samples < STALL_SHARE:
        return None
    kernels = table[table["reason"] == reason]
    kernel = str(kernels.loc[kernels["warp_cycles"].idxmax(), "kernel"])
    contexts = evidence.profile.contexts
    named = contexts[(contexts["name"] == kernel) & (contexts["kind"] == "kernel")]
    of_step = min(_kernel_ms(evidence) / evidence.total_ms, 1.0)
    lines = stall_table(sampled, "line")
    lines = lines[(lines["reason"] == reason) & (lines["kernel"] == kernel) & lines["file"].ne("")]
    return {
        "id": f"stall_{reason.lower()}",
        "share": of_samples * of_step,
        "kernels": of_step,
        "of_samples": of_samples,
        "component": str(named["component"].iloc[0]) if len(named) else "other",
        "reason": reason,
        "meaning": STALLS.get(reason, ""),
        "of_stalls": top["share_of_stalls"],
        "kernel": kernel_name(kernel).short or kernel[:80],
        "line": f", at {lines.loc[lines['warp_cycles'].idxmax(), 'place']}" if len(lines) else "",
        "quality": _sampling_quality(sampled.meta.get("pc_sampling") or {}),
        "remedy": capitalised(str(top["advice"])),
        "speedup": bounded(0.3 * of_samples * of_step),
        "limit": STALL_LIMITS.get(reason, "memory bandwidth"),
    }


def _sampling_quality(measured: dict[str, Any]) -> str | None:
    """How many samples a stall table stands on; a reason stands where there is no number."""
    taken, period = measured.get("taken"), measured.get("period_cycles")
    if not isinstance(taken, float | int):
        return None
    text = f"{taken:,.0f} samples"
    if isinstance(period, float | int):
        text += f", one in {period:,.0f} cycles"
    expected, dropped = measured.get("expected"), measured.get("dropped")
    if isinstance(expected, float | int) and expected:
        text += f", {min(taken / expected, 1.0):.0%} of those expected"
    lost = f"{dropped:,.0f}" if isinstance(dropped, float | int) else "not measured"
    return f"Sampling: {text}; dropped: {lost}."


def _kernel_ms(evidence: Evidence) -> float:
    """Time of a mean step in which kernels run, no more than the GPU works."""
    return min(float(_kernels(evidence)["ms"].sum()), evidence.device_ms)


def _kernels(evidence: Evidence) -> pd.DataFrame:
    """As :func:`kernel_table`, with ``ms`` of a mean step."""
    table = kernel_table(evidence.profile)
    each = table["time_ms"] / iteration_count(evidence.profile)
    return table.assign(ms=table["per_iteration_ms"].fillna(each))


def _capability(evidence: Evidence) -> int | None:
    """First figure of the GPU's compute capability."""
    for device in evidence.meta.get("devices") or []:
        major = str(device.get("compute") or "").partition(".")[0]
        if major.isdigit():
            return int(major)
    return None


def _link_gb_per_s(evidence: Evidence) -> float | None:
    capability = _capability(evidence)
    return None if capability is None else LINKS_GB_PER_S.get(capability)


def _synchronising_calls(evidence: Evidence) -> pd.DataFrame:
    """Calls in the step that wait for the GPU: ``start_ns``, ``end_ns``, ``name``,
    ``component``, ``phase``, ``waited_ms`` (of a mean iteration)."""
    profile = evidence.profile
    waits = profile.which("name", lambda name: bool(SYNC.fullmatch(name)))
    trace = profile.trace[waits[profile.trace["context"].to_numpy()]]
    calls = trace[evidence.inside(trace["start_ns"].to_numpy())].reset_index(drop=True)
    if calls.empty or not evidence.has_timeline:
        return calls[:0]
    names = profile.contexts[["name", *PART]].iloc[calls["context"]].reset_index(drop=True)
    calls = calls[["start_ns", "end_ns", "context"]].join(names)
    length = calls["end_ns"] - calls["start_ns"]
    return calls.assign(waited_ms=length / 1e6 / len(evidence.windows[0]))


def _idle_around(evidence: Evidence, calls: pd.DataFrame, ledger: Ledger) -> tuple[float, float]:
    """(idle time from synchronising calls to the next work, that of it the calls cost), ms of a
    mean iteration; each call gets its part as ``lost_ms``."""
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
    calls["lost_ms"] = lost.to_numpy() / count
    return float(groups["idle"].max().sum()) / count, float(calls["lost_ms"].sum())


def _busy_or_taken(evidence: Evidence, ledger: Ledger) -> Stretches:
    """Stretches in which the GPU works, or does nothing for no fault of this program."""
    begun, done = ledger.taken
    return union(
        np.concatenate([evidence.work["start_ns"].to_numpy(), begun]),
        np.concatenate([evidence.work["end_ns"].to_numpy(), done]),
    )


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
        start = spans["start_ns"].to_numpy()[np.maximum(at, 0)]
        end = spans["end_ns"].to_numpy()[np.maximum(at, 0)]
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
    evidence: Evidence, calls: pd.DataFrame, around: pd.DataFrame, ledger: Ledger
) -> pd.DataFrame:
    """``calls`` whose ``lost_ms`` is no less than the GPU's idle time in the operators around."""
    busy = _busy_or_taken(evidence, ledger)
    around = around.drop_duplicates(["start_ns", "end_ns"])
    start, end = around["start_ns"].to_numpy(), around["end_ns"].to_numpy()
    idle = (end - start - overlap(start, end, *busy)) / 1e6 / max(len(evidence.windows[0]), 1)
    inside = pd.Series(idle, index=around["call"]).groupby(level=0).sum()
    return calls.assign(
        lost_ms=np.fmax(calls["lost_ms"], inside.reindex(calls.index)).astype(float)
    )


def _copies(evidence: Evidence) -> pd.DataFrame:
    """Copies over the link in the step: rows of ``evidence.work`` with ``name``, ``ms`` and
    ``bytes`` (0 where not measured), each of a mean iteration."""
    work, profile = evidence.work, evidence.profile
    if work.empty:
        return work
    names = profile.contexts["name"]
    over_link = profile.which("name", lambda name: bool(OVER_LINK.search(name)))[work["context"]]
    found = work[work["kind"].eq("copy") & over_link]
    count = max(len(evidence.windows[0]), 1)
    every = np.bincount(profile.trace["context"], minlength=len(names))[found["context"]]
    size = np.nan_to_num(profile.value_table("copy_bytes").to_numpy())[found["context"]]
    return found.assign(
        name=names.iloc[found["context"]].to_numpy(),
        ms=(found["end_ns"] - found["start_ns"]) / 1e6 / count,
        bytes=size / np.maximum(every, 1) / count,
    )


def _delaying_ms(evidence: Evidence, found: pd.DataFrame, kernels: pd.DataFrame) -> float:
    """Time of copies in a mean step that nothing hides and in which something waits for them:
    launched work, or the host in a call that copies or synchronises. Where the host and launches
    are not recorded, all that nothing hides."""
    start, end = union(found["start_ns"].to_numpy(), found["end_ns"].to_numpy())
    ran = union(kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy())
    launched = kernels[kernels["launch_end_ns"] >= 0]
    profile = evidence.profile
    blocking = profile.which("name", lambda name: bool(BLOCKING.match(name)))
    calls = profile.trace[blocking[profile.trace["context"].to_numpy()]]
    waits = union(
        np.concatenate([launched["launch_end_ns"].to_numpy(), calls["start_ns"].to_numpy()]),
        np.concatenate([launched["start_ns"].to_numpy(), calls["end_ns"].to_numpy()]),
    )
    count = 1e6 * max(len(evidence.windows[0]), 1)
    if not host_is_traced(profile):
        return float((end - start).sum() - overlap(start, end, *ran).sum()) / count
    hidden_or_free = union(np.concatenate([ran[0], waits[0]]), np.concatenate([ran[1], waits[1]]))
    either = float(overlap(start, end, *hidden_or_free).sum())
    return (either - float(overlap(start, end, *ran).sum())) / count


ALLOCATING = re.compile(r"(?:cuda|cu|hip)(?:Malloc|Free|Mem(?:Alloc|Free)|Host(?:Alloc|Free))")
"""Calls that take memory from the driver or give it back."""

BLOCKING = re.compile(r"(?:cuda|cu|hip)\w*(?:Memcpy|Synchronize)")
"""Calls in which the host may wait for a copy."""
