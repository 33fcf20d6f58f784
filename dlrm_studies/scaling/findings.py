"""What the ranks of a scaling record wait for: exposed collectives, the link, uneven ranks."""

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
from dlrm_workbook.analysis.findings.finding import Finding, capitalised, rank, removed
from dlrm_workbook.analysis.findings.ranks import COMMUNICATION_SHARE, IMBALANCE_SHARE
from dlrm_workbook.ground.units import milliseconds

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
        advice=(better + " " if better else "")
        + EXCHANGE_ADVICE.get(key, "Exchange less, or hide it."),
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


def _named(row: dict[str, Any]) -> str:
    return f"{kind_label(str(row['kind']))} of {row['what']}"


def _limit(record: ScalingRecord, top: dict[str, Any], ranks: int) -> tuple[str, str]:
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


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], table.to_dict("records"))


def _better_sharding(
    record: ScalingRecord, parameters: Parameters | None, run: dict[str, Any]
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
    if gain["mid"] < LEAST_SPEEDUP or best["sharding"] == used:
        return {}, {}, ""
    text = (
        f"training.sharding={best['sharding']} is predicted to take "
        f"{milliseconds(float(best['mid_ms']))} instead of {milliseconds(float(before['mid_ms']))}."
    )
    return {"training.sharding": str(best["sharding"])}, gain, text
