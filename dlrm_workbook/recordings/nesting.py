"""Turning timed spans of one thread into a tree.

Profilers write spans (start, end) without saying which lies in which. Where they
nest, the tree is plain. They do not always: torch.profiler with Python stacks
starts a ``record_function`` range inside the Python call that opens it and ends
it inside the call that closes it, so those spans overlap (two overlaps a range).
A tree that subtracts children from parents regardless then has negative times.

Stretches are simpler: disjoint, in order, and so (start, end) of each say everything.
"""

from __future__ import annotations

import heapq

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Bools, Floats, Ints
from dlrm_workbook.recordings.profile import depths

MOST_CUTS = 8
"""Times that a span is cut to begin later; in the recordings of programs at hand once at most."""


def nest(start: Ints, end: Ints, soft: Bools) -> tuple[Ints, Ints, Ints, Ints]:
    """Clip the spans of one thread so that they nest, and find their parents.

    Where two spans overlap without nesting, the overlap is taken from one of them:

    * a soft span (a Python frame) yields to a hard one (an operator or range), which
      keeps its times; so operators have the self times that ``key_averages`` has;
    * between two of a kind, the later one is cut: to the part inside the earlier one
      if that is at least half of it, else to the part after it;
    * a span that was cut to begin later :data:`MOST_CUTS` times is cut to end instead, so
      that any spans nest in n log n time.

    Args:
        start: (n,) int ns.
        end: (n,) int ns, not before ``start``.
        soft: (n,) bool, whether a span yields.

    Returns:
        (start, end, parent, order): the clipped times (n,), the index of the span
        that encloses each (n,), −1 for none, and the indices (n,) in an order in
        which parents precede children. Children of one span never overlap, so
        ``duration − sum of the children's durations`` is never negative.
    """
    turn = np.lexsort((soft, -end, start))
    parent, row = np.full(len(start), -1, dtype=np.int64), turn.copy()
    begin, finish = start[turn], end[turn]
    over, overlaps = enclosing_in_turn(begin, finish)
    parent[turn] = np.where(over >= 0, turn[over], -1)
    if overlaps.any():
        mixed = np.sort(turn[overlaps])
        clipped = start.copy(), end.copy()
        *times, above, order = _clipped(start[mixed], end[mixed], soft[mixed])
        for column, values in zip(clipped, times, strict=True):
            column[mixed] = values
        parent[mixed] = np.where(above >= 0, mixed[above], -1)
        row[overlaps] = mixed[order]
        start, end = clipped
    return start, end, parent, row


def enclosing_in_turn(start: Ints, end: Ints) -> tuple[Ints, Bools]:
    """The span that encloses each (n,), −1 for none, where all nest; and, true of all spans of a
    stretch of time in which two overlap, where they do not. The spans are in order, enclosing ones
    first."""
    count, place = len(start), np.arange(len(start))
    if not count:
        return place, np.zeros(0, dtype=bool)
    # of the spans before it, those that ended; empty ones at the same moment end at once
    empty = np.cumsum(end == start)
    last = np.searchsorted(start, start, side="right") - 1
    later = empty[last] - empty + (end == start)
    depth = place - np.searchsorted(np.sort(end), start, side="right") + later
    # enclosed by the last one before it that is a level higher
    key = np.sort(depth * count + place)
    above = np.searchsorted(key, (depth - 1) * count + place) - 1
    over = np.where(depth > 0, key[np.maximum(above, 0)] % count, -1)
    reach = np.maximum.accumulate(end)
    stretch = np.cumsum(np.append(True, start[1:] >= reach[:-1])) - 1
    wrong = (depth > 0) & (end[np.maximum(over, 0)] < end)
    overlaps = np.zeros(int(stretch[-1]) + 1, dtype=bool)
    overlaps[stretch[wrong]] = True
    return over, overlaps[stretch]


def _clipped(start: Ints, end: Ints, soft: Bools) -> tuple[Ints, Ints, Ints, Ints]:
    """As :func:`nest`, span by span."""
    starts, ends = start.tolist(), end.tolist()
    yields = soft.tolist()
    parent = [-1] * len(starts)
    order: list[int] = []
    queue = np.lexsort((soft, -end, start)).tolist()
    queue.reverse()
    # Spans that were cut to begin later wait here until their new start.
    waiting: list[tuple[int, int, int, int]] = []
    stack: list[int] = []
    held_until = -1
    cuts = [0] * len(starts)

    def wait(span: int, begin: int) -> None:
        starts[span] = begin
        ends[span] = max(ends[span], begin)
        heapq.heappush(waiting, (begin, -ends[span], len(order) + len(waiting), span))

    while queue or waiting:
        if waiting and (not queue or waiting[0][0] <= starts[queue[-1]]):
            span = heapq.heappop(waiting)[-1]
        else:
            span = queue.pop()
            if yields[span] and starts[span] < held_until:
                # Python frames nest in each other: this one is called by the frame
                # that is waiting, so it waits too.
                wait(span, held_until)
                continue
        begin, finish = starts[span], ends[span]
        cut = False
        while stack:
            top = stack[-1]
            limit = ends[top]
            if limit <= begin:
                stack.pop()
            elif finish <= limit:
                break
            elif yields[top] and not yields[span]:
                ends[top] = begin
                stack.pop()
            elif cuts[span] == MOST_CUTS:
                ends[span] = finish = limit
                break
            elif yields[span] and not yields[top]:
                held_until = max(held_until, limit)
                cut = True
                break
            elif 2 * (limit - begin) >= finish - begin:
                ends[span] = finish = limit
                break
            else:
                cut = True
                break
        if cut:
            cuts[span] += 1
            wait(span, limit)
            continue
        parent[span] = stack[-1] if stack else -1
        order.append(span)
        stack.append(span)
    clipped_start, clipped_end, parents, turn = np.array([starts, ends, parent, order], np.int64)
    return clipped_start, clipped_end, parents, turn


def self_times(start: Ints, end: Ints, parent: Ints) -> Ints:
    """Time of each span outside its children, ns (n,), for spans that :func:`nest` made."""
    outside = end - start
    inner = parent >= 0
    np.subtract.at(outside, parent[inner], (end - start)[inner])
    return outside


def innermost(start: Ints, end: Ints, parent: Ints, at: Ints) -> Ints:
    """The innermost span open at each moment: index, −1 where none is open. ``start``, ``end`` and
    ``parent`` are of nested spans of one thread, in any order, ``at`` are moments (m,), ns. A span
    is open from its start until before its end."""
    # Empty spans are never open, and sorted among others they would hide one that is.
    chosen = np.flatnonzero(end > start)
    if not len(chosen):
        return np.full(len(at), -1, dtype=np.int64)
    depth, around = depths(parent)[chosen], parent[chosen]
    if (end[np.maximum(around, 0)] >= end[chosen])[around >= 0].all():
        # what begins or ends last before a moment says what is open then: it, or the one around it
        begins = np.repeat([False, True], len(chosen))
        when = np.concatenate([end[chosen], start[chosen]])
        turn = np.lexsort((np.concatenate([-depth, depth]), begins, when))
        when, opened = when[turn], np.concatenate([around, chosen])[turn]
    else:  # as on streams: the one begun last, or the nearest around it that has not ended
        turn = np.lexsort((depth, start[chosen]))
        when, opened = start[chosen][turn], chosen[turn]
    place = np.searchsorted(when, at, side="right") - 1
    span = np.where(place >= 0, opened[np.maximum(place, 0)], -1)
    while (over := (span >= 0) & (end[np.maximum(span, 0)] <= at)).any():
        span[over] = parent[span[over]]
    return span


# ---- stretches ----------------------------------------------------------------------------


def stretch_at(start: Ints, end: Ints, at: Ints) -> Ints:
    """Row (n,) of the disjoint, ordered stretch that each moment lies in; −1 where none."""
    row = np.searchsorted(start, at, side="right") - 1
    return np.where(at < end[row], row, -1) if len(start) else row


def start_and_end(rows: pd.DataFrame) -> tuple[Ints, Ints]:
    """(``start_ns``, ``end_ns``) of rows (n,) of a trace, of iterations or the like."""
    return rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()


def stretches(*tables: pd.DataFrame) -> tuple[Ints, Ints]:
    """(start, end) of the stretches of time that any row of some tables covers, in order."""
    start, end = zip(*map(start_and_end, tables), strict=True)
    return union(np.concatenate(start), np.concatenate(end))


def last_ends(begins: Ints, ends: Ints, row: Ints, end: Ints) -> Ints:
    """Ends of iterations on a GPU: that of their last operation, but not after the next begins.
    ``begins`` and ``ends`` (n,) are of the iterations on the host, in order, ``row`` (operations,)
    is the iteration of each operation, −1 for none, which ended at ``end``."""
    late = ends.copy()
    np.maximum.at(late, row[row >= 0], end[row >= 0])
    late[:-1] = np.minimum(late[:-1], np.maximum(begins[1:], ends[:-1]))
    return late


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """(start, end) of the stretches that any of the intervals covers, in order."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    if not len(start):
        return start, end
    reached = np.maximum.accumulate(end)
    new = np.concatenate([[True], start[1:] > reached[:-1]])
    last = np.concatenate([new[1:], [True]])
    return start[new], reached[last]


def union_ns(start: Ints, end: Ints) -> int:
    """Length of the union of intervals (n,), ns."""
    start, end = union(start, end)
    return int((end - start).sum())


def covered(first: Ints, last: Ints, until: Ints) -> Ints:
    """How much of the stretches ``first..last`` lies before each moment (n,)."""
    if not len(first):
        return np.zeros(len(until), dtype=np.int64)
    length = last - first
    row = np.searchsorted(first, until, side="right") - 1
    before = np.cumsum(length)[row] - length[row]
    return np.where(row < 0, 0, before + np.clip(until - first[row], 0, length[row]))


def overlap(start: Ints, end: Ints, first: Ints, last: Ints) -> Floats:
    """How much (n,) of each interval lies in the stretches ``first..last``."""
    return (covered(first, last, end) - covered(first, last, start)).astype(float)


MOST_LANES = 64
"""Rows that spans are spread over."""


def lanes(start: Ints, end: Ints) -> Ints:
    """The first row (n,) on which each span has room, so that no two of a row overlap.

    Where more than :data:`MOST_LANES` run at once, the last row takes them all.
    """
    lane = np.zeros(len(start), dtype=np.int64)
    turn = np.argsort(start, kind="stable")
    if (start[turn][1:] >= np.maximum.accumulate(end[turn])[:-1]).all():
        return lane
    free: list[int] = []
    for row, begin, finish in zip(turn, start[turn].tolist(), end[turn].tolist(), strict=True):
        place = next((i for i, until in enumerate(free) if until <= begin), len(free))
        place = min(place, MOST_LANES - 1)
        free[place : place + 1] = [finish]
        lane[row] = place
    return lane
