"""A shared machine's slow periods, left out of a record by the same rule everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def faster_half(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the faster half of what was repeated.

    Where other guests of a machine come and go, the same work takes up to twice as long for
    seconds (seen in a virtual machine that tells nothing of it: no stolen time, no process).
    A median then says which period a run fell into. Of each run the iterations are kept that
    are fastest on their slowest rank; of processes alone likewise, of each exchange of the
    link probe the repetitions. Runs and their predictions are so treated alike.
    """
    kept = dict(record)
    chosen = _chosen(record["iterations"], lambda row: row["run"], lambda row: row["iteration"])
    for table in ("iterations", "parts", "collectives", "spans"):
        kept[table] = [row for row in record[table] if (row["run"], row["iteration"]) in chosen]
    alone = record["compute_profile"]
    chosen = _chosen(
        _iterations_alone(alone),
        _setting,
        lambda row: row["iteration"],
    )
    kept["compute_profile"] = [r for r in alone if (_setting(r), r["iteration"]) in chosen]
    kept["link_probe"] = _probe_half(record["link_probe"])
    return kept


def _setting(row: Row) -> tuple[Any, ...]:
    return row["case"], row["concurrent"], row["batch_size"]


def _iterations_alone(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Time of each process's iterations: all their parts."""
    total: dict[tuple[Any, ...], float] = defaultdict(float)
    for row in rows:
        total[*_setting(row), row["process"], row["iteration"]] += row["time_ms"]
    names = ("case", "concurrent", "batch_size", "process", "iteration", "time_ms")
    return [dict(zip(names, (*key, time_ms), strict=True)) for key, time_ms in total.items()]


def _chosen(
    rows: Sequence[Row], group: Callable[[Row], Hashable], iteration: Callable[[Row], int]
) -> set[tuple[Hashable, int]]:
    """(group, iteration) of the faster half, an iteration being as slow as its slowest row."""
    slowest: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for row in rows:
        times, place = slowest[group(row)], iteration(row)
        times[place] = max(times.get(place, 0.0), row["time_ms"])
    return {
        (name, place)
        for name, times in slowest.items()
        for place in sorted(times, key=lambda place: (times[place], place))[: -(-len(times) // 2)]
    }


def _probe_half(rows: Sequence[Row]) -> list[Row]:
    by_case: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_case[row["collective"], row["ranks"], row["bytes"]].append(row)
    return [
        row
        for found in by_case.values()
        for row in sorted(found, key=lambda row: row["time_ms"])[: -(-len(found) // 2)]
    ]
