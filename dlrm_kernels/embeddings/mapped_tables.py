"""Tables larger than the host's memory: files on a disk, mapped into the address space.

The system keeps the rows that are in use in memory and writes changed pages back; a row
that is not there costs a read of the disk. The files are scratch: what a run has learned
is in its checkpoints, and the files go when the run ends. Folders that killed runs left
behind are removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch

from dlrm_core.errors import InputError
from dlrm_core.units import format_bytes

PREFIX = "dlrm-tables-"
_LOCK = "in-use"
_IN_MEMORY = ("tmpfs", "ramfs")


class MappedTables:
    """Memory for tables (R, d) float32, each a file of its own.

    Args:
        folder: on a disk; a folder of this run's own is made in it.

    Attributes:
        folder: the run's own.
        bytes: of all files.
        tensors: of the tables, uninitialised.

    Raises:
        InputError: the folder cannot be written, is itself in memory, or has too little room
            (both numbers are named).
    """

    def __init__(self, folder: Path, table_rows: Sequence[int], dim: int) -> None:
        self.bytes = sum(table_rows) * dim * 4
        self.tensors: list[torch.Tensor] = []
        if (kind := file_system(folder)) in _IN_MEMORY:
            raise InputError(
                f"training.tables_on_disk is {str(folder)!r}, which is in memory ({kind}): name a "
                "folder on a disk"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            self._check_room(folder)
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            lock = (self.folder / _LOCK).open("w")
        except OSError as error:
            raise InputError(
                f"training.tables_on_disk: {folder} cannot be written: {error.strerror}"
            ) from None
        self._finish = weakref.finalize(self, _remove, self.folder, lock)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for number, rows in enumerate(table_rows):
                self.tensors.append(_mapped(self.folder / f"{number:05d}.f32", rows, dim))
        except OSError as error:
            self.close()
            raise InputError(
                f"training.tables_on_disk: tables of {format_bytes(self.bytes)} cannot be made in "
                f"{folder}: {error.strerror}"
            ) from None

    def settle(self) -> None:
        """After the tables are filled: rows are looked up anywhere, so nothing is read ahead.

        By default a miss reads up to 128 KiB around it, 512 times a row of 64 floats.
        """
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for tensor in self.tensors:
            advise(tensor.data_ptr(), tensor.nbytes, mmap.MADV_RANDOM)

    def close(self) -> None:
        """Remove the files; their room is free once the tensors are gone as well."""
        self._finish()

    def _check_room(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        if self.bytes > free:
            raise InputError(
                f"training.tables_on_disk: the tables on the host take {format_bytes(self.bytes)}, "
                f"but {format_bytes(free)} are free in {folder}, "
                f"{format_bytes(self.bytes - free)} too few"
            )


def remove_leftovers(folder: Path) -> None:
    """Remove the folders of runs that were killed: nobody holds their locks any more."""
    for left in folder.glob(f"{PREFIX}*"):
        try:
            with (left / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # in use, just being made, or not ours to remove


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that a folder is on, as ``ext4``; empty where nobody says."""
    place, best, kind = folder.resolve(), -1, ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(" ")
        # spaces and the like are octal there
        point = Path(fields[1].encode().decode("unicode_escape"))
        # later lines cover earlier ones
        if place.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def _mapped(path: Path, rows: int, dim: int) -> torch.Tensor:
    """A file of R d floats as a tensor (R, d); writes go to the file.

    Its room on the disk is taken now, though nothing is written: a disk that fills up later
    would end the process with SIGBUS.
    """
    size = rows * dim * 4
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    with torch.device("cpu"):
        flat = torch.from_file(str(path), shared=True, size=rows * dim, dtype=torch.float32)
    return flat.view(rows, dim)


def _remove(folder: Path, lock: IO[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()
