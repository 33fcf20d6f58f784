"""NVIDIA's feature_spec.yaml: which column lies in which file, of which type and size.

Layout (DeepLearningExamples, PyTorch/Recommendation/DLRM): sections ``feature_spec``
(name to dtype, and cardinality of a categorical feature), ``source_spec`` (``train`` and
``test`` to chunks of type split_binary, one file each, paths relative to the YAML),
``channel_spec`` (categorical, numerical, label, in reading order) and ``metadata``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_text
from dlrm_core.base.settings import check_text, read_yaml

FILE_NAME = "feature_spec.yaml"
MOST_SPEC_BYTES = 1_000_000


@dataclass(frozen=True)
class ColumnFile:
    """One file of a split: C columns of one type, row after row.

    Attributes:
        path: the file.
        features: names of its columns.
        dtype: of one value.
        rows: number of embedding rows that the values index; None where they index none.
    """

    path: Path
    features: tuple[str, ...]
    dtype: np.dtype
    rows: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * len(self.features)


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split; ``numerical`` is None where there are no dense features."""

    numerical: ColumnFile | None
    label: ColumnFile
    tables: tuple[ColumnFile, ...]

    @property
    def all(self) -> tuple[ColumnFile, ...]:
        """Every file of the split."""
        dense = () if self.numerical is None else (self.numerical,)
        return (*dense, self.label, *self.tables)


@dataclass(frozen=True)
class FeatureSpec:
    """A data set in split_binary layout.

    Attributes:
        splits: the files of each split, tables in the order of the channel.
        table_rows: cardinality of each categorical feature.
        dense_features: number of numerical features.
        metadata: whatever the maker noted.
    """

    splits: Mapping[str, SplitFiles]
    table_rows: tuple[int, ...]
    dense_features: int
    metadata: Mapping[str, Any]


def index_dtype(rows: int) -> np.dtype:
    """The smallest of int8, int16 and int32 whose maximum exceeds the cardinality.

    Raises:
        InputError: none does.
    """
    for kind in (np.int8, np.int16, np.int32):
        if rows < np.iinfo(kind).max:
            return np.dtype(kind)
    raise InputError(f"a table has {rows} rows, more than int32's {np.iinfo(np.int32).max - 1}")


def read_spec(path: Path) -> FeatureSpec:
    """Read and check a feature_spec.yaml, given itself or its folder.

    Raises:
        InputError: naming the file, the field, and what was found and expected.
    """
    try:
        file = path / FILE_NAME if path.is_dir() else path
        is_there = file.exists()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not is_there:
        raise InputError(
            f"{file}: no such file; a split_binary data set has one (make a data set with "
            "'dlrm data generate'; without feature_spec.yaml name the format)"
        )
    text = read_text(file, MOST_SPEC_BYTES)
    try:
        tree = read_yaml(text)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    if tree is None:
        raise InputError(
            f"{file}: the file is empty; expected feature_spec, source_spec and channel_spec"
        )
    return _Reader(file, tree).spec()


def with_stated_shape(model: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section ``model`` with the rows and features that it leaves out and its data set states.

    Raises:
        InputError: as :func:`read_spec`; of other formats than 'split_binary' nothing is read.
    """
    path, form = data.get("path"), data.get("format", "split_binary")
    if form != "split_binary" or not path or not isinstance(path, str):
        return model
    check_text(path, "data.path")
    spec = read_spec(Path(path))
    shape = {"table_rows": list(spec.table_rows), "tables": len(spec.table_rows)}
    return {"dense_features": spec.dense_features, **model, **shape}


class _Reader:
    """Checks one feature_spec.yaml, each complaint with its file."""

    def __init__(self, file: Path, tree: Any) -> None:
        self.file = file
        self.tree = self._mapping(tree, "the file")

    def spec(self) -> FeatureSpec:
        features = self._mapping(self.tree.get("feature_spec"), "feature_spec")
        channels = self._mapping(self.tree.get("channel_spec"), "channel_spec")
        names = {
            channel: self._names(channels.get(channel, []), f"channel_spec.{channel}")
            for channel in ("categorical", "numerical", "label")
        }
        if len(names["label"]) != 1:
            self._fail(f"channel_spec.label has {len(names['label'])} features, expected 1")
        if not names["categorical"]:
            self._fail("channel_spec.categorical is empty, expected at least 1 feature")
        kinds = {n: self._dtype(features, n) for channel in names.values() for n in channel}
        rows = {name: self._cardinality(features, name) for name in names["categorical"]}
        sources = self._mapping(self.tree.get("source_spec"), "source_spec")
        splits = {
            split: self._files(sources[split], f"source_spec.{split}", names, kinds, rows)
            for split in sources
        }
        if "train" not in splits:
            self._fail("source_spec has no 'train'")
        metadata = self.tree.get("metadata")
        return FeatureSpec(
            splits,
            tuple(rows.values()),
            len(names["numerical"]),
            metadata if isinstance(metadata, Mapping) else {},
        )

    def _files(
        self,
        chunks: Any,
        where: str,
        names: Mapping[str, list[str]],
        kinds: Mapping[str, np.dtype],
        rows: Mapping[str, int],
    ) -> SplitFiles:
        if not isinstance(chunks, list):
            self._fail(f"{where} is {chunks!r}, expected a list of chunks")
        found: dict[str, ColumnFile] = {}
        for i, chunk in enumerate(chunks):
            chunk = self._mapping(chunk, f"{where}[{i}]")
            columns = self._names(chunk.get("features"), f"{where}[{i}].features")
            files = self._names(chunk.get("files"), f"{where}[{i}].files")
            if chunk.get("type") != "split_binary" or len(files) != 1 or not columns:
                self._fail(
                    f"{where}[{i}] is of type {chunk.get('type')!r} with {len(files)} files and "
                    f"{len(columns)} features, expected split_binary with 1 file"
                )
            if columns[0] in found:
                self._fail(f"{where}[{i}]: feature {columns[0]!r} was in a chunk before")
            if len(columns) > 1 and columns != names["numerical"]:
                self._fail(
                    f"{where}[{i}].features differs from channel_spec.numerical: several "
                    "features of one file are the numerical ones, in their order"
                )
            if columns[0] not in kinds:
                self._fail(f"{where}[{i}]: feature {columns[0]!r} is in no channel")
            path = Path(files[0])
            if path.is_absolute() or ".." in path.parts:
                self._fail(f"{where}[{i}].files: {files[0]!r} leads out of the data set")
            kind = kinds[columns[0]]
            found[columns[0]] = ColumnFile(
                self.file.parent / path, tuple(columns), kind, rows.get(columns[0])
            )
        expected = [*names["numerical"][:1], *names["label"], *names["categorical"]]
        for name in expected:
            if name not in found:
                self._fail(f"{where} has no chunk with feature {name!r}")
        first = names["numerical"][:1]
        if first and found[first[0]].features != tuple(names["numerical"]):
            self._fail(
                f"{where}: the chunk of {first[0]!r} has {len(found[first[0]].features)} "
                f"features, expected all {len(names['numerical'])} numerical ones"
            )
        return SplitFiles(
            found[first[0]] if first else None,
            found[names["label"][0]],
            tuple(found[name] for name in names["categorical"]),
        )

    def _dtype(self, features: Mapping[str, Any], name: str) -> np.dtype:
        text = self._mapping(features.get(name), f"feature_spec.{name}").get("dtype")
        # fixed-size numbers only: never let a file choose an object type
        kinds = {str(np.dtype(k)): np.dtype(k) for k in "bBhHiIlLefd?"}
        if str(text) not in kinds:
            self._fail(f"feature_spec.{name}.dtype is {text!r}, expected one of {', '.join(kinds)}")
        return kinds[str(text)]

    def _cardinality(self, features: Mapping[str, Any], name: str) -> int:
        rows = features[name].get("cardinality")
        if type(rows) is not int or rows < 1:
            self._fail(f"feature_spec.{name}.cardinality is {rows!r}, expected at least 1")
        kind = self._dtype(features, name)
        if kind.kind not in "iu":
            self._fail(f"feature_spec.{name}.dtype is {kind}, expected integers (categorical)")
        if rows - 1 > np.iinfo(kind).max:
            self._fail(
                f"feature_spec.{name}.cardinality is {rows}, but its dtype {kind} ends at "
                f"{np.iinfo(kind).max}"
            )
        return int(rows)

    def _names(self, value: Any, where: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._fail(f"{where} is {value!r}, expected a list of names")
        if len(set(value)) != len(value):
            self._fail(f"{where} names a feature twice")
        return list(value)

    def _mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self._fail(f"{where} is {value!r}, expected names with values"[:300])
        return dict(value)

    def _fail(self, message: str) -> Any:
        raise InputError(f"{self.file}: {message}")
