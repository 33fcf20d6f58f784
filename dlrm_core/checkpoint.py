"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder ``step-00001000`` with ``checkpoint.json`` (format, version, step,
parameters, position in the data, what optimisers count, checksums of everything, its own
included), ``weights.safetensors`` and, where the optimiser has state,
``optimizer.safetensors``. It is filled under a hidden name, brought to disk and then
renamed, so a folder of that name is whole whenever the process was killed. Older ones are
removed only after that. Nothing in a checkpoint is executed when it is read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from dlrm_core.errors import InputError, MissingToolError
from dlrm_core.files import lock_or_refuse, read_json, sync_folder

# Tensors in files: safetensors written as a stream, read back tensor by tensor.

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


FORMAT = "dlrm-checkpoint"
VERSION = 1
"""Of the folder's layout; older versions stay readable, newer ones are refused."""

MANIFEST = "checkpoint.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and whose manifest is whole; its tensors are still on disk.

    Attributes:
        step: iterations done.
        parameters: sections of the run that wrote it.
        state: all that is no tensor: ``position`` in the data, ``counts`` of updates,
            ``loss_scale``, ``skipped_steps``.
        files: what each tensor file must be, by its name.
    """

    folder: Path
    step: int
    parameters: Mapping[str, Any]
    state: Mapping[str, Any]
    files: Mapping[str, Any]

    def shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in one of the files; empty if there is no such file."""
        tensors = self.files.get(file, {}).get("tensors", {})
        return {name: tuple(about["shape"]) for name, about in tensors.items()}

    def read_into(self, file: str, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy all tensors of a file into others of the same names and shapes.

        Raises:
            InputError: a name or a shape differs (both are named), or the file is corrupted.
        """
        saved = self.shapes(file)
        for name in sorted(saved.keys() - targets.keys()):
            raise InputError(f"{self.folder / file}: holds {name}, which this run does not have")
        for name, target in targets.items():
            if name not in saved:
                raise InputError(f"{self.folder / file}: does not hold {name}, which this run has")
            if saved[name] != tuple(target.shape):
                raise InputError(
                    f"{self.folder / file}: {name} is {_by(saved[name])}, but this run's is "
                    f"{_by(tuple(target.shape))} ({_parameter_of(name)})"
                )
        if saved:
            read_tensors(self.folder / file, self.files[file], targets)

    def verify(self) -> None:
        """Read every byte and hold it against its checksum.

        Raises:
            InputError: naming the file and tensor that is corrupted.
        """
        for file, record in self.files.items():
            read_tensors(self.folder / file, record, dict.fromkeys(record["tensors"]))


class CheckpointFolder:
    """The checkpoints of one run; close it, or use it as a context.

    Args:
        folder: made if need be; no other process may write to it at the same time.
        keep: how many checkpoints stay.
        resumed_step: of the checkpoint that the run goes on from; 0: it begins anew.

    Raises:
        InputError: the folder cannot be written, is in use, or holds later checkpoints,
            which the run's own would be mixed up with.
    """

    def __init__(self, folder: Path, keep: int, resumed_step: int = 0) -> None:
        self.folder = folder
        self._keep = keep
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (folder / ".lock").open("a")
        except OSError as error:
            raise InputError(
                f"training.checkpoint_folder: {folder} cannot be written: {error.strerror}"
            ) from None
        try:
            self._claim(resumed_step)
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, resumed_step: int) -> None:
        lock_or_refuse(
            self._lock.fileno(),
            f"training.checkpoint_folder: another run is writing checkpoints to {self.folder}",
        )
        later = [step for step in steps_in(self.folder) if step > resumed_step]
        if later:
            begins = f"from step {resumed_step}" if resumed_step else "from the beginning"
            raise InputError(
                f"training.checkpoint_folder: {self.folder} holds a checkpoint of step "
                f"{later[-1]}, but this run starts {begins}: go on from it with "
                "training.resume: latest (dlrm train --resume latest), or choose another folder"
            )
        # what a run that was killed had not finished
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(
        self,
        step: int,
        parameters: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint; it is on disk, and found by others, when this returns.

        Raises:
            InputError: it cannot be written; the ones before it stay.
        """
        target = self.folder / f"step-{step:08d}"
        if target.exists():
            return target
        try:
            part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=self.folder))
            try:
                files = {WEIGHTS: write_tensors(part / WEIGHTS, weights)}
                if optimizer:
                    files[OPTIMIZER] = write_tensors(part / OPTIMIZER, optimizer)
                manifest = {
                    "format": FORMAT,
                    "version": VERSION,
                    "step": step,
                    "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "versions": {"torch": torch.__version__, "python": platform.python_version()},
                    "parameters": dict(parameters),
                    "state": dict(state),
                    "files": files,
                }
                manifest["sha256"] = _digest(manifest)
                _write_synced(part / MANIFEST, json.dumps(manifest))
                part.chmod(0o755)
                sync_folder(part)
                part.rename(target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            sync_folder(self.folder)
        except OSError as error:
            raise InputError(
                f"{target}: the checkpoint cannot be written: {error.strerror or error}"
            ) from None
        self._drop_old()
        return target

    def close(self) -> None:
        """Let other processes write to the folder."""
        self._lock.close()

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_old(self) -> None:
        for step in steps_in(self.folder)[: -self._keep]:
            old = self.folder / f"step-{step:08d}"
            hidden = self.folder / f".{old.name}-old"
            # hidden first: one that is being removed must not look whole
            with contextlib.suppress(OSError):
                old.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first; empty if there is no such folder."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or has one in it."""
    return (folder / MANIFEST).exists() or bool(steps_in(folder))


def find_checkpoint(given: str, folder: Path | None = None) -> Path:
    """The folder that ``training.resume`` or ``--checkpoint`` means.

    Args:
        given: a checkpoint, a folder of checkpoints, or 'latest'.
        folder: where 'latest' looks.

    Raises:
        InputError: there is no checkpoint.
    """
    if given == "latest":
        if folder is None:
            raise InputError(
                "training.resume is 'latest', but there is no training.checkpoint_folder to look "
                "for it in: name the folder, or the checkpoint itself"
            )
        place = folder
    else:
        place = Path(given)
    if (place / MANIFEST).exists():
        return place
    steps = steps_in(place)
    if not steps:
        raise InputError(f"{place}: holds no checkpoint (no {MANIFEST}, no step-NNNNNNNN)")
    return place / f"step-{steps[-1]:08d}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint says of itself, and see that its files are all there.

    Raises:
        InputError: it is no checkpoint, of a newer version, corrupted or cut short.
    """
    path = folder / MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path}: is no checkpoint of {FORMAT}")
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise InputError(
            f"{path}: has version {version}, this program reads versions up to {VERSION}"
        )
    digest = manifest.pop("sha256", "")
    if digest != (found := _digest(manifest)):
        raise InputError(
            f"{path}: has checksum {found[:16]}…, but {str(digest)[:16]}… was written: the file "
            "is corrupted"
        )
    for name, record in manifest["files"].items():
        check_file(folder / name, record)
    return Checkpoint(
        folder, manifest["step"], manifest["parameters"], manifest["state"], manifest["files"]
    )


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape) or "one number"


def _parameter_of(name: str) -> str:
    """Which parameter decides the shape of a tensor."""
    table = re.match(r"embeddings\.tables\.(\d+)\.", name)
    if table:
        return f"model.table_rows[{table[1]}], model.embedding_dim"
    return "model.bottom_mlp" if name.startswith("bottom_mlp") else "model.top_mlp"
