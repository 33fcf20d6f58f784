"""What a page says of a profile: sentences, and small frames of facts.

Nothing is analysed here; what was not measured says so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.text import format_bytes
from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import IDLE
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.findings.where import PLACE_LEVELS
from dlrm_workbook.analysis.reference import reference
from dlrm_workbook.analysis.roofline import COPIES, LAUNCHES, Limits, least_step
from dlrm_workbook.analysis.sentences import FENCE, in_markdown
from dlrm_workbook.analysis.verdict import compare_command
from dlrm_workbook.ground.units import at_most, faster, milliseconds, ratio
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch import RECORDED_PASS
from dlrm_workbook.show.tables import MOST_BOUND, NO_GAIN, Text
from dlrm_workbook.show.theme import rows_of

HOW = {
    "allocated_bytes": "only torch.profiler records it: "
    "`dlrm run profile -f FILE -p profiling.engine=torch`",
    "iterations": "the recording marks no iterations; `dlrm run profile -f FILE`, "
    "`dlrm record` and `dlrm run profile -- COMMAND` do",
    "probes": "no change was probed; `dlrm run profile -f FILE -p profiling.probes=true` probes "
    "changes of our own training",
}
"""Measurement to how it is made, where a profile gives no reason for its absence."""


def commands_text(lines: Sequence[str]) -> Text:
    """Commands that measure what was not measured."""
    what = "Run these commands to time what was not timed together:"
    return Text("\n".join([what, FENCE, *lines, FENCE]))


MOST_NAMED = 6
"""Quantities that are named of those that were not measured for one reason."""


def tried_text(table: pd.DataFrame, left_out: pd.DataFrame) -> Text:
    """The lines to write for what paid, and why other remedies were not tried, of ``tried`` and
    ``not_tried`` in :mod:`dlrm_workbook.analysis.tried`."""
    lines = []
    for _, row in table[table["status"].eq("paid") & table["id"].ne("together")].iterrows():
        where = f" at `{in_markdown(row['place'])}`" if row["place"] else ""
        lines += [f"**{in_markdown(row['remedy'])}**{where}. {in_markdown(row['note'])}", ""]
        lines += [FENCE, *row["code"].replace(FENCE, "'''").splitlines(), FENCE, ""]
    reasons = [f"{row['remedy']} ({row['reason']})" for _, row in left_out.iterrows()]
    if reasons:
        lines.append(in_markdown(f"Not tried: {'; '.join(reasons)}."))
    return Text("\n".join(lines))


def recording_facts(profile: Profile) -> pd.DataFrame:
    """What was measured, with what, on which machine: ``what``, ``value`` (words)."""
    meta = profile.meta
    machine, versions = meta.get("machine") or {}, meta.get("versions") or {}
    parameters = meta.get("parameters") or {}
    model, data = parameters.get("model") or {}, parameters.get("data") or {}
    training = parameters.get("training") or {}
    rows = model.get("table_rows") or [0]
    count = len(profile.iterations)
    words = {
        "run": meta.get("title"),
        "batch": training and f"{training.get('batch_size', 0):,} samples",
        "tables": model and f"{len(rows)}, {sum(rows):,} rows in all",
        "data": data and f"{data.get('generator')}, {data.get('loader')} loader",
        "profiler": meta.get("engine_choice") or meta.get("engine"),
        "iterations measured": f"{count:,}" if count else None,
        "device": meta.get("device_name") or meta.get("device"),
        "processor": machine.get("cpu")
        and f"{machine['cpu']}, {meta.get('threads', machine.get('usable_cores'))} threads used",
        "software": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return pd.DataFrame(
        [(name, str(value)) for name, value in words.items() if value], columns=["what", "value"]
    )


def passes(profile: Profile) -> pd.DataFrame:
    """How the run was measured: ``pass``, ``iteration_ms``, ``dilation`` (NaN: not measured).

    Every dilation is ``iteration_ms`` over the step of the page, as in the quality line
    (:mod:`dlrm_workbook.analysis.reference`). torch's own recording states its usual iteration.
    Where no step was timed without a profiler, a pass has the dilation that it measured itself.
    """
    table = pd.DataFrame(
        profile.meta.get("passes", []), columns=["name", "ms_per_iteration", "dilation"]
    )
    if (step := reference(profile)) is not None and step.unprofiled:
        table.loc[table["name"] == RECORDED_PASS, "ms_per_iteration"] = step.recorded_ms
        table["dilation"] = table["ms_per_iteration"].astype(float) / step.ms
    return table.rename(columns={"name": "pass", "ms_per_iteration": "iteration_ms"})


def unmeasured_frame(profile: Profile) -> pd.DataFrame:
    """Each ``reason`` for which something was not measured, with the ``quantities`` (words)."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(profile.not_measured.items()):
        # names of HPCToolkit's metrics are as its own tools write them
        words = name if ":" in name else name.replace("_", " ")
        by_reason.setdefault(reason, []).append(words)
    rows = []
    for reason, names in by_reason.items():
        more = len(names) - MOST_NAMED
        named = names if more <= 1 else [*names[:MOST_NAMED], f"{more} more"]
        rows.append((", ".join(named), reason))
    return pd.DataFrame(rows, columns=["quantities", "reason"])


def findings_text(
    found: Sequence[Finding], given: Sequence[str] = (), recording: Path | None = None
) -> Text:
    """Write the findings, worst first; nothing where no rule fires.

    Args:
        given: options that name the parameters of what was explained, for the commands that check
            a change; empty: none is named.
        recording: where it lies, for the command that compares it if there is no change; None:
            none is named.
    """
    blocks = []
    for number, finding in enumerate(found, 1):
        lines = [
            f"### {number}. {in_markdown(finding.title)}",
            *_evidence(finding.evidence, "GPU idle" if IDLE in finding.concerns else "time"),
            f"**Advice.** {in_markdown(finding.advice)}",
        ]
        if finding.change:
            options = " ".join(f"-p {name}={value}" for name, value in finding.change.items())
            lines.append(f"**To change.** `{options}`")
            if given:
                lines.append(f"**To check.** `{compare_command(finding.change, given)}`")
        if timed := finding.timed_speedup:
            sentence = f"**Timed as a whole step.** {_gain(timed)}"
            if finding.predicted_speedup:
                before = finding.predicted_speedup["mid"]
                sentence += f" Parts timed alone had predicted {ratio(before, figures=2)}."
            lines.append(sentence)
        elif finding.predicted_speedup.get("high", 1.0) > NO_GAIN:
            lines.append(f"**Predicted.** {_gain(finding.predicted_speedup)}")
        blocks.append("\n\n".join(lines))
    if found and recording is not None and not any(finding.change for finding in found):
        runs = shlex.quote(f"runs=[{recording}, OTHER]")
        command = f"dlrm run compare -p {runs}"
        blocks.append(f"**To compare.** `{command}` shows another recording beside this one.")
    return Text("\n\n".join(blocks))


_TIMED = re.compile(
    r"(?:^|, )(?P<name>\S.*?) (?P<time>[\d.,]+ (?:ms|µs|s))(?P<at> in [^,]+)?(?=, |$)"
)
"""A name with its time, in a list of such, and perhaps the part that it is in."""

SHORT = 4
"""Words up to which what stands before a list is the label of its rows."""

_LEVELS = "|".join(sorted(PLACE_LEVELS.values(), key=len, reverse=True))
_ITS = "(?:(?:it|the idle time) is )?"
_PLACES = re.compile(rf"(?:^By |; by )(?P<level>{_LEVELS}) {_ITS}(?P<list>.*?)(?=; by |$)")


def _evidence(text: str, of: str) -> list[str]:
    """Paragraphs of a finding's evidence: sentences, and a table of the times ``of`` something that
    they list."""
    sentences, rows = [], []
    for sentence in re.split(r"(?<=\.) (?=[A-Z`])", text):
        plain = sentence.removesuffix(".")
        lists = [(match["level"], match["list"]) for match in _PLACES.finditer(plain)]
        if not lists and ": " in plain:
            lists = [tuple(plain.rsplit(": ", 1))]
        timed = [(what, list(_TIMED.finditer(listed))) for what, listed in lists]
        is_place = plain.startswith("By ")
        if sum(len(items) for _, items in timed) < (1 if is_place else 2):
            sentences.append(sentence)
            continue
        for what, items in timed:
            if not is_place and len(what.split()) > SHORT:
                sentences.append(f"{what}.")
                what = ""
            what = what if is_place else what.lower()
            rows += [(what, item["name"] + (item["at"] or ""), item["time"]) for item in items]
    calls = [sentence for sentence in sentences if sentence.startswith("`")]
    calls *= len(calls) > 1
    told = " ".join(sentence for sentence in sentences if sentence not in calls)
    paragraphs = [f"**Evidence.** {in_markdown(told)}"]
    if rows:
        table = [f"| | | {of} |", "| --- | --- | ---: |"]
        before = ""
        for what, name, time in rows:
            table.append(f"| {what if what != before else ''} | {_cell(name)} | {time} |")
            before = what
        paragraphs.append("\n".join(table))
    return [*paragraphs, "\n".join(f"- {in_markdown(call)}" for call in calls)]


def _cell(name: str) -> str:
    """A name of a program's in a cell of Markdown."""
    return in_markdown(name).replace("|", "&#124;")


def _gain(gain: Mapping[str, float]) -> str:
    low, mid, high = (gain[name] for name in ("low", "mid", "high"))
    if low <= 1.0 and high > MOST_BOUND:
        return "Not bounded: next to nothing else takes time in the step."
    if low <= 1.0:  # nobody timed what takes its place: only a bound is known
        return (
            f"{at_most(high).capitalize()} faster, if all of this time is saved. How much a change "
            "brings was not timed."
        )
    return (
        f"{faster(mid, low, high, figures=2)}: a step takes {1 - 1 / mid:.0%} "
        f"less time ({1 - 1 / low:.0%} to {1 - 1 / high:.0%})."
    )


# The roofline: the ceilings of a machine, and how near to them the step is.

PRECISION_NAMES = {
    "fp32": "fp32",
    "fp32_onednn": "fp32 by oneDNN",
    "fp32_bf16x2": "fp32 as bf16x2 on tiles",
    "fp32_bf16x3": "fp32 as bf16x3 on tiles",
    "tf32": "TF32",
    "bf16": "bf16",
    "bf16_tiles": "bf16 on tiles",
    "fp16": "fp16",
}
"""Precision of matrix products to what a reader calls it."""

_WHILE = {LAUNCHES: "launching kernels", COPIES: "copying"}
"""Limits that do not read as what time is spent on."""


def product_peaks(ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Precision, as a reader calls it, to the best rate of its matrix products, GFLOP/s."""
    limits = Limits(ceilings)
    peaks = {name: rate for name in PRECISION_NAMES if (rate := limits.peak_gflops([name]))}
    # another library for the same precision is worth a line only where it is the faster one
    for name in PRECISION_NAMES:
        if peaks.get(name, 0.0) <= peaks.get(name.partition("_")[0], 0.0) and "_" in name:
            peaks.pop(name, None)
    return {PRECISION_NAMES[name]: rate for name, rate in peaks.items()}


def ceilings_frame(ceilings: Mapping[str, Any] | None) -> pd.DataFrame:
    """The machine's ceilings: ``ceiling``, ``value``, ``unit``; ``attrs["source"]`` says whence."""
    measured = ceilings or {}
    rows: list[tuple[str, float, str]] = [
        (f"matrix products, {label}, at best", rate, "GFLOP/s")
        for label, rate in product_peaks(measured).items()
    ]
    for row in sorted(measured.get("stream") or [], key=lambda row: row.get("bytes") or 0):
        rows += [
            (f"streaming {format_bytes(row['bytes'])}, {kind}", row[f"{kind}_gb_per_s"], "GB/s")
            for kind in ("read", "copy", "triad")
            if row.get(f"{kind}_gb_per_s")
        ]
    for row in measured.get("gather") or []:
        what = f"random rows of {row['row_bytes']:,} B in {format_bytes(row['table_bytes'])}"
        rows.append((what, row["gb_per_s"], "GB/s"))
    for name, label in (("dispatch_us", "one torch operator"), ("launch_us", "one launch")):
        if measured.get(name):
            rows.append((label, measured[name], "µs"))
    for row in measured.get("copy") or []:
        way = {"h2d": "to the GPU", "d2h": "from the GPU"}.get(row["direction"], row["direction"])
        rows.append((f"copy {way}, {row['kind']}", row["gb_per_s"], "GB/s"))
    if cache := measured.get("last_level_cache_bytes"):
        rows.append(("last-level cache", cache, "bytes"))
    table = pd.DataFrame(rows, columns=["ceiling", "value", "unit"])
    table.attrs["source"] = "measured" if Limits(measured).measured else str(measured["source"])
    return table


def roofline_text(table: pd.DataFrame, doubts: Sequence[str] = ()) -> Text:
    """How fast this step could be on its machine, and where the most can be gained, of
    ``roofline`` and ``doubts`` in :mod:`dlrm_workbook.analysis.roofline`."""
    step = least_step(table)
    unknown = ", ".join(part_label(component, phase) for component, phase in step["unknown"])
    if step["least_ms"] is None or not step["share"]:
        of = f" of {unknown}" if unknown else ""
        return Text(f"*Not measured: the ceilings{of}, so the least time is not known.*")
    limits = ", ".join(
        f"{milliseconds(time)} {_WHILE.get(limit, limit)}"
        for limit, time in step["limits"].items()
        if time > 0.005 * step["least_ms"]
    )
    text = (
        f"**The step takes {milliseconds(step['time_ms'])}. With this shape, precision and back "
        f"ends the machine needs at least {milliseconds(step['least_ms'])} "
        f"({step['share']:.0%})**: {limits}. "
    )
    if unknown:
        text += f"The least time of {unknown} is not known and counts as 0. "
    gaps = (table["time_ms"] - table["ceiling_ms"]).clip(lower=0.0)
    most = table.assign(gap_ms=gaps).nlargest(3, "gap_ms")
    gains = [
        f"{part_label(row.component, row.phase)} ({milliseconds(row.gap_ms)})"
        for row in rows_of(most)
        if row.gap_ms > 0.01 * step["time_ms"]
    ]
    if gains:
        text += f"Most time above these limits is spent in {', '.join(gains)}."
    else:
        text += "Every part is within 1% of the step of its limit."
    return Text("\n\n".join([text, *doubts]))
