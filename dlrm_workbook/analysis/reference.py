"""The one time that a page calls the step: a steady iteration without a profiler.

A recording is made under a profiler, which slows some parts more than others. Beside it the
measuring process runs iterations without one, and their median is the reference.
:func:`at_reference` rewrites a profile as if its clock had run at that pace, so that parts,
trees, tables and the timeline of a page add up to one step; what else took another time, and
why, is one table (:func:`other_times`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.parts import ITERATION_SPAN, parse_span
from dlrm_workbook.analysis.attribution import (
    KEYS,
    PART,
    attribute,
    has_iterations,
    iteration_contexts,
    iteration_count,
    iteration_state,
    main_thread,
    parts_at,
    per_iteration,
    segments,
    step_contexts,
)
from dlrm_workbook.analysis.steady import steady_state
from dlrm_workbook.ground.arrays import Bools, Floats, Ints
from dlrm_workbook.ground.runs import latest_run
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.nesting import start_and_end, union_ns
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive, of_streams
from dlrm_workbook.recordings.torch import RECORDED_PASS

LEAST_UNDISTURBED = 5
"""Undisturbed ones, fewer than which say less than all together."""

DISTURBED_SHARE = 0.05
"""Share of an iteration spent waiting for a core above which others disturbed it."""

PASSES = 3
"""Times that the paces are found; which iterations are steady has settled by then."""

ROUNDING = 0.005
"""Two sums of a GPU's time that differ by no more than this share count as the same."""

TIME_COLUMNS = ["what", "time_ms", "times_the_step", "iterations", "why"]
Time = tuple[str, float, float | None, str]
"""What was timed, ms, of how many iterations, and why it differs from the step."""


@dataclass(frozen=True)
class Reference:
    """The time of a step that everything on a page adds up to."""

    ms: float
    iterations: int | None
    """How many iterations it is the median or mean of; None where that is not known."""
    source: str
    """The origin of that time, in words that follow "the step is"."""
    unprofiled: bool
    """Whether it was measured without a profiler."""
    recorded_ms: float
    """Mean steady iteration of the recording itself."""
    recorded_iterations: int
    left_out: int
    """Iterations of the recording that are no steady ones."""
    recorded_mean_ms: float
    """Mean of all iterations of the recording."""
    laps: int = 0
    """Stretches of an iteration that another program's parts were timed by without the profiler."""

    @property
    def sentence(self) -> str:
        """What the step is on this page, for a reader."""
        if not self.unprofiled:
            return (
                f"On this page the step takes {milliseconds(self.ms)}: {self.source}. No iteration "
                "was timed without the profiler, so its cost is in every figure."
            )
        by_laps = (
            f", each of {self.laps} stretches of an iteration (between begins and ends of modules "
            "and of their backward passes) by its own time without the profiler"
        )
        return (
            f"On this page the step takes {milliseconds(self.ms)}: {self.source}. The recording "
            f"was made under a profiler, where it took {milliseconds(self.recorded_ms)}; times of "
            "parts, calls and operators are scaled so that they add up to the step"
            f"{by_laps if self.laps else ''}."
        )


# ---- the step without a profiler -------------------------------------------------------------


def unprofiled_ms(profile: Profile) -> float | None:
    """Median time of an iteration without the profiler, data included; None if unknown."""
    plain = _unprofiled(profile)
    return None if plain is None else plain[0]


def _unprofiled(profile: Profile) -> tuple[float, int | None, str] | None:
    """Milliseconds of an iteration without the profiler, of how many, and which they are."""
    times = unprofiled_times(profile)
    every_ms = profile.meta.get("unprofiled_iteration_ms") or []
    if times:
        source = f"the median of {len(times)} iterations without a profiler, beside the recording"
        if len(every_ms) > len(times):
            source += (
                f" ({len(every_ms) - len(times)} more were left out: other programs took the core "
                f"in over {DISTURBED_SHARE:.0%} of their time)"
            )
        return statistics.median(times), len(times), source
    for measured in profile.meta.get("passes", []):
        plain_ms = measured.get("unprofiled_ms_per_iteration")
        if measured.get("name") == "unprofiled":
            plain_ms = measured.get("ms_per_iteration") or plain_ms
        if plain_ms:
            return float(plain_ms), None, "the median iteration of a run without a profiler"
    return None


def unprofiled_times(profile: Profile) -> list[float]:
    """Times of the iterations without a profiler whose median is the step, ms, in run order."""
    counters = profile.meta.get("counters") or {}
    calm = _undisturbed(counters)
    if len(calm) >= LEAST_UNDISTURBED:
        return [counters["wall_ms"][row] for row in calm]
    return list(profile.meta.get("unprofiled_iteration_ms") or [])


def _undisturbed(counters: Mapping[str, list[Any]]) -> list[int]:
    """Rows of the unprofiled iterations during which the thread hardly waited for a core."""
    columns = (counters.get(name) or [] for name in ("profiled", "wall_ms", "run_queue_ms"))
    return [
        row
        for row, (profiled, wall, waited) in enumerate(zip(*columns, strict=False))
        if not profiled and wall and waited is not None and waited < DISTURBED_SHARE * wall
    ]


def _unprofiled_parts(profile: Profile) -> dict[tuple[str, str], float]:
    """Median of each part, ms, over the iterations without a profiler that the reference is of;
    ``("other", "")`` is what an iteration takes beyond its parts. Empty where not timed."""
    part_times = profile.meta.get("unprofiled_parts_ms") or []
    if not part_times or ITERATION_SPAN not in part_times[0]:
        table = _parts_by_laps(profile)
        medians = table[_calm_rows(profile, len(table))].median().dropna()
        return dict(zip(medians.index.tolist(), medians.tolist(), strict=True))
    table = pd.DataFrame(part_times).fillna(0.0)
    table = table[_calm_rows(profile, len(table))]
    part_of = {name: part for name in table if (part := parse_span(str(name))) is not None}
    # not the median iteration less the parts' medians: those do not add up
    rest = (table[ITERATION_SPAN] - table[list(part_of)].sum(axis=1)).clip(lower=0.0)
    medians_ms = {part: float(table[name].median()) for name, part in part_of.items()}
    return {("other", ""): float(rest.median())} | medians_ms


def _calm_rows(profile: Profile, count: int) -> Bools:
    """Tell which of the ``count`` iterations without a profiler the reference is of."""
    counters = profile.meta.get("counters") or {}
    profiled = counters.get("profiled") or []
    plain = [row for row, under in enumerate(profiled) if not under]
    calm = _undisturbed(counters)
    if len(calm) < LEAST_UNDISTURBED or len(plain) != count:
        return np.ones(count, dtype=bool)
    return np.isin(plain, calm)


def _parts_by_laps(profile: Profile) -> pd.DataFrame:
    """Time of each part (a column) in each iteration without a profiler, by the laps of both.

    A lap is a stretch of an iteration between two moments that are known with the profiler and
    without, such as the beginning and the end of a module. The time of a lap without the
    profiler is shared among parts as the recording of the same lap is. Iterations that are
    divided otherwise than most are NaN; empty without laps.
    """
    laps = profile.meta.get("laps_ms") or {}
    recorded, plain = laps.get("profiled") or [], laps.get("unprofiled") or []
    count = len(laps.get("between") or []) + 1
    lengths = {len(ms) for ms in (*recorded, *plain) if ms is not None}
    if len(recorded) != len(profile.iterations) or lengths != {count} or not any(plain):
        return pd.DataFrame()
    pieces = segments(profile, device=False)
    owners = parts_at(profile, pieces["context"].to_numpy())
    code, parts = pd.factorize(pd.MultiIndex.from_frame(owners))
    within = np.zeros((count, len(parts)))
    ordered = profile.iterations.sort_values("start_ns")
    for number, last, ms in zip(ordered["iteration"], ordered["end_ns"], recorded, strict=True):
        mine = np.flatnonzero(pieces["iteration"].eq(number))
        if ms is None or not len(mine):
            continue
        # an iteration of the trace begins a little earlier, before the counters are read
        edges = last + np.rint((np.append(0.0, np.cumsum(ms)) - np.sum(ms)) * 1e6).astype(np.int64)
        starts = pieces["start_ns"].to_numpy()[mine]
        cuts = np.unique(np.concatenate([starts[starts > edges[0]], edges]))
        lap = np.searchsorted(edges, cuts[:-1], side="right") - 1
        piece = np.maximum(np.searchsorted(starts, cuts[:-1], side="right") - 1, 0)
        np.add.at(within, (lap, code[mine[piece]]), np.diff(cuts))
    share = within / np.maximum(within.sum(axis=1, keepdims=True), 1.0)
    times = np.array([[np.nan] * count if ms is None else ms for ms in plain])
    return pd.DataFrame(times @ share, columns=parts)


# ---- a profile at the pace of the reference ----------------------------------------------------


def reference(profile: Profile) -> Reference | None:
    """What a step is on the page of this profile; None where no step is known.

    Where GPU work alone takes longer than an iteration without the profiler, or kernels were
    serialised, it is the recorded iteration.
    """
    if "reference" in profile.meta:
        stored = profile.meta["reference"]
        return None if stored is None else Reference(**stored)
    attribution = attribute(profile)
    recorded = float(attribution["time_ms"].sum()) if len(attribution) else 0.0
    if recorded <= 0 or not (has_iterations(profile) or _unprofiled(profile)):
        return None
    state = iteration_state(profile)
    steady = int(state.steady.sum()) if state is not None else iteration_count(profile)
    under: dict[str, Any] = {
        "recorded_ms": recorded,
        "recorded_iterations": steady,
        "left_out": 0 if state is None else int((~state.steady).sum()),
        "recorded_mean_ms": recorded if state is None else float(state.times_ms.mean()),
    }
    plain = None if profile.meta.get("serialised") else _unprofiled(profile)
    on_gpu = attribution["where"].eq("device")
    busy = float(attribution.loc[on_gpu, "time_ms"].sum())
    if plain is None or plain[0] <= busy:
        source = f"the mean of {steady} steady iterations of the recording"
        if steady == 1:
            source = "the one steady iteration of the recording"
        return Reference(recorded, steady, source, False, **under)
    laps = 0 if _parts_by_laps(profile).empty else len(profile.meta["laps_ms"]["between"]) + 1
    return Reference(*plain, True, **under, laps=0 if busy else laps)


def at_reference(profile: Profile) -> Profile:
    """The profile with its clock at the pace of the step without a profiler.

    Each part runs at its own pace, by its time without the profiler where that is known and
    else at one pace for all; on a GPU only the time in which the GPU idles is shortened, since
    no profiler makes a kernel faster or slower. The mean steady iteration and the sums over the
    call tree then come to the reference. Iterations are numbered as the process ran them. A
    profile without a reference, or one that is at it already, is given back as it is.
    """
    if "reference" in profile.meta:
        return profile
    step = reference(profile)
    if step is None or not step.unprofiled:
        meta = profile.meta | {"reference": None if step is None else asdict(step)}
        return replace(profile, meta=meta, iterations=_numbered(profile))
    paces, steady = _paces(profile, step.ms)
    step = _of_iterations(step, per_iteration(profile), steady)
    meta = profile.meta | {"reference": asdict(step)}
    clock = _Clock(profile, paces, step.ms / step.recorded_ms)
    tables = {
        name: table.assign(start_ns=clock(table["start_ns"]), end_ns=clock(table["end_ns"]))
        for name, table in (("trace", profile.trace), ("iterations", _numbered(profile)))
    }
    if profile.meta.get("overlong"):
        rows, ends = zip(*profile.meta["overlong"], strict=True)
        true_ends = clock(pd.Series(ends, dtype="int64")).tolist()
        meta["overlong"] = [list(pair) for pair in zip(rows, true_ends, strict=True)]
    values = _scaled_values(profile, paces, step)
    return replace(profile, **tables, values=values, meta=meta, _known={})


def all_at_reference(profiles: Mapping[str, Profile]) -> dict[str, Profile]:
    """Profiles that are compared, each at its reference; as they are where one has none.

    A profiler slows some parts more than others, and each recording by another factor.
    """
    references = [reference(profile) for profile in profiles.values()]
    if not all(step and step.unprofiled for step in references):
        return dict(profiles)
    return {name: at_reference(profile) for name, profile in profiles.items()}


def _numbered(profile: Profile) -> pd.DataFrame:
    """The iterations under the numbers that the counters of the process give them."""
    counters = profile.meta.get("counters") or {}
    pairs = zip(counters.get("iteration") or [], counters.get("profiled") or [], strict=False)
    numbers = [int(number) for number, profiled in pairs if profiled]
    if len(numbers) != len(profile.iterations) or not numbers:
        return profile.iterations
    order = profile.iterations["start_ns"].rank(method="first").astype(int) - 1
    return profile.iterations.assign(iteration=np.array(sorted(numbers))[order])


def _of_iterations(step: Reference, part_times: pd.DataFrame, steady: Ints) -> Reference:
    """The reference with what it says of the recording from the iterations that are steady on the
    page, so that its dilation is theirs."""
    totals = part_times.groupby("iteration")["time_ms"].sum()
    if totals.empty:
        return step
    return replace(
        step,
        recorded_ms=float(totals.reindex(steady).mean()),
        recorded_iterations=len(steady),
        left_out=len(totals) - len(steady),
    )


def _paces(profile: Profile, step_ms: float) -> tuple[pd.DataFrame, Ints]:
    """Time at the reference over recorded time, by part, and the numbers of steady iterations.
    Returns ``component``, ``phase``, ``where``, ``pace``; and the iterations (n,)."""
    part_times = per_iteration(profile).set_index(KEYS)
    state = iteration_state(profile)
    numbers = np.sort(part_times["iteration"].unique())
    steady = numbers if state is None else profile.iterations["iteration"].to_numpy()[state.steady]
    plain = _unprofiled_parts(profile)
    for _ in range(PASSES):
        usual = _mean_of(part_times, steady)
        pace = _pace_of_each(usual, plain, step_ms)
        at_pace = part_times["time_ms"] * pace.reindex(part_times.index)
        totals = at_pace.groupby(part_times["iteration"]).sum()
        # parts at paces of their own may make other iterations the steady ones
        steady = totals.index[steady_state(totals.to_numpy()).steady].to_numpy()
    pace = _pace_of_each(_mean_of(part_times, steady), plain, step_ms)
    return pace.rename("pace").reset_index(), steady


def _mean_of(part_times: pd.DataFrame, iterations: Ints) -> pd.Series:
    """Mean time of each part (rows as in ``each``) in some iterations, ms."""
    chosen = part_times[part_times["iteration"].isin(iterations)]
    total = chosen.groupby(level=list(KEYS), sort=False)["time_ms"].sum()
    return total.reindex(part_times.index.unique()).fillna(0.0) / len(iterations)


def _pace_of_each(
    usual: pd.Series, plain: Mapping[tuple[str, str], float], step_ms: float
) -> pd.Series:
    """Pace of each part whose usual time is given: they come to the step; a GPU's are 1."""
    on_gpu = usual.index.get_level_values("where") == "device"
    rest = usual[~on_gpu].sum()
    moved = step_ms - usual[on_gpu].sum()
    pace = pd.Series(moved / rest if rest > 0 else 1.0, usual.index)
    if on_gpu.any():
        pace[on_gpu] = 1.0
        return pace
    for row, (component, phase, _) in enumerate(usual.index):
        if plain.get((component, phase)) and usual.iloc[row] > 0:
            pace.iloc[row] = plain[component, phase] / usual.iloc[row]
    return pace * step_ms / (usual * pace).sum()


class _Clock:
    """Moments of a recording to those of the same work at the reference's pace."""

    def __init__(self, profile: Profile, paces: pd.DataFrame, outside: float) -> None:
        pieces = segments(profile) if len(profile.trace) else pd.DataFrame()
        self.outside = outside
        if pieces.empty:
            self.at, self.moved, self.origin = np.zeros(1), np.zeros(1), 0
            return
        pieces = pieces.sort_values("start_ns", ignore_index=True)
        pieces[PART] = parts_at(profile, pieces["context"].to_numpy())
        merged = pieces.merge(paces, on=KEYS, how="left")["pace"]
        by_place = paces.groupby("where")["pace"].median()
        pace = merged.fillna(pieces["where"].map(by_place)).fillna(outside).to_numpy()
        start, end = start_and_end(pieces)
        # nanoseconds since 1970 are more than a float holds
        self.origin = int(start[0])
        edges = np.stack([start, end], axis=1).ravel() - self.origin
        lengths = np.diff(edges).astype(float)
        lengths[0::2] *= pace
        lengths[1::2] *= outside
        self.at, self.moved = edges.astype(float), np.concatenate([[0.0], np.cumsum(lengths)])

    def __call__(self, moments: pd.Series) -> Ints:
        """Nanoseconds (n,) at the other pace; the first iteration begins when it did."""
        since = (moments.to_numpy() - self.origin).astype(float)
        moved = np.interp(since, self.at, self.moved)
        moved += self.outside * (np.minimum(since - self.at[0], 0.0))
        moved += self.outside * (np.maximum(since - self.at[-1], 0.0))
        return np.asarray(np.rint(moved).astype(np.int64) + self.origin)


def _scaled_values(profile: Profile, paces: pd.DataFrame, step: Reference) -> pd.DataFrame:
    """The profile's values with CPU times of the step that add up to the reference.

    Of a sampled recording these are those of the step's own thread within iterations: what other
    threads computed, and start-up, is what the database holds.
    """
    values = profile.values
    exclusive = profile.rows("cpu_time_ms", "exclusive")
    thread, context = values["profile"].to_numpy(), values["context"].to_numpy()
    scaled = exclusive
    if profile.meta.get("engine") == "hpctoolkit":
        if not iteration_contexts(profile).any():
            return values
        inside = step_contexts(profile, other_threads=False)
        scaled = exclusive & inside[context] & (thread == main_thread(profile))
    if not scaled.any():
        return values
    value = values["value"].to_numpy().copy()
    if paces["where"].eq("device").any():
        value[scaled] *= step.ms / step.recorded_mean_ms
    else:
        factor = _value_factors(profile, paces, step, values[exclusive])
        value[scaled] *= factor[context[scaled]]
    parent = profile.contexts["parent"].to_numpy()
    inclusive = profile.rows("cpu_time_ms", "inclusive")
    for one in np.unique(thread[inclusive]):
        here = exclusive & (thread == one)
        total = np.bincount(context[here], value[here], minlength=len(parent))
        into = inclusive & (thread == one)
        value[into] = inclusive_from_exclusive(parent, total)[context[into]]
    return values.assign(value=value)


def _value_factors(
    profile: Profile, paces: pd.DataFrame, step: Reference, exclusive: pd.DataFrame
) -> Floats:
    """What the CPU time of each context (n,) is multiplied by.

    Values are sums over all iterations, steady or not; a part's come to what the part takes in
    the reference times the number of iterations.
    """
    steady = attribute(profile).merge(paces, on=KEYS)
    then = (steady["time_ms"] * steady["pace"]).groupby([steady[name] for name in PART]).sum()
    then *= step.ms / then.sum()
    inside = step_contexts(profile, other_threads=False)[exclusive["context"].to_numpy()]
    mine = exclusive[inside & exclusive["profile"].eq(main_thread(profile)).to_numpy()]
    parts = profile.contexts[PART]
    mine = mine.join(parts, on="context")
    now = mine.groupby(PART)["value"].sum() / iteration_count(profile)
    ratio = then / now.where(now > 0)
    overall = step.ms / now.sum() if now.sum() > 0 else 1.0
    factors = ratio.reindex(pd.MultiIndex.from_frame(parts)).to_numpy(dtype=float)
    return np.where(np.isfinite(factors), factors, overall)


# ---- the other times ----------------------------------------------------------------------------


def other_times(profile: Profile, folder: Path | None = None) -> pd.DataFrame:
    """Every other time of an iteration that was measured, and why it is not the step. ``profile``
    is at its reference, ``folder`` is the profile run's: the newest training run of the same
    parameters beside it is one of the times. The step comes first. Where no step is known, it is
    the times that the page adds up of the whole recording; empty if it has one."""
    step = reference(profile)
    if step is None:
        return _of_recording(profile)
    spoken = {"torch": "torch.profiler", "hpctoolkit": "HPCToolkit", "nsight": "Nsight Systems"}
    tool = spoken.get(str(profile.meta.get("engine")), "the profiler")
    rows: list[Time] = [("the step", step.ms, step.iterations, step.source)]
    plain, counted = _counted(profile), "; the system's counters are of these"
    if not plain:
        plain, counted = profile.meta.get("unprofiled_iteration_ms") or [], ""
    if step.unprofiled and plain:
        what = "mean of all iterations without a profiler"
        why = f"it is a mean, of slow and disturbed iterations too; the step is a median{counted}"
        rows.append((what, statistics.fmean(plain), len(plain), why))
    if step.unprofiled:
        what = f"steady iteration under {tool}"
        why = "the profiler costs time, and these iterations ran at another time"
        rows.append((what, step.recorded_ms, step.recorded_iterations, why))
    if step.left_out:
        every = step.recorded_iterations + step.left_out
        why = f"it includes {step.left_out} iterations that are warm-up or outliers"
        rows.append((f"mean of all iterations under {tool}", step.recorded_mean_ms, every, why))
    for measured in profile.meta.get("passes", []):
        # torch's own recording is in the rows above
        is_listed = measured.get("name") in ("unprofiled", RECORDED_PASS)
        if measured.get("ms_per_iteration") and not is_listed:
            why = "its sampling and hooks cost time"
            if tool != "HPCToolkit":
                why = "only Python's stack was sampled in iterations, which ran at another time"
            count, time_ms = measured.get("iterations"), float(measured["ms_per_iteration"])
            rows.append((f"pass {measured['name']}", time_ms, count, why))
    rows += [*_added_up(profile), *_timed_apart(profile)]
    if (trained := _trained(folder, profile)) is not None:
        why = "it is the median iteration of another process that ran earlier"
        rows.append(("the train run", *trained, why))
    table = pd.DataFrame(rows, columns=["what", "time_ms", "iterations", "why"])
    return table.assign(times_the_step=table["time_ms"] / step.ms)[TIME_COLUMNS]


def _of_recording(profile: Profile) -> pd.DataFrame:
    """The CPU times that parts and call tree of a recording without steps add up to."""
    parts, context_ms = attribute(profile), profile.value_table("cpu_time_ms").to_numpy()
    parts_ms = float(parts["time_ms"].sum()) if parts["where"].eq("host").all() else 0.0
    called, whole = float(context_ms[step_contexts(profile)].sum()), float(context_ms.sum())
    rows = [
        ("the parts", parts_ms, "they are of the main thread, and of those that run parts for it"),
        (
            "the call tree",
            called,
            "it adds up all threads, those too that work for an operator or wait in it for work",
        ),
        ("all threads, from beginning to end", whole, "it includes start-up, the others do not"),
    ]
    # a time that does not differ from the one before needs no reason
    kept = [
        row
        for row, before in zip(rows, [0.0, parts_ms, called], strict=True)
        if parts_ms > 0 and row[1] > (1 + ROUNDING) * before
    ]
    table = pd.DataFrame(kept if len(kept) > 1 else [], columns=["what", "time_ms", "why"])
    return table.assign(times_the_step=table["time_ms"] / parts_ms, iterations=np.nan)[TIME_COLUMNS]


def _counted(profile: Profile) -> list[float]:
    """Wall times, ms, of the iterations without a profiler that the system's counters are of."""
    counters = profile.meta.get("counters") or {}
    pairs = zip(counters.get("wall_ms") or [], counters.get("profiled") or [], strict=False)
    return [wall for wall, profiled in pairs if not profiled]


def _added_up(profile: Profile) -> list[Time]:
    """Time of a step on all streams of its GPU together, where some of them run at once."""
    parts = attribute(profile)
    busy = float(parts.loc[parts["where"].eq("device"), "time_ms"].sum())
    if not busy or not profile.has("gpu_time_ms"):
        return []
    steps = iteration_count(profile)
    total = float(profile.value_table("gpu_time_ms")[step_contexts(profile)].sum()) / steps
    if total < (1 + ROUNDING) * busy:
        return []
    work = of_streams(profile)
    start, end = start_and_end(work)
    cause = "work of the GPU outside of these steps counts, too"
    if work.empty or (end - start).sum() > (1 + ROUNDING) * union_ns(start, end):
        cause = "kernels and copies run at once on several streams"
    why = (
        f"{cause}: the GPU is busy for {milliseconds(busy)} of the step; the call tree and the "
        "tables of calls add up to this"
    )
    return [("GPU time of all streams, added up", total, steps, why)]


def _timed_apart(profile: Profile) -> list[Time]:
    """Parts timed alone, and the whole steps timed in turns with changed ones."""
    rows: list[Time] = []
    base = (profile.meta.get("part_probes") or {}).get("base") or {}
    if alone := sum(ms for phases in base.values() for ms in phases.values()):
        why = "caches are not as the neighbouring parts leave them; nothing runs between parts"
        rows.append(("parts timed alone, added up", alone, None, why))
    together = profile.meta.get("together") or {}
    if rounds := together.get("base_ms"):
        why = "timed in turns with the changed steps, after the recording"
        what = "the unchanged step, timed beside the changed ones"
        rows.append((what, statistics.median(rounds), None, why))
    return rows


def _trained(folder: Path | None, profile: Profile) -> tuple[float, int] | None:
    """(ms per iteration, iterations) of the newest training run of these parameters."""
    run = None if folder is None else latest_run(folder.parent.parent, "train")
    if run is None:
        return None
    try:
        result, asked = read_json(run / "result.json"), read_json(run / "run.json")
        sections = profile.meta.get("parameters") or {}
        names = ("model", "data", "training")
        if any(asked["parameters"].get(name) != sections.get(name) for name in names):
            return None
        return float(result["ms_per_iteration"]), len(result["iteration_ms"])
    except (InputError, OSError, KeyError, TypeError, ValueError):
        return None  # a run that is half written or of another version is none to compare with
