"""An SQLite export of Nsight Systems, as the tables that a trace of torch.profiler becomes.

Exports differ by version and by what was traced, so each table and column is asked for: of 2021
and of today, with names as text or as numbers of ``StringIds``. Nesting, parts, iterations and
launches are then found as in any trace.

Times are nanoseconds. A ``globalTid`` holds its process (bits 24 to 47, the machine above them)
and its thread (bits 0 to 23). Each process numbers its launches by itself.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
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
from dlrm_workbook.ground.tables import rows_of
from dlrm_workbook.recordings.foreign import Named, PartNames
from dlrm_workbook.recordings.nesting import lanes, stretch_at, union
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

RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


def _named(kind: str) -> dict[str, str]:
    return {r["name"]: r["meaning"] for r in rows_of(__file__, "nsight.csv") if r["kind"] == kind}


WORK = _named("work")
"""Tables of what ran on GPUs."""

NO_CALLS = ("CUDA_GRAPH_EVENTS", "CUDA_GRAPH_NODE_EVENTS", NVTX, "PROFILER_OVERHEAD")
"""Tables with threads and names that hold no calls of a library."""

RANGES, STARTED = (59, 60, 70, 71), (60, 71)
"""``eventType`` of NVTX ranges, and of those that are started and ended, not pushed and popped."""

MIGRATED = "unified memory"
COPIES, PLACES = tuple(_named("copy").values()), tuple(_named("memory").values())
"""``copyKind`` and kinds of memory by number, as torch.profiler names them."""

OVERHEADS = _named("overhead")
"""What the profiler did (patterns), as torch.profiler names it."""

GPU_PROPERTIES = _named("GPU property")
"""Names of torch.profiler to columns of ``TARGET_INFO_GPU``."""

NOT_MEASURED = {
    "allocated_bytes": "Nsight Systems does not record what torch allocates",
    "flops": "an export of Nsight Systems has no counts of operations",
    **dict.fromkeys(
        ("gpu_time_ms", "launches", "copy_bytes"),
        "the export has no work of a GPU; `nsys profile --trace=cuda,nvtx` records it",
    ),
}

WAITING_CALLS = re.compile(
    r"p?poll|p?select|epoll_\w*wait|wait(?:pid|id|3|4)?|pause|(?:\w*nano|u)?sleep|futex|accept4?"
    r"|recv\w*|sem_\w*wait|sig\w*wait\w*|(?:mtx|pthread)_\w*(?:(?<!un)lock|wait|join)"
)
"""Matches names of calls of the system that wait for something, and compute nothing meanwhile."""

_EXCHANGE = Named("communication")

_NO_RANGE: dict[str, Any] = {"shapes": "", "sequence": -1, "started": False}
"""Columns that tell something of ranges alone."""

_VERSION = re.compile(r"(?:_ptsz|_ptds)?_v\d{4,}$")
"""``cudaLaunchKernel_v7000`` is ``cudaLaunchKernel`` elsewhere."""

_EMITTED = re.compile(r", (?:stashed )?(?:seq|op_id|sizes|input_op_ids) ?= ?")
_SEQUENCE = re.compile(r"seq ?= ?(\d{1,18})")
_SIZES = re.compile(r"sizes ?= ?(\[[\d, \[\]]*\])")
"""What ``torch.autograd.profiler.emit_nvtx`` adds to the name of an operator."""

_OPERATOR = re.compile(
    r"(?:aten|autograd|torch|c10d|fbgemm|torchrec)::|record_param_comms$|\w+Backward\d*$"
)
_LOST = re.compile(r"(?i)\b(dropped|lost|incomplete|not all|overflow|exceed)")


def read_nsight(path: Path, parts: Mapping[str, str] | None = None) -> dict[int, Profile]:
    """Rank to its profile, of an SQLite export of Nsight Systems, or of a report where ``nsys`` is
    installed; ``parts`` has patterns of names to parts, see ``profiling.parts``. An InputError says
    that the file is damaged, locked, no export, or holds nothing of a program.

    Processes are ranks where each has GPUs of its own, or all exchange data by collectives; all
    others of an export are one profile.
    """
    with _exported(path) as place, _database(place, path) as database, without_collection():
        ranks = _Export(database, path).ranks()
    meta = {"engine": "nsight", "not_measured": NOT_MEASURED}
    profiles = {rank: profile_of(events, parts, meta) for rank, events in ranks.items()}
    for profile in profiles.values():
        profile.metrics["source"] = "Nsight Systems"
    return profiles


@contextmanager
def _exported(path: Path) -> Iterator[Path]:
    """The database of a file: itself, or what ``nsys`` makes of a report."""
    if path.suffix not in REPORTS:
        yield path
        return
    nsys = shutil.which("nsys")
    if nsys is None:
        raise InputError(
            f"{path} is a report of Nsight Systems, and nsys is not installed here: export it "
            f"where it is with `nsys export --type sqlite {path.name}` and give the .sqlite file"
        )
    with tempfile.TemporaryDirectory(prefix="dlrm-nsys-") as folder:
        target = Path(folder) / "export.sqlite"
        command = [nsys, "export", "--type", "sqlite", "--output", str(target)]
        command.append(str(path.absolute()))
        done = run_child(command, stage="nsys export", timeout_s=EXPORT_TIMEOUT_S)
        if done.timed_out or done.exit_code or not target.exists():
            why = "took too long" if done.timed_out else f"says: {done.last_words()}"
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
            database.execute("BEGIN")  # all reading is of one state
            yield database
    except sqlite3.Error as error:
        raise InputError(f"{path} cannot be read: {visible(str(error))}") from None


class _Export:
    """One export: which tables and columns it has, and what they hold. Raises InputError: it is no
    export of Nsight Systems, or a table lacks its times."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self.database, self.path = database, path
        listed = database.execute(
            "SELECT t.name, c.name FROM sqlite_master AS t, pragma_table_info(t.name) AS c "
            "WHERE t.type = 'table' AND t.sql NOT LIKE 'CREATE VIRTUAL%'"
        )
        self.columns: dict[str, list[str]] = {}
        for table, column in listed:
            self.columns.setdefault(table, []).append(column)
        known = (RUNTIME, NVTX, *WORK)
        if not any(name in self.columns for name in (*known, "TARGET_INFO_SYSTEM_ENV")):
            raise InputError(
                f"{path} is an SQLite database, but no export of Nsight Systems: it has none of "
                f"the tables {', '.join(known)}"
            )
        for name in known:
            for column in ("start", "end"):
                if name in self.columns and column not in self.columns[name]:
                    raise InputError(f"{path}: its table {name} lacks the column '{column}'")
        self.cautions = Cautions()
        self.numbers: dict[int, int] = {}
        """Process to a small number."""
        of_process = {RUNTIME: "globalTid"} | dict.fromkeys(WORK, "globalPid")
        self.tells_processes = all(
            self._always_has(table, column)
            for table, column in of_process.items()
            if table in self.columns
        )
        self.strings: dict[Any, str] = {}
        """Number to text, of ``StringIds``."""
        if self.has("StringIds", "id", "value"):
            text = f"substr(value, 1, {LONGEST_TEXT})"
            rows = database.execute(f"SELECT id, {text} FROM StringIds")
            self.strings = {number: str(value) for number, value in rows}
        threads = self.read("ThreadNames", ["globalTid", "nameId"])
        self.names = dict(
            zip(_threads(threads["globalTid"]), self.named(threads["nameId"]), strict=True)
        )
        """Line to the name of the thread."""

    # ---- tables to columns ----------------------------------------------------------

    def has(self, table: str, *columns: str) -> bool:
        return set(columns) <= set(self.columns.get(table, ())) and table in self.columns

    def _always_has(self, table: str, column: str) -> bool:
        lacking = f"SELECT 1 FROM {_quoted(table)} WHERE {_quoted(column)} IS NULL LIMIT 1"
        return self.has(table, column) and self.database.execute(lacking).fetchone() is None

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """Columns of whole numbers; ``NO_TIME`` where there is none, or no such column."""
        if not any(self.has(table, column) for column in columns):
            return pd.DataFrame({column: np.empty(0, dtype=np.int64) for column in columns})
        terms = (
            f"CASE typeof({name}) WHEN 'integer' THEN {name} WHEN 'real' THEN "
            f"CAST({name} AS INTEGER) ELSE ?1 END"
            if self.has(table, column)
            else "?1"
            for column, name in zip(columns, map(_quoted, columns), strict=True)
        )
        source = f"FROM {_quoted(table)} NOT INDEXED"  # so that all are read in one order
        (count,) = self.database.execute(f"SELECT count(*) {source}").fetchone()
        found, filled = np.empty((count, len(columns)), dtype=np.int64, order="F"), 0
        rows = self.database.execute(f"SELECT {', '.join(terms)} {source}", (NO_TIME,))
        while some := rows.fetchmany(CHUNK):
            found[filled : filled + len(some)] = some
            filled += len(some)
        return pd.DataFrame(found, columns=list(columns), copy=False)

    def text(self, number: int) -> str:
        return visible(self.strings.get(number, "")) or "unnamed"

    def named(self, numbers: pd.Series) -> Names:
        """The text (n,) of each number."""
        return _filled(numbers.to_frame(), self.text)

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
        of_process = np.array(numbered, dtype=np.int64)[place] if self.tells_processes else 0
        known = number.between(1, 2**32 - 1)
        return np.where(known, (of_process << 32) | number.where(known, 0), -1)

    # ---- CPU threads ----------------------------------------------------------------

    def host(self) -> pd.DataFrame:
        """Calls, ranges and samples of threads, as ``Events.host``, with ``process``."""
        calls = filter(self._holds_calls, self.columns)
        host = _joined([*map(self.calls, calls), self.ranges()])
        host = host[~np.isin(np.arange(len(host)), _within_cuda(host))].reset_index(drop=True)
        is_open = host["end"].eq(NO_TIME) & host["kind"].isin(["annotation", "operator"])
        is_open &= _is_time(host["start"])
        if is_open.any():
            times = pd.concat([host["start"], host["end"]])
            host.loc[is_open, "end"] = times[_is_time(times)].max()
        self.cautions.add(
            int(is_open.sum()),
            "NVTX range{s} {was} still open when the recording ended: {it} {is} taken to end with "
            "the last call or range",
        )
        if self.has("COMPOSITE_EVENTS", "id", "start", "globalTid"):
            host = _joined([host, self.samples(host)])
        host["line"] = _threads(host["tid"])
        host["process"] = host.pop("tid").to_numpy() >> 24
        for column in ("external", "forward_thread", "python_id", "python_parent", "collective"):
            host[column] = np.int8(-1)
        host["types"] = host["values"] = ""
        return host

    def _holds_calls(self, table: str) -> bool:
        named = self.has(table, "nameId") or self.has(table, "textId")
        timed = self.has(table, "start", "end", "globalTid") and table not in NO_CALLS
        return table == RUNTIME or (named and timed)

    def calls(self, table: str) -> pd.DataFrame:
        """Calls of CUDA (``runtime``), or of another library or the system (``function``)."""
        name = "nameId" if self.has(table, "nameId") else "textId"
        calls = self.read(table, ["start", "end", "globalTid", "correlationId", name])
        calls.columns = pd.Index(["start", "end", "tid", "correlation", "name"])
        short = _filled(calls[["name"]], lambda number: _VERSION.sub("", self.text(number)))
        is_cuda, process = table == RUNTIME, calls["tid"].to_numpy() >> 24
        number = self.launches(process, calls["correlation"]) if is_cuda else -1
        kind = "runtime" if is_cuda else "function"
        calls = calls.assign(name=short, correlation=number, kind=kind, **_NO_RANGE)
        again = calls[calls["correlation"].ge(0) & calls["correlation"].duplicated(keep=False)]
        # a call of the runtime may share its number with that of the driver in it
        inner = again.sort_values("start").drop_duplicates("correlation", keep="last")
        both = again.reset_index().merge(inner, on=["correlation", "tid"], suffixes=("", "_in"))
        outer = (both["start"] < both["start_in"]) & (both["end"] >= both["end_in"])
        calls.loc[both["index"][outer], "correlation"] = -1
        return calls

    def ranges(self) -> pd.DataFrame:
        """NVTX ranges as annotations; what ``emit_nvtx`` writes as operators."""
        held = self.read(NVTX, ["start", "end", "globalTid", "eventType", "textId"])
        texts: Iterator[str | None] = map(self.strings.get, held.pop("textId").tolist())
        if self.has(NVTX, "text"):
            rows = self.database.execute(
                f"SELECT substr(text, 1, {LONGEST_TEXT}) FROM {NVTX} NOT INDEXED"
            )
            texts = (text or named for (text,), named in zip(rows, texts, strict=True))
        # ranges of a program may all differ, by the number of their operator
        emitted = lru_cache(maxsize=CHUNK)(_emitted)
        kinds: dict[tuple[str, str, str], int] = {}
        codes = ((kinds.setdefault(what, len(kinds)), n) for what, n in map(emitted, texts))
        code = np.fromiter(codes, dtype=np.dtype([("what", np.int64), ("sequence", np.int64)]))
        whats = pd.DataFrame(list(kinds), columns=["name", "kind", "shapes"])
        held.columns = pd.Index(["start", "end", "tid", "started"])
        for name in whats:
            held[name] = whats[name].to_numpy(dtype=object)[code["what"]]
        held["sequence"] = code["sequence"]
        # where an export does not say the type, a mark is what has no end
        typed = self.has(NVTX, "eventType")
        ranges = held["started"].isin(RANGES) if typed else held["end"].ne(NO_TIME)
        held["started"] = held["started"].isin(STARTED)
        held["correlation"] = -1
        return held if ranges.all() else held[ranges]

    def samples(self, host: pd.DataFrame) -> pd.DataFrame:
        """Functions that CPU samples saw outside of calls, as spans that cut no call and no range.

        A sample stands for half the usual time between two of them of any thread on either side,
        but not beyond its neighbours, nor where a call or range begins or ends.
        """
        host = host[_is_time(host["start"])]
        found = self.read("COMPOSITE_EVENTS", ["id", "start", "globalTid"])
        stacks = self.read("SAMPLING_CALLCHAINS", ["id", "symbol", "module", "stackDepth"])
        inner = stacks[stacks["stackDepth"].eq(0)].drop_duplicates("id").drop(columns="stackDepth")
        found = found.merge(inner, on="id").sort_values(["globalTid", "start"])
        found = found[_is_time(found["start"])]
        of_thread = dict(iter(host.groupby("tid")))
        # a thread that is seen more seldom slept in between
        usual = found.groupby("globalTid")["start"].diff().median()
        half, spans = 0 if np.isnan(usual) else int(usual) // 2, []
        for tid, group in found.groupby("globalTid"):
            at = group["start"].to_numpy()
            known = of_thread.get(tid, host.iloc[:0])
            middles = (at[1:] + at[:-1]) // 2
            edges = np.unique(np.append(known[["start", "end"]].to_numpy(), middles))
            place = np.searchsorted(edges, at, side="right")
            first = np.maximum(at - half, np.append(NO_TIME, edges)[place])
            last = np.minimum(at + half, np.append(edges, np.iinfo(np.int64).max)[place])
            calls = known[known["kind"].isin(["runtime", "function"])]
            busy = union(calls["start"].to_numpy(), calls["end"].to_numpy())
            outside = stretch_at(*busy, at) < 0
            spans.append(group.assign(start=first, end=last, tid=tid)[outside])
        if not spans:
            return host.iloc[:0]
        self.cautions.said.append(
            f"CPU functions are of samples, {usual / 1e6:.3g} ms apart on a thread: their times "
            "are estimates, and between samples nothing is known."
        )
        functions = pd.concat(spans, ignore_index=True)
        name = _filled(functions[["symbol", "module"]], self._function)
        functions = functions[["start", "end", "tid"]]
        return functions.assign(name=name, kind="function", correlation=-1, **_NO_RANGE)

    def _function(self, symbol: int, module: int) -> str:
        """A function's name; of an address that nothing names, its library."""
        name, library = self.text(symbol), self.text(module).rpartition("/")[2]
        return f"code of {library}" if name.startswith(("0x", "unnamed")) else name

    # ---- GPUs -----------------------------------------------------------------------

    def device(self) -> pd.DataFrame:
        """Kernels, copies, memory sets and whole graphs, as ``Events.device``, with ``process``."""
        name = next((c for c in ("demangledName", "shortName") if self.has(KERNELS, c)), "nameId")
        shape = [f"{what}{axis}" for what in ("grid", "block") for axis in "XYZ"]
        columns = ["start", "end", "globalPid", "deviceId", "streamId", "correlationId", name]
        columns += ["registersPerThread", "staticSharedMemory", "dynamicSharedMemory", *shape]
        columns += ["bytes", "copyKind", "srcKind", "dstKind", "memKind", "graphId"]
        texts: dict[str, tuple[list[str], Callable[..., str]]] = {
            "kernel": ([name], self.text),
            "memcpy": (["copyKind", "srcKind", "dstKind"], _copied),
            "memset": (["memKind"], lambda kind: f"Memset ({_place(kind)})"),
            "graph": (["graphId"], "CUDA graph {}".format),
        }
        frames: list[pd.DataFrame] = []
        for table, category in WORK.items():
            held = self.read(table, columns)
            told, text = texts[category]
            grid, block = (_filled(held[axes], _triple) for axes in (shape[:3], shape[3:]))
            process = held["globalPid"].to_numpy() >> 24
            shared = held["staticSharedMemory"].clip(lower=0) + held["dynamicSharedMemory"]
            frame = pd.DataFrame(
                {
                    "start": held["start"],
                    "end": held["end"],
                    "name": _filled(held[told], text),
                    "kind": "copy" if category.startswith("mem") else "kernel",
                    "category": "kernel" if category == "graph" else category,
                    "process": process,
                    "correlation": self.launches(process, held["correlationId"]),
                    "gpu": held["deviceId"].clip(lower=-1),
                    "stream": held["streamId"].clip(lower=-1),
                    "bytes": held["bytes"].clip(lower=-1),
                    "grid": grid,
                    "block": block,
                    "registers": held["registersPerThread"].clip(lower=-1),
                    "shared_memory": shared.where(held["dynamicSharedMemory"].ge(0), -1),
                    "graph": held["graphId"].clip(lower=-1),
                }
            )
            if category == "graph":  # traced as a whole, or node by node, which says more
                launched = pd.concat(frames)["correlation"].to_numpy()
                nodes = frame["correlation"].ge(0) & frame["correlation"].isin(launched)
                frame = frame[~nodes]
                self.cautions.add(
                    len(frame),
                    "launch{es} of CUDA graphs {was} recorded as a whole, and each counts as one "
                    "kernel: `nsys profile --cuda-graph-trace=node` records their kernels",
                )
            frames.append(frame)
        device = _joined(frames)
        device[["external", "collective"]] = np.int8(-1)
        device[["blocks_per_sm", "warps_per_sm", "occupancy", "bandwidth"]] = np.float32(np.nan)
        self._number_gpus(device)
        return device

    def _number_gpus(self, device: pd.DataFrame) -> None:
        """Number GPUs as the machine does, not as each process sees them (``ordinal``), where that
        is said."""
        device["ordinal"] = device["gpu"]
        columns = ["pid", "cudaId", "gpuId"]
        known = self.read("TARGET_INFO_CUDA_DEVICE", columns).drop_duplicates(columns[:2])
        known = known[known["gpuId"].ge(0)]
        if len(known):
            pid = pd.Series(device["process"].to_numpy() & 0xFFFFFF, name="pid")
            seen = pd.MultiIndex.from_arrays([pid, device["gpu"]])
            gpu = known.set_index(columns[:2])["gpuId"].reindex(seen).to_numpy(dtype=float)
            device["gpu"] = np.where(np.isfinite(gpu), gpu, device["gpu"]).astype(np.int64)

    def marks(self) -> pd.DataFrame:
        """What the profiler did on threads, as ``Events.marks``."""
        own = self.read("PROFILER_OVERHEAD", ["start", "end", "globalTid", "nameId"])
        own = own[_is_time(own["start"]) & _is_time(own["end"])].reset_index(drop=True)
        name = pd.Series(self.named(own["nameId"]), dtype=object)
        for pattern, same in OVERHEADS.items():
            name = name.mask(name.str.contains(pattern).astype(bool), same)
        line = _threads(own["globalTid"])
        marks = own[["start"]].assign(duration=own["end"] - own["start"])
        return marks.assign(line=line, name=name, kind="overhead", correlation=-1)

    # ---- all of it ------------------------------------------------------------------

    def ranks(self) -> dict[int, Events]:
        """The events of each rank, by rank; of one, where processes are no ranks. An InputError
        says that no kernel, call or range is in the export."""
        memory = ["start", "line", "bytes", "total", "device", "reserved"]
        frames = {"host": self.host(), "device": self.device()}
        if not self.tells_processes:
            frames["host"]["process"] = frames["device"]["process"] = 0
        for name, frame in frames.items():
            usable = _is_time(frame["start"]) & (_is_time(frame["end"]) | frame["end"].eq(NO_TIME))
            said = "event{s} {has} a time that is no number, and {was} left out"
            self.cautions.add(int((~usable).sum()), said)
            frame = frame if usable.all() else frame[usable].reset_index(drop=True)
            ends = frame["end"].ne(NO_TIME)
            frame["duration"] = (frame["end"].where(ends, 0) - frame["start"]).where(ends, -1)
            frames[name] = frame
        frames["memory"] = pd.DataFrame({name: [] for name in memory}).astype({"start": "int64"})
        frames["marks"] = self.marks()
        if all(frame.empty for frame in (frames["host"], frames["device"])):
            raise InputError(
                f"{self.path} is an export of Nsight Systems, but holds no kernel, CUDA call or "
                "NVTX range: `nsys profile --trace=cuda,nvtx` records them"
            )
        self._leave_out_strays(frames)
        self.cautions.add(
            _to_lanes(frames["host"], self.names),
            "NVTX range{s} begin{v} in one call or range of {its} thread and end{v} in another: "
            "{it} {is} shown beside the thread",
        )
        zero = from_first_event(frames, self.cautions)
        told = [
            visible(" ".join(str(row["text"]).split()))[:300]
            for row in self.rows("DIAGNOSTIC_EVENT", ["severity", "text"])
            if row["severity"] in (3, 4) or _LOST.search(str(row["text"])[:LONGEST_TEXT])
        ]
        self.cautions.said += [f"Nsight Systems says: {one}" for one in dict.fromkeys(told)][:5]
        ranks = self._processes_of_ranks(frames["device"])
        return {rank: self._events(frames, rank, zero, process) for rank, process in ranks.items()}

    def _leave_out_strays(self, frames: dict[str, pd.DataFrame]) -> None:
        """Leave out events that lie far from all others, unless the recording was that long.

        A program may wait for minutes between its start and its work, so distance alone says
        nothing where the export tells how long was recorded.
        """
        timed = [frames[name] for name in ("host", "device", "memory")]
        start = np.concatenate([frame["start"].to_numpy() for frame in timed])
        told = self.read("ANALYSIS_DETAILS", ["duration"])["duration"].max()
        if not int(start.max()) - int(start.min()) <= 1.1 * told:
            leave_out_strays(timed, self.cautions)

    def _processes_of_ranks(self, device: pd.DataFrame) -> dict[int, int | None]:
        """Rank to its process; rank 0 to None where processes are no ranks."""
        used = device[["process", "ordinal", "gpu"]].drop_duplicates(["process", "gpu"])
        used = used.sort_values(["ordinal", "gpu", "process"])
        processes = used["process"].drop_duplicates().tolist()
        says = PartNames().of
        kernels = matching(device["name"], lambda name: says("kernel", name) == _EXCHANGE)
        exchanging = set(device.loc[kernels, "process"])
        shared = used["gpu"].duplicated().any() and exchanging != set(processes)
        if not self.tells_processes or len(processes) < 2 or shared:
            return {0: None}
        of_mpi = self.read("MPI_RANKS", ["globalTid", "rank"])
        of_process = of_mpi["rank"].groupby(of_mpi["globalTid"].to_numpy() >> 24).first()
        ranks = of_process.reindex(processes).fillna(-1).astype(int).tolist()
        if min(ranks) < 0 or len(set(ranks)) < len(ranks):
            ranks = list(range(len(processes)))
            self.cautions.said.append(
                f"{len(processes)} processes used GPUs: they are taken as ranks, numbered by their "
                "GPUs, since the export does not say their ranks."
            )
        return dict(sorted(zip(ranks, processes, strict=True)))

    def _events(
        self, frames: dict[str, pd.DataFrame], rank: int, zero: int, process: int | None
    ) -> Events:
        host, device = frames["host"], frames["device"]
        if process is not None:
            host, device = (
                frame[frame["process"].eq(process)].reset_index(drop=True)
                for frame in (host, device)
            )
        gpu = device["gpu"].to_numpy()
        if device["process"].nunique() > 1:  # whose streams have the same numbers
            pid = device["process"].to_numpy() & 0xFFFFFF
            gpu = _filled(pd.DataFrame({"gpu": gpu, "pid": pid}), "{} of process {}".format)
        streams = pd.DataFrame({"gpu": gpu, "stream": device["stream"]})
        device["line"] = _filled(streams, "{}/{}".format)
        began = self.rows("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])
        epoch = began[0]["utcEpochNs"] if began else 0
        held = {n: c for n, c in GPU_PROPERTIES.items() if self.has("TARGET_INFO_GPU", c)}
        gpus = []
        for row in self.rows("TARGET_INFO_GPU", list(held.values())):
            gpus.append({name: row[column] for name, column in held.items()})
            warps = gpus[-1].pop("maxWarpsPerSm", None)
            gpus[-1]["maxThreadsPerMultiprocessor"] = 32 * warps if isinstance(warps, int) else None
        events = Events(
            host=host,
            device=device,
            memory=frames["memory"],
            names=self.names,
            rank=rank,
            marks=frames["marks"],
            flows=pd.DataFrame(columns=["forward", "forward_line", "backward", "backward_line"]),
            collectives=pd.DataFrame(columns=list(COLLECTIVE)),
            header={"deviceProperties": gpus},
            clock_ns=zero + (epoch if isinstance(epoch, int) and abs(epoch) < 2**62 else 0),
        )
        cautions = Cautions()
        cautions.said += self.cautions.said
        look_at_device(events, cautions)
        events.cautions = cautions.said
        return events


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def _within_cuda(host: pd.DataFrame) -> Ints:
    """Rows of calls of the system within a call of CUDA on their thread: they are its work."""
    inside = [np.empty(0, dtype=np.int64)]
    for row in host.groupby("tid").indices.values():
        begin, end, kind = (host[name].to_numpy()[row] for name in ("start", "end", "kind"))
        first, last = union(begin[kind == "runtime"], end[kind == "runtime"])
        at = stretch_at(first, last, begin)
        within = (at >= 0) & (kind == "function")
        within[within] = end[within] <= last[at[within]]
        inside.append(row[within])
    return np.concatenate(inside)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_time(column: pd.Series) -> pd.Series:
    return column.between(-(2**62), 2**62)


def _filled(held: pd.DataFrame, text: Callable[..., str]) -> Names:
    """A text (n,) of each row's values, made once for each distinct row."""
    row = held.groupby(list(held), sort=False).ngroup().to_numpy()
    rows = held.drop_duplicates().itertuples(index=False)
    return np.array([*(text(*values) for values in rows), ""], dtype=object)[row]


def _threads(tid: pd.Series) -> Names:
    """Process and thread (n,) of each ``globalTid``, such as ``71/72``."""
    return _filled(tid.to_frame(), lambda one: f"{one >> 24 & 0xFFFFFF}/{one & 0xFFFFFF}")


def _emitted(text: str | None) -> tuple[tuple[str, str, str], int]:
    """(name, kind and shapes; sequence number) of an NVTX range.

    ``emit_nvtx`` writes ``aten::mm, seq = 5, op_id = 7, sizes = [[2, 3], [3, 4]]``.
    """
    text = visible(str(text or "unnamed"))
    added = _EMITTED.search(text)
    name, rest = (text[: added.start()], text[added.start() :]) if added else (text, "")
    sequence, sizes = _SEQUENCE.search(rest), _SIZES.search(rest)
    operator = bool(sequence or sizes or _OPERATOR.match(name) or (rest and "::" in name))
    kind = "operator" if operator and not name.startswith(SPAN_PREFIX) else "annotation"
    return (name, kind, sizes[1] if sizes else ""), int(sequence[1]) if sequence else -1


def _copied(kind: int, source: int, target: int) -> str:
    """``Memcpy HtoD (Pinned -> Device)``."""
    way = COPIES[kind] if 0 <= kind < len(COPIES) else ""
    has_places = source >= 0 and target >= 0 and MIGRATED not in way
    places = f" ({_place(source)} -> {_place(target)})" if has_places else ""
    return f"Memcpy {way}".rstrip() + places


def _place(kind: int) -> str:
    return PLACES[kind] if 0 <= kind < len(PLACES) else "Unknown"


def _triple(x: int, y: int, z: int) -> str:
    return f"[{x}, {y}, {z}]" if min(x, y, z) >= 0 else ""


def _to_lanes(host: pd.DataFrame, names: dict[str, str]) -> int:
    """Move started ranges that cross calls or ranges of their thread beside it, in place. Returns
    how many there are; ``names`` gets the names of the new lines."""
    started = host.pop("started").to_numpy(dtype=bool)
    if not started.any():
        return 0
    crossing = _crossing(host, started, ~started)
    crossing |= _crossing(host, started & ~crossing, ~crossing)
    for line, ranges in host[crossing].groupby("line"):
        lane = lanes(ranges["start"].to_numpy(), ranges["end"].to_numpy())
        titles = [f"{line} ranges {number + 1}" for number in range(lane.max() + 1)]
        host.loc[ranges.index, "line"] = np.array(titles, dtype=object)[lane]
        names |= {title: f"ranges beside {names.get(str(line), line)}" for title in titles}
    return int(crossing.sum())


def _crossing(host: pd.DataFrame, asked: Bools, counted: Bools) -> Bools:
    """Which of the asked spans (n,) begin in one counted span of their thread and end in another.

    Begins and ends are put in the one order in which spans that nest are brackets. A span crosses
    others if not all that open within it close there, which sums of random numbers tell.
    """
    line, _ = coded(host["line"])
    rows = np.flatnonzero(np.isin(line, line[asked]))
    start, end = host["start"].to_numpy()[rows], host["end"].to_numpy()[rows]
    length, count = end - start, len(rows)
    # what has no length closes after it opens; else ends come before begins, the inner ones first
    kind = np.concatenate([np.ones(count), np.where(length == 0, 2, 0)])
    size, number = np.concatenate([-length, length]), np.arange(count)
    tie = np.concatenate([number, -number])
    turn = np.lexsort((tie, size, kind, np.concatenate([start, end]), np.tile(line[rows], 2)))
    tags = np.random.default_rng(0).integers(1, 2**62, count, dtype=np.int64) * counted[rows]
    total = np.empty(2 * count, dtype=np.int64)
    total[turn] = np.cumsum(np.concatenate([tags, -tags])[turn])
    crossing = np.zeros(len(host), dtype=bool)
    crossing[rows] = total[count:] + tags != total[:count]
    return crossing & asked
