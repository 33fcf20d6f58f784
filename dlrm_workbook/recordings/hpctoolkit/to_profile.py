"""An HPCToolkit database as a ``Profile``: the same tables as every other engine.

Parts of our own step are found by name: a Python frame called ``component_phase``
(``bottom_mlp_forward``, see ``dlrm_core/parts.py``) stands for all that runs
below it, C++ and GPU kernels included, up to the next such frame. GPU time sits
under the CPU frames that launched it, so it is attributed by the same rule. Other
programs have other names, see :mod:`dlrm_workbook.recordings.hpctoolkit.parts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.text import counted
from dlrm_core.parts import ITERATION_FUNCTION, parse_span
from dlrm_workbook.ground.arrays import Floats, Ints
from dlrm_workbook.recordings.hpctoolkit.cautions import (
    cautions_of,
    is_serialised,
    overlong_kernels,
    sampling_quality,
    without_nonsense,
)
from dlrm_workbook.recordings.hpctoolkit.database import (
    AGAIN,
    FUNCTION,
    Database,
    Thread,
    refuse_negative,
)
from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError
from dlrm_workbook.recordings.hpctoolkit.meta import ENTRY, LEXICAL_TYPES, ROOT, Function
from dlrm_workbook.recordings.hpctoolkit.metrics import (
    COPY_KINDS,
    MEMORY_KINDS,
    additive,
    meaning_of,
    unit_of,
)
from dlrm_workbook.recordings.hpctoolkit.parts import (
    by_names,
    divide,
    iteration_functions,
    parts_in_order,
    work_on_gpus,
)
from dlrm_workbook.recordings.hpctoolkit.views import kernel_rows, unmeasured_metrics
from dlrm_workbook.recordings.profile import STANDARD_METRICS, THREAD_KINDS, Profile, nearest, typed
from dlrm_workbook.recordings.repetition import find_iterations

CPU_TIMES = {
    "CPUTIME (sec)": 1e3,
    "REALTIME (sec)": 1e3,
    "perf::task-clock": 1e-6,
    "perf::cpu-clock": 1e-6,
}
"""Metrics that can be ``cpu_time_ms``, best first, and milliseconds per unit."""
GPU_TIMES = ("GPUOP (sec)", "GKER (sec)", "GXCOPY (sec)", "GMSET (sec)")
COPY_BYTE_METRICS = tuple(
    f"{family}:{kind} (B)"
    for family, kinds in (("GXCOPY", COPY_KINDS), ("GMSET", MEMORY_KINDS))
    for kind in kinds
)
SHARED_METRICS = STANDARD_METRICS | {
    "launches": ("", "GPU kernels that ran"),
    "copy_bytes": ("B", "bytes of GPU copies and memory sets"),
}
"""Metrics that profiles of several engines have: name to (unit, meaning)."""
GPU_CALLS = ("GKER:COUNT", "GXCOPY:COUNT", "GMSET:COUNT")
SCALE = CPU_TIMES | dict.fromkeys(GPU_TIMES, 1e3)
"""Milliseconds per unit of the metrics that standard times are made of."""
WHY_ABSENT = {
    "cpu_time_ms": "no CPU time in this database; measure with hpcrun -e CPUTIME",
    "gpu_time_ms": "no GPU operation in this database; measure with hpcrun -e gpu=nvidia",
    "calls": "HPCToolkit samples CPU functions and does not count their calls",
}
"""Standard metric to the reason why a database has none."""

NO_ALLOCATIONS = (
    "HPCToolkit does not see torch's allocations; "
    "`dlrm run profile -f FILE -p profiling.engine=torch` does"
)

DIVIDED = (
    "call paths belong to several parts (kernels of bottom and top MLP are launched from the same "
    "place in the backward pass): each part has the share of their time that its operations have "
    "in the trace"
)

AMD_LIBRARIES = ("amdgpu", "rocm", "hsa-")
"""In the names of load modules of programs that compute on AMD's GPUs."""

PYTHON_MODULE = "<logical python>"
"""Load module of the Python frames of ``hpcrun -a python``."""

KIND_OF_TYPE = {ROOT: "root", ENTRY: "thread"} | dict(enumerate(LEXICAL_TYPES))

MOST_THREADS, MOST_ROWS = 256, 4_000_000
"""The tables hold up to so many threads (and streams) one by one, with up to so many values and
samples together, so that a profile needs the memory of its contexts."""
LEFT_TO_THE_SUM = 1e-9
"""A rest of a sum up to this share of it is rounding, once the threads that are held are taken
off."""

FEW_SAMPLES = 100
"""Fewer samples do not show that files are of different runs."""


def profile_from_database(database: Database, parts: Mapping[str, str] | None = None) -> Profile:
    """The Profile tables of a database; row numbers of contexts and profiles are kept.

    ``cpu_time_ms`` and ``gpu_time_ms`` come from sampled CPU time and from the time of
    GPU operations; ``calls`` counts GPU launches, copies and sets. Other metrics keep
    their names (those of HPCToolkit 2025-05, whatever the database's generation).
    Exclusive values are self times over the tree, inclusive ones ``execution`` values.
    Metrics that do not add up (the sampling period) are left to the database. Contexts of
    several parts are divided; their copies stand behind the database's rows.

    Of more threads than the tables have room for (:func:`held_threads`) the others are one thread,
    without a trace: their sum. ``meta["left_out"]`` counts them by kind, and
    ``meta["main_thread"]`` says which thread does most, the sum apart. ``meta["overlong"]`` lists
    rows of the trace that last too long, each with its true end. ``parts`` has patterns to parts,
    for names that no rule knows (:class:`foreign.PartNames`). A DatabaseError says that the
    database is damaged, an InputError that ``parts`` names an unknown part.
    """
    held = held_threads(database)
    metrics, values, sources = _values(database, held)
    contexts, ours = _contexts(database)
    others, left_out, cautions = _left_out(database, held, values)
    threads = typed("threads", [asdict(thread) for thread in [*held, *others]] or None)
    trace = _trace(database, held, _time_of_samples(database, values))
    trace["context"] = _measured_twins(contexts, values)[trace["context"].to_numpy()]
    overlong = overlong_kernels(values, trace)
    iterations, notices, unmarked = _iterations(work_on_gpus(trace, threads))
    lost = contexts["name"].str.endswith(ITERATION_FUNCTION).any()  # in whatever scopes
    lost &= not iteration_functions(contexts, values).any()
    if not ours or parts or lost:
        labels = by_names(contexts, parts)
        order = parts_in_order(trace, threads, labels, iterations)
        tables, divided = divide((contexts, values, trace), labels, order, overlong)
        contexts, values, trace = tables
        notices += [f"{divided} {DIVIDED}"] if divided else []
    quality = sampling_quality(database.measured())
    values, nonsense, absurd = without_nonsense(values, contexts)
    amd = any(word in name for name in database.meta.modules for word in AMD_LIBRARIES)
    serialised = quality is not None and is_serialised(trace, contexts, amd)
    cautions = [
        *database.cautions,
        *cautions,
        *cautions_of(contexts, values, trace, overlong, serialised),
        *absurd,
    ]
    profile = Profile.build(
        contexts=contexts,
        metrics=metrics[~metrics["metric"].isin(list(nonsense))],
        values=values,
        threads=threads,
        trace=trace,
        iterations=iterations,
        meta={
            "engine": "hpctoolkit",
            "device": "cuda" if "gpu_time_ms" in sources else "cpu",
            "database": str(database.path),
            "title": database.meta.title,
            "passes": [],
            "not_measured": _reasons(database, sources) | unmarked | nonsense,
            "notices": notices,
            "cautions": cautions,
            "overlong": list(overlong.items()),
            **({"serialised": serialised, "pc_sampling": quality} if quality else {}),
            **left_out,
        },
    )
    _refuse_contradictions(database, profile)
    return profile


def _reasons(database: Database, measured: Collection[str]) -> dict[str, str]:
    """Why something is not measured; ``measured`` are the standard metrics that are."""
    reasons = unmeasured_metrics(database)
    reasons |= {name: why for name, why in WHY_ABSENT.items() if name not in measured}
    if not database.traces:
        reasons["trace"] = database.absent.get("trace.db", "trace.db has no trace lines")
    return reasons | {"allocated_bytes": NO_ALLOCATIONS}


def _iterations(work: pd.DataFrame) -> tuple[pd.DataFrame | None, list[str], dict[str, str]]:
    """(iterations of the GPU's work, how they were found, why there are none)."""
    why = "HPCToolkit does not mark iterations"
    spans = find_iterations(*(work[name].to_numpy() for name in ("start_ns", "end_ns", "context")))
    if not spans:
        why += ", and no sequence of launches on the GPU repeats" if len(work) else ""
        return None, [], {"iterations": why}
    iterations = pd.DataFrame(spans, columns=["start_ns", "end_ns"])
    notice = (
        f"no iteration is marked in this database: {len(spans)} were found from the "
        "repeating sequence of launches on the GPU"
    )
    return iterations.assign(iteration=np.arange(len(spans))), [notice], {}


def _measured_twins(contexts: pd.DataFrame, values: pd.DataFrame) -> Ints:
    """The context (contexts,) that holds the values of each context, which is mostly itself.

    Where kernels are sampled, the trace names a kernel below a second ``<gpu kernel>`` of the
    same caller, which has no values.
    """
    result = np.arange(len(contexts))
    parent = contexts["parent"].to_numpy()
    kernel = contexts["kind"].eq("kernel").to_numpy() & (parent >= 0)
    placeholder = contexts["kind"].eq("runtime").to_numpy()[parent]
    caller = np.where(placeholder, parent[parent], parent)
    table = contexts.loc[kernel, ["name", "module"]].assign(caller=caller[kernel])
    table["valued"] = np.isin(table.index, values["context"].unique())
    for _, rows in table.groupby(["name", "module", "caller"], sort=False):
        if len(rows) > 1 and rows["valued"].sum() == 1:
            result[rows.index] = rows.index[rows["valued"]][0]
    return result


def _contexts(database: Database) -> tuple[pd.DataFrame, bool]:
    """(contexts, whether functions of our own step name their parts)."""
    tree, meta = database.tree, database.meta
    # the last of each is of what is not known, −1
    modules = np.array([*meta.modules, ""], dtype=object)
    files = np.array([*meta.files, ""], dtype=object)
    functions = pd.DataFrame([*meta.functions, Function("", -1, 0, -1, 0)])
    names = functions["name"].astype(str)
    python = pd.Series(files[functions["file"]]).str.endswith(".py").to_numpy(dtype=bool)
    python |= modules[functions["module"]] == PYTHON_MODULE
    # the placeholders of GPU operations are functions, named in the table as they are there
    copies = names.str.startswith(("<gpu copy", "<gpu memset"))
    placeholders = names.str.startswith("<gpu ")
    of_function = np.select([copies, placeholders, python], ["copy", "runtime", "python"], "")
    lexical = pd.Series(tree.lexical_type).map(KIND_OF_TYPE).fillna("function")
    kinds = lexical.to_numpy(dtype=object, copy=True)
    is_function = tree.lexical_type == FUNCTION
    told = is_function & (of_function != "")[tree.function]
    kinds[told] = of_function[tree.function[told]]
    kinds[kernel_rows(database)] = "kernel"
    # Only Python functions: a C++ function that happens to be called so is no part.
    parts = [
        parse_span(name.rpartition(".")[2]) if is_python else None
        for name, is_python in zip(names, python, strict=True)
    ]
    named = np.array([part is not None for part in parts])
    owner = nearest(tree.parent, named[tree.function] & is_function)
    labels = np.array([part or ("other", "") for part in parts], dtype=object)
    component, phase = labels[np.where(owner >= 0, tree.function[owner], -1)].T
    # A function's own file, line and module stand in where the context has none.
    own = functions.iloc[tree.function]
    has_source = tree.file >= 0
    contexts = pd.DataFrame(
        {
            "context": np.arange(len(tree)),
            "parent": tree.parent,
            "kind": kinds,
            "name": database.names,
            "shapes": "",
            "file": files[np.where(has_source, tree.file, own["file"])],
            "line": np.where(has_source, tree.line, own["line"]),
            "module": modules[np.where(tree.module >= 0, tree.module, own["module"])],
            "component": component,
            "phase": phase,
        }
    )
    return contexts, bool((component != "other").any())


def held_threads(database: Database) -> list[Thread]:
    """The threads and streams that a profile holds one by one, in the order of the file.

    These are all, as a rule. Of more than ``MOST_THREADS`` of a kind, or with more than
    ``MOST_ROWS`` values and samples, they are the first CPU thread and those that were busy
    longest: on the GPU, then on the CPU.
    """
    lines = {line.profile: line for line in database.traces}
    times = [
        [name for name, canonical in database.canonical.items() if canonical == chief]
        for chief in (*GPU_TIMES, *CPU_TIMES)
    ]

    def rows(thread: Thread) -> int:
        line = lines.get(thread.profile)
        return database.profiles[thread.profile].count + (line.count if line else 0)

    def busy(thread: Thread) -> tuple[float, ...]:
        if thread.kind == "gpu_stream":
            line = lines.get(thread.profile)
            return (float(np.diff(line.time_ns).sum() - line.idle_ns) if line else 0.0,)
        root = database.root(thread.profile)
        return tuple(sum(root.get(name, 0.0) for name in names) for names in times)

    held: set[int] = set()
    for kind in THREAD_KINDS:
        threads = [thread for thread in database.threads if thread.kind == kind]
        if len(threads) > MOST_THREADS or sum(map(rows, threads)) > MOST_ROWS:
            first = threads[:1] if kind == "cpu_thread" else []
            threads = first + sorted(threads[len(first) :], key=busy, reverse=True)
            fit = int((np.cumsum([rows(thread) for thread in threads]) <= MOST_ROWS).sum())
            threads = threads[: min(max(fit, 1), MOST_THREADS)]
        held |= {thread.profile for thread in threads}
    return [thread for thread in database.threads if thread.profile in held]


def _left_out(
    database: Database, held: list[Thread], values: pd.DataFrame
) -> tuple[list[Thread], dict[str, Any], list[str]]:
    """(the thread that stands for those not held, what ``meta`` knows of them, what to say)."""
    kinds = [thread.kind for thread in database.threads]
    held_kinds = [thread.kind for thread in held]
    counts = {kind: kinds.count(kind) - held_kinds.count(kind) for kind in THREAD_KINDS}
    cautions, command = [], "`dlrm database DATABASE --json`"
    if streams := counts["gpu_stream"]:
        cautions.append(
            f"{streams:,} of {kinds.count('gpu_stream'):,} GPU streams, those with the least "
            "work, are not in the timeline: the GPU may have been less idle than it says. "
            f"{command} lists them."
        )
    if not (threads := counts["cpu_thread"]):
        return [], {"left_out": counts} if cautions else {}, cautions
    cpu = [thread.profile for thread in held if thread.kind == "cpu_thread"]
    cpu_times = values[values["metric"].eq("cpu_time_ms") & values["profile"].isin(cpu)]
    time = cpu_times[cpu_times["scope"].eq("exclusive")].groupby("profile")["value"].sum().to_dict()
    # not the sum, which is of no thread and may have the most time
    main_thread = max(cpu, key=lambda profile: time.get(profile, 0.0))
    cautions.append(
        f"The {len(cpu):,} busiest of {kinds.count('cpu_thread'):,} CPU threads stand here one by "
        f"one. The others ({counted(threads, 'thread')}) stand here as one, with the sum of what "
        f"was measured of them and without a timeline. {command} has the sums of each thread."
    )
    # no profile of the file has this number
    name, number = counted(threads, "other thread"), len(database.profiles)
    others = Thread(number, "cpu_thread", name, -1, -1)
    return [others], {"left_out": counts, "main_thread": main_thread}, cautions


def _by_thread(
    database: Database, held: list[Thread]
) -> Iterator[tuple[int, tuple[Ints, Ints, Floats]]]:
    """(profile, its inclusive values) of each thread that is held, then of all others together.

    The others have what the sum over all threads has more than those that are held.
    """
    others = sum(thread.kind == "cpu_thread" for thread in database.threads)
    others -= sum(thread.kind == "cpu_thread" for thread in held)
    index, row, whole = database.inclusive_values(0)
    if not others:
        index, row, whole = index[:0], row[:0], whole[:0]
    key, left = index * len(database.tree) + row, whole.copy()
    for thread in held:
        inclusive = database.inclusive_values(thread.profile)
        yield thread.profile, inclusive
        if len(key):
            theirs = inclusive[0] * len(database.tree) + inclusive[1]
            place = np.minimum(np.searchsorted(key, theirs), len(key) - 1)
            in_sum = key[place] == theirs  # cautions say it where the sum lacks a context
            left[place[in_sum]] -= inclusive[2][in_sum]
    if len(key):
        more = np.abs(left) > LEFT_TO_THE_SUM * np.abs(whole)
        yield len(database.profiles), (index[more], row[more], left[more])


def _values(
    database: Database, held: list[Thread]
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, list[str]]]:
    """(metrics, values, standard metric to what it was made of)."""
    canonical = database.canonical
    present: dict[str, list[str]] = {}
    for name in database.root():
        if additive(name):
            present.setdefault(canonical[name], []).append(name)
    gpu = [name for name in GPU_TIMES if name in present]
    made = {
        "cpu_time_ms": [name for name in CPU_TIMES if name in present][:1],
        # GPUOP is the sum of the others; older databases only have the parts.
        "gpu_time_ms": gpu[:1] if "GPUOP (sec)" in gpu else gpu,
        "calls": [name for name in GPU_CALLS if name in present],
        "launches": [name for name in ("GKER:COUNT",) if name in present],
        "copy_bytes": [name for name in COPY_BYTE_METRICS if name in present],
    }
    standard = {name: sources for name, sources in made.items() if sources}
    made_of = {name for names in standard.values() for name in names}
    # GPU times and counts stay besides: kernel and copy tables need each of them.
    replaced = {name for name in made_of if name in CPU_TIMES or name == "GPUOP (sec)"}
    sources = standard | {name: [name] for name in present if name not in replaced}
    order = sorted(sources)
    rows = []
    for name in order:
        shared = SHARED_METRICS[name] if name in standard else (unit_of(name), meaning_of(name))
        listed = ", ".join(one for source in sources[name] for one in present[source])
        rows.append((name, *shared, f"HPCToolkit {listed}"))
    metrics = pd.DataFrame(rows, columns=["metric", "unit", "meaning", "source"])
    # (metric of the database, metric of the profile, factor), all by number
    pairs = [
        (place, number, SCALE.get(canonical[metric.name], 1.0) if name in standard else 1.0)
        for place, metric in enumerate(database.metrics)
        for number, name in enumerate(order)
        if canonical[metric.name] in sources[name]
    ]
    # columns of numbers, named at the end: names are slow to join by the million
    pieces: list[tuple[int, Ints, int, int, Floats]] = []
    for profile, inclusive in _by_thread(database, held):
        exclusive = database.self_of_sparse(*inclusive)
        for side, (index, row, value) in enumerate((inclusive, exclusive)):
            bounds = np.searchsorted(index, np.arange(len(database.metrics) + 1))
            for place, number, factor in pairs:
                part = slice(bounds[place], bounds[place + 1])
                if part.start < part.stop:
                    pieces.append((profile, row[part], number, side, value[part] * factor))
    columns = ["profile", "context", "metric", "scope", "value"]
    if not pieces:
        return metrics, pd.DataFrame(columns=columns), standard
    profiles, contexts, numbers, sides, values = zip(*pieces, strict=True)
    value, sizes = np.concatenate(values), list(map(len, values))
    metric = np.repeat(np.array(numbers, np.int32), sizes)
    scope = np.repeat(np.array(sides, np.int8), sizes)
    if not np.isfinite(value).all():
        bad_metric = order[metric[np.flatnonzero(~np.isfinite(value))[0]]]
        raise DatabaseError(f"{database.path}: metric '{bad_metric}' has a value that is no number")
    table = pd.DataFrame(
        {
            "profile": np.repeat(profiles, sizes),
            "context": np.concatenate(contexts),
            "metric": _named(metric, order),
            "scope": _named(scope, ["inclusive", "exclusive"]),
            "value": value,
        }
    )
    several = [name for name in order if sum(len(present[listed]) for listed in sources[name]) > 1]
    if several:  # several inputs of one standard metric meet in one row
        mixed = table["metric"].isin(several)
        groups = table[mixed].groupby(columns[:-1], sort=False, observed=True)
        summed = groups["value"].sum().reset_index()
        table = pd.concat([table[~mixed], summed], ignore_index=True)
    return metrics, table, standard


def _refuse_contradictions(database: Database, profile: Profile) -> None:
    """Refuse files that are not of one run: each is whole, but they contradict each other."""
    values = profile.values
    negative = values["value"].clip(upper=0).groupby(values["metric"], observed=True).sum()
    whole = values["value"].abs().groupby(values["metric"], observed=True).sum()
    for metric in negative.index:
        refuse_negative(database, metric, -negative[metric], whole[metric])
    work = work_on_gpus(profile.trace, profile.threads)
    operations = profile.of_kind("kernel", "copy", "runtime")
    on_gpu = operations[work["context"]]
    if operations.any() and len(on_gpu) >= FEW_SAMPLES and on_gpu.mean() < 0.5:
        raise DatabaseError(
            f"{database.path}: meta.db and trace.db contradict each other: {(~on_gpu).sum()} of "
            f"{len(on_gpu)} samples of GPU streams are of no GPU operation; {AGAIN}"
        )


def _named(number: Any, names: list[str]) -> pd.Categorical:
    return pd.Categorical.from_codes(number, pd.Index(names))


SLEEPS_AFTER = 5
"""Times of a sample without a next one after which a thread slept: hpcrun's TRACE_GAP_FACTOR."""


def _time_of_samples(database: Database, values: pd.DataFrame) -> dict[int, int]:
    """Nanoseconds of processor time behind a sample, for each thread that was sampled."""
    exclusive = values[(values["metric"] == "cpu_time_ms") & (values["scope"] == "exclusive")]
    time = (exclusive.groupby("profile")["value"].sum() * 1e6).to_dict()
    lines = [line for line in database.traces if time.get(line.profile, 0) > 0]
    counts = {line.profile: int((line.context != 0).sum()) for line in lines}
    return {p: int(time[p] / count) for p, count in counts.items() if count}


def _trace(database: Database, held: list[Thread], sampled: Mapping[int, int]) -> pd.DataFrame:
    """What ran when: an interval a sample, to the next sample; gaps are context 0.

    A thread that sleeps takes no sample. hpcrun marks that as not running where the next sample
    comes late, but not where a thread ends, and not for every clock; so its rule is applied to
    every line of ``held`` threads again, with the processor time of a ``sampled`` thread's sample
    (nanoseconds).
    """
    frames = []
    threads = {thread.profile for thread in held}
    lines = [line for line in database.traces if line.profile in threads and line.count > 1]
    for line in lines:
        times, context = line.time_ns, line.context[:-1]
        rows = database.tree.rows(context)
        running = (context != 0) & (rows >= 0)
        start, end = times[:-1], times[1:]
        if period := sampled.get(line.profile):
            end = np.where(end - start > SLEEPS_AFTER * period, start + period, end)
        frames.append(
            pd.DataFrame(
                {
                    "profile": line.profile,
                    "start_ns": start[running],
                    "end_ns": end[running],
                    "context": rows[running],
                    "depth": database.tree.depth[rows[running]],
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else typed("trace", None)
