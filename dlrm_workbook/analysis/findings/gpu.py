"""The GPU: why it idles, what it copies, which of its units it leaves unused.

Idle time is charged to what the host does meanwhile (:mod:`dlrm_workbook.analysis.idleness`):
in a synchronising call it waits for the GPU itself, elsewhere the GPU waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.parts import part_label
from dlrm_core.units import milliseconds
from dlrm_workbook.analysis.attribution import iteration_count, step_contexts
from dlrm_workbook.analysis.context_tree import overlap, union
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import (
    Finding,
    Ledger,
    amdahl,
    bounded,
    largest,
    predicted,
    removed,
)
from dlrm_workbook.analysis.gpu import (
    kernel_table,
    sampled_profile,
    stall_reasons,
    stall_table,
)
from dlrm_workbook.analysis.idleness import gpu_idleness, idle_blame
from dlrm_workbook.recordings.hpctoolkit.metrics import STALLS

IDLE_SHARE = 0.2
"""Of the iterations in which no stream runs; below it launches keep ahead of kernels."""

SHORT_KERNEL_US = 10.0
"""A launch costs 3 to 10 us of host time (NVIDIA, "Getting started with CUDA graphs",
2019): kernels shorter than this cannot hide it. The measured launch cost is used where
there is one."""

SYNC = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize")
COPY_CALL = re.compile(r"cu(da)?Memcpy(?!.*Async)")
SYNC_SHARE = 0.03

COPY_SHARE = 0.05
GEMM = re.compile(r"gemm|xmma|cutlass|cublas|wgmma|hmma", re.IGNORECASE)
TENSOR_CORE = re.compile(
    r"tensorop|tensor_op|hmma|wgmma|mma_?sync|xmma_gemm|h?16816|s1688|s16816|bf16|f16|fp16|tf32|"
    r"imma|nvjet|_h\d+_|hgemm",
    re.IGNORECASE,
)
GEMM_SHARE = 0.1

LOW_OCCUPANCY = 25.0
OCCUPANCY_SHARE = 0.2
STALL_SHARE = 0.3
"""Of the samples, by one reason."""

UNAVOIDABLE_STALLS = ("NONE", "NSEL", "HID", "INV", "OTHR")


def synchronising(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The host waits for the GPU within the step, and the GPU then for the host."""
    if not evidence.on_gpu:
        return
    calls = _calls(evidence, SYNC)
    readbacks = evidence.called["name"].isin(
        ["aten::item", "aten::_local_scalar_dense", "aten::nonzero"]
    )
    reads = evidence.called[readbacks & evidence.called["name"].ne("aten::item")]
    if calls.empty or calls["calls"].sum() < 0.5:
        return
    count = float(calls["calls"].sum())
    waited = float(calls["time_ms"].sum())
    idle = _idle_after(evidence, calls["context"].tolist())
    share = max(idle, 0.0) / evidence.total_ms if evidence.total_ms else 0.0
    if max(share, waited / max(evidence.total_ms, 1e-9)) < SYNC_SHARE:
        return
    share = max(share, SYNC_SHARE)
    by = calls.groupby(["component", "phase"])["time_ms"].sum()
    component, phase = largest(by)
    ledger.explain(idle, (str(component), str(phase)))
    names = ", ".join(sorted(calls["name"].unique()))
    text = (
        f"{names} is called {count:,.1f} times an iteration, most in "
        f"{part_label(str(component), str(phase)) or 'the loop'}; the host waits "
        f"{milliseconds(waited)} in it, and the GPU idles {milliseconds(idle)} after it."
    )
    if not reads.empty:
        text += f" {', '.join(sorted(reads['name'].unique()))} read values back."
    yield Finding(
        id="synchronisation",
        title=f"The host waits for the GPU {count:,.0f} times in each step",
        component=str(component),
        share_of_step=min(share, 1.0),
        evidence=text,
        advice=(
            "Do not read values back in the loop (.item(), .cpu(), nonzero, print of a tensor): "
            "keep losses on the GPU and read them every training.log_every iterations."
        ),
        predicted_speedup=removed(share),
        limit="synchronisation",
    )


def copies(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Copies between host and GPU hold the step up: pageable memory, or not overlapped."""
    if not evidence.on_gpu or evidence.total_ms <= 0:
        return
    found = _copies(evidence)
    if found.empty:
        return
    alone = float(found["alone_ms"].sum())
    share = alone / evidence.total_ms
    pageable = found["name"].str.contains("Pageable", case=False)
    big = float(found.loc[pageable, "time_ms"].sum())
    if share < COPY_SHARE:
        return
    is_pageable = big > 0.3 * float(found["time_ms"].sum())
    total = float(found["bytes"].sum())
    rate = total / float(found["time_ms"].sum()) / 1e6 if found["time_ms"].sum() else 0.0
    ledger.explain(alone, ("transfer", "forward"))
    text = (
        f"Copies of {total / 1e6:,.1f} MB an iteration take "
        f"{milliseconds(float(found['time_ms'].sum()))} ({rate:.1f} GB/s), "
        f"{milliseconds(alone)} of it while no kernel runs."
    )
    if is_pageable:
        text += (
            f" {milliseconds(big)} are from or to pageable memory, which the driver copies twice."
        )
    pinned = [row for row in evidence.ceilings("copy") or [] if row.get("kind") == "pinned"]
    if pinned:
        text += f" Pinned copies reach {max(row['gb_per_s'] for row in pinned):.1f} GB/s here."
    change: dict[str, Any] = {}
    if (
        evidence.parameter("data.loader") == "synchronous"
        and evidence.parameter("data.place") != "device"
    ):
        change = {"data.loader": "prefetch"}
    yield Finding(
        id="pageable_copies" if is_pageable else "copies_not_overlapped",
        title=(
            f"Copies from pageable memory hold {share:.0%} of the step"
            if is_pageable
            else f"Copies that no kernel overlaps hold {share:.0%} of the step"
        ),
        component=str(found.groupby("component")["alone_ms"].sum().idxmax()),
        share_of_step=share,
        evidence=text,
        advice=(
            "The prefetching loader pins its batches, so that copies are asynchronous and run "
            "beside kernels; uniform and zipf batches can be made on the GPU (data.place: device)."
        ),
        change=change,
        predicted_speedup=(predicted(evidence, change) if change else None) or bounded(share),
        limit="copies",
    )


def launch_bound(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The GPU idles while the host prepares launches."""
    if not evidence.on_gpu:
        return
    idleness = gpu_idleness(evidence.profile)
    if idleness.empty:
        return
    idle_share = float(idleness["idle_share"].mean())
    blame = idle_blame(evidence.profile, "component")
    busy = blame[~blame["component"].isin(["data", "transfer"])] if not blame.empty else blame
    host = float(busy["share"].sum()) * idle_share if not busy.empty else 0.0
    host -= ledger.explained_ms / evidence.total_ms if evidence.total_ms else 0.0
    kernels = kernel_table(evidence.profile)
    if kernels.empty or host < IDLE_SHARE:
        return
    launches = float(kernels["launches"].sum()) / iteration_count(evidence.profile)
    mean_us = 1e3 * float(kernels["time_ms"].sum()) / max(float(kernels["launches"].sum()), 1.0)
    cost = float(evidence.ceilings("launch_us") or SHORT_KERNEL_US)
    if mean_us > 5 * cost:
        return
    graphs: dict[str, Any] = {"training.cuda_graphs": True}
    if evidence.parameter("training.embedding_backend", "torch") != "fused":
        # with any other the host waits for the GPU in every update: nothing to capture
        graphs["training.embedding_backend"] = "fused"
    gain = predicted(evidence, graphs)
    off = not evidence.parameter("training.cuda_graphs", False)
    yield Finding(
        id="launch_bound",
        title=f"The GPU idles {idle_share:.0%} of the time, waiting for launches",
        component=str(busy.loc[busy["blamed_ms"].idxmax(), "component"]),
        share_of_step=host,
        evidence=(
            f"{launches:,.0f} kernels an iteration of {mean_us:.1f} us each, against "
            f"{cost:.1f} us for a launch; in {host:.0%} of the time the GPU has nothing to do "
            "while the host is in the model."
        ),
        advice=(
            "Fewer and longer kernels: capture the step in a CUDA graph (training.cuda_graphs), "
            "compile it, a larger batch, fused embeddings and optimiser."
        ),
        change=graphs if off else {},
        predicted_speedup=gain or bounded(min(host, 0.95)),
        limit="launches",
    )


def tensor_cores(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Matrix products in fp32 without tensor cores."""
    if not evidence.on_gpu:
        return
    kernels = kernel_table(evidence.profile)
    if kernels.empty or evidence.total_ms <= 0:
        return
    products = kernels[kernels["kernel"].str.contains(GEMM)]
    plain = products[~products["kernel"].str.contains(TENSOR_CORE)]
    time = float(plain["time_ms"].sum()) / iteration_count(evidence.profile)
    share = time / evidence.total_ms
    if share < GEMM_SHARE:
        return
    lowest = evidence.parameter("training.lowest_precision", "bf16")
    if evidence.parameter("training.precision", "fp32") == "fp32" and lowest != "fp32":
        change: dict[str, Any] = {"training.precision": "bf16"}
    elif not evidence.parameter("training.tf32", False):
        change = {"training.tf32": True}
    else:
        return
    names = ", ".join(plain.nlargest(2, "time_ms")["kernel"].str.slice(0, 60))
    yield Finding(
        id="tensor_cores_unused",
        title=f"Matrix products hold {share:.0%} of the step and use no tensor cores",
        component=str(plain.groupby("component")["time_ms"].sum().idxmax()),
        share_of_step=share,
        evidence=f"{milliseconds(time)} an iteration in kernels such as {names}.",
        advice=(
            "bf16 by autocast (training.precision) or TF32 (training.tf32) run on tensor cores, "
            "4 to 16 times the fp32 rate on A100 and later (data sheets in docs/roofline.md)."
        ),
        change=change,
        predicted_speedup=predicted(evidence, change)
        or {"low": amdahl(share, 1.5), "mid": amdahl(share, 3.0), "high": amdahl(share, 8.0)},
        limit="arithmetic",
    )


def occupancy(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Kernels that hold the step leave most of the GPU's warps empty."""
    if not evidence.on_gpu:
        return
    kernels = kernel_table(evidence.profile)
    if kernels.empty or kernels["occupancy_percent"].isna().all():
        return
    low = kernels[kernels["occupancy_percent"] < LOW_OCCUPANCY]
    low = low[~low["kernel"].str.contains(GEMM)]  # products live from registers, not from warps
    share = float(low["time_ms"].sum()) / float(kernels["time_ms"].sum())
    if share < OCCUPANCY_SHARE:
        return
    worst = low.loc[low["time_ms"].idxmax()]
    yield Finding(
        id="low_occupancy",
        title=f"Kernels of low occupancy hold {share:.0%} of the GPU's time",
        component=str(worst["component"]),
        share_of_step=share,
        evidence=(
            f"{str(worst['kernel'])[:80]} keeps {worst['occupancy_percent']:.0f} % of the warps "
            f"that fit on a multiprocessor ({worst['registers']:.0f} registers a thread, "
            f"{worst['blocks']:.0f} blocks a launch)."
        ),
        advice=(
            "More and smaller blocks (a larger batch), fewer registers or less shared memory a "
            "block, so that other warps run while one waits for memory."
        ),
        predicted_speedup=bounded(0.5 * share),
        limit="memory bandwidth",
    )


def stalls(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """One reason stops most warps, by PC samples."""
    if not evidence.on_gpu:
        return
    table = stall_table(sampled_profile(evidence.profile))
    if table.empty:
        return
    reasons = stall_reasons(table)
    reasons = reasons[~reasons["reason"].isin(UNAVOIDABLE_STALLS)]
    if reasons.empty:
        return
    top = reasons.loc[reasons["share_of_samples"].idxmax()]
    share = float(top["share_of_samples"])
    if share < STALL_SHARE:
        return
    kernels = table[table["reason"] == top["reason"]]
    kernel = str(kernels.loc[kernels["warp_cycles"].idxmax(), "kernel"])
    place = evidence.profile.contexts
    named = place[(place["name"] == kernel) & (place["kind"] == "kernel")]
    meaning = STALLS.get(str(top["reason"]), "")
    waits = {"GMEM": "memory bandwidth", "MTHR": "memory bandwidth", "MEM": "memory bandwidth"}
    limits = waits | {"SYNC": "synchronisation", "PIPE": "arithmetic"}
    yield Finding(
        id=f"stall_{str(top['reason']).lower()}",
        title=f"{share:.0%} of the GPU's samples are stalls by one reason: {meaning}",
        component=str(named["component"].iloc[0]) if len(named) else "other",
        share_of_step=share,
        evidence=(
            f"{top['reason']}: {share:.0%} of all warp samples, {top['share_of_stalls']:.0%} of "
            f"the stalls, most in {kernel[:80]}."
        ),
        advice=str(top["advice"])[:1].upper() + str(top["advice"])[1:] + ".",
        predicted_speedup=bounded(0.3 * share),
        limit=limits.get(str(top["reason"]), "memory bandwidth"),
    )


def _calls(evidence: Evidence, pattern: re.Pattern[str]) -> pd.DataFrame:
    """Calls of the step that match: ``context``, ``name``, ``component``, ``phase``,
    ``calls``, ``time_ms`` (inclusive), a mean iteration."""
    contexts = evidence.profile.contexts
    chosen = contexts["name"].str.fullmatch(pattern.pattern + r"\w*").to_numpy()
    chosen &= step_contexts(evidence.profile, other_threads=False)
    table = contexts.loc[chosen, ["context", "name", "component", "phase"]].copy()
    steps = iteration_count(evidence.profile)
    calls = evidence.profile.value_table("calls").to_numpy()[chosen]
    time = evidence.profile.value_table("cpu_time_ms", "inclusive").to_numpy()[chosen]
    table["calls"], table["time_ms"] = calls / steps, time / steps
    if not evidence.profile.has("calls"):
        # a sampled profile counts no calls; that it was met at all is at least one
        table["calls"] = 1.0
    return table


def _idle_after(evidence: Evidence, contexts: list[int]) -> float:
    """Milliseconds an iteration from the end of a synchronising call to the next GPU work."""
    profile = evidence.profile
    spans = profile.trace[profile.trace["context"].isin(contexts)]
    streams = profile.threads.loc[profile.threads["kind"] == "gpu_stream", "profile"]
    device = profile.trace[profile.trace["profile"].isin(streams)]
    if spans.empty or device.empty or profile.iterations.empty:
        return 0.0
    starts = np.sort(device["start_ns"].to_numpy())
    busy_until = np.maximum.accumulate(np.sort(device["end_ns"].to_numpy()))
    last = int(profile.iterations["end_ns"].max())
    idle = 0
    for end in spans["end_ns"].to_numpy():
        after = np.searchsorted(starts, end)
        until = int(starts[after]) if after < len(starts) else last
        before = np.searchsorted(busy_until, end, side="right") - 1
        # idle begins when the last kernel before the call's end was done, not when it returned
        since = int(busy_until[before]) if before >= 0 else int(end)
        running = ((device["start_ns"] < end) & (device["end_ns"] > end)).any()
        if not running:
            idle += max(0, until - since)
    return idle / 1e6 / iteration_count(profile)


def _copies(evidence: Evidence) -> pd.DataFrame:
    """Copies over the link: ``name``, ``component``, ``bytes``, ``time_ms``, ``alone_ms`` (no
    kernel runs meanwhile), a mean iteration."""
    profile = evidence.profile
    contexts = profile.contexts
    is_copy = contexts["kind"].eq("copy") & contexts["name"].str.contains(
        "HtoD|DtoH|copyin|copyout"
    )
    kernel = contexts["kind"].eq("kernel").to_numpy()
    copied = profile.trace[is_copy.to_numpy()[profile.trace["context"]]]
    ran = profile.trace[kernel[profile.trace["context"]]].sort_values("start_ns")
    if copied.empty:
        return pd.DataFrame()
    start, end = union(ran["start_ns"].to_numpy(), ran["end_ns"].to_numpy())
    copied = copied.sort_values("start_ns")
    covered = overlap(copied["start_ns"].to_numpy(), copied["end_ns"].to_numpy(), start, end)
    steps = iteration_count(profile)
    length = (copied["end_ns"] - copied["start_ns"]).to_numpy()
    table = pd.DataFrame(
        {
            "context": copied["context"].to_numpy(),
            "time_ms": length / 1e6 / steps,
            "alone_ms": (length - covered) / 1e6 / steps,
        }
    )
    table = table.groupby("context", as_index=False).sum()
    names = contexts.loc[table["context"], ["name", "component"]].reset_index(drop=True)
    table = table.join(names)
    size = profile.value_table("copy_bytes").reindex(table["context"]).to_numpy() / steps
    return table.assign(bytes=np.nan_to_num(size))


RULES = (synchronising, copies, launch_bound, tensor_cores, occupancy, stalls)
