"""What is hidden behind computing, and what is exposed: copies, communication, making data.

Hidden time costs nothing; exposed time adds to the step. On a GPU, computing is a kernel that
runs (communication kernels excepted), and the host's own work is exposed while none does. On a
CPU one thread iterates: what it does itself is exposed, what other threads do meanwhile (a
prefetching loader) is hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.analysis.attribution import host_segments, per_iteration
from dlrm_core.analysis.context_tree import Ints, overlap, union, unmeasured
from dlrm_core.analysis.launches import device_operations
from dlrm_core.profiling.profile import Profile

OVERLAP = ["what", "where", "total_ms", "hidden_ms", "exposed_ms", "exposed_share", "of_iteration"]

KINDS: dict[str, str] = {
    "copies": "copies between host and GPU, and on it",
    "communication": "exchange between ranks",
    "data": "making batches",
}

_COLLECTIVE = r"nccl|rccl|c10d::|gloo|all_?(?:to_?all|reduce|gather)"


def overlaps(profile: Profile) -> pd.DataFrame:
    """Copies, communication and making data against computing, in a mean iteration.

    Returns:
        ``what`` (of ``KINDS``), ``where`` (``device``, ``host`` or ``other threads``),
        ``total_ms``, ``hidden_ms`` (while something is computed), ``exposed_ms`` (the rest;
        the two add up), ``exposed_share`` and ``of_iteration`` (exposed time as a share of the
        iteration); most exposed first. What did not occur has no row. Empty, with the reason,
        where nothing of the kind ran or the profile does not say when its iterations ran.
    """
    if profile.iterations.empty or profile.trace.empty:
        return unmeasured(OVERLAP, "the profile does not say when its iterations ran")
    work = device_operations(profile)
    rows = _on_gpu(profile, work) if len(work) else _on_cpu(profile)
    rows = [row for row in rows if row["total_ms"] > 0]
    if not rows:
        return unmeasured(OVERLAP, "nothing was copied, exchanged or made in the iterations")
    table = pd.DataFrame(rows)
    iterations = profile.iterations
    wall = float((iterations["end_ns"] - iterations["start_ns"]).mean()) / 1e6
    table["hidden_ms"] = table["total_ms"] - table["exposed_ms"]
    table["exposed_share"] = table["exposed_ms"] / table["total_ms"]
    table["of_iteration"] = table["exposed_ms"] / wall
    return table.sort_values("exposed_ms", ascending=False, ignore_index=True)[OVERLAP]


def _on_gpu(profile: Profile, work: pd.DataFrame) -> list[dict[str, Any]]:
    names = profile.contexts["name"].iloc[work["context"]].str.lower()
    exchange = names.str.contains(_COLLECTIVE).to_numpy()
    exchange |= work["component"].eq("communication").to_numpy()
    is_copy = work["kind"].eq("copy").to_numpy() & ~exchange
    compute = ~exchange & ~is_copy
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    window = _window(profile)
    busy = union(start[compute], end[compute])
    rows = []
    for what, chosen in (("copies", is_copy), ("communication", exchange)):
        own = union(start[chosen], end[chosen])
        rows.append(_row(profile, what, "device", own, busy, window))
    host = _host_in(profile, "data")
    rows.append(_row(profile, "data", "host", host, busy, window))
    return rows


def _on_cpu(profile: Profile) -> list[dict[str, Any]]:
    """On a CPU the iterating thread hides nothing; other threads hide all of theirs."""
    each = per_iteration(profile)
    count = len(profile.iterations)
    own = each.groupby("component")["time_ms"].sum() / count
    rows = []
    for what, component in (("data", "data"), ("communication", "communication")):
        exposed = float(own.get(component, 0.0))
        rows.append({"what": what, "where": "host", "total_ms": exposed, "exposed_ms": exposed})
    loader = ((profile.meta.get("parameters") or {}).get("data") or {}).get("loader")
    if loader not in (None, "synchronous"):
        ahead = sum(
            float(thread.get("cpu_ms_per_iteration") or 0.0)
            for thread in profile.meta.get("threads_cpu") or []
            if thread.get("kind") == "python"
        )
        rows.append(
            {"what": "data", "where": "other threads", "total_ms": ahead, "exposed_ms": 0.0}
        )
    return rows


def _row(
    profile: Profile,
    what: str,
    where: str,
    own: tuple[Ints, Ints],
    busy: tuple[Ints, Ints],
    window: tuple[Ints, Ints],
) -> dict[str, Any]:
    """Milliseconds of ``own`` in the window, in all and outside of ``busy``."""
    start, end = _within(own, window)
    count = len(profile.iterations)
    total = float((end - start).sum()) / 1e6 / count
    hidden = float(overlap(start, end, *busy).sum()) / 1e6 / count
    return {"what": what, "where": where, "total_ms": total, "exposed_ms": total - hidden}


def _within(own: tuple[Ints, Ints], window: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The parts of disjoint, ordered stretches that lie in those of the window."""
    cuts = np.unique(np.concatenate([*own, *window]))
    if len(cuts) < 2:
        return cuts[:0], cuts[:0]
    begin, finish = cuts[:-1], cuts[1:]
    inside = (overlap(begin, finish, *own) > 0) & (overlap(begin, finish, *window) > 0)
    return begin[inside], finish[inside]


def _window(profile: Profile) -> tuple[Ints, Ints]:
    table = profile.iterations
    return union(table["start_ns"].to_numpy(), table["end_ns"].to_numpy())


def _host_in(profile: Profile, component: str) -> tuple[Ints, Ints]:
    """When the iterating thread was in a part, whatever the GPU did."""
    pieces = host_segments(profile)
    context = pieces["context"].to_numpy()
    part = profile.contexts["component"].to_numpy()[np.maximum(context, 0)]
    chosen = pieces[(context >= 0) & (part == component)]
    return union(chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy())
