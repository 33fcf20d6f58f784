"""Tensors in files: safetensors written as a stream, read back tensor by tensor.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, little endian,
the size of a JSON header; the header, padded with spaces to a multiple of 8, with dtype,
shape and place of every tensor; then their bytes one behind the other. Nothing in it can
be executed. The library's own writer wants all bytes of a tensor at once, and of a tensor
on a GPU a copy of all of it; here at most :data:`PIECE_BYTES` are in flight. Each tensor
gets a CRC-32, which safetensors has not: a flipped bit is found and named.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dlrm_core.errors import InputError, MissingToolError

PIECE_BYTES = 8 << 20
"""Read, written, copied and checked at a time."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a new safetensors file, on disk when this returns.

    Args:
        tensors: on any device; none is copied as a whole.

    Returns:
        what :func:`check_file` and :func:`read_tensors` hold the file to: ``bytes``,
        ``header_bytes``, ``header_crc32`` and for each of ``tensors`` its ``dtype``,
        ``shape`` and ``crc32``.
    """
    header = _header(tensors)
    about: dict[str, Any] = {}
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        _write_all(file, header)
        for name, tensor in tensors.items():
            checksum = 0
            for piece in _pieces(tensor):
                # the checksum of a piece is taken while the piece is written
                taken = beside.submit(zlib.crc32, piece, checksum)
                _write_all(file, piece)
                checksum = taken.result()
            about[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "crc32": checksum,
            }
        size = file.tell()
        os.fsync(file.fileno())
    return {
        "bytes": size,
        "header_bytes": len(header),
        "header_crc32": zlib.crc32(header),
        "tensors": about,
    }


def check_file(path: Path, record: Mapping[str, Any]) -> None:
    """Refuse a file whose size or header is not what was written.

    Raises:
        InputError: naming the file and both numbers.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(int(record["header_bytes"]))
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; the checkpoint is not whole") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if size != record["bytes"]:
        raise InputError(
            f"{path}: holds {size:,} bytes, but {record['bytes']:,} were written: it is "
            f"{'cut short' if size < record['bytes'] else 'not the same file'}"
        )
    found = zlib.crc32(header)
    if found != record["header_crc32"]:
        raise InputError(
            f"{path}: its header has checksum {found:08x}, but {record['header_crc32']:08x} was "
            "written: the file is corrupted"
        )


def read_tensors(
    path: Path, record: Mapping[str, Any], targets: Mapping[str, torch.Tensor | None]
) -> None:
    """Copy tensors of a file into others of their shape, in place, and check every byte.

    Args:
        record: what :func:`write_tensors` returned.
        targets: by name; None: the tensor is checked only.

    Raises:
        InputError: the file is corrupted; what has been copied until then stays.
        MissingToolError: safetensors is not installed.
    """
    check_file(path, record)
    library = _library()
    try:
        with library.safe_open(path, framework="pt") as file, ThreadPoolExecutor(2) as workers:
            jobs = [
                workers.submit(_read_one, path, file, name, record["tensors"][name], target)
                for name, target in targets.items()
            ]
            for job in jobs:
                job.result()
    except library.SafetensorError as error:
        raise InputError(f"{path}: is no safetensors file: {error}") from None


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
        InputError: the file is missing, cut short, or no safetensors file.
        MissingToolError: safetensors is not installed.
    """
    check_file(path, record)
    library = _library()
    try:
        with library.safe_open(path, framework="pt") as file, torch.no_grad():
            source = file.get_slice(name)
            if columns is None:
                target.copy_(source[rows.start : rows.stop])
            else:
                target.copy_(source[rows.start : rows.stop, columns.start : columns.stop])
    except library.SafetensorError as error:
        raise InputError(f"{path}: is no safetensors file: {error}") from None


def _read_one(
    path: Path, file: Any, name: str, about: Mapping[str, Any], target: torch.Tensor | None
) -> None:
    source = file.get_slice(name)
    shape = tuple(about["shape"])
    checksum = 0
    with torch.no_grad():
        for rows in row_ranges(shape, 8 if about["dtype"] in ("F64", "I64") else 4):
            piece = source[rows.start : rows.stop] if shape else file.get_tensor(name)
            checksum = zlib.crc32(_bytes_of(piece), checksum)
            if target is not None:
                (target[rows.start : rows.stop] if shape else target).copy_(piece)
    if checksum != about["crc32"]:
        raise InputError(
            f"{path}: {name} has checksum {checksum:08x}, but {about['crc32']:08x} was written: "
            "the file is corrupted"
        )


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries, place = {}, 0
    for name, tensor in tensors.items():
        end = place + tensor.numel() * tensor.element_size()
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


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order, a few rows at a time."""
    tensor = tensor.detach()
    for rows in row_ranges(tuple(tensor.shape), tensor.element_size()):
        part = tensor[rows.start : rows.stop] if tensor.dim() else tensor
        yield _bytes_of(part.contiguous().cpu())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write_all(file: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _library() -> Any:
    """safetensors, which only those who read checkpoints need."""
    try:
        import safetensors
    except ImportError:
        raise MissingToolError(
            "reading a checkpoint needs safetensors, which is not installed: "
            "pip install safetensors"
        ) from None
    return safetensors
