"""What a reader of a GPU database must know before believing its figures.

Figures that contradict each other, or that no GPU can have, are named here instead of being
averaged in silence; what one cannot mend is taken out, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

DIFFERENT_TIMES = 0.1
"""Two kernel times that differ by more than this share are named."""
MOST_OVERLONG = 20
"""At most one interval of so many of a kernel can be mended by the others."""
USUAL_TIMES = 2.0
"""A mended interval is at most so many times as long or short as the others of its kernel."""
ROUNDING_NS = 1.0
MOST_LOCAL_BYTES = 1 << 20
"""Local memory of a launch above which it is what the driver reserves for the whole GPU (a
thread has 512 KB at most, and kernels of torch use a few hundred bytes)."""
PAGEABLE_GB_PER_S = 10.0
"""Below this speed copies of large blocks are usually of pageable memory, which goes through a
buffer of the driver; pinned memory reaches 12 GB/s on PCIe 3 x16, 25 on PCIe 4, 50 on PCIe 5."""
LARGE_COPY_BYTES = 1 << 18
"""Mean size of copies from which their speed tells of the link, not of the launch."""
PRODUCT_KERNELS = ("gemm", "gemv", "cutlass", "xmma", "nvjet", "cijk", "matmul")
"""In lower case, of the names of kernels that multiply matrices."""


def sampling_quality(root: Mapping[str, float]) -> dict[str, float | str] | None:
    """How well a recording was PC-sampled, by its metrics of the whole run; None if it was not.

    These are ``taken``, ``expected``, ``dropped`` (samples), ``period_cycles`` (between samples),
    ``utilisation_percent`` (samples taken of those that a busy GPU would give): numbers, or the
    reason why there is none.
    """
    taken, cycles = root.get("GSAMP:TOT", 0.0), root.get("GINS", 0.0)
    if not taken and not cycles:
        return None
    expected = root.get("GSAMP:EXP", 0.0)
    absent = "not measured: the database has no value of"
    utilisation = min(100.0, 100 * taken / expected) if expected else 0.0
    return {
        "taken": taken or f"{absent} GSAMP:TOT",
        "expected": expected or f"{absent} GSAMP:EXP",
        "dropped": root.get("GSAMP:DRP", f"{absent} GSAMP:DRP"),
        "period_cycles": cycles / taken if taken and cycles else f"{absent} GSAMP:PER (cyc)",
        "utilisation_percent": utilisation or f"{absent} GSAMP:EXP and GSAMP:TOT",
    }


def is_serialised(trace: pd.DataFrame, contexts: pd.DataFrame, amd: bool) -> bool:
    """Whether the kernels of a PC-sampled recording ran one at a time.

    NVIDIA's PC sampling does so; AMD's does not, and neither did one in which kernels overlap.
    """
    if amd:
        return False
    kernels = trace[contexts["kind"].eq("kernel").to_numpy()[trace["context"]]]
    kernels = kernels.sort_values("start_ns")
    reached = np.maximum.accumulate(kernels["end_ns"].to_numpy())
    return not (kernels["start_ns"].to_numpy()[1:] < reached[:-1]).any()


def without_nonsense(
    values: pd.DataFrame, contexts: pd.DataFrame
) -> tuple[pd.DataFrame, dict[str, str], list[str]]:
    """The values without metrics that cannot be true, each such metric to the reason why it was
    left out, and sentences for the reader."""
    reasons, cautions = {}, []
    wanted = ("GKER:COUNT", "GKER:BLKS_ACUMU", "GKER:BLK_THR_ACUMU", "GKER:LMEM_ACUMU (B)")
    wide = _by_context(values, wanted, absent=np.nan)
    wide = wide[wide["GKER:COUNT"] > 0]
    mean = wide.div(wide["GKER:COUNT"], axis=0)
    blocks, threads = wide["GKER:BLKS_ACUMU"], wide["GKER:BLK_THR_ACUMU"]
    if len(wide) and (blocks == threads).all() and mean["GKER:BLKS_ACUMU"].nunique() > 1:
        names = contexts["name"].iloc[wide.index].nunique()
        reasons["GKER:BLKS_ACUMU"] = (
            "GKER:BLKS equals GKER:BLK_THR in every kernel: HPCToolkit wrote the one into the other"
        )
        reasons["mean_blocks"] = reasons["GKER:BLKS_ACUMU"]
        cautions.append(
            f"Thread blocks are not measured: in all {names} kernels their number (GKER:BLKS) "
            "equals the threads of a block (GKER:BLK_THR), so HPCToolkit wrote one into the other."
        )
    local = mean["GKER:LMEM_ACUMU (B)"].max()
    if local > MOST_LOCAL_BYTES:
        reasons["GKER:LMEM_ACUMU (B)"] = (
            f"{local / 1e6:.0f} MB for a launch is no kernel's local memory; it is what the "
            "driver reserves on the GPU"
        )
        cautions.append(
            f"Local memory is not measured: GKER:LMEM says up to {local / 1e6:.0f} MB for a "
            "launch, more than a kernel can use."
        )
    return values[~values["metric"].isin(list(reasons))], reasons, cautions


def _by_context(values: pd.DataFrame, metrics: Sequence[str], absent: float) -> pd.DataFrame:
    """Exclusive values by context, a column for each metric; one without values is ``absent``."""
    rows = values[(values["scope"] == "exclusive") & values["metric"].isin(metrics)]
    wide = rows.astype({"metric": "object"}).pivot_table(
        "value", "context", "metric", aggfunc="sum", fill_value=0.0
    )
    return wide.reindex(columns=list(metrics), fill_value=absent)


def overlong_kernels(values: pd.DataFrame, trace: pd.DataFrame) -> dict[int, int]:
    """Kernels whose interval in the trace is too long: index of the row of ``trace`` to its end in
    nanoseconds, by the metric.

    A record that is missing from the trace makes the interval before it last until the next one.
    Then all other intervals of that kernel add up to its time by the metric (GKER) but for one
    launch of the usual length.
    """
    exclusive = values[values["scope"] == "exclusive"]
    time, launches = (
        exclusive[exclusive["metric"] == name].groupby("context")["value"].sum()
        for name in ("GKER (sec)", "GKER:COUNT")
    )
    ends: dict[int, int] = {}
    for context, rows in trace[trace["context"].isin(time.index)].groupby("context"):
        length = (rows["end_ns"] - rows["start_ns"]).sort_values()
        over = length.sum() - 1e9 * time[context]
        if len(rows) != launches.get(context) or over <= ROUNDING_NS * len(rows):
            continue
        for wrong in range(1, len(rows) // MOST_OVERLONG + 1):
            rest = length.iloc[:-wrong]
            true = (1e9 * time[context] - rest.sum()) / wrong
            least, most = rest.iloc[0] / USUAL_TIMES, USUAL_TIMES * rest.iloc[-1]
            if true > 0 and least <= true <= most:
                late = length.index[-wrong:]
                ends |= (rows["start_ns"][late] + round(true)).to_dict()
                break
    return ends


def cautions_of(
    contexts: pd.DataFrame,
    values: pd.DataFrame,
    trace: pd.DataFrame,
    overlong: Mapping[int, int],
    serialised: bool,
) -> list[str]:
    """Sentences about the times of a recording on a GPU, gravest first."""
    cautions = []
    if serialised:
        cautions.append(
            "Kernels were serialised: PC sampling runs one at a time and makes each launch "
            "slower, so times, idleness and overlap of this recording are distorted. It is for "
            "stall reasons; measure times without it (-e gpu=nvidia)."
        )
    total = values[values["scope"] == "exclusive"].groupby("metric", observed=True)["value"].sum()
    is_kernel = contexts["kind"].eq("kernel").to_numpy()
    if len(trace) and total.get("GKER (sec)", 0) > 0:
        rows = trace[is_kernel[trace["context"]]]
        by_trace = float((rows["end_ns"] - rows["start_ns"]).sum()) / 1e6
        metric, count = 1e3 * float(total["GKER (sec)"]), float(total.get("GKER:COUNT", np.nan))
        if abs(len(rows) / count - 1) > DIFFERENT_TIMES:
            cautions.append(
                f"The trace holds {len(rows):,} kernels where {count:,.0f} were launched: it is "
                "not whole, or not of this run, so busy and idle time and iterations are not to "
                "be relied on."
            )
        elif by_trace > 0 and abs(by_trace / metric - 1) > DIFFERENT_TIMES:
            mended = sum((rows["end_ns"][list(overlong)] - pd.Series(overlong)).tolist()) / 1e6
            longest = (rows["end_ns"] - rows["start_ns"])[list(overlong)].max() / 1e6
            if overlong:
                why = (
                    f"{len(overlong)} of {len(rows):,} intervals of the trace are too long (up to "
                    f"{longest:.1f} ms; by {mended:.1f} ms together), the others agree. Times of "
                    "kernels, parts and steps are without that; what is drawn or summed from the "
                    "trace itself (timelines, a GPU's idle time, gpu_busy_ms) is not."
                )
            else:
                why = (
                    f"{1e3 * (by_trace - metric) / count:+.2f} µs for each of {count:,.0f} "
                    "launches on average. Times over the whole recording are the metric's; times "
                    "in an iteration, busy and idle time are the trace's."
                )
            cautions.append(
                f"Two times of the kernels disagree by {abs(by_trace / metric - 1):.0%}: "
                f"{metric:.1f} ms by the metric (GKER), {by_trace:.1f} ms by the trace: {why}"
            )
    return [*cautions, *_copy_speed(values), *_unseen_products(contexts, values)]


def _copy_speed(values: pd.DataFrame) -> list[str]:
    """What the speed of copies to the GPU tells of the host's memory."""
    wanted = ("GXCOPY:H2D (B)", "GXCOPY:COUNT", "GXCOPY (sec)")
    wide = _by_context(values, wanted, absent=0.0)
    size, count, seconds = wide[wide[wanted[0]] > 0].sum()
    if not seconds or not count or size < LARGE_COPY_BYTES * count:
        return []
    speed = size / seconds / 1e9
    if speed >= PAGEABLE_GB_PER_S:
        return []
    return [
        f"Copies to the GPU ran at {speed:.2f} GB/s ({size / 1e6:,.1f} MB in {count:,.0f} copies, "
        f"{1e3 * seconds:.1f} ms), a speed usual for pageable memory (pinned memory reaches "
        "12 GB/s on PCIe 3 x16). HPCToolkit does not record whether memory was pinned."
    ]


def _unseen_products(contexts: pd.DataFrame, values: pd.DataFrame) -> list[str]:
    """Whether the forward pass of a part lacks the matrix products that its backward pass has."""
    launched = values[(values["metric"] == "GKER:COUNT") & (values["scope"] == "exclusive")]
    count = np.bincount(launched["context"], launched["value"], minlength=len(contexts))
    product = contexts["name"].str.lower().str.contains("|".join(PRODUCT_KERNELS)).to_numpy()
    lacking = []
    for part in ("bottom_mlp", "top_mlp"):
        mine = contexts["component"].eq(part).to_numpy() & product
        forward = count[mine & contexts["phase"].eq("forward").to_numpy()].sum()
        backward = count[mine & contexts["phase"].eq("backward").to_numpy()].sum()
        # every layer has one product in its forward pass, and one or two in its backward pass
        if backward > 0 and 3 * forward < backward:
            lacking.append(
                f"{part.replace('_mlp', ' MLP')} ({forward:,.0f} forward, {backward:,.0f} backward)"
            )
    if not lacking:
        return []
    return [
        "Matrix products of the forward pass are missing in this recording: kernels recorded for "
        f"{' and '.join(lacking)}. A layer has one forward and at most two backward, so the "
        "forward times of these parts are too small; HPCToolkit did not see those launches."
    ]
