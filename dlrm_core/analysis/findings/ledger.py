"""Which of the lost time is explained already, so that no millisecond is blamed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd

from dlrm_core.analysis.findings.evidence import Evidence, Part
from dlrm_core.analysis.findings.finding import Finding


class Ledger:
    """Milliseconds of a mean iteration that rules have explained.

    A cause without a place (another process on the cores) explains a little of every
    part's excess; it is taken off all of them in proportion.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._excess = evidence.excess_ms
        self._part: dict[Part, float] = {}
        self._anywhere = 0.0

    def explain(self, milliseconds: float, part: Part | None = None) -> None:
        """Record that a rule explained time, in one part or anywhere in the step."""
        if part is None:
            self._anywhere += milliseconds
        else:
            self._part[part] = self._part.get(part, 0.0) + milliseconds

    def explained_in(self, part: Part) -> float:
        """Milliseconds explained in this very part."""
        return self._part.get(part, 0.0)

    @property
    def anywhere_ms(self) -> float:
        """Milliseconds explained without a place."""
        return self._anywhere

    def is_explained(self, part: Part) -> bool:
        """Whether some rule explained time in this very part."""
        return part in self._part

    @property
    def explained_ms(self) -> float:
        """All time explained so far, in parts and anywhere."""
        return self._anywhere + sum(self._part.values())

    @property
    def left_ms(self) -> pd.Series:
        """Excess of each part over its probe that no rule has explained, ms."""
        left = self._excess.copy()
        for part, explained in self._part.items():
            if part in left.index:
                left[part] = max(0.0, left[part] - explained)
        total = float(left.sum())
        if total > 0:
            left *= max(0.0, 1.0 - self._anywhere / total)
        return left


Rule = Callable[[Evidence, Ledger], Iterable[Finding]]
"""Looks at the evidence, enters what it explains into the ledger, yields findings."""
