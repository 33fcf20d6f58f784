"""The GPU at work: which of its units kernels leave unused, and which kernels take most."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import PART, iteration_count
from dlrm_workbook.analysis.device_counters import limit_by_counters
from dlrm_workbook.analysis.devices import device_of
from dlrm_workbook.analysis.findings.evidence import MOST_LISTED, Evidence, by_kernel, listed_times
from dlrm_workbook.analysis.findings.finding import (
    LEAST_SHARE,
    Causes,
    Measured,
    amdahl,
    bounded,
    capitalised,
    largest,
    largest_part,
    predicted,
    removed,
    rule,
)
from dlrm_workbook.analysis.findings.where import in_place, part_name, shown, time_by_name
from dlrm_workbook.analysis.gpu import (
    KERNEL_KEYS,
    WARP,
    sampled_profile,
    stall_reasons,
    stall_table,
)
from dlrm_workbook.analysis.gpu_limits import UNJUDGED
from dlrm_workbook.analysis.kernel_names import (
    UNNAMED_TRITON,
    WHOLE_GRAPH,
    computes_in_double,
    kernel_name,
)
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import COMMUNICATION
from dlrm_workbook.recordings.hpctoolkit.metrics import STALLS
from dlrm_workbook.recordings.profile import nearest
from dlrm_workbook.recordings.torch.shape_work import NOT_DOUBLE, NOTE

COPYING = re.compile(
    r"(?:elementwise )?(?:\w*float\d+ )?copy\b|nchw ?to|nhwc ?to|transpose", re.IGNORECASE
)

POINTWISE = re.compile(
    r"(?!.*(?:index_elementwise|scatter_gather))(?:elementwise|.*_elementwise_kernel)"
)
"""Kernels that do one operation for each value; those that move rows by an index do none."""

OF_TORCH = "at::|aten|cudnn|triton_"
"""Matches names of kernels that torch runs, as other frameworks of their kind do."""

LEAST_KINDS = 2
"""Different kernels that take a twentieth of such time each; fewer are judged one by one."""

FULLY_BUSY = 0.95
"""Of the step, in which the GPU works."""

KERNEL_SHARE = 0.04
"""Least share of the step for a kernel to be listed among those that no other finding names."""


def working_kernels(evidence: Evidence) -> pd.DataFrame:
    """As :attr:`Evidence.kernels`, with ``ms`` of a mean step in which the GPU works on each.

    Of kernels that run at once, or beyond their step, the time counts once: all together take no
    more than the GPU's time. ``fills`` is the most that a launch can use of the GPU, by its blocks
    for the multiprocessors and its threads for a warp (NaN where unknown), ``is_small`` whether
    that is known to be little.
    """
    table, gpu = evidence.kernels, device_of(evidence.meta)
    recorded = (evidence.meta.get("devices") or [{}])[0].get("sms")
    units = float(recorded or (gpu.units if gpu else 0) or np.nan)
    fills = (table["blocks"] / units).clip(upper=1) * (table["threads_per_block"] / WARP).clip(
        upper=1
    )
    fills = fills.where(fills > 0)
    small = fills.le(FAR_FROM_LIMIT) | table["waves"].le(FEW_WAVES)
    table = table.assign(units=units, fills=fills, is_small=small)
    if not evidence.has_timeline:
        return table
    pieces = evidence.pieces[evidence.pieces["where"].eq("device")]
    contexts = evidence.profile.contexts.rename(columns={"name": "kernel"})[KERNEL_KEYS]
    ms = np.bincount(pieces["context"], pieces["ms"], len(contexts))
    by_key = contexts.assign(ms=ms).groupby(KERNEL_KEYS)["ms"].sum()
    return table.assign(ms=by_key.reindex(pd.MultiIndex.from_frame(table[KERNEL_KEYS])).to_numpy())


def _unexplained_kernels(evidence: Evidence, ledger: Causes) -> pd.DataFrame:
    """A row for each of these kernels that no finding explains and no exchange between ranks is:
    sums over the parts that launch it, all else of the part in which it takes most."""
    table = working_kernels(evidence)
    # by name: kernels that compute are launched within an exchange's annotation too
    table = table[~table["kernel"].str.contains(COMMUNICATION)]
    table = table[~table["kernel"].isin(ledger.device_work)].sort_values("ms", ascending=False)
    sums = table.groupby("kernel")[["ms", "launches", "time_ms"]].transform("sum")
    table = table.assign(**sums, mean_us=1e3 * sums["time_ms"] / sums["launches"])
    return table.drop_duplicates("kernel").sort_values("ms", ascending=False)


@rule(
    "tensor_cores_unused",
    title="{what} take {share:.0%} of the step and use no tensor cores",
    evidence=("They take {time:ms} per iteration, in kernels such as {names}.",),
    advice="{units} run on tensor cores, 4 to 16 times the fp32 rate (data sheets in "
    "dlrm help gpus).",
    limit="arithmetic",
    gpu=True,
)
def tensor_cores(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Matrix products in fp32 without tensor cores, on a GPU that has them."""
    capability = evidence.capability
    if capability is not None and capability < 7:
        return None
    kernels = working_kernels(evidence)
    unused = kernels["tensor_cores"].eq("no") & kernels["precision"].isin(["fp32", ""])
    # what transforms operands and results of a convolution in fp32 is part of it
    unused |= kernels["kernel"].str.contains("winograd") & kernels["precision"].eq("fp32")
    slow = kernels[unused]
    slow = slow[~slow["kernel"].isin(ledger.device_work)]
    time = float(slow["ms"].sum())
    share = time / evidence.total_ms
    if share < LEAST_SHARE:
        return None
    lowest = evidence.parameter("training.lowest_precision", "bf16")
    if evidence.parameter("training.precision", "fp32") == "fp32" and lowest != "fp32":
        change: dict[str, Any] = {"training.precision": "bf16"}
    elif not evidence.parameter("training.tf32", False):
        change = {"training.tf32": True}
    else:
        return None
    only_fp16 = _takes_only_fp16(evidence)
    guess = {"low": amdahl(share, 1.5), "mid": amdahl(share, 3.0), "high": amdahl(share, 8.0)}
    return {
        "share": share,
        "device_work": slow["kernel"],
        "component": slow.groupby("component")["ms"].sum().idxmax(),
        "time": time,
        "names": ", ".join(slow.nlargest(2, "ms")["short_name"]),
        "pieces": evidence.of_kernels(slow["kernel"]),
        "what": _products(slow),
        "units": "fp16 products by autocast"
        if only_fp16
        else "bf16 by autocast (training.precision) or TF32 (training.tf32)",
        "change": {} if only_fp16 else change,
        "speedup": predicted(evidence, change) or guess,
    }


CONVOLVING = "conv|fprop|[dw]grad|cudnn|winograd|igemm|backward weight"
"""Matches names of kernels that compute a convolution as a product."""


def _products(kernels: pd.DataFrame) -> str:
    """What kernels that multiply matrices compute, by their names."""
    of_convolutions = kernels.loc[kernels["kernel"].str.contains(CONVOLVING, case=False), "ms"]
    is_much = of_convolutions.sum() > 0.1 * kernels["ms"].sum()
    return "Convolutions and matrix products" if is_much else "Matrix products"


NEWER = re.compile(r"ampere|hopper|blackwell|nvjet|sm_?[89]\d|_[89]0_|bf16|bfloat16", re.IGNORECASE)
"""Names of kernels that no GPU before Ampere (compute capability 8) runs."""


def _takes_only_fp16(evidence: Evidence) -> bool:
    """Whether tensor cores of the GPU take neither bf16 nor TF32, by its compute capability; by its
    kernels' names where the recording does not tell."""
    names = evidence.kernels["kernel"].str
    of_old = names.contains("volta_|turing_").any() and not names.contains(NEWER).any()
    return bool(of_old) if evidence.capability is None else evidence.capability < 8


DOUBLE_OPERATIONS, DOUBLE_SHARE = "operations:fp64", 0.03


@rule(
    "float64",
    title="Arithmetic in float64 takes {taken:.0%} of the step{instead}",
    evidence=("It takes {time:ms} per iteration, in {names}.",),
    advice="{find}: {remedy}, and it takes twice the bytes.",
    limit="arithmetic",
)
def float64(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Kernels or operators compute in float64, which no part of such a model needs."""
    profile = evidence.profile
    metric = "gpu_time_ms" if evidence.on_gpu else "cpu_time_ms"
    chosen = profile.which("name", computes_in_double) & profile.of_kind("kernel")
    if evidence.on_gpu:  # what leaves most of the GPU idle is not held back by its arithmetic
        kernels = working_kernels(evidence)
        small = kernels["is_small"] & kernels["ms"].ge(HEAVY_SHARE * evidence.device_ms)
        chosen &= ~profile.which("name", set(kernels["kernel"][small]).__contains__)
    if profile.has(DOUBLE_OPERATIONS):
        chosen |= profile.value_table(DOUBLE_OPERATIONS, "exclusive").gt(0).to_numpy()
    parent = profile.contexts["parent"].to_numpy()
    # what an operator was given goes before the name of its kernel
    other = profile.value_table(NOTE + NOT_DOUBLE).eq(profile.value_table("calls"))
    chosen &= ~np.append(other, False)[nearest(parent, profile.of_kind("operator"))]
    # of an operator and its kernel the operator counts
    chosen &= (parent < 0) | (nearest(parent, chosen)[np.maximum(parent, 0)] < 0)
    time = profile.value_table(metric, "inclusive")[chosen] / iteration_count(profile)
    if evidence.has_timeline:
        pieces = evidence.pieces[evidence.pieces["where"].eq("device")]
        at = nearest(parent, chosen)[pieces["context"]]
        time = pieces["ms"].groupby(at).sum().drop(-1, errors="ignore")
    share = float(time.sum()) / evidence.total_ms
    if not share >= DOUBLE_SHARE:
        return None
    rows = profile.contexts.loc[time.index]
    part = largest(time.groupby([rows["component"], rows["phase"]]).sum())
    ledger.explain(float(time.sum()), part)
    short = [
        kernel_name(name).short if kind == "kernel" else shown(name)
        for name, kind in zip(rows["name"], rows["kind"], strict=True)
    ]
    heaviest = time.groupby(short).sum().nlargest(2)
    of_torch = profile.which("name", lambda name: name.startswith("aten::")).any()
    # on a CPU float32 takes half of the bytes and of the vector units' time
    lost = share if evidence.on_gpu else 0.5 * share
    return {
        "share": lost,
        "least": 0.0,
        "device_work": rows["name"],
        "taken": share,
        "instead": "" if evidence.on_gpu else ", about twice what float32 would",
        "find": "Find what makes float64 (a NumPy array or a Python constant made into a tensor, "
        ".double(), a default type) and make it float32"
        if of_torch
        else "Store and compute in float32 where the accuracy suffices, in float64 only what needs "
        "it (sums, residuals)",
        "remedy": "GPUs compute float64 at a half to a 64th of the rate of float32"
        if evidence.on_gpu
        else "a processor computes float64 at half of the rate of float32",
        "component": part[0],
        "time": float(time.sum()),
        "names": ", ".join(f"{name} ({milliseconds(ms)})" for name, ms in heaviest.items()),
        "speedup": {"low": 1.0, "mid": amdahl(share, 2.0), "high": amdahl(share, 64.0)}
        if evidence.on_gpu
        else {**removed(lost), "high": amdahl(share, 2.0)},
    }


@rule(
    "layout_copies",
    title="Conversions and copies of layout take {share:.0%} of the step, most by {by}",
    evidence=(
        "Kernels that only convert or copy tensors, to another type or layout, run {time:ms} per "
        "iteration, in {launches:count} launches: {names}.",
        "{pace}",
    ),
    advice="Convert once and keep the result (weights, constants), let autocast or the model keep "
    "one type, keep the layout that the next operator wants (channels_last, no transposed views "
    "that are made contiguous), and make tensors on the GPU in their type.",
    limit="memory bandwidth",
    gpu=True,
)
def layout_copies(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Kernels that copy tensors to another type or layout take much of the step (in real
    recordings 0 to 2.4 %)."""
    return _work_of(evidence, ledger, COPYING, 1)


@rule(
    "pointwise_operators",
    title="Pointwise operators take {share:.0%} of the step",
    evidence=(
        "Each reads its operands from memory and writes its result back: {time:ms} per iteration "
        "in {launches:count} launches of {kinds} kernels.",
        "Largest kernels: {names}.",
        "{pace}",
    ),
    advice="Fuse them, so that values stay in registers from one to the next: compile the model "
    "(training.compile), or use fused operators (torch.nn.functional, a fused optimiser).",
    limit="memory bandwidth",
    gpu=True,
)
def pointwise_operators(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Many kernels that do one operation for each value take much of the step together (in real
    recordings 1 to 14 %)."""
    return _work_of(evidence, ledger, POINTWISE, LEAST_KINDS)


def _work_of(
    evidence: Evidence, ledger: Causes, kind: re.Pattern[str], least_kinds: int
) -> Measured | None:
    """Time and launches of the kernels whose names, short or whole, match, if there are so many
    kinds."""
    kernels = working_kernels(evidence)
    if not (
        evidence.profile.of_kind("operator").any() or kernels["kernel"].str.contains(OF_TORCH).any()
    ):
        return None  # a program's own kernels may be called copy
    named = kernels["short_name"].str.match(kind) | kernels["kernel"].str.match(kind)
    chosen = kernels[named & ~kernels["kernel"].isin(ledger.device_work)]
    time = min(float(chosen["ms"].sum()), evidence.device_ms)
    by_kernel = chosen.groupby("short_name")["ms"].sum().sort_values(ascending=False)
    kinds = int(by_kernel.gt(0.05 * by_kernel.sum()).sum())
    if time < LEAST_SHARE * evidence.total_ms or kinds < least_kinds:
        return None
    pieces = evidence.of_kernels(chosen["kernel"])
    operators = time_by_name(evidence.profile, *pieces)["outer"].index
    return {
        "share": time / evidence.total_ms,
        "explains": largest_part(chosen, "ms"),
        "device_work": chosen["kernel"],
        "time": time,
        "launches": float(chosen["launches"].sum()) / iteration_count(evidence.profile),
        "kinds": kinds,
        "pace": evidence.pace_of(str(chosen.loc[chosen["ms"].idxmax(), "kernel"])),
        "names": listed_times(by_kernel[:3]),
        "by": operators[0] if len(operators) else by_kernel.index[0],
        "pieces": pieces,
        "speedup": bounded(time / evidence.total_ms),
    }


HEAVY_SHARE, HEAVY_STEP_SHARE = 0.2, 0.1
"""Least shares of the GPU's time and of the step that one kernel takes."""

ONE_OPERATOR = 0.8
"""Least part of a kernel's time in one operator for it to be called that operator's time."""

FAR_FROM_LIMIT, FEW_WAVES = 0.5, 0.1
"""Kernels whose blocks stay and take one piece of work after another have more than so few."""

UNJUDGED_SHARE = 0.3
"""Of the step: from here on a kernel is named even if its limits are not known."""


@rule(
    "heavy_kernel",
    title="{heading}",
    evidence=(
        "{kernel} takes {time:ms} per iteration, {of_device:.0%} of the GPU's time, in "
        "{launches} of {each}.",
        "By its operator's shapes {reached:.1%} of that would do at the limits of this GPU's data "
        "sheet.",
        "Its grid fills {waves:.0%} of the GPU.",
        "{launch}",
        "{counted}",
        "{unknown}",
    ),
    advice="{advised}",
    limit="",
    gpu=True,
)
def heavy_kernel(evidence: Evidence, ledger: Causes) -> Measured | None:
    """A kernel takes much of the GPU's time far from its limits, or most of it at unknown ones."""
    kernels = _unexplained_kernels(evidence, ledger)
    kernels = kernels[~kernels["short_name"].str.startswith(UNNAMED_TRITON)]
    share = kernels["ms"] / evidence.total_ms
    of_device = kernels["ms"] / evidence.device_ms
    most = of_device.ge(0.5) & (len(evidence.profile.iterations) == 0)
    heavy = of_device.ge(HEAVY_SHARE) & (share.ge(HEAVY_STEP_SHARE) | most)
    far = kernels["share_of_ceiling"].lt(FAR_FROM_LIMIT) | kernels["waves"].lt(FAR_FROM_LIMIT)
    far |= kernels["is_small"]
    # products are judged by their units (tensor_cores), as far as their names tell
    unknown = kernels["share_of_ceiling"].isna()
    slow = [name for name, (_, pace) in evidence.paces.items() if ": " in pace]
    unknown &= kernels["tensor_cores"].eq("") | kernels["kernel"].isin(slow)
    chosen = kernels[heavy & (far | (unknown & (share.ge(UNJUDGED_SHARE) | most)))]
    if chosen.empty:
        return None
    worst = chosen.loc[chosen["ms"].idxmax()]
    reached, waves = float(worst["share_of_ceiling"]), float(worst["waves"])
    number = float(worst["launches"]) / iteration_count(evidence.profile)
    is_small = bool(worst["is_small"])
    launch = _launch_text(worst.to_dict()) if worst["fills"] < 1 else None
    few = f"Its grid fills {waves:.0%} of the GPU." if waves <= FEW_WAVES else launch
    taken = min(float(worst["ms"]) / evidence.total_ms, 1.0)
    has_limit, is_graph = reached == reached, str(worst["kernel"]).startswith(WHOLE_GRAPH)
    return {
        "share": taken,
        "least": 0.0,
        "device_work": [worst["kernel"]],
        "component": worst["component"],
        "heading": _heading(evidence, worst.to_dict(), taken, few if is_small else None),
        "kernel": worst["kernel"] if is_graph else f"The kernel {worst['short_name']}",
        "pieces": evidence.of_kernels([str(worst["kernel"])]),
        "time": float(worst["ms"]),
        "of_device": min(float(worst["ms"]) / evidence.device_ms, 1.0),
        "launches": f"{number:,.0f} launch{'es' * (round(number) != 1)}",
        "each": _each(evidence, str(worst["kernel"]), float(worst["mean_us"])),
        "reached": reached if has_limit else None,
        "waves": waves if waves < 1 else None,
        "counted": limit_by_counters(evidence.profile, str(worst["kernel"])),
        "launch": launch,
        "unknown": None
        if has_limit or waves < 1 or is_small or str(worst["kernel"]) in evidence.paces
        else "The recording does not show how close it is to the GPU's limits.",
        "advised": "Record the kernels in it: nsys profile --cuda-graph-trace=node."
        if is_graph
        else "Give each launch more threads: blocks of a multiple of 32 of them (128 or 256) "
        "and several blocks for each multiprocessor, which share the elements."
        if is_small
        else "Look at its shapes and at what calls it: operands that are tiny, strided or padded, "
        "work that could be batched, a library or a data type with faster kernels.",
        "speedup": bounded(taken * (1 - reached)) if has_limit else bounded(taken, 0.5),
    }


SPREAD_TIMES = 3.0
"""Times the shortest launch of a kernel that the longest takes for no mean to stand for both."""


def _each(evidence: Evidence, kernel: str, mean_us: float) -> str:
    """How long the launches of a kernel take: their mean, or where they differ much, from to."""
    own = evidence.work[
        evidence.profile.contexts["name"].eq(kernel).to_numpy()[evidence.work["context"]]
    ]
    ms = (own["end_ns"] - own["start_ns"]) / 1e6
    if len(ms) and ms.max() > SPREAD_TIMES * ms.min():
        return f"{milliseconds(float(ms.min()))} to {milliseconds(float(ms.max()))}"
    return f"{mean_us:,.1f} µs"


def _launch_text(kernel: Mapping[Any, Any]) -> str:
    """How many multiprocessors, and threads of a warp, the launches of a kernel can use."""
    units, blocks, threads = (kernel[name] for name in ("units", "blocks", "threads_per_block"))
    counts = [f"{number:,.1f}".removesuffix(".0") for number in (blocks, threads)]
    used = [f"{np.ceil(blocks):,.0f} of {units:,.0f} multiprocessors"] if blocks < units else []
    used += [f"{counts[1]} of the {WARP} threads of a warp"] if threads < WARP else []
    block, thread = "block" + "s" * (blocks != 1), "thread" + "s" * (threads != 1)
    return f"A launch of {counts[0]} {block} of {counts[1]} {thread} uses {' and '.join(used)}."


def _heading(
    evidence: Evidence, kernel: Mapping[Any, Any], share: float, launch: str | None
) -> str:
    """The operator at which a kernel (a row of :attr:`Evidence.kernels`) does most, with the share
    of the step and its pace; without these what is known of it, such as small launches."""
    place, pace = evidence.paces.get(str(kernel["kernel"]), ("", ""))
    counted = limit_by_counters(evidence.profile, str(kernel["kernel"]))
    head = f"One kernel takes {share:.0%} of the step: {kernel['short_name']}"
    if str(kernel["kernel"]).startswith(WHOLE_GRAPH):
        return f"{kernel['kernel']} takes {share:.0%} of the step; its kernels were not recorded"
    if not pace:
        known = counted or launch
        return f"{head}; {known[0].lower()}{known[1:-1]}" if known else head
    if UNJUDGED in pace and counted:
        pace = f"{UNJUDGED} of its inputs; {counted[0].lower()}{counted[1:-1]}"
    if UNJUDGED in pace and "(" not in place:  # a compiled region, or a call without its inputs
        return f"{head}, in {place}, whose inputs were not recorded"
    inner = time_by_name(evidence.profile, *evidence.of_kernels([str(kernel["kernel"])]))["inner"]
    if len(inner) and inner.iloc[0] < ONE_OPERATOR * inner.sum():
        return f"{head}, most in {place}, which {pace}"
    return f"{place} takes {share:.0%} of the step in {kernel['short_name']} and {pace}"


@rule(
    "largest_kernels",
    title="{what} {take} {share:.0%} of the step: {kernels}",
    evidence=(
        "Of what the GPU does and no finding above names, these take most: {listed}.",
        "Beside them: {beside}.",
        "{busy}",
        "{launch}",
        "{paces}",
        "{unknown}",
    ),
    advice="Look at what calls them, at their shapes and types, and whether each iteration needs "
    "them; compare with another recording of the same model (dlrm run compare) if they took less.",
    limit="",
    timeline=True,
)
def largest_kernels(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The largest pieces of another program's work on the GPU that no rule has named.

    Kernels that are known to reach half of the GPU's limits are left out: there is little to gain.
    """
    if evidence.is_ours:
        return None
    table = _unexplained_kernels(evidence, ledger)
    table = table[~table["share_of_ceiling"].ge(FAR_FROM_LIMIT)]
    chosen = table[table["ms"] >= KERNEL_SHARE * evidence.total_ms]
    if chosen.empty:
        return _kernels_of_one_place(evidence, table)
    what = "One kernel" if len(chosen) == 1 else f"{len(chosen)} kernels"
    if chosen["short_name"].str.startswith(UNNAMED_TRITON).any():  # a name of several kernels
        what = "Kernels"
    products = table[[kernel_name(name).is_product for name in table["kernel"]]]
    products = products[~products["short_name"].str.contains("attention")]
    others = chosen[~chosen["kernel"].isin(products["kernel"])]
    are_products = len(products) > 1 and products["ms"].sum() > others["ms"].sum()
    if are_products:
        what, chosen = _products(products), products
    time, longest = float(chosen["ms"].sum()), chosen["kernel"][:3].astype(str)
    names = [f"`{name}`" if ", " in name else name for name in chosen["short_name"].astype(str)]
    at = [part_name(*part) if part[0] != "other" else "" for part in chosen[PART].to_numpy()]
    rows = zip(chosen["short_name"], map(milliseconds, chosen["ms"]), at, strict=True)
    listed = [f"{name} {ms}{part and f' in {part}'}" for name, ms, part in rows]
    return {
        "share": time / evidence.total_ms,
        "least": KERNEL_SHARE,
        "component": largest_part(chosen, "ms")[0],
        "what": what,
        "take": "takes" if what == "One kernel" else "take",
        "kernels": ", ".join(names[:2]) + ", ..." * (len(names) > 2),
        "paces": " ".join(filter(None, dict.fromkeys(map(evidence.pace_of, longest)))) or None,
        "busy": f"The GPU works {working:.0%} of the step: computing, not the host, takes the time."
        if (working := evidence.device_ms / evidence.total_ms) > FULLY_BUSY
        else None,
        "listed": ", ".join(listed[:MOST_LISTED]),
        "beside": listed_times(others.set_index("short_name")["ms"]) or None
        if are_products
        else None,
        "pieces": evidence.of_kernels(chosen["kernel"]),
        "launch": _launch_text(chosen.iloc[0].to_dict()) if chosen["fills"].iloc[0] < 1 else None,
        "unknown": "The recording does not show how close they are to the GPU's limits."
        if not chosen["fills"].iloc[0] < 1
        and chosen["share_of_ceiling"].isna().all()
        and not set(longest) & evidence.paces.keys()
        else None,
        "speedup": bounded(time / evidence.total_ms, 0.5),
    }


def _kernels_of_one_place(evidence: Evidence, table: pd.DataFrame) -> Measured | None:
    """Figures of :func:`largest_kernels` for kernels none of which is large, but all those of one
    operator, function or range are; None without one.

    Args:
        table: of :func:`_unexplained_kernels`.
    """
    pieces = evidence.of_kernels(table["kernel"])
    most = {
        str(times.index[0]): (float(times.iloc[0]), level)
        for level, times in time_by_name(evidence.profile, *pieces).items()
        if len(times)
    }
    name = max(most, key=lambda each: most[each][0], default="")
    time, level = most.get(name, (0.0, ""))
    if not name:
        return None
    inside = in_place(evidence.profile, level, name)[pieces[0]]
    pieces = pieces[0][inside], pieces[1][inside]
    times = by_kernel(evidence.profile, *pieces)
    own = evidence.profile.contexts.iloc[pieces[0]].assign(ms=pieces[1])
    return {
        **dict.fromkeys(("beside", "busy", "launch", "paces", "unknown")),
        "share": time / evidence.total_ms,
        "least": KERNEL_SHARE,
        "component": largest_part(own, "ms")[0],
        "what": f"Kernels in {shown(name)}",
        "take": "take",
        "kernels": ", ".join(map(str, times.index[:2])),
        "listed": listed_times(times),
        "pieces": pieces,
        "speedup": bounded(time / evidence.total_ms, 0.5),
    }


STALL_SHARE = 0.3
"""Of the samples, by one reason."""

UNAVOIDABLE_STALLS = ("NONE", "NSEL", "HID", "INV", "OTHR")

STALL_LIMITS = {"SYNC": "synchronisation", "PIPE": "arithmetic"}
"""Stall reason to the limit that it shows; of all others, memory bandwidth."""


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
def stalls(evidence: Evidence, ledger: Causes) -> Measured | None:
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
    kernels_ms = min(float(evidence.kernels["ms"].sum()), evidence.device_ms)
    of_step = min(kernels_ms / evidence.total_ms, 1.0)
    lines = stall_table(sampled, "line")
    lines = lines[(lines["reason"] == reason) & (lines["kernel"] == kernel) & lines["file"].ne("")]
    return {
        "id": f"stall_{reason.lower()}",
        "share": of_samples * of_step,
        "least": 0.0,
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
        "speedup": bounded(of_samples * of_step, 0.3),
        "limit": STALL_LIMITS.get(reason, "memory bandwidth"),
    }


def _sampling_quality(measured: dict[str, Any]) -> str | None:
    """How many samples a stall table stands on; a reason stands where there is no number."""
    given = {name: n for name, n in measured.items() if isinstance(n, float | int)}
    if "taken" not in given:
        return None
    text = f"{given['taken']:,.0f} samples"
    if "period_cycles" in given:
        text += f", one in {given['period_cycles']:,.0f} cycles"
    if given.get("expected"):
        text += f", {min(given['taken'] / given['expected'], 1.0):.0%} of those expected"
    lost = f"{given['dropped']:,.0f}" if "dropped" in given else "not measured"
    return f"Sampling: {text}; dropped: {lost}."
