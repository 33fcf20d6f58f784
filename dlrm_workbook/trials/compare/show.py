"""Figures, sentences and column formats of comparisons. Nothing is analysed here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.parts import part_label
from dlrm_workbook.analysis.changes import change_text
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.intervals import Interval
from dlrm_workbook.ground.units import (
    faster,
    from_to,
    milliseconds,
    percent,
    ratio,
    signed_milliseconds,
    speedup,
)
from dlrm_workbook.show import theme
from dlrm_workbook.show.tables import Column, Text, listed
from dlrm_workbook.trials.compare.analyse import NOT_A_PART
from dlrm_workbook.trials.compare.comparison import FINISHED, Comparison, Outcome

ENDS = ("mid", "low", "high")

LABEL = 0.4
"""Room for the text beside a bar, as a share of the longest one."""

FAR = math.log(1.2)
"""A range that holds 1 has its middle told where that is as far from 1, as a logarithm."""

TWICE = 1.0
"""A difference of this many doublings has the full colour."""


def speedups(outcomes: Sequence[Outcome]) -> go.Figure:
    """Predicted range and measured interval of each outcome, one above the other."""
    result = theme.figure("Speed-up, predicted and measured", 150 + 62 * len(outcomes), legend=True)
    labels = [theme.lines_of(change_text(o.change) or o.after, 34) for o in outcomes]
    predicted = [(row - 0.13, o.predicted.speedup) for row, o in enumerate(outcomes) if o.predicted]
    measured = [(row + 0.13, o.speedup.to_dict()) for row, o in enumerate(outcomes) if o.speedup]
    for name, gains, colour, symbol, side in (
        ("predicted", predicted, theme.PREDICTED_COLOUR, "diamond", "top"),
        ("measured", measured, theme.COLOURS["top_mlp"], "circle", "bottom"),
    ):
        if not gains:
            continue
        mids, lows, highs = ([gain[end] for _, gain in gains] for end in ENDS)
        theme.add_points(
            result,
            mids,
            [place for place, _ in gains],
            name,
            [
                f"{label}<br>{name}: {speedup(*(gain[end] for end in ENDS))}"
                for label, gain in ((labels[round(place)], gain) for place, gain in gains)
            ],
            mode="markers+text",
            marker={"color": colour, "size": 11, "symbol": symbol},
            error_x=theme.error_bars(lows, mids, highs, colour, 2.5),
            text=[ratio(mid) for mid in mids],
            textposition=f"{side} center",
            cliponaxis=False,
        )
    theme.mark_one(result)
    result.update_xaxes(title="speed-up over the first (1x: no difference)")
    theme.label_rows(result, labels)
    return result


def rounds(times: pd.DataFrame) -> go.Figure:
    """Mean steady iteration of each setting in each round, by
    :func:`~dlrm_workbook.trials.compare.analyse.round_table`."""
    whole = times[times["component"] == ""]
    result = theme.figure("Iteration time in each round", 320, legend=True)
    parts = ("top_mlp", "embedding", "optimizer", "data")
    colours = [theme.INK, *(theme.COLOURS[name] for name in parts)]
    for number, (name, rows) in enumerate(whole.groupby("setting", sort=False)):
        rows = rows.sort_values("round")
        hover = f"{name}, round %{{x}}: %{{y:,.2f}} ms"
        look = theme.line_look(colours[number % len(colours)], number)
        theme.add_points(result, rows["round"] + 1, rows["time_ms"], str(name), hover, **look)
    result.update_xaxes(title="round", dtick=1)
    result.update_yaxes(title="ms", rangemode="tozero")
    return result


def part_differences(parts: pd.DataFrame, per: str = "per iteration") -> go.Figure:
    """What each part takes more or less, with its interval; pale where chance may be all.

    Args:
        parts: what :func:`dlrm_workbook.analysis.compare.compare_parts` gives.
        per: what the times are of, see ``Comparison.per``.
    """
    table = parts.iloc[parts["difference_ms"].abs().argsort()[::-1]].head(18)
    rows = theme.rows_of(table)
    pale = [row.verdict not in ("slower", "faster") for row in rows]
    result = theme.figure(
        "Difference of each part, after minus before", 130 + theme.ROW * max(len(rows), 3)
    )
    half = [row.high_ms - row.difference_ms if row.high_ms == row.high_ms else 0.0 for row in rows]
    theme.add_bars(
        result,
        table["difference_ms"].tolist(),
        list(range(len(rows))),
        "",
        theme.markers(
            [("other" if row.verdict == NOT_A_PART else row.component, row.phase) for row in rows],
            pale,
        ),
        [
            f"{part_label(row.component, row.phase)}: {row.before_ms:,.3f} ms before, "
            f"{row.after_ms:,.3f} ms after<br>{row.verdict}"
            for row in rows
        ],
        error_x={"array": half, "color": theme.INK, "thickness": 1.4, "width": 4},
    )
    # beyond both the bar and its interval, so that the text covers neither
    ends = [
        math.copysign(abs(row.difference_ms) + side, row.difference_ms)
        for row, side in zip(rows, half, strict=True)
    ]
    longest = max(map(abs, ends), default=0.0) or 1.0
    texts = list(map(signed_milliseconds, table["difference_ms"]))
    theme.add_ends(result, ends, list(range(len(rows))), texts)
    # a side takes what its bars reach, and room for the text beside them
    left, right = (
        max([side * end for end in ends if side * end > 0], default=-LABEL * longest / 2)
        + LABEL * longest
        for side in (-1, 1)
    )
    result.update_xaxes(
        title=("ms in an iteration" if per == "per iteration" else f"ms {per}")
        + ": left is faster, right is slower",
        range=[-left, right],
        zeroline=True,
        zerolinecolor=theme.INK,
    )
    theme.label_rows(result, [part_label(row.component, row.phase) for row in rows])
    return result


def _as_long(row: Any, sampled_before: bool) -> str:
    """A node's time after over that before; without a time before: what that means."""
    if row.before_ms == 0:
        return "no samples before" if sampled_before else "new"
    return f"{ratio(row.after_ms / row.before_ms)} the time"


def difference_icicle(tree: pd.DataFrame) -> go.Figure:
    """Both call trees of :func:`~dlrm_workbook.analysis.difference_tree.difference_tree` in one: as
    wide as the time after, coloured by the difference."""
    drawn = tree[tree["after_ms"] > 0]
    rows = theme.rows_of(drawn)
    sampled = tree.attrs.get("sampled", (False, False))
    total = drawn[["before_ms", "after_ms"]].to_numpy().max(initial=0.0)
    result = theme.icicle(
        "Call tree of the run after, coloured by its time over that before",
        540,
        drawn,
        "after_ms",
        [theme.difference_colour(_doublings(r.before_ms, r.after_ms, total) / TWICE) for r in rows],
        [
            (
                theme.wrapped(theme.plotly_text(row.label)),
                part_label(row.component, row.phase),
                row.before_ms,
                row.difference_ms,
                _as_long(row, sampled[0]),
            )
            for row in rows
        ],
        "%{customdata[0]}<br>part: %{customdata[1]}<br>before %{customdata[2]:,.3f} ms, "
        "after %{value:,.3f} ms<br>%{customdata[3]:+,.3f} ms, %{customdata[4]}",
        domain={"x": [0, 0.9]},
    )
    _add_scale(result)
    return result


def _doublings(before: float, after: float, total: float) -> float:
    """Difference in doublings; 0 where it is less than a thousandth of the step."""
    if abs(after - before) < 0.001 * total:
        return 0.0
    if before <= 0:
        return TWICE
    if after <= 0:
        return -TWICE
    return max(-TWICE, min(TWICE, math.log2(after / before)))


def _add_scale(result: go.Figure) -> None:
    """A colour bar; the icicle's colours are given, so a trace without points carries it."""
    ticks = {-1: "0.5x", -0.5: "0.7x", 0: "same", 0.5: "1.4x", 1: "2x or new"}
    bar: dict[str, Any] = {"tickvals": list(ticks), "ticktext": list(ticks.values())}
    bar |= {"thickness": 14, "len": 0.85, "x": 0.92, "outlinewidth": 0}
    scale = [[0, theme.FASTER], [0.5, theme.SAME], [1, theme.SLOWER]]
    look = {"color": [0], "cmin": -TWICE, "cmax": TWICE, "colorscale": scale}
    look |= {"showscale": True, "colorbar": bar}
    result.add_scatter(x=[None], y=[None], mode="markers", hoverinfo="skip", marker=look)
    result.update_xaxes(visible=False)
    result.update_yaxes(visible=False)


def waterfall(outcomes: Sequence[Outcome]) -> go.Figure:
    """From the first setting to the last by cumulative steps, each against the same baseline, with
    what was predicted of each."""
    shown = [o for o in outcomes if o.speedup is not None and o.before_ms and o.after_ms]
    result = theme.figure("From baseline to all changes", 440, legend=True)
    base = float(shown[0].before_ms or 0.0) if shown else 0.0
    levels = [base, *(base / o.speedup.mid for o in shown if o.speedup)]
    done: dict[str, object] = {}
    labels = ["baseline"]
    for outcome in shown:
        added = {name: value for name, value in outcome.change.items() if name not in done}
        labels.append(theme.lines_of(change_text(added), 26))
        done |= outcome.change
    labels.append("all changes")
    steps = [after - before for before, after in itertools.pairwise(levels)]
    texts = [milliseconds(base), *map(signed_milliseconds, steps), milliseconds(levels[-1])]
    hover = [f"{name}: {text}" for name, text in zip(labels, texts, strict=True)]
    theme.add_steps(result, levels, texts, hover, flat=False)
    predicted = [(at, o.predicted.speedup) for at, o in enumerate(shown, 1) if o.predicted]
    if predicted:
        mids, highs, lows = ([base / gain[end] for _, gain in predicted] for end in ENDS)
        diamond: dict[str, Any] = {"symbol": "diamond", "size": 12, "color": theme.PREDICTED_COLOUR}
        diamond |= {"line": {"color": "white", "width": 1}}
        theme.add_points(
            result,
            [at for at, _ in predicted],
            mids,
            "predicted before it was measured",
            [
                f"{labels[at]}<br>predicted {milliseconds(mid)}"
                for (at, _), mid in zip(predicted, mids, strict=True)
            ],
            marker=diamond,
            error_y=theme.error_bars(lows, mids, highs, theme.PREDICTED_COLOUR, 2),
        )
    result.update_xaxes(
        tickmode="array", tickvals=list(range(len(labels))), ticktext=labels, showgrid=False
    )
    result.update_yaxes(title="ms per iteration", rangemode="tozero")
    return result


def outcome_text(comparison: Comparison) -> Text:
    """What came out, in a sentence or two an outcome."""
    blocks = [_judgement(outcome, comparison) for outcome in comparison.outcomes]
    blocks += filter(None, [comparison.gpu_sentence])
    if comparison.mixed:
        blocks.append(f"**Careful.** {in_markdown(comparison.mixed)}")
    blocks += [f"- {in_markdown(notice)}" for notice in comparison.notices]
    return Text("\n\n".join(blocks) or "Nothing was compared.")


def _judgement(outcome: Outcome, comparison: Comparison) -> str:
    what = in_markdown(change_text(outcome.change) or outcome.after)
    measured = outcome.speedup
    if outcome.doubt:
        after, before = (
            milliseconds(ms or math.nan) for ms in (outcome.after_ms, outcome.before_ms)
        )
        times = f"{what}: {after} {comparison.per}, {in_markdown(outcome.before)}: {before}."
        return f"**{times}** {in_markdown(outcome.doubt)}"
    if measured is None:
        return f"**{what}**: not measured yet."
    gain = faster(measured.mid, measured.low, measured.high)
    if not math.isfinite(measured.low):
        text = f"**{what}: {gain}**, without repetitions to say how sure"
    elif measured.contains(1.0):
        anywhere = from_to(measured.low, measured.high, ratio)
        middle, far = faster(measured.mid, math.nan, math.nan), abs(math.log(measured.mid))
        shown = f"{middle}, which scatter hides" if far > FAR else "no difference shown"
        text = f"**{what}: {shown}**, the speed-up lies anywhere from {anywhere}"
    else:
        saved = 1 - 1 / measured.mid
        text = f"**{what}: {gain}**, {percent(abs(saved))} {'less' if saved > 0 else 'more'} time"
    repeated = comparison.kind == "change" or math.isfinite(measured.low)
    text += f"; {_basis(measured, comparison)}." if repeated else "."
    if outcome.predicted is not None and outcome.error is not None:
        ends = outcome.predicted.speedup
        side = "inside that range" if outcome.in_range else "outside that range"
        if not outcome.in_range and measured.low <= ends["high"] and measured.high >= ends["low"]:
            side += ", but the two ranges overlap: more rounds can settle it"
        way = "long" if outcome.error > 0 else "short"
        gain_range = speedup(*(ends[end] for end in ENDS), figures=2)
        text += (
            f" Predicted: {gain_range}. The measured speed-up is {side}; the predicted time is "
            f"{percent(abs(outcome.error))} too {way}."
        )
    elif outcome.reason and comparison.kind == "change":
        text += f" Not predicted: {in_markdown(outcome.reason)}."
    return text


def _basis(measured: Interval, comparison: Comparison) -> str:
    """What the interval of a speed-up rests on."""
    if comparison.kind != "change":
        return "interval from the runs' repeated iterations, 95%"
    count = len({run.round for run in comparison.runs})
    sure = measured.confidence
    text = f"with {sure:.1%} confidence" if sure > 0 else "one round gives no confidence"
    more = "" if sure >= 0.95 else " (six rounds or more give 95%)"
    return f"median of {count} rounds, {text}{more}"


def prediction_notices(comparison: Comparison) -> Text:
    made = [outcome.predicted for outcome in comparison.outcomes if outcome.predicted]
    texts = dict.fromkeys(text for prediction in made for text in prediction.notices)
    return listed(texts)


def losses_text(comparison: Comparison) -> Text:
    """Whether the change trains the same, in words."""
    lines = []
    for outcome in comparison.outcomes:
        losses = outcome.losses
        if not losses or not losses["iterations"]:
            continue
        name = change_text(outcome.change)
        if losses["equal"]:
            text = f"the losses of all {losses['iterations']} iterations are the same, bit for bit"
        else:
            text = (
                f"the losses differ from iteration {losses['first_difference']} on, by at most "
                f"{losses['largest_difference']:.1e} ({losses['relative']:.1e} of the mean loss)"
            )
        shaky = [side for side, same in losses["repeatable"].items() if same is False]
        if shaky:
            text += f"; runs of {' and '.join(shaky)} do not even repeat themselves exactly"
        lines.append(f"- {name}: {text}.")
    return Text("\n".join(lines) or f"*Not measured: {FINISHED}.*")


def difference_columns(table: pd.DataFrame) -> dict[str, str | Column]:
    """Columns of a table of what else differs: a value of each profile."""
    profiles = [str(name) for name in table.columns[2:]]
    named: dict[str, str | Column] = {"kind": "of", "name": Column("name", "text")}
    return named | {name: Column(name, "value") for name in profiles}
