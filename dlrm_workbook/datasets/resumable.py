"""Work on a folder that survives kill -9: done in order, noted, renamed when whole.

A data set is made in ``NAME.partial`` beside its final place; ``progress.json`` there says
how much of it is on disk for certain. After a kill the same command goes on from that
note, and whatever was written beyond it is written again (with the same bytes). The
folder gets its final name in one step, so a data set that can be seen is whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import lock_or_refuse, make_folder, sync_folder
from dlrm_workbook.ground.bar import Bar
from dlrm_workbook.ground.ledger import Ledger

T = TypeVar("T")
NOTE = "progress.json"
SYNC_BYTES = 256 << 20
"""Bytes written between two notes of progress, each after the disk has taken them."""


class Workplace:
    """``TARGET.partial``, with a note of what is done.

    Attributes:
        folder: where the data set is made.
        done: what is on the disk for certain, as the last :meth:`note` said.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self._ledger = ledger
        self.note(ledger.document["done"])

    def note(self, done: dict[str, Any]) -> None:
        self.done = self._ledger.document["done"] = dict(done)
        self._ledger.save()


@contextlib.contextmanager
def workplace(target: Path, request: dict[str, Any], command: str) -> Iterator[Workplace | None]:
    """Where a data set is made; at the end of the block the folder gets its final name. An
    InputError says that the target exists already, or that another request was begun there.

    After an error what is unfinished stays for the next time; where nothing was done before an
    InputError, nothing stays in the way. None: the data set was whole already.
    """
    folder = target.with_name(target.name + ".partial")

    def open_note(note: Path) -> Ledger:
        return Ledger(
            note,
            {"request": request, "done": {}},
            work=lambda document: document["request"],
            advice=f"give the first {command} again to go on, or delete that folder",
        )

    if target.exists():
        # a kill between the last two steps leaves the note in a whole data set
        note = target / NOTE
        if not note.exists():
            raise InputError(f"{target} exists already; a data set is never written over another")
        open_note(note)
        note.unlink()
        yield None
        return
    try:
        make_folder(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}") from None
    lock = os.open(folder, os.O_RDONLY)
    try:
        lock_or_refuse(lock, f"{folder}: another process is writing it")
        # a kill in the middle of write_text leaves its unnamed file
        for leftover in folder.glob(".*"):
            leftover.unlink()
        ledger = open_note(folder / NOTE)
        if not ledger.resumed and any(folder.iterdir()):
            raise InputError(f"{folder} is in the way: it holds files, but no {NOTE}")
        place = Workplace(folder, ledger)
        try:
            yield place
        except InputError:
            if not place.done:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        os.fsync(lock)
        folder.rename(target)
        sync_folder(target.parent)
        (target / NOTE).unlink()
    finally:
        os.close(lock)


class OpenFiles:
    """Files of a workplace, written at places by any thread; they are made if need be, and kept as
    they are if not. The disk takes what was written while more is made, and the workplace notes
    what it has: a state is noted when all that it speaks of is on the disk."""

    def __init__(self, place: Workplace, folder: Path, names: Iterable[str]) -> None:
        files = {name: folder / name for name in names}
        parents = {file.parent for file in files.values()}
        for parent in parents:
            make_folder(parent)
        self._place = place
        self._handles = {
            name: os.open(file, os.O_RDWR | os.O_CREAT, 0o644) for name, file in files.items()
        }
        for parent in parents:
            sync_folder(parent)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._under_way: tuple[Future[None], dict[str, Any]] | None = None
        self._unsynced = 0

    def write(self, name: str, values: np.ndarray, row: int) -> None:
        """Write rows of a file from the ``row``-th on."""
        view = values.data.cast("B")
        place = row * (values.nbytes // len(values))
        while len(view):
            written = os.pwrite(self._handles[name], view, place)
            view, place = view[written:], place + written

    def written(self, size: int, state: dict[str, Any]) -> None:
        """Count bytes that were written and that ``state`` speaks of; never waits."""
        self._unsynced += size
        if self._under_way is not None and self._under_way[0].done():
            self._settle()
        if self._under_way is None and self._unsynced >= SYNC_BYTES:
            self._under_way = self._pool.submit(self._sync), dict(state)
            self._unsynced = 0

    def finish(self, state: dict[str, Any]) -> None:
        """Return when all is on the disk and noted."""
        self._settle()
        self._sync()
        self._place.note(state)

    def _settle(self) -> None:
        if self._under_way is not None:
            future, state = self._under_way
            future.result()
            self._place.note(state)
            self._under_way = None

    def _sync(self) -> None:
        """Return when the disk has all that was written before the call."""
        for handle in self._handles.values():
            # begins to write, without waiting: the files then share one commit of the journal
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        for handle in self._handles.values():
            os.fdatasync(handle)

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown()
        for handle in self._handles.values():
            os.close(handle)


def threaded(
    work: Callable[[Any], T], items: Iterable[Any], threads: int, ahead: int
) -> Iterator[T]:
    """Results of ``work`` in the order of the items, ``threads`` at a time.

    At most ``ahead`` items are under way or waiting to be taken, so memory is flat.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="dataset") as pool:
        under_way: deque[Future[T]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(work, item))
                if len(under_way) >= ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def need_space(folder: Path, size: int) -> None:
    """Refuse (InputError) before writing what the disk has no room for, with both numbers."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise InputError(
            f"{folder} has {free / 1e9:.2f} GB free, but {size / 1e9:.2f} GB are to be written "
            "(fewer samples with --samples or --max-rows)"
        )


def progress_bar(what: str, unit: str, total: int, done: int = 0) -> Bar:
    """A bar on standard error, or none where nobody looks."""
    return Bar(what, unit, total, shown=sys.stderr.isatty(), done=done, unit_scale=True)
