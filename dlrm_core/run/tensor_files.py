"""Tensors in files: the documented safetensors layout, written and read a few rows at a time.

A file is the length of its header (8 bytes, little endian), the header (JSON: name to type,
shape and place) and the tensors' bytes. What was written is recorded beside it with
checksums, and every byte read is held to them. No tensor is ever copied as a whole.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import open_binary
from dlrm_core.base.settings import LARGEST_INT

LARGEST = sys.float_info.max
"""The largest finite value."""

PIECE_BYTES = 8 << 20
"""Read, written, copied and checked at a time."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a new file, which is on disk when this returns.

    Args:
        tensors: on any device; only their shape, their type and rows of them are asked for.

    Returns:
        what :func:`read_tensors` holds the file to: ``bytes``, ``header_bytes``,
        ``header_crc32`` and for each of ``tensors`` its ``dtype``, ``shape`` and ``crc32``.
    """
    header = _header(tensors)
    about: dict[str, Any] = {}
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        _write_all(file, header)
        for name, tensor in tensors.items():
            checksum = 0
            for rows in row_ranges(tuple(tensor.shape), tensor.dtype.itemsize):
                part = tensor[rows.start : rows.stop] if tensor.shape else tensor
                piece = _bytes_of(part.detach().contiguous().cpu())
                # the checksum of a piece is taken while the piece is written
                taken = beside.submit(zlib.crc32, piece, checksum)
                _write_all(file, piece)
                checksum = taken.result()
            shape = list(tensor.shape)
            about[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "crc32": checksum}
        size = file.tell()
        os.fsync(file.fileno())
    return {
        "bytes": size,
        "header_bytes": len(header),
        "header_crc32": zlib.crc32(header),
        "tensors": about,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """How a file spells the type of a tensor's values, such as F32."""
    return _NAMES[dtype]


_CRC32 = 2**32 - 1

RECORD: Mapping[Any, Any] = {
    "bytes": LARGEST_INT,
    "header_bytes": 1 << 30,
    "header_crc32": _CRC32,
    "tensors": {...: {"dtype": tuple(_DTYPES), "shape": [LARGEST_INT], "crc32": _CRC32}},
}
"""The form (:func:`dlrm_core.base.settings.require_form`) of what :func:`write_tensors` returns."""


def stored_tensors(path: Path, record: Mapping[str, Any]) -> dict[str, _Stored]:
    """The tensors of a file whose size and header are those that its record calls for.

    Raises:
        InputError: they are not; naming the file.
    """
    if not path.exists():
        raise InputError(f"{path} is missing; the checkpoint is not whole")
    stored = {name: _Stored(path, name, about) for name, about in record["tensors"].items()}
    header = _header(stored)
    place = len(header)
    for tensor in stored.values():
        tensor.begin = place
        place += tensor.bytes
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            begin = file.read(len(header))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if size != record["bytes"]:
        raise InputError(
            f"{path} has {size:,} bytes, but {record['bytes']:,} were written: it is "
            f"{'cut short' if size < record['bytes'] else 'not the same file'}"
        )
    if begin != header or place != size:
        raise InputError(
            f"{path} does not begin with the tensors, types and shapes that {path.parent.name} "
            "records of it: the file is corrupted, or was written by something else"
        )
    return stored


def read_tensors(
    path: Path,
    record: Mapping[str, Any],
    targets: Mapping[str, torch.Tensor | None],
    not_negative: tuple[str, ...] = (),
) -> None:
    """Copy tensors of a file into others of their shape, in place, and check every value.

    Args:
        record: what :func:`write_tensors` returned.
        targets: by name; None: the tensor is checked only.
        not_negative: ends of the names of tensors without a value below 0.

    Raises:
        InputError: the file is corrupted, or a value is not finite, or negative where it cannot
            be; what has been copied until then stays.
    """
    stored = stored_tensors(path, record)
    with ThreadPoolExecutor(2) as workers:
        jobs = [
            workers.submit(
                stored[name].check,
                record["tensors"][name]["crc32"],
                target,
                0.0 if name.endswith(not_negative) else -LARGEST,
            )
            for name, target in targets.items()
        ]
        for job in jobs:
            job.result()


def read_part(
    path: Path,
    record: Mapping[str, Any],
    name: str,
    target: torch.Tensor,
    rows: range,
    columns: range | None = None,
) -> None:
    """Copy some rows, and of them some columns, of a tensor; its checksum is not looked at.

    Args:
        record: what :func:`write_tensors` returned.
        target: (rows, columns), or (rows,) where ``columns`` is None.

    Raises:
        InputError: the file is missing or cut short.
    """
    source = stored_tensors(path, record)[name]
    with torch.no_grad():
        piece = source.read(rows)
        target.copy_(piece if columns is None else piece[:, columns.start : columns.stop])


class _Stored:
    """A tensor in a file: ``about`` is what its record says of it, ``begin`` its first byte."""

    begin = 0

    def __init__(self, path: Path, name: str, about: Mapping[str, Any]) -> None:
        self._path, self._name = path, name
        self.dtype: torch.dtype = _DTYPES[about["dtype"]]
        self.shape = tuple(about["shape"])

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: range) -> torch.Tensor:
        """Some rows; of a tensor without dimensions, itself."""
        shape = (len(rows), *self.shape[1:]) if self.shape else ()
        piece = torch.empty(shape, dtype=self.dtype)
        into = memoryview(_bytes_of(piece))
        row_bytes = math.prod(self.shape[1:]) * piece.element_size()
        with self._path.open("rb", buffering=0) as file:
            file.seek(self.begin + rows.start * row_bytes)
            while into:
                count = file.readinto(into)
                if not count:
                    raise InputError(f"{self._path} ends within {self._name}: it is cut short")
                into = into[count:]
        return piece

    @torch.no_grad()
    def check(self, expected: int, target: torch.Tensor | None, least: float) -> None:
        """Hold all bytes to their checksum, and copy them into ``target`` meanwhile.

        Args:
            least: that a value may be.
        """
        checksum, odd = 0, None
        for rows in row_ranges(self.shape, self.dtype.itemsize):
            piece = self.read(rows)
            checksum = zlib.crc32(_bytes_of(piece), checksum)
            if piece.numel():
                # both are NaN where one value is
                low, high = (float(bound) for bound in torch.aminmax(piece))
                if not least <= low <= high <= LARGEST:
                    odd = low, high
            if target is not None:
                (target[rows.start : rows.stop] if self.shape else target).copy_(piece)
        if checksum != expected:
            raise InputError(
                f"{self._path}: {self._name} has checksum {checksum:08x}, but {expected:08x} was "
                "written: the file is corrupted"
            )
        if odd is not None:
            wanted = "finite numbers of at least 0" if least == 0 else "finite numbers"
            raise InputError(
                f"{self._path}: {self._name} has values from {odd[0]:g} to {odd[1]:g}, expected "
                f"{wanted}"
            )


def _header(tensors: Mapping[str, Any]) -> bytes:
    entries, place = {}, 0
    for name, tensor in tensors.items():
        end = place + math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def row_ranges(shape: tuple[int, ...], element_bytes: int) -> Iterator[range]:
    """Rows of a tensor in portions of about :data:`PIECE_BYTES`."""
    count = shape[0] if shape else 1
    rows = max(1, PIECE_BYTES // max(1, math.prod(shape[1:]) * element_bytes))
    for start in range(0, count, rows):
        yield range(start, min(start + rows, count))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write_all(file: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
