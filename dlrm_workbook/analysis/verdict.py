"""The page's first answer: what limits the run, how far its changes would take it, how sure.

The advised changes are taken one on top of the other, best first. What the step takes with all
changes up to one was timed as a whole step (:mod:`dlrm_workbook.evidence.together`) or is
predicted from parts timed alone (:mod:`.whatif`), down to the least time that the machine's
measured ceilings allow (:mod:`.roofline`).
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_workbook.analysis.attribution import IDLE, PART, attribute, basis
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.devices import DATA_SHEET
from dlrm_workbook.analysis.findings import bottlenecks_json, findings, limit
from dlrm_workbook.analysis.findings.finding import Finding, plain
from dlrm_workbook.analysis.lines import lines
from dlrm_workbook.analysis.quality import quality
from dlrm_workbook.analysis.reference import at_reference, reference
from dlrm_workbook.analysis.roofline import least_step, least_times, profile_parameters
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.analysis.tried import tried_sentence
from dlrm_workbook.analysis.whatif import COVER, Prediction, measured_parts, prediction
from dlrm_workbook.evidence.dependence import changed_parameters, signature
from dlrm_workbook.ground.intervals import t_quantile
from dlrm_workbook.ground.units import at_most, faster, from_to, milliseconds, ratio
from dlrm_workbook.recordings.profile import Profile

PROCESS_ERROR = 0.03
"""Relative error of a ratio of whole steps that one process timed, for another process
(docs/results.md: so wide, the ranges contain 23 of 24 ratios of fresh processes)."""

HARDWARE_LIMIT = "hardware limit"
"""Name of the last stage, with the configuration that it is of."""

NOW, TIMED, PREDICTED = "the step", "timed as a whole step", "predicted from parts timed alone"
BY_CEILINGS = "ceilings of this machine"
INSTEAD, ESTIMATED, UNKNOWN = "not combined", "estimated by its rule", "not predicted"
"""How the time of a stage is known; the last three are of changes that are not on the way."""

DENSE_CHOICE = frozenset(
    {"training.precision", "training.fp32_matmul", "training.dense_backend", "training.tf32"}
)
"""Leaves that each choose how the products of the MLPs are computed: one takes another's place."""

AT_MOST = "an upper bound: all of its time saved"
"""Note of a change of which no more than that is known."""

ANOTHER_BATCH = "another batch is another step: compare its time per sample"


@dataclass(frozen=True)
class Stage:
    """A step as it is, as it would be, or as the machine allows at best."""

    name: str
    low_ms: float
    mid_ms: float
    high_ms: float
    """NaN where nothing is known."""
    parts: pd.DataFrame
    """``component``, ``time_ms``: they sum to ``mid_ms``. Empty where nothing is known."""
    change: dict[str, Any] = field(default_factory=dict)
    """All parameters changed up to here; of a change that is not on the way, its own."""
    basis: str = NOW
    """How the time is known: ``NOW``, ``TIMED``, ``PREDICTED``, ``BY_CEILINGS``, or, of a change
    that is not on the way, ``INSTEAD``, ``ESTIMATED`` or ``UNKNOWN``."""
    note: str = ""
    """Why a change is not on the way."""
    least: pd.DataFrame = field(default_factory=pd.DataFrame)
    """``component``, ``time_ms``: the least that the machine's ceilings allow for this stage's own
    configuration. Empty where that is not known."""

    @property
    def limit_ms(self) -> float:
        """The least time of a step of this configuration, ms; NaN where it is not known."""
        return float(self.least["time_ms"].sum()) if len(self.least) else math.nan

    @property
    def on_the_way(self) -> bool:
        """Whether the stage is the step with one more change on top of those before."""
        return self.basis in (TIMED, PREDICTED)

    @property
    def aside(self) -> bool:
        """Whether this is a change that was not combined with the others."""
        return self.basis in (INSTEAD, ESTIMATED, UNKNOWN)

    @property
    def ms(self) -> dict[str, float]:
        """``low``, ``mid``, ``high`` of the step."""
        return {"low": self.low_ms, "mid": self.mid_ms, "high": self.high_ms}

    def speedup(self, now_ms: float) -> dict[str, float]:
        """``low``, ``mid``, ``high``: the step now over this one."""
        ends = zip(self.ms, reversed(self.ms.values()), strict=True)
        return {end: now_ms / ms for end, ms in ends}


# ---- which changes go together ----------------------------------------------------------------


def combined(parameters: Parameters, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The advised changes on top of each other, worst finding first: all up to each one.

    Changes that take the place of an earlier one, or do not go with those before, are left out.
    """
    result: list[dict[str, Any]] = []
    taken: dict[str, Any] = {}
    for finding in findings:
        if taken | finding.change != taken and not _why_apart(parameters, taken, finding.change):
            taken = taken | finding.change
            result.append(taken)
    return result


def _why_apart(
    parameters: Parameters | None, taken: Mapping[str, Any], change: Mapping[str, Any]
) -> str:
    """Why a change is not put on top of those taken; "" where it is."""
    if "training.batch_size" in change:
        return ANOTHER_BATCH
    theirs, ours = (
        {name: value for name, value in choice.items() if name in DENSE_CHOICE}
        for choice in (taken, change)
    )
    if theirs and ours and ours | theirs != ours:
        return f"takes the place of {_named(theirs)}"
    if again := [name for name in change if name in taken and taken[name] != change[name]]:
        return f"takes the place of {_named({name: taken[name] for name in again})}"
    if parameters is None:
        return "the recording does not say which parameters it ran with"
    try:
        changed_parameters(parameters, {**taken, **change})
    except InputError as error:
        return f"does not go with those before: {error}"
    return ""


def _named(change: Mapping[str, Any]) -> str:
    """A change in a few words: ``precision: bf16 and loader: prefetch``."""
    return " and ".join(f"{name.partition('.')[2]}: {value}" for name, value in change.items())


# ---- whole steps, timed -----------------------------------------------------------------------


def advised_changes(profile: Profile) -> list[dict[str, Any]]:
    """The changes that are to be timed as whole steps: all up to each advised one. An InputError
    says that there is none, or why whole steps are not timed."""
    parameters = profile_parameters(profile)
    if profile.device != "cpu":
        raise InputError("whole steps under changes are timed on the CPU only")
    if not parameters.profiling.probes:
        raise InputError("profiling.probes is false")
    scaled = at_reference(profile)
    changes = combined(parameters, findings(scaled, attribute(scaled)))
    if not changes:
        raise InputError("no parameter is advised to be changed")
    return changes


NOBODY_TIMED = "nobody timed any; `dlrm run profile -f FILE` times those of our own training"


def timed_table(profile: Profile) -> pd.DataFrame:
    """The whole steps that were timed in turns, the step as it is first."""
    ends = ("low", "mid", "high")
    columns = ["change", "iteration_ms", "rounds", *(f"speedup_{end}" for end in ends)]
    together = profile.meta.get("together") or {}
    rows = []
    for stage in [{"change": {}, "ms": together.get("base_ms")}, *together.get("stages", [])]:
        if stage.get("ms"):
            gain = timed(profile, stage["change"]) or dict.fromkeys(ends, math.nan)
            times = statistics.median(stage["ms"]), len(stage["ms"])
            rows.append((_named(stage["change"]) or "as it is", *times, *map(gain.get, ends)))
    if not rows:
        return unmeasured(columns, profile.not_measured.get("together", NOBODY_TIMED))
    return pd.DataFrame(rows, columns=columns)


def timed(profile: Profile, change: Mapping[str, Any]) -> dict[str, float] | None:
    """``low``, ``mid``, ``high`` speed-up of the whole step under a change, if it was timed."""
    together = profile.meta.get("together") or {}
    for stage in together.get("stages") or []:
        if stage["change"] == plain(dict(change)) and stage.get("ms"):
            return whole_step_gain(together["base_ms"], stage["ms"])
    return None


def whole_step_gain(base_ms: Sequence[float], then_ms: Sequence[float]) -> dict[str, float]:
    """``low``, ``mid``, ``high`` speed-up by whole steps that took turns, round by round.

    The middle is the geometric mean of the rounds' ratios, the range by Student's t of their
    logarithms, joined with what a whole step in another process is off by.
    """
    logs = [math.log(base / then) for base, then in zip(base_ms, then_ms, strict=True)]
    error = 0.0
    if len(logs) > 1:
        error = t_quantile(0.95, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle, reach = statistics.fmean(logs), math.hypot(error, COVER * PROCESS_ERROR)
    ends = {"low": middle - reach, "mid": middle, "high": middle + reach}
    return {end: math.exp(value) for end, value in ends.items()}


def findings_timed(profile: Profile, found: Sequence[Finding]) -> list[Finding]:
    """The findings in the same order, with the speed-ups of whole steps under their changes."""
    return [
        replace(one, timed_speedup=(one.change and timed(profile, one.change)) or {})
        for one in found
    ]


def finding_table(found: Sequence[Finding]) -> pd.DataFrame:
    """A row for each finding, with the one gain that its change has on a page. ``found`` is what
    :func:`findings_timed` gives."""
    columns = ["title", "component", "share_of_step", "change"]
    rows = []
    for one in found:
        gain = one.timed_speedup or one.predicted_speedup
        basis = TIMED if one.timed_speedup else "predicted" if gain else ""
        if basis == "predicted" and gain["low"] <= 1.0:
            basis = AT_MOST.removeprefix("an ")
        rows.append((*(getattr(one, name) for name in columns), gain, basis))
    return pd.DataFrame(rows, columns=[*columns, "gain", "basis"])


def with_timed(made: Prediction, profile: Profile) -> Prediction:
    """A prediction as it is, or with the time of the whole step, if the profile timed the change.

    The parts keep their proportions.
    """
    gain = timed(profile, made.change)
    if gain is None:
        return made
    low, mid, high = (made.now_ms / gain[end] for end in ("high", "mid", "low"))
    times = ["then_ms", "low_ms", "high_ms"]
    parts = made.parts.assign(**{name: made.parts[name] * mid / made.mid_ms for name in times})
    notice = (
        f"The profile timed whole steps under {_named(made.change)} in turns with the step as it "
        f"is; parts timed alone had predicted {ratio(made.speedup['mid'], figures=2)}."
    )
    made = replace(made, low_ms=low, mid_ms=mid, high_ms=high, parts=parts)
    return replace(made, method=TIMED, notices=[*made.notices, notice])


# ---- the way ----------------------------------------------------------------------------------


def stages(
    profile: Profile, found: Sequence[Finding], roofline: pd.DataFrame | None = None
) -> list[Stage]:
    """The way from the measured step down to the machine's limit.

    Args:
        profile: at its reference (:mod:`.reference`).
        found: findings, worst first.
        roofline: what :func:`dlrm_workbook.analysis.roofline.roofline` gives.

    Returns:
        The step, a stage for each advised change on top of those before, then the advised
        changes that do not combine or that nobody timed, then the least time of the machine with
        the changes on the way, where known. A recording of another program has the step alone,
        with the time in which its GPU idles; one without named parts has none.
    """
    profile = at_reference(profile)
    parameters: Parameters | None = None
    try:
        parameters = profile_parameters(profile)
        parts = _by_component(measured_parts(profile), "now_ms")
    except InputError:
        parts = _recorded_parts(profile)
    if parts.empty:
        return []
    now = float(parts["time_ms"].sum())
    step = reference(profile)
    least = _lowest(roofline)
    name_now = basis(profile)
    if step is not None:
        name_now = f"the step, as {'measured' if step.unprofiled else 'recorded'}"
    way, aside = [Stage(name_now, now, now, now, parts, least=least)], []
    taken: dict[str, Any] = {}
    for finding in found:
        if taken | finding.change == taken:
            continue
        why_apart = _why_apart(parameters, taken, finding.change)
        stage = _stage(profile, finding, {} if why_apart else taken, now, why_apart)
        # what slows the step down is no advice, whatever its parts did alone
        if stage.on_the_way and stage.mid_ms >= way[-1].mid_ms:
            note = "gains nothing on top of the changes before it"
            stage = replace(stage, basis=INSTEAD, note=note, change=dict(finding.change))
        if stage.on_the_way:
            if len(least):
                stage = replace(stage, least=_changed_least(profile, stage))
            way.append(stage)
            taken = stage.change
        else:
            aside.append(stage)
    last = way[-1]
    # a data sheet is no measurement of the machine
    is_sheet = (profile.meta.get("ceilings") or {}).get("source") == DATA_SHEET
    if is_sheet or not len(last.least):
        return [*way, *aside]
    name = f"{HARDWARE_LIMIT}, {'with these changes' if last.change else 'as configured'}"
    times = (last.limit_ms,) * 3
    return [*way, *aside, Stage(name, *times, last.least, basis=BY_CEILINGS, least=last.least)]


def _stage(
    profile: Profile, finding: Finding, taken: Mapping[str, Any], now_ms: float, why_apart: str
) -> Stage:
    """The step after a finding's change on top of those taken, as well as it is known."""
    change = {**taken, **finding.change}
    predicted, note = None, why_apart
    try:
        predicted = prediction(profile, change)
    except InputError as error:
        note = note or str(error)
    gain = None if why_apart else timed(profile, change)
    basis = TIMED
    if gain is None and predicted is not None:
        gain, basis = predicted.speedup, INSTEAD if why_apart else PREDICTED
    elif gain is None and finding.predicted_speedup:
        gain, basis = finding.predicted_speedup, ESTIMATED
        if gain["low"] <= 1.0:  # an upper bound is all that is known
            gain, note = dict.fromkeys(gain, gain["high"]), f"{note}; {AT_MOST}".lstrip("; ")
    # what its rule estimates is of this change alone
    apart = why_apart or gain is None or basis == ESTIMATED
    name = f"{'or' if apart else '+'} {_named(finding.change)}"
    if gain is None:
        nan = math.nan
        return Stage(name, nan, nan, nan, _whole(nan), dict(finding.change), UNKNOWN, note)
    low, mid, high = (now_ms / gain[end] for end in ("high", "mid", "low"))
    parts = _whole(mid)
    if predicted is not None:
        parts = _by_component(predicted.parts, "then_ms")
        parts["time_ms"] *= mid / parts["time_ms"].sum()
    stage_change = change if basis in (TIMED, PREDICTED) else dict(finding.change)
    return Stage(name, low, mid, high, parts, stage_change, basis, note)


def _whole(time_ms: float) -> pd.DataFrame:
    """A step of whose parts nothing is known."""
    return pd.DataFrame({"component": ["other"], "time_ms": [time_ms]})


def _lowest(parts: pd.DataFrame | None) -> pd.DataFrame:
    """The least time that the machine allows, as :attr:`Stage.least`, of ``roofline``'s columns."""
    if parts is None or parts.empty or not least_step(parts)["least_ms"]:
        return pd.DataFrame()
    # as in least_step, no part takes longer than it was measured to take
    lowest = parts["ceiling_ms"].clip(upper=parts["time_ms"])
    return _by_component(parts.assign(ceiling_ms=lowest)[lowest > 0], "ceiling_ms")


def _changed_least(profile: Profile, stage: Stage) -> pd.DataFrame:
    """:attr:`Stage.least` of a stage under its changes; its parts take what they are predicted."""
    try:
        made = with_timed(prediction(profile, stage.change), profile)
    except InputError:
        return pd.DataFrame()
    base = profile_parameters(profile)
    changed, _ = changed_parameters(base, stage.change)
    # measured bags are of the unchanged run
    same = signature(base, "embedding") == signature(changed, "embedding")
    statistics = profile.meta.get("data_statistics") if same else None
    least = least_times(changed, profile.meta.get("ceilings") or {}, statistics, profile.device)
    parts = made.parts.rename(columns={"then_ms": "time_ms"}).merge(least, on=PART, how="left")
    parts["time_ms"] *= stage.mid_ms / parts["time_ms"].sum()
    # where the model asks nothing of the machine, the machine needs no time
    parts.loc[parts["limit"].isna(), "ceiling_ms"] = 0.0
    return _lowest(parts)


def _recorded_parts(profile: Profile) -> pd.DataFrame:
    """Parts of the recorded step, and the time in which its GPU idles; empty without names."""
    table = attribute(profile)
    on_gpu = table["where"].eq("device")
    if on_gpu.any():
        table = table.assign(component=table["component"].where(on_gpu, IDLE))
    elif table["component"].eq("other").all():
        table = table.iloc[:0]
    return _by_component(table[table["time_ms"] > 0], "time_ms")


def _by_component(parts: pd.DataFrame, column: str) -> pd.DataFrame:
    table = parts.groupby("component", as_index=False, sort=False)[[column]].sum()
    return table.rename(columns={column: "time_ms"})


def table(way: Sequence[Stage]) -> pd.DataFrame:
    """A row for each stage. ``way`` is what :func:`stages` gives."""
    columns = ["name", "mid_ms", "low_ms", "high_ms", "limit_ms", "basis", "note"]
    table = pd.DataFrame([{name: getattr(one, name) for name in columns} for one in way])
    table.insert(4, "speedup", way[0].mid_ms / table["mid_ms"])
    return table.rename(columns={"name": "step"})


def commands(way: Sequence[Stage], given: Sequence[str] = ("-f", "FILE")) -> list[str]:
    """The commands that time the changes which nobody timed beside the step. ``given`` are options
    that name the parameters of the run, as :func:`compare_command` takes them."""
    untimed = [stage.change for stage in way if stage.change and stage.basis != TIMED]
    return [compare_command(change, given) for change in untimed]


def compare_command(change: Mapping[str, Any], given: Sequence[str]) -> str:
    """The command that times a change in turns with the parameters as they are. ``given`` are the
    options that say which these are, such as ``-f FILE``."""
    options = [("-p", f"change.{name}={option_text(value)}") for name, value in change.items()]
    return shlex.join(["dlrm", "run", "compare", *given, *itertools.chain(*options)])


# ---- the headline -----------------------------------------------------------------------------


def verdict_text(
    profile: Profile, attribution: pd.DataFrame, findings: Sequence[Finding], way: Sequence[Stage]
) -> str:
    """The headline of a profile; :func:`quality` says what its times are good for."""
    limit_sentence = limit(profile, attribution, findings[0].title if findings else "")
    sheet = (profile.meta.get("ceilings") or {}).get("source") == DATA_SHEET
    texts = [headline(findings, way, limit_sentence, sheet), in_markdown(tried_sentence(profile))]
    return "\n\n".join(filter(None, texts))


def step_headline(profile: Profile, attribution: pd.DataFrame) -> str:
    """What a profile says at first sight: the step's time and its largest part, in Markdown. The
    profile is at its reference."""
    step, largest = reference(profile), in_markdown(limit(profile, attribution))
    if step is None:
        return largest
    return f"**A step takes {milliseconds(step.ms)}**, {in_markdown(step.source)}. {largest}"


def headline(
    findings: Sequence[Finding], way: Sequence[Stage], limit_sentence: str, sheet: bool = False
) -> str:
    """The verdict in a few sentences of Markdown: what limits, what to change, what it brings; of
    worst findings first, :func:`stages`, and :func:`dlrm_workbook.analysis.findings.limit`."""
    hardware, rates = "", "of the GPU's data sheet" if sheet else "measured on this machine"
    if way and len(way[0].least):
        hardware = (
            "Hardware limit as configured, of the model's arithmetic and memory traffic alone at "
            f"rates {rates}: {milliseconds(way[0].limit_ms)}"
        )
        for last in [stage for stage in way if stage.on_the_way][-1:]:
            changed = milliseconds(last.limit_ms) if len(last.least) else "not known"
            hardware += f"; with the changes: {changed}"
        hardware += "."
    if not findings:
        return f"**No known bottleneck found.** {in_markdown(limit_sentence)} {hardware}".rstrip()
    sentences = [_start(findings, way), _all_together(way), hardware]
    second = " ".join(filter(None, sentences))
    text = f"**{in_markdown(findings[0].title)}.** {in_markdown(limit_sentence)}"
    return text + (f"\n\n{second}" if second else "")


def _start(findings: Sequence[Finding], way: Sequence[Stage]) -> str:
    """What to change first, and what it brings; in words where no parameter of ours helps."""
    if (first := next((stage for stage in way if stage.on_the_way), None)) is not None:
        change, gain = first.change, first.speedup(way[0].mid_ms)
        how = "timed" if first.basis == TIMED else "predicted"
    else:
        # what was timed or predicted on the way and gained nothing is not advised by a finding
        vain = [stage.change for stage in way if way[0].mid_ms <= stage.mid_ms and stage.change]
        advised = (one for one in findings if one.change and one.predicted_speedup)
        worst = next((one for one in advised if dict(one.change) not in vain), None)
        if worst is None:
            return f"What to do: {in_markdown(findings[0].advice)}"
        change, gain, how = worst.change, worst.predicted_speedup, "estimated"
    options = " ".join(f"-p {name}={option_text(value)}" for name, value in change.items())
    options = options.replace("`", "'")
    mid, low, high = (gain[end] for end in ("mid", "low", "high"))
    words = faster(mid, low, high, figures=2)
    if low <= 1.0 and how == "estimated":  # nobody timed what takes its place
        words = f"{at_most(high)} faster"
    return f"Start with `{options}`: {how} {words}."


def option_text(value: Any) -> str:
    """A value as one writes it behind ``-p NAME=``."""
    return value if isinstance(value, str) else json.dumps(value).replace(" ", "")


def _all_together(way: Sequence[Stage]) -> str:
    """What all advised changes that go together bring; "" of fewer than two."""
    changed = [stage for stage in way if stage.on_the_way]
    if len(changed) < 2:
        return ""
    last, now = changed[-1], way[0].mid_ms
    gain = last.speedup(now)
    how = "timed as whole steps" if last.basis == TIMED else "predicted, not timed together"
    return (
        f"**{'Both' if len(changed) == 2 else f'All {len(changed)}'} advised changes together: "
        f"{faster(gain['mid'], gain['low'], gain['high'], figures=2)}**, from "
        f"{milliseconds(now)} to {milliseconds(last.mid_ms)} "
        f"({from_to(last.low_ms, last.high_ms)}), {how}."
    )


# ---- the document -----------------------------------------------------------------------------


def document(
    profile: Profile,
    attribution: pd.DataFrame,
    found: list[Finding],
    way: Sequence[Stage],
    roofline: pd.DataFrame,
    changes: pd.DataFrame,
) -> dict[str, Any]:
    """``bottlenecks.json``: findings and attribution, with what stands behind the verdict. ``way``
    is what :func:`stages` gives, ``roofline`` and ``changes`` are what
    :func:`dlrm_workbook.analysis.roofline.roofline` and
    :func:`dlrm_workbook.analysis.whatif.what_if_table` give."""
    step = reference(profile)
    more = {
        "headline": verdict_text(profile, attribution, found, way),
        "quality": quality(profile, attribution, found),
        "reference": None if step is None else vars(step),
        "together": _together(way),
        "stages": [
            {name: getattr(stage, name) for name in ("name", "change", "ms", "basis", "note")}
            | {"parts_ms": stage.parts.set_index("component")["time_ms"].to_dict()}
            for stage in way
        ],
        "roofline": roofline.to_dict("records"),
        "what_if": changes.to_dict("records"),
        "lines": lines(profile).to_dict("records"),
    }
    return bottlenecks_json(profile, attribution, found) | dict(plain(more))


def _together(way: Sequence[Stage]) -> dict[str, Any] | None:
    """All advised changes that go together, as one; None where there are none."""
    changed = [stage for stage in way if stage.on_the_way]
    if not changed:
        return None
    last, now = changed[-1], way[0].mid_ms
    return {
        "change": last.change,
        "changes": len(changed),
        "now_ms": now,
        "ms": last.ms,
        "speedup": last.speedup(now),
        "basis": last.basis,
        "not_combined": [stage.change for stage in way if stage.aside],
    }
