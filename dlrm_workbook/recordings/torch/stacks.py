"""Sampled Python stacks as spans of a trace.

Samples in which a thread was in the same function, one after another, become one span of that
function; the line that it was at belongs to its name, so that time is told by line. A span ends
where another thing began that the trace knows exactly: it never cuts an operator.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_core.errors import InputError
from dlrm_core.parts import STEP_MARK, parse_span
from dlrm_workbook.recordings.torch.chrome_trace import load_json

_PLUMBING = re.compile(
    r"^<frozen |/torch/nn/modules/module\.py$|/torch/optim/optimizer\.py$|"
    r"/torch/(utils/_contextlib|autograd/profiler|_tensor)\.py$|/dlrm_workbook/recordings/torch/"
)
"""Files whose functions only hand on to others, and our own."""

LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
"""Files that are no code of the program's own."""

MOST_OPERATORS = 1 / 3
"""Between two samples with no larger share of operators, Python is what runs."""


def sampled_lines(file: Path) -> dict[str, Any]:
    """Time by part and line of our own workload, whose functions name its parts.

    Returns:
        ``rows`` of ``component``, ``phase``, ``function``, ``file``, ``at`` (the line) and
        ``time_ms`` of a mean iteration, operators included; ``ms_per_iteration``.

    Raises:
        InputError: the file holds no stacks.
    """
    document = load_json(file)
    try:
        moments = np.array([moment for moment, _ in document["samples"]], dtype=np.int64)
        each_ms = [float(ms) for ms in document["iteration_ms"]]
        rows = [
            _own_line([document["frames"][i] for i in document["stacks"][stack]])
            for _, stack in document["samples"]
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{file}: is no record of Python stacks: {error!r}") from None
    table = pd.DataFrame(rows, columns=["component", "phase", "function", "file", "at"])
    if len(table) > 1:  # each stands for the time around it
        edges = (moments[1:] + moments[:-1]) / 2
        edges = np.concatenate([[2 * moments[0] - edges[0]], edges, [2 * moments[-1] - edges[-1]]])
        table["time_ms"] = np.diff(edges) / 1e6 / max(len(each_ms), 1)
        table = table.groupby(list(table.columns[:-1])).sum().reset_index()
    return {
        "rows": table.to_dict("records") if "time_ms" in table else [],
        "ms_per_iteration": sum(each_ms) / max(len(each_ms), 1),
    }


def _own_line(stack: list[tuple[str, int, str, int]]) -> tuple[str, str, str, str, int]:
    """(component, phase, function, file, line) of a stack, outermost first.

    The line is the innermost one of the program's own, not of a library that it calls.
    """
    parts = (parse_span(function.rpartition(".")[2]) for _, _, function, _ in reversed(stack))
    component, phase = next(filter(None, parts), ("other", ""))
    own = [frame for frame in stack if not LIBRARY.search(frame[0])] or stack
    file, _, function, line = own[-1]
    return component, phase, function, file, int(line)


def with_stacks(host: pd.DataFrame, file: Path) -> pd.DataFrame:
    """The host's spans, and those that samples of the stack tell.

    Args:
        host: see :class:`~dlrm_workbook.recordings.torch.chrome_trace.Events`.
        file: what :meth:`~dlrm_workbook.recordings.torch.sampling.StackSampler.document` says,
            and ``marks``: the moments of the marks between iterations on the samples' clock.

    Raises:
        InputError: the file does not hold that.
    """
    document = load_json(file)
    try:
        marks = np.array(document["marks"], dtype=np.int64)
        samples = np.array(document["samples"], dtype=np.int64).reshape(-1, 2)
        stacks = [[_label(*document["frames"][i]) for i in stack] for stack in document["stacks"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{file}: is no record of Python stacks: {error!r}") from None
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
    spans["line"], spans["kind"], spans["shapes"], spans["types"] = line, "python", "", ""
    for column in host.columns.difference(spans.columns):
        spans[column] = -1
    return pd.concat([host, spans[host.columns].astype(host.dtypes)], ignore_index=True)


def _label(file: str, first: int, function: str, line: int) -> tuple[str, str]:
    """(what tells the function from others, its name with the line that runs)."""
    if _PLUMBING.search(file):
        return "", ""
    return f"{file}:{first}", f"{file}({int(line)}): {function}"


def _stretches(
    operators: pd.DataFrame, moments: npt.NDArray[np.int64], marks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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
    busy = _time_inside(outer, right) - _time_inside(outer, left)
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


def _time_inside(
    outer: npt.NDArray[np.int64], until: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Time in operators before each moment (n,), ns."""
    if not len(outer):
        return np.zeros(len(until), dtype=np.int64)
    lengths = np.concatenate([[0], np.cumsum(outer[:, 1] - outer[:, 0])])
    begun = np.searchsorted(outer[:, 0], until, side="right")
    last = outer[np.maximum(begun - 1, 0), 1]
    over = np.where(begun > 0, np.maximum(last - until, 0), 0)
    return np.asarray(lengths[begun] - over, dtype=np.int64)


def _out_of(outer: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Moments (n,) moved to the end of the operator that they lie in."""
    if not len(outer):
        return at
    place = np.searchsorted(outer[:, 0], at, side="right") - 1
    end = outer[np.maximum(place, 0), 1]
    return np.where((place >= 0) & (end > at), end, at)


def _outermost(operators: pd.DataFrame) -> npt.NDArray[np.int64]:
    """(start, end) of the spans that lie in no other (m, 2), in order."""
    table = operators.sort_values(["start", "end"], ascending=[True, False])
    start, end = table["start"].to_numpy(dtype=np.int64), table["end"].to_numpy(dtype=np.int64)
    reach = np.concatenate([[-1], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    outer = start >= reach
    return np.stack([start[outer], end[outer]], axis=1)


def _spans(
    begin: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    stacks: list[list[tuple[str, str]]],
    marks: npt.NDArray[np.int64],
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
    for number, (start, finish, stack) in enumerate(
        zip(begin.tolist(), end.tolist(), stacks, strict=True)
    ):
        named = [frame for frame in stack if frame[1]]
        if iteration[number] != last:
            close(0)
            last = iteration[number]
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
    return rows
