"""From a torch.profiler recording (or any of its chrome traces) to a :class:`Profile`.

Host spans (operators, ranges, Python frames, CUDA calls) become a call tree per
thread, with identical call paths merged. What ran on the GPU hangs below the CUDA call
with the same ``correlation``, so a kernel belongs to the part of the step that launched
it, whenever it ran.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.errors import InputError
from dlrm_core.parts import ITERATION_SPAN, parse_span
from dlrm_workbook.recordings.nesting import innermost, nest, self_times
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive
from dlrm_workbook.recordings.torch.chrome_trace import Events, load_json, read_events

FLOP_OPERATORS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""torch counts elementwise operators too, by the dense shape even of sparse tensors:
an update of a few thousand rows would pass for one of a whole table."""

CURVE_POINTS = 2000
"""Points kept of the memory curve of a device."""


def allocated(memory: pd.DataFrame, host: pd.DataFrame, count: int) -> dict[str, np.ndarray]:
    """Bytes allocated in each context (count,), on host and GPU; frees are not subtracted.

    Args:
        memory: see :class:`~dlrm_workbook.recordings.torch.chrome_trace.Events`.
        host: nested spans with line, start, end, parent (row), context; each thread's
            rows are together.

    Returns:
        ``allocated_bytes`` and ``gpu_allocated_bytes``, each only if recorded.
    """
    columns: dict[str, np.ndarray] = {}
    for line, events in memory[memory["bytes"].gt(0)].groupby("line"):
        spans = host[host["line"] == line]
        if spans.empty:
            continue
        parent = spans["parent"].to_numpy()
        inside = innermost(
            spans["start"].to_numpy(),
            spans["end"].to_numpy(),
            np.where(parent >= 0, parent - int(spans.index[0]), -1),
            events["start"].to_numpy(),
        )
        context = spans["context"].to_numpy()[inside]
        size = events["bytes"].to_numpy(dtype=float)
        on_host = events["device"].eq("cpu").to_numpy()
        for name, chosen in (("allocated_bytes", on_host), ("gpu_allocated_bytes", ~on_host)):
            counted = chosen & (inside >= 0)
            if counted.any():
                column = np.bincount(context[counted], size[counted], count)
                columns[name] = columns.get(name, 0) + column
    return columns


def curves(memory: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Device to its peak and its curve of allocated bytes over time."""
    found = {}
    for device, events in memory.sort_values("start").groupby("device"):
        total = events["total"].to_numpy(dtype=np.int64)
        # A point of the curve is the largest of its stretch, so the peak stays.
        cut = np.linspace(0, len(total), min(CURVE_POINTS, len(total)) + 1).astype(int)[:-1]
        found[str(device)] = {
            "peak_bytes": int(total.max()),
            "time_ms": (events["start"].to_numpy()[cut] / 1e6).tolist(),
            "bytes": np.maximum.reduceat(total, cut).tolist(),
        }
    return found


def matrix_flops(
    host: pd.DataFrame, count: int, averages: list[dict[str, Any]] | None
) -> np.ndarray | None:
    """Operations of each context (count,), NaN where none are known; None without any.

    Args:
        host: spans with name, shapes, context.
        averages: rows of ``key_averages.json``: they have the operations by name and
            shapes, a call's are the mean of those.
    """
    each = {
        (row["name"], row["shapes"]): row["flops"] / row["count"]
        for row in averages or []
        if row["flops"] and row["name"] in FLOP_OPERATORS
    }
    if not each:
        return None
    pairs = zip(host["name"], host["shapes"], strict=True)
    calls = np.array([each.get(pair, np.nan) for pair in pairs])
    # A context in which one call is unknown is unknown: NaN adds up to NaN.
    called = np.bincount(host["context"], minlength=count) > 0
    return np.where(called, np.bincount(host["context"], calls, count), np.nan)


ANY = "*"
"""Stands for a size that differs from call to call."""

_NUMBER = re.compile(r"\d+")


def join_unsteady(names: pd.Series, shapes: pd.Series, iterations: int) -> pd.Series:
    """Shapes in which sizes that change between iterations are written ``*``.

    A shape seen at least once an iteration is steady and stays as it is. The others of
    an operator, where they have the same number of inputs and dimensions, are joined.

    Args:
        names: (n,) operator of each span.
        shapes: (n,) its input shapes as text, "" where unknown.
        iterations: how many were recorded; below 2 nothing is joined.

    Returns:
        (n,) shapes to tell contexts apart by.
    """
    if iterations < 2:
        return shapes
    pairs = pd.DataFrame({"name": names.to_numpy(), "shapes": shapes.to_numpy()})
    counts = pairs[pairs["shapes"] != ""].value_counts(["name", "shapes"])
    rare = counts[counts < iterations].index.to_frame(index=False)
    if rare.empty:
        return shapes
    rare["form"] = [_NUMBER.sub("#", text) for text in rare["shapes"]]
    joined: dict[tuple[str, str], str] = {}
    for (name, form), group in rare.groupby(["name", "form"], sort=False):
        if len(group) < 2:
            continue
        texts = group["shapes"].tolist()
        sizes = np.array([_NUMBER.findall(text) for text in texts])
        same = (sizes == sizes[0]).all(axis=0)
        filling = iter(np.where(same, sizes[0], ANY).tolist())
        text = "".join(next(filling) if piece == "#" else piece for piece in str(form))
        joined.update(((str(name), old), text) for old in texts)
    if not joined:
        return shapes
    keys = zip(pairs["name"], pairs["shapes"], strict=True)
    return pd.Series([joined.get(key, key[1]) for key in keys], index=shapes.index)


METRICS: dict[str, tuple[str, str]] = {
    "cpu_time_ms": ("ms", "wall time of the span on its CPU thread"),
    "calls": ("", "how often the span was entered"),
    "gpu_time_ms": ("ms", "time of GPU kernels, copies and memory sets, summed over streams"),
    "launches": ("", "GPU kernels that ran"),
    "copy_bytes": ("B", "bytes of GPU copies and memory sets"),
    "allocated_bytes": ("B", "host memory allocated through torch"),
    "gpu_allocated_bytes": ("B", "GPU memory allocated through torch"),
    "flops": ("", "floating point operations of matrix products, by torch's formulas"),
}

STEP_PREFIX = "ProfilerStep#"
"""Of the ranges that ``profiler.step()`` opens, one a step, numbered."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PYTHON = re.compile(r"^(?P<file>.*?)\((?P<line>\d+)\): (?P<name>.*)$")


def read_trace(path: str | Path) -> Profile:
    """Read a chrome trace of torch.profiler (``.json`` or ``.json.gz``).

    Raises:
        InputError: the file is missing, cut short, not JSON or no such trace.
    """
    return profile_of(read_events(Path(path)))


def profile_of(events: Events) -> Profile:
    """The profile of a trace that has been read."""
    return _Builder(events).build({}, None)


def read_recording(folder: str | Path) -> Profile:
    """Read what ``torch_recorder.record`` left: trace, FLOPs, times and circumstances.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    folder = Path(folder)
    head = load_json(folder / "recording.json")
    version = head.get("format_version") if isinstance(head, dict) else None
    if version != 1:
        raise InputError(
            f"{folder / 'recording.json'} has format version {version}; this version reads 1"
        )
    averages = load_json(folder / "key_averages.json")
    needed = {"name", "shapes", "count", "flops"}
    rows = averages.get("rows") if isinstance(averages, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and needed <= row.keys() for row in rows
    ):
        raise InputError(
            f"{folder / 'key_averages.json'} needs a list 'rows', each with {sorted(needed)}"
        )
    meta = {key: value for key, value in head.items() if key != "format_version"}
    return _Builder(read_events(folder / "trace.json.gz")).build(meta, rows)


class _Builder:
    """Holds the tables while they grow; one per trace."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.host, self.device, self.memory = events.host, events.device, events.memory
        self.names, self.rank = events.names, events.rank
        self.contexts: dict[tuple[Any, ...], int] = {}
        """(parent, kind, name, shapes, component, phase) to row."""
        self.owner: list[int] = []
        """Thread (row of ``threads``) on which a context was entered."""
        self.threads: list[dict[str, Any]] = []
        self.iterations: list[tuple[int, int]] = []

    def thread(self, kind: str, name: str, number: str) -> int:
        """Add a row to ``threads``; ``number`` as the trace has it, which may be a word."""
        profile = len(self.threads)
        self.threads.append(
            {
                "profile": profile,
                "kind": kind,
                "name": name,
                "rank": self.rank,
                "thread": int(number) if number.lstrip("-").isdigit() else profile,
            }
        )
        return profile

    def context(self, key: tuple[Any, ...], profile: int) -> int:
        row = self.contexts.setdefault(key, len(self.contexts))
        if row == len(self.owner):
            self.owner.append(profile)
        return row

    def build(self, meta: dict[str, Any], averages: list[dict[str, Any]] | None) -> Profile:
        self.nest_host()
        self.place_host()
        self.place_device()
        contexts = self.context_table()
        parent = contexts["parent"].to_numpy()
        count = len(contexts)
        own = self_times(*(self.host[name].to_numpy() for name in ("start", "end", "parent")))
        where = self.host["context"].to_numpy()
        columns = {
            "cpu_time_ms": np.bincount(where, own / 1e6, count),
            "calls": np.bincount(where, minlength=count).astype(float),
        }
        if len(self.device):
            device = self.device
            where = device["context"].to_numpy()
            for name, each in (
                ("gpu_time_ms", (device["end"] - device["start"]) / 1e6),
                ("launches", device["kind"] == "kernel"),
                ("copy_bytes", device["bytes"]),
            ):
                columns[name] = np.bincount(where, each.to_numpy(dtype=float), count)
            columns["calls"] += np.bincount(where, minlength=count)
        columns |= allocated(self.memory, self.host, count)
        values = [
            frame
            for metric, column in columns.items()
            for frame in self.value_rows(metric, column, parent)
        ]
        operations = matrix_flops(self.host, count, averages)
        if operations is not None:
            values.append(self.rows("flops", "exclusive", operations, ~np.isnan(operations)))
        names = [*columns, *(["flops"] if operations is not None else [])]
        metrics = pd.DataFrame([(name, *METRICS[name], "torch.profiler") for name in names])
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
        pieces = []
        offset = 0
        # The thread with the iterations first, then by activity: row 0 is the main thread.
        marks = self.host["name"].eq(ITERATION_SPAN).groupby(self.host["line"]).sum()
        sizes = self.host["line"].value_counts()
        lines = sorted(sizes.index, key=lambda line: (-marks[line], -sizes[line], line))
        for line in lines:
            number = line.rpartition("/")[2]
            profile = self.thread("cpu_thread", self.names.get(line, f"thread {number}"), number)
            spans = self.host[self.host["line"] == line].copy()
            soft = spans["kind"].eq("python").to_numpy()
            start, end, parent, order = nest(
                spans["start"].to_numpy(), spans["end"].to_numpy(), soft
            )
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            spans["start"], spans["end"] = start, end
            spans = spans.iloc[order]
            parent = parent[order]
            spans["parent"] = np.where(parent >= 0, place[parent] + offset, -1)
            spans["profile"] = profile
            offset += len(spans)
            pieces.append(spans)
        if pieces:
            self.host = pd.concat(pieces, ignore_index=True)
        else:
            self.host["parent"] = self.host["profile"] = np.empty(0, dtype=np.int64)
        mark = self.host["profile"].eq(0) & self.host["name"].eq(ITERATION_SPAN)
        if not mark.any():  # a trace of the user's own: torch's profiler.step() marks steps
            mark = self.host["profile"].eq(0) & self.host["name"].str.startswith(STEP_PREFIX)
        spans = self.host.loc[mark, ["start", "end"]].sort_values("start")
        self.iterations = list(spans.itertuples(index=False, name=None))

    def place_host(self) -> None:
        """Give every host span its context and depth."""
        parts = {name: parse_span(name) for name in self.host["name"].unique()}
        labels = {name: _label(name) for name in parts}
        roots = [
            self.context((-1, "thread", thread["name"], "", "other", "", profile), profile)
            for profile, thread in enumerate(self.threads)
        ]
        foreign = self.parts_of_other_threads(parts)
        contexts: list[int] = []
        depths: list[int] = []
        found: list[tuple[str, str]] = []
        shapes = join_unsteady(self.host["name"], self.host["shapes"], len(self.iterations))
        columns = [self.host[name].tolist() for name in ("name", "kind", "parent", "profile")]
        rows = zip(*columns, shapes.tolist(), strict=True)
        for row, (name, kind, above, profile, form) in enumerate(rows):
            part = parts[name] if kind == "annotation" else None
            if above >= 0:
                over, depth = contexts[above], depths[above] + 1
                part = part or found[above]
            else:
                over, depth = roots[profile], 0
                part = part or foreign.get(row, ("other", ""))
            key = (over, kind, labels[name], form, *part, profile)
            contexts.append(self.context(key, profile))
            depths.append(depth)
            found.append(part)
        self.host["context"] = np.array(contexts, dtype=np.int64)
        self.host["depth"] = np.array(depths, dtype=np.int64)

    def parts_of_other_threads(
        self, parts: dict[str, tuple[str, str] | None]
    ) -> dict[int, tuple[str, str]]:
        """Part of each outermost span of an autograd thread.

        Such a thread works for the main thread, which waits: it has the part that
        the main thread is in when the span starts. (A prefetching thread does not.)
        """
        main = self.host["profile"].eq(0)
        named = main & self.host["kind"].eq("annotation") & self.host["name"].map(parts).notna()
        helps = self.host["name"].str.startswith("autograd::engine::")
        asked = self.host[~main & self.host["parent"].eq(-1) & helps]
        if asked.empty or not named.any():
            return {}
        spans = self.host[named]
        start, end, parent, _ = nest(
            spans["start"].to_numpy(), spans["end"].to_numpy(), np.zeros(len(spans), dtype=bool)
        )
        inside = innermost(start, end, parent, asked["start"].to_numpy())
        return {
            row: parts[spans["name"].iloc[span]] or ("other", "")
            for row, span in zip(asked.index, inside, strict=True)
            if span >= 0
        }

    def place_device(self) -> None:
        """Hang GPU work below the call that launched it, and name the streams."""
        if self.device.empty:
            return
        runtime = self.host[self.host["kind"].eq("runtime") & self.host["correlation"].ge(0)]
        launcher = dict(zip(runtime["correlation"], runtime.index, strict=True))
        operators = self.host[self.host["kind"].eq("operator") & self.host["external"].ge(0)]
        operator = dict(zip(operators["external"], operators.index, strict=True))
        launched = self.device["correlation"].map(launcher)
        launched = launched.fillna(self.device["external"].map(operator)).fillna(-1)
        self.device["launcher"] = launched.astype("int64")
        above = self.host["context"].tolist()
        keys = list(self.contexts)
        streams = {}
        for line in sorted(self.device["line"].unique()):
            gpu, _, stream = line.rpartition("/")
            streams[line] = self.thread("gpu_stream", f"GPU {gpu} stream {stream}", stream)
        contexts = []
        columns = (self.device[name].tolist() for name in ("name", "kind", "launcher", "line"))
        for name, kind, span, line in zip(*columns, strict=True):
            if span >= 0:
                over = above[span]
                part, profile = keys[over][4:6], self.owner[over]
            else:
                profile = streams[line]
                over = self.context(
                    (-1, "root", "launched before the trace", "", "other", "", profile), profile
                )
                part = ("other", "")
            contexts.append(self.context((over, kind, name, "", *part, profile), profile))
        self.device["context"] = np.array(contexts, dtype=np.int64)
        self.device["profile"] = self.device["line"].map(streams)

    # ---- tables -------------------------------------------------------------------

    def context_table(self) -> pd.DataFrame:
        names = ["parent", "kind", "name", "shapes", "component", "phase", "profile"]
        table = pd.DataFrame(list(self.contexts), columns=names)
        table.insert(0, "context", np.arange(len(table)))
        table["file"], table["line"], table["module"] = "", 0, ""
        python = table["kind"].eq("python")
        source = table.loc[python, "name"].str.extract(_PYTHON)
        table.loc[python, "file"] = source["file"].fillna("")
        table.loc[python, "line"] = source["line"].fillna(0).astype("int64")
        return table

    def rows(self, metric: str, scope: str, column: np.ndarray, chosen: np.ndarray) -> pd.DataFrame:
        context = np.flatnonzero(chosen)
        return pd.DataFrame(
            {
                "profile": np.array(self.owner, dtype=np.int64)[context],
                "context": context,
                "metric": metric,
                "scope": scope,
                "value": column[context],
            }
        )

    def value_rows(self, metric: str, column: np.ndarray, parent: np.ndarray) -> list[pd.DataFrame]:
        """Rows of an additive metric; contexts it does not touch have none."""
        frames = [self.rows(metric, "exclusive", column, column != 0)]
        if metric != "calls":  # calls of a caller and its callees do not add up to anything
            total = inclusive_from_exclusive(parent, column)
            frames.append(self.rows(metric, "inclusive", total, total != 0))
        return frames

    def trace_table(self) -> pd.DataFrame:
        spans = [self.host, *([self.device.assign(depth=0)] if len(self.device) else [])]
        kept = ["profile", "start", "end", "context", "depth"]
        table = pd.concat([frame[kept] for frame in spans])
        table = table.rename(columns={"start": "start_ns", "end": "end_ns"})
        return table.sort_values(["profile", "start_ns", "depth"])

    def iteration_table(self) -> pd.DataFrame:
        """Iterations; on a GPU each lasts until its last kernel ends or the next begins."""
        table = pd.DataFrame(self.iterations, columns=["start_ns", "end_ns"], dtype="int64")
        if len(self.device) and len(table):
            at = self.device["launcher"].to_numpy()
            begun = np.where(at >= 0, self.host["start"].to_numpy()[at], -1)
            start = table["start_ns"].to_numpy()
            which = np.searchsorted(start, begun, side="right") - 1
            end = table["end_ns"].to_numpy().copy()
            inside = (which >= 0) & (begun < end[np.maximum(which, 0)])
            np.maximum.at(end, which[inside], self.device["end"].to_numpy()[inside])
            end[:-1] = np.minimum(end[:-1], np.maximum(start[1:], table["end_ns"].to_numpy()[:-1]))
            table["end_ns"] = end
        table.insert(0, "iteration", np.arange(len(table)))
        return table

    # ---- circumstances -------------------------------------------------------------

    def describe(self, meta: dict[str, Any], metrics: list[str]) -> dict[str, Any]:
        meta = {"engine": "torch", "passes": [], **self.events.circumstances(), **meta}
        missing = dict(meta.get("not_measured", {}))
        on_gpu = len(self.device) > 0
        meta.setdefault("device", "cuda" if on_gpu else "cpu")
        if not on_gpu:
            reason = "the trace holds no GPU activity"
            for name in ("gpu_time_ms", "launches", "copy_bytes"):
                missing.setdefault(name, reason)
        if self.memory.empty:
            missing.setdefault("allocated_bytes", "memory was not recorded (profile_memory)")
        if "flops" not in metrics:
            missing.setdefault("flops", "a chrome trace has none; only a recording has them")
        meta["not_measured"] = {name: why for name, why in missing.items() if name not in metrics}
        if len(self.memory):
            meta["memory"] = curves(self.memory)
        return meta


def _label(name: str) -> str:
    """Name of a span without what differs from call to call."""
    if name.startswith(STEP_PREFIX):
        return "ProfilerStep*"
    return _ADDRESS.sub("", name)
