"""Many runs as plain tables: what was set in each, how long each part took, by which law.

Tables and not a package's objects, so that a thousand runs are a thousand rows. For Hatchet
and Thicket there is ``Profile.to_hatchet()`` of each run (docs/pages.md shows how).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.files import read_json
from dlrm_core.parts import COMPONENTS
from dlrm_workbook.analysis.changes import change_text
from dlrm_workbook.analysis.compare import part_estimates, step_estimate
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.ground.intervals import CONFIDENCE, Interval, t_quantile
from dlrm_workbook.recordings.hatchet_frames import thicket
from dlrm_workbook.recordings.profile import Profile

# ---- how time grows with a parameter: time = a + b x^c, with an interval for the exponent -----

STEP = 0.02
"""Between the exponents that are tried."""

EXPONENTS = np.round(np.arange(-2.0, 4.0001, STEP), 2)
FLOOR = 0.02
"""Relative noise from run to run that is assumed at least, whatever one run says of itself."""

KNOWN = 3
"""How many residuals the known noise counts for."""

FLAT_SLOPE = 0.1
"""Mean slope below which growth within the noise counts as none."""

LEAST_SIZES = 4
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
                f"doubling multiplies the time by {2**self.slope:.2f} {between}"
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
    smallest, largest = float(sizes.min()), float(sizes.max())
    ends = (len(sizes), smallest, largest)
    rise = np.log(times[sizes == largest]).mean() - np.log(times[sizes == smallest]).mean()
    slope = float(rise / math.log(largest / smallest))
    squares = np.array([_solve(u, times, c)[0] for c in EXPONENTS])
    none = Interval(math.nan, math.nan, math.nan, 0.0)
    constant = _weighted(np.ones(len(times)), times)
    total = float((((times - constant) / times) ** 2).sum())
    # few residuals say little of the noise, so what is known of it counts as some more
    freedom = max(len(times) - 3, 0) + KNOWN
    least = float(squares.min())
    variance = (least + KNOWN * noise**2) / freedom
    slack = variance * t_quantile(0.5 + CONFIDENCE / 2, freedom) ** 2
    if total - least <= 2 * slack and abs(slope) < FLAT_SLOPE:
        return Law(constant, 0.0, 0.0, none, math.nan, "constant", slope, *ends)
    if distinct < LEAST_SIZES:
        _, a, b = _solve(u, times, 1.0)
        return Law(a, b / scale, 1.0, none, math.nan, "unsettled", slope, *ends)
    start = float(EXPONENTS[squares.argmin()])
    best = _golden(lambda c: _solve(u, times, c)[0], start - STEP, start + STEP)
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
        a = _weighted(np.ones(len(times)), times)
        return float((((times - a) / times) ** 2).sum()), a, 0.0
    growing = u**c
    design = np.stack([1 / times, growing / times], axis=1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones(len(u)), rcond=None)
    if a < 0:
        a, b = 0.0, _weighted(growing, times)
    elif b < 0:
        a, b = _weighted(np.ones(len(times)), times), 0.0
    residual = (times - a - b * growing) / times
    return float((residual**2).sum()), float(a), float(b)


def _weighted(growing: np.ndarray, times: np.ndarray) -> float:
    """b of the least relative squares of b · growing."""
    ratio = growing / times
    return float(ratio.sum() / (ratio**2).sum())


def _power(u: np.ndarray, times: np.ndarray, c: float | None) -> tuple[float, float, float]:
    """(sum of relative squares, b, c) of b u^c; the exponent is given or found."""

    def cost(exponent: float) -> float:
        growing = u**exponent
        return float((((times - _weighted(growing, times) * growing) / times) ** 2).sum())

    if c is None:
        start = EXPONENTS[np.argmin([cost(float(e)) for e in EXPONENTS])]
        c = _golden(cost, float(start) - STEP, float(start) + STEP)
    return cost(c), _weighted(u**c, times), c


def _golden(cost: Callable[[float], float], low: float, high: float) -> float:
    """The place of the least cost between two bounds."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if cost(left) <= cost(right) else (left, high)
    return (low + high) / 2


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


# ---- tables of many runs ------------------------------------------------------------------------

WHOLE_STEP = "step"
"""Component of the row that holds the whole iteration."""

SHORT = {
    "training.batch_size": "batch",
    "model.embedding_dim": "dim",
    "data.indices_per_lookup": "pooling",
    "model.tables": "tables",
    "model.table_rows": "rows",
    "training.threads": "threads",
}
"""What the field calls these leaves."""


def short_leaf(leaf: str) -> str:
    """A leaf as figures name it: ``batch``, or its last word."""
    return SHORT.get(leaf, leaf.rpartition(".")[2].replace("_", " "))


def part_table(profiles: Mapping[str, Profile]) -> pd.DataFrame:
    """Mean time of each part in each run, and of the whole step (component ``step``)."""
    columns = ["run", "component", "phase", "time_ms", "se_ms"]
    pieces = [pd.DataFrame(columns=columns)] if not profiles else []
    for name, profile in profiles.items():
        whole = [(name, WHOLE_STEP, "", *step_estimate(profile)[:2])]
        parts = part_estimates(profile).assign(run=name)[columns]
        pieces += [pd.DataFrame(whole, columns=columns), parts]
    return pd.concat(pieces, ignore_index=True)


def settings_table(parameters: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """The leaves that differ between runs, by their sections: a row a run (index), a column a leaf.

    A list of equal numbers becomes that number, any other list text (512-512-64). How a
    run was measured (``profiling``) is left out.
    """
    rows = {
        run: {
            f"{section}.{leaf}": _scalar(value)
            for section, content in sections.items()
            if isinstance(content, Mapping) and section not in ("profiling", "sweep")
            for leaf, value in content.items()
        }
        for run, sections in parameters.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index", dtype=object)
    varying = [leaf for leaf in table.columns if table[leaf].map(repr).nunique() > 1]
    return table[varying]


def _scalar(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if value and all(item == value[0] for item in value):
            return value[0]
        return "-".join(map(str, value))
    return value


SWEEP = "sweep.json"
"""The record of a sweep, in its folder."""


def swept_runs(folder: Path, notebook: str) -> dict[str, Path]:
    """Run folder of a notebook in each point of a sweep that finished it: label to folder. An
    InputError says that the folder holds no record of a sweep."""
    return {
        change_text(row["change"]): folder / row["folders"][notebook]
        for row in read_json(folder / SWEEP)["points"]
        if notebook in row["folders"]
    }


def across_runs(frames: Mapping[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``metadata`` and rows of a Thicket of runs; both empty, with the reason, where none is."""
    reason = "one run is no ensemble; give a sweep (`-p sweep_folder=FOLDER`) or `other_run`"
    try:
        if len(frames) > 1:
            ensemble = thicket(frames)
            return ensemble.metadata, ensemble.dataframe
    except MissingToolError as error:
        reason = str(error)
    return unmeasured([], reason), unmeasured([], reason)


def numeric_axes(settings: pd.DataFrame) -> list[str]:
    """Leaves along which a law can be fitted: positive numbers, two values or more."""
    axes = []
    for leaf in settings.columns:
        values = settings[leaf].tolist()
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(values) and min(numbers) > 0 and len(set(numbers)) > 1:
            axes.append(leaf)
    return axes


@dataclass(frozen=True)
class Curve:
    """How one part grows along one leaf, everything else held."""

    component: str
    held: str
    """The other leaves' values, such as ``dim 32``; empty where none varies."""
    x: np.ndarray
    time_ms: np.ndarray
    law: Law


def scaling(times: pd.DataFrame, settings: pd.DataFrame, leaf: str) -> list[Curve]:
    """Fit a law to every part along a leaf.

    Leaves that change with it (``bottom_mlp`` with ``embedding_dim``) count as part of it; the
    others are held: each of their combinations has its own curve. ``times`` is what
    :func:`part_table` gives, ``settings`` what :func:`settings_table` gives. Returns curves in the
    order of a step, the whole step first; a part without time, or with fewer than two sizes, has
    none.
    """
    held = [
        other
        for other in settings.columns
        if other != leaf
        and settings.groupby(leaf)[other].agg(lambda v: v.map(repr).nunique()).max() > 1
    ]
    # one name for each combination, and only one of leaves that always change together
    by_pattern: dict[bytes, str] = {}
    numeric = numeric_axes(settings)
    for other in sorted(held, key=lambda name: name not in numeric):
        by_pattern.setdefault(pd.factorize(settings[other].map(repr))[0].tobytes(), other)
    label = {
        run: ", ".join(f"{short_leaf(other)} {row[other]}" for other in by_pattern.values())
        for run, row in settings.iterrows()
    }
    squared = times.assign(variance=times["se_ms"] ** 2)
    table = squared.groupby(["run", "component"], as_index=False)[["time_ms", "variance"]].sum()
    table["x"] = table["run"].map(settings[leaf]).astype(float)
    table["held"] = table["run"].map(label)
    curves = []
    for (component, text), group in table.groupby(["component", "held"], sort=False):
        group = group[group["time_ms"] > 0].sort_values("x")
        if group["x"].nunique() < 2:
            continue
        relative = np.sqrt(group["variance"]) / group["time_ms"]
        error = float(relative.median()) if relative.notna().any() else None
        law = fit_law(group["x"].tolist(), group["time_ms"].tolist(), error)
        points = group["x"].to_numpy(), group["time_ms"].to_numpy()
        curves.append(Curve(str(component), str(text), *points, law))
    order = {name: number for number, name in enumerate((WHOLE_STEP, *COMPONENTS))}
    return sorted(curves, key=lambda curve: order.get(curve.component, len(order)))


def fitted_curves(times: pd.DataFrame, settings: pd.DataFrame) -> dict[str, list[Curve]]:
    """Leaf to the parts' laws along it; laws need three runs or more. ``times`` is what
    :func:`part_table` gives, ``settings`` what :func:`settings_table` gives."""
    axes = numeric_axes(settings) if len(settings) > 2 else []
    curves = {leaf: scaling(times, settings, leaf) for leaf in axes}
    return {leaf: fits for leaf, fits in curves.items() if fits}


def curves_of_runs(profiles: Mapping[str, Profile]) -> dict[str, list[Curve]]:
    """:func:`fitted_curves` of profiles by name."""
    sections = {name: p.meta.get("parameters") or {} for name, p in profiles.items()}
    return fitted_curves(part_table(profiles), settings_table(sections))


def law_table(curves: Mapping[str, Sequence[Curve]]) -> pd.DataFrame:
    """All laws in rows, for readers and ``sweep.json``; empty without any. ``curves`` is what
    :func:`fitted_curves` gives."""
    rows = []
    for leaf, fits in curves.items():
        for curve in fits:
            law = curve.law
            row: dict[str, Any] = {"leaf": leaf, "component": curve.component, "phase": ""}
            row |= {"held": curve.held, "points": law.points}
            row |= {"a_ms": law.a, "b_ms": law.b, "c": law.c}
            row |= {"c_low": law.exponent.low, "c_high": law.exponent.high}
            row |= {name: getattr(law, name) for name in ("slope", "r2", "kind")}
            rows.append(row | {"sentence": law.sentence(short_leaf(leaf))})
    return pd.DataFrame(rows)
