"""Quality of click predictions over a stream: exact AUC, log loss, accuracy, in bounded memory.

The area under the ROC curve is the probability that a click scores above a non-click,
a tie counting half (Hanley and McNeil 1982). So it is a sum over the distinct scores v:
``sum P_v (N_<v + N_v / 2) / (P N)``, with P_v clicks and N_v non-clicks of score v. The
counts are kept as sorted runs of (score, N_v, P_v): in memory while they are few, on disk
beyond a limit, merged block by block. Every operation is on whole numbers, so the result
does not depend on the order of samples, the size of batches or the limit.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from dlrm_core.base.errors import InputError

MEMORY_BYTES = 256 << 20
"""What an :class:`AucCounter` takes before it goes to disk."""

_RECORD = np.dtype([("score", np.uint32), ("negatives", np.int64), ("positives", np.int64)])
_SORTING_BYTES = 48
"""Taken a sample while samples are sorted and counted: keys, labels, counts, and copies."""


class AucCounter:
    """Counts scores of clicks and non-clicks; see the module.

    Args:
        memory_bytes: limit of the counts held in memory; beyond, they go to a temporary file.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limit = max(16, memory_bytes // _SORTING_BYTES)
        self._keys: list[np.ndarray] = []
        self._waiting = 0
        self._counts = np.empty(0, _RECORD)
        self._files = contextlib.ExitStack()
        self._spill: IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []
        """(first record, number of records) of each run in the file."""

    def add(self, scores: np.ndarray, clicks: np.ndarray) -> None:
        """Count samples.

        Args:
            scores: (n,) float32, any but NaN; larger means more likely a click.
            clicks: (n,) bool.

        Raises:
            InputError: a score is not a number.
        """
        scores = np.ascontiguousarray(scores, np.float32).reshape(-1)
        if np.isnan(scores).any():
            place = int(np.flatnonzero(np.isnan(scores))[0])
            raise InputError(f"prediction {place} of a batch is not a number: there is no AUC")
        limit = max(1, self._limit // 4)
        clicks = np.asarray(clicks, bool).reshape(-1)
        for start in range(0, scores.size, limit):
            part = slice(start, start + limit)
            self._keys.append(_ordered(scores[part]) << np.uint64(1) | clicks[part])
            self._waiting += self._keys[-1].size
            if self._waiting >= limit:
                self._count()

    def area(self) -> float | None:
        """AUC of everything counted so far; None without a click or without a non-click."""
        self._count()
        area, below, above = 0, 0, 0
        for block in self._blocks():
            negatives, positives = block["negatives"], block["positives"]
            if int(negatives.sum()) * int(positives.sum()) >= 1 << 61:
                negatives, positives = negatives.astype(object), positives.astype(object)
            # twice the area, in whole numbers
            before = np.cumsum(negatives) - negatives
            area += int((positives * (2 * before + negatives)).sum())
            area += 2 * below * int(positives.sum())
            below += int(negatives.sum())
            above += int(positives.sum())
        # Python divides whole numbers of any size with one rounding
        return area / (2 * below * above) if below and above else None

    def close(self) -> None:
        """Remove the temporary file."""
        self._files.close()

    def _count(self) -> None:
        """Sort what is waiting into the counts; send the counts to disk when they are many."""
        if not self._waiting:
            return
        keys = np.sort(np.concatenate(self._keys))
        self._keys, self._waiting = [], 0
        labels = (keys & np.uint64(1)).astype(np.int64)
        scores = (keys >> np.uint64(1)).astype(np.uint32)
        fresh = _counted(scores, 1 - labels, labels)
        self._counts = _merged([self._counts, fresh]) if self._counts.size else fresh
        if self._counts.size >= self._limit // 2:
            if self._spill is None:
                file = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
                self._spill = self._files.enter_context(file)
            first = sum(size for _, size in self._runs)
            self._spill.seek(0, 2)
            self._spill.write(self._counts.view(np.uint8).data)
            self._runs.append((first, self._counts.size))
            self._counts = np.empty(0, _RECORD)

    def _blocks(self) -> Iterator[np.ndarray]:
        """All counts by rising score, each score in one block."""
        sources = [*(self._portions(*run) for run in self._runs), iter([self._counts])]
        heads = [np.empty(0, _RECORD) for _ in sources]
        while True:
            heads = [
                head if head.size else next(source, head)
                for head, source in zip(heads, sources, strict=True)
            ]
            if not any(head.size for head in heads):
                return
            # up to here every run has been read
            last = min(head["score"][-1] for head in heads if head.size)
            cuts = [int(np.searchsorted(head["score"], last, side="right")) for head in heads]
            yield _merged([head[:cut] for head, cut in zip(heads, cuts, strict=True)])
            heads = [head[cut:] for head, cut in zip(heads, cuts, strict=True)]

    def _portions(self, first: int, size: int) -> Iterator[np.ndarray]:
        """A run in the file, so much at a time that all runs together keep to the limit."""
        assert self._spill is not None
        most = max(1, self._limit // 2 // (len(self._runs) + 1))
        for start in range(first, first + size, most):
            self._spill.seek(start * _RECORD.itemsize)
            count = min(most, first + size - start)
            yield np.frombuffer(self._spill.read(count * _RECORD.itemsize), _RECORD)


class QualityMeter:
    """AUC, log loss and accuracy of a stream of predictions; use it as a context.

    Targets count as clicks above 0.5 for AUC and accuracy; the log loss takes them as
    they are.
    """

    def __init__(self) -> None:
        self._auc = AucCounter()
        self._samples = 0
        self._right = 0
        self._clicks = 0
        self._log_loss = 0.0
        self.graded = False
        """A target was neither 0 nor 1."""

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        """Count a batch.

        Args:
            predictions: (n,) or (n, 1) float32 in [0, 1].
            targets: as many, in [0, 1].

        Raises:
            InputError: a prediction is not a number.
        """
        p = predictions.reshape(-1)
        t = targets.reshape(-1)
        clicks = t > 0.5
        self._auc.add(p, clicks)
        self._samples += t.size
        self._right += int(((p > 0.5) == clicks).sum())
        self._clicks += int(clicks.sum())
        self.graded = self.graded or bool(((t != 0.0) & (t != 1.0)).any())
        wide, graded = p.astype(np.float64), t.astype(np.float64)
        with np.errstate(divide="ignore"):
            hit, miss = np.maximum(np.log(wide), -100.0), np.maximum(np.log1p(-wide), -100.0)
        self._log_loss -= float((graded * hit + (1.0 - graded) * miss).sum())

    def quality(self) -> dict[str, Any]:
        """``samples``, ``auc``, ``log_loss``, ``accuracy``, ``click_share`` of what was counted,
        as :class:`dlrm_core.run.evaluate.Evaluation` has them.

        Raises:
            InputError: there were no samples.
        """
        if not self._samples:
            raise InputError("the test data holds no samples, expected at least one")
        count = self._samples
        return {
            "samples": count,
            "auc": self._auc.area(),
            "log_loss": self._log_loss / count,
            "accuracy": self._right / count,
            "click_share": self._clicks / count,
        }

    def __enter__(self) -> QualityMeter:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._auc.close()


def _ordered(scores: np.ndarray) -> np.ndarray:
    """Whole numbers (n,) uint64 below 2^32 in the order of the float32 scores; ties stay ties."""
    # adding zero makes -0.0 the same as 0.0
    bits = (scores + np.float32(0.0)).view(np.uint32)
    # negative numbers: more bits are less; positive ones lie above all negative ones
    flip = np.where(bits >> np.uint32(31), np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    return (bits ^ flip).astype(np.uint64)


def _counted(scores: np.ndarray, negatives: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """One record for each score; ``scores`` are sorted."""
    starts = np.flatnonzero(np.concatenate([[True], scores[1:] != scores[:-1]]))
    result = np.empty(starts.size, _RECORD)
    result["score"] = scores[starts]
    result["negatives"] = np.add.reduceat(negatives, starts)
    result["positives"] = np.add.reduceat(positives, starts)
    return result


def _merged(runs: list[np.ndarray]) -> np.ndarray:
    """Sorted runs as one, counts of a score added up."""
    runs = [run for run in runs if run.size]
    if len(runs) <= 1:
        return runs[0] if runs else np.empty(0, _RECORD)
    records = np.concatenate(runs)
    order = np.argsort(records["score"], kind="stable")
    return _counted(
        records["score"][order], records["negatives"][order], records["positives"][order]
    )
