"""The events of a chrome trace, one by one, without holding its text or all of it as objects.

torch writes traces of gigabytes, and JSON that is not always valid: control characters in
strings, quotes in names that nothing escapes, ``nan`` and ``inf`` as C++ prints them. Such an
event is repaired, or skipped where that fails, and counted.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from dlrm_core.base.errors import InputError

BYTES_AT_ONCE = 8 << 20
"""Bytes read at a time."""

AHEAD = 1 << 20
"""Characters that lie ahead whenever an event is read, unless the file ends: the longest event."""

LONGEST_VALUE = 256 << 20
"""Characters of the longest value beside the events."""

MOST_TEXT = 64 << 30
"""Bytes of the longest trace that is read, unpacked."""

MOST_PACKED = 300
"""Bytes of text a packed byte; real traces have 15 to 75, a bomb of gzip up to 1,032."""

UNSUSPICIOUS = 128 << 20
"""Bytes of text that are read however well they were packed."""

_BLANK = re.compile(r"[\s,]*")
_COLON = re.compile(r"[\s:]*")
_FIELD = r'"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp)"\s*:'
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{\s*" + _FIELD + ")")
_LAST_EVENT = re.compile(r"\}\s*(?=\]\s*(?:,|\}|\Z))")
_NAME = re.compile(r'("name"\s*:\s*")(.*?)("\s*(?:,\s*' + _FIELD + r"|\}\s*\Z))", re.DOTALL)
_QUOTE = re.compile(r'\\?"')
_ODD_NUMBER = re.compile(r"(:\s*|\[\s*|,\s*)-?(?:nan|inf(?:inity)?|n/a)\b(?=\s*[,\}\]])", re.I)
_ODD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')

_scan = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
"""Reads one JSON value of a text from a position on: (value, where it ends)."""


ARCHIVE_ERRORS = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile),
    *(RuntimeError, NotImplementedError),  # an encrypted or otherwise odd zip
)
"""What reading a file, packed or a member of an archive, may raise."""


def reason(error: BaseException) -> str:
    """Why a file or archive cannot be read, for people."""
    if isinstance(error, EOFError) or "unexpected end" in str(error):
        return "it is cut short"
    packed = (zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile)
    if isinstance(error, packed):
        return f"it is damaged ({error})"
    return str(getattr(error, "strerror", None) or error)


class EventStream:
    """The events of one trace; what stands beside them is in ``header`` when they are over."""

    def __init__(self, file: IO[bytes], name: str, packed_bytes: int) -> None:
        """
        Args:
            file: the trace, gzipped or not.
            name: what the trace is called in sentences.
            packed_bytes: size of the file that it lies in.
        """
        self.name = name
        self.header: dict[str, Any] = {}
        self.has_events = False
        self.repaired = self.skipped = 0
        self._packed_bytes, self._read_bytes = packed_bytes, 0
        buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
        with self._told():
            packed = buffered.peek(2)[:2] == b"\x1f\x8b"
        self._file: Any = gzip.GzipFile(fileobj=buffered) if packed else buffered
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._text, self._at, self._ended = "", 0, False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every event.

        Raises:
            InputError: the trace is cut short, not JSON, or larger than is read.
        """
        first = self._next()
        if first == "[":
            yield from self._events()
        elif first == "{":
            self._at += 1
            while (mark := self._next()) != "}":
                if mark != '"':
                    raise self._refusal()
                key = self._value()
                mark = self._next(_COLON)
                if key == "traceEvents" and mark == "[":
                    yield from self._events()
                else:
                    self.header[str(key)] = self._value()
            self._at += 1
        else:
            raise self._refusal()
        if self._next() not in ("", "\0"):
            raise InputError(f"{self.name} cannot be read: text follows the end of its JSON")

    def _events(self) -> Iterator[dict[str, Any]]:
        self.has_events = True
        at = self._at + 1
        while True:
            self._at = at
            self._fill(AHEAD)
            text, at = self._text, self._at
            last = len(text) if self._ended else len(text) - AHEAD
            while at <= last:
                at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
                try:
                    event, at = _scan(text, at)
                except (ValueError, StopIteration):
                    break
                yield event
            else:
                continue
            if at >= len(text) and not self._ended:
                continue
            if text[at : at + 1] == "]":
                self._at = at + 1
                return
            if len(text) - at < AHEAD and not self._ended:
                continue
            at, repaired = self._repair(text, at)
            if repaired is not None:
                yield repaired

    def _repair(self, text: str, at: int) -> tuple[int, dict[str, Any] | None]:
        """(where an invalid event ends, the event if it could be repaired)."""
        boundary = _NEXT_EVENT.search(text, at) or _LAST_EVENT.search(text, at)
        if boundary is None:
            self._at = at
            raise self._refusal()
        end = boundary.start() + 1
        event = text[at:end]
        event = _NAME.sub(lambda name: name[1] + _QUOTE.sub(r"\"", name[2]) + name[3], event)
        event = _ODD_ESCAPE.sub(r"\\\\", _ODD_NUMBER.sub(r"\1NaN", event))
        try:
            value, stop = _scan(event, 0)
        except (ValueError, StopIteration):
            value, stop = None, 0
        if isinstance(value, dict) and stop == len(event):
            self.repaired += 1
            return end, value
        self.skipped += 1
        return end, None

    # ---- the window -----------------------------------------------------------------

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the user of a file or archive that cannot be read."""
        try:
            yield
        except ARCHIVE_ERRORS as error:
            raise InputError(f"{self.name} cannot be read: {reason(error)}") from None

    def _fill(self, ahead: int) -> None:
        """Read until ``ahead`` characters lie ahead, or the trace ends."""
        if self._ended or len(self._text) - self._at >= ahead:
            return
        pieces, length = [self._text[self._at :]], len(self._text) - self._at
        while not self._ended and length < ahead:
            with self._told():
                data = self._file.read(BYTES_AT_ONCE)
            self._read_bytes += len(data)
            suspicious = self._read_bytes > max(UNSUSPICIOUS, MOST_PACKED * self._packed_bytes)
            if suspicious or self._read_bytes > MOST_TEXT:
                raise InputError(
                    f"{self.name} is not read: {self._packed_bytes:,} bytes unpack to more than "
                    f"{self._read_bytes - len(data):,}, which no trace does"
                )
            self._ended = not data
            pieces.append(self._decode(data, final=not data))
            length += len(pieces[-1])
        self._text, self._at = "".join(pieces), 0

    def _next(self, skipped: re.Pattern[str] = _BLANK) -> str:
        """The character that follows blanks (and commas, or a colon); "" at the end."""
        while True:
            self._fill(AHEAD)
            self._at = skipped.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        """The JSON value that begins here."""
        ahead = AHEAD
        while True:
            try:
                value, self._at = _scan(self._text, self._at)
                return value
            except (ValueError, StopIteration):
                if self._ended or ahead > LONGEST_VALUE:
                    raise self._refusal() from None
                ahead *= 4
                self._fill(ahead)

    def _refusal(self) -> InputError:
        """Why the text that lies ahead cannot be read."""
        if not self._read_bytes:
            return InputError(f"{self.name} cannot be read: it is empty")
        try:
            _scan(self._text, self._at)
            where = len(self._text)
        except StopIteration as error:
            where = error.value
        except json.JSONDecodeError as error:
            where = len(self._text) if error.msg.startswith("Unterminated") else error.pos
        if self._ended and where >= len(self._text.rstrip()) - 1:
            return InputError(f"{self.name} cannot be read: it is cut short")
        return InputError(f"{self.name} cannot be read: it is not JSON")
