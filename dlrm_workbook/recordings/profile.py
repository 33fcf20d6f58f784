"""The tables of a measured run, the same whichever profiler measured it.

A profile is a call tree (``contexts``) with numbers on it (``values``, whose
columns are named in ``metrics``), the threads and GPU streams it was measured
on (``threads``), what each of them did over time (``trace``) and when each
training iteration ran (``iterations``). See docs/profile.md.

What was not measured has no rows in ``values`` and a reason in
``meta["not_measured"]``: it is never a zero.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, whole_folder, write_text
from dlrm_core.base.settings import shown
from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.ground.tables import rows_of

if TYPE_CHECKING:
    from hatchet import GraphFrame

SCHEMA: dict[str, dict[str, str]] = {}
for _row in rows_of(__file__, "tables.csv"):
    SCHEMA.setdefault(_row["table"], {})[_row["column"]] = _row["dtype"]
"""Table to column to dtype; ``object`` and ``category`` columns hold str. Column order is kept.

``values`` has up to ten million rows of a few names: categories are compared as numbers."""

CONTEXT_KINDS = (
    *("root", "thread", "function", "annotation", "operator", "kernel", "copy", "runtime"),
    *("python", "line", "loop", "instruction"),
)
SCOPES = ("exclusive", "inclusive")
THREAD_KINDS = ("cpu_thread", "gpu_stream")

STANDARD_METRICS: dict[str, tuple[str, str]] = {
    "cpu_time_ms": ("ms", "time on a CPU thread"),
    "gpu_time_ms": ("ms", "time of GPU kernels, copies and memory sets"),
    "calls": ("", "how often the context was entered"),
}
"""Metrics with one name in every engine: name to (unit, meaning)."""


def typed(table: str, rows: Any) -> pd.DataFrame:
    """A frame with the columns and dtypes of ``table``; ``rows`` may be None for none. An
    InputError says that a column is missing or cannot be of its dtype."""
    schema = SCHEMA[table]
    frame = pd.DataFrame(rows)
    if not len(frame.columns):
        frame = pd.DataFrame(columns=list(schema))
    _require_columns(frame, table, f"profile table '{table}'")
    try:
        frame = frame[list(schema)].astype(schema, copy=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"profile table '{table}' has a value of the wrong type: {error}"
        ) from None
    plain = isinstance(frame.index, pd.RangeIndex) and frame.index.equals(pd.RangeIndex(len(frame)))
    return frame if plain else frame.reset_index(drop=True)


def _require_columns(frame: pd.DataFrame, table: str, what: str) -> None:
    if missing := [name for name in SCHEMA[table] if name not in frame.columns]:
        raise InputError(f"{what} lacks the column(s) {', '.join(missing)}")


def depths(parent: np.ndarray) -> np.ndarray:
    """Depth of every context, roots 0, by log2(deepest) passes over whole columns. ``parent`` is
    the row of the parent (n,), −1 for a root; in any order."""
    ancestor = np.asarray(parent, dtype=np.int64).copy()
    depth = (ancestor >= 0).astype(np.int64)
    while (linked := ancestor >= 0).any():
        here = ancestor[linked]
        # The right-hand sides are complete copies before either is written.
        steps, beyond = depth[here], ancestor[here]
        depth[linked] += steps
        ancestor[linked] = beyond
    return depth


def nearest(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Row (n,) of the nearest marked (n,) context at or above each, −1 where there is none.
    ``parent`` is the row of the parent (n,), −1 for a root; in any order."""
    link = np.where(marked | (parent < 0), np.arange(len(parent)), parent)
    while True:  # pointer doubling, as in depths
        further = link[link]
        if (further == link).all():
            return np.where(marked[link], link, -1)
        link = further


def inclusive_from_exclusive(parent: np.ndarray, exclusive: np.ndarray) -> np.ndarray:
    """Add every context's exclusive value, (n,) or (n, metrics), to all its ancestors, in one pass
    a tree level; ``parent`` (n,) is the row of the parent, −1 for a root."""
    parent = np.asarray(parent, dtype=np.int64)
    total = np.array(exclusive, dtype=np.float64, copy=True)
    depth = depths(parent)
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(depth.max(initial=0) + 2))
    for level in range(len(bounds) - 2, 0, -1):
        rows = order[bounds[level] : bounds[level + 1]]
        np.add.at(total, parent[rows], total[rows])
    return total


def coded(column: pd.Series) -> tuple[Ints, list[str]]:
    """(number of each row's text (n,), the texts)."""
    codes, names = pd.factorize(column)
    return codes.astype(np.int64), [str(name) for name in names]


def coded_pairs(first: pd.Series, second: pd.Series) -> tuple[Ints, list[tuple[str, str]]]:
    """(number of each row's pair of texts (n,), the pairs)."""
    (one, ones), (other, others) = coded(first), coded(second)
    pair, pairs = pd.factorize(one * len(others) + other)
    texts = [(ones[number // len(others)], others[number % len(others)]) for number in pairs]
    return pair.astype(np.int64), texts


def numbered_together(columns: Sequence[Ints]) -> Ints:
    """Number (n,) of each row's values, in the order in which they first come; ``columns`` are
    numbers (n,) from 0."""
    number = columns[0].astype(np.int64)
    for column in columns:
        number = pd.factorize(number * (int(column.max(initial=0)) + 1) + column)[0]
    return number.astype(np.int64)


def matching(column: pd.Series, matches: Callable[[str], bool]) -> Bools:
    """Rows (n,) whose text matches; every distinct text is asked for once."""
    code, names = coded(column)
    return np.array([matches(name) for name in names], dtype=bool)[code]


_Table = TypeVar("_Table", pd.DataFrame, np.ndarray, dict[str, Any])
_Arguments = ParamSpec("_Arguments")


def once(
    make: Callable[Concatenate[Profile, _Arguments], _Table],
) -> Callable[Concatenate[Profile, _Arguments], _Table]:
    """A function whose table or column of a profile, see :meth:`Profile.once`, is made once for all
    calls with the same further arguments."""

    @functools.wraps(make)
    def made(profile: Profile, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Table:
        name = f"{make.__module__}.{make.__qualname__} {args} {kwargs}"
        return profile.once(name, lambda: make(profile, *args, **kwargs))

    return made


_THREAD = r"thread -?\d+"
"""Beginning of the name of a thread that is named by the system's number of it."""

FORMAT_VERSION = 1
"""Version of the saved folder, raised when a reader of the previous one would go wrong."""


@dataclass
class Profile:
    """One measured run. Build it with the readers, or with :meth:`build`."""

    contexts: pd.DataFrame
    metrics: pd.DataFrame
    values: pd.DataFrame
    threads: pd.DataFrame
    trace: pd.DataFrame
    iterations: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)
    _known: dict[str, tuple[Any, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "values":  # also a table that is put in the place of the first
            plain = [n for n in ("metric", "scope") if n in value and value[n].dtype != "category"]
            value = value.astype(dict.fromkeys(plain, "category")) if plain else value
        super().__setattr__(name, value)

    @classmethod
    def build(cls, *, meta: dict[str, Any] | None = None, **tables: Any) -> Profile:
        """A validated profile from tables of which each is anything ``pd.DataFrame`` accepts. An
        InputError says that they do not fit together, see :meth:`validate`; a TypeError that one is
        no table of a profile."""
        frames: dict[str, Any] = {t: typed(t, tables.pop(t, None)) for t in SCHEMA}
        profile = cls(**frames, **tables, meta=dict(meta or {}))
        profile.validate()
        return profile

    # ---- checks -----------------------------------------------------------------

    def validate(self) -> None:
        """Check that the tables fit together; an InputError names the table, the row and what is
        wrong with it."""
        for table in SCHEMA:
            _require_columns(getattr(self, table), table, f"profile table '{table}'")
        contexts, values = self.contexts, self.values
        count, context, parent = len(contexts), contexts["context"], contexts["parent"]
        _refuse(context != np.arange(count), "contexts", "'context' must count from 0, row by row")
        _refuse(parent < -1, "contexts", "'parent' must be a context or −1")
        _refuse(parent >= context, "contexts", "a parent must come before its children")
        _refuse(~contexts["kind"].isin(CONTEXT_KINDS), "contexts", "'kind' is unknown")
        listed = set(self.metrics["metric"])
        _refuse(~values["metric"].isin(listed), "values", "'metric' is not in table 'metrics'")
        _refuse(~values["scope"].isin(SCOPES), "values", f"'scope' must be one of {SCOPES}")
        _refuse(values["value"].isna(), "values", "'value' must be a number; leave the row out")
        profiles = set(self.threads["profile"])
        for table, frame in (("values", values), ("trace", self.trace)):
            outside = ~frame["context"].between(0, count - 1)
            _refuse(outside, table, "'context' is not in 'contexts'")
            _refuse(~frame["profile"].isin(profiles), table, "'profile' is not in 'threads'")
        _refuse(~self.threads["kind"].isin(THREAD_KINDS), "threads", "'kind' is unknown")
        for table, frame in (("trace", self.trace), ("iterations", self.iterations)):
            _refuse(frame["end_ns"] < frame["start_ns"], table, "'end_ns' is before 'start_ns'")

    # ---- reading ----------------------------------------------------------------

    @property
    def device(self) -> str:
        """``cuda`` if the run used a GPU, else ``cpu``."""
        return str(self.meta.get("device", "cpu")).partition(":")[0]

    @property
    def not_measured(self) -> dict[str, str]:
        """What could not be measured, name to reason."""
        return dict(self.meta.get("not_measured", {}))

    def has(self, metric: str) -> bool:
        """Whether ``metric`` was measured at all."""
        return metric in self._remembered(
            "metrics with values", lambda: set(self.values["metric"].unique())
        )

    def once(self, name: str, make: Callable[[], _Table]) -> _Table:
        """A table or column made from this profile: made once, then copied.

        Many tables of a page, and each prediction, begin with the same ones. A profile
        that was given other tables makes them anew.
        """
        return self._remembered(name, make).copy()

    def _remembered(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gave when these tables were first asked for it."""
        tables = (self.contexts, self.values, self.trace, self.iterations)
        cached = self._known.get(name)
        if cached is None or any(a is not b for a, b in zip(cached[0], tables, strict=True)):
            cached = self._known[name] = (tables, make())
        return cached[1]

    def rows(self, metric: str, scope: str | None = None) -> np.ndarray:
        """Which rows (n,) of ``values`` are of a metric, in one scope or in any."""
        chosen = self.values["metric"] == metric
        if scope is not None:
            chosen &= self.values["scope"] == scope
        return chosen.to_numpy()

    def values_of(self, metrics: Callable[[str], bool], scope: str) -> pd.DataFrame:
        """Rows of ``values`` of the metrics whose names match, in one scope."""
        wanted = [name for name in self.values["metric"].cat.categories if metrics(str(name))]
        rows = self.values["metric"].isin(wanted) & (self.values["scope"] == scope)
        return self.values[rows].astype({"metric": "object", "scope": "object"})

    def numbered(self, column: str) -> tuple[np.ndarray, list[str]]:
        """(number of each context's name (n,), the names) of a column of ``contexts``.

        Comparing a million names takes a tenth of a second, and every table of a page
        asks; so names are numbered once.
        """
        return self._remembered(f"numbers of {column}", lambda: coded(self.contexts[column]))

    def which(self, column: str, matches: Callable[[str], bool]) -> np.ndarray:
        """Contexts (n,) whose ``column`` matches; every distinct name is asked for once."""
        codes, names = self.numbered(column)
        return np.array([matches(name) for name in names], dtype=bool)[codes]

    def of_kind(self, *kinds: str) -> np.ndarray:
        """Contexts (n,) of one of the kinds."""
        return self.which("kind", lambda kind: kind in kinds)

    def value_table(self, metric: str, scope: str = "exclusive") -> pd.Series:
        """One metric for every context, summed over threads: NaN throughout when the metric was not
        measured; 0 for a context on which a measured metric has no row."""
        index = pd.RangeIndex(len(self.contexts), name="context")
        if not self.has(metric):
            return pd.Series(np.nan, index=index, name=metric)

        def added() -> np.ndarray:
            rows = self.values[self.rows(metric, scope)]
            return np.bincount(rows["context"], rows["value"], minlength=len(self.contexts))

        return pd.Series(self.once(f"sum of {metric} {scope}", added), index=index, name=metric)

    # ---- hatchet ----------------------------------------------------------------

    def to_hatchet(self, iterations: int = 1) -> GraphFrame:
        """The call tree as a Hatchet ``GraphFrame``, a row a context, summed over threads.

        Metrics keep their names: ``cpu_time_ms`` is exclusive, ``cpu_time_ms (inc)``
        inclusive. For ``tree()``, queries and Thicket; heavy work is quicker on the tables.
        Threads are numbered from the one with the most CPU time: the numbers that the system
        gave them differ from run to run, and trees of two runs would have no node in common.

        Hatchet walks trees recursively, so for a deep tree the recursion limit of this process is
        raised. All values are divided by ``iterations``: recordings of different length are
        comparable by a mean iteration, ``attribution.iteration_count(profile)``. A MissingToolError
        says that Hatchet is not installed.
        """
        from dlrm_workbook.recordings.hatchet_frames import graph_frame

        contexts = self.contexts.drop(columns="context").rename(columns={"kind": "type"})
        threads = contexts["type"].eq("thread") & contexts["name"].str.match(_THREAD)
        time = self.value_table("cpu_time_ms", "inclusive")[threads]
        for number, row in enumerate(time.sort_values(ascending=False, kind="stable").index, 1):
            contexts.loc[row, "name"] = re.sub(_THREAD, f"thread {number}", contexts["name"][row])
        columns = {
            metric + suffix: self.value_table(metric, scope) / iterations
            for metric in self.metrics["metric"]
            for scope, suffix in (("exclusive", ""), ("inclusive", " (inc)"))
            if self.rows(metric, scope).any()
        }
        metrics = pd.DataFrame(columns, index=self.contexts.index)
        default = "gpu_time_ms" if self.has("gpu_time_ms") else "cpu_time_ms"
        default += " (inc)" if f"{default} (inc)" in metrics else ""
        return graph_frame(contexts, metrics, default, dict(self.meta))

    # ---- files ------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write the tables (Parquet) and ``profile.json`` into a new folder, which appears only
        when whole: it is written beside its place and renamed. An InputError says that it exists
        already, or cannot be written."""
        target = Path(folder)
        with whole_folder(target, "profile") as part:
            self.write(part)
        return target

    def write(self, folder: Path) -> None:
        """Write what :meth:`save` does, but a reader may see half of it."""
        folder.mkdir(exist_ok=True)
        for table in SCHEMA:
            getattr(self, table).to_parquet(folder / f"{table}.parquet", index=False)
        self.save_meta(folder)

    def save_meta(self, folder: str | Path) -> None:
        """Write ``profile.json`` of a saved folder again: more was found out about the run. An
        InputError says that the file cannot be written."""
        head = {"format_version": FORMAT_VERSION, "meta": self.meta}
        text = json.dumps(head, indent=1, default=_plain)
        write_text(Path(folder) / "profile.json", text + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read what :meth:`save` wrote; an InputError names the file and what is wrong with it."""
        folder = Path(folder)
        head_file = folder / "profile.json"
        if not head_file.exists():
            raise InputError(f"{folder} is no profile: it has no profile.json")
        head = read_json(head_file)
        version = head.get("format_version") if isinstance(head, dict) else None
        if version != FORMAT_VERSION:
            raise InputError(
                f"{head_file} has format version {version}; this version reads {FORMAT_VERSION}"
            )
        tables = {table: _read_table(folder / f"{table}.parquet", table) for table in SCHEMA}
        try:
            return cls.build(**tables, meta=_checked_meta(head_file, head.get("meta") or {}))
        except InputError as error:
            raise InputError(f"{folder}: {error}") from None


def of_streams(profile: Profile, trace: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of the trace that are on a GPU's streams. ``trace`` is the profile's, where it is
    not as recorded."""
    trace = profile.trace if trace is None else trace
    streams = profile.threads.loc[profile.threads["kind"].eq("gpu_stream"), "profile"]
    return trace[trace["profile"].isin(streams)]


def true_trace(profile: Profile) -> pd.DataFrame:
    """The trace, in which intervals that it leaves open until the next one end where they did."""
    true_end = dict(profile.meta.get("overlong", []))
    if not true_end:
        return profile.trace
    ends = profile.trace["end_ns"].copy()
    ends.loc[list(true_end)] = list(true_end.values())
    return profile.trace.assign(end_ns=ends)


def _read_table(file: Path, table: str) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)
    except FileNotFoundError:
        raise InputError(f"{file.parent} is no whole profile: it has no {file.name}") from None
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        reason = str(error).splitlines()[0]
        raise InputError(f"{file} cannot be read, it may be cut short: {reason}") from None
    _require_columns(frame, table, str(file))
    return frame


_META = {row["key"]: row["holds"] for row in rows_of(__file__, "meta.csv")}
"""What keys of a profile's ``meta`` hold, in words."""


def _holds(value: Any, expected: str) -> bool:
    """Whether a value is what the words of :data:`_META` say."""
    if expected.startswith("a list of "):
        return isinstance(value, list) and all(_holds(item, expected[10:]) for item in value)
    if expected == "numbers":
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, dict if expected == "names with values" else str)


def _checked_meta(file: Path, meta: Any) -> dict[str, Any]:
    """The ``meta`` of a file that anybody may have written; null is the same as left out. Raises
    InputError: naming the file, the key, its value and what was expected."""
    if not isinstance(meta, dict):
        raise InputError(f"{file}: meta is {shown(meta)}, expected names with values")
    meta = {name: value for name, value in meta.items() if value is not None}
    for name, expected in _META.items():
        if name in meta and not _holds(meta[name], expected):
            raise InputError(f"{file}: meta.{name} is {shown(meta[name])}, expected {expected}")
    return meta


def _refuse(wrong: Any, table: str, message: str) -> None:
    rows = np.flatnonzero(np.asarray(wrong))
    if len(rows):
        raise InputError(f"profile table '{table}', row {rows[0]}: {message}")


def _plain(value: Any) -> Any:
    """JSON for the numpy scalars and paths that end up in ``meta``."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a profile's meta cannot hold a {type(value).__name__}")
