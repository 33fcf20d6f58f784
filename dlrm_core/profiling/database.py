"""Reader of HPCToolkit databases, format 4.x, everything in them.

``read_database(path)`` gives a ``Database``: the calling-context tree with full
names, every thread, GPU context and stream, all metrics in all scopes, summary
statistics, derived metrics, and traces.

**Two rules decide whether figures are right.** Instruction points under a known
source line hold values but have no node in ``meta.db``, so summing ``point``
values over the tree loses time (most of it, often). And self time is therefore
``execution(node) - sum of execution(children in the tree)``: what a node did
itself, outside-tree points included. Self values over the tree add up to the
root, for each thread and in sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlrm_core.profiling.derived import DerivedMetric, read_taxonomy
from dlrm_core.profiling.format4 import REPROCESS, DatabaseError
from dlrm_core.profiling.format4_meta import Meta, read_meta
from dlrm_core.profiling.format4_tree import ENTRY, ROOT
from dlrm_core.profiling.format4_values import (
    ContextValues,
    ThreadProfile,
    TraceLine,
    read_profiles,
    read_traces,
)
from dlrm_core.profiling.formulas import Input, evaluate, parse_formula
from dlrm_core.profiling.metrics import canonical_name, derive
from dlrm_core.profiling.tree_values import Floats, Ints, TreeValues

if TYPE_CHECKING:
    import pandas as pd
    from hatchet import GraphFrame

__all__ = ["Database", "DatabaseError", "Thread", "read_database"]

FUNCTION, LOOP, LINE, INSTRUCTION = range(4)
PYTHON_MODULE = "<logical python>"


@dataclass(frozen=True)
class Thread:
    """Where one profile was measured.

    Attributes:
        profile: row in ``profile.db`` (0 is the summary and no thread).
        kind: ``cpu_thread`` or ``gpu_stream``.
        name: for instance ``rank 1 thread 0`` or ``rank 0 GPU 0 stream 7``; unique.
        rank, thread: −1 where there is none. For a stream ``thread`` is the stream.
    """

    profile: int
    kind: str
    name: str
    rank: int
    thread: int


class Database(TreeValues):
    """One HPCToolkit database. Get it from ``read_database``.

    Rows of the tree number its contexts: row 0 is the root over all entry points
    (context 0), parents precede children. Columns have shape (rows,).

    Attributes:
        path: its folder.
        meta: titles, metrics, modules, files, functions.
        tree: the calling-context tree in columns.
        profiles: the summary of the run (0), then every thread and stream.
        traces: trace lines; empty where nothing was traced.
        by_context: ``cct.db``, or None where it is missing.
        absent: file to what is missing with it.
    """

    def __init__(
        self,
        path: Path,
        meta: Meta,
        profiles: list[ThreadProfile],
        traces: list[TraceLine],
        by_context: ContextValues | None,
        absent: dict[str, str],
    ) -> None:
        super().__init__(path, meta, profiles)
        self.traces = traces
        self.by_context = by_context
        self.absent = absent

    # ---- names --------------------------------------------------------------------

    @functools.cached_property
    def names(self) -> list[str]:
        """Name of every row: function names whole, ``file:line``, ``module@0xoffset``."""
        tree, meta = self.tree, self.meta
        base = [_base(path) for path in meta.files]
        modules = [_base(path) for path in meta.modules]
        functions = [
            f.name
            or (f"<{modules[f.module]}@{f.offset:#x}>" if f.module >= 0 else "")
            or (f"<{base[f.file]}:{f.line}>" if f.file >= 0 else "<unknown function>")
            for f in meta.functions
        ]
        entries = iter(meta.tree.entry_names)
        names = []
        columns = (tree.lexical_type, tree.function, tree.file, tree.line, tree.module, tree.offset)
        for kind, function, file, line, module, offset in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if kind == ENTRY:
                name = f"<{next(entries)}>"
            elif kind == ROOT:
                name = "<root>"
            elif kind == FUNCTION and function >= 0:
                name = functions[function]
            elif kind == INSTRUCTION and module >= 0:
                name = f"{modules[module]}@{offset:#x}"
            elif file >= 0:
                name = f"{base[file]}:{line}" if line else base[file]
            elif function >= 0:
                name = functions[function]
            elif module >= 0:
                name = f"<{modules[module]}@{offset:#x}>"
            else:
                name = "<unknown function>"
            names.append(f"loop at {name}" if kind == LOOP else name)
        return names

    @functools.cached_property
    def contexts(self) -> pd.DataFrame:
        """One row a context.

        Columns: ``context`` (the database's id), ``parent`` (row, −1 for the root),
        ``depth`` (entry points 0), ``type`` (``root``, ``entry``, ``function``, ``loop``,
        ``line``, ``instruction``), ``relation`` to the parent, ``name``, ``file``,
        ``line`` (of the context, else of its function's definition), ``module``,
        ``offset`` (in the module).
        """
        from dlrm_core.profiling.database_views import contexts_table

        return contexts_table(self)

    @functools.cached_property
    def threads(self) -> list[Thread]:
        """Every profile but summaries: CPU threads and GPU streams."""
        threads: list[Thread] = []
        seen: set[str] = set()
        for profile in self.profiles:
            if profile.summary:
                continue
            ids = {identifier.kind: identifier for identifier in profile.identifiers}
            rank = ids["RANK"].logical if "RANK" in ids else -1
            parts = [f"rank {rank}"] if rank >= 0 else []
            stream = ids.get("GPUSTREAM") or ids.get("GPUCONTEXT")
            if stream is None:
                kind, number = "cpu_thread", ids["THREAD"].logical if "THREAD" in ids else -1
                parts.append(f"thread {number}" if number >= 0 else "process")
            else:
                kind, number = "gpu_stream", stream.logical
                gpu = ids.get("GPUDEVICE") or ids.get("GPUCONTEXT")
                parts += [f"GPU {gpu.logical}"] if gpu else []
                parts.append(f"stream {number}")
            name = " ".join(parts)
            if name in seen:  # several unranked processes, or nodes: tell them apart
                name = f"{name} (profile {profile.number})"
            seen.add(name)
            threads.append(Thread(profile.number, kind, name, rank, number))
        return threads

    # ---- derived ------------------------------------------------------------------

    @functools.cached_property
    def taxonomy(self) -> list[DerivedMetric]:
        """The metrics of ``metrics/default.yaml``, with formulas; empty without the file.

        Raises:
            DatabaseError: the file is damaged.
        """
        file = self.path / "metrics" / "default.yaml"
        return read_taxonomy(file) if file.is_file() else []

    def derived_column(self, name: str, cost: str = "exclusive", profile: int = 0) -> Floats:
        """A metric of the taxonomy over the tree, by its formula; NaN without a value.

        Args:
            name: as in ``metrics/default.yaml``, for instance ``GKER:OCC_THR``.
            cost: ``inclusive`` or ``exclusive``.
            profile: row of ``profiles``; 0 for all threads.

        Raises:
            DatabaseError: no such metric, no formula for that cost, an input that the
                database does not hold, or damaged values.
        """
        wanted = canonical_name(name)
        for metric in self.taxonomy:
            if canonical_name(metric.name) == wanted and cost in metric.formulas:
                program = metric.formulas[cost]
                break
        else:
            raise DatabaseError(f"{self.path}: no {cost} formula for a metric '{name}'")
        columns: dict[Input, Floats] = {}

        def value_of(given: Input) -> Floats:
            if given not in columns:
                columns[given] = self._statistic(given, profile)
            return columns[given]

        return np.broadcast_to(
            np.asarray(evaluate(program, value_of), np.float64), (len(self.tree),)
        ).copy()

    def _statistic(self, given: Input, profile: int) -> Floats:
        metric = self.metric(given.metric)
        unary = parse_formula(given.formula)
        if not self.profiles[profile].summary:
            column = self.column(given.metric, given.scope, profile)
            result = evaluate(unary, lambda _: column)
            return np.where(column != 0, result, 0.0)
        for statistic in metric.statistics:
            same = (statistic.scope, statistic.combine) == (given.scope, given.combine)
            if same and parse_formula(statistic.formula) == unary:
                return self._dense(profile, statistic.metric_id)
        raise DatabaseError(
            f"{self.path}: no {given.combine} of '{given.formula}' of metric "
            f"'{given.metric}' in scope '{given.scope}'"
        )

    def derived(self, row: int = 0, profile: int = 0) -> dict[str, float | str]:
        """Occupancy, utilisation, stall shares, ... of a row; a sentence where not measured."""
        if row == 0:
            values = self.root(profile)
        else:
            scope = self.meta.inclusive_scope
            context = int(self.tree.context[row])
            at = self.profiles[profile].at(context)
            values = {
                name: at[number]
                for (name, of_scope), number in self._ids(profile).items()
                if of_scope == scope and number in at
            }
        named = {canonical_name(name): value for name, value in values.items()}
        return derive(named, self._canonical)

    # ---- reports ------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Counts, sums and traces of the database (``dlrm database PATH --json``)."""
        from dlrm_core.profiling.database_views import facts

        return facts(self)

    def describe(self) -> str:
        """A summary to read: metrics, threads, totals, top functions, what is missing."""
        from dlrm_core.profiling.database_views import describe

        return describe(self)

    def kernels(self) -> pd.DataFrame:
        """GPU kernels: time, launches, occupancy, ...; see ``database_views.kernels_table``."""
        from dlrm_core.profiling.database_views import kernels_table

        return kernels_table(self)

    def to_hatchet(self) -> GraphFrame:
        """The tree as a Hatchet GraphFrame with all metrics, summed over threads.

        Raises:
            MissingToolError: Hatchet is not installed.
        """
        from dlrm_core.profiling.database_views import graph_frame

        return graph_frame(self)

    # ---- nearest enclosing --------------------------------------------------------

    def nearest(self, marked: npt.NDArray[np.bool_]) -> Ints:
        """Row of the nearest marked context at or above each row, −1 where there is none."""
        link = np.where(marked, np.arange(len(marked)), self.tree.parent)
        link[0] = 0
        while True:  # pointer doubling: log2(depth) passes
            further = link[link]
            if (further == link).all():
                break
            link = further
        return np.where(marked[link], link, -1)

    def is_python(self, function: int) -> bool:
        """Whether a row of ``meta.functions`` is a Python frame (``hpcrun -a python``)."""
        found = self.meta.functions[function]
        module = self.meta.modules[found.module] if found.module >= 0 else ""
        file = self.meta.files[found.file] if found.file >= 0 else ""
        return module == PYTHON_MODULE or file.endswith(".py")


def _base(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def read_database(path: str | Path) -> Database:
    """Open an HPCToolkit database of format 4.x.

    Values stay on disk (memory-mapped) until they are asked for.

    Args:
        path: the database folder that ``hpcprof -o`` wrote.

    Raises:
        DatabaseError: not a database, of another format, incomplete or damaged; the
            message names the file, what was found and what was expected, or what to do.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a database folder" if folder.exists() else "does not exist"
        raise DatabaseError(f"{folder}: {what}; give the folder that `hpcprof -o` wrote")
    if not (folder / "meta.db").is_file():
        raise DatabaseError(_no_database(folder))
    meta = read_meta(folder / "meta.db")
    if not (folder / "profile.db").is_file():
        raise DatabaseError(f"{folder}: has meta.db but no profile.db; run hpcprof again")
    profiles = read_profiles(
        folder / "profile.db",
        meta.identifier_kinds,
        [number for metric in meta.metrics for number in metric.scopes.values()],
        [s.metric_id for metric in meta.metrics for s in metric.statistics],
    )
    absent: dict[str, str] = {}
    traces: list[TraceLine] = []
    if (folder / "trace.db").is_file():
        traces = read_traces(folder / "trace.db", len(profiles))
    else:
        absent["trace.db"] = "no traces; measure with hpcrun -t"
    by_context = None
    if (folder / "cct.db").is_file():
        by_context = ContextValues(folder / "cct.db")
    else:
        absent["cct.db"] = "no index by context; profile.db holds the same values"
    if not (folder / "metrics" / "default.yaml").is_file():
        absent["metrics/default.yaml"] = "no derived metrics by formula"
    return Database(folder, meta, profiles, traces, by_context, absent)


def _no_database(folder: Path) -> str:
    """What to do about a folder without ``meta.db``."""
    if (folder / "experiment.xml").exists() or (folder / "experiment.mt").exists():
        return (
            f"{folder}: an old database (experiment.xml), and this reader knows format 4.x; "
            + REPROCESS
        )
    if any(folder.glob("*.hpcrun")):
        return (
            f"{folder}: a measurement directory, not a database; "
            f"run `hpcprof -o DATABASE {folder}` first"
        )
    return f"{folder}: no meta.db in it, so no HPCToolkit database of format 4.x"
