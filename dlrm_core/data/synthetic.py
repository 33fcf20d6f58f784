"""Random batches: facebookresearch/dlrm's own loop, and vectorised ones by other laws of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dlrm_core.base.errors import InputError
from dlrm_core.data.batch import WHOLE, Batch, Share
from dlrm_core.data.reuse import ReuseLaw


@dataclass(eq=False)
class _BagLaw:
    """What facebook's law and those like it are given; the stream follows from the seed.

    A stream is a :class:`dlrm_core.data.epochs.Generator`; its state goes to another one on the
    same kind of device.

    All ranks draw the whole stream, since the place of a bag's numbers in it follows from those
    before; what is made of the numbers is made of a rank's own ``share`` only.
    """

    dense_features: int
    table_rows: tuple[int, ...]
    batch_size: int
    indices_per_lookup: int
    fixed_pooling: bool
    round_targets: bool
    seed: int
    share: Share = field(default=WHOLE, kw_only=True)


@dataclass(eq=False)
class SyntheticBatches(_BagLaw):
    """facebook's bag law without sorting and deduplication.

    Drawn on the CPU by numpy's SFC64 (several times faster than the Mersenne Twister,
    which torch's CPU generator is), on a GPU by torch there; so the two places have
    two streams of one law.

    Dense features and targets are U[0,1) (targets rounded on request); a bag
    holds exactly k indices (with ``multi_hot_sizes`` each table's own k), or
    max(1, round(r min(R, k))) with r ~ U[0,1).
    Rows are uniform over the table, or follow a bounded power law: the
    continuous density x^-a on [1, R + 1) cut to whole numbers, so that
    P(row i) = ((i+1)^(1-a) - (i+2)^(1-a)) / (1 - (R+1)^(1-a)), row 0 hottest;
    with ``reuse`` they follow :class:`dlrm_core.data.reuse.ReuseLaw` instead.

    ``padded`` batches leave each table room for its longest bags and say on the device
    alone how many lookups are real, so that the host need not wait to know.
    """

    zipf_exponent: float | None
    device: torch.device
    padded: bool = False
    multi_hot_sizes: tuple[int, ...] | None = None
    reuse: bool = False

    def __post_init__(self) -> None:
        seed, device, table_rows = self.seed, self.device, self.table_rows
        self.padded = self.padded and not self.fixed_pooling
        self.random: _Draws = _HostDraws(seed) if device.type == "cpu" else _Draws(seed, device)
        bounds = [min(rows, self.indices_per_lookup) for rows in table_rows]
        self._bounds = torch.tensor(bounds, dtype=torch.float32, device=device)[:, None]
        self._last = torch.tensor(table_rows, device=device)[:, None] - 1
        self._laws = [ReuseLaw(rows) for rows in table_rows] if self.reuse else []
        spans = [self._span(rows) for rows in table_rows]
        self._spans = torch.tensor(spans, dtype=torch.float64, device=device)[:, None]
        self._rooms = [room_for(self.batch_size, bound) for bound in bounds]
        self._limits = torch.tensor(self._rooms, device=device)

    def state(self) -> dict[str, Any]:
        return {"random": self.random.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.random.restore(state["random"])

    def next_batch(self, size: int | None = None) -> Batch:
        """The next batch, shapes as in :class:`Batch`; ``size`` samples, at most the usual."""
        size, tables = size or self.batch_size, len(self.table_rows)
        extents = None
        dense = self.random.uniform(size, self.dense_features)
        if self.fixed_pooling:
            counts = self.multi_hot_sizes or (self.indices_per_lookup,) * tables
            bags = torch.tensor(counts, device=self.device)[:, None]
            offsets = torch.arange(size, device=self.device) * bags
            totals = [size * count for count in counts]
        else:
            sizes = (self.random.uniform(tables, size) * self._bounds).round().clamp_(min=1).long()
            ends = sizes.cumsum(1)
            offsets = ends - sizes
            if self.padded:
                ends = ends.minimum(self._limits[:, None])
                offsets = offsets.minimum(self._limits[:, None])
                begins = self._limits.cumsum(0) - self._limits
                extents = torch.stack([begins, ends[:, -1]])
                totals = self._rooms
            else:
                # the host must know how long the batch is: one small copy back
                totals = ends[:, -1].tolist()
        targets = self.random.uniform(size, 1)
        if self.round_targets:
            targets.round_()
        first, behind = self.share.samples(size)
        begun, ended = [0] * tables, totals
        if behind - first < size:
            begun = offsets[:, first].tolist()
            ended = offsets[:, behind].tolist() if behind < size else totals
            offsets = offsets[:, first:behind] - offsets[:, first : first + 1]
        kept = (end - begin for begin, end in zip(begun, ended, strict=True))
        starts = tuple(itertools.accumulate(kept, initial=0))
        indices = self._draw_rows(totals, begun, starts)
        dense, targets = dense[first:behind], targets[first:behind]
        return Batch(dense, indices, offsets, starts, targets, extents, self.padded)

    def _draw_rows(
        self, totals: list[int], begins: list[int], starts: tuple[int, ...]
    ) -> torch.Tensor:
        """Rows looked up (N,) int64, those of table t at ``starts[t]``.

        Of the ``totals[t]`` numbers drawn for it, those from ``begins[t]`` on are used.
        """
        if self.device.type != "cpu" and len(set(totals)) == 1 and not self.reuse:
            return self._draw_all(totals[0])
        indices = torch.empty(starts[-1], dtype=torch.int64, device=self.device)
        for t, (rows, total, begin) in enumerate(zip(self.table_rows, totals, begins, strict=True)):
            into = indices[starts[t] : starts[t + 1]]
            own = slice(begin, begin + into.numel())
            if self.reuse:
                draws = self.random.uniform(total, dtype=torch.float64)[own]
                into.copy_(self._laws[t].rows(draws))
            elif self.zipf_exponent is not None:
                # float64: with float32 a table of more than 2^24 rows has rows never drawn
                draws = self.random.uniform(total, dtype=torch.float64)[own]
                into.copy_(self._power_law(draws, self._span(rows)).clamp_(0, rows - 1))
            elif into.numel() == total:
                self.random.below(rows, into)
            else:
                drawn = torch.empty(total, dtype=torch.int64, device=self.device)
                self.random.below(rows, drawn)
                into.copy_(drawn[own])
        return indices

    def _draw_all(self, count: int) -> torch.Tensor:
        """``count`` rows of every table (T count,) int64, in a few launches for all of them."""
        draws = self.random.uniform(len(self.table_rows), count, dtype=torch.float64)
        if self.zipf_exponent is None:
            found = draws.mul_(self._last + 1).long()
        else:
            found = self._power_law(draws, self._spans).clamp_(min=0)
        return found.minimum(self._last).flatten()

    def _span(self, rows: int) -> float:
        """What a table's draws are multiplied by, or with exponent 1 are the exponents of."""
        exponent = self.zipf_exponent
        if exponent is None or exponent == 1.0:
            return rows + 1.0
        return 1.0 - (rows + 1.0) ** (1.0 - exponent)

    def _power_law(self, draws: torch.Tensor, span: float | torch.Tensor) -> torch.Tensor:
        """Rows int64 from draws in [0, 1), by a table's span; rounding may lead out of it."""
        exponent = self.zipf_exponent
        assert exponent is not None
        if exponent == 1.0:
            return torch.pow(span, draws).long() - 1
        return (1.0 - draws * span).pow_(1.0 / (1.0 - exponent)).long() - 1


def room_for(bags: int, bound: int) -> int:
    """Lookups that a table of so many bags has room for, when bags hold up to ``bound``.

    Their sum has a mean of at most B (k/2 + 1) and a deviation of about k sqrt(B/12). Eight
    deviations above the mean (once in 10^15 batches) the last bags would be cut short.
    """
    return min(bags * bound, math.ceil(bags * (bound / 2 + 1) + 8 * bound * (bags / 12) ** 0.5))


class _Draws:
    """Random numbers by torch, on the device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.random = torch.Generator(device).manual_seed(seed)

    def state(self) -> dict[str, Any]:
        return {"torch": self.random.get_state().cpu().numpy().copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.random.set_state(torch.from_numpy(state["torch"]))

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """U[0,1)."""
        return torch.rand(*shape, generator=self.random, device=self.device, dtype=dtype)

    def below(self, bound: int, into: torch.Tensor) -> None:
        """Fill ``into`` with whole numbers in [0, bound)."""
        into.random_(0, bound, generator=self.random)


class _HostDraws(_Draws):
    """Random numbers by numpy, on the CPU."""

    def __init__(self, seed: int) -> None:
        self.draws = np.random.Generator(np.random.SFC64(seed))

    def state(self) -> dict[str, Any]:
        return dict(self.draws.bit_generator.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.draws.bit_generator.state = state

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        kind = np.float32 if dtype == torch.float32 else np.float64
        return torch.from_numpy(self.draws.random(shape, dtype=kind))

    def below(self, bound: int, into: torch.Tensor) -> None:
        # 32 bits are drawn where they suffice: half the work
        kind = np.uint32 if bound <= 1 << 32 else np.int64
        into.numpy()[:] = self.draws.integers(0, bound, into.numel(), dtype=kind)


_SKIPPED_AT_ONCE = 1 << 20


@dataclass(eq=False)
class FacebookLoop(_BagLaw):
    """The law as facebook's script runs it: a Python loop over samples.

    Slow on purpose: it is the oracle for data.generator: facebook (:mod:`dlrm_kernels`) and the
    honest baseline, since the experiment's CPU time goes here.
    """

    def __post_init__(self) -> None:
        self.random = np.random.RandomState(self.seed)

    def state(self) -> dict[str, Any]:
        return {"random": self.random.get_state(legacy=False), "skip": 0}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the loop or of the replay, which are the same.

        Raises InputError if it skips more draws than ever lie between two states of the replay.
        """
        skip, lookups = state["skip"], len(self.table_rows) * (self.indices_per_lookup + 2)
        most = 16 * self.batch_size * (self.dense_features + lookups + 1)
        if skip > most:
            raise InputError(f"skip is {skip}, expected at most {most}")
        self.random.set_state(state["random"])
        for start in range(0, skip, _SKIPPED_AT_ONCE):
            self.random.random_sample(min(_SKIPPED_AT_ONCE, skip - start))

    def next_batch(self, size: int | None = None) -> Batch:
        """The next batch of the stream, shapes as in :class:`Batch`; of ``size`` samples."""
        size, random = size or self.batch_size, self.random
        dense = torch.tensor(random.rand(size, self.dense_features).astype(np.float32))
        all_offsets, all_indices, table_starts = [], [], [0]
        for rows in self.table_rows:
            offsets, indices = [], []
            offset = 0
            for _ in range(size):
                if self.fixed_pooling:
                    count = np.array([self.indices_per_lookup])
                else:  # arrays of one number, as facebook's loop has them: they cost time
                    draw = random.random_sample(1) * min(rows, self.indices_per_lookup)
                    count = np.round(max(np.ones(1), draw)).astype(np.int64)
                draws = random.random_sample(count)
                bag = np.unique(np.round(draws * (rows - 1)).astype(np.int64))
                offsets += [offset]
                indices += bag.tolist()
                offset += bag.size
            all_offsets.append(torch.tensor(offsets))
            all_indices.append(torch.tensor(indices))
            table_starts.append(table_starts[-1] + offset)
        targets = random.rand(size, 1).astype(np.float32)
        if self.round_targets:
            targets = np.round(targets).astype(np.float32)
        return Batch(
            dense,
            torch.cat(all_indices),
            torch.stack(all_offsets),
            tuple(table_starts),
            torch.tensor(targets),
        ).part(*self.share.samples(size))
