"""Tables and sentences as a reader of a notebook wants them: units, separators, few digits.

Nothing is analysed here; what was not measured says so.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_core.parts import part_label
from dlrm_core.units import NOT_MEASURED, NOTHING, digits, known_ms, percent, speedup
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show.tables import Table, Text, column
from dlrm_workbook.show.theme import rows_of, short_name


def notices(texts: Sequence[str]) -> Text:
    """What the run had to say about itself; a sentence if there was nothing."""
    if not texts:
        return Text("No notices: the run went as the parameters say.")
    return Text("\n".join(f"- {text}" for text in texts))


def profile_facts(profile: Profile) -> Table:
    """What was measured, with what, on which machine."""
    meta = profile.meta
    machine, versions = meta.get("machine") or {}, meta.get("versions") or {}
    parameters = meta.get("parameters") or {}
    model, data = parameters.get("model") or {}, parameters.get("data") or {}
    training = parameters.get("training") or {}
    rows = model.get("table_rows") or [0]
    count = len(profile.iterations)
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    known = {
        "run": meta.get("title"),
        "batch": training and f"{training.get('batch_size', 0):,} samples",
        "tables": model and f"{len(rows)}, {sum(rows):,} rows in all",
        "data": data and f"{data.get('generator')}, {data.get('loader')} loader",
        "profiler": meta.get("engine_choice") or meta.get("engine"),
        "iterations measured": f"{count:,}" if count else None,
        "device": meta.get("device_name") or meta.get("device"),
        "processor": machine.get("cpu")
        and f"{machine['cpu']}, {meta.get('threads', machine.get('usable_cores'))} threads used",
        "software": software,
    }
    return Table(["", "value"], [(name, str(value)) for name, value in known.items() if value])


def passes_table(profile: Profile) -> Table:
    """How the run was measured, and how much slower measuring made it."""
    rows = []
    for made in profile.meta.get("passes", []):
        dilation = made.get("dilation")
        rows.append(
            (
                str(made.get("name", "")),
                known_ms(made.get("ms_per_iteration")),
                f"{dilation:.2f}×" if dilation else NOT_MEASURED,
            )
        )
    return Table(["pass", "ms per iteration", "dilation"], rows)


def not_measured_table(profile: Profile) -> Table | Text:
    """What could not be measured, with the reason."""
    missing = profile.not_measured
    if not missing:
        return Text("Everything this workbook knows of was measured.")
    names = {name: name.replace("_", " ") for name in missing}
    return Table(["not measured", "reason"], [(names[n], missing[n]) for n in sorted(missing)])


def metrics_table(profile: Profile) -> Table:
    """What was measured: metrics with unit, meaning and source."""
    return Table(
        ["metric", "unit", "meaning", "source"],
        [(row.metric, row.unit, row.meaning, row.source) for row in rows_of(profile.metrics)],
    )


def missing(profile: Profile, name: str) -> Text:
    """The sentence in the place of a figure that cannot be drawn."""
    reason = profile.not_measured.get(name, "the profile holds no such measurement")
    return Text(f"*Not measured: {reason}.*")


def attribution_table(attribution: pd.DataFrame) -> Table:
    """Time of each part and phase, largest first; the column ``on`` where there is a GPU."""
    table = attribution.sort_values("time_ms", ascending=False)
    on_gpu = bool(table["where"].eq("device").any())
    where = {"device": "GPU", "host": "CPU, GPU idle"}
    columns = ["part", "phase", *(["on"] if on_gpu else []), "time (ms)", "share of step"]
    return Table(
        columns,
        [
            (
                part_label(row.component),
                row.phase or NOTHING,
                *([where[row.where]] if on_gpu else []),
                time,
                percent(row.share),
            )
            for row, time in zip(rows_of(table), column(table["time_ms"]), strict=True)
        ],
    )


def operators_table(operators: pd.DataFrame) -> Table:
    """Operators with shapes; columns of what was not measured are left out."""
    rows = rows_of(operators)
    cells = {
        "operator": [
            "Python" if row.kind == "annotation" else short_name(row.name, 60) for row in rows
        ],
        "part": [part_label(row.component, row.phase) for row in rows],
        "input shapes": [_shapes(row.shapes) for row in rows],
        "calls": [_count(row.calls) for row in rows],
        "CPU itself (ms)": column(operators["cpu_self_ms"]),
        "GPU (ms)": column(operators["gpu_ms"]),
        "share": [percent(row.share) for row in rows],
        "GFLOP/s": column(operators["gflops_per_second"]),
    }
    measured = {"calls": "calls", "GPU (ms)": "gpu_ms", "GFLOP/s": "gflops_per_second"}
    for name, of in measured.items():
        if operators[of].isna().all():
            del cells[name]
    return Table.of(cells)


def data_table(split: pd.DataFrame) -> Table:
    """Data, transfer and compute over the iterations; no rows without iterations."""
    if split.empty:
        return Table([], [])
    total = split[["data_ms", "transfer_ms", "compute_ms"]].sum(axis=1)
    rows = [
        _spread_row(name, split[f"{name}_ms"], total)
        for name in ("data", "transfer", "compute")
        if split[f"{name}_ms"].gt(0).any()
    ]
    return Table(
        ["", "mean (ms)", "median (ms)", "least (ms)", "most (ms)", "share"],
        [*rows, _spread_row("iteration", total, total)],
    )


def iteration_table(each: pd.DataFrame) -> Table:
    """How the iterations' times spread, and which was the slowest; no rows without any."""
    if each.empty:
        return Table([], [])
    times = each.groupby("iteration")["time_ms"].sum()
    quantiles = {"least": 0.0, "median": 0.5, "90 of 100 below": 0.9, "most": 1.0}
    figures = column([*(times.quantile(q) for q in quantiles.values()), times.mean()])
    rows = list(zip([*quantiles, "mean"], figures, strict=True))
    return Table(
        ["time of an iteration", "ms"], [*rows, ("number of the slowest", str(times.idxmax()))]
    )


def timeline_table(spans: pd.DataFrame, count: int = 60) -> Table:
    """The spans of the timeline's first iteration, in the order they began."""
    first = spans[spans["iteration"] == spans["iteration"].min()].sort_values("start_ms")
    first = first.head(count)
    parts = map(part_label, first["component"], first["phase"])
    times = column(first["start_ms"]), column(first["duration_ms"])
    return Table(
        ["lane", "part", "start (ms)", "duration (ms)"],
        zip(first["lane"], parts, *times, strict=True),
    )


def tree_table(tree: pd.DataFrame, count: int = 20) -> Table:
    """The heaviest rows of the call tree, with their callees."""
    table = tree.sort_values("value_ms", ascending=False, kind="stable").head(count)
    total = float(tree.loc[tree["parent"] == "", "value_ms"].sum())
    cells = {
        "call": [short_name(name, 60) for name in table["label"]],
        "part": list(map(part_label, table["component"], table["phase"])),
        "with callees (ms)": column(table["value_ms"]),
        "share": [percent(value / total) for value in table["value_ms"]],
        "itself (ms)": column(table["self_ms"]),
    }
    return Table.of(cells)


def memory_table(memory: pd.DataFrame) -> Table:
    """What each part allocates in a mean iteration."""
    cells = {
        "part": [part_label(name) for name in memory["component"]],
        "phase": [phase or NOTHING for phase in memory["phase"]],
        "device": [device.upper() for device in memory["device"]],
        "allocated (MB)": column(memory["allocated_mb"]),
    }
    return Table.of(cells)


def verdict(found: Sequence[Finding], limit: str) -> Text:
    """The findings, worst first; the limit alone where no rule fires."""
    if not found:
        return Text(f"**No rule found a bottleneck.** {limit}")
    blocks = [limit]
    for number, finding in enumerate(found, 1):
        lines = [
            f"### {number}. {finding.title}",
            f"**Evidence.** {finding.evidence}",
            f"**Advice.** {finding.advice}",
        ]
        if finding.change:
            lines.append(f"**To change.** {_changes(finding.change)}")
        if finding.predicted_speedup:
            lines.append(f"**Predicted.** {_speedup(finding.predicted_speedup)}")
        blocks.append("\n\n".join(lines))
    return Text("\n\n".join(blocks))


def findings_table(found: Sequence[Finding]) -> Table:
    """The findings in a line each."""
    rows = []
    for finding in found:
        gain = finding.predicted_speedup
        rows.append(
            (
                finding.title,
                part_label(finding.component),
                percent(finding.share_of_step),
                ", ".join(f"{name}: {value}" for name, value in finding.change.items()) or NOTHING,
                speedup(**gain) if gain else NOTHING,
            )
        )
    return Table(["finding", "part", "share of step", "parameter", "predicted speed-up"], rows)


def _changes(change: Mapping[str, Any]) -> str:
    set_to = ", ".join(f"`{name}: {value}`" for name, value in change.items())
    options = " ".join(f"-p {name}={value}" for name, value in change.items())
    return f"{set_to} (on the command line: `{options}`)"


def _speedup(gain: Mapping[str, float]) -> str:
    low, mid, high = gain["low"], gain["mid"], gain["high"]
    return (
        f"A step {mid:.2f}× as fast, between {low:.2f}× and {high:.2f}×: "
        f"{1 - 1 / mid:.0%} less time ({1 - 1 / low:.0%} to {1 - 1 / high:.0%})."
    )


def _spread_row(name: str, times: pd.Series, total: pd.Series) -> tuple[str, ...]:
    figures = column((times.mean(), times.median(), times.min(), times.max()))
    return name, *figures, percent(float(times.sum() / total.sum()))


def _shapes(text: str) -> str:
    """Shapes without those of scalars: ``2048×64, 3 of 64×64``; ``*`` is any."""
    shapes = (found.replace(", ", "×") for found in re.findall(r"\[([\d*, ]+)\]", text))
    groups = ((shape, len(list(same))) for shape, same in itertools.groupby(shapes))
    return ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in groups)


def _count(calls: float) -> str:
    """Calls in a mean iteration: whole, or with digits where iterations differ."""
    if not math.isfinite(calls):
        return NOTHING
    return digits(calls) if calls % 1 else f"{calls:,.0f}"
