"""How near each part comes to what the machine allows, and which limit binds it.

The roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009) on the operators of
one iteration: an operator takes at least as long as its arithmetic, its bytes, its
random rows, or the host's cost of issuing it, whichever is longest, by ceilings measured
on the machine. A part takes at least the sum of its operators; what it takes beyond that
can be gained without changing shapes or precision.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import PART
from dlrm_workbook.analysis.devices import DATA_SHEET
from dlrm_workbook.analysis.work import FLOAT_BYTES, lookups, operator_work, part_work
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import Profile, nearest
from dlrm_workbook.recordings.torch.seen_shapes import lookup_of, product_of
from dlrm_workbook.recordings.torch.shape_work import (
    ASKED_FOR,
    FORMULAS,
    NO_WORK,
    OPERAND_BYTES,
    OPERATIONS,
    bytes_are,
)

ARITHMETIC = "arithmetic"
MEMORY = "memory bandwidth"
ROWS = "random rows"
DISPATCH = "dispatch"
LAUNCHES = "launches"
COPIES = "copies"

LIMIT_WORDS = {
    ARITHMETIC: "matrix products at the model's shapes",
    MEMORY: "streaming through memory or cache",
    ROWS: "reading random rows",
    DISPATCH: "the host's cost of an operator",
    LAUNCHES: "the host's cost of launching kernels",
    COPIES: "copying between host and device",
}
"""Limit to what the machine spends its time on there."""

ROOFLINE_COLUMNS = [*PART, "time_ms", "flops", "bytes", "intensity_flop_per_byte", "gflops"]
ROOFLINE_COLUMNS += ["gb_per_s", "ceiling", "ceiling_ms", "share_of_ceiling", "limit"]

BUSY_SHARE = 0.05
"""Of measuring the ceilings, spent waiting for a core: above it they are not the machine's."""

BEYOND = 1.1
"""A share of a ceiling above this is more than the measurements' noise."""

WORTH_NAMING = 0.005
"""A smaller share of the step is not worth the name of an operator."""

WORTH_MS = 0.2
"""Shorter parts are not worth a doubt."""

MAX_RELATIVE_ERROR = 1e-5
"""Of a library that may multiply fp32 matrices in another one's place."""

# ---- what a machine allows ---------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Ceilings of one machine, as a recording carries them in ``meta["ceilings"]``."""

    ceilings: Mapping[str, Any]

    @property
    def measured(self) -> bool:
        """Whether they were measured; else they are a data sheet's."""
        return self.ceilings.get("source") != DATA_SHEET

    # ---- arithmetic -------------------------------------------------------------

    def gemm_ms(
        self,
        part: str,
        product: str,
        layer: int,
        shape: tuple[int, int, int, int],
        precisions: Iterable[str],
    ) -> tuple[float, bool] | None:
        """Least time of a product (batch, m, n, k), and whether it was timed at this very shape.

        A product of the same shape counts, whichever layer it was timed for; then one of the
        same layer timed at another size, by its rate; without one, the best rate of all. Ceilings
        of its precision are recorded under the names ``precisions``.
        """
        flops = 2.0 * math.prod(shape)
        wanted = set(precisions)
        rows = self._products(wanted)
        of_layer = [
            row
            for row in rows
            if row.get("part") == part
            and row.get("phase") == product
            and row.get("layer") in (layer, None, -1)
        ]
        alike = [row for row in rows if row.get("phase") == product and _shape(row) == shape]
        if alike := alike or [row for row in of_layer if _flops(row) == flops]:
            return min(float(row["ms"]) for row in alike), True
        rates = [_flops(row) / float(row["ms"]) for row in of_layer if _flops(row) > 0]
        rates = rates or [1e6 * rate for rate in self._gemm_gflops(wanted)]
        rates = rates or [1e6 * rate for rate in self._peaks_gflops(wanted)]
        return (flops / max(rates), False) if rates else None

    def product_ms(
        self, shape: tuple[int, int, int, int], precisions: Iterable[str]
    ) -> float | None:
        """Least time of a product (batch, m, n, k), where it was timed at this shape."""
        rows = self._products(set(precisions))
        return min((float(row["ms"]) for row in rows if _shape(row) == shape), default=None)

    def peak_gflops(self, precisions: Iterable[str]) -> float | None:
        """The best rate of matrix products in this precision, 10^9 operations/s."""
        wanted = set(precisions)
        return max(self._gemm_gflops(wanted) + self._peaks_gflops(wanted), default=None)

    def _products(self, wanted: set[str]) -> list[Mapping[str, Any]]:
        return [row for row in self._list("gemm") if self._usable(row, wanted)]

    def _gemm_gflops(self, wanted: set[str]) -> list[float]:
        rows = [row for row in self._products(wanted) if _positive(row.get("gflops"))]
        return [float(row["gflops"]) for row in rows]

    def _peaks_gflops(self, wanted: set[str]) -> list[float]:
        peaks = self.ceilings.get("peak_gflops") or {}
        return [float(peaks[name]) for name in wanted if _positive(peaks.get(name))]

    def _usable(self, row: Mapping[str, Any], wanted: set[str]) -> bool:
        if row.get("precision") not in wanted or not _positive(row.get("ms")):
            return False
        if not row["precision"].startswith("fp32_"):
            return True
        error = row.get("relative_error")
        return error is not None and error <= MAX_RELATIVE_ERROR

    # ---- memory -----------------------------------------------------------------

    def memory_ms(self, read: float, written: float) -> float | None:
        """Least time to stream so many bytes in and out.

        Reading costs a = 1 / read rate a byte, writing b = 2 / copy rate − a: a copy moves
        as many bytes in as out. Between two measured sizes (one in cache, one in memory)
        the time is interpolated in logarithms of the size.
        """
        # STREAM's three arrays of ``bytes`` each took turns, so that is what the level held
        known = [
            (3 * float(row["bytes"]), read * cost[0] + written * cost[1])
            for row in self._list("stream")
            if _positive(row.get("bytes")) and (cost := _costs(row)) is not None
        ]
        seconds = _between(read + written, known)
        return None if seconds is None else 1e3 * seconds

    def gather_ms(self, gathered: float, row_bytes: float, table_bytes: float) -> float | None:
        """Least time to read so many bytes in random rows of tables of ``table_bytes``.

        By the measurements with the nearest size of a row, interpolated as streaming is.
        """
        rows = [row for row in self._list("gather") if _positive(row.get("gb_per_s"))]
        if not rows:
            return None

        def apart(row: Mapping[str, Any]) -> float:
            return abs(math.log(float(row["row_bytes"]) / row_bytes))

        nearest = min(map(apart, rows))
        known = [
            (float(row["table_bytes"]), 1e-9 * gathered / float(row["gb_per_s"]))
            for row in rows
            if apart(row) == nearest
        ]
        seconds = _between(table_bytes, known)
        return None if seconds is None else 1e3 * seconds

    # ---- host and link ----------------------------------------------------------

    def overhead_ms(self, on_gpu: bool) -> float | None:
        """Least time of the host for one operator: a dispatch, and on a GPU a launch."""
        names = ("dispatch_us", "launch_us") if on_gpu else ("dispatch_us",)
        costs = [self.ceilings.get(name) for name in names]
        known = [float(cost) for cost in costs if cost is not None and _positive(cost)]
        return max(known) / 1e3 if known else None

    def kernel_ms(self) -> float | None:
        """Least time of any kernel on the GPU, from one queued kernel to the next."""
        cost = self.ceilings.get("kernel_us")
        return float(cost) / 1e3 if cost is not None and _positive(cost) else None

    def copy_ms(self, moved: float) -> float | None:
        """Least time to copy so many bytes from the host to the device, from whichever memory."""
        rates = [
            float(row["gb_per_s"])
            for row in self._list("copy")
            if row.get("direction") == "h2d" and _positive(row.get("gb_per_s"))
        ]
        return moved / max(rates) / 1e6 if rates else None

    def _list(self, name: str) -> list[Mapping[str, Any]]:
        return list(self.ceilings.get(name) or [])


def _between(size: float, known: Iterable[tuple[float, float]]) -> float | None:
    """The time at ``size``, from (size, time) pairs: log-linear between, constant beyond."""
    points = sorted(known)
    if not points or size <= 0:
        return points[0][1] if points else None
    if size <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (small, fast), (large, slow) in itertools.pairwise(points):
        if size <= large:
            if small == large or fast <= 0 or slow <= 0:
                return min(fast, slow)
            share = math.log(size / small) / math.log(large / small)
            return float(fast ** (1 - share) * slow**share)
    return points[-1][1]


def _positive(value: Any) -> bool:
    return value is not None and math.isfinite(float(value)) and float(value) > 0


def _shape(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Batch, m, n, k of a recorded product; ``batch`` is there for batched ones only."""
    return (row.get("batch") or 1, *(row.get(name) or 0 for name in "mnk"))


def _flops(row: Mapping[str, Any]) -> float:
    """Operations of a recorded product."""
    return 2.0 * math.prod(float(size) for size in _shape(row))


def _costs(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Seconds a byte read and a byte written by one measurement of streaming."""
    read, copy = row.get("read_gb_per_s"), row.get("copy_gb_per_s")
    if not _positive(read):
        return None
    a = 1e-9 / float(read)  # type: ignore[arg-type]
    if not _positive(copy):
        return a, a
    both = 2e-9 / float(copy)  # type: ignore[arg-type]
    # reading alone cannot take longer than reading and writing
    a = min(a, both)
    return a, both - a


# ---- parts against it ----------------------------------------------------------------------


def roofline(profile: Profile, attribution: pd.DataFrame) -> pd.DataFrame:
    """Each part and phase against the machine's ceilings; rows as in ``attribution``.

    Args:
        attribution: of the profile; ``device`` and ``host`` time of a part are added, so
            that the times sum to the step.

    Returns:
        ``ceiling_ms`` is NaN where no ceiling is known, 0 where the machine has nothing to do. Of
        another program the work is that of its operators (:func:`operator_limits`), and a part is
        NaN where too much of it has none. Empty if no shapes are known (:func:`missing`).
    """
    parameters = parameters_of(profile)
    if attribution.empty or (parameters is None and missing(profile)):
        return pd.DataFrame({name: [] for name in ROOFLINE_COLUMNS})
    table = attribution.groupby(PART, as_index=False, sort=False)[["time_ms"]].sum()
    if parameters is None:
        return _with_rates(_seen_parts(profile, table))
    statistics = profile.meta.get("data_statistics")
    work = part_work(parameters, statistics, profile.device)
    least = least_times(parameters, profile.meta.get("ceilings") or {}, statistics, profile.device)
    if "like" in profile.meta:
        work, least = _one_update(work), _one_update(least)
    table = table.merge(work, on=PART, how="left").merge(least, on=PART, how="left")
    idle = table["flops"].isna()
    table["bytes"] = table["read_bytes"] + table["written_bytes"]
    table[["flops", "bytes"]] = table[["flops", "bytes"]].fillna(0.0)
    # where the model asks nothing of the machine, the machine needs no time
    table.loc[idle, "ceiling_ms"] = 0.0 if profile.meta.get("ceilings") else np.nan
    table[["limit", "ceiling"]] = table[["limit", "ceiling"]].fillna("")
    if "like" in profile.meta:
        # nothing is faster than the machine: the recording lacks work, or it is another model's
        lacking = table["ceiling_ms"] > table["time_ms"]
        table.loc[lacking, ["ceiling_ms", "limit", "ceiling"]] = np.nan, "", LACKING
    return _with_rates(table)


def _one_update(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of parts, with one for the dense update, which other programs do not divide."""
    table = table.copy()
    table.loc[table["phase"].eq("update") & table["component"].ne("embedding"), PART[0]] = (
        "optimizer"
    )
    texts = {name: "first" for name in table if table[name].dtype == object}
    how = {name: texts.get(name, "sum") for name in table if name not in PART}
    return table.groupby(PART, as_index=False, sort=False).agg(how)


BY_SHEET = ", by data sheet, not measured"
LACKING = "not known: less time was recorded than the machine needs for this model's work"


def _with_rates(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that follow from time, work and least time."""
    time = table["time_ms"].where(table["time_ms"] > 0)
    table["intensity_flop_per_byte"] = table["flops"] / table["bytes"].where(table["bytes"] > 0)
    table["gflops"] = table["flops"] / time / 1e6
    table["gb_per_s"] = table["bytes"] / time / 1e6
    table["share_of_ceiling"] = table["ceiling_ms"] / time
    return table[ROOFLINE_COLUMNS]


def missing(profile: Profile) -> str | None:
    """Why there is no roofline, or no ceilings on it; None if there are."""
    known = parameters_of(profile) is not None
    if not known and profile.meta.get("parameters"):
        return "the recorded parameters are not those of a model that this version knows"
    if not profile.meta.get("ceilings"):
        why = (
            "the recording has no ceilings of its machine; "
            "`dlrm run profile -f FILE -p profiling.probes=true` measures them"
            if known
            else "the profile does not say which model ran, and its machine was not measured; "
            "`dlrm run profile -- COMMAND` and `dlrm_workbook.record` measure it"
        )
        return profile.not_measured.get("ceilings", why)
    return None if known or profile.has(OPERAND_BYTES) else "no shapes of operators were recorded"


def operations_by_precision(profile: Profile) -> pd.DataFrame:
    """Operations of each context (rows) that shapes tell, by the operands' precision (columns)."""
    metrics = [str(name) for name in profile.metrics["metric"] if str(name).startswith(OPERATIONS)]
    columns = {m.removeprefix(OPERATIONS): profile.value_table(m).fillna(0.0) for m in metrics}
    return pd.DataFrame(columns, index=profile.contexts.index)


OPERATOR_COLUMNS = ["name", "shapes", *PART, "calls", "time_ms", "flops", "bytes"]
OPERATOR_COLUMNS += ["ceiling_ms", "share_of_ceiling", "limit", "reason"]

NO_FORMULA = "its work is not counted"
NOT_TOLD = "the shapes and types of its inputs do not tell its work"

UNKNOWN_SHARE = 0.1
"""A part has no least time where operators of unknown work take more than this share of it."""

DISPATCHES = 10
"""An operator that takes no more than so many dispatches counts as one that does nothing else."""

_FP32 = ("fp32", "fp32_onednn")
"""Ceilings of fp32: a program could call the faster library without changing precision."""


def operator_limits(profile: Profile) -> pd.DataFrame:
    """Operators of another program on a CPU, with the least time by this machine's ceilings.

    An operator whose work its inputs tell has the time of all that it calls; others have the
    time in which they call none. Those that call others most of that time, move no data, or
    take no more than a few dispatches have no work.

    Returns:
        The most time first, of a mean iteration; ``bytes`` are taken as read, since shapes do not
        say what is written, so that the least time is not too long. Empty where :func:`missing`
        says why.
    """
    if profile.meta.get("parameters") or missing(profile):
        return pd.DataFrame({name: [] for name in OPERATOR_COLUMNS})
    limits, contexts = Limits(profile.meta["ceilings"]), profile.contexts
    by_precision = operations_by_precision(profile)
    flops = by_precision.sum(axis=1).to_numpy()
    size = profile.value_table(OPERAND_BYTES).fillna(0.0).to_numpy()
    known = (flops > 0) | (size > 0)
    names = contexts["name"].str.removeprefix("aten::")
    operator, parent = profile.of_kind("operator"), contexts["parent"].to_numpy()
    calls = profile.value_table("calls").fillna(0.0).to_numpy()
    own = profile.value_table("cpu_time_ms").fillna(0.0).to_numpy()
    whole = profile.value_table("cpu_time_ms", "inclusive").fillna(0.0).to_numpy()
    short = own <= DISPATCHES * calls * (limits.overhead_ms(False) or 0.0)
    passes_on = np.isin(np.arange(len(contexts)), parent[operator]) & (own <= whole / 2)
    no_work = ~known & (short | passes_on | names.isin(NO_WORK).to_numpy())
    rows = np.flatnonzero(known | (operator & (nearest(parent, known) < 0)))
    each = 1.0 / max(len(profile.iterations), 1)
    table = contexts[["name", "shapes", *PART]].iloc[rows].reset_index(drop=True)
    table["calls"] = calls[rows] * each
    table["time_ms"] = np.where(known, whole, own)[rows] * each
    table["flops"], table["bytes"] = flops[rows] * each, size[rows] * each
    table["precision"] = by_precision.idxmax(axis=1).to_numpy()[rows] if flops.any() else ""
    table["no_work"], table["known"] = no_work[rows], known[rows]
    keys = ["name", "shapes", *PART, "precision", "no_work", "known"]
    table = table.groupby(keys, as_index=False, sort=False).sum()
    least = [_least_of(limits, row) for row in table.itertuples(index=False)]
    found = ["ceiling_ms", "limit", "reason"]
    table[found] = pd.DataFrame(least, columns=found, index=table.index)
    # what C++ calls is dispatched faster than what Python calls
    fastest = table[["ceiling_ms", "time_ms"]].min(axis=1)
    table["ceiling_ms"] = table["ceiling_ms"].mask(table["limit"].eq(DISPATCH), fastest)
    table["share_of_ceiling"] = table["ceiling_ms"] / table["time_ms"].where(table["time_ms"] > 0)
    return table.sort_values("time_ms", ascending=False, ignore_index=True)[OPERATOR_COLUMNS]


def _least_of(limits: Limits, row: Any) -> tuple[float, str, str]:
    """Least time of an operator, in ms for all its calls, its limit, and why it is not known."""
    if row.no_work:
        return 0.0, "", ""
    if not row.known:
        return math.nan, "", NOT_TOLD if row.name in FORMULAS else NO_FORMULA
    precisions = _FP32 if row.precision == "fp32" else (row.precision,)
    product = product_of(row.name, row.shapes)
    if product and (alone := limits.product_ms(product, precisions)) is not None:
        return alone * row.calls, ARITHMETIC, ""  # its memory and its start are in it
    times: dict[str, float | None] = {DISPATCH: limits.overhead_ms(False)}
    # rows that are asked for again come from a cache: what is written counts
    once = 0.5 if not row.flops and bytes_are(row.name) == ASKED_FOR else 1.0
    times[MEMORY] = limits.memory_ms(once * row.bytes / row.calls, 0.0)
    if times[MEMORY] is None:
        return math.nan, "", "streaming bandwidth was not measured"
    if (table := _rows_of(row.name, row.shapes, row.flops / row.calls)) is not None:
        gathered, row_bytes, table_bytes = table
        times[ROWS] = limits.gather_ms(gathered, row_bytes, table_bytes)
    elif row.flops:
        peak = limits.peak_gflops(precisions)
        if peak is None:
            return math.nan, "", f"matrix products of {row.precision} were not timed"
        times[ARITHMETIC] = row.flops / row.calls / peak / 1e6
    known = {limit: time for limit, time in times.items() if time is not None}
    limit = max(known, key=lambda name: known[name])
    return known[limit] * row.calls, limit, ""


def _rows_of(name: str, shapes: str, flops: float) -> tuple[float, float, float] | None:
    """Bytes read in random rows by a call, of a row, and of its table; None for what reads none."""
    if (lookup := lookup_of(name, shapes)) is not None:
        height, width, _, _ = lookup
        gathered = FLOAT_BYTES * flops  # a number of each row is added once
    elif flops and name in ("aten::add", "aten::add_"):
        height, width = json.loads(shapes)[0]
        gathered = FLOAT_BYTES * flops / 2  # and, with a rate, multiplied
    else:
        return None
    row_bytes = float(FLOAT_BYTES * width)
    return gathered, row_bytes, height * row_bytes


def _seen_parts(profile: Profile, table: pd.DataFrame) -> pd.DataFrame:
    """Work and least time of parts of another program, from those of their operators.

    Time outside of operators, such as Python's, is that of no operator and asks nothing of the
    machine that is known here, so it counts as 0.
    """
    operators = operator_limits(profile)
    operators["unknown_ms"] = operators["time_ms"].where(operators["ceiling_ms"].isna(), 0.0)
    sums = operators.groupby(PART)[["flops", "bytes", "ceiling_ms", "unknown_ms"]].sum()
    table = table.join(sums, on=PART).fillna(dict.fromkeys(sums.columns, 0.0))
    of_part = dict(list(operators.groupby(PART)))
    found = []
    row: Any
    for row in table.itertuples(index=False):
        limit, words, least = "", "", row.ceiling_ms
        if row.component == "communication":
            words, least = "what the network allows was not measured", math.nan
        elif row.unknown_ms > UNKNOWN_SHARE * row.time_ms:
            own = of_part[row.component, row.phase]
            worst: Any = own.loc[own["unknown_ms"].idxmax()]
            words, least = f"{worst['name']}: {worst['reason']}", math.nan
        elif least > 0:
            own = of_part[row.component, row.phase]
            limit = str(own.groupby("limit")["ceiling_ms"].sum().idxmax())
            words = LIMIT_WORDS[limit]
        found.append((least, limit, words))
    table[["ceiling_ms", "limit", "ceiling"]] = found
    return table.astype({"ceiling_ms": float})


def doubts(profile: Profile, table: pd.DataFrame) -> list[str]:
    """Reasons not to trust the ceilings, as sentences; none where all is well. ``table`` is what
    :func:`roofline` gives of the profile."""
    sentences = _known_work(profile, table)
    waited = (profile.meta.get("ceilings") or {}).get("run_queue_share")
    if waited is not None and waited > BUSY_SHARE:
        sentences.append(
            f"The machine was busy while its ceilings were measured: the measuring thread waited "
            f"for a core {waited:.0%} of the time. They are too low, and shares of them too high."
        )
    above = table[(table["share_of_ceiling"] > BEYOND) & (table["time_ms"] > WORTH_MS)]
    if len(above):
        names = ", ".join(
            f"{part_label(component, phase)} ({share:.2f} times)"
            for component, phase, share in above[[*PART, "share_of_ceiling"]].to_numpy()
        )
        sentences.append(
            f"Faster than the ceilings allow: {names}. Either the machine was slower while they "
            "were measured, or the part found its data in a nearer cache than was measured."
        )
    return sentences


def _known_work(profile: Profile, table: pd.DataFrame) -> list[str]:
    """The sentence about how much of another program's step has known work; none of our own."""
    operators = operator_limits(profile)
    total = float(table["time_ms"].sum())
    if operators.empty or total <= 0:
        return []
    unknown = operators[operators["ceiling_ms"].isna()]
    inside, silent = (float(rows["time_ms"].sum()) for rows in (operators, unknown))
    sentence = (
        f"The recorded shapes tell the work of operators that take {(inside - silent) / total:.0%} "
        f"of the step. Code outside of operators, such as Python's, takes "
        f"{max(0.0, 1 - inside / total):.0%}; its least time counts as 0."
    )
    each = unknown.groupby("name")["time_ms"].sum()
    largest = each[each > WORTH_NAMING * total].nlargest(3)
    if names := ", ".join(f"`{name}` ({milliseconds(time)})" for name, time in largest.items()):
        sentence += f" Operators of unknown work take {silent / total:.1%}, above all {names}."
    return [sentence]


def least_step(table: pd.DataFrame) -> dict[str, Any]:
    """The step as a whole.

    Args:
        table: what :func:`roofline` gives.

    Returns:
        ``time_ms``, ``least_ms`` (sum of the parts' least times, none above the measured
        one; None where they are not known for more than :data:`UNKNOWN_SHARE` of the step; a
        part without one counts as 0), ``share`` (least over measured), ``limits`` (limit
        to ms of the least time, largest first), ``unknown`` (parts without a ceiling).
    """
    unknown = table[table["ceiling_ms"].isna()]
    time = float(table["time_ms"].sum())
    lowest = table["ceiling_ms"].clip(upper=table["time_ms"])
    too_little = unknown["time_ms"].sum() > UNKNOWN_SHARE * time or lowest.isna().all()
    least = None if too_little else float(lowest.sum())
    limits = lowest[lowest > 0].groupby(table["limit"]).sum()
    return {
        "time_ms": time,
        "least_ms": least,
        "share": least / time if least is not None and time > 0 else None,
        "limits": limits.sort_values(ascending=False).to_dict(),
        "unknown": list(unknown[PART].itertuples(index=False, name=None)),
    }


def least_times(
    parameters: Parameters,
    ceilings: Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Least time of each part by a machine's ceilings, measured or of a data sheet. ``ceilings``
    are in the form of ``meta["ceilings"]``; also ``devices.Device.ceilings()``. Returns
    ``component``, ``phase``, ``ceiling_ms``, ``limit``, ``ceiling``. A part has NaN and a
    ``ceiling`` that says what is missing, where none applies to it."""
    device = device or parameters.training.device
    operators = least_operator_times(parameters, ceilings, statistics, device)
    rows = [
        (*part, *_part(group, Limits(ceilings), device))
        for part, group in operators.groupby(PART, sort=False)
    ]
    return pd.DataFrame(rows, columns=[*PART, "ceiling_ms", "limit", "ceiling"])


def least_operator_times(
    parameters: Parameters,
    ceilings: Mapping[str, Any],
    statistics: Mapping[str, Any] | None,
    device: str,
) -> pd.DataFrame:
    """Every operator of ``work.operator_work`` with the least time by each ceiling.

    Returns:
        Its columns and, in ms for all its executions, NaN where not known: ``arithmetic``,
        ``memory``, ``rows``, ``copies``, ``overhead`` (of the host), ``kernel`` (the
        least of any on a GPU); ``timed`` (the product itself was timed, so that its memory
        and its start are in it).
    """
    limits = Limits(ceilings)
    work = operator_work(parameters, statistics, device)
    precisions = precision_names(parameters)
    on_gpu = device.startswith("cuda")
    # a captured graph is launched as a whole
    captured = on_gpu and parameters.training.cuda_graphs
    overhead = None if captured else limits.overhead_ms(on_gpu)
    row_bytes = float(parameters.model.row_bytes)
    prefetched = parameters.data.loader == "prefetch"
    table_bytes = _table_bytes(parameters, ceilings, statistics)
    rows = []
    row: Any
    for row in work.itertuples(index=False):
        times: dict[str, float | None] = dict.fromkeys([*_LIMITS, "overhead", "kernel"])
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
    row_bytes = float(parameters.model.row_bytes)
    looked_up = lookups(parameters, statistics)
    touched = max(sum(table.unique for table in looked_up), 1.0) * row_bytes
    cached = touched <= float(ceilings.get("last_level_cache_bytes") or 0)

    def size(table: int, phase: str) -> float:
        whole = looked_up[table].rows * row_bytes
        return min(touched, whole) if cached and phase != "forward" else whole

    return size


def precision_names(parameters: Parameters) -> tuple[str, ...]:
    """Names of the measured products that are of this run's precision."""
    precision = parameters.training.precision
    fused = parameters.training.dense_backend == "fused"
    if precision != "fp32":
        return (precision, f"{precision}_tiles") if fused else (precision,)
    # whichever library multiplies fp32 faster could be used without changing precision
    names: tuple[str, ...] = ("fp32", "fp32_onednn")
    if fused:
        names = (*names, f"fp32_{parameters.training.fp32_matmul}")
    return (*names, "tf32") if parameters.training.tf32 else names


def profile_parameters(profile: Profile) -> Parameters:
    """The parameters that the profiled run had. An InputError says that the profile does not tell,
    or that they are not those of a model we know."""
    sections = profile.meta.get("parameters")
    if not sections:
        raise InputError("the profile does not say with which parameters it ran")
    return parameters_from_sections(sections)


def parameters_of(profile: Profile) -> Parameters | None:
    """The parameters that a profile was recorded with; None if it has none we know.

    Of a recording of another program, whose steps are known, those that a user gave it.
    """
    sections = profile.meta.get("parameters")
    if not sections and len(profile.iterations):
        sections = profile.meta.get("like")
    if not isinstance(sections, Mapping) or not sections.get("model"):
        return None
    try:
        return parameters_from_sections(sections)
    except InputError:
        return None


_LIMITS = {"arithmetic": ARITHMETIC, "memory": MEMORY, "rows": ROWS, "copies": COPIES}
"""Column of :func:`least_operator_times` to the limit that it is the time of."""


def _part(operators: pd.DataFrame, limits: Limits, device: str) -> tuple[float, str, str]:
    """Least time of a part, of its operators one after the other; its limit, and that in words."""
    if (lacking := _lacking(operators)) is not None:
        return np.nan, "", lacking
    on_gpu = device.startswith("cuda")
    known = operators[list(_LIMITS)].copy()
    known.loc[operators["timed"], ["memory", "rows"]] = np.nan
    known["overhead"] = operators["kernel" if on_gpu else "overhead"].where(~operators["timed"])
    known = known.dropna(how="all").rename(
        columns=_LIMITS | {"overhead": LAUNCHES if on_gpu else DISPATCH}
    )
    # of each operator the longest least time counts
    times = known.max(axis=1).groupby(known.idxmax(axis=1)).sum() if len(known) else pd.Series()
    # on a GPU the host runs ahead of the device: the longer of the two is the part's
    host = float(operators["overhead"].sum()) if on_gpu else 0.0
    if host > times.sum():
        times = pd.Series({LAUNCHES: host})
    total, limit = float(times.sum()), str(times.idxmax())
    if total == 0:
        return 0.0, "", ""
    return total, limit, LIMIT_WORDS[limit] + ("" if limits.measured else BY_SHEET)


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
