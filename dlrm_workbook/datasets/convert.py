"""``dlrm data convert``: a data set in another of the layouts that DLRM trainings use.

Labels and rows are the same in every layout. Dense values are features in split_binary (float16),
and counts, of which training takes log(x + 1), in terabyte (int32) and deepspark_dist (float32);
Parquet keeps whatever it is given. A count x becomes the feature log(x + k), rounded through
float32 as NVIDIA's chain rounds, a feature v the count exp(v) - k, but at least 0. k is what the
metadata of feature_spec.yaml state ("log(x + 3) ..." of preprocessed text), or 1.

How many rows tables have, and who made the data set, only split_binary can say. So its
feature_spec.yaml goes along under another name, and a way there and back gives the same files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_text, write_text
from dlrm_core.data.files.sources import (
    TERABYTE_COLUMNS,
    TERABYTE_DENSE,
    check_range,
    open_source,
    refuse,
)
from dlrm_core.data.files.spec import FILE_NAME, MOST_SPEC_BYTES, FeatureSpec, read_spec
from dlrm_workbook.datasets.resumable import (
    OpenFiles,
    Workplace,
    need_space,
    progress_bar,
    workplace,
)
from dlrm_workbook.datasets.splits import (
    ABOUT,
    ANY_ROW,
    ROW_GROUP,
    Block,
    Split,
    open_split,
    split_names,
)
from dlrm_workbook.datasets.write_spec import write_spec
from dlrm_workbook.ground.bar import Bar

ORIGIN = "source_feature_spec.yaml"
"""The feature_spec.yaml of the split_binary data set that others were converted from."""


@dataclass(frozen=True)
class Conversion:
    """The data set to convert, and the layout wanted.

    Attributes:
        path: of the data set; of terabyte also one .bin file.
        before, after: layouts, of :data:`dlrm_workbook.datasets.splits.CONVERTED_LAYOUTS`.
        halve_test: make the second half of the test split the split ``val``, as facebook's
            writer of terabyte does.
        counts: whether Parquet's dense values are counts; None: as its files say.
    """

    path: Path
    before: str
    after: str
    halve_test: bool = False
    counts: bool | None = None


@dataclass(frozen=True)
class Converted:
    """The outcome of a conversion.

    Attributes:
        samples: of each split of the new data set.
        bytes: of its files.
        values: dense values written.
        lost: how many of them would not be the same after a conversion back.
        law: a sentence on how features and counts belong together; empty where nothing was made
            of either.
    """

    folder: Path
    samples: dict[str, int]
    bytes: int
    values: int
    lost: int
    seconds: float
    law: str


@dataclass(frozen=True)
class SplitRange:
    """A split of the new data set: samples ``start`` to ``stop`` of one of the old."""

    name: str
    split: Split
    start: int
    stop: int


def convert(request: Conversion, target: Path) -> Converted:
    """Write a data set in another layout, or go on with one that was interrupted; the folder
    ``target`` appears when all is written.

    Raises:
        InputError: the data set cannot be read, has a value that the new layout cannot hold, or
            the target exists, was begun with something else, or does not fit on the disk.
    """
    started = time.perf_counter()
    if request.before == request.after:
        raise InputError(f"--from and --to are both {request.before}, expected two layouts")
    parts = _parts(request)
    first = parts[0].split
    if request.after == "terabyte" and first.shape != (TERABYTE_DENSE, TERABYTE_TABLES):
        raise InputError(
            f"{request.path} has {first.shape[0]} numerical and {first.shape[1]} "
            f"categorical features, but terabyte holds {TERABYTE_DENSE} and {TERABYTE_TABLES}"
        )
    asked = dataclasses.asdict(request) | {"path": str(request.path.absolute())}
    samples = {part.name: part.stop - part.start for part in parts}
    origin = _origin(request, parts)
    law = _DenseLaw.stated(origin[1].metadata if origin else {})
    lost = 0
    with workplace(target, asked, "dlrm data convert") as place:
        if place is not None:
            wide = 4 * (1 + sum(first.shape))
            need_space(place.folder, wide * sum(samples.values()))
            lost = _write(request, parts, place, origin, law)
    return Converted(
        folder=target,
        samples=samples,
        bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
        values=sum(samples.values()) * len(first.dense),
        lost=lost,
        seconds=time.perf_counter() - started,
        law=law.sentence if "parquet" not in (request.before, request.after) else "",
    )


TERABYTE_TABLES = TERABYTE_COLUMNS - 1 - TERABYTE_DENSE


def _parts(request: Conversion) -> list[SplitRange]:
    path = request.path
    names = split_names(path, request.before) if path.exists() else []
    if not names:
        if request.before != "parquet" or not path.exists():
            open_source(path, request.before.replace("parquet", "terabyte"), "train")
        raise InputError(
            f"{path} holds no split in the layout {request.before}, expected "
            "train.parquet or a folder 'train' of such files"
        )
    if request.halve_test and ("val" in names or "test" not in names):
        raise InputError(f"--halve-test: {path} has the splits {', '.join(names)}")
    parts: list[SplitRange] = []
    for name in names:
        split = open_split(path, request.before, name, request.counts)
        if parts and split.shape != parts[0].split.shape:
            raise InputError(f"{path}: {name} has other features than {parts[0].name}")
        middle = split.samples
        if request.halve_test and name == "test":
            middle = -(-split.samples // 2)
            parts.append(SplitRange("val", split, middle, split.samples))
        parts.append(SplitRange(name, split, 0, middle))
    return parts


def _write(
    request: Conversion,
    parts: list[SplitRange],
    place: Workplace,
    origin: tuple[Path, FeatureSpec] | None,
    law: _DenseLaw,
) -> int:
    """Write all splits into a workplace, and count the dense values that lost digits."""
    spec = None
    if request.after == "split_binary":
        spec = _specification(request, parts, place.folder, origin)
    elif origin is not None:
        write_text(place.folder / ORIGIN, read_text(origin[0], MOST_SPEC_BYTES))
    done = {"lost": 0} | dict.fromkeys((part.name for part in parts), 0) | place.done
    total = sum(part.stop - part.start for part in parts)
    before = sum(done[part.name] for part in parts)
    with progress_bar("converting", "samples", total, before) as bar:
        for part in parts:
            if request.after == "parquet":
                _write_parquet(place, part, origin and origin[1], done, bar)
            else:
                outputs = _files(request.after, part, spec, place.folder, law)
                _write_files(place, part, outputs, done, bar)
    return int(done["lost"])


def _origin(request: Conversion, parts: list[SplitRange]) -> tuple[Path, FeatureSpec] | None:
    """The feature_spec.yaml that a data set has or was converted from; refused (InputError) where
    it is of another one."""
    folder = request.path if request.path.is_dir() else request.path.parent
    file = folder / (FILE_NAME if request.before == "split_binary" else ORIGIN)
    if not file.exists():
        return None
    spec = read_spec(file)
    shape, there = (spec.dense_features, len(spec.table_rows)), parts[0].split.shape
    if shape != there:
        raise InputError(
            f"{file} has {shape[0]} numerical and {shape[1]} categorical features, but the data "
            f"set has {there[0]} and {there[1]}"
        )
    return file, spec


def _specification(
    request: Conversion,
    parts: list[SplitRange],
    folder: Path,
    origin: tuple[Path, FeatureSpec] | None,
) -> FeatureSpec:
    """Write the feature_spec.yaml of the new data set: the one it comes from, if there is one."""
    names = [part.name for part in parts]
    if origin is not None and sorted(origin[1].splits) == sorted(names):
        write_text(folder / FILE_NAME, read_text(origin[0], MOST_SPEC_BYTES))
        return read_spec(folder)
    known = parts[0].split.table_rows if origin is None else origin[1].table_rows
    if None in known:
        known = _largest_rows(parts)
    metadata = {
        "made_by": "dlrm data convert",
        "from": request.before,
        "samples": {part.name: part.stop - part.start for part in parts},
        "numerical": "log(x + 1) as float16" if parts[0].split.counts else "as float16",
    }
    rows = [count or 1 for count in known]
    write_spec(folder, len(parts[0].split.dense), rows, metadata, names)
    return read_spec(folder)


def _largest_rows(parts: list[SplitRange]) -> tuple[int, ...]:
    """The largest row of each table and one more: as many rows as it must have."""
    rows = np.zeros(len(parts[0].split.tables), np.int64)
    with progress_bar("counting rows", "samples", sum(p.stop - p.start for p in parts)) as bar:
        for part in parts:
            for block in part.split.blocks(part.start, part.stop):
                rows = np.maximum(rows, [int(values.max()) + 1 for values in block.tables])
                bar.add(len(block.labels))
    return tuple(rows.tolist())


@dataclass(frozen=True)
class _DenseLaw:
    """How the features of a split_binary data set follow from counts.

    Attributes:
        offset: the k of log(x + k).
        made_up: they are uniform random numbers and no count's: the nearest one stands for each.
        sentence: for the reader.
    """

    offset: int = 1
    made_up: bool = False
    sentence: str = ""

    @classmethod
    def stated(cls, metadata: Mapping[str, Any]) -> _DenseLaw:
        """As the metadata of feature_spec.yaml have it."""
        log = re.match(r"log\(x \+ (\d{1,3})\)", str(metadata.get("numerical")))
        maker = metadata.get("made_by"), metadata.get("labels")
        # with a teacher's labels the best AUC rests on the numbers themselves
        made_up = maker == ("dlrm data generate", "random")
        if made_up:
            sentence = "numerical features are made up: the nearest count stands for each"
        elif log:
            sentence = f"numerical features are {log[0]} of counts x, as feature_spec.yaml states"
        else:
            sentence = (
                "numerical features are taken to be log(x + 1) of counts x: no metadata.numerical "
                "states it (NVIDIA's own preprocessing makes log(x + 3))"
            )
        return cls(int(log[1]) if log else 1, made_up, sentence)

    def feature(self, counts: np.ndarray) -> np.ndarray:
        """log(x + k) as float32, of which NVIDIA's chain makes float16."""
        return np.log(counts + float(self.offset)).astype(np.float32)

    def counts(self, features: np.ndarray) -> np.ndarray:
        """exp(v) - k; 0 for Criteo's few negative integers and what is missing, as facebook's."""
        return np.maximum(np.expm1(np.minimum(features, 700.0)) - (self.offset - 1), 0.0)


Written = Callable[[Block], tuple[np.ndarray, int]]
"""The values that a block puts into a file, and how many of them lost digits."""


def _files(
    layout: str, part: SplitRange, spec: FeatureSpec | None, folder: Path, law: _DenseLaw
) -> dict[str, Written]:
    """Files of a split, within ``folder``, each with what it holds of a block."""
    split, name = part.split, part.name

    def labels(dtype: np.dtype) -> Written:
        return lambda block: (block.labels.astype(dtype), 0)

    def dense(dtype: np.dtype, counts: bool = True) -> Written:
        return lambda block: _dense(block, split, law, dtype, counts)

    def rows(table: int, dtype: np.dtype, most: int | None = None) -> Written:
        return lambda block: (_rows(block, split, table, most).astype(dtype), 0)

    int32, float32 = np.dtype("<i4"), np.dtype("<f4")
    if layout == "terabyte":
        return {f"terabyte_processed_{name}.bin": lambda block: _samples(block, split, law, int32)}
    if spec is None:
        outputs = {f"{name}/label.bin": labels(float32)}
        if split.dense:
            outputs[f"{name}/numerical.bin"] = dense(float32)
        return outputs | {f"{name}/cat_{t}.bin": rows(t, int32) for t in range(len(split.tables))}
    files = spec.splits[name]
    label = np.dtype(np.uint8) if files.label.dtype == bool else files.label.dtype
    written = [(files.label, labels(label))]
    if files.numerical is not None:
        written.append((files.numerical, dense(files.numerical.dtype, counts=False)))
    written += [(file, rows(t, file.dtype, file.rows)) for t, file in enumerate(files.tables)]
    outputs = {str(file.path.relative_to(folder)): values for file, values in written}
    if len(outputs) < len(written):
        raise InputError(f"{folder / FILE_NAME}: two features of {name} have the same file")
    return outputs


def _write_files(
    place: Workplace, part: SplitRange, outputs: dict[str, Written], done: dict[str, Any], bar: Bar
) -> None:
    with OpenFiles(place, place.folder, outputs) as files:
        for block in part.split.blocks(part.start + done[part.name], part.stop):
            size, count = 0, len(block.labels)
            for path, values_of in outputs.items():
                values, lost = values_of(block)
                if values.size:
                    files.write(path, values, block.start - part.start)
                size, done["lost"] = size + values.nbytes, done["lost"] + lost
            done[part.name] += count
            bar.add(count)
            files.written(size, done)
        files.finish(done)


def _rows(block: Block, split: Split, table: int, most: int | None = None) -> np.ndarray:
    """The rows of a table, which has ``most`` in the new data set; None: nothing says."""
    check_range(split.tables[table], block.tables[table], block.start, most or ANY_ROW)
    return block.tables[table]


def _samples(block: Block, split: Split, law: _DenseLaw, dtype: np.dtype) -> tuple[np.ndarray, int]:
    """Whole samples, as terabyte has them, and how many dense values lost digits."""
    dense, lost = _dense(block, split, law, dtype, counts=True)
    whole = np.empty((len(block.labels), TERABYTE_COLUMNS), dtype)
    whole[:, 0], whole[:, 1 : 1 + TERABYTE_DENSE] = block.labels, dense
    for table in range(len(block.tables)):
        whole[:, 1 + TERABYTE_DENSE + table] = _rows(block, split, table)
    return whole, lost


def _dense(
    block: Block, split: Split, law: _DenseLaw, dtype: np.dtype, counts: bool
) -> tuple[np.ndarray, int]:
    """Dense values (B, D) of a block as a file holds them, as ``counts`` or features, and how many
    lost digits. Raises InputError: naming file, sample, feature and a value that cannot be held."""
    values, exact, whole = block.dense, block.dense.astype(np.float64), dtype.kind == "i"
    if split.counts and not counts:
        written = law.feature(exact).astype(dtype)
        back = law.counts(written.astype(np.float64))
        back = np.rint(back) if values.dtype.kind in "iu" else back
        return written, int(np.count_nonzero(back.astype(values.dtype) != values))
    if split.counts == counts:
        if whole:
            wrong = (np.rint(exact) != exact) | (exact > MOST_COUNT)
            _refuse_first(wrong, block, split, "a whole count below 2^31, which terabyte holds")
        written = values.astype(dtype)
        return written, int(np.count_nonzero(written.astype(np.float64) != exact))
    nearest = law.counts(exact)
    wrong = (exact < 0) | (nearest > MOST_COUNT)
    log = f"log(x + {law.offset})"
    _refuse_first(wrong, block, split, f"{log} of a count x from 0 to 2^31 - 1")
    written = (np.rint(nearest) if whole else nearest).astype(dtype)
    differs = law.feature(written.astype(np.float64)).astype(values.dtype) != values
    if whole and not law.made_up:
        words = f"{log} of a whole count x, which terabyte holds (deepspark_dist holds any)"
        _refuse_first(differs & (nearest > 0), block, split, words)
    return written, int(np.count_nonzero(differs))


MOST_COUNT = 2**31 - 1


def _refuse_first(wrong: np.ndarray, block: Block, split: Split, wanted: str) -> None:
    if wrong.any():
        row, feature = map(int, np.unravel_index(int(wrong.argmax()), wrong.shape))
        refuse(split.dense[feature], block.start + row, block.dense[row, feature], wanted)


def _write_parquet(
    place: Workplace, part: SplitRange, spec: FeatureSpec | None, done: dict[str, Any], bar: Bar
) -> None:
    """Write ``SPLIT.parquet``: what is begun after a kill is written from its beginning."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    split = part.split
    if done[part.name] == part.stop - part.start and done[part.name]:
        return
    rows = split.table_rows if spec is None else spec.table_rows
    dense_type = pa.from_numpy_dtype(split.dense_type)
    fields = [("label", pa.uint8())]
    fields += [(f"num_{i}", dense_type) for i in range(len(split.dense))]
    fields += [(f"cat_{t}", pa.int32()) for t in range(len(split.tables))]
    about = json.dumps({"counts": split.counts, "table_rows": None if None in rows else rows})
    schema = pa.schema(fields, metadata={ABOUT: about})
    file = place.folder / f"{part.name}.parquet"
    with _synced(file) as handle, pq.ParquetWriter(handle, schema, compression="zstd") as writer:
        for block in split.blocks(part.start, part.stop):
            columns = [block.labels, *block.dense.T, *(v.astype(np.int32) for v in block.tables)]
            arrays = [pa.array(np.ascontiguousarray(column)) for column in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema), row_group_size=ROW_GROUP)
            bar.add(len(block.labels))
    done[part.name] = part.stop - part.start
    place.note(done)


@contextlib.contextmanager
def _synced(file: Path) -> Iterator[Any]:
    """A file that is written anew, and on the disk when the block ends."""
    with file.open("wb") as handle:
        yield handle
        handle.flush()
        os.fsync(handle.fileno())
