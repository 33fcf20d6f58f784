"""Puts Python lines and modules of somebody's program into a sampled profile, by the clock.

The program's own process sampled its Python stack while hpcrun sampled its libraries, and noted
when modules began and ended (:mod:`dlrm_workbook.recordings.torch.beside`), on one clock. So each
of hpcrun's samples lies below the stack and the module that ran then, and names tell the parts as
they do in call paths of ``hpcrun -a python``, which slows down each Python call.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.parts import ITERATION_SPAN, SpanRow
from dlrm_workbook.ground.arrays import Ints
from dlrm_workbook.ground.marks import GROUP_PREFIX, PART_PREFIX
from dlrm_workbook.recordings.foreign import START_UP, PartNames
from dlrm_workbook.recordings.hpctoolkit.parts import by_names, divide, parts_in_order
from dlrm_workbook.recordings.hpctoolkit.spans import Log, Node, laid_out, launched_in
from dlrm_workbook.recordings.nesting import stretch_at
from dlrm_workbook.recordings.profile import Profile, nearest
from dlrm_workbook.recordings.torch.lines import FILE, missing_of_lines, read_lines
from dlrm_workbook.recordings.torch.sampling import is_user_code

MOVES = (" backward begins", " backward ends", " begins", " ends")
"""What a noted moment says of the group of modules before it."""

BACKWARD = ("backward", "_engine_run_backward", "grad")
"""Python functions of torch in which a backward pass runs, by their own names."""
OPTIMIZER = "optimizer begins"
UPDATE = f"{PART_PREFIX}optimizer update"

NO_STACKS = "the program's own process sampled no Python stacks"


def with_stacks(
    profile: Profile,
    spans: list[SpanRow],
    folder: Path | None,
    warmup: int = 0,
    parts: dict[str, str] | None = None,
) -> Profile:
    """The profile with its samples below iterations, Python stacks and modules, and their parts.

    Values are divided as in :func:`~dlrm_workbook.recordings.hpctoolkit.spans.with_spans`; start-up
    and warm-up stay outside of the iterations.

    Args:
        profile: of an HPCToolkit database measured with ``-t``.
        spans: the iterations of the same run.
        folder: of the process, with :data:`~dlrm_workbook.recordings.torch.beside.FILE`; where
            there is none, parts come from the names of libraries' functions alone.
        warmup: iterations at the beginning that do not count, where there are more.
        parts: pattern to part, for names that no rule knows.

    Raises:
        InputError: the file holds no stacks.
    """
    every = sorted(row for row in spans if row[0] == ITERATION_SPAN)
    loops = every[warmup:] or every
    if profile.trace.empty or not loops:
        return profile
    sampled = folder is not None and (folder / FILE).is_file()
    document = read_json(folder / FILE) if folder is not None and sampled else {}
    try:
        log = _log(document, loops)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{FILE} is no record of Python stacks: {error!r}") from None

    def place(work: pd.DataFrame, meta: dict[str, Any]) -> pd.DataFrame:
        begins, ends = (np.array([row[side] for row in every]) for side in (1, 2))
        number, how = launched_in(profile, work, begins, ends)
        meta["notices"] = [f"iterations are those that the program's optimizers end; {how}"]
        placed = work.assign(iteration=number - (len(every) - len(loops)))
        placed = placed[placed["iteration"] >= 0]
        return placed.assign(part=log.numbered([()] * len(placed)))

    result = _with_parts(laid_out(profile, log, place), parts)
    if folder is not None and sampled:
        lines = read_lines(folder)
        result.meta["not_measured"].pop("Python frames", None)
        if lines is not None:
            lines["profiled"] = False  # by torch.profiler: hpcrun slows no Python down
            result.meta["lines"] = lines
            result.meta["not_measured"] |= missing_of_lines(lines)
    elif not profile.of_kind("python").any():
        result.meta["not_measured"]["Python frames"] = NO_STACKS
    return result


def _log(document: dict[str, Any], loops: list[SpanRow]) -> Log:
    """What ran when: stretches of one stack and one group of modules."""
    begins, ends = (np.array([row[side] for row in loops]) for side in (1, 2))
    samples = np.array(document.get("samples", []), dtype=np.int64).reshape(-1, 2)
    samples = samples[np.argsort(samples[:, 0], kind="stable")]
    middles = (samples[1:, 0] + samples[:-1, 0]) // 2
    moments, group_at, groups = _groups(document.get("modules", []), np.append(begins, ends))
    cuts = np.unique(np.concatenate([begins, ends, middles, moments]))
    start, end = cuts[:-1], cuts[1:]
    inside = stretch_at(begins, ends, start) >= 0
    start, end = start[inside], end[inside]
    stack = np.full(len(start), -1)
    if len(samples):
        stack = samples[np.searchsorted(middles, start, side="right"), 1]
    group = group_at[np.searchsorted(moments, start, side="right")]
    pair, pairs = pd.factorize(stack * (len(groups) + 1) + group)
    frames = [_frame(*frame) for frame in document.get("frames", [])]
    stacks = [[frames[number] for number in one] for one in document.get("stacks", [])]
    chains = []
    for number in pairs.tolist():
        own, module = divmod(number, len(groups) + 1)
        frames_above = stacks[own] if own >= 0 else []
        below = [groups[module]] if module < len(groups) else []
        if below and below[0].phase == "backward":
            # what follows a backward pass, clipping say, is not its last module's
            runs = not frames_above or any(
                node.name.rpartition(".")[2] in BACKWARD for node in frames_above
            )
            below = [below[0]._replace(phase="")] if runs else []
        chains.append(tuple(frames_above + below))
    return Log(chains, pair, start, end, loops, interpreter=False)


def _frame(file: str, first: int, function: str, line: int) -> Node:
    """The context of a frame: of the user's code by line, of libraries by function."""
    at = int(line) if is_user_code(str(file), str(function)) else int(first)
    return Node("python", str(function), str(file), at)


def _groups(noted: list[tuple[str, int]], edges: Ints) -> tuple[Ints, Ints, list[Node]]:
    """Moments (m,), what was open (m + 1,) before and after each, and the contexts of that.

    The number after the last stands for outside of all. From the last begin of an optimizer to the
    end of its iteration it is the update; ``edges`` are begins and ends of iterations.
    """
    rows = sorted([(int(at), str(what)) for what, at in noted] + [(int(at), "") for at in edges])
    opened: list[tuple[str, str]] = []
    inner = set[tuple[str, str]]()  # a group and one that ran within it
    after = [("", "")]
    for number, (_, what) in enumerate(rows):
        move = next((move for move in MOVES if what.endswith(move)), "")
        one = GROUP_PREFIX + what.removesuffix(move), "backward" if "backward" in move else ""
        if not move or what == OPTIMIZER:
            # a backward pass ends without a word where no gradient goes on
            last = bool(move) and number + 1 < len(rows) and not rows[number + 1][1]
            opened = [(UPDATE, "")] if last else []
        elif move == MOVES[2]:
            inner |= {(outer, one[0]) for outer, _ in opened}
            opened.append(one)
        elif move == MOVES[0]:
            # one gradient begins a module, and then those around it whose result it made too
            at = len(opened)
            while at and (one[0], opened[at - 1][0]) in inner:
                at -= 1
            opened.insert(at, one)
        elif one in opened:
            at = len(opened) - 1 - opened[::-1].index(one)
            del opened[at : at + 1 if one[1] else None]
        after.append(opened[-1] if opened else ("", ""))
    names = sorted(set(after) - {("", "")})
    numbers = [names.index(one) if one[0] else len(names) for one in after]
    nodes = [Node("annotation", name, phase=phase) for name, phase in names]
    return np.array([at for at, _ in rows]), np.array(numbers), nodes


def _with_parts(profile: Profile, parts: dict[str, str] | None) -> Profile:
    """The profile with the part of every context of its iterations, by names and by order."""
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    labels = by_names(contexts, parts)
    outside = nearest(parent, contexts["name"].eq(ITERATION_SPAN).to_numpy()) < 0
    labels.component[outside], labels.phase[outside] = "other", START_UP
    # what no name tells is of the group that ran it, whatever ran before
    grouped = nearest(parent, contexts["name"].str.startswith(GROUP_PREFIX).to_numpy()) >= 0
    of_group = (labels.component == "other") & grouped
    trace = profile.trace[~of_group[profile.trace["context"]]]
    order = parts_in_order(trace, profile.threads, labels, profile.iterations)
    tables = (contexts, profile.values, profile.trace)
    (contexts, values, trace), _ = divide(tables, labels, order, {})
    names = PartNames(parts)
    parent = contexts["parent"].to_numpy()
    group = nearest(parent, contexts["name"].str.startswith(GROUP_PREFIX).to_numpy())
    unnamed = contexts["component"].eq("other").to_numpy() & (group >= 0)
    modules = contexts["name"].iloc[group[unnamed]].map(names.module).to_numpy()
    backward = contexts["kind"].eq("python") & contexts["name"].str.endswith("backward")
    phase = np.where(nearest(parent, backward.to_numpy()) >= 0, "backward", "forward")
    contexts.loc[unnamed, "component"] = modules
    contexts.loc[unnamed, "phase"] = phase[unnamed]
    root = contexts["kind"].isin(["root", "thread"]).to_numpy()
    started = np.append(outside, np.zeros(len(contexts) - len(outside), dtype=bool)) & ~root
    contexts.loc[started, ["component", "phase"]] = ["other", START_UP]
    return replace(profile, contexts=contexts, values=values, trace=trace, _known={})
