"""Calls that take so long the first time only: contexts start, libraries load, kernels compile."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.context_tree import running_table
from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.recordings.nesting import overlap, start_and_end, stretches, union
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive, of_streams, once

FIRST_TIMES, LEAST_US = 20.0, 1000.0
"""Times a later call of its name that a first one takes, and the least it takes: dispatching an
operator to a GPU, or launching what is loaded, takes 2 to 20 µs."""

ALONE_US = 5000.0
"""The least of a first call that no other of its name follows."""

DRIVER = re.compile(r"^(?:cuda|cu|hip)(?!\w*(?:Memcpy|Synchronize|Wait|Host|Graph))[A-Z]")
"""Calls of the driver that neither wait nor pin memory, which takes longer for larger buffers."""

LOADING = re.compile(r"(?:Launch|Module|Occupancy|Library|StreamCreate|Ctx|Init|FuncGet|FuncSet)")
"""Those of them that do next to nothing once what they need is loaded."""

FREEING = re.compile(r"^(?:cuda|cu|hip)\w*(?:Unload|Unmap|Destroy|Free|Release)")
"""Those that give back: they load nothing, but that a first ``cudaFree(0)`` begins all."""

COMPILING = re.compile(r"^_compile\.|\(dynamo_timed\)|aclopCompile")
COMPILED = re.compile(r"^Torch-Compiled Region")
DISPATCH_ONLY = re.compile(r"^aten::(?:new_)?empty")
"""Operators that launch nothing, and take no longer for larger tensors."""


@once
def first_calls(profile: Profile) -> pd.DataFrame:
    """The time of the host in what later calls find done: loaded, compiled, or begun.

    That is compiling itself; the first call of the driver, those of a millisecond and more that do
    nothing once all is loaded, and first ones that take far longer than those of their name that
    follow; likewise the own body of an operator that dispatches work to a GPU; and with all that is
    in it the first of equal calls from one place (:func:`_first_of_equal`). Returns ``name``,
    ``start_ns``, ``end_ns``, in order, some in others, and ``later_ms``, what later ones usually
    take (NaN).
    """
    names, trace = profile.contexts["name"].to_numpy(), profile.trace
    nothing = trace[["context", "start_ns", "end_ns"]].iloc[:0].assign(name="", later_ms=np.nan)

    def named(pattern: re.Pattern[str]) -> Bools:
        return profile.which("name", lambda name: bool(pattern.search(name)))

    def first_of(rows: pd.DataFrame, us: pd.Series) -> pd.DataFrame:
        """The first rows of their names that take (us) far longer than the usual later one."""
        name = pd.Series(names[rows["context"]], rows.index)
        later = rows.sort_values("start_ns", kind="stable").groupby(name).cumcount() > 0
        usual = us[later].groupby(name[later]).median()
        least = (FIRST_TIMES * name.map(usual)).clip(lower=LEAST_US).fillna(ALONE_US)
        return rows.assign(later_ms=name.map(usual) / 1e3)[~later & us.ge(least)]

    of_driver = profile.of_kind("runtime") & named(DRIVER)
    calls = trace[of_driver[trace["context"].to_numpy()]]
    frees = named(FREEING)[calls["context"].to_numpy()]
    calls = calls[~(frees & calls["start_ns"].gt(of_streams(profile)["start_ns"].min()))]
    us = (calls["end_ns"] - calls["start_ns"]) / 1e3
    # where every launch takes long, as counters are read or a queue is full, none loads
    usual = us.groupby(names[calls["context"]]).transform("median")
    long = calls[us.ge(LEAST_US) & us.ge(FIRST_TIMES * usual)]
    begins = calls.loc[calls["start_ns"].eq(calls["start_ns"].min())]
    loads = long[named(LOADING)[long["context"].to_numpy()] | long.index.isin(begins.index)]
    rows = [nothing, first_of(calls, us), loads]
    operators = profile.of_kind("operator")
    launches = inclusive_from_exclusive(
        profile.contexts["parent"].to_numpy(), profile.of_kind("kernel", "copy").astype(float)
    )
    bodies = operators & ((launches > 0) | (named(DISPATCH_ONLY) & (launches.sum() > 0)))
    spans = trace[bodies[trace["context"].to_numpy()]]
    for thread, own in spans.groupby("profile"):
        pieces = _bodies(profile, int(thread), own)
        us = pieces["length"].groupby(pieces["call"]).sum().reindex(own.index, fill_value=0)
        chosen = first_of(own, us / 1e3)
        rows.append(pieces[pieces["call"].isin(chosen.index)])
    compiling = profile.of_kind("operator", "annotation", "runtime") & named(COMPILING)
    rows.append(trace[compiling[trace["context"].to_numpy()]])
    regions = trace[(operators & named(COMPILED))[trace["context"].to_numpy()]]
    rows.append(first_of(regions, (regions["end_ns"] - regions["start_ns"]) / 1e3))
    table = pd.concat([*rows, _first_of_equal(profile)]).drop_duplicates(["context", "start_ns"])
    table = table.assign(name=names[table["context"]])[["name", "start_ns", "end_ns", "later_ms"]]
    return table.sort_values(["start_ns", "end_ns"], ascending=[True, False])


def _first_of_equal(profile: Profile) -> pd.DataFrame:
    """The first of three calls or more, equal and from one place, of a function, range or operator
    where it takes far longer than each of the others, but not since it waits or copies."""
    contexts, trace = profile.contexts, profile.trace
    alike = profile.of_kind("python", "annotation")
    sized = contexts["shapes"].ne("") & ~contexts["shapes"].str.contains("*", regex=False)
    alike |= profile.of_kind("operator") & sized.to_numpy()
    calls = trace[alike[trace["context"].to_numpy()]].sort_values("start_ns", kind="stable")
    us = (calls["end_ns"] - calls["start_ns"]) / 1e3
    later = us[calls.duplicated("context")].groupby(calls["context"]).agg(["median", "max", "size"])
    first = calls.drop_duplicates("context").join(later, on="context").assign(us=us)
    first = first[first["size"].gt(1) & first["us"].ge(ALONE_US)]
    first = first[first["us"].ge(FIRST_TIMES * first["median"]) & first["us"].ge(5 * first["max"])]
    waits = ~profile.which("name", lambda name: bool(DRIVER.match(name)))
    waits &= profile.of_kind("runtime")
    held = stretches(trace[waits[trace["context"].to_numpy()]])
    waited = overlap(*start_and_end(first), *held)
    return first.assign(later_ms=first["median"] / 1e3)[waited < 500 * first["us"]]


def _bodies(profile: Profile, thread: int, calls: pd.DataFrame) -> pd.DataFrame:
    """The stretches in which a thread is in the bodies of calls of its own, outside all that they
    call: ``context``, ``start_ns``, ``end_ns``, ``length`` (ns) and ``call``, its label."""
    pieces = running_table(profile, thread)
    pieces = pieces[pieces["context"].isin(calls["context"])].sort_values("start_ns")
    of_calls = calls[["context", "start_ns"]].assign(call=calls.index).sort_values("start_ns")
    pieces = pd.merge_asof(pieces, of_calls, on="start_ns", by="context")
    return pieces.assign(length=pieces["end_ns"] - pieces["start_ns"])


def in_first_calls(profile: Profile, start: Ints, end: Ints) -> tuple[float, pd.DataFrame]:
    """How much (ms) of stretches (n,) passes in first calls, and in those of each name itself,
    without the first calls within it (``ms``), most first, with ``later_ms``."""
    calls = first_calls(profile)
    begin, finish = start_and_end(calls)
    whole = overlap(begin, finish, *union(start, end)) / 1e6
    own, around = whole.copy(), list[int]()
    for row, (since, until) in enumerate(zip(begin, finish, strict=True)):
        while around and finish[around[-1]] < until:
            around.pop()
        if around and finish[around[-1]] > since:
            own[around[-1]] -= whole[row]
        around.append(row)
    times = pd.DataFrame({"ms": own, "later_ms": calls["later_ms"].to_numpy()})
    times = times.groupby(calls["name"].to_numpy()).agg({"ms": "sum", "later_ms": "max"})
    return float(own.sum()), times.sort_values("ms", ascending=False)
