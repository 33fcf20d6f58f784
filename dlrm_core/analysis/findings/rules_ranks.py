"""Runs of several ranks: uneven load, and small tables that are better replicated."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from dlrm_core.analysis.attribution import iteration_count
from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.findings.finding import Finding, milliseconds, removed
from dlrm_core.analysis.findings.ledger import Ledger

IMBALANCE_SHARE = 0.1
"""(slowest − mean) / slowest: what all other ranks wait for the slowest one."""

COMMUNICATION_SHARE = 0.1
"""TensorBoard's former profiler plugin warned at the same share of communication."""

SMALL_TABLE_BYTES = 8 << 20


def load_imbalance(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """One rank has more to do than the others, who wait for it."""
    busy = rank_times(evidence)
    if len(busy) < 2:
        return
    worst, mean = float(busy.max()), float(busy.mean())
    share = (worst - mean) / worst if worst > 0 else 0.0
    if share < IMBALANCE_SHARE:
        return
    rank = int(busy.idxmax())
    yield Finding(
        id="load_imbalance",
        title=f"Rank {rank} has {worst / mean:.2f} times the mean work; the others wait for it",
        component="communication",
        share_of_step=share,
        evidence=(
            "Busy time an iteration, communication left out: "
            + ", ".join(f"rank {r} {milliseconds(float(ms))}" for r, ms in busy.items())
            + "."
        ),
        advice=(
            "Place tables by their measured time, not by their number or rows; split the largest "
            "table by columns or rows."
        ),
        predicted_speedup=removed(share),
        limit="load imbalance",
    )


def replicate_small_tables(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Small tables are exchanged though a copy on every rank would cost nothing."""
    ranks = int(evidence.profile.threads["rank"].nunique())
    rows = list(evidence.parameter("model.table_rows", []))
    count, dim = evidence.parameter("model.tables"), evidence.parameter("model.embedding_dim", 0)
    rows = rows * int(count) if len(rows) == 1 and count else rows
    share = evidence.share("communication")
    small = [number for number, n in enumerate(rows) if 4 * n * dim <= SMALL_TABLE_BYTES]
    if ranks < 2 or not small or share < COMMUNICATION_SHARE:
        return
    part = len(small) / len(rows)
    yield Finding(
        id="replicate_small_tables",
        title=f"{len(small)} of {len(rows)} tables are small enough to be on every rank",
        component="communication",
        share_of_step=share,
        evidence=(
            f"Communication holds {share:.0%} of the step; {len(small)} tables of at most "
            f"{SMALL_TABLE_BYTES >> 20} MiB ({4e-6 * dim * sum(rows[t] for t in small):.1f} MB in "
            f"all) are {part:.0%} of what is exchanged."
        ),
        advice=(
            "Replicate them (data parallel): their gradients are smaller than their lookups, and "
            "each rank then looks up its own samples."
        ),
        predicted_speedup=removed(share * part * 0.8),
        limit="copies",
    )


def rank_times(evidence: Evidence) -> pd.Series:
    """Busy milliseconds an iteration of each rank, communication left out; by rank."""
    profile = evidence.profile
    metric = "gpu_time_ms" if profile.has("gpu_time_ms") else "cpu_time_ms"
    rows = profile.values[profile.rows(metric, "exclusive")]
    talks = profile.contexts["component"].eq("communication").to_numpy()
    rows = rows[~talks[rows["context"]]]
    rank = profile.threads.set_index("profile")["rank"]
    total = rows.groupby(rows["profile"].map(rank))["value"].sum()
    return total / iteration_count(profile)


RULES = (load_imbalance, replicate_small_tables)
