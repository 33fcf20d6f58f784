"""What a data set holds, and whether it is what it says: every value is looked at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.data.files.sources import FORMATS, Column, Source, check_range, open_source
from dlrm_core.data.files.spec import FILE_NAME
from dlrm_core.data.files.teacher import SampleMaker
from dlrm_workbook.datasets.best_auc import law_of
from dlrm_workbook.datasets.criteo import FIELDS, Request, parse_piece, read_pieces
from dlrm_workbook.datasets.generate import BLOCK
from dlrm_workbook.datasets.loops import COUNTS, MISSING, TABLES
from dlrm_workbook.datasets.resumable import NOTE
from dlrm_workbook.datasets.splits import split_names
from dlrm_workbook.datasets.vocabulary import forget

AT_ONCE = 1 << 20
MOST_DISTINCT = 1 << 29
"""Tables of more rows have their different rows not counted: a byte a row is needed."""


def examine_data(path: Path, format: str | None = None, verify: bool = False) -> dict[str, Any]:
    """Look at every value of a data set.

    Args:
        path: a data set's folder, a terabyte_processed_*.bin, or Criteo's text.
        format: one of FORMATS; None: told from the files, where they tell.
        verify: of a data set that ``dlrm data generate`` made, make every sample again and
            compare the bytes.

    Returns:
        ``path``, ``format``, ``splits`` (name to samples, bytes, click_rate, tables, dense),
        ``metadata``, ``problems`` (sentences; empty: all is well).

    Raises:
        InputError: this is not a data set, or its format must be told.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"--format is {format!r}, expected one of {', '.join(FORMATS)}")
    if not path.exists():
        # says also whether it is unfinished
        open_source(path, format or "split_binary", "train")
    if path.is_dir() and (path / NOTE).exists():
        return _unfinished(path)
    format = format or detect(path)
    if format == "text":
        return _text(path)
    report = _report(path, format)
    for split in split_names(path, format) or ["train"]:
        try:
            source = open_source(path, format, split)
            report["metadata"] = dict(source.metadata)
            report["splits"][split] = _split(source, report["problems"])
            if verify:
                _verify(source, report["problems"])
        except InputError as error:
            report["problems"].append(str(error))
    _compare_with_metadata(report)
    return report


def _report(path: Path, format: str) -> dict[str, Any]:
    return {"path": str(path), "format": format, "splits": {}, "metadata": {}, "problems": []}


def detect(path: Path) -> str:
    """The format of a data set, or 'text', as far as its files tell; where they do not, an
    InputError says so."""
    if path.is_file():
        if path.name == FILE_NAME:
            return "split_binary"
        whole = path.parent.parent
        if path.suffix == ".bin" and (whole / FILE_NAME).exists():
            raise InputError(f"{path} is one file of the data set {whole}; give that folder")
        return "terabyte" if path.suffix == ".bin" else "text"
    if (path / FILE_NAME).exists():
        return "split_binary"
    if list(path.glob("terabyte_processed_*.bin")):
        return "terabyte"
    if (path / "train" / "label.bin").exists():
        raise InputError(
            f"{path} has no {FILE_NAME}, and the same file names are used with other types: say "
            "--format deepspark_dist (int32 and float32) if it is DeepSpark's"
        )
    raise InputError(f"{path} holds no data set of the formats {', '.join(FORMATS)}")


def _unfinished(path: Path) -> dict[str, Any]:
    note = read_json(path / NOTE)
    problem = f"{path}: not finished; give the command that began it again (done so far: "
    problem += f"{json.dumps(note.get('done'))})"
    return _report(path, "unfinished") | {"metadata": note, "problems": [problem]}


def _split(source: Source, problems: list[str]) -> dict[str, Any]:
    files = {column.file for column in (source.label, *source.tables)} | {source.dense_file}
    clicks = 0.0
    for _, labels in _checked(source, source.read_labels, problems, source.label.values):
        clicks += float(labels.sum())
    return {
        "samples": source.samples,
        "bytes": sum(file.stat().st_size for file in files),
        "click_rate": clicks / source.samples if source.samples else None,
        "dense": _dense(source, problems),
        "tables": [_table(source, column, problems) for column in source.tables],
    }


def _checked(
    source: Source,
    read: Callable[[int, int], np.ndarray],
    problems: list[str],
    mapped: np.ndarray | None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks that can be read; of those that cannot, the first is a problem."""
    told = False
    for start, count in blocks(source.samples, AT_ONCE):
        try:
            yield start, read(start, start + count)
        except InputError as error:
            if not told:
                problems.append(str(error))
            told = True
        forget(mapped)


def _dense(source: Source, problems: list[str]) -> list[dict[str, Any]]:
    low = np.full(len(source.dense_names), np.inf)
    high, total, count = -low, np.zeros(len(low)), 0
    if len(low):
        for _, values in _checked(source, source.read_dense, problems, source.dense):
            low, high = np.minimum(low, values.min(0)), np.maximum(high, values.max(0))
            total, count = total + values.sum(0, dtype=np.float64), count + len(values)
    figures = {"minimum": low, "maximum": high, "mean": total / max(count, 1)}
    return [
        {"feature": name}
        | {figure: float(values[i]) if count else None for figure, values in figures.items()}
        for i, name in enumerate(source.dense_names)
    ]


def _table(source: Source, column: Column, problems: list[str]) -> dict[str, Any]:
    rows = column.rows
    limit = np.iinfo(column.values.dtype).max if rows is None else rows
    seen = np.zeros(rows, bool) if rows is not None and rows <= MOST_DISTINCT else None
    low, high, hottest, wrong = None, None, 0, 0
    for start, count in blocks(source.samples, AT_ONCE):
        values = column.values[start : start + count]
        smallest, largest = int(values.min()), int(values.max())
        low = smallest if low is None else min(low, smallest)
        high = largest if high is None else max(high, largest)
        hottest += count - int(np.count_nonzero(values))
        if smallest < 0 or largest >= limit:
            good = (values >= 0) & (values < limit)
            if not wrong:
                try:
                    check_range(column, values, start, limit)
                except InputError as error:
                    problems.append(str(error))
            wrong += int(count - good.sum())
            values = values[good]
        if seen is not None:
            seen[values] = True
        forget(column.values)
    if wrong > 1:
        problems[-1] += f"; {wrong} such values in this file"
    return {
        "feature": column.name,
        "dtype": str(column.values.dtype),
        "cardinality": rows,
        "minimum": low,
        "maximum": high,
        "different_rows": None if seen is None else int(np.count_nonzero(seen)),
        "row_0_share": hottest / source.samples if source.samples else None,
    }


def _verify(source: Source, problems: list[str]) -> None:
    """Make every sample of a generated data set again and compare."""
    law = law_of(source)
    if law is None:
        raise InputError(
            f"{source.path}: --verify is for data sets that 'dlrm data generate' made; this one's "
            "metadata do not say how to make it again"
        )
    maker = SampleMaker(law, source.split)
    told: set[str] = set()
    for start, count in blocks(source.samples, BLOCK):
        labels, dense, tables, _ = maker.block(start, count)
        columns = [(source.label, labels.view(np.uint8))]
        columns += list(zip(source.tables, tables, strict=True))
        if source.dense is not None:
            for j, name in enumerate(source.dense_names):
                column = Column(source.dense_file, name, source.dense[:, j])
                columns.append((column, dense[:, j]))
        for column, expected in columns:
            found = column.values[start : start + count]
            same = found == expected
            if column.name not in told and not same.all():
                told.add(column.name)
                i = int((~same).argmax())
                problems.append(
                    f"{column.file}: sample {start + i}, feature {column.name}: {found[i]}, but "
                    f"it was made as {expected[i]}"
                )
            forget(column.values)


def _compare_with_metadata(report: dict[str, Any]) -> None:
    """What the maker noted against what is there."""
    noted = report["metadata"].get("samples")
    if not isinstance(noted, dict):
        return
    for split, facts in report["splits"].items():
        if split in noted and noted[split] != facts["samples"]:
            report["problems"].append(
                f"{report['path']}: split {split} has {facts['samples']} samples, but its "
                f"metadata say {noted[split]}: cut short"
            )


def _text(path: Path) -> dict[str, Any]:
    """Criteo's text: lines, clicks, missing fields, ranges of the integers."""
    problems: list[str] = []
    rows, clicks, size = 0, 0, 0
    missing = np.zeros(COUNTS + TABLES, np.int64)
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    low, high = np.full(COUNTS, most), np.full(COUNTS, least)
    start = {"file": 0, "offset": 0, "line": 1, "rows": 0}
    for piece in read_pieces(Request("kaggle", [path], 1), start):
        try:
            labels, numbers, _, bits = parse_piece(piece, path)
        except InputError as error:
            problems.append(str(error))
            break
        rows, clicks, size = rows + piece.rows, clicks + int(labels.sum()), size + len(piece.text)
        empty = numbers == MISSING
        missing[:COUNTS] += empty.sum(0)
        missing[COUNTS:] += [int(np.count_nonzero(bits & np.uint32(1 << t))) for t in range(TABLES)]
        low = np.minimum(low, np.where(empty, most, numbers).min(0))
        high = np.maximum(high, np.where(empty, least, numbers).max(0))
    if not rows and not problems:
        problems.append(f"{path} has no lines")
    fields = [
        {
            "feature": name,
            "missing_share": float(missing[i]) / rows if rows else None,
            "minimum": int(low[i]) if i < COUNTS and low[i] <= high[i] else None,
            "maximum": int(high[i]) if i < COUNTS and low[i] <= high[i] else None,
        }
        for i, name in enumerate(FIELDS[1:])
    ]
    split = {"samples": rows, "bytes": size, "click_rate": clicks / rows if rows else None}
    splits = {"all": split | {"fields": fields}}
    return _report(path, "text") | {"splits": splits, "problems": problems}


def blocks(samples: int, block: int) -> Iterator[tuple[int, int]]:
    """(start, count) of consecutive blocks."""
    for start in range(0, samples, block):
        yield start, min(block, samples - start)
