"""``profile.db`` and ``trace.db``: numbers by thread and over time.

The files are sparse and unaligned: a value is 10 bytes (u16 metric, f64), an
index entry 12 (u32 context, u64 first value). Values are not decoded until
asked for, large blocks pass through in chunks, and no thread's index or trace is
kept, so that a database needs the memory of its contexts, however many threads it has.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_workbook.ground.arrays import Bools, Floats, Ints
from dlrm_workbook.recordings.hpctoolkit import format as f4

VALUES_AT_ONCE = 1 << 20
"""Values decoded at a time where a whole block is only summed over."""

METRIC_IDS = 1 << 16
"""Ids of metrics and statistics are 16 bits wide."""


@dataclass(frozen=True, slots=True)
class Identifier:
    """One step of a thread's identity: kind (``RANK``, ``THREAD``, ...) and two ids."""

    kind: str
    logical: int
    physical: int


class ThreadProfile:
    """What was measured on one thread (or, for a summary, over all of them).

    Attributes:
        number: its row in the file; 0 is the summary of the whole run.
        identifiers: where it ran, from node to thread; empty for profile 0.
        count: number of values.
    """

    def __init__(
        self,
        file: f4.DatabaseFile,
        number: int,
        block: dict[str, int],
        identifiers: tuple[Identifier, ...],
        listed: Bools,
    ) -> None:
        what = f"profile {number}"
        self.number = number
        self.summary = bool(block["flags"] & 1)
        self.identifiers = identifiers
        self.count = block["value_count"]
        self._file = file
        self._listed = listed
        self._raw = file.table(
            "profile value", block["values"], self.count, what=f"the values of {what}"
        )
        self._index = index = file.table(
            "profile index", block["index"], block["index_count"], what=f"the index of {what}"
        )
        if (np.diff(index["context"].astype(np.int64)) <= 0).any():
            raise file.error(f"the index of {what} does not increase")
        starts = index["start"].astype(np.uint64)
        if (len(starts) and int(starts[-1]) > self.count) or (starts[1:] < starts[:-1]).any():
            raise file.error(
                f"the index of {what} leads to value {int(starts.max())}, and there are "
                f"{self.count}"
            )
        if self.count and (not len(starts) or starts[0] != 0):
            raise file.error(f"{what} has {self.count} values and no index entry for the first")
        file.spent(index.nbytes)

    @property
    def contexts(self) -> Ints:
        """Ids of the contexts with values, increasing; shape (contexts,)."""
        return self._decoded("context")

    @property
    def starts(self) -> Ints:
        """Number of the first value of each context; shape (contexts,)."""
        return self._decoded("start")

    def _decoded(self, column: str) -> Ints:
        decoded: Ints = self._index[column].astype(np.int64)
        self._file.spent(self._index.nbytes)
        return decoded

    def _checked(self, first: int, beyond: int) -> tuple[Ints, Floats]:
        """(metric ids, values) from value ``first`` to before ``beyond``; shape (values,)."""
        block = self._raw[first:beyond]
        metric, value = block["metric"].astype(np.int64), block["value"].astype(np.float64)
        listed = self._listed
        wrong = ~listed[np.minimum(metric, len(listed) - 1)] | (metric >= len(listed))
        if wrong.any():
            raise self._file.error(
                f"profile {self.number} has values of metric id {int(metric[np.argmax(wrong)])}, "
                "which meta.db does not list"
            )
        odd = ~np.isfinite(value)
        if odd.any():
            raise self._file.error(
                f"profile {self.number} has the value {value[odd][0]}, which no measurement gives"
            )
        self._file.spent(block.nbytes)
        return metric, value

    def chunks(self, at_once: int | None = None) -> Iterator[tuple[Ints, Ints, Floats]]:
        """(context ids, metric ids, values) of up to so many values at a time; shape (values,).

        They are sorted by context, then metric.
        """
        contexts, edges = self.contexts, np.append(self.starts, self.count)
        at_once = at_once or VALUES_AT_ONCE
        for first in range(0, max(self.count, 1), at_once):
            metric, value = self._checked(first, first + at_once)
            counts = np.diff(edges.clip(first, first + len(value)))
            yield np.repeat(contexts, counts), metric, value

    def values(self) -> tuple[Ints, Ints, Floats]:
        return next(self.chunks(self.count))

    def sums(self) -> tuple[Floats, Ints]:
        """(sum over contexts, number of values) by metric id, up to the last that is listed."""
        size = len(self._listed)
        total, number = np.zeros(size), np.zeros(size, np.int64)
        for _, metric, value in self.chunks():
            number += np.bincount(metric, minlength=size)
            total += np.bincount(metric, weights=value, minlength=size)
        return total, number

    def at(self, context: int) -> dict[int, float]:
        """Metric id to value in one context (0: the whole tree); empty if it has none."""
        contexts, starts = self._index["context"], self._index["start"]
        place = bisect.bisect_left(contexts, context)
        if place == len(contexts) or contexts[place] != context:
            return {}
        beyond = starts[place + 1] if place + 1 < len(starts) else self.count
        metric, value = self._checked(int(starts[place]), int(beyond))
        return dict(zip(metric.tolist(), value.tolist(), strict=True))


def read_profiles(
    path: Path, kinds: list[str], metric_ids: list[int], statistic_ids: list[int]
) -> list[ThreadProfile]:
    """The profiles of ``profile.db``; the first is the summary of the whole run. ``kinds`` are
    names of identifier kinds, ``metric_ids`` and ``statistic_ids`` those that thread profiles and
    summaries may hold, all of ``meta.db``. A DatabaseError says that it is missing, cut short,
    damaged, or of another format."""
    file = f4.DatabaseFile(path, "prof", b"_prof.db", ("ProfileInfos", "IdTuples"))
    _, table = file.items("ProfileInfos", "short list", "profile")
    if not len(table):
        raise file.error("it lists no profiles, and the summary profile is always there")
    # as floats, which do not overflow
    stated = sum(
        table[f"{what}_count"].astype(np.float64).sum() * f4.RECORDS[f"profile {what}"].itemsize
        for what in ("value", "index")
    )
    if stated > file.size:
        raise file.error(
            f"its values take {int(stated)} bytes together, and the file has {file.size}: "
            "they overlap"
        )
    metrics, statistics = _listed(metric_ids), _listed(statistic_ids)
    profiles = []
    identities: dict[int, tuple[Identifier, ...]] = {0: ()}
    most = len(file.sections["IdTuples"]) // f4.RECORDS["identifier"].itemsize + 1
    names = f4.RECORDS["profile"].names or ()
    for number, row in enumerate(table.tolist()):
        block = dict(zip(names, row, strict=True))
        pointer = block["identifiers"]
        if pointer not in identities:
            identities[pointer] = _identifiers(file, pointer, kinds, number)
            most -= len(identities[pointer])
            if most < 0:
                raise file.error("it has more identifiers than its identifier section has room for")
        ids = statistics if block["flags"] & 1 else metrics
        profiles.append(ThreadProfile(file, number, block, identities[pointer], ids))
    if not profiles[0].summary:
        raise file.error("its first profile is not marked as the summary of the run")
    return profiles


def _listed(ids: list[int]) -> Bools:
    """Whether each metric id is listed, up to the last that is; at least of shape (1,)."""
    listed = np.zeros(max(ids, default=0) + 1, np.bool_)
    listed[ids] = True
    return listed


def _identifiers(
    file: f4.DatabaseFile, pointer: int, kinds: list[str], number: int
) -> tuple[Identifier, ...]:
    what = f"the identifier list of profile {number}"
    count = file.one("identifier tuple", pointer, what)["count"]
    table = file.table("identifier", pointer + f4.IDENTIFIERS_OFFSET, count, what=what)
    return tuple(
        Identifier(kinds[kind] if kind < len(kinds) else f"KIND{kind}", logical, physical)
        for kind, _, logical, physical in table.tolist()
    )


class TraceLine:
    """What one thread or stream did over time.

    From ``time_ns[i]`` (since the epoch) to ``time_ns[i + 1]`` it was in context
    ``context[i]``; context 0 is "not running".

    Attributes:
        profile: row of its thread in ``profile.db``.
        count: number of samples.
    """

    def __init__(self, file: f4.DatabaseFile, profile: int, start: int, count: int) -> None:
        self.profile, self.count = profile, count
        self._file, self._start = file, start

    @property
    def time_ns(self) -> Ints:
        """Time of each sample; shape (samples,)."""
        return self._decoded("time_ns")

    @property
    def context(self) -> Ints:
        """Context from each sample on; shape (samples,)."""
        return self._decoded("context")

    def _decoded(self, column: str) -> Ints:
        samples = self._file.table("trace sample", self._start, self.count)
        decoded: Ints = samples[column].astype(np.int64)
        self._file.spent(samples.nbytes)
        return decoded

    @property
    def idle_ns(self) -> int:
        """Time in context 0 between its first and last sample."""
        return int(np.diff(self.time_ns)[self.context[:-1] == 0].sum())


def read_traces(path: Path, profiles: int) -> list[TraceLine]:
    """The trace lines of ``trace.db``; ``profiles`` is how many ``profile.db`` has. A DatabaseError
    says that it is missing, cut short, damaged, or of another format."""
    file = f4.DatabaseFile(path, "trce", b"trace.db", ("CtxTraces",))
    _, table = file.items("CtxTraces", "trace headers", "trace")
    lines = []
    room, size = file.size, f4.RECORDS["trace sample"].itemsize
    for number, (profile, start, end) in enumerate(table.tolist()):
        what = f"trace {number}"
        if profile >= profiles:
            raise file.error(f"{what} is of profile {profile}, and there are {profiles}")
        count, rest = divmod(end - start, size)
        room -= max(end - start, 0)
        if end < start or rest or room < 0:
            raise file.error(
                f"{what} runs from byte {start} to byte {end}, not a whole number of "
                f"{size}-byte samples within {file.size} bytes"
            )
        file.table("trace sample", start, count, what=what)
        line = TraceLine(file, profile, start, count)
        times = line.time_ns
        if count and (times[0] < 0 or (times[1:] < times[:-1]).any()):
            raise file.error(f"the times of {what} do not increase")
        lines.append(line)
    return lines
