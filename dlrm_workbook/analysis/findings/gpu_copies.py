"""What the GPU copies, sets and exchanges while nothing computes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.text import counted
from dlrm_workbook.analysis.attribution import PART, host_is_traced
from dlrm_workbook.analysis.findings.evidence import MOST_LISTED, Evidence, joined, listed_times
from dlrm_workbook.analysis.findings.finding import (
    Causes,
    Measured,
    bounded,
    largest,
    largest_part,
    predicted,
    rule,
)
from dlrm_workbook.analysis.findings.gpu_taken import BLOCKING
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.ground.units import digits, milliseconds
from dlrm_workbook.recordings.nesting import overlap, stretches
from dlrm_workbook.recordings.nsight import MIGRATED
from dlrm_workbook.recordings.torch.trace import LAUNCHED_BEFORE

SMALL_COPY = 1000
"""Bytes up to which a copy's time is that of calling it."""

OVER_LINK = re.compile("HtoD|DtoH|HostToDevice|DeviceToHost|copyin|copyout")


@rule(
    "copies_not_overlapped",
    title="Copies that no kernel overlaps take {share:.0%} of the step",
    evidence=(
        "Copies of {megabytes} MB per iteration, in {count}, take {time:ms}{rate}, {alone:ms} of "
        "it while no kernel runs and work or the host waits for them.",
        "The GPU idles {idle_ms:ms} more around calls that return when their copy has ended.",
        "{pageable:ms} are from or to pageable memory, which the driver copies twice.",
        "Pinned copies reach {pinned:.1f} GB/s here.",
        "Pinned copies over this GPU's link reach about {link:.0f} GB/s (PCIe x16).",
        "{doubt}",
    ),
    advice="The prefetching loader pins its batches, so that copies are asynchronous and run "
    "beside kernels; uniform and zipf batches can be made on the GPU (data.place: device).",
    limit="copies",
    timeline=True,
)
def copies(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Copies between host and GPU hold the step up: pageable memory, or not overlapped."""
    crossing = _copies(evidence, over_link=True)
    if crossing.empty:
        return None
    kernels = evidence.work[evidence.work["kind"].eq("kernel")]
    time, alone = evidence.alone_ms(crossing, kernels)[0], _delaying_ms(evidence, crossing, kernels)
    share = (alone + ledger.copying_ms) / evidence.total_ms
    is_pageable = crossing["name"].str.contains("Pageable", case=False)
    pageable, size = float(crossing.loc[is_pageable, "ms"].sum()), float(crossing["bytes"].sum())
    summed = float(crossing["ms"].sum())
    pinned = [row for row in evidence.ceiling("copy") or [] if row.get("kind") == "pinned"]
    best = max((row["gb_per_s"] for row in pinned), default=None)
    on_device = evidence.parameter("data.place") == "device"
    in_turn = evidence.parameter("data.loader") == "synchronous" and not on_device
    change: dict[str, Any] = {"data.loader": "prefetch"} if in_turn else {}
    figures: Measured = {
        "share": share,
        "explains": largest_part(crossing, "ms"),
        "count": counted(max(round(len(crossing) / evidence.iterations), 1), "piece"),
        "megabytes": digits(size / 1e6) if size else None,
        "time": time,
        "idle_ms": ledger.copying_ms or None,
        "rate": f" ({digits(size / summed / 1e6)} GB/s)",
        "alone": alone,
        "pageable": None,
        "pinned": best,
        "link": None if best else LINKS_GB_PER_S.get(evidence.capability or 0),
        "pieces": (crossing["context"], crossing["ms"]),
        "change": change,
        "speedup": (predicted(evidence, change) if change else None) or bounded(share),
    }
    if not size:
        figures["evidence"] = (
            "Copies take {time:ms} per iteration, {alone:ms} of it while no kernel runs and work "
            "or the host waits for them; their bytes were not measured.",
        )
    if not evidence.is_ours:
        pinned_ms = crossing.loc[crossing["name"].str.contains("Pinned"), "ms"].sum()
        figures["advice"] = (
            "Keep on the GPU what is copied again and again, such as offloaded parameters, or copy "
            "fewer bytes (they are pinned already), ahead and on a stream of their own."
            if pinned_ms > 0.5 * summed
            else "Copy many values at once: a copy takes microseconds, however little it moves."
            if 0 < size * evidence.iterations < SMALL_COPY * len(crossing)
            else "Pin the batches (DataLoader(pin_memory=True)) and copy them ahead with "
            "non_blocking=True on a stream of their own, or copy fewer bytes."
        )
    if crossing.loc[crossing["name"].str.contains(MIGRATED), "ms"].sum() > 0.5 * summed:
        figures["title"] = "Moving pages of unified memory takes {share:.0%} of the step"
        figures["advice"] = PREFETCH
    if pageable > 0.3 * summed:
        figures["id"] = "pageable_copies"
        figures["title"] = "Copies from pageable memory take {share:.0%} of the step"
        figures["pageable"] = pageable
    return figures


PREFETCH = (
    "Move the data ahead of who uses it (cudaMemPrefetchAsync, cudaMemAdvise), or copy it: pages "
    "that a kernel or the host faults on move in small pieces, while it waits."
)
"""The advice where pages of unified memory move."""


def _copies(evidence: Evidence, over_link: bool) -> pd.DataFrame:
    """Copies in the step, over the link or on GPUs: rows of ``evidence.work`` with ``name``, ``ms``
    and ``bytes`` (0 where not measured), each of a mean iteration."""
    work, profile = evidence.work, evidence.profile
    names = profile.contexts["name"]
    crossing = evidence.named(OVER_LINK)[work["context"]] == over_link
    chosen = work[work["kind"].eq("copy") & crossing]
    count = evidence.iterations
    every = np.bincount(profile.trace["context"], minlength=len(names))[chosen["context"]]
    size = np.nan_to_num(profile.value_table("copy_bytes").to_numpy())[chosen["context"]]
    return chosen.assign(
        name=names.iloc[chosen["context"]].to_numpy(),
        ms=(chosen["end_ns"] - chosen["start_ns"]) / 1e6 / count,
        bytes=size / np.maximum(every, 1) / count,
    )


def _delaying_ms(evidence: Evidence, found: pd.DataFrame, kernels: pd.DataFrame) -> float:
    """Time of copies in a mean step that nothing hides and in which something waits for them:
    launched work (further copies too), or the host in a call that copies or synchronises. What was
    launched before the recording waits from its beginning. Where the host and launches are not
    recorded, all that nothing hides."""
    start, end = stretches(found)
    ran = stretches(kernels)
    profile, work = evidence.profile, evidence.work
    caller = profile.contexts["parent"].to_numpy()[work["context"]]
    before = evidence.named(re.compile(LAUNCHED_BEFORE))[np.maximum(caller, 0)]
    since = work["launch_end_ns"].where(~before, evidence.windows[0][0])
    calls = evidence.spans(evidence.named(BLOCKING))
    launched = since.ge(0)
    queued = since[launched].to_numpy(), work["start_ns"][launched].to_numpy()
    either = (end - start).sum()
    if host_is_traced(profile):
        either = overlap(start, end, *joined(ran, queued, stretches(calls))).sum()
    return float(either - overlap(start, end, *ran).sum()) / 1e6 / evidence.iterations


LINKS_GB_PER_S = {6: 12, 7: 12, 8: 25, 9: 50, 10: 50, 12: 50}
"""What pinned copies reach over PCIe x16 (generations 3, 4 and 5) by the first figure of the
compute capability of NVIDIA's GPUs of that time."""


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
    timeline=True,
)
def heavy_copy(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Copies and memory sets that never cross the link take much of the step."""
    staying = _copies(evidence, over_link=False)
    if staying.empty:
        return None
    time, alone = evidence.alone_ms(staying, evidence.work[evidence.work["kind"].eq("kernel")])
    share = alone / evidence.total_ms

    def part_of(pattern: str) -> float:
        own = staying["name"].str.contains(pattern, case=False)
        return float(staying.loc[own, "ms"].sum() / staying["ms"].sum())

    sets, moved = part_of("memset|<gpu set>"), float(staying["bytes"].sum())
    return {
        "share": share,
        "explains": largest_part(staying, "ms"),
        "what": "Memory sets" if sets > 0.9 else "Copies" if sets < 0.1 else "Copies and sets",
        "where": "between GPUs" if part_of("PtoP|peer") > 0.5 else "on the GPU",
        "names": ", ".join(staying.groupby("name")["ms"].sum().nlargest(2).index),
        "count": len(staying) / evidence.iterations,
        "time": time,
        "alone": alone,
        "rate": f"; {moved / 1e6:,.1f} MB per iteration" if moved > 0 else "",
        "pieces": (staying["context"], staying["ms"]),
        "speedup": bounded(share),
    }


EXCHANGE_ALONE_SHARE = 0.1

LATE_TIMES, LEAST_LIKE, MOST_LATE = 10.0, 4, 0.25
"""Times the usual length of at least so many collectives of its name for one to be late, and the
largest part of all that is."""


@rule(
    "exposed_communication",
    title="Exposed communication takes {share:.0%} of the step",
    evidence=(
        "Collectives run {time:ms} per iteration, {exposed:ms} of it while nothing else does: "
        "{kinds}.",
        "Up to {waiting:ms} of that is waiting for other ranks, which has a finding of its own.",
        "In {waited:ms} of it the recording shows this rank waiting for others.",
        "{late}",
        "{unknown}",
    ),
    advice="Start collectives earlier and let them run beside computing (a pipeline over batches, "
    "larger buckets of gradients), send fewer bytes (bf16, smaller tables replicated), and even "
    "out the ranks.",
    limit="network",
    component="communication",
    timeline=True,
)
def exposed_communication(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Collectives hold the step up."""
    exchange = evidence.work[evidence.is_exchange]
    if exchange.empty:
        return None
    time, exposed = evidence.exchange_ms
    alone = max(exposed - ledger.waiting_ms, 0.0)
    names = evidence.profile.contexts["name"].iloc[exchange["context"]]
    kinds = exchange.groupby([kernel_name(name).short for name in names])
    by_kind = pd.Series({kind: evidence.alone_ms(rows, rows)[0] for kind, rows in kinds})
    length = (exchange["end_ns"] - exchange["start_ns"]) / 1e6 / evidence.iterations
    late = _late_calls(exchange, names)
    waits = stretches(pd.DataFrame(evidence.meta.get("exchange_waits", exchange[:0])))
    waited = overlap(*stretches(exchange), *waits).sum() / 1e6 / evidence.iterations
    return {
        "share": alone / evidence.total_ms,
        "least": EXCHANGE_ALONE_SHARE,
        "explains": ("communication", largest(exchange.groupby(PART).size())[1]),
        "time": time,
        "exposed": exposed,
        "waiting": min(ledger.waiting_ms, exposed) or None,
        "late": late,
        "waited": waited or None,
        **(MOSTLY_WAITS if waited > 0.5 * time else {}),
        "unknown": None
        if late or waited or len(evidence.ranks) > 1
        else "The recording of one rank does not show how much of it is waiting for another rank.",
        "kinds": listed_times(by_kind.nlargest(MOST_LISTED)),
        "pieces": (exchange["context"], length),
        "speedup": bounded(alone / evidence.total_ms),
    }


MOSTLY_WAITS: Measured = {
    "title": "Exposed communication takes {share:.0%} of the step, most of it waiting for others",
    "advice": "Even out the ranks, and look at a recording of the one that comes last.",
}
"""Sentences of exchanges in which a rank is recorded to wait for the others most of the time."""


def _late_calls(exchange: pd.DataFrame, names: pd.Series) -> str | None:
    """A sentence on few collectives that take far longer than all others of their name and have
    most of the time of all; None where there are none."""
    ms = (exchange["end_ns"] - exchange["start_ns"]).to_numpy() / 1e6
    of_kind = pd.Series(ms).groupby(names.to_numpy())
    usual = of_kind.transform("median").to_numpy()
    odd = (ms > LATE_TIMES * usual) & (of_kind.transform("size").to_numpy() >= LEAST_LIKE)
    if odd.mean() > MOST_LATE or not ms[odd].sum() > 0.5 * ms.sum():
        return None
    return (
        f"Of {counted(len(ms), 'collective')} the longest, {odd.sum():,}, last up to "
        f"{milliseconds(ms[odd].max())}, others of their names "
        f"{milliseconds(float(np.median(usual[odd])))}: there the rank waits for one that comes "
        "later, or sets up what it first uses, unless they carry that many times the bytes."
    )
