"""How near each part comes to what the machine allows, and which limit it meets.

The roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009) on the operators of
one iteration: an operator takes at least as long as its arithmetic, its bytes, its
random rows, or the host's cost of issuing it, whichever is longest, by ceilings measured
on the machine. A part takes at least the sum of its operators; what it takes beyond that
can be gained without changing shapes or precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.analysis.embedding_work import lookups
from dlrm_core.analysis.limits import Limits
from dlrm_core.analysis.work import operator_work, part_work, setting_of
from dlrm_core.analysis.work_rows import FLOAT_BYTES
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.profiling.profile import Profile

ARITHMETIC = "arithmetic"
MEMORY = "memory bandwidth"
ROWS = "random rows"
DISPATCH = "dispatch"
LAUNCHES = "launches"
COPIES = "copies"

COLUMNS = [
    "component",
    "phase",
    "time_ms",
    "flops",
    "bytes",
    "intensity_flop_per_byte",
    "gflops",
    "gb_per_s",
    "ceiling",
    "ceiling_ms",
    "share_of_ceiling",
    "limit",
]

KEYS = ["component", "phase"]

BUSY_SHARE = 0.05
"""Of measuring the ceilings, spent waiting for a core: above it they are not the machine's."""

BEYOND = 1.1
"""A share of a ceiling above this is more than the measurements' noise."""

WORTH_MS = 0.2
"""Shorter parts are not worth a doubt."""

_TIMES = ("arithmetic", "memory", "rows", "copies", "overhead", "kernel")


def roofline(profile: Profile, attribution: pd.DataFrame) -> pd.DataFrame:
    """Each part and phase against the machine's ceilings.

    Args:
        attribution: of the profile; ``device`` and ``host`` time of a part are added, so
            that the times sum to the step.

    Returns:
        ``component``, ``phase``, ``time_ms``, ``flops``, ``bytes`` (operands of its
        operators), ``intensity_flop_per_byte``, ``gflops`` and ``gb_per_s`` (achieved,
        over ``time_ms``), ``ceiling`` (what binds, in words), ``ceiling_ms`` (least time;
        NaN where no ceiling is known, 0 where the machine has nothing to do),
        ``share_of_ceiling`` (``ceiling_ms`` / ``time_ms``), ``limit``. Rows as in
        ``attribution``. Empty if the model's shapes are not known (:func:`missing`).
    """
    parameters = parameters_of(profile)
    if parameters is None or attribution.empty:
        return pd.DataFrame({name: [] for name in COLUMNS})
    statistics = profile.meta.get("data_statistics")
    work = part_work(parameters, statistics, profile.device)
    least = least_times(parameters, profile.meta.get("ceilings") or {}, statistics, profile.device)
    table = attribution.groupby(KEYS, as_index=False, sort=False)[["time_ms"]].sum()
    table = table.merge(work, on=KEYS, how="left").merge(least, on=KEYS, how="left")
    idle = table["flops"].isna()
    table["bytes"] = table["read_bytes"] + table["written_bytes"]
    table[["flops", "bytes"]] = table[["flops", "bytes"]].fillna(0.0)
    # where the model asks nothing of the machine, the machine needs no time
    table.loc[idle, "ceiling_ms"] = 0.0 if profile.meta.get("ceilings") else np.nan
    table[["limit", "ceiling"]] = table[["limit", "ceiling"]].fillna("")
    time = table["time_ms"].where(table["time_ms"] > 0)
    table["intensity_flop_per_byte"] = table["flops"] / table["bytes"].where(table["bytes"] > 0)
    table["gflops"] = table["flops"] / time / 1e6
    table["gb_per_s"] = table["bytes"] / time / 1e6
    table["share_of_ceiling"] = table["ceiling_ms"] / time
    return table[COLUMNS]


def missing(profile: Profile) -> str | None:
    """Why there is no roofline, or no ceilings on it; None if there are."""
    if not profile.meta.get("parameters"):
        return "the profile does not say which model ran, so its work is not known"
    if parameters_of(profile) is None:
        return "the recorded parameters are not those of a model that this version knows"
    if not profile.meta.get("ceilings"):
        return profile.not_measured.get(
            "ceilings",
            "the recording holds no ceilings of its machine (profiling.probes measures them)",
        )
    return None


def doubts(profile: Profile, table: pd.DataFrame) -> list[str]:
    """Reasons not to trust the ceilings, as sentences; none where all is well.

    Args:
        table: what :func:`roofline` gives of the profile.
    """
    found = []
    waited = (profile.meta.get("ceilings") or {}).get("run_queue_share")
    if waited is not None and waited > BUSY_SHARE:
        found.append(
            f"The machine was busy while its ceilings were measured: the measuring thread waited "
            f"for a core {waited:.0%} of the time. They are too low, and shares of them too high."
        )
    above = table[(table["share_of_ceiling"] > BEYOND) & (table["time_ms"] > WORTH_MS)]
    if len(above):
        names = ", ".join(
            f"{component.replace('_mlp', ' MLP')} {phase} ({share:.2f} times)".replace("  ", " ")
            for component, phase, share in zip(
                above["component"], above["phase"], above["share_of_ceiling"], strict=True
            )
        )
        found.append(
            f"Faster than the ceilings allow: {names}. Either the machine was slower while they "
            "were measured, or the part found its data in a nearer cache than was measured."
        )
    return found


def least_step(table: pd.DataFrame) -> dict[str, Any]:
    """The step as a whole.

    Args:
        table: what :func:`roofline` gives.

    Returns:
        ``time_ms``, ``least_ms`` (sum of the parts' least times, none above the measured
        one; None where one is not known), ``share`` (least over measured), ``limits`` (limit
        to ms of the least time, largest first), ``unknown`` (parts without a ceiling).
    """
    unknown = table[table["ceiling_ms"].isna()]
    time = float(table["time_ms"].sum())
    lowest = table["ceiling_ms"].clip(upper=table["time_ms"])
    least = None if len(unknown) or table.empty else float(lowest.sum())
    limits = lowest[lowest > 0].groupby(table["limit"]).sum()
    return {
        "time_ms": time,
        "least_ms": least,
        "share": least / time if least is not None and time > 0 else None,
        "limits": limits.sort_values(ascending=False).to_dict(),
        "unknown": list(zip(unknown["component"], unknown["phase"], strict=True)),
    }


def least_times(
    parameters: Parameters | Mapping[str, Any],
    ceilings: Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Least time of each part by a machine's ceilings, measured or of a data sheet.

    Args:
        ceilings: in the form of ``meta["ceilings"]``; also ``devices.Device.ceilings()``.

    Returns:
        ``component``, ``phase``, ``ceiling_ms``, ``limit``, ``ceiling``. A part has NaN
        and a ``ceiling`` that says what is missing, where none applies to it.

    Raises:
        InputError: the parameters are not valid.
    """
    if not isinstance(parameters, Parameters):
        parameters = parameters_from_sections(parameters)
    device = device or parameters.training.device
    operators = least_operator_times(parameters, ceilings, statistics, device)
    rows = [
        {"component": component, "phase": phase, **_part(group, Limits(ceilings), device)}
        for (component, phase), group in operators.groupby(KEYS, sort=False)
    ]
    return pd.DataFrame(rows, columns=[*KEYS, "ceiling_ms", "limit", "ceiling"])


def least_operator_times(
    parameters: Parameters,
    ceilings: Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Every operator of ``work.operator_work`` with the least time by each ceiling.

    Returns:
        Its columns and, in ms for all its executions, NaN where not known: ``arithmetic``,
        ``memory``, ``rows``, ``copies``, ``overhead`` (of the host), ``kernel`` (the
        least of any on a GPU); ``timed`` (the product itself was timed, so that its memory
        and its start are in it).
    """
    limits = Limits(ceilings)
    device = device or parameters.training.device
    work = operator_work(parameters, statistics, device)
    precisions = precision_names(parameters)
    on_gpu = device.startswith("cuda")
    # a captured graph is launched as a whole
    captured = on_gpu and setting_of(parameters, "cuda_graphs", False)
    overhead = None if captured else limits.overhead_ms(on_gpu)
    row_bytes = float(FLOAT_BYTES * parameters.model.embedding_dim)
    prefetched = parameters.data.loader == "prefetch"
    table_bytes = _table_bytes(parameters, ceilings, statistics)
    works: list[Any] = list(work.itertuples(index=False))
    rows = []
    for row in works:
        times: dict[str, float | None] = dict.fromkeys(_TIMES)
        timed = False
        if row.product:
            shape = (row.batch, row.m, row.n, row.k)
            found = limits.gemm_ms(row.component, row.product, row.layer, shape, precisions)
            if found is not None:
                times["arithmetic"], timed = found
        if row.on_link:
            times["copies"] = limits.copy_ms(row.read_bytes)
        elif row.component == "data" and prefetched:
            # another thread makes it; the step need not wait
            times["memory"] = 0.0
        else:
            times["memory"] = limits.memory_ms(row.read_bytes, row.written_bytes)
        if row.gather_bytes:
            size = table_bytes(row.table, row.phase)
            times["rows"] = limits.gather_ms(row.gather_bytes, row_bytes, size)
        if row.component not in ("data", "transfer") and not row.merged:
            times["overhead"], times["kernel"] = overhead, limits.kernel_ms() if on_gpu else None
        known = {name: np.nan if time is None else time * row.count for name, time in times.items()}
        rows.append({**known, "timed": timed})
    return pd.concat([work, pd.DataFrame(rows, index=work.index)], axis=1)


def _table_bytes(
    parameters: Parameters, ceilings: Mapping[str, Any], statistics: Mapping[str, Any] | None
) -> Callable[[int, str], float]:
    """Bytes that the random rows of a table and phase lie in.

    The whole table; after the forward pass only the rows that it touched, if the cache
    holds those of all tables.
    """
    row_bytes = float(FLOAT_BYTES * parameters.model.embedding_dim)
    looked_up = lookups(parameters, statistics)
    touched = max(sum(table.unique for table in looked_up), 1.0) * row_bytes
    cached = touched <= float(ceilings.get("last_level_cache_bytes") or 0)

    def size(table: int, phase: str) -> float:
        whole = looked_up[table].rows * row_bytes
        return min(touched, whole) if cached and phase != "forward" else whole

    return size


def precision_names(parameters: Parameters) -> tuple[str, ...]:
    """Names of the measured products that are of this run's precision."""
    precision = setting_of(parameters, "precision", "fp32")
    fused = setting_of(parameters, "dense_backend", "torch") == "fused"
    if precision != "fp32":
        return (precision, f"{precision}_tiles") if fused else (precision,)
    # whichever library multiplies fp32 faster could be used without changing precision
    names: tuple[str, ...] = ("fp32", "fp32_onednn")
    if fused:
        names = (*names, f"fp32_{setting_of(parameters, 'fp32_matmul', 'default')}")
    return (*names, "tf32") if setting_of(parameters, "tf32", False) else names


def parameters_of(profile: Profile) -> Parameters | None:
    """The parameters that a profile was recorded with; None if it has none we know."""
    sections = profile.meta.get("parameters")
    if not isinstance(sections, Mapping) or not sections.get("model"):
        return None
    try:
        return parameters_from_sections(sections)
    except InputError:
        return None


# ---- a part ---------------------------------------------------------------------

_LIMITS = {"arithmetic": ARITHMETIC, "memory": MEMORY, "rows": ROWS, "copies": COPIES}


def _part(operators: pd.DataFrame, limits: Limits, device: str) -> dict[str, Any]:
    """Least time of a part: of its operators, one after the other."""
    if (lacking := _lacking(operators)) is not None:
        return {"ceiling_ms": np.nan, "limit": "", "ceiling": lacking}
    on_gpu = device.startswith("cuda")
    known = operators[list(_LIMITS)].copy()
    known.loc[operators["timed"], ["memory", "rows"]] = np.nan
    known["overhead"] = operators["kernel" if on_gpu else "overhead"].where(~operators["timed"])
    binding = _binding(known, LAUNCHES if on_gpu else DISPATCH)
    times = binding.groupby("limit")["ms"].sum()
    # on a GPU the host runs ahead of the device: the longer of the two is the part's
    host = float(operators["overhead"].sum()) if on_gpu else 0.0
    if host > times.sum():
        times = pd.Series({LAUNCHES: host})
    return _answer(times, limits)


def _lacking(operators: pd.DataFrame) -> str | None:
    """What a part needs and nobody measured; None if everything is known."""
    moved = operators["on_link"]
    products = operators["product"] != ""
    if operators.loc[products, "arithmetic"].isna().any():
        return "matrix products of this precision were not measured"
    if operators.loc[~moved, "memory"].isna().any():
        return "streaming bandwidth was not measured"
    if operators.loc[moved, "copies"].isna().any():
        return "copies between host and device were not measured"
    return None


def _binding(known: pd.DataFrame, overhead: str) -> pd.DataFrame:
    """Of each operator the longest least time (``ms``) and the limit that asks for it."""
    some = known.dropna(how="all")
    names = {**_LIMITS, "overhead": overhead}
    longest = some.idxmax(axis=1) if len(some) else pd.Series(dtype=object)
    return pd.DataFrame({"limit": longest.map(names), "ms": some.max(axis=1)})


def _answer(times: pd.Series, limits: Limits) -> dict[str, Any]:
    total, limit = float(times.sum()), str(times.idxmax())
    if total == 0:
        return {"ceiling_ms": 0.0, "limit": "", "ceiling": ""}
    words = _words(limit)
    if not limits.measured:
        words += ", by data sheet, not measured"
    return {"ceiling_ms": total, "limit": limit, "ceiling": words}


def _words(limit: str) -> str:
    return {
        ARITHMETIC: "matrix products at the model's shapes",
        MEMORY: "streaming through memory or cache",
        ROWS: "reading random rows",
        DISPATCH: "the host's cost of an operator",
        LAUNCHES: "the host's cost of launching kernels",
        COPIES: "copying between host and device",
    }[limit]
