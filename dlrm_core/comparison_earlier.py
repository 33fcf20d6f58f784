"""What an earlier try of a comparison left in its folder, and need not be done again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_core.analysis.whatif import Prediction
from dlrm_core.comparison_base import Outcome
from dlrm_core.files import read_json
from dlrm_core.run_folder import versions

RECORD = "compare.json"


@dataclass(frozen=True)
class Earlier:
    """What an earlier try left in ``compare.json``; empty for a new comparison."""

    change: dict[str, Any] = field(default_factory=dict)
    predicted_at: str = ""
    measured_from: str = ""
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Earlier:
        """What the folder holds.

        Raises:
            InputError: its ``compare.json`` cannot be read.
        """
        if not (folder / RECORD).is_file():
            return cls()
        document = read_json(folder / RECORD)
        done = len(document.get("rounds") or [])
        said = [
            "This comparison was stopped and gone on with; what had finished was not run again"
            + (f" ({done} runs in turns)." if done else ".")
        ]
        now, before = versions(), document.get("versions") or {}
        changed = [f"{name} {before[name]}, now {now.get(name)}" for name in before
                   if now.get(name) != before[name]]  # fmt: skip
        if changed and done:
            said.append(f"Rounds of one comparison were made with other versions: {changed[0]}.")
        kept = [text for text in document.get("notices") or [] if text not in said]
        return cls(
            dict(document.get("change") or {}),
            document.get("predicted_at") or "",
            document.get("measured_from") or "",
            list(document.get("outcomes") or []),
            [text for text in kept if not text.startswith("This comparison was stopped")] + said,
        )

    def restore(self, outcomes: Sequence[Outcome]) -> bool:
        """Give the outcomes the predictions made before; whether there were any to give."""
        known = {str(row["change"]): row for row in self.outcomes}
        if not self.predicted_at or any(str(o.change) not in known for o in outcomes):
            return False
        for outcome in outcomes:
            row = known[str(outcome.change)]
            made = row["predicted"]
            outcome.predicted = Prediction.from_dict(made) if made else None
            outcome.reason = row["not_predicted"]
        return True


def whole_profile(folder: Path, name: str) -> Path | None:
    """The folder of a profile that an earlier try finished: ``NAME``, ``NAME-2``, ...; or None."""
    for place in sorted(folder.glob(f"{name}*")):
        if (place / "profile" / "profile.json").is_file():
            return place
    return None
