"""Splits of a data set in any layout, read block by block as they are stored.

Beside the layouts that training reads (:mod:`dlrm_core.data.files.sources`) there is Parquet:
``SPLIT.parquet``, or a folder ``SPLIT`` of such files in the order of their names, with the
columns ``label``, ``num_0`` ..., ``cat_0`` ... (TorchRec's ``int_0`` and Criteo's ``_c0`` to
``_c39`` are read too). What Parquet cannot say stands in the files' own metadata.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.data.files.sources import (
    FORMATS,
    TERABYTE_COLUMNS,
    TERABYTE_DENSE,
    Column,
    Source,
    check_dense,
    check_labels,
    check_range,
    open_source,
)
from dlrm_core.data.files.spec import read_spec
from dlrm_workbook.datasets.vocabulary import forget

CONVERTED_LAYOUTS = (*FORMATS, "parquet")
SPLIT_NAMES = ("train", "test", "val")
ROW_GROUP = 1 << 17
"""Samples read at a time, and of a row group in Parquet."""

ANY_ROW = int(np.iinfo(np.int32).max)
"""Rows of a table whose size nothing says."""

ABOUT = b"dlrm"
"""Key of the metadata in our Parquet files: JSON with ``counts`` and ``table_rows``."""


@dataclass(frozen=True)
class Block:
    """Neighbouring samples as they are stored.

    Attributes:
        start: number of the first in its split.
        labels: (B,) uint8, 0 or 1.
        dense: (B, D), finite; counts are 0 or more.
        tables: T times (B,) whole numbers, each a row of its table.
    """

    start: int
    labels: np.ndarray
    dense: np.ndarray
    tables: list[np.ndarray]


class Split(ABC):
    """One split of a data set.

    Attributes:
        samples: number of samples.
        counts: whether training takes log(x + 1) of dense values; else they are features.
        dense_type: of dense values as stored.
        dense: file and name of each of the D dense features, without values.
        tables: of the T categorical features too; their rows are None where nothing says.
    """

    samples: int
    counts: bool
    dense_type: np.dtype
    dense: Sequence[Column]
    tables: Sequence[Column]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers D and T of its features."""
        return len(self.dense), len(self.tables)

    @property
    def table_rows(self) -> tuple[int | None, ...]:
        return tuple(column.rows for column in self.tables)

    @abstractmethod
    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Samples ``start`` to ``stop`` in order, every value checked; an InputError names file,
        sample, feature, value and what was expected."""


class FileSplit(Split):
    """A split that training can read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.samples = source.samples
        self.counts = source.counts
        dense = source.dense
        self.dense_type = np.dtype(np.float32) if dense is None else dense.dtype
        names = source.dense_names
        self.dense = [Column(source.dense_file, name, np.empty(0)) for name in names]
        self.tables = source.tables

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        source = self._source
        for at in range(start, stop, ROW_GROUP):
            end = min(at + ROW_GROUP, stop)
            tables = [column.values[at:end] for column in source.tables]
            for column, values in zip(source.tables, tables, strict=True):
                check_range(column, values, at, column.rows or ANY_ROW)
            labels = source.read_labels(at, end)[:, 0].astype(np.uint8)
            dense = np.empty((end - at, 0), self.dense_type)
            if source.dense is not None:
                dense = source.dense[at:end]
                check_dense(source.dense_file, source.dense_names, dense, at, self.counts)
            yield Block(at, labels, dense, tables)
            forget(source.dense, *(column.values for column in (source.label, *source.tables)))


class ParquetSplit(Split):
    """A split in Parquet; ``counts`` as :func:`open_split` takes it. An InputError names a file
    that cannot be read, or columns that are not those of a data set."""

    def __init__(self, files: Sequence[Path], counts: bool | None) -> None:
        self._files = [(file, _open(file)) for file in files]
        path, first = self._files[0]
        for file, other in self._files[1:]:
            if not other.schema_arrow.equals(first.schema_arrow):
                raise InputError(f"{file} has other columns or types than {path}")
        schema = first.schema_arrow
        self._label, dense, tables = _columns(path, schema.names)
        types = {name: _type(schema.field(name).type) for name in schema.names}
        for names, kinds, expected in (
            ([self._label], "biuf", "numbers"),
            (dense, "iuf", "numbers"),
            (tables, "iu", "whole numbers"),
        ):
            for name in names:
                if types[name].kind not in kinds:
                    found = schema.field(name).type
                    raise InputError(f"{path}: {name} is of type {found}, expected {expected}")
        about = _about(path, schema.metadata, len(tables))
        if len({types[name] for name in dense}) > 1:
            raise InputError(f"{path}: {dense[0]} ... are of different types, expected one")
        self.dense_type = types[dense[0]] if dense else np.dtype(np.float32)
        self.dense = [Column(path, name, np.empty(0)) for name in dense]
        self.samples = sum(file.metadata.num_rows for _, file in self._files)
        rows = about.get("table_rows") or [None] * len(tables)
        self.tables = [
            Column(path, name, np.empty(0), count) for name, count in zip(tables, rows, strict=True)
        ]
        self.counts = self._are_counts(path, about.get("counts") if counts is None else counts)

    def _are_counts(self, path: Path, said: bool | None) -> bool:
        if said is not None or not self.dense:
            return bool(said)
        if self.dense_type.kind in "iu":
            return True
        if self.dense_type == np.float16:
            return False
        raise InputError(
            f"{path}: {self.dense[0].name} is {self.dense_type}, which may be counts or features: "
            "say --dense counts (training takes log(x + 1)) or --dense features"
        )

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        at = 0
        for path, file in self._files:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if at + rows > start and at < stop:
                    yield from self._group(path, file, group, at, max(start, at), stop)
                at += rows

    def _group(
        self, path: Path, file: Any, group: int, at: int, start: int, stop: int
    ) -> Iterator[Block]:
        """Samples of a row group, which begins ``at`` a sample, from ``start`` to ``stop``."""
        names = [self._label, *(column.name for column in (*self.dense, *self.tables))]
        try:
            for batch in file.iter_batches(ROW_GROUP, [group], names):
                first, last = max(at, start), min(at + batch.num_rows, stop)
                if first < last:
                    yield self._block(path, batch.slice(first - at, last - first), first)
                at += batch.num_rows
        except InputError:
            raise
        except (OSError, ValueError) as error:
            _unreadable(path, error)

    def _block(self, path: Path, batch: Any, start: int) -> Block:
        def values(name: str) -> np.ndarray:
            column = batch.column(name)
            if column.null_count:
                row = start + column.is_null().to_pylist().index(True)
                raise InputError(f"{path}: sample {row}, feature {name} is empty")
            return column.to_numpy(zero_copy_only=False)

        labels = values(self._label)
        check_labels(Column(path, self._label, labels), labels, start)
        dense = np.empty((batch.num_rows, len(self.dense)), self.dense_type)
        for i, column in enumerate(self.dense):
            dense[:, i] = values(column.name)
        check_dense(path, [column.name for column in self.dense], dense, start, self.counts)
        tables = [values(column.name) for column in self.tables]
        for column, rows in zip(self.tables, tables, strict=True):
            check_range(replace(column, file=path), rows, start, column.rows or ANY_ROW)
        return Block(start, labels.astype(np.uint8), dense, tables)


def _open(file: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        _unreadable(file, error)


def _unreadable(file: Path, error: Exception) -> NoReturn:
    # pyarrow's ArrowInvalid is a ValueError
    reason = (str(error).splitlines() or ["no reason given"])[0][:200]
    raise InputError(f"{file} cannot be read as Parquet: {reason}") from None


def _type(kind: Any) -> np.dtype:
    """numpy's type of a column; of objects where there is none."""
    try:
        return np.dtype(kind.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        return np.dtype(object)


def _columns(file: Path, names: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Names of the label, the dense features and the categorical ones, in order."""
    criteo = [f"_c{i}" for i in range(TERABYTE_COLUMNS)]
    if sorted(names) == sorted(criteo):
        return criteo[0], criteo[1 : 1 + TERABYTE_DENSE], criteo[1 + TERABYTE_DENSE :]
    found: dict[str, list[str]] = {}
    for prefixes in ("num|int", "cat"):
        numbered = {
            int(match[2]): name
            for name in names
            if (match := re.fullmatch(rf"({prefixes})_(\d+)", name))
        }
        if sorted(numbered) != list(range(len(numbered))):
            raise InputError(
                f"{file} has the columns {', '.join(numbered.values())[:200]}, expected "
                f"{prefixes.split('|')[0]}_0, _1, ... without gaps"
            )
        found[prefixes] = [numbered[i] for i in range(len(numbered))]
    dense, tables = found["num|int"], found["cat"]
    if "label" not in names or not tables or len(names) != 1 + len(dense) + len(tables):
        raise InputError(
            f"{file} has the columns {', '.join(names)[:200]}, expected label, num_0 ... and "
            f"cat_0 ..., or _c0 to _c{TERABYTE_COLUMNS - 1}"
        )
    return "label", dense, tables


def _about(file: Path, metadata: Any, tables: int) -> dict[str, Any]:
    """The metadata that a file of ours has; {} of a file of others."""
    if not metadata or ABOUT not in metadata:
        return {}
    try:
        about = json.loads(metadata[ABOUT])
        counts, rows = about["counts"], about["table_rows"]
    except (ValueError, KeyError, TypeError):
        counts = rows = 0
    known = rows is None or (
        isinstance(rows, list)
        and len(rows) == tables
        and all(row is None or (type(row) is int and 0 < row <= ANY_ROW) for row in rows)
    )
    if not isinstance(counts, bool) or not known:
        raise InputError(
            f"{file}: its metadata 'dlrm' is {str(metadata[ABOUT])[:200]}, expected counts (true "
            f"or false) and table_rows (a number of rows for each of the {tables} tables)"
        )
    return {"counts": counts, "table_rows": rows and tuple(rows)}


def split_names(path: Path, layout: str) -> list[str]:
    """Names of a data set's splits, those of :data:`SPLIT_NAMES` first and in their order."""
    if layout == "split_binary":
        names = set(read_spec(path).splits)
        return [name for name in SPLIT_NAMES if name in names] + sorted(names - set(SPLIT_NAMES))
    if layout == "parquet":
        return [name for name in SPLIT_NAMES if _parquet_files(path, name)]
    if layout == "deepspark_dist":
        return [name for name in SPLIT_NAMES if (path / name).is_dir()]
    if path.is_file():
        return [path.stem.removeprefix("terabyte_processed_")]
    return [name for name in SPLIT_NAMES if (path / f"terabyte_processed_{name}.bin").exists()]


def _parquet_files(path: Path, split: str) -> list[Path]:
    one = path / f"{split}.parquet"
    return [one] if one.is_file() else sorted((path / split).glob("*.parquet"))


def open_split(path: Path, layout: str, name: str, counts: bool | None = None) -> Split:
    """One split of a data set in any of :data:`CONVERTED_LAYOUTS`; ``counts`` says whether
    Parquet's dense values are counts, None: as its files say. An InputError names a file that is
    missing, cut short, or not what the layout says."""
    if layout == "parquet":
        return ParquetSplit(_parquet_files(path, name), counts)
    return FileSplit(open_source(path, layout, name))
