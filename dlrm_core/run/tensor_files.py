"""Tensors in files: numpy's own ``.npy``, one a tensor, written and read a few rows at a time.

numpy has no bf16: such numbers are stored as the words of 16 bits that they are, and the
record beside the file says what they mean. No tensor is ever copied as a whole.
"""

from __future__ import annotations

import math
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import open_binary
from dlrm_core.base.settings import LARGEST_INT

PIECE_BYTES = 8 << 20
"""Read, written, copied and checked at a time."""

HEADER_BYTES = 128

SQUARES = (".sum", ".exp_avg_sq")
"""Ends of the names of optimisers' sums of squares, which are never negative."""

_DESCRIPTIONS = {
    **{"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"},
    **{"int64": "<i8", "int32": "<i4", "uint8": "|u1"},
}
"""numpy's description of the numbers of a torch type, by the type's name."""

RECORD: Mapping[Any, Any]
RECORD = {"dtype": tuple(_DESCRIPTIONS), "shape": [LARGEST_INT], "crc32": 2**32 - 1}
"""The form (:func:`dlrm_core.base.settings.require_form`) of what :func:`write_tensor` returns."""


def write_tensor(path: Path, tensor: torch.Tensor) -> dict[str, Any]:
    """Write a new file; its record: ``dtype``, ``shape`` and ``crc32``, of the whole file.

    The tensor is on any device; only its shape, its type and rows of it are asked for.
    """
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    header = _header(dtype, shape)
    checksum = zlib.crc32(header)
    with path.open("xb") as file:
        file.write(header)
        for rows in row_ranges(shape, tensor.dtype.itemsize):
            part = tensor[rows.start : rows.stop] if shape else tensor
            piece = _bytes_of(part.detach().contiguous().cpu())
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
    return {"dtype": dtype, "shape": list(shape), "crc32": checksum}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in records, such as float32."""
    return str(dtype).removeprefix("torch.")


class StoredTensor:
    """A tensor in a file whose size and header are those that its record calls for."""

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        self.path, self._checksum = path, record["crc32"]
        self.dtype: torch.dtype = getattr(torch, record["dtype"])
        self.shape = tuple(record["shape"])
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        header = _header(record["dtype"], self.shape)
        written = len(header) + math.prod(self.shape) * self.dtype.itemsize
        if not path.exists():
            raise InputError(f"{path} is missing; the checkpoint is not whole")
        with open_binary(path) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                begin = file.read(len(header))
            except OSError as error:
                raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if size != written:
            how = "cut short" if size < written else "not the same file"
            raise InputError(
                f"{path} has {size:,} bytes, but {written:,} were written: it is {how}"
            )
        if begin != header:
            raise InputError(
                f"{path} does not begin with the type and shape that the checkpoint records of "
                "it: the file is corrupted, or was written by something else"
            )

    def read(self, rows: range) -> torch.Tensor:
        """Some rows, or a tensor without dimensions; the checksum is not looked at."""
        shape = (len(rows), *self.shape[1:]) if self.shape else ()
        piece = torch.empty(shape, dtype=self.dtype)
        with self.path.open("rb") as file:
            file.seek(HEADER_BYTES + rows.start * self._row_bytes)
            if file.readinto(_bytes_of(piece)) != piece.nbytes:
                raise InputError(f"{self.path} is cut short")
        return piece

    @torch.no_grad()
    def check(self, target: torch.Tensor | None = None) -> None:
        """Hold all bytes to their checksum, and copy them into ``target`` meanwhile.

        Raises InputError if the file is corrupted, or a value is not finite, or negative where it
        cannot be; what has been copied until then stays.
        """
        least = 0.0 if self.path.stem.endswith(SQUARES) else -sys.float_info.max
        checksum, odd = zlib.crc32(_header(dtype_name(self.dtype), self.shape)), ""
        for rows in row_ranges(self.shape, self.dtype.itemsize):
            piece = self.read(rows)
            checksum = zlib.crc32(_bytes_of(piece), checksum)
            if piece.numel():
                # both are NaN where one value is
                low, high = (float(bound) for bound in torch.aminmax(piece))
                if not least <= low <= high <= sys.float_info.max:
                    odd = f"has values from {low:g} to {high:g}, expected finite numbers"
            if target is not None:
                (target[rows.start : rows.stop] if self.shape else target).copy_(piece)
        if checksum != self._checksum:
            raise InputError(
                f"{self.path} has checksum {checksum:08x}, but {self._checksum:08x} was written: "
                "the file is corrupted"
            )
        if odd:
            raise InputError(f"{self.path} {odd}{' of at least 0' if least == 0 else ''}")


def row_ranges(shape: tuple[int, ...], element_bytes: int) -> Iterator[range]:
    """Rows of a tensor in portions of about :data:`PIECE_BYTES`."""
    count = shape[0] if shape else 1
    rows = max(1, PIECE_BYTES // max(1, math.prod(shape[1:]) * element_bytes))
    for start in range(0, count, rows):
        yield range(start, min(start + rows, count))


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The same bytes whichever numpy is installed: its format's version 1.0."""
    about = {"descr": _DESCRIPTIONS[dtype], "fortran_order": False, "shape": shape}
    text = f"{about!r}".ljust(HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
