"""The call trees of two runs laid over each other: where the time went, or came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import PART, iteration_count, step_contexts
from dlrm_workbook.analysis.compare import part_estimates
from dlrm_workbook.analysis.operators import SMALL
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive

TREE_COLUMNS = [
    *("id", "parent", "label", "kind", "component", "phase"),
    *("before_ms", "after_ms", "difference_ms", "self_before_ms", "self_after_ms"),
]
ROOT = "step"
"""Label of the root over both trees."""

SMALLEST_SHARE = 0.002
"""Share of the longer step below which nodes are joined, if it is so in both runs."""


def difference_tree(before: Profile, after: Profile) -> pd.DataFrame:
    """The union of two call trees with the time of each node in both, parents first.

    Nodes are the same if their path of names is: input shapes, lines and addresses do not
    count, so that runs of other sizes lie over each other. Trees of different profilers have
    little but the parts in common: they are cut off below those, and the CPU time of a part is
    the one that the table of parts has. Nodes that hold less than
    :data:`SMALLEST_SHARE` are joined, parent by parent. Times are the GPU's where both runs
    used one, else the CPU's. Empty if either lacks them.

    ``attrs["sampled"]``: whether times before, and after, are counted samples, so that a node
    without any may have run all the same.
    """
    on_gpu = before.has("gpu_time_ms") and after.has("gpu_time_ms")
    metric = "gpu_time_ms" if on_gpu else "cpu_time_ms"
    if not (before.has(metric) and after.has(metric)):
        return pd.DataFrame(columns=TREE_COLUMNS)
    by_part = before.meta.get("engine") != after.meta.get("engine")
    sides = [_paths(profile, metric, by_part) for profile in (before, after)]
    tree = _pruned(_union(sides))
    tree.attrs["sampled"] = tuple(
        profile.meta.get("engine") == "hpctoolkit" and metric == "cpu_time_ms"
        for profile in (before, after)
    )
    return tree


def _paths(profile: Profile, metric: str, by_part: bool) -> pd.DataFrame:
    """Contexts of the step with time, callers first. Returns ``name``, ``kind``, ``component``,
    ``phase``, ``above`` (index of the caller; −1 above the root), ``self_ms``. Iterations and
    threads are one root: which one it was does not matter."""
    if by_part and metric == "cpu_time_ms":
        return _by_part(part_estimates(profile).rename(columns={"time_ms": "self_ms"}))
    self_ms = profile.value_table(metric).to_numpy() / iteration_count(profile)
    within = step_contexts(profile, other_threads=False)
    parent = profile.contexts["parent"].to_numpy()
    top = within & ((parent < 0) | ~within[np.maximum(parent, 0)])
    table = profile.contexts[["name", "kind", *PART]].assign(
        above=np.where(within & ~top, parent, -1), self_ms=np.where(within, self_ms, 0.0)
    )
    if by_part:
        return _by_part(table[within])
    table.loc[top, ["name", "kind"]] = ROOT, "root"
    total = inclusive_from_exclusive(table["above"].to_numpy(), table["self_ms"].to_numpy())
    return table[within & (total > 0)]


def _by_part(table: pd.DataFrame) -> pd.DataFrame:
    """The parts alone, below a root without time of its own."""
    parts = table[table["self_ms"] > 0].groupby(PART, as_index=False)["self_ms"].sum()
    names = (parts["component"] + " " + parts["phase"]).str.strip()
    parts = parts.assign(above=0, kind="annotation", name=names)
    root = {"name": ROOT, "kind": "root", "component": "other", "phase": "", "above": -1}
    return pd.concat([pd.DataFrame([root | {"self_ms": 0.0}]), parts], ignore_index=True)


def _union(sides: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One node for each path of names, callers first, with the time of both sides."""
    nodes: dict[tuple[int, str, str], int] = {}
    parts: list[tuple[str, str]] = []
    self_ms: list[list[float]] = []
    for number, side in enumerate(sides):
        node_of = {-1: -1}
        columns = ["above", "name", "kind", "component", "phase", "self_ms"]
        for row, above, name, kind, *part, time_ms in side[columns].itertuples(name=None):
            node = nodes.setdefault((node_of[above], name, kind), len(nodes))
            if node == len(parts):
                parts.append((part[0], part[1]))
                self_ms.append([0.0, 0.0])
            self_ms[node][number] += time_ms
            node_of[row] = node
    table = pd.DataFrame(list(nodes), columns=["above", "name", "kind"])
    table[PART] = pd.DataFrame(parts, columns=PART)
    table[["self_before_ms", "self_after_ms"]] = np.array(self_ms).reshape(-1, 2)
    above = table["above"].to_numpy(dtype=np.int64)
    for name in ("before_ms", "after_ms"):
        table[name] = inclusive_from_exclusive(above, table[f"self_{name}"].to_numpy())
    return table


def _pruned(table: pd.DataFrame) -> pd.DataFrame:
    if table.empty:
        return pd.DataFrame(columns=TREE_COLUMNS)
    largest = table[["before_ms", "after_ms"]].max(axis=1).to_numpy()
    above = table["above"].to_numpy()
    shown = (above < 0) | (largest >= SMALLEST_SHARE * largest[above < 0].max())
    table["id"] = np.arange(len(table)).astype(str)
    table["parent"] = np.where(above < 0, "", above.astype(str))
    table = table.rename(columns={"name": "label"})
    hidden = ~shown & shown[np.maximum(above, 0)]
    rest = table[hidden].groupby("parent")[["before_ms", "after_ms"]].sum()
    small = table.iloc[rest.index.astype(int)].assign(parent=rest.index, label=SMALL, kind="")
    small["id"] = "small-" + small["parent"]
    times = ["before_ms", "after_ms", "self_before_ms", "self_after_ms"]
    small[times] = rest[["before_ms", "after_ms"] * 2].to_numpy()
    table = pd.concat([table[shown], small], ignore_index=True)
    table["difference_ms"] = table["after_ms"] - table["before_ms"]
    return table[TREE_COLUMNS]


def largest_changes(tree: pd.DataFrame) -> pd.DataFrame:
    """The 20 nodes whose own time changed most, with the path that leads to them.

    Own time, without callees: so that one cause is one row and not its callers as well. Nodes of
    one run only are ``new`` or ``gone``; a call of that part that the other run has under another
    caller is not. What a sampled run has no sample of is NaN: it may have run all the same.
    A tree that is empty is given back, with its reason.
    """
    if tree.empty:
        return tree
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
        self_ms = [row["self_before_ms"], row["self_after_ms"]]
        if lacks is not None:
            self_ms[lacks] = np.nan
        rows.append((path[::-1], *names, *self_ms, self_ms[1] - self_ms[0], state))
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
