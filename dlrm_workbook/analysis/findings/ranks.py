"""What ranks wait for each other, as the profiles of several ranks show it by themselves."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlrm_workbook.analysis.attribution import iteration_count, main_thread
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import Causes, Measured, bounded, rule
from dlrm_workbook.analysis.findings.where import part_name
from dlrm_workbook.analysis.rank_traces import PER_ITERATION, collectives, rank_table
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import Profile

IMBALANCE_SHARE = 0.1
"""(slowest − mean) of the step: what all other ranks wait for the slowest one."""


@rule(
    "rank_imbalance",
    title="Ranks wait {share:.0%} of their step for the last to arrive, above all for rank {rank}",
    evidence=(
        "In {counted} matched collectives ranks spend {waiting:ms} {per} waiting and at most "
        "{transfer:ms} transferring, of a step of {mean:ms} (means over {count} ranks).",
        "Rank {rank} comes last in {last_in} of them, for which the others wait {caused:ms} {per}.",
        "Before those, what it did longer than the others is above all {part} on the {where} "
        "({longer:ms} {per}).",
        "Not counted: {start:ms} {per} in collectives before which the ranks may not have begun "
        "together, or whose ends do not meet.",
        "{single}",
    ),
    advice="Make the ranks arrive together: spread tables by their measured time, give each rank's "
    "process its own cores, and look at what the late rank does differently there.",
    limit="load imbalance",
    component="communication",
)
def waiting_for_last_rank(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Ranks wait in collectives until the last one arrives; of the traces of several ranks."""
    if len(evidence.ranks) < 2:
        return None
    matches = collectives(evidence.ranks)
    table = rank_table(evidence.ranks, matches)
    if matches.empty or not matches["counted"].any():
        return None
    step, waiting = float(table["step_ms"].mean()), float(table["waiting_ms"].mean())
    share = waiting / step if step > 0 else 0.0
    late = table.loc[table["others_wait_ms"].idxmax()]
    if share < IMBALANCE_SHARE or not late["last_in"]:
        return None
    per = str(table.attrs["per"])
    count = int(table["iterations"].min()) if per == PER_ITERATION else 1
    own = matches[matches["counted"] & matches["last_rank"].eq(late["rank"])]
    parts = own[own["component"].ne("")].groupby(["component", "phase", "where"])
    longer = parts["longer_us"].sum() / 1e3 / count
    most: Any = longer.idxmax() if len(longer) else (None, "", None)
    part, phase, where = most
    start = float(table["start_ms"].mean())
    this = [number for number, profile in evidence.ranks.items() if profile is evidence.profile]
    own_waiting = table.loc[table["rank"].isin(this), "waiting_ms"]
    ledger.waiting_ms = float(own_waiting.fillna(0.0).sum())
    if int(late["rank"]) in this:
        # of this rank's idle time, what the others wait for: told once
        ledger.late_ms = float(late["others_wait_ms"])
    return {
        "share": share,
        "rank": int(late["rank"]),
        "counted": int(matches["counted"].sum()),
        "count": len(table),
        "waiting": waiting,
        "transfer": float(table["transfer_ms"].mean()),
        "mean": step,
        "per": per,
        "last_in": int(late["last_in"]),
        "caused": float(late["others_wait_ms"]),
        "part": part and part_name(str(part), str(phase)),
        "where": {"host": "processor", "device": "GPU"}.get(str(where)),
        "longer": float(longer.max()) if len(longer) else None,
        "start": start if start > 0 else None,
        "single": None
        if table["iterations"].min() > 1
        else "One step is recorded: how unevenly the ranks came to it is a part of this.",
        "speedup": bounded(share),
    }


@rule(
    "load_imbalance",
    title="Rank {rank} has {times:.2f}x the mean work{others}",
    evidence=("Busy time per iteration, communication left out: {listed}.",),
    advice="Place tables by their measured time, not by their number or rows; split the largest "
    "table by columns or rows.",
    limit="load imbalance",
    component="communication",
)
def load_imbalance(evidence: Evidence, ledger: Causes) -> Measured | None:
    """One rank has more to do than the others, who wait for it."""
    busy = _rank_times(evidence)
    if len(busy) < 2:
        return None
    worst, mean = float(busy.max()), float(busy.mean())
    # of ranks in one profile the parts' times are sums over ranks, and no step
    step = max(worst, evidence.total_ms if evidence.ranks else 0.0)
    share = (worst - mean) / step if worst > 0 else 0.0
    world = (evidence.meta.get("distributed") or {}).get("world_size")
    recorded = f" of the {len(busy)} ranks of {world} that are recorded"
    partly = isinstance(world, int) and world > len(busy)
    listed = ", ".join(f"rank {rank} {milliseconds(float(ms))}" for rank, ms in busy.items())
    return {
        "share": share,
        "least": IMBALANCE_SHARE,
        "rank": int(busy.idxmax()),
        "times": worst / mean,
        "others": recorded if partly else "; the others wait for it",
        "listed": listed,
    }


def _rank_times(evidence: Evidence) -> pd.Series:
    """Busy milliseconds per iteration of each rank, communication left out; by rank.

    It is empty where some threads are known as a sum only, which has no rank.
    """
    if any(
        profile.meta.get("left_out") for profile in (evidence.profile, *evidence.ranks.values())
    ):
        return pd.Series(dtype=float)
    if evidence.ranks:
        each = {rank: float(_busy(one).sum()) for rank, one in evidence.ranks.items()}
        return pd.Series(each, dtype=float)
    return _busy(evidence.profile)


def _busy(profile: Profile) -> pd.Series:
    """Busy milliseconds per iteration by rank, communication left out: of the GPUs, or of the
    threads that run the steps."""
    on_gpu = profile.has("gpu_time_ms")
    rows = profile.values[profile.rows("gpu_time_ms" if on_gpu else "cpu_time_ms", "exclusive")]
    talks = profile.contexts["component"].eq("communication").to_numpy()
    rows = rows[~talks[rows["context"]]]
    threads = profile.threads.set_index("profile")
    if not on_gpu and threads["rank"].nunique() < 2:
        rows = rows[rows["profile"].eq(main_thread(profile))]
    total = rows.groupby(rows["profile"].map(threads["rank"]))["value"].sum()
    return total / iteration_count(profile)
