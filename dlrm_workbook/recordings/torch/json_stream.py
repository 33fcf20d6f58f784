"""The events of a chrome trace, a piece of its text at a time, without holding all of it.

A piece is decoded into typed events by msgspec. torch writes JSON that is not always valid:
control characters in strings, quotes in names that nothing escapes, ``nan`` and ``inf`` as C++
prints them. Only the events of such a piece are read one by one: each is repaired, or left out
where that fails, and counted.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import lzma
import multiprocessing
import re
import signal
import tarfile
import warnings
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import IO, Any

import msgspec

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import die_with_parent
from dlrm_workbook.ground.machine import usable_cores
from dlrm_workbook.recordings.torch.counters import RANGES

BYTES_AT_ONCE = 4 << 20
"""Bytes that are read at a time while those before are decoded."""

BLOCK = 4 << 20
"""Bytes that a process gets to read, at least."""

PIECE = 256 << 10
"""Bytes that are decoded together, at least: their events fit into a processor's cache."""

MOST_HELPERS = 8
"""Processes that read a trace, at most."""

MOST_GIVEN = 2 * MOST_HELPERS
"""Blocks that are read, or wait for it, at most."""

LONGEST_VALUE = 256 << 20
"""Bytes of the longest value beside the events, and of the longest event."""

SHORT_VALUE = 4 << 10
"""Bytes in which the end of such a value is looked for first."""

MOST_TEXT = 64 << 30
"""Bytes of the longest trace that is read, unpacked."""

MOST_PACKED = 300
"""Bytes of text a packed byte; real traces have 15 to 75, a bomb of gzip up to 1,032."""

UNSUSPICIOUS = 128 << 20
"""Bytes of text that are read however well they were packed."""

_COUNTERS = re.compile(rb'"ph"\s*:\s*"C"|"cuda_profiler_range"')
_FIELD = r'"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp)"\s*:'
_BLANK = re.compile(rb"[\s,]*")
_BLANK_TEXT = re.compile(r"[\s,]*")
_COLON = re.compile(rb"[\s:]*")
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_LAST_EVENT = re.compile(rb"\}\s*(?=\]\s*(?:,|\}|\Z))")
"""Between two events, and behind the last: seldom elsewhere, and then a piece does not decode."""

_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{\s*" + _FIELD + r")|\}\s*(?=\]\s*(?:,|\}|\Z))")
_NAME = re.compile(r'("name"\s*:\s*")(.*?)("\s*(?:,\s*' + _FIELD + r"|\}\s*\Z))", re.DOTALL)
_QUOTE = re.compile(r'\\?"')
_ODD_NUMBER = re.compile(r"(:\s*|\[\s*|,\s*)-?(?:nan|inf(?:inity)?|n/a)\b(?=\s*[,\}\]])", re.I)
_ODD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SURROGATE = re.compile("[\ud800-\udfff]")

_scan = json.JSONDecoder(strict=False, parse_constant=lambda _: None).scan_once  # type: ignore[attr-defined]
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


class Arguments(msgspec.Struct, gc=False):
    """The arguments of an event that are read; ``Raw`` ones are JSON of many equal texts."""

    external: Any = msgspec.field(default=-1, name="External id")
    external_2021: Any = msgspec.field(default=-1, name="external id")
    correlation: Any = -1
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Any = msgspec.field(default=-1, name="Fwd thread id")
    python_id: Any = msgspec.field(default=-1, name="Python id")
    python_parent: Any = msgspec.field(default=-1, name="Python parent id")
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    values: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Concrete Inputs")
    strides: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Strides")
    device: int | float | str | None = None
    stream: int | float | str | None = None
    connection: Any = msgspec.field(default=None, name="connection_id")
    npu_stream: int | float | str | None = msgspec.field(default=None, name="Stream Id")
    npu_line: int | float | str | None = msgspec.field(default=None, name="Physic Stream Id")
    grid: msgspec.Raw = msgspec.Raw(b"")
    block: msgspec.Raw = msgspec.Raw(b"")
    registers: Any = msgspec.field(default=-1, name="registers per thread")
    shared_memory: Any = msgspec.field(default=-1, name="shared memory")
    blocks_per_sm: Any = msgspec.field(default=None, name="blocks per SM")
    warps_per_sm: Any = msgspec.field(default=None, name="warps per SM")
    occupancy: Any = msgspec.field(default=None, name="est. achieved occupancy %")
    graph: Any = msgspec.field(default=-1, name="graph id")
    bytes: Any = -1
    bandwidth: Any = msgspec.field(default=None, name="memory bandwidth (GB/s)")
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default="", name="In msg nelems")
    out_elements: Any = msgspec.field(default="", name="Out msg nelems")
    dtype: Any = ""
    group_size: Any = msgspec.field(default="", name="Group size")
    group: Any = msgspec.field(default="", name="Process Group Name")
    ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    in_split: Any = msgspec.field(default="", name="In split size")
    out_split: Any = msgspec.field(default="", name="Out split size")
    allocated: Any = msgspec.field(default=None, name="Bytes")
    total: Any = msgspec.field(default=-1, name="Total Allocated")
    reserved: Any = msgspec.field(default=-1, name="Total Reserved")
    device_type: Any = msgspec.field(default=0, name="Device Type")
    device_id: Any = msgspec.field(default=0, name="Device Id")
    name: Any = None
    direction: str | None = None
    size: Any = None


class TraceEvent(msgspec.Struct, gc=False):
    """One event; what is None is not there."""

    ph: str = ""
    cat: str = ""
    name: str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: Any = None
    dur: Any = None
    id: Any = None
    args: Arguments | None = None


_decode_event = msgspec.json.Decoder(TraceEvent).decode
_decode_events = msgspec.json.Decoder(list[TraceEvent]).decode


class Block:
    """The events of a text that begins between two events of a trace, and may end within one.

    Attributes:
        read: bytes of whole events that were read, from the begin on.
        repaired, skipped: events that are no valid JSON, and were repaired or left out.
        malformed: events that are JSON, but have not what an event has.
        first_malformed: what is wrong with the first of those; "" where there is none.
        counters: events with hardware counters, as JSON has them.
    """

    def __init__(self, data: bytes) -> None:
        self.read = self.repaired = self.skipped = self.malformed = 0
        self.first_malformed = ""
        self.counters: list[dict[str, Any]] = []
        self._data = data

    def __iter__(self) -> Iterator[list[TraceEvent]]:
        """Every event, in lists."""
        data, size, here = self._data, PIECE, self._skip_blanks()
        while here < len(data) and data[here] != ord("]"):
            boundary = _BOUNDARY.search(data, here + size)
            # what follows the last event may be long; what ends in a list only seems to be the last
            boundary = boundary or _LAST_EVENT.search(data, here + size - PIECE)
            end = len(data) if boundary is None else boundary.start() + 1
            try:
                piece = b"".join((b"[", memoryview(data)[here:end], b"]"))
                yield _decode_events(piece)
                self.read = end
                if _COUNTERS.search(piece):
                    self.counters += filter(_counts, msgspec.json.decode(piece))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                yield list(self._one_by_one(end))
            if self.read == here and end == len(data):
                return  # it ends within an event
            size = PIECE if self.read > here else 2 * size
            here = self._skip_blanks()

    def _skip_blanks(self) -> int:
        self.read = _BLANK.match(self._data, self.read).end()  # type: ignore[union-attr]
        return self.read

    def _one_by_one(self, end: int) -> Iterator[TraceEvent]:
        """The events up to a place; what is no valid JSON is repaired, or left out."""
        text, at = _text(self._data[self.read : end]), 0
        while text[at : at + 1] not in ("", "]"):
            try:
                value, at = _scan(text, at)
            except (ValueError, StopIteration):
                boundary = _NEXT_EVENT.search(text, at)
                stop = len(text) if boundary is None else boundary.start() + 1
                value = _repaired(text[at:stop])
                if value is None and boundary is None:
                    break  # it ends farther on
                self.repaired += value is not None
                self.skipped += value is None
                at = stop
            if value is not None:
                yield from self._typed(value)
            at = _BLANK_TEXT.match(text, at).end()  # type: ignore[union-attr]
        self.read += len(_bytes(text[:at]))

    def _typed(self, value: Any) -> list[TraceEvent]:
        """The event of a JSON value; none where it is no event."""
        try:
            if _counts(value):
                self.counters.append(value)
            text = json.dumps(value, ensure_ascii=False)
            text = _SURROGATE.sub(lambda one: f"\\\\u{ord(one[0]):04x}", text)  # as it is shown
            return [_decode_event(text.encode())]
        except (msgspec.MsgspecError, ValueError) as error:
            self.malformed += 1
            self.first_malformed = self.first_malformed or f"is odd: {error}"
            return []


class EventStream:
    """The events of one trace; what stands beside them is in ``header`` when they are over.

    Attributes:
        has_events: whether there is a list of events.
    """

    def __init__(self, file: IO[bytes], name: str, packed_bytes: int) -> None:
        """``file`` may be gzipped; ``packed_bytes`` is the size of the file that it lies in."""
        self.name = name
        self.header: dict[str, Any] = {}
        self.has_events = False
        self._packed_bytes, self._read_bytes = packed_bytes, 0
        buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
        with self._told():
            packed = buffered.peek(2)[:2] == b"\x1f\x8b"
        self._file: Any = gzip.GzipFile(fileobj=buffered) if packed else buffered
        self._data, self._at, self._ended = b"", 0, False
        self._thread = ThreadPoolExecutor(1)
        self._coming: Future[bytes] = self._thread.submit(self._file.read, BYTES_AT_ONCE)
        self._helpers: ProcessPoolExecutor | None = None

    def parts(self, read: Callable[[bytes], Any]) -> Generator[Any]:
        """What ``read``, a function of a module, makes of each block of events, in order: an object
        with :attr:`Block.read`. Blocks of a long trace are read by several processes, since
        decoding holds Python's lock.

        Raises:
            InputError: the trace is cut short, not JSON, or larger than is read.
        """
        try:
            yield from self._document(read)
        except BrokenProcessPool:
            raise InputError(
                f"{self.name} cannot be read: a process that read it was ended, as happens where "
                "memory is short"
            ) from None
        finally:
            self._thread.shutdown()
            if self._helpers is not None:
                self._helpers.shutdown(cancel_futures=True)

    def _document(self, read: Callable[[bytes], Any]) -> Iterator[Any]:
        self._fill(len(codecs.BOM_UTF8))
        if self._data.startswith(codecs.BOM_UTF8):
            self._at = len(codecs.BOM_UTF8)
        first = self._next()
        if first == b"[":
            yield from self._events(read)
        elif first == b"{":
            self._at += 1
            while (mark := self._next()) != b"}":
                if mark != b'"':
                    raise self._refusal()
                key = self._value()
                mark = self._next(_COLON)
                if key == "traceEvents" and mark == b"[":
                    yield from self._events(read)
                else:
                    self.header[str(key)] = self._value()
            self._at += 1
        else:
            raise self._refusal()
        if self._next() not in (b"", b"\0"):
            raise InputError(f"{self.name} cannot be read: text follows the end of its JSON")

    def _events(self, read: Callable[[bytes], Any]) -> Iterator[Any]:
        self.has_events, size = True, BLOCK
        self._at += 1
        given: deque[tuple[bytes, Future[Any]]] = deque()
        while True:
            if len(given) < MOST_GIVEN and self._peek() not in (b"]", b""):
                block = self._block(size)
                given.append((block, self._begun(read, block)))
            elif given:
                block, coming = given.popleft()
                yield (part := coming.result())
                if part.read < len(block):
                    # it ended within an event, or behind the last: what follows is cut anew
                    later = [data for data, _ in given]
                    given.clear()
                    ahead = [block[part.read :], *later, self._data[self._at :]]
                    self._data, self._at = b"".join(ahead), 0
                    nothing = not block[: part.read].strip(b", \t\r\n")
                    size = 2 * size if nothing else BLOCK
                    whole = self._ended and len(block) >= len(self._data)
                    if nothing and self._peek() != b"]" and (whole or size > LONGEST_VALUE):
                        raise self._refusal()
            elif self._next() == b"]":
                self._at += 1
                return
            else:
                raise self._refusal()

    def _block(self, size: int) -> bytes:
        """At least so many bytes of whole events, by their look; all that is left at the end."""
        while True:
            self._fill(2 * size)
            begin = self._at
            boundary = _BOUNDARY.search(self._data, begin + size)
            if boundary is not None or self._ended or size > LONGEST_VALUE:
                self._at = len(self._data) if boundary is None else boundary.start() + 1
                return self._data[begin : self._at]
            size *= 2

    def _begun(self, read: Callable[[bytes], Any], block: bytes) -> Future[Any]:
        """The reading of a block, by another process where more than this block is to come."""
        processes = min(usable_cores(), MOST_HELPERS)
        if self._helpers is None and (self._ended or processes < 2):
            done: Future[Any] = Future()
            done.set_result(read(block))
            return done
        with warnings.catch_warnings():
            # Python warns of threads: what a helper calls takes no lock that one may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            if self._helpers is None:
                fork = multiprocessing.get_context("fork")
                self._helpers = ProcessPoolExecutor(processes, fork, _as_helper)
            return self._helpers.submit(read, block)

    # ---- the window -----------------------------------------------------------------

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the user of a file or archive that cannot be read."""
        try:
            yield
        except ARCHIVE_ERRORS as error:
            raise InputError(f"{self.name} cannot be read: {reason(error)}") from None

    def _fill(self, ahead: int) -> None:
        """Read until ``ahead`` bytes lie ahead, or the trace ends."""
        length = len(self._data) - self._at
        if self._ended or length >= ahead:
            return
        pieces = [self._data[self._at :]]
        while not self._ended and length < ahead:
            with self._told():
                data = self._coming.result()
            self._read_bytes += len(data)
            suspicious = self._read_bytes > max(UNSUSPICIOUS, MOST_PACKED * self._packed_bytes)
            if suspicious or self._read_bytes > MOST_TEXT:
                raise InputError(
                    f"{self.name} is not read: {self._packed_bytes:,} bytes unpack to more than "
                    f"{self._read_bytes - len(data):,}, which no trace does"
                )
            self._ended = not data
            if data:
                self._coming = self._thread.submit(self._file.read, BYTES_AT_ONCE)
            pieces.append(data)
            length += len(data)
        self._data, self._at = b"".join(pieces), 0

    def _next(self, skipped: re.Pattern[bytes] = _BLANK) -> bytes:
        """The byte that follows blanks (and commas, or a colon), which are behind us then; none at
        the end."""
        following = self._peek(skipped)
        self._at = skipped.match(self._data, self._at).end()  # type: ignore[union-attr]
        return following

    def _peek(self, skipped: re.Pattern[bytes] = _BLANK) -> bytes:
        """The same byte, with the blanks still ahead."""
        ahead = 1
        while True:
            self._fill(ahead)
            at: int = skipped.match(self._data, self._at).end()  # type: ignore[union-attr]
            if at < len(self._data) or self._ended:
                return self._data[at : at + 1]
            ahead = 2 * (at - self._at + 1)

    def _value(self) -> Any:
        """The JSON value that begins here."""
        ahead = SHORT_VALUE
        while True:
            self._fill(ahead)
            text = _text(self._data[self._at : self._at + ahead])
            whole = self._ended and self._at + ahead >= len(self._data)
            try:
                value, end = _scan(text, 0)
                if end < len(text) or whole:
                    self._at += len(_bytes(text[:end]))
                    return value if text.isascii() else _scan(_shown(text[:end]), 0)[0]
            except (ValueError, StopIteration):
                if whole or ahead > LONGEST_VALUE:
                    raise self._refusal() from None
            ahead *= 8

    def _refusal(self) -> InputError:
        """Why the text that lies ahead cannot be read."""
        if not self._read_bytes:
            return InputError(f"{self.name} cannot be read: it is empty")
        text = _text(self._data[self._at :])
        try:
            _scan(text, 0)
            where = len(text)
        except StopIteration as error:
            where = error.value
        except json.JSONDecodeError as error:
            where = len(text) if error.msg.startswith("Unterminated") else error.pos
        if self._ended and where >= len(text.rstrip()) - 1:
            return InputError(f"{self.name} cannot be read: it is cut short")
        return InputError(f"{self.name} cannot be read: it is not JSON")


def _as_helper() -> None:
    """Begin a process that reads blocks: it ends with the one that reads the trace, not before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()


def _counts(event: Any) -> bool:
    """Whether an event holds values of counters, whose names are those of its arguments."""
    if not isinstance(event, dict) or not isinstance(event.get("args"), dict):
        return False
    return event.get("ph") == "C" or event.get("cat") == RANGES


def _text(data: bytes) -> str:
    """Text of which :func:`_bytes` makes the same bytes again, whatever they are."""
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    """The text with a mark in the place of bytes that are no UTF-8."""
    return _bytes(text).decode("utf-8", "replace")


def _repaired(event: str) -> dict[str, Any] | None:
    """An event that is no valid JSON, where its text can be mended."""
    event = _NAME.sub(lambda name: name[1] + _QUOTE.sub(r"\"", name[2]) + name[3], event)
    event = _ODD_ESCAPE.sub(r"\\\\", _ODD_NUMBER.sub(r"\1null", event))
    try:
        value, stop = _scan(event, 0)
    except (ValueError, StopIteration):
        return None
    return value if isinstance(value, dict) and stop == len(event) else None
