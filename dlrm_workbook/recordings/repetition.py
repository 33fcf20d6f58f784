"""Finds the iterations of a recording in which nothing marks them.

Training does the same work again and again, so the launches on a GPU repeat:
``find_iterations`` looks for a launch that occurs once per iteration, such that
between two of its occurrences nearly always the same launches lie. It looks at how
often each launch occurs between them, not at their order, so other streams, small
operations whose number varies, prefetched copies and an evaluation in the middle do
not mislead it. Where nothing repeats it finds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_workbook.ground.arrays import Bools, Ints

FEWEST_ITERATIONS = 5
"""Fewer are found in the equal layers of a single step, too."""
FEWEST_LAUNCHES = 3
"""Fewer launches per iteration are a loop of something else."""
REGULAR = 0.9
"""A launch belongs to the pattern if this share of iterations has its usual number; one
iteration may always differ."""
ROUGHLY_REGULAR = 0.6
"""The same before stretches that are no iteration (an evaluation) are left out."""
ALIKE = 0.75
"""Share of the pattern's launches that a stretch must have in their usual number."""
EXPLAINED = 0.5
"""Share of the launches within the iterations that must belong to the pattern."""
AS_GOOD = 0.99
"""Of patterns that explain this share of what the best one explains, the shortest is chosen
(what happens every tenth iteration does not make ten iterations one), and of equally short
ones that which begins first."""
RUNS = (1, 2, 4, 8)
"""How many launches in a row are tried as the mark of an iteration."""
MOST_GROUPS, MOST_MARKS = 12, 4
"""How many numbers of occurrences, and how many marks of each, are tried."""
MOST_CELLS = 20_000_000
"""Most cells of a table of stretches by symbols; longer ones are not tried."""


def find_iterations(
    start_ns: Ints, end_ns: Ints, symbol: npt.ArrayLike
) -> list[tuple[int, int]] | None:
    """When each iteration ran, from the repeating sequence of launches.

    Args:
        start_ns, end_ns: of each kernel, copy and memory set (launches,), in any order.
        symbol: what each is: a name or number that is the same in every iteration
            (launches,); a kernel's call path tells more than its name.

    Returns:
        (start_ns, end_ns) of the iterations, in order. One lasts from its first launch to
        the next one's first; the last one, and one before an evaluation, to the end of
        its last launch. What does not fit (start-up, an evaluation, a cut iteration) is
        left out. None where fewer than five iterations are found, or less than half of the
        launches within them repeats.
    """
    order = np.argsort(start_ns, kind="stable")
    start, end = np.asarray(start_ns)[order], np.asarray(end_ns)[order]
    codes, names = pd.factorize(np.asarray(symbol)[order])
    code = codes.astype(np.int64)
    if len(code) < FEWEST_ITERATIONS * FEWEST_LAUNCHES:
        return None
    patterns = [pattern for mark in _marks(code) if (pattern := _pattern(code, len(names), mark))]
    if not patterns:
        return None
    most = max(pattern.explained for pattern in patterns)
    most_kept = max(
        pattern.kept.sum() for pattern in patterns if pattern.explained >= AS_GOOD * most
    )
    best = min(
        (
            pattern
            for pattern in patterns
            if pattern.kept.sum() == most_kept and pattern.explained >= REGULAR * most
        ),
        key=lambda pattern: pattern.mark[0],
    )
    first = best.mark - _launches_before(code, best.mark[best.kept], best.mark)
    begin, beyond = start[first], np.append(start[first[1:]], 0)
    for number in np.flatnonzero(best.kept & (best.long | (first == first[-1]))):
        rows = slice(first[number], first[number + 1] if number + 1 < len(first) else len(code))
        last = first[number] + _complete(code[rows], best.usual)
        beyond[number] = end[first[number] : last + 1].max()
    return list(zip(begin[best.kept].tolist(), beyond[best.kept].tolist(), strict=True))


@dataclass(frozen=True)
class _Pattern:
    """What lies between two occurrences of a mark.

    Attributes:
        mark: rows of the mark; a stretch runs from one to the next, the last to the end.
        usual: how often each symbol is in an iteration; 0 for what varies (symbols,).
        kept: which stretches hold an iteration (stretches,).
        long: which of them hold more: an evaluation after it, for instance.
        explained: launches that belong to the pattern.
    """

    mark: Ints
    usual: Ints
    kept: Bools
    long: Bools
    explained: int


def _marks(code: Ints) -> list[Ints]:
    """Occurrences (row numbers) of what may stand once in each iteration."""
    candidates: list[Ints] = []
    run = code
    for length in RUNS:
        if length > 1:
            # a run of twice the launches is a pair of runs
            half = length // 2
            pair = run[:-half] * (run.max() + 1) + run[half:]
            run = pd.factorize(pair)[0].astype(np.int64)
        if len(run) < FEWEST_ITERATIONS:
            break
        order = np.argsort(run, kind="stable")
        counts = np.bincount(run)
        pieces = np.split(order, np.cumsum(counts)[:-1])
        enough = (counts >= FEWEST_ITERATIONS) & (counts * FEWEST_LAUNCHES <= len(code))
        candidates += [pieces[number] for number in np.flatnonzero(enough)]
    groups: dict[int, list[Ints]] = {}
    for rows in candidates:
        groups.setdefault(len(rows), []).append(rows)
    weightiest = sorted(groups, key=lambda count: count * len(groups[count]), reverse=True)
    return [
        rows
        for count in weightiest[:MOST_GROUPS]
        for rows in sorted(groups[count], key=lambda rows: rows[0])[:MOST_MARKS]
    ]


def _pattern(code: Ints, symbols: int, mark: Ints) -> _Pattern | None:
    """The pattern between occurrences of a mark; None where there is no regular one."""
    if len(mark) * symbols > MOST_CELLS:
        return None
    stretch = np.repeat(np.arange(len(mark)), np.diff(mark, append=len(code)))
    cells = stretch * symbols + code[mark[0] :]
    table = np.bincount(cells, minlength=len(mark) * symbols).reshape(len(mark), symbols)
    usual = np.median(table, axis=0).astype(np.int64)
    usual[(table == usual).mean(axis=0) < ROUGHLY_REGULAR] = 0
    kept = (table >= usual) @ usual >= ALIKE * usual.sum()
    if kept.sum() < FEWEST_ITERATIONS:
        return None
    exceptions = (table[kept] != usual).sum(axis=0)
    usual[exceptions > max(1, (1 - REGULAR) * kept.sum())] = 0
    if usual.sum() < FEWEST_LAUNCHES:
        return None
    long = kept & ((table > usual) @ usual > (1 - ALIKE) * usual.sum())
    plain = kept & ~long
    plain[-1] = False  # the last stretch has whatever follows the training, too
    if table[plain][:, usual > 0].sum() < EXPLAINED * table[plain].sum():
        return None
    return _Pattern(mark, usual, kept, long, int(np.minimum(table, usual)[kept].sum()))


def _launches_before(code: Ints, kept: Ints, mark: Ints) -> int:
    """How many launches before its mark nearly every iteration has, the first one included."""
    most = min(int(np.diff(mark).min()) - 1, int(mark[0]))
    for back in range(1, most + 1):
        if (code[kept - back] == code[kept[0] - back]).mean() < REGULAR:
            return back - 1
    return most


def _complete(code: Ints, usual: Ints) -> int:
    """The place in a stretch at which its launches have made up the pattern."""
    last = 0
    for symbol in np.flatnonzero(usual):
        places = np.flatnonzero(code == symbol)
        if len(places):
            last = max(last, int(places[min(len(places), usual[symbol]) - 1]))
    return last
