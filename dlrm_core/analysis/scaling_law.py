"""How time grows with a parameter: time = a + b x^c, with an interval for the exponent.

Times of computer programs scatter by a share of themselves, so residuals are relative.
For a given exponent the two coefficients are a linear least-squares problem with
non-negative solutions; the exponent is found by scanning, and its interval is the
likelihood profile's: all exponents whose sum of squares is within F(1, df) of the least
(Bates and Watts, Nonlinear Regression Analysis, section 6.1; F(1, df) is Student's t squared).
Where the data do not speak against it, the plainer law is told: no growth, growth from
zero, or growth in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_core.analysis.intervals import CONFIDENCE, Interval, t_quantile
from dlrm_core.errors import InputError

STEP = 0.02
EXPONENTS = np.round(np.arange(-2.0, 4.0001, STEP), 2)
FLOOR = 0.02
"""Relative noise from run to run that is assumed at least, whatever one run says of itself."""

KNOWN = 3
"""How many residuals the known noise counts for."""

FLAT = 0.1
"""Mean slope below which a growth within the noise is told as none."""

LEAST = 4
"""Distinct sizes that three unknowns need before they can be tested."""

OPEN = 2.0
"""An exponent's interval wider than this leaves the law open."""

DECISIVE = 0.5
"""An exponent's interval wider than this decides nothing."""


@dataclass(frozen=True)
class Law:
    """A fitted law ``a + b x^c`` in milliseconds."""

    a: float
    """Constant part, ms."""
    b: float
    c: float
    exponent: Interval
    """Of c in the full law; without bounds (NaN) where the sizes are too few."""
    r2: float
    """Share of the (relative) scatter that the law explains; NaN of a constant."""
    kind: str
    """``constant``, ``linear``, ``power``, ``unsettled`` (too few sizes or too much scatter)."""
    slope: float
    """Mean slope in the log-log picture, from the smallest size to the largest: doubling the
    size takes 2^slope times as long."""
    points: int
    smallest: float
    largest: float

    def __call__(self, x: np.ndarray | float) -> np.ndarray:
        """Milliseconds at size x."""
        return np.asarray(self.a + self.b * np.asarray(x, dtype=float) ** self.c)

    @property
    def break_even(self) -> float:
        """Size at which the growing part is as long as the constant one; NaN without either."""
        if self.a <= 0 or self.b <= 0 or self.c <= 0:
            return math.nan
        return float((self.a / self.b) ** (1 / self.c))

    def sentence(self, name: str = "x") -> str:
        """The law in words."""
        between = f"between {name} {_size(self.smallest)} and {_size(self.largest)}"
        if self.kind == "constant":
            return f"does not depend on {name} {between}"
        if self.kind == "unsettled":
            return (
                f"{self.points} points with this scatter leave the law open; on average a "
                f"doubling takes {2**self.slope:.2f} times as long {between}"
            )
        e = self.exponent
        bounds = f"exponent {e.mid:.2f}, {e.low:.2f} to {e.high:.2f}"
        if self.kind == "linear":
            sure = e.high - e.low <= DECISIVE
            text = f"linear in {name}" if sure else f"may be linear in {name}"
        elif self.c < 0:
            text = f"falls as {name}^{self.c:.2f}"
        else:
            how = "faster" if self.c > 1 else "slower"
            text = f"grows as {name}^{self.c:.2f}, {how} than linear"
        text += f" ({bounds})"
        if self.break_even > self.smallest:
            text += f"; constant overhead dominates below {name} = {_size(self.break_even)}"
        return text


def fit_law(
    x: Sequence[float], time_ms: Sequence[float], relative_error: float | None = None
) -> Law:
    """Fit ``a + b x^c`` with a, b >= 0 (b may be negative only as a falling power).

    Args:
        x: (n,) sizes, positive; sizes may repeat.
        time_ms: (n,) times, positive.
        relative_error: known relative standard error of a time, if there is one.

    Raises:
        InputError: fewer than two distinct sizes, or values that are not positive.
    """
    sizes, times = np.asarray(x, dtype=float), np.asarray(time_ms, dtype=float)
    distinct = len(np.unique(sizes))
    if distinct < 2 or len(sizes) != len(times):
        raise InputError(
            f"a scaling law needs at least 2 sizes, not {distinct} ({len(times)} times)"
        )
    if not (np.all(np.isfinite(times)) and np.all(times > 0) and np.all(sizes > 0)):
        raise InputError("a scaling law needs positive sizes and times")
    noise = max(FLOOR, relative_error or 0.0)
    scale = float(np.exp(np.log(sizes).mean()))
    u = sizes / scale
    slope = _mean_slope(sizes, times)
    ends = (len(sizes), float(sizes.min()), float(sizes.max()))
    squares = np.array([_solve(u, times, c)[0] for c in EXPONENTS])
    none = Interval(math.nan, math.nan, math.nan, 0.0)
    constant = _weighted_constant(times)
    total = float((((times - constant) / times) ** 2).sum())
    # few residuals say little of the noise, so what is known of it counts as some more
    freedom = max(len(times) - 3, 0) + KNOWN
    least = float(squares.min())
    variance = (least + KNOWN * noise**2) / freedom
    slack = variance * t_quantile(0.5 + CONFIDENCE / 2, freedom) ** 2
    if total - least <= 2 * slack and abs(slope) < FLAT:
        return Law(constant, 0.0, 0.0, none, math.nan, "constant", slope, *ends)
    if distinct < LEAST:
        _, a, b = _solve(u, times, 1.0)
        return Law(a, b / scale, 1.0, none, math.nan, "unsettled", slope, *ends)
    best = _refined(u, times, float(EXPONENTS[squares.argmin()]))
    least = min(least, _solve(u, times, best)[0])
    kept = EXPONENTS[squares <= least + slack]
    low, high = (float(kept.min()), float(kept.max())) if len(kept) else (best, best)
    low, high = min(low, best) - STEP / 2, max(high, best) + STEP / 2
    kind, c = ("linear", 1.0) if low <= 1 <= high else ("power", best)
    square, a, b = _solve(u, times, c)
    # a constant part that the data do not ask for is left out
    bare = _power(u, times, 1.0 if kind == "linear" else None)
    if bare[0] <= least + slack:
        square, a, b, c = bare[0], 0.0, bare[1], bare[2]
    low, high = min(low, c), max(high, c)
    exponent = Interval(low, best if kind == "linear" else c, high, CONFIDENCE)
    if high - low > OPEN:
        kind = "unsettled"
    r2 = 1 - square / total if total > 0 else math.nan
    return Law(a, b / scale**c, c, exponent, r2, kind, slope, *ends)


def _solve(u: np.ndarray, times: np.ndarray, c: float) -> tuple[float, float, float]:
    """(sum of relative squares, a, b) of the best a, b >= 0 for one exponent."""
    if c == 0:
        a = _weighted_constant(times)
        return float((((times - a) / times) ** 2).sum()), a, 0.0
    growing = u**c
    design = np.stack([1 / times, growing / times], axis=1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones(len(u)), rcond=None)
    if a < 0:
        a, b = 0.0, _weighted(growing, times)
    elif b < 0:
        a, b = _weighted_constant(times), 0.0
    residual = (times - a - b * growing) / times
    return float((residual**2).sum()), float(a), float(b)


def _weighted(growing: np.ndarray, times: np.ndarray) -> float:
    """b of the least relative squares of b · growing."""
    ratio = growing / times
    return float(ratio.sum() / (ratio**2).sum())


def _weighted_constant(times: np.ndarray) -> float:
    return _weighted(np.ones(len(times)), times)


def _power(u: np.ndarray, times: np.ndarray, c: float | None) -> tuple[float, float, float]:
    """(sum of relative squares, b, c) of b u^c; the exponent is given or found."""

    def cost(exponent: float) -> float:
        growing = u**exponent
        return float((((times - _weighted(growing, times) * growing) / times) ** 2).sum())

    if c is None:
        start = EXPONENTS[np.argmin([cost(float(e)) for e in EXPONENTS])]
        c = _golden(cost, float(start) - STEP, float(start) + STEP)
    return cost(c), _weighted(u**c, times), c


def _refined(u: np.ndarray, times: np.ndarray, start: float) -> float:
    return _golden(lambda c: _solve(u, times, c)[0], start - STEP, start + STEP)


def _golden(cost: Callable[[float], float], low: float, high: float) -> float:
    """The place of the least cost between two bounds."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if cost(left) <= cost(right) else (left, high)
    return (low + high) / 2


def _mean_slope(x: np.ndarray, times: np.ndarray) -> float:
    smallest, largest = x == x.min(), x == x.max()
    rise = np.log(times[largest]).mean() - np.log(times[smallest]).mean()
    return float(rise / math.log(x.max() / x.min()))


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
