"""What a recording knows of the user's lines, as ``Profile.meta["lines"]`` keeps it.

A sampled stack becomes a path: the user's frames in it, outermost first, each with what the
libraries below it do before the next one (:data:`MARKS`). The backward pass runs in no line of
the user's: its nodes are numbered in the order in which the forward pass built them, and the
counted iteration (:mod:`dlrm_workbook.recordings.torch.counting`) saw which path built which.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.parts import parse_span
from dlrm_workbook.ground.arrays import Ints
from dlrm_workbook.recordings.foreign import node_key, outermost_marked
from dlrm_workbook.recordings.nesting import stretch_at
from dlrm_workbook.recordings.profile import matching
from dlrm_workbook.recordings.torch.sampling import is_user_code
from dlrm_workbook.recordings.torch.stacks import time_around

MARKS = {
    "ours": re.compile(r"/dlrm_workbook/"),
    "optimizer": re.compile(r"(?:^|/)torch/optim/(?!swa_utils)|\.zero_grad$"),
    "weights": re.compile(r"(?:^|/)torch/nn/utils/(?:parametri\w+|(?:weight|spectral)_norm)\.py:"),
    "module": re.compile(r"(?:^|/)torch/nn/modules/module\.py:.*_call_impl$"),
    "backward": re.compile(
        r"(?:^|/)torch/(_tensor\.py:.*backward|autograd/(__init__\.py:(backward|grad)|"
        r"graph\.py:_engine_run_backward))$"
    ),
    "again": re.compile(r"/checkpoint\w*\.py:.*(unpack_hook|CheckpointFunction\.backward)$"),
    "checkpoint": re.compile(r"(?:^|/)torch/utils/checkpoint\.py:"),
    "started": re.compile(r"(?:^|/)torch/utils/data/\w+\.py:_MultiProcessing\w+\.__init__$"),
    "loader": re.compile(r"(?:^|/)torch/utils/data/"),
    "received": re.compile(r"(?:^|/)torch/multiprocessing/reductions\.py:rebuild_"),
}
"""What a library's function (FILE:NAME) says of the user's line that called it."""

_COMPREHENSION = re.compile(r"\.<locals>(\.<(listcomp|setcomp|dictcomp|genexpr)>)+$")

FILE = "lines.json"
"""Holds what was sampled, in the folder of a process."""

MAIN = "main"
"""Name of the thread that runs the steps."""

Frame = tuple[str, int, str, int]
"""File, first line of the function, function, line."""


def read_lines(folder: Path) -> dict[str, Any] | None:
    """The samples of a recording by path; None where no stack was sampled.

    Returns:
        ``frames`` (file, first line, function, line); ``paths``, each a list of (frame, mark);
        ``threads``, the names, :data:`MAIN` first; ``times``: columns ``iteration``, ``thread``,
        ``path``, ``ms`` and ``samples``; ``iteration_ms``; ``counted``, with ``built`` and
        ``backward`` as paths; ``sources``: (file, first line, text); ``profiled``: whether the
        profiler ran meanwhile.

    Raises:
        InputError: a file holds no stacks.
    """
    file = folder / FILE
    profiled = not file.is_file()
    if profiled:
        file = folder / "python.json"  # of a program that ended before lines were sampled
        if not file.is_file():
            return None
    document = read_json(file)
    try:
        marks = document.get("marks", [])
        iterations = np.array(
            document.get("iterations") or list(itertools.pairwise(marks)), dtype=np.int64
        ).reshape(-1, 2)
        table = _Paths()
        path_of = np.array(
            [table.of_stack([document["frames"][i] for i in s]) for s in document["stacks"]],
            dtype=np.int64,
        )
        main = np.array(document["samples"], dtype=np.int64).reshape(-1, 2)
        main = main[np.argsort(main[:, 0], kind="stable")]
        parts = [_main_times(iterations, main)]
        names = {int(number): str(name) for number, name in document.get("threads", {}).items()}
        others = np.array(document.get("others", []), dtype=np.int64).reshape(-1, 4)
        for thread, number in enumerate(names, 1):
            parts.append(_other_times(iterations, others[others[:, 1] == number], thread))
        times = pd.concat(parts, ignore_index=True)
        times["path"] = path_of[times.pop("stack")]
        keys = ["iteration", "thread", "path"]
        times = times.groupby(keys, sort=False)[["ms", "samples"]].sum().reset_index()
        counted = dict(document.get("counted") or {"missing": "no iteration was counted"})
        if "built" in counted:
            counted["built"] = [(a, b, table.of_frames(path)) for a, b, path in counted["built"]]
            counted["backward"] = [table.of_frames(path) for path in counted["backward"]]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{file} is no record of Python stacks: {error!r}") from None
    return {
        "profiled": profiled,
        "frames": table.listed,
        "paths": list(table.paths),
        "threads": [MAIN, *names.values()],
        "times": {name: column.tolist() for name, column in times.items()},
        "iteration_ms": (np.diff(iterations).ravel() / 1e6).tolist(),
        "counted": counted,
        "sources": document.get("sources", []),
    }


class _Paths:
    """Numbers of frames, and of paths of them."""

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.listed: list[Frame] = []
        self.paths: dict[tuple[tuple[int, str], ...], int] = {}

    def number(self, frame: Frame) -> int:
        if frame not in self.frames:
            self.listed.append(frame)
        return self.frames.setdefault(frame, len(self.frames))

    def of_frames(self, frames: Sequence[Sequence[Any]]) -> int:
        """The path of frames that are all the user's."""
        path: list[tuple[int, str]] = []
        for file, first, function, line in frames:
            self._append(path, (str(file), int(first), str(function), int(line)))
        return self.paths.setdefault(tuple(path), len(self.paths))

    def _append(self, path: list[tuple[int, str]], frame: Frame) -> None:
        """Add a frame to a path; that of a comprehension goes on with its function's."""
        file, _, function, line = frame
        around = _COMPREHENSION.sub("", function)
        if around != function and path:
            over, mark = self.listed[path[-1][0]], path[-1][1]
            if (over[0], over[2]) == (file, around):
                path[-1] = (self.number((file, over[1], around, line)), mark)
                return
        path.append((self.number(frame), ""))

    def of_stack(self, stack: Sequence[Sequence[Any]]) -> int:
        """The path of a stack, outermost frame first."""
        path: list[tuple[int, str]] = []
        for given in stack:
            file, function = str(given[0]), str(given[2])
            if is_user_code(file, function):
                self._append(path, (file, int(given[1]), function, int(given[3])))
            elif path and (mark := mark_of(f"{file}:{function}")):
                frame, marks = path[-1]
                role, _, above = marks.partition(" ")
                # whatever runs again does, but for the backward pass that it is for
                again = above == "again" and mark != "backward"
                path[-1] = (frame, f"{role} {above if again else mark}")
            part = parse_span(function.rpartition(".")[2])
            if path and part:
                frame, marks = path[-1]
                path[-1] = (frame, f"{role_of(*part)} {marks.partition(' ')[2]}")
        return self.paths.setdefault(tuple(path), len(self.paths))


@cache
def mark_of(function: str) -> str:
    """What a library's function (FILE:NAME) does, "" where that is nothing of :data:`MARKS`."""
    return next((name for name, at in MARKS.items() if at.search(function)), "")


def role_of(component: str, phase: str) -> str:
    """The role of a part of the step, "" of none."""
    if component in ("data", "transfer"):
        return "batch"
    if component == "optimizer" or phase == "update":
        return "optimizer"
    return "" if component == "other" else "model"


def _main_times(iterations: Ints, samples: Ints) -> pd.DataFrame:
    """Each iteration divided among its samples: its time is theirs, whole."""
    rows = [np.zeros((0, 3))]
    for number, (begin, end) in enumerate(iterations.tolist()):
        first, last = np.searchsorted(samples[:, 0], [begin, end])
        if first == last:  # shorter than the distance of two samples: the nearest one's
            first = min(first, len(samples) - 1)
            last = first + 1
        moments, stack = samples[first:last].T
        cuts = np.concatenate([[begin], (moments[1:] + moments[:-1]) / 2, [end]])
        ms = np.diff(cuts[: len(moments) + 1]) / 1e6
        rows.append(np.column_stack([np.full(len(ms), number), stack, ms]))
    table = pd.DataFrame(np.concatenate(rows), columns=["iteration", "stack", "ms"])
    return table.astype({"iteration": int, "stack": int}).assign(thread=0, samples=1)


def _other_times(iterations: Ints, samples: Ints, thread: int) -> pd.DataFrame:
    """The time that another thread computed in each sample of it.

    What the system does not say is the time around the sample, also if the thread sleeps.
    """
    moment, stack, computed = samples[:, 0], samples[:, 2], samples[:, 3]
    if len(samples) < 2 or (computed < 0).any():
        ms = time_around(moment) / 1e6
    else:
        # between two stacks it is divided by how much each computes from sample to sample
        passed, ns = np.diff(moment), np.diff(computed)
        same = stack[1:] == stack[:-1]
        wall, busy = (np.bincount(stack[1:][same], x[same], stack.max() + 1) for x in (passed, ns))
        rate = np.where(wall > 0, busy / np.maximum(wall, 1), 1.0) + 1e-6
        before, after = rate[stack[:-1]], rate[stack[1:]]
        first = np.append(ns * before / (before + after), 0)
        ms = (first + np.append(0, ns - first[:-1])) / 1e6
    row = stretch_at(iterations[:, 0], iterations[:, 1], samples[:, 0])
    table = pd.DataFrame({"iteration": row, "stack": stack, "ms": ms})
    return table[row >= 0].assign(thread=thread, samples=1)


def node_times(
    host: pd.DataFrame,
    device: pd.DataFrame,
    iterations: Sequence[tuple[int, int]],
    sampled: dict[str, Any],
) -> dict[str, Any]:
    """What the nodes of the backward pass say of the paths that built them.

    A node's number, counted from the beginning of its iteration, says what built it, where
    iterations build as many nodes as the counted one.

    Args:
        host, device: spans, nested, and what ran on a GPU with its ``launcher``.
        sampled: as :func:`read_lines` gives it.

    Returns:
        ``backward``: columns ``path`` and ``ns``, over the recorded iterations, path -1 has the
        time of nodes that no path is known of; on a GPU it is that of the kernels.
        ``operators``: ``path``, ``name`` and ``ns`` of the operators that built the nodes.
        ``again``: ``ns`` of nodes that had run in the same iteration, of ``of_ns`` of all.
        Nothing where no iteration can be compared.
    """
    counted = sampled["counted"]
    if "built" not in counted or "sequence" not in host or not iterations:
        return {}
    spans = np.array(iterations, dtype=np.int64).reshape(-1, 2)
    is_node = matching(host["name"], lambda name: node_key(name) is not None)
    is_node &= host["kind"].eq("operator").to_numpy()
    node = outermost_marked(host["parent"].to_numpy(), is_node)
    start, sequence = host["start"].to_numpy(), host["sequence"].to_numpy()
    of_iteration = stretch_at(spans[:, 0], spans[:, 1], start)
    forward = (node < 0) & (sequence >= 0) & (host["profile"].to_numpy() == 0)
    forward &= (of_iteration >= 0) & host["kind"].eq("operator").to_numpy()
    first = np.full(len(spans) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, of_iteration[forward], sequence[forward])
    alike = np.diff(first) == counted["advance"]
    nodes = np.flatnonzero((node == np.arange(len(node))) & (of_iteration >= 0))
    nodes = nodes[np.argsort(start[nodes], kind="stable")]
    if not alike.any():  # one iteration, or all differ
        return {}
    nodes = nodes[alike[of_iteration[nodes]]]
    if len(device):
        launcher = device["launcher"].to_numpy()
        below = np.where(launcher >= 0, node[launcher], -1)
        length = (device["end"] - device["start"]).to_numpy()
        ns = np.bincount(below[below >= 0], length[below >= 0], len(host))[nodes]
    else:
        ns = (host["end"] - host["start"]).to_numpy()[nodes]
    place = pd.Series(sequence[nodes] - first[of_iteration[nodes]])
    ran_before = pd.DataFrame(
        {"place": place, "iteration": of_iteration[nodes], "name": host["name"].to_numpy()[nodes]}
    ).duplicated() & place.ge(0)
    again = {"ns": int(ns[ran_before].sum()), "of_ns": int(ns.sum())}
    # the accumulation of a gradient has no number: it follows the node that made the gradient
    place = place.where((place >= 0) & (place < counted["advance"])).ffill().fillna(-1)
    built = sorted(counted["built"])
    begin, end = (np.array([row[i] for row in built], dtype=np.int64) for i in (0, 1))
    paths = np.append([path for _, _, path in built], -1)

    def path_of(places: pd.Series) -> Ints:
        return paths[stretch_at(begin, end, places.to_numpy(dtype=np.int64))]

    table = pd.DataFrame({"path": path_of(place), "ns": ns}).groupby("path").sum().reset_index()
    # an operator that builds no node has the number of the next one that does
    outer = outermost_marked(host["parent"].to_numpy(), forward) == np.arange(len(host))
    rows = np.flatnonzero(forward & outer & np.append(alike, False)[of_iteration])
    number = sequence[rows] - first[of_iteration[rows]]
    ran = pd.DataFrame({"row": rows, "iteration": of_iteration[rows], "number": number})
    ran = ran.sort_values("row").groupby(["iteration", "number"]).tail(1)
    ran = ran[ran["number"].isin(place)]
    chosen = ran["row"].to_numpy()
    ran = ran.assign(
        path=path_of(ran["number"]),
        name=host["name"].to_numpy(dtype=object)[chosen],
        ns=(host["end"] - host["start"]).to_numpy()[chosen],
    )
    operators = ran.groupby(["path", "name"])["ns"].sum().reset_index()
    return {
        "backward": table.to_dict("list"),
        "operators": operators.to_dict("list"),
        "again": again,
    }


def missing_of_lines(sampled: dict[str, Any]) -> dict[str, str]:
    """What is not known of lines, name to reason."""
    missing = {}
    if reason := sampled["counted"].get("missing"):
        missing["lines.calls"] = f"how often lines run was not counted: {reason}"
    if "backward" not in sampled:
        missing["lines.backward"] = "the backward pass is in the line that calls it: " + (
            reason or "iterations build different numbers of nodes"
        )
    if sampled["profiled"]:
        missing["lines.unprofiled"] = (
            "the program ended before lines were sampled without the profiler, so their shares "
            "are those of iterations under it"
        )
    return missing
