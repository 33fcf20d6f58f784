"""How a benchmark is shown: columns of its tables, sentences, and figures."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.base.text import counted
from dlrm_studies.bench import analyse
from dlrm_studies.bench.analyse import Document
from dlrm_studies.bench.bare import cautions
from dlrm_studies.bench.cases import BF16X2, FP32, GROWTH, PLAIN, TORCHREC
from dlrm_studies.columns import columns_of
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.evidence.contestants import PEER, certainty, difference_text, gain_text
from dlrm_workbook.ground.units import (
    NOTHING,
    digits,
    faster,
    known_or,
    milliseconds,
    percent,
    ratio,
    signed_milliseconds,
    value_text,
)
from dlrm_workbook.show import theme
from dlrm_workbook.show.tables import Text, each_row

FIGURE_NAMES = {"step_ms": "step", "end_to_end_ms": "end to end"}


def contestant_label(name: str) -> str:
    """A contestant as a reader calls it."""
    names = {PEER: "facebookresearch/dlrm", PLAIN: "ours, plain", TORCHREC: "TorchRec"}
    return names.get(name, f"ours, {name}")


def interval_text(
    confidence: float, low: float, high: float, text: Callable[[float], str] = ratio
) -> str:
    """``1.20x to 1.31x``; one round has no interval: its ends would both be the number itself."""
    return f"{text(low)} to {text(high)}" if confidence > 0 else "one round"


def option_label(leaf: str, value: Any, also: str) -> str:
    """An option with its value, and what goes with it."""
    return f"{leaf}: {value_text(value)}{f', with {also}' if also else ''}"


# Columns of the tables of :mod:`.analyse`.

COLUMNS = columns_of(
    "bench",
    {
        "contestant": each_row(contestant_label, words=True),
        "figure": each_row(lambda name: FIGURE_NAMES[name], words=True),
        "ratios": each_row(interval_text),
        "times": each_row(functools.partial(interval_text, text=digits)),
        "shares": each_row(functools.partial(interval_text, text=percent)),
        "confidence": each_row(lambda value: f"{value:.0%}" if value > 0 else NOTHING),
        "difference": each_row(difference_text),
        "error": each_row(lambda error: known_or(error, "{:.1e}".format)),
        "option": each_row(option_label, words=True),
    },
)


# Sentences.


def verdict(document: Document) -> Text:
    """Speed-ups and over whom, whether goals are met, whether the training is the same."""
    cases = analyse.judged(document, "shape")
    if not cases:
        return Text("No shape was measured.")
    lines = [_case_verdict(document, cases[0])]
    if len(cases) > 1:
        lines.append(_others_verdict(document, cases[1:]))
    table = analyse.ratios(document)
    goals = table[table["goal"].notna()]
    if len(goals):
        missed = goals[goals["mid"] < goals["goal"]]
        reached = len(goals) - len(missed)
        text = f"**{reached} of {len(goals)} goals against facebookresearch/dlrm reached**"
        if len(missed):
            text += "; furthest from its goal: " + _furthest(missed)
        lines.append(text + ".")
    lines += _cautions(document)
    lines.append(_same_training(document))
    return Text("\n\n".join(lines))


def _case_verdict(document: Document, case: Mapping[str, Any]) -> str:
    name = analyse.best(document, case)
    meaning = str(case["meaning"])
    where = f"{meaning[:1].upper()}{meaning[1:]}, {counted(case['threads'], 'thread')}"
    if not name or name not in case["ratios"]:
        return f"**{where}**: nothing to compare."
    intervals = case["ratios"][name]
    sure = intervals["step_ms"]["confidence"]
    whole = gain_text(intervals["end_to_end_ms"], contestant_label(case["against"]))
    return (
        f"**{where}: {contestant_label(name)} is {whole} end to end**, data included, and "
        f"{gain_text(intervals['step_ms'])} per step ({certainty(intervals['step_ms'])}"
        f"{'' if sure >= 0.95 else '; six rounds or more give 95%'})."
    )


def _others_verdict(document: Document, cases: Sequence[Mapping[str, Any]]) -> str:
    """From which to which speed-up the fastest of ours reaches in several cases."""
    rated = [case["ratios"].get(analyse.best(document, case)) for case in cases]
    reach = []
    for figure, name in (("end_to_end_ms", "end to end"), ("step_ms", "per step")):
        mids = [intervals[figure]["mid"] for intervals in rated if intervals]
        if mids:
            ends = [faster(end(mids), math.nan, math.nan) for end in (min, max)]
            reach.append(f"from {ends[0]} to {ends[1]} {name}")
    if not reach:
        return "Nothing to compare in the other cases."
    cases_named = counted(len(mids), "other case")
    return f"In {cases_named} below, the fastest of ours is {' and '.join(reach)}."


def _cautions(document: Document) -> list[str]:
    """What the machine did not give while each case was measured."""
    return [
        f"{sentence} ({_place(case)})."
        for case in analyse.judged(document, "shape")
        if case.get("bare")
        for sentence in cautions(case["bare"])
    ]


def _place(case: Mapping[str, Any]) -> str:
    """A shape and its threads; one that has no name is as it was given."""
    name = "as given" if case["case"] == "given" else case["case"]
    return f"{name}, {counted(case['threads'], 'thread')}"


def _furthest(missed: pd.DataFrame) -> str:
    row = theme.rows_of(missed.assign(short=missed["mid"] / missed["goal"]).nsmallest(1, "short"))[
        0
    ]
    return (
        f"{contestant_label(row.contestant)} on {row.case}, {FIGURE_NAMES[row.figure]}, "
        f"{ratio(row.mid)} of {ratio(row.goal)}"
    )


def _same_training(document: Document) -> str:
    judged = [case["losses_agree"] for case in document["cases"] if "losses_agree" in case]
    if not any(value is not None for value in judged):
        return "Losses: nothing to compare."
    if all(value is not False for value in judged):
        return (
            "All contestants train the same model on the same data to the same losses: within "
            "1e-05 in fp32, 5e-03 in bf16 and fp16, in the very runs that were timed."
        )
    return "**Careful: not all contestants train the same**, see the losses below."


def best_speeds(times: pd.DataFrame) -> pd.DataFrame:
    """The fastest contestant of each shape, end to end.

    Returns:
        Columns as in ``dlrm help columns best_speeds``.
    """
    if times.empty:
        return pd.DataFrame(columns=["on", "model", "samples_per_second"])
    fastest = times.groupby(["case", "threads"], sort=False)["samples_per_second"].idxmax()
    chosen = times.loc[fastest]
    return pd.DataFrame(
        {
            "on": chosen["contestant"].map(contestant_label),
            "model": chosen["case"].replace("given", "the model as given")
            + chosen["threads"].map(lambda count: f", {counted(count, 'thread')}"),
            "samples_per_second": chosen["samples_per_second"].where(
                chosen["samples_per_second"].map(math.isfinite)
            ),
        }
    ).dropna()


def notices(document: Document) -> Text:
    """What contestants said, what failed, what was not measured."""
    lines = [f"- {in_markdown(text)}." for text in analyse.unfinished(document)]
    for case in document["cases"]:
        for name, texts in (case.get("notices") or {}).items():
            lines += [f"- {contestant_label(name)}: {in_markdown(text)}." for text in texts]
    return Text("\n".join(dict.fromkeys(lines)) or "Everything ran as the parameters say.")


CONTESTANTS = {
    PEER: theme.COLOURS["optimizer"],
    PLAIN: theme.INK,
    FP32: theme.COLOURS["loss"],
    BF16X2: theme.COLOURS["top_mlp"],
    "bf16": theme.COLOURS["bottom_mlp"],
    "fp16": theme.COLOURS["interaction"],
    TORCHREC: theme.COLOURS["embedding"],
}
"""Contestant to colour."""

LOOKS = {
    "step_ms": ("step", theme.COLOURS["top_mlp"], "circle", -0.1),
    "end_to_end_ms": ("end to end, with data", theme.COLOURS["data"], "diamond", 0.3),
}
"""Name, colour and marker of a ratio, and how far it lies below the middle of its row: on a narrow
screen the label of the row stands above it."""


def colour_of(name: str) -> str:
    """A contestant's colour."""
    return CONTESTANTS.get(name, theme.COLOURS["other"])


def times_bars(times: pd.DataFrame) -> go.Figure:
    """Whole iteration of every contestant and shape: the step, and the wait for data on top.

    Args:
        times: what :func:`dlrm_studies.bench.analyse.times` gives.
    """
    places, groups = _in_cases(times)
    height = 150 + 27 * (len(times) + 2 * len(groups))
    result = theme.figure("Time per iteration", height, legend=True)
    hover = [
        f"{contestant_label(row.contestant)}<br>step {_with_interval(row, 'step')}<br>"
        f"end to end {_with_interval(row, 'end_to_end')}<br>{row.samples_per_second:,.0f} samples/s"
        for row in theme.rows_of(times)
    ]
    colours = {"color": [colour_of(name) for name in times["contestant"]]}
    theme.add_bars(result, times["step_ms"], places, "", colours, hover, showlegend=False)
    low, mid, high = (times[f"end_to_end_{end}"] for end in ("low_ms", "ms", "high_ms"))
    theme.add_bars(
        result,
        (times["end_to_end_ms"] - times["step_ms"]).clip(lower=0),
        places,
        "waiting for data; the rest of a bar is the step",
        {"color": theme.COLOURS["data"]},
        hover,
        error_x=theme.error_bars(low, mid, high),
    )
    texts = list(map(milliseconds, times["end_to_end_ms"]))
    theme.add_ends(result, times["end_to_end_high_ms"], places, texts)
    room = theme.with_room(times["end_to_end_high_ms"], texts)
    result.update_layout(barmode="stack", bargap=0.25)
    result.update_xaxes(title="ms per iteration, shorter is better", range=room)
    theme.label_rows(result, [contestant_label(name) for name in times["contestant"]], places)
    theme.add_headings(result, groups)
    return result


def _with_interval(row: Any, figure: str) -> str:
    mid, low, high = (getattr(row, f"{figure}_{end}") for end in ("ms", "low_ms", "high_ms"))
    return f"{digits(mid)} ms ({interval_text(row.confidence, low, high, digits)})"


def ratio_dots(ratios: pd.DataFrame) -> go.Figure:
    """Speed-ups with intervals: of a step, end to end, and the goals."""
    step = ratios[ratios["figure"] == "step_ms"].reset_index(drop=True)
    places, groups = _in_cases(step)
    names = list(dict.fromkeys(ratios["against"]))
    against = " or ".join(contestant_label(name) for name in names)
    title = f"Speed-up over {against}"
    result = theme.figure(title, 170 + 40 * (len(step) + len(groups)), legend=True)
    top = float(ratios[["high", "goal"]].max().max()) if len(ratios) else 1.0
    for kind, (_, colour, _, lift) in LOOKS.items():
        rows = ratios[ratios["figure"] == kind].reset_index(drop=True)
        _add_dots(result, rows, kind, places, _faster)
        ends = []
        for row in theme.rows_of(rows):
            # behind the goal where that would cross the figure
            crossed = math.isfinite(row.goal) and row.high <= row.goal < row.high + 0.14 * top
            ends.append(row.goal if crossed else row.high)
        lifted = [place + lift for place in places]
        theme.add_ends(result, ends, lifted, list(map(ratio, rows["mid"])))
        goals = [
            (goal, place)
            for goal, place in zip(rows["goal"], lifted, strict=True)
            if math.isfinite(goal)
        ]
        if goals:
            _add_goals(result, goals, colour, "%{x:g}x", f"goal, {FIGURE_NAMES[kind]}")
    theme.mark_one(result, 1.0, groups, max(places, default=0.0))
    result.update_xaxes(title="speed-up (1x: no difference)", range=[0, 1.15 * top])
    theme.label_rows(result, [contestant_label(name) for name in step["contestant"]], places)
    theme.add_headings(result, groups)
    return result


def growth_curves(growth: pd.DataFrame) -> go.Figure:
    """End-to-end time along batch, tables, dim and pooling, a line a contestant; axes are log.

    Args:
        growth: what :func:`dlrm_studies.bench.analyse.growth` gives.
    """
    table = growth[growth["figure"] == "end_to_end_ms"]
    table = table[table["threads"] == table["threads"].min()]
    quantities = [name for name in GROWTH if name in set(growth["quantity"])]
    result, cells = theme.panels(
        "Growth of the time per iteration, end to end", quantities, 2, legend=True
    )
    names = list(dict.fromkeys(table["contestant"]))
    for quantity, at in zip(quantities, cells, strict=True):
        curves = table[table["quantity"] == quantity]
        for number, name in enumerate(names):
            curve = curves[curves["contestant"] == name].sort_values("value")
            look = theme.line_look(colour_of(name), number)
            # often level with facebookresearch/dlrm, which it must not hide
            look["line"]["dash"] = "dash" if name == PLAIN else "solid"
            theme.add_points(
                result,
                curve["value"],
                curve["time_ms"],
                contestant_label(name),
                f"{contestant_label(name)}, {quantity} %{{x:,}}: %{{y:,.2f}} ms",
                at=at,
                legendgroup=name,
                showlegend=quantity == quantities[0],
                cliponaxis=False,
                **look,
            )
        sizes = sorted({float(x) for x in curves["value"]})
        result.update_xaxes(**theme.log_axis(sizes, "{:,.0f}".format), **at)
        result.update_yaxes(**theme.log_axis(theme.log_ticks(curves["time_ms"].tolist())), **at)
    result.update_yaxes(title="ms", col=1)
    return result


def options_dots(without: pd.DataFrame) -> go.Figure:
    """Speed-up of the run with each option over the run without it."""
    leaves = list(dict.fromkeys(without["leaf"]))
    result = theme.figure("What each option brings", 150 + 46 * max(len(leaves), 2), legend=True)
    for kind in LOOKS:
        rows = without[without["figure"] == kind]
        places = [leaves.index(leaf) for leaf in rows["leaf"]]
        _add_dots(
            result,
            rows,
            kind,
            places,
            lambda row: f"{_gain_of(row)} with {option_label(row.leaf, row.value, row.also)}",
        )
    theme.mark_one(result)
    options = without.drop_duplicates("leaf")[["leaf", "value", "also"]]
    labels = [theme.lines_of(option_label(*option), 34) for option in theme.rows_of(options)]
    result.update_xaxes(title="speed-up with the option over without it (1x: no difference)")
    theme.label_rows(result, labels)
    return result


def ladder_waterfall(rungs: pd.DataFrame) -> go.Figure:
    """End-to-end time from the plain contestant to the tuned one, an option more at each row.

    Args:
        rungs: what :func:`dlrm_studies.bench.analyse.ladder` gives.
    """
    rows = theme.rows_of(rungs[rungs["figure"] == "end_to_end_ms"].sort_values("rung"))
    result = theme.figure("From plain to tuned, end to end", 170 + 40 * max(len(rows), 2))
    times = [float(row.time_ms) for row in rows]
    steps = [after - before for before, after in itertools.pairwise(times)]
    labels = ["plain"] + [
        theme.lines_of(f"{row.leaf.partition('.')[2]}: {value_text(row.value)}", 26)
        for row in rows[1:]
    ]
    gain = f", {_gain_of(rows[-1])}" if len(rows) > 1 else ""
    texts = [
        *map(milliseconds, times[:1]),
        *map(signed_milliseconds, steps),
        *(f"{milliseconds(ms)}{gain}" for ms in times[-1:]),
    ]
    labels.append("all")
    hover = [f"{name}: {text}" for name, text in zip(labels, texts, strict=False)]
    theme.add_steps(result, times, texts, hover)
    result.update_xaxes(title="ms per iteration", range=[0, 1.25 * max(times, default=1.0)])
    theme.label_rows(result, labels)
    return result


def _in_cases(table: pd.DataFrame) -> tuple[list[float], list[tuple[float, str]]]:
    """Places of a table's rows, and the heading of each case with its own."""
    many = table["threads"].nunique() > 1
    return theme.in_groups(
        ("as given" if row.case == "given" else row.case)
        + (f", {counted(row.threads, 'thread')}" if many else "")
        for row in theme.rows_of(table)
    )


def _add_dots(
    target: go.Figure,
    rows: pd.DataFrame,
    kind: str,
    places: Sequence[float],
    sentence_of: Callable[[Any], str],
) -> None:
    """Ratios of one kind with their intervals, a little above or below the middle of a row.

    Args:
        sentence_of: a row's sentence, without the interval.
    """
    name, colour, symbol, lift = LOOKS[kind]
    theme.add_points(
        target,
        rows["mid"],
        [place + lift for place in places],
        name,
        [
            f"{name}: {sentence_of(row)} ({interval_text(row.confidence, row.low, row.high)})"
            for row in theme.rows_of(rows)
        ],
        marker={"color": colour, "size": 11, "symbol": symbol},
        error_x=theme.error_bars(rows["low"], rows["mid"], rows["high"], colour, 2.5),
    )


def _faster(row: Any) -> str:
    names = contestant_label(row.contestant), contestant_label(row.against)
    return f"{names[0]} is {_gain_of(row)} than {names[1]}"


def _gain_of(row: Any) -> str:
    """The middle of a ratio: ``2.10x faster``."""
    return faster(row.mid, math.nan, math.nan)


def _add_goals(
    target: go.Figure, goals: Sequence[tuple[float, float]], colour: str, text: str, name: str
) -> None:
    """Goals as upright marks: each with its place."""
    line = {"width": 3, "color": colour}
    mark = {"symbol": "line-ns-open", "color": colour, "size": 16, "line": line}
    x, y = zip(*goals, strict=True)
    theme.add_points(target, x, y, name, f"goal {text}", marker=mark)
