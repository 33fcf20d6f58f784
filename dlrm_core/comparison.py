"""One comparison from beginning to end: what the ``compare`` notebook calls.

A *change* is profiled, predicted, measured in turns with the baseline, profiled, and judged;
*finished runs* are loaded and judged. Either way ``compare.json`` holds everything, and is
written again after every stage, so that a comparison that is killed has lost no round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.analysis import rounds as in_rounds
from dlrm_core.analysis.attribution import attribute
from dlrm_core.analysis.compare import (
    circumstances,
    compare_parts,
    differing,
    mixed_causes,
    part_estimates,
    ratio_interval,
    step_estimate,
)
from dlrm_core.analysis.findings import findings
from dlrm_core.analysis.intervals import Interval
from dlrm_core.analysis.whatif import Prediction, predict, predict_change
from dlrm_core.change_options import (
    apply_change,
    change_steps,
    change_text,
    difference,
    flat_change,
)
from dlrm_core.compare_runs import ROUNDS, TimedRun, run_in_turns
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.files import write_json
from dlrm_core.profiling.hpctoolkit_process import Progress, ProgressCallback
from dlrm_core.profiling.measure import measure, saved_profile
from dlrm_core.profiling.profile import Profile
from dlrm_core.sweep import RECORD as SWEEP_RECORD
from dlrm_core.sweep import Sweep

BASELINE = "baseline"
SAME_TRAINING = ("training.batches", "training.log_every")
"""Leaves that may differ between a profile that is given and the run it stands for."""


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
    """As :func:`dlrm_core.analysis.compare.compare_parts` gives."""
    losses: dict[str, Any] | None = None

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
        foretold = self.predicted.speedup
        return bool(foretold["low"] <= self.speedup.mid <= foretold["high"])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "before": self.before,
            "after": self.after,
            "change": self.change,
            "predicted": self.predicted.to_dict() if self.predicted else None,
            "not_predicted": self.reason,
            "measured": None
            if self.speedup is None
            else {
                "before_ms": self.before_ms,
                "after_ms": self.after_ms,
                "speedup": self.speedup.to_dict(),
            },
            "error": self.error,
            "in_predicted_range": self.in_range,
            "parts": [] if self.parts is None else self.parts.to_dict("records"),
            "losses": self.losses,
        }


class Comparison:
    """What both kinds share: profiles by name, outcomes, ``compare.json``."""

    kind = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profiles: dict[str, Profile] = {}
        self.outcomes: list[Outcome] = []
        self.runs: list[TimedRun] = []
        self.times = in_rounds.round_table([])
        self.notices: list[str] = []
        self.status = "running"

    @property
    def sentence(self) -> str:
        """What is compared, for the top of the page (Markdown)."""
        raise NotImplementedError

    def profile_baseline(self, progress: ProgressCallback | None = None) -> None:
        """Measure or load what comes first."""

    def predict(self) -> None:
        """Foretell the outcomes, before anything of the change is run."""

    def measure(self, progress: ProgressCallback | None = None) -> None:
        """Run the settings in turns."""

    def profile_changed(self, progress: ProgressCallback | None = None) -> None:
        """Measure what comes last."""

    @property
    def differences(self) -> pd.DataFrame:
        """What is not the same in all profiles, see :func:`~.analysis.compare.differing`."""
        return differing([circumstances(profile) for profile in self.profiles.values()])

    @property
    def mixed(self) -> str:
        """A warning where more than parameters differ; else empty."""
        return mixed_causes(self.differences)

    def finish(self) -> Path:
        """Write the final ``compare.json``; its path."""
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
            "rounds": [run.to_dict() for run in self.runs],
            "notices": self.notices,
            "written": datetime.now().astimezone().isoformat(),
            **self._extra(),
        }
        path = self.folder / "compare.json"
        # default=str: numpy's scalars know how to print themselves
        write_json(path, json.loads(json.dumps(document, default=_scalar)))
        return path

    def _extra(self) -> dict[str, Any]:
        return {}


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
        self.change = flat_change(change)
        self.profile_run = profile_run
        self.stepwise = steps
        self.rounds = rounds
        self.iterations = iterations or max(parameters.profiling.iterations, 2)
        if self.change:
            self._plan()
        if profile_run:
            profile = saved_profile(Path(profile_run).expanduser().absolute())
            _require_same(parameters, profile, profile_run)
            self.profiles[BASELINE] = profile

    def _plan(self) -> None:
        changed = apply_change(self.parameters, self.change)
        if not difference(self.parameters, changed):
            raise InputError(
                f"change: {change_text(self.change)} is what the parameters say already"
            )
        made = change_steps(self.parameters, self.change) if self.stepwise else [self.change]
        self.outcomes = [
            Outcome(BASELINE, _setting_name(made, number), dict(step), None, "not yet", None)
            for number, step in enumerate(made)
        ]

    @property
    def sentence(self) -> str:
        if not self.change:
            return (
                "No change was given, so the first finding of the baseline's profile that names "
                "one is tried."
            )
        how = "leaf by leaf, each on top of the ones before" if self.stepwise else "in one go"
        return (
            f"**{self.parameters.title}**\n\nCompared: the parameters as they are, and the same "
            f"with `{change_text(self.change)}`, {how}."
        )

    def profile_baseline(self, progress: ProgressCallback | None = None) -> None:
        if BASELINE not in self.profiles:
            self.profiles[BASELINE] = measure(
                self.parameters, self.folder / "baseline", progress=progress
            )
        if not self.change:
            self._take_finding()
        self.save()

    def _take_finding(self) -> None:
        profile = self.profiles[BASELINE]
        for finding in findings(profile, attribute(profile)):
            if finding.change:
                self.change = flat_change(finding.change)
                self._plan()
                self.notices.append(
                    f"No change was given: tried is what the finding “{finding.title}” says, "
                    f"{change_text(self.change)}."
                )
                return
        self.notices.append("No change was given, and no finding of the baseline names one.")

    def predict(self) -> None:
        for outcome in self.outcomes:
            try:
                outcome.predicted, outcome.reason = self._predicted(outcome.change), ""
            except InputError as error:
                outcome.reason = str(error)
        self.save()

    def _predicted(self, change: Mapping[str, Any]) -> Prediction:
        profile = self.profiles[BASELINE]
        try:
            return predict(profile, change)
        except InputError:
            if not getattr(self.parameters.profiling, "probes", True):
                raise
            return predict_change(self.parameters, profile, change)

    def measure(self, progress: ProgressCallback | None = None) -> None:
        if not self.outcomes:
            return
        settings = {BASELINE: self.parameters} | {
            outcome.after: apply_change(self.parameters, outcome.change)
            for outcome in self.outcomes
        }
        run_in_turns(
            settings,
            self.folder / "rounds",
            rounds=self.rounds,
            iterations=self.iterations,
            progress=progress,
            after_round=self._judge,
        )

    def _judge(self, runs: Sequence[TimedRun]) -> None:
        """Take in the rounds so far."""
        self.runs = list(runs)
        self.times = in_rounds.round_table(runs)
        for outcome in self.outcomes:
            wide = in_rounds.whole_rounds(self.times, BASELINE, outcome.after)
            samples = self.samples_ratio(outcome)
            outcome.speedup = in_rounds.speedup(self.times, BASELINE, outcome.after, samples)
            outcome.before_ms = float(wide["before"].median())
            outcome.after_ms = float(wide["after"].median())
            outcome.parts = in_rounds.compare_settings(self.times, BASELINE, outcome.after)
            outcome.losses = in_rounds.compare_losses(runs, BASELINE, outcome.after)
        self.save()

    def samples_ratio(self, outcome: Outcome) -> float:
        """Samples of an iteration after the change over those before."""
        after = apply_change(self.parameters, outcome.change).training.batch_size
        return after / self.parameters.training.batch_size

    def profile_changed(self, progress: ProgressCallback | None = None) -> None:
        if not self.outcomes:
            return
        last = self.outcomes[-1]
        changed = apply_change(self.parameters, last.change)
        self.profiles[last.after] = measure(changed, self.folder / "changed", progress=progress)
        if last.parts is not None and last.parts.empty:
            # no parts by the clock (a GPU): those of the two profiles
            first, other = self.profiles[BASELINE], self.profiles[last.after]
            last.parts = compare_parts(part_estimates(first), part_estimates(other))
            self.notices.append(
                "Parts are compared by the two profiles, which were not taken in turns: a GPU's "
                "work is not bound to the host's clock."
            )
        self.save()

    def _extra(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "parameters": self.parameters.to_sections(),
            "settings": {"rounds": self.rounds, "iterations": self.iterations},
        }


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
        places = [place for text in runs for place in _places(text)]
        if len(places) < 2:
            raise InputError(f"runs names {len(places)} profile(s), expected at least two")
        labels = run_labels(places)
        self.places = dict(zip(labels, (place for _, place in places), strict=True))
        self.profiles = {
            label: saved_profile(place) for label, (_, place) in zip(labels, places, strict=True)
        }
        self._judge()

    def _judge(self) -> None:
        first = next(iter(self.profiles))
        before = self.profiles[first]
        parts = part_estimates(before)
        whole = step_estimate(before)
        for label, profile in list(self.profiles.items())[1:]:
            other = step_estimate(profile)
            outcome = Outcome(first, label, {}, None, "finished runs are compared", None)
            outcome.speedup = ratio_interval(whole, other, _samples(profile) / _samples(before))
            outcome.before_ms, outcome.after_ms = whole[0], other[0]
            outcome.parts = compare_parts(parts, part_estimates(profile))
            self.outcomes.append(outcome)

    @property
    def sentence(self) -> str:
        lines = [f"- **{label}**: `{place}`" for label, place in self.places.items()]
        return "\n".join(
            ["Compared are finished runs; the others are held against the first.", "", *lines]
        )

    def _extra(self) -> dict[str, Any]:
        return {"runs": {label: str(place) for label, place in self.places.items()}}


class RoundBar:
    """Live progress of the runs in turns: one bar over all of them.

    Use as the ``progress`` of :meth:`Comparison.measure`, in a ``with``.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._total = 0
        if isinstance(comparison, ChangeComparison) and comparison.outcomes:
            self._total = comparison.rounds * (1 + len(comparison.outcomes))
        self._seen: list[str] = []
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        """Show which run is going on, and how far it is."""
        if progress.stage not in self._seen:
            self._seen.append(progress.stage)
            self._bar.n = len(self._seen) - 1
            self._bar.set_description_str(progress.stage, refresh=False)
        self._bar.set_postfix_str(f"{progress.elapsed_s:.0f} s", refresh=False)
        self._bar.refresh()

    def __enter__(self) -> RoundBar:
        from tqdm.auto import tqdm

        if self._total:
            self._bar = tqdm(total=self._total, desc="rounds", unit="run")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if self._bar is not None:
            self._bar.n = self._total if kind is None else self._bar.n
            self._bar.close()


def start(
    parameters: Parameters,
    folder: Path,
    *,
    change: Mapping[str, Any],
    against: str = "",
    runs: Sequence[str] = (),
    profile_run: str = "",
    steps: bool = False,
    rounds: int = ROUNDS,
    iterations: int = 0,
) -> Comparison:
    """The comparison that a notebook's parameters ask for.

    Args:
        against: a parameters file; what it sets otherwise is the change.

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
            raise InputError(f"against {against}: sets nothing otherwise than the parameters")
    return ChangeComparison(
        parameters,
        folder,
        wanted,
        profile_run=profile_run,
        steps=steps,
        rounds=rounds,
        iterations=iterations,
    )


def _places(text: str) -> list[tuple[str, Path]]:
    """(label, folder) of each profile that a folder stands for."""
    folder = Path(text).expanduser().absolute()
    if (folder / SWEEP_RECORD).is_file():
        return list(Sweep.open(folder).run_folders("profile").items())
    return [("", folder)]


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


def _setting_name(steps: Sequence[Mapping[str, Any]], number: int) -> str:
    """Name of a setting: ``change``, or ``step 2``; names files, so no odd characters."""
    return "change" if len(steps) == 1 else f"step-{number + 1}"


def _samples(profile: Profile) -> float:
    training = (profile.meta.get("parameters") or {}).get("training") or {}
    return float(training.get("batch_size") or 1)


def _require_same(parameters: Parameters, profile: Profile, profile_run: str) -> None:
    sections = profile.meta.get("parameters")
    if not sections:
        raise InputError(f"profile_run {profile_run}: does not say with which parameters it ran")
    measured = parameters_from_sections(sections)
    for leaf, value in difference(parameters, measured).items():
        if leaf in SAME_TRAINING:
            continue
        section, _, name = leaf.partition(".")
        raise InputError(
            f"profile_run {profile_run}: was measured with {leaf} {value!r}, but the parameters "
            f"say {getattr(getattr(parameters, section), name)!r}"
        )


def _scalar(value: Any) -> Any:
    """JSON for numpy's scalars."""
    return value.item() if hasattr(value, "item") else str(value)
