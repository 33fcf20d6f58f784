"""From hashed categories to row numbers, in memory that does not grow with the data.

Row 0 is for what is missing or rarer than the threshold; the others are numbered from 1
by falling count, ties by the category's own value, so that row 1 is the hottest. (As
NVIDIA's Spark preprocessing does, which leaves ties to chance.)

Blocks are counted one by one; what memory has no room for goes to disk as a sorted run, and runs
are merged one range of keys at a time. Numbering is a counting sort in two streaming passes.
Looking up uses as many passes over the column as the hash table needs.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

Blocks = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""A column read from its beginning: blocks of keys (uint32) and of missing bits (uint32)."""
Entries = tuple[np.ndarray, np.ndarray]
"""Keys in rising order (uint32), and how often each came (int64)."""
COMMON_COUNT = 1 << 16
"""Counts from here on are sorted in memory: at most N / COMMON_COUNT categories have one."""
ENTRY_BYTES = 48
"""Memory of an entry while entries are added up."""
SLOT_BYTES = 32
"""Memory of a category in pandas' hash table, at most."""
MERGE_ENTRIES = 1 << 20


def build_vocabulary(
    blocks: Blocks, bit: int, threshold: int, memory: int, keys: Path, counts: Path
) -> tuple[int, int]:
    """Count a column's categories and number those that came ``threshold`` times or more; gives how
    many are kept, and how many there were.

    Its missing bit is ``bit``, and counting may take ``memory`` bytes. The file ``keys`` gets the
    categories kept, uint32: entry i is row i + 1; ``counts`` gets how often each came, int64.
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
    most = max(1 << 10, memory // ENTRY_BYTES)
    runs: list[tuple[Path, Path]] = []
    counted: list[Entries] = []
    for block, missing in blocks():
        counted.append(np.unique(block[_given(missing, bit)], return_counts=True))
        if sum(len(keys) for keys, _ in counted) > most:
            counted = [_added_up(counted)]
            # with less than half of the room free every few blocks would be added up again
            if 2 * len(counted[0][0]) > most:
                runs.append(_write_run(scratch, len(runs), *counted.pop()))
    return [*runs, _write_run(scratch, len(runs), *_added_up(counted))]


def _given(missing: np.ndarray, bit: int) -> np.ndarray:
    """Where a column has a category."""
    return missing & np.uint32(1 << bit) == 0


def _added_up(pieces: Sequence[Entries]) -> Entries:
    """The entries of several pieces, with the counts of equal keys added up."""
    if len(pieces) == 1:
        return pieces[0]
    keys = np.concatenate([np.empty(0, np.uint32), *(keys for keys, _ in pieces)])
    counts = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in pieces)])
    keys, places = np.unique(keys, return_inverse=True)
    return keys, np.bincount(places, counts, len(keys)).astype(np.int64)


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


def _merge_range(runs: list[Entries], low: int, high: int) -> Entries:
    """The entries of all runs with keys in [low, high)."""
    pieces = []
    for keys, counts in runs:
        # the upper end may be 2^32, which uint32 has not
        begin = int(np.searchsorted(keys, np.uint32(low)))
        end = len(keys) if high >> 32 else int(np.searchsorted(keys, np.uint32(high)))
        pieces.append((np.array(keys[begin:end]), np.array(counts[begin:end])))
    return _added_up(pieces)


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
    blocks: Blocks, bit: int, keys: Path, memory: int, dtype: np.dtype, path: Path
) -> None:
    """Write the row number of every value of a column to a file. ``keys`` has the column's
    categories, as :func:`build_vocabulary` wrote them; the hash table may take ``memory`` bytes: a
    larger vocabulary takes several passes."""
    categories = _map(keys, np.uint32)
    at_once = max(1 << 9, memory // SLOT_BYTES)
    with path.open("w+b") as file:
        for first in range(0, max(1, len(categories)), at_once):
            some = pd.Index(np.array(categories[first : first + at_once]))
            forget(categories)
            place = 0
            for block, missing in blocks():
                file.seek(place)
                out = np.fromfile(file, dtype, len(block)) if first else np.zeros(len(block), dtype)
                found = some.get_indexer(pd.Index(block))
                known = (found >= 0) & _given(missing, bit)
                out[known] = first + 1 + found[known]
                file.seek(place)
                file.write(out.data)
                place += out.nbytes
        file.flush()
        os.fdatasync(file.fileno())
