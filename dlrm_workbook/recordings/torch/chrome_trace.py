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
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import open_binary
from dlrm_core.base.text import visible
from dlrm_core.parts import SPAN_PREFIX
from dlrm_workbook.ground.arrays import Bools, Floats, Ints
from dlrm_workbook.ground.marks import GROUP_PREFIX
from dlrm_workbook.ground.processes import without_collection
from dlrm_workbook.recordings.nesting import nest
from dlrm_workbook.recordings.profile import numbered_together
from dlrm_workbook.recordings.torch.counters import Counters
from dlrm_workbook.recordings.torch.json_stream import Arguments, Block, EventStream, TraceEvent
from dlrm_workbook.recordings.torch.shape_work import FORMULAS, values_text

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
    "mtia_ccp_events": "kernel",
}
"""For spans of streams of GPUs and other accelerators; :meth:`_Walk._category` finds others."""

MARK_KINDS = {
    "cuda_sync": "sync",  # the first: waits have the number of their category, as kernels do
    "gpu_user_annotation": "annotation",
    "xpu_sync": "sync",
    "npu_exchange_wait": "exchange",
    "overhead": "overhead",
}
"""A range repeated over its kernels and a wait, on GPU streams, and what CUPTI says of itself:
counted as time they would count it twice."""

_WAIT = re.compile(r"(?i)(?:(?:event|stream|queue)_?)?wait(?:_?(?:event|stream))?|semaphore\w*")
"""Matches names of spans in which a stream of an accelerator that is no GPU waits: no work."""

PROFILERS_OWN = ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource")
"""Overheads that would not be there without the profiler. The others of CUPTI's
(``CUpti_ActivityOverheadKind``: drivers compile, modules load, a queue of commands is full) would.
"""

IGNORED = frozenset(
    {"trace", "cuda_event", "cuda_profiler_range", "external_correlation", "", "none"}
    | {"hardware_counters", "xpu_scope_profiler", "collective_comm", "cpu_instant_event"}
)
"""Categories of spans that are no work of the program's."""

OF_EXCHANGES = re.compile(r"(Notify[ _]Wait)|Notify[ _]|EVENT_WAIT|SDMA$|Reduce_Inline$")
"""Spans of an NPU that wait (the group: for another in an exchange), or are pieces of exchanges."""

MOST_PROCESSES = 1 << 22
"""Linux gives processes lower numbers."""

OF_AUTOGRAD = {"CPU functions": "host", "CUDA functions": "device"}
"""Process of spans without category to their table: ``torch.autograd.profiler`` writes them so
without Kineto, and did up to torch 1.7 (``EventList.export_chrome_trace``). The times of a GPU are
those between two of its events around each operator, so that they nest as the operators do."""

OTHER_PROFILERS = {
    "/device:|/host:CPU": "TensorFlow's or XLA's profiler",
    "CPU HIP API|CPU HSA API": "rocprof",
    r"\bSession\b": "ONNX Runtime",
}
"""Names of processes, or categories, in traces of others to who writes such."""

UTILITY = frozenset({"aten::is_leaf", "aten::output_nr", "aten::_version"})
"""Operators that ``key_averages`` leaves out; their time stays with the caller."""

STEP_PREFIX = "ProfilerStep#"
"""Of the ranges that ``profiler.step()`` opens, one a step, numbered."""

COLLECTIVE = (
    *("name", "in_elements", "out_elements", "dtype", "group_size", "group", "ranks"),
    *("in_split", "out_split"),
)
"""Columns of ``Events.collectives``: the arguments of collectives."""

LATEST_YEAR_US = 10**17
"""Microseconds since 1970 in the year 5138: larger time stamps are nanoseconds."""

MOST_RANKS = 10**9
"""A rank, or a number of ranks, is smaller."""

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

    accelerator: str = ""
    """What the device is where it is no GPU: ``MTIA``, ``XPU``."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Hardware counters, see :meth:`.counters.Counters.table`."""

    @property
    def distributed(self) -> dict[str, Any]:
        """``rank``, ``world_size``, ``backend``: as the trace has them, or None."""
        given = self.header.get("distributedInfo")
        given = given if isinstance(given, dict) else {}
        known = {name: given.get(name) for name in ("rank", "world_size", "backend")}
        # a number that no machine has is none
        return {
            name: None if isinstance(value, int) and abs(value) >= MOST_RANKS else value
            for name, value in known.items()
        }

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
        overhead = self.marks[self.marks["kind"].eq("overhead")]
        overhead = overhead[overhead["name"].isin(PROFILERS_OWN)]
        if len(overhead):
            facts["profiler_overhead"] = overhead[["name", "start", "end"]].to_dict("list")
        waits = self.marks[self.marks["kind"].eq("exchange")]
        if len(waits):
            facts["exchange_waits"] = {f"{at}_ns": waits[at].tolist() for at in ("start", "end")}
        if len(self.device) and self.devices:
            facts["device_name"] = self.devices[0]["name"]
        if self.counters:
            facts["device_counters"] = self.counters
        if self.accelerator:
            facts["accelerator"] = self.accelerator
            facts.setdefault("device_name", self.accelerator)
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
        parts = stack.enter_context(contextlib.closing(stream.parts(_walked)))
        walk = _Walk()
        try:
            for part in parts:
                walk.join(part)
                if walk.malformed > max(MOST_OTHERS, walk.taken / 2):
                    raise NoTraceError(f"{path} is no chrome trace: most of its events are empty")
        except RecursionError:
            raise InputError(f"{path} cannot be read: its JSON is nested too deeply") from None
        if not stream.has_events:
            raise NoTraceError(f"{path} is no chrome trace: it has no list 'traceEvents'")
        return walk.finish(stream)


# ---- events to columns ----------------------------------------------------------------


class _Numbered(dict[Any, int]):
    """Values to the order in which they first came."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


class _Table:
    """Columns of one table, as pieces of arrays.

    Args:
        kept: how columns are kept (:data:`_KEPT`) to their names; of what a column has numbers,
            where it holds such.
    """

    def __init__(self, **kept: str) -> None:
        self.columns = {name: how for how, names in kept.items() for name in names.split()}
        self.pieces: dict[str, list[Any]] = {name: [] for name in self.columns}

    def add(self, args: Sequence[Arguments], **given: Sequence[Any]) -> None:
        """Add rows: columns that are given, and otherwise the arguments of that name."""
        for name, how in self.columns.items():
            column = given[name] if name in given else list(map(attrgetter(name), args))
            self.pieces[name].append(_KEPT[how](column))

    def all_columns(self) -> dict[str, Any]:
        return {name: self.column(name) for name in self.columns}

    def column(self, name: str) -> Any:
        """A column; (whole, fraction) of a time."""
        pieces = self.pieces[name]
        if self.columns[name] == "time":
            whole, fraction = zip(*pieces, strict=True) if pieces else ((), ())
            nothing = np.empty(0, dtype=np.int64)
            return np.concatenate([nothing, *whole]), np.concatenate([np.empty(0), *fraction])
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


NO_TIME = np.iinfo(np.int64).min
"""The whole part of a time that is no number."""


def _floats(column: Sequence[Any]) -> Floats:
    """Numbers (n,), NaN where a value is none."""
    numbers = _array(column, np.float64)
    return np.array([_number(value) for value in column]) if numbers is None else numbers


def _array(column: Sequence[Any], dtype: Any = None) -> npt.NDArray[Any] | None:
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


def _integers(column: Sequence[Any]) -> Ints:
    """Integers (n,), −1 where a value is none."""
    integers = _array(column, np.int64)
    if integers is None:
        numbers = _floats(column)
        finite = np.isfinite(numbers) & (np.abs(numbers) < 2.0**63)
        integers = np.where(finite, np.where(finite, numbers, 0), -1).astype(np.int64)
    return integers


def _times(column: Sequence[Any]) -> tuple[Ints, Floats]:
    """(whole, fraction) of each: integers stay exact, whatever their size."""
    values = _array(column) if len(column) and type(column[0]) is int else None
    if values is not None and values.dtype == np.int64:
        return values, np.zeros(len(values))
    numbers = _floats(column)
    finite = np.isfinite(numbers) & (np.abs(numbers) < 2.0**62)
    whole = np.floor(np.where(finite, numbers, 0))
    return np.where(finite, whole, NO_TIME).astype(np.int64), np.where(finite, numbers - whole, 0)


_KEPT: dict[str, Callable[[Sequence[Any]], Any]] = {
    "time": _times,
    "integer": _integers,
    "float": lambda column: _floats(column).astype(np.float32),
    **dict.fromkeys(
        ("kinds", "lines", "texts", "raws", "groups"),
        lambda column: np.array(column, dtype=np.int32),
    ),
}
"""Ways to keep a column: as it is, or as numbers of what a :class:`_Walk` has under that name."""

_SPAN_KINDS = ("operator", "annotation", "python", "runtime")
_MARK_KINDS = tuple(dict.fromkeys(MARK_KINDS.values()))
_CATEGORIES = ("kernel", "memcpy", "memset")
_RAW = ("shapes", "types", "values", "strides")
"""Columns of numbers of JSON texts, each decoded once."""

_VALUE_ARGUMENTS = ("Input Dims", "Concrete Inputs", "Input Strides")

_EVENT = attrgetter("ts", "dur", "pid", "tid", "name", "cat", "args")
_OF_COLLECTIVE = attrgetter("collective", *COLLECTIVE[1:])
_NO_ARGUMENTS = Arguments()
_NOTHING = TraceEvent()
_NO_TEXT = _NO_ARGUMENTS.shapes

MOST_OTHERS = 1_000_000
"""Events that are none of torch.profiler's, before a file with more of them than others is one."""


def _walked(data: bytes) -> _Walk:
    """What the events of a block say."""
    walk, block = _Walk(), Block(data)
    for events in block:
        walk.take(events)
    walk.read, walk.repaired, walk.skipped = block.read, block.repaired, block.skipped
    walk.malformed += block.malformed
    walk.first_malformed = block.first_malformed or walk.first_malformed
    walk.counted = block.counters
    return walk


class _Walk:
    """Takes the events of a trace, a list at a time, and holds the columns that they become."""

    def __init__(self) -> None:
        self.taken = self.malformed = self.without_duration = self.lost = 0
        self.read = self.repaired = self.skipped = 0
        self.first_malformed = ""
        self.unknown: Counter[str] = Counter()
        self.without_category: Counter[Any] = Counter()
        """Spans of each process that have none."""
        self.processes: dict[Any, Any] = {}
        self.lines, self.texts, self.raws, self.groups = (_Numbered() for _ in range(4))
        self.texts[""], self.raws[b""]  # number 0
        self.names: dict[tuple[Any, Any], Any] = {}
        """Process and thread to the thread's name."""
        self.tables: dict[str, str] = {}
        """Category to ``host``, ``device``, ``marks``; "" where it is not read."""
        self.kinds: dict[str, int] = {}
        """Category to the number of its kind in that table."""
        self.accelerator = ""
        self.of_autograd = 0
        """Operators of :data:`OF_AUTOGRAD`; their rows on the GPU follow each."""
        self.counters = Counters()
        self.counted: list[dict[str, Any]] = []
        """Events with hardware counters."""
        self.host = _Table(
            time="start duration",
            **dict(lines="line", texts="name", kinds="kind", groups="collective"),
            raws="shapes types values strides",
            integer="correlation external sequence forward_thread python_id python_parent",
        )
        self.device = _Table(
            time="start duration",
            **dict(lines="line", texts="name", kinds="kind", groups="collective"),
            raws="grid block",
            integer="correlation external bytes gpu stream registers shared_memory graph",
            float="blocks_per_sm warps_per_sm occupancy bandwidth",
        )
        self.memory = _Table(
            time="start", lines="line", texts="device", integer="bytes total reserved"
        )
        self.marks = _Table(
            time="start duration", lines="line", texts="name", kinds="kind", integer="correlation"
        )
        self.flows = _Table(time="start", lines="line", texts="phase", integer="id")

    def take(self, events: list[TraceEvent]) -> None:
        """Keep what the events say, if it is of interest."""
        rows: dict[str, list[TraceEvent]] = {name: [] for name in ("host", "device", "marks", "")}
        memory, flows = [], []
        table_of = self.tables
        for event in events:
            phase = event.ph
            if phase == "X":
                try:
                    rows[table_of[event.cat]].append(event)
                except KeyError:
                    rows[self._category(event)].append(event)
            elif phase == "i":
                if event.name == "[memory]":
                    memory.append(event)
            elif phase == "M":
                if event.name == "thread_name" and event.args is not None:
                    self.names[event.pid, event.tid] = event.args.name
                elif event.name == "process_name" and event.args is not None:
                    self.processes[event.pid] = event.args.name
            elif event.cat == "fwdbwd":
                flows.append(event)
            elif event == _NOTHING:  # some end their lists with {}
                self.malformed += 1
            elif not phase:
                self._refuse("ph")
        self.taken += len(events)
        for event in rows[""]:
            if not event.cat:
                self.without_category[event.pid] += 1
            elif _fold(event.cat) not in IGNORED:
                self.unknown[event.cat] += 1
        if rows["host"]:
            self._host(rows["host"])
        if waits := list(filter(_waits, rows["device"])):
            rows["device"] = [one for one in rows["device"] if not _waits(one)]
        if rows["device"]:
            self._device(rows["device"])
        if marks := rows["marks"] + waits:
            args, timed = self._timed(marks)
            self.marks.add(args, **timed)
        if memory:
            self._memory(memory)
        if flows:
            self.flows.add(
                [],
                start=[event.ts for event in flows],
                line=[self.lines[event.pid, event.tid] for event in flows],
                phase=[self.texts[event.ph] for event in flows],
                id=[event.id for event in flows],
            )

    def join(self, part: _Walk) -> None:
        """Add what another has taken of the events that follow."""
        own_number = {
            name: np.array(
                [getattr(self, name)[value] for value in getattr(part, name)] + [-1], dtype=np.int32
            )
            for name in ("lines", "texts", "raws", "groups")
        }
        for table in ("host", "device", "memory", "marks", "flows"):
            mine, other = getattr(self, table), getattr(part, table)
            for name, how in mine.columns.items():
                pieces = other.pieces[name]
                if how in own_number:
                    pieces = [own_number[how][piece] for piece in pieces]
                if name == "external":
                    pieces = [np.where(piece < 0, -1, piece + self.of_autograd) for piece in pieces]
                mine.pieces[name] += pieces
        for count in ("taken", "malformed", "without_duration", "repaired", "skipped"):
            setattr(self, count, getattr(self, count) + getattr(part, count))
        self.of_autograd += part.of_autograd
        self.first_malformed = self.first_malformed or part.first_malformed
        self.accelerator = self.accelerator or part.accelerator
        for known in ("unknown", "without_category", "processes", "names"):
            getattr(self, known).update(getattr(part, known))
        self.counters.add(part.counted)

    def _refuse(self, lacks: str, count: int = 1) -> None:
        """Count events that lack what each has."""
        self.malformed += count
        self.first_malformed = self.first_malformed or f"has no {lacks!r}"

    def _category(self, event: TraceEvent) -> str:
        """The table of a category that was not seen before. One that is not known is a device's
        where its span has a correlation and a device or a stream: the work of an accelerator that
        a call launched."""
        category = event.cat
        if not category:
            return self._of_npu(event) or self._of_autograd(event)
        folded = _fold(category)
        table, number = "", 0
        if kind := HOST_KINDS.get(folded):
            table, number = "host", _SPAN_KINDS.index(kind)
        elif kind := DEVICE_KINDS.get(folded):
            number = 0 if kind == "kernel" else 2 if folded.endswith("memset") else 1
            table = "device"
        elif kind := MARK_KINDS.get(folded):
            table, number = "marks", _MARK_KINDS.index(kind)
        if category not in HOST_KINDS and category not in DEVICE_KINDS:
            self.accelerator = self.accelerator or accelerator_of(category)
        self.kinds[category] = number
        if table or folded in IGNORED:
            self.tables[category] = table
        elif (args := event.args) is not None and (args.correlation != -1 or args.direction):
            return "" if args.device is None and args.stream is None else "device"
        return table

    def _of_npu(self, event: TraceEvent) -> str:
        """The table of a span of Ascend's profiler (msprof), "" of any other: its calls of CANN lie
        in a process whose number tells the program's, and what they launch on an NPU has their
        connection. An exchange is one row of HCCL's; of its pieces on the NPU its waits are kept.
        """
        if (args := event.args) is None or args.connection is None:
            return ""
        stream = args.npu_line if args.npu_stream is None else args.npu_stream
        exchange, number = str(event.name).startswith("hcom_"), event.pid
        if stream is not None and (piece := OF_EXCHANGES.match(str(event.name))):
            event.cat = "npu_exchange_wait" if piece[1] else ""
            return event.cat and self._category(event)
        if exchange:
            stream = f"HCCL {event.tid}"
        self.accelerator = self.accelerator or accelerator_of("npu_runtime")
        event.cat = "npu_runtime" if stream is None else "kernel"
        if type(number) is int:
            # with two more digits, or in the bits above ten, of which five are the NPU
            by_bits = number // 100 > MOST_PROCESSES
            event.pid = number if stream is not None else number >> 10 if by_bits else number // 100
            number = number & 31 if by_bits else number
        event.args = Arguments(
            correlation=args.connection or -1,
            stream=stream,
            device=None if stream is None else number,
        )
        return self._category(event)

    def _of_autograd(self, event: TraceEvent) -> str:
        """The table of a span without category; what the GPU does gets the number of its operator.

        The kinds of operators and kernels have number 0.
        """
        self.kinds[event.cat] = 0
        table = OF_AUTOGRAD.get(event.pid, "") if isinstance(event.pid, str) else ""
        if table:
            self.of_autograd += table == "host"
            event.args = Arguments(external=self.of_autograd)
        return table

    def _timed(self, rows: list[TraceEvent]) -> tuple[list[Arguments], dict[str, Any]]:
        """The arguments of spans, and their start, duration, line, name and kind."""
        start, duration, process, thread, name, category, given = zip(
            *map(_EVENT, rows), strict=True
        )
        args = [_NO_ARGUMENTS if one is None else one for one in given]
        if None in duration:
            self.without_duration += duration.count(None)
            duration = tuple(0 if one is None else one for one in duration)
        return args, {
            "start": start,
            "duration": duration,
            "line": list(map(self.lines.__getitem__, zip(process, thread, strict=True))),
            "name": list(map(self.texts.__getitem__, name)),
            "kind": list(map(self.kinds.__getitem__, category)),
        }

    def _host(self, rows: list[TraceEvent]) -> None:
        args, timed = self._timed(rows)
        # numbers differ from call to call: only those that count are kept
        counts = [row.name in FORMULAS for row in rows]
        texts = {
            "shapes": [one.shapes for one in args],
            "types": [one.types for one in args],
            "values": [a.values if c else _NO_TEXT for a, c in zip(args, counts, strict=True)],
            "strides": [a.strides if c else _NO_TEXT for a, c in zip(args, counts, strict=True)],
        }
        raws = self.raws
        numbers = {
            name: [0 if raw is _NO_TEXT else raws[bytes(raw)] for raw in column]
            for name, column in texts.items()
        }
        self.host.add(args, **timed, **self._external(args), **numbers)

    def _device(self, rows: list[TraceEvent]) -> None:
        args, timed = self._timed(rows)
        sizes = [one.bytes for one in args]
        if any(one.direction is not None for one in args):
            for place, (row, one) in enumerate(zip(rows, args, strict=True)):
                copied, moved = copy_of(str(row.name), one)
                if timed["kind"][place] == 0 and moved >= 0:
                    timed["name"][place], timed["kind"][place] = self.texts[copied], 1
                    sizes[place] = moved
        pairs = list(zip(rows, args, strict=True))
        gpus = [row.pid if one.device is None else one.device for row, one in pairs]
        streams = [row.tid if one.stream is None else one.stream for row, one in pairs]
        timed["line"] = list(map(self.lines.__getitem__, zip(gpus, streams, strict=True)))
        raws = self.raws
        self.device.add(
            args,
            **timed,
            **self._external(args),
            bytes=sizes,
            gpu=gpus,
            stream=streams,
            grid=[raws[bytes(one.grid)] for one in args],
            block=[raws[bytes(one.block)] for one in args],
        )

    def _external(self, args: list[Arguments]) -> dict[str, list[Any]]:
        """``external`` of spans, whose name was another in 2021, and the number of the arguments
        of each ``collective``, −1 of what is none."""
        return {
            "external": [a.external_2021 if a.external == -1 else a.external for a in args],
            "collective": [-1 if a.collective is None else self._group(a) for a in args],
        }

    def _group(self, args: Arguments) -> int:
        return self.groups[tuple(visible(str(value)) for value in _OF_COLLECTIVE(args))]

    def _memory(self, rows: list[TraceEvent]) -> None:
        given = [(row, row.args) for row in rows if row.args is not None]
        given = [(row, args) for row, args in given if args.allocated is not None]
        self._refuse("Bytes", len(rows) - len(given))
        # c10's device types: 0 CPU, 1 CUDA
        devices = ["cpu" if a.device_type == 0 else f"gpu {a.device_id}" for _, a in given]
        self.memory.add(
            [args for _, args in given],
            start=[row.ts for row, _ in given],
            line=[self.lines[row.pid, row.tid] for row, _ in given],
            bytes=[args.allocated for _, args in given],
            device=[self.texts[device] for device in devices],
        )

    # ---- columns to tables ----------------------------------------------------------

    def finish(self, stream: EventStream) -> Events:
        """The tables.

        Raises:
            InputError: there is no operator, range or kernel.
        """
        path = stream.name
        cautions = Cautions()
        cautions.add(self.repaired, "event{s} {was} not valid JSON and {was} repaired")
        cautions.add(self.skipped, "event{s} {was} not valid JSON and {was} left out")
        nanoseconds, why = self._unit()
        tables = ("host", "device", "memory", "marks")
        frames = {name: self._frame(name, nanoseconds) for name in tables}
        if self.of_autograd and len(frames["device"]):
            frames["device"] = _own_work(frames["device"])
            cautions.said.append(
                "Times of the GPU are those between events around operators, without Kineto: idle "
                "time within an operator counts as its work."
            )
        cautions.add(
            self.malformed,
            "event{s} lack{v} a name, time or what else torch.profiler writes, and {was} left out",
        )
        if nanoseconds:
            cautions.said.append(f"The times of this trace are read as nanoseconds: {why}.")
        cautions.add(self.lost, "event{s} {has} a time that is no number, and {was} left out")
        leave_out_strays([frames[name] for name in ("host", "device", "memory")], cautions)
        host, device, memory, marks = frames.values()
        if host.empty and device.empty:
            if odd := self.first_malformed:
                odd += f", of {self.taken:,} in its list"
                raise InputError(f"{path} is no trace of torch.profiler: an event {odd}")
            bare = self.without_category.total()
            why = f": {bare:,} of its events have no category ('cat')" if bare else ""
            kinds = " ".join(map(str, [*self.processes.values(), *self.unknown]))
            for pattern, tool in OTHER_PROFILERS.items():
                if re.search(pattern, kinds):
                    why = f": {tool} wrote it, whose traces are not read"
            raise NoTraceError(f"{path} holds no operator, range or kernel of torch.profiler{why}")
        what = device["kind"].to_numpy()
        host["kind"] = _texts(_SPAN_KINDS, host["kind"].to_numpy())
        device["kind"] = _texts(["kernel", "copy", "copy"], what)
        device["category"] = _texts(_CATEGORIES, what)
        marks["kind"] = _texts(_MARK_KINDS, marks["kind"].to_numpy())
        zero = from_first_event(frames, cautions)
        cautions.add(
            self.counters.refused,
            "value{s} of hardware counters {is} no number{s}, and {was} left out: not measured",
        )
        cautions.add(
            self.counters.beyond,
            "value{s} of hardware counters {was} left out: a trace has more than are read",
        )
        cautions.add(
            self.without_duration,
            "event{s} {has} no duration: {it} {is} counted, but {its} time is not",
        )
        for category, count in self.unknown.most_common(5):
            # a category of an attacker's may hold braces, so it is no part of the pattern
            shown = visible(category[:80])
            cautions.add(count, "event{s} of category '{category}' {was} not read", category=shown)
        for process, count in self.without_category.most_common(5):
            shown = visible(str(self.processes.get(process, process))[:80])
            cautions.add(count, "span{s} of '{name}' {was} not read: no category", name=shown)
        base = stream.header.get("baseTimeNanoseconds")
        names = {visible(f"{a}/{b}"): visible(str(name)) for (a, b), name in self.names.items()}
        events = Events(
            *(host, device, memory, names),
            rank=0,
            marks=marks,
            flows=self._flows(zero, nanoseconds),
            collectives=pd.DataFrame(list(self.groups), columns=list(COLLECTIVE)),
            header=stream.header,
            clock_ns=zero + (base if isinstance(base, int) and abs(base) < 2**62 else 0),
            accelerator=self.accelerator if len(device) else "",
            counters=self.counters.table(zero, nanoseconds),
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

    def _read_texts(self, columns: dict[str, Any]) -> None:
        """Put texts in the place of the JSON of arguments, and finish what names tell of spans."""
        names = list(self.texts)
        raws = [_json(raw) for raw in self.raws]
        shapes, types, values, strides = (columns.pop(name) for name in _RAW)
        name, has_shapes = columns["name"], shapes > 0
        asked = np.flatnonzero(has_shapes & ((values > 0) | (strides > 0)))
        told = np.zeros(len(name), dtype=np.int32)
        call = numbered_together([one[asked] for one in (name, shapes, values, strides)])
        _, first = np.unique(call, return_index=True)
        number = []
        for row in asked[first].tolist():
            given = (raws[column[row]] for column in (shapes, values, strides))
            arguments = dict(zip(_VALUE_ARGUMENTS, given, strict=True))
            number.append(self.texts[values_text(names[name[row]], arguments)])
        told[asked] = np.array(number, dtype=np.int32)[call]
        of_raw = np.zeros(len(raws), dtype=np.int32)
        for raw in np.unique(np.concatenate([shapes, types])).tolist():
            of_raw[raw] = self.texts[str(raws[raw])]
        columns["shapes"] = of_raw[shapes]
        columns["types"] = np.where(has_shapes, of_raw[types], 0)
        columns["values"] = told
        # our ranges may be written as operators, see dlrm_core/parts.py; so were all in 2021
        ranges = (SPAN_PREFIX, GROUP_PREFIX, STEP_PREFIX)
        is_range = np.array([str(text).startswith(ranges) for text in names], dtype=bool)
        operator, annotation = map(_SPAN_KINDS.index, ("operator", "annotation"))
        columns["kind"][is_range[name] & (columns["kind"] == operator)] = annotation

    def _usable(self, columns: dict[str, Any], nanoseconds: bool) -> Bools:
        """Which rows (n,) of a table have a time, a name and a thread; the others are counted."""
        whole, _ = columns["start"]
        usable = (whole != NO_TIME) & (np.abs(whole) < (2**62 if nanoseconds else 2**62 // 1000))
        self.lost += int((~usable).sum())
        nowhere = [number for pair, number in self.lines.items() if None in pair]
        for lacks, missing in (
            ("name", columns.get("name", np.empty(0)) == self.texts.get(None, -1)),
            ("pid", np.isin(columns["line"], nowhere)),
        ):
            if missing.any():
                self._refuse(lacks, int((missing & usable).sum()))
                usable &= ~missing
        return usable

    def _frame(self, table: str, nanoseconds: bool) -> pd.DataFrame:
        """A table as a frame, of the rows that are usable."""
        columns = getattr(self, table).all_columns()
        usable = self._usable(columns, nanoseconds)
        if table == "host":
            usable &= ~np.isin(columns["name"], [self.texts[text] for text in UTILITY])
            self._read_texts(columns)
        for name, values in columns.items():
            if name in ("start", "duration"):
                whole, fraction = values
                columns[name] = _nanoseconds(whole[usable], fraction[usable], already=nanoseconds)
            elif name == "line":
                columns[name] = _texts(self._threads(), values[usable])
            elif name in ("grid", "block"):
                columns[name] = _texts([str(_json(raw)) for raw in self.raws], values[usable])
            elif name in ("name", "shapes", "types", "values", "device"):
                named = [visible(text or "") for text in self.texts]
                columns[name] = _texts(named, values[usable])
            else:
                columns[name] = values[usable]
        return pd.DataFrame(columns, copy=False)

    def _threads(self) -> list[str]:
        """Process and thread, or GPU and stream, of each line."""
        return [visible(f"{_word(one)}/{_word(other)}") for one, other in self.lines]

    def _flows(self, zero: int, nanoseconds: bool) -> pd.DataFrame:
        columns = self.flows.all_columns()
        columns["start"] = _nanoseconds(*columns["start"], already=nanoseconds) - zero
        columns["line"] = np.array(self._threads(), dtype=object)[columns["line"]]
        table = pd.DataFrame(columns)
        forward, backward = (
            table[table["phase"].eq(self.texts[phase])].drop_duplicates("id", keep="last")
            for phase in ("s", "f")
        )
        pairs = forward.merge(backward, on="id", suffixes=("_forward", "_backward"))
        sides = ["start_forward", "line_forward", "start_backward", "line_backward"]
        names = ["forward", "forward_line", "backward", "backward_line"]
        return pairs[sides].set_axis(names, axis=1)


def _json(raw: bytes) -> Any:
    """What an argument's JSON says; "" where there is none."""
    return msgspec.json.decode(raw) if raw else ""


def _texts(texts: Sequence[str], number: Ints) -> pd.Categorical:
    """The text (n,) of each number; those that occur in no row are left out."""
    used = np.flatnonzero(np.bincount(number, minlength=len(texts)))
    named = np.empty(len(used), dtype=object)
    named[:] = [texts[place] for place in used.tolist()]
    code, distinct = pd.factorize(named)
    code_of = np.zeros(len(texts), dtype=np.int32)
    code_of[used] = code
    kinds = pd.CategoricalDtype(pd.Index(distinct, dtype=object))
    return pd.Categorical.from_codes(code_of[number], dtype=kinds)  # type: ignore[arg-type]


def _nanoseconds(whole: Ints, fraction: Floats, *, already: bool) -> Ints:
    """Times (n,); −1 where one is no number."""
    whole = np.where(whole == NO_TIME, -1, whole)
    return whole if already else whole * 1000 + np.rint(fraction * 1000).astype(np.int64)


def _waits(event: TraceEvent) -> bool:
    """Whether a stream of an accelerator that is no GPU waits in this span."""
    is_gpus = event.cat.lower().startswith(("kernel", "gpu_", "mem"))
    return not is_gpus and bool(_WAIT.fullmatch(str(event.name)))


def _own_work(device: pd.DataFrame) -> pd.DataFrame:
    """Nested spans of streams, each cut to the longest stretch that no span in it covers; without
    those that have none of a microsecond, the resolution of a GPU's events."""
    parts = []
    for _, rows in device.groupby("line", observed=True, sort=False):
        start, end = rows["start"].to_numpy(), (rows["start"] + rows["duration"]).to_numpy()
        start, end, above, _ = nest(start, end, np.zeros(len(rows), dtype=bool))
        inner = np.flatnonzero(above >= 0)
        span = np.concatenate([np.arange(len(rows)), above[inner]])
        # from its begin, or the end of a span within it, to the next one, or its end
        since, until = np.append(start, end[inner]), np.append(end, start[inner])
        since, until = since[np.lexsort((since, span))], until[np.lexsort((until, span))]
        pieces = pd.DataFrame({"span": np.sort(span), "since": since, "length": until - since})
        longest = pieces.loc[pieces.groupby("span")["length"].idxmax()]
        cut = rows.assign(start=longest["since"].to_numpy(), duration=longest["length"].to_numpy())
        parts.append(cut[cut["duration"].ge(CLOCK_NS)])
    return pd.concat(parts)


def copy_of(name: str, args: Arguments) -> tuple[str, int]:
    """The name and bytes of a span that copies by its ``direction`` and ``size``, as MTIA's
    ``dma_request`` does; the name as it is and −1 of others."""
    if type(args.size) is not int or args.direction not in _DIRECTIONS:
        return name, -1
    return f"Memcpy {_DIRECTIONS[args.direction]} ({name})", args.size


_DIRECTIONS = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD"}
_GPUS = ("", "cuda", "hip", "roc", "gpu")


def accelerator_of(category: str) -> str:
    """``MTIA`` of ``mtia_runtime``: whose calls these are, where it is no GPU's."""
    vendor, _, end = category.lower().rpartition("_")
    if vendor == "privateuse1":  # torch's name for back ends that are not its own
        return "accelerator"
    return vendor.upper() if end in ("runtime", "driver") and vendor not in _GPUS else ""


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
    following = (
        in_turn.groupby("line", sort=False, observed=True)["start"].shift(-1).reindex(device.index)
    )
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
    launcher = correlation.map(calls["name"].astype(object)).fillna("")
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
