"""What a collective takes on a link: a latency a step and a rate for what leaves a rank.

The alpha-beta model (Hockney 1994): a message of n bytes takes alpha + n / beta. A collective
is a number of such steps and of bytes that leave a rank (:func:`steps_and_bytes`), after
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005) and, for the ring, Patarasuk and Yuan (2009). p ranks, n bytes of payload as
:mod:`.communication` counts them:

========================================  =========================  ==================
collective, algorithm                     steps                      bytes
========================================  =========================  ==================
allreduce, ring                           2 (p − 1)                  2 n (p − 1) / p
allreduce, halving_doubling               2 ceil(log2 p)             2 n (p − 1) / p
allreduce, tree                           2 ceil(log2 p)             2 n ceil(log2 p)
alltoall, pairwise                        p − 1                      n (p − 1) / p
alltoall, bruck                           ceil(log2 p)               n ceil(log2 p) / 2
allgather and reduce_scatter, ring        p − 1                      n (p − 1) / p
broadcast, tree                           ceil(log2 p)               n ceil(log2 p)
========================================  =========================  ==================

Where p is no power of two, halving_doubling first folds the ranks above it onto others: two
more steps and 2 n more bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrm_core.errors import InputError

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("ring", "halving_doubling", "tree"),
    "alltoall": ("pairwise", "bruck"),
    "allgather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("tree",),
}
"""Collective to its algorithms; a library's usual one first."""

BEST = "best"
"""In place of an algorithm: whichever takes least, as libraries choose by size."""


class Range(NamedTuple):
    """A time or a rate with its range: nine cases of ten."""

    low: float
    mid: float
    high: float

    def __add__(self, other: object) -> Range:
        if not isinstance(other, Range):
            return NotImplemented
        return Range(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Range:
        """All three by one factor of 0 or more."""
        return Range(self.low * factor, self.mid * factor, self.high * factor)


LEAST_BYTES = 64.0
"""Payload of a collective that takes its latency only."""

NOTHING = Range(0.0, 0.0, 0.0)


def steps_and_bytes(
    collective: str, algorithm: str, ranks: int, payload: float
) -> tuple[float, float]:
    """Steps of a collective and the bytes that leave a rank, as in the module's table.

    Raises:
        InputError: no such collective or algorithm.
    """
    known = ALGORITHMS.get(collective)
    if known is None:
        raise InputError(f"collective is {collective!r}, expected one of {', '.join(ALGORITHMS)}")
    if algorithm not in known:
        raise InputError(
            f"algorithm of {collective} is {algorithm!r}, expected one of {', '.join(known)}"
        )
    if ranks <= 1:
        return 0.0, 0.0
    away = payload * (ranks - 1) / ranks
    depth = math.ceil(math.log2(ranks))
    if algorithm == "ring":
        both = 2 if collective == "allreduce" else 1
        return both * (ranks - 1), both * away
    if algorithm == "halving_doubling":
        folded = 0 if ranks == 1 << depth else 1
        inner = 1 << (depth - folded)
        steps = 2 * int(math.log2(inner)) + 2 * folded
        return steps, 2 * payload * (inner - 1) / inner + 2 * payload * folded
    if algorithm == "tree":
        both = 2 if collective == "allreduce" else 1
        return both * depth, both * payload * depth
    if algorithm == "pairwise":
        return ranks - 1, away
    return depth, payload * depth / 2


class Fit(NamedTuple):
    """One collective on one number of ranks, as measured: time = alpha + bytes / rate."""

    fixed_us: float
    gb_per_s: float
    scatter: float
    """Relative half width of nine residuals of ten."""
    points: tuple[tuple[float, float], ...]
    """Measured (bytes, ms), bytes ascending."""


@dataclass(frozen=True)
class Link:
    """A link between ranks; rates are what one rank sends in one direction.

    ``alpha_us`` and ``gb_per_s`` carry ranges; ``source`` says where from. ``fits`` has what
    was measured itself, by (collective, ranks).
    """

    name: str
    alpha_us: Range
    gb_per_s: Range
    source: str
    measured: bool = False
    fits: Mapping[tuple[str, int], Fit] = field(default_factory=dict)

    def time_ms(self, collective: str, ranks: int, payload: float, algorithm: str = BEST) -> Range:
        """Time of a collective, with its range.

        What was measured on as many ranks is interpolated between the sizes measured; beyond
        them, and on other numbers of ranks, alpha and beta decide.

        Raises:
            InputError: no such collective or algorithm.
        """
        if ranks <= 1 or payload <= 0:
            return NOTHING
        fit = self.fits.get((collective, ranks))
        if fit is not None and algorithm == BEST:
            mid = _interpolated(fit, payload)
            return Range(mid / (1 + fit.scatter), mid, mid * (1 + fit.scatter))
        names = ALGORITHMS.get(collective, ()) if algorithm == BEST else (algorithm,)
        if not names:
            steps_and_bytes(collective, algorithm, ranks, payload)
        known = [self._modelled(collective, name, ranks, payload) for name in names]
        return min(known, key=lambda time: time.mid)

    def _modelled(self, collective: str, algorithm: str, ranks: int, payload: float) -> Range:
        steps, moved = steps_and_bytes(collective, algorithm, ranks, payload)
        alpha, rate = self.alpha_us, self.gb_per_s

        def ms(each_us: float, gb_per_s: float) -> float:
            return 1e-3 * steps * each_us + 1e-6 * moved / gb_per_s

        return Range(ms(alpha.low, rate.high), ms(alpha.mid, rate.mid), ms(alpha.high, rate.low))


def _interpolated(fit: Fit, payload: float) -> float:
    """Between measured sizes linearly in logarithms; outside by the fit, joined on."""
    points = fit.points
    line = 1e-3 * fit.fixed_us + 1e-6 * payload / fit.gb_per_s
    if len(points) < 2:
        return line
    (small, fast), (large, slow) = points[0], points[-1]
    if payload <= small:
        # latency is what is left when the bytes are gone
        return min(fast, max(line, fast * payload / small))
    if payload >= large:
        return slow + 1e-6 * (payload - large) / fit.gb_per_s
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if payload <= x1:
            share = math.log(payload / x0) / math.log(x1 / x0)
            return float(y0 ** (1 - share) * y1**share)
    return slow


@dataclass(frozen=True)
class Network:
    """Ranks on nodes: one link inside a node, one between nodes; one node if that is None.

    ``between`` gives the rate of one rank: of a node's interfaces its share. Collectives go
    in two levels, as NCCL does it: inside a node first, then between ranks of one place.
    """

    inside: Link
    between: Link | None = None
    ranks_per_node: int = 1 << 30

    @property
    def name(self) -> str:
        if self.between is None:
            return self.inside.name
        if self.ranks_per_node == 1:
            return self.between.name
        return f"{self.ranks_per_node} × {self.inside.name}, {self.between.name}"

    @property
    def measured(self) -> bool:
        return self.inside.measured and (self.between is None or self.between.measured)

    def limit(self, ranks: int) -> str:
        """Name of the link that a collective over so many ranks meets."""
        crosses = self.between is not None and ranks > self.ranks_per_node
        return self.between.name if crosses and self.between else self.inside.name

    def calls_ms(self, collective: str, ranks: int, payload: float, calls: int) -> Range:
        """Time of a payload in so many calls: what each costs without bytes comes on top."""
        whole = self.time_ms(collective, ranks, payload)
        return whole + self.time_ms(collective, ranks, LEAST_BYTES).times(calls - 1)

    def time_ms(self, collective: str, ranks: int, payload: float) -> Range:
        """Time of a collective over so many ranks, nodes filled one after the other.

        All-reduce: reduce-scatter inside, all-reduce of 1/g between, all-gather inside.
        All-to-all: either every pair directly, both links at once, or in two levels with
        one message a node; whichever takes less. Others: inside, then between.
        """
        local = self.ranks_per_node
        if self.between is None or ranks <= local:
            return self.inside.time_ms(collective, ranks, payload)
        nodes = -(-ranks // local)
        if collective == "allreduce":
            return (
                self.inside.time_ms("reduce_scatter", local, payload)
                + self.between.time_ms("allreduce", nodes, payload / local)
                + self.inside.time_ms("allgather", local, payload)
            )
        if collective == "alltoall":
            at_home = payload * local / ranks
            inside = self.inside.time_ms("alltoall", local, at_home)
            direct = self._straight(ranks, payload)
            staged = self.inside.time_ms("alltoall", local, payload) + self.between.time_ms(
                "alltoall", nodes, payload
            )
            at_once = Range(*map(max, inside, direct))
            return min(at_once, staged, key=lambda time: time.mid)
        part = payload / local
        return self.inside.time_ms(collective, local, payload) + self.between.time_ms(
            collective, nodes, part
        )

    def _straight(self, ranks: int, payload: float) -> Range:
        """A message to every rank of every other node."""
        assert self.between is not None
        alpha, rate = self.between.alpha_us, self.between.gb_per_s
        others = ranks - self.ranks_per_node
        moved = payload * others / ranks
        return Range(
            1e-3 * others * alpha.low + 1e-6 * moved / rate.high,
            1e-3 * others * alpha.mid + 1e-6 * moved / rate.mid,
            1e-3 * others * alpha.high + 1e-6 * moved / rate.low,
        )
