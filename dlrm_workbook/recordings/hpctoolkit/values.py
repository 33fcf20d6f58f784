"""``profile.db`` and ``trace.db``: numbers by thread and over time.

The files are sparse and unaligned: a value is 10 bytes (u16 metric, f64), an
index entry 12 (u32 context, u64 first value). Values are not decoded until
asked for, and large blocks pass through in chunks, so that opening a database
costs its index, not its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_workbook.recordings.hpctoolkit import format as f4

CHUNK = 1 << 20
"""Values decoded at a time where a whole block is only summed over."""

METRIC_IDS = 1 << 16
"""Ids of metrics and statistics are 16 bits wide."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Identifier:
    """One step of a thread's identity: kind (``RANK``, ``THREAD``, ...) and two ids."""

    kind: str
    logical: int
    physical: int


class ThreadProfile:
    """What was measured on one thread (or, for a summary, over all of them).

    Attributes:
        number: its row in the file; 0 is the summary of the whole run.
        summary: whether it holds summary statistics.
        identifiers: where it ran, from node to thread; empty for profile 0.
        count: number of values.
        contexts: ids of the contexts with values (contexts,), increasing.
        starts: number of the first value of each (contexts,).
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
        self._first_byte = block["values"]
        self._raw = file.table(
            f4.PROFILE_VALUE, block["values"], self.count, what=f"{what}: values"
        )
        index = file.table(
            f4.PROFILE_INDEX, block["index"], block["index_count"], what=f"{what}: index"
        )
        self.contexts: Ints = index["context"].astype(np.int64)
        starts = index["start"].astype(np.uint64)
        if (np.diff(self.contexts) <= 0).any():
            raise file.error(f"{what}: its index is not in increasing order")
        if (len(starts) and int(starts[-1]) > self.count) or (starts[1:] < starts[:-1]).any():
            raise file.error(
                f"{what}: its index leads to value {int(starts.max())}, and there are {self.count}"
            )
        if self.count and (not len(starts) or starts[0] != 0):
            raise file.error(f"{what}: {self.count} values, and no index entry for the first")
        self.starts: Ints = starts.astype(np.int64)

    def check(self, metric: Ints) -> None:
        """Refuse metric ids that ``meta.db`` does not list."""
        wrong = ~self._known[metric]
        if wrong.any():
            raise self._file.error(
                f"profile {self.number} holds values of metric id {int(metric[np.argmax(wrong)])}, "
                "which meta.db does not list"
            )

    def check_finite(self, value: Floats) -> None:
        """Refuse values that are no numbers."""
        if not np.isfinite(value).all():
            odd = value[~np.isfinite(value)][0]
            raise self._file.error(f"profile {self.number} holds the value {odd}, which none has")

    def values(self) -> tuple[Ints, Ints, Floats]:
        """(context ids, metric ids, values), sorted by context, then metric; shape (values,)."""
        counts = np.diff(self.starts, append=self.count)
        metric = self._raw["metric"].astype(np.int64)
        self.check(metric)
        value = self._raw["value"].astype(np.float64)
        self.check_finite(value)
        return np.repeat(self.contexts, counts), metric, value

    def chunks(self) -> Iterator[tuple[int, Ints, Any]]:
        """(number of the first value, metric ids, values f64), ``CHUNK`` at a time."""
        size = f4.PROFILE_VALUE.size
        for start in range(0, self.count, CHUNK):
            part = self._raw[start : start + CHUNK]
            self.check_finite(part["value"])
            yield start, part["metric"].astype(np.int64), part["value"]
            if self.count > CHUNK:
                first = self._first_byte + start * size
                self._file.forget(first, first + len(part) * size)

    def places(self, start: int, count: int) -> Ints:
        """Row of ``contexts`` of each of ``count`` values from value ``start``; shape (count,)."""
        first, last = np.searchsorted(self.starts, [start, start + count - 1], side="right") - 1
        edges = self.starts[first : last + 2].clip(start, start + count)
        if last + 1 == len(self.starts):
            edges = np.append(edges, start + count)
        return np.repeat(np.arange(first, last + 1), np.diff(edges))

    def sums(self) -> tuple[Floats, Ints]:
        """(sum over contexts, number of values) by metric id; shapes (``METRIC_IDS``,)."""
        total, number = np.zeros(METRIC_IDS), np.zeros(METRIC_IDS, np.int64)
        for _, metric, value in self.chunks():
            self.check(metric)
            number += np.bincount(metric, minlength=METRIC_IDS)
            total += np.bincount(metric, weights=value, minlength=METRIC_IDS)
        return total, number

    def at(self, context: int) -> dict[int, float]:
        """Metric id to value in one context (0: the whole tree); empty if it has none."""
        place = int(np.searchsorted(self.contexts, context))
        if place == len(self.contexts) or self.contexts[place] != context:
            return {}
        last = self.starts[place + 1] if place + 1 < len(self.starts) else self.count
        part = self._raw[int(self.starts[place]) : int(last)]
        self.check(part["metric"].astype(np.int64))
        self.check_finite(part["value"])
        return dict(zip(part["metric"].tolist(), part["value"].tolist(), strict=True))


def read_profiles(
    path: Path, kinds: list[str], metric_ids: list[int], statistic_ids: list[int]
) -> list[ThreadProfile]:
    """The profiles of ``profile.db``; the first is the summary of the whole run.

    Args:
        kinds: names of identifier kinds, from ``meta.db``.
        metric_ids, statistic_ids: ids that thread profiles and summaries may hold.

    Raises:
        DatabaseError: missing, cut short, damaged, or of another format.
    """
    file = f4.DatabaseFile(path, "prof", b"_prof.db", ("ProfileInfos", "IdTuples"))
    _, table = file.items("ProfileInfos", f4.SHORT_LIST, f4.PROFILE)
    if not len(table):
        raise file.error("it lists no profiles, and the summary profile is always there")
    _refuse_overlap(file, table, f4.PROFILE_VALUE, f4.PROFILE_INDEX)
    known, known_statistics = _listed(metric_ids), _listed(statistic_ids)
    profiles = []
    identities: dict[int, tuple[Identifier, ...]] = {0: ()}
    most = len(file.sections["IdTuples"]) // f4.IDENTIFIER.size + 1
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


def _listed(ids: list[int]) -> npt.NDArray[np.bool_]:
    """Whether each metric id is listed; shape (``METRIC_IDS``,)."""
    listed = np.zeros(METRIC_IDS, np.bool_)
    listed[ids] = True
    return listed


def _refuse_overlap(
    file: f4.DatabaseFile, table: npt.NDArray[Any], value: f4.Record, index: f4.Record
) -> None:
    """Refuse a table whose value blocks take more room together than the file has."""
    # as floats, which do not overflow
    stated = table["value_count"].astype(np.float64).sum() * value.size
    stated += table["index_count"].astype(np.float64).sum() * index.size
    if stated > file.size:
        raise file.error(
            f"its values take {int(stated)} bytes together, and the file has {file.size}: "
            "they overlap"
        )


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
