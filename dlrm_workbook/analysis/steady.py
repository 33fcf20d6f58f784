"""Which iterations stand for the run: warm-up, stragglers and drift told apart by statistics.

Nothing here counts iterations by convention. A warm-up is a beginning whose times differ in
rank from what follows, by more than chance lets any beginning differ; a straggler is an
iteration beyond what the slowest of that many ordinary iterations reach by chance. Both
thresholds are quantiles of the statistic's own distribution, simulated once for each number
of iterations, so they hold for short runs as for long ones and for all iterations together.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlrm_core.errors import InputError
from dlrm_core.units import milliseconds

# What chance alone does to the times of a run: critical values for each number of iterations.

Floats = npt.NDArray[np.float64]


FALSE_ALARM = 0.01
"""Chance of each judgement (warm-up, drift, two levels) on a run without any."""


STRAGGLER_ALARM = 0.025
"""The same of stragglers where scatter has exponential tails; far less where it is normal."""


_DRAWS = 4000


LONGEST = 1000
"""Critical values of longer runs are those of this length: they grow with log log n."""


def critical_rank(count: int) -> float:
    """What the largest standardised rank sum of a beginning exceeds in 1 of 100 runs.

    Of ``count`` independent times in any order; it depends on no distribution.
    """
    return _critical_rank(tabulated(count))


def critical_deviation(count: int) -> float:
    """What the largest of ``count`` ordinary deviations exceeds in 1 of 40 runs.

    In units of the upper spread (see :func:`upper_spreads`), for double-exponential scatter.
    """
    # Beyond the simulated length the largest of n grows with log n, as exponential tails do.
    known = _critical_deviation(tabulated(count))
    return known + (math.log(count / LONGEST) / math.log(2) if count > LONGEST else 0.0)


def rank_sums(ranks: Floats) -> Floats:
    """Standardised rank sum of every beginning (runs, n−1): |z| of Mann-Whitney's test.

    Args:
        ranks: (runs, n) ranks 1..n.
    """
    count = ranks.shape[1]
    size = np.arange(1, count)
    sums = np.cumsum(ranks, axis=1)[:, :-1]
    deviation = np.sqrt(size * (count - size) * (count + 1) / 12)
    return np.abs(sums - size * (count + 1) / 2) / deviation


@functools.lru_cache(maxsize=64)
def _critical_rank(count: int) -> float:
    random = np.random.default_rng(count)
    largest = [
        rank_sums(random.permuted(np.tile(np.arange(1.0, count + 1), (rows, 1)), axis=1)).max(1)
        for rows in _portions(count)
    ]
    return float(np.quantile(np.concatenate(largest), 1 - FALSE_ALARM))


def beginnings(times: Floats, most: int) -> Floats:
    """How far all of the first 1, 2, ... iterations are above the rest (runs, most).

    In units of the rest's spread above its median (see :func:`upper_spreads`).
    """
    heights = np.empty((len(times), most))
    for size in range(1, most + 1):
        rest = times[:, size:]
        usual = np.median(rest, axis=1, keepdims=True)
        spread = upper_spreads(rest - usual)
        heights[:, size - 1] = (times[:, :size].min(axis=1) - usual[:, 0]) / spread
    return heights


@functools.lru_cache(maxsize=64)
def critical_beginnings(count: int) -> Floats:
    random = np.random.default_rng(count)
    most = min(MOST_SLOW, count // 3)
    heights = np.concatenate(
        [beginnings(random.laplace(size=(rows, count)), most) for rows in _portions(count)]
    )
    return np.quantile(heights, 1 - FALSE_ALARM / most, axis=0)


MOST_SLOW = 6
"""Beginnings of up to this many iterations are judged by their size, longer ones by ranks."""


def upper_spreads(away: Floats) -> Floats:
    """Scale (runs,) of how far the slower half is above the median, from (runs, n) distances.

    The mean excess of an exponential tail whose largest three tenths are known only to be
    large (type II censoring; Epstein and Sobel 1953): stragglers among them do not widen it.
    """
    half = away.shape[1] // 2
    above = np.sort(away, axis=1)[:, -half:]
    unknown = math.ceil(_CENSORED * half)
    known = half - unknown
    scale = (above[:, :known].sum(axis=1) + unknown * above[:, known - 1]) / known
    return np.maximum(scale, np.finfo(float).tiny)


_CENSORED = 0.3


@functools.lru_cache(maxsize=64)
def _critical_deviation(count: int) -> float:
    random = np.random.default_rng(count)
    largest = []
    for rows in _portions(count):
        values = random.laplace(size=(rows, count))
        away = values - np.median(values, axis=1, keepdims=True)
        largest.append(away.max(axis=1) / upper_spreads(away))
    return float(np.quantile(np.concatenate(largest), 1 - STRAGGLER_ALARM))


def variance_left(ordered: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """(share of the variance that the best split in two leaves, its place) of each row."""
    count = ordered.shape[1]
    ordered = ordered - ordered.mean(axis=1, keepdims=True)
    least = max(count // 5, 2)
    size = np.arange(least, count - least + 1)
    sums = np.cumsum(ordered, axis=1)[:, size - 1]
    between = sums**2 / size + sums**2 / (count - size)
    total = np.maximum((ordered**2).sum(axis=1), np.finfo(float).tiny)
    best = between.argmax(axis=1)
    return 1 - between.max(axis=1) / total, size[best]


@functools.lru_cache(maxsize=64)
def critical_split(count: int) -> float:
    random = np.random.default_rng(count)
    left = [
        variance_left(np.sort(random.random((rows, count)), axis=1))[0] for rows in _portions(count)
    ]
    return float(np.quantile(np.concatenate(left), FALSE_ALARM))


def ranks_of(times: Floats) -> Floats:
    """Ranks 1..n (n,); equal times share the mean of theirs."""
    _, place, count = np.unique(times, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[place].astype(np.float64)


def tabulated(count: int) -> int:
    """The length whose critical values serve a run of ``count``: within 12 % of it.

    They change with the logarithm of the length at most, and each takes a simulation.
    """
    coarse = max(1 << max(count.bit_length() - 4, 0), 1)
    return min(count - count % coarse, LONGEST)


def _portions(count: int) -> list[int]:
    """Rows of each simulated portion: 2 million values at most at once."""
    rows = max(1, min(_DRAWS, 2_000_000 // count))
    return [rows] * max(1, _DRAWS // rows)


Bools = npt.NDArray[np.bool_]

LEAST = 8
"""Fewer iterations than this cannot tell a warm-up or a straggler from chance."""


STRAGGLER_LEAST = 0.05
"""A straggler, a warm-up or another level differs by at least this share of the usual time."""

LEVEL_LEAST = 0.02
"""Drift and two levels in one run are told only if they change the time by this share."""


@dataclass(frozen=True)
class SteadyState:
    """What the times of a run's iterations say about each other."""

    times_ms: Floats
    """Times of the iterations in run order (n,), milliseconds."""
    first: int
    """The first steady iteration; those before it are warm-up."""
    outliers: Bools
    """Stragglers (n,): steady iterations that took much longer than the usual one."""
    usual_ms: float
    """Median of the steady iterations."""
    spread_ms: float
    """Their spread: 1.4826 times the median absolute deviation, so sigma if they are normal."""
    threshold_ms: float
    """From here an iteration is a straggler; infinite where too few ran to tell."""
    drift: float | None
    """Change of the time over the steady iterations as a share of the usual one, where its
    trend is significant (Mann-Kendall); None where it is not."""
    shift: int | None
    """The iteration from which a later part of the run keeps another level, if one does."""
    levels_ms: tuple[float, float] | None
    """The two times around which the steady iterations gather, where there are two."""

    @property
    def warm_up(self) -> Bools:
        """Which iterations (n,) are warm-up."""
        return np.arange(len(self.times_ms)) < self.first

    @property
    def steady(self) -> Bools:
        """Which iterations (n,) stand for the run: neither warm-up nor stragglers."""
        return ~self.warm_up & ~self.outliers

    @property
    def straggler_share(self) -> float:
        """What stragglers took beyond the usual time, as a share of the run after warm-up."""
        after = self.times_ms[self.first :]
        extra = (after - self.usual_ms)[self.outliers[self.first :]].sum()
        return float(extra / after.sum()) if after.sum() > 0 else 0.0

    @property
    def summary(self) -> str:
        """The judgement in plain sentences."""
        return " ".join(_sentences(self))


def steady_state(times_ms: npt.ArrayLike) -> SteadyState:
    """Tell warm-up, stragglers, drift and two levels from ordinary scatter.

    * Warm-up: change point of the mean rank (the largest standardised rank sum over all
      beginnings up to half the run; Pettitt 1979), repeated on the rest until none is found;
      then up to six leading iterations all of which are slower than chance allows.
    * Stragglers: beyond ``median + q * spread above the median`` where ``q`` is exceeded by the
      largest of that many double-exponential values in 1 of 40 runs: the heavy tail of
      ordinary timings is no straggler.
    * Drift: Mann-Kendall's test with Theil and Sen's slope. Two levels: the best split in two
      groups leaves less variance than any split of evenly spread values does.

    Tests on ranks are widened by the correlation of neighbouring iterations.

    Args:
        times_ms: times in run order (n,), milliseconds.

    Raises:
        InputError: no times, or times that are negative or not finite.
    """
    times = np.asarray(times_ms, dtype=np.float64).ravel()
    if not len(times) or not np.isfinite(times).all() or (times < 0).any():
        raise InputError(f"iteration times must be finite and not negative, not {times[:5]} ...")
    if len(times) < LEAST:
        usual = float(np.median(times))
        nothing = np.zeros(len(times), dtype=bool)
        spread = _spread(times, usual)
        return SteadyState(times, 0, nothing, usual, spread, math.inf, None, None, None)
    first, shift = _changes(times)
    first = _past_slow_beginning(times, first)
    rest = times[first:]
    limit = _threshold(rest)
    slow = np.concatenate([np.zeros(first, dtype=bool), rest > limit])
    kept = rest[rest <= limit]
    usual = float(np.median(kept))
    return SteadyState(
        times_ms=times,
        first=first,
        outliers=slow,
        usual_ms=usual,
        spread_ms=_spread(kept, usual),
        threshold_ms=limit,
        drift=None if shift is not None else _drift(kept),
        shift=shift,
        levels_ms=None if shift is not None else _two_levels(kept),
    )


def _changes(times: Floats) -> tuple[int, int | None]:
    """(first iteration after the warm-up, iteration of a later lasting change or None)."""
    first, last = 0, len(times)
    while last - first >= LEAST:
        cut = _change_point(times[first:last])
        if cut is None:
            break
        if cut > (last - first) // 2:
            last = first + cut  # a later change; what comes before it may begin with warm-up
        else:
            first += cut
    return first, last if last < len(times) else None


def _change_point(times: Floats) -> int | None:
    """How many iterations at the beginning differ from the rest, if the difference is no chance."""
    count = len(times)
    scores = rank_sums(ranks_of(times)[None, :])[0]
    cut = int(np.argmax(scores)) + 1
    if min(cut, count - cut) < 2:
        return None  # a single one is judged by its size
    before, after = np.median(times[:cut]), np.median(times[cut:])
    spread = _spread(times[cut:], after)
    change = abs(before - after)
    if change < max(STRAGGLER_LEAST * after, spread):
        return None
    residual = np.concatenate([times[:cut] - before, times[cut:] - after])
    if scores[cut - 1] < critical_rank(count) * _correlation_factor(residual):
        return None
    # Ranks find that there is a change; where it is, the levels tell better: the place that
    # leaves the least absolute distance from them.
    gain = np.cumsum(np.abs(times - before) - np.abs(times - after))[1 : count - 1]
    return int(np.argmin(gain)) + 2


def _past_slow_beginning(times: Floats, first: int) -> int:
    """Warm-up also takes a few leading iterations all of which are slow beyond chance.

    Too few for their ranks to tell, but of a size that the rest does not have.
    """
    while len(times) - first >= LEAST:
        rest = times[first:]
        limits = critical_beginnings(tabulated(len(rest)))
        usual = np.array([np.median(rest[size:]) for size in range(1, len(limits) + 1)])
        heights = beginnings(rest[None, :], len(limits))[0]
        slow = np.minimum.accumulate(rest[: len(limits)]) >= (1 + STRAGGLER_LEAST) * usual
        beyond = np.flatnonzero((heights > limits) & slow)
        if not len(beyond):
            break
        first += int(beyond[-1]) + 1
    return first


def _threshold(times: Floats) -> float:
    """From here an iteration is a straggler, ms."""
    usual = float(np.median(times))
    reach = critical_deviation(len(times)) * float(upper_spreads(times[None, :] - usual)[0])
    return usual + max(reach, STRAGGLER_LEAST * usual)


def _drift(times: Floats) -> float | None:
    """Change over all of ``times`` as a share of their median, where its trend is no chance."""
    if len(times) < LEAST:
        return None
    place = np.arange(len(times))
    if len(times) > LONGEST:  # pairs grow with the square; evenly chosen ones keep the trend
        place = np.linspace(0, len(times) - 1, LONGEST).astype(int)
        times = times[place]
    count = len(times)
    first, second = np.triu_indices(count, 1)
    difference = times[second] - times[first]
    score = np.sign(difference).sum()
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    slope = float(np.median(difference / (place[second] - place[first])))
    usual = float(np.median(times))
    residual = times - slope * place
    z = abs(score) / deviation / _correlation_factor(residual)
    change = slope * float(place[-1]) / usual if usual else 0.0
    return change if z > _TWO_SIDED and abs(change) >= LEVEL_LEAST else None


_TWO_SIDED = 2.576
"""Standard normal quantile that 1 of 100 exceeds in either direction (``FALSE_ALARM``)."""


def _two_levels(times: Floats) -> tuple[float, float] | None:
    """The medians of two groups, each a fifth or more, where the times gather in two."""
    if len(times) < 2 * LEAST:
        return None
    ordered = np.sort(times)
    left, cut = variance_left(ordered[None, :])
    if left[0] > critical_split(tabulated(len(times))):
        return None
    low, high = np.median(ordered[: cut[0]]), np.median(ordered[cut[0] :])
    return (float(low), float(high)) if high - low >= LEVEL_LEAST * low else None


def _spread(times: Floats, usual: float) -> float:
    return float(1.4826 * np.median(np.abs(times - usual)))


def _correlation_factor(residual: Floats) -> float:
    """By how much neighbours' correlation widens a rank statistic: sqrt((1 + r) / (1 − r)).

    Of ranks, so that a straggler does not hide it; uncorrelated within chance counts as 0.
    """
    ranks = ranks_of(residual)
    ranks = ranks - ranks.mean()
    power = float((ranks**2).sum())
    if power <= 0:
        return 1.0
    r = float((ranks[1:] * ranks[:-1]).sum()) / power
    r = min(r, 0.9) if r > 1.0 / math.sqrt(len(ranks)) else 0.0
    return math.sqrt((1 + r) / (1 - r))


def _sentences(state: SteadyState) -> list[str]:
    count = len(state.times_ms)
    if count < LEAST:
        return [
            f"Only {count} iterations: too few to tell warm-up or stragglers from chance "
            f"({LEAST} are needed)."
        ]
    said = []
    if state.first:
        warm = float(np.median(state.times_ms[: state.first]))
        many = f"the first {state.first} iterations are" if state.first > 1 else "iteration 0 is"
        said.append(
            f"Warm-up: {many} left out ({milliseconds(warm)} against "
            f"{milliseconds(state.usual_ms)} afterwards, {warm / state.usual_ms - 1:+.0%})."
        )
    else:
        said.append("No warm-up is left in the measured iterations.")
    slow = np.flatnonzero(state.outliers)
    if len(slow):
        listed = ", ".join(map(str, slow[:8])) + (", …" if len(slow) > 8 else "")
        said.append(
            f"Stragglers: {len(slow)} of {count - state.first} ({listed}) took over "
            f"{milliseconds(state.threshold_ms)}; they cost {state.straggler_share:.1%} of the "
            "time."
        )
    else:
        said.append("No stragglers.")
    if state.shift is not None:
        before, after = (
            float(np.median(part))
            for part in (
                state.times_ms[state.first : state.shift],
                state.times_ms[state.shift :],
            )
        )
        said.append(
            f"From iteration {state.shift} on the level is another: {milliseconds(after)} instead "
            f"of {milliseconds(before)}; something changed while it was measured."
        )
    if state.drift is not None:
        said.append(
            f"The time drifts by {state.drift:+.1%} from the first to the last steady iteration."
        )
    if state.levels_ms is not None:
        low, high = state.levels_ms
        said.append(
            f"The iterations gather around two times, {milliseconds(low)} and "
            f"{milliseconds(high)}: they do not all do the same, or the machine has two speeds."
        )
    share = state.spread_ms / state.usual_ms if state.usual_ms else 0.0
    said.append(
        f"A steady iteration takes {milliseconds(state.usual_ms)}, with a spread of {share:.1%} "
        f"over {int(state.steady.sum())} of them."
    )
    return said
