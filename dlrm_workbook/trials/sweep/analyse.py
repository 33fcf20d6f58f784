"""What a sweep found: a row a point, which findings come and go, how the parts grow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.ensemble import (
    WHOLE_STEP,
    fitted_curves,
    law_table,
    part_table,
    settings_table,
    swept_runs,
)
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.quality import quality, quality_of_runs, quality_of_times
from dlrm_workbook.analysis.reference import all_at_reference, unprofiled_ms
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.trials.sweep.plan import Sweep, describe_failures

POINT_COLUMNS = [
    *("number", "label", "status", "ms_per_iteration", "samples_per_second"),
    *("top", "top_share", "speedup", "quality"),
]


class SweepSummary:
    """A sweep's results, read from its folder.

    Attributes:
        points: a row a point; ``dlrm help columns`` describes its columns.
        quality: ``level`` and ``sentence`` of all points together, see
            :func:`~.analysis.quality.quality_of_runs`; empty without times.
        times: time of each part at each point, see :func:`~.analysis.ensemble.part_table`.
        curves: leaf to laws of the parts, fitted to reliable points; laws: the same as a table.
        findings: index the rule, a column a point (its number), share of the step or NaN.
    """

    def __init__(self, folder: Path | str) -> None:
        """
        Raises:
            InputError: the folder holds no sweep, or a profile in it cannot be read.
        """
        self.sweep = Sweep.open(Path(folder))
        self.failures = describe_failures(self.sweep)
        runs = swept_runs(self.sweep.folder, "profile")
        opened = {label: open_recording(place).profile for label, place in runs.items()}
        self.profiles = all_at_reference(opened)
        trained = swept_runs(self.sweep.folder, "train").items()
        self.results = {label: _result(folder) for label, folder in trained}
        qualities = {
            label: quality_of_times(result["iteration_ms"])
            for label, result in self.results.items()
            if result.get("iteration_ms")
        }
        found: dict[str, list[Finding]] = {}
        for label, profile in self.profiles.items():
            parts = attribute(profile)
            found[label] = findings(profile, parts)
            qualities[label] = quality(profile, parts, found[label])
        self.quality = quality_of_runs(qualities) if qualities else {}
        levels = {label: said["level"] for label, said in qualities.items()}
        self.points = pd.DataFrame(self._rows(levels), columns=POINT_COLUMNS)
        speed = self.points["samples_per_second"].where(self.points["quality"] != "red")
        self.points.insert(5, "of_best", speed / speed.max())
        self.times = part_table(self.profiles) if self.profiles else self._whole_times()
        sections = {point.label: point.parameters.to_sections() for point in self.sweep.points}
        self.times.attrs["quality"] = levels
        reliable = self.times[self.times["run"].map(levels).ne("red")]
        settings = settings_table({label: sections[label] for label in reliable["run"].unique()})
        self.curves = fitted_curves(reliable, settings)
        self.laws = law_table(self.curves)
        numbers = dict(zip(self.points["label"], self.points["number"], strict=True))
        columns = {
            numbers[label]: {f.id.replace("_", " "): f.share_of_step for f in fired}
            for label, fired in found.items()
        }
        table = pd.DataFrame(columns, dtype=float)
        largest = table.max(axis=1).sort_values(ascending=False)
        self.findings = table.reindex(largest.index)

    def _rows(self, levels: dict[str, str]) -> list[tuple[Any, ...]]:
        rows = []
        for point, row in zip(self.sweep.points, self.sweep.rows, strict=True):
            folders = {name: self.sweep.folder / place for name, place in row["folders"].items()}
            profile = self.profiles.get(point.label)
            ms = self.results.get(point.label, {}).get("ms_per_iteration")
            top, share, gain = "", math.nan, math.nan
            if profile is not None:
                ms = unprofiled_ms(profile) or ms
                top, share = _top(profile)
            if "compare" in folders:
                compared_ms, gain = _compared(folders["compare"])
                # parts and findings are the profile's, and so is the step that they add up to
                ms = compared_ms if profile is None else ms
            speed = 1e3 * point.parameters.training.batch_size / ms if ms else math.nan
            measured = (ms or math.nan, speed, top, share, gain, levels.get(point.label, ""))
            rows.append((point.number, point.label, row["status"], *measured))
        return rows

    def _whole_times(self) -> pd.DataFrame:
        """Time of the whole step where points were trained, not profiled."""
        rows = [
            (label, WHOLE_STEP, "", result["ms_per_iteration"], math.nan)
            for label, result in self.results.items()
            if result.get("ms_per_iteration")
        ]
        return pd.DataFrame(rows, columns=["run", "component", "phase", "time_ms", "se_ms"])

    def finding_table(self) -> pd.DataFrame:
        """Which finding is there at which point; ``dlrm help columns`` describes the columns."""
        table = self.findings.add_prefix("at ").rename_axis("finding").reset_index()
        there = self.findings.notna()
        if len(table):
            table["along_the_grid"] = [_appearance(row) for row in there.to_numpy().tolist()]
        return table

    def save(self) -> Path:
        """Write ``summary.json`` beside ``sweep.json``; its path."""
        path = self.sweep.folder / "summary.json"
        write_json(
            path,
            {
                "quality": self.quality,
                "points": self.points.to_dict("records"),
                "times": self.times.to_dict("records"),
                "laws": self.laws.to_dict("records"),
                "findings": {
                    str(title): {str(k): v for k, v in shares.items() if not math.isnan(v)}
                    for title, shares in self.findings.to_dict("index").items()
                },
            },
        )
        return path


def newest_sweep(output_root: Path) -> Path:
    """The sweep that was begun last.

    Raises:
        InputError: there is none.
    """
    sweeps = sorted(output_root.glob("*/*/sweep.json"))
    if not sweeps:
        raise InputError(
            f"no sweep was found in {output_root}; give one with -p sweep_folder=FOLDER, or run "
            "one: dlrm run profile -f FILE with a sweep section"
        )
    return sweeps[-1].parent


def _appearance(there: list[bool]) -> str:
    if all(there):
        return "everywhere"
    if not there[0] and there[-1]:
        return "appears"
    return "disappears" if there[0] and not there[-1] else "at some points"


def _top(profile: Profile) -> tuple[str, float]:
    """The component with the most time, and its share of the step."""
    shares = attribute(profile).groupby("component")["share"].sum()
    return (str(shares.idxmax()), float(shares.max())) if len(shares) else ("", math.nan)


def _result(folder: Path) -> dict[str, Any]:
    """What a training says of itself; empty where it says nothing."""
    file = folder / "result.json"
    return dict(read_json(file)) if file.is_file() else {}


def _compared(folder: Path) -> tuple[float | None, float]:
    """(baseline's ms an iteration, measured speed-up of the last outcome)."""
    outcomes = read_json(folder / "compare.json").get("outcomes") or [{}]
    measured = outcomes[-1].get("measured")
    if not measured:
        return None, math.nan
    return float(measured["before_ms"]), float(measured["speedup"]["mid"])
