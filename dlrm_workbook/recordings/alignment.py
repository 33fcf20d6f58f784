"""Parts of GPU work that one recording times, told by another recording of the same program.

A kernel runs long after its launch, so the clock does not say which part of the step launched
it, and a call path without Python frames says it seldom. But the operations of a stream run in
the order of their launches, and that order is the same whichever profiler watches. So each
iteration of the timed recording is aligned, stream by stream, with an iteration of a recording
of torch.profiler, which knows the launch of everything: equal names in equal order are the same
operation, a few that one of the tools leaves out (memory sets) are gaps.

An operation that has no twin stays with its neighbours where both are of one part; else it is
``other``. Where less than :data:`LEAST_MATCHED` has a twin, nothing is attributed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Ints
from dlrm_workbook.recordings.nesting import start_and_end, stretch_at
from dlrm_workbook.recordings.profile import Profile, of_streams, true_trace

LEAST_MATCHED = 0.9
"""Share of the operations of the iterations that must have a twin."""

CLOCKS_APART_NS = 1_000_000
"""How far the clocks of the GPU's trace and of the host may be apart."""

RECOGNISED = 0.8
"""Share of an iteration's operations that must have a twin where it is looked for."""
MOST_TRIED = 50
"""Places at which an iteration is looked for."""

NO_ITERATION = -1

_COPIES = (
    (re.compile(r"memset", re.I), "memory set"),
    (re.compile(r"HtoD|HostToDevice|copyin|H2D", re.I), "copy to the device"),
    (re.compile(r"DtoH|DeviceToHost|copyout|D2H", re.I), "copy to the host"),
)
MEMORY_SET = "memory set"
_INTEGER = re.compile(r"(?<=\d)u?l?l\b|(?<=\d)u\b")


def operation_key(kind: str, name: str) -> str:
    """What a GPU operation is called, alike in every tool.

    Kernels lose the return type, the parameters, spaces and suffixes of integers; of copies
    only the direction is left.
    """
    if kind != "kernel":
        return next((key for pattern, key in _COPIES if pattern.search(name)), "copy")
    name = name.strip().removeprefix("void ")
    if name.endswith(")"):
        depth = 0
        for place in range(len(name) - 1, 0, -1):
            depth += (name[place] == ")") - (name[place] == "(")
            if depth == 0:
                name = name[:place]
                break
    return _INTEGER.sub("", name.replace(" ", ""))


def operations_by_stream(profile: Profile) -> pd.DataFrame:
    """What ran on the GPUs, by stream and in the order of its begin: ``profile`` (the stream),
    ``start_ns``, ``end_ns``, ``context``, ``key``; the index is that of the trace. Intervals that
    the recording leaves open until the next one end where they truly did."""
    work = of_streams(profile, true_trace(profile))
    work = work.sort_values(["profile", "start_ns"], kind="stable")
    named = profile.contexts.loc[work["context"].unique(), ["kind", "name"]]
    keys = {row: operation_key(kind, name) for row, kind, name in named.itertuples()}
    columns = ["profile", "start_ns", "end_ns", "context"]
    return work[columns].assign(key=work["context"].map(keys).astype(object))


def launching_iteration(profile: Profile, work: pd.DataFrame) -> Ints:
    """Which iteration launched each operation (operations,) in a trace with launches, or −1.

    The k-th operation below a launching call's context is that of its k-th call. What cannot
    be told so is of the iteration of its neighbours on the stream, if that is one.
    """
    parent = profile.contexts["parent"].to_numpy()[work["context"].to_numpy()]
    calls = profile.trace[profile.trace["context"].isin(parent)].sort_values("start_ns")
    begun = {context: rows.to_numpy() for context, rows in calls.groupby("context")["start_ns"]}
    launched = np.full(len(work), NO_ITERATION, dtype=np.int64)
    order = np.argsort(work["start_ns"].to_numpy(), kind="stable")
    for context, rows in pd.Series(order).groupby(parent[order]):
        operations, rest = divmod(len(rows), len(begun.get(context, ())) or len(rows) + 1)
        if operations and not rest:
            launched[rows.to_numpy()] = np.repeat(begun[context], operations)
    iteration = stretch_at(*start_and_end(profile.iterations), launched)
    table = pd.Series(iteration).where(launched >= 0)
    stream = work["profile"].to_numpy()
    before, after = table.groupby(stream).ffill(), table.groupby(stream).bfill()
    return np.where(before == after, before, NO_ITERATION).astype(np.int64)


def align(ours: Sequence[int], theirs: Sequence[int], most: int) -> list[tuple[int, int]] | None:
    """Pairs (place in ours, place in theirs) of the fewest differences, in order; None where more
    than ``most`` elements are in only one of the two.

    All of ``theirs`` is gone through; what follows in ``ours`` is free. (Myers 1986: the furthest
    place on each diagonal that a number of differences can reach.)
    """
    nowhere = -(len(ours) + len(theirs) + 2)
    reach = {1: 0}
    rounds: list[dict[int, int]] = []
    for differences in range(most + 1):
        rounds.append(dict(reach))
        ends = []
        for diagonal in range(-differences, differences + 1, 2):
            x = max(reach.get(diagonal + 1, nowhere), reach.get(diagonal - 1, nowhere) + 1)
            y = x - diagonal
            if x < 0 or x > len(ours) or y > len(theirs):
                reach[diagonal] = nowhere
                continue
            while x < len(ours) and y < len(theirs) and ours[x] == theirs[y]:
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if y == len(theirs):
                ends.append((x, y))
        if ends:
            return _pairs(rounds, *max(ends), nowhere)
    return None


def _pairs(rounds: list[dict[int, int]], x: int, y: int, nowhere: int) -> list[tuple[int, int]]:
    """The way back from the end of an alignment."""
    pairs: list[tuple[int, int]] = []
    for differences in range(len(rounds) - 1, -1, -1):
        reach, diagonal = rounds[differences], x - y
        below, left = reach.get(diagonal + 1, nowhere), reach.get(diagonal - 1, nowhere) + 1
        start = max(below, left)
        pairs += [(place, place - diagonal) for place in range(x - 1, start - 1, -1)]
        if differences:
            x = below if below >= left else left - 1
            y = start - diagonal - (below >= left)
    return pairs[::-1]


@dataclass
class Alignment:
    """What the other recording says of the GPU's work.

    Attributes:
        operations: as :func:`operations_by_stream` gives them, with ``iteration`` (−1 outside
            all), ``component`` and ``phase`` (``other`` and "" where nothing is known) and
            ``matched``.
        share, time_share: of the operations of the iterations that have a twin, by number and by
            time, without memory sets, which not every tool lists.
        reason: why nothing is attributed; "" where parts are.
    """

    operations: pd.DataFrame
    share: float
    time_share: float
    reason: str = ""


def align_profiles(profile: Profile, other: Profile, begins: Ints, ends: Ints) -> Alignment:
    """Give each GPU operation of a profile its iteration and part.

    Where the tools spell the arguments of templates so differently that too little has a twin,
    kernels are compared by the names of their functions alone. ``other`` is of the same program,
    with iterations, launches and parts (torch.profiler's); ``begins`` and ``ends`` are of the
    host's iterations, in order, by the clock of ``profile``.
    """
    ours, theirs = operations_by_stream(profile), operations_by_stream(other)
    theirs["iteration"] = launching_iteration(other, theirs)
    parts = other.contexts[["component", "phase"]]
    theirs[["component", "phase"]] = parts.loc[theirs["context"]].to_numpy()
    theirs = theirs[theirs["iteration"] != NO_ITERATION].copy()
    alignment = _aligned(ours, theirs, begins, ends)
    if not alignment.reason:
        return alignment
    for table in (ours, theirs):
        # without the arguments of templates and the scopes around the function
        table["key"] = table["key"].str.partition("<")[0].str.rpartition("::")[2]
    by_function = _aligned(ours, theirs, begins, ends)
    return alignment if by_function.reason else by_function


def _aligned(ours: pd.DataFrame, theirs: pd.DataFrame, begins: Ints, ends: Ints) -> Alignment:
    """As :func:`align_profiles`, for operations that have keys, and parts in ``theirs``."""
    operations = ours.assign(iteration=NO_ITERATION, component="other", phase="", matched=False)
    if theirs.empty:
        return Alignment(operations, 0.0, 0.0, "torch.profiler's recording has no GPU operation")
    templates: dict[Any, pd.DataFrame] = {
        stream: _usual_iteration(rows) for stream, rows in theirs.groupby("profile")
    }
    streams: dict[Any, pd.DataFrame] = dict(iter(operations.groupby("profile")))
    for stream, mine in _partners(streams, templates).items():
        rows = _along(streams[mine], templates[stream], begins)
        operations.loc[rows.index, list(rows.columns)] = rows
    # what runs while the host is in an iteration was launched in that one or an earlier one
    at = stretch_at(begins, ends, operations["start_ns"].to_numpy())
    late = (operations["iteration"] == NO_ITERATION) & (at >= 0)
    operations.loc[late, "iteration"] = at[late]
    counted = operations[
        (operations["iteration"] != NO_ITERATION) & (operations["key"] != MEMORY_SET)
    ]
    lasted = (counted["end_ns"] - counted["start_ns"]).clip(lower=0)
    expected = sum((template["key"] != MEMORY_SET).sum() for template in templates.values())
    share = counted["matched"].sum() / max(len(counted), expected * len(begins), 1)
    time_share = lasted[counted["matched"]].sum() / max(lasted.sum(), 1)
    reason = ""
    if min(share, time_share) < LEAST_MATCHED:
        reason = (
            f"{share:.1%} of the GPU operations of the iterations, with {time_share:.1%} of their "
            "time, follow in the order of torch.profiler's recording of the same workload; at "
            f"least {LEAST_MATCHED:.0%} of both must"
        )
        operations[["component", "phase"]] = ["other", ""]
    return Alignment(operations, float(share), float(time_share), reason)


def _usual_iteration(rows: pd.DataFrame) -> pd.DataFrame:
    """The iteration of a stream whose sequence of operations occurs most, the latest of those."""
    sequences = rows.groupby("iteration")["key"].agg(tuple)
    count = Counter(sequences)
    usual = max(sequences.index, key=lambda number: (count[sequences[number]], number))
    return rows[rows["iteration"] == usual]


def _partners(ours: dict[int, pd.DataFrame], templates: dict[int, pd.DataFrame]) -> dict[Any, Any]:
    """Their stream to ours that does the same work; the pairs that share most come first."""
    counts = {stream: Counter(rows["key"]) for stream, rows in ours.items()}
    pairs = []
    for stream, template in templates.items():
        wanted = Counter(template["key"])
        for mine, count in counts.items():
            pairs.append(((wanted & count).total(), count.total(), mine, stream))
    partner: dict[Any, Any] = {}
    for common, _, mine, stream in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:])):
        if common and stream not in partner and mine not in partner.values():
            partner[stream] = mine
    return partner


def _next_iteration(
    ours: list[int], theirs: list[int], place: int
) -> tuple[int, list[tuple[int, int]]]:
    """Where the next iteration is looked for, at ``place`` or later, and its aligned pairs.

    Operations of no iteration may stand before it (a recording that begins in the middle of
    one); where they are too many to be gaps, it is looked for where it begins as usual.
    """
    length = len(theirs)
    first = align(ours[place : place + 2 * length + 100], theirs, length // 2 + 20) or []
    if len(first) >= RECOGNISED * length:
        return place, first
    mark = theirs[:3]
    places = range(place + 1, len(ours))
    marked = (later for later in places if ours[later : later + len(mark)] == mark)
    for later in islice(marked, MOST_TRIED):
        if pairs := align(ours[later : later + 2 * length], theirs, int((1 - RECOGNISED) * length)):
            return later, pairs
    return place, first if len(first) >= length / 2 else []


def _twins(ours: list[int], theirs: list[int], earliest: list[int]) -> tuple[Ints, Ints]:
    """Place in ``theirs`` (−1 for none) and iteration of each operation of a stream.

    Each iteration begins in ``ours`` at its place in ``earliest`` at the earliest.
    """
    twin = np.full(len(ours), -1)
    iteration = np.full(len(ours), NO_ITERATION)
    place = 0
    for number, possible in enumerate(earliest):
        place, pairs = _next_iteration(ours, theirs, max(place, possible))
        if not pairs:
            continue
        first, last = place + pairs[0][0], place + pairs[-1][0]
        iteration[first : last + 1] = number
        for mine, their in pairs:
            twin[place + mine] = their
        place = last + 1
    return twin, iteration


def _along(rows: pd.DataFrame, template: pd.DataFrame, begins: Ints) -> pd.DataFrame:
    """Iteration and part of a stream's operations, from one iteration of the other recording.

    Iterations are aligned in order. None begins on the GPU before the host begins it, so what
    runs earlier (start-up, an evaluation in between) is of none. They are aligned from the end
    to the beginning, too: where equal names leave room for another part, none is given.
    """
    codes = pd.factorize(pd.concat([template["key"], rows["key"]]))[0].tolist()
    theirs, ours = codes[: len(template)], codes[len(template) :]
    possible = np.searchsorted(rows["start_ns"].to_numpy(), begins - CLOCKS_APART_NS)
    twin, iteration = _twins(ours, theirs, possible.tolist())
    back, _ = _twins(ours[::-1], theirs[::-1], [0] * len(begins))
    again = np.where(back >= 0, len(theirs) - 1 - back, -1)[::-1]
    pair, names = pd.factorize(pd.MultiIndex.from_frame(template[["component", "phase"]]))
    agree = pair[np.maximum(twin, 0)] == pair[np.maximum(again, 0)]
    matched = (twin >= 0) & (again >= 0) & agree
    part = pd.Series(np.where(matched, pair[np.maximum(twin, 0)], np.nan))
    # no gap is at the end of an iteration, so its neighbours are of the same one
    before, after = part.ffill(), part.bfill()
    placed = matched | ((iteration != NO_ITERATION) & (before == after).to_numpy())
    label = np.where(placed, before.fillna(-1), -1).astype(np.int64)
    labels = np.array([*names, ("other", "")], dtype=object)
    component, phase = labels[label].T
    columns = {"component": component, "phase": phase, "iteration": iteration, "matched": matched}
    return pd.DataFrame(columns, index=rows.index)
