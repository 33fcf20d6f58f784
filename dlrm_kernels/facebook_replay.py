"""facebookresearch/dlrm's random data without its loop over samples: the same stream, fast."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dlrm_core.base.engines import optional_engine
from dlrm_core.data.batch import Batch
from dlrm_core.data.synthetic import FacebookLoop

_WORTH_AN_ENGINE = 200_000
"""Draws of a batch from which on machine code is loaded, which takes half a second once; numpy
makes fewer in a few milliseconds."""


class FacebookReplay(FacebookLoop):
    """The same stream bit for bit, without the loop over samples.

    Only the chain of bag sizes is sequential: where a bag's size is drawn
    depends on all sizes before it. So the stream is drawn in blocks, every
    position is read as if it were a size, and the chain is followed through the
    resulting list; everything else is whole-array arithmetic. Large batches are made by
    :mod:`dlrm_kernels.facebook_random` where it is installed, bag after bag in machine code.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._drawn = np.empty(0)
        """Draws of the stream not used yet."""
        self._total = 0
        """Draws made so far, used or not."""
        self._marks = collections.deque([(0, self.random.get_state(legacy=False))])
        """(draws made so far, the generator's state) at some points of the stream, in order."""
        self._code = self._machine_code()

    def _machine_code(self) -> Any | None:
        """What makes batches in machine code; None where they are small or it is not installed."""
        bag = self.indices_per_lookup
        draws = self.batch_size * (self.dense_features + len(self.table_rows) * (1 + bag // 2))
        if draws < _WORTH_AN_ENGINE:
            return None
        code = optional_engine("facebook's random numbers")
        if code and bag <= code.LARGEST_BAG and max(self.table_rows) <= code.LARGEST_ROW:
            return code
        return None

    def state(self) -> dict[str, Any]:
        """Where the stream stands: the generator's state at a mark, and how far beyond it.

        The generator itself is ahead by what is drawn and not used, and cannot go back.
        """
        place = self._total - self._drawn.size
        while len(self._marks) > 1 and self._marks[1][0] <= place:
            self._marks.popleft()
        total, random = self._marks[0]
        if self._marks[-1][0] < self._total:
            self._marks.append((self._total, self.random.get_state(legacy=False)))
        return {"random": random, "skip": place - total}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._drawn, self._total = np.empty(0), 0
        self._marks = collections.deque([(0, self.random.get_state(legacy=False))])

    def next_batch(self, size: int | None = None) -> Batch:
        """The next batch of the stream, equal to the loop's in every bit."""
        size = size or self.batch_size
        dense = self._take(size * self.dense_features, np.float32)
        bags = [self._table(rows, size) for rows in self.table_rows]
        targets = self._take(size, np.float32)
        if self.round_targets:
            targets = np.round(targets)
        table_starts = np.concatenate([[0], np.cumsum([indices.size for indices, _ in bags])])
        return Batch(
            torch.from_numpy(dense.reshape(size, self.dense_features)),
            torch.from_numpy(np.concatenate([indices for indices, _ in bags])),
            torch.from_numpy(np.stack([offsets for _, offsets in bags])),
            tuple(int(start) for start in table_starts),
            torch.from_numpy(targets.reshape(size, 1)),
        ).part(*self.share.samples(size))

    def _take(self, count: int, kind: type[np.floating] = np.float64) -> np.ndarray:
        """The next ``count`` draws of the stream, rounded to ``kind``."""
        taken, self._drawn = self._drawn[:count].astype(kind, copy=False), self._drawn[count:]
        if taken.size == count:
            return taken
        return np.concatenate([taken, self._draw(count - taken.size, kind)])

    def _fill(self, count: int) -> None:
        missing = count - self._drawn.size
        if missing > 0:
            self._drawn = np.concatenate([self._drawn, self._draw(missing)])

    def _draw(self, count: int, kind: type[np.floating] = np.float64) -> np.ndarray:
        self._total += count
        if self._code is None:
            return self.random.random_sample(count).astype(kind, copy=False)
        return self._code.random_sample(self.random, count, kind)

    def _table(self, rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """One table's indices (N_t,) and offsets (B,), both int64, of B = ``size`` samples."""
        bound = min(rows, self.indices_per_lookup)
        if self._code is not None:
            return self._table_at_once(self._code, rows, size, bound)
        if self.fixed_pooling:
            counts = np.full(size, self.indices_per_lookup)
            draws = self._take(int(counts.sum()))
        else:
            draws, counts = self._chain(size, bound)
        # one sortable key per draw: sample first, row second
        samples = np.repeat(np.arange(size, dtype=np.int64), counts)
        keys = np.round(draws * (rows - 1)).astype(np.int64)
        keys += samples * rows
        keys.sort()
        first = np.empty(keys.size, dtype=bool)
        first[:1] = True
        np.not_equal(keys[1:], keys[:-1], out=first[1:])
        keys = keys[first]
        offsets = np.searchsorted(keys, np.arange(size, dtype=np.int64) * rows)
        kept = np.diff(offsets, append=keys.size)
        keys -= np.repeat(np.arange(size, dtype=np.int64) * rows, kept)
        return keys, offsets

    def _table_at_once(
        self, code: Any, rows: int, size: int, bound: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do the work of :meth:`_table` in machine code."""
        fixed = self.indices_per_lookup if self.fixed_pooling else 0
        usual, most = (fixed, fixed) if fixed else (bound // 2 + 2, bound + 1)
        progress, offsets = np.zeros(3, np.int64), np.empty(size, np.int64)
        indices = np.empty(size * most, np.int64)
        while (done := int(progress[0])) < size:
            self._fill(int(progress[1]) + max((size - done) * usual, most))
            code.fill_bags(self._drawn, bound, fixed, rows, progress, offsets, indices)
        _, used, written = progress
        self._drawn = self._drawn[used:]
        return indices[:written], offsets

    def _chain(self, size: int, bound: int) -> tuple[np.ndarray, np.ndarray]:
        """Follow the bag sizes through the stream.

        Returns the draws that become indices, and the size of each bag (B,).
        """
        self._fill(size * (bound // 2 + 2))
        # Only the draws that are sizes are looked at, one after the other; a
        # memoryview hands out Python floats without making a list of the whole block.
        drawn = self._drawn.data
        places: list[int] = []
        place = 0
        while len(places) < size:
            try:
                draw = drawn[place]
            except IndexError:
                self._fill(place + (size - len(places)) * (bound // 2 + 2))
                drawn = self._drawn.data
                continue
            places.append(place)
            # Python's round is numpy's: halves go to the even neighbour
            place += 1 + (round(draw * bound) or 1)
        self._fill(place)
        chain = np.array(places)
        draws = self._take(place)
        counts = np.diff(chain, append=place) - 1
        is_index = np.ones(place, dtype=bool)
        is_index[chain] = False
        return draws[is_index], counts
