"""When the GPU had nothing to do, and what the CPU was doing meanwhile.

Blame follows HPCToolkit's idleness analysis (Chabbi et al., "Effective sampling-driven
performance tools for GPU-accelerated supercomputers", SC 2013): each moment in which
every stream is idle is charged to the code that the CPU runs then, shared evenly among
the threads that run. Only threads that launch GPU work are charged, where they are known:
no other could have given the GPU something to do.

In a sampled trace (HPCToolkit) a thread is in the code of its last sample until the next
one, so a thread that sleeps is charged as long as one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dlrm_core.errors import InputError
from dlrm_workbook.analysis.context_tree import (
    Ints,
    missing_reason,
    nearest,
    overlap,
    running,
    scopes_of,
    union,
    unmeasured,
)
from dlrm_workbook.recordings.profile import Profile

SPANS = {
    "iterations": "from the first iteration's start to the last one's end",
    "gpu": "from the first GPU operation's start to the last one's end",
    "run": "from the first to the last event of the trace",
}
NOBODY = "(no thread that launches GPU work was running)"

IDLENESS = ["gpu", "rank", "streams", "span_ms", "busy_ms", "idle_ms", "idle_share"]
IDLENESS += ["gaps", "longest_gap_ms"]
BLAME = ["name", "kind", "file", "module", "component", "phase", "blamed_ms", "share"]
_GPU_METRICS = ("gpu_time_ms", "launches", "GKER:COUNT", "GXCOPY:COUNT")


def gpu_idleness(profile: Profile, span: str | None = None) -> pd.DataFrame:
    """How long each GPU ran something, on any of its streams, and how long nothing.

    Args:
        span: ``iterations``, ``gpu`` or ``run`` (see ``SPANS``); iterations if the profile
            has them, else ``gpu``, so that start-up is not counted as idle.

    Returns:
        ``gpu`` (name), ``rank``, ``streams``, ``span_ms``, ``busy_ms`` (union over the
        streams), ``idle_ms``, ``idle_share`` (0 to 1), ``gaps`` (idle stretches),
        ``longest_gap_ms``; ``attrs["span"]`` says in words which span. Empty, with the
        reason in ``attrs["not_measured"]``, without a trace of a GPU stream.

    Raises:
        InputError: ``span`` is unknown, or the profile has no iterations.
    """
    streams = _streams(profile)
    if streams.empty:
        return unmeasured(IDLENESS, _why(profile))
    first, last, kind = _span(profile, streams, span)
    rows = []
    for (gpu, rank), group in streams.groupby(["gpu", "rank"], sort=True):
        start, end = _idle(profile, group["profile"].tolist(), first, last)
        idle = int((end - start).sum())
        rows.append(
            {
                "gpu": gpu,
                "rank": rank,
                "streams": len(group),
                "span_ms": (last - first) / 1e6,
                "busy_ms": (last - first - idle) / 1e6,
                "idle_ms": idle / 1e6,
                "idle_share": idle / (last - first) if last > first else np.nan,
                "gaps": len(start),
                "longest_gap_ms": (end - start).max(initial=0) / 1e6,
            }
        )
    table = pd.DataFrame(rows, columns=IDLENESS)
    table.attrs["span"] = SPANS[kind]
    return table


def idle_blame(
    profile: Profile,
    by: str = "function",
    *,
    span: str | None = None,
    threads: Sequence[int] | None = None,
) -> pd.DataFrame:
    """What the CPU ran while every stream of every GPU was idle.

    Args:
        by: ``function`` (the innermost function, operator or range), ``python`` (the
            innermost Python function) or ``component`` (parts of the model).
        span: as for :func:`gpu_idleness`.
        threads: rows of ``threads`` to charge; if None those that launch GPU work, or
            all CPU threads where none is known to.

    Returns:
        ``name``, ``kind``, ``file``, ``module``, ``component``, ``phase``, ``blamed_ms``,
        ``share``; most first. ``blamed_ms`` adds up to the idle time and ``share`` to 1;
        idle time in which no charged thread ran has a row of its own. Empty, with the
        reason in ``attrs["not_measured"]``, without traces of a GPU and of CPU threads.

    Raises:
        InputError: ``by`` or ``span`` is unknown.
    """
    if by not in ("function", "python", "component"):
        raise InputError(f"blame is by function, python or component, not by '{by}'")
    streams = _streams(profile)
    if streams.empty:
        return unmeasured(BLAME, _why(profile))
    charged = _charged(profile) if threads is None else list(threads)
    lanes = [lane for lane in (running(profile, thread) for thread in charged) if len(lane[0])]
    if not lanes:
        reason = "no CPU thread that launches GPU work has a trace; measure CPUTIME with -t"
        return unmeasured(BLAME, missing_reason(profile, ["cpu trace"], reason))
    first, last, kind = _span(profile, streams, span)
    idle_start, idle_end = _idle(profile, streams["profile"].tolist(), first, last)
    blamed = _share_out(lanes, idle_start, idle_end, len(profile.contexts))
    table = _named(profile, by, blamed)
    total = float(table["blamed_ms"].sum())
    table["share"] = table["blamed_ms"] / total if total else np.nan
    table = table.sort_values("blamed_ms", ascending=False, ignore_index=True)[BLAME]
    table.attrs["span"] = SPANS[kind]
    return table


def _streams(profile: Profile) -> pd.DataFrame:
    """``profile``, ``rank``, ``gpu`` of the streams with a trace."""
    threads = profile.threads
    traced = threads["kind"].eq("gpu_stream") & threads["profile"].isin(profile.trace["profile"])
    table = threads[traced]
    return table.assign(gpu=table["name"].str.replace(r" stream.*", "", regex=True))


def _why(profile: Profile) -> str:
    return missing_reason(
        profile, ["GPU times", "gpu_time_ms", "trace"], "no GPU stream has a trace; measure with -t"
    )


def _span(profile: Profile, streams: pd.DataFrame, span: str | None) -> tuple[int, int, str]:
    if span is None:
        span = "gpu" if profile.iterations.empty else "iterations"
    if span not in SPANS:
        raise InputError(f"span '{span}' is unknown; one of {', '.join(SPANS)}")
    if span == "iterations":
        table = profile.iterations
        if table.empty:
            raise InputError("this profile does not say when its iterations ran")
    else:
        table = profile.trace
        if span == "gpu":
            table = table[table["profile"].isin(streams["profile"])]
    return int(table["start_ns"].min()), int(table["end_ns"].max()), span


def _idle(profile: Profile, streams: list[int], first: int, last: int) -> tuple[Ints, Ints]:
    """(start, end) of the stretches of the span in which none of the streams runs."""
    trace = profile.trace[profile.trace["profile"].isin(streams)]
    start = np.clip(trace["start_ns"].to_numpy(), first, last)
    end = np.clip(trace["end_ns"].to_numpy(), first, last)
    some = end > start
    begin, finish = union(start[some], end[some])
    gap_start, gap_end = np.append(first, finish), np.append(begin, last)
    gap = gap_end > gap_start
    return gap_start[gap], gap_end[gap]


def _charged(profile: Profile) -> list[int]:
    threads = profile.threads
    cpu = threads.loc[threads["kind"].eq("cpu_thread"), "profile"]
    used = profile.values.loc[profile.values["metric"].isin(_GPU_METRICS), "profile"].unique()
    launching = cpu[cpu.isin(used)]
    return (cpu if launching.empty else launching).tolist()


def _share_out(
    lanes: list[tuple[Ints, Ints, Ints]], idle_start: Ints, idle_end: Ints, count: int
) -> np.ndarray:
    """Idle ns of each context (count,), and last those with no lane running."""
    edges = [idle_start, idle_end, *(edge for lane in lanes for edge in lane[:2])]
    cuts = np.unique(np.concatenate(edges))
    length = overlap(cuts[:-1], cuts[1:], idle_start, idle_end)
    pieces = cuts[:-1][length > 0]
    length = length[length > 0]
    active = np.zeros(len(pieces), dtype=np.int64)
    owners = []
    for start, end, context in lanes:
        row = np.maximum(np.searchsorted(start, pieces, side="right") - 1, 0)
        runs = (start[row] <= pieces) & (pieces < end[row])
        active += runs
        owners.append((runs, context[row]))
    blamed = np.zeros(count + 1)
    for runs, context in owners:
        blamed[:count] += np.bincount(context[runs], (length / np.maximum(active, 1))[runs], count)
    blamed[count] = length[active == 0].sum()
    return blamed


def _named(profile: Profile, by: str, blamed: np.ndarray) -> pd.DataFrame:
    contexts = profile.contexts
    rows = np.flatnonzero(blamed[:-1])
    if by == "component":
        table = contexts.loc[rows, ["component", "phase"]].assign(
            name=contexts["component"], kind="part", file="", module=""
        )
    else:
        owner = scopes_of(contexts)
        if by == "python":
            python = nearest(
                contexts["parent"].to_numpy(), contexts["kind"].eq("python").to_numpy()
            )
            owner = np.where(python >= 0, python, owner)
        names = ["name", "kind", "file", "module"]
        # the part is the context's own: a helper function serves several
        parts = contexts.loc[rows, ["component", "phase"]].reset_index(drop=True)
        table = contexts.loc[owner[rows], names].reset_index(drop=True).join(parts)
    table["blamed_ms"] = blamed[rows] / 1e6
    keys = ["name", "kind", "file", "module", "component", "phase"]
    table = table.groupby(keys, as_index=False, sort=False)[["blamed_ms"]].sum()
    if blamed[-1]:
        nobody = dict.fromkeys(keys, "") | {"name": NOBODY, "component": "other"}
        table.loc[len(table)] = nobody | {"blamed_ms": blamed[-1] / 1e6}
    return table
