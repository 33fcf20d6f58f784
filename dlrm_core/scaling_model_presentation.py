"""Tables of what the scaling model rests on: bytes, memory, links, stragglers, other people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from dlrm_core.analysis.benchmark import ladder
from dlrm_core.analysis.communication_study import Study
from dlrm_core.analysis.scaling_check import typical_error
from dlrm_core.capacity import format_bytes
from dlrm_core.figure_theme import digits, part_label, percent, rows_of, signed_percent
from dlrm_core.page_tables import (
    NOT_MEASURED,
    NOTHING,
    Table,
    Text,
    column,
    counted,
    from_to,
    known_or,
)

PLAIN_MS, TUNED_MS = 4288, 38
"""One iteration of Small on one socket, before and after (Kalamkar et al. 2020)."""

_MEMORY = {
    "table": "tables",
    "dense": "MLPs",
    "state": "optimiser",
    "gradient": "gradients",
    "activation": "activations",
    "exchange": "exchanged",
    "total": "in all",
}
"""Column of memory to its title."""


def kind_label(name: str) -> str:
    """A sharding or collective as a reader calls it."""
    names = {"allreduce": "all-reduce", "alltoall": "all-to-all", "allgather": "all-gather"}
    return names.get(name, name.replace("_", "-"))


def study_table(table: pd.DataFrame) -> Table:
    """Bytes of the study's three configurations, computed and quoted."""
    return Table(
        [
            *("configuration", "most ranks", "quoted", "all-reduce (MiB)", "quoted ", "error"),
            *("all-to-all (MiB)", "quoted  ", "error "),
        ],
        [
            (
                *(row.name, f"{row.ranks}", f"{row.quoted_ranks}"),
                *(f"{row.allreduce_mib:,.2f}", f"{row.quoted_allreduce_mib:,.1f}"),
                signed_percent(row.allreduce_error),
                *(f"{row.alltoall_mib:,.2f}", f"{row.quoted_alltoall_mib:,.1f}"),
                signed_percent(row.alltoall_error),
            )
            for row in rows_of(table)
        ],
    )


def volumes_table(table: pd.DataFrame) -> Table:
    """Every exchange of every sharding."""
    return Table(
        ["sharding", "collective", "what", "phase", "payload a rank", "leaves a rank", "all ranks"],
        [
            (
                *(kind_label(row.sharding), kind_label(row.collective), row.what, row.phase),
                *(format_bytes(row.bytes), format_bytes(row.leaves_bytes)),
                format_bytes(row.total_bytes),
            )
            for row in rows_of(table)
        ],
    )


def memory_table(table: pd.DataFrame) -> Table:
    """Memory of the fullest and of the emptiest rank, by sharding.

    Args:
        table: ``sharding`` and the columns of :func:`dlrm_core.analysis.rank_memory.rank_memory`.
    """
    rows = []
    for sharding, ranks in table.groupby("sharding", sort=False):
        most = ranks.loc[ranks["total_bytes"].idxmax()]
        least = ranks.loc[ranks["total_bytes"].idxmin()]
        ends = {f"fullest: {int(most['rank'])}": most, f"emptiest: {int(least['rank'])}": least}
        if most["total_bytes"] == least["total_bytes"]:
            ends = {"every rank": most}
        for name, row in ends.items():
            cells = [format_bytes(float(row[f"{part}_bytes"])) for part in _MEMORY]
            rows.append((kind_label(str(sharding)), name, *cells))
    return Table(["sharding", "rank", *_MEMORY.values()], rows)


def links_table(table: pd.DataFrame) -> Table:
    """Links by name, with ranges and sources."""
    return Table(
        ["link", "latency of a step (µs)", "range", "rate of a rank (GB/s)", "range ", "from"],
        [
            (
                *(
                    row.name,
                    digits(row.alpha_us),
                    from_to(row.alpha_us_low, row.alpha_us_high),
                ),
                *(
                    digits(row.gb_per_s),
                    from_to(row.gb_per_s_low, row.gb_per_s_high),
                ),
                row.source,
            )
            for row in rows_of(table)
        ],
    )


def stragglers_table(table: pd.DataFrame) -> Table:
    """Mean and bad iterations with slow ranks."""
    even, mean, worst = (column(table[name]) for name in ("even_ms", "mean_ms", "p95_ms"))
    rows = [
        (f"{row.ranks:,}", a, b, c, percent(row.waited_share), signed_percent(row.loss))
        for row, a, b, c in zip(rows_of(table), even, mean, worst, strict=True)
    ]
    return Table(
        ["ranks", "even (ms)", "mean (ms)", "one in twenty over (ms)", "a rank waits", "loss"], rows
    )


def published_table(table: pd.DataFrame) -> Table:
    """Published scaling beside our predictions; sources are those of :func:`published_sources`."""
    numbers = _numbers(table["source"])
    rows = []
    for row in rows_of(table):
        rows.append(
            (
                *(row.hardware, f"{row.devices}", row.model, row.precision, f"{row.batch_size:,}"),
                known_or(row.published, "{:,.0f}".format, "no number printed"),
                f"{row.predicted:,.0f}",
                from_to(row.predicted_low, row.predicted_high, "{:,.0f}".format),
                known_or(row.error, signed_percent),
                *(row.basis, f"[{numbers[row.source]}]"),
            )
        )
    return Table(
        [
            *("machine", "devices", "model", "precision", "batch", "published (samples/s)"),
            *("predicted (samples/s)", "range", "error", "from devices", "source"),
        ],
        rows,
    )


def published_sources(table: pd.DataFrame) -> Text:
    """Where published figures are from, and what the predictions had to assume."""
    numbers = _numbers(table["source"])
    lines = [f"- [{number}] {source}" for source, number in numbers.items()]
    assumed = table.drop_duplicates("not_published")
    lines += [
        f"- Not published for {row.hardware} [{numbers[row.source]}], so assumed: "
        f"{row.not_published}."
        for row in rows_of(assumed)
    ]
    return Text("\n".join(lines))


def _numbers(sources: pd.Series) -> dict[str, int]:
    return {str(source): number + 1 for number, source in enumerate(sources.unique())}


def published_sentence(table: pd.DataFrame) -> Text:
    """How near the predictions of other people's machines are."""
    known = table.dropna(subset=["error"])
    blind, held = known[known["basis"] == "1"], known[known["basis"] != "1"]
    return Text(
        f"From one device's published throughput and data sheets alone, {len(blind)} figures are "
        f"predicted within {typical_error(blind):.0%} (geometric mean); the "
        f"{len(held)} of sixteen devices from those of one and eight within "
        f"{typical_error(held):.1%}. Nothing of it was measured here."
    )


def shares_table(shares: Iterable[tuple[str, float]], study: Study | None) -> Table:
    """Shares of one rank's iteration, beside what the study says of them."""
    claims = {"embedding": study.embedding_share} if study else {}
    return Table(
        ["part", "share of one rank's iteration here", "the study says"],
        [(part_label(name), percent(share), claims.get(name, NOTHING)) for name, share in shares],
    )


def way_text(document: Mapping[str, Any] | None) -> Text:
    """The study's way from 2020's plain program to its tuned one, and ours from today's."""
    study = (
        f"The study (published, one socket of 28 cores): {PLAIN_MS:,} ms to {TUNED_MS} ms, "
        f"{PLAIN_MS / TUNED_MS:.0f} times as fast."
    )
    rungs = ladder(document) if document else pd.DataFrame()
    if rungs.empty:
        return Text(f"{study} Here: {NOT_MEASURED}.")
    rows = rows_of(rungs[rungs["figure"] == "end_to_end_ms"].sort_values("rung"))
    first, last = rows[0], rows[-1]
    assert document is not None
    threads = document["cases"][0]["threads"]
    return Text(
        f"{study} Here, on {counted(threads, 'core')} of an "
        f"{document['machine'].get('cpu', 'unknown processor')}, "
        f"today's plain PyTorch takes {digits(first.time_ms)} ms and the options of "
        f"`kalamkar_small.yaml` {digits(last.time_ms)} ms, {last.mid:.2f} times as fast. Most of "
        "the study's factor is gone because PyTorch itself has mended it since: its EmbeddingBag "
        "sums bags in parallel, in compiled kernels (github.com/pytorch/pytorch/issues/31356)."
    )
