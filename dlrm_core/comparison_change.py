"""A change against its baseline: profiled, predicted, measured in turns, profiled, judged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dlrm_core.analysis import rounds as in_rounds
from dlrm_core.analysis.attribution import attribute
from dlrm_core.analysis.compare import compare_parts, part_estimates
from dlrm_core.analysis.findings import findings
from dlrm_core.analysis.whatif import Prediction, predict, predict_change
from dlrm_core.change_options import (
    apply_change,
    change_steps,
    change_text,
    difference,
    flat_change,
)
from dlrm_core.compare_runs import ROUNDS, TimedRun, run_in_turns
from dlrm_core.comparison_base import Comparison, Outcome
from dlrm_core.comparison_earlier import Earlier, whole_profile
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.files import only_process
from dlrm_core.profiling.hpctoolkit_process import Progress, ProgressCallback, fresh_path
from dlrm_core.profiling.measure import measure, saved_profile
from dlrm_core.profiling.profile import Profile
from dlrm_core.progress import Bar
from dlrm_core.run_folder import versions

BASELINE = "baseline"
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
        self.earlier = Earlier.of(folder)
        self.change = flat_change(change or self.earlier.change)
        self.profile_run = profile_run
        self.stepwise = steps
        self.predicted_at = self.measured_from = ""
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
        self.notices += self.earlier.notices
        if BASELINE not in self.profiles:
            self.profiles[BASELINE] = self._profile("baseline", self.parameters, progress)
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

    def _profile(
        self, name: str, parameters: Parameters, progress: ProgressCallback | None
    ) -> Profile:
        """Measure a profile in a folder of that name, or take the one an earlier try made."""
        made = whole_profile(self.folder, name)
        if made is not None:
            return saved_profile(made)
        return measure(parameters, fresh_path(self.folder / name), progress=progress)

    def predict(self) -> None:
        if self.earlier.restore(self.outcomes):
            # foretold before the first round, and so it stays
            self.predicted_at = self.earlier.predicted_at
            self.save()
            return
        for outcome in self.outcomes:
            try:
                outcome.predicted, outcome.reason = self._predicted(outcome.change), ""
            except InputError as error:
                outcome.reason = str(error)
        self.predicted_at = _now()
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
        self.measured_from = self.earlier.measured_from or _now()
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
        self.profiles[last.after] = self._profile("changed", changed, progress)
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


def _setting_name(steps: Sequence[Mapping[str, Any]], number: int) -> str:
    """Name of a setting: ``change``, or ``step 2``; names files, so no odd characters."""
    return "change" if len(steps) == 1 else f"step-{number + 1}"


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
