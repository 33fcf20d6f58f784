"""The embedding tables: which rows are asked for, and what reading and updating them costs."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrm_core.data.reuse import ReuseLaw
from dlrm_workbook.analysis.findings.evidence import Evidence, heaviest
from dlrm_workbook.analysis.findings.finding import Causes, Measured, amdahl, bounded, rule
from dlrm_workbook.recordings.foreign import node_key

SKEW = 4.0
"""Times as often as the generator's law expects is the hottest row asked for."""

HOT_SHARE = 0.05
"""Of a table's lookups, by one row; below it contention costs nothing that is measurable."""

FEW_ROWS = 64
"""Rows; in a smaller table each row is hot whatever the law."""


@rule(
    "skewed_indices",
    title="{hottest:.0%} of a table's lookups go to a single row",
    evidence=(
        "So it is in {hot_tables} of {tables} tables.",
        "Worst, table {table}: {hottest:.0%} of its {lookups:,.0f} lookups per batch fall on one "
        "of {rows:,} rows, where {law} expects {expected:.2%}; only {different:,.0f} different "
        "rows are asked for.",
        "Reading and updating tables takes {share:.0%} of the step.",
    ),
    advice="Check the indices (a constant column, a default value, a hash that collides). If they "
    "are meant, sum the gradients of equal rows before the update. Times measured with them say "
    "little of real data: hot rows stay in cache.",
    limit="random rows",
    component="embedding",
    concerns=("embedding",),
)
def skewed_indices(evidence: Evidence, ledger: Causes) -> Measured | None:
    """One row, or a few, get most of a table's lookups."""
    hot = []
    for table in evidence.tables:
        expected, share = _expected_hottest(evidence, table), float(table["hottest_share"])
        if table["rows"] >= FEW_ROWS and share >= HOT_SHARE and share >= SKEW * expected:
            hot.append((share, expected, table))
    if not hot:
        return None
    share, expected, table = max(hot, key=lambda row: row[0])
    threads = evidence.threads or 1
    generator = evidence.parameter("data.generator")
    # a hot row is one thread's work, or is fought for: at best the others take their part of it
    updates = evidence.share("embedding", "update") + evidence.share("embedding", "backward")
    gain = amdahl(updates * share, float(threads)) if threads > 1 else 1.0
    return {
        "share": evidence.share("embedding"),
        "least": 0.0,
        "hottest": share,
        "hot_tables": len(hot),
        "tables": len(evidence.tables),
        "table": table["table"],
        "lookups": float(table["lookups_per_batch"]),
        "rows": table["rows"],
        "law": f"data.generator '{generator}'" if generator else "a uniform law",
        "expected": expected,
        "different": table["unique_rows_per_batch"],
        "speedup": {"low": 1.0, "mid": gain**0.5, "high": gain},
        "limit": "random rows" if threads == 1 else "load imbalance",
    }


UNREAD = re.compile("grad_indice_weights|per_sample_weights_backward")
"""Kernels that compute the gradient of a lookup's per-sample weights."""

UNREAD_SHARE = 0.02

_LOOKUP = re.compile(r"lookup_\w+_function|embedding_bag\b")
_ONE_DIMENSION = re.compile(r"\[(\d+)\]")


@rule(
    "unread_gradient",
    title="A gradient that nothing reads takes {share:.0%} of the step: of the weights of a lookup",
    evidence=(
        "{kernel} computes the gradient of per-sample weights in {time:ms} per iteration.",
        "By the recorded shapes it has {sizes} values, and no node of autograd takes so many.",
    ),
    advice="Where the weights are not learned, say so: FBGEMM computes their gradient unless "
    "feature_requires_grad is given as zeros, and autograd discards it.",
    limit="memory bandwidth",
    component="embedding",
    gpu=True,
    concerns=("embedding",),
)
def unread_gradient(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The backward of a lookup computes a gradient of its weights that no later node takes."""
    kernels = evidence.kernels[evidence.kernels["kernel"].str.contains(UNREAD)]
    time, contexts = float(kernels["ms"].sum()), evidence.profile.contexts
    called = contexts[contexts["kind"].eq("operator") & contexts["shapes"].ne("")]
    lookups = called.loc[called["name"].str.contains(_LOOKUP), "shapes"]
    sizes = set()
    for shapes in lookups:  # indices and their weights are as many
        counts = Counter(map(int, _ONE_DIMENSION.findall(shapes)))
        twice = [size for size, count in counts.items() if count > 1]
        sizes |= {max(twice)} if twice else set()
    nodes = called.loc[[node_key(name) is not None for name in called["name"]], "shapes"]
    taken = {int(size) for shapes in nodes for size in _ONE_DIMENSION.findall(shapes)}
    if kernels.empty or not sizes or nodes.empty or sizes & taken:
        return None
    return {
        "share": time / evidence.total_ms,
        "least": UNREAD_SHARE,
        "explains": ("embedding", "backward"),
        "device_work": kernels["kernel"],
        "kernel": str(kernels["short_name"].iloc[0]),
        "time": time,
        "sizes": ", ".join(f"{size:,}" for size in sorted(sizes, reverse=True)),
        "pieces": evidence.of_kernels(kernels["kernel"]),
    }


GIANT_SHARE, GIANT_TIMES = 0.6, 8.0
"""Share of all tables' bytes or lookups, and times the median table's."""


@rule(
    "giant_table",
    title="Table {table} has {of_rows:.0%} of all rows",
    evidence=(
        "Table {table} has {rows:,} rows ({gigabytes:.2f} GB), {of_rows:.0%} of all rows; the "
        "median table has {median:,.0f}.",
        "It gets {of_lookups:.0%} of the lookups.",
        "Its own operators take {time:ms} per iteration, the median table's {usual:ms}.",
    ),
    advice="Hash it into fewer rows or split it by columns or rows: no placement of whole tables "
    "can balance it, and its rows come from memory while the others' may stay in cache.",
    limit="memory capacity",
    component="embedding",
    concerns=("embedding",),
)
def giant_table(evidence: Evidence, ledger: Causes) -> Measured | None:
    """One table is far larger than the others, in bytes or in lookups."""
    rows = evidence.table_rows
    if len(rows) < 3:
        return None
    dim = int(evidence.parameter("model.embedding_dim", 0) or 0)
    looked_up = {table["table"]: float(table["lookups_per_batch"]) for table in evidence.tables}
    lookups = [looked_up.get(number, 0.0) for number in range(len(rows))]
    by_bytes, by_lookups = _dominant(rows), _dominant(lookups)
    if 4.0 * dim * max(rows) <= float(evidence.ceiling("last_level_cache_bytes") or 32 << 20):
        by_bytes = None
    number = by_lookups if by_lookups is not None else by_bytes
    if number is None:
        return None
    share = evidence.share("embedding")
    time, usual = _table_times(evidence, rows, dim, number)
    lost = (time - usual) / evidence.total_ms if time and usual else share * 0.5
    lost = min(max(lost, 0.0), share)
    return {
        "share": lost if time is not None else share,
        "least": 0.0,
        "table": number,
        "rows": rows[number],
        "of_rows": rows[number] / sum(rows),
        "gigabytes": 4e-9 * dim * rows[number],
        "median": statistics.median(rows),
        "of_lookups": lookups[number] / sum(lookups) if sum(lookups) else None,
        "time": time,
        "usual": usual or None,
        "speedup": bounded(lost),
        "limit": "load imbalance" if by_lookups is not None else "memory capacity",
    }


@rule(
    "embedding_update",
    title="The sparse embedding update takes {share:.0%} of the step",
    evidence=(
        "Updating the embedding tables takes {time:ms} of {total_ms:ms} ({share:.0%}).",
        "Most of it: {heaviest}.",
    ),
    advice="torch first builds a sparse gradient of every looked-up row and then applies it; the "
    "fused backend updates each row in the backward pass. What it takes here was not probed, so "
    "the range is only bounded.",
    limit="random rows",
    component="embedding",
    concerns=("embedding",),
)
def embedding_update(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The sparse update is a large part of the step, and no probe tells what would replace it."""
    backend = evidence.parameter("training.embedding_backend", "torch")
    probed = any("training.embedding_backend" in probe["change"] for probe in evidence.probed)
    if backend != "torch" or probed:
        return None
    share = evidence.share("embedding", "update")
    column = "gpu_ms" if evidence.profile.has("gpu_time_ms") else "cpu_self_ms"
    return {
        "share": share,
        "time": evidence.time("embedding", "update"),
        "heaviest": heaviest(evidence.of_part("embedding", "update"), 3, column),
        "change": {"training.embedding_backend": "fused"},
        "speedup": bounded(share),
    }


def _expected_hottest(evidence: Evidence, table: Mapping[str, Any]) -> float:
    """Share of the hottest row by the generator's law (see ``data/synthetic.py``)."""
    rows, lookups = float(table["rows"]), max(float(table["lookups_per_batch"]), 1.0)
    if evidence.parameter("data.generator") == "reuse":
        return ReuseLaw(int(rows)).hottest()
    if evidence.parameter("data.generator") != "zipf":
        # uniform: the fullest of many cells holds a few more than its mean
        mean = lookups / rows
        return (mean + 3.0 * mean**0.5 + 3.0) / lookups
    a = float(evidence.parameter("data.zipf_exponent", 1.05))
    if abs(a - 1.0) < 1e-9:
        return math.log(2.0) / math.log(rows + 1.0)
    return float((1.0 - 2.0 ** (1.0 - a)) / (1.0 - (rows + 1.0) ** (1.0 - a)))


def _dominant(sizes: list[float] | list[int]) -> int | None:
    """The one entry that holds most of the sum and many times the median."""
    number = int(np.argmax(sizes))
    least = max(GIANT_SHARE * sum(sizes), GIANT_TIMES * max(statistics.median(sizes), 1e-9))
    return number if sizes[number] >= least else None


def _table_times(
    evidence: Evidence, rows: list[int], dim: int, number: int
) -> tuple[float | None, float | None]:
    """(ms of the table's own operators, ms of the median table's), told apart by shapes."""
    operators = evidence.called[evidence.called["component"] == "embedding"]
    first = operators["shapes"].str.extract(r"\[(\d+), (\d+)\]")
    shape = re.compile(rf"\[{rows[number]}, {dim}\]")
    of_table = operators[operators["shapes"].map(lambda text: bool(shape.search(text)))]
    if of_table.empty or not dim or rows.count(rows[number]) > 1:
        return None, None
    width = first[1] == str(dim)
    others = operators[width & first[0].isin([str(r) for r in rows if r != rows[number]])]
    by_rows = others.groupby(first[0][others.index])["cpu_self_ms"].sum()
    per_table = [float(ms) / max(rows.count(int(str(r))), 1) for r, ms in by_rows.items()]
    return float(of_table["cpu_self_ms"].sum()), statistics.median(per_table) if per_table else None
