"""Which iterations stand for the run: warm-up, outliers and drift, detected statistically.

Nothing here counts iterations by convention. A warm-up is a beginning whose times differ in
rank from what follows, by more than chance lets any beginning differ. An outlier is an
iteration beyond what the slowest of that many ordinary iterations reaches by chance (a
straggler), or below what the fastest reaches (it did not do all the work: a recording's end
cuts the last iteration short). Ordinary scatter is taken to have exponential tails: timings do,
and lighter tails raise fewer alarms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.text import counted
from dlrm_workbook.ground.arrays import Bools, Floats
from dlrm_workbook.ground.units import milliseconds, signed_percent

FALSE_ALARM = 0.01
"""Chance of each judgement (warm-up, drift, two levels) on a run without any."""

STRAGGLER_ALARM = 0.025
"""The same of stragglers, and of short iterations, where scatter has exponential tails; far less
where it is normal."""

LEAST_TO_JUDGE = 8
"""Fewer iterations than this cannot tell a warm-up or a straggler from chance."""

LEAST_OF_SPLIT = 4
"""Fewer iterations than this cannot tell which of two speeds is the usual one."""

SPLIT_TIMES = 1.5
"""Times the median of the faster half: slower iterations than this do something else."""

SPLIT_SHARE = 0.15
"""Of all time, lost in these, and no iteration between them and the others: two groups."""

SPLIT_APART = 1.25
"""Times the slowest of the others, at least, that the fastest of the slow ones takes."""

SINGLE_APART = 4.0
"""The same of a single slow iteration: a straggler by chance seldom reaches it."""

COLD_APART = 2.0
"""Times the slowest of the others, at least three, that a first iteration takes which loads and
compiles: however few they are, it is a warm-up."""

STRAGGLER_LEAST = 0.05
"""An outlier, a warm-up or another level differs by at least this share of the usual time."""

LEVEL_LEAST = 0.02
"""Drift and two levels in one run are reported only if they change the time by this share."""

MOST_SLOW = 6
"""Beginnings of up to this many iterations are judged by their size, longer ones by ranks."""

MOST_PAIRED = 1000
"""Trends of longer runs are computed from this many evenly chosen iterations."""

_CENSORED = 0.3
_TWO_SIDED = 2.576
"""Standard normal quantile that 1 of 100 exceeds in either direction (``FALSE_ALARM``)."""


@dataclass(frozen=True)
class SteadyState:
    """What the times of a run's iterations say about each other."""

    times_ms: Floats
    """Times of the iterations in run order (n,), milliseconds."""
    first: int
    """The first steady iteration; those before it are warm-up."""
    outliers: Bools
    """Iterations (n,) after the warm-up that took much longer or much less than the usual one."""
    usual_ms: float
    """Median of the steady iterations."""
    spread_ms: float
    """Their spread: 1.4826 times the median absolute deviation, so sigma if they are normal."""
    threshold_ms: float
    """From here an iteration is a straggler; infinite where too few ran to tell."""
    least_ms: float
    """Below this an iteration is a short one; 0 where too few ran to tell."""
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
        """Which iterations (n,) stand for the run: neither warm-up nor outliers."""
        return ~self.warm_up & ~self.outliers

    @property
    def mean_ms(self) -> float:
        """The mean steady iteration is what pages name; they judge by the median, ``usual_ms``."""
        return float(self.times_ms[self.steady].mean())

    @property
    def stragglers(self) -> Bools:
        """Which iterations (n,) are outliers that took longer than the usual one."""
        return self.outliers & (self.times_ms > self.usual_ms)

    @property
    def short(self) -> Bools:
        """Which iterations (n,) are outliers that took less than the usual one."""
        return self.outliers & (self.times_ms < self.usual_ms)

    @property
    def straggler_share(self) -> float:
        """What stragglers took beyond the usual time, as a share of the run after warm-up."""
        after = self.times_ms[self.first :]
        extra = (after - self.usual_ms)[self.stragglers[self.first :]].sum()
        return float(extra / after.sum()) if after.sum() > 0 else 0.0

    def in_words(self, numbers: Sequence[int] | None = None) -> str:
        """The judgement in plain sentences. ``numbers`` are what each iteration (n,) is called on
        the page; None: 0, 1, ..."""
        return " ".join(_sentences(self, numbers or range(len(self.times_ms))))


def steady_state(times_ms: npt.ArrayLike) -> SteadyState:
    """Tell warm-up, outliers, drift and two levels from ordinary scatter.

    * Warm-up: change point of the mean rank (the largest standardised rank sum over all
      beginnings up to half the run; Pettitt 1979), repeated on the rest until none is found;
      then up to six leading iterations all of which are slower than chance allows. Of four to
      seven the first, if it takes far longer than each of the others.
    * Stragglers: beyond what the largest of that many exponential excesses over the median
      reaches in 1 of 40 runs, in units of their mean. Short iterations: the same below it.
    * Drift: Mann-Kendall's test with Theil and Sen's slope. Two levels: the best split in two
      groups leaves less variance than any split of evenly spread values does.

    Tests on ranks are widened by the correlation of neighbouring iterations. The times (n,) are in
    run order, milliseconds. An InputError refuses no times, or times that are negative or not
    finite.
    """
    times = np.asarray(times_ms, dtype=np.float64).ravel()
    if not len(times) or not np.isfinite(times).all() or (times < 0).any():
        raise InputError(f"iteration times must be finite and not negative, not {times[:5]} ...")
    if LEAST_OF_SPLIT <= len(times) < LEAST_TO_JUDGE and times[0] > COLD_APART * times[1:].max():
        others = steady_state(times[1:])
        outliers = np.append(False, others.outliers)
        return replace(others, times_ms=times, first=others.first + 1, outliers=outliers)
    if len(times) < LEAST_TO_JUDGE:
        slow = _split(times)
        usual = float(np.median(times[~slow]))
        spread = _spread(times[~slow], usual)
        limit = float(times[slow].min()) if slow.any() else math.inf
        return SteadyState(times, 0, slow, usual, spread, limit, 0.0, None, None, None)
    first, shift = _changes(times)
    first = _past_slow_beginning(times, first)
    rest = times[first:]
    limit, least = _thresholds(rest)
    slow = _split(rest) if shift is None else np.zeros(len(rest), dtype=bool)
    if slow.any():
        limit = min(limit, math.nextafter(float(rest[slow].min()), 0.0))
    outside = (rest > limit) | (rest < least)
    kept = rest[~outside]
    usual = float(np.median(kept))
    return SteadyState(
        times_ms=times,
        first=first,
        outliers=np.concatenate([np.zeros(first, dtype=bool), outside]),
        usual_ms=usual,
        spread_ms=_spread(kept, usual),
        threshold_ms=limit,
        least_ms=least,
        drift=None if shift is not None else _drift(kept),
        shift=shift,
        levels_ms=None if shift is not None else _two_levels(kept),
    )


# ---- warm-up ---------------------------------------------------------------------


def _changes(times: Floats) -> tuple[int, int | None]:
    """(first iteration after the warm-up, iteration of a later lasting change or None)."""
    first, last = 0, len(times)
    while last - first >= LEAST_TO_JUDGE:
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
    size = np.arange(1, count)
    sums = pd.Series(times).rank().cumsum().to_numpy()[:-1]
    deviation = np.sqrt(size * (count - size) * (count + 1) / 12)
    scores = np.abs(sums - size * (count + 1) / 2) / deviation  # |z| of Mann-Whitney's test
    cut = int(np.argmax(scores)) + 1
    if min(cut, count - cut) < 2:
        return None  # a single one is judged by its size
    before, after = np.median(times[:cut]), np.median(times[cut:])
    change = abs(before - after)
    if change < max(STRAGGLER_LEAST * after, _spread(times[cut:], after)):
        return None
    residual = np.concatenate([times[:cut] - before, times[cut:] - after])
    # 99 % quantile of the largest score of independent times, within 0.1 for 8 to 1,000 of them
    if scores[cut - 1] < (3.8 - 4.22 / math.sqrt(count)) * _correlation_factor(residual):
        return None
    # Ranks find that there is a change; where it is, the levels tell better: the place that
    # leaves the least absolute distance from them.
    gain = np.cumsum(np.abs(times - before) - np.abs(times - after))[1 : count - 1]
    return int(np.argmin(gain)) + 2


def _past_slow_beginning(times: Floats, first: int) -> int:
    """Warm-up also takes a few leading iterations all of which are slow beyond chance.

    They are too few for their ranks to tell, but of a size that the rest does not have.
    """
    while (count := len(times) - first) >= LEAST_TO_JUDGE:
        most = min(MOST_SLOW, count // 3)
        beyond = 0
        for size in range(1, most + 1):
            rest = times[first + size :]
            usual = float(np.median(rest))
            mean, values = _mean_excess(rest - usual)
            # each of `size` values exceeds the median by chance 1/2, and it by x means by exp(-x)
            reach = _gamma_quantile(0.5**size * most / FALSE_ALARM, values) / size * mean
            if times[first : first + size].min() > usual + max(reach, STRAGGLER_LEAST * usual):
                beyond = size
        if not beyond:
            break
        first += beyond
    return first


# ---- outliers ----------------------------------------------------------------------


def _split(times: Floats) -> Bools:
    """Which iterations (n,) take far longer than the others, if the times form two groups.

    However many they are, up to half: a callback every third step is no tail of the usual ones.
    A single one may be chance unless it is longer than all the others by far; slow ones only at
    the beginning or only at the end are a warm-up or a change.
    """
    count = len(times)
    none = np.zeros(count, dtype=bool)
    if count < LEAST_OF_SPLIT:
        return none
    ordered = np.sort(times)
    usual = float(np.median(ordered[: math.ceil(count / 2)]))
    longer = ordered > SPLIT_TIMES * usual
    if not longer.any() or longer.all():
        return none
    # all that are longer, or those beyond the widest gap among them: some may be on their way back
    widest = ordered[1:] / np.maximum(ordered[:-1], 1e-9) * longer[1:]
    for least in (ordered[longer][0], ordered[1:][widest.argmax()]):
        slow = times >= least
        apart = SPLIT_APART if slow.sum() > 1 else SINGLE_APART
        turns = int(np.count_nonzero(slow[1:] != slow[:-1]))
        lost = float((times[slow] - usual).sum())
        is_group = slow.sum() <= count // 2 and least >= apart * times[~slow].max()
        if is_group and turns >= 2 and lost > SPLIT_SHARE * times.sum():
            return slow
    return none


def lasting_rise(times: npt.ArrayLike, factor: float) -> int | None:
    """The place from which on every time is longer than all before it by a factor. ``times`` (n,)
    are in run order, ``factor`` is 1.5 for half as long again. Returns the place with the largest
    rise, at least two times before and after it; None if the times rise nowhere so."""
    values = np.asarray(times, dtype=np.float64)
    cuts = np.arange(2, len(values) - 1)
    rise = [values[cut:].min() / max(values[:cut].max(), 1e-12) for cut in cuts]
    return int(cuts[np.argmax(rise)]) if rise and max(rise) >= factor else None


def _thresholds(times: Floats) -> tuple[float, float]:
    """(from here an iteration is a straggler, below this it is a short one), ms."""
    usual = float(np.median(times))

    def reach(away: Floats) -> float:
        mean, values = _mean_excess(away)
        by_chance = mean * _gamma_quantile(len(times) // 2 / STRAGGLER_ALARM, values)
        return max(by_chance, STRAGGLER_LEAST * usual)

    return usual + reach(times - usual), max(usual - reach(usual - times), 0.0)


def _mean_excess(away: Floats) -> tuple[float, int]:
    """(mean distance above the median, how many values it rests on), of distances (n,) from it.

    The mean of an exponential tail whose largest three tenths are known only to be large
    (type II censoring; Epstein and Sobel 1953), so that stragglers do not widen it.
    """
    half = len(away) // 2
    above = np.sort(away)[-half:]
    unknown = math.ceil(_CENSORED * half)
    values = half - unknown
    mean = (above[:values].sum() + unknown * above[values - 1]) / values
    return max(float(mean), float(np.finfo(float).tiny)), values


def _gamma_quantile(odds: float, values: int) -> float:
    """How many means an exponential value exceeds once in ``odds``.

    P(x > q mean) = (1 + q / n)^-n where the mean was estimated from n values.
    """
    return values * max(odds ** (1 / values) - 1, 0.0)


# ---- drift, levels, spread -------------------------------------------------------------


def _drift(times: Floats) -> float | None:
    """Change over all of ``times`` as a share of their median, where its trend is no chance."""
    if len(times) < LEAST_TO_JUDGE:
        return None
    place = np.linspace(0, len(times) - 1, min(len(times), MOST_PAIRED)).astype(int)
    times = times[place]
    count = len(times)
    first, second = np.triu_indices(count, 1)
    difference = times[second] - times[first]
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    slope = float(np.median(difference / (place[second] - place[first])))
    usual = float(np.median(times))
    z = abs(np.sign(difference).sum()) / deviation / _correlation_factor(times - slope * place)
    change = slope * float(place[-1]) / usual if usual else 0.0
    return change if z > _TWO_SIDED and abs(change) >= LEVEL_LEAST else None


def _two_levels(times: Floats) -> tuple[float, float] | None:
    """The medians of two groups, each a fifth or more, where the times gather in two."""
    count = len(times)
    if count < 2 * LEAST_TO_JUDGE:
        return None
    ordered = np.sort(times)
    away = ordered - ordered.mean()
    least = max(count // 5, 2)
    size = np.arange(least, count - least + 1)
    sums = np.cumsum(away)[size - 1]
    between = sums**2 / size + sums**2 / (count - size)
    left = 1 - between.max() / max((away**2).sum(), np.finfo(float).tiny)
    # the best split of evenly spread values leaves 1/4 of the variance, less by chance: this
    # in 1 of 100 runs
    if left > 0.25 - 0.63 / math.sqrt(count):
        return None
    cut = size[between.argmax()]
    low, high = float(np.median(ordered[:cut])), float(np.median(ordered[cut:]))
    return (low, high) if high - low >= LEVEL_LEAST * low else None


def _spread(times: Floats, usual: float) -> float:
    return float(1.4826 * np.median(np.abs(times - usual)))


def _correlation_factor(residual: Floats) -> float:
    """By how much neighbours' correlation widens a rank statistic: sqrt((1 + r) / (1 − r)).

    Of ranks, so that a straggler does not hide it; uncorrelated within chance counts as 0.
    """
    ranks = pd.Series(residual).rank().to_numpy()
    ranks = ranks - ranks.mean()
    power = float((ranks**2).sum())
    if power <= 0:
        return 1.0
    r = float((ranks[1:] * ranks[:-1]).sum()) / power
    r = min(r, 0.9) if r > 1.0 / math.sqrt(len(ranks)) else 0.0
    return math.sqrt((1 + r) / (1 - r))


# ---- sentences ---------------------------------------------------------------------


def listed(numbers: Iterable[int], most: int = 8) -> str:
    """The first of some numbers of iterations, as text."""
    texts = [str(number) for number in numbers]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def _sentences(state: SteadyState, numbers: Sequence[int]) -> list[str]:
    count = len(state.times_ms)
    if count < LEAST_TO_JUDGE and state.outliers.any() and not state.first:
        outliers = [numbers[int(row)] for row in np.flatnonzero(state.outliers)]
        return [
            f"{len(outliers)} of {count} iterations ({listed(outliers)}) took "
            f"{SPLIT_TIMES:g} times the median iteration or more; they cost "
            f"{state.straggler_share:.1%} of the time. Too few ran to detect a warm-up."
        ]
    if count < LEAST_TO_JUDGE and not state.first:
        return [
            f"Only {counted(count, 'iteration')}: too few to detect warm-up or stragglers "
            f"({LEAST_TO_JUDGE} are needed)."
        ]
    sentences = ["No warm-up is left in the measured iterations.", "No outliers."]
    if state.first:
        warm = float(np.median(state.times_ms[: state.first]))
        many = f"the first {state.first} iterations are"
        if state.first == 1:
            many = f"iteration {numbers[0]} is"
        sentences[0] = (
            f"Warm-up: {many} left out ({milliseconds(warm)} against "
            f"{milliseconds(state.mean_ms)} afterwards, "
            f"{signed_percent(warm / state.mean_ms - 1, decimals=0)})."
        )
    if state.outliers.any():
        sentences.pop()
    cost = f"{state.straggler_share:.1%} of the time"
    straggling = f"over {milliseconds(state.threshold_ms)}; they cost {cost}"
    for name, rows, how in (
        ("Stragglers", state.stragglers, straggling),
        ("Short iterations", state.short, f"less than {milliseconds(state.least_ms)}"),
    ):
        if places := [numbers[int(row)] for row in np.flatnonzero(rows)]:
            many = f"{len(places)} of {count - state.first} ({listed(places)})"
            sentences.append(f"{name}: {many} took {how}.")
    if state.shift is not None:
        before = float(np.median(state.times_ms[state.first : state.shift]))
        after = float(np.median(state.times_ms[state.shift :]))
        sentences.append(
            f"From iteration {numbers[state.shift]} on, iterations take {milliseconds(after)} "
            f"instead of {milliseconds(before)}: something changed during the measurement."
        )
    if state.drift is not None:
        sentences.append(
            f"The time drifts by {signed_percent(state.drift)} from the first to the last steady "
            "iteration."
        )
    if state.levels_ms is not None:
        low, high = state.levels_ms
        sentences.append(
            f"The iterations cluster around two times, {milliseconds(low)} and "
            f"{milliseconds(high)}: they do not all do the same, or the machine has two speeds."
        )
    share = state.spread_ms / state.usual_ms if state.usual_ms else 0.0
    sentences.append(
        f"The mean of {int(state.steady.sum())} steady iterations is "
        f"{milliseconds(state.mean_ms)}, with a spread of {share:.1%}."
    )
    return sentences


# ---- a shared machine's slow periods ---------------------------------------------------------


def undisturbed(table: pd.DataFrame, settings: Sequence[str], repetition: str) -> pd.DataFrame:
    """The rows of the faster half of the repetitions of each setting.

    Where other guests of a machine come and go, the same work takes up to twice as long for
    seconds (seen in a virtual machine that tells nothing of it: no stolen time, no process). A
    mean or a median then says which period a run fell into. What else runs only ever adds, so
    the slower half says more of that than of the program. The mean of the faster half is what
    we call a time: means of parts then add up to the mean of the whole.

    Args:
        settings: columns; what has the same values there is a repetition of the same thing.
        repetition: column that counts the repetitions. A repetition is as long as its rows'
            ``time_ms`` together. Where there is no such column, all rows are kept.
    """
    if table.empty or repetition not in table.columns:
        return table
    keys = [*settings, repetition]
    times = table.groupby(keys, sort=False)["time_ms"].sum()
    groups = times.groupby(level=list(range(len(settings))), sort=False)
    chosen = times.index[groups.rank(method="first") <= np.ceil(groups.transform("size") / 2)]
    return table[pd.MultiIndex.from_frame(table[keys]).isin(chosen)]
