"""What the ranks of a scaling record wait for: exposed collectives, the link, uneven ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlrm_core.config import Parameters
from dlrm_core.parts import part_label
from dlrm_studies.scaling.model.choice import best_sharding
from dlrm_studies.scaling.model.communication import MIB, kind_label
from dlrm_studies.scaling.model.links import Network
from dlrm_studies.scaling.model.prediction import Setting, measured_profile
from dlrm_studies.scaling.model.record import (
    ScalingRecord,
    exchange_times,
    exposed_shares,
    imbalance,
    own_link,
)
from dlrm_studies.scaling.model.sharding import KINDS
from dlrm_workbook.analysis.findings.finding import Finding, rank, removed
from dlrm_workbook.analysis.findings.ranks import IMBALANCE_SHARE
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.show.theme import rows_of

COMMUNICATION_SHARE = 0.1
"""TensorBoard's former profiler plugin warned at the same share of communication."""

WAITING_FACTOR = 2.0
"""An exchange that takes so many times as long as alone waits for ranks, not for the link."""

LATENCY_SHARE = 0.5
"""Share of an exchange's time that does not depend on its bytes: more is latency's."""

LEAST_SPEEDUP = 1.1
"""A sharding that gains less is not proposed."""


EXCHANGE_ADVICE = {
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
    run = rows_of(shares.nlargest(1, "share"))[0]
    exchanges = exchange_times(record).query("run == @run.run")
    of_run = rows_of(exchanges.sort_values("exposed_ms", ascending=False))
    if not of_run:
        return
    top = of_run[0]
    # the part also packs what is sent and unpacks what has come
    packing = run.exposed_ms - exchanges["exposed_ms"].sum()
    limit, why = _limit(record, top)
    change, gain, better = _better_sharding(record, parameters, run)
    key = "pooled vectors" if top.what.startswith("pooled") else top.what
    times = "; ".join(
        f"{_named(row)} {milliseconds(row.exposed_ms)} of {milliseconds(row.time_ms)} exposed"
        for row in of_run[:4]
    )
    yield Finding(
        id="communication",
        title=(
            f"{run.share:.0%} of each iteration on {run.ranks} ranks is communication that nothing "
            f"hides; the longest is {_named(top)}"
        ),
        component="communication",
        share_of_step=run.share,
        evidence=(
            f"Run {run.run} ({kind_label(run.sharding)}, batch {run.batch_size}): {times}"
            + (f"; packing and unpacking {milliseconds(packing)}" if packing > 0 else "")
            + f". {why}"
        ),
        advice=better + EXCHANGE_ADVICE.get(key, "Exchange less, or hide it."),
        change=change,
        predicted_speedup=gain or removed(run.share),
        limit=limit,
    )


def imbalance_findings(record: ScalingRecord) -> Iterable[Finding]:
    """The most uneven run, if its slowest rank makes the others wait."""
    table = imbalance(record)
    if table.empty or float(table["share"].max()) < IMBALANCE_SHARE:
        return
    worst = rows_of(table.nlargest(1, "share"))[0]
    held = record.of_run("placement", worst.run)
    tables = held.loc[held["rank"] == worst.slowest_rank, "table"].nunique()
    holds = f"; it holds {tables} of {held['table'].nunique()} tables" if len(held) else ""
    yield Finding(
        id="rank_imbalance",
        title=(
            f"Rank {worst.slowest_rank} has {worst.slowest_ms / worst.mean_ms:.2f}x the mean work "
            f"of {worst.ranks} ranks; the others wait for it"
        ),
        component=worst.component,
        share_of_step=worst.share,
        evidence=(
            f"Run {worst.run}: rank {worst.slowest_rank} computes "
            f"{milliseconds(worst.slowest_ms)}, the mean is {milliseconds(worst.mean_ms)}; most of "
            f"the difference is in {part_label(worst.component)}{holds}."
        ),
        advice=(
            "Place tables by their lookups, not by their number or rows; cut the busiest one by "
            "columns or rows (training.sharding)."
            if worst.component == "embedding"
            else "Ranks have equal samples, so the slow rank's machine or cores differ: look at "
            "what else runs there."
        ),
        predicted_speedup=removed(worst.share),
        limit="load imbalance",
    )


def _named(exchange: Any) -> str:
    return f"{kind_label(exchange.kind)} of {exchange.what}"


def _limit(record: ScalingRecord, top: Any) -> tuple[str, str]:
    """Which limit the exchange meets, and the sentence that says so.

    Args:
        top: a row of :func:`.record.exchange_times`.
    """
    link = own_link(record, "measured link")
    if link is None:
        reason = record.reasons.get("link_probe", "its sizes are too few")
        return "network", f"The link was not measured ({reason})."
    size = top.bytes / max(top.calls, 1.0)
    alone = link.time_ms(top.kind, top.ranks, size).mid * top.calls
    fit = link.fits.get((top.kind, top.ranks))
    moved = (
        f"Alone it takes {milliseconds(alone)} for {top.bytes / MIB:.2f} MiB per rank ({link.name})"
    )
    if top.time_ms > WAITING_FACTOR * alone > 0:
        return "load imbalance", (
            f"{moved}: the rest is waiting for slower ranks, or for a core that ranks share."
        )
    fixed = 1e-3 * (fit.fixed_us if fit else link.alpha_us.mid) * top.calls
    if fixed > LATENCY_SHARE * alone > 0:
        return "network", f"{moved}, mostly latency: fewer, larger exchanges."
    return "network", f"{moved}, mostly bytes: the link's rate is the limit."


def _better_sharding(
    record: ScalingRecord, parameters: Parameters | None, run: Any
) -> tuple[dict[str, Any], dict[str, float], str]:
    """A change to a sharding that is predicted to be faster; empty where there is none."""
    link = own_link(record, "measured link")
    if link is None or parameters is None or record.compute_profile.empty:
        return {}, {}, ""
    setting = Setting(
        parameters, Network(link), measured_profile(record.compute_profile), hidden=False
    )
    candidates = best_sharding(setting, run.ranks, run.batch_size).candidates
    table = candidates[candidates["sharding"].isin(KINDS)].dropna(subset=["mid_ms"])
    now = table.loc[table["sharding"] == run.sharding, "mid_ms"]
    if now.empty:
        return {}, {}, ""
    best, before = rows_of(table.nsmallest(1, "mid_ms"))[0], float(now.iloc[0])
    if before < LEAST_SPEEDUP * best.mid_ms or best.sharding == run.sharding:
        return {}, {}, ""
    times = {"low": best.high_ms, "mid": best.mid_ms, "high": best.low_ms}
    text = (
        f"training.sharding={best.sharding} is predicted to take {milliseconds(best.mid_ms)} "
        f"instead of {milliseconds(before)}. "
    )
    return {"training.sharding": best.sharding}, {n: before / t for n, t in times.items()}, text
