"""What ranks wait for each other: exposed collectives, the link's limit, uneven ranks.

Three rules speak of what the profiles of several ranks show by themselves;
:func:`scaling_findings` reads a scaling record, which
:mod:`dlrm_studies.scaling.model.communication` defines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pandas as pd

from dlrm_core.config import Parameters
from dlrm_core.parts import part_label
from dlrm_studies.scaling.model.choice import best_sharding
from dlrm_studies.scaling.model.communication import kind_label
from dlrm_studies.scaling.model.links import Network
from dlrm_studies.scaling.model.prediction import Setting
from dlrm_studies.scaling.model.record import (
    ScalingRecord,
    exchange_times,
    exposed_shares,
    imbalance,
    own_link,
    own_profile,
)
from dlrm_studies.scaling.model.sharding import SHARDINGS
from dlrm_workbook.analysis.attribution import iteration_count
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import (
    Finding,
    Ledger,
    Measured,
    bounded,
    capitalised,
    rank,
    removed,
    rule,
)
from dlrm_workbook.analysis.rank_traces import PER_ITERATION, collectives, rank_table
from dlrm_workbook.ground.units import milliseconds

IMBALANCE_SHARE = 0.1
"""(slowest − mean) / slowest: what all other ranks wait for the slowest one."""

COMMUNICATION_SHARE = 0.1
"""TensorBoard's former profiler plugin warned at the same share of communication."""

SMALL_TABLE_BYTES = 8 << 20


@rule(
    "rank_imbalance",
    title="Ranks wait {share:.0%} of their step for the last one to arrive, most for rank {rank}",
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
def waiting_for_last_rank(evidence: Evidence, ledger: Ledger) -> Measured | None:
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
    longer = (
        own[own["component"].ne("")].groupby(["component", "phase", "where"])["longer_us"].sum()
    )
    longer = longer / 1e3 / count
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
        "part": part and part_label(str(part), str(phase)),
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
    title="Rank {rank} has {times:.2f}x the mean work; the others wait for it",
    evidence=("Busy time per iteration, communication left out: {listed}.",),
    advice="Place tables by their measured time, not by their number or rows; split the largest "
    "table by columns or rows.",
    limit="load imbalance",
    component="communication",
)
def load_imbalance(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """One rank has more to do than the others, who wait for it."""
    busy = _rank_times(evidence)
    if len(busy) < 2:
        return None
    worst, mean = float(busy.max()), float(busy.mean())
    share = (worst - mean) / worst if worst > 0 else 0.0
    if share < IMBALANCE_SHARE:
        return None
    listed = ", ".join(f"rank {rank} {milliseconds(float(ms))}" for rank, ms in busy.items())
    return {
        "share": share,
        "rank": int(busy.idxmax()),
        "times": worst / mean,
        "listed": listed,
    }


@rule(
    "replicate_small_tables",
    title="{small} of {tables} tables are small enough to be on every rank",
    evidence=(
        "Communication takes {share:.0%} of the step; {small} tables of at most {most} MiB "
        "({megabytes:.1f} MB in all) are {part:.0%} of what is exchanged.",
    ),
    advice="Replicate them (data parallel): their gradients are smaller than their lookups, and "
    "each rank then looks up its own samples.",
    limit="copies",
    component="communication",
)
def replicate_small_tables(evidence: Evidence, ledger: Ledger) -> Measured | None:
    """Small tables are exchanged though a copy on every rank would cost nothing."""
    rows, dim = evidence.table_rows, evidence.parameter("model.embedding_dim", 0)
    share = evidence.share("communication")
    small = [count for count in rows if 4 * count * dim <= SMALL_TABLE_BYTES]
    ranks = evidence.profile.threads["rank"].nunique()
    if ranks < 2 or not small or share < COMMUNICATION_SHARE:
        return None
    part = len(small) / len(rows)
    return {
        "share": share,
        "small": len(small),
        "tables": len(rows),
        "most": SMALL_TABLE_BYTES >> 20,
        "megabytes": 4e-6 * dim * sum(small),
        "part": part,
        "speedup": removed(share * part * 0.8),
    }


def _rank_times(evidence: Evidence) -> pd.Series:
    """Busy milliseconds per iteration of each rank, communication left out; by rank.

    It is empty where some threads are known as a sum only, which has no rank.
    """
    profile = evidence.profile
    if profile.meta.get("left_out"):
        return pd.Series(dtype=float)
    metric = "gpu_time_ms" if profile.has("gpu_time_ms") else "cpu_time_ms"
    rows = profile.values[profile.rows(metric, "exclusive")]
    talks = profile.contexts["component"].eq("communication").to_numpy()
    rows = rows[~talks[rows["context"]]]
    rank = profile.threads.set_index("profile")["rank"]
    total = rows.groupby(rows["profile"].map(rank))["value"].sum()
    return total / iteration_count(profile)


WAITING_FACTOR = 2.0
"""An exchange that takes so many times as long as alone waits for ranks, not for the link."""

LATENCY_SHARE = 0.5
"""Share of an exchange's time that does not depend on its bytes: more is latency's."""

LEAST_GAIN = 1.1
"""A sharding that gains less is not proposed."""

Row = dict[str, Any]

ADVICE = {
    "dense gradients": (
        "An all-reduce is as long for any batch: more samples per rank make it a smaller share; "
        "a smaller top MLP makes it shorter."
    ),
    "table gradients": (
        "Replicated tables are all-reduced whole, looked up or not: replicate smaller ones only "
        "(training.replicated_bytes)."
    ),
    "indices": (
        "Indices travel before anything else can start: replicated tables need none, and a "
        "column-wise table needs them once a slice."
    ),
    "pooled vectors": (
        "Whole tables send each pooled vector once; row-wise ones send a partial sum from every "
        "rank. Replicate small tables, keep large ones whole."
    ),
}
"""What is exchanged to what shortens it."""


def scaling_findings(record: ScalingRecord, parameters: Parameters | None) -> list[Finding]:
    """All that a record alone shows, worst first."""
    return rank([*communication_findings(record, parameters), *imbalance_findings(record)])


def communication_findings(
    record: ScalingRecord, parameters: Parameters | None
) -> Iterable[Finding]:
    """The run of most ranks whose exposed share is largest, if that is worth a word."""
    shares = exposed_shares(record).merge(record.runs, on="run")
    shares = shares[(shares["ranks"] > 1) & (shares["share"] >= COMMUNICATION_SHARE)]
    if shares.empty or record.collectives.empty:
        return
    run = _rows(shares.nlargest(1, "share"))[0]
    number, share = int(run["run"]), float(run["share"])
    exchanges = exchange_times(record)
    own = _rows(exchanges[exchanges["run"] == number].sort_values("exposed_ms", ascending=False))
    if not own:
        return
    top = own[0]
    # the part also packs what is sent and unpacks what has come
    packing = float(run["exposed_ms"]) - sum(float(row["exposed_ms"]) for row in own)
    limit, why = _limit(record, top, int(run["ranks"]))
    change, gain, better = _better_sharding(record, parameters, run)
    what = str(top["what"])
    key = "pooled vectors" if what.startswith("pooled") else what
    yield Finding(
        id="communication",
        title=(
            f"{share:.0%} of each iteration on {run['ranks']} ranks is communication that nothing "
            f"hides; the longest is {_named(top)}"
        ),
        component="communication",
        share_of_step=share,
        evidence=(
            f"Run {number} ({kind_label(run['sharding'])}, batch {run['batch_size']}): "
            + "; ".join(
                f"{_named(row)} {milliseconds(row['exposed_ms'])} of "
                f"{milliseconds(row['time_ms'])} exposed"
                for row in own[:4]
            )
            + (f"; packing and unpacking {milliseconds(packing)}" if packing > 0 else "")
            + f". {why}"
        ),
        advice=(better + " " if better else "") + ADVICE.get(key, "Exchange less, or hide it."),
        change=change,
        predicted_speedup=gain or removed(share),
        limit=limit,
    )


def imbalance_findings(record: ScalingRecord) -> Iterable[Finding]:
    """The most uneven run, if its slowest rank makes the others wait."""
    table = imbalance(record)
    if table.empty or float(table["share"].max()) < IMBALANCE_SHARE:
        return
    worst = _rows(table.nlargest(1, "share"))[0]
    run, share = int(worst["run"]), float(worst["share"])
    slowest = int(worst["slowest_rank"])
    held = record.of_run("placement", run)
    tables = held[held["rank"] == slowest]["table"].nunique() if len(held) else None
    total = held["table"].nunique() if len(held) else None
    yield Finding(
        id="rank_imbalance",
        title=(
            f"Rank {slowest} has {worst['slowest_ms'] / worst['mean_ms']:.2f}x the mean work "
            f"of {worst['ranks']} ranks; the others wait for it"
        ),
        component=str(worst["component"]),
        share_of_step=share,
        evidence=(
            f"Run {run}: rank {slowest} computes {milliseconds(worst['slowest_ms'])}, the mean is "
            f"{milliseconds(worst['mean_ms'])}; most of the difference is in "
            f"{part_label(str(worst['component']))}"
            + (f"; it holds {tables} of {total} tables." if tables is not None else ".")
        ),
        advice=(
            "Place tables by their lookups, not by their number or rows; cut the busiest one by "
            "columns or rows (training.sharding)."
            if worst["component"] == "embedding"
            else "Ranks have equal samples, so the slow rank's machine or cores differ: look at "
            "what else runs there."
        ),
        predicted_speedup=removed(share),
        limit="load imbalance",
    )


def _named(row: Row) -> str:
    return f"{kind_label(str(row['kind']))} of {row['what']}"


def _limit(record: ScalingRecord, top: Row, ranks: int) -> tuple[str, str]:
    """Which limit the exchange meets, and the sentence that says so."""
    link = own_link(record, "measured link")
    if link is None:
        reason = record.reasons.get("link_probe", "its sizes are too few")
        return "network", f"The link was not measured ({reason})."
    size = float(top["bytes"]) / max(float(top["calls"]), 1.0)
    alone = link.time_ms(str(top["kind"]), ranks, size).mid * float(top["calls"])
    fit = link.fits.get((str(top["kind"]), ranks))
    moved = (
        f"alone it takes {milliseconds(alone)} for {top['bytes'] / (1 << 20):.2f} MiB per rank "
        f"({link.name})"
    )
    if alone > 0 and float(top["time_ms"]) > WAITING_FACTOR * alone:
        return "load imbalance", (
            f"{capitalised(moved)}: the rest is waiting for slower ranks, or for a core that ranks "
            "share."
        )
    fixed = 1e-3 * (fit.fixed_us if fit else link.alpha_us.mid) * float(top["calls"])
    if alone > 0 and fixed > LATENCY_SHARE * alone:
        return "network", f"{capitalised(moved)}, mostly latency: fewer, larger exchanges."
    return "network", f"{capitalised(moved)}, mostly bytes: the link's rate is the limit."


def _rows(table: pd.DataFrame) -> list[Row]:
    return cast(list[Row], table.to_dict("records"))


def _better_sharding(
    record: ScalingRecord, parameters: Parameters | None, run: Row
) -> tuple[dict[str, Any], dict[str, float], str]:
    """A change to a sharding that is predicted to be faster; empty where there is none."""
    link = own_link(record, "measured link")
    if link is None or parameters is None or record.compute_profile.empty:
        return {}, {}, ""
    setting = Setting(parameters, Network(link), own_profile(record), hidden=False)
    batch, used = int(run["batch_size"]), str(run["sharding"])
    choice = best_sharding(setting, int(run["ranks"]), batch)
    table = choice.candidates[choice.candidates["sharding"].isin(set(SHARDINGS) - {"mixed"})]
    table = table.dropna(subset=["mid_ms"])
    now = table[table["sharding"] == used]
    if now.empty:
        return {}, {}, ""
    best, before = _rows(table.nsmallest(1, "mid_ms"))[0], _rows(now)[0]
    gain = {
        "low": float(before["mid_ms"] / best["high_ms"]),
        "mid": float(before["mid_ms"] / best["mid_ms"]),
        "high": float(before["mid_ms"] / best["low_ms"]),
    }
    if gain["mid"] < LEAST_GAIN or best["sharding"] == used:
        return {}, {}, ""
    text = (
        f"training.sharding={best['sharding']} is predicted to take "
        f"{milliseconds(float(best['mid_ms']))} instead of {milliseconds(float(before['mid_ms']))}."
    )
    return {"training.sharding": str(best["sharding"])}, gain, text
