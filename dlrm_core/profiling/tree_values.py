"""Values of a database over its calling-context tree: by thread, metric and scope."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlrm_core.profiling.format4 import DatabaseError
from dlrm_core.profiling.format4_meta import Meta, Metric
from dlrm_core.profiling.format4_tree import ContextTree
from dlrm_core.profiling.format4_values import ThreadProfile
from dlrm_core.profiling.formulas import VARIABLE
from dlrm_core.profiling.metrics import canonical_name

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SELF_ROUNDING = 1e-12
"""Self values below this share of their inclusive value are rounding, and become 0."""


class TreeValues:
    """The values of profiles over a tree, in columns of shape (rows,).

    Attributes:
        path: the database's folder, for messages.
        meta: titles, metrics, modules, files, functions.
        tree: the calling-context tree in columns.
        profiles: the summary of the run (0), then every thread and stream.
    """

    def __init__(self, path: Path, meta: Meta, profiles: list[ThreadProfile]) -> None:
        self.path = path
        self.meta = meta
        self.tree: ContextTree = meta.tree
        self.profiles = profiles
        self._metrics = {metric.name: metric for metric in meta.metrics}
        self._canonical: dict[str, str] = {}
        for name in self._metrics:
            self._canonical.setdefault(canonical_name(name), name)

    @property
    def metrics(self) -> list[Metric]:
        return self.meta.metrics

    def metric(self, name: str) -> Metric:
        """The metric called so here or in another generation of HPCToolkit.

        Raises:
            DatabaseError: there is none; the message lists those there are.
        """
        found = self._metrics.get(name) or self._metrics.get(
            self._canonical.get(canonical_name(name), "")
        )
        if found is None:
            listed = ", ".join(sorted(self._metrics)[:60]) or "none"
            raise DatabaseError(f"{self.path}: no metric '{name}'; it has {listed}")
        return found

    def _ids(self, profile: int) -> dict[tuple[str, str], int]:
        """(metric, scope) to the id of its plain values in a profile."""
        if not self.profiles[profile].summary:
            return {
                (metric.name, scope): number
                for metric in self.metrics
                for scope, number in metric.scopes.items()
            }
        return {
            (metric.name, statistic.scope): statistic.metric_id
            for metric in self.metrics
            for statistic in metric.statistics
            if statistic.combine == "sum" and statistic.formula == VARIABLE
        }

    def column(self, metric: str, scope: str = "", profile: int = 0) -> Floats:
        """Values of a metric over the tree, 0 where a context has none; shape (rows,).

        Args:
            metric: any generation's name.
            scope: ``point``, ``function``, ``lex_aware``, ``execution`` (the default).
            profile: row of ``profiles``; 0 sums over all threads.

        Raises:
            DatabaseError: no such metric, scope or profile, or its values are damaged.
        """
        if not 0 <= profile < len(self.profiles):
            raise DatabaseError(f"{self.path}: no profile {profile}, it has {len(self.profiles)}")
        found = self.metric(metric)
        scope = scope or self.meta.inclusive_scope
        number = self._ids(profile).get((found.name, scope))
        if number is None:
            raise DatabaseError(
                f"{self.path}: metric '{found.name}' has no scope '{scope}'; "
                f"it has {', '.join(found.scopes)}"
            )
        return self._dense(profile, number)

    def matrix(self, metrics: Sequence[str], scope: str = "", profile: int = 0) -> Floats:
        """``column`` for several metrics, in one pass; shape (metrics, rows).

        Raises:
            DatabaseError: as ``column``.
        """
        ids = self._ids(profile)
        scope = scope or self.meta.inclusive_scope
        target = np.full(65536, -1, np.int64)
        for i, name in enumerate(metrics):
            number = ids.get((self.metric(name).name, scope))
            if number is None:
                raise DatabaseError(f"{self.path}: metric '{name}' has no scope '{scope}'")
            target[number] = i
        source = self.profiles[profile]
        rows = self.tree.rows(source.contexts)
        # One column more, for what is not asked for and what is outside the tree.
        result = np.zeros((len(metrics) + 1, len(self.tree)))
        for start, metric, value in source.chunks():
            row = rows[source.places(start, len(metric))]
            result[np.where(row >= 0, target[metric], -1), row] = value
        return result[:-1]

    def _dense(self, profile: int, number: int) -> Floats:
        contexts, values = self.profiles[profile].select(number)
        rows = self.tree.rows(contexts)
        inside = rows >= 0
        column = np.zeros(len(self.tree))
        column[rows[inside]] = values[inside]
        return column

    def self_column(self, metric: str, profile: int = 0) -> Floats:
        """Self values of a metric over the tree; they add up to ``column(metric)[0]``.

        Raises:
            DatabaseError: as ``column``.
        """
        return self.self_of(self.column(metric, profile=profile))

    def self_of(self, inclusive: Floats) -> Floats:
        """Self values from inclusive ones, both of shape (rows,)."""
        below = np.bincount(self.tree.parent[1:], inclusive[1:], minlength=len(inclusive))
        own = inclusive - below
        own[np.abs(own) <= SELF_ROUNDING * np.abs(inclusive)] = 0.0
        return own

    def inclusive_values(self, profile: int) -> tuple[Ints, Ints, Floats]:
        """(metric index, row, inclusive value) of all metrics in a profile's tree, sparse.

        Metric indices count ``metrics``. Sorted by metric, then row.

        Raises:
            DatabaseError: its values are damaged.
        """
        scope = self.meta.inclusive_scope
        values = self.profiles[profile].values()
        index_of = np.full(65536, -1, np.int64)
        order = {metric.name: i for i, metric in enumerate(self.metrics)}
        for (name, of_scope), number in self._ids(profile).items():
            if of_scope == scope:
                index_of[number] = order[name]
        index, rows = index_of[values.metric], self.tree.rows(values.context)
        keep = (index >= 0) & (rows >= 0)
        index, rows, value = index[keep], rows[keep], values.value[keep]
        sort = np.lexsort((rows, index))
        return index[sort], rows[sort], value[sort]

    def self_values(self, profile: int) -> tuple[Ints, Ints, Floats]:
        """(metric index, row, self value) of all metrics in a profile's tree, sparse.

        Raises:
            DatabaseError: its values are damaged.
        """
        return self.self_of_sparse(*self.inclusive_values(profile))

    def self_of_sparse(self, index: Ints, rows: Ints, value: Floats) -> tuple[Ints, Ints, Floats]:
        """Self values from inclusive ones, as ``inclusive_values`` gives them."""
        size = len(self.tree)
        key = index * size + rows
        above = self.tree.parent[rows]
        has_parent = above >= 0
        # Each value counts for its row and against its parent.
        all_keys = np.concatenate([key, (index * size + above)[has_parent]])
        keys, place = np.unique(all_keys, return_inverse=True)
        parts = np.concatenate([value, -value[has_parent]])
        own: Floats = np.bincount(place, parts, minlength=len(keys)).astype(np.float64)
        scale = np.bincount(place[: len(key)], np.abs(value), minlength=len(keys))
        keep = np.abs(own) > SELF_ROUNDING * scale
        return keys[keep] // size, keys[keep] % size, own[keep]

    def root(self, profile: int = 0) -> dict[str, float]:
        """Metric to its inclusive value over the whole tree; only metrics with a value."""
        at_root = self.profiles[profile].at(0)
        scope = self.meta.inclusive_scope
        return {
            name: at_root[number]
            for (name, of_scope), number in self._ids(profile).items()
            if of_scope == scope and number in at_root
        }
