"""What holds a training step back, each finding with its evidence and its remedy.

A rule looks at the evidence (:class:`Evidence`: a profile, its attribution, the system's
counters, probes of each part alone, the machine's ceilings) and either finds something or is
silent; nothing wrong is an empty list and a sentence (:func:`limit`). Rules run from the most
specific to the most general, and each enters what time it explains into a :class:`Causes`, so
that a general rule speaks only of what no other has explained. What each rule looks at, its
threshold and why: dlrm help findings.

Gains are predicted by the what-if model where the change was probed on this machine;
elsewhere by Amdahl's law on the time in excess of what the part takes alone; where not even
that is known, only the bound is: the part's time gone entirely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_workbook.analysis.attribution import (
    IDLE,
    basis,
    coverage,
    device_beside_host,
    recorded,
    unattributed,
)
from dlrm_workbook.analysis.device_counters import counted_sentence
from dlrm_workbook.analysis.devices import DATA_SHEET
from dlrm_workbook.analysis.findings import (
    changes,
    data,
    embedding,
    generic,
    gpu_copies,
    gpu_idle,
    gpu_taken,
    gpu_work,
    host,
    iterations,
    operators,
    program,
    ranks,
)
from dlrm_workbook.analysis.findings.evidence import Evidence, heaviest
from dlrm_workbook.analysis.findings.finding import (
    LEAST_SHARE,
    Causes,
    Finding,
    Rule,
    of_one_step,
    plain,
    rank,
)
from dlrm_workbook.analysis.findings.where import part_name
from dlrm_workbook.analysis.kernel_names import kernel_family
from dlrm_workbook.analysis.lanes import MOST_LANES
from dlrm_workbook.analysis.lines import by_role
from dlrm_workbook.ground.units import milliseconds, percent
from dlrm_workbook.recordings.foreign import START_UP
from dlrm_workbook.recordings.profile import Profile

IDLE_GPU = ("gpu_idle", "launch_bound")
"""Findings of a GPU that does nothing."""

STARVED = ("launch_bound", "gpu_idle", "gpu_idle_otherwise")

MAKES_NEW_PAGES = (
    *("float64", "dense_updates", "around_model", "computed_again", "whole_tables"),
    *("untrained_gradients", "without_gradients", "small_operators", "run_again"),
    "padded_positions",
)
"""Findings of lines whose large temporaries the system has to give pages."""

EXPLAINS = {
    "synchronisation": (STARVED, 0.5),
    "blocking_launches": (STARVED, 0.5),
    "allocation": (STARVED, 0.5),
    "profiler_overhead": (STARVED, 0.5),
    "rank_imbalance": (("exposed_communication", "largest_place"), 0.0),
    "load_imbalance": (("waiting",), 0.0),
    "data_generation": (("python_in_part", "page_faults"), 0.5),
    **dict.fromkeys(MAKES_NEW_PAGES, (("page_faults",), 0.5)),
}
"""Finding of a cause to those that speak of its effects, before which it stands if its share is no
less than this part of the effect's."""

SPREAD = (*STARVED, "pointwise_operators", "irregular_iterations")
"""Findings that are sums of many."""

WITHOUT_CAUSE = ("largest_kernels", "largest_place", "without_gradients", "many_passes")
"""Findings that name where time passes, and no cause; what is computed without gradients, or part
by part, may be wanted, as the answers of a teacher."""

SPREAD_WEIGHT = 0.5
"""Factor of these in the order of findings: of sums, where no one place of a program has their
time; of what names no cause, always."""

OTHERWISE = 0.1
"""Of the step or of the recording: so much that a headline leaves out, or that differs between the
two, is said."""

MOST_OF_ALL = 0.5
"""Of a recording; if the iterations that are explained take less, that is said."""

NEXT_TO_NOTHING = 0.02
"""Share of the time of a named part that is not worth a sentence, where most has no name."""

SERIALISED_CAUTION = (
    "Kernels were serialised by PC sampling: times, idleness and overlap of this recording are "
    "distorted. It is for stall reasons; measure times without it (hpcrun -e CPUTIME -e "
    "gpu=nvidia -t)."
)

RULES: tuple[Rule, ...] = (
    host.leak,
    host.nearly_full,
    data.data_generation,
    ranks.waiting_for_last_rank,
    gpu_taken.slower_gpu,
    gpu_taken.gpu_taken,
    gpu_taken.profiler_overhead,
    gpu_idle.blocking_launches,
    gpu_idle.synchronising,
    gpu_idle.allocation,
    gpu_copies.copies,
    gpu_copies.exposed_communication,
    gpu_idle.launch_bound,
    gpu_idle.gpu_idle,
    embedding.unread_gradient,
    gpu_work.float64,
    gpu_work.tensor_cores,
    gpu_work.layout_copies,
    gpu_work.pointwise_operators,
    gpu_work.stalls,
    gpu_work.heavy_kernel,
    gpu_work.largest_kernels,
    gpu_copies.heavy_copy,
    operators.extra_operators,
    operators.avoidable_operators,
    host.other_processes,
    host.other_threads,
    host.waiting_for_cores,
    host.too_few_threads,
    host.collecting_garbage,
    program.left_on,
    program.around_model,
    program.outside_parts,
    program.dense_updates,
    program.padding_lookups,
    program.empty_products,
    program.subnormal_numbers,
    program.backward_twice,
    program.forward_again,
    program.computed_again,
    program.whole_tables,
    program.padded_positions,
    program.untrained_gradients,
    program.without_gradients,
    program.float64_lines,
    program.small_operators,
    host.storage_in_loop,
    host.waiting,
    host.page_faults,
    host.python_in_part,
    operators.dispatch_bound,
    operators.many_passes,
    embedding.skewed_indices,
    embedding.giant_table,
    embedding.embedding_update,
    changes.faster_settings,
    ranks.load_imbalance,
    generic.spinning_threads,
    iterations.irregular,
    generic.slower_than_alone,
    program.outside_modules,
    generic.largest_place,
)
"""In the order in which they run: what leaves no doubt about its cause comes first."""


def findings(
    profile: Profile, attribution: pd.DataFrame, ranks: Mapping[int, Profile] | None = None
) -> list[Finding]:
    """All bottlenecks that the rules see: what fails first, then by predicted time saved.

    Args:
        ranks: every rank's profile, where the recording holds several; ``profile`` is one.
    """
    evidence = Evidence(profile, attribution, ranks)
    if evidence.total_ms <= 0:
        return []
    ledger = Causes(evidence)
    unranked = [finding for rule in RULES for finding in rule(evidence, ledger)]
    unranked = program.as_tried(unranked, profile)
    ranked = rank(iterations.of_all_iterations(unranked))
    if not evidence.is_ours:
        ranked = _by_share(ranked)
    ranked = _dominant_in_place(ranked)
    largest = max(ranked, key=lambda finding: finding.share_of_step, default=None)
    idles = largest is not None and largest.id in IDLE_GPU and largest.severity == "slows"
    if evidence.is_ours and largest is not None and idles:
        # nothing else can bring as much as the GPU that does nothing
        first = sum(finding.severity == "fails" for finding in ranked)
        ranked.remove(largest)
        ranked.insert(first, largest)
    for cause, (effects, least) in EXPLAINS.items():
        _before(ranked, cause, effects, least)
    return of_one_step(ranked, _available(evidence), evidence.basis)


def _by_share(ranked: Sequence[Finding]) -> list[Finding]:
    """The findings by the share of the step that they take; what gives no gain to expect is last.

    Of another program few changes were timed: its gains are bounds of one kind or another.
    """
    fails = [each for each in ranked if each.severity == "fails"]
    slows = [each for each in ranked if each.severity != "fails"]
    # a GPU that waits for its host: one cause, told in the pieces that differ in what the host does
    starved = [each for each in slows if each.id in STARVED]
    weights = {id(each): _weight(each) for each in slows}
    if starved:
        weights[id(max(starved, key=_weight))] = sum(weights[id(each)] for each in starved)
    return fails + sorted(slows, key=lambda each: (not each.predicted_speedup, -weights[id(each)]))


def _weight(finding: Finding) -> float:
    """The share of the step by which a finding is ranked: what the step feels of it; and of what is
    spread over the program half, but no less than what lies in one place; of what names no cause
    half. One cause goes before a sum of many, and either before a place where time passes."""
    if finding.id not in (*SPREAD, *WITHOUT_CAUSE):
        return finding.felt * finding.share_of_step
    in_one = finding.in_one if finding.id in SPREAD else 0.0
    return finding.felt * max(SPREAD_WEIGHT * finding.share_of_step, in_one)


def _dominant_in_place(ranked: Sequence[Finding]) -> list[Finding]:
    """The findings without a dominant part of which another tells half; it comes first of those
    that slow the step if more of it than any of them takes is left when all others are taken off.
    """
    dominant = next(
        (each for each in ranked if each.id == "largest_place" and not each.predicted_speedup), None
    )
    if dominant is None:
        return list(ranked)
    others = [each for each in ranked if each is not dominant]
    share = dominant.share_of_step
    same = [each for each in others if each.component == dominant.component != "other"]
    if any(each.share_of_step >= 0.5 * share for each in same):
        return others
    # while the GPU is idle it works for no part
    beside = sum(each.share_of_step for each in others if IDLE in each.concerns)
    slows = [
        each.share_of_step
        for each in others
        if each.severity == "slows" and each.id != "largest_functions"  # pieces of the same time
    ]
    if share - (sum(slows) - beside) < max(slows, default=0.0):
        return list(ranked)
    others.insert(sum(each.severity != "slows" for each in others), dominant)
    return others


def _before(ranked: list[Finding], cause: str, effects: tuple[str, ...], least: float) -> None:
    """Move the finding of a cause before the first of the effects of which it is this part or more;
    in place."""
    moved = next((finding for finding in ranked if finding.id == cause), None)
    if moved is None:
        return
    for place, finding in enumerate(ranked[: ranked.index(moved)]):
        if finding.id in effects and least * finding.share_of_step <= moved.share_of_step:
            ranked.remove(moved)
            ranked.insert(place, moved)
            return


def _available(evidence: Evidence) -> dict[str, float]:
    """Share of the step (0 to 1) that each component takes, and the GPU's idle time."""
    shares = evidence.attribution.groupby("component")["share"].sum().fillna(0.0)
    available = {str(name): float(share) for name, share in shares.items()}
    if evidence.has_timeline:
        available[IDLE] = evidence.idle_ms / evidence.total_ms
    return available


def limit(profile: Profile, attribution: pd.DataFrame, title: str = "") -> str:
    """As :func:`_limit`, with the name of a device that is no GPU."""
    evidence = Evidence(profile, attribution)
    return evidence.of_device(_limit(evidence, title)) + counted_sentence(profile)


def _limit(evidence: Evidence, title: str) -> str:
    """One sentence: which part the step's time goes to most, and the limit it meets.

    Args:
        title: of the finding that stands before it; the part and the share that it names are
            not named again.
    """
    profile, attribution = evidence.profile, evidence.attribution
    named = attribution[attribution["time_ms"] > 0]
    if named.empty:
        return "Nothing was measured, so nothing can be said about limits."
    on_device = named["where"].eq("device")
    if not evidence.is_ours and not on_device.any() and (roles := by_role(profile)):
        return roles
    of_gpu = bool(on_device.any())
    first = _busy(evidence) if of_gpu else _explained(evidence)
    named = named[on_device] if of_gpu else named
    total = float(named["time_ms"].sum())
    if named["component"].eq("other").all():
        nothing = f"{first}The recording names no part of a model."
        return nothing + _without_part(profile) + _paces(evidence, title)
    parts = named[named["component"] != "other"] if evidence.low_coverage else named
    parts = parts.groupby(["component", "phase"], as_index=False)[["time_ms"]].sum()
    top = parts.loc[parts["time_ms"].idxmax()]
    name = part_name(str(top["component"]), str(top["phase"]))
    time = float(top["time_ms"])
    times = f"{milliseconds(time)} of {milliseconds(total)}"
    reached = _reached(evidence, str(top["component"]), str(top["phase"]))
    whole, per = "the GPU's time" if of_gpu else evidence.basis, evidence.per
    if whole == "the CPU time":
        whole = "the main thread's CPU time"
        per += ", start-up left out" * bool(profile.contexts["phase"].eq(START_UP).any())
    largest = f"{'named ' if evidence.low_coverage else ''}part of {whole}"
    operators = evidence.of_part(str(top["component"]), str(top["phase"]))
    called = operators[operators["kind"].eq("operator")]
    most = heaviest(called, 2)
    told = float(called.groupby("name")["cpu_self_ms"].sum().nlargest(2).sum()) > 0.5 * time
    if most and told and not of_gpu and not evidence.is_ours:
        reached += f", most of it in {most}"
    text = f"The largest {largest} is {name}: {times} {per} ({time / total:.0%}){reached}."
    if time < NEXT_TO_NOTHING * total and evidence.low_coverage:
        text = ""
    text = f"{first}{text}".rstrip()
    if not of_gpu and f"takes {time / total:.0%} of" in title and name.split()[0] in title.lower():
        text = f"{first}That is {times} {per}{reached}."
    if evidence.low_coverage:
        kind = "GPU's" if of_gpu else "CPU's"
        text += (
            f" Only {percent(coverage(attribution))} of the {kind} time is in named parts."
            f"{_without_part(profile)}"
        )
    return text.lstrip()


def _paces(evidence: Evidence, title: str) -> str:
    """How near their limits the operators run that take most of the GPU's time, as sentences;
    without one that the title tells of."""
    if evidence.device_ms < LEAST_SHARE * evidence.total_ms:
        return ""  # of a GPU that hardly works
    kernels = gpu_work.working_kernels(evidence)
    paces = kernels["kernel"].map(evidence.paces)
    times = kernels["ms"].groupby(paces).sum().sort_values(ascending=False)
    told = [
        f" {place} {pace} (its kernels take {percent(ms / evidence.device_ms)} of the GPU's time)."
        for (place, pace), ms in zip(times.index, times, strict=True)
        if ms > WORTH_PACE * evidence.device_ms and place not in title
    ]
    return "".join(told[:MOST_PACES])


WORTH_PACE, MOST_PACES = 0.02, 3
"""Least share of the GPU's time, and number, of operators of which a headline says how near their
limits they run."""


def _busy(evidence: Evidence) -> str:
    """How much of the step the GPU works, where the recording has a timeline."""
    if not evidence.has_timeline:
        return "How long the GPU was idle was not measured: the recording has no timeline. "
    share = evidence.device_ms / evidence.total_ms
    text = (
        f"The GPU works {milliseconds(evidence.device_ms)} of {milliseconds(evidence.total_ms)} "
        f"{evidence.per} ({percent(share)}). "
    )
    busy_ms, span_ms = evidence.whole
    if abs(busy_ms / span_ms - share) > OTHERWISE:
        text += (
            f"From its first operation to its last in the whole recording it works "
            f"{milliseconds(busy_ms)} of {milliseconds(span_ms)} ({percent(busy_ms / span_ms)}). "
        )
    if evidence.profile.iterations.empty:
        text += gpu_idle.left_out(evidence, LEAST_SHARE * evidence.total_ms)
    text += _explained(evidence)
    time, exposed = evidence.exchange_ms
    if time > OTHERWISE * evidence.total_ms:
        text += (
            f"The exchange between ranks runs {milliseconds(time)} of the step, "
            f"{milliseconds(exposed)} while nothing else does. "
        )
    return text


def _explained(evidence: Evidence) -> str:
    """How much of another program's recording its iterations are, where that is not most of it."""
    if evidence.is_ours or evidence.profile.iterations.empty:
        return ""
    (first, last), (begin, end) = evidence.windows, recorded(evidence.profile)
    explained, whole = float((last - first).sum()) / 1e6, (end - begin) / 1e6
    if explained >= MOST_OF_ALL * whole:
        return ""
    return (
        f"The iterations that are explained take {milliseconds(explained)} of a recording of "
        f"{milliseconds(whole)}. "
    )


def _without_part(profile: Profile) -> str:
    """The largest names that belong to no part; variants of one kernel count together."""
    table = unattributed(profile)
    on_gpu = profile.has("gpu_time_ms")
    table = table[table["device_ms" if on_gpu else "host_ms"].gt(0)]
    shorter = kernel_family if on_gpu else (lambda name: name[:60])
    largest = table["share"].groupby(table["name"].map(shorter)).sum().nlargest(3)
    listed = ", ".join(f"{name} ({percent(share)})" for name, share in largest.items())
    return f" Largest without a part: {listed}." if listed else ""


def cautions(profile: Profile) -> list[str]:
    """Sentences on what in this recording not to take at its word, gravest first."""
    sentences = [str(sentence) for sentence in profile.meta.get("cautions") or []]
    if profile.meta.get("serialised") and not any("serialised" in text for text in sentences):
        sentences.insert(0, SERIALISED_CAUTION)
    if (more := profile.trace["profile"].nunique() - MOST_LANES) > 0:
        sentences.append(f"Timelines show the {MOST_LANES} threads that ran longest, not {more:,}.")
    return [*sentences, *filter(None, [host.faults_of_profiler(profile)])]


def _reached(evidence: Evidence, component: str, phase: str) -> str:
    """``, at 83% of what bf16 matrix products reach here: arithmetic``."""
    if component in ("data", "other"):
        return ""  # made by Python or numpy: no ceiling of the machine is near
    table = evidence.roofline
    row = table[(table["component"] == component) & (table["phase"] == phase)]
    if row.empty or row["share_of_ceiling"].iloc[0] > 1.0:  # the ceiling was measured too low
        return ""
    limit = str(row["limit"].iloc[0])
    ceilings = {
        "arithmetic": f"{evidence.parameter('training.precision', 'fp32')} matrix products reach "
        "here",
        "random rows": "random rows of its tables reach here",
        "memory bandwidth": "this machine's memory gives",
        **dict.fromkeys(("dispatch", "launches"), "calling its operators allows"),
    }
    by_sheet = (evidence.meta.get("ceilings") or {}).get("source") == DATA_SHEET
    what = "its data sheet allows" if by_sheet else ceilings.get(limit, "this machine allows")
    return f", at {percent(row['share_of_ceiling'].iloc[0])} of what {what}: {limit}"


def bottlenecks_json(
    profile: Profile, attribution: pd.DataFrame, found: list[Finding] | None = None
) -> dict[str, Any]:
    """The content of ``bottlenecks.json``; plain JSON values, None for what was not measured."""
    if found is None:
        found = findings(profile, attribution)
    keys = ["component", "phase"]
    rows = attribution
    if rows["where"].eq("device").any():
        # a part's time is the GPU's; the rest is one row, and what the host did then is beside it
        idle = rows["where"].ne("device")
        rows = rows.assign(
            component=rows["component"].where(~idle, IDLE), phase=rows["phase"].where(~idle, "")
        )
    parts = rows.groupby(keys, as_index=False, sort=False)[["time_ms", "share"]].sum()
    beside = device_beside_host(profile)
    passes = [{"dilation": None, **measured} for measured in profile.meta.get("passes", [])]
    document = {
        "findings": [finding.to_dict() for finding in found],
        "limit": limit(profile, attribution),
        "attribution": parts.to_dict("records"),
        "device_beside_host": beside.to_dict("records"),
        "share_of": basis(profile),
        "coverage": coverage(attribution),
        "ms_per_iteration": float(attribution["time_ms"].sum()) if len(attribution) else None,
        "profiler": profile.meta.get("engine"),
        "device": profile.meta.get("device"),
        "passes": passes,
        "trials": (profile.meta.get("trials") or {}).get("rows", []),
        "cautions": cautions(profile),
        "not_measured": profile.not_measured,
    }
    return dict(plain(document))
