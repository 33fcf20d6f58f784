"""What a chrome trace of torch.profiler holds, as tables of spans.

Any program's: of CUDA, HIP and XPU devices, of the schema of 2021 (``Kernel``, ``Runtime``,
``Operator``) and of today's, as torch wrote it or as a tool that cut it wrote it again. ``ts``
and ``dur`` are microseconds, with decimals or without (nanoseconds where the trace's own
bandwidths or its dates say so); here they are integer nanoseconds from the first event on.

The events are walked once, a window of the text at a time (:mod:`json_stream`), and become
columns of numbers at once: a trace of a gigabyte needs 300 bytes an event.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import MOST_JSON, open_binary
from dlrm_core.base.text import visible
from dlrm_core.parts import SPAN_PREFIX
from dlrm_workbook.ground.arrays import Floats, Ints
from dlrm_workbook.ground.marks import GROUP_PREFIX
from dlrm_workbook.ground.processes import without_collection
from dlrm_workbook.recordings.torch.json_stream import EventStream
from dlrm_workbook.recordings.torch.shape_work import values_text

HOST_KINDS = {
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "annotation",
    "python_function": "python",
    "runtime": "runtime",
    "driver": "runtime",
}
"""Chrome trace category, in lower case, to context kind, for spans of CPU threads. So are
``cuda_runtime``, ``hip_driver``, ``xpu_runtime``, ...: what ends in one of the last two."""

DEVICE_KINDS = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "memcpy": "copy",
    "memset": "copy",
}
"""For spans of GPU streams."""

MARK_KINDS = {
    "gpu_user_annotation": "annotation",
    "cuda_sync": "sync",
    "xpu_sync": "sync",
    "overhead": "overhead",
}
"""A range repeated over its kernels and a wait, on GPU streams, and what CUPTI says of itself:
counted as time they would count it twice."""

PROFILERS_OWN = ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource")
"""Overheads that would not be there without the profiler. The others of CUPTI's
(``CUpti_ActivityOverheadKind``: drivers compile, modules load, a queue of commands is full) would.
"""

IGNORED = frozenset(
    {"trace", "cuda_event", "cuda_profiler_range", "external_correlation", "", "none"}
    | {"hardware_counters", "xpu_scope_profiler", "collective_comm", "cpu_instant_event"}
)
"""Categories of spans that are no work of the program's."""

UTILITY = frozenset({"aten::is_leaf", "aten::output_nr", "aten::_version"})
"""Operators that ``key_averages`` leaves out; their time stays with the caller."""

STEP_PREFIX = "ProfilerStep#"
"""Of the ranges that ``profiler.step()`` opens, one a step, numbered."""

COLLECTIVE = {
    "Collective name": "name",
    "In msg nelems": "in_elements",
    "Out msg nelems": "out_elements",
    "dtype": "dtype",
    "Group size": "group_size",
    "Process Group Name": "group",
    "Process Group Ranks": "ranks",
    "In split size": "in_split",
    "Out split size": "out_split",
}
"""Arguments of collectives to columns of ``Events.collectives``."""

EVENTS_HELD = 100_000
"""Events that are held as Python objects at most."""

LATEST_YEAR_US = 10**17
"""Microseconds since 1970 in the year 5138: larger time stamps are nanoseconds."""

CLOCK_NS = 1000
"""Times of GPU and CPU that differ by less are equal: traces in whole microseconds."""


class NoTraceError(InputError):
    """A file is whole, but no trace of torch.profiler."""


@dataclass
class Events:
    """The events of one trace. Times are int ns from the first event on.

    What an event does not say is −1 (or NaN in columns of floats, "" in those of text).
    """

    host: pd.DataFrame
    """start, end, duration, line (process/thread), name, kind, shapes, correlation, external,
    types (of the inputs, as text), sequence (of autograd), forward_thread, python_id,
    python_parent, collective (row of ``collectives``), values (see
    :func:`~dlrm_workbook.recordings.torch.shape_work.values_text`)."""
    device: pd.DataFrame
    """start, end, duration, line (GPU/stream), name, kind, correlation, external, bytes (of
    copies and memsets), gpu, stream, category (kernel, memcpy, memset), grid and block (text),
    registers (a thread), shared_memory (bytes a block), blocks_per_sm, warps_per_sm, occupancy
    (%, estimated), graph (its id), bandwidth (GB/s), collective."""
    memory: pd.DataFrame
    """start, line, bytes (negative when freed), total (allocated after it, −1 in
    traces of 2021), device, reserved."""
    names: dict[str, str]
    """Line to the name of the thread."""
    rank: int
    marks: pd.DataFrame
    """start, end, line, name, kind (``annotation``, ``sync``, ``overhead``), correlation: of GPU
    streams and of the profiler, not counted as time."""
    flows: pd.DataFrame
    """forward, forward_line, backward, backward_line: when an operator ran, and its backward."""
    collectives: pd.DataFrame
    """The distinct arguments of collectives, see :data:`COLLECTIVE`."""
    header: dict[str, Any] = field(default_factory=dict)
    """What the trace says beside its events."""
    clock_ns: int = 0
    """The clock's time at time 0, ns; since 1970 where the trace gives its base time."""
    cautions: list[str] = field(default_factory=list)
    """Sentences about what in this trace is not as it should be."""
    launched_before: tuple[int, int] | None = None
    """GPU operations whose launch is not recorded, and their ns; None where no launch is."""

    @property
    def distributed(self) -> dict[str, Any]:
        """``rank``, ``world_size``, ``backend``: as the trace has them, or None."""
        given = self.header.get("distributedInfo")
        given = given if isinstance(given, dict) else {}
        return {name: given.get(name) for name in ("rank", "world_size", "backend")}

    @property
    def devices(self) -> list[dict[str, Any]]:
        """Of each GPU that did something, else of all: id, name, sms, memory_bytes, compute,
        and the threads, registers and bytes of shared memory of a multiprocessor."""
        given = self.header.get("deviceProperties")
        listed = [
            {
                "id": row.get("id"),
                "name": visible(str(row.get("name", ""))),
                "sms": row.get("numSms"),
                "memory_bytes": row.get("totalGlobalMem"),
                "compute": f"{row.get('computeMajor', '?')}.{row.get('computeMinor', '?')}",
                "threads_per_sm": row.get("maxThreadsPerMultiprocessor"),
                "registers_per_sm": row.get("regsPerMultiprocessor"),
                "shared_memory_per_sm": row.get("sharedMemPerMultiprocessor"),
            }
            for row in (given if isinstance(given, list) else [])
            if isinstance(row, dict)
        ]
        used = set(self.device["gpu"].unique().tolist())
        return [row for row in listed if row["id"] in used] or listed

    def circumstances(self) -> dict[str, Any]:
        """What a profile's ``meta`` says of the trace: its GPUs, ranks, clock and cautions."""
        names = pd.Series(self.host["name"].unique(), dtype=object)
        steps = self.host["name"].isin(names[names.str.startswith(STEP_PREFIX)])
        facts: dict[str, Any] = {
            "devices": self.devices,
            "distributed": self.distributed,
            "clock_ns": self.clock_ns,
            "cautions": self.cautions,
            "profiler_steps": int(steps.sum()),
            "steps_threads": self.host.loc[steps, "line"].unique().tolist(),
        }
        if self.launched_before is not None:
            count, spent = self.launched_before
            facts["launched_before_trace"] = {"count": count, "time_ms": spent / 1e6}
        overhead = self.marks[
            self.marks["name"].isin(PROFILERS_OWN) & self.marks["kind"].eq("overhead")
        ]
        if len(overhead):
            facts["profiler_overhead"] = overhead[["name", "start", "end"]].to_dict("list")
        if len(self.device) and self.devices:
            facts["device_name"] = self.devices[0]["name"]
        return facts


def read_events(path: Path, file: IO[bytes] | None = None, packed_bytes: int = 0) -> Events:
    """The spans and memory events of a chrome trace.

    Args:
        file: the trace, where it is a member of an archive; ``path`` then only names it.
        packed_bytes: size of that archive.

    Raises:
        InputError: the file is missing, cut short or not JSON.
        NoTraceError: it is no such trace.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_collection())
        if file is None:
            file = stack.enter_context(open_binary(path))
            packed_bytes = path.stat().st_size
        stream = EventStream(file, str(path), packed_bytes)
        walk = _Walk()
        try:
            for event in stream:
                walk.take(event)
        except RecursionError:
            raise InputError(f"{path} cannot be read: its JSON is nested too deeply") from None
        if not stream.has_events:
            raise NoTraceError(f"{path} is no chrome trace: it has no list 'traceEvents'")
        return walk.finish(stream)


def load_json(path: Path) -> Any:
    """A JSON file, gzipped or not.

    Raises:
        InputError: it is missing, cut short or not JSON.
    """
    with open_binary(path) as opened:
        try:
            packed = opened.peek(2)[:2] == b"\x1f\x8b"  # type: ignore[attr-defined]
            file = gzip.GzipFile(fileobj=opened) if packed else opened
            data = file.read(MOST_JSON + 1)
            if len(data) > MOST_JSON:
                raise InputError(f"{path} is not read: it holds more than {MOST_JSON:,} bytes")
            return json.loads(data)
        except (EOFError, zlib.error):
            raise InputError(f"{path} is cut short") from None
        except RecursionError:
            raise InputError(f"{path} cannot be read: its JSON is nested too deeply") from None
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None


# ---- events to columns ----------------------------------------------------------------


class _Numbered(dict[Any, int]):
    """Values to the order in which they first came."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


class _Rows:
    """Rows of one table, turned into columns of numbers a chunk at a time.

    Args:
        columns: name to how it is kept: ``time``, ``integer``, ``float``, or ``number`` of a
            value of :class:`_Numbered`.
    """

    def __init__(self, columns: dict[str, str]) -> None:
        self.columns = columns
        self.rows: list[tuple[Any, ...]] = []
        self.chunks: dict[str, list[Any]] = {name: [] for name in columns}

    def pack(self) -> None:
        if not self.rows:
            return
        for (name, how), column in zip(
            self.columns.items(), zip(*self.rows, strict=True), strict=True
        ):
            values: Any
            if how == "time":
                values = _times(column)
            elif how == "float":
                values = _floats(column).astype(np.float32)
            elif how == "number":
                values = np.array(column, dtype=np.int32)
            else:
                values = _integers(column)
            self.chunks[name].append(values)
        self.rows.clear()

    def column(self, name: str) -> Any:
        """A column; (whole, fraction) of a time."""
        self.pack()
        chunks = self.chunks[name]
        if self.columns[name] == "time":
            empty = np.empty(0, dtype=np.int64), np.empty(0)
            parts = zip(*chunks, strict=True) if chunks else ((part,) for part in empty)
            return tuple(np.concatenate(part) for part in parts)
        return np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64)


NO_TIME = np.iinfo(np.int64).min
"""The whole part of a time that is no number."""


def _floats(column: tuple[Any, ...]) -> Floats:
    """Numbers (n,), NaN where a value is none."""
    numbers = _array(column, np.float64)
    return np.array([_number(value) for value in column]) if numbers is None else numbers


def _array(column: tuple[Any, ...], dtype: Any = None) -> npt.NDArray[Any] | None:
    """An array (n,) of the values as they are; None where they do not fit."""
    try:
        values = np.array(column, dtype=dtype)
    except (ValueError, TypeError, OverflowError):
        return None
    return values if values.ndim == 1 else None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return np.nan


def _integers(column: tuple[Any, ...]) -> Ints:
    """Integers (n,), −1 where a value is none."""
    integers = _array(column, np.int64)
    if integers is None:
        numbers = _floats(column)
        finite = np.isfinite(numbers) & (np.abs(numbers) < 2.0**63)
        integers = np.where(finite, np.where(finite, numbers, 0), -1).astype(np.int64)
    return integers


def _times(column: tuple[Any, ...]) -> tuple[Ints, Floats]:
    """(whole, fraction) of each: integers stay exact, whatever their size."""
    values = _array(column) if column and type(column[0]) is int else None
    if values is not None and values.dtype == np.int64:
        return values, np.zeros(len(values))
    numbers = _floats(column)
    finite = np.isfinite(numbers) & (np.abs(numbers) < 2.0**62)
    whole = np.floor(np.where(finite, numbers, 0))
    return np.where(finite, whole, NO_TIME).astype(np.int64), np.where(finite, numbers - whole, 0)


_TIMED = {"start": "time", "duration": "time", "line": "number", "name": "number"}
_NOTHING: dict[str, Any] = {}
_SPAN_KINDS = ("operator", "annotation", "python", "runtime")
_MARK_KINDS = tuple(dict.fromkeys(MARK_KINDS.values()))
_CATEGORIES = ("kernel", "memcpy", "memset")


class _Walk:
    """Takes the events of a trace one by one and holds the columns that they become."""

    def __init__(self) -> None:
        self.taken = 0
        self.malformed = 0
        self.first_malformed: Exception | None = None
        self.without_duration = 0
        self.unknown: Counter[str] = Counter()
        self.lines, self.texts, self.groups = _Numbered(), _Numbered(), _Numbered()
        self.texts[""]  # number 0
        self.names: dict[str, str] = {}
        self.folded: dict[Any, str] = {}
        self.flow_ends: dict[Any, dict[str, tuple[Any, int]]] = {}
        self.host = _Rows(
            _TIMED
            | {"kind": "number", "shapes": "number", "correlation": "integer"}
            | {"external": "integer", "types": "number", "sequence": "integer"}
            | {"forward_thread": "integer", "python_id": "integer", "python_parent": "integer"}
            | {"collective": "number", "values": "number"}
        )
        self.device = _Rows(
            _TIMED
            | {"kind": "number", "correlation": "integer", "external": "integer"}
            | {"bytes": "integer", "gpu": "integer", "stream": "integer", "grid": "number"}
            | {"block": "number", "registers": "integer", "shared_memory": "integer"}
            | {"blocks_per_sm": "float", "warps_per_sm": "float", "occupancy": "float"}
            | {"graph": "integer", "bandwidth": "float", "collective": "number"}
        )
        self.memory = _Rows(
            {"start": "time", "line": "number", "bytes": "integer", "total": "integer"}
            | {"device": "number", "reserved": "integer"}
        )
        self.marks = _Rows(_TIMED | {"kind": "number", "correlation": "integer"})

    def take(self, event: dict[str, Any]) -> None:
        """Keep what an event says, if it is of interest."""
        try:
            phase = event["ph"]
            if phase == "X":
                self._span(event)
            elif phase == "i":
                if event["name"] == "[memory]":
                    self._memory(event)
            elif phase == "M":
                self._name(event)
            elif event.get("cat") == "fwdbwd":
                ends = self.flow_ends.setdefault(event["id"], {})
                ends[phase] = event["ts"], self.lines[event["pid"], event["tid"]]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self.malformed += 1
            self.first_malformed = self.first_malformed or error
        self.taken += 1
        if self.taken % EVENTS_HELD == 0:
            for rows in (self.host, self.device, self.memory, self.marks):
                rows.pack()

    def _span(self, event: dict[str, Any]) -> None:
        category = event.get("cat", "")
        kind = HOST_KINDS.get(category) or DEVICE_KINDS.get(category)
        if kind is None:
            folded = self.folded.get(category)
            if folded is None:
                folded = self.folded[category] = _fold(str(category))
            category = folded
            kind = HOST_KINDS.get(category) or DEVICE_KINDS.get(category)
            if kind is None and category not in MARK_KINDS:
                if category not in IGNORED:
                    self.unknown[str(event["cat"])] += 1
                return
        args = event.get("args") or _NOTHING
        name = event["name"]
        if type(name) is not str:
            raise TypeError(f"the name {name!r}")
        duration = event.get("dur")
        if duration is None:
            self.without_duration += 1
            duration = 0
        get = args.get
        external = get("External id", -1)
        if external == -1:
            external = get("external id", -1)
        correlation = get("correlation", -1)
        collective = -1
        if "Collective name" in args:
            collective = self.groups[tuple(visible(str(get(name, ""))) for name in COLLECTIVE)]
        start = event["ts"]
        if category in DEVICE_KINDS:
            gpu = get("device", event["pid"])
            stream = get("stream", event["tid"])
            line = self.lines[gpu, stream]
            common = (start, duration, line, self.texts[name])
            what = 0 if kind == "kernel" else 2 if category.endswith("memset") else 1
            launch: tuple[Any, ...] = (0, 0, -1, -1, None, None, None)
            if what == 0:
                launch = (
                    self.texts[str(get("grid", ""))],
                    self.texts[str(get("block", ""))],
                    get("registers per thread", -1),
                    get("shared memory", -1),
                    get("blocks per SM"),
                    get("warps per SM"),
                    get("est. achieved occupancy %"),
                )
            sizes = (what, correlation, external, get("bytes", -1), gpu, stream)
            rest = (get("graph id", -1), get("memory bandwidth (GB/s)"), collective)
            self.device.rows.append((*common, *sizes, *launch, *rest))
            return
        line = self.lines[event["pid"], event["tid"]]
        if category in MARK_KINDS:
            number = _MARK_KINDS.index(MARK_KINDS[category])
            mark = (start, duration, line, self.texts[name], number, correlation)
            self.marks.rows.append(mark)
            return
        if name in UTILITY:
            return
        shapes = types = values = 0
        if "Input Dims" in args:
            shapes = self.texts[str(args["Input Dims"])]
            types = self.texts[str(get("Input type", ""))]
            values = self.texts[values_text(name, args)]
        # our ranges may be written as operators, see dlrm_core/parts.py; so were all in 2021
        if kind == "operator" and name.startswith((SPAN_PREFIX, GROUP_PREFIX, STEP_PREFIX)):
            kind = "annotation"
        self.host.rows.append(
            (
                start,
                duration,
                line,
                self.texts[name],
                _SPAN_KINDS.index(kind),
                shapes,
                correlation,
                external,
                types,
                get("Sequence number", -1),
                get("Fwd thread id", -1),
                get("Python id", -1),
                get("Python parent id", -1),
                collective,
                values,
            )
        )

    def _memory(self, event: dict[str, Any]) -> None:
        args = event["args"]
        # c10's device types: 0 CPU, 1 CUDA
        on_host = args.get("Device Type", 0) == 0
        self.memory.rows.append(
            (
                event["ts"],
                self.lines[event["pid"], event["tid"]],
                args["Bytes"],
                args.get("Total Allocated", -1),
                self.texts["cpu" if on_host else f"gpu {args.get('Device Id', 0)}"],
                args.get("Total Reserved", -1),
            )
        )

    def _name(self, event: dict[str, Any]) -> None:
        if event["name"] == "thread_name":
            line = visible(f"{event['pid']}/{event['tid']}")
            self.names[line] = visible(str(event["args"]["name"]))

    # ---- columns to tables ----------------------------------------------------------

    def finish(self, stream: EventStream) -> Events:
        """The tables.

        Raises:
            InputError: there is no operator, range or kernel.
        """
        path = stream.name
        cautions = Cautions()
        cautions.add(stream.repaired, "event{s} {was} not valid JSON and {was} repaired")
        cautions.add(stream.skipped, "event{s} {was} not valid JSON and {was} left out")
        cautions.add(
            self.malformed,
            "event{s} lack{v} a name, a time or what else torch.profiler writes, and {was} left "
            "out",
        )
        texts = np.array([visible(text) for text in self.texts], dtype=object)
        lines = np.array([visible(f"{_word(a)}/{_word(b)}") for a, b in self.lines], dtype=object)
        tables = {name: getattr(self, name) for name in ("host", "device", "memory", "marks")}
        nanoseconds, why = self._unit()
        if nanoseconds:
            cautions.said.append(f"The times of this trace are read as nanoseconds: {why}.")
        frames: dict[str, pd.DataFrame] = {}
        lost = 0
        for table, rows in tables.items():
            columns: dict[str, Any] = {}
            usable: Any = slice(None)
            for name, how in rows.columns.items():
                values = rows.column(name)
                if how == "time":
                    whole, fraction = values
                    if name == "start":
                        limit = 2**62 if nanoseconds else 2**62 // 1000
                        usable = (whole != NO_TIME) & (np.abs(whole) < limit)
                        lost += int((~usable).sum())
                    whole = np.where(whole == NO_TIME, -1, whole)
                    values = whole if nanoseconds else whole * 1000 + _rounded(fraction)
                elif name == "line":
                    values = lines[values] if len(values) else values.astype(object)
                elif name in ("name", "shapes", "types", "values", "grid", "block", "device"):
                    values = texts[values] if len(values) else values.astype(object)
                columns[name] = values
            frames[table] = pd.DataFrame(columns)[usable].reset_index(drop=True)
        cautions.add(lost, "event{s} {has} a time that is no number, and {was} left out")
        leave_out_strays([frames[name] for name in ("host", "device", "memory")], cautions)
        host, device, memory, marks = frames.values()
        if host.empty and device.empty:
            if self.first_malformed is not None:
                error = self.first_malformed
                lacks = isinstance(error, KeyError)
                why = f"has no {error.args[0]!r}" if lacks else f"is odd: {error}"
                raise InputError(f"{path} is no trace of torch.profiler: an event {why}") from None
            raise NoTraceError(f"{path} holds no operator, range or kernel of torch.profiler")
        host["kind"] = np.array(_SPAN_KINDS, dtype=object)[host["kind"].to_numpy()]
        what = device["kind"].to_numpy()
        device["kind"] = np.array(["kernel", "copy", "copy"], dtype=object)[what]
        device["category"] = np.array(_CATEGORIES, dtype=object)[what]
        marks["kind"] = np.array(_MARK_KINDS, dtype=object)[marks["kind"].to_numpy()]
        zero = from_first_event(frames, cautions)
        cautions.add(
            self.without_duration,
            "event{s} {has} no duration: {it} {is} counted, but {its} time is not",
        )
        for category, count in self.unknown.most_common(5):
            # a category of an attacker's may hold braces, so it is no part of the pattern
            cautions.add(
                count,
                "event{s} of category '{category}' {was} not read",
                category=visible(category[:80]),
            )
        base = stream.header.get("baseTimeNanoseconds")
        events = Events(
            host,
            device,
            memory,
            self.names,
            0,
            marks,
            self._flows(lines, zero, nanoseconds),
            pd.DataFrame(list(self.groups), columns=list(COLLECTIVE.values())),
            stream.header,
            zero + (base if isinstance(base, int) and abs(base) < 2**62 else 0),
        )
        rank = events.distributed["rank"]
        events.rank = rank if isinstance(rank, int) else 0
        look_at_device(events, cautions)
        events.cautions = cautions.said
        return events

    def _unit(self) -> tuple[bool, str]:
        """Whether times are nanoseconds, and why. The format says microseconds, always."""
        (whole, fraction) = self.device.column("duration")
        size = self.device.column("bytes").astype(float)
        bandwidth = self.device.column("bandwidth").astype(float)
        duration = whole + fraction
        usable = (bandwidth > 0) & np.isfinite(bandwidth) & (size > 0) & (duration > 0)
        if usable.any():
            # GB/s are bytes a nanosecond
            factor = float(np.median(size[usable] / bandwidth[usable] / duration[usable]))
            return 0.5 < factor < 2, "its copies' sizes and bandwidths agree with that alone"
        starts = [rows.column("start")[0] for rows in (self.host, self.device)]
        first = [int(start[start > 0].min()) for start in starts if (start > 0).any()]
        if first and min(first) > LATEST_YEAR_US:
            return True, "as microseconds they would lie thousands of years ahead"
        return False, ""

    def _flows(self, lines: npt.NDArray[Any], zero: int, nanoseconds: bool) -> pd.DataFrame:
        pairs = [ends for ends in self.flow_ends.values() if "s" in ends and "f" in ends]
        columns: dict[str, Any] = {}
        for side, phase in (("forward", "s"), ("backward", "f")):
            whole, fraction = _times(tuple(ends[phase][0] for ends in pairs))
            when = whole if nanoseconds else whole * 1000 + _rounded(fraction)
            columns[side] = when - zero
            at = np.array([ends[phase][1] for ends in pairs], dtype=np.int64)
            columns[f"{side}_line"] = lines[at] if len(at) else at.astype(object)
        return pd.DataFrame(columns)


def _fold(category: str) -> str:
    """A category as :data:`HOST_KINDS` has it: of any vendor, of any year."""
    folded = category.lower()
    for end in ("runtime", "driver"):
        if folded.endswith(f"_{end}"):
            return end
    return folded


def _word(part: Any) -> str:
    """A thread or stream: ``stream 7`` of 2021 is stream 7."""
    return str(part).removeprefix("stream ")


def _rounded(fraction: Floats) -> Ints:
    return np.rint(fraction * 1000).astype(np.int64)


class Cautions:
    """Sentences with counts."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def add(self, count: int, what: str, **figures: Any) -> None:
        """A sentence about ``count`` things; none about none."""
        if count:
            # of one thing, of several
            forms = {"s": ("", "s"), "es": ("", "es"), "v": ("s", ""), "it": ("it", "they")}
            forms |= {"is": ("is", "are"), "was": ("was", "were"), "has": ("has", "have")}
            forms |= {"its": ("its", "their"), "them": ("it", "them")}
            words = {name: form[count != 1] for name, form in forms.items()}
            self.said.append(f"{count:,} {what}.".format(**words, **figures))


# ---- what cannot be -------------------------------------------------------------------

STRAY_NS = 10**9
"""A few events farther away than this, and than ten times what all others span, are strays; so
is the end of a GPU operation that lasts longer than this, and than three times the recording."""


def from_first_event(frames: dict[str, pd.DataFrame], cautions: Cautions) -> int:
    """Count times from the first event on and add ``end``, in place.

    Args:
        frames: ``host``, ``device``, ``memory`` and ``marks`` of :class:`Events`, not all empty.

    Returns:
        The first event's time before, ns.
    """
    timed = (frames[name] for name in ("host", "device", "memory"))
    zero = min(int(frame["start"].min()) for frame in timed if len(frame))
    negative = 0
    for frame in frames.values():
        frame["start"] -= zero
        if "duration" in frame:
            negative += int((frame["duration"] < 0).sum())
            frame["duration"] = frame["duration"].clip(lower=0)
            frame["end"] = frame["start"] + frame["duration"]
    cautions.add(
        negative,
        "event{s} {has} a negative duration or one that is no number: {it} {is} counted, but "
        "{its} time is not",
    )
    return zero


def leave_out_strays(frames: list[pd.DataFrame], cautions: Cautions) -> None:
    """Leave out, in place, the few events whose time is far from all others'."""
    start = np.sort(np.concatenate([frame["start"].to_numpy() for frame in frames]))
    first, last = 0, len(start)
    while last - first >= 20:
        gaps = np.diff(start[first:last])
        widest = int(gaps.argmax())
        rest = int(start[last - 1] - start[first]) - int(gaps[widest])
        before, after = widest + 1, last - first - widest - 1
        if gaps[widest] < max(10 * rest, STRAY_NS):
            break
        if min(before, after) > max(1, (last - first) // 100):
            break
        if before < after:
            first += before
        else:
            last -= after
    if last - first < len(start):
        low, high = start[first], start[last - 1]
        for frame in frames:
            far = frame.index[~frame["start"].between(low, high)]
            frame.drop(index=far, inplace=True)
            frame.reset_index(drop=True, inplace=True)
        cautions.add(
            len(start) - (last - first),
            "event{s} lie{v} far away from the {all:,} others, which span {span:.3f} s: {its} "
            "time cannot be right, and {it} {was} left out",
            all=last - first,
            span=(high - low) / 1e9,
        )


GRAPH_LAUNCH = r"(?:cuda|cu|hip)GraphLaunch"
"""Matches a call that launches all the kernels of a graph."""


def look_at_device(events: Events, cautions: Cautions) -> None:
    """Name what the GPU's work cannot be, and take it out where it would spoil figures."""
    device, host = events.device, events.host
    if device.empty:
        return
    in_turn = device.sort_values("start", kind="stable")
    following = in_turn.groupby("line", sort=False)["start"].shift(-1).reindex(device.index)
    # A kernel may outlive what the host did, but not by far what all others span.
    first, last = device["start"].min(), device["start"].max()
    if len(host):
        first, last = min(first, host["start"].min()), max(last, host["end"].max())
    window = int(last - first)
    endless = (device["duration"] > max(3 * window, STRAY_NS)) & bool(len(host))
    if endless.any():
        cautions.add(
            int(endless.sum()),
            "GPU operation{s} last{v} up to {longest:,.0f} s, while the whole recording spans "
            "{window:.3f} s, which cannot be: {it} {is} counted until the next work on {its} "
            "stream begins, or without time where none follows",
            longest=device.loc[endless, "duration"].max() / 1e9,
            window=window / 1e9,
        )
        end = following.fillna(device["start"])[endless].astype("int64")
        device.loc[endless, "end"] = end
        device.loc[endless, "duration"] = end - device.loc[endless, "start"]
    over = (device["end"] - following).fillna(0)
    cautions.add(
        int((over > CLOCK_NS).sum()),
        "GPU operation{s} end{v} after the next one on {its} stream begins, by up to "
        "{most:,.0f} µs: the GPU's busy time counts such time once, the sum of durations twice",
        most=over.max() / 1e3,
    )
    _look_at_launches(events, cautions)
    rank, size = events.distributed["rank"], events.distributed["world_size"]
    if isinstance(rank, int) and isinstance(size, int) and not 0 <= rank < size:
        cautions.said.append(
            f"The trace says that it is of rank {rank} of {size}, which cannot be."
        )


def _look_at_launches(events: Events, cautions: Cautions) -> None:
    """Take out launches that cannot be told, and say how many kernels have none recorded."""
    device, host = events.device, events.host
    runtime = host[host["kind"].eq("runtime") & host["correlation"].ge(0)]
    if runtime.empty:
        return
    correlation = device["correlation"]
    calls = runtime.drop_duplicates("correlation").set_index("correlation")
    launcher = correlation.map(calls["name"]).fillna("")
    doubled = runtime["correlation"][runtime["correlation"].duplicated()].unique()
    # an ordinary launch is of one kernel; a graph's is of many
    of_one = launcher.str.contains("LaunchKernel") & device["kind"].eq("kernel")
    unclear = correlation.isin(doubled) | (of_one & correlation.duplicated(keep=False))
    cautions.add(
        int(unclear.sum()),
        "GPU operation{s} share{v} the number of {its} launch with others, though a call "
        "launches one: what launched {them} is not known",
    )
    before = launcher.eq("") & ~unclear
    events.launched_before = int(before.sum()), int(device.loc[before, "duration"].sum())
    cautions.add(
        int(before.sum()),
        "GPU operation{s}, {spent:,.3f} ms in all, {has} no recorded launch: launched before "
        "the recording began",
        spent=events.launched_before[1] / 1e6,
    )
    begun = correlation.map(calls["start"])
    early = (device["start"] + CLOCK_NS < begun) & ~unclear
    cautions.add(
        int(early.sum()),
        "GPU operation{s} begin{v} before the call that launches {them}, by up to {most:,.0f} "
        "µs: the clocks of GPU and CPU differ",
        most=float((begun - device["start"])[early].max() / 1e3) if early.any() else 0.0,
    )
    graphs = runtime.loc[runtime["name"].str.match(GRAPH_LAUNCH), "correlation"]
    sizes = graphs.map(correlation.value_counts()).fillna(0).astype(int)
    cautions.add(
        len(sizes),
        "launch{es} of CUDA graphs {has} {least} to {most} GPU operations each in the trace, and "
        "a profiler may record only some of a graph's: idle time is an upper bound",
        least=sizes.min(),
        most=sizes.max(),
    )
    device.loc[unclear, ["correlation", "external"]] = -1
