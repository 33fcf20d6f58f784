"""``profile.db``, ``cct.db`` and ``trace.db``: numbers by thread, by context, over time.

The files are sparse and unaligned: a value is 10 bytes (u16 metric, f64), an
index entry 12 (u32 context, u64 first value). Values are not decoded until
asked for, and large blocks pass through in chunks, so that opening a database
costs its index, not its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_workbook.recordings.hpctoolkit import format as f4
from dlrm_workbook.recordings.hpctoolkit.derived import VARIABLE
from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError
from dlrm_workbook.recordings.hpctoolkit.meta import ContextTree, Meta, Metric
from dlrm_workbook.recordings.hpctoolkit.metrics import canonical_name

CHUNK = 1 << 20
"""Values decoded at a time where a whole block is only summed over."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Identifier:
    """One step of a thread's identity: kind (``RANK``, ``THREAD``, ...) and two ids."""

    kind: str
    logical: int
    physical: int


@dataclass(frozen=True)
class Values:
    """The values of one profile, sorted by context, then metric. All of shape (values,)."""

    context: Ints
    metric: Ints
    value: Floats


class ThreadProfile:
    """What was measured on one thread (or, for a summary, over all of them).

    Attributes:
        number: its row in the file; 0 is the summary of the whole run.
        summary: whether it holds summary statistics.
        identifiers: where it ran, from node to thread; empty for profile 0.
        count: number of values.
    """

    def __init__(
        self,
        file: f4.DatabaseFile,
        number: int,
        block: dict[str, int],
        identifiers: tuple[Identifier, ...],
        known: npt.NDArray[np.bool_],
    ) -> None:
        what = f"profile {number}"
        self.number = number
        self.summary = bool(block["flags"] & 1)
        self.identifiers = identifiers
        self.count = block["value_count"]
        self._file = file
        self._known = known
        self._raw = file.table(
            f4.PROFILE_VALUE, block["values"], self.count, what=f"{what}: values"
        )
        index = file.table(
            f4.PROFILE_INDEX, block["index"], block["index_count"], what=f"{what}: index"
        )
        self.contexts: Ints = index["context"].astype(np.int64)
        starts = index["start"].astype(np.uint64)
        self.starts = _checked_starts(file, what, self.contexts, starts, self.count)

    @property
    def first_byte(self) -> int:
        """Where its values begin, for messages and for letting pages go."""
        return int(self._raw.__array_interface__["data"][0]) if self.count else 0

    def check(self, metric: Ints) -> None:
        """Refuse metric ids that ``meta.db`` does not list."""
        if len(metric) and int(metric.max()) >= len(self._known):
            raise self._unknown(int(metric.max()))
        if len(metric) and not self._known[metric].all():
            raise self._unknown(int(metric[np.argmin(self._known[metric])]))

    def _unknown(self, metric: int) -> f4.DatabaseError:
        return self._file.error(
            f"profile {self.number} holds values of metric id {metric}, which meta.db does not list"
        )

    def values(self) -> Values:
        """All its values, decoded; 24 bytes each."""
        counts = np.diff(self.starts, append=self.count)
        metric = self._raw["metric"].astype(np.int64)
        self.check(metric)
        return Values(
            np.repeat(self.contexts, counts), metric, self._raw["value"].astype(np.float64)
        )

    def select(self, metric_id: int) -> tuple[Ints, Floats]:
        """(context ids, values) of one metric, both of shape (contexts with it,)."""
        contexts, values = [], []
        for start, metric, value in self.chunks():
            at = np.flatnonzero(metric == metric_id)
            place = np.searchsorted(self.starts, at + start, side="right") - 1
            contexts.append(self.contexts[place])
            values.append(value[at].astype(np.float64))
        if not contexts:
            return np.empty(0, np.int64), np.empty(0)
        return np.concatenate(contexts), np.concatenate(values)

    def places(self, start: int, count: int) -> Ints:
        """Row of ``contexts`` of each of ``count`` values from value ``start``; shape (count,)."""
        first, last = np.searchsorted(self.starts, [start, start + count - 1], side="right") - 1
        edges = self.starts[first : last + 2].clip(start, start + count)
        if last + 1 == len(self.starts):
            edges = np.append(edges, start + count)
        return np.repeat(np.arange(first, last + 1), np.diff(edges))

    def chunks(self) -> Iterator[tuple[int, Any, Any]]:
        """(number of the first value, metric ids u16, values f64), ``CHUNK`` at a time."""
        size = f4.PROFILE_VALUE.size
        base = self._file.bytes.__array_interface__["data"][0]
        for start in range(0, self.count, CHUNK):
            part = self._raw[start : start + CHUNK]
            yield start, part["metric"].astype(np.int64), part["value"]
            if self.count > CHUNK:
                first = self.first_byte - base + start * size
                self._file.forget(first, first + len(part) * size)

    def sums(self) -> tuple[Floats, Ints]:
        """(sum over contexts, number of values) by metric id; shapes (largest id + 1,)."""
        size = len(self._known)
        total, number = np.zeros(size), np.zeros(size, np.int64)
        for _, metric, value in self.chunks():
            counted = np.bincount(metric, minlength=size)
            if len(counted) > size or counted[~self._known].any():
                self.check(metric)
            number += counted
            total += np.bincount(metric, weights=value, minlength=size)
        return total, number

    def at(self, context: int) -> dict[int, float]:
        """Metric id to value in one context (0: the whole tree); empty if it has none."""
        place = int(np.searchsorted(self.contexts, context))
        if place == len(self.contexts) or self.contexts[place] != context:
            return {}
        last = self.starts[place + 1] if place + 1 < len(self.starts) else self.count
        part = self._raw[int(self.starts[place]) : int(last)]
        self.check(part["metric"].astype(np.int64))
        return dict(zip(part["metric"].tolist(), part["value"].tolist(), strict=True))


def _checked_starts(
    file: f4.DatabaseFile, what: str, keys: Ints, starts: npt.NDArray[np.uint64], count: int
) -> Ints:
    """Starts as int64 if keys increase, starts do not decrease, and all values have a key."""
    if len(keys) and (np.diff(keys) <= 0).any():
        raise file.error(f"{what}: its index is not in increasing order")
    if (len(keys) and int(starts[-1]) > count) or (starts[1:] < starts[:-1]).any():
        raise file.error(
            f"{what}: its index leads to value {int(starts.max())}, and there are {count}"
        )
    if count and (not len(keys) or starts[0] != 0):
        raise file.error(f"{what}: {count} values, and no index entry for the first")
    return starts.astype(np.int64)


def read_profiles(
    path: Path, kinds: list[str], metric_ids: list[int], statistic_ids: list[int]
) -> list[ThreadProfile]:
    """The profiles of ``profile.db``; the first is the summary of the whole run.

    Args:
        path: the file.
        kinds: names of identifier kinds, from ``meta.db``.
        metric_ids, statistic_ids: ids that thread profiles and summaries may hold.

    Raises:
        DatabaseError: missing, cut short, damaged, or of another format.
    """
    file = f4.DatabaseFile(path, "prof", b"_prof.db", ("ProfileInfos", "IdTuples"))
    _, table = file.items("ProfileInfos", f4.SHORT_LIST, f4.PROFILE)
    if not len(table):
        raise file.error("it lists no profiles, and the summary profile is always there")
    _refuse_overlap(
        file,
        _block_bytes(table, f4.PROFILE_VALUE.size, f4.PROFILE_INDEX.size),
        "the profiles' values",
    )
    known = _membership(metric_ids)
    known_statistics = _membership(statistic_ids)
    profiles = []
    identities: dict[int, tuple[Identifier, ...]] = {0: ()}
    most = file.sections["IdTuples"].size // f4.IDENTIFIER.size + 1
    names = f4.PROFILE.dtype.names or ()
    for number, row in enumerate(table.tolist()):
        block = dict(zip(names, row, strict=True))
        pointer = block["identifiers"]
        if pointer not in identities:
            identities[pointer] = _identifiers(file, pointer, kinds, number)
            most -= len(identities[pointer])
            if most < 0:
                raise file.error("more identifiers than its identifier section has room for")
        ids = known_statistics if block["flags"] & 1 else known
        profiles.append(ThreadProfile(file, number, block, identities[pointer], ids))
    if not profiles[0].summary:
        raise file.error("its first profile is not marked as the summary of the run")
    return profiles


def _membership(ids: list[int]) -> npt.NDArray[np.bool_]:
    """Whether each id is listed; shape (largest id + 1,)."""
    listed = np.zeros(max(ids, default=-1) + 1, np.bool_)
    listed[ids] = True
    return listed


def _block_bytes(table: npt.NDArray[Any], value_size: int, index_size: int) -> int:
    """Bytes that all value blocks of a table take together (no overflow: as float)."""
    return int(
        table["value_count"].astype(np.float64).sum() * value_size
        + table["index_count"].astype(np.float64).sum() * index_size
    )


def _refuse_overlap(file: f4.DatabaseFile, stated: int, what: str) -> None:
    if stated > file.size:
        raise file.error(f"{what} take {stated} bytes together, and the file has {file.size}")


def _identifiers(
    file: f4.DatabaseFile, pointer: int, kinds: list[str], number: int
) -> tuple[Identifier, ...]:
    what = f"profile {number}: identifiers"
    count = file.one(f4.IDENTIFIER_TUPLE, pointer, what)["count"]
    table = file.table(f4.IDENTIFIER, pointer + f4.IDENTIFIERS_OFFSET, count, what=what)
    return tuple(
        Identifier(kinds[kind] if kind < len(kinds) else f"KIND{kind}", logical, physical)
        for kind, _, logical, physical in table.tolist()
    )


class ContextValues:
    """``cct.db``: the values of one context over all threads, without reading the others."""

    def __init__(self, path: Path) -> None:
        self._file = f4.DatabaseFile(path, "ctxt", b"__ctx.db", ("CtxInfos",))
        _, self._table = self._file.items("CtxInfos", f4.SHORT_LIST, f4.CONTEXT_VALUES)
        _refuse_overlap(
            self._file,
            _block_bytes(self._table, f4.CONTEXT_VALUE.size, f4.CONTEXT_INDEX.size),
            "the contexts' values",
        )
        self.count = len(self._table)
        self.value_count = int(self._table["value_count"].sum())

    def values(self) -> tuple[Ints, Ints, Ints, Floats]:
        """(context ids, metric ids, profile numbers, values) of all contexts; shape (values,).

        Raises:
            DatabaseError: a block leads outside the file or its index is damaged.
        """
        table, file = self._table, self._file
        context, at = _gather(file, table["values"], table["value_count"], f4.CONTEXT_VALUE)
        of, index_at = _gather(file, table["index"], table["index_count"], f4.CONTEXT_INDEX)
        index = _records(file, index_at, f4.CONTEXT_INDEX)
        raw = _records(file, at, f4.CONTEXT_VALUE)
        # Where each index entry's values begin, counted over all contexts.
        first = np.concatenate([[0], np.cumsum(table["value_count"].astype(np.int64))])
        within = index["start"]
        if (within > table["value_count"][of]).any():
            raise file.error("an index entry leads past the values of its context")
        starts = first[of] + within.astype(np.int64)
        ends = np.append(starts[1:], len(raw))
        if (ends < starts).any() or (len(raw) and (not len(starts) or starts[0] != 0)):
            raise file.error("the indices of its contexts do not cover their values in order")
        metric = np.repeat(index["metric"].astype(np.int64), ends - starts)
        return context, metric, raw["profile"].astype(np.int64), raw["value"].astype(np.float64)

    def at(self, context: int) -> tuple[Ints, Ints, Floats]:
        """(metric ids, profile numbers, values) of one context, each of shape (values,).

        Raises:
            DatabaseError: its block is damaged.
        """
        empty = np.empty(0, np.int64)
        if not 0 <= context < self.count:
            return empty, empty, np.empty(0)
        what = f"context {context}"
        row = self._table[context]
        count = int(row["value_count"])
        raw = self._file.table(f4.CONTEXT_VALUE, int(row["values"]), count, what=f"{what}: values")
        index = self._file.table(
            f4.CONTEXT_INDEX, int(row["index"]), int(row["index_count"]), what=f"{what}: index"
        )
        metric = index["metric"].astype(np.int64)
        starts = _checked_starts(self._file, what, metric, index["start"].astype(np.uint64), count)
        counts = np.diff(starts, append=count)
        return (
            np.repeat(metric, counts),
            raw["profile"].astype(np.int64),
            raw["value"].astype(np.float64),
        )


def _gather(
    file: f4.DatabaseFile, pointers: npt.NDArray[Any], counts: npt.NDArray[Any], kind: f4.Record
) -> tuple[Ints, Ints]:
    """(row of the table, byte) of every record that a table's arrays hold, in order."""
    sizes = counts.astype(np.int64)  # their sum is bounded: see _refuse_overlap
    start = np.where(sizes > 0, pointers, 0).astype(np.uint64)
    if (start > np.uint64(file.size)).any() or (
        start.astype(np.int64) + sizes * kind.size > file.size
    ).any():
        raise file.error(f"an array of {kind.name} records reaches past byte {file.size}")
    owner = np.repeat(np.arange(len(sizes)), sizes)
    before = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    rank = np.arange(len(owner)) - before[owner]
    return owner, start.astype(np.int64)[owner] + rank * kind.size


def _records(file: f4.DatabaseFile, at: Ints, kind: f4.Record) -> npt.NDArray[Any]:
    """A copy of the records at bytes ``at``; shape (len(at),)."""
    copied = np.empty(len(at), kind.dtype)
    octets = copied.view(np.uint8).reshape(len(at), kind.size)
    for start in range(0, len(at), CHUNK):  # the addresses take eight times the records
        part = slice(start, start + CHUNK)
        octets[part] = file.bytes[at[part, None] + np.arange(kind.size)]
    return copied


@dataclass
class TraceLine:
    """What one thread or stream did over time.

    From ``time_ns[i]`` (since the epoch) to ``time_ns[i + 1]`` it was in context
    ``context[i]``; context 0 is "not running". Both of shape (samples,).
    """

    profile: int
    time_ns: Ints
    context: Ints = field(repr=False)

    @property
    def idle_ns(self) -> int:
        """Time in context 0 between its first and last sample."""
        return int(np.diff(self.time_ns)[self.context[:-1] == 0].sum())


def read_traces(path: Path, profiles: int) -> list[TraceLine]:
    """The trace lines of ``trace.db``; ``profiles`` is how many ``profile.db`` has.

    Raises:
        DatabaseError: missing, cut short, damaged, or of another format.
    """
    file = f4.DatabaseFile(path, "trce", b"trace.db", ("CtxTraces",))
    _, table = file.items("CtxTraces", f4.TRACES, f4.TRACE)
    lines = []
    room = file.size
    for number, (profile, start, end) in enumerate(table.tolist()):
        what = f"trace {number}"
        if profile >= profiles:
            raise file.error(f"{what} is of profile {profile}, and there are {profiles}")
        count, rest = divmod(end - start, f4.TRACE_SAMPLE.size)
        room -= max(end - start, 0)
        if end < start or rest or room < 0:
            raise file.error(
                f"{what} runs from byte {start} to byte {end}, not a whole number of "
                f"{f4.TRACE_SAMPLE.size}-byte samples within {file.size} bytes"
            )
        samples = file.table(f4.TRACE_SAMPLE, start, count, what=what)
        times = samples["time_ns"].astype(np.int64)
        if count and (times[0] < 0 or (times[1:] < times[:-1]).any()):
            raise file.error(f"{what}: its times do not increase")
        lines.append(TraceLine(profile, times, samples["context"].astype(np.int64)))
    return lines


# Values of a database over its calling-context tree: by thread, metric and scope.

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
