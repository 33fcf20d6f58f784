"""Edits of real HPCToolkit databases: contexts take longer, and what follows comes later.

Values are scaled where they lie in ``profile.db``, in every profile, and the inclusive values of
what is above grow by as much; ``trace.db`` is timed anew. ``cct.db`` holds the same values by
context and is left out, as `hpcprof` leaves it out where it is not asked for. Points inside a
known source line, which no reader finds in the tree, keep what was sampled there.
"""

import shutil
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_workbook.recordings.hpctoolkit.database import Database, read_database
from dlrm_workbook.recordings.hpctoolkit.meta import RELATIONS

INCLUSIVE = "execution"
"""The scope in which a context holds what all contexts below it took."""

VALUE = np.dtype([("metric", "<u2"), ("value", "<f8")])
SAMPLE = np.dtype([("time_ns", "<u8"), ("context", "<u4")])


@dataclass(frozen=True)
class Stretch:
    """Contexts that take ``factor`` times as long (or hold so many times the bytes)."""

    rows: tuple[int, ...]
    """Of the tree: what is below them takes longer too. None is below another."""
    traced: tuple[int, ...]
    """Ids that stand for them in the trace."""
    metrics: tuple[str, ...]
    factor: float


@cache
def _opened(folder: Path) -> Database:
    return read_database(folder)


class DatabaseCopy:
    """A database that can be edited, and written as a new one.

    Attributes:
        database: the recorded one.
        time: the metric of its time: of the GPU where it recorded one, else of the CPU.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = _opened(folder)
        measured = self.database.measured()
        self.time = "GPUOP (sec)" if "GPUOP (sec)" in measured else "CPUTIME (sec)"
        self.stretches: list[Stretch] = []

    # ---- what is there ------------------------------------------------------------------

    @property
    def recorded_us(self) -> float:
        """From a GPU's first operation to its last; of a program without one, its CPU time."""
        if self.time == "CPUTIME (sec)":
            return 1e6 * self.database.measured()[self.time]
        lines = self._gpu_lines()
        first, last = min(line[0][0] for line in lines), max(line[0][-1] for line in lines)
        return float(last - first) / 1e3

    @property
    def step_us(self) -> float:
        """Length of the recording with its edits: nothing marks iterations in it."""
        return self.recorded_us + sum(
            1e6 * (stretch.factor - 1.0) * self.seconds(stretch.rows) for stretch in self.stretches
        )

    @property
    def steps(self) -> list[tuple[float, float]]:
        """The one span of the whole recording, us."""
        return [(0.0, self.step_us)]

    def rows(self, name: str) -> tuple[int, ...]:
        """Rows of the tree with this name, topmost only."""
        named = [row for row, own in enumerate(self.database.names) if own == name]
        return tuple(row for row in named if not self._below(named)[row])

    def seconds(self, rows: tuple[int, ...]) -> float:
        """Time of some contexts and what is below them."""
        return float(self.database.column(self.time)[list(rows)].sum())

    def _gpu_lines(self) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        streams = {t.profile for t in self.database.threads if t.kind == "gpu_stream"}
        return [
            (line.time_ns, line.context)
            for line in self.database.traces
            if line.profile in streams and len(line.time_ns)
        ]

    def _below(self, rows: Any, itself: bool = False) -> npt.NDArray[np.bool_]:
        """Whether each row is below one of these (or is one)."""
        parent = self.database.tree.parent
        chosen = np.zeros(len(parent), np.bool_)
        chosen[list(rows)] = True
        inside = np.zeros(len(parent), np.bool_)
        for row in range(1, len(parent)):  # parents precede children
            inside[row] = inside[parent[row]] or chosen[parent[row]]
        return inside | chosen if itself else inside

    # ---- edits --------------------------------------------------------------------------

    def _kernel_metrics(self) -> tuple[str, ...]:
        """What a kernel that takes longer has more of: time, and samples of its instructions."""
        samples = [m.name for m in self.database.metrics if m.name.startswith("GINS")]
        return ("GPUOP (sec)", "GKER (sec)", *samples)

    def stretch_function(self, name: str, loss: float) -> float:
        """The function of that name with most time takes so many microseconds more: its own
        instructions and calls, or the kernels that it launched."""
        row = max(self.rows(name), key=lambda row: self.seconds((row,)))
        below = np.flatnonzero(self._below([row], itself=True))
        traced = self.database.tree.context[below].tolist()
        metrics = self._kernel_metrics() if self.time == "GPUOP (sec)" else (self.time,)
        return self._stretch((row,), tuple(traced), metrics, loss)

    def _stretch(
        self, rows: tuple[int, ...], traced: tuple[int, ...], metrics: tuple[str, ...], loss: float
    ) -> float:
        factor = 1.0 + loss / 1e6 / self.seconds(rows)
        known = {metric.name for metric in self.database.metrics}
        wanted = tuple(metric for metric in metrics if metric in known)
        self.stretches.append(Stretch(rows, traced, wanted, factor))
        return factor

    def replay(self) -> "DatabaseCopy":
        """The database with its edits, which take their place when it is written."""
        return self

    def problems(self) -> list[str]:
        """What cannot be: nothing, as no operation is moved past another."""
        return []

    # ---- writing ------------------------------------------------------------------------

    def save(self, folder: Path, name: str = "database") -> Path:
        """Write the edited database into a folder; returns what a user opens."""
        path = folder / f"{name}.d"
        shutil.copytree(self.folder, path, copy_function=shutil.copyfile)
        for place in (path, *path.rglob("*")):
            place.chmod(0o755 if place.is_dir() else 0o644)
        (path / "cct.db").unlink()
        for stretch in self.stretches:
            self._write_values(path / "profile.db", stretch)
        self._write_traces(path / "trace.db")
        return path

    def _write_values(self, path: Path, stretch: Stretch) -> None:
        """Scale the values of the stretched contexts, and what is above them by as much."""
        tree = self.database.tree
        inside = self._below(stretch.rows, itself=True)
        calls = tree.relation == RELATIONS.index("call")
        data = np.memmap(path, np.uint8, "r+")
        for profile, (count, start) in zip(
            self.database.profiles, _blocks(data, "<QQ32x"), strict=True
        ):
            contexts, metrics, values = profile.values()
            stored = data[start : start + count * VALUE.itemsize].view(VALUE)
            rows = tree.rows(contexts)
            for scope, number in self._numbers(profile.summary, stretch.metrics):
                cells = np.flatnonzero((metrics == number) & (rows >= 0))
                cell = dict(zip(rows[cells].tolist(), cells.tolist(), strict=True))
                own = cells[inside[rows[cells]]]
                stored["value"][own] = values[own] * stretch.factor
                if scope == "point":
                    continue
                for row in stretch.rows:
                    more = (stretch.factor - 1.0) * (values[cell[row]] if row in cell else 0.0)
                    while more and tree.parent[row] >= 0:
                        if scope != INCLUSIVE and calls[row]:
                            break  # a function's own time ends where it is called
                        row = int(tree.parent[row])
                        stored["value"][cell[row]] += more
        data.flush()

    def _numbers(self, summary: bool, wanted: tuple[str, ...]) -> list[tuple[str, int]]:
        """(scope, id) of what a profile holds of some metrics."""
        found: list[tuple[str, int]] = []
        for metric in self.database.metrics:
            if metric.name in wanted and not summary:
                found += metric.scopes.items()
            elif metric.name in wanted:
                found += [
                    (each.scope, each.metric_id)
                    for each in metric.statistics
                    if each.combine == "sum"
                ]
        return found

    def _write_traces(self, path: Path) -> None:
        """Time all lines anew: what a stretched context holds up comes later on each."""
        old, new = self._clock()
        data = np.memmap(path, np.uint8, "r+")
        for _, start, end in _blocks(data, "<I4xQQ"):
            samples = data[start:end].view(SAMPLE)
            samples["time_ns"] = _moved(samples["time_ns"].astype(np.int64), old, new)
        (section,) = struct.unpack_from("<Q", data, 16 + 8)
        edges = np.array(struct.unpack_from("<QQ", data, section + 16), np.int64)
        struct.pack_into("<QQ", data, section + 16, *_moved(edges, old, new).tolist())
        data.flush()

    def _clock(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Times of the recording and how much later each is, both increasing, ns."""
        starts, ends, more = [], [], []
        for stretch in self.stretches:
            spans = []
            for line in self.database.traces:
                inside = np.isin(line.context[:-1], stretch.traced)
                spans.append(
                    np.stack([line.time_ns[:-1][inside], line.time_ns[1:][inside]], axis=1)
                )
            found = np.concatenate(spans)
            length = found[:, 1] - found[:, 0]
            added = 1e9 * (stretch.factor - 1.0) * self.seconds(stretch.rows)
            starts.append(found[:, 0])
            ends.append(found[:, 1])
            more.append(length * (added / length.sum()))
        if not starts:
            return np.zeros(1, np.int64), np.zeros(1, np.int64)
        times = np.unique(np.concatenate([*starts, *ends]))
        later = np.zeros(len(times))
        for start, end, own in zip(*map(np.concatenate, (starts, ends, more)), strict=True):
            first, last = np.searchsorted(times, [start, end])
            if last > first:
                share = (times[first + 1 : last + 1] - start) / (end - start)
                later[first + 1 : last + 1] += own * share
                later[last + 1 :] += own
        return times, later.astype(np.int64)


def _moved(
    times: npt.NDArray[np.int64], old: npt.NDArray[np.int64], later: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """New times; integers throughout, as nanoseconds since 1970 do not fit a float."""
    zero = int(old[0])
    moved = np.interp((times - zero).astype(float), (old - zero).astype(float), later.astype(float))
    return times + moved.astype(np.int64)


def _blocks(data: npt.NDArray[Any], layout: str) -> list[tuple[int, ...]]:
    """The records of the list with which the first section of a database's file begins."""
    (section,) = struct.unpack_from("<Q", data, 16 + 8)
    items, count, stride = struct.unpack_from("<QIB", data, section)
    return [struct.unpack_from(layout, data, items + stride * number) for number in range(count)]
