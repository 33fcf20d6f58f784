"""Making batches."""

from __future__ import annotations

import math
from typing import Any

from dlrm_workbook.analysis.attribution import device_beside_host, parts_at
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import (
    Causes,
    Measured,
    bounded,
    capitalised,
    is_worthwhile,
    predicted,
    rule,
)
from dlrm_workbook.analysis.findings.where import main_function, shown
from dlrm_workbook.analysis.lines import line_table
from dlrm_workbook.ground.units import milliseconds

DATA_SHARE = 0.05
"""Data generation above this share of the step is a finding; the same limit as
TensorBoard's former profiler plugin had for the data loader."""

UNAVOIDABLE_SHARE = 0.15
"""Up to here the fastest generator that makes such batches is no finding. Overlapping it
takes a core, and with all cores at work the step loses more than it gains (measured:
operators of two threads beside a prefetching one on two cores took 1.3 times as long)."""

FOREIGN_SHARE = UNAVOIDABLE_SHARE
"""The same of another program on a CPU, whose author can change how batches are made."""

FASTER = {"facebook_loop": "facebook"}
"""Generator to one that makes the very same batches faster."""

PREFETCH: dict[str, Any] = {"data.loader": "prefetch"}

FASTER_ADVICE = "make the same batches, bit for bit, with vectorised numpy"
PREFETCH_ADVICE = "make the next batch on another thread while the step computes"

FOREIGN_ADVICE = (
    "make batches ahead of the step in other processes or threads (a DataLoader with workers, or "
    "with more of them), whole batches at a time instead of sample by sample"
)
"""The advice to a program that has none of our parameters."""

STARTED_ADVICE = (
    "Start workers once: DataLoader(persistent_workers=True), or longer epochs (a sampler that "
    "goes on)"
)
"""The same where its workers are started again and again."""

Speedup = dict[str, float]


@rule(
    "data_generation",
    title="Data generation {keeps} {share:.0%} of each step{most}",
    evidence=(
        "{makes} a batch {keeps} {time:ms} of {total_ms:ms} per iteration ({share:.0%}); {others} "
        "the other {rest:ms}.",
        "The host takes {host:ms} for it, while the GPU works in the rest of that time.",
        "Timed alone on this machine: {alone:ms} per batch{by_generators}.",
        "{unprobed}",
        "The thread computes nothing in {idle:ms} of it: it sleeps.",
        "The Python lines that take most of it: {lines}.",
        "In {received:ms} of it tensors that workers send are put together again, one by one: each "
        "comes in a file of shared memory of its own.",
    ),
    advice="{remedy}.",
    limit="data generation",
    component="data",
    concerns=("data",),
)
def data_generation(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Making a batch, or waiting for it, holds up the step."""
    total, time = evidence.total_ms, evidence.time("data") - evidence.feeding_ms
    if not evidence.is_ours and not evidence.has_timeline:
        time = max(time, evidence.batch_ms)  # also what no name tells
    share = time / total
    if share <= DATA_SHARE:
        return None
    ledger.explain(time, ("data", "forward"))
    change, speedup, remedy = _remedy(evidence, time)
    # a GPU waits for it, whatever it takes
    foreign = not evidence.is_ours and (evidence.on_gpu or share > FOREIGN_SHARE)
    usual = share <= UNAVOIDABLE_SHARE and not _is_slow(evidence, time)
    if not change and usual and not foreign:
        return None  # overlap would not pay, and it takes what such batches take
    waits = evidence.parameter("data.loader") == "prefetch"
    generator = evidence.parameter("data.generator")
    then = _probed_ms(evidence, {"data.generator": FASTER.get(generator, "")})
    idle = evidence.share_of_wall("blocked_ms") * total
    figures: Measured = {
        "share": share,
        "makes": ("Waiting for" if waits else "Making")
        if evidence.is_ours
        else "Making, or waiting for,",
        "keeps": "takes",
        "most": "" if evidence.is_ours else _most_in(evidence),
        "time": time,
        "host": None,
        "rest": total - time,
        "others": "the model takes" if evidence.is_ours else "everything else takes",
        "alone": evidence.alone("data", "forward"),
        "by_generators": "",
        "lines": evidence.said_lines("data"),
        "received": None,
        "unprobed": None,
        "idle": min(idle, time) if not waits and idle > 0.5 * time else None,
        "remedy": capitalised(remedy),
        "change": change,
        "speedup": speedup,
    }
    if then is not None:
        figures["by_generators"] = f" by {generator}, {milliseconds(then)} by {FASTER[generator]}"
    elif "data.generator" in change:
        figures["unprobed"] = "How fast the other generator is here was not measured."
    table = line_table(evidence.profile)
    received = table.marked_ms("received") / table.step_ms * total if table is not None else 0.0
    if table is not None and table.marked_ms("started") > 0:
        figures["remedy"] = STARTED_ADVICE
    if received > 0.3 * time:
        figures["received"] = received
        figures["most"] += ", most of it to receive what workers send, sample by sample"
        figures["remedy"] = (
            "Put samples together in the workers (a collate_fn that stacks them), so that a batch "
            "crosses as few tensors"
        )
    if evidence.has_timeline or not (evidence.meta.get("lines") or evidence.pieces.empty):
        making = evidence.pieces[evidence.pieces["where"].eq("host")]
        parts = parts_at(evidence.profile, making["context"].to_numpy())
        making = making[parts["component"].eq("data").to_numpy()]
        figures["pieces"] = (making["context"], making["ms"])
        beside = device_beside_host(evidence.profile).query("component == 'data'")
        host_ms = float(beside["host_ms"].sum())
        if host_ms > time + DATA_SHARE * total and not evidence.is_ours:
            figures |= {"keeps": "keeps the GPU idle for", "host": host_ms}
    if evidence.basis == "the CPU time":
        figures["title"] = "Data generation takes {share:.0%} of the main thread's CPU time"
    if waits:
        figures["title"] = "The step waits for data in {share:.0%} of its time"
    return figures


def _most_in(evidence: Evidence) -> str:
    """Words that name the operator or function of Python that takes more than half of the time of
    making batches itself, to the exclusion of what it calls; "" if none does."""
    by_line = evidence.lines_of("data")
    if len(by_line) and not evidence.has_timeline:
        main = main_function(by_line)
        return f", most of it in {main}" if main else ""
    table = evidence.of_part("data")
    own = table[table["kind"].isin(["operator", "python"])].groupby("name")["cpu_self_ms"].sum()
    if not own.max() > 0.5 * evidence.time("data"):
        return ""
    return f", most of it in {shown(str(own.idxmax()))}"


def _remedy(evidence: Evidence, time: float) -> tuple[dict[str, Any], Speedup, str]:
    """(change, speed-up, advice): the least change that takes most of the time away."""
    if not evidence.is_ours:
        advice = FOREIGN_ADVICE + ", or on the GPU" * evidence.on_gpu
        return {}, bounded(time / evidence.total_ms), advice
    faster = FASTER.get(evidence.parameter("data.generator"))
    if faster:
        return _faster_generator(evidence, time, {"data.generator": faster})
    total = evidence.total_ms
    share = time / total
    if evidence.parameter("data.loader") == "synchronous":
        ahead = predicted(evidence, PREFETCH)
        pays = share > UNAVOIDABLE_SHARE or _has_spare_core(evidence)
        if ahead is None and pays:
            return PREFETCH, _overlapped(total, time, time, worst=1.0), PREFETCH_ADVICE
        if ahead is not None and is_worthwhile(ahead) and pays:
            return PREFETCH, ahead, PREFETCH_ADVICE
    advice = "no parameter makes these batches faster without changing them"
    if _is_slow(evidence, time):
        advice = (
            "look at what making a batch waits for or computes beyond drawing numbers: "
            "files, sleeps, Python loops"
        )
    elif evidence.parameter("data.place") == "cpu" and evidence.on_gpu:
        advice = "uniform and zipf batches can be made on the GPU (data.place: device)"
    return {}, bounded(share), advice


def _faster_generator(
    evidence: Evidence, time: float, change: dict[str, Any]
) -> tuple[dict[str, Any], Speedup, str]:
    """The same batches made faster, and overlapped too where they still take long."""
    total = evidence.total_ms
    then, now = _probed_ms(evidence, change), evidence.alone("data", "forward")
    gain = predicted(evidence, change)
    if then is None or not now:
        return change, gain or bounded(time / total), FASTER_ADVICE
    faster_ms = time * then / now
    rest = total - time
    if (
        evidence.parameter("data.loader") == "synchronous"
        and faster_ms / (rest + faster_ms) > DATA_SHARE
    ):
        both = predicted(evidence, change | PREFETCH)
        if both is None or gain is None or both["mid"] > 1.02 * gain["mid"]:
            speedup = both or _overlapped(total, time, faster_ms)
            return change | PREFETCH, speedup, f"{FASTER_ADVICE}; {PREFETCH_ADVICE}"
    mid = total / (rest + faster_ms)
    measured = {"low": 1 + 0.9 * (mid - 1), "mid": mid, "high": max(mid, total / rest)}
    return change, gain or measured, FASTER_ADVICE


def _has_spare_core(evidence: Evidence) -> bool:
    """Whether another thread could compute without taking a core from the operators."""
    threads, cores = evidence.threads, evidence.cores
    return evidence.on_gpu or threads is None or cores is None or threads < cores


def _is_slow(evidence: Evidence, time: float) -> bool:
    """Whether the batches take much longer than they take alone, and the step loses by it."""
    alone = evidence.alone("data", "forward")
    if alone is None:
        return False
    return time > 1.5 * alone and time - alone > DATA_SHARE * evidence.total_ms


def _overlapped(total: float, time: float, made: float, worst: float | None = None) -> Speedup:
    """Without overlap, and with all of it: what lies between depends on free cores."""
    rest = total - time
    low = total / (rest + made) if worst is None else worst
    high = total / max(rest, made)
    return {"low": low, "mid": math.sqrt(low * high), "high": high}


def _probed_ms(evidence: Evidence, change: dict[str, Any]) -> float | None:
    """Milliseconds per batch after exactly this change, if it was probed."""
    for probe in evidence.probed:
        if probe.get("change") == change:
            value = (probe.get("parts") or {}).get("data", {}).get("forward")
            return float(value) if value is not None and math.isfinite(value) else None
    return None
