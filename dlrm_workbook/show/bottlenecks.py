"""Figures of a profile: attribution, verdict, what-if, call tree, operators, timeline, memory.

DataFrames in, ``go.Figure`` out. Nothing is computed here that a reader could want as a number:
the frames come from :mod:`dlrm_workbook.analysis`, and a figure of what was not measured is not
asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.parts import part_label
from dlrm_workbook.analysis.attribution import IDLE
from dlrm_workbook.analysis.verdict import AT_MOST, BY_CEILINGS, PREDICTED, Stage
from dlrm_workbook.ground.units import at_most, from_to, milliseconds, percent, ratio
from dlrm_workbook.show.tables import Text, operator_name, table_bars
from dlrm_workbook.show.theme import (
    COLOURS,
    COMPUTE_COLOUR,
    INK,
    OUTLINE,
    SPAN_GAP,
    TREE_NAME,
    add_bars,
    add_ends,
    add_legend_lines,
    add_part_spans,
    add_points,
    add_spans,
    colour_of,
    components_of,
    error_bars,
    figure,
    icicle,
    label_rows,
    lines_of,
    mark_one,
    markers,
    paled,
    plotly_text,
    ranked_bars,
    rows_of,
    short_name,
    stacked_iterations,
    with_room,
    wrapped,
)

_DEVICE_COLOURS = {"cpu": COLOURS["bottom_mlp"], "gpu": COLOURS["embedding"]}


def attribution_bars(attribution: pd.DataFrame, unit: str = "ms in a mean iteration") -> go.Figure:
    """Time of each part and phase of a mean iteration, the largest on top; the GPU's where one
    was measured.

    Args:
        attribution: ``component``, ``phase``, ``where``, ``time_ms``, ``share``.
        unit: of ``time_ms``, for the axis.
    """
    table = attribution[attribution["time_ms"] > 0]
    on_gpu = table["where"].eq("device")
    of_all = unit.partition(" in ")[2].partition(",")[0]
    what, whole = ("a step", "the step") if "iteration" in unit else (of_all, "it")
    if not on_gpu.any():
        return _part_bars(f"Time of {what} by part and phase", unit, table)
    title, idle = f"GPU time of {what} by part and phase", table[~on_gpu]
    if len(idle):
        time, share = milliseconds(idle["time_ms"].sum()), percent(idle["share"].sum())
        title += f" (idle in another {time}, {share} of {whole})"
    # shares stay those of the step, as in the table below
    return _part_bars(title, f"GPU time, {unit}", table[on_gpu])


CODE_FONT = {"family": "monospace", "size": 12}
CODE_LETTERS = 92
"""Letters of a line of source that are drawn."""


def source_margin(listing: pd.DataFrame) -> go.Figure:
    """The source of the :func:`~dlrm_workbook.analysis.lines.hottest` function, and before each
    line its share of the step."""
    table = listing.reset_index(drop=True)
    largest = float(table["share"].max()) or 1.0
    texts = [percent(share) if share > 0 else "" for share in table["share"]]
    indent = int(table["source"].str.len().sub(table["source"].str.lstrip().str.len()).min())
    code = [
        plotly_text(text[indent:].rstrip()[:CODE_LETTERS].replace(" ", "\u00a0"))
        for text in table["source"]
    ]
    name = plotly_text(str(listing.attrs["function"]))
    result = ranked_bars(
        f"Share of the step by line of {name}",
        "",
        [str(line) for line in table["line"]],
        table["share"].tolist(),
        texts,
        [f"line {row.line}: {milliseconds(row.time_ms)}" for row in rows_of(table)],
        {"color": COMPUTE_COLOUR, "line": {"width": 0}},
        row=18,
    )
    look: dict[str, Any] = {"mode": "text", "text": code, "textposition": "middle right"}
    look |= {"textfont": CODE_FONT, "hoverinfo": "skip"}
    add_points(result, [1.4 * largest] * len(code), table.index, "", "", **look)
    result.update_xaxes(range=[0, 7 * largest], showticklabels=False, showgrid=False)
    return result


def idle_part_bars(table: pd.DataFrame, unit: str = "ms in a mean iteration") -> go.Figure:
    """What the host was in while the GPU did nothing: the host's rows of the same table."""
    title = "Where the host was while the GPU was idle"
    return _part_bars(title, f"GPU idle, {unit}", table, pale=True)


def _part_bars(title: str, unit: str, table: pd.DataFrame, pale: bool = False) -> go.Figure:
    table = table.sort_values("time_ms", ascending=False)
    parts = list(zip(table["component"], table["phase"], strict=True))
    look = markers(parts, [pale] * len(parts))
    return table_bars(table, title, unit, "time_ms", _part, columns="part_notes", marker=look)


def _part(row: Any) -> str:
    return part_label(row.component, row.phase)


def call_tree_icicle(tree: pd.DataFrame, unit: str = "ms in a mean iteration") -> go.Figure:
    """The :func:`~dlrm_workbook.analysis.operators.call_tree`, callers above callees, as wide as
    their time; a click zooms."""
    least = tree.attrs.get("smallest_share")
    tree = _one_root(tree)
    joined = f" (calls below {percent(least)} are joined)" if least else ""
    return icicle(
        f"Call tree{joined}, {unit}",
        520,
        tree,
        "value_ms",
        list(map(colour_of, tree["component"])),
        list(map(_box_notes, rows_of(tree))),
        "%{label}%{customdata[0]}<br>part: %{customdata[1]}<br>%{value:,.3f} ms "
        "(%{percentRoot:.1%}), of it itself %{customdata[2]:,.3f} ms%{customdata[3]}",
    )


def _box_notes(row: Any) -> tuple[str, str, float, str]:
    """What a hover text says of a box: its whole name, its part, its own time, the way to it."""
    is_short = row.label == short_name(row.label, TREE_NAME)
    name = "" if is_short else f"<br>{wrapped(plotly_text(row.label), most=2)}"
    shapes = f"<br>shapes {wrapped(row.shapes)}" if row.shapes else ""
    part = part_label(row.component, row.phase)
    return name, part, row.self_ms, shapes + _through(row.through)


def _one_root(tree: pd.DataFrame) -> pd.DataFrame:
    """The tree with a box above several threads, which plotly would draw without a name."""
    roots = tree["parent"] == ""
    if roots.sum() < 2:
        return tree
    name = "all threads"
    above = tree[roots].head(1).assign(
        id=name, label=name, component="other", phase="", shapes="", self_ms=0.0,
        value_ms=tree.loc[roots, "value_ms"].sum(),
    )  # fmt: skip
    return pd.concat([above, tree.assign(parent=tree["parent"].mask(roots, name))])


def _through(calls: Sequence[str]) -> str:
    """A line with the calls that a box is reached through, without the middle ones of many."""
    names = [short_name(call, 26) for call in calls]
    if len(names) > 7:
        names = [*names[:3], f"… {len(names) - 6} more …", *names[-3:]]
    way = wrapped(plotly_text(" › ".join(names)))
    return f"<br>through {way}" if names else ""


def iteration_times(part_times: pd.DataFrame) -> go.Figure:
    """Time of every iteration, stacked by part in the order of a step.

    Args:
        part_times: ``iteration``, ``component``, ``time_ms``.
    """
    table = part_times.groupby(["component", "iteration"])["time_ms"].sum().reset_index()
    parts = components_of(table["component"], IDLE)
    looks = {name: (part_label(name), colour_of(name), "") for name in parts}
    looks[IDLE] = ("GPU idle, host not measured", COLOURS["other"], "")
    return stacked_iterations("Time of each iteration", table, "component", "time_ms", looks)


DETAIL_SHARE = 0.25
"""Operators are drawn once so much of an iteration, or less, fills the timeline."""


def iteration_timeline(spans: pd.DataFrame, detail: pd.DataFrame | None = None) -> go.Figure:
    """What each thread and GPU stream does when, a row a lane and iteration; drag to zoom.

    Args:
        spans: of :func:`dlrm_workbook.analysis.operators.timeline`.
        detail: of :func:`dlrm_workbook.analysis.operators.operator_spans`: drawn where the reader
            zooms in on a page, or clicks its entry of the legend.
    """
    several = spans["lane"].nunique() > 1
    spans = _laned(spans, several)
    lanes = list(dict.fromkeys(spans.sort_values("iteration", kind="stable")["lane"]))
    rows = {lane: row for row, lane in enumerate(lanes)}
    result = figure("Timeline of iterations", 190 + 46 * len(lanes), legend=True)
    add_part_spans(result, spans, rows)
    if detail is not None and len(detail):
        last = float((spans["start_ms"] + spans["duration_ms"]).max())
        result.update_layout(meta={"detail_below_ms": DETAIL_SHARE * last})
        _add_operators(result, _laned(detail, several), rows)
    # overlay: a bar is where its base says, whatever else is in the row
    result.update_layout(barmode="overlay", bargap=SPAN_GAP)
    result.update_xaxes(title="ms since the iteration began")
    label_rows(result, list(map(plotly_text, lanes)))
    return result


def export_text(recording: Path) -> Text:
    """How to open the timeline and the call tree in viewers of others."""
    command = f"dlrm export {shlex.quote(str(recording))} --to"
    return Text(
        "Two viewers of others show every span, and the call tree. They read the file in the "
        "browser and upload nothing.\n\n"
        f"- for ui.perfetto.dev: `{command} perfetto timeline.json.gz`\n"
        f"- for www.speedscope.app: `{command} speedscope calls.json`"
    )


def _laned(spans: pd.DataFrame, several: bool) -> pd.DataFrame:
    lane = "iteration " + spans["iteration"].astype(str)
    return spans.assign(lane=lane + ", " + spans["lane"] if several else lane)


def _add_operators(target: go.Figure, detail: pd.DataFrame, rows: Mapping[str, int]) -> None:
    """Operators in the lower half of their row, hidden until they are asked for."""
    there = detail.attrs.get("of", len(detail))
    count = f"the {len(detail):,} longest of {there:,} " if there > len(detail) else ""
    name = f"{count}operators (zoom in)"
    more: dict[str, Any] = {"visible": "legendonly", "width": 0.3, "offset": 0.02}
    # one entry of the legend stands for the traces of all parts
    more |= {"legendgroup": "operators", "showlegend": True}
    for component, spans in detail.groupby("component", sort=False):
        look = {"color": paled(colour_of(str(component))), "line": {"width": 1, "color": INK}}
        add_spans(target, spans, rows, name, look, **more)
        more["showlegend"] = False


def operator_bars(
    operators: pd.DataFrame, count: int = 15, unit: str = "ms in a mean iteration"
) -> go.Figure:
    """The ``count`` operators of :func:`~dlrm_workbook.analysis.operators.top_operators` that take
    the most time themselves; of the GPU's, where one was measured."""
    on_gpu = bool(operators["gpu_ms"].notna().any())
    time = "gpu_ms" if on_gpu else "cpu_self_ms"
    return table_bars(
        operators[operators[time] > 0].head(count),
        "Operators by their own time",
        f"{'GPU' if on_gpu else 'CPU'} time, {unit}",
        time,
        lambda row: (
            operator_name(row.name, row.kind, 26)
            + f'<br><span style="font-size: 11px">{_part(row)}</span>'
        ),
        columns="operator_notes",
        row=38,
    )


def memory_by_part(memory: pd.DataFrame) -> go.Figure:
    """What each part allocates in a mean iteration, by
    :func:`~dlrm_workbook.analysis.operators.memory`, largest on top."""
    several = memory["device"].nunique() > 1
    table = memory.sort_values("allocated_mb", ascending=False)

    def label(row: Any) -> str:
        return _part(row) + (f", {row.device.upper()}" if several else "")

    return table_bars(
        table,
        "Memory allocated by part and phase",
        "MB (10⁶ B) allocated in a mean iteration, freed or not",
        "allocated_mb",
        label,
        text="{:,.3g} MB".format,
    )


def memory_line(curve: pd.DataFrame) -> go.Figure:
    """Memory held through torch, by :func:`~dlrm_workbook.analysis.operators.memory_curve`."""
    result = figure("Memory over the recording", 340, legend=curve["device"].nunique() > 1)
    for device, part in curve.groupby("device"):
        line = {"shape": "hv", "width": 1.5, "color": _DEVICE_COLOURS.get(str(device), INK)}
        name = str(device).upper()
        hover = f"{name} at %{{x:,.1f}} ms: %{{y:,.2f}} MB"
        more: dict[str, Any] = {"mode": "lines", "line": line}
        add_points(result, part["time_ms"], part["allocated_mb"], name, hover, **more)
    result.update_xaxes(title="ms since the recording began", rangemode="tozero")
    result.update_yaxes(title="MB above its start (10⁶ B)")
    return result


# What changes would bring: whole steps, each made of its parts in the parts' colours.

MODULE_KEYS = 4
"""Parts named by modules in the legend of steps: those that take most. The others have long names
too, which a pointer shows."""

LEAST_KEYED, LEAST_WRITTEN = 0.01, 0.1
"""Share of the longest step from which on a part is in the legend, and has its time in its bar."""

STEP_ROW = 46
"""Height of a step, in pixels."""


def _add_steps(target: go.Figure, steps: Sequence[str], parts: pd.DataFrame) -> None:
    """A bar for each step, in the order of ``steps``, stacked of its parts.

    Args:
        parts: ``step``, ``component``, ``time_ms``.
    """
    times = parts.groupby(["component", "step"])["time_ms"].sum()
    looks: dict[str, tuple[str, str | dict[str, Any]]] = {
        name: (part_label(name), colour_of(name))
        for name in components_of(parts["component"], IDLE, UNTIMED)
    }
    looks[IDLE] = ("GPU idle", IDLE_LOOK)
    looks[UNTIMED] = ("not timed together", UNTIMED_COLOUR)
    modules = times.groupby("component").max().drop([*COLOURS, IDLE, UNTIMED], errors="ignore")
    unkeyed = set(modules.nsmallest(max(0, len(modules) - MODULE_KEYS)).index)
    largest = times.groupby("component").max()
    longest = times.groupby("step").sum().max()
    small = largest[largest < LEAST_KEYED * longest].index
    unkeyed |= set(small.difference(largest.nlargest(MODULE_KEYS).index))
    for component, (label, colour) in looks.items():
        if not times.get(component, pd.Series(dtype=float)).any():
            continue
        lengths = times[component].reindex(steps, fill_value=0.0)
        hover = [
            f"{plotly_text(step)}<br>{label}: {milliseconds(time)}"
            for step, time in lengths.items()
        ]
        least = {IDLE: longest}.get(component, LEAST_WRITTEN * longest)  # nothing on pale bars
        inside = [f"{time:,.3g}" if time > least else "" for time in lengths]
        key, rows = component not in unkeyed, list(range(len(steps)))
        add_bars(target, lengths, rows, label, colour, hover, inside=inside, showlegend=key)
    target.update_layout(barmode="stack", bargap=0.35)


VERDICT_ROW, VERDICT_FRAME = 30, 120
"""Height of a step and of all around them, in pixels, where the page's head has room for 300."""

UNTIMED = "untimed"
"""Component of the bar of a change that was not timed together with the others."""

UNTIMED_COLOUR = INK
IDLE_LOOK: dict[str, Any] = {"color": paled(INK), "line": {"width": OUTLINE, "color": INK}}


def verdict_bars(stages: Sequence[Stage]) -> go.Figure | Text:
    """The step, the step after each advised change, and the machine's limit; grey is what nobody
    timed on top of the changes before."""
    if not stages:
        return Text("")
    names, first = [stage.name for stage in stages], stages[0].mid_ms
    is_limited = stages[-1].basis == BY_CEILINGS
    title = (
        "From the step to the machine's limit" if is_limited else "The step, and with each change"
    )
    if len(stages) == 1:
        title = f"What {names[0].partition(',')[0]} is made of"
    # a legend of two lines must leave room for a lone bar
    result = figure(title, VERDICT_FRAME + VERDICT_ROW * max(len(stages), 2), legend=True)
    _add_steps(result, names, pd.concat([_drawn(s, stages).assign(step=s.name) for s in stages]))
    lengths = [stage.mid_ms if stage.mid_ms == stage.mid_ms else 0.0 for stage in stages]
    texts = [f"<b>{milliseconds(first)}</b>"] + [_end_of(stage, first) for stage in stages[1:]]
    add_ends(result, lengths, list(range(len(stages))), texts)
    # the last row is a limit itself; a change has a tick at the limit of its own configuration
    limited = [(at, one) for at, one in enumerate(stages[:-1]) if len(one.least)]
    if limited:
        tick = {"color": INK, "size": 16, "symbol": "line-ns", "line": {"width": 3, "color": INK}}
        hover = [f"{plotly_text(s.name)}<br>limit: {milliseconds(s.limit_ms)}" for _, s in limited]
        ends = [one.limit_ms for _, one in limited], [at for at, _ in limited]
        add_points(result, *ends, "hardware limit", hover, marker=tick)
    add_legend_lines(result)
    unit = {"the step, as measured": "ms per iteration, without a profiler"}.get(
        names[0], "ms per iteration" if "step" in names[0] else f"ms of {names[0]}"
    )
    result.update_xaxes(title=unit, range=with_room(lengths, texts))
    label_rows(result, [lines_of(name, 46) for name in names])
    return result


def _drawn(stage: Stage, stages: Sequence[Stage]) -> pd.DataFrame:
    """The parts of a stage; one grey part where it was not timed with the changes before it."""
    alone = next((one for one in stages if one.on_the_way), None)
    if stage.aside or (stage.basis == PREDICTED and stage is not alone):
        whole = pd.DataFrame({"component": [UNTIMED], "time_ms": [stage.mid_ms]})
        return whole.fillna(0.0)
    return stage.parts


def _end_of(stage: Stage, now_ms: float) -> str:
    """What stands behind the bar of a stage."""
    if stage.mid_ms != stage.mid_ms:
        return "not predicted"
    gain = now_ms / stage.mid_ms
    words = at_most(gain) if stage.note.endswith(AT_MOST) else ratio(gain)
    text = f"<b>{milliseconds(stage.mid_ms)}</b>  {words}"
    if stage.low_ms != stage.high_ms:
        text += f"  ({from_to(stage.low_ms, stage.high_ms)})"
    return text


FURTHEST = 1.5
"""Ranges are drawn to this many times the longest bar; beyond it their end is written."""


def tried_ranges(table: pd.DataFrame) -> go.Figure | Text:
    """How many times as fast the program ran under each remedy of
    :func:`~dlrm_workbook.analysis.tried.tried`, with the range."""
    timed = table[table["speedup_mid"].notna()].reset_index(drop=True)
    if timed.empty:
        return Text("*No remedy could be timed.*")
    low, mid, high = (timed[f"speedup_{end}"] for end in ("low", "mid", "high"))
    result = figure("Speed-up by each remedy, tried in turns", 130 + 34 * len(timed))
    hover = [f"{plotly_text(str(row.remedy))}<br>{row.status}" for row in timed.itertuples()]
    look = {"color": COMPUTE_COLOUR, "size": 9}
    more: dict[str, Any] = {"marker": look, "error_x": error_bars(low, mid, high, thickness=2)}
    add_points(result, mid, timed.index, "speed-up", hover, **more)
    add_ends(result, high.fillna(mid), list(timed.index), list(map(ratio, mid)))
    mark_one(result)
    span = [min(0.9, 0.95 * low.min()), 1.1 * max(1.0, high.max())]
    result.update_xaxes(title="times as fast as without it (range of nine in ten)", range=span)
    label_rows(result, [lines_of(remedy, 48) for remedy in timed["remedy"]])
    return result


def what_if_bars(table: pd.DataFrame, parts: pd.DataFrame) -> go.Figure | Text:
    """A step after each change, with the range it is predicted in.

    Bars are times of as many samples as an iteration has now, so that another batch size compares
    with the rest. Tables are of ``what_if_table`` and ``what_if_parts``.
    """
    predicted = table[table["mid_ms"].notna()]
    if predicted.empty:
        return Text(
            "*Not measured: no change was probed; `dlrm run profile -f FILE -p "
            "profiling.probes=true` probes changes of our own training.*"
        )
    names, now = ["as it is", *predicted["change"]], float(predicted["now_ms"].iloc[0])
    title = "Predicted time of a step after each change"
    result = figure(title, 160 + STEP_ROW * len(names), legend=True)
    _add_steps(result, names, parts.rename(columns={"change": "step"}))
    middle = now / predicted["speedup_mid"]
    least, highest = now / predicted["speedup_high"], now / predicted["speedup_low"]
    # one change of which little is known must not flatten all the others
    furthest = FURTHEST * max(now, float(middle.max()))
    most = highest.clip(upper=furthest)
    look = {"color": INK, "size": 7, "symbol": "line-ns", "line": {"width": 2}}
    error = error_bars(least, middle, most, thickness=2)
    places = list(range(1, len(names)))
    spans: dict[str, Any] = {"marker": look, "error_x": error, "hoverinfo": "skip"}
    add_points(result, middle, places, "predicted range", "", **spans)
    # behind the dotted line, which would cross them
    ends = [max(now, end) for end in (now, *most)]
    texts = [milliseconds(now)] + [
        f"{milliseconds(time)}  ({ratio(gain)})"
        + (f", up to {milliseconds(end)} →" if end > furthest else "")
        for time, gain, end in zip(middle, predicted["speedup_mid"], highest, strict=True)
    ]
    add_ends(result, ends, list(range(len(names))), texts)
    mark_one(result, now)
    result.update_xaxes(
        title="ms for the samples of one iteration now, without a profiler",
        range=with_room(ends, texts),
    )
    label_rows(result, [lines_of(name, 36) for name in names])
    return result


def engine_bars(table: pd.DataFrame) -> go.Figure:
    """Time of each part by two engines, with how far apart they may be, of
    :func:`~dlrm_workbook.analysis.compare.engines_side_by_side`."""
    first, second = (
        name.removesuffix("_cost_ms") for name in table.columns if name.endswith("_cost_ms")
    )
    parts = table[table["component"] != "iteration"].iloc[::-1]
    label = list(map(part_label, parts["component"], parts["phase"]))
    result = figure("Each part by two recordings", 160 + 34 * len(parts), legend=True)
    error = {"type": "data", "array": parts["error_ms"], "thickness": 1.5, "width": 3, "color": INK}
    for name, colour, bar in ((second, INK, error), (first, COLOURS["bottom_mlp"], None)):
        hover = f"%{{y}}, {name}: %{{x:,.3f}} ms"
        add_bars(result, parts[f"{name}_ms"], label, name, colour, hover, error_x=bar)
    result.update_layout(barmode="group", legend_traceorder="reversed")
    result.update_xaxes(title="ms of a steady iteration (log scale)", type="log", dtick=1)
    return result
