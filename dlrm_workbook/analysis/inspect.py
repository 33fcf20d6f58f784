"""What a recording holds: counts, times, coverage, and what it cannot tell.

``dlrm inspect PATH`` prints it. Every figure is of the whole recording, not of an iteration.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.files import plain
from dlrm_workbook.analysis.attribution import PART, host_time, in_step_order, step_contexts
from dlrm_workbook.ground.runs import named_run
from dlrm_workbook.recordings.foreign import exchange_kernels
from dlrm_workbook.recordings.nesting import start_and_end, union_ns
from dlrm_workbook.recordings.open import Recording, open_recording
from dlrm_workbook.recordings.profile import Profile, of_streams
from dlrm_workbook.recordings.torch.chrome_trace import GRAPH_LAUNCH

SUMMED = (
    *("threads", "streams", "gpu_time_ms", "kernels", "communication_kernels", "copies"),
    "graph_launches",
)
"""Figures that add up over ranks."""

OWN = (
    *("gpu_span_ms", "gpu_busy_ms", "compute_ms", "communication_ms", "overlap_ms"),
    *("launched_before_trace", "launched_before_trace_ms", "steps_thread"),
)
"""Figures that every rank has for itself."""

HPCTOOLKIT_COUNTS = {"kernels": ["GKER:COUNT"], "copies": ["GXCOPY:COUNT", "GMSET:COUNT"]}

NO_GPU_WORK = "no work of a GPU is recorded"
NO_TIMELINE = "the recording has no timeline of the GPU"

WHOLE_RECORDING = "the whole recording"
"""What times and shares here are of; those of a page are of steady iterations."""


def inspect_recording(recording: Recording) -> dict[str, Any]:
    """The facts of a recording.

    Returns:
        ``kind``, ``devices`` (names), ``ranks``, ``threads``, ``streams``, ``iterations``;
        ``gpu_span_ms`` (from the first GPU operation's begin to the last one's end),
        ``gpu_busy_ms`` (union of their intervals), ``gpu_time_ms`` (sum of their durations),
        ``compute_ms`` and ``communication_ms`` (unions of kernels' intervals), ``overlap_ms``
        (of those two); ``kernels``, ``communication_kernels``, ``copies`` (copies and
        memsets), ``graph_launches``, ``launched_before_trace`` (count) and
        ``launched_before_trace_ms``, ``steps_thread``; ``coverage`` (share of GPU time, or of
        the step's CPU time without a GPU, in named parts), ``share_of`` (what ``coverage`` and
        ``attribution`` are of; a page's are of steady iterations), ``attribution`` (rows
        ``component``, ``phase``, ``device``, ``time_ms``), ``cautions``, ``not_measured``
        (name to reason, for what is None). Of several ranks also ``per_rank``: a list of the
        same, each with ``rank``; times that do not add up are then None above it.
    """
    if not recording.ranks:
        facts = inspect_profile(recording.profile)
        facts["cautions"] = recording.cautions + facts["cautions"]
        return facts
    rank_facts = [{"rank": rank} | inspect_profile(one) for rank, one in recording.ranks.items()]
    whole = {name: rank_facts[0][name] for name in rank_facts[0] if name != "rank"}
    names = (name for one in rank_facts for name in one["devices"] or [])
    whole["devices"] = list(dict.fromkeys(names))
    whole["ranks"] = len(rank_facts)
    missing = {name: why for name, why in whole["not_measured"].items() if name not in OWN}
    for name in SUMMED:
        values = [one[name] for one in rank_facts]
        is_whole = all(value is not None for value in values)
        whole[name] = sum(values) if is_whole else None
        if not is_whole:
            missing.setdefault(name, "not every rank has it; see per_rank")
    for name in OWN:
        whole[name] = None
        missing[name] = "each rank has its own; see per_rank"
    counts = {one["iterations"] for one in rank_facts}
    whole["iterations"] = counts.pop() if len(counts) == 1 else None
    if counts:
        missing["iterations"] = "the ranks differ; see per_rank"
    rows = pd.DataFrame([row for one in rank_facts for row in one["attribution"]])
    whole["attribution"], whole["coverage"] = _summed(rows)
    whole["cautions"] = recording.cautions + [
        f"Rank {one['rank']}: {caution}" for one in rank_facts for caution in one["cautions"]
    ]
    whole["not_measured"] = {name: why for name, why in missing.items() if whole[name] is None}
    whole["per_rank"] = rank_facts
    return whole


def inspect_profile(profile: Profile) -> dict[str, Any]:
    """The facts of one rank, see :func:`inspect_recording`."""
    meta = profile.meta
    missing: dict[str, str] = {}
    names = [row["name"] for row in meta.get("devices") or [] if row.get("name")]
    names = list(dict.fromkeys(names or filter(None, [meta.get("device_name")])))
    if not names:
        missing["devices"] = "the recording names no device"
    kinds = profile.threads["kind"]
    more = meta.get("left_out") or {}  # threads that are one row together, and streams
    facts: dict[str, Any] = {
        "kind": meta.get("engine"),
        "devices": names or None,
        "ranks": 1,
        "threads": int(kinds.eq("cpu_thread").sum()) + max(more.get("cpu_thread", 0) - 1, 0),
        "streams": int(kinds.eq("gpu_stream").sum()) + more.get("gpu_stream", 0),
        "iterations": len(profile.iterations) or meta.get("profiler_steps") or None,
    }
    if facts["iterations"] is None:
        why = profile.not_measured.get("iterations")
        missing["iterations"] = why or "no steps are marked, and none repeat"
    facts |= _gpu_times(profile, missing)
    facts |= _counts(profile, missing)
    before = meta.get("launched_before_trace")
    for name, key in (("launched_before_trace", "count"), ("launched_before_trace_ms", "time_ms")):
        facts[name] = before[key] if before else None
        if before is None:
            missing[name] = "no launches are recorded to compare with"
    threads = meta.get("steps_threads") or []
    facts["steps_thread"] = ", ".join(threads) or None
    if not threads:
        missing["steps_thread"] = "no ProfilerStep ranges are recorded"
    facts["share_of"] = WHOLE_RECORDING
    facts["attribution"], facts["coverage"] = _summed(_by_part(profile))
    if facts["coverage"] is None:
        missing["coverage"] = "no time is recorded"
    facts["cautions"] = [str(caution) for caution in meta.get("cautions", [])]
    facts["not_measured"] = missing
    return facts


def _gpu_times(profile: Profile, missing: dict[str, str]) -> dict[str, Any]:
    """Span, busy time, communication: from the timeline of the GPU's streams."""
    work = of_streams(profile)
    start, end = start_and_end(work)
    context = work["context"].to_numpy()
    kernels = profile.of_kind("kernel")[context]
    exchanges = exchange_kernels(profile)[context]
    compute = union_ns(start[kernels & ~exchanges], end[kernels & ~exchanges])
    communication = union_ns(start[exchanges], end[exchanges])
    times: dict[str, Any] = {
        "gpu_span_ms": (int(end.max()) - int(start.min())) / 1e6 if len(work) else None,
        "gpu_busy_ms": union_ns(start, end) / 1e6,
        "compute_ms": compute / 1e6,
        "communication_ms": communication / 1e6,
        "overlap_ms": (compute + communication - union_ns(start[kernels], end[kernels])) / 1e6,
        "communication_kernels": int(exchanges.sum()),
    }
    if work.empty:
        why = NO_TIMELINE if profile.has("gpu_time_ms") else NO_GPU_WORK
        times = dict.fromkeys(times)
        missing |= dict.fromkeys(times, why)
    return times


def _counts(profile: Profile, missing: dict[str, str]) -> dict[str, Any]:
    """Sum of durations, kernels, copies and launches of graphs."""
    counts: dict[str, Any] = dict.fromkeys(("gpu_time_ms", "kernels", "copies", "graph_launches"))
    if not profile.has("gpu_time_ms"):
        why = profile.not_measured.get("gpu_time_ms", NO_GPU_WORK)
        missing |= dict.fromkeys(counts, why)
        return counts
    counts["gpu_time_ms"] = float(profile.value_table("gpu_time_ms").sum())
    if profile.meta.get("engine") == "hpctoolkit":
        for name, metrics in HPCTOOLKIT_COUNTS.items():
            if counted := [metric for metric in metrics if profile.has(metric)]:
                counts[name] = round(sum(profile.value_table(metric).sum() for metric in counted))
            else:
                missing[name] = f"the database has no {' or '.join(metrics)}"
        missing["graph_launches"] = "HPCToolkit does not record launches of graphs"
        return counts
    calls = profile.value_table("calls").to_numpy()
    launches = profile.contexts["name"].str.match(GRAPH_LAUNCH).to_numpy()
    for name, chosen in (
        ("kernels", profile.of_kind("kernel")),
        ("copies", profile.of_kind("copy")),
        ("graph_launches", launches & profile.of_kind("runtime")),
    ):
        counts[name] = round(calls[chosen].sum())
    return counts


def _by_part(profile: Profile) -> pd.DataFrame:
    """Rows of ``component``, ``phase``, ``device``, ``time_ms``; of CPU threads the step's."""
    frames = []
    for device, metric in (("gpu", "gpu_time_ms"), ("cpu", "cpu_time_ms")):
        if profile.has(metric):
            time = profile.value_table(metric)
            if device == "cpu":
                time = host_time(profile).where(step_contexts(profile))
            table = profile.contexts[PART].assign(device=device, time_ms=time)
            frames.append(table[table["time_ms"].gt(0)])
    return pd.concat(frames) if frames else pd.DataFrame()


def _summed(rows: pd.DataFrame) -> tuple[list[Any], float | None]:
    """(time of each part, phase and device; share of the GPU's time, or else the CPU's, named)."""
    if rows.empty:
        return [], None
    total = rows.groupby(["device", *PART], as_index=False)[["time_ms"]].sum()
    table = pd.concat([in_step_order(total[total["device"] == name]) for name in ("gpu", "cpu")])
    main = table[table["device"] == ("gpu" if table["device"].eq("gpu").any() else "cpu")]
    named = main.loc[main["component"] != "other", "time_ms"].sum()
    columns = [*PART, "device", "time_ms"]
    return table[columns].to_dict("records"), float(named / main["time_ms"].sum())


# ---- the command ----------------------------------------------------------------------


def command_inspect(arguments: argparse.Namespace) -> int:
    """``dlrm inspect PATH``: print what a recording holds."""
    recording = open_recording(named_run(arguments.path, "profile"))
    facts = inspect_recording(recording)
    if arguments.json:
        print(json.dumps(plain(facts), indent=1))
    else:
        print(facts_as_text(recording, facts))
    return 0


LABELS = {
    "devices": "devices",
    "ranks": "ranks",
    "threads": "CPU threads",
    "streams": "GPU streams",
    "iterations": "iterations",
    "steps_thread": "thread of the steps",
    "gpu_span_ms": "GPU, first to last operation, ms",
    "gpu_busy_ms": "GPU busy, ms",
    "gpu_time_ms": "GPU operations, summed, ms",
    "compute_ms": "compute kernels, ms",
    "communication_ms": "communication kernels, ms",
    "overlap_ms": "both at once, ms",
    "kernels": "kernels",
    "communication_kernels": "communication kernels",
    "copies": "copies and memsets",
    "graph_launches": "launches of CUDA graphs",
    "launched_before_trace": "GPU operations without a recorded launch",
    "launched_before_trace_ms": "their time, ms",
    "coverage": f"time in named parts, of {WHOLE_RECORDING}",
}
"""What the text output says, in this order."""


def facts_as_text(recording: Recording, facts: dict[str, Any]) -> str:
    """The facts as text for people."""
    lines = [f"{recording.path}: {facts['kind']}", ""]
    lines += _figures(facts)
    attribution = pd.DataFrame(facts["attribution"])
    if len(attribution):
        of_device = attribution.groupby("device")["time_ms"].transform("sum")
        attribution["share"] = (attribution["time_ms"] / of_device).map("{:.1%}".format)
        lines += ["", f"Time in {WHOLE_RECORDING}, ms:"]
        lines.append(attribution.to_string(index=False, float_format=lambda x: f"{x:,.3f}"))
    if "per_rank" in facts:
        columns = ["rank", "iterations", "kernels", "copies", "gpu_span_ms", "gpu_busy_ms"]
        columns += ["compute_ms", "communication_ms", "overlap_ms"]
        table = pd.DataFrame(facts["per_rank"])[columns]
        lines += ["", "Rank by rank:", table.to_string(index=False), "", recording.sentence]
    if facts["cautions"]:
        lines += ["", "Cautions:", *(f"- {caution}" for caution in facts["cautions"])]
    return "\n".join(lines)


def _figures(facts: dict[str, Any]) -> list[str]:
    """A line a figure; at the end what is not measured, a line a reason."""
    lines = []
    absent: dict[str, list[str]] = {}
    for name, label in LABELS.items():
        value = facts[name]
        if value is None:
            reason = facts["not_measured"].get(name, "not recorded")
            absent.setdefault(reason, []).append(label)
            continue
        if name == "coverage":
            text = f"{value:.1%}"
        elif isinstance(value, float | np.floating):
            text = f"{value:,.3f}"
        elif isinstance(value, list):
            text = ", ".join(value)
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        lines.append(f"  {label:44} {text}")
    if absent:
        lines += ["", "Not measured:"]
        lines += [f"- {', '.join(labels)}: {reason}" for reason, labels in absent.items()]
    return lines
