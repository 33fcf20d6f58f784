"""One comparison from beginning to end: what the ``compare`` notebook calls.

``dlrm help columns`` describes the columns of its tables.

A *change* is profiled, predicted, measured in turns with the baseline, profiled, and judged;
*finished runs* are loaded and judged. Either way ``compare.json`` holds everything, and is
written again after every stage, so that a comparison that is killed has lost no round.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.base.text import counted
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_workbook.analysis.attribution import as_one, attribute, has_iterations
from dlrm_workbook.analysis.changes import (
    apply_change,
    change_steps,
    change_text,
    difference,
    flat_change,
)
from dlrm_workbook.analysis.compare import (
    SAME_PROGRAM,
    circumstances,
    compare_parts,
    device_differences,
    differing,
    likeness,
    mixed_causes,
    part_estimates,
    ratio_interval,
    recorded_differences,
    steady_rows,
    step_estimate,
    work_against_step,
)
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.ensemble import SWEEP, swept_runs
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.analysis.quality import GOOD_FOR, quality, quality_of_runs
from dlrm_workbook.analysis.reference import TIME_COLUMNS, all_at_reference, at_reference, reference
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.analysis.verdict import with_timed
from dlrm_workbook.analysis.whatif import Prediction, predict_change, prediction
from dlrm_workbook.ground.bar import Bar
from dlrm_workbook.ground.intervals import Interval
from dlrm_workbook.ground.machine import versions
from dlrm_workbook.ground.processes import Progress, ProgressCallback, fresh_path, only_process
from dlrm_workbook.ground.units import milliseconds, ratio
from dlrm_workbook.recordings.measure import measure
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.trials.compare import analyse as in_rounds
from dlrm_workbook.trials.compare.measure import ROUNDS, TimedRun, run_in_turns

COMPARISON_FILE = "compare.json"

FINISHED = (
    "finished runs are compared; `dlrm run compare -f FILE -p change.LEAF=VALUE` predicts a change "
    "and runs it in turns with the baseline"
)
"""Why runs that had finished before have neither predictions nor rounds."""

PREDICTION_COLUMNS = ["change", "now_ms", "then_ms", "low_ms", "high_ms"]
PREDICTION_COLUMNS += ["speedup_low", "speedup_mid", "speedup_high", "method"]


@dataclass
class Outcome:
    """Two settings side by side: what was predicted, what was measured."""

    before: str
    after: str
    change: dict[str, Any]
    """What sets ``after`` apart from ``before``; empty for finished runs."""
    predicted: Prediction | None
    reason: str
    """Why there is no prediction; empty where there is one."""
    speedup: Interval | None
    """Measured: time of a sample before over after; None until then."""
    before_ms: float | None = None
    after_ms: float | None = None
    parts: pd.DataFrame | None = None
    """As :func:`dlrm_workbook.analysis.compare.compare_parts` gives."""
    losses: dict[str, Any] | None = None
    doubt: str = ""
    """Why the two times make no speed-up; empty where they do."""
    quality: str = ""
    """Level of the worse of both, see :mod:`~.analysis.quality`; empty until both are there."""

    @property
    def error(self) -> float | None:
        """Predicted over measured time of a step, both against the baseline, less 1."""
        if self.predicted is None or self.speedup is None:
            return None
        return self.speedup.mid / self.predicted.speedup["mid"] - 1

    @property
    def in_range(self) -> bool | None:
        """Whether the measured speed-up lies in the predicted range."""
        if self.predicted is None or self.speedup is None:
            return None
        gain = self.predicted.speedup
        return bool(gain["low"] <= self.speedup.mid <= gain["high"])

    def part_table(self) -> pd.DataFrame:
        """The parts, with ``predicted_ms`` of each on the scale of the measured baseline."""
        parts = self.parts
        if parts is None or parts.empty:
            return unmeasured([], "the parts were not timed")
        made = self.predicted
        if made is None or not self.before_ms or not made.now_ms:
            return parts.assign(predicted_ms=math.nan)
        scale = self.before_ms / made.now_ms
        then = scale * made.parts.set_index(["component", "phase"])["then_ms"]
        keys = pd.MultiIndex.from_frame(parts[["component", "phase"]])
        return parts.assign(predicted_ms=then.reindex(keys).to_numpy())

    def to_dict(self) -> dict[str, Any]:
        measured = {
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "speedup": self.speedup.to_dict() if self.speedup else None,
        }
        return {
            "before": self.before,
            "after": self.after,
            "change": self.change,
            "predicted": self.predicted.to_dict() if self.predicted else None,
            "not_predicted": self.reason,
            "measured": measured if self.speedup or self.doubt else None,
            "doubt": self.doubt,
            "quality": self.quality,
            "error": self.error,
            "in_predicted_range": self.in_range,
            "parts": [] if self.parts is None else self.parts.to_dict("records"),
            "losses": self.losses,
        }


TURNS = "the rounds in turns"
"""Name of what they are good for, beside that of each profile."""

SCATTERED = 1.5
"""Times between the ratios of two rounds from which on the machine was not quiet."""


class Comparison:
    """What both kinds share: profiles by name, outcomes, ``compare.json``."""

    kind = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sentence = ""
        """What is compared, for the top of the page (Markdown)."""
        self.profiles: dict[str, Profile] = {}
        self.outcomes: list[Outcome] = []
        self.runs: list[TimedRun] = []
        self.times = unmeasured([], FINISHED)
        self.notices: list[str] = []
        self.apart = False  # whether a notice tells the GPU's work and the step apart
        self.qualities: dict[str, dict[str, str]] = {}
        """Name of a profile to what it is good for, see :func:`~.analysis.quality.quality`."""
        self.per = "per iteration"
        """What times are of: an iteration, or ``in the whole recording``."""
        self.status = "running"

    def _note(self, *notices: str) -> None:
        self.notices += [text for text in notices if text not in self.notices]

    # A stage can be asked for again: what it has measured stays, and what is missing is added.

    def profile_baseline(self, progress: ProgressCallback | None = None) -> pd.DataFrame:
        """Measure or load what comes first; its time by part at the step that the other pages of
        the run add up to (:func:`~.analysis.reference.at_reference`)."""
        return attribute(at_reference(next(iter(self.profiles.values()))))

    def predict(self) -> pd.DataFrame:
        """Predict the outcomes, before anything of the change is run: :meth:`prediction_table`."""
        return self.prediction_table()

    def measure(self, progress: ProgressCallback | None = None) -> pd.DataFrame:
        """Run the settings in turns, as many rounds as are missing: :meth:`ratio_table`."""
        return self.ratio_table()

    def profile_changed(self, progress: ProgressCallback | None = None) -> pd.DataFrame:
        """Measure what comes last: :meth:`Outcome.part_table` of the last outcome."""
        return (
            self.outcomes[-1].part_table()
            if self.outcomes
            else unmeasured([], "nothing was compared")
        )

    @property
    def differences(self) -> pd.DataFrame:
        """What is not the same in all profiles, see :func:`~.analysis.compare.differing`."""
        return differing([circumstances(profile) for profile in self.profiles.values()])

    @property
    def mixed(self) -> str:
        """A warning where more than parameters differ; else empty."""
        return mixed_causes(self.differences)

    @property
    def rated(self) -> list[Outcome]:
        """Outcomes that have a speed-up."""
        return [outcome for outcome in self.outcomes if outcome.speedup is not None]

    @property
    def steps(self) -> list[Outcome]:
        """Outcomes of a change that was run in turns leaf by leaf; else empty."""
        return self.rated if self.runs and len(self.outcomes) > 1 else []

    def outcome_table(self) -> pd.DataFrame:
        """Predicted and measured, a row an outcome.

        Predicted times are on the scale of the baseline that ran in turns: the profile had its
        own day.
        """
        rows = []
        for outcome in self.outcomes:
            made, measured = outcome.predicted, outcome.speedup
            scale = outcome.before_ms / made.now_ms if made and outcome.before_ms else math.nan
            row: dict[str, Any] = {
                "change": change_text(outcome.change) or outcome.after,
                "before_ms": outcome.before_ms,
                "predicted_ms": scale * made.mid_ms if made else math.nan,
                "after_ms": outcome.after_ms,
            }
            for end in ("low", "mid", "high"):
                row[f"predicted_{end}"] = made.speedup[end] if made else math.nan
                row[f"measured_{end}"] = getattr(measured, end) if measured else math.nan
            row |= {"error": outcome.error, "in_range": outcome.in_range}
            rows.append(row | {"quality": outcome.quality})
        return pd.DataFrame(rows)

    @property
    def quality(self) -> dict[str, str]:
        """What the runs are good for, see :func:`~.analysis.quality.quality_of_runs`: rounds in
        turns, which the profiles' doubts do not concern, and then what the profiles are."""
        profiles = dict(self.qualities)
        turns = profiles.pop(TURNS, None)
        said = quality_of_runs(profiles) if profiles else {}
        if not turns or not said:
            return turns or said
        if said["level"] == "green":
            return turns
        level = max(turns["level"], "amber", key=list(GOOD_FOR).index)
        of_turns = f"{turns['sentence'][:1].lower()}{turns['sentence'][1:]}"
        sentence = f"The speed-up: {of_turns} Its parts and the prediction: {said['sentence']}"
        return {"level": level, "sentence": sentence}

    @property
    def sameness(self) -> str:
        """What is the same in all profiles, and what they do not say, where nothing differs."""
        kinds = [
            {kind for kind, values in each.items() if any(v is not None for v in values.values())}
            for each in map(circumstances, self.profiles.values())
        ]
        asked = ["parameters", "versions", "machine"]
        same = [kind for kind in asked if kinds and all(kind in each for each in kinds)]
        lacking = [kind for kind in asked if kind not in same]
        text = f"The same in all: {', '.join(same)}." if same else ""
        if lacking:
            text += f" Not recorded in all of them, so not compared: {', '.join(lacking)}."
        return text.strip()

    @property
    def gpu_sentence(self) -> str:
        """How the GPUs' own work changed, in Markdown; "" where it is not recorded in both."""
        # NaN where a side was not measured, and no columns where there are no two profiles
        sides = ["device_ms_before", "device_ms_after"]
        table = self.of_first_and_last(recorded_differences).reindex(columns=sides)
        before, after = (float(time_ms) for time_ms in table.sum())
        if not min(before, after):
            return ""
        work = self.of_first_and_last(device_differences)
        text = (
            f"The GPU's own work: {milliseconds(before)} before and {milliseconds(after)} after "
            f"{self.per}, {ratio(after / before)} the time (durations of kernels and copies, added "
            "up; how much of that is chance is not known). "
        ) * (not self.apart)  # else its times are told beside the step's
        if len(work):
            row = work.iloc[0]
            ends = f"{milliseconds(row['before_ms'])} to {milliseconds(row['after_ms'])}"
            what = "The GPU's work" if self.apart else "It"
            text += f"{what} changed most in `{in_markdown(str(row['operator']))}`: {ends}."
        return text.strip()

    def other_times(self) -> pd.DataFrame:
        """The step before the change, and that of each profile, which ran at another time.

        Empty where no step is known.
        """
        step_ms = self.outcomes[0].before_ms if self.outcomes else None
        if not step_ms or self.per != "per iteration":
            return unmeasured([], "no iterations were timed")
        rows: list[tuple[Any, ...]] = []
        if self.runs:
            before = [run for run in self.runs if run.setting == self.outcomes[0].before]
            count = sum(int(steady_rows(run.iteration_ms).sum()) for run in before)
            why = f"the median of {len(before)} rounds, each the mean of its steady iterations"
            rows = [("the step before the change", step_ms, count, f"{why}; no profiler")]
        for name, profile in self.profiles.items():
            if found := reference(profile):
                why = f"{found.source}; tables of this profile add up to it"
                rows.append((f"the step in {name}'s profile", found.ms, found.iterations, why))
        table = pd.DataFrame(rows, columns=["what", "time_ms", "iterations", "why"])
        table["times_the_step"] = table["time_ms"] / step_ms
        return table[TIME_COLUMNS]

    def prediction_table(self) -> pd.DataFrame:
        """What is predicted before anything of the change has run, a row an outcome."""
        if self.kind == "runs":
            return unmeasured([], FINISHED)
        rows = []
        for outcome in self.outcomes:
            made, method = outcome.predicted, f"not predicted: {outcome.reason}"
            row: dict[str, Any] = {"change": change_text(outcome.change), "method": method}
            if made is not None:
                row |= {"now_ms": made.now_ms, "then_ms": made.mid_ms, "method": made.method}
                row |= {"low_ms": made.low_ms, "high_ms": made.high_ms}
                row |= {f"speedup_{end}": made.speedup[end] for end in ("low", "mid", "high")}
            rows.append(row)
        return pd.DataFrame(rows, columns=PREDICTION_COLUMNS)

    def ratio_table(self) -> pd.DataFrame:
        """Mean steady iteration of each setting in each round, and the rounds' own ratios."""
        if not self.runs:
            return unmeasured([], FINISHED)
        whole = self.times[self.times["component"] == ""]
        wide = whole.pivot(index="round", columns="setting", values="time_ms")
        first, others = self.outcomes[0].before, [outcome.after for outcome in self.outcomes]
        table = wide[[first, *others]].add_suffix("_ms")
        for name in others:
            table[f"{first} / {name}"] = wide[first] / wide[name]
        table.insert(0, "round", wide.index + 1)
        return table.reset_index(drop=True)

    def difference_table(self) -> pd.DataFrame:
        """Parameters, versions and machine where they differ, with the value in each profile."""
        differences = self.differences
        values = pd.DataFrame(differences["values"].tolist(), columns=list(self.profiles))
        return pd.concat([differences[["kind", "name"]].reset_index(drop=True), values], axis=1)

    def of_first_and_last(
        self, differences: Callable[[Profile, Profile], pd.DataFrame]
    ) -> pd.DataFrame:
        """What a question about two recordings answers; empty, with the reason, where one is."""
        if len(self.profiles) < 2:
            return unmeasured([], "there are no two profiles")
        first, *_, last = self.profiles.values()
        return differences(first, last)

    def _judge_runs(self) -> None:
        """Say what each profile is good for; an unreliable one makes no speed-up."""
        for label, profile in self.profiles.items():
            if label not in self.qualities:
                parts = attribute(profile)
                self.qualities[label] = quality(profile, parts, findings(profile, parts))
        rounds = len({run.round for run in self.runs})
        if rounds:
            table = in_rounds.round_table(self.runs)
            times = table[table["component"].eq("")].pivot(
                index="round", columns="setting", values="time_ms"
            )
            # a machine's drift is in all of a round; what is in one run alone is not
            ratios = times.div(times.iloc[:, 0], axis=0)
            low, high = ratios.min(), ratios.max()
            worst = (high / low).idxmax()
            scattered = high[worst] > SCATTERED * low[worst]
            level = "green" if rounds >= ROUNDS and not scattered else "amber"
            words = [GOOD_FOR[level], f"{counted(rounds, 'round')}, of {ROUNDS} that give 95%."]
            sentence = ": ".join(filter(None, words))
            if scattered:
                ends = f"{ratio(low[worst])} the time of {times.columns[0]}, in another "
                ends += ratio(high[worst])
                sentence += f" In one round {worst} took {ends}: the machine was not quiet."
            self.qualities[TURNS] = {"level": level, "sentence": sentence}
        levels = list(GOOD_FOR)
        for outcome in self.outcomes:
            # rounds in turns are measured without the profiles, whose doubts are not theirs
            pair = (TURNS,) if rounds else (outcome.before, outcome.after)
            said_of = {name: self.qualities[name] for name in pair if name in self.qualities}
            found = [said["level"] for said in said_of.values()]
            outcome.quality = max(found, key=levels.index, default="")
            red = [name for name, said in said_of.items() if said["level"] == "red"]
            if red and not outcome.doubt:
                outcome.speedup = None
                outcome.doubt = f"Unreliable: {' and '.join(red)}, so this is no result."

    def finish(self) -> Path:
        self.status = "finished"
        return self.save()

    def save(self) -> Path:
        """Write ``compare.json`` as far as the comparison has come."""
        document = {
            "kind": self.kind,
            "status": self.status,
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
            "differences": self.differences.to_dict("records"),
            "mixed_causes": self.mixed,
            "per": self.per,
            "quality": self.quality,
            "rounds": [run.to_dict() for run in self.runs],
            "notices": self.notices,
            "written": _now(),
            **self._extra(),
        }
        path = self.folder / COMPARISON_FILE
        # numpy's scalars as JSON has them
        write_json(path, json.loads(json.dumps(document, default=lambda value: value.item())))
        return path

    def _extra(self) -> dict[str, Any]:
        """What this kind of comparison has besides."""
        return {}


def earlier_try(folder: Path) -> dict[str, Any]:
    """``compare.json`` of an earlier try, with what is said of going on; empty if there is none.

    Raises:
        InputError: it cannot be read.
    """
    if not (folder / COMPARISON_FILE).is_file():
        return {}
    document: dict[str, Any] = read_json(folder / COMPARISON_FILE)
    done = len(document.get("rounds") or [])
    stopped = "This comparison was stopped"
    runs = f" ({done} runs in turns)" if done else ""
    sentences = [f"{stopped} and gone on with; what had finished was not run again{runs}."]
    now, before = versions(), document.get("versions") or {}
    changed = [name for name in before if now.get(name) != before[name]]
    if changed and done:
        other = f"{changed[0]} {before[changed[0]]}, now {now.get(changed[0])}"
        sentences.append(f"Rounds of one comparison were made with other versions: {other}.")
    notices = document.get("notices") or []
    kept = [text for text in notices if text not in sentences and not text.startswith(stopped)]
    return document | {"notices": kept + sentences}


def whole_profile(folder: Path, name: str) -> Path | None:
    """The folder of a profile that an earlier try finished: ``NAME``, ``NAME-2``, ...; or None."""
    finished = sorted(folder.glob(f"{name}*/profile/profile.json"))
    return finished[0].parents[1] if finished else None


BASELINE = "baseline"
NOT_YET = "not yet"
"""Why there is no prediction before :meth:`Comparison.predict` was called."""
SAME_TRAINING = ("training.batches", "training.log_every")
"""Leaves that may differ between a profile that is given and the run it stands for."""


class ChangeComparison(Comparison):
    """The parameters as they are against the same with a change."""

    kind = "change"

    def __init__(
        self,
        parameters: Parameters,
        folder: Path,
        change: Mapping[str, Any],
        *,
        profile_run: str = "",
        steps: bool = False,
        rounds: int = ROUNDS,
        iterations: int = 0,
    ) -> None:
        """
        Args:
            change: leaf to value; empty: what the first finding of the baseline's profile says.
            profile_run: a finished profile of the baseline; empty: it is measured.
            steps: measure the change leaf by leaf, each on top of the ones before.
            iterations: counted in each run of a round; 0 is ``profiling.iterations``.

        Raises:
            InputError: the change cannot work, or the profile is of other parameters.
        """
        super().__init__(folder)
        if rounds < 1 or iterations < 0 or iterations == 1:
            raise InputError(
                f"rounds is {rounds} and iterations {iterations}, expected at least 1 round and "
                "2 iterations (or 0 for profiling.iterations)"
            )
        self.parameters = parameters
        self.earlier = earlier_try(folder)
        self.change = flat_change(change or self.earlier.get("change") or {})
        self.stepwise = steps
        self.predicted_at = self.measured_from = ""
        self.rounds = rounds
        self.iterations = iterations or max(parameters.profiling.iterations, 2)
        self.sentence = (
            "No change was given, so the first finding of the baseline's profile that names one is "
            "tried."
        )
        if self.change:
            self._plan()
            how = "leaf by leaf, each on top of the ones before" if steps else "in one go"
            self.sentence = (
                f"**{in_markdown(parameters.title)}**\n\nCompared: the parameters as they are, "
                f"and the same with `{change_text(self.change)}`, {how}."
            )
        if profile_run:
            profile = open_recording(Path(profile_run).expanduser().absolute()).profile
            _require_same(parameters, profile, profile_run)
            self.profiles[BASELINE] = profile

    def _plan(self) -> None:
        changed = apply_change(self.parameters, self.change)
        if not difference(self.parameters, changed):
            raise InputError(
                f"change: {change_text(self.change)} is what the parameters say already"
            )
        steps = change_steps(self.parameters, self.change) if self.stepwise else [self.change]
        # a setting's name names files, so no odd characters
        names = ["change"] if len(steps) == 1 else [f"step-{n}" for n in range(1, len(steps) + 1)]
        self.outcomes = [
            Outcome(BASELINE, name, dict(step), None, NOT_YET, None)
            for name, step in zip(names, steps, strict=True)
        ]

    def profile_baseline(self, progress: ProgressCallback | None = None) -> pd.DataFrame:
        self._note(*self.earlier.get("notices", []))
        if BASELINE not in self.profiles:
            self.profiles[BASELINE] = self._profile("baseline", self.parameters, progress)
        if not self.change:
            self._take_finding(self.profiles[BASELINE])
        self.save()
        return super().profile_baseline()

    def _take_finding(self, profile: Profile) -> None:
        """Plan the change that the first finding with one advises."""
        scaled = at_reference(profile)
        finding = next((f for f in findings(scaled, attribute(scaled)) if f.change), None)
        if finding is None:
            self._note(
                "No finding of the baseline names a change: give one by `-p change.LEAF=VALUE`."
            )
            return
        self.change = flat_change(finding.change)
        self._plan()
        self._note(f"A finding of the baseline advises this change: “{finding.title}”.")

    def _profile(
        self, name: str, parameters: Parameters, progress: ProgressCallback | None
    ) -> Profile:
        """Measure a profile in a folder of that name, or take the one an earlier try made."""
        finished = whole_profile(self.folder, name)
        if finished is not None:
            return open_recording(finished).profile
        return measure(parameters, fresh_path(self.folder / name), progress=progress)

    def predict(self) -> pd.DataFrame:
        # predicted before the first round, and so it stays
        if self.predicted_at and all(outcome.reason != NOT_YET for outcome in self.outcomes):
            return super().predict()
        earlier = {str(row["change"]): row for row in self.earlier.get("outcomes", [])}
        self.predicted_at = self.earlier.get("predicted_at") or ""
        if not self.predicted_at or any(str(o.change) not in earlier for o in self.outcomes):
            earlier, self.predicted_at = {}, _now()
        for outcome in self.outcomes:
            row = earlier.get(str(outcome.change))
            if row is not None:
                made = row["predicted"]
                outcome.predicted = Prediction.from_dict(made) if made else None
                outcome.reason = row["not_predicted"]
                continue
            try:
                outcome.predicted, outcome.reason = self._predicted(outcome.change), ""
            except InputError as error:
                outcome.reason = str(error)
        self.save()
        return super().predict()

    def _predicted(self, change: Mapping[str, Any]) -> Prediction:
        profile = self.profiles[BASELINE]
        try:
            return with_timed(prediction(profile, change), profile)
        except InputError:
            if not self.parameters.profiling.probes:
                raise
            return predict_change(self.parameters, profile, change)

    def measure(self, progress: ProgressCallback | None = None) -> pd.DataFrame:
        if not self.outcomes:
            return super().measure()
        settings = {BASELINE: self.parameters}
        settings |= {o.after: apply_change(self.parameters, o.change) for o in self.outcomes}
        self.measured_from = self.earlier.get("measured_from") or _now()
        with only_process(self.folder / "rounds"):
            self.save()
            run_in_turns(
                settings,
                self.folder / "rounds",
                rounds=self.rounds,
                iterations=self.iterations,
                progress=progress,
                after_round=self._judge,
            )
        return super().measure()

    def _judge(self, runs: Sequence[TimedRun]) -> None:
        self.runs = list(runs)
        self.times = in_rounds.round_table(runs)
        for outcome in self.outcomes:
            changed = apply_change(self.parameters, outcome.change)
            # time is compared per sample
            samples = changed.training.batch_size / self.parameters.training.batch_size
            outcome.speedup = in_rounds.gain(self.times, BASELINE, outcome.after, samples)
            pair = in_rounds.pair_of_times_ms(self.times, BASELINE, outcome.after)
            outcome.before_ms, outcome.after_ms = pair
            outcome.parts = in_rounds.compare_settings(self.times, BASELINE, outcome.after)
            outcome.losses = in_rounds.compare_losses(runs, BASELINE, outcome.after)
        self.save()

    def profile_changed(self, progress: ProgressCallback | None = None) -> pd.DataFrame:
        if not self.outcomes:
            return super().profile_changed()
        last = self.outcomes[-1]
        changed = apply_change(self.parameters, last.change)
        self.profiles[last.after] = self._profile("changed", changed, progress)
        self.profiles = all_at_reference(self.profiles)
        self._judge_runs()
        if last.parts is not None and last.parts.empty:
            # no parts by the clock (a GPU): those of the two profiles
            first, other = self.profiles[BASELINE], self.profiles[last.after]
            last.parts = compare_parts(part_estimates(first), part_estimates(other))
            self._note(
                "Parts are compared by the two profiles, which were not taken in turns: a GPU's "
                "work is not bound to the host's clock."
            )
        self.save()
        return super().profile_changed()

    def _extra(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "parameters": self.parameters.to_sections(),
            "predicted_at": self.predicted_at or None,
            "measured_from": self.measured_from or None,
            "settings": {"rounds": self.rounds, "iterations": self.iterations},
            "versions": versions(),
        }


@contextlib.contextmanager
def round_bar(comparison: Comparison) -> Iterator[Callable[[Progress], None]]:
    """Live progress of the runs in turns: the ``progress`` of :meth:`Comparison.measure`."""
    total = 0
    if isinstance(comparison, ChangeComparison) and comparison.outcomes:
        total = comparison.rounds * (1 + len(comparison.outcomes))
    seen: list[str] = []
    with Bar("rounds", "run", total, shown=total > 0) as bar:

        def show(progress: Progress) -> None:
            if progress.stage not in seen:
                seen.append(progress.stage)
            bar.show(len(seen) - 1, f"{progress.elapsed_s:.0f} s", progress.stage)

        yield show
        bar.fill()


def _now() -> str:
    return datetime.now().astimezone().isoformat()


def _require_same(parameters: Parameters, profile: Profile, profile_run: str) -> None:
    sections = profile.meta.get("parameters")
    if not sections:
        raise InputError(f"profile_run {profile_run} does not say with which parameters it ran")
    measured = parameters_from_sections(sections)
    for leaf, value in difference(parameters, measured).items():
        if leaf in SAME_TRAINING:
            continue
        section, _, name = leaf.partition(".")
        raise InputError(
            f"profile_run {profile_run} was measured with {leaf} {value!r}, but the parameters "
            f"say {getattr(getattr(parameters, section), name)!r}"
        )


class RunsComparison(Comparison):
    """Finished runs, the first of which the others are held against."""

    kind = "runs"

    def __init__(self, folder: Path, runs: Sequence[str]) -> None:
        """
        Args:
            runs: run folders of profile (or recordings, or HPCToolkit databases); a sweep's
                folder stands for all its points.

        Raises:
            InputError: a folder holds no profile, or there are fewer than two.
        """
        super().__init__(folder)
        places: list[tuple[str, Path]] = []
        for text in runs:
            place = Path(text).expanduser().absolute()
            swept = (place / SWEEP).is_file()
            places += swept_runs(place, "profile").items() if swept else [("", place)]
        if len(places) < 2:
            raise InputError(f"runs names {len(places)} profile(s), expected at least two")
        labels = run_labels(places)
        self.places = dict(zip(labels, (place for _, place in places), strict=True))
        opened = {label: open_recording(place) for label, place in self.places.items()}
        self.profiles = {label: recording.profile for label, recording in opened.items()}
        self._take_alike()
        if self.per == "per iteration":
            self.profiles = all_at_reference(self.profiles)
        without_host = [name for name, p in self.profiles.items() if not p.has("cpu_time_ms")]
        for label in without_host:
            self._note(
                f"{label} has no times of the host: what it did while the GPU was idle counts as "
                "other."
            )
        self.sentence = "These are finished runs; the others are compared with the first.\n"
        for label, place in self.places.items():
            self.sentence += f"\n- **{label}**: `{place}` {opened[label].sentence}".rstrip(" ")
        before = self.profiles[labels[0]]
        parts, whole = part_estimates(before), step_estimate(before)
        for label in labels[1:]:
            profile = self.profiles[label]
            other = step_estimate(profile)
            samples = _samples(profile) / _samples(before)
            doubt = self._doubt(before, profile)
            if not doubt and (apart := work_against_step(before, profile)):
                self.notices.append(apart)
                self.apart = True
            self.outcomes.append(
                Outcome(
                    labels[0],
                    label,
                    change={},
                    predicted=None,
                    reason="finished runs are compared",
                    speedup=None if doubt else ratio_interval(whole, other, samples),
                    doubt=doubt,
                    before_ms=whole[0],
                    after_ms=other[0],
                    parts=compare_parts(parts, part_estimates(profile)),
                )
            )
        self._judge_runs()

    def _take_alike(self) -> None:
        """Compare whole recordings where one of them has no iterations."""
        lacking = [label for label, profile in self.profiles.items() if not has_iterations(profile)]
        if not lacking:
            return
        self.per = "in the whole recording"
        profiles = self.profiles.values()
        on_gpu = any(profile.threads["kind"].eq("gpu_stream").any() for profile in profiles)
        if len(lacking) < len(profiles) or on_gpu:
            self.profiles = {label: as_one(profile) for label, profile in self.profiles.items()}
        self.notices.append(
            f"No iterations are marked in {' and '.join(lacking)}: all times are of whole "
            "recordings, and it is not known whether they contain the same work."
        )

    def _doubt(self, before: Profile, after: Profile) -> str:
        """Why the times of two recordings are no speed-up of one program; "" where they are."""
        if self.per != "per iteration":
            return "Whole recordings are compared, so this is no speed-up."
        if all(profile.meta.get("parameters") for profile in (before, after)):
            return ""
        shares = likeness(before, after)
        if shares is None:
            return (
                "Nothing in the recordings shows whether they are of one model and batch, so this "
                "is no speed-up."
            )
        by_name, with_shapes = shares
        if by_name < SAME_PROGRAM:
            return (
                f"They have {by_name:.0%} of their operator calls in common: they are of different "
                "programs, so this is no speed-up."
            )
        if with_shapes < SAME_PROGRAM:
            self.notices.append(
                f"{with_shapes:.0%} of the operator calls are of the same input shapes: batch or "
                "model differ, and times are per iteration, not per sample."
            )
        return ""

    def _extra(self) -> dict[str, Any]:
        return {"runs": {label: str(place) for label, place in self.places.items()}}


def comparison_of(
    parameters: Parameters,
    folder: Path,
    *,
    change: Mapping[str, Any],
    against: str = "",
    runs: Sequence[str] = (),
    **measured: Any,
) -> Comparison:
    """The comparison that a notebook's parameters ask for.

    Args:
        against: a parameters file; what it sets otherwise is the change.
        measured: how a change is measured, see :class:`ChangeComparison`.

    Raises:
        InputError: the parameters contradict each other, or cannot work.
    """
    if runs and (change or against):
        raise InputError(
            "runs compares finished runs, change and against run new ones; give one of them"
        )
    if runs:
        return RunsComparison(folder, [str(run) for run in runs])
    wanted = dict(change)
    if against:
        wanted = difference(parameters, load_parameters(against)) | flat_change(change)
        for leaf in SAME_TRAINING:
            wanted.pop(leaf, None)
        if not wanted:
            raise InputError(f"against {against} sets nothing otherwise than the parameters")
    return ChangeComparison(parameters, folder, wanted, **measured)


def run_labels(places: Sequence[tuple[str, Path]]) -> list[str]:
    """A short, distinct name for each run: its folder's, or as much of the path as it takes."""
    names = [label or place.name for label, place in places]
    for number, (label, place) in enumerate(places):
        if names.count(names[number]) > 1 and not label:
            names[number] = f"{place.parent.name}/{place.name}"
    return [
        name if names.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(names, 1)
    ]


def _samples(profile: Profile) -> float:
    """Samples of an iteration; 1 where the profile does not say."""
    training = (profile.meta.get("parameters") or {}).get("training") or {}
    return float(training.get("batch_size") or 1)
