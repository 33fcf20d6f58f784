"""Is launching the limit: how often, how long, and how far the host runs ahead.

A GPU is bound by launches when its kernels end sooner than the host can launch the next one:
the queue of launched kernels then runs empty again and again. On a CPU the analogue is the
cost of dispatching an operator against what the operator does.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import PART, main_thread
from dlrm_workbook.analysis.context_tree import extent, reason_of, unmeasured
from dlrm_workbook.recordings.foreign import exchange_kernels
from dlrm_workbook.recordings.nesting import start_and_end, stretch_at
from dlrm_workbook.recordings.profile import Profile, nearest, of_streams, once

OPERATION_COLUMNS = ["start_ns", "end_ns", "context", "kind", *PART]
OPERATION_COLUMNS += ["launch_start_ns", "launch_end_ns"]
LAUNCH_COLUMNS = [*PART, "launches", "kernel_us", "kernel_ms", "launch_us", "short_share"]
SUMMARY_COLUMNS = ["launches", "launches_per_s", "kernel_us", "launch_us", "short_share"]
SUMMARY_COLUMNS += ["queue_depth", "empty_share", "launch_bound"]
DEPTHS = ["time_ms", "depth"]
LOAD_COLUMNS = [*PART, "operators", "operator_us", "part_ms", "dispatch_us", "dispatch_ms"]
LOAD_COLUMNS += ["dispatch_share"]

UNTRACED_LAUNCH = -1
"""Launch time of device work whose launch is not in the trace."""

BOUND = 0.5
"""Launch-bound: more than this share of the kernels are shorter than a launch, and on average
less than one is queued. Then the host's launching sets the pace, whatever the kernels do."""


@once
def launched_operations(profile: Profile) -> pd.DataFrame:
    """Kernels, copies and memory sets with the call that launched each, in order of start.

    A call path that launches n times has n calls and n (or c n, for a graph of c kernels)
    operations below it; first in is first out, so the k-th belongs to the k-th.

    Returns:
        ``start_ns``, ``end_ns``, ``context``, ``kind`` (``kernel`` or ``copy``), ``component``,
        ``phase``, ``launch_start_ns``, ``launch_end_ns`` (−1 where the launch is not in the
        trace). Empty, with the reason, without a trace of a GPU stream.
    """
    trace, work = profile.trace, of_streams(profile)
    calls = trace.drop(work.index)
    work = work[work["end_ns"] > work["start_ns"]]
    if work.empty:
        reason = "no GPU stream has a trace"
        return unmeasured(OPERATION_COLUMNS, reason, profile, "gpu_time_ms", "trace")
    work = work.sort_values(["start_ns", "end_ns"])
    context = work["context"].to_numpy()
    over = np.maximum(profile.contexts["parent"].to_numpy()[context], 0)  # the root has none
    calls = calls[calls["context"].isin(over)].sort_values(["context", "start_ns"])
    begun = np.full(len(work), UNTRACED_LAUNCH, dtype=np.int64)
    done = begun.copy()
    launches = np.bincount(calls["context"], minlength=len(profile.contexts))
    below = np.bincount(over, minlength=len(launches))
    per_call, rest = np.divmod(below, np.maximum(launches, 1))
    is_told = ((launches > 0) & (rest == 0))[over]
    turn = pd.Series(over).groupby(over).cumcount().to_numpy()
    call = (np.cumsum(launches) - launches)[over] + turn // np.maximum(per_call[over], 1)
    begun[is_told] = calls["start_ns"].to_numpy()[call[is_told]]
    done[is_told] = calls["end_ns"].to_numpy()[call[is_told]]
    # Merged call paths may be out of order by a stream's lag: nothing starts before its launch.
    wrong = begun > work["start_ns"].to_numpy()
    begun[wrong], done[wrong] = UNTRACED_LAUNCH, UNTRACED_LAUNCH
    done = np.where(done >= 0, np.minimum(done, work["start_ns"].to_numpy()), done)
    operations = work[["start_ns", "end_ns", "context"]].reset_index(drop=True)
    operations[["kind", *PART]] = profile.contexts[["kind", *PART]].to_numpy()[context]
    operations["launch_start_ns"], operations["launch_end_ns"] = begun, done
    return operations


NO_OPERATORS = "the recording has no operators of torch"


def exchanging(profile: Profile, work: pd.DataFrame) -> pd.Series:
    """Which rows of :func:`launched_operations` are kernels that exchange data between ranks."""
    return pd.Series(exchange_kernels(profile)[work["context"].to_numpy()], work.index)


def launches_by_part(profile: Profile) -> pd.DataFrame:
    """Kernels launched by each part in a mean iteration, most launches first.

    ``launch_us`` is NaN where the launching call is not traced; ``short_share`` is of the kernels
    that end sooner than a launch takes (:func:`launch_cost_us`). Empty, with the reason, without a
    GPU trace.
    """
    kernels = _kernels(profile)
    if kernels.empty:
        return unmeasured(LAUNCH_COLUMNS, reason_of(kernels) or "no kernel ran")
    cost = launch_cost_us(profile, kernels)
    count = max(len(profile.iterations), 1)
    kernels = kernels.assign(short=kernels["us"] < cost if cost == cost else np.nan)
    table = kernels.groupby(PART, as_index=False).agg(
        launches=("us", "size"),
        kernel_us=("us", "median"),
        kernel_ms=("us", "sum"),
        launch_us=("call_us", "median"),
        short_share=("short", "mean"),
    )
    table["launches"] /= count
    table["kernel_ms"] /= 1e3 * count
    table = table.sort_values("launches", ascending=False, ignore_index=True)[LAUNCH_COLUMNS]
    table.attrs["per"] = _per(profile)
    return table


def _per(profile: Profile) -> str:
    return "per iteration" if len(profile.iterations) else "in all"


def launch_cost_us(profile: Profile, kernels: pd.DataFrame | None = None) -> float:
    """What a launch costs the host: measured alone before the run, or else in the trace; NaN."""
    if measured := (profile.meta.get("ceilings") or {}).get("launch_us"):
        return float(measured)
    kernels = _kernels(profile) if kernels is None else kernels
    call_us = pd.Series(dtype=float) if kernels.empty else kernels["call_us"].dropna()
    return float(call_us.median()) if len(call_us) else float("nan")


def launch_summary(profile: Profile) -> pd.DataFrame:
    """One row: does launching set the pace of the GPU (``launch_bound``, see ``BOUND``)?

    NaN, or None, where the trace does not say. Empty, with the reason, without a GPU trace.
    """
    kernels = _kernels(profile)
    if kernels.empty:
        return unmeasured(SUMMARY_COLUMNS, reason_of(kernels) or "no kernel ran")
    count = max(len(profile.iterations), 1)
    cost = launch_cost_us(profile, kernels)
    first, last = _window(profile, kernels)
    depth = queue_depth(profile)
    seconds = (last - first) / 1e9
    short = float((kernels["us"] < cost).mean()) if cost == cost else np.nan
    mean = empty = np.nan
    if len(depth):
        length = np.diff(np.append(depth["time_ms"].to_numpy(), (last - first) / 1e6))
        mean = float(np.average(depth["depth"], weights=length)) if length.sum() else np.nan
        empty = float(length[depth["depth"].to_numpy() == 0].sum() / length.sum())
    row = {
        "launches": len(kernels) / count,
        "launches_per_s": len(kernels) / seconds,
        "kernel_us": float(kernels["us"].median()),
        "launch_us": cost,
        "short_share": short,
        "queue_depth": mean,
        "empty_share": empty,
        "launch_bound": bool(short > BOUND and mean < 1) if cost == cost else None,
    }
    summary = pd.DataFrame([row], columns=SUMMARY_COLUMNS)
    summary.attrs["per"] = _per(profile)
    return summary


def queue_depth(profile: Profile, most: int | None = None) -> pd.DataFrame:
    """Operations launched and not finished, over time; each row holds until the next.

    Empty, with the reason, without launches in the trace. There are at ``most`` so many rows: of
    more changes, the mean depth of equal bins.
    """
    work = launched_operations(profile)
    if work.empty:
        return unmeasured(DEPTHS, reason_of(work))
    launched = work[work["launch_end_ns"] >= 0]
    if launched.empty:
        return unmeasured(DEPTHS, "the trace does not say which call launched what")
    first, last = _window(profile, work)
    begin = np.clip(launched["launch_end_ns"].to_numpy(), first, last)
    end = np.clip(launched["end_ns"].to_numpy(), first, last)
    moment = np.concatenate([[first], begin, end])
    change = np.concatenate([[0], np.ones(len(begin)), -np.ones(len(end))])
    where, index = np.unique(moment, return_inverse=True)
    depth = np.cumsum(np.bincount(index, change))
    keep = np.append(True, depth[1:] != depth[:-1]) & (where < last)
    where, depth = where[keep], depth[keep]
    if most is not None and len(where) > most:
        edges = np.linspace(first, last, most + 1)
        area = np.concatenate([[0.0], np.cumsum(depth * np.diff(np.append(where, last)))])
        reached = np.interp(edges, np.append(where, last), area)
        where, depth = edges[:-1], np.diff(reached) / np.diff(edges)
    return pd.DataFrame({"time_ms": (where - first) / 1e6, "depth": depth})


def operator_load(profile: Profile) -> pd.DataFrame:
    """Operators that each part calls on the host, and what dispatching them costs at least.

    Outermost operators only: what they call is dispatched too, so ``dispatch_ms`` is a lower
    bound. A part with a high share is limited by calling, not by computing. Most operators first;
    ``dispatch_us`` is NaN where it was not measured. Empty, with the reason, where operators are
    not traced.
    """
    spans = outermost_operators(profile)
    if spans.empty:
        return unmeasured(LOAD_COLUMNS, NO_OPERATORS, profile, "operators")
    count = max(len(profile.iterations), 1)
    dispatch = (profile.meta.get("ceilings") or {}).get("dispatch_us") or float("nan")
    us = (spans["end_ns"] - spans["start_ns"]) / 1e3
    # what C++ calls is dispatched faster than what Python calls
    spans = spans.assign(us=us, least=np.minimum(us, float(dispatch)))
    table = spans.groupby(PART, as_index=False).agg(
        operators=("us", "size"),
        operator_us=("us", "median"),
        part_ms=("us", "sum"),
        dispatch_ms=("least", "mean"),
    )
    table["operators"] /= count
    table["part_ms"] /= 1e3 * count
    table["dispatch_us"] = float(dispatch)
    table["dispatch_ms"] *= table["operators"] / 1e3
    table["dispatch_share"] = table["dispatch_ms"] / table["part_ms"]
    return table.sort_values("operators", ascending=False, ignore_index=True)[LOAD_COLUMNS]


def outermost_operators(profile: Profile) -> pd.DataFrame:
    """Spans of operators that no operator calls, in iterations: ``start_ns``, ``end_ns``,
    ``context``, ``component``, ``phase``; on the thread of the iterations."""
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    operator = contexts["kind"].eq("operator").to_numpy()
    above = nearest(parent, operator)[np.maximum(parent, 0)]
    outer = operator & ((parent < 0) | (above < 0))
    trace = profile.trace[profile.trace["profile"] == main_thread(profile)]
    spans = trace[outer[trace["context"].to_numpy()]]
    if len(profile.iterations):
        first, last = map(np.sort, start_and_end(profile.iterations))
        spans = spans[stretch_at(first, last, spans["start_ns"].to_numpy()) >= 0]
    parts = contexts[PART].iloc[spans["context"]].reset_index(drop=True)
    return spans[["start_ns", "end_ns", "context"]].reset_index(drop=True).join(parts)


def _kernels(profile: Profile) -> pd.DataFrame:
    """Kernels launched in the iterations, with ``us`` and ``call_us``."""
    work = launched_operations(profile)
    work = work[work["kind"].eq("kernel")] if len(work) else work
    if work.empty:
        return work
    first, last = _window(profile, work)
    is_launched = work["launch_end_ns"] >= 0
    call_us = (work["launch_end_ns"] - work["launch_start_ns"]).where(is_launched) / 1e3
    kernels = work.assign(us=(work["end_ns"] - work["start_ns"]) / 1e3, call_us=call_us)
    at = work["launch_start_ns"].where(is_launched, work["start_ns"])
    return kernels[(at >= first) & (at < last)]


def _window(profile: Profile, work: pd.DataFrame) -> tuple[int, int]:
    return extent(profile.iterations if len(profile.iterations) else work)
