"""Making batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dlrm_core.units import milliseconds
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import (
    Finding,
    Ledger,
    bounded,
    is_worthwhile,
    predicted,
    probe_of,
    sentence,
)

DATA_SHARE = 0.05
"""Data generation above this share of the step is a finding; the same limit as
TensorBoard's former profiler plugin had for the data loader."""

UNAVOIDABLE_SHARE = 0.15
"""Up to here the fastest generator that makes such batches is no finding. Overlapping it
takes a core, and with all cores at work the step loses more than it gains (measured:
operators of two threads beside a prefetching one on two cores took 1.3 times as long)."""

FASTER = {"facebook_loop": "facebook"}
"""Generator to one that makes the very same batches faster."""


def data_generation(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Making a batch, or waiting for it, holds up the step."""
    total, time = evidence.total_ms, evidence.time("data")
    if total <= 0 or time / total <= DATA_SHARE:
        return
    share = time / total
    ledger.explain(time, ("data", "forward"))
    change, speedup, advice = _remedy(evidence, time)
    if not change and share <= UNAVOIDABLE_SHARE and not _is_slow(evidence, time):
        # overlap would not pay, and it takes what such batches take: nothing to do here
        return
    waits = evidence.parameter("data.loader") == "prefetch"
    text = (
        f"{'Waiting for' if waits else 'Making'} a batch takes {milliseconds(time)} of "
        f"{milliseconds(total)} an iteration ({share:.0%}); the model takes the other "
        f"{milliseconds(total - time)}."
    )
    generator = evidence.parameter("data.generator")
    then = _probed_ms(evidence, {"data.generator": FASTER.get(generator, "")})
    alone = evidence.alone("data", "forward")
    if alone is not None and then is not None:
        text += (
            f" Timed alone on this machine: {milliseconds(alone)} a batch by {generator}, "
            f"{milliseconds(then)} by {FASTER[generator]}."
        )
    elif alone is not None:
        text += f" Timed alone on this machine: {milliseconds(alone)} a batch."
    if "data.generator" in change and then is None:
        text += " How fast the other generator is here was not measured."
    idle = evidence.share_of_wall("blocked_ms") * total
    if not waits and idle > 0.5 * time:
        text += f" The thread computes nothing in {milliseconds(min(idle, time))} of it: it sleeps."
    yield Finding(
        id="data_generation",
        title=(
            f"The step waits for data in {share:.0%} of its time"
            if waits
            else f"Data generation holds {share:.0%} of the step"
        ),
        component="data",
        share_of_step=share,
        evidence=text,
        advice=sentence(advice),
        change=change,
        predicted_speedup=speedup,
        limit="data generation",
    )


def _remedy(evidence: Evidence, time: float) -> tuple[dict[str, Any], dict[str, float], str]:
    """(change, speed-up, advice): the least change that takes most of the time away."""
    total = evidence.total_ms
    share = time / total
    faster = FASTER.get(evidence.parameter("data.generator"))
    synchronous = evidence.parameter("data.loader") == "synchronous"
    overlap: dict[str, Any] = {"data.loader": "prefetch"}
    said_faster = "make the same batches, bit for bit, with vectorised numpy"
    said_overlap = "make the next batch on another thread while the step computes"
    if faster:
        change: dict[str, Any] = {"data.generator": faster}
        then = _probed_ms(evidence, change)
        now = evidence.alone("data", "forward")
        made = time * then / now if then is not None and now else None
        alone_gain = predicted(evidence, change)
        both = predicted(evidence, change | overlap) if synchronous else None
        if made is None:
            return change, alone_gain or bounded(share), said_faster
        still = made / (total - time + made) > DATA_SHARE
        if (
            synchronous
            and still
            and (both is None or alone_gain is None or _more(both, alone_gain))
        ):
            gain = both or _overlapped(total, time, made)
            return change | overlap, gain, f"{said_faster}; {said_overlap}"
        return change, alone_gain or _known(total, time, made), said_faster
    if synchronous:
        ahead = predicted(evidence, overlap)
        pays = share > UNAVOIDABLE_SHARE or _has_spare_core(evidence)
        if ahead is None and pays:
            return overlap, _overlapped(total, time, time, worst=1.0), said_overlap
        if ahead is not None and is_worthwhile(ahead) and pays:
            return overlap, ahead, said_overlap
    advice = "no parameter makes these batches faster without changing them"
    if _is_slow(evidence, time):
        advice = (
            "look at what making a batch waits for or computes beyond drawing numbers: "
            "files, sleeps, Python loops"
        )
    elif evidence.parameter("data.place") == "cpu" and evidence.on_gpu:
        advice = "uniform and zipf batches can be made on the GPU (data.place: device)"
    return {}, bounded(share), advice


def _has_spare_core(evidence: Evidence) -> bool:
    """Whether another thread could compute without taking a core from the operators."""
    threads, cores = evidence.threads, evidence.cores
    return evidence.on_gpu or threads is None or cores is None or threads < cores


def _is_slow(evidence: Evidence, time: float) -> bool:
    """Whether the batches take much longer than they take alone."""
    alone = evidence.alone("data", "forward")
    return alone is not None and time > 1.5 * alone


def _more(better: dict[str, float], than: dict[str, float]) -> bool:
    return better["mid"] > 1.02 * than["mid"]


def _known(total: float, time: float, made: float) -> dict[str, float]:
    """Batches that take ``made`` instead of ``time`` milliseconds, both measured."""
    rest = total - time
    mid = total / (rest + made)
    return {"low": 1 + 0.9 * (mid - 1), "mid": mid, "high": max(mid, total / rest)}


def _overlapped(
    total: float, time: float, made: float, worst: float | None = None
) -> dict[str, float]:
    """Without overlap, and with all of it: what lies between depends on free cores."""
    rest = total - time
    low = total / (rest + made) if worst is None else worst
    high = total / max(rest, made)
    return {"low": low, "mid": math.sqrt(low * high), "high": high}


def _probed_ms(evidence: Evidence, change: dict[str, Any]) -> float | None:
    probe = probe_of(evidence, change)
    value = ((probe or {}).get("parts") or {}).get("data", {}).get("forward")
    return float(value) if value is not None and math.isfinite(value) else None


RULES = (data_generation,)
