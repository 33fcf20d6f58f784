"""A GPU that gives less than it could: slower than it was, busy with another program, or held up
by functions of the host in its streams or by the profiler.

None shows in what the program computes: the same kernels are launched in the same order. What
tells is the recording's own comparison: each launch with itself in earlier iterations, and idle
time with the work that waits in the GPU's queue meanwhile.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import IDLE, iteration_state, windows
from dlrm_workbook.analysis.findings.evidence import Evidence, joined, listed_times, stretches
from dlrm_workbook.analysis.findings.finding import LEAST_SHARE, Causes, Measured, bounded, rule
from dlrm_workbook.analysis.idleness import Stretches, usual_start_up
from dlrm_workbook.analysis.launches import launched_operations
from dlrm_workbook.analysis.steady import lasting_rise
from dlrm_workbook.recordings.foreign import COMMUNICATION
from dlrm_workbook.recordings.nesting import overlap, stretch_at, union

ONE_FACTOR = 0.75
"""Least share of the kernels' time in kernels that become slower by half of the change or more:
a clock slows all that computes, though less what waits for memory."""

SYNC = re.compile(
    r"^(?:cu(?:da)?|hip)(?:Device|Stream|Event|Ctx)Synchronize\w*$|^AscendCL@aclrtSynchronize"
)
"""Calls that wait for the GPU, or another accelerator."""

BLOCKING = re.compile(r"^(?:cuda|cu|hip)\w*(?:Memcpy|Synchronize)")
"""Calls in which the host may wait for a copy."""


SLOWER_TIMES = 1.1
"""Times as long: boost clocks of a GPU at work wander by a few percent, a limit of power or
temperature takes 10 % and more."""


@rule(
    "slower_gpu",
    title="The GPU is {factor:.1f}x slower from iteration {first} of {count} on",
    evidence=(
        "The same launches of the same kernels take {before:ms} in each earlier iteration and "
        "{after:ms} in each later one; {alike:.0%} of their time is in kernels that became slower "
        "together.",
        "So it is not the program that changed: the GPU's clock dropped (a limit of power or "
        "temperature), or something else uses the GPU since then.",
        "All later iterations together lose {lost:ms} by it.",
    ),
    advice="Look at the GPU while it runs: clocks, power, temperature and other processes "
    "(nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE; nvidia-smi pmon). Lock the clocks to "
    "compare runs (nvidia-smi --lock-gpu-clocks), and measure again.",
    limit="scheduling",
    gpu=True,
)
def slower_gpu(evidence: Evidence, ledger: Causes) -> Measured | None:
    """From some iteration on all kernels take longer by one factor."""
    spans = windows(evidence.profile)
    times = _same_launches(evidence, spans)
    if times.empty or times.shape[1] < 4:
        return None
    by_step = times.sum().to_numpy()
    cut = lasting_rise(by_step, SLOWER_TIMES)
    if cut is None:
        return None
    before, after = times.iloc[:, :cut].median(axis=1), times.iloc[:, cut:].median(axis=1)
    factor = float(after.sum() / before.sum())
    slower = after > before * (1.0 + 0.5 * (factor - 1.0))
    alike = float(before[slower].sum() / before.sum())
    if alike < ONE_FACTOR:
        return None
    length = (spans["end_ns"] - spans["start_ns"]).to_numpy() / 1e6
    extra = np.maximum(length - np.median(length[:cut]), 0.0)
    work = launched_operations(evidence.profile)
    inside = overlap(spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy(), *stretches(work))
    worked = inside / 1e6
    extra = np.minimum(extra, worked * (1.0 - 1.0 / factor))
    extra[:cut] = 0.0
    state = iteration_state(evidence.profile)
    counted = np.ones(len(extra), dtype=bool)
    if state is not None and state.steady[cut:].any():
        counted = state.steady  # the step that all shares are of
    share = float(extra[counted].sum() / length[counted].sum())
    if share < LEAST_SHARE:
        return None
    ledger.slower_from = cut
    return {
        "share": share,
        "first": cut + 1,
        "count": len(length),
        "factor": factor,
        "before": float(before.sum()),
        "after": float(after.sum()),
        "alike": alike,
        "lost": float(extra.sum()),
    }


COMPARED = 0.5
"""Least share of the kernels' time in launches that every iteration makes alike."""


def _same_launches(evidence: Evidence, spans: pd.DataFrame) -> pd.DataFrame:
    """Time (ms) of each kernel and call path (rows) in each iteration (columns), of those that
    every iteration launches equally often; empty where these are too little of all."""
    work = launched_operations(evidence.profile)
    nothing = pd.DataFrame()
    if work.empty or len(spans) < 4:
        return nothing
    exchange = evidence.named(COMMUNICATION)
    work = work[work["kind"].eq("kernel") & ~exchange[work["context"].to_numpy()]]
    begun = work["launch_start_ns"].where(work["launch_start_ns"] >= 0, work["start_ns"])
    step = stretch_at(spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy(), begun.to_numpy())
    work = work.assign(step=step, ms=(work["end_ns"] - work["start_ns"]) / 1e6)
    work = work[work["step"] >= 0]
    if work.empty:
        return nothing
    table = work.pivot_table("ms", "context", "step", aggfunc=["sum", "size"], fill_value=0.0)
    launches = table["size"]
    same = launches.eq(launches.iloc[:, 0], axis=0).all(axis=1)
    every = table["sum"]
    chosen = every[same.to_numpy()]
    enough = len(every.columns) == len(spans) and chosen.sum().sum() > COMPARED * every.sum().sum()
    return chosen if enough else nothing


@rule(
    "profiler_overhead",
    title="The GPU is idle {share:.0%} of the step while the profiler handles its own buffers",
    evidence=(
        "In {idle_ms:ms} per iteration the GPU does nothing because a call of the host is held up "
        "by the profiler: {names}.",
        "This loss is the profiler's own; without it the step is shorter by as much.",
    ),
    advice="Do not optimise the program for it. Record fewer events (no shapes, stacks or memory, "
    "fewer iterations), or leave out the iterations that it falls into.",
    limit="dispatch",
    timeline=True,
    concerns=(IDLE,),
)
def profiler_overhead(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The GPU idles because the profiler holds the host up in a call of the GPU's driver."""
    overhead = pd.DataFrame(evidence.meta.get("profiler_overhead") or {})
    if overhead.empty:
        return None
    idle = without(evidence.idle, ledger.taken)
    # the profiler's own threads work beside the host, and hold nothing up
    idle = idle[evidence.profile.of_kind("runtime")[idle["context"]] & idle["context"].ge(0)]
    start, end = idle["start_ns"].to_numpy(), idle["end_ns"].to_numpy()

    def held_by(rows: pd.DataFrame) -> np.ndarray:
        return overlap(start, end, *union(rows["start"].to_numpy(), rows["end"].to_numpy()))

    count, held = 1e6 * evidence.iterations, held_by(overhead)
    lost = float(held.sum()) / count
    if lost < LEAST_SHARE * evidence.total_ms:
        return None
    most = held > 0.5 * (end - start)
    ledger.taken = joined(ledger.taken, (start[most], end[most]))
    by_name = {name: held_by(rows).sum() / count for name, rows in overhead.groupby("name")}
    times = pd.Series(by_name).sort_values(ascending=False)
    return {
        "share": lost / evidence.total_ms,
        "idle_ms": lost,
        "names": listed_times(times[times > 0]),
    }


_HOST_FUNCTIONS: Measured = {
    "id": "host_functions",
    "title": "The GPU does nothing in {share:.0%} of the step because its streams wait for "
    "functions of the host",
    "evidence": (
        "In {count:,.1f} gaps per iteration of {usual:ms} (median) no stream runs anything. The "
        "work that ends each gap had been launched, behind a call of {calls}.",
        "Such a call puts a function of the host into a stream, and later work of that stream "
        "begins only when the function has returned.",
    ),
    "advice": "Take the functions out of the streams that compute: wait for an event on another "
    "thread and do the work there, or put them on a stream of their own that waits for an event.",
    "limit": "synchronisation",
}
"""Sentences that replace those of :func:`gpu_taken` where the recording has the cause."""


@rule(
    "gpu_taken",
    title="The GPU does nothing in {share:.0%} of the step although work waits in its queue{whose}",
    evidence=(
        "In {count:,.1f} gaps per iteration of {usual:ms} (median) no stream runs anything, while "
        "work that has been launched waits; where the GPU is free, work begins {start_up:.0f} µs "
        "after its launch (median).",
        "{regular}",
        "What waits in the queue of an idle GPU waits neither for the host nor for other work that "
        "was recorded: for other processes, for graphics of its own, or for a driver that hands on "
        "launches in batches (Windows).",
    ),
    advice="See which processes use this GPU (nvidia-smi, nvidia-smi pmon): give the run a GPU of "
    "its own, or let the processes share it by MPS or MIG, not in turns.",
    limit="scheduling",
    timeline=True,
    concerns=(IDLE,),
)
def gpu_taken(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The GPU idles while launched work waits in its queue: somebody else has it."""
    if evidence.meta.get("serialised"):
        return None
    start, end, start_up, usual_us = _queued_gaps(evidence)
    inside = evidence.inside(start)
    start, end = start[inside], end[inside]
    behind, calls = _behind_host_functions(evidence, end)
    if (end - start)[behind].sum() > 0.5 * (end - start).sum():
        start, end = start[behind], end[behind]
    else:
        calls = ""
    count = evidence.iterations
    lost = float((end - start).sum()) / 1e6 / count
    share = lost / evidence.total_ms
    if share < LEAST_SHARE or len(start) < 2:
        return None
    period = None if calls else _period_ms(end)
    if period is None and (evidence.has_graphs or (usual_us > START_UP_US and not calls)):
        return None  # kernels that were not recorded may run in the gaps
    if period is None and not calls and _while_waiting(evidence, start, end):
        return None  # a program that waits all the time: what it does between is the likelier cause
    ledger.taken = (start, end)
    figures: Measured = {
        "share": share,
        "idle_ms": lost,
        "whose": "",
        "count": len(start) / count,
        "usual": float(np.median(end - start)) / 1e6,
        "start_up": start_up / 1e3,
        "regular": None,
        # how long the host would take with the GPU its own nothing tells: no more goes than this
        "speedup": bounded(share) | {"mid": 1.0 / (1.0 - 0.75 * share)},
    }
    if period is not None:
        figures["whose"] = ": another process takes turns on it"
        figures["regular"] = (
            f"The gaps end every {period:.1f} ms: so a GPU goes round between processes that share "
            "it in time slices."
        )
    return figures | (_HOST_FUNCTIONS | {"calls": calls} if calls else {})


HOST_FUNCTION = re.compile(r"^(?:cu(?:da)?|hip)(?:LaunchHostFunc|StreamAddCallback)\w*$")
"""Calls that put a function of the host into a stream: later work there waits until it returns."""


def _behind_host_functions(evidence: Evidence, end: Any) -> tuple[Any, str]:
    """Find the gaps whose cause is a function of the host in a stream.

    Args:
        end: (n,) ends of gaps, ns, where work begins.

    Returns:
        Which gaps (n,) end with work that was launched behind such a call, when what ran before
        the gap had been launched already; the names of the calls.
    """
    profile = evidence.profile
    calls = evidence.spans(evidence.named(HOST_FUNCTION)).sort_values("start_ns")
    work = launched_operations(profile)
    launched = work["launch_start_ns"].to_numpy()
    row = np.searchsorted(work["start_ns"].to_numpy(), end)
    begun = calls["start_ns"].to_numpy()
    earlier = np.searchsorted(begun, launched[np.maximum(row - 1, 0)])
    behind = (row > 0) & (np.searchsorted(begun, launched[row]) > earlier)
    names = sorted(set(profile.contexts["name"].iloc[calls["context"]]))
    return behind & (launched[row] >= 0), ", ".join(names)


START_UP_US, WAITING_US = 20.0, 100.0
"""Work that has been launched begins within 5 to 20 µs on a GPU that is free; far longer is no
start-up (NVIDIA's time slices last 1 ms and more). What waits in a queue begins within 1 to 10 µs
of the end of what ran before: where that usually takes longer, kernels lack in the recording."""


def _queued_gaps(evidence: Evidence) -> tuple[Any, Any, float, float]:
    """(start, end, usual start-up) in ns: stretches in which nothing runs on the GPU and work
    that was launched before waits far longer than a start-up takes; and the usual time (µs) to the
    next operation in the queue. What was launched first depends on nothing that has yet to run.
    """
    work = launched_operations(evidence.profile)
    begin, done = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    launched = work["launch_end_ns"].to_numpy()
    launched = np.where(_waited_out(evidence, launched, begin), -1, launched)
    ready = np.where((launched >= 0) & (launched < begin), launched, begin)
    earliest = np.minimum.accumulate(ready[::-1])[::-1]
    reached = np.maximum.accumulate(done)
    since = np.maximum(reached[:-1], earliest[1:])
    free = reached[:-1] <= ready[1:]
    start_up = usual_start_up(work, "launch_start_ns")
    waits = begin[1:] - since
    chosen = waits > max(1e3 * WAITING_US, 10.0 * start_up)
    queued = waits[~free & (begin[1:] > reached[:-1])]
    usual_us = float(np.median(queued)) / 1e3 if len(queued) else 0.0
    return since[chosen], begin[1:][chosen], start_up, usual_us


MANY_WAITS = 10
"""Such calls to each gap."""


def _while_waiting(evidence: Evidence, start: Any, end: Any) -> bool:
    """Whether the host spends most of the gaps in calls that wait for the GPU, of which there are
    many more than gaps."""
    calls = evidence.calls(SYNC)
    if len(calls) < MANY_WAITS * len(start):
        return False
    return bool(overlap(start, end, *stretches(calls)).sum() > 0.5 * (end - start).sum())


WHOLE_GPU = re.compile(r"^(?:cu(?:da)?|hip)(?:Device|Ctx)Synchronize$")
"""Calls that return when all that was launched is done."""


def _waited_out(evidence: Evidence, launched: Any, begin: Any) -> Any:
    """Mark operations (n,) that begin after a call that waits for the whole GPU and was made after
    their launch: the call would have waited for them, so that their launch is not known."""
    calls = evidence.spans(evidence.named(WHOLE_GPU)).sort_values("start_ns")
    if calls.empty:
        return np.zeros(len(launched), dtype=bool)
    # the first call after each launch
    place = np.searchsorted(calls["start_ns"].to_numpy(), launched)
    far = np.iinfo(np.int64).max
    ended = np.append(np.minimum.accumulate(calls["end_ns"].to_numpy()[::-1])[::-1], far)[place]
    return (launched >= 0) & (ended <= begin)


REGULAR_GAPS = 6
"""Gaps from which on their regularity is judged."""


def _period_ms(at: np.ndarray) -> float | None:
    """The time between moments (n,) ns that come regularly, or at multiples of it; None where
    they do not."""
    apart = np.diff(at)
    if len(apart) < REGULAR_GAPS:
        return None
    period = float(np.median(apart))
    turns = apart / period
    regular = (np.abs(turns - np.round(turns)) < 0.1) & (turns > 0.5)
    # any gaps would be so near by chance in a fifth of the cases
    return period / 1e6 if regular.mean() >= ONE_FACTOR else None


def without(pieces: pd.DataFrame, taken: Stretches) -> pd.DataFrame:
    """Rows of idle pieces that begin in none of the stretches."""
    return pieces[stretch_at(*taken, pieces["start_ns"].to_numpy()) < 0]
