"""The files between Criteo's text and the finished data set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dlrm_core.datasets.criteo_kernels import DENSE, TABLES
from dlrm_core.datasets.feature_spec import index_dtype
from dlrm_core.datasets.resumable import OpenFiles, write_at
from dlrm_core.datasets.vocabulary import build_vocabulary, number_column

ROWS_AT_ONCE = 1 << 18
LABEL, NUMERICAL, MISSING_BITS = "label.bin", "numerical.bin", "missing.bin"
SIZES = {LABEL: 1, NUMERICAL: 2 * DENSE}


class RawColumns:
    """``raw/``: columns of all rows, written in pieces; then ``train/`` and ``test/``.

    Every step can be done again after a kill, with the same outcome.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw = folder / "raw"
        self._files = OpenFiles()

    def write(
        self,
        row: int,
        labels: np.ndarray,
        dense: np.ndarray,
        categories: np.ndarray,
        missing: np.ndarray,
    ) -> None:
        """Write rows from ``row`` on; any thread, any order."""
        write_at(self._open(LABEL), labels, row)
        write_at(self._open(NUMERICAL), dense, row * SIZES[NUMERICAL])
        write_at(self._open(MISSING_BITS), missing, row * 4)
        for table in range(TABLES):
            write_at(self._open(_raw_name(table)), categories[table], row * 4)

    def _open(self, name: str) -> int:
        return self._files.open(self.raw / name)

    def sync(self) -> None:
        """Return when the disk has all that was written."""
        self._files.sync()

    def split(self, rows: int, train: int) -> None:
        """Labels and dense features to their splits: the first ``train`` rows and the others."""
        self._files.close()
        for name, size in SIZES.items():
            source = self.raw / name
            for split in ("train", "test"):
                (self.folder / split).mkdir(exist_ok=True)
            if source.exists():
                _copy_part(source, train * size, rows * size, self.folder / "test" / name)
                source.replace(self.folder / "train" / name)
            os.truncate(self.folder / "train" / name, train * size)

    def convert(
        self, table: int, rows: int, train: int, threshold: int, memory: int
    ) -> tuple[int, int]:
        """Number one column's categories and write its row numbers.

        Returns:
            categories kept, and categories there were.
        """
        # of a kill in the middle of a column nothing is left
        name = f"cat_{table}.bin"
        folder = self.folder / "vocabulary"
        with RawColumn(self.raw, table, rows) as column:
            vocabulary = build_vocabulary(
                column.blocks, table, threshold, memory, folder, f"cat_{table}"
            )
            dtype = index_dtype(vocabulary.size + 1)
            with OpenFiles() as files:
                paths = [self.folder / split / name for split in ("train", "test")]
                handles = [files.open(path) for path in paths]
                sizes = [train, rows - train]
                for path, size in zip(paths, sizes, strict=True):
                    files.cut(path, size * dtype.itemsize)

                def write(place: int, values: np.ndarray) -> None:
                    cut = min(max(train - place, 0), len(values))
                    write_at(handles[0], values[:cut], place * dtype.itemsize)
                    write_at(handles[1], values[cut:], (place + cut - train) * dtype.itemsize)

                def read(place: int, count: int) -> np.ndarray:
                    cut = min(max(train - place, 0), count)
                    parts = [
                        read_values(handles[0], dtype, place, cut),
                        read_values(handles[1], dtype, place + cut - train, count - cut),
                    ]
                    return np.concatenate(parts)

                number_column(column.blocks, table, vocabulary, memory, dtype, read, write)
                files.sync()
        for path in (vocabulary.keys, vocabulary.counts):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return vocabulary.size, vocabulary.different

    def drop(self, table: int) -> None:
        """Free the disk of a column that is done."""
        (self.raw / _raw_name(table)).unlink(missing_ok=True)

    def remove(self) -> None:
        """Free the disk of all that is left."""
        self._files.close()
        shutil.rmtree(self.raw, ignore_errors=True)

    def __enter__(self) -> RawColumns:
        return self

    def __exit__(self, *failure: object) -> None:
        self._files.close()


class RawColumn:
    """One column of hashed categories, read in blocks as often as needed."""

    def __init__(self, raw: Path, table: int, rows: int) -> None:
        self._paths = raw / _raw_name(table), raw / MISSING_BITS
        self._rows = rows
        self._handles: list[int] = []

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and missing bits, a quarter of a million rows at a time."""
        for start in range(0, self._rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, self._rows - start)
            keys, missing = (
                read_values(handle, np.dtype(np.uint32), start, count) for handle in self._handles
            )
            yield keys, missing

    def __enter__(self) -> RawColumn:
        self._handles = [os.open(path, os.O_RDONLY) for path in self._paths]
        return self

    def __exit__(self, *failure: object) -> None:
        for handle in self._handles:
            os.close(handle)


def read_values(handle: int, dtype: np.dtype, first: int, count: int) -> np.ndarray:
    """``count`` values from the ``first``-th on, in memory of their own."""
    out = np.empty(count, dtype)
    view = memoryview(out.view(np.uint8).data)
    place = first * dtype.itemsize
    while len(view):
        got = os.preadv(handle, [view], place)
        if not got:
            raise OSError(f"a file ends {len(view)} bytes too early")
        view, place = view[got:], place + got
    return out


def _raw_name(table: int) -> str:
    return f"cat_{table}.u32"


def _copy_part(source: Path, begin: int, end: int, target: Path) -> None:
    """Bytes [begin, end) of a file as a file of their own."""
    with source.open("rb") as read, target.open("wb") as write:
        read.seek(begin)
        left = end - begin
        while left:
            block = read.read(min(left, 8 << 20))
            if not block:
                raise OSError(f"{source} ends {left} bytes too early")
            write.write(block)
            left -= len(block)
        write.flush()
        os.fsync(write.fileno())
