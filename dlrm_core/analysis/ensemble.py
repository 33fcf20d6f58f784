"""Many runs as plain tables: what was set in each, how long each part took, by which law.

Tables and not a package's objects, so that a thousand runs are a thousand rows. For Hatchet
and Thicket there is ``Profile.to_hatchet()`` of each run (docs/compare.md shows how).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.analysis.compare import part_estimates, step_estimate
from dlrm_core.analysis.scaling_law import Law, fit_law
from dlrm_core.parts import COMPONENTS
from dlrm_core.profiling.profile import Profile

WHOLE = "step"
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
    """Mean time of each part in each run, and of the whole step.

    Returns:
        ``run``, ``component`` (``step`` for the whole), ``phase``, ``time_ms``, ``se_ms``.
    """
    pieces = []
    for name, profile in profiles.items():
        parts = part_estimates(profile)[["component", "phase", "time_ms", "se_ms"]]
        time, se, _ = step_estimate(profile)
        whole = pd.DataFrame(
            {"component": [WHOLE], "phase": [""], "time_ms": [time], "se_ms": [se]}
        )
        pieces.append(pd.concat([whole, parts]).assign(run=name))
    columns = ["run", "component", "phase", "time_ms", "se_ms"]
    if not pieces:
        return pd.DataFrame(columns=columns)
    return pd.concat(pieces, ignore_index=True)[columns]


def settings_table(parameters: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """The leaves that differ between runs: a row a run (index), a column a leaf.

    Args:
        parameters: run to its sections.

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
    phase: str
    held: str
    """The other leaves' values, such as ``dim 32``; empty where none varies."""
    x: np.ndarray
    time_ms: np.ndarray
    law: Law


def scaling(
    times: pd.DataFrame, settings: pd.DataFrame, leaf: str, by_phase: bool = False
) -> list[Curve]:
    """Fit a law to every part along a leaf.

    Leaves that change with it (``bottom_mlp`` with ``embedding_dim``) count as part of it;
    the others are held: each of their combinations has its own curve.

    Args:
        times: what :func:`part_table` gives.
        settings: what :func:`settings_table` gives.
        by_phase: a curve a phase instead of one a component.

    Returns:
        Curves in the order of a step, the whole step first; a part without time, or with
        fewer than two sizes, has none.
    """
    held = [
        other
        for other in settings.columns
        if other != leaf
        and settings.groupby(leaf)[other].agg(lambda v: v.map(repr).nunique()).max() > 1
    ]
    # one name for each combination, and only one of leaves that always change together
    seen: list[tuple[str, ...]] = []
    named = []
    numeric = numeric_axes(settings)
    for other in sorted(held, key=lambda name: name not in numeric):
        pattern = tuple(map(str, pd.factorize(settings[other].map(repr))[0]))
        if pattern not in seen:
            seen.append(pattern)
            named.append(other)
    label = pd.Series(
        [
            ", ".join(f"{short_leaf(other)} {row[other]}" for other in named)
            for _, row in settings.iterrows()
        ],
        index=settings.index,
        dtype=object,
    )
    keys = ["run", "component", *(["phase"] if by_phase else [])]
    squared = times.assign(variance=times["se_ms"] ** 2)
    table = squared.groupby(keys, as_index=False)[["time_ms", "variance"]].sum()
    table["x"] = table["run"].map(settings[leaf]).astype(float)
    table["held"] = table["run"].map(label)
    table["phase"] = table["phase"] if by_phase else ""
    curves = []
    for (component, phase, text), group in table.groupby(
        ["component", "phase", "held"], sort=False
    ):
        group = group[group["time_ms"] > 0].sort_values("x")
        if group["x"].nunique() < 2:
            continue
        relative = np.sqrt(group["variance"]) / group["time_ms"]
        error = float(relative.median()) if relative.notna().any() else None
        law = fit_law(group["x"].tolist(), group["time_ms"].tolist(), error)
        points = group["x"].to_numpy(), group["time_ms"].to_numpy()
        curves.append(Curve(str(component), str(phase), str(text), *points, law))
    order = {name: number for number, name in enumerate((WHOLE, *COMPONENTS))}
    return sorted(curves, key=lambda curve: order.get(curve.component, len(order)))


@dataclass(frozen=True)
class Ensemble:
    """Many runs and their laws."""

    times: pd.DataFrame
    """As :func:`part_table` gives."""
    settings: pd.DataFrame
    """As :func:`settings_table` gives."""
    curves: dict[str, list[Curve]]
    """Leaf to the parts' laws along it."""

    @classmethod
    def of(cls, profiles: Mapping[str, Profile]) -> Ensemble:
        """Of profiles by name; laws need three runs or more."""
        sections = {name: p.meta.get("parameters") or {} for name, p in profiles.items()}
        return cls.from_tables(part_table(profiles), settings_table(sections))

    @classmethod
    def from_tables(cls, times: pd.DataFrame, settings: pd.DataFrame) -> Ensemble:
        """Of tables that are there already."""
        axes = numeric_axes(settings) if len(settings) > 2 else []
        curves = {leaf: scaling(times, settings, leaf) for leaf in axes}
        return cls(times, settings, {leaf: found for leaf, found in curves.items() if found})

    @property
    def laws(self) -> pd.DataFrame:
        """All laws, see :func:`law_table`; empty without any."""
        tables = [law_table(curves, leaf) for leaf, curves in self.curves.items()]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def law_table(curves: list[Curve], leaf: str) -> pd.DataFrame:
    """The laws in rows, for readers and ``sweep.json``.

    Returns:
        ``leaf``, ``component``, ``phase``, ``held``, ``points``, ``a_ms``, ``b_ms``, ``c``,
        ``c_low``, ``c_high``, ``slope``, ``r2``, ``kind``, ``sentence``.
    """
    rows = [
        {
            "leaf": leaf,
            "component": curve.component,
            "phase": curve.phase,
            "held": curve.held,
            "points": curve.law.points,
            "a_ms": curve.law.a,
            "b_ms": curve.law.b,
            "c": curve.law.c,
            "c_low": curve.law.exponent.low,
            "c_high": curve.law.exponent.high,
            "slope": curve.law.slope,
            "r2": curve.law.r2,
            "kind": curve.law.kind,
            "sentence": curve.law.sentence(short_leaf(leaf)),
        }
        for curve in curves
    ]
    return pd.DataFrame(rows)
