"""What the figures of a page are good for.

A doubt counts where it could change what the page concludes: which finding comes first, that
there is one, that there is none, or how long the step takes. What a measurement suffers from is
expressed as a share of the step by which its shares may be off; a finding that is larger by more
than that stands, however noisy the machine was.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from dlrm_core.base.text import counted
from dlrm_workbook.analysis.attribution import coverage, iteration_state
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.reference import Reference, reference, unprofiled_times
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.analysis.steady import SteadyState, steady_state
from dlrm_workbook.ground.units import percent, ratio
from dlrm_workbook.recordings.foreign import START_UP
from dlrm_workbook.recordings.profile import Profile

GOOD_FOR = {
    "green": "Times, shares and gains can be used as they stand",
    "amber": "",
    "red": "Do not use before measuring again",
}

LEVELS = list(GOOD_FOR)

HIDDEN, USELESS = 0.1, 0.3
"""Shares of the step: a bottleneck that may hide behind a doubt, and an error of shares that
spoils every conclusion."""

SLOWER_TOGETHER, FAR_SLOWER = 1.2, 1.5
"""Times the step that the changes were timed beside was as long as the page's: from the first on
its gains are those of another machine, from the second on they mean nothing."""

FEW = 8
"""Steady iterations, fewer than which cannot tell a warm-up or outliers."""

MANY_LEFT_OUT = 0.2
"""Share of the recorded iterations that are warm-up or outliers."""


@dataclass(frozen=True)
class Doubt:
    """Something that a conclusion of the page suffers from: how much, what, and which."""

    level: str
    reason: str
    conclusion: str


WAITS_FOR_CORES = ("waiting_for_cores", "too_many_threads", "other_threads")
"""Findings that say for whom the step waits: where one does, that is no error of the others."""


def quality(
    profile: Profile, attribution: pd.DataFrame, findings: Sequence[Finding]
) -> dict[str, str]:
    """What the figures of a page are good for. ``profile`` is at its reference, ``findings`` are
    its own, worst first. Returns ``level`` (``green``, ``amber`` or ``red``) and ``sentence``,
    Markdown: each doubt with the conclusion that it may change; where there is none, what the step
    was measured by."""
    doubts = list(_doubts(profile, attribution, findings))
    level = _worst(doubt.level for doubt in doubts)
    by_conclusion: dict[str, list[str]] = {}
    for doubt in sorted(doubts, key=lambda doubt: -LEVELS.index(doubt.level)):
        by_conclusion.setdefault(doubt.conclusion, []).append(doubt.reason)
    reasons = [f"{why}, since {' and '.join(what)}" for why, what in by_conclusion.items()]
    step = reference(profile)
    good_for = GOOD_FOR[level]
    if not reasons and step is not None and step.unprofiled:
        count = step.iterations and counted(step.iterations, "iteration")
        reasons = [f"{count} without a profiler" if count else f"the step is {step.source}"]
        if (scatter := _scatter(_unprofiled_state(profile))) is not None:
            reasons.append(f"spread {percent(scatter)}")
        slowed = step.recorded_ms / step.ms
        by = f"slowed the step {ratio(slowed)} (removed)" if slowed > 1 else "did not slow the step"
        reasons.append(f"the profiler {by}")
    elif not reasons and step is not None:
        good_for = "Times and shares are as recorded"
        count = counted(step.recorded_iterations, "iteration")
        reasons = [f"{count} under a profiler and none without it, so its cost is in every figure"]
    sentence = ": ".join(filter(None, (good_for, "; ".join(reasons))))
    return {"level": level, "sentence": f"{sentence[:1].upper()}{sentence[1:]}."}


def quality_of_times(times_ms: Sequence[float]) -> dict[str, str]:
    """What the iterations of a run that nobody profiled are good for; as :func:`quality`."""
    state = steady_state(times_ms)
    doubts = list(_doubts_of_iterations(state))
    steady = max(int(state.steady.sum()), 1)
    error = (_scatter(state) or 0.0) / math.sqrt(steady)
    if error >= HIDDEN / 2:
        why = f"iterations scatter by {percent(_scatter(state) or 0.0)}"
        told = f"their mean may be off by {percent(2 * error)}"
        doubts.append(Doubt("red" if error > USELESS / 2 else "amber", why, told))
    level = _worst(doubt.level for doubt in doubts)
    reasons = [f"{doubt.conclusion}, since {doubt.reason}" for doubt in doubts]
    reasons = reasons or [counted(steady, "steady iteration")]
    return {"level": level, "sentence": f"{GOOD_FOR[level]}: {'; '.join(reasons)}."}


MOST_SAID = 2
"""Runs whose doubts are told where several are side by side."""


def quality_of_runs(runs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What several runs side by side are good for: no more than the worst of them. ``runs`` has the
    name of each, and what :func:`quality` gives of it. Returns ``level`` and ``sentence`` as of
    :func:`quality`; each run with a doubt is named."""
    level = _worst(run["level"] for run in runs.values())
    doubted = [(name, run) for name, run in runs.items() if run["level"] != "green"]
    doubted.sort(key=lambda one: -LEVELS.index(one[1]["level"]))
    if not doubted:
        return {"level": level, "sentence": f"{GOOD_FOR[level]}, of all {len(runs)} runs."}
    # a sentence behind a colon
    texts = {name: f"{run['sentence'][:1].lower()}{run['sentence'][1:]}" for name, run in doubted}
    said = [f"{in_markdown(name)}: {text}" for name, text in texts.items()]
    head = f"{len(doubted)} of {counted(len(runs), 'run')}"
    verb = "is" if len(said) == 1 else "are"
    if left := said[MOST_SAID:]:
        said = [*said[:MOST_SAID], f"The other {len(left)}: see the page of each."]
    return {"level": level, "sentence": f"{head} {verb} in doubt. {' '.join(said)}"}


def _worst(levels: Iterable[str]) -> str:
    return max(levels, key=LEVELS.index, default="green")


OF_GPUS = re.compile(r"aten::(cudnn|miopen)_(convolution|batch_norm|rnn)")
"""Matches names of operators that run on a GPU only, with its work recorded or not."""


def _doubts(
    profile: Profile, attribution: pd.DataFrame, findings: Sequence[Finding]
) -> Iterator[Doubt]:
    """Every doubt that may change a conclusion."""
    step, state = reference(profile), iteration_state(profile)
    if profile.meta.get("serialised"):
        why = "kernels were serialised by PC sampling"
        yield Doubt("red", why, "times, idle time and overlap are distorted")
    marked = profile.meta.get("steps_threads") or []
    if (processes := len({str(thread).partition("/")[0] for thread in marked})) > 1:
        why = f"steps of {processes} processes are in one recording: open each one's by itself"
        yield Doubt("red", why, "times are of all of them together")
    if profile.meta.get("sample"):
        why = "this is a recorded sample"
        yield Doubt("amber", why, "another machine may show something else")
    if step is None:
        all_is = profile.meta.get("engine") == "hpctoolkit"
        all_is &= not profile.contexts["phase"].eq(START_UP).any()
        of_all = "shares are of all of it" + ", start-up with it, which no name tells" * all_is
        yield Doubt("amber", "the recording marks no steps", of_all)
    is_of_gpu = profile.of_kind("runtime").any() or profile.meta.get("engine") == "nsight"
    is_of_gpu |= profile.which("name", lambda name: bool(OF_GPUS.match(name))).any()
    if is_of_gpu and not profile.has("gpu_time_ms"):
        why = "none of its work is recorded (no device activity)"
        yield Doubt("amber", why, "what a GPU did, and when it was idle, is not known")
    elif profile.has("gpu_time_ms") and not profile.of_kind("kernel").any():
        calls = profile.contexts["name"][profile.of_kind("runtime")]
        calls = calls[calls.str.match("(?:cu|cuda|hip)[A-Z]")]
        why, what = "no kernel was launched", "the GPU computes nothing here"
        if calls.empty or calls.str.contains("Launch").any():
            why, what = (
                "no kernel is recorded",
                "the GPU may work more, and idle less, than is said",
            )
        yield Doubt("amber", why, what)
    # what else ran is no cause in the program, and hides those that are
    causes = [finding for finding in findings if finding.id != "other_processes"]
    for share, reason in _errors(profile, attribution, step, findings):
        if (changed := _changed(share, causes)) is not None:
            yield Doubt(changed[0], reason, changed[1])
    rounds = (profile.meta.get("together") or {}).get("base_ms") or []
    if rounds and step is not None and statistics.median(rounds) > SLOWER_TOGETHER * step.ms:
        times = statistics.median(rounds) / step.ms
        why = f"while the changes were timed together, the step took {ratio(times)} its time"
        yield Doubt("red" if times > FAR_SLOWER else "amber", why, "gains may differ")
    if step is not None and step.unprofiled and step.recorded_ms * SLOWER_TOGETHER < step.ms:
        times = step.recorded_ms / step.ms
        why = f"the profiled step took {ratio(times)} its time, and no profiler makes a step faster"
        yield Doubt("red" if times * FAR_SLOWER < 1 else "amber", why, "the step may take less")
    if state is not None:
        yield from _doubts_of_iterations(state)


def _errors(
    profile: Profile, attribution: pd.DataFrame, step: Reference | None, findings: Sequence[Finding]
) -> Iterator[tuple[float, str]]:
    """Shares of the step (0 to 1) by which shares of parts may be off, each with its reason."""
    by_lines = "lines" in profile.meta  # sampled without the profiler
    from_lines = by_lines and all(finding.id == "around_model" for finding in findings[:1])
    evidence = Evidence(profile, attribution)
    waited = evidence.machine_share("run_queue_ms")
    if waited and not any(finding.id in WAITS_FOR_CORES for finding in findings):
        yield waited, f"the thread of the step had no core in {percent(waited)} of its time"
    if step is not None and not step.unprofiled:
        if not evidence.on_gpu:  # kernels keep their times under a profiler
            yield HIDDEN, "what the profiler cost was not measured"
    elif step is not None and not step.laps and not from_lines:
        dilation = step.recorded_ms / step.ms
        why = f"the profiled step took {ratio(dilation)} the time of the plain one"
        yield 1 - min(dilation, 1 / dilation), why  # a profiler speeds nothing up
    plain = _unprofiled_state(profile)
    if (scatter := _scatter(plain)) is not None and plain is not None:
        why = f"iterations without a profiler scatter by {percent(scatter)}"
        yield scatter / math.sqrt(max(int(plain.steady.sum()), 1)), why
    # what no part names has a line, or is of no concern to kernels, copies, operators, idle time
    first = findings[0].component if findings else ""
    of_kind = evidence.on_gpu and first in ("data", "transfer")
    if not by_lines and first != "other" and not of_kind:
        unnamed = 1 - coverage(attribution)
        yield unnamed, f"{percent(unnamed)} of the time is in no named part"


def _changed(error: float, findings: Sequence[Finding]) -> tuple[str, str] | None:
    """The level of an error of shares, and the conclusion that it may change; None for none."""
    slows = [_saved(finding) for finding in findings if finding.severity == "slows"]
    if not slows:
        if error < HIDDEN:
            return None
        hidden = f"a bottleneck of up to {error:.0%} of the step may not show"
        return ("red" if error > USELESS else "amber"), hidden
    first = next(finding for finding in findings if finding.severity == "slows")
    title = f"“{in_markdown(first.title)}”"
    if error >= slows[0]:
        return ("red" if error >= USELESS else "amber"), f"{title} may be wrong"
    if error > HIDDEN / 2 and 0 <= slows[0] - max(slows[1:], default=0.0) < error:
        return "amber", f"{title} may not be the largest"
    return None


def _saved(finding: Finding) -> float:
    """The share of the step that the remedy of a finding should save, or that it takes."""
    gain = finding.predicted_speedup.get("mid")
    return 1 - 1 / gain if gain else finding.share_of_step


def _doubts_of_iterations(state: SteadyState) -> Iterator[Doubt]:
    """Doubts about too few iterations, and many left out."""
    steady, count = int(state.steady.sum()), len(state.times_ms)
    if steady < FEW:
        why = f"the steady iterations number only {steady}"
        so = "a warm-up cannot be told from the usual step"
        yield Doubt("amber", why, "the usual step may be another" if state.first else so)
    if count - steady > MANY_LEFT_OUT * count:
        why = f"{count - steady} of {count} iterations are warm-up or outliers"
        yield Doubt("amber", why, "the usual step is not the run")


def _unprofiled_state(profile: Profile) -> SteadyState | None:
    """What the iterations that the step is the median of say about each other, where they are
    known: they scatter on their own, however even the recorded ones are."""
    step = reference(profile)
    times = unprofiled_times(profile) if step is not None and step.unprofiled else []
    return steady_state(times) if times else None


def _scatter(state: SteadyState | None) -> float | None:
    """Spread of the steady iterations as a share of the usual one."""
    return None if state is None or not state.usual_ms else state.spread_ms / state.usual_ms
