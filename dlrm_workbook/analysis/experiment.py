"""The experiment that this project began with, beside the figures once published for it.

facebookresearch/dlrm was run on an H100 under ``hpcrun -a python -e gpu=nvidia,pc -t``, and a
report of July 2025 (public repository ``yuninxia/dlrm``, ``workloads/reports`` and
``workloads/dlrm_performance_analysis_report.md``) promised a gain of 351.5x. Its counts and times
are sums of *inclusive* values over the whole call tree: a launch is counted again at every
caller above it. :func:`beside` sets its figures beside the recording's, and beside what comes
out when inclusive values of the same recording are added up.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from dlrm_core.config import load_parameters
from dlrm_workbook.analysis.attribution import iteration_count, iteration_times_ms
from dlrm_workbook.analysis.gpu import copy_table
from dlrm_workbook.analysis.idleness import gpu_idleness
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import START_UP
from dlrm_workbook.recordings.profile import Profile, of_streams, true_trace

PRESET = "h100_experiment"
"""Parameters of the model that the experiment trained."""

PUBLISHED = Path(__file__).with_suffix(".csv")
"""Figure, what was published, its unit, and what went wrong."""


def inclusive_sums(profile: Profile) -> dict[str, float]:
    """Sums over the call tree that count a value again at each of its callers. Returns each
    metric's sum of inclusive values over all contexts, in the metric's unit."""
    names = ("GKER:COUNT", "launches", "copy_bytes", "GXCOPY:H2D (B)", "gpu_time_ms", "cpu_time_ms")
    return {
        name: float(profile.value_table(name, "inclusive").sum())
        for name in names
        if profile.has(name)
    }


def beside(profile: Profile, host: Profile | None = None) -> pd.DataFrame:
    """What was published of the experiment, and what its recording says. ``profile`` is of the
    GPU's recording, ``host`` of that of the same program with CPU time, where there is one.
    ``summed`` are inclusive values of this recording added up as the report did (NaN where that is
    not what it did); ``measured`` is NaN where this recording cannot tell."""
    wrong = inclusive_sums(profile)
    cpu = inclusive_sums(host).get("cpu_time_ms", math.nan) if host is not None else math.nan
    summed = {
        "kernel launches": wrong.get("GKER:COUNT", wrong.get("launches", math.nan)),
        "copied to the GPU": wrong.get("GXCOPY:H2D (B)", math.nan) / 1e9,
        "time of GPU operations": wrong.get("gpu_time_ms", math.nan) / 1e3,
        "time on CPU threads": cpu / 1e3,
    }
    right = _measured(profile, host)
    table = pd.read_csv(PUBLISHED, keep_default_na=False)
    table["summed"], table["measured"] = table["figure"].map(summed), table["figure"].map(right)
    return table[["figure", "unit", "published", "summed", "measured", "what_went_wrong"]]


def _measured(profile: Profile, host: Profile | None) -> dict[str, float]:
    """The figures of ``experiment.csv`` by the recording, each value counted once."""
    idle = gpu_idleness(replace(profile, trace=true_trace(profile), _known={}))
    copies = copy_table(profile)
    total = float(profile.value_table("gpu_time_ms").sum())
    to_gpu = copies[copies["direction"].str.startswith("host to")] if len(copies) else copies
    launches = "GKER:COUNT" if profile.has("GKER:COUNT") else "launches"
    figures = {
        "kernel launches": float(profile.value_table(launches).sum()),
        "time of GPU operations": total / 1e3,
    }
    if len(to_gpu):
        figures["copied to the GPU"] = float(to_gpu["bytes"].sum()) / 1e9
        time_ms = float(to_gpu["time_ms"].sum())
        figures["speed of copies"] = figures["copied to the GPU"] / (time_ms / 1e3)
        figures["copies in the GPU's time"] = 100 * float(copies["time_ms"].sum()) / total
    if len(idle):
        busy, span = float(idle["busy_ms"].sum()), float(idle["span_ms"].sum())
        figures["GPU used"] = 100 * busy / span
    if host is not None:
        figures["time on CPU threads"] = float(host.value_table("cpu_time_ms").sum()) / 1e3
    return figures


def tables_seen(profile: Profile) -> pd.DataFrame:
    """What the recording says of the model's embedding tables, beside :data:`PRESET`; NaN where it
    cannot tell."""
    model = load_parameters(PRESET, []).model
    dense, tables = 4 * sum(model.dense_weights.values()), sum(model.table_rows) * model.row_bytes
    rows, launched, copied = len(model.table_rows), math.nan, math.nan
    contexts = profile.contexts
    lookup = contexts["name"].str.contains("EmbeddingBag_updateOutputKernel", regex=False)
    if profile.has("GKER:COUNT") and (lookup & contexts["kind"].eq("kernel")).any():
        launched = float(profile.value_table("GKER:COUNT")[lookup].sum())
    if profile.has("GXCOPY:H2D (B)"):
        early = contexts["phase"].eq(START_UP)
        copied = float(profile.value_table("GXCOPY:H2D (B)")[early].sum()) or math.nan
    steps = iteration_count(profile)
    table = [
        ("lookups launched", "", launched, rows * steps),
        ("tables: lookups of an iteration", "", launched / steps, rows),
        ("weights copied to the GPU before training", "B", copied, dense + tables),
        ("rows of tables: what the MLPs leave of that", "", (copied - dense) / model.row_bytes,
         sum(model.table_rows)),
    ]  # fmt: skip
    return pd.DataFrame(table, columns=["figure", "unit", "recorded", "preset"])


def promised(compared: pd.DataFrame, parts: pd.DataFrame) -> str:
    """The published gain beside the most that less work of the GPU could bring, in a sentence.
    ``compared`` is what :func:`beside` gives, ``parts`` the time of a step by part, on the GPU
    (``where`` is ``device``) and not."""
    gain = compared.set_index("figure")["published"]["predicted gain"]
    step = float(parts["time_ms"].sum())
    busy = float(parts.loc[parts["where"].eq("device"), "time_ms"].sum())
    return (
        f"A report promised a gain of {gain:.0f}x. All work of the GPU takes {milliseconds(busy)} "
        f"of a step of {milliseconds(step)}: without any of it the step would be "
        f"{step / (step - busy):.3f}x as fast."
    )


def steps(profile: Profile) -> pd.DataFrame:
    """Length of every step and the GPU's work in it.

    ``launching_ms`` is from its first operation on the GPU to the end of its last. Operations that
    the trace leaves open count as long as they took.
    """
    table = profile.iterations[["iteration"]].copy()
    table["time_ms"] = iteration_times_ms(profile)
    work = of_streams(profile, true_trace(profile))
    # each operation belongs to the step in which it began
    step = np.searchsorted(profile.iterations["start_ns"], work["start_ns"], side="right") - 1
    inside = (step >= 0) & (work["start_ns"] < profile.iterations["end_ns"].iloc[-1]).to_numpy()
    first, last = work["start_ns"][inside], work["end_ns"][inside]
    reach = last.groupby(step[inside]).max() - first.groupby(step[inside]).min()
    table["launching_ms"] = reach.reindex(range(len(table))).to_numpy() / 1e6
    length_ms = (work["end_ns"] - work["start_ns"]).to_numpy() / 1e6
    table["busy_ms"] = np.bincount(step[inside], length_ms[inside], minlength=len(table))
    table["busy_share"] = table["busy_ms"] / table["time_ms"]
    return table
