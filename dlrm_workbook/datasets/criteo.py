"""Criteo's text (Kaggle and Terabyte) to NVIDIA's layout, on files larger than memory.

Two stages, each at the speed of one core's parsing or hashing times the cores:

1. the text, in pieces: labels, log(x+3) of the integers (0 where missing; what is below
   −2 counts as −2) as float16, and the 26 hashed categories as 32-bit columns;
2. each category column: counted, numbered (``vocabulary``), rewritten as row numbers.

The last rows become the test split. Everything follows from the input: the same bytes
come out for any number of threads, amount of memory and number of interruptions.
"""

from __future__ import annotations

import gzip
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import make_folder, open_binary, sync_folder
from dlrm_core.data.files.spec import index_dtype, read_spec
from dlrm_workbook.datasets.loops import (
    BAD_INTEGER,
    BAD_LABEL,
    COUNTS,
    FEW_FIELDS,
    HEX_VALUES,
    MANY_FIELDS,
    NO_FAULT,
    TABLES,
    parser,
)
from dlrm_workbook.datasets.resumable import (
    OpenFiles,
    Workplace,
    need_space,
    progress_bar,
    threaded,
    workplace,
)
from dlrm_workbook.datasets.vocabulary import build_vocabulary, number_column
from dlrm_workbook.datasets.write_spec import SPLITS, write_spec

TEXT_LAYOUTS = {"kaggle": 1 / 7, "terabyte": 1 / 24}
"""Share of the rows, from the end, that are the test split: the last day."""
PIECE_BYTES = 4 << 20
"""Bytes of text parsed at a time."""
ROWS_AT_ONCE = 1 << 18
"""Rows of a category column read at a time."""
FIELDS = ["label", *(f"I{i + 1}" for i in range(COUNTS)), *(f"C{i + 1}" for i in range(TABLES))]
LABEL, NUMERICAL, MISSING_BITS = "label.bin", "numerical.bin", "missing.bin"

RAW_ROW_BYTES = 1 + 2 * COUNTS + 4 + 4 * TABLES
"""Bytes of a row on the disk while categories are not numbered yet."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        layout: 'kaggle' or 'terabyte'; the text is the same, the days are not.
        inputs: text files in order, gzipped if named so.
        threshold: categories that came less often become row 0.
        test_fraction: share of the rows, from the end, that are the test split.
        memory: bytes of hash tables, all threads together.
    """

    layout: str
    inputs: Sequence[Path]
    threshold: int
    max_rows: int | None = None
    test_fraction: float | None = None
    threads: int = 1
    memory: int = 512 << 20

    def note(self) -> dict[str, Any]:
        """What the result follows from, to know the same request again."""
        files = [(str(path.absolute()), path.stat()) for path in self.inputs]
        return {
            "layout": self.layout,
            "inputs": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files],
            "frequency_threshold": self.threshold,
            "max_rows": self.max_rows,
            "test_fraction": self.fraction,
        }

    @property
    def fraction(self) -> float:
        return TEXT_LAYOUTS[self.layout] if self.test_fraction is None else self.test_fraction


@dataclass(frozen=True)
class Piece:
    """Whole lines of one input.

    Attributes:
        file: its number among the inputs.
        line: number of the first line, from 1.
        row: number of the first row in the data set.
        rows: lines to parse.
        text: bytes, the last a newline.
        end: place in the (unpacked) file where the next piece begins.
    """

    file: int
    line: int
    row: int
    rows: int
    text: bytes = field(repr=False)
    end: int


@dataclass(frozen=True)
class Preprocessed:
    folder: Path
    rows: dict[str, int]
    table_rows: tuple[int, ...]
    input_bytes: int
    seconds: float


def preprocess(request: Request, target: Path) -> Preprocessed:
    """Convert text, or go on with a conversion that was interrupted. An InputError names a file or
    a line that cannot be read, or says that there is no room, or that another request was begun."""
    started = time.perf_counter()
    _check(request)
    size = sum(path.stat().st_size for path in request.inputs)
    with workplace(target, request.note(), "dlrm data preprocess") as place:
        if place is not None:
            _work(request, place, size)
    spec = read_spec(target)
    rows = {split: int(spec.metadata["samples"][split]) for split in SPLITS}
    return Preprocessed(target, rows, spec.table_rows, size, time.perf_counter() - started)


def _check(request: Request) -> None:
    if request.layout not in TEXT_LAYOUTS:
        raise InputError(
            f"--layout is {request.layout!r}, expected one of {', '.join(TEXT_LAYOUTS)}"
        )
    for path in request.inputs:
        if not path.is_file():
            why = " is a folder, expected a text file" if path.is_dir() else ": no such file"
            raise InputError(f"--input {path}{why}")
    if request.threshold < 1:
        raise InputError(f"--frequency-threshold is {request.threshold}, expected at least 1")
    if request.max_rows is not None and request.max_rows < 2:
        raise InputError(f"--max-rows is {request.max_rows}, expected at least 2")
    if not 0.0 < request.fraction < 1.0:
        raise InputError(f"--test-fraction is {request.fraction:g}, expected between 0 and 1")


def _work(request: Request, place: Workplace, size: int) -> None:
    if not place.done.get("parsed"):
        if not request.max_rows:
            # text is wider than its columns, except for what gzip makes of it
            packed = any(path.suffix == ".gz" for path in request.inputs)
            need_space(place.folder, 0 if place.done else size * (4 if packed else 1))
        _parse(request, place)
    rows = int(place.done["rows"])
    test = max(1, round(rows * request.fraction))
    if rows - test < 1:
        place.done = {}  # nothing to go on with
        raise InputError(
            f"the inputs have {rows} rows, of which {test} would be the test split: none is "
            "left to train on"
        )
    train = rows - test
    _split_column(place.folder, LABEL, 1, rows, train)
    _split_column(place.folder, NUMERICAL, 2 * COUNTS, rows, train)
    done = dict(place.done)
    # table to [categories kept, categories there were]
    features = {int(t): list(counts) for t, counts in done.pop("features", {}).items()}
    left = [t for t in range(TABLES) if t not in features]
    memory = request.memory // request.threads

    def convert(table: int) -> tuple[int, list[int]]:
        counts = _convert_column(place.folder, table, rows, train, request.threshold, memory)
        return table, list(counts)

    with progress_bar("numbering categories", "features", TABLES, len(features)) as bar:
        for table, counts in threaded(convert, left, request.threads, request.threads):
            features[table] = counts
            place.note(done | {"features": {str(t): counts for t, counts in features.items()}})
            (place.folder / "raw" / f"cat_{table}.u32").unlink(missing_ok=True)
            bar.add()
    shutil.rmtree(place.folder / "raw", ignore_errors=True)
    metadata = {
        "made_by": "dlrm data preprocess",
        "layout": request.layout,
        "inputs": [path.name for path in request.inputs],
        "frequency_threshold": request.threshold,
        "samples": {"train": train, "test": test},
        "clicks": int(done["clicks"]),
        "different_categories": [features[t][1] for t in range(TABLES)],
        "numerical": "log(x + 3) as float16, 0 where missing",
        "row_0": "missing, or rarer than the threshold",
    }
    table_rows = [features[t][0] + 1 for t in range(TABLES)]
    write_spec(place.folder, COUNTS, table_rows, metadata)


def _parse(request: Request, place: Workplace) -> None:
    done = {"file": 0, "offset": 0, "line": 1, "rows": 0, "clicks": 0} | place.done

    def parse(piece: Piece) -> tuple[Piece, int]:
        labels, numbers, categories, missing = parse_piece(piece, request.inputs[piece.file])
        columns = [labels, transform(numbers), missing, *categories]
        for name, values in zip(names, columns, strict=True):
            files.write(name, values, piece.row)
        return piece, int(labels.sum())

    names = [LABEL, NUMERICAL, MISSING_BITS, *(f"cat_{table}.u32" for table in range(TABLES))]
    size = sum(path.stat().st_size for path in request.inputs)
    with (
        progress_bar("parsing", "B", size) as bar,
        OpenFiles(place, place.folder / "raw", names) as files,
    ):
        pieces = read_pieces(request, done)
        for piece, clicks in threaded(parse, pieces, request.threads, 2 * request.threads):
            done["file"], done["offset"] = piece.file, piece.end
            done["line"], done["rows"] = piece.line + piece.rows, piece.row + piece.rows
            done["clicks"] += clicks
            bar.add(len(piece.text))
            files.written(len(piece.text), done)
        files.finish(done)
    if not done["rows"]:
        place.done = {}  # nothing to go on with
        raise InputError(f"{request.inputs[0]} has no lines")
    place.note(done | {"parsed": True})


def _split_column(folder: Path, name: str, row_bytes: int, rows: int, train: int) -> None:
    """Move a column from ``raw/`` to its splits: the first ``train`` rows, and the others.

    It can be done again after a kill, with the same outcome.
    """
    train_folder, test_folder = (folder / split for split in SPLITS)
    make_folder(train_folder)
    make_folder(test_folder)
    source = folder / "raw" / name
    if source.exists():
        with source.open("rb") as whole, (test_folder / name).open("wb") as part:
            whole.seek(train * row_bytes)
            shutil.copyfileobj(whole, part, 8 << 20)
            part.truncate((rows - train) * row_bytes)
            part.flush()
            os.fsync(part.fileno())
        # the rows of the test split are on disk, with their name, before they are cut off here
        sync_folder(test_folder)
        source.replace(train_folder / name)
        sync_folder(train_folder)
    with (train_folder / name).open("r+b") as rows_left:
        rows_left.truncate(train * row_bytes)
        os.fsync(rows_left.fileno())


def _convert_column(
    folder: Path, table: int, rows: int, train: int, threshold: int, memory: int
) -> tuple[int, int]:
    """Number one column's categories and write its row numbers. Returns categories kept, and
    categories there were."""

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - start)
            keys, missing = (
                np.fromfile(folder / "raw" / name, np.uint32, count, offset=4 * start)
                for name in (f"cat_{table}.u32", MISSING_BITS)
            )
            # machine code looks at as many of both
            if len(keys) != count or len(missing) != count:
                raise OSError(f"{folder / 'raw'}: the columns end before row {start + count}")
            yield keys, missing

    keys, counts = (folder / "vocabulary" / f"cat_{table}.{kind}" for kind in ("keys", "counts"))
    make_folder(keys.parent)
    kept, different = build_vocabulary(blocks, table, threshold, memory, keys, counts)
    dtype = index_dtype(kept + 1)
    name = f"cat_{table}.bin"
    number_column(blocks, table, keys, memory, dtype, folder / "raw" / name)
    _split_column(folder, name, dtype.itemsize, rows, train)
    for path in (keys, counts):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(keys.parent)
    return kept, different


def read_pieces(request: Request, done: dict[str, Any]) -> Iterator[Piece]:
    """The inputs in pieces of whole lines, from where ``done`` says."""
    row = int(done["rows"])
    line, offset = int(done["line"]), int(done["offset"])
    for number in range(int(done["file"]), len(request.inputs)):
        path = request.inputs[number]
        try:
            with _open(path) as file:
                file.seek(offset)
                for text in _whole_lines(file):
                    if not text.endswith(b"\n"):
                        most = f"more than {len(text)} bytes: not Criteo's text"
                        raise InputError(f"{path}: line {line} has {most}")
                    rows = text.count(b"\n")
                    offset += len(text)
                    if request.max_rows is not None:
                        rows = min(rows, request.max_rows - row)
                        if rows <= 0:
                            return
                    yield Piece(number, line, row, rows, text, offset)
                    row, line = row + rows, line + rows
        except (OSError, EOFError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
        line, offset = 1, 0


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The rest of a file in whole lines; a line that is far too long comes without its end."""
    rest = b""
    while block := file.read(PIECE_BYTES):
        lines, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield lines + newline
        elif len(rest) > max(PIECE_BYTES, 1 << 16):
            yield rest
    if rest:  # a last line without its newline
        yield rest + b"\n"


def _open(path: Path) -> IO[bytes]:
    with open_binary(path):
        pass  # or it is refused
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb", buffering=0)  # type: ignore[return-value]


def parse_piece(piece: Piece, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The columns of a piece of text.

    Returns:
        labels (B,) bool; integers (B, 13) int32, MISSING where empty; categories (26, B)
        uint32, 0 where empty; missing (B,) uint32, bit t set where category t is empty.

    Raises:
        InputError: naming file, line, field and what is there.
    """
    rows = piece.rows
    labels = np.empty(rows, np.uint8)
    numbers = np.empty((rows, COUNTS), np.int32)
    categories = np.empty((TABLES, rows), np.uint32)
    missing = np.empty(rows, np.uint32)
    fault = np.zeros(3, np.int64)
    text = np.frombuffer(piece.text, np.uint8)
    parser()(text, rows, HEX_VALUES, labels, numbers, categories, missing, fault)
    if fault[0] != NO_FAULT:
        _refuse_line(piece, path, *fault.tolist())
    return labels.view(bool), numbers, categories, missing


def transform(numbers: np.ndarray) -> np.ndarray:
    """log(x + 3) of Criteo's integers as float16; missing: 0; below −2: as −2, which is 0 too.

    NVIDIA's chain keeps the logarithms as float32 before it splits its files, so they are
    rounded twice here too: 10,361 and 1,020 other integers below 2**24 need it.
    """
    # MISSING is the smallest integer, so it is caught by the same maximum
    logarithms = np.log(np.maximum(numbers, -2).astype(np.float64) + 3.0)
    return logarithms.astype(np.float32).astype(np.float16)


def _refuse_line(piece: Piece, path: Path, kind: int, row: int, number: int) -> None:
    line = piece.text.split(b"\n", row + 1)[row]
    found = line.split(b"\t")[number : number + 1]
    shown = repr(found[0][:40] if found else b"")[1:]
    where = f"{path}: line {piece.line + row}"
    fields = line.count(b"\t") + 1
    if kind in (FEW_FIELDS, MANY_FIELDS) or fields != len(FIELDS):
        hint = " (a test file without labels?)" if fields == len(FIELDS) - 1 else ""
        raise InputError(f"{where} has {fields} fields, expected {len(FIELDS)}{hint}")
    named = {BAD_LABEL: "0 or 1", BAD_INTEGER: "a whole number of 32 bits, or nothing"}
    wanted = named.get(kind, "at most 8 hexadecimal digits, or nothing")
    raise InputError(f"{where}, field {number + 1} ({FIELDS[number]}): {shown}, expected {wanted}")
