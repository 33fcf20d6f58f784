"""What an HPCToolkit database holds: as tables, as text and as facts (``dlrm database``)."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.recordings.hpctoolkit.database import (
    CHIEF_METRICS,
    FUNCTION,
    Database,
    read_database,
)
from dlrm_workbook.recordings.hpctoolkit.meta import ENTRY, LEXICAL_TYPES, RELATIONS, enumerated
from dlrm_workbook.recordings.hpctoolkit.metrics import (
    DERIVATIONS,
    meaning_of,
    reason_without_value,
    unit_of,
)
from dlrm_workbook.recordings.profile import nearest

GPU_KERNEL = "<gpu kernel>"
TOP_FUNCTIONS = 12


def database_facts(database: Database) -> dict[str, Any]:
    """Counts, sums and traces (``dlrm database PATH --json``); integers exact, sums as numpy
    adds them. The keys are those of the stored expectations that this reader is tested against.
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
    in_tree = tree.rows(summary.contexts) >= 0
    names = [function.name for function in meta.functions]
    return {
        **({"cautions": database.cautions} if database.cautions else {}),
        "database": database.path.resolve().name,
        "title": meta.title,
        "contexts_without_root": len(tree) - 1,
        "context_types": _counts(tree.lexical_type[1:], LEXICAL_TYPES),
        "relations": _counts(tree.relation[tree.lexical_type >= 0], RELATIONS),
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
                "samples": line.count,
                "first_ns": int(line.time_ns[0]) if line.count else None,
                "last_ns": int(line.time_ns[-1]) if line.count else None,
                "idle_ns": line.idle_ns,
            }
            for line in database.traces
        ],
    }


def _counts(values: Ints, names: tuple[str, ...]) -> dict[str, int]:
    """How often each value occurs, by its name, in alphabetical order."""
    distinct, number = np.unique(values, return_counts=True)
    listed = ["entry" if value == ENTRY else enumerated(names, value) for value in distinct]
    return dict(sorted(zip(listed, number.tolist(), strict=True)))


def _named_sums(profile: Any, names: dict[int, str]) -> dict[str, float]:
    total, number = profile.sums()
    return {names[i]: float(total[i]) for i in np.flatnonzero(number).tolist()}


def unmeasured_metrics(database: Database) -> dict[str, str]:
    """Metric or derived quantity to the reason why there is no number for it."""
    root = database.root()
    measured = database.measured()
    reasons = {
        metric.name: reason_without_value(metric.name, measured)
        for metric in sorted(database.metrics, key=lambda metric: metric.name)
        if metric.name not in root
    }
    listed = {name.partition(":")[0] for name in database.canonical.values()}
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


def kernel_rows(database: Database) -> Bools:
    """Which rows are GPU kernels: functions called by ``<gpu kernel>``.

    Where nothing is known below ``<gpu kernel>`` (no PC samples, no GPU binary), the
    placeholder itself stands for its kernels.
    """
    tree, meta = database.tree, database.meta
    placeholder = np.array([f.name == GPU_KERNEL for f in meta.functions] + [False])[tree.function]
    placeholder &= tree.lexical_type == FUNCTION
    below = placeholder[np.maximum(tree.parent, 0)] & (tree.parent >= 0)
    kernels = below & (tree.lexical_type >= FUNCTION)
    childless = placeholder.copy()
    childless[tree.parent[kernels]] = False
    return kernels | childless


def functions_table(database: Database, metric: str) -> pd.DataFrame:
    """Self values of a metric by enclosing function, largest first.

    Columns: ``function``, ``module``, ``value`` (unit of the metric), ``share_percent``.
    """
    exclusive = database.self_column(metric)
    owner = nearest(database.tree.parent, database.tree.lexical_type == FUNCTION)
    by_row = pd.DataFrame({"owner": owner, "value": exclusive})
    by_row = by_row[by_row["value"] != 0].groupby("owner")[["value"]].sum().reset_index()
    # of row -1 and function -1, which are none, the last
    names = np.array([*database.names, "<outside every function>"], dtype=object)
    modules = np.array([*database.meta.modules, ""], dtype=object)
    module_of = np.array([*(function.module for function in database.meta.functions), -1])
    by_row["function"] = names[by_row["owner"]]
    by_row["module"] = modules[module_of[np.append(database.tree.function, -1)[by_row["owner"]]]]
    table = by_row.groupby(["function", "module"])[["value"]].sum().reset_index()
    total = exclusive.sum()
    table["share_percent"] = 100 * table["value"] / total if total else 0.0
    return table.sort_values("value", ascending=False, kind="stable").reset_index(drop=True)


def database_summary(database: Database) -> str:
    """A summary to read: metrics, threads, totals, top functions, what is missing."""
    meta, tree, root = database.meta, database.tree, database.root()
    by_reason: dict[str, list[str]] = {}
    for name, reason in unmeasured_metrics(database).items():
        by_reason.setdefault(reason, []).append(name)
    derived = database.derived()
    numbers = [
        (one, value) for one in DERIVATIONS if not isinstance(value := derived[one.name], str)
    ]
    outside = int((tree.rows(database.profiles[0].contexts) < 0).sum())
    traced = {line.profile: line.count for line in database.traces}
    threads = []
    for thread in database.threads:
        total = database.root(thread.profile)
        times = ", ".join(f"{name} {total[name]:.6g}" for name in CHIEF_METRICS if name in total)
        threads.append(
            f"{thread.name:28} {database.profiles[thread.profile].count} values, "
            f"{traced.get(thread.profile, 0)} trace samples{'; ' + times if times else ''}"
        )
    chief = next((name for name in CHIEF_METRICS if name in root), None) or next(iter(root), None)
    top = functions_table(database, chief).head(TOP_FUNCTIONS) if chief else pd.DataFrame()
    sections = {
        "measured, over all threads:": [
            f"{name:24} {value:>16.6g} {unit_of(name):12} {meaning_of(name)}"
            for name, value in sorted(root.items())
        ]
        or ["nothing: no metric has a value"],
        "not measured:": [f"{', '.join(names)}: {why}" for why, names in by_reason.items()],
        "derived, over the whole run:": [
            f"{one.name:24} {value:>16.6g} {one.unit:12} {one.meaning}" for one, value in numbers
        ],
        "outside of the tree:": [
            f"{outside} instruction points hold values; what they measured is self time of the "
            "source line above them"
        ]
        if outside
        else [],
        "threads and streams:": threads,
        f"top functions by self {chief}:": [
            f"{row.share_percent:5.1f} %  {row.value:12.6g}  {row.function}"
            for row in top.itertuples()
        ],
        "read with caution:": database.cautions,
        "missing files:": [f"{name}: {reason}" for name, reason in database.absent.items()],
    }
    lines = [
        f"{database.path}: {meta.title}",
        f"format 4.{meta.minor_version}, {len(tree) - 1} contexts to depth {tree.depth.max()}, "
        f"{len(meta.functions)} functions, {len(meta.files)} files, {len(meta.modules)} modules",
    ]
    for title, listed in sections.items():
        lines += ["", title, *(f"  {line}" for line in listed)] if listed else []
    return "\n".join(lines) + "\n"


def database(arguments: argparse.Namespace) -> int:
    opened = read_database(arguments.path)
    if arguments.json:
        print(json.dumps(database_facts(opened), indent=1, sort_keys=True))
    else:
        print(database_summary(opened))
    return 0
