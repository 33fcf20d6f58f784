"""The embedding tables: which rows are asked for, and what reading and updating them costs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from dlrm_core.units import milliseconds
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import Finding, Ledger, amdahl, bounded, probed

SKEW = 4.0
"""Times as often as the generator's law expects is the hottest row asked for."""

HOT_SHARE = 0.05
"""Of a table's lookups, by one row; below it contention costs nothing that is measurable."""

CONTENDED_SHARE = 0.2
SMALL_TABLE = 64
"""Rows; in a smaller table each row is hot whatever the law."""

GIANT_BYTES = 0.6
"""Share of all tables' bytes."""

GIANT_LOOKUPS = 0.6
GIANT_TIMES = 8.0
"""Times the median table."""

BOUND_SHARE = 0.6
UPDATE_SHARE = 0.05


def skewed_indices(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """One row, or a few, get most of a table's lookups."""
    tables = _tables(evidence)
    hot = []
    for table in tables:
        expected = _expected_hottest(evidence, table)
        share = float(table["hottest_share"])
        if table["rows"] < SMALL_TABLE or share < HOT_SHARE or share < SKEW * expected:
            continue
        hot.append((share, expected, table))
    if not hot:
        return
    share, expected, table = max(hot, key=lambda row: row[0])
    held = evidence.share("embedding")
    update = evidence.share("embedding", "update") + evidence.share("embedding", "backward")
    threads = evidence.threads or 1
    method = evidence.parameter("training.embedding_update", "race_free")
    lookups = float(table["lookups_per_batch"])
    text = (
        f"In {len(hot)} of {len(tables)} tables. Worst, table {table['table']}: {share:.0%} of its "
        f"{lookups:,.0f} lookups a batch fall on one of {table['rows']:,} rows, where "
        f"{_law(evidence)} expects {expected:.2%}; only {table['unique_rows_per_batch']:,.0f} "
        f"different rows are asked for. Reading and updating tables holds {held:.0%} of the step."
    )
    # a hot row is one thread's work, or is fought for: at best the others take their part of it
    gain = amdahl(update * share, float(threads)) if threads > 1 else 1.0
    yield Finding(
        id="skewed_indices",
        title=f"{share:.0%} of a table's lookups go to a single row",
        component="embedding",
        share_of_step=held,
        evidence=text,
        advice=(
            "Check the indices (a constant column, a default value, a hash that collides). If "
            "they are meant, sum the gradients of equal rows before the update; "
            f"this run's update is '{method}', and rows that several threads write are "
            "serialised. Times measured with them say little of real data: hot rows stay in cache."
        ),
        predicted_speedup={"low": 1.0, "mid": gain**0.5, "high": gain},
        limit="random rows" if threads == 1 else "load imbalance",
    )


def contended_update(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Threads fight for hot rows in the update."""
    method = evidence.parameter("training.embedding_update")
    threads = evidence.threads or 1
    if method not in ("atomic", "locked", "naive") or threads < 2 or evidence.on_gpu:
        return
    if evidence.parameter("training.embedding_backend") != "fused":
        return
    tables = [table for table in _tables(evidence) if table["rows"] >= SMALL_TABLE]
    hottest = max((float(table["hottest_share"]) for table in tables), default=0.0)
    share = evidence.share("embedding", "update") + evidence.share("embedding", "backward")
    if hottest < HOT_SHARE or share < CONTENDED_SHARE:
        return
    yield Finding(
        id="contended_update",
        title=f"Threads fight for hot rows in the '{method}' update",
        component="embedding",
        share_of_step=share,
        evidence=(
            f"{threads} threads write rows of which the hottest gets {hottest:.0%} of a table's "
            f"lookups; backward and update of the tables hold {share:.0%} of the step."
        ),
        advice="Let each row belong to one thread.",
        change={"training.embedding_update": "race_free"},
        predicted_speedup=bounded(share),
        limit="synchronisation",
    )


def giant_table(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """One table dwarfs the others, in bytes or in lookups."""
    rows = [int(row) for row in evidence.parameter("model.table_rows", [])]
    count = int(evidence.parameter("model.tables", 0) or 0)
    rows = rows * count if len(rows) == 1 and count else rows
    if len(rows) < 3:
        return
    dim = int(evidence.parameter("model.embedding_dim", 0) or 0)
    looked_up = {table["table"]: float(table["lookups_per_batch"]) for table in _tables(evidence)}
    lookups = [looked_up.get(number, 0.0) for number in range(len(rows))]
    by_bytes, by_lookups = _dominant(rows, GIANT_BYTES), _dominant(lookups, GIANT_LOOKUPS)
    size = 4.0 * dim * max(rows)
    cache = float(evidence.ceilings("last_level_cache_bytes") or 32 << 20)
    if by_bytes is not None and size <= cache:
        by_bytes = None
    number = by_lookups if by_lookups is not None else by_bytes
    if number is None:
        return
    share = evidence.share("embedding")
    time, usual = _table_times(evidence, rows, dim, number)
    text = (
        f"Table {number} has {rows[number]:,} rows ({4e-9 * dim * rows[number]:.2f} GB), "
        f"{rows[number] / sum(rows):.0%} of all rows; the median table has "
        f"{statistics.median(rows):,.0f}."
    )
    if sum(lookups):
        text += f" It gets {lookups[number] / sum(lookups):.0%} of the lookups."
    if time is not None and usual:
        text += (
            f" Its own operators take {milliseconds(time)} an iteration, the median table's "
            f"{milliseconds(usual)}."
        )
    held = (time - usual) / evidence.total_ms if time and usual else share * 0.5
    held = min(max(held, 0.0), share)
    yield Finding(
        id="giant_table",
        title=f"Table {number} dwarfs the others: {rows[number] / sum(rows):.0%} of all rows",
        component="embedding",
        share_of_step=held if time is not None else share,
        evidence=text,
        advice=(
            "Hash it into fewer rows or split it by columns or rows: no placement of whole tables "
            "can balance it, and its rows come from memory while the others' may stay in cache."
        ),
        predicted_speedup=bounded(held),
        limit="load imbalance" if by_lookups is not None else "memory capacity",
    )


def bound_by_rows(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Most of the step is spent near what memory gives for scattered rows."""
    share = evidence.share("embedding")
    if share < BOUND_SHARE:
        return
    met = evidence.roofline
    met = met[
        (met["component"] == "embedding") & met["limit"].isin(["random rows", "memory bandwidth"])
    ]
    near = met[met["share_of_ceiling"] >= 0.5]
    near_ms = float(near["time_ms"].sum())
    if near_ms < 0.5 * evidence.time("embedding"):
        return
    top = near.loc[near["time_ms"].idxmax()]
    yield Finding(
        id="embeddings_memory_bound",
        title=f"Embeddings hold {share:.0%} of the step, near what memory gives",
        component="embedding",
        share_of_step=share,
        evidence=(
            f"Embedding {top['phase']} reaches {top['share_of_ceiling']:.0%} of the ceiling for "
            f"{top['limit']} ({top['gb_per_s']:.1f} GB/s) measured on this machine."
        ),
        advice=(
            "Only fewer bytes help: a smaller dimension or pooling factor, rows in lower "
            "precision, a cache of hot rows, or more memory channels (sharded tables)."
        ),
        predicted_speedup={"low": 1.0, "mid": 1.0, "high": amdahl(share, 2.0)},
        limit=str(top["limit"]),
    )


def embedding_update(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The sparse update is a large part of the step, and no probe tells what would replace it."""
    share = evidence.share("embedding", "update")
    backend = evidence.parameter("training.embedding_backend", "torch")
    told = any("training.embedding_backend" in probe["change"] for probe in probed(evidence))
    if share <= UPDATE_SHARE or backend != "torch" or told:
        return
    time, total = evidence.time("embedding", "update"), evidence.total_ms
    text = (
        f"Updating the embedding tables takes {milliseconds(time)} of {milliseconds(total)} "
        f"({share:.0%})."
    )
    table = evidence.operators
    table = table[(table["component"] == "embedding") & (table["phase"] == "update")]
    column = "gpu_ms" if evidence.profile.has("gpu_time_ms") else "cpu_self_ms"
    heaviest = table.groupby("name")[column].sum().nlargest(3)
    if heaviest.gt(0).any():
        listed = ", ".join(f"{name} {milliseconds(ms)}" for name, ms in heaviest.items() if ms)
        text += f" Most of it: {listed}."
    yield Finding(
        id="embedding_update",
        title=f"The sparse embedding update holds {share:.0%} of the step",
        component="embedding",
        share_of_step=share,
        evidence=text,
        advice=(
            "torch first builds a sparse gradient of every looked-up row and then applies it; the "
            "fused backend updates each row in the backward pass. What it takes here was not "
            "probed, so the range is only bounded."
        ),
        change={"training.embedding_backend": "fused"},
        predicted_speedup=bounded(share),
        limit="random rows",
    )


def _tables(evidence: Evidence) -> list[Mapping[str, Any]]:
    return (evidence.meta.get("data_statistics") or {}).get("tables") or []


def _expected_hottest(evidence: Evidence, table: Mapping[str, Any]) -> float:
    """Share of the hottest row by the generator's law (see ``data/synthetic.py``)."""
    rows, lookups = float(table["rows"]), max(float(table["lookups_per_batch"]), 1.0)
    if evidence.parameter("data.generator") != "zipf":
        # uniform: the fullest of many cells holds a few more than its mean
        mean = lookups / rows
        return (mean + 3.0 * mean**0.5 + 3.0) / lookups
    a = float(evidence.parameter("data.zipf_exponent", 1.05))
    if abs(a - 1.0) < 1e-9:
        return math.log(2.0) / math.log(rows + 1.0)
    return float((1.0 - 2.0 ** (1.0 - a)) / (1.0 - (rows + 1.0) ** (1.0 - a)))


def _law(evidence: Evidence) -> str:
    generator = evidence.parameter("data.generator", "a uniform law")
    return f"data.generator '{generator}'" if generator != "a uniform law" else generator


def _dominant(sizes: list[float] | list[int], least: float) -> int | None:
    """The one entry that holds ``least`` of the sum and many times the median."""
    total = sum(sizes)
    if not total:
        return None
    number = max(range(len(sizes)), key=lambda place: sizes[place])
    size = sizes[number]
    if size < least * total or size < GIANT_TIMES * max(statistics.median(sizes), 1e-9):
        return None
    return number


def _table_times(
    evidence: Evidence, rows: list[int], dim: int, number: int
) -> tuple[float | None, float | None]:
    """(ms of the table's own operators, ms of the median table's), told apart by shapes."""
    operators = evidence.called[evidence.called["component"] == "embedding"]
    first = operators["shapes"].str.extract(r"\[(\d+), (\d+)\]")
    found = re.compile(rf"\[{rows[number]}, {dim}\]")
    own = operators[operators["shapes"].map(lambda text: bool(found.search(text)))]
    if own.empty or not dim or rows.count(rows[number]) > 1:
        return None, None
    width = first[1] == str(dim)
    others = operators[width & first[0].isin([str(r) for r in rows if r != rows[number]])]
    each = others.groupby(first[0][others.index])["cpu_self_ms"].sum()
    per = [float(ms) / max(rows.count(int(str(r))), 1) for r, ms in each.items()]
    return float(own["cpu_self_ms"].sum()), statistics.median(per) if per else None


RULES = (skewed_indices, contended_update, giant_table, bound_by_rows, embedding_update)
