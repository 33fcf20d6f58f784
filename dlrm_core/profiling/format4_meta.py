"""``meta.db``: metrics, modules, files, functions and the calling-context tree.

The tree is found by one iterative walk over the children arrays (they hold
records of different lengths, so each tells where the next begins); all fields
are then gathered at once with numpy. Trees of any depth and width cost the same
per context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_core.profiling import format4 as f4
from dlrm_core.profiling.format4_tree import (
    ContextTree,
    Ints,
    enumerated,
    read_tree,
)

META_SECTIONS = (
    "General",
    "IdNames",
    "Metrics",
    "Context",
    "Strings",
    "Modules",
    "Files",
    "Functions",
)
LEXICAL_TYPES = ("function", "loop", "line", "instruction")
RELATIONS = ("lexical", "call", "inlined_call")
SCOPE_TYPES = ("custom", "point", "execution", "transitive")
COMBINE = ("sum", "min", "max")


@dataclass(frozen=True)
class Statistic:
    """A summary statistic of the summary profile: ``combine`` over threads of ``formula``."""

    scope: str
    formula: str
    combine: str
    metric_id: int


@dataclass(frozen=True)
class Metric:
    """A metric as the database names it.

    Attributes:
        name: for instance ``CPUTIME (sec)``.
        scopes: propagation scope to the id of its values in thread profiles.
        statistics: what the summary profile holds of it.
    """

    name: str
    scopes: dict[str, int]
    statistics: tuple[Statistic, ...]


@dataclass(frozen=True)
class Function:
    """A function or other named construct; ``module`` and ``file`` are rows or −1."""

    name: str
    module: int
    offset: int
    file: int
    line: int


@dataclass
class Meta:
    """What ``meta.db`` says.

    Attributes:
        identifier_kinds: names by number, for instance ``NODE``, ``RANK``, ``THREAD``.
        scope_types: propagation scope to one of ``SCOPE_TYPES``; scopes are told
            apart by these, since their names may change.
        modules, files: paths.
    """

    minor_version: int
    title: str
    description: str
    identifier_kinds: list[str]
    scope_types: dict[str, str]
    metrics: list[Metric]
    modules: list[str]
    files: list[str]
    functions: list[Function]
    tree: ContextTree

    @property
    def inclusive_scope(self) -> str:
        """The scope that sums over all descendants; ``execution`` in all known writers."""
        return next((n for n, kind in self.scope_types.items() if kind == "execution"), "execution")


def read_meta(path: Path) -> Meta:
    """Read ``meta.db``.

    Raises:
        DatabaseError: missing, cut short, damaged, or of another format.
    """
    file = f4.DatabaseFile(path, "meta", b"_meta.db", META_SECTIONS)
    general = file.header("General", f4.GENERAL)
    names = file.header("IdNames", f4.IDENTIFIER_NAMES)
    kinds = file.table(f4.POINTER, names["names"], names["count"], what="identifier names")
    module_head, module_table = file.items("Modules", f4.LIST, f4.MODULE)
    file_head, file_table = file.items("Files", f4.LIST, f4.SOURCE_FILE)
    function_head, function_table = file.items("Functions", f4.LIST, f4.FUNCTION)

    def row_in(head: dict[str, int], what: str) -> Callable[[npt.NDArray[Any]], Ints]:
        return lambda pointers: _rows_at(file, head, pointers, what)

    module_row, file_row = row_in(module_head, "load module"), row_in(file_head, "source file")
    functions = [
        Function(*row)
        for row in zip(
            file.strings(function_table["name"], "function name"),
            module_row(function_table["module"]).tolist(),
            function_table["offset"].tolist(),
            file_row(function_table["file"]).tolist(),
            function_table["line"].tolist(),
            strict=True,
        )
    ]
    tree = read_tree(file, row_in(function_head, "function"), file_row, module_row)
    metrics, scope_types = _read_metrics(file)
    return Meta(
        minor_version=file.minor_version,
        title=file.string(general["title"], "title"),
        description=file.string(general["description"], "description"),
        identifier_kinds=file.strings(kinds["pointer"], "identifier name"),
        scope_types=scope_types,
        metrics=metrics,
        modules=file.strings(module_table["path"], "module path"),
        files=file.strings(file_table["path"], "source path"),
        functions=functions,
        tree=tree,
    )


def _rows_at(
    file: f4.DatabaseFile, head: dict[str, int], pointers: npt.NDArray[Any], what: str
) -> Ints:
    """Rows of a list to which ``pointers`` point; −1 for a pointer 0."""
    none = pointers == 0
    start, count, stride = head["items"], head["count"], max(head["stride"], 1)
    relative = np.where(none, np.uint64(0), pointers - np.uint64(start))  # wraps when below
    rows, rest = np.divmod(relative, np.uint64(stride))
    wrong = ~none & ((rest != 0) | (rows >= count))
    if wrong.any():
        raise file.error(
            f"pointer {int(pointers[np.argmax(wrong)])} to a {what}, and there are {count} "
            f"of them, {stride} bytes apart from byte {start}"
        )
    return np.where(none, -1, rows.astype(np.int64))


def _read_metrics(file: f4.DatabaseFile) -> tuple[list[Metric], dict[str, str]]:
    """(metrics, scope to its type)."""
    head = file.header("Metrics", f4.METRICS)
    table = file.table(f4.METRIC, head["metrics"], head["count"], head["metric_stride"], "metrics")
    scope_table = file.table(
        f4.SCOPE, head["scopes"], head["scope_count"], head["scope_stride"], "scopes"
    )
    scope_names = file.strings(scope_table["name"], "scope name")
    listed = int(table["instance_count"].sum()) + int(table["summary_count"].sum())
    # Ids are 16 bits wide, so there cannot be more; a bound before any list is built.
    if listed > 2 * 65536:
        raise file.error(f"{listed} metric scopes and statistics, at most {2 * 65536} have ids")
    scope_head = {
        "items": head["scopes"],
        "count": head["scope_count"],
        "stride": head["scope_stride"],
    }

    def scopes_of(rows: npt.NDArray[Any], what: str) -> list[str]:
        at = _rows_at(file, scope_head, rows["scope"], "propagation scope")
        if (at < 0).any():
            raise file.error(f"{what} without a propagation scope (pointer 0)")
        return [scope_names[i] for i in at.tolist()]

    metrics: list[Metric] = []
    ids: list[int] = []
    statistic_ids: list[int] = []
    for row in table:
        name = file.string(int(row["name"]), "metric name")
        what = f"metric '{name}'"
        instances = file.table(
            f4.SCOPE_INSTANCE,
            int(row["instances"]),
            int(row["instance_count"]),
            head["instance_stride"],
            f"{what}: scopes",
        )
        summaries = file.table(
            f4.SUMMARY,
            int(row["summaries"]),
            int(row["summary_count"]),
            head["summary_stride"],
            f"{what}: statistics",
        )
        scopes = dict(zip(scopes_of(instances, what), instances["metric_id"].tolist(), strict=True))
        statistics = tuple(
            Statistic(scope, formula, enumerated(COMBINE, combine), metric_id)
            for scope, formula, combine, metric_id in zip(
                scopes_of(summaries, what),
                file.strings(summaries["formula"], f"{what}: formula"),
                summaries["combine"].tolist(),
                summaries["metric_id"].tolist(),
                strict=True,
            )
        )
        ids.extend(instances["metric_id"].tolist())
        statistic_ids.extend(statistic.metric_id for statistic in statistics)
        metrics.append(Metric(name, scopes, statistics))
    for kind, found in (("metric", ids), ("statistic", statistic_ids)):
        if len(set(found)) != len(found):
            raise file.error(f"{len(found)} {kind} ids, of which only {len(set(found))} differ")
    types = [enumerated(SCOPE_TYPES, kind) for kind in scope_table["type"].tolist()]
    return metrics, dict(zip(scope_names, types, strict=True))
