"""From hashed categories to row numbers, in memory that does not grow with the data.

Row 0 is for what is missing or rarer than the threshold; the others are numbered from 1
by falling count, ties by the category's own value, so that row 1 is the hottest. (As
NVIDIA's Spark preprocessing does, which leaves ties to chance.)

Counting uses one hash table; when it is full it goes to disk as a sorted run, and runs
are merged one range of keys at a time. Numbering is a counting sort in two streaming
passes. Looking up uses as many passes over the column as the table needs.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dlrm_workbook.datasets.loops import compiled, count_keys, insert_keys, look_up_keys

Blocks = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""A column read from its beginning: blocks of keys (uint32) and of missing bits (uint32)."""
COMMON_COUNT = 1 << 16
"""Counts from here on are sorted in memory: at most N / COMMON_COUNT categories have one."""
SLOT_BYTES = 12
MERGE_ENTRIES = 1 << 20


class HashTable:
    """An open hash table from uint32 to int64 (0: empty), at most half full."""

    def __init__(self, slots: int) -> None:
        self.slots = 1 << max(4, (slots - 1).bit_length())
        self.keys = np.zeros(self.slots, np.uint32)
        self.values = np.zeros(self.slots, np.int64)
        self.shift = np.uint64(64 - (self.slots.bit_length() - 1))

    @property
    def limit(self) -> int:
        """Most entries that it takes."""
        return self.slots // 2

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys in rising order, and their values."""
        full = np.flatnonzero(self.values)
        order = np.argsort(self.keys[full], kind="stable")
        return self.keys[full][order], self.values[full][order]


def build_vocabulary(
    blocks: Blocks, bit: int, threshold: int, memory: int, keys: Path, counts: Path
) -> tuple[int, int]:
    """Count a column's categories and number those that came ``threshold`` times or more.

    Args:
        bit: of the missing bits that is this column's.
        memory: bytes that the hash table may take.
        keys: file that gets the categories kept, uint32: entry i is row i + 1.
        counts: file that gets how often each came, int64.

    Returns:
        categories kept, and categories there were.
    """
    scratch = keys.with_suffix(".runs")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    runs = _count(blocks, bit, memory, scratch)
    kept, histogram, different = _merge(runs, threshold, scratch, memory)
    _number(kept, histogram, keys, counts)
    shutil.rmtree(scratch)
    return int(histogram.sum()), different


def _count(blocks: Blocks, bit: int, memory: int, scratch: Path) -> list[tuple[Path, Path]]:
    """Sorted runs of (key, count) on disk."""
    count, insert = compiled(count_keys), compiled(insert_keys)
    table = HashTable(1 << 10)
    runs: list[tuple[Path, Path]] = []
    most = max(1 << 10, 1 << ((memory // SLOT_BYTES).bit_length() - 1))
    state = np.zeros(2, np.int64)
    for block, missing in blocks():
        state[0] = 0
        while True:
            count(
                block, missing, np.uint32(bit), table.shift, table.limit,
                table.keys, table.values, state,
            )  # fmt: skip
            if state[0] == len(block):
                break
            keys, counts = table.entries()
            if table.slots < most:
                table = HashTable(min(most, table.slots * 4))
                insert(keys, counts, table.shift, table.keys, table.values)
            else:
                runs.append(_write_run(scratch, len(runs), keys, counts))
                table = HashTable(most)
                state[1] = 0
    return [*runs, _write_run(scratch, len(runs), *table.entries())]


def _write_run(
    scratch: Path, number: int, keys: np.ndarray, counts: np.ndarray
) -> tuple[Path, Path]:
    files = scratch / f"{number}.keys", scratch / f"{number}.counts"
    keys.tofile(files[0])
    counts.tofile(files[1])
    return files


def _merge(
    runs: list[tuple[Path, Path]], threshold: int, scratch: Path, memory: int
) -> tuple[tuple[Path, Path], np.ndarray, int]:
    """Runs added up: the kept entries by rising key, how many have each count, and all there were.

    The last place of the histogram is for counts of COMMON_COUNT and above.
    """
    mapped = [(_map(k, np.uint32), _map(c, np.int64)) for k, c in runs]
    total = sum(len(keys) for keys, _ in mapped)
    # a range of keys of all runs at a time; hashed categories spread evenly
    at_once = max(1024, min(MERGE_ENTRIES, memory // 64))
    parts = max(1, -(-total // at_once))
    edges = [(part << 32) // parts for part in range(parts + 1)]
    histogram = np.zeros(COMMON_COUNT + 1, np.int64)
    different = 0
    kept = scratch / "kept.keys", scratch / "kept.counts"
    with kept[0].open("wb") as keys_file, kept[1].open("wb") as counts_file:
        for low, high in itertools.pairwise(edges):
            keys, counts = _merge_range(mapped, low, high)
            forget(*(array for run in mapped for array in run))
            different += len(keys)
            chosen = counts >= threshold
            keys, counts = keys[chosen], counts[chosen]
            histogram += np.bincount(np.minimum(counts, COMMON_COUNT), minlength=COMMON_COUNT + 1)
            keys_file.write(keys.data)
            counts_file.write(counts.data)
    return kept, histogram, different


def _merge_range(
    runs: list[tuple[np.ndarray, np.ndarray]], low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys in [low, high) of all runs, rising, with their counts added up."""
    pieces = []
    for keys, counts in runs:
        # the upper end may be 2^32, which uint32 has not
        begin = int(np.searchsorted(keys, np.uint32(low)))
        end = len(keys) if high >> 32 else int(np.searchsorted(keys, np.uint32(high)))
        pieces.append((np.array(keys[begin:end]), np.array(counts[begin:end])))
    if len(pieces) == 1:
        return pieces[0]
    keys = np.concatenate([piece[0] for piece in pieces])
    counts = np.concatenate([piece[1] for piece in pieces])
    if not len(keys):
        return keys, counts
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.add.reduceat(counts, first)


def _number(
    kept: tuple[Path, Path], histogram: np.ndarray, keys_path: Path, counts_path: Path
) -> None:
    """Sort the kept entries by falling count, ties by rising key: a counting sort on disk."""
    all_keys, all_counts = _map(kept[0], np.uint32), _map(kept[1], np.int64)
    size = len(all_keys)
    out_keys = _new(keys_path, np.uint32, size)
    out_counts = _new(counts_path, np.int64, size)
    # where the entries of each count begin: after all of higher counts
    begins = np.cumsum(histogram[::-1])[::-1] - histogram
    common: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, size, MERGE_ENTRIES):
        keys = np.array(all_keys[start : start + MERGE_ENTRIES])
        counts = np.array(all_counts[start : start + MERGE_ENTRIES])
        is_common = counts >= COMMON_COUNT
        common.append((keys[is_common], counts[is_common]))
        keys, counts = keys[~is_common], counts[~is_common]
        order = np.argsort(counts, kind="stable")
        keys, counts = keys[order], counts[order]
        values, first, number = np.unique(counts, return_index=True, return_counts=True)
        ranks = np.arange(len(keys)) - np.repeat(first, number)
        places = np.repeat(begins[values], number) + ranks
        begins[values] += number
        out_keys[places], out_counts[places] = keys, counts
        forget(all_keys, all_counts, out_keys, out_counts)
    if common:
        keys = np.concatenate([piece[0] for piece in common])
        counts = np.concatenate([piece[1] for piece in common])
        order = np.lexsort((keys, -counts))
        out_keys[: len(keys)], out_counts[: len(keys)] = keys[order], counts[order]


def _map(path: Path, kind: type) -> np.ndarray:
    if not path.stat().st_size:
        return np.empty(0, kind)
    return np.memmap(path, dtype=kind, mode="r")


def forget(*arrays: np.ndarray | None) -> None:
    """Give the mapped pages back: what is on disk need not count as memory of ours."""
    for array in arrays:
        if isinstance(array, np.memmap):
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def _new(path: Path, kind: type, size: int) -> np.ndarray:
    if not size:
        path.write_bytes(b"")
        return np.empty(0, kind)
    return np.memmap(path, dtype=kind, mode="w+", shape=(size,))


def number_column(
    blocks: Blocks,
    bit: int,
    keys: Path,
    memory: int,
    dtype: np.dtype,
    path: Path,
) -> None:
    """Write the row number of every value of a column to a file.

    Args:
        keys: the column's categories, as :func:`build_vocabulary` wrote them.
        memory: bytes that the hash table may take; a larger vocabulary takes several passes.
        dtype: of the row numbers.
    """
    insert, look_up = compiled(insert_keys), compiled(look_up_keys)
    at_once = max(1 << 9, (1 << ((memory // SLOT_BYTES).bit_length() - 1)) // 2)
    categories = _map(keys, np.uint32)
    with path.open("w+b") as file:
        for first in range(0, max(1, len(categories)), at_once):
            some = np.array(categories[first : first + at_once])
            forget(categories)
            table = HashTable(2 * len(some))
            rows = np.arange(first + 1, first + 1 + len(some), dtype=np.int64)
            insert(some, rows, table.shift, table.keys, table.values)
            place = 0
            for block, missing in blocks():
                file.seek(place)
                out = np.fromfile(file, dtype, len(block)) if first else np.zeros(len(block), dtype)
                look_up(block, missing, np.uint32(bit), table.shift, table.keys, table.values, out)
                file.seek(place)
                file.write(out.data)
                place += out.nbytes
        file.flush()
        os.fdatasync(file.fileno())
