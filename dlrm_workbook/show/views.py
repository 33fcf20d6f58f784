"""What a report can show, by name: each view's table, its figure, and what stands in their place.

A table is computed by :mod:`dlrm_workbook.analysis` and drawn by the other modules of this room;
here it is said once which belong together, so that a notebook asks for a name and never decides
whether there is something to show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlrm_workbook.analysis import (
    attribution,
    device_counters,
    gpu,
    gpu_limits,
    idleness,
    lanes,
    launches,
    lines,
    operators,
    rank_traces,
    reference,
    reuse,
    roofline,
    tried,
    verdict,
    views,
    whatif,
)
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.findings import cautions
from dlrm_workbook.analysis.other_gpus import other_gpus
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show import bottlenecks as figures
from dlrm_workbook.show import gpu as gpu_figures
from dlrm_workbook.show import idle as idle_figures
from dlrm_workbook.show import profile as about
from dlrm_workbook.show import ranks as rank_figures
from dlrm_workbook.show import roofline as roofline_figures
from dlrm_workbook.show.tables import FIRST, TABLES, Quality, Text, absent, draw, listed, show

if TYPE_CHECKING:
    from dlrm_workbook.report import Report

LEAST_LINE = 0.005
"""Share of the step from which on a line is one of the first."""

TIMES = ("gpu_time_ms", "cpu_time_ms")
"""Metrics that calls are compared by, the first that was measured."""

CACHE_SIZE = "last_level_cache_bytes"


@dataclass(frozen=True)
class View:
    """One question of a report and what answers it.

    Attributes:
        title: what it shows, in a few words: the table's name on a page.
        table: computes the table of a profile; an empty one has its reason in
            ``attrs["not_measured"]``.
        figure: draws the table.
        made: computes the table of a report, where it needs more than the profile.
        drawn: draws the figure of a report, where it needs more than the table.
        words: sentences before the figure; may be empty.
        listed: whether a page shows the table too, with the columns that
            :data:`~.tables.TABLES` has under the view's name, else as :func:`~.tables.show` does.
        tags: where a page has it: ``summary`` (in ``verdict.md`` too), ``open``, ``detail``,
            ``headline``, ``quality``.
        tab: title of the tab, where the tables of several views stand in one place.
        most: rows that are shown at first.
        sort: column that a page's rows are sorted by, the largest first.
        is_told: whether other outputs of a page say what the table does, which is folded there.
        needs: a measurement that an empty table without a reason lacks
            (:data:`dlrm_workbook.show.profile.HOW`).
    """

    title: str
    table: Callable[[Profile], pd.DataFrame] | None = None
    figure: Callable[[pd.DataFrame], Any] | None = None
    _: KW_ONLY
    made: Callable[[Report], pd.DataFrame] | None = None
    drawn: Callable[[Report], Any] | None = None
    words: Callable[[Report], Any] | None = None
    listed: bool = True
    tags: str = ""
    tab: str = ""
    most: int = FIRST
    sort: str = ""
    is_told: bool = False
    needs: str = ""

    @property
    def is_drawn(self) -> bool:
        return bool(self.figure or self.drawn)


def outputs(report: Report, name: str) -> list[tuple[Any, dict[str, Any]]]:
    """What a view shows of a report, in order: its sentences, its figure, its table.

    Where it has nothing to show this is the reason, or nothing where there is none.
    """
    view, table = VIEWS[name], report.table(name)
    tags: dict[str, Any] = {"tags": view.tags.split()}
    shown = [(view.words(report), tags)] if view.words else []
    if reason := report.absent(name):
        return [*shown, (absent(reason), tags)]
    if table.empty:
        return shown
    if view.is_drawn:
        shown.append((report.figure(name), tags))
    if view.listed:
        whole = report.folder / "tables" / f"{name}.csv" if report.folder else None
        rows = table.sort_values(view.sort, ascending=False) if view.sort else table
        columns = TABLES.get(name)
        formatted = show(rows, columns, most=view.most, whole=whole, caption=view.title)
        tags = {"tags": [*tags["tags"], *["detail"] * view.is_told]}
        shown.append((formatted, tags | ({"tab": view.tab} if view.tab else {})))
    return shown


# ---- tables that need more than the profile --------------------------------------------------


def _first_lines(report: Report) -> pd.DataFrame:
    table = report.lines
    if table.empty:  # the section of the lines says why
        return pd.DataFrame()
    seen = table["thread"].eq(lines.MAIN) & table["share_of_step"].ge(LEAST_LINE)
    return table[table["file"].ne("") & seen].head(3)


def _steps(report: Report) -> pd.DataFrame:
    if len(report.stages) > 1:
        return report.bars
    timed = verdict.timed_table(report.profile)
    return timed if len(timed) else pd.DataFrame()


def _calls(report: Report) -> pd.DataFrame:
    one, metric, within = _compared(report)
    other = [name for name in TIMES if name != metric and one.has(name)]
    return views.folded(views.top_down(one, metric, also=other, within=within), 40)


def _callers(report: Report) -> pd.DataFrame:
    one, metric, within = _compared(report)
    return views.bottom_up(one, metric, 8, within=within)


def _functions(report: Report) -> pd.DataFrame:
    one, metric, within = _compared(report)
    return views.flat(one, metric, within=within)


def _compared(report: Report) -> tuple[Profile, str, Any]:
    """A mean iteration, the metric by which its calls are compared, and which of them count."""
    profile = report.profile
    metric = next((name for name in TIMES if profile.has(name)), TIMES[-1])
    value = profile.values["value"] / attribution.iteration_count(profile)
    one = replace(profile, values=profile.values.assign(value=value), _known={})
    return one, metric, attribution.step_contexts(profile)


def _icicle(report: Report) -> Any:
    return figures.call_tree_icicle(
        operators.call_tree(report.profile, _compared(report)[1]), _unit(report)
    )


def _unit(report: Report) -> str:
    return attribution.time_unit(report.profile)


def _threads(profile: Profile) -> pd.DataFrame:
    spans = lanes.thread_timeline(profile)
    if len(spans) and (spans["component"] == "other").all():
        return lanes.thread_timeline(profile, "function")
    return spans


def _iterations(profile: Profile) -> pd.DataFrame:
    table = attribution.per_iteration(profile)
    return table[table["iteration"].isin(profile.iterations["iteration"])]


def _state(report: Report) -> Text:
    state = attribution.iteration_state(report.profile)
    return Text(state.in_words(report.profile.iterations["iteration"].tolist()) if state else "")


def _differed(profile: Profile) -> pd.DataFrame:
    grew = attribution.what_differed(profile).query("grew_ms > 0")
    return grew.groupby("iteration", sort=False).head(3)


def _other_times(report: Report) -> pd.DataFrame:
    table = reference.other_times(report.profile, report.source.folder)
    reason = "nothing ran without a profiler; `dlrm run profile -f FILE` does"
    return table if len(table) > 1 else unmeasured(list(table.columns), reason)


def _roofline(report: Report) -> pd.DataFrame:
    reason = roofline.missing(report.profile)
    columns = list(report.limits.columns)
    return unmeasured(columns, f"no roofline, {reason}") if reason else report.limits


def _on_gpu(report: Report) -> bool:
    return bool(report.parts["where"].eq("device").any())


def _idle_parts(report: Report) -> pd.DataFrame:
    parts = report.parts
    return parts[parts["where"].eq("host") & parts["time_ms"].gt(0) & _on_gpu(report)]


def _device_beside_host(report: Report) -> pd.DataFrame:
    table = attribution.device_beside_host(report.profile)
    return table if _on_gpu(report) else table.head(0)


def _step_sentence(report: Report) -> Text:
    step = reference.reference(report.profile)
    basis = attribution.basis(report.profile)
    sentence = f"The recording marks no steps: times are of {basis}."
    of_all = "the GPU's time" if _on_gpu(report) else basis
    covered = f"{attribution.coverage(report.parts):.2%} of {of_all} is in named parts."
    return Text(f"{step.sentence if step else sentence} {covered}")


def _stall_reasons(report: Report) -> pd.DataFrame:
    stalls = report.stalls
    reasons = gpu.stall_reasons(stalls) if len(stalls) else stalls
    names = {reason: row["words"] for reason, row in gpu.REASONS.items()}
    return reasons.replace({"reason": names})


def _stalls(by: str) -> Callable[[Profile], pd.DataFrame]:
    return lambda profile: gpu.stall_table(gpu.sampled_profile(profile), by)


VIEWS: dict[str, View] = {
    # the answer
    "source": View("What is explained", words=lambda report: Text(report.source.sentence)),
    "headline": View(
        "What limits the step", words=lambda report: Text(report.headline), tags="headline"
    ),
    "quality": View(
        "What figures are good for", words=lambda report: Quality(**report.quality), tags="quality"
    ),
    "first_lines": View("Lines with the most time", made=_first_lines, tags="headline"),
    "bars": View(
        "The step, and the step after each advised change",
        made=lambda report: verdict.table(report.stages) if report.stages else pd.DataFrame(),
        drawn=lambda report: figures.verdict_bars(report.stages),
        listed=False,
        tags="headline",
    ),
    "cautions": View(
        "Read with caution", words=lambda report: draw(
            lambda said: Text(f"**Read with caution:**\n\n{listed(said)}"),
            cautions(report.profile), "",
        ),
    ),
    "lines": View("Time by line", lines.lines, tags="summary"),
    "hottest": View(
        "The function with the most time", lines.hottest, figures.source_margin, listed=False
    ),
    "trials": View(
        "Remedies tried on this program", tried.tried, figures.tried_ranges,
        words=lambda report: about.tried_text(report.trials, tried.not_tried(report.profile)),
        tags="summary",
    ),
    "findings": View(
        "What to change",
        made=lambda report: verdict.finding_table(report.ranked_findings),
        words=lambda report: about.findings_text(
            report.ranked_findings, report.source.options, report.source.folder
        ),
        tags="summary", is_told=True,
    ),
    "stages": View(
        "All changes together", made=_steps, is_told=True,
        words=lambda report: draw(
            about.commands_text, verdict.commands(report.stages, report.source.options), ""
        ),
    ),
    "changes": View(
        "Each change alone, predicted", whatif.what_if_table, needs="probes",
        drawn=lambda report: figures.what_if_bars(
            report.changes, whatif.what_if_parts(report.profile)
        ),
    ),
    # where the time goes
    "parts": View(
        "Time by part and phase", attribution.attribute, sort="time_ms", tags="summary",
        drawn=lambda report: figures.attribution_bars(report.parts, _unit(report)),
        words=_step_sentence,
    ),
    "idle_parts": View(
        "Where the host was while the GPU was idle", made=_idle_parts, listed=False,
        drawn=lambda report: figures.idle_part_bars(report.idle_parts, _unit(report)),
    ),
    "device_beside_host": View("Parts on the GPU and on the host", made=_device_beside_host),
    "times": View("Other times of the step", made=_other_times, tags="open summary"),
    "unattributed": View("What is in no part", attribution.unattributed, tags="detail", most=10),
    "roofline": View(
        "Parts beside the limits of the machine", made=_roofline, sort="time_ms",
        drawn=lambda report: roofline_figures.roofline_chart(
            report.roofline, report.profile.meta.get("ceilings")
        ),
        words=lambda report: draw(
            lambda table: about.roofline_text(table, roofline.doubts(report.profile, table)),
            report.roofline, "",
        ),
    ),
    "least_times": View(
        "Measured and least time", made=lambda report: report.roofline,
        figure=roofline_figures.least_time_bars, listed=False, tags="detail",
    ),
    "operator_limits": View(
        "Operators beside the limits of the machine", roofline.operator_limits, tags="detail"
    ),
    "ceilings": View(
        "Limits of the machine", tags="detail",
        made=lambda report: about.ceilings_frame(report.profile.meta.get("ceilings")),
    ),
    # the GPU
    "idle": View(
        "Idle time of the GPU by cause", figure=idle_figures.idle_shares,
        made=lambda report: idleness.idle_by_cause(report.profile, report.idle_iterations),
    ),
    "blame": View(
        "What the CPU ran while the GPU was idle", idleness.idle_blame, gpu_figures.blame_bars,
        most=15,
    ),
    "launches": View("Launches of kernels", launches.launch_summary),
    "idle_iterations": View(
        "Idle time of each iteration", idleness.idle_causes, idle_figures.idle_each, listed=False,
        tags="detail",
    ),
    "queue": View(
        "Work queued for the GPU", lambda profile: launches.queue_depth(profile, 1000),
        idle_figures.queue_line, listed=False, tags="detail",
    ),
    "launches_by_part": View("Launches by part", launches.launches_by_part, tags="detail"),
    "gpus": View(
        "GPUs busy and idle", idleness.gpu_idleness, gpu_figures.idleness_bars, tags="detail"
    ),
    "kernels": View("Kernels by time", gpu.kernel_table, gpu_figures.kernel_bars),
    "kernel_launches": View(
        "What kernels were launched with, and what they reach",
        made=lambda report: report.kernels, tags="detail",
    ),
    "copies": View("Copies", gpu.copy_table, tags="detail"),
    "rates": View(
        "Operators beside the limits of the GPU", gpu_limits.operator_rates,
        roofline_figures.operator_roofline,
    ),
    "rate_coverage": View("Kernels whose rate is known", gpu_limits.rate_coverage, tags="detail"),
    "counters": View("Hardware counters", device_counters.counter_table, tags="detail"),
    "stalls": View(
        "What warps wait for, by kernel", _stalls("kernel"), gpu_figures.stall_bars, listed=False
    ),
    "stall_lines": View(
        "What warps wait for, by line", _stalls("line"), gpu_figures.stall_bars, listed=False
    ),
    "stall_reasons": View("What warps wait for", made=_stall_reasons),
    "ranks": View(
        "Each rank's step", figure=rank_figures.rank_bars,
        made=lambda report: rank_traces.rank_table(report.source.ranks, report.collectives),
    ),
    "waiting": View(
        "Time in collectives", made=lambda report: report.ranks,
        figure=rank_figures.waiting_bars, listed=False,
    ),
    "collectives": View(
        "Collectives, the longest wait first", sort="wait_us",
        made=lambda report: rank_traces.collectives(report.source.ranks), tags="detail",
    ),
    "rank_parts": View(
        "Each part over the ranks", tags="detail",
        made=lambda report: rank_traces.parts_over_ranks(report.source.ranks),
    ),
    # calls
    "calls": View(
        "Calls, callers above callees", made=_calls, drawn=_icicle, tags="open", tab="Top-down",
    ),
    "callers": View("Functions with their callers", made=_callers, tab="Bottom-up", most=40),
    "functions": View("Functions over all calls", made=_functions, tab="Flat", most=15),
    "operators": View(
        "Operators by their own time", operators.top_operators,
        drawn=lambda report: figures.operator_bars(report.operators, unit=_unit(report)),
    ),
    # one after the other
    "timeline": View(
        "First spans of the first iterations", operators.timeline, needs="iterations", most=40,
        drawn=lambda report: figures.iteration_timeline(
            report.timeline, operators.operator_spans(report.profile)
        ),
    ),
    "threads": View(
        "What each thread and stream ran", _threads, gpu_figures.lane_timeline, listed=False,
        tags="detail",
    ),
    "export": View(
        "Other viewers", words=lambda report: draw(figures.export_text, report.source.folder, "")
    ),
    "iterations": View(
        "Iterations by part", _iterations, figures.iteration_times, words=_state, listed=False,
        needs="iterations",
    ),
    "differed": View("What took longer in iterations left out", _differed, tags="open"),
    # the machine
    "states": View(
        "What the threads did", idleness.thread_states, idle_figures.thread_state_bars, listed=False
    ),
    "outside_operators": View("Time outside operators", idleness.outside_operators, tags="open"),
    "operator_load": View("Calls of operators", launches.operator_load),
    "overlaps": View("What runs at the same time", idleness.overlaps, tags="detail"),
    "memory": View(
        "Memory allocated by part", operators.memory, figures.memory_by_part,
        needs="allocated_bytes",
    ),
    "memory_curve": View(
        "Memory over the recording", operators.memory_curve, figures.memory_line, listed=False,
        needs="allocated_bytes",
    ),
    # how it was measured
    "machine": View("What was recorded", about.recording_facts),
    "passes": View("What measuring cost", about.passes, tags="summary"),
    "not_measured": View("What was not measured", about.unmeasured_frame),
    # what few need
    "cache_hits": View(
        "Lookups that a cache of rows answers", reuse.cache_hit_shares,
        drawn=lambda report: roofline_figures.cache_curve(
            report.cache_hits, (report.profile.meta.get("ceilings") or {}).get(CACHE_SIZE)
        ),
    ),
    "row_reuse": View("How often rows are used again", reuse.row_reuse),
    "other_gpus": View(
        "The same step on other GPUs", partial(other_gpus, "other_gpus"),
        words=lambda report: listed(report.other_gpus.attrs.get("notices", [])),
    ),
}  # fmt: skip
"""Name, as an attribute of a :class:`~dlrm_workbook.report.Report`, to what it shows."""
