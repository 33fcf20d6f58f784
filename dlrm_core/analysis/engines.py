"""Two recordings of one run side by side: do HPCToolkit and torch say the same of each part?

They cannot agree to the last digit, and the table says how far apart they may be. Each part's
error has these sources, all of them measured:

* scatter from iteration to iteration (standard error of the mean, neighbours' correlation
  counted);
* two runs of one program differ: by as much as their times without any profiler do;
* what the profiler itself costs. It is subtracted: torch's falls on the parts in proportion to
  the operators they run, HPCToolkit's in proportion to time; half of it counts as error;
* sampled times: n samples of period p stand for ``n p``, give or take ``p sqrt(n)`` (Poisson),
  and the profiler knows how many samples it dropped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dlrm_core.analysis.attribution import (
    iteration_state,
    main_thread,
    per_iteration,
    step_contexts,
)
from dlrm_core.analysis.intervals import standard_error
from dlrm_core.errors import InputError
from dlrm_core.parts import COMPONENTS, PHASES, part_label
from dlrm_core.profiling.profile import Profile

PART = ["component", "phase"]
WHOLE = "iteration"
"""``component`` of the row for the iteration as a whole."""

FALSE_ALARM = 0.05
"""Chance that any part of two equal recordings is said to differ."""


@dataclass(frozen=True)
class _Estimate:
    """One recording's times, per iteration, by part; the whole iteration is a part."""

    table: pd.DataFrame
    """Index (component, phase): ``ms`` (profiler's cost subtracted), ``error_ms`` (one standard
    error), ``cost_ms``, and where samples were taken ``sampled_ms``, ``clock_ms``,
    ``sampling_error_ms``."""
    plain_ms: float
    """An iteration without the profiler; NaN if it was not timed."""


def engines_side_by_side(
    profiles: Mapping[str, Profile] | Sequence[Profile],
) -> pd.DataFrame:
    """Mean time of each part by two recordings of the same run, and whether they agree.

    Args:
        profiles: two; by name, or else named by their engines (``hpctoolkit``, ``torch``).

    Returns:
        First the row of the whole ``iteration``, then parts in the order of a step:
        ``component``, ``phase``; for each recording NAME ``NAME_ms`` (its profiler's cost
        subtracted), ``NAME_cost_ms`` and, where it sampled, ``NAME_sampled_ms`` and
        ``NAME_sampling_error_ms``; ``difference_ms`` (second less first), ``error_ms`` (how
        far apart chance and the profilers may put them, so that in 95 % of comparisons all
        parts agree), ``agrees``. ``attrs["sentence"]`` sums it up. GPU and host time of a part
        are added. Over the steady iterations of each.

    Raises:
        InputError: there are not two, or one has no iterations.
    """
    named = _named(profiles)
    estimates = {name: _estimate(name, profile) for name, profile in named.items()}
    first, second = estimates.values()
    index = first.table.index.union(second.table.index)
    table = pd.DataFrame(index=index)
    for name, estimate in estimates.items():
        own = estimate.table.reindex(index)
        table[f"{name}_ms"], table[f"{name}_cost_ms"] = own["ms"], own["cost_ms"]
        if "sampled_ms" in own:
            table[f"{name}_sampled_ms"] = own["sampled_ms"]
            table[f"{name}_sampling_error_ms"] = own["sampling_error_ms"]
    a, b = (estimate.table.reindex(index).fillna(0.0) for estimate in estimates.values())
    between = _between_runs(first.plain_ms, second.plain_ms) * (a["ms"] + b["ms"]) / 2
    error = np.sqrt(a["error_ms"] ** 2 + b["error_ms"] ** 2 + between**2)
    table["difference_ms"] = b["ms"] - a["ms"]
    table["error_ms"] = error * _deviations(len(table))
    table["agrees"] = table["difference_ms"].abs() <= table["error_ms"]
    result = _in_step_order(table.reset_index())
    result.attrs["sentence"] = _sentence(result, list(named))
    return result


def samples_against_clock(profile: Profile) -> pd.DataFrame:
    """Sampled CPU time of each part beside the clock's own, of one HPCToolkit recording.

    Returns:
        ``component``, ``phase``, ``clock_ms``, ``sampled_ms``, ``difference_ms``, ``error_ms``
        (so that in 95 % of recordings all parts agree), ``agrees``. A part that waits (for data,
        for a core) has less sampled than clock time: that is no error of either. Empty where
        samples and clock are not both there.
    """
    columns = [*PART, "clock_ms", "sampled_ms", "difference_ms", "error_ms", "agrees"]
    if profile.iterations.empty:
        return pd.DataFrame(columns=columns)
    table = _sampled(profile)
    if table is None:
        return pd.DataFrame(columns=columns)
    table["difference_ms"] = table["sampled_ms"] - table["clock_ms"]
    table["error_ms"] = table["sampling_error_ms"] * _deviations(len(table))
    table["error_ms"] += _lost(profile) * table["clock_ms"]
    table["agrees"] = table["difference_ms"].abs() <= table["error_ms"]
    return _in_step_order(table.reset_index())[columns]


def _named(profiles: Mapping[str, Profile] | Sequence[Profile]) -> dict[str, Profile]:
    if not isinstance(profiles, Mapping):
        named: dict[str, Profile] = {}
        for profile in profiles:
            name = str(profile.meta.get("engine", "profile"))
            named[name if name not in named else f"{name}_{len(named) + 1}"] = profile
    else:
        named = dict(profiles)
    if len(named) != 2:
        raise InputError(f"two recordings are laid side by side, not {len(named)}")
    for name, profile in named.items():
        if profile.iterations.empty:
            raise InputError(f"the recording '{name}' has no iterations to compare")
    return named


def _estimate(name: str, profile: Profile) -> _Estimate:
    state = iteration_state(profile)
    assert state is not None  # _named refused profiles without iterations
    numbers = profile.iterations["iteration"].to_numpy()
    each = per_iteration(profile)
    wide = each.pivot_table(index="iteration", columns=PART, values="time_ms", aggfunc="sum")
    wide = wide.reindex(numbers).fillna(0.0)[state.steady]
    wide[(WHOLE, "")] = wide.sum(axis=1)
    count = len(wide)
    # One iteration says nothing of its scatter: it may be anything up to its own time.
    scatter = [
        standard_error(wide[part].to_numpy())[0] if count > 1 else float(wide[part].iloc[0])
        for part in wide
    ]
    table = pd.DataFrame({"ms": wide.mean(), "scatter": scatter})
    table.index.names = PART
    plain, dilated = _plain_and_profiled(profile)
    cost = max(dilated - plain, 0.0) if math.isfinite(dilated - plain) else 0.0
    table["cost_ms"] = np.minimum(cost * _cost_shares(profile, table), table["ms"])
    table["ms"] -= table["cost_ms"]
    table["error_ms"] = np.hypot(table["scatter"], table["cost_ms"] / 2)
    sampled = _sampled(profile)
    if sampled is not None:
        table = table.join(sampled)
    return _Estimate(table, plain)


def _plain_and_profiled(profile: Profile) -> tuple[float, float]:
    """Milliseconds of an iteration without and under the profiler; NaN if not timed."""
    without = profile.meta.get("unprofiled_iteration_ms")
    under = profile.meta.get("iteration_ms")
    if without and under:
        return statistics.median(without), statistics.median(under)
    passes = {made.get("name"): made for made in profile.meta.get("passes", [])}
    times = passes.get("times", {}).get("ms_per_iteration")
    plain = passes.get("unprofiled", {}).get("ms_per_iteration")
    return float(plain or "nan"), float(times or "nan")


def _cost_shares(profile: Profile, table: pd.DataFrame) -> pd.Series:
    """How the profiler's cost divides among the parts; 1 for the whole iteration."""
    if profile.meta.get("engine") == "torch":
        host = profile.trace[profile.trace["profile"] == main_thread(profile)]
        inside = host[step_contexts(profile)[host["context"].to_numpy()]]
        # A range's own cost is paid around it, by what it lies in; an operator's inside.
        parent = profile.contexts["parent"].to_numpy()
        is_range = profile.contexts["kind"].eq("annotation").to_numpy() & (parent >= 0)
        payer = np.where(is_range, parent, np.arange(len(parent)))[inside["context"].to_numpy()]
        parts = profile.contexts[PART].iloc[payer]
        weight = parts.groupby(PART).size().reindex(table.index, fill_value=0).astype(float)
    else:
        weight = table["ms"].copy()
    weight[(WHOLE, "")] = 0.0
    share = weight / weight.sum() if weight.sum() else weight
    share[(WHOLE, "")] = 1.0
    return share


def _sampled(profile: Profile) -> pd.DataFrame | None:
    """Sampled and clock time of each part over all iterations, where spans placed samples."""
    if profile.meta.get("engine") != "hpctoolkit" or not profile.meta.get("spans"):
        return None
    main = main_thread(profile)
    rows = profile.values[profile.rows("cpu_time_ms", "exclusive")]
    rows = rows[rows["profile"].eq(main)]
    kinds = profile.contexts["kind"].to_numpy()
    events = profile.trace[profile.trace["profile"] == main]
    samples = int((kinds[events["context"].to_numpy()] != "annotation").sum())
    if rows.empty or not samples:
        return None
    period_ms = float(rows["value"].sum()) / samples
    inside = rows[step_contexts(profile)[rows["context"].to_numpy()]]
    parts = profile.contexts[PART].iloc[inside["context"]].reset_index(drop=True)
    count = len(profile.iterations)
    sampled = inside["value"].reset_index(drop=True).groupby([parts[name] for name in PART]).sum()
    clock = per_iteration(profile).groupby(PART)["time_ms"].sum()
    table = pd.DataFrame({"clock_ms": clock / count, "sampled_ms": sampled / count}).fillna(0.0)
    table.loc[(WHOLE, ""), :] = table.sum()
    # Of samples that would be expected from the clock: a part without any has an error too.
    expected = np.maximum(table["clock_ms"] * count / period_ms, 1.0)
    table["sampling_error_ms"] = period_ms * np.sqrt(expected) / count
    return table


def _lost(profile: Profile) -> float:
    """Share of its samples that the pass for times dropped."""
    for made in profile.meta.get("passes", []):
        if made.get("name") == "times":
            return float(made.get("lost_samples") or 0.0)
    return 0.0


def _between_runs(first_ms: float, second_ms: float) -> float:
    """Share by which two runs without profiler differed; 0 where they were not timed."""
    if not (math.isfinite(first_ms) and math.isfinite(second_ms)) or first_ms + second_ms <= 0:
        return 0.0
    return 2 * abs(first_ms - second_ms) / (first_ms + second_ms)


def _deviations(count: int) -> float:
    """Standard errors that none of ``count`` normal deviations exceeds in 95 % (Bonferroni)."""
    return statistics.NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * max(count, 1)))


def _in_step_order(table: pd.DataFrame) -> pd.DataFrame:
    order = {name: row for row, name in enumerate([WHOLE, *COMPONENTS])}
    phase = {name: row for row, name in enumerate(PHASES)}
    rank = table["component"].map(order).fillna(len(order)) * 10 + table["phase"].map(phase).fillna(
        0
    )
    return table.iloc[np.argsort(rank.to_numpy(), kind="stable")].reset_index(drop=True)


SPOKEN = {"hpctoolkit": "HPCToolkit", "torch": "torch.profiler"}
"""Engines as a reader calls them."""


def _sentence(table: pd.DataFrame, names: list[str]) -> str:
    whole, parts = table.iloc[0], table.iloc[1:]
    first, second = names
    one, other = (SPOKEN.get(name, name) for name in names)
    differ = parts.loc[~parts["agrees"], PART].to_numpy()
    apart = [part_label(str(component), str(phase)) for component, phase in differ]
    total = (
        f"An iteration takes {whole[f'{first}_ms']:#.3g} ms by {one} and "
        f"{whole[f'{second}_ms']:#.3g} ms by {other}, "
        f"{whole['difference_ms']:+.2g} ms where "
        f"{whole['error_ms']:.2g} ms are within the error"
    )
    if not apart:
        return f"{total}. All {len(parts)} parts agree within the error of both."
    return (
        f"{total}. {len(parts) - len(apart)} of {len(parts)} parts agree within the error of "
        f"both; {', '.join(apart)} {'does' if len(apart) == 1 else 'do'} not."
    )
