"""Where the iterations of a torch trace are: by their marks, else by what repeats."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from dlrm_core.parts import ITERATION_SPAN
from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.ground.marks import STEP_MARK
from dlrm_workbook.recordings.foreign import PartNames, outermost_marked
from dlrm_workbook.recordings.profile import coded, coded_pairs, matching, nearest
from dlrm_workbook.recordings.repetition import find_iterations
from dlrm_workbook.recordings.torch.chrome_trace import STEP_PREFIX

STEP_LABEL = "ProfilerStep*"

FEWEST = 3
"""Occurrences of an annotation that may mark the iterations."""

CONTAINED = 0.9
"""Share of the launches between the first and the last of them that must lie within them."""

LEAST_SHARE = 0.5
"""Share of all launches, and of the time of what they launched, that iterations must hold."""

STEP_PARTS = ("optimizer", "loss")
"""Parts that a training step has, and no layer."""

LONGER_GAP = 2.0
"""Times as long as nine of ten gaps between the host's operators that it is in none from one
iteration to the next: it fetches a batch or reads a result. Between equal layers it does not."""

_NUMBER = re.compile(r"\d+")
_STEP_WORDS = re.compile(r"step|iter|batch", re.IGNORECASE)


class Steps(NamedTuple):
    """The iterations of a trace."""

    spans: list[tuple[int, int]]
    """(start, end) ns of each, on the host, in order."""
    label: str
    """Of the ranges that mark them, without numbers; "" where none does."""
    source: str
    """How they were found, as the page says it; "" where there are none."""


def unnumbered(name: str) -> str:
    """The name of a range that differs by numbers only from one iteration to the next."""
    return _NUMBER.sub("*", name)


def step_marks(host: pd.DataFrame) -> Bools:
    """Which spans (n,) mark an iteration: our own ranges, else the marks between iterations that
    a session made, else the ranges of ``profiler.step()``."""
    for name in (ITERATION_SPAN, STEP_MARK):
        marks = host["name"].eq(name).to_numpy()
        if marks.any():
            return marks
    return matching(host["name"], lambda name: name.startswith(STEP_PREFIX))


def find_steps(host: pd.DataFrame, device: pd.DataFrame, names: PartNames) -> Steps:
    """The iterations of a trace. The nested spans of profile 0 in ``host`` are the thread that
    steps; ``device`` is GPU work with ``launcher``, the row of ``host`` that launched it, or empty.
    """
    marks = step_marks(host) & host["profile"].eq(0).to_numpy()
    spans = host.loc[marks, ["start", "end", "name"]].sort_values("start", kind="stable")
    lasting = spans["end"].gt(spans["start"]) | spans["name"].eq(STEP_MARK)
    # of ranges within ranges, as broken names make them, the outer ones
    reached = spans["end"].where(lasting, -1).cummax().shift(fill_value=-1)
    spans = spans[lasting & spans["start"].ge(reached)]
    if len(spans):
        start, end = spans["start"].tolist(), spans["end"].tolist()
        ranges, marked = list(zip(start, end, strict=True)), spans["name"].iloc[0]
        if marked == STEP_MARK:
            between = list(zip(end[:-1], start[1:], strict=True))
            return Steps(between, "", "the steps of its optimizer, or its own calls of step()")
        if marked == ITERATION_SPAN:
            return Steps(ranges, ITERATION_SPAN, "its own ranges")
        return Steps(ranges, STEP_LABEL, "the ranges of profiler.step()")
    launched = device[device["launcher"].ge(0)] if len(device) else device
    if len(launched):
        rows = launched["launcher"].to_numpy()
    else:
        operator = host["kind"].eq("operator").to_numpy() & host["profile"].eq(0).to_numpy()
        outermost = outermost_marked(host["parent"].to_numpy(), operator)
        rows = np.flatnonzero(outermost == np.arange(len(host)))
    ran = launched if len(launched) else host.iloc[rows]
    work = (ran["end"] - ran["start"]).to_numpy()
    annotated = _annotated(host, work, rows, names)
    return annotated or _repeated(host, launched, work, rows, names)


def _annotated(host: pd.DataFrame, work: Ints, rows: Ints, names: PartNames) -> Steps | None:
    """The ranges of which one contains nearly all launches, again and again, and most of the
    ``work`` (n,) ns of what is launched in ``rows`` (n,)."""
    ranges = host[host["kind"].eq("annotation")]
    if ranges.empty:
        return None
    ranges = ranges[matching(ranges["name"], lambda name: names.of("annotation", name) is None)]
    order = np.argsort(host["start"].to_numpy()[rows], kind="stable")
    launches = host["start"].to_numpy()[rows][order]
    worked = np.concatenate([[0], np.cumsum(work[order])])
    labels = [unnumbered(str(name)) for name in ranges["name"]]
    candidates: list[tuple[tuple[bool, int], Steps]] = []
    for (_, label), group in ranges.groupby(["profile", np.array(labels, dtype=object)]):
        start, end = (np.sort(group[name].to_numpy()) for name in ("start", "end"))
        if len(start) < FEWEST or (start[1:] < end[:-1]).any():
            continue
        within = np.searchsorted(launches, [start[0], end[-1]])
        since, until = np.searchsorted(launches, start), np.searchsorted(launches, end)
        inside, held = until - since, (worked[until] - worked[since]).sum()
        least = max(CONTAINED * (within[1] - within[0]), LEAST_SHARE * len(launches))
        if (inside > 0).all() and inside.sum() >= least:
            spans = list(zip(start.tolist(), end.tolist(), strict=True))
            in_words = bool(_STEP_WORDS.search(str(label)))
            most = held >= LEAST_SHARE * worked[-1]
            if in_words or (most and not _are_layers(host, spans, names)):
                found = Steps(spans, str(label), f"the ranges '{label}'")
                candidates.append(((in_words, len(start)), found))
    return max(candidates, key=lambda entry: entry[0])[1] if candidates else None


def _repeated(
    host: pd.DataFrame, launched: pd.DataFrame, work: Ints, rows: Ints, names: PartNames
) -> Steps:
    """Iterations from the repeating sequence of launches (of operators, without a GPU)."""
    none = Steps([], "", "")
    if not len(rows):
        return none
    name, texts = coded(host["name"])
    operator = nearest(host["parent"].to_numpy(), host["kind"].eq("operator").to_numpy())[rows]
    symbol = np.where(operator >= 0, name[operator], len(texts))
    if len(launched):
        kernel, kernels = coded(launched["name"])
        symbol = symbol * len(kernels) + kernel
    start, end = host["start"].to_numpy()[rows], host["end"].to_numpy()[rows]
    spans = find_iterations(start, end, symbol)
    if not spans or spans[0][0] == spans[-1][0]:
        return none
    # an evaluation, or an optimizer's loop over parameters, has little of the work
    inside = (start >= spans[0][0]) & (start < spans[-1][1])
    held = min(inside.mean(), work[inside].sum() / max(work.sum(), 1))
    if held < LEAST_SHARE or _are_layers(host, spans, names):
        return none
    what = "launches" if len(launched) else "operators"
    return Steps(spans, "", f"the repeating sequence of {what}")


def _are_layers(host: pd.DataFrame, spans: list[tuple[int, int]], names: PartNames) -> bool:
    """Whether what repeats may be the equal layers of one pass: most of it has no part of a
    training step in it, and the host goes from one to the next as it does within them."""
    begin = np.array([start for start, _ in spans])
    pair, pairs = coded_pairs(host["kind"], host["name"])
    said = [names.of(kind, name) for kind, name in pairs]
    trains = np.array([one is not None and one.component in STEP_PARTS for one in said])[pair]
    within = np.searchsorted(begin, host["start"].to_numpy()[trains], side="right") - 1
    if len(np.unique(within[within >= 0])) >= CONTAINED * len(spans):
        return False
    called = host[host["kind"].isin(["operator", "runtime"]) & host["profile"].eq(0)]
    called = called[called["start"].ge(begin[0]) & called["start"].lt(spans[-1][1])]
    called = called.sort_values("start", kind="stable")
    start = called["start"].to_numpy()[1:]
    gap = start - np.maximum.accumulate(called["end"].to_numpy())[:-1]
    first = np.searchsorted(start, begin[1:])
    between = np.zeros(len(gap), dtype=bool)
    between[first[first < len(gap)]] = True
    inside = gap[(gap > 0) & ~between]
    if not between.any() or not len(inside):
        return True
    return bool(np.median(gap[between]) <= LONGER_GAP * np.quantile(inside, 0.9))
