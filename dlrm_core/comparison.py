"""One comparison from beginning to end: what the ``compare`` notebook calls.

A *change* is profiled, predicted, measured in turns with the baseline, profiled, and judged;
*finished runs* are loaded and judged. Either way ``compare.json`` holds everything, and is
written again after every stage, so that a comparison that is killed has lost no round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_core.analysis.compare import (
    compare_parts,
    part_estimates,
    ratio_interval,
    step_estimate,
)
from dlrm_core.change_options import difference, flat_change
from dlrm_core.compare_runs import ROUNDS
from dlrm_core.comparison_base import Comparison, Outcome
from dlrm_core.comparison_change import SAME_TRAINING, ChangeComparison, round_bar
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError
from dlrm_core.profiling.measure import saved_profile
from dlrm_core.profiling.profile import Profile
from dlrm_core.sweep import RECORD as SWEEP_RECORD
from dlrm_core.sweep import Sweep

__all__ = [
    "ChangeComparison",
    "Comparison",
    "Outcome",
    "RunsComparison",
    "round_bar",
    "start",
]


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


def _samples(profile: Profile) -> float:
    training = (profile.meta.get("parameters") or {}).get("training") or {}
    return float(training.get("batch_size") or 1)
