"""What a collective takes on a link: a latency per step and a rate for what leaves a rank.

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

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.steady import undisturbed

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("ring", "halving_doubling", "tree"),
    "alltoall": ("pairwise", "bruck"),
    "allgather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("tree",),
}
"""Collective to its algorithms; a library's usual one first."""


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
    """Steps of a collective and the bytes that leave a rank, as in the module's table."""
    if ranks <= 1:
        return 0.0, 0.0
    away = payload * (ranks - 1) / ranks
    depth = math.ceil(math.log2(ranks))
    both = 2 if collective == "allreduce" else 1
    if algorithm == "ring":
        return both * (ranks - 1), both * away
    if algorithm == "tree":
        return both * depth, both * payload * depth
    if algorithm == "halving_doubling":
        folded = 0 if ranks == 1 << depth else 1
        inner = 1 << (depth - folded)
        steps = 2 * int(math.log2(inner)) + 2 * folded
        return steps, 2 * payload * (inner - 1) / inner + 2 * payload * folded
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

    def time_ms(self, collective: str, ranks: int, payload: float) -> Range:
        """Time of a collective, with its range.

        What was measured on as many ranks is interpolated between the sizes measured; beyond
        them, and on other numbers of ranks, alpha and beta decide, by the algorithm that takes
        least, as libraries choose by size.

        Raises:
            InputError: no such collective.
        """
        if ranks <= 1 or payload <= 0:
            return NOTHING
        fit = self.fits.get((collective, ranks))
        if fit is not None:
            mid = _interpolated(fit, payload)
            return Range(mid / (1 + fit.scatter), mid, mid * (1 + fit.scatter))
        if collective not in ALGORITHMS:
            raise InputError(
                f"collective is {collective!r}, expected one of {', '.join(ALGORITHMS)}"
            )
        by_algorithm = [
            self.steps_ms(*steps_and_bytes(collective, algorithm, ranks, payload))
            for algorithm in ALGORITHMS[collective]
        ]
        return min(by_algorithm, key=lambda time: time.mid)

    def steps_ms(self, steps: float, moved: float) -> Range:
        """Time of so many steps and of so many bytes that leave a rank."""
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
            others = ranks - local
            direct = self.between.steps_ms(others, payload * others / ranks)
            staged = self.inside.time_ms("alltoall", local, payload) + self.between.time_ms(
                "alltoall", nodes, payload
            )
            at_once = Range(*map(max, inside, direct))
            return min(at_once, staged, key=lambda time: time.mid)
        part = payload / local
        return self.inside.time_ms(collective, local, payload) + self.between.time_ms(
            collective, nodes, part
        )


# Links by name, with their vendors' rates and what libraries make of them.

SHEET_SHARE = Range(0.5, 0.78, 0.95)
"""Share of a data sheet's rate that a collective gets."""

LINKS = tuple(
    Link(
        row["name"],
        Range(*(row[f"alpha_us_{end}"] for end in Range._fields)),
        SHEET_SHARE.times(row["sheet_gb_per_s"]),
        f"{row['source']}; latency: NCCL src/graph/tuning.cc (hwLat)",
    )
    for row in pd.read_csv(Path(__file__).with_name("links.csv")).to_dict("records")
)
"""OPA is the study's network (Kalamkar et al. 2020, 64 sockets, one port a socket)."""


def link(name: str) -> Link:
    """The link of a name, upper or lower case.

    Raises:
        InputError: no such link is listed, with the closest that is.
    """
    by_name = {listed.name.lower(): listed for listed in LINKS}
    wanted = name.strip().lower()
    if wanted in by_name:
        return by_name[wanted]
    close = difflib.get_close_matches(wanted, by_name, n=1, cutoff=0.4)
    known = ", ".join(listed.name for listed in LINKS)
    hint = f"did you mean {by_name[close[0]].name}?" if close else f"known: {known}"
    raise InputError(f"no link is called {name!r}; {hint}")


def links_table(links: Sequence[Link]) -> pd.DataFrame:
    """Links with their latency and rate: columns as in ``dlrm help columns links_table``."""
    ends = ("_low", "", "_high")
    return pd.DataFrame(
        [
            {"name": listed.name}
            | {f"alpha_us{end}": value for end, value in zip(ends, listed.alpha_us, strict=True)}
            | {f"gb_per_s{end}": value for end, value in zip(ends, listed.gb_per_s, strict=True)}
            | {"measured": listed.measured, "source": listed.source}
            for listed in links
        ]
    )


# A link from measured collectives: latency, rate and how far single measurements lie off.

EXCHANGE = ["collective", "ranks", "bytes"]

HUBER = 1.345
"""Residuals beyond so many standard deviations count less: 95 % efficient on a normal one."""

COVER = 1.64
"""Half width of a range in standard deviations: nine of ten of a normal distribution. The
deviation itself is 1.4826 times the median residual, which disturbed runs do not widen."""

LINK_SCATTER = 0.05
"""No link is known better than this: two probes of one machine differ as much."""


def calibrate(probe: pd.DataFrame, name: str = "measured") -> Link:
    """A link from collectives that were timed alone.

    Args:
        probe: ``collective``, ``ranks``, ``bytes``, ``time_ms`` as in ``record.csv``,
            one row per repetition. Rows of one rank, of no bytes or no time are left out; of the
            repetitions the faster half counts (:mod:`dlrm_workbook.ground.intervals`).
        name: the link's name.

    Raises:
        InputError: fewer than two sizes were measured.
    """
    usable = probe[(probe["ranks"] > 1) & (probe["bytes"] > 0) & (probe["time_ms"] > 0)]
    usable = usable[usable["collective"].isin(list(ALGORITHMS))]
    if usable["bytes"].nunique() < 2:
        raise InputError(
            f"link probe: {usable['bytes'].nunique()} sizes measured on two ranks or more, "
            "expected at least 2: latency and rate cannot be told apart"
        )
    kept = undisturbed(usable, EXCHANGE, "repetition")
    fits = {}
    for key, rows in usable.groupby(["collective", "ranks"]):
        collective, ranks = cast(tuple[str, int], key)
        fitted = _fit(rows, kept.loc[kept.index.intersection(rows.index)])
        if fitted is not None:
            fits[(str(collective), int(ranks))] = fitted
    alpha, rate = _common(kept)
    most = int(usable["ranks"].max())
    source = f"measured: {len(usable)} collectives on up to {most} ranks"
    return Link(name, alpha, rate, source, True, fits)


def _fit(rows: pd.DataFrame, kept: pd.DataFrame) -> Fit | None:
    """Alpha and rate of one collective on one number of ranks, by what is undisturbed of it."""
    means = kept.groupby("bytes")["time_ms"].mean().sort_index()
    if len(means) < 2:
        return None
    fixed, slope = robust_line(kept["bytes"].to_numpy(float), kept["time_ms"].to_numpy(float))
    # more bytes do not take less time: a size that was disturbed throughout is held to the next
    bounded = means[::-1].cummin()[::-1]
    points = tuple(zip(bounded.index.astype(float), bounded.astype(float), strict=True))
    # what a range must hold are single measurements, the disturbed ones too
    residuals = np.log(rows["time_ms"].to_numpy(float) / rows["bytes"].map(means).to_numpy(float))
    scatter = max(LINK_SCATTER, float(np.expm1(COVER * _deviation(residuals))))
    return Fit(1e3 * fixed, _rate(slope), scatter, points)


def _rate(ms_per_byte: float) -> float:
    # 1 ms a byte is 1e-6 GB/s; a slope of 0 would be a link without a limit
    return 1e-6 / max(ms_per_byte, 1e-12)


def robust_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope, neither negative, of y = a + b x by relative errors (Huber)."""
    design = np.column_stack([np.ones_like(x), x])
    solved = robust_least_squares(design, y)
    return float(solved[0]), float(solved[1])


def robust_least_squares(design: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coefficients of 0 or more for ``design @ c = y``, by relative errors, Huber's weights.

    Shapes: design (n, k), y (n,), result (k,). A coefficient that would be negative is 0 and
    the others are fitted without it.
    """
    scaled = design / y[:, None]
    # columns of equal size: seconds a byte are 1e-9 of a latency
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    scaled = scaled / norms
    weights = np.ones(len(y))
    solved = np.zeros(design.shape[1])
    for _ in range(40):
        before, solved = solved, _nonnegative(scaled * weights[:, None], weights)
        # least absolute deviations at first, so that no outlier draws the start
        residual = scaled @ solved - 1
        spread = max(1.4826 * float(np.median(np.abs(residual))), 1e-9)
        weights = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual), 1e-12)))
        if np.allclose(before, solved, rtol=1e-9, atol=0):
            break
    return solved / norms


def _nonnegative(design: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of 0 or more (the active set, few columns)."""
    kept = list(range(design.shape[1]))
    while kept:
        part = np.linalg.lstsq(design[:, kept], y, rcond=None)[0]
        if (part >= 0).all():
            solved = np.zeros(design.shape[1])
            solved[kept] = part
            return solved
        kept.pop(int(np.argmin(part)))
    return np.zeros(design.shape[1])


def _common(rows: pd.DataFrame) -> tuple[Range, Range]:
    """One alpha and one rate over all collectives, with ranges from their own fits."""
    forms = np.array(
        [
            steps_and_bytes(str(kind), ALGORITHMS[str(kind)][0], int(ranks), float(size))
            for kind, ranks, size in rows[["collective", "ranks", "bytes"]].itertuples(index=False)
        ]
    )
    times = rows["time_ms"].to_numpy(float)
    step_ms, byte_ms = robust_least_squares(forms, times)
    predicted = forms @ np.array([step_ms, byte_ms])
    ratio = np.log(times / np.maximum(predicted, 1e-12))
    wide = max(1 + LINK_SCATTER, float(np.exp(COVER * _deviation(ratio))))
    alpha_us, rate = 1e3 * float(step_ms), _rate(float(byte_ms))
    return (
        Range(alpha_us / wide, alpha_us, alpha_us * wide),
        Range(rate / wide, rate, rate * wide),
    )


def _deviation(residuals: np.ndarray) -> float:
    """Standard deviation around 0 by the median residual (Hampel 1974)."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def check(probe: pd.DataFrame, link: Link) -> pd.DataFrame:
    """A probe's times beside what a link says: how good a calibration is.

    Returns:
        Columns as in ``dlrm help columns check``.
    """
    rows = []
    for key, times in undisturbed(probe, EXCHANGE, "repetition").groupby(EXCHANGE)["time_ms"]:
        kind, ranks, size = cast(tuple[str, int, float], key)
        expected = link.time_ms(str(kind), int(ranks), float(size))
        measured = float(times.mean())
        row = (kind, ranks, size, measured, *expected, expected.mid / measured - 1)
        rows.append(row)
    return pd.DataFrame(
        rows, columns=[*EXCHANGE, "measured_ms", "low_ms", "mid_ms", "high_ms", "error"]
    )
