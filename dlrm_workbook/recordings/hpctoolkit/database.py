"""Reader of HPCToolkit databases, format 4.x, everything in them.

``read_database(path)`` gives a ``Database``: the calling-context tree with full
names, every thread, GPU context and stream, all metrics in all scopes, summary
statistics, and traces.

**Two rules decide whether figures are right.** Instruction points under a known
source line hold values but have no node in ``meta.db``, so summing ``point``
values over the tree loses time (most of it, often). And self time is therefore
``execution(node) - sum of execution(children in the tree)``: what a node did
itself, outside-tree points included. Self values over the tree add up to the
root, for each thread and in sum.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Floats, Ints
from dlrm_workbook.recordings.hpctoolkit.format import REPROCESS, DatabaseError, DatabaseFile
from dlrm_workbook.recordings.hpctoolkit.meta import ENTRY, ROOT, Meta, Metric, read_meta
from dlrm_workbook.recordings.hpctoolkit.metrics import (
    additive,
    canonical_name,
    canonical_names,
    derive,
)
from dlrm_workbook.recordings.hpctoolkit.values import (
    METRIC_IDS,
    ThreadProfile,
    TraceLine,
    read_profiles,
    read_traces,
)

FUNCTION, LOOP, LINE, INSTRUCTION = range(4)

SELF_ROUNDING = 1e-12
"""Self values below this share of their inclusive value are rounding, and become 0."""

CHIEF_METRICS = ("CPUTIME (sec)", "REALTIME (sec)", "GPUOP (sec)", "GKER (sec)", "perf::task-clock")
"""Metrics by which a reader sorts a tree, best first."""


@dataclass(frozen=True)
class Thread:
    """Where one profile was measured; a row of the table ``threads``.

    Attributes:
        profile: row in ``profile.db`` (0 is the summary and no thread).
        name: for instance ``rank 1 thread 0`` or ``rank 0 GPU 0 stream 7``; unique.
        rank, thread: −1 where there is none. For a stream ``thread`` is the stream.
    """

    profile: int
    kind: str
    name: str
    rank: int
    thread: int


@dataclass(eq=False)
class Database:
    """One HPCToolkit database. Get it from ``read_database``.

    Rows of the tree number its contexts: row 0 is the root over all entry points
    (context 0), parents precede children. Columns have shape (rows,).

    Attributes:
        profiles: the summary of the run (0), then every thread and stream.
        traces: empty where nothing was traced.
        absent: file to what is missing with it.
        cautions: sentences about what its files say of each other and cannot both be so.
        canonical: each metric's name to its 2025-05 name.
    """

    path: Path
    meta: Meta
    profiles: list[ThreadProfile]
    traces: list[TraceLine]
    absent: dict[str, str]
    cautions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree, self.metrics = self.meta.tree, self.meta.metrics
        self._metrics = {metric.name: metric for metric in self.metrics}
        self.canonical = canonical_names(self._metrics)
        self._named = {canonical: name for name, canonical in reversed(self.canonical.items())}

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
    def threads(self) -> list[Thread]:
        """CPU threads and GPU streams: every profile but summaries."""
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

    # ---- values over the tree ------------------------------------------------------

    def metric(self, name: str) -> Metric:
        """The metric called so here or in another generation of HPCToolkit. Where there is none, a
        DatabaseError lists those there are."""
        metric = self._metrics.get(name) or self._metrics.get(
            self._named.get(canonical_name(name), "")
        )
        if metric is None:
            listed = ", ".join(sorted(self._metrics)[:60]) or "none"
            raise DatabaseError(f"{self.path}: no metric '{name}'; it has {listed}")
        return metric

    def _ids(self, profile: int) -> dict[tuple[str, str], int]:
        """(metric, scope) to the id of its plain values in a profile."""
        return self._plain_ids[self.profiles[profile].summary]

    @functools.cached_property
    def _plain_ids(self) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
        """(metric, scope) to the id of its plain values in threads, and in summaries."""
        of_threads = {
            (metric.name, scope): number
            for metric in self.metrics
            for scope, number in metric.scopes.items()
        }
        of_summaries = {
            (metric.name, statistic.scope): statistic.metric_id
            for metric in self.metrics
            for statistic in metric.statistics
            if statistic.combine == "sum" and statistic.formula == "$$"
        }
        return of_threads, of_summaries

    def column(self, name: str, scope: str = "", profile: int = 0) -> Floats:
        """Values of a metric over the tree, 0 where a context has none; shape (rows,).

        Args:
            name: of the metric, in any generation's spelling.
            scope: ``point``, ``function``, ``lex_aware``, ``execution`` (the default).
            profile: row of ``profiles``; 0 sums over all threads.

        Raises:
            DatabaseError: no such metric, scope or profile, or its values are damaged.
        """
        if not 0 <= profile < len(self.profiles):
            raise DatabaseError(f"{self.path}: no profile {profile}, it has {len(self.profiles)}")
        metric, scope = self.metric(name), scope or self.meta.inclusive_scope
        number = self._ids(profile).get((metric.name, scope))
        if number is None:
            raise DatabaseError(
                f"{self.path}: metric '{metric.name}' has no scope '{scope}'; "
                f"it has {', '.join(metric.scopes)}"
            )
        # One place more, for the row −1 of what is outside the tree.
        result = np.zeros(len(self.tree) + 1)
        for context, metric_id, value in self.profiles[profile].chunks():
            chosen = metric_id == number
            result[self.tree.rows(context[chosen])] = value[chosen]
        return result[:-1]

    def self_column(self, name: str, profile: int = 0) -> Floats:
        """Self values of a metric over the tree; they add up to ``column(name)[0]``."""
        inclusive = self.column(name, profile=profile)
        below = np.bincount(self.tree.parent[1:], inclusive[1:], minlength=len(inclusive))
        exclusive = inclusive - below
        exclusive[np.abs(exclusive) <= SELF_ROUNDING * np.abs(inclusive)] = 0.0
        return exclusive

    def inclusive_values(self, profile: int) -> tuple[Ints, Ints, Floats]:
        """(metric index, row, inclusive value) of all metrics in a profile's tree, sparse.

        Metric indices count ``metrics``. Sorted by metric, then row.
        """
        scope = self.meta.inclusive_scope
        context, metric_id, value = self.profiles[profile].values()
        index_of = np.full(METRIC_IDS, -1, np.int64)
        order = {metric.name: i for i, metric in enumerate(self.metrics)}
        for (name, of_scope), number in self._ids(profile).items():
            if of_scope == scope:
                index_of[number] = order[name]
        index, rows = index_of[metric_id], self.tree.rows(context)
        keep = (index >= 0) & (rows >= 0)
        index, rows, value = index[keep], rows[keep], value[keep]
        sort = np.lexsort((rows, index))
        return index[sort], rows[sort], value[sort]

    def self_of_sparse(self, index: Ints, rows: Ints, value: Floats) -> tuple[Ints, Ints, Floats]:
        """Self values from inclusive ones, as ``inclusive_values`` gives them."""
        size = len(self.tree)
        key = index * size + rows
        above = self.tree.parent[rows]
        has_parent = above >= 0
        # Each value counts for its row and against its parent.
        all_keys = np.concatenate([key, (index * size + above)[has_parent]])
        keys, place = np.unique(all_keys, return_inverse=True)
        parts = np.concatenate([value, -value[has_parent]])
        exclusive: Floats = np.bincount(place, parts, minlength=len(keys)).astype(np.float64)
        scale = np.bincount(place[: len(key)], np.abs(value), minlength=len(keys))
        keep = np.abs(exclusive) > SELF_ROUNDING * scale
        return keys[keep] // size, keys[keep] % size, exclusive[keep]

    def root(self, profile: int = 0) -> dict[str, float]:
        """Metric to its inclusive value over the whole tree; only metrics with a value."""
        at_root = self.profiles[profile].at(0)
        scope = self.meta.inclusive_scope
        return {
            name: at_root[number]
            for (name, of_scope), number in self._ids(profile).items()
            if of_scope == scope and number in at_root
        }

    def measured(self) -> dict[str, float]:
        """Canonical metric to its inclusive value over the whole tree; only those with a value."""
        values: dict[str, float] = {}
        for name, value in self.root().items():
            values[self.canonical[name]] = values.get(self.canonical[name], 0.0) + value
        return values

    def derived(self) -> dict[str, float | str]:
        """Occupancy, utilisation, stall shares, ... of the run; a sentence where not measured."""
        return derive(self.measured(), self._named)


def _base(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def read_database(path: str | Path) -> Database:
    """Open an HPCToolkit database of format 4.x; values stay on disk (memory-mapped) until they are
    asked for. A DatabaseError says that it is none, of another format, incomplete or damaged, and
    names the file, what was found and what was expected, or what to do."""
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a database folder" if folder.exists() else "does not exist"
        raise DatabaseError(f"{folder}: {what}; give the folder that `hpcprof -o` wrote")
    if not (folder / "meta.db").is_file():
        raise DatabaseError(_no_database(folder))
    meta = read_meta(folder / "meta.db")
    if not (folder / "profile.db").is_file():
        raise DatabaseError(f"{folder} has meta.db but no profile.db; run hpcprof again")
    profiles = read_profiles(
        folder / "profile.db",
        meta.identifier_kinds,
        [number for metric in meta.metrics for number in metric.scopes.values()],
        [s.metric_id for metric in meta.metrics for s in metric.statistics],
    )
    database = Database(folder, meta, profiles, [], {})
    by_context: Ints | None = None
    if (folder / "trace.db").is_file():
        database.traces = read_traces(folder / "trace.db", len(profiles))
    else:
        database.absent["trace.db"] = "no traces; measure with hpcrun -t"
    if (folder / "cct.db").is_file():
        # The same values by context: only their counts are read.
        file = DatabaseFile(folder / "cct.db", "ctxt", b"__ctx.db", ("CtxInfos",))
        _, table = file.items("CtxInfos", "short list", "context info")
        by_context = table["value_count"].astype(np.int64)
    else:
        database.absent["cct.db"] = "no index by context; profile.db holds the same values"
    refuse_contradictions(database)
    database.cautions = contradictions(database, by_context)
    return database


CONTRADICTION = 0.01
"""Two figures of one thing that differ by more than this share are not rounding."""
GPU_TIMES_APART = 0.1
"""A trace that is shorter than the metrics by more than this share lacks operations."""
LONGEST_EXCESS_US = 20.0
"""Mean time by which a traced operation may be longer than by the metrics; in the recording of an
H100 (shared/recordings/dlrm-h100-pc.d) each of 8,715 is longer by 3.5 µs."""
AGAIN = "they are not of one run; run hpcprof again"


def refuse_contradictions(database: Database) -> None:
    """Refuse ``meta.db`` and ``profile.db`` that are not of one run, though each is whole; the
    DatabaseError names the files and what they disagree about."""
    root = database.root()
    of_threads: Counter[str] = Counter()
    for thread in database.threads:
        of_threads.update(database.root(thread.profile))
    for name, value in root.items():
        if additive(name) and abs(of_threads[name] - value) > CONTRADICTION * abs(value):
            raise DatabaseError(
                f"{database.path}: meta.db and profile.db contradict each other: {name} is "
                f"{value:.6g} in the summary and {of_threads[name]:.6g} over the threads; {AGAIN}"
            )
    for name in filter(root.get, CHIEF_METRICS):
        exclusive = database.self_column(name)
        refuse_negative(database, name, -exclusive.clip(max=0).sum(), np.abs(exclusive).sum())


def refuse_negative(database: Database, metric: str, negative: float, whole: float) -> None:
    """Refuse self values of which so much is below zero that it is no rounding."""
    if negative > CONTRADICTION * whole:
        raise DatabaseError(
            f"{database.path}: meta.db and profile.db contradict each other: callees have more of "
            f"{metric} than their callers; {AGAIN}"
        )


def contradictions(database: Database, by_context: Ints | None) -> list[str]:
    """Sentences about what the files of a database say of each other and cannot both be so;
    ``by_context`` is the number of values of each context id in ``cct.db``, if there is one."""
    cautions = []
    in_summary = database.profiles[0].contexts
    threads = [profile for profile in database.profiles if not profile.summary]
    summary, occurs = pd.Index(in_summary), np.zeros(len(in_summary), np.bool_)
    count, beside = np.zeros(len(in_summary), np.int64), in_summary[:0]
    for profile in threads:
        contexts, numbers = profile.contexts, np.diff(profile.starts, append=profile.count)
        place = summary.get_indexer(pd.Index(contexts))
        listed = place >= 0
        occurs[place[listed]] = True
        count[place[listed]] += numbers[listed]
        beside = np.union1d(beside, contexts[~listed])
    if threads and (len(beside) or not occurs.all()):
        cautions.append(
            "profile.db contradicts itself: its threads have values in "
            f"{occurs.sum() + len(beside):,} contexts, its summary in {len(in_summary):,}; one of "
            "them is damaged."
        )
    elif by_context is not None:
        most = max(int(database.tree.context.max()), int(in_summary.max(initial=0)))
        inside = in_summary < len(by_context)
        expected = np.zeros(len(in_summary), np.int64)
        expected[inside] = by_context[in_summary[inside]]
        elsewhere = np.count_nonzero(by_context) - np.count_nonzero(expected)
        differ = int((count != expected).sum() + elsewhere)
        if differ or most >= len(by_context):
            cautions.append(
                f"cct.db is of another run, or damaged: it lists {len(by_context):,} contexts, the "
                f"other files {most + 1:,}, and the number of values differs in {differ:,}."
            )
    if database.traces:
        known, unknown = np.zeros(len(database.tree) + 1, np.bool_), in_summary[:0]
        for line in database.traces:
            contexts = line.context
            rows = database.tree.rows(contexts)
            known[rows] = True
            unknown = np.union1d(unknown, contexts[rows < 0])
        if len(unknown):
            cautions.append(
                f"{len(unknown):,} of {known[:-1].sum() + len(unknown):,} contexts of trace.db are "
                "not in meta.db: it is of another run, or damaged, so times over the run are not "
                "to be relied on."
            )
        lines = sorted(line.profile for line in database.traces)
        if lines != [profile.number for profile in threads]:
            cautions.append(
                f"trace.db has {len(lines):,} lines, of {len(set(lines)):,} of the "
                f"{len(threads):,} threads and streams in profile.db: nothing is known of when "
                "the others ran, or it is of another run."
            )
        else:
            cautions += _odd_gpu_time(database)
    cautions += _odd_points(database)
    return cautions


def _odd_gpu_time(database: Database) -> list[str]:
    """Say if the GPU's operations in the trace do not take the time that the metrics say."""
    streams = {thread.profile for thread in database.threads if thread.kind == "gpu_stream"}
    count = traced_ns = 0
    for line in database.traces:
        if line.profile in streams:
            span = np.diff(line.time_ns)[line.context[:-1] != 0]
            count, traced_ns = count + len(span), traced_ns + int(span.sum())
    metric_ms = 1e3 * database.measured().get("GPUOP (sec)", 0.0)
    if not count or not metric_ms:
        return []
    traced_ms = traced_ns / 1e6
    each_us = 1e3 * (traced_ms - metric_ms) / count
    if -GPU_TIMES_APART * metric_ms <= traced_ms - metric_ms and each_us <= LONGEST_EXCESS_US:
        return []
    return [
        f"trace.db has {traced_ms:,.1f} ms of GPU operations where profile.db has "
        f"{metric_ms:,.1f} ms ({each_us:+,.1f} µs for each of {count:,}): it is not whole, or of "
        "another run, so times over the run are not to be relied on."
    ]


def _odd_points(database: Database) -> list[str]:
    """Metrics whose values at points do not add up to the whole run's."""
    total, _ = database.profiles[0].sums()
    ids, at_root = database._ids(0), database.profiles[0].at(0)
    odd = []
    for metric in database.metrics:
        point = ids.get((metric.name, "point"))
        whole = at_root.get(ids.get((metric.name, database.meta.inclusive_scope), -1))
        if point is None or whole is None or not additive(metric.name):
            continue
        if abs(total[point] - whole) > CONTRADICTION * abs(whole):
            odd.append(f"{metric.name} ({total[point]:.6g} of {whole:.6g})")
    if not odd:
        return []
    listed = ", ".join(odd[:3]) + (", ..." if len(odd) > 3 else "")
    return [f"Values at points do not add up to the whole run's: {listed}; profile.db is damaged."]


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
