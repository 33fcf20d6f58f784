"""What a finding is, how a rule makes one, and what its change is predicted to gain."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import IDLE
from dlrm_workbook.analysis.findings.evidence import Evidence, Part
from dlrm_workbook.analysis.findings.where import (
    RECORD_MORE,
    SAMPLE_MORE,
    most_in_one,
    place_sentence,
    shown,
)
from dlrm_workbook.analysis.first_calls import FIRST_TIMES, in_first_calls
from dlrm_workbook.analysis.idleness import Stretches, felt_share
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.analysis.steady import LEAST_OF_SPLIT
from dlrm_workbook.analysis.whatif import prediction
from dlrm_workbook.ground.arrays import Ints
from dlrm_workbook.ground.units import milliseconds

LIMITS = (
    "launches",
    "dispatch",
    "memory bandwidth",
    "random rows",
    "arithmetic",
    "copies",
    "synchronisation",
    "data generation",
    "scheduling",
    "load imbalance",
    "memory capacity",
    "network",
)
"""What can hold a step back. ``dispatch`` is the host's cost of calling operators,
``random rows`` the latency of reading rows of a table, ``scheduling`` other work that
takes the machine's cores."""

LEAST_SHARE = 0.05
"""Of the step; below it a remedy gains less than a run's own scatter. Rules that leave less doubt
have thresholds of their own."""

HARDLY = 0.005
"""Of the step: what takes less slows nothing down."""

SEVERITIES = ("fails", "slows")
"""``fails``: the run will end, or its result is worth nothing; always before ``slows``."""


@dataclass(frozen=True)
class Finding:
    """One bottleneck. ``share_of_step`` is the share of the step that it takes (0 to 1)."""

    id: str
    title: str
    component: str
    share_of_step: float
    evidence: str
    advice: str
    change: dict[str, Any] = field(default_factory=dict)
    """Parameter to the value to try, for ``compare``; empty if no parameter of ours helps."""
    predicted_speedup: dict[str, float] = field(default_factory=dict)
    """``low``, ``mid``, ``high``: step time now over step time after ``change``; empty where
    nothing tells."""
    severity: str = "slows"
    limit: str = ""
    """The limit that it meets, one of ``LIMITS``."""
    concerns: tuple[str, ...] = ()
    """What its share is time of: components, ``idle`` (of the GPU), or nothing for the step."""
    in_one: float = 0.0
    """Share of the step (0 to 1) that lies in one range, operator, function or call of the program;
    0 where it was not looked for."""
    felt: float = 1.0
    """Share (0 to 1) of its time by which the step would be shorter without it; the rest passes
    while the host sets the pace."""
    part_of: str = ""
    """Id of a finding ranked above it with which it shares time; "" for none that is known."""
    counted_above: float = 0.0
    """Share of the step (0 to 1), at least, that the findings above it count as well."""
    timed_speedup: dict[str, float] = field(default_factory=dict)
    """As ``predicted_speedup``, of whole steps that were timed under ``change``; else empty."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the ends of a gain that nothing tells are None."""
        unknown = dict.fromkeys(("low", "mid", "high"))
        gains = {"predicted_speedup": self.predicted_speedup, "timed_speedup": self.timed_speedup}
        return asdict(self) | {name: unknown | gain for name, gain in gains.items()}


def rank(found: Iterable[Finding]) -> list[Finding]:
    """Worst first: what fails, then by the predicted time saved, then by share of the step."""
    return sorted(
        found,
        key=lambda finding: (
            SEVERITIES.index(finding.severity),
            -finding.predicted_speedup.get("mid", 1.0),
            -finding.share_of_step,
        ),
    )


SAME = 0.01
"""Shares of the step that are larger by less than this do not contradict each other."""


def of_one_step(
    ranked: Sequence[Finding], available: Mapping[str, float], whole: str = "the step"
) -> list[Finding]:
    """The findings, each with the share of the step that those above it count as well.

    Time is certainly counted twice where two findings together take more than all of what they
    concern (the same part, the idle GPU), or all findings together more than the step. So the
    shares less ``counted_above`` add up to no more than 1.

    Args:
        ranked: worst first.
        available: share of the step (0 to 1) by what a finding concerns.
        whole: what the shares are of, in words.
    """
    listed: list[Finding] = []
    taken = 0.0
    for finding in ranked:
        twice_share, partner = 0.0, None
        for above in listed:
            places = {*above.concerns, *finding.concerns}
            if not above.concerns or not finding.concerns or not places <= available.keys():
                continue
            most = sum(available[place] for place in places)
            twice = above.share_of_step + finding.share_of_step - max(most, above.share_of_step)
            twice = min(twice, finding.share_of_step, above.share_of_step)
            if twice > max(twice_share, SAME):
                twice_share, partner = twice, above
        over = taken + finding.share_of_step - twice_share - 1.0
        twice_share += over if over > SAME else 0.0
        taken += finding.share_of_step - twice_share
        if twice_share > 0:
            sentence = f"{twice_share:.0%} of {whole} is counted by findings above as well"
            if twice_share > finding.share_of_step - SAME:
                sentence = "All of this time is counted by findings above as well"
            sentence += f" (“{partner.title}”)." if partner is not None else "."
            finding = replace(
                finding,
                evidence=f"{finding.evidence} {sentence}".lstrip(),
                part_of=partner.id if partner is not None else "",
                counted_above=twice_share,
            )
        listed.append(finding)
    return listed


Measured = dict[str, Any]
"""What a rule measured: ``share`` (of the step) and the figures that its sentences name."""


class Causes:
    """Milliseconds of a mean iteration that rules have explained, so that none is blamed twice.

    A cause without a place (another process on the cores) explains a little of every
    part's excess; it is taken off all of them in proportion.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._excess = evidence.excess_ms
        self._part: dict[Part, float] = {}
        self.anywhere_ms = 0.0
        """Milliseconds explained without a place."""
        self.idle_ms = 0.0
        """Milliseconds of the GPU's idle time that rules have explained."""
        self.copying_ms = 0.0
        """Milliseconds of it around copies to the host whose calls return when they have ended."""
        self.late_ms = 0.0
        """Milliseconds of the GPU's idle time that a finding over ranks reports."""
        self.waiting_ms = 0.0
        """Milliseconds of waiting in collectives that a finding over ranks reports."""
        self.idle_causes: set[str] = set()
        """What explained it: ``launches``, ``synchronisation``, ``allocation``."""
        self.waits: Stretches = (np.array([], np.int64), np.array([], np.int64))
        """Operators around waits for the GPU: idle time in them is synchronisation."""
        self.taken: Stretches = (np.array([], np.int64), np.array([], np.int64))
        """Stretches in which launched work waited for a GPU that did nothing."""
        self.slower_from: int | None = None
        """Place of the iteration from which on the GPU is slower than before."""
        self.device_work: set[str] = set()
        """Names of kernels whose time a rule has explained."""
        self.some_share = 0.0
        """Share of all iterations' time that lines take in some of them only, told by a finding."""
        self.told: list[tuple[float, str]] = []
        """Share of the step (0 to 1) and text of each finding so far."""

    def explain(self, milliseconds: float, part: Part | None = None) -> None:
        """Record that a rule explained time, in one part or anywhere in the step."""
        if part is None:
            self.anywhere_ms += milliseconds
        else:
            self._part[part] = self._part.get(part, 0.0) + milliseconds

    def enter(self, measured: Measured, total_ms: float) -> None:
        """Record what a rule says that it explained, see :func:`rule`."""
        if "explains" in measured:
            self.explain(measured["share"] * total_ms, measured["explains"])
        self.idle_ms += measured.get("idle_ms") or 0.0
        self.device_work |= set(measured.get("device_work", ()))

    def explained_in(self, part: Part) -> float:
        """Milliseconds explained in this very part."""
        return self._part.get(part, 0.0)

    def is_explained(self, part: Part) -> bool:
        """Whether some rule explained time in this very part."""
        return part in self._part

    @property
    def explained_ms(self) -> float:
        """All time explained so far, in parts and anywhere."""
        return self.anywhere_ms + sum(self._part.values())

    @property
    def left_ms(self) -> pd.Series:
        """Excess of each part over its probe that no rule has explained, ms."""
        left = self._excess.copy()
        for part, explained in self._part.items():
            if part in left.index:
                left[part] = max(0.0, left[part] - explained)
        total = float(left.sum())
        if total > 0:
            left *= max(0.0, 1.0 - self.anywhere_ms / total)
        return left


WITHOUT_TORCH = {
    "synchronisation": "Wait, or read results back, only where the host needs them: let work of "
    "one stream follow each other, and wait for events of it later, or for many results at once.",
    "allocation": "Take memory once and use it again: a pool (cudaMallocAsync), or buffers of the "
    "largest size, instead of taking and giving it back around each use.",
    "pageable_copies": "Copy from and to pinned memory (cudaHostAlloc, cudaHostRegister) on a "
    "stream of its own, keep on the GPU what is used there again, or copy fewer bytes.",
}
"""Finding to what to do in programs that are none of torch's."""

TORCHS = re.compile(r"torch|DataLoader|\.item\(\)")
"""Matches advice that holds for programs of torch alone."""

Measure = Callable[[Evidence, Causes], Measured | Iterable[Measured] | None]


@dataclass(frozen=True)
class Rule:
    """A function that measures, and sentences about what it measured; see :func:`rule`."""

    measure: Measure
    id: str
    title: str
    evidence: tuple[str, ...]
    advice: str
    limit: str
    component: str = "other"
    gpu: bool | None = None
    """Only for runs on a GPU (True) or on a CPU (False)."""
    timeline: bool = False
    """Only for recordings that say when a GPU worked."""
    concerns: tuple[str, ...] = ()

    def __call__(self, evidence: Evidence, ledger: Causes) -> Iterator[Finding]:
        """Look at the evidence, enter into the ledger what it explains, yield the findings."""
        if self.gpu not in (None, evidence.on_gpu) or self.timeline > evidence.has_timeline:
            return
        measured = self.measure(evidence, ledger)
        for figures in [measured] if isinstance(measured, dict) else measured or ():
            hardly = figures["share"] < HARDLY and figures.get("severity") != "fails"
            if figures["share"] >= figures.get("least", LEAST_SHARE) and not hardly:
                ledger.enter(figures, evidence.total_ms)
                yield self._finding(evidence, ledger, figures)

    def _finding(self, seen: Evidence, ledger: Causes, measured: Measured) -> Finding:
        share = min(max(float(measured["share"]), 0.0), 1.0)
        part = measured.get("explains") or (self.component, "")
        usual: Measured = {"component": part[0], "speedup": None, "change": {}, "severity": "slows"}
        figures = vars(self) | usual | measured | {"share": share}
        filled = [_filled(sentence, figures, seen) for sentence in figures["evidence"]]
        in_one, felt, first, most = 0.0, 1.0, 0.0, ""
        if "pieces" in figures:
            context, ms = figures["pieces"]
            it = figures.get("it", "it")
            filled.append(place_sentence(seen.profile, context, ms, seen.total_ms, it))
            filled += [_in_one_iteration(seen, context), _in_one_launch(seen, context)]
            if figures.get("in_place", True):
                in_one = most_in_one(seen.profile, context, ms) / seen.total_ms
                in_one *= figures.get("odd_share", 1.0)
            felt = _felt(seen, context) if IDLE not in self.concerns else 1.0
        if len(called := figures.get("pieces", [figures.get("called", ())])[0]):
            first, most, sentence = share_of_first_calls(seen, called)
            filled += [sentence] if first > LEAST_FIRST else []
        advice = _filled(figures["advice"], figures, seen) or ""
        if first > MOSTLY_FIRST:
            advice = FIRST_CALLS
            figures |= {"speedup": bounded(share)}  # how much of it recurs is not known
        if TORCHS.search(advice) and not seen.profile.of_kind("operator").any():
            advice = WITHOUT_TORCH.get(str(figures["id"]), advice)
        if seen.meta.get("engine") == "nsight":
            advice = advice.replace(RECORD_MORE, SAMPLE_MORE)
        speedup = removed(share) if figures["speedup"] is None else figures["speedup"]
        if seen.on_gpu and not (figures["change"] and seen.probed):
            speedup = capped(partly_felt(speedup, felt), felt * share)
            if speedup and felt < MOST_FELT:
                filled.append(
                    f"After {1.0 - felt:.0%} of it the GPU waits for the host's next launch: "
                    "there the host sets the pace, and less work on the GPU brings nothing."
                )
        title = re.sub(
            "^the ", "The ", _of_basis(seen, _filled(figures["title"], figures, seen) or "")
        )
        if first > MOSTLY_FIRST:
            title += f"; {first:.0%} of that in first calls, which load or compile"
            title += "" if most in title else f" (above all {most})"
        text = _of_basis(seen, " ".join(filter(None, filled)))
        ledger.told.append((share, f"{title} {text}"))
        return Finding(
            id=figures["id"],
            title=title,
            component=str(figures["component"]),
            share_of_step=share,
            in_one=min(in_one, share),
            felt=felt,
            evidence=text,
            advice=advice if seen.is_ours else PARAMETERS.sub("", advice),
            change=dict(figures["change"]) if seen.is_ours else {},
            predicted_speedup=speedup,
            severity=figures["severity"],
            limit=figures["limit"],
            concerns=tuple(figures["concerns"]),
        )


def rule(id: str, **sentences: Any) -> Callable[[Measure], Rule]:
    """Make a :class:`Rule` of a function that measures.

    The function returns None where it finds nothing, figures, or the figures of several findings
    one after the other. Figures fill the templates, together with the attributes of
    :class:`Evidence` (``{total_ms:ms}``, ``{cores}``); ``{name:ms}`` writes milliseconds, and a
    sentence of the evidence is left out where one of its figures is None.

    Nothing is found where ``share`` is below ``least`` (:data:`LEAST_SHARE`, unless the figures
    have another). What is found enters the ledger: with a figure ``explains``, a part or None for
    anywhere in the step, all time of the share; ``device_work`` and ``idle_ms`` as they are there.

    A figure named as an attribute of the rule (``title``, ``limit``, ...) replaces it; the
    component is that of the part that is explained, if no other is given. ``change``, ``severity``
    and ``speedup`` are the finding's. Without ``speedup`` the share is waste that can go entirely
    (:func:`removed`); an empty one says that nothing tells the gain. ``pieces`` gives the contexts
    and the time (ms of a mean step) of the pieces that the share is of, which become a sentence
    (:func:`~.where.place_sentence`), or ``called`` the contexts alone; ``in_place`` is False where
    most of it has no name that tells where to look, and ``odd_share`` is the part of the iterations
    that have that time, if not all.
    """
    return lambda measure: Rule(measure, id, **sentences)


PARAMETERS = re.compile(r" \((?:[a-z]+\.[a-z_]+[^()]*)\)")
"""Parameters of ours in an advice, which another program does not have."""


LEAST_LAUNCHES = 3
"""Of kernels, for one of them to be an exception."""

LEAST_FIRST, MOSTLY_FIRST = 0.2, 0.5
"""Least parts of a finding's time in first calls to be told, and to be its reason."""

ONE_OF_FEW = 2 / 3
"""Least part of a finding's time in one of few iterations for that one to be named."""


def _in_one_iteration(evidence: Evidence, contexts: Ints) -> str | None:
    """A sentence on time that lies in one of so few iterations that no rule compares them."""
    number = evidence.windows[0].size
    if evidence.profile.iterations.empty or not 2 < number < LEAST_OF_SPLIT:
        return None
    rows = evidence.pieces[evidence.pieces["context"].isin(np.unique(contexts))]
    by_iteration = rows.groupby("iteration")["ms"].sum()
    if not by_iteration.max() > ONE_OF_FEW * by_iteration.sum():
        return None
    place = sorted(evidence.pieces["iteration"].unique()).index(by_iteration.idxmax()) + 1
    share = by_iteration.max() / by_iteration.sum()
    return f"In one iteration, number {place} of {number}, is {share:.0%} of it."


def _in_one_launch(evidence: Evidence, contexts: Ints) -> str | None:
    """A sentence on time of the GPU most of which passes in one launch of a kernel of several."""
    if not evidence.has_timeline:
        return None
    work = evidence.work[evidence.work["kind"].eq("kernel") & ~evidence.is_exchange]
    work = work[work["context"].isin(np.unique(contexts))]
    if len(work) < LEAST_LAUNCHES:
        return None
    ms = ((work["end_ns"] - work["start_ns"]) / 1e6).to_numpy()
    names = evidence.profile.contexts["name"].to_numpy()[work["context"]]
    longest = int(ms.argmax())
    others = ms[(names == names[longest]) & (np.arange(len(ms)) != longest)]
    if ms[longest] < 0.5 * ms.sum() or not (
        len(others) and ms[longest] > FIRST_TIMES * np.median(others)
    ):
        return None
    usual = milliseconds(float(np.median(others)))
    name = kernel_name(str(names[longest])).short
    return f"One launch of {name} takes {milliseconds(ms[longest])} of that, as a rule {usual}."


FIRST_CALLS = (
    "Few calls take so long while libraries load: record later iterations, see what recurs."
)


def share_of_first_calls(evidence: Evidence, contexts: Ints) -> tuple[float, str, str]:
    """The share of the host's time in these contexts that passes in first calls, the name of those
    that take most of it, and a sentence."""
    rows = evidence.pieces[evidence.pieces["context"].isin(np.unique(contexts))]
    rows = rows[rows["where"].ne("device")]
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    time, by_name = in_first_calls(evidence.profile, start, end)
    share = 1e6 * time / max(float((end - start).sum()), 1.0)
    listed, by_name = [], by_name[by_name["ms"] > 0.05 * time][:3]
    for name, row in by_name.iterrows():
        then = f" (then {milliseconds(row['later_ms'])} each)" if row["later_ms"] > 0 else ""
        listed.append(f"{shown(str(name))} {milliseconds(row['ms'] / evidence.iterations)}{then}")
    most = shown(str(by_name.index[0])) if listed else ""
    taken = f"{share:.0%} of that: {', '.join(listed)}"
    return share, most, f"First calls, which load or compile, take {taken}."


def _felt(evidence: Evidence, contexts: Ints) -> float:
    """The :func:`felt_share` of GPU operations; 1 where the contexts are the host's work."""
    kinds = evidence.profile.contexts["kind"].iloc[contexts]
    on_gpu = evidence.on_gpu and evidence.has_timeline and kinds.isin(["kernel", "copy"]).all()
    return felt_share(evidence.profile, contexts) if on_gpu else 1.0


def _of_basis(evidence: Evidence, text: str) -> str:
    """The text with the name of what its shares are of, where that is no step."""
    if evidence.basis != "the step":
        for step in ("the step", "each step"):
            text = text.replace(step, evidence.basis)
        text = text.replace("per iteration", evidence.per)
        text = text.replace("in each iteration", evidence.per)
    return evidence.of_device(text)


class _Template(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """Write ``ms`` as milliseconds and ``count`` as a count of a mean iteration."""
        if format_spec == "ms":
            return milliseconds(float(value))
        if format_spec == "count":
            return f"{value:,.1f}".removesuffix(".0")
        return str(super().format_field(value, format_spec))


def _filled(template: str, figures: Measured, evidence: Evidence) -> str | None:
    """The sentence with its figures; None if one of them is None."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    values = {}
    for name in names:
        values[name] = figures[name] if name in figures else getattr(evidence, name)
        if values[name] is None:
            return None
    return _Template().vformat(template, (), values)


# Predicted gains: from the what-if model where it can tell, else from shares of the step.

MOST_FELT = 0.9
"""A finding says so where less than this share of its kernels' time is felt by the step."""

WORTHWHILE = 1.05
"""Least predicted speed-up that makes a finding: a run's own scatter is a few percent."""


def amdahl(share: float, gain: float) -> float:
    """Speed-up of a step of which ``share`` (0 to 1) takes 1/``gain`` of its time.

    Amdahl, "Validity of the single processor approach", AFIPS 1967.
    """
    return 1.0 / max(1.0 - share + share / gain, 1e-9)


def bounded(share: float, likely: float = 1.0) -> dict[str, float]:
    """Speed-up when only the bound is known: the share's time gone entirely.

    The middle is the geometric mean of doing nothing and of the ``likely`` part of it going.
    """
    mid, high = (1.0 / max(1.0 - part * share, 1e-9) for part in (likely, 1.0))
    return {"low": 1.0, "mid": math.sqrt(mid), "high": high}


def removed(share: float) -> dict[str, float]:
    """Speed-up when ``share`` of the step is known to be waste that can go entirely.

    Half of it going is the least that is claimed, a tenth more than measured the most:
    the two clocks (with and without the profiler) agree no better.
    """
    share = min(max(share, 0.0), 0.99)
    return {
        "low": 1.0 / (1.0 - 0.5 * share),
        "mid": 1.0 / (1.0 - share),
        "high": 1.0 / (1.0 - min(1.1 * share, 0.995)),
    }


def partly_felt(speedup: Mapping[str, float], factor: float) -> dict[str, float]:
    """Speed-ups when only a factor (0 to 1) of the time that each saves is felt."""
    return {end: 1.0 / (1.0 - factor * (1.0 - 1.0 / gain)) for end, gain in speedup.items()}


def capped(speedup: Mapping[str, float], share: float) -> dict[str, float]:
    """The gains, none above that of the share's time gone entirely."""
    most = 1.0 / max(1.0 - share, 1e-9)
    return {end: min(gain, most) for end, gain in speedup.items()}


def predicted(evidence: Evidence, change: Mapping[str, Any]) -> dict[str, float] | None:
    """``low``, ``mid``, ``high`` speed-up (time a sample), or None where nothing can tell."""
    try:
        return prediction(evidence.profile, change).speedup
    except InputError:
        return None


def is_worthwhile(speedup: Mapping[str, float] | None) -> bool:
    """Whether a prediction is a gain beyond doubt: by its middle, and not lost at its low."""
    return speedup is not None and speedup["mid"] >= WORTHWHILE and speedup["low"] > 1.0


def largest(by_part: pd.Series) -> Part:
    """The (component, phase) with the largest value of a series indexed by both."""
    component, phase = by_part.index[int(np.argmax(by_part.to_numpy()))]
    return str(component), str(phase)


def largest_part(rows: pd.DataFrame, column: str) -> Part:
    """The (component, phase) of which the rows have most of a column."""
    return largest(rows.groupby(["component", "phase"])[column].sum())


def capitalised(text: str) -> str:
    """The text with its first letter large."""
    return text[:1].upper() + text[1:]


def plain(value: Any) -> Any:
    """JSON values only: NaN (not measured) becomes None, numpy scalars Python's own."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
