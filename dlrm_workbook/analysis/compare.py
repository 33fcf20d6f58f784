"""Recordings side by side: two profilers on one run, and two runs part by part.

**Two profilers** cannot agree to the last digit, and the table says how far apart they may be.
Each part's error has these sources, all of them measured:

* scatter from iteration to iteration (standard error of the mean, neighbours' correlation
  counted);
* two runs of one program differ: by as much as their times without any profiler do;
* what the profiler itself costs. It is subtracted: torch's falls on the parts in proportion to
  the operators they run, HPCToolkit's in proportion to time; half of it counts as error;
* sampled times: n samples of period p stand for ``n p``, give or take ``p sqrt(n)`` (Poisson).

**Two runs** differ in a part if Welch's t-test on the mean steady iteration, corrected for the
number of parts, says so; and whatever else differs between the runs is listed.

**Two recordings of any programs** are compared per iteration where both have iterations, else as
they are; how alike the programs are is measured by the operators that they call.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import (
    PART,
    in_step_order,
    iteration_count,
    main_thread,
    per_iteration,
    step_contexts,
)
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.analysis.rank_traces import window, work_within
from dlrm_workbook.analysis.steady import LEAST_TO_JUDGE, steady_state
from dlrm_workbook.ground.intervals import (
    CONFIDENCE,
    Interval,
    Values,
    holm,
    p_value,
    standard_error,
    t_interval,
    welch_degrees,
)
from dlrm_workbook.ground.units import faster, milliseconds, signed_milliseconds
from dlrm_workbook.recordings.profile import Profile, nearest

WHOLE = "iteration"
"""``component`` of the row for the iteration as a whole."""

PART_ALARM = 0.05
"""Chance that any part of two equal recordings is said to differ."""

SPOKEN = {"hpctoolkit": "HPCToolkit", "torch": "torch.profiler", "nsight": "Nsight Systems"}
"""Engines as a reader calls them."""

# ---- two profilers on one run ----------------------------------------------------------


def engines_side_by_side(profile: Profile, beside: Profile | None) -> pd.DataFrame:
    """Mean time of each part by two recordings of the same run, and whether they agree.

    The row of the whole ``iteration`` comes first, then parts in the order of a step. GPU and host
    time of a part are added, over the steady iterations of each. ``attrs["sentence"]`` sums it up.
    Profiles are named by their engines (``hpctoolkit``, ``torch``). Empty, with the reason, where
    nothing is beside it; an InputError says that one has no iterations.
    """
    if beside is None:
        return unmeasured([], "one profiler measured it (`profiling.engine: both` takes both)")
    named: dict[str, Profile] = {}
    for each in (profile, beside):
        name = str(each.meta.get("engine", "profile"))
        if each.iterations.empty:
            raise InputError(f"the recording '{name}' has no iterations to compare")
        named[name if name not in named else f"{name}_2"] = each
    estimates = {name: _estimate(each) for name, each in named.items()}
    first, second = estimates.values()
    index = first.index.union(second.index)
    table = pd.DataFrame(index=index)
    for name, estimate in estimates.items():
        side = estimate.reindex(index)
        table[f"{name}_ms"], table[f"{name}_cost_ms"] = side["ms"], side["cost_ms"]
    a, b = (estimate.reindex(index).fillna(0.0) for estimate in (first, second))
    one, other = (_plain_and_profiled(each)[0] for each in named.values())
    # two runs without profiler differed by this share; unknown where they were not timed
    apart = 2 * abs(one - other) / (one + other) if one + other > 0 else 0.0
    between = apart * (a["ms"] + b["ms"]) / 2
    error = np.sqrt(a["error_ms"] ** 2 + b["error_ms"] ** 2 + between**2)
    table["difference_ms"] = b["ms"] - a["ms"]
    # standard errors that none of so many normal deviations exceeds in 95 % (Bonferroni)
    deviations = statistics.NormalDist().inv_cdf(1 - PART_ALARM / (2 * max(len(table), 1)))
    table["error_ms"] = error * deviations
    table["agrees"] = table["difference_ms"].abs() <= table["error_ms"]
    result = in_step_order(table.reset_index())
    result.attrs["sentence"] = _sentence(result, list(named))
    return result


def _estimate(profile: Profile) -> pd.DataFrame:
    """One recording's times per iteration; the whole iteration is a part. By (component, phase):
    ``ms`` (profiler's cost subtracted), ``error_ms`` (one standard error), ``cost_ms``."""
    table = part_estimates(profile).set_index(PART)[["time_ms", "se_ms"]]
    table.loc[(WHOLE, ""), :] = step_estimate(profile)[:2]
    # One iteration says nothing of its scatter: it may be anything up to its own time.
    table["scatter"] = table["se_ms"].fillna(table["time_ms"])
    table["ms"] = table["time_ms"]
    plain, dilated = _plain_and_profiled(profile)
    cost = max(dilated - plain, 0.0) if math.isfinite(dilated - plain) else 0.0
    table["cost_ms"] = np.minimum(cost * _cost_shares(profile, table), table["ms"])
    table["ms"] -= table["cost_ms"]
    table["error_ms"] = np.hypot(table["scatter"], table["cost_ms"] / 2)
    return table


def _plain_and_profiled(profile: Profile) -> tuple[float, float]:
    """Milliseconds of an iteration without and under the profiler; NaN if not timed."""
    without = profile.meta.get("unprofiled_iteration_ms")
    under = profile.meta.get("iteration_ms")
    if without and under:
        return statistics.median(without), statistics.median(under)
    passes = {measured.get("name"): measured for measured in profile.meta.get("passes", [])}
    times = passes.get("times", {}).get("ms_per_iteration")
    plain = passes.get("unprofiled", {}).get("ms_per_iteration")
    return float(plain or "nan"), float(times or "nan")


def _cost_shares(profile: Profile, table: pd.DataFrame) -> pd.Series:
    """How the profiler's cost divides among the parts; 1 for the whole iteration."""
    if profile.meta.get("engine") != "hpctoolkit":
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


def _sentence(table: pd.DataFrame, names: list[str]) -> str:
    whole, parts = table.iloc[0], table.iloc[1:]
    first, second = names
    one, other = (SPOKEN.get(name, name) for name in names)
    differ = parts.loc[~parts["agrees"], PART].to_numpy()
    apart = [part_label(str(component), str(phase)) for component, phase in differ]
    total = (
        f"An iteration takes {milliseconds(whole[f'{first}_ms'])} by {one} and "
        f"{milliseconds(whole[f'{second}_ms'])} by {other}: a difference of "
        f"{signed_milliseconds(whole['difference_ms'])}, where {milliseconds(whole['error_ms'])} "
        "are within the error"
    )
    if whole["error_ms"] > whole[f"{first}_ms"] / 2:
        return f"{total}: that is too much to hold the parts beside each other."
    agreeing = f"{len(parts) - len(apart)} of {len(parts)}" if apart else f"All {len(parts)}"
    others = f"; {', '.join(apart)} {'does' if len(apart) == 1 else 'do'} not" if apart else ""
    return f"{total}. {agreeing} parts agree within the error of both{others}."


# ---- two runs, part by part ---------------------------------------------------------------

ESTIMATES = [*PART, "time_ms", "se_ms", "degrees", "observations", "of"]


def steady_rows(times_ms: Values) -> np.ndarray:
    """Which iterations (n,) stand for a run: neither warm-up nor outliers; all of a short one."""
    times = np.asarray(times_ms, dtype=float)
    if len(times) < LEAST_TO_JUDGE:
        return np.ones(len(times), dtype=bool)
    steady = np.asarray(steady_state(times).steady)
    return steady if steady.sum() >= 2 else np.ones(len(times), dtype=bool)


def iteration_parts(profile: Profile) -> pd.DataFrame:
    """Milliseconds of each part (columns: component, phase) in each steady iteration (rows)."""
    times = per_iteration(profile)
    table = times.pivot_table(
        index="iteration", columns=PART, values="time_ms", aggfunc="sum", fill_value=0.0
    )
    return table[steady_rows(table.sum(axis=1).to_numpy(dtype=float))]


def part_estimates(profile: Profile) -> pd.DataFrame:
    """Mean time of each part with its standard error.

    Returns:
        ``component``, ``phase``, ``time_ms`` (steady iterations), ``se_ms`` (NaN where one
        observation is all there is), ``degrees`` (of freedom; infinite for counted samples),
        ``observations`` (iterations, or samples), ``of`` (``iterations`` or ``samples``);
        in the order of a step.
    """
    if profile.iterations.empty or profile.trace.empty:
        return in_step_order(_counted(profile))
    rows = []
    for part, column in iteration_parts(profile).items():
        times = column.to_numpy(dtype=float)
        se, degrees = standard_error(times)
        rows.append((*part, times.mean(), se, degrees, len(times), "iterations"))  # type: ignore[misc]
    return in_step_order(pd.DataFrame(rows, columns=ESTIMATES))


def step_estimate(profile: Profile) -> tuple[float, float, float]:
    """(mean iteration in ms, its standard error, degrees of freedom)."""
    if profile.iterations.empty or profile.trace.empty:
        table = _counted(profile)
        return float(table["time_ms"].sum()), float(np.hypot.reduce(table["se_ms"])), math.inf
    times = iteration_parts(profile).sum(axis=1).to_numpy(dtype=float)
    se, degrees = standard_error(times)
    return float(times.mean()), se, degrees


def _counted(profile: Profile) -> pd.DataFrame:
    """Parts of a sampled profile; the error of n samples is sqrt(n) of them."""
    parts = per_iteration(profile).groupby(PART, as_index=False)["time_ms"].sum()
    period = sampling_period_ms(profile) / iteration_count(profile)
    count = parts["time_ms"] / (period or math.nan)
    se = parts["time_ms"] / np.sqrt(count.where(count > 0))
    return parts.assign(se_ms=se, degrees=math.inf, observations=count, of="samples")[ESTIMATES]


def sampling_period_ms(profile: Profile) -> float:
    """Time that one sample stands for: what the contexts with one sample hold.

    Most contexts of a sampled tree were met once, so the tenth of them with the least time
    tells the period; 0 if nothing was sampled.
    """
    metric = "cpu_time_ms" if profile.has("cpu_time_ms") else "gpu_time_ms"
    rows = profile.values[profile.rows(metric, "exclusive")]
    rows = rows[rows["value"] > 0]
    return float(rows["value"].quantile(0.1, interpolation="lower")) if len(rows) else 0.0


def compare_parts(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Each part before and after, with the interval of the difference, NaN where unknown.

    A part that a run does not have counts as 0 ms. ``before`` and ``after`` are what
    :func:`part_estimates` gives.
    """
    table = before.merge(after, on=PART, how="outer", suffixes=("_a", "_b"))
    names = ["time_ms", "se_ms", "degrees"]
    for side in ("_a", "_b"):
        lacking = table[f"time_ms{side}"].isna()
        table.loc[lacking, [f"{name}{side}" for name in names]] = 0.0
    rows = []
    columns = [f"{name}{side}" for side in ("_a", "_b") for name in names]
    for *part, a, se_a, df_a, b, se_b, df_b in table[[*PART, *columns]].itertuples(index=False):
        se = math.hypot(se_a, se_b)
        degrees = welch_degrees(se_a, df_a, se_b, df_b) if math.isfinite(se) else 0.0
        test = b - a, se, degrees
        rows.append((*part, a, b, t_interval(*test), p_value(*test)))
    return difference_table(rows)


def difference_table(
    rows: Sequence[tuple[str, str, float, float, Interval, float]],
) -> pd.DataFrame:
    """Columns of :func:`compare_parts` from (component, phase, before, after, interval, p)."""
    columns = [*PART, "before_ms", "after_ms", "difference_ms", "low_ms", "high_ms"]
    times = [(*row, interval.mid, interval.low, interval.high) for *row, interval, _ in rows]
    table = pd.DataFrame(times, columns=columns).assign(p=holm([row[-1] for row in rows]))
    table["verdict"] = list(map(verdict_of_part, table["difference_ms"], table["p"]))
    return in_step_order(table)


def verdict_of_part(difference: float, p: float) -> str:
    """``slower``, ``faster``, ``no difference shown``, or ``not known`` without repetitions."""
    if not math.isfinite(p):
        return "not known"
    if p > 1 - CONFIDENCE:
        return "no difference shown"
    return "slower" if difference > 0 else "faster"


def ratio_interval(
    before: tuple[float, float, float], after: tuple[float, float, float], samples: float = 1.0
) -> Interval:
    """Speed-up, before over after, with its interval (delta method on the logarithm). ``before``
    and ``after`` are (mean, standard error, degrees of freedom), as :func:`step_estimate` gives
    them; ``samples`` are those of an iteration after over those before, 1 compares iterations."""
    relative = [se / mean if mean > 0 else math.nan for mean, se, _ in (before, after)]
    se = math.hypot(*relative)
    degrees = welch_degrees(relative[0], before[2], relative[1], after[2])
    middle = math.log(samples * before[0] / after[0]) if min(before[0], after[0]) > 0 else math.nan
    interval = t_interval(middle, se, degrees)
    low, mid, high = (math.exp(value) for value in (interval.low, interval.mid, interval.high))
    return Interval(low, mid, high, interval.confidence)


def circumstances(profile: Profile) -> dict[str, dict[str, Any]]:
    """What a run was: ``parameters`` (dotted leaves), ``versions``, ``machine``, ``measuring``."""
    meta = profile.meta
    sections = meta.get("parameters") or {}
    leaves = {
        f"{section}.{leaf}": value
        for section, content in sections.items()
        if isinstance(content, Mapping)
        for leaf, value in content.items()
    }
    machine = dict(meta.get("machine") or {})
    machine |= {"device": meta.get("device_name") or meta.get("device")}
    machine |= {"threads used": meta.get("threads")}
    return {
        "parameters": leaves,
        "versions": dict(meta.get("versions") or {}),
        "machine": machine,
        "measuring": {"engine": meta.get("engine")},
    }


def differing(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """What is not the same in all runs. ``runs`` are what :func:`circumstances` gives of each.
    Returns ``kind``, ``name``, and ``values`` (a list, one entry a run; None where it has none)."""
    rows = []
    for kind in dict.fromkeys(kind for run in runs for kind in run):
        for name in dict.fromkeys(name for run in runs for name in run.get(kind, {})):
            values = [run.get(kind, {}).get(name) for run in runs]
            if any(value != values[0] for value in values[1:]):
                rows.append((kind, name, values))
    return pd.DataFrame(rows, columns=["kind", "name", "values"])


# what these say varies from minute to minute, or only describes the run
INCIDENTAL = ("profiling.", "training.batches", "training.log_every", "available")


def mixed_causes(differences: pd.DataFrame) -> str:
    """A warning where more than the parameters differ, so that no one thing is the cause."""
    others = differences[differences["kind"] != "parameters"]
    if others.empty:
        return ""
    named = [
        f"{kind}: {', '.join(rows['name'])}" for kind, rows in others.groupby("kind", sort=False)
    ]
    changed = differences[differences["kind"].eq("parameters")]
    changed = changed[~changed["name"].str.startswith(INCIDENTAL)]
    also = f" besides {len(changed)} parameter(s)" if len(changed) else ""
    return (
        f"This comparison mixes causes: the runs differ in {'; '.join(named)}{also}. What is "
        "slower or faster cannot be put down to one of them."
    )


# ---- two recordings of any programs -------------------------------------------------------

RECORDED_COLUMNS = ["device_ms", "host_ms", "idle_ms", "launches"]

SAME_PROGRAM = 0.5
"""Share of operator calls in common below which two recordings are not of one program: two ranks
of one job have 1.00, a production DLRM and TorchRec's example 0.18 to 0.34."""


def _inside(profile: Profile) -> np.ndarray:
    """Contexts (n,) whose host time counts: the step's, or all of a recording taken whole."""
    if "whole" in profile.meta:
        return np.ones(len(profile.contexts), bool)
    return step_contexts(profile)


def device_contexts(profile: Profile) -> pd.DataFrame:
    """``ms`` and ``launches`` of each context that ran on the GPU, of a mean iteration."""
    count = iteration_count(profile)
    if profile.meta.get("engine") == "hpctoolkit" or profile.trace.empty:
        name = "GKER:COUNT" if profile.has("GKER:COUNT") else "launches"
        table = pd.DataFrame({"ms": profile.value_table("gpu_time_ms")})
        table["launches"] = profile.value_table(name)
        table = table[table["ms"].gt(0) | table["launches"].gt(0)]
        return table / count
    first, last, _ = window(profile, len(profile.iterations) > 0)
    work = work_within(profile, first, last)
    spent = (work["end_ns"] - work["start_ns"]) / 1e6
    kernels = pd.Series(profile.of_kind("kernel")[work["context"].to_numpy()], work.index)
    table = pd.DataFrame({"context": work["context"], "ms": spent, "launches": kernels})
    return table.groupby("context")[["ms", "launches"]].sum() / count


def recorded_parts(profile: Profile) -> pd.DataFrame:
    """Device, host and idle time of each part, of a mean iteration (the whole where none is known).

    ``host_ms`` is of all CPU threads in the step, ``idle_ms`` of the GPU while the step's thread is
    in that part; NaN where not measured.
    """
    parts = profile.contexts[PART]
    frames = []
    if profile.has("gpu_time_ms"):
        device = device_contexts(profile).rename(columns={"ms": "device_ms"})
        frames.append(device.join(parts).groupby(PART).sum())
    if profile.has("cpu_time_ms"):
        host = profile.value_table("cpu_time_ms")[_inside(profile)] / iteration_count(profile)
        frames.append(parts.assign(host_ms=host).dropna().groupby(PART)[["host_ms"]].sum())
    if len(profile.trace) and profile.threads["kind"].eq("gpu_stream").any():
        part_times = per_iteration(profile)
        idle = part_times[part_times["where"].eq("host")]
        count = max(len(profile.iterations), 1)
        frames.append(idle.groupby(PART)[["time_ms"]].sum().set_axis(["idle_ms"], axis=1) / count)
    nothing = pd.DataFrame(index=pd.MultiIndex.from_frame(parts.head(0)))
    table = pd.concat(frames, axis=1) if frames else nothing
    measured = table.columns
    table = table.fillna(0.0).reindex(columns=RECORDED_COLUMNS).rename_axis(PART)
    table = table[table[measured].gt(0).any(axis=1)]
    return in_step_order(table.reset_index())


NO_GPU = "work of a GPU was not recorded in both"


def recorded_differences(before: Profile, after: Profile) -> pd.DataFrame:
    """Two recordings part by part, as :func:`recorded_parts`: ``device_ms_before``, ...

    A part that only one recording has counts as 0 in the other, if that measured the like. Empty,
    with the reason, where neither has work of a GPU: the step's parts say the same then.
    """
    ordered = [f"{name}_{side}" for name in RECORDED_COLUMNS for side in ("before", "after")]
    if not (before.has("gpu_time_ms") or after.has("gpu_time_ms")):
        return unmeasured([*PART, *ordered], NO_GPU)
    one, other = (recorded_parts(profile).set_index(PART) for profile in (before, after))
    table = one.add_suffix("_before").join(other.add_suffix("_after"), how="outer")
    measured = table.columns[table.notna().any()]
    table[measured] = table[measured].fillna(0.0)
    return in_step_order(table[ordered].reset_index())


def device_differences(before: Profile, after: Profile) -> pd.DataFrame:
    """What ran on the GPUs, by the operator that launched it (or by kernel where none is known).

    Largest difference first. Kernels have other names on other GPUs, operators have not. Empty,
    with the reason, where a recording has no work of a GPU.
    """
    if not (before.has("gpu_time_ms") and after.has("gpu_time_ms")):
        columns = ["operator", *PART, "before_ms", "after_ms", "difference_ms"]
        return unmeasured(columns, NO_GPU)
    keys = ["operator", *PART]
    table = _by_operator(before).merge(
        _by_operator(after), on=keys, how="outer", suffixes=("_before", "_after")
    )
    numbers = ["ms_before", "ms_after", "launches_before", "launches_after"]
    table[numbers] = table[numbers].astype(float).fillna(0.0)
    names = ["kernel_before", "kernel_after"]
    table[names] = table[names].fillna("")
    table = table.rename(columns={"ms_before": "before_ms", "ms_after": "after_ms"})
    table["difference_ms"] = table["after_ms"] - table["before_ms"]
    order = table["difference_ms"].abs().sort_values(ascending=False, kind="stable").index
    columns = [*keys, "before_ms", "after_ms", "difference_ms", *numbers[2:], *names]
    return table.loc[order, columns].reset_index(drop=True)


APART = 1.2
"""Ratio of two recordings' ratios from which on the GPU's work and the step are told apart."""


def work_against_step(before: Profile, after: Profile) -> str:
    """One sentence where the GPU's work and the step change by far other factors, with the part in
    which the GPU's idle time changed most; "" elsewhere."""
    table = recorded_differences(before, after)
    work, words = [float(table[f"device_ms_{side}"].sum()) for side in ("before", "after")], ""
    if iteration_count(before) == iteration_count(after):
        # work at the edges of the iterations counts too
        work = [float(profile.value_table("gpu_time_ms").sum()) for profile in (before, after)]
        words = f" of {iteration_count(before)} iterations"
    step = [step_estimate(profile)[0] for profile in (before, after)]
    if not all(value > 0 for value in (*work, *step)):
        return ""
    ratios = work[0] / work[1], step[0] / step[1]
    if max(ratios) < APART * min(ratios):
        return ""
    (now, then), changes = step, []
    for ratio, times in zip(ratios, (work, step), strict=True):
        change = faster(ratio, math.nan, math.nan, figures=2)
        changes.append(
            f"{change} ({milliseconds(times[0])} before, {milliseconds(times[1])} after)"
        )
    text = f"The GPU's kernels and copies{words} are {changes[0]}, the step is {changes[1]}"
    idle = table["idle_ms_after"] - table["idle_ms_before"]
    if not idle.abs().max() > 0.5 * abs(then - now):
        return f"{text}."
    row = table.loc[idle.abs().idxmax()]
    part = part_label(str(row["component"]), str(row["phase"]))
    shares = [row[f"idle_ms_{side}"] / whole for side, whole in (("before", now), ("after", then))]
    return (
        f"{text}, because of the GPU's idle time in {part}: {shares[0]:.0%} of the step before, "
        f"{shares[1]:.0%} after."
    )


def _by_operator(profile: Profile) -> pd.DataFrame:
    """``operator``, part, ``ms``, ``launches``, ``kernel`` (the longest) of a mean iteration."""
    contexts = profile.contexts
    operator = nearest(contexts["parent"].to_numpy(), profile.of_kind("operator"))
    names = contexts["name"].to_numpy()
    device = device_contexts(profile)
    row = device.index.to_numpy()
    kernels = [kernel_name(str(name)).short for name in names[row]]
    label = np.where(operator[row] >= 0, names[operator[row]], kernels)
    table = device.join(contexts[PART]).assign(operator=label, kernel=kernels)
    table = table.sort_values("ms", ascending=False, kind="stable")
    groups = table.groupby(["operator", *PART], as_index=False)
    return groups.agg({"ms": "sum", "launches": "sum", "kernel": "first"})


def likeness(before: Profile, after: Profile) -> tuple[float, float] | None:
    """Share of operator calls that two recordings have in common: by name, and with shapes.

    Calls of a mean iteration, the fewer of both over the more; None where one has no operators.
    The share with shapes is NaN where a recording has none.
    """
    sides = []
    for profile in (before, after):
        chosen = profile.of_kind("operator") & _inside(profile)
        calls = profile.value_table("calls")[chosen] / iteration_count(profile)
        sides.append(profile.contexts.loc[chosen, ["name", "shapes"]].assign(calls=calls))
    if any(side.empty for side in sides):
        return None

    def in_common(keys: list[str]) -> float:
        calls = pd.concat([side.groupby(keys)["calls"].sum() for side in sides], axis=1).fillna(0.0)
        return float(calls.min(axis=1).sum() / calls.max(axis=1).sum())

    has_shapes = all(side["shapes"].str.strip("[], ").ne("").any() for side in sides)
    return in_common(["name"]), in_common(["name", "shapes"]) if has_shapes else math.nan
