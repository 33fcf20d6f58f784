"""Sampled Python stacks as spans of a trace.

Samples in which a thread was in the same function, one after another, become one span of that
function; the line that it was at belongs to its name, so that each line has its time. A span ends
where another thing began that the trace knows exactly: it never cuts an operator.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_workbook.ground.arrays import Floats, Ints
from dlrm_workbook.ground.marks import STEP_MARK
from dlrm_workbook.recordings.nesting import overlap, stretch_at

_PLUMBING = re.compile(
    r"^<frozen |/torch/nn/modules/module\.py$|/torch/optim/optimizer\.py$|"
    r"/torch/(utils/_contextlib|autograd/profiler|_tensor)\.py$|/dlrm_workbook/(recordings/torch|evidence)/"
)
"""Files whose functions only hand on to others, and our own."""

MOST_OPERATORS = 1 / 3
"""Between two samples with no larger share of operators, Python is what runs."""


def time_around(moments: Ints) -> Floats:
    """The time that each sample stands for (n,), ns: up to halfway to its neighbours."""
    if len(moments) < 2:
        return np.zeros(len(moments))
    middle = (moments[1:] + moments[:-1]) / 2
    first, last = 2 * moments[0] - middle[0], 2 * moments[-1] - middle[-1]
    return np.diff(np.concatenate([[first], middle, [last]]))


def with_stacks(host: pd.DataFrame, file: Path) -> pd.DataFrame:
    """The host's spans (as in :class:`~dlrm_workbook.recordings.torch.chrome_trace.Events`) up to
    the last mark, with those that samples of the stack tell.

    The ``file`` holds what :meth:`~dlrm_workbook.recordings.torch.sampling.StackSampler.document`
    says, and ``marks``: the moments of the marks between iterations on the samples' clock. An
    InputError says that it does not.
    """
    document = read_json(file)
    try:
        marks = np.array(document["marks"], dtype=np.int64)
        samples = np.array(document["samples"], dtype=np.int64).reshape(-1, 2)
        stacks = [[_label(*document["frames"][i]) for i in stack] for stack in document["stacks"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{file} is no record of Python stacks: {error!r}") from None
    seen = host[host["name"].eq(STEP_MARK)].sort_values("start")
    if len(seen):  # the range in which the profiler was stopped has no end of its own
        last = seen["end"].iloc[-1]
        host = host[host["start"].lt(last)].assign(end=host["end"].clip(upper=last))
        host["duration"] = host["end"] - host["start"]
    if not len(samples) or len(seen) != len(marks):
        return host.reset_index(drop=True)
    line = seen["line"].iloc[0]
    # both clocks count nanoseconds; a mark is noted just before its range opens
    offset = int(np.median(seen["start"].to_numpy() - marks))
    moments = samples[:, 0] + offset
    main = host[host["line"].eq(line)]
    operators = main[main["kind"].isin(["operator", "runtime"])]
    begin, end = _stretches(operators, moments, marks + offset)
    rows = _spans(begin, end, [stacks[i] for i in samples[:, 1]], marks + offset)
    spans = pd.DataFrame(rows, columns=["start", "end", "name"])
    spans["duration"] = spans["end"] - spans["start"]
    given = dict.fromkeys(host.columns, -1) | {"line": line, "kind": "python"}
    given |= {"shapes": "", "types": ""}
    spans = spans.assign(**{name: given[name] for name in host.columns.difference(spans.columns)})
    return pd.concat([host, spans[host.columns].astype(host.dtypes)], ignore_index=True)


def _label(file: str, first: int, function: str, line: int) -> tuple[str, str]:
    """(what tells the function from others, its name with the line that runs)."""
    if _PLUMBING.search(file):
        return "", ""
    return f"{file}:{first}", f"{file}({int(line)}): {function}"


def _stretches(operators: pd.DataFrame, moments: Ints, marks: Ints) -> tuple[Ints, Ints]:
    """From when to when each sample holds (n,).

    At least for the operator or the gap that it lies in. Where little but Python runs up to the
    next sample, until halfway to it; up to a mark, until the mark.
    """
    outer = _outermost(operators)
    edges = np.unique(np.concatenate([outer.ravel(), marks]))
    place = np.searchsorted(edges, moments, side="right")
    begin = np.where(place > 0, edges[np.maximum(place - 1, 0)], moments)
    end = np.where(place < len(edges), edges[np.minimum(place, len(edges) - 1)], moments)
    # the moments between which Python may hold: all samples and marks, in order
    every = np.sort(np.concatenate([moments, marks]))
    left, right = every[:-1], every[1:]
    busy = overlap(left, right, *outer.T)
    middle = _out_of(outer, (left + right) // 2)
    left_is_mark, right_is_mark = np.isin(left, marks), np.isin(right, marks)
    limit = np.where(left_is_mark, left, np.where(right_is_mark, right, middle))
    python = busy < MOST_OPERATORS * (right - left)
    at = np.searchsorted(every, moments)
    before, after = np.maximum(at - 1, 0), np.minimum(at, len(limit) - 1)
    has_before, has_after = at > 0, at < len(limit)
    begin = np.where(has_before & python[before], np.minimum(begin, limit[before]), begin)
    end = np.where(has_after & python[after], np.maximum(end, limit[after]), end)
    # two samples in one gap share it
    same = begin[1:] < end[:-1]
    meet = np.clip((moments[1:] + moments[:-1]) // 2, moments[:-1], moments[1:])
    begin[1:] = np.where(same, meet, begin[1:])
    end[:-1] = np.where(same, meet, end[:-1])
    return begin, np.maximum(begin, end)


def _out_of(outer: Ints, at: Ints) -> Ints:
    """Moments (n,) moved to the end of the operator that they lie in."""
    row = stretch_at(outer[:, 0], outer[:, 1], at)
    return np.where(row >= 0, outer[np.maximum(row, 0), 1], at) if len(outer) else at


def _outermost(operators: pd.DataFrame) -> Ints:
    """(start, end) of the spans that lie in no other (m, 2), in order."""
    table = operators.sort_values(["start", "end"], ascending=[True, False])
    start, end = table["start"].to_numpy(dtype=np.int64), table["end"].to_numpy(dtype=np.int64)
    reach = np.concatenate([[-1], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    outer = start >= reach
    return np.stack([start[outer], end[outer]], axis=1)


def _spans(
    begin: Ints, end: Ints, stacks: list[list[tuple[str, str]]], marks: Ints
) -> list[tuple[int, int, str]]:
    """(start, end, name) of every function of the samples, runs of equal ones joined.

    A run does not go on over a mark, nor where a caller differs.
    """
    rows: list[tuple[int, int, str]] = []
    open_: list[tuple[str, str, int, int]] = []
    """Key, name, start and end of what the last sample was in, outermost first."""
    iteration = np.searchsorted(marks, begin, side="right")

    def close(depth: int) -> None:
        while len(open_) > depth:
            _, name, start, finish = open_.pop()
            rows.append((start, finish, name))

    last = -1
    for start, finish, stack, number in zip(
        begin.tolist(), end.tolist(), stacks, iteration.tolist(), strict=True
    ):
        named = [frame for frame in stack if frame[1]]
        if number != last:
            close(0)
            last = number
        same = 0
        for held, frame in zip(open_, named, strict=False):
            if held[:2] != frame:
                break
            same += 1
        close(same)
        for depth, (key, name, since, until) in enumerate(open_):
            open_[depth] = (key, name, since, max(until, finish))
        floor = rows[-1][1] if rows else start
        for key, name in named[same:]:
            open_.append((key, name, max(start, floor), finish))
    close(0)
    return rows[::-1]  # of equal spans the caller first
