"""An SQLite export of Nsight Systems, as the tables that a trace of torch.profiler becomes.

Exports differ by version and by what was traced, so each table and column is asked for: of 2021
(no ``META_DATA_EXPORT``) and of today, with names as text or as numbers of ``StringIds``. What
:class:`~dlrm_workbook.recordings.torch.chrome_trace.Events` holds is filled from them, and all
that follows (nesting, parts, iterations, launches) is that of any trace.

Times are nanoseconds. A ``globalTid`` holds its process (bits 24 to 47, above them its machine)
and its thread (bits 0 to 23). Numbers of launches are a process's own.
"""

from __future__ import annotations

import heapq
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import open_binary
from dlrm_core.base.text import visible
from dlrm_core.parts import SPAN_PREFIX
from dlrm_workbook.ground.arrays import Bools, Ints, Names
from dlrm_workbook.ground.processes import run_child, without_collection
from dlrm_workbook.recordings.foreign import Named, PartNames
from dlrm_workbook.recordings.nesting import stretch_at, union
from dlrm_workbook.recordings.profile import Profile, coded, matching
from dlrm_workbook.recordings.torch.chrome_trace import (
    COLLECTIVE,
    NO_TIME,
    Cautions,
    Events,
    from_first_event,
    leave_out_strays,
    look_at_device,
)
from dlrm_workbook.recordings.torch.trace import profile_of

MAGIC = b"SQLite format 3\0"
"""How every SQLite file begins."""

REPORTS = (".nsys-rep", ".qdrep")
"""Ends of the names of reports, which only ``nsys`` itself can read."""

EXPORT_TIMEOUT_S = 600
"""Seconds that ``nsys export`` may take."""

LONGEST_TEXT = 10_000
"""Characters of a name; the output of programs, which exports hold too, can be megabytes."""

CHUNK = 50_000
"""Rows that are held as Python objects at a time."""

CUPTI = "CUPTI_ACTIVITY_KIND_"
RUNTIME = CUPTI + "RUNTIME"
DEVICE_TABLES = {
    CUPTI + "KERNEL": "kernel",
    CUPTI + "MEMCPY": "memcpy",
    CUPTI + "MEMSET": "memset",
    CUPTI + "GRAPH_TRACE": "graph",
}
"""Tables of what ran on GPUs."""

NO_CALLS = ("CUDA_GRAPH_EVENTS", "CUDA_GRAPH_NODE_EVENTS", "NVTX_EVENTS", "PROFILER_OVERHEAD")
"""Tables with threads and names that are no calls of a library."""

RANGES = (59, 60, 70, 71)
"""``eventType`` of NVTX ranges: pushed and popped, started and ended; read from a text file."""
STARTED = (60, 71)

COPIES = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
COPIES += ("HtoD", "DtoH", "DtoD")  # by unified memory
PLACES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
"""``copyKind`` and kinds of memory, by number, as torch.profiler names them."""

OVERHEADS = {
    r"(?i)flush": "Buffer Flush",
    r"(?i)instrumentation|profiling init": "Instrumentation",
    r"(?i)resource management": "Resource",
}
"""What the profiler did, as torch.profiler names it."""

_NO_RANGE: dict[str, Any] = {"shapes": "", "sequence": -1, "started": False}
"""Columns that tell something of ranges alone."""

_VERSION = re.compile(r"(?:_ptsz|_ptds)?_v\d{4,}$")
"""``cudaLaunchKernel_v7000`` is ``cudaLaunchKernel`` elsewhere."""

_EMITTED = re.compile(r", (?:stashed )?(?:seq|op_id|sizes|input_op_ids) ?= ?")
_SEQUENCE = re.compile(r"seq ?= ?(\d{1,18})")
_SIZES = re.compile(r"sizes ?= ?(\[[\d, \[\]]*\])")
"""What ``torch.autograd.profiler.emit_nvtx`` adds to the name of an operator."""

_LIBRARIES = re.compile(r"(?:aten|autograd|torch|c10d|fbgemm|torchrec)::")
_LOST = re.compile(r"(?i)\b(dropped|lost|incomplete|not all|overflow|exceed)")

NOT_MEASURED = {
    "allocated_bytes": "Nsight Systems does not record what torch allocates",
    "flops": "an export of Nsight Systems has no counts of operations",
    **dict.fromkeys(
        ("gpu_time_ms", "launches", "copy_bytes"),
        "the export has no work of a GPU; `nsys profile --trace=cuda,nvtx` records it",
    ),
}


def read_nsight(path: Path, parts: Mapping[str, str] | None = None) -> dict[int, Profile]:
    """Read an SQLite export of Nsight Systems, or a report where ``nsys`` is installed.

    Args:
        parts: patterns of names to parts, see ``profiling.parts``.

    Returns:
        Rank to its profile. Processes are ranks where each has GPUs of its own; all others of an
        export are one profile.

    Raises:
        InputError: the file is damaged, locked, no export, or holds nothing of a program.
    """
    with _exported(path) as place, _database(place, path) as database:
        export = _Export(database, path)
        with without_collection():
            ranks = export.ranks()
    profiles = {}
    for rank, events in ranks.items():
        profile = profile_of(events, parts, {"engine": "nsight", "not_measured": NOT_MEASURED})
        profile.metrics["source"] = "Nsight Systems"
        profiles[rank] = profile
    return profiles


@contextmanager
def _exported(path: Path) -> Iterator[Path]:
    """The database of a file: itself, or what ``nsys`` makes of a report."""
    if path.suffix not in REPORTS:
        yield path
        return
    with open_binary(path), tempfile.TemporaryDirectory(prefix="dlrm-nsys-") as folder:
        target = Path(folder) / "export.sqlite"
        command = ["nsys", "export", "--type", "sqlite", "--output", str(target), str(path)]
        nsys, advice = shutil.which("nsys"), "`nsys export --type sqlite` makes a file of it"
        if nsys is None:
            raise InputError(f"{path} is a report, and nsys is not installed here: {advice}")
        done = run_child([nsys, *command[1:]], stage="nsys export", timeout_s=EXPORT_TIMEOUT_S)
        if done.timed_out or done.exit_code or not target.exists():
            why = "took too long" if done.timed_out else f"said: {done.last_words()}"
            raise InputError(f"{path} cannot be read: nsys export {why}")
        yield target


@contextmanager
def _database(place: Path, path: Path) -> Iterator[sqlite3.Connection]:
    """The database, open for reading only; nothing that it defines is run."""
    with open_binary(place):
        pass
    try:
        uri = f"{place.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=1)) as database:
            database.text_factory = lambda text: text.decode("utf-8", "replace")
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA query_only = ON")
            yield database
    except sqlite3.Error as error:
        raise InputError(f"{path} cannot be read: {visible(str(error))}") from None


class _Export:
    """One export: which tables and columns it has, and what they hold.

    Raises:
        InputError: it is no export of Nsight Systems, or a table lacks its times.
    """

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self.database, self.path = database, path
        listed = database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL TABLE%'"
        ).fetchall()
        self.columns = {
            name: [row[1] for row in database.execute(f"PRAGMA table_info({_quoted(name)})")]
            for (name,) in listed
        }
        read = (RUNTIME, "NVTX_EVENTS", *DEVICE_TABLES)
        if not any(name in self.columns for name in (*read, "TARGET_INFO_SYSTEM_ENV")):
            raise InputError(
                f"{path} is an SQLite database, but no export of Nsight Systems: it has none of "
                f"the tables {', '.join(read)}"
            )
        for name in read:
            for column in ("start", "end"):
                if name in self.columns and column not in self.columns[name]:
                    raise InputError(f"{path}: its table {name} lacks the column '{column}'")
        self.cautions = Cautions()
        self.numbers: dict[int, int] = {}
        """Process to a small number."""
        self.by_process = self.has(RUNTIME, "globalTid") and all(
            self.has(table, "globalPid") for table in DEVICE_TABLES if table in self.columns
        )
        self.strings: dict[int, str] = {}
        """Number to text, of ``StringIds``."""
        if self.has("StringIds", "id", "value"):
            rows = self.database.execute(
                f"SELECT id, substr(value, 1, {LONGEST_TEXT}) FROM StringIds"
            )
            self.strings = {number: str(text) for number, text in rows}
        self.names = self._thread_names()

    # ---- tables to columns ----------------------------------------------------------

    def has(self, table: str, *columns: str) -> bool:
        return set(columns) <= set(self.columns.get(table, ()))

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """Columns of whole numbers; ``NO_TIME`` where one is no number, or there is no such column."""
        held = [column for column in columns if self.has(table, column)]
        terms = (
            f"CASE typeof({name}) WHEN 'integer' THEN {name} WHEN 'real' THEN "
            f"CAST({name} AS INTEGER) ELSE ?1 END"
            for name in map(_quoted, held)
        )
        chunks = [np.empty((len(held), 0), dtype=np.int64)]
        if held:
            # not by an index: columns that are read one after another are in one order
            rows = self.database.execute(
                f"SELECT {', '.join(terms)} FROM {_quoted(table)} NOT INDEXED", (NO_TIME,)
            )
            while some := rows.fetchmany(CHUNK):
                chunks.append(np.ascontiguousarray(np.array(some, dtype=np.int64).T))
        values = dict(zip(held, np.concatenate(chunks, axis=1), strict=True))
        count = len(next(iter(values.values()), ()))
        return pd.DataFrame({c: values.get(c, np.full(count, NO_TIME)) for c in columns})

    def texts(self, table: str, column: str) -> tuple[Ints, list[str]]:
        """(number of each row's text (n,), the texts; "" where there is none)."""
        if not self.has(table, column):
            count = self.database.execute(f"SELECT count(*) FROM {_quoted(table)}").fetchone()[0]
            return np.zeros(count, dtype=np.int64), [""]
        numbers: dict[Any, int] = {}
        rows = self.database.execute(
            f"SELECT substr({_quoted(column)}, 1, {LONGEST_TEXT}) FROM {_quoted(table)} NOT INDEXED"
        )
        codes = (numbers.setdefault(text, len(numbers)) for (text,) in rows)
        code = np.fromiter(codes, dtype=np.int64)
        return code, ["" if text is None else str(text) for text in numbers]

    def named(self, numbers: pd.Series) -> Names:
        """The text (n,) that each number stands for."""
        distinct, place = np.unique(numbers.to_numpy(), return_inverse=True)
        texts = [visible(self.strings.get(int(number), "")) or "unnamed" for number in distinct]
        return np.array(texts, dtype=object)[place] if texts else np.empty(0, dtype=object)

    def rows(self, table: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of a small table, as they are; none where a column is missing."""
        if not self.has(table, *columns):
            return []
        listed = ", ".join(map(_quoted, columns))
        found = self.database.execute(f"SELECT {listed} FROM {_quoted(table)} LIMIT {CHUNK}")
        return [dict(zip(columns, row, strict=True)) for row in found]

    def launches(self, process: Ints, number: pd.Series) -> Ints:
        """Numbers of launches (n,) that tell processes apart; −1 where there is none."""
        distinct, place = np.unique(process, return_inverse=True)
        numbered = [self.numbers.setdefault(int(one), len(self.numbers)) for one in distinct]
        of_process = np.array(numbered, dtype=np.int64)[place] if self.by_process else 0
        known = number.between(1, 2**32 - 1)
        return np.where(known, (of_process << 32) | number.where(known, 0), -1)

    # ---- CPU threads ----------------------------------------------------------------

    def host(self) -> pd.DataFrame:
        """Calls, ranges and samples of threads, as ``Events.host``, with ``process``."""
        frames = [self.calls(table) for table in self.columns if self._holds_calls(table)]
        frames += [self.ranges()]
        host = pd.concat([frame for frame in frames if len(frame)] or frames[-1:])
        host = host.reset_index(drop=True)
        usable = _is_time(host["start"])
        last = host.loc[usable, ["start", "end"]].max().max()
        is_open = host["end"].eq(NO_TIME) & host["kind"].isin(["annotation", "operator"])
        host.loc[is_open, "end"] = last
        self.cautions.add(
            int((is_open & usable).sum()),
            "NVTX range{s} {was} still open when the recording ended: {it} {is} taken to end with "
            "the last event",
        )
        samples = self.samples(host[usable])
        if len(samples):
            host = pd.concat([host, samples], ignore_index=True)
        tid = host.pop("tid").to_numpy()
        host["process"] = tid >> 24
        host["line"] = _lines(_process(tid), tid & 0xFFFFFF)
        for column in ("external", "forward_thread", "python_id", "python_parent", "collective"):
            host[column] = np.int8(-1)
        host["types"], host["values"] = "", ""
        return host

    def _holds_calls(self, table: str) -> bool:
        if table == RUNTIME:
            return True
        named = self.has(table, "nameId") or self.has(table, "textId")
        return named and self.has(table, "start", "end", "globalTid") and table not in NO_CALLS

    def calls(self, table: str) -> pd.DataFrame:
        """Calls of CUDA (``runtime``), or of another library or the system (``function``)."""
        name = "nameId" if self.has(table, "nameId") else "textId"
        calls = self.read(table, ["start", "end", "globalTid", "correlationId", name])
        calls.columns = pd.Index(["start", "end", "tid", "correlation", "name"])
        names = self.named(calls["name"])
        code, texts = coded(pd.Series(names, dtype=object))
        short = np.array([_VERSION.sub("", text) for text in texts], dtype=object)
        calls["name"] = short[code] if len(texts) else names
        is_cuda = table == RUNTIME
        numbers = self.launches(calls["tid"].to_numpy() >> 24, calls["correlation"]) if is_cuda else -1
        kind = "runtime" if is_cuda else "function"
        return calls.assign(correlation=numbers, kind=kind, **_NO_RANGE)

    def ranges(self) -> pd.DataFrame:
        """NVTX ranges as annotations; operators that ``emit_nvtx`` named as operators."""
        table = "NVTX_EVENTS"
        held = self.read(table, ["start", "end", "globalTid", "textId", "eventType"])
        held.columns = pd.Index(["start", "end", "tid", "name", "type"])
        code, texts = self.texts(table, "text") if table in self.columns else (held["name"], [])
        # what has no text of its own is numbered after the texts
        number, numbers = pd.factorize(held["name"])
        code = np.where(np.array([not text for text in texts], dtype=bool)[code], -1, code)
        texts += [self.strings.get(int(one), "") or "unnamed" for one in numbers]
        code = np.where(code < 0, len(texts) - len(numbers) + number, code)
        split = pd.DataFrame(
            [_emitted(text) for text in texts], columns=["name", "kind", "shapes", "sequence"]
        )
        for column in split:
            held[column] = split[column].to_numpy()[code]
        # where exports do not say the type, a mark is what has no end
        held = held[
            held["type"].isin(RANGES) if self.has(table, "eventType") else held["end"].ne(NO_TIME)
        ]
        return held.assign(correlation=-1, started=held.pop("type").isin(STARTED))

    def samples(self, host: pd.DataFrame) -> pd.DataFrame:
        """Functions that CPU samples saw between calls, as spans that cut no call and no range.

        A sample stands for half the usual time between two of them on either side, but not beyond
        its neighbours, nor where another call or range begins or ends.
        """
        found = self.read("COMPOSITE_EVENTS", ["id", "start", "globalTid"])
        stacks = self.read("SAMPLING_CALLCHAINS", ["id", "symbol", "stackDepth"])
        inner = stacks[stacks["stackDepth"].eq(0)].drop_duplicates("id").set_index("id")["symbol"]
        found = found.assign(symbol=found["id"].map(inner)).dropna().astype(np.int64)
        found = found[_is_time(found["start"])].sort_values(["globalTid", "start"])
        spans, intervals = [], []
        of_thread = dict(iter(host.groupby("tid")))
        for tid, group in found.groupby("globalTid"):
            at = group["start"].to_numpy()
            if len(at) < 2:
                continue
            intervals.append(np.diff(at))
            half = int(np.median(intervals[-1])) // 2
            middle = (at[1:] + at[:-1]) // 2
            first = np.maximum(at - half, np.append(at[0] - half, middle))
            last = np.minimum(at + half, np.append(middle, at[-1] + half))
            if tid in of_thread:
                known = of_thread[tid]
                edges = np.unique(known[["start", "end"]].to_numpy())
                place = np.searchsorted(edges, at, side="right")
                first = np.where(place > 0, np.maximum(first, edges[place - 1]), first)
                following = np.append(edges, np.iinfo(np.int64).max)[place]
                last = np.minimum(last, following)
                calls = known[known["kind"].isin(["runtime", "function"])]
                within = stretch_at(*union(calls["start"].to_numpy(), calls["end"].to_numpy()), at)
                group = group[within < 0]
                first, last = first[within < 0], last[within < 0]
            names = self.named(group["symbol"])
            spans.append(pd.DataFrame({"start": first, "end": last, "tid": tid, "name": names}))
        if not spans:
            return pd.DataFrame()
        self.cautions.said.append(
            f"CPU functions are of samples, {np.median(np.concatenate(intervals)) / 1e6:.3g} ms "
            "apart on a thread: their times are estimates, and between samples nothing is known."
        )
        functions = pd.concat(spans, ignore_index=True)
        return functions.assign(kind="function", correlation=-1, **_NO_RANGE)

    # ---- GPUs -----------------------------------------------------------------------

    def device(self) -> pd.DataFrame:
        """Kernels, copies, memory sets and whole graphs, as ``Events.device``, with ``process``."""
        named = next(
            (c for c in ("demangledName", "shortName") if self.has(CUPTI + "KERNEL", c)), ""
        )
        shape = [f"{what}{axis}" for what in ("grid", "block") for axis in "XYZ"]
        columns = ["start", "end", "globalPid", "deviceId", "streamId", "correlationId", named]
        columns += ["graphNodeId", "registersPerThread", "staticSharedMemory", *shape]
        columns += ["dynamicSharedMemory", "bytes", "copyKind", "srcKind", "dstKind", "memKind"]
        columns += ["graphId"]
        frames = []
        for table, category in DEVICE_TABLES.items():
            held = self.read(table, columns)
            if category == "kernel":
                name = self.named(held[named])
            elif category == "memcpy":
                name = _filled(held[["copyKind", "srcKind", "dstKind"]], _copied)
            elif category == "memset":
                name = _filled(held[["memKind"]], lambda kind: f"Memset ({_place(kind)})")
            else:
                name = _filled(held[["graphId"]], "CUDA graph {}, as a whole".format)
            memory = held["staticSharedMemory"] + held["dynamicSharedMemory"]
            frames.append(
                pd.DataFrame(
                    {
                        "start": held["start"],
                        "end": held["end"],
                        "name": name,
                        "kind": "copy" if category.startswith("mem") else "kernel",
                        "category": "kernel" if category == "graph" else category,
                        "process": held["globalPid"],
                        "launch": held["correlationId"],
                        "gpu": held["deviceId"].clip(lower=-1),
                        "stream": held["streamId"].clip(lower=-1),
                        "bytes": held["bytes"].clip(lower=-1),
                        "grid": _filled(held[shape[:3]], _triple),
                        "block": _filled(held[shape[3:]], _triple),
                        "registers": held["registersPerThread"].clip(lower=-1),
                        "shared_memory": memory.where(held["dynamicSharedMemory"].ge(0), -1),
                        "graph": held["graphId"].clip(lower=-1),
                        "whole": category == "graph",
                    }
                )
            )
        device = pd.concat(frames, ignore_index=True)
        device["process"] = device["process"].to_numpy() >> 24
        device["correlation"] = self.launches(device["process"].to_numpy(), device.pop("launch"))
        # graphs are traced as a whole or node by node; where both are there, nodes say more
        nodes = device.loc[~device["whole"] & device["correlation"].ge(0), "correlation"]
        whole = device["whole"] & ~device["correlation"].isin(nodes)
        device = device[whole | ~device["whole"]].drop(columns="whole").reset_index(drop=True)
        self.cautions.add(
            int(whole.sum()),
            "launch{es} of CUDA graphs {was} recorded as a whole, and each counts as one kernel: "
            "`nsys profile --cuda-graph-trace=node` records their kernels",
        )
        for column in ("external", "collective"):
            device[column] = np.int8(-1)
        for column in ("blocks_per_sm", "warps_per_sm", "occupancy", "bandwidth"):
            device[column] = np.float32(np.nan)
        return device

    def marks(self) -> pd.DataFrame:
        """Waits of GPU streams, and what the profiler did, as ``Events.marks``."""
        waits = self.read(CUPTI + "SYNCHRONIZATION", ["start", "end", "deviceId", "streamId"])
        own = self.read("PROFILER_OVERHEAD", ["start", "end", "globalTid", "nameId"])
        tid = own["globalTid"].to_numpy()
        marks = pd.DataFrame(
            {
                "start": pd.concat([waits["start"], own["start"]]),
                "end": pd.concat([waits["end"], own["end"]]),
                "line": np.concatenate(
                    [
                        _lines(waits["deviceId"], waits["streamId"]),
                        _lines(_process(tid), tid & 0xFFFFFF),
                    ]
                ),
                "name": np.concatenate(
                    [np.full(len(waits), "synchronize", dtype=object), self.named(own["nameId"])]
                ),
                "kind": ["sync"] * len(waits) + ["overhead"] * len(own),
                "correlation": -1,
            }
        )
        for pattern, name in OVERHEADS.items():
            marks.loc[marks["name"].str.contains(pattern), "name"] = name
        return marks[_is_time(marks["start"]) & _is_time(marks["end"])].reset_index(drop=True)

    # ---- all of it ------------------------------------------------------------------

    def ranks(self) -> dict[int, Events]:
        """The events of each rank, by rank; of one, where processes are no ranks.

        Raises:
            InputError: no kernel, call or range is in the export.
        """
        host, device, marks = self.host(), self.device(), self.marks()
        if host.empty and device.empty:
            raise InputError(
                f"{self.path} is an export of Nsight Systems, but holds no kernel, CUDA call or "
                "NVTX range: `nsys profile --trace=cuda,nvtx` records them"
            )
        self._name_gpus(device)
        frames = {"host": host, "device": device}
        for name, frame in frames.items():
            usable = _is_time(frame["start"]) & (_is_time(frame["end"]) | frame["end"].eq(NO_TIME))
            self.cautions.add(
                int((~usable).sum()), "event{s} {has} a time that is no number, and {was} left out"
            )
            frame = frame[usable].reset_index(drop=True)
            frame["duration"] = np.where(
                frame["end"].eq(NO_TIME), -1, frame["end"] - frame["start"].to_numpy()
            )
            frames[name] = frame
        memory = {"start": 0, "bytes": 0, "total": 0, "reserved": 0, "line": "", "device": ""}
        frames["memory"] = pd.DataFrame([memory]).iloc[:0]
        frames["marks"] = marks.assign(duration=marks["end"] - marks["start"])
        leave_out_strays([frames[name] for name in ("host", "device", "memory")], self.cautions)
        host, device = frames["host"], frames["device"]
        self.cautions.add(
            _to_lanes(host, self.names),
            "NVTX range{s} begin{v} in one call or range of {its} thread and end{v} in another: "
            "{it} {is} shown beside the thread",
        )
        zero = from_first_event(frames, self.cautions)
        self._diagnose()
        ranks = self._processes_of_ranks(device)
        return {
            rank: self._events(
                frames
                if process is None
                else frames
                | {
                    "host": host[host["process"].eq(process)].reset_index(drop=True),
                    "device": device[device["process"].eq(process)].reset_index(drop=True),
                },
                rank,
                zero,
            )
            for rank, process in ranks.items()
        }

    def _events(self, frames: dict[str, pd.DataFrame], rank: int, zero: int) -> Events:
        host, device = frames["host"], frames["device"]
        gpu = device["gpu"]
        if device["process"].nunique() > 1:  # whose streams have the same numbers
            process = _process(device["process"].to_numpy() << 24)
            gpu = _filled(pd.DataFrame({"gpu": gpu, "process": process}), "{} of process {}".format)
        device["line"] = _lines(gpu, device["stream"])
        began = self.rows("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])
        epoch = next((row["utcEpochNs"] for row in began), 0)
        events = Events(
            host=host,
            device=device,
            memory=frames["memory"],
            names=self.names,
            rank=rank,
            marks=frames["marks"],
            flows=pd.DataFrame(columns=["forward", "forward_line", "backward", "backward_line"]),
            collectives=pd.DataFrame(columns=list(COLLECTIVE.values())),
            processes=self._process_names(),
            header={"deviceProperties": self._gpus()},
            clock_ns=zero + (epoch if isinstance(epoch, int) and abs(epoch) < 2**62 else 0),
        )
        cautions = Cautions()
        cautions.said += self.cautions.said
        look_at_device(events, cautions)
        events.cautions = cautions.said
        return events

    def _name_gpus(self, device: pd.DataFrame) -> None:
        """Number GPUs as the machine does, not as each process sees them, where that is said."""
        columns = ["pid", "cudaId", "gpuId"]
        known = self.read("TARGET_INFO_CUDA_DEVICE", columns).drop_duplicates(columns[:2])
        if known.empty or (known == NO_TIME).any().any():
            return
        pid = _process(device["process"].to_numpy() << 24)
        seen = pd.MultiIndex.from_arrays([pid, device["gpu"]])
        gpu = known.set_index(columns[:2])["gpuId"].reindex(seen).to_numpy()
        device["gpu"] = np.where(np.isfinite(gpu), gpu, device["gpu"]).astype(np.int64)

    def _processes_of_ranks(self, device: pd.DataFrame) -> dict[int, int | None]:
        """Rank to its process; rank 0 to None where processes are no ranks.

        They are where each has GPUs of its own, or all exchange data by collectives.
        """
        used = device[["process", "gpu"]].drop_duplicates().sort_values(["gpu", "process"])
        processes = used["process"].drop_duplicates().tolist()
        says = PartNames().of
        exchange = matching(
            device["name"], lambda name: says("kernel", name) == Named("communication")
        )
        exchanging = set(device.loc[exchange, "process"])
        if (
            not self.by_process
            or len(processes) < 2
            or (used["gpu"].duplicated().any() and exchanging < set(processes))
        ):
            return {0: None}
        of_mpi = self.read("MPI_RANKS", ["globalTid", "rank"])
        named = dict(
            zip((of_mpi["globalTid"].to_numpy() >> 24).tolist(), of_mpi["rank"].tolist(), strict=True)
        )
        ranks = [named.get(process, -1) for process in processes]
        if min(ranks) < 0 or len(set(ranks)) < len(ranks):
            ranks = list(range(len(processes)))
            self.cautions.said.append(
                f"{len(processes)} processes used GPUs: they are taken as ranks, numbered by their "
                "GPUs, since the export does not say their ranks."
            )
        return dict(sorted(zip(ranks, processes, strict=True)))

    def _thread_names(self) -> dict[str, str]:
        names = self.read("ThreadNames", ["globalTid", "nameId"])
        tid = names["globalTid"].to_numpy()
        lines = _lines(_process(tid), tid & 0xFFFFFF)
        return dict(zip(lines.tolist(), self.named(names["nameId"]).tolist(), strict=True))

    def _process_names(self) -> dict[str, str]:
        rows = self.rows("PROCESSES", ["pid", "name"])
        return {str(row["pid"]): visible(str(row["name"])) for row in rows if row["name"]}

    def _gpus(self) -> list[dict[str, Any]]:
        """Properties of GPUs under the names of a trace's ``deviceProperties``."""
        asked = {
            "id": "id",
            "name": "name",
            "numSms": "smCount",
            "totalGlobalMem": "totalMemory",
            "computeMajor": "computeMajor",
            "computeMinor": "computeMinor",
            "regsPerMultiprocessor": "maxRegistersPerSm",
            "sharedMemPerMultiprocessor": "maxShmemPerSm",
            "maxWarpsPerSm": "maxWarpsPerSm",
            "threadsPerWarp": "threadsPerWarp",
        }
        asked = {name: c for name, c in asked.items() if self.has("TARGET_INFO_GPU", c)}
        found = self.rows("TARGET_INFO_GPU", list(asked.values())) if "name" in asked else []
        gpus = [{name: row[column] for name, column in asked.items()} for row in found]
        for gpu in gpus:
            gpu["name"] = str(gpu["name"] or "")
            warps, threads = gpu.get("maxWarpsPerSm"), gpu.get("threadsPerWarp")
            if isinstance(warps, int) and isinstance(threads, int):
                gpu["maxThreadsPerMultiprocessor"] = warps * threads
        return gpus

    def _diagnose(self) -> None:
        """Repeat what Nsight Systems itself says is wrong with the recording."""
        for row in self.rows("DIAGNOSTIC_EVENT", ["severity", "text"])[:CHUNK]:
            words = visible(" ".join(str(row["text"]).split()))[:300]
            serious = isinstance(row["severity"], int) and row["severity"] >= 3
            if serious or _LOST.search(words):
                self.cautions.said.append(f"Nsight Systems says: {words}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_time(column: pd.Series) -> pd.Series:
    return column.between(-(2**62), 2**62)


def _process(tid: Ints) -> Ints:
    return (tid >> 24) & 0xFFFFFF


def _lines(first: Any, second: Any) -> Names:
    """``7/12`` (n,): of processes and threads, or of GPUs and streams."""
    return _filled(pd.DataFrame({"first": first, "second": second}), "{}/{}".format)


def _emitted(text: str) -> tuple[str, str, str, int]:
    """(name, kind, shapes, sequence number) of an NVTX range.

    ``emit_nvtx`` writes ``aten::mm, seq = 5, op_id = 7, sizes = [[2, 3], [3, 4]]``.
    """
    text = visible(text)
    added = _EMITTED.search(text)
    name, rest = (text[: added.start()], text[added.start() :]) if added else (text, "")
    sequence, sizes = _SEQUENCE.search(rest), _SIZES.search(rest)
    operator = bool(sequence or sizes or _LIBRARIES.match(name) or (rest and "::" in name))
    kind = "operator" if operator and not name.startswith(SPAN_PREFIX) else "annotation"
    return name, kind, sizes[1] if sizes else "", int(sequence[1]) if sequence else -1


def _filled(held: pd.DataFrame, text: Callable[..., str]) -> Names:
    """A text (n,) of each row's numbers, made once for each distinct row."""
    row = held.groupby(list(held), sort=False).ngroup().to_numpy()
    rows = held.drop_duplicates().itertuples(index=False)
    return np.array([*(text(*values) for values in rows), ""], dtype=object)[row]


def _copied(kind: int, source: int, target: int) -> str:
    """``Memcpy HtoD (Pinned -> Device)``."""
    way = COPIES[kind] if 0 <= kind < len(COPIES) else ""
    places = f" ({_place(source)} -> {_place(target)})" if source >= 0 and target >= 0 else ""
    return f"Memcpy {way}".rstrip() + places


def _place(kind: int) -> str:
    return PLACES[kind] if 0 <= kind < len(PLACES) else "Unknown"


def _triple(x: int, y: int, z: int) -> str:
    return f"[{x}, {y}, {z}]" if min(x, y, z) >= 0 else ""


def _crossing(host: pd.DataFrame, asked: Bools) -> Bools:
    """Which of the asked spans (n,) begin in one span of their thread and end in another.

    Ends are put in the one order in which spans that nest are brackets. A span crosses another if
    what opens within it is not what closes within it, which sums of random numbers tell.
    """
    line, _ = coded(host["line"])
    rows = np.flatnonzero(np.isin(line, line[asked]))
    start, end = host["start"].to_numpy()[rows], host["end"].to_numpy()[rows]
    long = end - start
    count = len(rows)
    turn = np.lexsort(
        (
            np.concatenate([-np.arange(count), np.arange(count)]),
            np.concatenate([-long, long]),
            # what has no length closes after it opens, all else before others open
            np.concatenate([np.ones(count), np.where(long == 0, 2, 0)]),
            np.concatenate([start, end]),
            np.tile(line[rows], 2),
        )
    )
    place = np.empty(2 * count, dtype=np.int64)
    place[turn] = np.arange(2 * count)
    tags = np.random.default_rng(0).integers(1, 2**62, count, dtype=np.int64)
    total = np.cumsum(np.concatenate([tags, -tags])[turn])
    opens, closes = place[:count], place[count:]
    crossing = np.zeros(len(host), dtype=bool)
    crossing[rows] = total[closes] + tags != total[opens]
    return crossing & asked


MOST_LANES = 64
"""Rows that ranges of one thread may take beside the thread's own."""


def _to_lanes(host: pd.DataFrame, names: dict[str, str]) -> int:
    """Move started ranges that cross calls or ranges of their thread to rows of their own, in place.

    Returns:
        How many there are. ``names`` gets those of the new rows.
    """
    started = host.pop("started").to_numpy(dtype=bool)
    crossing = _crossing(host, started) if started.any() else started
    rows = host[crossing].sort_values("start", kind="stable")
    line = host["line"].to_numpy(dtype=object, copy=True)
    for thread, ranges in rows.groupby("line"):
        free: list[tuple[int, int]] = []  # when each lane is free again
        for row, start, end in zip(ranges.index, ranges["start"], ranges["end"], strict=True):
            lane = len(free) % MOST_LANES
            if free and (free[0][0] <= start or len(free) == MOST_LANES):
                lane = heapq.heappop(free)[1]
            heapq.heappush(free, (end, lane))
            line[row] = f"{thread} ranges {lane + 1}"
            names[line[row]] = f"{names.get(str(thread), str(thread))}: started ranges {lane + 1}"
    host["line"] = line
    return len(rows)
