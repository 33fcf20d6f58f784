"""What every comparison has: outcomes, profiles by name, and ``compare.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.analysis import rounds as in_rounds
from dlrm_core.analysis.compare import circumstances, differing, mixed_causes
from dlrm_core.analysis.intervals import Interval
from dlrm_core.analysis.whatif import Prediction
from dlrm_core.compare_runs import TimedRun
from dlrm_core.files import write_json
from dlrm_core.profiling.hpctoolkit_process import ProgressCallback
from dlrm_core.profiling.profile import Profile


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


def _scalar(value: Any) -> Any:
    """JSON for numpy's scalars."""
    return value.item() if hasattr(value, "item") else str(value)
