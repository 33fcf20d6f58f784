"""Files: written whole or not at all, and read only where they can be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dlrm_core.base.errors import InputError

DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of the system that no program can mend: a full disk, a quota, a limit, a bad device."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON as :func:`whole_file` does: a reader sees the old file or the new one, whole."""
    write_text(path, json.dumps(plain(value), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text as :func:`whole_file` does; the disk has it when this returns."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _refusing(what: str, errors: Collection[int] | None = None) -> Iterator[None]:
    """Say of a trouble of the system inside, or of these kinds of it alone, what it prevented."""
    try:
        yield
    except OSError as error:
        if errors is not None and error.errno not in errors:
            raise
        raise InputError(f"{what}: {error.strerror}") from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file that appears only when whole, in the place of an old one: fill what is yielded.

    It lies hidden beside ``path``, is brought to disk and renamed at the end, and the disk has its
    name when the block ends; after an error it is removed. Raises InputError if the folder cannot
    be written, or the disk is full.
    """
    with _refusing(f"{path} cannot be written"):
        make_folder(path.parent)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        file = part.open("xb")
    with _refusing(f"{path} cannot be written", DISK_TROUBLE):
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there; the disk has their names then."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names in a folder; a file's own fsync does not bring them."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot
            raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Return when the disk has all that lies in a folder and below; links are not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):  # hidden ones of other writers come and go
                if stat.S_ISREG(path.lstat().st_mode):
                    _sync(path)
        sync_folder(Path(place))


def require_new(target: Path, what: str) -> None:
    """Refuse, before long work, a folder that :func:`whole_folder` would refuse after it."""
    _hidden_beside(target, what).rmdir()


def _hidden_beside(target: Path, what: str) -> Path:
    if target.exists():
        raise InputError(f"{target} exists already; a {what} is never written over another")
    with _refusing(f"cannot write the {what} to {target}"):
        make_folder(target.parent)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))


@contextlib.contextmanager
def whole_folder(target: Path, what: str) -> Iterator[Path]:
    """A new folder that appears only when whole: fill the one that is yielded.

    It lies hidden beside ``target``; at the end all of it is brought to disk, whoever wrote it, and
    it is renamed; after an error, or an interruption, it is gone. Raises InputError if ``target``
    exists, or cannot be written.
    """
    part = _hidden_beside(target, what)
    try:
        yield part
        part.chmod(0o755)
        sync_tree(part)
        part.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise InputError(f"cannot write the {what} to {target}: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[IO[bytes]]:
    """A file that a user named, open for reading; only a regular one is opened.

    A pipe, a device or one of /proc is refused at once: it could wait, or go on, for ever. Raises
    InputError if it is missing, no regular file, or cannot be read.
    """
    try:
        # without waiting for who writes a pipe; to a regular file the flag means nothing
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read: {why}") from None
    about = os.fstat(handle)
    kernels = os.path.ismount("/proc") and about.st_dev == Path("/proc").stat().st_dev
    if kernels or not stat.S_ISREG(about.st_mode):
        os.close(handle)
        what = "a folder" if stat.S_ISDIR(about.st_mode) else "no regular file"
        raise InputError(f"{path} cannot be read: it is {what}")
    with os.fdopen(handle, "rb") as file:
        yield file


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a file that a user named; a larger one than allowed is refused unread.

    Raises InputError if it is missing, no regular file, too large, or no UTF-8 text.
    """
    with open_binary(path) as file:
        with _refusing(f"{path} cannot be read"):
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            size = max(os.fstat(file.fileno()).st_size, len(data))
            raise InputError(
                f"{path} is not read: it has {size:,} bytes, expected at most {most_bytes:,}"
            )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read as text: {error}") from None


MOST_JSON = 256 << 20
"""Bytes of the largest JSON file that is read whole."""


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises InputError if the file is missing, no regular file, too large, cut short or not JSON.
    """
    text = read_text(path, MOST_JSON)
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{path} cannot be read as JSON: {why}") from None


def plain(value: Any) -> Any:
    """The same value with what JSON cannot say (NaN, infinity) as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def lock_or_refuse(handle: int, refusal: str) -> None:
    """Lock an open file or folder; the lock ends with the process, however that ends.

    Raises InputError if another process has the lock; ``refusal`` is the sentence.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(refusal) from None
    except OSError:
        pass  # some network file systems have no locks


@contextlib.contextmanager
def locked(file: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a file, made if need be, for as long as the block lasts.

    Raises InputError if another process holds it, with ``refusal``; or it cannot be made.
    """
    with _refusing(f"{file.parent} cannot be written"):
        make_folder(file.parent)
        lock = file.open("a")
    with lock:
        lock_or_refuse(lock.fileno(), refusal)
        yield


class JsonLines:
    """A file of JSON lines, each in the file, behind ``prefix``, as soon as it is written.

    Raises InputError if the file cannot be written, now or by any method.
    """

    def __init__(self, path: Path, append: bool = False, prefix: str = "") -> None:
        self._path, self._prefix = path, prefix
        with self._writing():
            make_folder(path.parent)
            self._file: IO[str] = path.open("a" if append else "w", encoding="utf-8")
            sync_folder(path.parent)

    def write(self, value: Any) -> None:
        with self._writing():
            self._file.write(f"{self._prefix}{json.dumps(plain(value))}\n")
            self._file.flush()

    def sync(self) -> None:
        """Return when the disk has all lines."""
        with self._writing():
            os.fsync(self._file.fileno())

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return _refusing(f"{self._path} cannot be written")

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            with self._writing():
                self._file.close()
        except InputError:
            if failure[0] is None:
                raise
