"""Quality of click predictions over a stream: exact AUC, log loss, accuracy.

The area under the ROC curve is the probability that a click scores above a non-click,
a tie counting half (Hanley and McNeil 1982): with both sorted it is counted in whole
numbers and divided once, so it does not depend on the order of samples or the size of batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_core.base.errors import InputError

_PORTION = 1 << 20
"""Clicks that are looked up among the non-clicks at a time."""


def area_under_curve(clicks: np.ndarray, others: np.ndarray) -> float | None:
    """AUC of the scores of clicks (P,) and of non-clicks (N,), sorted here; None without either."""
    clicks.sort()
    others.sort()
    # of both sides: non-clicks below a click, and those not above it, so that a tie counts half
    twice = sum(
        int(np.searchsorted(others, clicks[start : start + _PORTION], side).sum())
        for start in range(0, clicks.size, _PORTION)
        for side in ("left", "right")
    )
    # Python divides whole numbers of any size with one rounding
    return twice / (2 * clicks.size * others.size) if clicks.size and others.size else None


class QualityMeter:
    """AUC, log loss and accuracy of a stream of predictions; 4 bytes a sample are kept, and as
    much again is needed to sort them.

    Targets count as clicks above 0.5 for AUC and accuracy; the log loss takes them as
    they are.
    """

    def __init__(self) -> None:
        self._clicks: list[np.ndarray] = []
        self._others: list[np.ndarray] = []
        self._right = 0
        self._log_loss = 0.0
        self.graded = False
        """A target was neither 0 nor 1."""

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        """Count a batch: predictions (n,) or (n, 1) float32 and as many targets, all in [0, 1].

        Raises InputError if a prediction is not a number.
        """
        p = predictions.reshape(-1)
        t = targets.reshape(-1)
        if np.isnan(p).any():
            place = int(np.flatnonzero(np.isnan(p))[0])
            raise InputError(f"prediction {place} of a batch is not a number: there is no AUC")
        clicks = t > 0.5
        self._clicks.append(p[clicks])
        self._others.append(p[~clicks])
        self._right += int(((p > 0.5) == clicks).sum())
        self.graded = self.graded or bool(((t != 0.0) & (t != 1.0)).any())
        wide, graded = p.astype(np.float64), t.astype(np.float64)
        with np.errstate(divide="ignore"):
            hit, miss = np.maximum(np.log(wide), -100.0), np.maximum(np.log1p(-wide), -100.0)
        self._log_loss -= float((graded * hit + (1.0 - graded) * miss).sum())

    def quality(self) -> dict[str, Any]:
        """``samples``, ``auc``, ``log_loss``, ``accuracy``, ``click_share`` of what was counted,
        as :class:`dlrm_core.run.evaluate.Evaluation` has them.

        Raises InputError if there were no samples.
        """
        clicks, others = (
            np.concatenate([np.empty(0, np.float32), *scores])
            for scores in (self._clicks, self._others)
        )
        count = clicks.size + others.size
        if not count:
            raise InputError("the test data holds no samples, expected at least one")
        return {
            "samples": count,
            "auc": area_under_curve(clicks, others),
            "log_loss": self._log_loss / count,
            "accuracy": self._right / count,
            "click_share": clicks.size / count,
        }
