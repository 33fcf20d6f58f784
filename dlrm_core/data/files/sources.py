"""Memory-mapped data sets in the layouts that DLRM trainings use.

Three formats, named explicitly, since two of them share file names with other types:

* ``split_binary``: NVIDIA's; feature_spec.yaml says which file holds what;
* ``deepspark_dist``: DeepSpark's; ``SPLIT/label.bin`` float32, ``SPLIT/numerical.bin``
  (N, D) float32 counts, ``SPLIT/cat_T.bin`` int32; log(x+1) is taken of the counts;
* ``terabyte``: facebook's and MLPerf's ``terabyte_processed_SPLIT.bin``, rows of 40 int32:
  label, 13 counts, 26 categorical; log(x+1) is taken of the counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.data.files.spec import ColumnFile, SplitFiles, read_spec

FORMATS = ("split_binary", "deepspark_dist", "terabyte")
TERABYTE_COLUMNS = 40
TERABYTE_DENSE = 13


@dataclass(frozen=True)
class Column:
    """One feature of one split, N values of it.

    Attributes:
        file: where it lies.
        name: of the feature.
        values: (N,), memory-mapped; in a row-major file with a stride.
        rows: embedding rows that it may index; None where the data set does not say.
    """

    file: Path
    name: str
    values: np.ndarray
    rows: int | None = None


@dataclass(frozen=True)
class Source:
    """One split of a data set on disk.

    Attributes:
        path: of the data set, as given.
        format: one of FORMATS.
        split: 'train', 'test' or 'val'.
        label: one column.
        dense: (N, D) values, memory-mapped; None without dense features.
        dense_names: D names.
        dense_file: where they lie.
        tables: T columns.
        metadata: what the data set says of itself.
    """

    path: Path
    format: str
    split: str
    label: Column
    dense: np.ndarray | None
    dense_names: tuple[str, ...]
    dense_file: Path
    tables: tuple[Column, ...]
    metadata: Any

    @property
    def samples(self) -> int:
        """Number of samples N."""
        return len(self.label.values)

    @property
    def counts(self) -> bool:
        """Whether dense values are counts, of which log(x+1) is taken."""
        return self.format != "split_binary"

    def read_labels(self, start: int, stop: int) -> np.ndarray:
        """Targets (B, 1) float32.

        Raises:
            InputError: a value that is neither 0 nor 1.
        """
        values = self.label.values[start:stop]
        values = values.view(np.uint8) if values.dtype == bool else values
        check_labels(self.label, values, start)
        return values.astype(np.float32).reshape(-1, 1)

    def read_dense(self, start: int, stop: int) -> np.ndarray:
        """Dense features (B, D) float32, log(x+1) taken where they are counts.

        Raises:
            InputError: a value that is not finite, or a count below 0.
        """
        if self.dense is None:
            return np.empty((stop - start, 0), np.float32)
        values = self.dense[start:stop].astype(np.float32)
        check_dense(self.dense_file, self.dense_names, values, start, self.counts)
        if self.counts:
            # torch's logarithm, as DeepSpark's: the same bits, and on torch's threads
            import torch

            torch.from_numpy(values).add_(1.0).log_()
        return values

    def read_rows(self, start: int, stop: int, rows: Sequence[int], out: np.ndarray) -> None:
        """Rows looked up of every table into ``out`` (T, B) int64.

        Args:
            rows: what each table has; every value is held against it.

        Raises:
            InputError: naming file, sample, feature, value and the number of rows.
        """
        for table, column in enumerate(self.tables):
            values = column.values[start:stop]
            check_range(column, values, start, rows[table])
            out[table] = values


def check_labels(column: Column, values: np.ndarray, start: int) -> None:
    """Hold labels (B,) against 0 and 1.

    Raises:
        InputError: naming file, sample, feature and value.
    """
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        refuse(column, start + int(wrong.argmax()), values[wrong][0], "0 or 1")


def check_dense(
    file: Path, names: Sequence[str], values: np.ndarray, start: int, counts: bool
) -> None:
    """Hold dense values (B, D) against what a feature, or a count, can be.

    Raises:
        InputError: naming file, sample, feature and value.
    """
    good, wanted = np.isfinite(values), "a finite number"
    if counts and not (enough := values >= 0).all():
        good, wanted = enough, "a count of 0 or more"
    if not good.all():
        row, feature = map(int, np.unravel_index(int((~good).argmax()), good.shape))
        refuse(Column(file, names[feature], values), start + row, values[row, feature], wanted)


def refuse(column: Column, row: int, value: Any, wanted: str) -> NoReturn:
    """Raise what says which value of which file is wrong.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"{column.file}: sample {row}, feature {column.name}: {value}, expected {wanted}"
    )


def check_range(column: Column, values: np.ndarray, start: int, rows: int) -> None:
    """Hold row numbers against a table's size.

    Raises:
        InputError: naming file, sample, feature, value and the number of rows.
    """
    if not values.size:
        return
    # seen as unsigned, a negative number is a huge one: one comparison for both ends
    unsigned = values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "i" else values
    if int(unsigned.max()) >= rows:
        row = int((unsigned >= rows).argmax())
        raise InputError(
            f"{column.file}: sample {start + row}, feature {column.name}: row {values[row]}, but "
            f"the table has {rows} rows (0 to {rows - 1})"
        )


def open_source(path: str | Path, format: str, split: str) -> Source:
    """Memory-map one split of a data set.

    Args:
        path: its folder (or, with terabyte, the .bin file itself).
        format: one of FORMATS.
        split: 'train', 'test' or, where there is one, 'val'.

    Raises:
        InputError: a file is missing, cut short or of another length than its neighbours.
    """
    path = Path(path)
    if format not in FORMATS:
        raise InputError(f"format is {format!r}, expected one of {', '.join(FORMATS)}")
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        why = "no such data set; 'dlrm data generate' makes one"
        if partial.exists():
            why = f"not finished: {partial} is there; give the command that began it again"
        raise InputError(f"{path}: {why}")
    if format == "terabyte":
        return _terabyte(path, split)
    if format == "deepspark_dist":
        return _column_files(path, format, split, _deepspark_files(path, split), {})
    spec = read_spec(path)
    if split not in spec.splits:
        raise InputError(f"{path} has no split {split!r}, but {', '.join(spec.splits)}")
    return _column_files(path, format, split, spec.splits[split], spec.metadata)


def _deepspark_files(path: Path, split: str) -> SplitFiles:
    """The files of DeepSpark's variant, which has no list of them."""
    folder = path / split
    if not (folder / "label.bin").is_file():
        raise InputError(f"{folder / 'label.bin'}: no such file (format deepspark_dist)")
    found = (re.fullmatch(r"cat_(\d+)\.bin", file.name) for file in folder.iterdir())
    numbers = sorted(int(match[1]) for match in found if match)
    if numbers != list(range(len(numbers))) or not numbers:
        raise InputError(
            f"{folder} has the tables {numbers}, expected cat_0.bin, cat_1.bin, ... without gaps"
        )
    label = ColumnFile(folder / "label.bin", ("label",), np.dtype("<f4"))
    tables = tuple(
        ColumnFile(folder / f"cat_{t}.bin", (f"cat_{t}.bin",), np.dtype("<i4")) for t in numbers
    )
    dense = folder / "numerical.bin"
    if not dense.is_file():
        return SplitFiles(None, label, tables)
    samples, size = _file_size(label.path) // 4, _file_size(dense)
    if not samples or size % (4 * samples):
        raise InputError(
            f"{dense} has {size} bytes, expected a multiple of {4 * samples} (float32, "
            f"{samples} samples in {label.path.name})"
        )
    names = tuple(f"num_{i}" for i in range(size // (4 * samples)))
    return SplitFiles(ColumnFile(dense, names, np.dtype("<f4")), label, tables)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _sample_count(files: Sequence[ColumnFile]) -> int:
    """Samples in a split's files, which must all have as many.

    Raises:
        InputError: naming the file and both numbers.
    """
    counts = []
    for file in files:
        size = _file_size(file.path)
        if size % file.row_bytes:
            raise InputError(
                f"{file.path} has {size} bytes, expected a multiple of {file.row_bytes} "
                f"({len(file.features)} x {file.dtype} a sample): cut short, or of another type"
            )
        counts.append(size // file.row_bytes)
    for file, count in zip(files, counts, strict=True):
        if count != counts[0]:
            # the odd one out is named: most files agree
            usual = max(set(counts), key=counts.count)
            odd, found = (files[0], counts[0]) if count == usual else (file, count)
            raise InputError(
                f"{odd.path} has {found} samples ({_file_size(odd.path)} bytes), but the other "
                f"files of the split have {usual} ({usual * odd.row_bytes} bytes)"
            )
    return counts[0]


def _column_files(path: Path, format: str, split: str, files: SplitFiles, metadata: Any) -> Source:
    """A split whose features lie in files of their own."""
    samples = _sample_count(files.all)
    dense = files.numerical

    def column(file: ColumnFile) -> Column:
        return Column(file.path, file.features[0], _map(file, samples)[:, 0], file.rows)

    return Source(
        path=path,
        format=format,
        split=split,
        label=column(files.label),
        dense=None if dense is None else _map(dense, samples),
        dense_names=() if dense is None else dense.features,
        dense_file=files.label.path if dense is None else dense.path,
        tables=tuple(column(file) for file in files.tables),
        metadata=metadata,
    )


def _map(file: ColumnFile, samples: int) -> np.ndarray:
    shape = (samples, len(file.features))
    if not samples:
        return np.empty(shape, file.dtype)
    # bool files are mapped as bytes, so that a byte of 2 is seen
    kind = np.dtype(np.uint8) if file.dtype == bool else file.dtype
    return np.memmap(file.path, dtype=kind, mode="r", shape=shape)


def _terabyte(path: Path, split: str) -> Source:
    """A split in facebook's layout: one file with a row a sample."""
    file = path / f"terabyte_processed_{split}.bin" if path.is_dir() else path
    dense = tuple(f"num_{i}" for i in range(TERABYTE_DENSE))
    tables = tuple(f"cat_{t}" for t in range(TERABYTE_COLUMNS - 1 - TERABYTE_DENSE))
    whole = ColumnFile(file, ("label", *dense, *tables), np.dtype("<i4"))
    values = _map(whole, _sample_count([whole]))
    columns = [Column(file, name, values[:, i]) for i, name in enumerate(whole.features)]
    return Source(
        path=path,
        format="terabyte",
        split=split,
        label=columns[0],
        dense=values[:, 1 : 1 + TERABYTE_DENSE],
        dense_names=dense,
        dense_file=file,
        tables=tuple(columns[1 + TERABYTE_DENSE :]),
        metadata={},
    )
