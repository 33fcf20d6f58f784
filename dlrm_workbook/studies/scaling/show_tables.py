"""Tables and sentences of the scaling page. Nothing is analysed here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_core.config import Parameters
from dlrm_core.parts import part_label
from dlrm_core.units import (
    NOT_MEASURED,
    NOTHING,
    counted,
    digits,
    format_bytes,
    from_to,
    known_or,
    percent,
    signed_percent,
    yes_or_no,
)
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.ranks.check import predicted_and_measured, typical_error
from dlrm_workbook.analysis.ranks.choice import Choice
from dlrm_workbook.analysis.ranks.communication import Study
from dlrm_workbook.analysis.ranks.record import ScalingRecord
from dlrm_workbook.show.tables import Table, Text, column
from dlrm_workbook.show.theme import rows_of
from dlrm_workbook.studies.bench.analyse import ladder
from dlrm_workbook.studies.scaling.notebook import Scaling

# Tables of what the scaling model rests on: bytes, memory, links, stragglers, other people.

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
        table: ``sharding`` and the columns of
            :func:`dlrm_workbook.analysis.ranks.choice.rank_memory`.
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


GOAL = 0.10
"""Geometric mean of errors that predictions of runs on this machine should keep."""


def scaling_table(table: pd.DataFrame) -> Table:
    """Predicted iterations on every number of ranks; why one cannot be, where one cannot."""
    rows = []
    impossible = not table["mid_ms"].map(math.isfinite).all()
    for row in rows_of(table):
        head = (f"{row.ranks:,}", f"{row.batch_size:,}")
        if not math.isfinite(row.mid_ms):
            rows.append((*head, *[NOTHING] * 8, kind_label(str(row.note))))
            continue
        # with eleven columns there is no room for reasons; the chosen ones have their own table
        why = (NOTHING,) if impossible else ()
        rows.append(
            (
                *head,
                kind_label(str(row.sharding)),
                digits(row.mid_ms),
                from_to(row.low_ms, row.high_ms),
                percent(row.exposed_ms / row.mid_ms),
                f"{row.samples_per_second:,.0f}",
                f"{row.speedup:,.2f}×",
                percent(row.efficiency),
                format_bytes(row.memory_bytes),
                *why,
            )
        )
    return Table(
        [
            *("ranks", "batch", "sharding", "ms", "range (ms)", "exposed", "samples/s"),
            *("times as fast", "efficiency", "fullest rank"),
            *(("why not",) if impossible else ()),
        ],
        rows,
    )


def candidates_table(table: pd.DataFrame) -> Table:
    """Every sharding that was looked at for one number of ranks."""
    rows = []
    for row in rows_of(table.sort_values("mid_ms")):
        rows.append(
            (
                kind_label(str(row.sharding)),
                known_or(row.mid_ms, digits),
                from_to(row.low_ms, row.high_ms),
                known_or(row.exposed_ms, digits),
                known_or(row.memory_bytes, format_bytes),
                kind_label(str(row.note)),
            )
        )
    return Table(["sharding", "ms", "range (ms)", "exposed (ms)", "fullest rank", "why"], rows)


def choice_text(choice: Choice, ranks: int) -> Text:
    """The best sharding on so many ranks, and why."""
    return Text(f"On {ranks:,} ranks: {kind_label(choice.reason)}")


def measured_table(table: pd.DataFrame) -> Table | Text:
    """Iterations, speed-up and efficiency as measured on this machine."""
    if table.empty:
        return Text("*No run was measured.*")
    rows = []
    for row in rows_of(table):
        rows.append(
            (
                *(f"{row.ranks}", str(getattr(row, "scaling", "") or NOTHING)),
                *(f"{row.batch_size:,}", kind_label(str(row.sharding))),
                *(digits(row.time_ms), from_to(row.low_ms, row.high_ms)),
                f"{row.samples_per_second:,.0f}",
                known_or(row.speedup, "{:.2f}×".format),
                known_or(row.efficiency, percent),
            )
        )
    return Table(
        [
            *(
                "ranks",
                "scaling",
                "batch",
                "sharding",
                "ms",
                "fastest to upper quartile (ms)",
                "samples/s",
            ),
            *("times as fast as 1", "efficiency"),
        ],
        rows,
    )


def exchanges_table(table: pd.DataFrame, runs: pd.DataFrame) -> Table | Text:
    """What each exchange took in each run, and how much of it was waited for."""
    ranks = runs.set_index("run")["ranks"].to_dict()
    table = table[table["run"].map(ranks) > 1]
    if table.empty:
        return Text("*No exchange was measured.*")
    names = runs.set_index("run")["sharding"].to_dict()
    times, exposed = column(table["time_ms"]), column(table["exposed_ms"])
    rows = [
        (
            *(f"{row.run}", f"{ranks[row.run]}", kind_label(str(names[row.run]))),
            *(kind_label(str(row.kind)), row.what, format_bytes(row.bytes), f"{row.calls:.0f}"),
            *(time, shown, f"{row.gb_per_s:.2f}", percent(row.share)),
        )
        for row, time, shown in zip(rows_of(table), times, exposed, strict=True)
    ]
    return Table(
        [
            *("run", "ranks", "sharding", "collective", "what", "payload a rank", "calls"),
            *("ms", "exposed (ms)", "GB/s", "of the iteration"),
        ],
        rows,
    )


def check_sentence(table: pd.DataFrame) -> Text:
    """How good the predictions of this machine's runs are."""
    known = table[table["error"].notna()]
    if known.empty:
        return Text("No run was predicted.")
    error = typical_error(known)
    inside = int(known["in_range"].sum())
    reached = "within" if error <= GOAL else "outside"
    return Text(
        f"**{len(known)} runs are predicted within {error:.1%} (geometric mean), {reached} the "
        f"{GOAL:.0%} asked for; {inside} of {len(known)} measured times lie in their ranges.** "
        f"Furthest off: {signed_percent(max(known['error'].tolist(), key=abs))}."
    )


def check_table(table: pd.DataFrame) -> Table:
    """Predicted and measured, run by run; notes where there are any."""
    rows = []
    noted = bool((table["note"].astype(str) != "").any())
    for row in rows_of(table):
        known = math.isfinite(row.predicted_ms)
        rows.append(
            (
                *(f"{row.ranks}", f"{row.batch_size:,}", kind_label(str(row.sharding))),
                digits(row.measured_ms),
                known_or(row.predicted_ms, digits),
                from_to(row.low_ms, row.high_ms),
                known_or(row.error, signed_percent),
                yes_or_no(row.in_range if known else None),
                known_or(row.measured_exposed_ms, digits),
                known_or(row.predicted_exposed_ms, digits),
                *((kind_label(str(row.note)) or NOTHING,) if noted else ()),
            )
        )
    return Table(
        [
            *("ranks", "batch", "sharding", "measured (ms)", "predicted (ms)", "range (ms)"),
            *("error", "in range", "exposed, measured (ms)", "exposed, predicted (ms)"),
            *(("note",) if noted else ()),
        ],
        rows,
    )


def imbalance_table(table: pd.DataFrame) -> Table | Text:
    """The slowest rank of each run, and where its time goes."""
    if table.empty:
        return Text("*No run of several ranks was measured.*")
    slowest, mean = column(table["slowest_ms"]), column(table["mean_ms"])
    rows = [
        (
            *(f"{row.run}", f"{row.ranks}", f"{row.slowest_rank}", worst, typical),
            *(percent(row.share), part_label(str(row.component))),
        )
        for row, worst, typical in zip(rows_of(table), slowest, mean, strict=True)
    ]
    return Table(
        [
            *("run", "ranks", "slowest rank", "its own work (ms)", "mean (ms)"),
            *("the others wait", "most in"),
        ],
        rows,
    )


def findings_text(found: Sequence[Finding], record: ScalingRecord) -> Text:
    """What the record shows; nothing wrong is a sentence, too."""
    if not found:
        if record.parts.empty:
            return Text(f"Nothing was measured on several ranks: {record.reasons.get('parts')}.")
        if not (record.runs["ranks"] > 1).any():
            return Text("Nothing was measured on several ranks: one was asked for.")
        return Text(
            "No run spends a tenth of an iteration on communication that nothing hides, and no "
            "rank has a tenth more to do than the mean."
        )
    return Text(
        "\n\n".join(
            f"**{each.title}.** {each.evidence} {each.advice}"
            + (
                f" (`-p {name}={value}`, {each.predicted_speedup['low']:.2f} to "
                f"{each.predicted_speedup['high']:.2f} times as fast)"
                if (name := next(iter(each.change), "")) and (value := each.change[name])
                else ""
            )
            for each in found
        )
    )


def not_measured_text(reasons: Mapping[str, str]) -> Text:
    """What this page lacks, and why."""
    if not reasons:
        return Text("Everything on this page that says *measured* was.")
    return Text("\n".join(f"- {name}: {NOT_MEASURED}: {why}" for name, why in reasons.items()))


def launch_text(lines: Mapping[str, Any]) -> Text:
    """How the same training is started on one node, on several, under Slurm."""
    titles = {
        "one_node": "On this node",
        "each_node": "On every node (FIRST_NODE is the first one's name)",
        "slurm": "Under Slurm",
    }
    return Text(
        "\n\n".join(
            f"{titles[name]}:\n\n```\n{lines[name]}\n```" for name in titles if name in lines
        )
    )


def verdict(scaling: Scaling, strong: pd.DataFrame, weak: pd.DataFrame) -> Text:
    """Where scaling stops paying, what limits it there, and how sure that is."""
    network = scaling.network.name
    lines = [
        line
        for line in (
            _strong_verdict(strong, network),
            _weak_verdict(weak),
            _checked_verdict(scaling.record, scaling.parameters),
        )
        if line
    ]
    return Text("\n\n".join(lines) or "Nothing can be predicted.")


def _strong_verdict(table: pd.DataFrame, network: str) -> str:
    known = table[table["mid_ms"].notna()]
    if known.empty:
        return ""
    best = rows_of(known.nsmallest(1, "mid_ms"))[0]
    half = known[known["efficiency"] >= 0.5]
    text = (
        f"**Strong scaling over {network}: {best.speedup:,.1f} times as fast as one rank at "
        f"most, on {best.ranks:,} ranks** ({digits(best.mid_ms)} ms an iteration, "
        f"{digits(best.low_ms)} to {digits(best.high_ms)}, of it "
        f"{percent(best.exposed_ms / best.mid_ms)} "
        f"communication that nothing hides)."
    )
    if len(half):
        last = rows_of(half.nlargest(1, "ranks"))[0]
        text += f" Efficiency stays at 50% or more up to {last.ranks:,} ranks."
    return text


def _weak_verdict(table: pd.DataFrame) -> str:
    known = table[table["mid_ms"].notna()]
    if len(known) < 2:
        return ""
    last = rows_of(known.nlargest(1, "ranks"))[0]
    return (
        f"Weak scaling keeps {percent(last.efficiency)} of its efficiency on {last.ranks:,} ranks "
        f"({last.samples_per_second:,.0f} samples a second)."
    )


def _checked_verdict(record: ScalingRecord, parameters: Parameters) -> str:
    if record.link_probe.empty or record.compute_profile.empty or record.runs.empty:
        return "Predictions were not checked here: no ranks were measured."
    return check_sentence(predicted_and_measured(record, parameters)).markdown
