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

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_core.errors import MissingToolError
from dlrm_workbook.recordings.hpctoolkit.derived import (
    DerivedMetric,
    Input,
    evaluate,
    parse_formula,
    read_taxonomy,
)
from dlrm_workbook.recordings.hpctoolkit.format import REPROCESS, DatabaseError
from dlrm_workbook.recordings.hpctoolkit.meta import (
    ENTRY,
    LEXICAL_TYPES,
    RELATIONS,
    ROOT,
    Meta,
    enumerated,
    read_meta,
)
from dlrm_workbook.recordings.hpctoolkit.metrics import (
    DERIVATIONS,
    canonical_name,
    derive,
    meaning_of,
    reason_without_value,
    unit_of,
)
from dlrm_workbook.recordings.hpctoolkit.values import (
    ContextValues,
    Floats,
    ThreadProfile,
    TraceLine,
    TreeValues,
    read_profiles,
    read_traces,
)
from dlrm_workbook.recordings.hpctoolkit.values import (
    Ints as imported_Ints,
)

if TYPE_CHECKING:
    import pandas as pd
    from hatchet import GraphFrame

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

        return facts(self)

    def describe(self) -> str:
        """A summary to read: metrics, threads, totals, top functions, what is missing."""

        return describe(self)

    def kernels(self) -> pd.DataFrame:
        """GPU kernels: time, launches, occupancy, ...; see ``database_views.kernels_table``."""

        return kernels_table(self)

    def to_hatchet(self) -> GraphFrame:
        """The tree as a Hatchet GraphFrame with all metrics, summed over threads.

        Raises:
            MissingToolError: Hatchet is not installed.
        """

        return graph_frame(self)

    # ---- nearest enclosing --------------------------------------------------------

    def nearest(self, marked: npt.NDArray[np.bool_]) -> imported_Ints:
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


# A database as tables, as text, as facts and as a Hatchet GraphFrame.

VIEWS_FUNCTION = 0
GPU_KERNEL = "<gpu kernel>"
TOP_FUNCTIONS = 12

Ints = npt.NDArray[np.int64]


def _type_names(kinds: Ints) -> list[str]:
    named = {ROOT: "root", ENTRY: "entry"}
    return _each(kinds, lambda kind: named.get(kind) or enumerated(LEXICAL_TYPES, kind))


def _each(numbers: Ints, name: Callable[[int], str]) -> list[str]:
    """The name of every number, made once for each that occurs."""
    found, which = np.unique(numbers, return_inverse=True)
    names = np.array([name(number) for number in found.tolist()], dtype=object)
    return names[which].tolist()


def _counts(values: Ints, names: Callable[[Ints], list[str]]) -> dict[str, int]:
    """How often each value occurs, by its name, in alphabetical order."""
    found, number = np.unique(values, return_counts=True)
    return dict(sorted(zip(names(found), number.tolist(), strict=True)))


def contexts_table(database: Database) -> pd.DataFrame:
    """See ``Database.contexts``."""
    tree, meta = database.tree, database.meta
    functions = meta.functions
    # A function's own file, line and module stand in where the context has none.
    of_function = np.array(
        [(f.file, f.line, f.module, f.offset % (1 << 63)) for f in functions] or [(-1, 0, -1, 0)],
        np.int64,
    )
    known = of_function[np.maximum(tree.function, 0)]
    has = tree.function >= 0
    file = np.where(tree.file >= 0, tree.file, np.where(has, known[:, 0], -1))
    line = np.where(tree.file >= 0, tree.line, np.where(has, known[:, 1], 0))
    module = np.where(tree.module >= 0, tree.module, np.where(has, known[:, 2], -1))
    offset = np.where(tree.module >= 0, (tree.offset % (1 << 63)).astype(np.int64), known[:, 3])
    # −1, not known, is the last of each
    files = np.array([*meta.files, ""], dtype=object)
    modules = np.array([*meta.modules, ""], dtype=object)
    return pd.DataFrame(
        {
            "context": tree.context,
            "parent": tree.parent,
            "depth": tree.depth,
            "type": _type_names(tree.lexical_type),
            "relation": _each(
                tree.relation, lambda number: "" if number < 0 else enumerated(RELATIONS, number)
            ),
            "name": database.names,
            "file": files[file],
            "line": line,
            "module": modules[module],
            "offset": np.where(module >= 0, offset, 0),
        }
    )


def facts(database: Database) -> dict[str, Any]:
    """Counts, sums and traces; integers exact, sums as numpy adds them.

    The keys are those of the stored expectations that this reader is tested
    against: see ``Database.facts``.
    """
    tree, meta = database.tree, database.meta
    summary = database.profiles[0]
    statistics = {
        statistic.metric_id: f"{metric.name}|{statistic.scope}|{statistic.combine}|"
        f"{statistic.formula}"
        for metric in meta.metrics
        for statistic in metric.statistics
    }
    plain = {
        number: f"{metric.name}|{scope}"
        for metric in meta.metrics
        for scope, number in metric.scopes.items()
    }
    entry_rows = np.flatnonzero(tree.lexical_type == ENTRY)
    entries: dict[str, int] = {}
    for row, kind in zip(entry_rows.tolist(), tree.entry_types, strict=True):
        name = kind if kind not in entries else f"{kind} {tree.context[row]}"
        entries[name] = int(tree.context[row])
    below = tree.lexical_type >= 0
    in_tree = tree.rows(summary.contexts) >= 0
    names = [function.name for function in meta.functions]
    return {
        "database": database.path.resolve().name,
        "title": meta.title,
        "contexts_without_root": len(tree) - 1,
        "context_types": _counts(tree.lexical_type[1:], _type_names),
        "relations": _counts(
            tree.relation[below],
            lambda numbers: [enumerated(RELATIONS, number) for number in numbers.tolist()],
        ),
        "entry_points": entries,
        "max_depth": int(tree.depth.max()),
        "functions": len(names),
        "files": len(meta.files),
        "modules": len(meta.modules),
        "longest_function_name": max(names, key=len, default=""),
        "metrics": {metric.name: sorted(metric.scopes) for metric in meta.metrics},
        "summary_values": summary.count,
        "contexts_with_values": len(summary.contexts),
        "contexts_with_values_outside_tree": int((~in_tree).sum()),
        "summary_root": {
            statistics[number]: value for number, value in sorted(summary.at(0).items())
        },
        "summary_sum_over_contexts": _named_sums(summary, statistics),
        "threads": [
            {
                "profile": profile.number,
                "ids": [[i.kind, i.logical, i.physical] for i in profile.identifiers],
                "values": profile.count,
                "sum_over_contexts": _named_sums(profile, statistics if profile.summary else plain),
            }
            for profile in database.profiles[1:]
        ],
        "traces": [
            {
                "profile": line.profile,
                "samples": len(line.time_ns),
                "first_ns": int(line.time_ns[0]) if len(line.time_ns) else None,
                "last_ns": int(line.time_ns[-1]) if len(line.time_ns) else None,
                "idle_ns": line.idle_ns,
            }
            for line in database.traces
        ],
    }


def _named_sums(profile: Any, names: dict[int, str]) -> dict[str, float]:
    total, number = profile.sums()
    return {names[i]: float(total[i]) for i in np.flatnonzero(number).tolist()}


def metrics_table(database: Database) -> pd.DataFrame:
    """Metrics with ``metric``, ``canonical``, ``unit``, ``meaning``, ``source``, ``total``.

    ``total`` is the inclusive value at the root over all threads, NaN where the
    metric has no value anywhere.
    """
    root = database.root()
    return pd.DataFrame(
        [
            {
                "metric": metric.name,
                "canonical": canonical_name(metric.name),
                "unit": unit_of(metric.name),
                "meaning": meaning_of(metric.name),
                "source": "HPCToolkit",
                "total": root.get(metric.name, np.nan),
            }
            for metric in database.metrics
        ],
        columns=["metric", "canonical", "unit", "meaning", "source", "total"],
    )


def not_measured(database: Database) -> dict[str, str]:
    """Metric or derived quantity to the reason why there is no number for it."""
    root = database.root()
    measured = {canonical_name(name): value for name, value in root.items()}
    reasons = {
        metric.name: reason_without_value(metric.name, measured)
        for metric in sorted(database.metrics, key=lambda metric: metric.name)
        if metric.name not in root
    }
    listed = {canonical_name(metric.name).partition(":")[0] for metric in database.metrics}
    families = {name.partition(" ")[0] for name in listed}
    for name, result in database.derived().items():
        if not isinstance(result, str):
            continue
        reasons[name] = result.removeprefix("not measured: ")
        if not families & {"GPUOP", "GKER", "GINS"}:
            reasons[name] = "no GPU metrics in this database; measure with hpcrun -e gpu=nvidia"
        elif name.startswith(("stall", "utilization")) and "GINS" not in families:
            reasons[name] = "no PC sampling in this database; measure with hpcrun -e gpu=nvidia,pc"
    return reasons


def kernel_rows(database: Database) -> npt.NDArray[np.bool_]:
    """Which rows are GPU kernels: functions called by ``<gpu kernel>``.

    Where nothing is known below ``<gpu kernel>`` (no PC samples, no GPU binary), the
    placeholder itself stands for its kernels.
    """
    tree, meta = database.tree, database.meta
    placeholder = np.array([f.name == GPU_KERNEL for f in meta.functions] + [False])[tree.function]
    placeholder &= tree.lexical_type == VIEWS_FUNCTION
    below = placeholder[np.maximum(tree.parent, 0)] & (tree.parent >= 0)
    kernels = below & (tree.lexical_type >= VIEWS_FUNCTION)
    childless = placeholder.copy()
    childless[tree.parent[kernels]] = False
    return kernels | childless


def kernels_table(database: Database) -> pd.DataFrame:
    """GPU kernels by name, longest first.

    Columns: ``kernel``, ``module``, ``file``, ``line``, ``time_ms``, ``share_percent``
    and the quantities of ``metrics.DERIVATIONS`` that a kernel has (NaN where not
    measured).
    """
    rows = np.flatnonzero(kernel_rows(database))
    gpu = [
        name
        for name in database.root()
        if canonical_name(name).startswith(("GKER", "GINS", "GSAMP", "GPUOP"))
    ]
    columns = {
        canonical_name(name): values[rows]
        for name, values in zip(gpu, database.matrix(gpu), strict=True)
    }
    keys = ["name", "module", "file", "line"]
    frame = database.contexts.loc[rows, keys].assign(**columns)
    groups = frame.groupby(keys, sort=False)[list(columns)].sum().reset_index()
    table: pd.DataFrame = groups[keys].rename(columns={"name": "kernel"})
    time = groups["GKER (sec)"] if "GKER (sec)" in columns else pd.Series(np.nan, groups.index)
    table["time_ms"] = 1e3 * time
    table["share_percent"] = 100 * time / time.sum()
    listed = {canonical_name(metric.name) for metric in database.metrics}
    quantities = [
        derive({str(name): row[name] for name in columns if row[name]}, listed)
        for row in groups.to_dict("records")
    ]
    for name in (derivation.name for derivation in DERIVATIONS if derivation.of_kernels):
        results = [row[name] for row in quantities]
        table[name] = [np.nan if isinstance(result, str) else result for result in results]
    return table.sort_values("time_ms", ascending=False, kind="stable").reset_index(drop=True)


def functions_table(database: Database, metric: str, profile: int = 0) -> pd.DataFrame:
    """Self values of a metric by enclosing function, largest first.

    Columns: ``function``, ``module``, ``value`` (unit of the metric), ``share_percent``.
    """
    own = database.self_column(metric, profile)
    owner = database.nearest(database.tree.lexical_type == VIEWS_FUNCTION)
    by_row = pd.DataFrame({"owner": owner, "value": own})
    by_row = by_row[by_row["value"] != 0].groupby("owner")[["value"]].sum().reset_index()
    names, modules = database.names, [*database.meta.modules, ""]
    functions = database.meta.functions
    tree = database.tree
    rows = by_row["owner"].tolist()
    by_row["function"] = [names[r] if r >= 0 else "<outside every function>" for r in rows]
    by_row["module"] = [
        modules[functions[tree.function[r]].module] if r >= 0 and tree.function[r] >= 0 else ""
        for r in rows
    ]
    table = by_row.groupby(["function", "module"])[["value"]].sum().reset_index()
    total = own.sum()
    table["share_percent"] = 100 * table["value"] / total if total else 0.0
    return table.sort_values("value", ascending=False, kind="stable").reset_index(drop=True)


def describe(database: Database) -> str:
    """See ``Database.describe``."""
    meta, tree = database.meta, database.tree
    root = database.root()
    lines = [
        f"{database.path}: {meta.title}",
        f"format 4.{meta.minor_version}, {len(tree) - 1} contexts to depth {tree.depth.max()}, "
        f"{len(meta.functions)} functions, {len(meta.files)} files, {len(meta.modules)} modules",
        "",
        "measured, over all threads:",
    ]
    for name, value in sorted(root.items()):
        lines.append(f"  {name:24} {value:>16.6g} {unit_of(name):12} {meaning_of(name)}")
    if not root:
        lines.append("  nothing: no metric has a value")
    absent = not_measured(database)
    if absent:
        lines += ["", "not measured:"]
        by_reason: dict[str, list[str]] = {}
        for name, reason in absent.items():
            by_reason.setdefault(reason, []).append(name)
        lines += [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    numbers = {n: r for n, r in database.derived().items() if not isinstance(r, str)}
    if numbers:
        lines += ["", "derived, over the whole run:"]
        for derivation in DERIVATIONS:
            if derivation.name in numbers:
                lines.append(
                    f"  {derivation.name:24} {numbers[derivation.name]:>16.6g} "
                    f"{derivation.unit:12} {derivation.meaning}"
                )
    outside = int((tree.rows(database.profiles[0].contexts) < 0).sum())
    if outside:
        lines += [
            "",
            f"{outside} instruction points hold values and are not in the tree; what they "
            "measured is self time of the source line above them",
        ]
    lines += ["", "threads and streams:"]
    traced = {line.profile: len(line.time_ns) for line in database.traces}
    for thread in database.threads:
        profile = database.profiles[thread.profile]
        of_thread = database.root(thread.profile)
        own = ", ".join(f"{name} {of_thread[name]:.6g}" for name in _CHIEF if name in of_thread)
        lines.append(
            f"  {thread.name:28} {profile.count} values, {traced.get(thread.profile, 0)} trace "
            f"samples{'; ' + own if own else ''}"
        )
    chief = next((name for name in _CHIEF if name in root), None) or next(iter(root), None)
    if chief is not None:
        lines += ["", f"top functions by self {chief}:"]
        for row in functions_table(database, chief).head(TOP_FUNCTIONS).itertuples():
            lines.append(f"  {row.share_percent:5.1f} %  {row.value:12.6g}  {row.function}")
    if database.absent:
        lines += ["", "missing files:"]
        lines += [f"  {name}: {reason}" for name, reason in database.absent.items()]
    return "\n".join(lines) + "\n"


_CHIEF = ("CPUTIME (sec)", "REALTIME (sec)", "GPUOP (sec)", "GKER (sec)", "perf::task-clock")


def graph_frame(database: Database) -> GraphFrame:
    """See ``Database.to_hatchet``.

    Metrics keep their names: ``CPUTIME (sec)`` holds self values, ``CPUTIME (sec) (inc)``
    inclusive ones. Hatchet's own methods recurse; for a deep tree the recursion limit
    of this process is raised so that they work (see ``deep_frames``).
    """
    try:
        from dlrm_workbook.recordings import deep_frames
    except ImportError as problem:
        raise MissingToolError(
            "Hatchet is not installed; run `pip install 'llnl-hatchet>=2026.2.0' 'pandas<3'`"
        ) from problem
    contexts = database.contexts
    columns: dict[str, Any] = {}
    exclusive = list(database.root())
    for name, values in zip(exclusive, database.matrix(exclusive), strict=True):
        columns[name], columns[f"{name} (inc)"] = database.self_of(values), values
    labels = contexts[["name", "type", "file", "line", "module", "context"]]
    chief = next((name for name in _CHIEF if name in columns), None)
    return deep_frames.build(
        [
            {"name": name, "type": kind}
            for name, kind in zip(contexts["name"], contexts["type"], strict=True)
        ],
        database.tree.parent.tolist(),
        pd.concat([labels, pd.DataFrame(columns, index=labels.index)], axis=1),
        exclusive,
        [f"{name} (inc)" for name in exclusive],
        f"{chief or (exclusive[0] if exclusive else 'time')} (inc)",
        {"database": str(database.path), "title": database.meta.title},
    )


# ``dlrm database``: what an HPCToolkit database holds.


def database(arguments: argparse.Namespace) -> int:
    """Print the facts of a database as JSON, or a summary for people."""
    found = read_database(arguments.path)
    if arguments.json:
        print(json.dumps(found.facts(), indent=1, sort_keys=True))
    else:
        print(found.describe())
    return 0
