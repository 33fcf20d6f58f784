"""``meta.db``: metrics, modules, files, functions and the calling-context tree.

The tree is found by one iterative walk over the children arrays (they hold
records of different lengths, so each tells where the next begins); all fields
are then gathered at once with numpy. Trees of any depth and width cost the same
per context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.recordings.hpctoolkit import format as f4
from dlrm_workbook.recordings.profile import depths

META_SECTIONS = (
    *("General", "IdNames", "Metrics", "Context"),
    *("Strings", "Modules", "Files", "Functions"),
)
LISTS = {"load module": "Modules", "source file": "Files", "function": "Functions"}
"""Records that contexts point to, and the sections that list them."""

Rows = Callable[[npt.NDArray[Any]], Ints]
"""Turns pointers to such records into their rows."""

ENTRY_TYPES = ("unknown_entry", "main_thread", "application_thread")
LEXICAL_TYPES = ("function", "loop", "line", "instruction")
RELATIONS = ("lexical", "call", "inlined_call")
SCOPE_TYPES = ("custom", "point", "execution", "transitive")
COMBINE = ("sum", "min", "max")

CONTEXT = f4.RECORDS["context"]

ENTRY, ROOT = -1, -2
"""``ContextTree.lexical_type`` of an entry point, and of context 0, the root over all of them."""


def enumerated(names: tuple[str, ...], value: int) -> str:
    """Name of an enumeration value; later minor versions may have more of them."""
    return names[value] if value < len(names) else f"unknown_{value}"


@dataclass
class ContextTree:
    """The calling-context tree in columns; row 0 is context 0, parents precede children.

    Every column has shape (rows,). ``function``, ``file`` and ``module`` are rows of
    the tables in ``Meta`` or −1; ``line`` 0 and ``offset`` 0 where there is none.
    ``relation`` is −1 for the root and the entry points. Rows go down level by level.
    """

    context: Ints
    parent: Ints
    depth: Ints
    lexical_type: Ints
    relation: Ints
    function: Ints
    file: Ints
    line: Ints
    module: Ints
    offset: npt.NDArray[np.uint64]
    entry_names: list[str] = field(default_factory=list)
    entry_types: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.context)

    def __post_init__(self) -> None:
        self._index = pd.Index(self.context)

    def rows(self, contexts: npt.NDArray[Any]) -> Ints:
        """Row of each context id, −1 where it is not in the tree."""
        return self._index.get_indexer(pd.Index(contexts))


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
    """Read ``meta.db``; a DatabaseError says that it is missing, cut short, damaged, or of another
    format."""
    file = f4.DatabaseFile(path, "meta", b"_meta.db", META_SECTIONS)
    general = file.header("General", "general properties")
    names = file.header("IdNames", "identifier names")
    kinds = file.table("pointer", names["names"], names["count"], what="identifier names")
    tables: dict[str, Any] = {}
    rows_of: dict[str, Rows] = {}
    for record, section in LISTS.items():
        head, tables[record] = file.items(section, "list", record)
        rows_of[record] = partial(_rows_at, file, head, record)
    listed = tables["function"]
    columns = (
        file.strings(listed["name"], "function name"),
        rows_of["load module"](listed["module"]).tolist(),
        listed["offset"].tolist(),
        rows_of["source file"](listed["file"]).tolist(),
        listed["line"].tolist(),
    )
    functions = [Function(*row) for row in zip(*columns, strict=True)]
    tree = _read_tree(file, rows_of)
    metrics, scope_types = _read_metrics(file)
    return Meta(
        minor_version=file.minor_version,
        title=file.string(general["title"], "title"),
        identifier_kinds=file.strings(kinds["pointer"], "identifier name"),
        scope_types=scope_types,
        metrics=metrics,
        modules=file.strings(tables["load module"]["path"], "module path"),
        files=file.strings(tables["source file"]["path"], "source path"),
        functions=functions,
        tree=tree,
    )


def _rows_at(
    file: f4.DatabaseFile, head: dict[str, int], what: str, pointers: npt.NDArray[Any]
) -> Ints:
    """Rows of a list to which ``pointers`` point; −1 for a pointer 0."""
    none = pointers == 0
    start, count, stride = head["items"], head["count"], max(head["stride"], 1)
    relative = np.where(none, np.uint64(0), pointers - np.uint64(start))  # wraps when below
    rows, rest = np.divmod(relative, np.uint64(stride))
    wrong = ~none & ((rest != 0) | (rows >= count))
    if wrong.any():
        raise file.error(
            f"it has the pointer {int(pointers[np.argmax(wrong)])} to a {what}, and there are "
            f"{count} of them, {stride} bytes apart from byte {start}"
        )
    return np.where(none, -1, rows.astype(np.int64))


def _read_tree(file: f4.DatabaseFile, rows_of: dict[str, Rows]) -> ContextTree:
    """The tree, its fields gathered at once."""
    head = file.header("Context", "context tree")
    entries = file.table(
        "entry point", head["entries"], head["count"], head["stride"], "entry points"
    )
    positions, parents = _walk(file, entries)
    count, first = len(positions), 1 + len(entries)
    words = np.frombuffer(file.map, "<u8", file.size // 8)
    fixed = words[positions[:, None] + np.arange(CONTEXT.itemsize // 8)].view(CONTEXT)
    context, flags, relation, lexical, flex = (
        fixed[name].ravel().astype(np.int64)
        for name in ("context", "flags", "relation", "lexical_type", "flex_words")
    )
    has_function, has_source, has_point = (flags & bit != 0 for bit in (1, 2, 4))
    needed = has_function + 2 * has_source.astype(np.int64) + 2 * has_point
    if (needed > flex).any():
        row = int(np.argmax(needed > flex))
        raise file.error(
            f"context {context[row]} has {flex[row]} words of fields where its flags "
            f"{flags[row]:#04x} need {needed[row]}"
        )

    # Optional fields come in this order, each in a word of its own (``line`` is a
    # u32, and no other field is short enough to share its word).
    def optional(present: Bools, offset: Ints | int) -> npt.NDArray[np.uint64]:
        # An absent field reads word 0 of the file: in bounds, and masked out.
        return np.where(present, words[np.where(present, positions + offset, 0)], np.uint64(0))

    after_function = 4 + has_function.astype(np.int64)
    after_source = after_function + 2 * has_source
    line = optional(has_source, after_function + 1) & np.uint64(0xFFFFFFFF)

    def column(entry_value: int, values: npt.NDArray[Any]) -> Ints:
        whole = np.full(first + count, entry_value, np.int64)
        whole[first:] = values
        return whole

    everywhere = column(0, context)
    everywhere[1:first] = entries["context"]
    lexical_type = column(ENTRY, lexical)
    lexical_type[0] = ROOT
    parent = column(0, parents)
    parent[0] = -1
    offset = np.zeros(first + count, np.uint64)
    offset[first:] = optional(has_point, after_source + 1)
    tree = ContextTree(
        context=everywhere,
        parent=parent,
        depth=np.maximum(depths(parent) - 1, 0),
        lexical_type=lexical_type,
        relation=column(-1, relation),
        function=column(-1, rows_of["function"](optional(has_function, 4))),
        file=column(-1, rows_of["source file"](optional(has_source, after_function))),
        line=column(0, line),
        module=column(-1, rows_of["load module"](optional(has_point, after_source))),
        offset=offset,
        entry_names=file.strings(entries["name"], "entry point name"),
        entry_types=[enumerated(ENTRY_TYPES, kind) for kind in entries["type"].tolist()],
    )
    twice = pd.Series(everywhere).duplicated()
    if twice.any():
        raise file.error(
            f"context {everywhere[twice.argmax()]} occurs twice in the tree (0 is the root's)"
        )
    return tree


def _walk(file: f4.DatabaseFile, entries: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Find every context below the entry points, level by level. Returns for each context the
    8-byte word at which it starts and the row of its parent (entry points are rows 1 to n). Raises
    DatabaseError: a children array leads outside the file, is cut within a record, or arrays
    overlap (a cycle), found by their number."""
    words = memoryview(file.map)[: file.size // 8 * 8].cast("Q")
    limit = file.size - f4.FOOTER_BYTES
    # Records of valid files do not overlap, so there are at most this many.
    most = file.size // CONTEXT.itemsize
    first = 1 + len(entries)
    fixed = CONTEXT.itemsize // 8
    positions: list[int] = []
    # Of each children array: where it starts, its bytes, the row of its parent, its contexts.
    # Plain lists of ints, not tuples: those would wake the garbage collector.
    has_children = np.flatnonzero(entries["children_size"])
    starts = entries["children"][has_children].tolist()
    sizes = entries["children_size"][has_children].tolist()
    rows = (has_children + 1).tolist()
    counts: list[int] = []
    for start, size in zip(starts, sizes, strict=True):  # which grow on the way
        if start % 8 or start + size > limit:
            raise file.error(
                f"the children at byte {start} take {size} bytes, which is no multiple of 8 or "
                f"lies outside the file's {file.size} bytes"
            )
        at, end = start >> 3, (start + size) >> 3
        before = len(positions)
        while at < end:
            after = at + fixed
            if after <= end:  # the word that tells the rest of its size can be read
                after += words[at + 2] >> 56
            if after > end:
                raise file.error(
                    f"the context at byte {8 * at} reaches byte {8 * after}, and its "
                    f"siblings end at byte {8 * end}"
                )
            if children_size := words[at]:
                starts.append(words[at + 1])
                sizes.append(children_size)
                rows.append(first + len(positions))
            positions.append(at)
            at = after
        counts.append(len(positions) - before)
        if len(positions) > most:
            raise file.error(
                f"its {file.size} bytes have over {most} contexts, so children arrays overlap"
            )
    return np.asarray(positions, np.int64), np.repeat(
        np.asarray(rows, np.int64), np.asarray(counts, np.int64)
    )


def _read_metrics(file: f4.DatabaseFile) -> tuple[list[Metric], dict[str, str]]:
    """(metrics, scope to its type)."""
    head = file.header("Metrics", "performance metrics")
    table = file.table("metric", head["metrics"], head["count"], head["metric_stride"], "metrics")
    scope_table = file.table(
        "propagation scope",
        head["scope_items"],
        head["scope_count"],
        head["scope_stride"],
        "scopes",
    )
    scope_names = file.strings(scope_table["name"], "scope name")
    listed = int(table["instance_count"].sum()) + int(table["summary_count"].sum())
    # Ids are 16 bits wide, so there cannot be more; a bound before any list is built.
    if listed > 2 * 65536:
        raise file.error(
            f"it lists {listed} metric scopes and statistics, expected at most {2 * 65536}"
        )
    scope_head = {name: head[f"scope_{name}"] for name in ("items", "count", "stride")}

    def scopes_of(rows: npt.NDArray[Any], what: str) -> list[str]:
        at = _rows_at(file, scope_head, "propagation scope", rows["scope"])
        if (at < 0).any():
            raise file.error(f"{what} has no propagation scope (pointer 0)")
        return [scope_names[i] for i in at.tolist()]

    metrics: list[Metric] = []
    ids: dict[str, list[int]] = {"metric": [], "statistic": []}
    for name_at, instances_at, summaries_at, instance_count, summary_count in table.tolist():
        name = file.string(name_at, "metric name")
        what = f"metric '{name}'"
        stride = head["instance_stride"]
        instances = file.table(
            "metric scope", instances_at, instance_count, stride, f"{what}: scopes"
        )
        stride = head["summary_stride"]
        summaries = file.table(
            "summary statistic", summaries_at, summary_count, stride, f"{what}: statistics"
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
        ids["metric"] += instances["metric_id"].tolist()
        ids["statistic"] += summaries["metric_id"].tolist()
        metrics.append(Metric(name, scopes, statistics))
    for kind, numbers in ids.items():
        if len(set(numbers)) != len(numbers):
            raise file.error(
                f"it has {len(numbers)} {kind} ids, of which only {len(set(numbers))} differ"
            )
    types = [enumerated(SCOPE_TYPES, kind) for kind in scope_table["type"].tolist()]
    return metrics, dict(zip(scope_names, types, strict=True))
