"""The call trees of two runs laid over each other: where the time went, or came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import PART, iteration_count, step_contexts
from dlrm_workbook.analysis.compare import part_estimates
from dlrm_workbook.analysis.operators import SMALL
from dlrm_workbook.recordings.profile import Profile, depths, inclusive_from_exclusive

COLUMNS = [
    *("id", "parent", "label", "kind", "component", "phase"),
    *("before_ms", "after_ms", "difference_ms", "self_before_ms", "self_after_ms"),
]
WHOLE = "step"
"""Label of the root over both trees."""


SMALLEST_SHARE = 0.002
"""Share of the longer step below which nodes are joined, if it is so in both runs."""


def difference_tree(before: Profile, after: Profile) -> pd.DataFrame:
    """The union of two call trees with the time of each node in both.

    Nodes are the same if their path of names is: input shapes, lines and addresses do not
    count, so that runs of other sizes lie over each other. Trees of different profilers have
    little but the parts in common: they are cut off below those, and the CPU time of a part is
    the one that the table of parts has. Nodes that hold less than
    :data:`SMALLEST_SHARE` are joined, parent by parent. Times are the GPU's where both runs
    used one, else the CPU's.

    Returns:
        ``id`` and ``parent`` (str, "" above the root), ``label``, ``kind``, ``component``,
        ``phase``, ``before_ms``, ``after_ms``, ``difference_ms`` (inclusive, a mean
        iteration), ``self_before_ms``, ``self_after_ms``; parents first. Empty if either
        lacks them. ``attrs["sampled"]``: whether times before, and after, are counted
        samples, so that a node without any may have run all the same.
    """
    on_gpu = before.has("gpu_time_ms") and after.has("gpu_time_ms")
    metric = "gpu_time_ms" if on_gpu else "cpu_time_ms"
    if not (before.has(metric) and after.has(metric)):
        return pd.DataFrame(columns=COLUMNS)
    by_part = before.meta.get("engine") != after.meta.get("engine")
    sides = [_paths(profile, metric, by_part) for profile in (before, after)]
    tree = _pruned(_union(sides))
    tree.attrs["sampled"] = tuple(
        profile.meta.get("engine") == "hpctoolkit" and metric == "cpu_time_ms"
        for profile in (before, after)
    )
    return tree


def _paths(profile: Profile, metric: str, by_part: bool) -> pd.DataFrame:
    """Contexts of the step with time: ``depth``, ``above`` (row), ``name`` and so on, ``self``."""
    if by_part and metric == "cpu_time_ms":
        return _by_part(part_estimates(profile).rename(columns={"time_ms": "self"}))
    own = profile.value_table(metric).to_numpy() / iteration_count(profile)
    within = step_contexts(profile, other_threads=False)
    parent = profile.contexts["parent"].to_numpy()
    top = within & ((parent < 0) | ~within[np.maximum(parent, 0)])
    table = profile.contexts[["name", "kind", *PART]].copy()
    table["above"] = np.where(within & ~top, parent, -1)
    table["self"] = np.where(within, own, 0.0)
    if by_part:
        return _by_part(table[within])
    # iterations and threads are one node: which one it was does not matter here
    table["name"] = np.where(top, WHOLE, table["name"])
    table["kind"] = np.where(top, "root", table["kind"])
    table["total"] = inclusive_from_exclusive(table["above"].to_numpy(), table["self"].to_numpy())
    rows = np.flatnonzero(within & (table["total"] > 0).to_numpy())
    # the last place is for −1, above the roots
    row = np.full(len(table) + 1, -1)
    row[rows] = np.arange(len(rows))
    table = table.iloc[rows].assign(above=row[table["above"].to_numpy()[rows]])
    return table.assign(depth=depths(table["above"].to_numpy())).reset_index(drop=True)


def _by_part(table: pd.DataFrame) -> pd.DataFrame:
    """The parts alone, each a tree of one node."""
    kept = table[table["self"] > 0]
    parts = kept.groupby(PART, as_index=False)["self"].sum()
    names = (parts["component"] + " " + parts["phase"]).str.strip()
    return parts.assign(above=-1, kind="annotation", name=names, depth=0)


def _union(sides: list[pd.DataFrame]) -> pd.DataFrame:
    """One node a path; level by level, so that deep trees need no recursion."""
    nodes: list[pd.DataFrame] = []
    count = 0
    place = [np.full(len(side), -1) for side in sides]
    deepest = max((int(side["depth"].max()) for side in sides if len(side)), default=-1)
    for level in range(deepest + 1):
        pieces = []
        for number, side in enumerate(sides):
            rows = np.flatnonzero(side["depth"].to_numpy() == level)
            above = side["above"].to_numpy()[rows]
            found = side.iloc[rows].assign(
                node_above=np.where(above >= 0, place[number][above], -1), side=number, row=rows
            )
            pieces.append(found)
        together = pd.concat(pieces, ignore_index=True)
        keys = together.groupby(["node_above", "name", "kind"], sort=False).ngroup().to_numpy()
        together["node"] = keys + count
        for number in range(len(sides)):
            of = together[together["side"] == number]
            place[number][of["row"].to_numpy()] = of["node"].to_numpy()
        first = together.groupby("node", sort=True).first()
        for number, column in enumerate(("self_before_ms", "self_after_ms")):
            of = together[together["side"] == number]
            first[column] = of.groupby("node")["self"].sum().reindex(first.index).fillna(0.0)
        nodes.append(first.reset_index())
        count += len(first)
    if not nodes:
        return pd.DataFrame(columns=[*COLUMNS, "above"])
    table = pd.concat(nodes, ignore_index=True)
    table["above"] = table["node_above"].astype(int)
    table = _one_root(table)
    for name in ("before_ms", "after_ms"):
        own = table[f"self_{name}"].to_numpy()
        table[name] = inclusive_from_exclusive(table["above"].to_numpy(), own)
    return table


def _one_root(table: pd.DataFrame) -> pd.DataFrame:
    """The same nodes under one root, whatever the step was in each run."""
    if table["above"].eq(-1).sum() == 1:
        return table
    root = {"name": WHOLE, "kind": "root", "component": "other", "phase": "", "above": -1}
    root |= {"self_before_ms": 0.0, "self_after_ms": 0.0}
    below = table.assign(above=table["above"] + 1)
    return pd.concat([pd.DataFrame([root]), below], ignore_index=True)


def _pruned(table: pd.DataFrame) -> pd.DataFrame:
    if table.empty:
        return pd.DataFrame(columns=COLUMNS)
    largest = table[["before_ms", "after_ms"]].max(axis=1).to_numpy()
    above = table["above"].to_numpy()
    shown = (above < 0) | (largest >= SMALLEST_SHARE * largest[above < 0].max())
    table["id"] = np.arange(len(table)).astype(str)
    table["parent"] = np.where(above < 0, "", above.astype(str))
    table = table.rename(columns={"name": "label"})
    hidden = ~shown & shown[np.maximum(above, 0)]
    rest = table[hidden].groupby("parent", as_index=False)[["before_ms", "after_ms"]].sum()
    owner = table.iloc[rest["parent"].astype(int)]
    small = rest.assign(
        id="small-" + rest["parent"],
        label=SMALL,
        kind="",
        component=owner["component"].to_numpy(),
        phase=owner["phase"].to_numpy(),
        self_before_ms=rest["before_ms"],
        self_after_ms=rest["after_ms"],
    )
    table = pd.concat([table[shown], small], ignore_index=True)
    table["difference_ms"] = table["after_ms"] - table["before_ms"]
    return table[COLUMNS]


def largest_changes(tree: pd.DataFrame) -> pd.DataFrame:
    """The 20 nodes whose own time changed most, with the path that leads to them.

    Own time, without callees: so that one cause is one row and not its callers as well.

    Returns:
        ``path`` (list of labels from below the root), ``label``, ``component``, ``phase``,
        ``before_ms``, ``after_ms``, ``difference_ms`` (own time), ``state`` (of nodes of one
        run only ``new`` and ``gone``, or, where the other run has the call of that part under
        another caller, ``other caller before``/``after``; else ""); largest change first. Where
        the other run is sampled it is ``no samples before``/``after``, and what has none
        is NaN: it may have run all the same.
    """
    label = dict(zip(tree["id"], tree["label"], strict=True))
    above = dict(zip(tree["id"], tree["parent"], strict=True))
    table = tree.assign(change=(tree["self_after_ms"] - tree["self_before_ms"]).abs())
    table = table[table["change"] > 0].sort_values("change", ascending=False).head(20)
    sampled = tree.attrs.get("sampled", (False, False))
    elsewhere = [
        set(tree.loc[tree[side] > 0, _CALL].itertuples(index=False, name=None))
        for side in ("before_ms", "after_ms")
    ]
    rows = []
    for row in table.to_dict("records"):
        path, at = [], str(row["id"])
        while above[at]:
            path.append(label[at])
            at = above[at]
        names = (row["label"], row["component"], row["phase"])
        state, lacks = _state(row, sampled, elsewhere)
        own = [row["self_before_ms"], row["self_after_ms"]]
        if lacks is not None:
            own[lacks] = np.nan
        rows.append((path[::-1], *names, *own, own[1] - own[0], state))
    columns = ["path", *_CALL, "before_ms", "after_ms", "difference_ms", "state"]
    return pd.DataFrame(rows, columns=columns)


_CALL = ["label", *PART]
"""What a call is, whoever calls it."""


def _state(
    row: Mapping[Any, Any], sampled: Sequence[bool], elsewhere: Sequence[set[Any]]
) -> tuple[str, int | None]:
    """What is to be said of a node, and which run (0, 1) tells nothing of it; None: both do."""
    for run, (side, word) in enumerate((("before", "new"), ("after", "gone"))):
        if row[f"{side}_ms"] != 0:
            continue
        if sampled[run]:
            return f"no samples {side}", run
        if row["label"] != SMALL and tuple(row[name] for name in _CALL) in elsewhere[run]:
            return f"other caller {side}", None
        return word, None
    return "", None
