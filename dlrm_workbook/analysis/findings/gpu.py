"""The GPU: why it idles, what it copies, which of its units it leaves unused.

Idle time is charged to what the host does meanwhile (:mod:`dlrm_workbook.analysis.idleness`):
in a synchronising call it waits for the GPU itself, elsewhere the GPU waits for it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import iteration_count, step_contexts
from dlrm_workbook.analysis.context_tree import overlap, union
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
from dlrm_workbook.analysis.gpu import kernel_table, sampled_profile, stall_reasons, stall_table
from dlrm_workbook.analysis.idleness import gpu_idleness, idle_blame
from dlrm_workbook.recordings.hpctoolkit.metrics import STALLS

IDLE_SHARE = 0.2
"""Of the iterations in which no stream runs; below it launches keep ahead of kernels."""

SHORT_KERNEL_US = 10.0
"""A launch costs 3 to 10 µs of host time (NVIDIA, "Getting started with CUDA graphs",
2019): kernels shorter than this cannot hide it. The measured launch cost is used where
there is one."""

SYNC = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize\w*")
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

STALL_LIMITS = {"SYNC": "synchronisation", "PIPE": "arithmetic"}
"""Stall reason to the limit that it shows; of all others, memory bandwidth."""


@rule(
    "synchronisation",
    title="The host waits for the GPU {count:,.0f} times in each step",
    evidence=(
        "{names} is called {count:,.1f} times per iteration, most in {place}; the host waits "
        "{waited:ms} in it, and the GPU idles {idle:ms} after it.",
        "{reads} read values back.",
    ),
    advice="Do not read values back in the loop (.item(), .cpu(), nonzero, print of a tensor): "
    "keep losses on the GPU and read them every training.log_every iterations.",
    limit="synchronisation",
    gpu=True,
)
def synchronising(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The host waits for the GPU within the step, and the GPU then for the host."""
    calls = _synchronising_calls(evidence)
    if calls.empty or calls["calls"].sum() < 0.5:
        return None
    waited = float(calls["time_ms"].sum())
    idle = _idle_after(evidence, calls["context"].tolist())
    share = max(idle, 0.0) / evidence.total_ms
    if max(share, waited / evidence.total_ms) < SYNC_SHARE:
        return None
    part = largest(calls.groupby(["component", "phase"])["time_ms"].sum())
    ledger.explain(idle, part)
    called = evidence.called["name"]
    reads = sorted(called[called.isin(["aten::_local_scalar_dense", "aten::nonzero"])].unique())
    return {
        "share": min(max(share, SYNC_SHARE), 1.0),
        "component": part[0],
        "names": ", ".join(sorted(calls["name"].unique())),
        "count": float(calls["calls"].sum()),
        "place": part_label(*part) or "the loop",
        "waited": waited,
        "idle": idle,
        "reads": ", ".join(reads) or None,
    }


@rule(
    "copies_not_overlapped",
    title="Copies that no kernel overlaps take {share:.0%} of the step",
    evidence=(
        "Copies of {megabytes:,.1f} MB per iteration take {time:ms} ({rate:.1f} GB/s), {alone:ms} "
        "of it while no kernel runs.",
        "{pageable:ms} are from or to pageable memory, which the driver copies twice.",
        "Pinned copies reach {pinned:.1f} GB/s here.",
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
    alone, time = float(found["alone_ms"].sum()), float(found["time_ms"].sum())
    share = alone / evidence.total_ms
    if share < COPY_SHARE:
        return None
    ledger.explain(alone, ("transfer", "forward"))
    is_pageable = found["name"].str.contains("Pageable", case=False)
    pageable, size = float(found.loc[is_pageable, "time_ms"].sum()), float(found["bytes"].sum())
    pinned = [row for row in evidence.ceiling("copy") or [] if row.get("kind") == "pinned"]
    synchronous = evidence.parameter("data.loader") == "synchronous"
    on_device = evidence.parameter("data.place") == "device"
    change: dict[str, Any] = {}
    if synchronous and not on_device:
        change = {"data.loader": "prefetch"}
    figures: Measured = {
        "share": share,
        "component": str(found.groupby("component")["alone_ms"].sum().idxmax()),
        "megabytes": size / 1e6,
        "time": time,
        "rate": size / time / 1e6 if time else 0.0,
        "alone": alone,
        "pageable": None,
        "pinned": max((row["gb_per_s"] for row in pinned), default=None),
        "change": change,
        "speedup": (predicted(evidence, change) if change else None) or bounded(share),
    }
    if pageable > 0.3 * time:
        figures["id"] = "pageable_copies"
        figures["title"] = "Copies from pageable memory take {share:.0%} of the step"
        figures["pageable"] = pageable
    return figures


@rule(
    "launch_bound",
    title="The GPU idles {idle:.0%} of the time, waiting for launches",
    evidence=(
        "{launches:,.0f} kernels per iteration of {mean_us:.1f} µs each, against {launch_us:.1f} "
        "µs for a launch; in {share:.0%} of the time the GPU has nothing to do while the host is "
        "in the model.",
    ),
    advice="Fewer and longer kernels: capture the step in a CUDA graph (training.cuda_graphs), "
    "compile it, a larger batch, fused embeddings and optimiser.",
    limit="launches",
    gpu=True,
)
def launch_bound(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """The GPU idles while the host prepares launches."""
    idleness = gpu_idleness(evidence.profile)
    if idleness.empty:
        return None
    idle = float(idleness["idle_share"].mean())
    blame = idle_blame(evidence.profile, "component")
    busy = blame[~blame["component"].isin(["data", "transfer"])] if not blame.empty else blame
    host = float(busy["share"].sum()) * idle if not busy.empty else 0.0
    host -= ledger.explained_ms / evidence.total_ms
    kernels = kernel_table(evidence.profile)
    if kernels.empty or host < IDLE_SHARE:
        return None
    launches = float(kernels["launches"].sum())
    mean_us = 1e3 * float(kernels["time_ms"].sum()) / max(launches, 1.0)
    launch_us = float(evidence.ceiling("launch_us") or SHORT_KERNEL_US)
    if mean_us > 5 * launch_us:
        return None
    graphs: dict[str, Any] = {"training.cuda_graphs": True}
    if evidence.parameter("training.embedding_backend", "torch") != "fused":
        # with any other the host waits for the GPU in every update: nothing to capture
        graphs["training.embedding_backend"] = "fused"
    return {
        "share": host,
        "component": str(busy.loc[busy["blamed_ms"].idxmax(), "component"]),
        "idle": idle,
        "launches": launches / iteration_count(evidence.profile),
        "mean_us": mean_us,
        "launch_us": launch_us,
        "change": {} if evidence.parameter("training.cuda_graphs", False) else graphs,
        "speedup": predicted(evidence, graphs) or bounded(min(host, 0.95)),
    }


@rule(
    "tensor_cores_unused",
    title="Matrix products take {share:.0%} of the step and use no tensor cores",
    evidence=("{time:ms} per iteration in kernels such as {names}.",),
    advice="bf16 by autocast (training.precision) or TF32 (training.tf32) run on tensor cores, 4 "
    "to 16 times the fp32 rate on A100 and later (data sheets in docs/roofline.md).",
    limit="arithmetic",
    gpu=True,
)
def tensor_cores(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Matrix products in fp32 without tensor cores."""
    kernels = kernel_table(evidence.profile)
    if kernels.empty:
        return None
    products = kernels[kernels["kernel"].str.contains(GEMM)]
    slow = products[~products["kernel"].str.contains(TENSOR_CORE)]
    time = float(slow["time_ms"].sum()) / iteration_count(evidence.profile)
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
    return {
        "share": share,
        "component": str(slow.groupby("component")["time_ms"].sum().idxmax()),
        "time": time,
        "names": ", ".join(slow.nlargest(2, "time_ms")["kernel"].str.slice(0, 60)),
        "change": change,
        "speedup": predicted(evidence, change) or guess,
    }


@rule(
    "low_occupancy",
    title="Kernels of low occupancy take {share:.0%} of the GPU's time",
    evidence=(
        "{kernel} keeps {occupancy:.0f}% of the warps that fit on a multiprocessor "
        "({registers:.0f} registers per thread, {blocks:.0f} blocks per launch).",
    ),
    advice="More and smaller blocks (a larger batch), fewer registers or less shared memory per "
    "block, so that other warps run while one waits for memory.",
    limit="memory bandwidth",
    gpu=True,
)
def occupancy(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Kernels that take much of the step leave most of the GPU's warps empty."""
    kernels = kernel_table(evidence.profile)
    if kernels.empty or kernels["occupancy_percent"].isna().all():
        return None
    low = kernels[kernels["occupancy_percent"] < LOW_OCCUPANCY]
    low = low[~low["kernel"].str.contains(GEMM)]  # products live from registers, not from warps
    share = float(low["time_ms"].sum()) / float(kernels["time_ms"].sum())
    if share < OCCUPANCY_SHARE:
        return None
    worst = low.loc[low["time_ms"].idxmax()]
    return {
        "share": share,
        "component": str(worst["component"]),
        "kernel": str(worst["kernel"])[:80],
        "occupancy": worst["occupancy_percent"],
        "registers": worst["registers"],
        "blocks": worst["blocks"],
        "speedup": bounded(0.5 * share),
    }


@rule(
    "stall",
    title="{share:.0%} of the GPU's samples are stalls by one reason: {meaning}",
    evidence=(
        "{reason}: {share:.0%} of all warp samples, {of_stalls:.0%} of the stalls, most in "
        "{kernel}.",
    ),
    advice="{remedy}.",
    limit="memory bandwidth",
    gpu=True,
)
def stalls(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """One reason stops most warps, by PC samples."""
    table = stall_table(sampled_profile(evidence.profile))
    if table.empty:
        return None
    reasons = stall_reasons(table)
    reasons = reasons[~reasons["reason"].isin(UNAVOIDABLE_STALLS)]
    if reasons.empty:
        return None
    top = reasons.loc[reasons["share_of_samples"].idxmax()]
    reason, share = str(top["reason"]), float(top["share_of_samples"])
    if share < STALL_SHARE:
        return None
    kernels = table[table["reason"] == reason]
    kernel = str(kernels.loc[kernels["warp_cycles"].idxmax(), "kernel"])
    contexts = evidence.profile.contexts
    named = contexts[(contexts["name"] == kernel) & (contexts["kind"] == "kernel")]
    return {
        "id": f"stall_{reason.lower()}",
        "share": share,
        "component": str(named["component"].iloc[0]) if len(named) else "other",
        "reason": reason,
        "meaning": STALLS.get(reason, ""),
        "of_stalls": top["share_of_stalls"],
        "kernel": kernel[:80],
        "remedy": capitalised(str(top["advice"])),
        "speedup": bounded(0.3 * share),
        "limit": STALL_LIMITS.get(reason, "memory bandwidth"),
    }


def _synchronising_calls(evidence: Evidence) -> pd.DataFrame:
    """Calls of the step that wait for the GPU: ``context``, ``name``, ``component``, ``phase``,
    ``calls``, ``time_ms`` (inclusive), of a mean iteration."""
    contexts = evidence.profile.contexts
    chosen = contexts["name"].str.fullmatch(SYNC.pattern).to_numpy()
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
    """Milliseconds per iteration from the end of a synchronising call to the next GPU work."""
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
    kernel runs meanwhile), of a mean iteration."""
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
