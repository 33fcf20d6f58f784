"""The three classic views of a calling-context tree: top-down, bottom-up and flat.

They serve any profile and any additive metric: seconds, launches, bytes, warp-cycles.
Top-down follows the calls, CPU and GPU in one tree; bottom-up starts from the functions
that hold the metric themselves and asks who calls them; flat sums over all calls.

A function that calls itself is counted once: inclusive values are those of its outermost
calls, exclusive values of all its calls. So exclusive values of the flat and of the
bottom-up view add up to the root, whatever recurses. The names are those of HPCToolkit's
viewer (user's manual, chapter "hpcviewer"), and so is the hot path's threshold.

Values are in the metric's unit (``attrs["unit"]``), summed over all threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.context_tree import outermost_contexts, scopes_of, unmeasured
from dlrm_workbook.ground.arrays import Bools, Floats, Ints
from dlrm_workbook.recordings.profile import Profile, depths, inclusive_from_exclusive, nearest

HOT = 0.5
"""The hot path goes on to a callee that holds at least this share of its caller."""

PLACE = ["kind", "name", "file", "line", "module", "component", "phase"]
TOP_DOWN = ["context", "parent", "depth", *PLACE, "inclusive", "exclusive", "small", "share", "hot"]
FUNCTION_COLUMNS = ["name", "kind", "file", "module"]
BOTTOM_UP = ["id", "parent", "depth", *FUNCTION_COLUMNS, "exclusive", "inclusive", "share"]
FLAT_COLUMNS: dict[str, list[str]] = {
    "function": FUNCTION_COLUMNS,
    "file": ["file"],
    "module": ["module"],
    "line": ["file", "line"],
}
VALUES = ["exclusive", "inclusive", "share", "inclusive_share"]


def top_down(
    profile: Profile,
    metric: str = "cpu_time_ms",
    *,
    also: Sequence[str] = (),
    smallest_share: float = 0.01,
    within: Bools | None = None,
) -> pd.DataFrame:
    """The call tree as rows, callers before callees, the largest callee first.

    Lines, loops and instructions are joined to the function that they lie in; parents and depths
    are as shown. ``exclusive + small`` add up to the whole. Empty, with the reason in
    ``attrs["not_measured"]``, if ``metric`` was not measured.

    Args:
        metric: additive, with inclusive values.
        also: further metrics, whose inclusive values come as columns ``x (inc)``. A
            context stays if any metric has ``smallest_share`` there: so GPU time is seen
            below the CPU frames that launched it, even where those took no time.
        smallest_share: of the whole; smaller contexts join their caller's ``small``.
            Threads are always shown.
        within: (contexts,) bool, the contexts that count, for example
            ``attribution.step_contexts(profile)``; all if None.
    """
    columns = [*TOP_DOWN, *(f"{name} (inc)" for name in also)]
    exclusive, inclusive = _values(profile, metric, within)
    if exclusive is None:
        return _unmeasured(columns, profile, metric)
    if inclusive is None:
        return unmeasured(columns, f"{metric} of a caller is not the sum over its callees")
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    owner = scopes_of(contexts)
    joined = owner != np.arange(len(owner))
    above = np.where(parent >= 0, owner[parent], -1)
    above[joined] = -1
    exclusive = np.bincount(owner, exclusive, len(owner)).astype(np.float64)
    others = {}
    for name in also:
        whole = _values(profile, name, within)[1]
        others[f"{name} (inc)"] = np.full(len(exclusive), np.nan) if whole is None else whole
    root = ~joined & (above < 0)
    shown = np.zeros(len(exclusive), dtype=bool)
    for column in (inclusive, *others.values()):
        least = smallest_share * np.nansum(np.abs(column[root]))
        shown |= (np.abs(column) >= np.where(root, 0, least)) & (column != 0) & ~np.isnan(column)
    shown &= ~joined
    # A callee's share is at most its caller's, so what is shown hangs together.
    hidden = ~joined & ~shown & (above >= 0)
    hidden[hidden] = shown[above[hidden]]
    small = np.bincount(above[hidden], inclusive[hidden], len(exclusive))
    rows = _walk(np.flatnonzero(shown), above, inclusive)
    total = inclusive[root].sum()
    table = contexts.loc[rows, ["context", *PLACE]].assign(
        parent=above[rows],
        depth=depths(above)[rows],
        inclusive=inclusive[rows],
        exclusive=exclusive[rows],
        small=small[rows],
        share=inclusive[rows] / total if total else np.nan,
        hot=_hot_path(rows, above, inclusive)[rows],
        **{name: column[rows] for name, column in others.items()},
    )
    return _described(table[columns].reset_index(drop=True), profile, metric, total)


LINK_SHARE = 0.999
"""A callee with this share of its caller is the next link of a chain of calls."""


def folded(view: pd.DataFrame, most: int = 40) -> pd.DataFrame:
    """The largest rows of :func:`top_down`, chains of calls that only hand on in one row. ``view``
    is what :func:`top_down` gives; at ``most`` so many rows are kept, those with the most time, in
    their order."""
    if view.empty:
        return view
    callees = view["parent"].value_counts()
    value = dict(zip(view["context"], view["inclusive"], strict=True))
    part = dict(zip(view["context"], view["component"] + "/" + view["phase"], strict=True))
    rows = list(zip(view["context"].tolist(), view["parent"].tolist(), strict=True))
    links = {
        context
        for context, parent in rows
        if callees[parent] == 1
        and value.get(parent, np.inf) * LINK_SHARE <= value[context]
        and part[parent] == part[context]
    }
    # the last link of a chain stays: it is where the calls part again, or end
    inner = links & {parent for context, parent in rows if context in links}
    level: dict[int, int] = {}
    before: dict[int, int] = {}
    for context, parent in rows:
        is_inner = context in inner
        level[context] = level.get(parent, -1) + (not is_inner)
        before[context] = before.get(parent, 0) + 1 if is_inner else 0
    passed = [0 if context in inner else before.get(parent, 0) for context, parent in rows]
    table = view.assign(level=[level[context] for context, _ in rows], folded=passed)
    table = table[[context not in inner for context, _ in rows]]
    # a callee has at most its caller's time: no row stays without its caller
    kept = table["inclusive"].sort_values(ascending=False, kind="stable").index[:most]
    return table.loc[sorted(kept)]


def bottom_up(
    profile: Profile,
    metric: str = "cpu_time_ms",
    count: int = 20,
    *,
    callers: int = 4,
    smallest_share: float = 0.05,
    within: Bools | None = None,
) -> pd.DataFrame:
    """Functions by their exclusive value, each with the callers it comes through.

    In a caller's row the values are the function's, as far as it was called that way; callers of
    one row add up to it at most (a function at the top of a thread has none). ``inclusive`` is NaN
    for metrics without inclusive values. Empty, with the reason in ``attrs["not_measured"]``, if
    ``metric`` was not measured.

    Args:
        count: how many functions, the largest first.
        callers: how many levels of callers below each.
        smallest_share: of the function's exclusive value; callers below it are left out.
        within: as for :func:`top_down`.
    """
    exclusive, inclusive = _values(profile, metric, within)
    if exclusive is None:
        return _unmeasured(BOTTOM_UP, profile, metric)
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    scope = scopes_of(contexts)
    key, first = _numbered(contexts, FLAT_COLUMNS["function"])
    key = key[scope]
    exclusive = np.bincount(scope, exclusive, len(scope)).astype(np.float64)
    is_scope = scope == np.arange(len(scope))
    reached = np.zeros(len(exclusive))
    if inclusive is not None:
        reached = np.where(outermost_contexts(parent, np.where(is_scope, key, -1)), inclusive, 0.0)
    total = exclusive.sum()
    by_key = np.bincount(key, exclusive, len(first))
    largest = np.argsort(-by_key, kind="stable")[:count]
    largest = largest[by_key[largest] != 0]
    rank = np.full(len(first), -1)
    rank[largest] = np.arange(len(largest))

    at = np.flatnonzero(((exclusive != 0) | (reached != 0)) & (rank[key] >= 0))
    chain = rank[key[at]]  # the row of the table that a context belongs to, level by level
    levels = [
        _level(0, -np.ones(len(largest), np.int64), largest, chain, exclusive[at], reached[at])
    ]
    offset, caller = len(largest), at
    function = np.arange(len(largest))  # that each row of the table is of
    top = contexts["kind"].eq("root").to_numpy()
    for depth in range(1, callers + 1):
        over = parent[caller]
        # The root over all threads calls nobody.
        called = (over >= 0) & ~top[np.maximum(over, 0)]
        at, chain, caller = at[called], chain[called], scope[over[called]]
        if not len(at):
            break
        pair = chain * len(first) + key[caller]
        pairs, number = np.unique(pair, return_inverse=True)
        level = _level(
            depth, pairs // len(first), pairs % len(first), number, exclusive[at], reached[at]
        )
        of_level = function[level["parent"].to_numpy()]
        whole = by_key[largest[of_level]]
        keep = np.abs(level["exclusive"].to_numpy()) >= smallest_share * np.abs(whole)
        renumbered = np.where(keep, offset + np.cumsum(keep) - 1, -1)
        chain = renumbered[number]
        going = chain >= 0
        at, chain, caller = at[going], chain[going], caller[going]
        levels.append(level[keep])
        function = np.append(function, of_level[keep])
        offset += int(keep.sum())
    table = pd.concat(levels, ignore_index=True)
    table.insert(0, "id", np.arange(len(table)))
    names = contexts.loc[first[table.pop("key")], FUNCTION_COLUMNS].reset_index(drop=True)
    table = pd.concat([table, names], axis=1)
    table["share"] = table["exclusive"] / total if total else np.nan
    if inclusive is None:
        table["inclusive"] = np.nan
    order = _walk(table["id"].to_numpy(), table["parent"].to_numpy(), table["exclusive"].to_numpy())
    table = table[BOTTOM_UP].iloc[order].reset_index(drop=True)
    return _described(table, profile, metric, total)


def flat(
    profile: Profile,
    metric: str = "cpu_time_ms",
    by: str = "function",
    *,
    within: Bools | None = None,
) -> pd.DataFrame:
    """Values summed over all call paths, by function, file, module or source line.

    The largest exclusive value comes first. File and module are "" (line 0) where they are not
    known; ``inclusive`` is NaN for metrics without inclusive values. Empty, with the reason in
    ``attrs["not_measured"]``, if ``metric`` was not measured. Values are ``by`` ``function``,
    ``file``, ``module`` or ``line``, an InputError refuses others; ``within`` is as for
    :func:`top_down`.
    """
    if by not in FLAT_COLUMNS:
        raise InputError(f"a flat view is by {', '.join(FLAT_COLUMNS)}, not by '{by}'")
    exclusive, inclusive = _values(profile, metric, within)
    if exclusive is None:
        return _unmeasured([*FLAT_COLUMNS[by], *VALUES], profile, metric)
    contexts = profile.contexts
    scope = scopes_of(contexts)
    where = scope if by in ("function", "module") else _source(contexts)
    key, first = _numbered(contexts, FLAT_COLUMNS[by])
    key = key[where]
    table = contexts.loc[first, FLAT_COLUMNS[by]].reset_index(drop=True)
    table["exclusive"] = np.bincount(key, exclusive, len(first))
    table["inclusive"] = np.nan
    whole = exclusive.sum()
    if inclusive is not None:
        # A thread is no function and lies in no file: it only holds what runs on it.
        inside = ~contexts["kind"].isin(["root", "thread"]).to_numpy()
        once = outermost_contexts(contexts["parent"].to_numpy(), np.where(inside, key, -1))
        table["inclusive"] = np.bincount(key[once], inclusive[once], len(first))
    table["share"] = table["exclusive"] / whole if whole else np.nan
    table["inclusive_share"] = table["inclusive"] / whole if whole else np.nan
    table = table[table["exclusive"].ne(0) | table["inclusive"].fillna(0).ne(0)]
    table = table.sort_values(["exclusive", "inclusive"], ascending=False, ignore_index=True)
    return _described(table, profile, metric, whole)


def _values(
    profile: Profile, metric: str, within: Bools | None
) -> tuple[Floats | None, Floats | None]:
    """(exclusive, inclusive) of every context (n,); None for what was not measured."""
    if not profile.has(metric):
        return None, None
    exclusive = profile.value_table(metric).to_numpy()
    inclusive = profile.value_table(metric, "inclusive").to_numpy()
    if within is not None:
        exclusive = np.where(within, exclusive, 0.0)
        inclusive = inclusive_from_exclusive(profile.contexts["parent"].to_numpy(), exclusive)
    return exclusive, inclusive if profile.rows(metric, "inclusive").any() else None


def _unmeasured(columns: list[str], profile: Profile, metric: str) -> pd.DataFrame:
    return unmeasured(columns, f"this profile has no values of '{metric}'", profile, metric)


def _described(table: pd.DataFrame, profile: Profile, metric: str, total: float) -> pd.DataFrame:
    row = profile.metrics[profile.metrics["metric"] == metric].iloc[0]
    table.attrs |= {"metric": metric, "unit": row["unit"], "meaning": row["meaning"]}
    table.attrs["total"] = float(total)
    return table


def _source(contexts: pd.DataFrame) -> Ints:
    """The context (n,) whose file and line say where each context is in the sources."""
    has = contexts["kind"].ne("instruction").to_numpy() | contexts["file"].ne("").to_numpy()
    source = nearest(contexts["parent"].to_numpy(), has)
    return np.where(source < 0, np.arange(len(source)), source)


def _numbered(contexts: pd.DataFrame, columns: list[str]) -> tuple[Ints, Ints]:
    """(number of each context's group, first context of each group)."""
    # kind is shown, but two kinds of one function are still one function
    keys = [name for name in columns if name != "kind"]
    number = np.zeros(len(contexts), dtype=np.int64)
    for name in keys:
        codes, values = pd.factorize(contexts[name])
        number = pd.factorize(number * max(len(values), 1) + codes)[0].astype(np.int64)
    return number, np.unique(number, return_index=True)[1].astype(np.int64)


def _walk(rows: Ints, parent: Ints, value: Floats) -> Ints:
    """``rows`` reordered: callers before callees, of callees the largest value first."""
    ordered = rows[np.argsort(-value[rows], kind="stable")].tolist()
    above = parent[ordered].tolist()
    listed = set(ordered)
    children: dict[int, list[int]] = {}
    for row, over in zip(ordered, above, strict=True):
        children.setdefault(over if over in listed else -1, []).append(row)
    result: list[int] = []
    stack = children.get(-1, [])[::-1]
    while stack:
        row = stack.pop()
        result.append(row)
        stack += children.get(row, [])[::-1]
    return np.array(result, dtype=np.int64)


def _hot_path(rows: Ints, above: Ints, inclusive: Floats) -> Bools:
    """Which contexts (n,) are on the hot path; ``rows`` as :func:`_walk` orders them."""
    hot = np.zeros(len(above), dtype=bool)
    last = -1
    for row in rows.tolist():
        # The first callee after its caller is its largest.
        if last < 0 or (above[row] == last and inclusive[row] >= HOT * inclusive[last]):
            hot[row] = True
            last = row
        elif above[row] == last:
            break
    return hot


def _level(
    depth: int, parent: Ints, key: Ints, number: Ints, exclusive: Floats, reached: Floats
) -> pd.DataFrame:
    """Rows of one depth of the bottom-up view."""
    return pd.DataFrame(
        {
            "depth": depth,
            "parent": parent,
            "key": key,
            "exclusive": np.bincount(number, exclusive, len(key)),
            "inclusive": np.bincount(number, reached, len(key)),
        }
    )
