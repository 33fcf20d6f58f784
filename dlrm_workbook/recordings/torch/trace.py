"""From a torch.profiler recording (or any of its chrome traces) to a :class:`Profile`.

Host spans (operators, ranges, Python frames, CUDA calls) become a call tree per
thread, with identical call paths merged. What ran on the GPU hangs below the CUDA call
with the same ``correlation``, so a kernel belongs to the part of the step that launched
it, whenever it ran.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.parts import ITERATION_SPAN
from dlrm_workbook.ground.arrays import Ints, Names
from dlrm_workbook.ground.tables import rows_of
from dlrm_workbook.recordings.foreign import ENGINE_PREFIX, PartNames
from dlrm_workbook.recordings.nesting import last_ends, nest, self_times, stretch_at
from dlrm_workbook.recordings.profile import (
    Profile,
    coded,
    coded_pairs,
    depths,
    inclusive_from_exclusive,
    matching,
    numbered_together,
)
from dlrm_workbook.recordings.torch import RECORDING_VERSION
from dlrm_workbook.recordings.torch.chrome_trace import STEP_PREFIX, Events, read_events
from dlrm_workbook.recordings.torch.details import ALLOCATIONS, allocated, join_details
from dlrm_workbook.recordings.torch.gaps import fill_gaps
from dlrm_workbook.recordings.torch.lines import missing_of_lines, node_times, read_lines
from dlrm_workbook.recordings.torch.parts import foreign_parts, has_own_parts, own_parts
from dlrm_workbook.recordings.torch.shape_work import shape_meaning, shape_metrics
from dlrm_workbook.recordings.torch.stacks import with_stacks
from dlrm_workbook.recordings.torch.steps import STEP_LABEL, find_steps, step_marks, unnumbered

FLOP_OPERATORS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""torch counts elementwise operators too, by the dense shape even of sparse tensors:
an update of a few thousand rows would pass for one of a whole table."""

CURVE_POINTS = 2000
"""Points kept of the memory curve of a device."""


def curves(memory: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Device to its peak and its curve of allocated bytes over time."""
    by_device = {}
    with_total = memory[memory["total"].ge(0)]
    for device, events in with_total.sort_values("start").groupby("device", observed=True):
        total = events["total"].to_numpy(dtype=np.int64)
        # A point of the curve is the largest of its stretch, so the peak stays.
        cut = np.linspace(0, len(total), min(CURVE_POINTS, len(total)) + 1).astype(int)[:-1]
        by_device[str(device)] = {
            "peak_bytes": int(total.max()),
            "time_ms": (events["start"].to_numpy()[cut] / 1e6).tolist(),
            "bytes": np.maximum.reduceat(total, cut).tolist(),
        }
    return by_device


def matrix_flops(
    host: pd.DataFrame, count: int, averages: list[dict[str, Any]] | None
) -> np.ndarray | None:
    """Operations of each context (count,), NaN where none are known; None without any.

    The ``averages``, rows of ``key_averages.json``, have the operations by name and shapes; a
    call's are the mean of those.
    """
    per_call = {
        (row["name"], row["shapes"]): row["flops"] / row["count"]
        for row in averages or []
        if row["flops"] and row["name"] in FLOP_OPERATORS
    }
    if not per_call:
        return None
    pairs = zip(host["name"], host["shapes"], strict=True)
    calls = np.array([per_call.get(pair, np.nan) for pair in pairs])
    # A context in which one call is unknown is unknown: NaN adds up to NaN.
    called = np.bincount(host["context"], minlength=count) > 0
    return np.where(called, np.bincount(host["context"], calls, count), np.nan)


NO_GPU = "the trace holds no GPU activity; `dlrm run profile -- COMMAND` records it"
NO_MEMORY = "memory was not recorded; torch.profiler's `profile_memory=True` records it"
NO_FLOPS = "a Chrome trace has no FLOP counts; recordings made by this workbook have them"

ANY = "*"
"""Stands for a size that differs from call to call."""

_NUMBER = re.compile(r"\d+")


def join_unsteady(names: pd.Series, shapes: pd.Series, iterations: int) -> pd.Series:
    """Shapes in which sizes that change between iterations are written ``*``.

    A shape seen at least once an iteration is steady and stays as it is. The others of an operator,
    where they have the same number of inputs and dimensions, are joined, unless fewer than two
    iterations were recorded. ``names`` are the operators (n,) of spans, ``shapes`` their input
    shapes (n,) as text, "" where unknown.
    """
    if iterations < 2:
        return shapes
    pair, pairs = coded_pairs(names, shapes)
    counts = np.bincount(pair, minlength=len(pairs))
    table = pd.DataFrame(pairs, columns=["name", "shapes"])
    rare = table[(counts < iterations) & table["shapes"].ne("").to_numpy()].copy()
    rare["form"] = [_NUMBER.sub("#", text) for text in rare["shapes"]]
    joined = table["shapes"].to_numpy(dtype=object).copy()
    for (_, model), group in rare.groupby(["name", "form"], sort=False):
        if len(group) < 2:
            continue
        sizes = np.array([_NUMBER.findall(text) for text in group["shapes"]])
        same = (sizes == sizes[0]).all(axis=0)
        filling = iter(np.where(same, sizes[0], ANY).tolist())
        text = "".join(next(filling) if piece == "#" else piece for piece in str(model))
        joined[group.index] = text
    return pd.Series(joined[pair], index=shapes.index)


_METRICS = rows_of(__file__, "metrics.csv")

TRACE_METRICS = {row["metric"]: (row["unit"], row["meaning"]) for row in _METRICS}

KERNEL_PROPERTIES = {row["metric"]: row["column"] for row in _METRICS if row["column"]}
"""HPCToolkit's name of a metric to the column of a trace's kernels that is summed in it."""

LAUNCHED_BEFORE = "launched before the trace"
"""The context above kernels and copies whose launch the trace does not hold."""

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PYTHON = re.compile(r"^(?P<file>.*?)\((?P<line>\d+)\): ")


def read_trace(path: str | Path, parts: Mapping[str, str] | None = None) -> Profile:
    """Read a chrome trace of torch.profiler (``.json`` or ``.json.gz``); ``parts`` has patterns of
    names to parts, see ``profiling.parts``. An InputError says that the file is missing, cut short,
    not JSON or no such trace."""
    return profile_of(read_events(Path(path)), parts)


def profile_of(
    events: Events, parts: Mapping[str, str] | None = None, meta: dict[str, Any] | None = None
) -> Profile:
    """The profile of a trace that has been read; ``meta`` says what its reader knows better."""
    return _Builder(events, PartNames(parts)).build(meta or {}, None)


def read_recording(folder: str | Path, parts: Mapping[str, str] | None = None) -> Profile:
    """Read what a recording's session left: trace, FLOPs, times and circumstances; ``parts`` has
    patterns of names to parts, for programs that are not ours. An InputError names the file and
    what is wrong with it."""
    folder = Path(folder)
    head = read_json(folder / "recording.json")
    version = head.get("format_version") if isinstance(head, dict) else None
    if version != RECORDING_VERSION:
        raise InputError(
            f"{folder / 'recording.json'} has format version {version}; this version reads "
            f"{RECORDING_VERSION}"
        )
    averages = read_json(folder / "key_averages.json")
    needed = {"name", "shapes", "count", "flops"}
    rows = averages.get("rows") if isinstance(averages, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and needed <= row.keys() for row in rows
    ):
        raise InputError(
            f"{folder / 'key_averages.json'} needs a list 'rows', each with {sorted(needed)}"
        )
    meta = {key: value for key, value in head.items() if key != "format_version"}
    if (tried := folder / "trials.json").is_file():
        meta["trials"] = read_json(tried)
        if not isinstance(meta["trials"], dict):
            raise InputError(f"{tried} needs names with values")
    events = _plain(read_events(folder / "trace.json.gz"))
    stacks, details = folder / "python.json", folder / "trace_details.json.gz"
    if stacks.is_file():
        events.host = with_stacks(events.host, stacks)
    if details.is_file():
        join_details(events, _plain(read_events(details)))
    if (sampled := read_lines(folder)) is not None:
        meta["lines"] = sampled
    counted = (sampled or {}).get("counted") or {}
    makers = [(file, function) for file, _, function in counted.get("batch", [])]
    return _Builder(events, PartNames(parts, makers)).build(meta, rows)


def _plain(events: Events) -> Events:
    """The events with texts in the place of categories, to be joined with others."""
    for table in (events.host, events.memory):
        for name in table.columns[table.dtypes.eq("category")]:
            table[name] = table[name].astype(object)
    return events


class _Builder:
    """Holds the tables while they grow; one per trace."""

    def __init__(self, events: Events, names: PartNames) -> None:
        self.events = events
        self.host, self.device, self.memory = events.host, events.device, events.memory
        self.part_names = names
        self.threads: list[dict[str, Any]] = []
        self.contexts = pd.DataFrame()
        """parent, kind, name, shapes, component, phase, profile (the thread it was entered on)."""
        self.inferred: list[str] = []
        """Sentences about parts that no name tells."""

    def thread(self, kind: str, name: str, number: str) -> int:
        """Add a row to ``threads``; ``number`` as the trace has it, which may be a word."""
        profile = len(self.threads)
        thread = int(number) if _INTEGER.fullmatch(number) else profile
        row = {"profile": profile, "kind": kind, "name": name}
        self.threads.append(row | {"rank": self.events.rank, "thread": thread})
        return profile

    def build(self, meta: dict[str, Any], averages: list[dict[str, Any]] | None) -> Profile:
        self.nest_host()
        self.find_launchers()
        self.steps = find_steps(self.host, self.device, self.part_names)
        self.iterations = self.steps.spans
        self.place_host()
        self.place_device()
        contexts = self.context_table()
        parent = contexts["parent"].to_numpy()
        count = len(contexts)
        self_ns = self_times(*(self.host[name].to_numpy() for name in ("start", "end", "parent")))
        where = self.host["context"].to_numpy()
        columns = {
            "cpu_time_ms": np.bincount(where, self_ns / 1e6, count),
            "calls": np.bincount(where, minlength=count).astype(float),
        }
        if len(self.device):
            device = self.device
            place = device["context"].to_numpy()
            for name, amounts in (
                ("gpu_time_ms", (device["end"] - device["start"]) / 1e6),
                ("launches", device["kind"] == "kernel"),
                ("copy_bytes", device["bytes"].clip(lower=0)),
            ):
                columns[name] = np.bincount(place, amounts.to_numpy(dtype=float), count)
            copies = device["kind"].eq("copy")
            if copies.any() and device.loc[copies, "bytes"].lt(0).all():
                del columns["copy_bytes"]
            columns["calls"] += np.bincount(place, minlength=count)
            columns |= self.kernel_properties(count)
        if len(self.device) or not has_own_parts(self.host):
            # on a CPU the work of our own model follows from its parameters
            columns |= shape_metrics(self.host, count)
        if "allocated_bytes" not in self.host:  # else of iterations of their own, see join_details
            memory = pd.DataFrame(allocated(self.host, self.memory), copy=False)
            self.host = pd.concat([self.host, memory], axis=1, copy=False)
        for name in ALLOCATIONS:
            if self.host[name].any():
                columns[name] = np.bincount(where, self.host[name].fillna(0.0), count)
        values: list[pd.DataFrame] = []
        for metric, column in columns.items():
            values.append(self.rows(metric, "exclusive", column, column != 0))
            if metric != "calls":  # calls of a caller and its callees do not add up to anything
                total = inclusive_from_exclusive(parent, column)
                values.append(self.rows(metric, "inclusive", total, total != 0))
        operations = matrix_flops(self.host, count, averages)
        if operations is not None:
            values.append(self.rows("flops", "exclusive", operations, ~np.isnan(operations)))
        names = [*columns, *(["flops"] if operations is not None else [])]
        described = {name: TRACE_METRICS.get(name) or shape_meaning(name) for name in names}
        metrics = pd.DataFrame([(name, *described[name], "torch.profiler") for name in names])
        return Profile.build(
            contexts=contexts,
            metrics=metrics.set_axis(["metric", "unit", "meaning", "source"], axis=1),
            values=pd.concat(values, ignore_index=True),
            threads=self.threads,
            trace=self.trace_table(),
            iterations=self.iteration_table(),
            meta=self.describe(meta, names),
        )

    # ---- spans to contexts --------------------------------------------------------

    def nest_host(self) -> None:
        """Nest the spans of each thread; sorts ``host`` so that parents come first."""
        # The thread with the iterations first, then by activity: row 0 is the main thread.
        line, lines = coded(self.host["line"])
        sizes = np.bincount(line, minlength=len(lines))
        # what only polls or was sampled is no main thread; without operators what launches is one
        kind = self.host["kind"]
        counts = kind.ne("function") if kind.eq("operator").any() else kind.eq("runtime")
        steps = np.bincount(line, counts, len(lines))
        marks = np.bincount(line, step_marks(self.host), len(lines))
        helps = matching(self.host["name"], lambda name: name.startswith(ENGINE_PREFIX))
        helps = np.bincount(line, helps, len(lines)) > sizes / 100
        # without marks, autograd's thread comes last, where another thread works too
        helps &= not marks.any() and sizes[~helps].sum() > sizes.sum() / 10
        order = np.lexsort((np.array(lines, dtype=object), -sizes, -steps, helps, -marks))
        profile_of = np.empty_like(order)
        for place in order:
            number = lines[place].rpartition("/")[2]
            name = self.events.names.get(lines[place], f"thread {number}")
            profile_of[place] = self.thread("cpu_thread", name, number)
        # of all threads at once: a trace may have thousands
        row = np.argsort(profile_of[line], kind="stable")
        soft = self.host["kind"].eq("python").to_numpy()[row]
        start, end = (self.host[name].to_numpy()[row] for name in ("start", "end"))
        parent, turn = np.empty_like(row), np.empty_like(row)
        for last, size in zip(np.cumsum(sizes[order]), sizes[order], strict=True):
            part = slice(last - size, last)
            start[part], end[part], over, within = nest(start[part], end[part], soft[part])
            parent[part] = np.where(over >= 0, over + last - size, -1)
            turn[part] = within + last - size
        place_of = np.empty_like(turn)
        place_of[turn] = np.arange(len(turn))
        rows = row[turn]
        columns = {name: column.array.take(rows) for name, column in self.host.items()}
        columns |= {"start": start[turn], "end": end[turn], "profile": profile_of[line[rows]]}
        columns["parent"] = np.where(parent >= 0, place_of[parent], -1)[turn]
        self.host = self.events.host = pd.DataFrame(columns, copy=False)

    def place_host(self) -> None:
        """Give every host span its part, its context and its depth."""
        component, phase = self.parts_of_host()
        host = self.host
        names = [thread["name"] for thread in self.threads]
        roots = _roots("thread", names, np.arange(len(self.threads), dtype=np.int64))
        code, names = coded(host["name"])
        label, labels = coded(pd.Series([self.label(name) for name in names], dtype=object))
        shapes = join_unsteady(host["name"], host["shapes"], len(self.iterations))
        others = (host["kind"], shapes, pd.Series(component), pd.Series(phase))
        what = numbered_together([label[code], *(coded(column)[0] for column in others)])
        parent, profile = host["parent"].to_numpy(), host["profile"].to_numpy()
        depth = depths(parent)
        # Level by level: a context is what is called, in the context that calls it.
        context = np.full(len(host), -1)
        first: list[Ints] = []
        above: list[Ints] = []
        made = len(roots)
        order = np.argsort(depth, kind="stable")
        bounds = np.searchsorted(depth[order], np.arange(depth.max(initial=-1) + 2))
        kinds = what.max(initial=0) + 1
        for begin, finish in itertools.pairwise(bounds):
            rows = order[begin:finish]
            over = np.where(parent[rows] >= 0, context[parent[rows]], profile[rows])
            called = over * kinds + what[rows]
            keys, new, same = np.unique(called, return_index=True, return_inverse=True)
            context[rows] = made + same
            first.append(rows[new])
            above.append(over[new])
            made += len(keys)
        entered, callers = (np.concatenate([[], *each]).astype(np.int64) for each in (first, above))
        # numbered in the order in which they are entered, callers before callees
        rank = np.argsort(entered)
        number = np.empty(made, dtype=np.int64)
        number[: len(roots)] = np.arange(len(roots))
        number[len(roots) + rank] = len(roots) + np.arange(len(rank))
        entered = entered[rank]
        found = _contexts(
            number[callers[rank]],
            host["kind"].to_numpy(dtype=object)[entered],
            np.array(labels, dtype=object)[label[code[entered]]],
            shapes.to_numpy(dtype=object)[entered],
            component[entered],
            phase[entered],
            profile[entered],
        )
        self.contexts = pd.concat([roots, found], ignore_index=True)
        host["context"] = number[context]
        host["depth"] = depth

    def parts_of_host(self) -> tuple[Names, Names]:
        """Component and phase of every host span; adds spans to ``host`` for known gaps."""
        if has_own_parts(self.host):
            return own_parts(self.host)
        component, phase, self.inferred = foreign_parts(
            self.host, self.iterations, self.part_names, self.events.flows
        )
        self.host, component, phase = fill_gaps(self.host, component, phase, self.iterations)
        return component, phase

    def label(self, name: str) -> str:
        """Name of a span without what differs from call to call."""
        if name.startswith(STEP_PREFIX):
            return STEP_LABEL
        if self.steps.label and unnumbered(name) == self.steps.label:
            return self.steps.label
        return _ADDRESS.sub("", name)

    # ---- what ran on the GPU ------------------------------------------------------

    def find_launchers(self) -> None:
        """Row in ``host`` of the call that launched each kernel and copy, −1 if none did."""
        if self.device.empty:
            return
        host, device = self.host, self.device

        def last_with(number: str, spans: pd.DataFrame) -> pd.Series:
            """Row of the last of some spans that have the number of each operation."""
            spans = spans[spans[number].ge(0)].drop_duplicates(number, keep="last")
            return device[number].map(pd.Series(spans.index, index=spans[number]))

        runtime = host[host["kind"].eq("runtime")]
        # some write no correlation, but give the call a number of its own
        loose = runtime[runtime["correlation"].lt(0)]
        loose = loose[loose["name"].str.contains("Launch|Memcpy|Memset")]
        launcher = last_with("correlation", runtime).fillna(last_with("external", loose))
        launcher = launcher.fillna(last_with("external", host[host["kind"].eq("operator")]))
        device["launcher"] = launcher.fillna(-1).astype("int64")

    def place_device(self) -> None:
        """Hang GPU work below the call that launched it, and name the streams."""
        if self.device.empty:
            return
        device = self.device
        line, lines = coded(device["line"])
        streams = np.empty(len(lines), dtype=np.int64)
        for place in np.argsort(np.array(lines)):
            gpu, _, stream = lines[place].rpartition("/")
            streams[place] = self.thread(
                "gpu_stream", f"{self.events.accelerator or 'GPU'} {gpu} stream {stream}", stream
            )
        device["profile"] = streams[line]
        span = device["launcher"].to_numpy()
        component, phase = self.parts_of_device()
        earlier = np.unique(device["profile"].to_numpy()[span < 0])
        roots = _roots("root", LAUNCHED_BEFORE, earlier)
        root_of = np.full(len(self.threads), -1)
        root_of[earlier] = len(self.contexts) + np.arange(len(earlier))
        launched_in = np.append(self.host["context"].to_numpy(), -1)[span]
        over = np.where(span >= 0, launched_in, root_of[device["profile"]])
        entered_on = np.append(self.contexts["profile"].to_numpy(), -1)[launched_in]
        kind, name = (device[column].to_numpy(dtype=object) for column in ("kind", "name"))
        profile = np.where(span >= 0, entered_on, device["profile"])
        table = _contexts(over, kind, name, "", component, phase, profile)
        keys = ["parent", "kind", "name", "component", "phase", "profile"]
        number = table.groupby(keys, sort=False).ngroup().to_numpy()
        new = table[~pd.Series(number).duplicated().to_numpy()]
        device["context"] = len(self.contexts) + len(roots) + number
        self.contexts = pd.concat([self.contexts, roots, new], ignore_index=True)

    def parts_of_device(self) -> tuple[Names, Names]:
        """Component and phase of everything that ran on a GPU: of the call that launched it.

        Some names say more: a collective is communication whoever launched it, a copy
        between host and GPU is a transfer where nothing around it names a part. What was
        launched before the trace has the part that kernels of the same name, grid and block
        have without exception.
        """
        device = self.device
        launcher = device["launcher"].to_numpy()
        context = np.append(self.host["context"].to_numpy(), -1)[launcher]
        component, phase = (
            np.append(self.contexts[name].to_numpy(dtype=object), nothing)[context]
            for name, nothing in (("component", "other"), ("phase", ""))
        )
        pair, pairs = coded_pairs(device["kind"], device["name"])
        named = [self.part_names.of(*texts) for texts in pairs]
        is_ours = has_own_parts(self.host)
        for number, says in enumerate(named):
            if says is None or not says.component:
                continue
            if is_ours and says.component != "communication":
                continue
            rows = pair == number
            if says.hint:  # a copy to the GPU within the making of a batch moves that batch
                moved = (component == "data") & (says.component == "transfer")
                rows &= (component == "other") | moved
            component[rows] = says.component
            phase[rows & (phase == "")] = says.phase
        if (launcher < 0).any():
            alike = ["kind", "name", *(c for c in ("grid", "block") if c in device)]
            same = device.groupby(alike, sort=False, observed=True).ngroup().to_numpy()
            table = pd.DataFrame({"same": same, "component": component, "phase": phase})
            parts = table[launcher >= 0].drop_duplicates()
            parts = parts[~parts["same"].duplicated(keep=False)].set_index("same")
            asked = (launcher < 0) & (component == "other") & np.isin(same, parts.index)
            if asked.any():
                ran = (device["end"] - device["start"]).to_numpy()[asked].sum() / 1e6
                self.inferred.append(
                    f"Of what was launched before the recording, {ran:.3f} ms are given the part "
                    "that kernels of the same name, grid and block have later."
                )
            component[asked] = parts["component"].loc[same[asked]]
            phase[asked] = parts["phase"].loc[same[asked]]
        return component, phase

    def kernel_properties(self, count: int) -> dict[str, np.ndarray]:
        """What kernels were launched with, summed over launches, under HPCToolkit's names."""
        kernels = self.device[self.device["kind"].eq("kernel")]
        where = kernels["context"].to_numpy()
        columns: dict[str, Any] = {}
        for name, property_name in KERNEL_PROPERTIES.items():
            if property_name not in kernels:
                continue
            if property_name in ("grid", "block"):
                code, texts = coded(kernels[property_name])
                values = np.array([_product(text) for text in texts] + [np.nan])[code]
            else:
                values = kernels[property_name].to_numpy(dtype=float)
            usable = np.isfinite(values) & (values >= 0)
            if usable.any():
                total = np.bincount(where[usable], values[usable], count)
                # a mean over launches of which some say nothing would be wrong
                total[where[~usable]] = 0
                columns[name] = total
        if "GKER:FGP_ACT_ACUMU" in columns:
            asked = columns["GKER:FGP_ACT_ACUMU"] > 0
            columns["GKER:FGP_MAX_ACUMU"] = 100.0 * np.bincount(where, minlength=count) * asked
        return columns

    # ---- tables -------------------------------------------------------------------

    def context_table(self) -> pd.DataFrame:
        table = self.contexts.copy()
        table.insert(0, "context", np.arange(len(table)))
        table["file"], table["line"], table["module"] = "", 0, ""
        python = table["kind"].eq("python")
        source = table.loc[python, "name"].str.extract(_PYTHON)
        table.loc[python, "file"] = source["file"].fillna("")
        table.loc[python, "line"] = pd.to_numeric(source["line"]).fillna(0).astype("int64")
        return table

    def rows(self, metric: str, scope: str, column: np.ndarray, chosen: np.ndarray) -> pd.DataFrame:
        context = np.flatnonzero(chosen)
        profile = self.contexts["profile"].to_numpy()[context]
        columns = {"profile": profile, "context": context, "metric": metric, "scope": scope}
        return pd.DataFrame(columns | {"value": column[context]})

    def trace_table(self) -> pd.DataFrame:
        spans = [self.host, *([self.device.assign(depth=0)] if len(self.device) else [])]
        kept = ["profile", "start", "end", "context", "depth"]
        table = pd.concat([frame[kept] for frame in spans])
        table = table.rename(columns={"start": "start_ns", "end": "end_ns"})
        # nearly sorted as they are, callers before callees: stable sorts of one column are fast
        order = np.argsort(table["start_ns"].to_numpy(), kind="stable")
        order = order[np.argsort(table["profile"].to_numpy()[order], kind="stable")]
        return table.take(order)

    def iteration_table(self) -> pd.DataFrame:
        """Iterations. On a GPU, which may lag behind the host, each begins when the main stream
        has done what was launched before, and lasts until its last operation ends or the next
        begins; a last one that launched nothing, after the loop, is none."""
        table = pd.DataFrame(self.iterations, columns=["start_ns", "end_ns"], dtype="int64")
        if len(self.device) and len(table):
            at = self.device["launcher"].to_numpy()
            begun = np.where(at >= 0, self.host["start"].to_numpy()[at], -1)
            start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
            row = stretch_at(start, end, begun)
            if len(table) > 1 and (row >= 0).any() and not (row == len(table) - 1).any():
                start, end = start[:-1], end[:-1]
            start = np.maximum(start, self.done_before(start, begun))
            end = last_ends(start, np.maximum(start, end), row, self.device["end"].to_numpy())
            table = pd.DataFrame({"start_ns": start, "end_ns": end})
        table.insert(0, "iteration", np.arange(len(table)))
        return table

    def done_before(self, moments: Ints, begun: Ints) -> Ints:
        """When the stream that computes most had done all that was launched before each moment
        (n,), 0 where nothing was; ``begun`` says when each operation was launched (operations,), −1
        where that is not recorded."""
        device = self.device
        component = self.contexts["component"].to_numpy()[device["context"]]
        computes = device["kind"].eq("kernel").to_numpy() & (component != "communication")
        time = (device["end"] - device["start"]).where(computes, 0)
        stream = device["profile"].to_numpy()
        main = np.flatnonzero(stream == time.groupby(stream).sum().idxmax())
        main = main[np.argsort(device["start"].to_numpy()[main], kind="stable")]
        # a stream runs what it is given in turn: what is not known was launched after those before
        launched = np.maximum.accumulate(begun[main])
        if launched[-1] < 0:
            return np.zeros(len(moments), dtype=np.int64)
        done = np.maximum.accumulate(device["end"].to_numpy()[main])
        return np.append(0, done)[np.searchsorted(launched, moments)]

    # ---- circumstances -------------------------------------------------------------

    def describe(self, meta: dict[str, Any], metrics: list[str]) -> dict[str, Any]:
        facts = self.events.circumstances()
        missing = dict(meta.get("not_measured", {}))
        if sampled := meta.get("lines"):
            sampled |= node_times(self.host, self.device, self.iterations, sampled)
            missing |= missing_of_lines(sampled)
        facts["cautions"] = [*facts["cautions"], *self.inferred]
        facts |= {"main_thread": 0, "iterations_from": self.steps.source}
        if self.steps.label not in ("", ITERATION_SPAN, STEP_LABEL):
            facts["iteration_name"] = self.steps.label
        meta = {"engine": "torch", "passes": [], **facts, **meta}
        on_gpu = len(self.device) > 0
        meta.setdefault("device", "cuda" if on_gpu else "cpu")
        reasons = {} if on_gpu else dict.fromkeys(("gpu_time_ms", "launches", "copy_bytes"), NO_GPU)
        if self.memory.empty:
            reasons["allocated_bytes"] = NO_MEMORY
        missing |= reasons | {"flops": NO_FLOPS} | missing  # what is known better stays
        copies = self.device[self.device["kind"].eq("copy")]
        unsized = int(copies["bytes"].lt(0).sum())
        if len(copies) and unsized == len(copies):
            missing.setdefault("copy_bytes", "no copy in the trace says how many bytes it moved")
        elif unsized:
            meta["cautions"] = [
                *meta["cautions"],
                f"{unsized:,} of {len(copies):,} copies and memsets do not say how many bytes "
                "they moved: bytes and GB/s are of the others.",
            ]
        meta["not_measured"] = {name: why for name, why in missing.items() if name not in metrics}
        if over_time := curves(self.memory):
            meta["memory"] = over_time
        elif len(self.memory):
            meta["not_measured"]["memory"] = "the trace has sizes of allocations, but no totals"
        if len(self.events.collectives) and on_gpu:
            launched = self.device[self.device["collective"].ge(0)]
            meta["collectives"] = {
                "stream": launched["profile"].tolist(),
                "start_ns": launched["start"].tolist(),
                "row": launched["collective"].tolist(),
                "arguments": self.events.collectives.to_dict("records"),
            }
        return meta


def _contexts(*columns: Any) -> pd.DataFrame:
    names = ("parent", "kind", "name", "shapes", "component", "phase", "profile")
    return pd.DataFrame(dict(zip(names, columns, strict=True)))


def _roots(kind: str, names: str | list[str], profiles: Ints) -> pd.DataFrame:
    """Contexts that nothing calls, one on each of some threads."""
    return _contexts(-1, kind, names, "", "other", "", profiles)


def _product(text: str) -> float:
    """Blocks of a grid, or threads of a block: ``[64, 2, 1]`` is 128; NaN where none is given."""
    sizes = _NUMBER.findall(text)
    return float(np.prod([float(size) for size in sizes])) if sizes else np.nan
