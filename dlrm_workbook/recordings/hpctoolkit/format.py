"""HPCToolkit database format 4.x: its structures on disk, read with bounds checks.

Source: ``doc/FORMATS.md`` of HPCToolkit (develop, 2025-05), whose structure tables are in
``records.csv``: field, byte offset, type. All integers and floats are little-endian; a pointer is
an absolute byte offset in the file.

Nothing in a file is believed before it is checked: a pointer, a count or a size
that leads outside the file is a ``DatabaseError``, and no allocation is larger
than a small multiple of the file. Arrays use the stride that the file states
(FORMATS.md, "Reader compatibility"), so that later minor versions, whose
structures are longer, can be read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import open_binary
from dlrm_core.base.text import visible
from dlrm_workbook.ground.tables import rows_of

MAGIC = b"HPCTOOLKIT"
MAJOR_VERSION = 4
FOOTER_BYTES = 8

NEEDED_FILES = ("meta.db", "profile.db", "cct.db")
"""Without these there is no database."""

DATABASE_FILES = (*NEEDED_FILES, "trace.db")
"""Of a database measured with ``-t``."""

STRING_BUDGET = 8
"""Names may take this many times the file's size once decoded (they may share bytes)."""

KEPT_BYTES = 64 << 20
"""Bytes of a file that are read before its pages are let go of."""

MAPPED_BYTES = 64 << 10
"""Bytes that Linux maps at once, around the first one that is read."""

REPROCESS = (
    "run `hpcprof -o NEW_DATABASE MEASUREMENTS` of HPCToolkit 2023.08 or later "
    "on the measurement directory to get a database in format 4"
)


class DatabaseError(InputError):
    """An HPCToolkit database cannot be read: missing, cut short, damaged or of another format.

    The message names the file and what was found against what was expected.
    """


IDENTIFIERS_OFFSET = 0x08
"""Bytes from an identifier tuple to its first identifier."""


def _records() -> dict[str, np.dtype[Any]]:
    fields: dict[str, list[tuple[str, str, int]]] = {}
    for row in rows_of(__file__, "records.csv"):
        field = row["field"], f"<{row['type']}", int(row["offset"], 16)
        fields.setdefault(row["record"], []).append(field)
    dtypes = {}
    for record, listed in fields.items():
        names, formats, offsets = (list(column) for column in zip(*listed, strict=True))
        dtypes[record] = np.dtype({"names": names, "formats": formats, "offsets": offsets})
    return dtypes


RECORDS = _records()
"""Structures of FORMATS.md by what they describe, as messages say it: fields at their offsets.

``itemsize`` is the end of the last field of version 4.0, the least that a stride stated by a file
may be. Modules, files and functions share one form of section header (``list``); lists of profiles
and contexts state their stride in one byte (``short list``). Of a ``context`` these are the fixed
32 bytes; ``flex_words`` 8-byte words of optional fields follow.
"""


class DatabaseFile:
    """One memory-mapped ``*.db`` file whose header and footer have been checked.

    Args:
        path: the file.
        code: its four-letter format identifier (``meta``, ``prof``, ``ctxt``, ``trce``).
        footer: the eight bytes that end a whole file.
        sections: names of the header's (size, pointer) pairs, in order.

    Raises:
        DatabaseError: the file cannot be opened, is of another format or version,
            or was cut short.
    """

    def __init__(self, path: Path, code: str, footer: bytes, sections: Sequence[str]) -> None:
        self.path = path
        try:
            with open_binary(path) as stream:
                self.size = os.fstat(stream.fileno()).st_size
                header_size = len(MAGIC) + 6 + 16 * len(sections)
                if self.size < header_size + FOOTER_BYTES:
                    raise self.error(
                        f"it is cut short: it has {self.size} bytes, and the header and footer "
                        f"alone take {header_size + FOOTER_BYTES}"
                    )
                self.map = mmap.mmap(stream.fileno(), self.size, access=mmap.ACCESS_READ)
        except DatabaseError:
            raise
        except InputError as problem:
            raise DatabaseError(str(problem)) from None
        except OSError as problem:
            raise self.error(f"it cannot be read: {problem.strerror or problem}") from problem
        head = bytes(self.map[:16])
        if head[:10] != MAGIC:
            raise self.error(
                f"it is no HPCToolkit database file: it begins with {head[:10]!r}, "
                f"expected {MAGIC!r}"
            )
        if head[14] != MAJOR_VERSION:
            raise self.error(
                f"it has format {head[14]}.{head[15]}, and this reader knows {MAJOR_VERSION}.x; "
                + REPROCESS
            )
        if head[10:14] != code.encode():
            raise self.error(f"it has the format {head[10:14]!r}, expected {code.encode()!r}")
        self.minor_version = head[15]
        pairs = np.frombuffer(self.map, "<u8", 2 * len(sections), offset=16).reshape(-1, 2).tolist()
        self.sections = {
            name: range(start, start + size)
            for name, (size, start) in zip(sections, pairs, strict=True)
        }
        """The bytes of each section."""
        self._check_whole(footer)
        self._strings: dict[int, str] = {}
        self._string_bytes = self._spent = 0

    def error(self, problem: str) -> DatabaseError:
        return DatabaseError(f"{self.path}: {problem}")

    def _check_whole(self, footer: bytes) -> None:
        reach = max((section.stop for section in self.sections.values()), default=0)
        end = bytes(self.map[-FOOTER_BYTES:])
        if reach + FOOTER_BYTES > self.size:
            raise self.error(
                f"it is cut short or damaged: it has {self.size} bytes, and its header states "
                f"sections up to byte {reach}, which {FOOTER_BYTES} bytes of footer follow"
            )
        if end != footer:
            raise self.error(
                f"it is cut short or damaged: its {self.size} bytes end with {end!r}, a whole "
                f"file ends with {footer!r}; run hpcprof again"
            )

    def table(
        self, record: str, pointer: int, count: int, stride: int | None = None, what: str = ""
    ) -> npt.NDArray[Any]:
        """A view of ``count`` records ``stride`` bytes apart from byte ``pointer``; shape (count,).
        A DatabaseError refuses a stride that is shorter than the record, and a table that does not
        lie within the file."""
        what, kind = what or record, RECORDS[record]
        size = kind.itemsize
        stride = size if stride is None else stride
        if count == 0:
            return np.empty(0, kind)
        if stride < size:
            raise self.error(f"{what} has a stride of {stride} bytes, at least {size} expected")
        end = pointer + (count - 1) * stride + size
        if end > self.size:
            raise self.error(
                f"{what}: {count} records of {stride} bytes from byte {pointer} "
                f"reach byte {end}, and the file ends at {self.size}"
            )
        return np.ndarray((count,), kind, self.map, pointer, (stride,))

    def one(self, record: str, pointer: int, what: str) -> dict[str, int]:
        """The fields of the record at byte ``pointer``."""
        row = self.table(record, pointer, 1, what=what)[0]
        return dict(zip(row.dtype.names, row.item(), strict=True))

    def header(self, section: str, record: str) -> dict[str, int]:
        return self.one(record, self.sections[section].start, f"section {section}")

    def items(self, section: str, header: str, record: str) -> tuple[dict[str, int], Any]:
        """(header, table) of a section that is one list: pointer, count, stride."""
        head = self.header(section, header)
        place = head["items"], head["count"], head["stride"]
        return head, self.table(record, *place, f"{section} list")

    def string(self, pointer: int, what: str) -> str:
        """The NUL-terminated UTF-8 string at byte ``pointer``, whole.

        Bytes that are not UTF-8, and control characters, appear as ``\\xNN``. A DatabaseError says
        that it starts or runs outside the file.
        """
        text = self._strings.get(pointer)
        if text is not None:
            return text
        limit = self.size - FOOTER_BYTES
        end = self.map.find(b"\0", pointer, limit) if pointer < limit else -1
        if end < 0:
            raise self.error(
                f"{what}: a string from byte {pointer} does not end before byte {limit}"
            )
        # Strings may overlap; many long ones in a damaged file would fill memory.
        self._string_bytes += end - pointer
        if self._string_bytes > STRING_BUDGET * self.size:
            raise self.error(
                f"{what}: its strings take over {STRING_BUDGET} times the file's {self.size} bytes"
            )
        text = visible(self.map[pointer:end].decode("utf-8", "backslashreplace"))
        self._strings[pointer] = text
        return text

    def strings(self, pointers: npt.NDArray[Any], what: str) -> list[str]:
        """The strings at each of ``pointers``; "" for a pointer 0."""
        return [self.string(at, what) if at else "" for at in pointers.tolist()]

    def spent(self, size: int) -> None:
        """Count bytes that were read, and let go of the file's pages now and then.

        They are read again on demand. Kept, they would count as this process's memory, and a
        database of many threads would be held whole.
        """
        self._spent += max(size, MAPPED_BYTES)
        if self._spent >= KEPT_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
            self._spent = 0
