"""What a recording would take on another GPU, predicted from data sheets, kernel by kernel.

Needs no parameters and no probes: whatever recording holds kernels of a GPU that
:mod:`dlrm_workbook.analysis.devices` lists. Each kernel's time is scaled by what limits it:

* a matrix product by the longer of its operations at the peak of its precision and unit (tensor
  cores or not) and its bytes at the memory's bandwidth, where its operator's shapes tell both;
  without shapes it lies between the two ratios;
* a kernel of a few microseconds (:data:`LATENCY_US`), of fewer blocks than multiprocessors
  (:data:`FEW_BLOCKS`), or far from every limit of the sheet (:data:`FAR`) is bound by latency,
  which is much the same on all of them: unchanged;
* a copy between host and device by the link, if it is pinned; a pageable one by the host:
  unchanged;
* communication depends on a network that no data sheet tells: unchanged;
* every other kernel moves bytes: by the memory's bandwidth.

The GPU's idle time is the host's and stays. The ranges are those of
:mod:`dlrm_workbook.analysis.whatif` for ratios of least times; they were not measured between
GPUs, unless two recordings are of one program (:func:`parts_held_against`) or have kernels in
common (:func:`held_against`).
"""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import PART, as_one, attribute, in_step_order
from dlrm_workbook.analysis.compare import SAME_PROGRAM, device_contexts, likeness
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.devices import DEVICES, NO_NAME, Device, device, device_of
from dlrm_workbook.analysis.gpu_limits import kernel_work, peak_tflops
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.analysis.roofline import Limits
from dlrm_workbook.analysis.whatif import COVER, MODEL_ERROR, ROOFLINE_ERROR
from dlrm_workbook.ground.arrays import Floats
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import COMMUNICATION
from dlrm_workbook.recordings.profile import Profile, nearest

LATENCY_US = 5.0
"""Kernels of one block take 2.3 to 6.5 us on a V100 and on an A100 alike (the real recordings)."""

LATENCY_RANGE = 2.0
"""Factor by which such kernels differ between GPUs: of those that a V100's and an A100's real
recordings have in common, half are within 1.3 to 1.9."""

FEW_BLOCKS = 40
"""Fewer blocks than this leave most of any listed GPU's multiprocessors idle."""

FAR = 0.1
"""A kernel that reaches less than this share of its limits, where its work is known, is bound by
none of them."""

SLOW_COPY = 0.5
"""A copy below this share of its link's rate is bound by the host: pageable, or too small."""

SHOWN_GPUS = ("V100-32GB", "A100-40GB", "A100-80GB", "H100-SXM", "H200", "B200")
"""GPUs that :func:`other_gpus` predicts for."""

KERNELS = ["ms", "launches", "limit", "ratio", "low", "high"]
PREDICTED_PARTS = [*PART, "where", "now_ms", "then_ms", "low_ms", "high_ms", "limit"]
GPUS = ["gpu", "now_ms", "then_ms", "low_ms", "high_ms", "speedup_mid", "speedup_low"]
GPUS += ["speedup_high", "unchanged"]
PARTS_HELD = [*PART, "before_ms", "predicted_ms", "low_ms", "high_ms", "after_ms"]
PARTS_HELD += ["error", "in_range"]
HELD = ["operator", "kernel", "shapes", "limit", "before_us", "predicted_us", "low_us", "high_us"]
HELD += ["after_us", "error", "in_range"]


def recorded_gpu(profile: Profile) -> Device:
    """The listed GPU of a recording.

    Raises:
        InputError: it holds no work of a GPU, or of one that is not listed.
    """
    if not profile.has("gpu_time_ms"):
        raise InputError(
            "the recording has no GPU work, so no other GPU can be predicted; "
            "`dlrm run all -f FILE -p training.device=cuda` records a run on a GPU"
        )
    listed = device_of(profile.meta)
    if listed is None:
        name = profile.meta.get("device_name")
        raise InputError(f"no data sheet of {name} is listed" if name else NO_NAME)
    return listed


def kernel_ratios(profile: Profile, name: str) -> pd.DataFrame:
    """Time on another GPU over time on this one, of everything that ran on it.

    Args:
        name: of the other GPU, as :func:`dlrm_workbook.analysis.devices.device` takes it.

    Returns:
        Index: context. ``ms`` and ``launches`` (of a mean iteration, or of the whole
        recording), ``limit`` (``arithmetic``, ``memory bandwidth``, ``latency``, ``link``,
        ``host``, ``network``), ``ratio`` with ``low`` and ``high``.

    Raises:
        InputError: see :func:`recorded_gpu` and ``device``; or the other GPU has no units for a
            precision that is used.
    """
    now, then = recorded_gpu(profile), device(name)
    table = device_contexts(profile)
    rows = table.index.to_numpy()
    names = profile.contexts["name"].to_numpy()[rows]
    count = profile.value_table("calls").to_numpy()[rows]
    total = profile.value_table("gpu_time_ms").to_numpy()[rows]
    mean_us = 1e3 * total / np.where(count > 0, count, np.nan)
    blocks = _blocks(profile)[rows]
    is_kernel = profile.of_kind("kernel")[rows]
    work = kernel_work(profile, rows)
    far = (work["flops"].notna() & (work["least_ms"] < FAR * work["least_of_ms"])).to_numpy()
    sizes = profile.value_table("copy_bytes").to_numpy()[rows]
    memory = now.memory_gb_per_s / then.memory_gb_per_s
    limits = []
    for row, text in enumerate(map(str, names)):
        if COMMUNICATION.search(text) and is_kernel[row]:
            limits.append(("network", 1.0, 1.0))
        elif is_kernel[row]:
            small = mean_us[row] <= LATENCY_US or blocks[row] < FEW_BLOCKS or far[row]
            least = kernel_name(text)
            if least.is_product:
                ratios = _product_ratios(now, then, least.precision, least.tensor_cores, work, row)
            else:
                ratios = ("memory bandwidth", memory, memory)
            limits.append(("latency", 1.0, 1.0) if small else ratios)
        else:
            rate = sizes[row] / total[row] / 1e6 if total[row] > 0 else math.nan
            limits.append(_copy_ratios(now, then, text, rate))
    table["limit"] = [limit for limit, _, _ in limits]
    table["ratio"] = [ratio for _, ratio, _ in limits]
    other = np.array([end for _, _, end in limits], dtype=float)
    reach = 1 + COVER * _error(table["ratio"].to_numpy())
    reach[table["limit"].eq("latency").to_numpy() & (now.name != then.name)] = LATENCY_RANGE
    table["low"] = np.minimum(table["ratio"] / reach, other)
    table["high"] = np.maximum(table["ratio"] * reach, other)
    return table[KERNELS]


def _error(ratio: Floats) -> Floats:
    by_sheet = ROOFLINE_ERROR * np.minimum(1.0, np.abs(np.log2(ratio)))
    error: Floats = np.hypot(by_sheet, MODEL_ERROR)
    return error


def _blocks(profile: Profile) -> Floats:
    """Mean blocks of a launch (contexts,); infinite where unknown.

    HPCToolkit's may be the threads of a block (its database of the experiment says so).
    """
    launches = profile.value_table("launches").to_numpy()
    total = profile.value_table("GKER:BLKS_ACUMU").to_numpy()
    if profile.meta.get("engine") == "hpctoolkit":
        return np.full(len(launches), np.inf)
    counted = (launches > 0) & (total > 0)
    return np.where(counted, total / np.where(counted, launches, 1), np.inf)


def _product_ratios(
    now: Device, then: Device, precision: str, cores: bool | None, work: pd.DataFrame, row: int
) -> tuple[str, float, float]:
    """(limit, ratio, the other end of what it may be) of a matrix product."""
    memory = now.memory_gb_per_s / then.memory_gb_per_s
    peak = peak_tflops(now, precision, cores)
    wanted = precision
    if precision == "tf32" and "tf32" not in then.tflops:
        wanted, cores = "fp32", False  # what torch does on a GPU without TF32
    if precision in ("bf16", "fp16") and cores and precision not in then.tflops:
        raise InputError(f"{then.name} has no units for {precision}, which the recording uses")
    other = peak_tflops(then, wanted, cores)
    if not (math.isfinite(peak) and math.isfinite(other)):
        return "memory bandwidth", memory, 1.0
    arithmetic = peak / other
    flops, size = float(work["flops"].iloc[row]), float(work["bytes"].iloc[row])
    if not (math.isfinite(flops) and math.isfinite(size)):
        return "arithmetic", arithmetic, memory
    before = flops / peak / 1e3, size / now.memory_gb_per_s
    after = flops / other / 1e3, size / then.memory_gb_per_s
    ratio = max(after) / max(before)
    return ("arithmetic" if before[0] >= before[1] else "memory bandwidth"), ratio, ratio


def _copy_ratios(now: Device, then: Device, name: str, rate: float) -> tuple[str, float, float]:
    """(limit, ratio, the other end of what it may be) of a copy or memory set.

    Args:
        rate: GB/s that it reaches; NaN where unknown.
    """
    memory = now.memory_gb_per_s / then.memory_gb_per_s
    link = now.link_gb_per_s / then.link_gb_per_s
    if not re.search(r"HtoD|DtoH|H2D|D2H|copyin|copyout|HostTo|ToHost", name):
        return "memory bandwidth", memory, memory
    if "pageable" in name.lower() or not rate >= SLOW_COPY * now.link_gb_per_s:
        return "host", 1.0, link
    return "link", link, link


def predict_gpu(profile: Profile, name: str) -> pd.DataFrame:
    """Each part of the step on another GPU, predicted from data sheets.

    Args:
        name: of the other GPU, as :func:`dlrm_workbook.analysis.devices.device` takes it.

    Returns:
        ``component``, ``phase``, ``where`` (``device``; idle time of the GPU stays), ``now_ms``,
        ``then_ms``, ``low_ms``, ``high_ms``, ``limit`` (what most of the part's time is bound by);
        in the order of a step. Of a mean steady iteration, or of the whole recording
        where no iteration is known (``attrs["per"]``). ``attrs["gpu"]``, ``attrs["notices"]``.

    Raises:
        InputError: see :func:`kernel_ratios`.
    """
    ratios = kernel_ratios(profile, name)
    marked = len(profile.iterations) > 0
    parts = attribute(profile if marked else as_one(profile))
    contexts = ratios.join(profile.contexts[PART])
    rows = []
    for row in parts.to_dict("records"):
        part = {key: row[key] for key in (*PART, "where")} | {"now_ms": row["time_ms"]}
        of_part = contexts[contexts[PART].eq([row[key] for key in PART]).all(axis=1)]
        spent = of_part["ms"].sum()
        scaled = {"then_ms": 1.0, "low_ms": 1.0, "high_ms": 1.0}
        limit = ""
        if row["where"] == "device" and spent > 0:
            columns = zip(scaled, ("ratio", "low", "high"), strict=True)
            scaled = {end: float((of_part["ms"] * of_part[c]).sum() / spent) for end, c in columns}
            limit = str(of_part.groupby("limit")["ms"].sum().idxmax())
        part |= {end: row["time_ms"] * ratio for end, ratio in scaled.items()}
        rows.append(part | {"limit": limit})
    table = in_step_order(pd.DataFrame(rows, columns=PREDICTED_PARTS))
    now = recorded_gpu(profile)
    table.attrs["per"] = "per iteration" if marked else "in the whole recording"
    table.attrs["gpu"] = f"{now.name} to {device(name).name}"
    table.attrs["notices"] = _notices(ratios, table)
    return table


def _notices(ratios: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    notices = [
        "Predicted from data sheets, not measured; the GPU's idle time is the host's and stays."
    ]
    spent = ratios.groupby("limit")["ms"].sum() / ratios["ms"].sum()
    for limit, why in (
        ("network", "communication, taken as unchanged: data sheets do not describe the network"),
        ("latency", "kernels too small for a faster GPU to help, taken as unchanged"),
    ):
        if spent.get(limit, 0.0) >= 0.01:
            notices.append(f"{spent[limit]:.0%} of the device time is {why}.")
    idle = table.loc[table["where"].ne("device"), "now_ms"].sum() / table["now_ms"].sum()
    if idle >= 0.01:
        notices.append(
            f"The GPU is idle for {idle:.0%} of the time, which another GPU does not mend."
        )
    return notices


def other_gpus(profile: Profile) -> pd.DataFrame:
    """The step on each of a few GPUs, predicted from data sheets; fastest first.

    Returns:
        Columns as in ``dlrm help columns other_gpus``. Empty, with the reason, where nothing can be
        predicted. ``attrs``: as :func:`predict_gpu`.
    """
    try:
        now = recorded_gpu(profile)
    except InputError as error:
        return (
            _beside_a_cpu(profile) if profile.meta.get("ceilings") else unmeasured(GPUS, str(error))
        )
    rows, attrs = [], {}
    for gpu in DEVICES:
        if gpu.name not in SHOWN_GPUS or gpu.name == now.name:
            continue
        try:
            table = predict_gpu(profile, gpu.name)
        except InputError:
            continue
        attrs = dict(table.attrs)
        before, after = float(table["now_ms"].sum()), float(table["then_ms"].sum())
        low, high = _joined(table)
        same = table["then_ms"].eq(table["now_ms"]) & table["now_ms"].gt(0)
        speedups = before / after, before / high, before / low
        unchanged = float(table.loc[same, "now_ms"].sum()) / before
        rows.append((gpu.name, before, after, low, high, *speedups, unchanged))
    if not rows:
        return unmeasured(GPUS, "no listed GPU has units for the precisions of the recording")
    table_of_gpus = pd.DataFrame(rows, columns=GPUS).sort_values("then_ms", ignore_index=True)
    table_of_gpus.attrs["notices"] = attrs["notices"]
    table_of_gpus.attrs["per"] = attrs["per"]
    return table_of_gpus


OF_THE_MODEL = ("bottom_mlp", "embedding", "interaction", "top_mlp", "loss", "optimizer")
"""Parts that a GPU would take over."""


def _beside_a_cpu(profile: Profile) -> pd.DataFrame:
    """A CPU's step on GPUs, by the two ratios that Kalamkar et al. 2020 compare machines by.

    The ends of the range are the model's parts over the ratio of arithmetic alone (fp32, the
    CPU's as measured) and over that of memory bandwidth alone; the middle is their geometric mean.
    All other parts, the making of batches among them, stay as they are. What a GPU adds is in
    neither ratio: it is a comparison of machines, not a prediction of the program.
    """
    limits, parts = Limits(profile.meta["ceilings"]), attribute(profile)
    step = float(parts["time_ms"].sum())
    scaled = float(parts.loc[parts["component"].isin(OF_THE_MODEL), "time_ms"].sum())
    if not scaled:
        return unmeasured(GPUS, "no part of the recording is one of the model's")
    gflops = limits.peak_gflops(["fp32"])
    rates = [row.get("read_gb_per_s") for row in profile.meta["ceilings"].get("stream") or []]
    known = [float(rate) for rate in rates if rate]
    if gflops is None or not known:
        return unmeasured(GPUS, "the CPU's arithmetic or its memory bandwidth was not measured")
    bandwidth = known[-1]  # of the largest arrays: memory, not a cache
    rows = []
    for gpu in DEVICES:
        if gpu.name not in SHOWN_GPUS:
            continue
        ratios = 1e3 * gpu.tflops["fp32"] / gflops, gpu.memory_gb_per_s / bandwidth
        low, mid, high = min(ratios), math.sqrt(ratios[0] * ratios[1]), max(ratios)
        times = [step - scaled + scaled / ratio for ratio in (mid, high, low)]
        speedups = [step / times[place] for place in (0, 2, 1)]
        rows.append((gpu.name, step, *times, *speedups, 1 - scaled / step))
    table = pd.DataFrame(rows, columns=GPUS).sort_values("then_ms", ignore_index=True)
    table.attrs["per"] = "iteration"
    table.attrs["notices"] = [
        f"This CPU reaches {gflops:,.0f} GFLOP/s in fp32 products and reads memory at "
        f"{bandwidth:,.0f} GB/s, as measured. Each range reaches from the ratio of one to that of "
        "the other, data sheet over measured (as Kalamkar et al. 2020 compare a CPU with a V100). "
        "It compares machines: launches and copies are in neither ratio, and what is not a part "
        "of the model, such as the making of batches, takes as long as now."
    ]
    return table


def _joined(table: pd.DataFrame) -> tuple[float, float]:
    """Low and high of the whole step: halfway between errors that add up and that do not."""
    after = float(table["then_ms"].sum())
    down, up = table["then_ms"] - table["low_ms"], table["high_ms"] - table["then_ms"]
    reach = [float((d.sum() + math.sqrt((d**2).sum())) / 2) for d in (down, up)]
    return after - reach[0], after + reach[1]


# ---- held against another recording -----------------------------------------------------


def parts_held_against(before: Profile, after: Profile) -> pd.DataFrame:
    """Device time of each part, predicted from one recording and measured in the other.

    Returns:
        Columns as in ``dlrm help columns parts_held_against``; communication is left out: it is not
        predicted. ``attrs["sentence"]`` sums it up. Empty, with the reason, where the recordings
        are not of one program with the same shapes.
    """
    try:
        predicted_parts = predict_gpu(before, recorded_gpu(after).name)
    except InputError as error:
        return unmeasured(PARTS_HELD, str(error))
    shares = likeness(before, after)
    if shares is None or not min(shares) >= SAME_PROGRAM or not len(after.iterations):
        return unmeasured(
            PARTS_HELD, "the two recordings are not of one program with the same shapes and steps"
        )
    predicted_parts = predicted_parts[
        predicted_parts["where"].eq("device") & predicted_parts["component"].ne("communication")
    ]
    predicted_parts = predicted_parts.rename(
        columns={"now_ms": "before_ms", "then_ms": "predicted_ms"}
    )
    measured = attribute(after)
    measured = measured[measured["where"].eq("device")].rename(columns={"time_ms": "after_ms"})
    table = predicted_parts.merge(measured[[*PART, "after_ms"]], on=PART).reset_index(drop=True)
    table["error"] = table["predicted_ms"] / table["after_ms"] - 1
    table["in_range"] = table["after_ms"].between(table["low_ms"], table["high_ms"])
    predicted, taken = table["predicted_ms"].sum(), table["after_ms"].sum()
    table.attrs["sentence"] = (
        f"Predicted from {recorded_gpu(before).name} to {recorded_gpu(after).name}, the GPU "
        f"computes for {milliseconds(predicted)} and was measured at {milliseconds(taken)} "
        f"({predicted / taken - 1:+.0%}); {table['in_range'].sum()} of {len(table)} parts lie in "
        "their range."
    )
    return table[PARTS_HELD]


def held_against(before: Profile, after: Profile) -> pd.DataFrame:
    """What two recordings have in common, predicted from the first and measured in the second.

    Kernels match that have the same name and grid, and operators (their kernels together) of the
    same name and shapes with no other kernels in common.

    Returns:
        Columns as in ``dlrm help columns held_against``; longest in the second first.
        ``attrs["sentence"]`` sums it up. Empty, with the reason, where nothing matches.
    """
    try:
        ratios = kernel_ratios(before, recorded_gpu(after).name)
        recorded_gpu(before)
    except InputError as error:
        return unmeasured(HELD, str(error))
    one, other = (_calls(profile) for profile in (before, after))
    one = one.join(ratios[["limit", "ratio", "low", "high"]])
    for end in ("ratio", "low", "high"):
        one[end] *= one["us"]
    spent = {"before_us": "us", "predicted_us": "ratio", "low_us": "low", "high_us": "high"}
    frames = []
    for keys, chosen in (
        (["kernel", "blocks", "threads"], "comparable"),
        (["operator", "shapes"], "shaped"),
    ):
        first, second = (calls[calls[chosen]].groupby(keys) for calls in (one, other))
        sums = first[["calls", *spent.values()]].sum().assign(limit=first["limit"].first())
        both = sums.join(second[["calls", "us"]].sum(), how="inner", rsuffix="_after")
        per_call = {name: both[column] / both["calls"] for name, column in spent.items()}
        per_call["after_us"] = both["us_after"] / both["calls_after"]
        frames.append(both[["limit"]].assign(**per_call).reset_index())
    table = (
        pd.concat(frames, ignore_index=True)
        .reindex(columns=HELD)
        .fillna({"operator": "", "kernel": "", "shapes": ""})
    )
    if table.empty:
        return unmeasured(
            HELD, "the recordings have no kernel of one grid nor operator of one shape in common"
        )
    table["error"] = table["predicted_us"] / table["after_us"] - 1
    table["in_range"] = table["after_us"].between(table["low_us"], table["high_us"])
    table = table.sort_values("after_us", ascending=False, ignore_index=True)
    off = table["error"].abs()
    table.attrs["sentence"] = (
        f"{len(table)} kernels or operators are in both recordings alike: the prediction from "
        f"{recorded_gpu(before).name} to {recorded_gpu(after).name} is off by {off.median():.0%} "
        f"in the median and {off.max():.0%} at most; {table['in_range'].sum()} lie in its range."
    )
    return table


def _calls(profile: Profile) -> pd.DataFrame:
    """What kernels took and by what they are compared; index: context.

    ``operator``, ``shapes``, ``kernel``, ``blocks``, ``threads``; ``us`` (in all), ``calls``;
    ``comparable`` (a kernel whose grid is known), ``shaped`` (below an operator whose inputs'
    shapes are known and do not vary).
    """
    contexts = profile.contexts
    kernels = profile.of_kind("kernel") & ~profile.which(
        "name", lambda name: bool(COMMUNICATION.search(name))
    )
    rows = np.flatnonzero(kernels & (profile.value_table("gpu_time_ms").to_numpy() > 0))
    operator = nearest(contexts["parent"].to_numpy(), profile.of_kind("operator"))[rows]
    launches = profile.value_table("launches").to_numpy()[rows]
    threads = profile.value_table("GKER:BLK_THR_ACUMU").to_numpy()[rows]
    blocks = _blocks(profile)[rows]
    shapes = np.where(operator >= 0, contexts["shapes"].to_numpy()[operator], "")
    table = pd.DataFrame(
        {
            "operator": np.where(operator >= 0, contexts["name"].to_numpy()[operator], ""),
            "shapes": shapes,
            "kernel": contexts["name"].to_numpy()[rows],
            "blocks": blocks,
            "threads": threads / np.where(launches > 0, launches, np.nan),
            "us": 1e3 * profile.value_table("gpu_time_ms").to_numpy()[rows],
            "calls": launches,
        },
        index=rows,
    )
    table["comparable"] = np.isfinite(blocks) & table["threads"].gt(0)
    sizes = pd.Series(shapes, index=rows).astype(str)
    table["shaped"] = sizes.str.contains(r"\d") & ~sizes.str.contains(r"\*")
    return table
