"""What several analyses ask of a calling-context tree and its trace: enclosing functions,
recursion, what runs when, and stretches of time.

Everything is columns over contexts, linear in their number, and never recursive: call
trees are hundreds of levels deep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.recordings.nesting import enclosing_in_turn, innermost, start_and_end, stretch_at
from dlrm_workbook.recordings.profile import Profile, nearest, once

INSIDE_FUNCTIONS = ("line", "loop", "instruction")
"""Kinds of context that lie within a function; every other kind is a scope of its own."""

WHY_EMPTY = "not_measured"
"""Key in a frame's ``attrs``: why it is empty."""


def unmeasured(
    columns: Sequence[str], reason: str, profile: Profile | None = None, *names: str
) -> pd.DataFrame:
    """An empty table that says in ``attrs["not_measured"]`` why it is empty. ``reason`` holds where
    the profile has no reason of its own for one of ``names``."""
    table = pd.DataFrame({name: [] for name in columns})
    table.attrs[WHY_EMPTY] = missing_reason(profile, names, reason) if profile else reason
    return table


def reason_of(table: pd.DataFrame) -> str:
    """Why a table holds nothing; "" if what it shows was measured."""
    return str(table.attrs.get(WHY_EMPTY, ""))


def missing_reason(profile: Profile, names: Sequence[str], otherwise: str) -> str:
    """The profile's own reason for the first of ``names`` that has one."""
    reasons = profile.not_measured
    return next((reasons[name] for name in names if reasons.get(name)), otherwise)


def scopes_of(contexts: pd.DataFrame) -> Ints:
    """The function (operator, kernel, range, thread, ...) that each context lies in (n,).

    Itself for what is no line, loop or instruction, and for those outside every function.
    """
    is_scope = ~contexts["kind"].isin(INSIDE_FUNCTIONS).to_numpy()
    scope = nearest(contexts["parent"].to_numpy(), is_scope)
    return np.where(scope < 0, np.arange(len(scope)), scope)


def places(parent: Ints) -> tuple[Ints, Ints]:
    """(first, beyond) of each context in a walk down the tree, callers before callees.

    A context and all below it are ``first <= place < beyond``.
    """
    above = parent.tolist()
    size = [1] * len(above)
    for row in range(len(above) - 1, -1, -1):
        if above[row] >= 0:
            size[above[row]] += size[row]
    first = [0] * len(above)
    free = [0] * len(above)
    top = 0
    for row, over in enumerate(above):
        if over < 0:
            place, top = top, top + size[row]
        else:
            place = free[over]
            free[over] = place + size[row]
        first[row], free[row] = place, place + 1
    begin = np.array(first, dtype=np.int64)
    return begin, begin + np.array(size, dtype=np.int64)


def outermost_contexts(parent: Ints, key: Ints) -> Bools:
    """Which contexts (n,) have no context of the same key above them.

    Inclusive values of these alone may be summed by key: what a recursive call holds is already in
    the call around it. ``key`` has numbers (n,) from 0; −1 belongs to no key and is never
    outermost.
    """
    begin, beyond = places(parent)
    order = np.lexsort((begin, key))
    order = order[key[order] >= 0]
    result = np.zeros(len(key), dtype=bool)
    if not len(order):
        return result
    # Places of one key are shifted beyond those of the key before: one running maximum
    # then serves all keys.
    shift = key[order] * (len(key) + 1)
    reached = np.maximum.accumulate(beyond[order] + shift)
    result[order] = True
    result[order[1:]] = (begin[order] + shift)[1:] >= reached[:-1]
    return result


Lane = tuple[Ints, Ints, Ints]
"""(start_ns, end_ns, context) of what runs when, without overlaps."""


def running(profile: Profile, thread: int) -> Lane:
    """What a thread or stream is in.

    Of nested spans the innermost has the time; where nothing runs there is no row.
    """
    table = running_table(profile, thread)
    return tuple(table[name].to_numpy() for name in table)  # type: ignore[return-value]


@once
def running_table(profile: Profile, thread: int) -> pd.DataFrame:
    """The same with columns ``start_ns``, ``end_ns`` and ``context``."""
    trace = profile.trace
    spans = trace[(trace["profile"] == thread) & (trace["end_ns"] > trace["start_ns"])]
    spans = spans.sort_values(["start_ns", "depth"])
    start, end = start_and_end(spans)
    context = spans["context"].to_numpy()
    if len(start) > 1 and (start[1:] < end[:-1]).any():
        cuts = distinct([start, end])
        open_span = innermost(start, end, enclosing(start, end), cuts[:-1])
        covered = open_span >= 0
        start, end, context = cuts[:-1][covered], cuts[1:][covered], context[open_span[covered]]
    return pd.DataFrame({"start_ns": start, "end_ns": end, "context": context})


def context_at(lane: Lane, moments: Ints) -> Ints:
    """The context (n,) that a lane is in at each moment; −1 for none."""
    start, end, context = lane
    return np.append(context, -1)[stretch_at(start, end, moments)]


def edges(*lanes: Lane) -> list[Ints]:
    """The moments at which lanes begin and end something, for :func:`distinct`."""
    return [moments for start, end, _ in lanes for moments in (start, end)]


def extent(rows: pd.DataFrame) -> tuple[int, int]:
    """The first ``start_ns`` and the last ``end_ns`` of some rows; zeros without any."""
    return (int(rows["start_ns"].min()), int(rows["end_ns"].max())) if len(rows) else (0, 0)


def distinct(times: Sequence[Ints]) -> Ints:
    """All moments in order, each once (n,); ``np.unique`` of millions takes ten times as long."""
    moments = np.sort(np.concatenate(times))
    new = np.ones(len(moments), dtype=bool)
    new[1:] = moments[1:] > moments[:-1]
    return moments[new]


def enclosing(start: Ints, end: Ints) -> Ints:
    """Row of the span (n,) that was begun before and is still open at each span's start.

    Spans are sorted by start, outer before inner. On a stream they may overlap without
    nesting; then the one begun last has the time.
    """
    parent, overlaps = enclosing_in_turn(start, end)
    mixed = np.flatnonzero(overlaps)
    ends = end.tolist()
    stack: list[int] = []
    for row, begin in zip(mixed.tolist(), start[mixed].tolist(), strict=True):
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        parent[row] = stack[-1] if stack else -1
        stack.append(row)
    return parent
