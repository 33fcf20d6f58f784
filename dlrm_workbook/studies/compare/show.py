"""Figures of comparisons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.parts import part_label
from dlrm_core.units import (
    NOT_MEASURED,
    NOTHING,
    digits,
    from_to,
    known_or,
    milliseconds,
    signed_milliseconds,
    signed_percent,
    speedup,
    value_text,
    yes_or_no,
)
from dlrm_workbook.changes import change_text
from dlrm_workbook.show.axes import error_bars, label_rows, lines_of, mark_one
from dlrm_workbook.show.tables import Table, Text, aligned, column, signed, with_signs
from dlrm_workbook.show.theme import (
    COLOURS,
    FASTER,
    GRID,
    INK,
    PREDICTED,
    ROW,
    SAME,
    SLOWER,
    SYMBOLS,
    difference_colour,
    escaped,
    figure,
    markers,
    rows_of,
    short_name,
    text_on,
    wrapped,
)
from dlrm_workbook.studies.compare.comparison import Comparison, Outcome
from dlrm_workbook.turns import Interval

WATERFALL: dict[str, Any] = {
    "textposition": "outside",
    "cliponaxis": False,
    "connector": {"line": {"color": GRID, "width": 1}},
    "increasing": {"marker": {"color": SLOWER}},
    "decreasing": {"marker": {"color": FASTER}},
    "totals": {"marker": {"color": INK}},
    "hovertemplate": "%{text}<extra></extra>",
}
"""The look of steps from one time to another."""

TWICE = 1.0
"""A difference of this many doublings has the full colour."""


def speedups(outcomes: Sequence[Outcome]) -> go.Figure:
    """Predicted range and measured interval of each outcome, one above the other."""
    shown = [outcome for outcome in outcomes if outcome.speedup is not None]
    result = figure("Speed-up, predicted and measured", 150 + 62 * len(shown), legend=True)
    labels = [lines_of(change_text(o.change) or o.after, 34) for o in shown]
    for name, colour, symbol, lift in (
        ("predicted", PREDICTED, "diamond", -0.13),
        ("measured", COLOURS["top_mlp"], "circle", 0.13),
    ):
        places, ranges = [], []
        for row, outcome in enumerate(shown):
            if name == "predicted":
                if outcome.predicted is None:
                    continue
                gain = outcome.predicted.speedup
                low, mid, high = gain["low"], gain["mid"], gain["high"]
            else:
                assert outcome.speedup is not None
                low, mid, high = outcome.speedup.low, outcome.speedup.mid, outcome.speedup.high
            places.append(row + lift)
            ranges.append((low, mid, high))
        if not ranges:
            continue
        lows, mids, highs = zip(*ranges, strict=True)
        result.add_trace(
            go.Scatter(
                x=mids,
                y=places,
                mode="markers+text",
                name=name,
                marker={"color": colour, "size": 11, "symbol": symbol},
                error_x=error_bars(lows, mids, highs, colour, 2.5),
                text=[f"{mid:.2f}×" for mid in mids],
                textposition="top center" if name == "predicted" else "bottom center",
                cliponaxis=False,
                hovertemplate=f"{name}: %{{x:.3f}}×<extra></extra>",
            )
        )
    mark_one(result)
    result.update_xaxes(title="times as fast as the first (1 is no difference)")
    label_rows(result, labels)
    return result


def rounds(times: pd.DataFrame) -> go.Figure:
    """Mean steady iteration of each setting in each round.

    Args:
        times: what :func:`dlrm_workbook.studies.compare.analyse.round_table` gives.
    """
    whole = times[times["component"] == ""]
    result = figure("Iteration time in each round", 320, legend=True)
    colours = [INK, *(COLOURS[name] for name in ("top_mlp", "embedding", "optimizer", "data"))]
    for number, (name, rows) in enumerate(whole.groupby("setting", sort=False)):
        rows = rows.sort_values("round")
        result.add_trace(
            go.Scatter(
                x=rows["round"] + 1,
                y=rows["time_ms"],
                name=str(name),
                mode="lines+markers",
                marker={"size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
                line={"color": colours[number % len(colours)], "width": 2},
                hovertemplate=f"{name}, round %{{x}}: %{{y:,.2f}} ms<extra></extra>",
            )
        )
    result.update_xaxes(title="round", dtick=1)
    result.update_yaxes(title="ms", rangemode="tozero")
    return result


def part_differences(parts: pd.DataFrame) -> go.Figure:
    """What each part takes more or less, with its interval; pale where chance may be all.

    Args:
        parts: what :func:`dlrm_workbook.analysis.compare.compare_parts` gives.
    """
    table = parts.iloc[parts["difference_ms"].abs().argsort()[::-1]].head(18)
    rows = rows_of(table)
    pale = [row.verdict not in ("slower", "faster") for row in rows]
    result = figure("Difference of each part, after less before", 130 + ROW * max(len(rows), 3))
    places = list(range(len(rows)))
    half = [row.high_ms - row.difference_ms if row.high_ms == row.high_ms else 0.0 for row in rows]
    result.add_trace(
        go.Bar(
            x=[row.difference_ms for row in rows],
            y=places,
            orientation="h",
            marker=markers([(row.component, row.phase) for row in rows], pale),
            error_x={"array": half, "color": INK, "thickness": 1.4, "width": 4},
            hovertext=[
                f"{part_label(row.component, row.phase)}: {row.before_ms:,.3f} ms before, "
                f"{row.after_ms:,.3f} ms after<br>{row.verdict}"
                for row in rows
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    # beyond both the bar and its interval, so that the text covers neither
    reach = [abs(row.difference_ms) + side for row, side in zip(rows, half, strict=True)]
    longest = max(reach, default=0.0) or 1.0
    for place, row, far in zip(places, rows, reach, strict=True):
        right = row.difference_ms >= 0
        result.add_annotation(
            x=far if right else -far,
            y=place,
            text=signed_milliseconds(row.difference_ms),
            showarrow=False,
            xanchor="left" if right else "right",
            xshift=6 if right else -6,
        )
    left = any(row.difference_ms < 0 for row in rows)
    right = any(row.difference_ms > 0 for row in rows)
    result.update_xaxes(
        title="ms in a mean iteration: left is faster, right is slower",
        range=[
            -1.35 * longest if left else -0.2 * longest,
            1.35 * longest if right else 0.2 * longest,
        ],
        zeroline=True,
        zerolinecolor=INK,
    )
    label_rows(result, [part_label(row.component, row.phase) for row in rows])
    return result


def _as_long(row: Any, sampled_before: bool) -> str:
    """How many times as long a node takes after; without a time before: what that means."""
    if row.before_ms == 0:
        return "no samples before" if sampled_before else "new"
    return f"{row.after_ms / row.before_ms:.2f} times as long"


def difference_icicle(tree: pd.DataFrame) -> go.Figure:
    """Both call trees in one: as wide as the time after, coloured by the difference.

    Args:
        tree: what :func:`dlrm_workbook.analysis.difference_tree.difference_tree` gives.
    """
    drawn = tree[tree["after_ms"] > 0]
    values = dict(zip(drawn["id"], drawn["after_ms"].astype(float), strict=True))
    children: dict[str, float] = {}
    # plotly draws nothing of a parent that is smaller, by a rounding error, than its children
    for row in rows_of(drawn)[::-1]:
        values[row.id] = max(values[row.id], children.get(row.id, 0.0))
        children[row.parent] = children.get(row.parent, 0.0) + values[row.id]
    rows = rows_of(drawn)
    sampled = tree.attrs.get("sampled", (False, False))
    total = max((max(row.before_ms, row.after_ms) for row in rows), default=0.0)
    doublings = [_doublings(row.before_ms, row.after_ms, total) for row in rows]
    colours = [difference_colour(value / TWICE) for value in doublings]
    labels = [short_name(row.label, 34) for row in rows]
    result = figure("Call tree of the run after, coloured by the difference", 540)
    result.add_trace(
        go.Icicle(
            ids=drawn["id"],
            parents=drawn["parent"],
            labels=labels,
            text=["<br>".join(label.rsplit(" ", 1)) for label in labels],
            values=[values[name] for name in drawn["id"]],
            branchvalues="total",
            customdata=[
                (
                    wrapped(escaped(row.label)),
                    part_label(row.component, row.phase),
                    row.before_ms,
                    row.difference_ms,
                    _as_long(row, sampled[0]),
                )
                for row in rows
            ],
            marker={
                "colors": colours,
                "line": {"width": 0.7, "color": "rgba(128, 128, 128, 0.7)"},
            },
            leaf={"opacity": 1},
            textfont={"color": [text_on(colour) for colour in colours]},
            tiling={"orientation": "v"},
            maxdepth=7,
            texttemplate="%{text}<br>%{percentRoot:.0%}",
            pathbar={"visible": True, "side": "top"},
            hovertemplate=(
                "%{customdata[0]}<br>part: %{customdata[1]}<br>before %{customdata[2]:,.3f} ms, "
                "after %{value:,.3f} ms<br>%{customdata[3]:+,.3f} ms, %{customdata[4]}"
                "<extra></extra>"
            ),
            domain={"x": [0, 0.9]},
        )
    )
    _add_scale(result)
    result.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
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
    result.add_trace(
        go.Scatter(
            x=[None],
            y=[None],
            mode="markers",
            hoverinfo="skip",
            marker={
                "color": [0],
                "cmin": -TWICE,
                "cmax": TWICE,
                "colorscale": [[0, FASTER], [0.5, SAME], [1, SLOWER]],
                "showscale": True,
                "colorbar": {
                    "title": {"text": "time<br>after"},
                    "tickvals": [-1, -0.5, 0, 0.5, 1],
                    "ticktext": ["½×", "0.7×", "same", "1.4×", "2× or new"],
                    "thickness": 14,
                    "len": 0.85,
                    "x": 0.92,
                    "outlinewidth": 0,
                },
            },
        )
    )
    result.update_xaxes(visible=False)
    result.update_yaxes(visible=False)


def waterfall(outcomes: Sequence[Outcome]) -> go.Figure:
    """From the first setting to the last, step by step, with what was foretold of each.

    Args:
        outcomes: cumulative steps, each against the same baseline.
    """
    shown = [o for o in outcomes if o.speedup is not None and o.before_ms and o.after_ms]
    result = figure("From baseline to all changes", 440, legend=True)
    base = float(shown[0].before_ms or 0.0) if shown else 0.0
    levels = [base, *(base / o.speedup.mid for o in shown if o.speedup)]
    done: dict[str, object] = {}
    labels = ["baseline"]
    for outcome in shown:
        added = {name: value for name, value in outcome.change.items() if name not in done}
        labels.append(lines_of(change_text(added), 26))
        done |= outcome.change
    labels.append("all changes")
    steps = [after - before for before, after in itertools.pairwise(levels)]
    result.add_trace(
        go.Waterfall(
            x=list(range(len(labels))),
            y=[base, *steps, levels[-1] if levels else 0.0],
            measure=["absolute", *("relative" for _ in steps), "total"],
            name="measured",
            showlegend=False,
            text=[
                milliseconds(base),
                *(signed_milliseconds(step) for step in steps),
                milliseconds(levels[-1]),
            ],
            **WATERFALL,
        )
    )
    foretold = [
        (place, *(base / o.predicted.speedup[end] for end in ("high", "mid", "low")))
        for place, o in enumerate(shown, 1)
        if o.predicted is not None
    ]
    if foretold:
        at, lows, mids, highs = zip(*foretold, strict=True)
        result.add_trace(
            go.Scatter(
                x=at,
                y=mids,
                mode="markers",
                name="predicted before it was measured",
                marker={
                    "color": PREDICTED,
                    "size": 12,
                    "symbol": "diamond",
                    "line": {"color": "white", "width": 1},
                },
                error_y=error_bars(lows, mids, highs, PREDICTED, 2),
                hovertemplate="predicted %{y:,.2f} ms<extra></extra>",
            )
        )
    result.update_xaxes(
        tickmode="array", tickvals=list(range(len(labels))), ticktext=labels, showgrid=False
    )
    result.update_yaxes(title="ms of an iteration", rangemode="tozero")
    return result


# Tables and sentences of comparisons. Nothing is analysed here.


def times_faster(interval: Interval | None) -> str:
    """The measured speed-up with its interval."""
    if interval is None:
        return NOT_MEASURED
    return speedup(interval.mid, interval.low, interval.high)


def foretold(outcome: Outcome) -> str:
    """The predicted speed-up with its range, or a dash."""
    if outcome.predicted is None:
        return NOTHING
    return speedup(**outcome.predicted.speedup)


def verdict(comparison: Comparison) -> Text:
    """What came out, in a sentence or two an outcome."""
    blocks = [_judgement(outcome, comparison) for outcome in comparison.outcomes]
    if comparison.mixed:
        blocks.append(f"**Careful.** {comparison.mixed}")
    blocks += [f"- {notice}" for notice in comparison.notices]
    return Text("\n\n".join(blocks) or "Nothing was compared.")


def _judgement(outcome: Outcome, comparison: Comparison) -> str:
    what = change_text(outcome.change) or outcome.after
    measured = outcome.speedup
    if measured is None:
        return f"**{what}**: not measured yet."
    sure = math.isfinite(measured.low) and not measured.contains(1.0)
    if not math.isfinite(measured.low):
        text = f"**{what}: {measured.mid:.2f}× as fast**, without repetitions to say how sure"
    elif sure:
        word = "faster" if measured.mid > 1 else "slower"
        change = abs(1 - 1 / measured.mid)
        text = (
            f"**{what}: {measured.mid:.2f}× as fast** ({measured.low:.2f} to "
            f"{measured.high:.2f}), {change:.1%} {'less' if word == 'faster' else 'more'} time"
        )
    else:
        text = (
            f"**{what}: no difference shown**, {measured.mid:.2f}× as fast "
            f"({measured.low:.2f} to {measured.high:.2f})"
        )
    text += f"; {_basis(outcome, comparison)}."
    if outcome.predicted is not None and outcome.error is not None:
        side = "inside" if outcome.in_range else "outside"
        text += (
            f" Predicted was {foretold(outcome)}: the predicted time is off by "
            f"{outcome.error:+.1%}, the measured speed-up {side} the range."
        )
    elif outcome.reason and comparison.kind == "change":
        text += f" Not predicted: {outcome.reason}."
    return text


def _basis(outcome: Outcome, comparison: Comparison) -> str:
    assert outcome.speedup is not None
    if comparison.kind == "change":
        count = len({run.round for run in comparison.runs})
        sure = outcome.speedup.confidence
        return (
            f"median of {count} rounds, "
            + (f"with {sure:.1%} confidence" if sure > 0 else "one round gives no confidence")
            + ("" if sure >= 0.95 else " (six rounds or more give 95 %)")
        )
    return "interval from the runs' repeated iterations, 95 %"


def outcomes_table(comparison: Comparison) -> Table:
    """Predicted, measured, error: a row an outcome."""
    rows = []
    for outcome in comparison.outcomes:
        made, then = outcome.predicted, None
        if made and outcome.before_ms:
            # on the scale of the baseline that ran in turns: the profile had its own day
            then = outcome.before_ms * made.mid_ms / made.now_ms
        rows.append(
            (
                change_text(outcome.change) or outcome.after,
                known_or(outcome.before_ms, digits, NOT_MEASURED),
                known_or(then, digits),
                known_or(outcome.after_ms, digits, NOT_MEASURED),
                foretold(outcome),
                times_faster(outcome.speedup),
                known_or(outcome.error, signed_percent),
                yes_or_no(outcome.in_range),
            )
        )
    return Table(
        [
            *("change", "before (ms)", "predicted (ms)", "after (ms)"),
            *("predicted speed-up", "measured speed-up", "error of predicted time", "in range"),
        ],
        rows,
    )


def predictions_table(comparison: Comparison) -> Table | Text:
    """What is foretold, before anything of the change has run."""
    if comparison.kind != "change":
        return Text("*Finished runs are compared: nothing was predicted.*")
    rows = []
    for outcome in comparison.outcomes:
        made = outcome.predicted
        rows.append(
            (
                change_text(outcome.change),
                known_or(made.now_ms if made else None, digits),
                known_or(made.mid_ms if made else None, digits),
                from_to(made.low_ms, made.high_ms) if made else NOTHING,
                foretold(outcome),
                made.method if made else f"not predicted: {outcome.reason}",
            )
        )
    columns = ["change", "now (ms)", "then (ms)", "range (ms)", "speed-up", "from"]
    return Table(columns, rows)


def prediction_notices(comparison: Comparison) -> Text:
    """What predictions say of themselves."""
    texts = [
        text
        for outcome in comparison.outcomes
        if outcome.predicted
        for text in outcome.predicted.notices
    ]
    return Text("\n".join(f"- {text}" for text in dict.fromkeys(texts)))


def rounds_table(comparison: Comparison) -> Table | Text:
    """Mean steady iteration of each setting in each round, and the rounds' own ratios."""
    if not comparison.runs:
        return Text("*Finished runs are compared: nothing was run in turns.*")
    whole = comparison.times[comparison.times["component"] == ""]
    wide = whole.pivot(index="round", columns="setting", values="time_ms")
    first = comparison.outcomes[0].before
    others = [outcome.after for outcome in comparison.outcomes]
    cells = {"round": [str(number + 1) for number in wide.index]}
    cells |= {f"{name} (ms)": column(wide[name]) for name in (first, *others)}
    for name in others:
        cells[f"{first} / {name}"] = [f"{ratio:.3f}" for ratio in wide[first] / wide[name]]
    return Table.of(cells)


def parts_table(outcome: Outcome) -> Table | Text:
    """Each part before and after, with the interval of its difference and the prediction."""
    parts = outcome.parts
    if parts is None or parts.empty:
        return Text("*The parts were not measured.*")
    then = _predicted_parts(outcome)
    rows = rows_of(parts)
    foreseen = [then.get((row.component, row.phase), math.nan) for row in rows]
    before, after, predicted = aligned(parts["before_ms"], parts["after_ms"], foreseen)
    low, gap, high = aligned(
        parts["low_ms"].abs(), parts["difference_ms"].abs(), parts["high_ms"].abs()
    )
    low = with_signs(parts["low_ms"], low)
    high = with_signs(parts["high_ms"], high)
    cells = {
        "part": [part_label(row.component) for row in rows],
        "phase": [row.phase or NOTHING for row in rows],
        "before (ms)": before,
        "after (ms)": after,
        "predicted (ms)": predicted,
        "difference (ms)": with_signs(parts["difference_ms"], gap),
        "95 % interval": [
            f"{a} to {b}" if a != NOTHING else NOTHING for a, b in zip(low, high, strict=True)
        ],
        "verdict": parts["verdict"].tolist(),
    }
    if not then:
        del cells["predicted (ms)"]
    return Table.of(cells)


def _predicted_parts(outcome: Outcome) -> dict[tuple[str, str], float]:
    """Predicted milliseconds of each part, on the scale of the measured baseline."""
    made = outcome.predicted
    if made is None or not outcome.before_ms or not made.now_ms:
        return {}
    scale = outcome.before_ms / made.now_ms
    return {
        (str(row["component"]), str(row["phase"])): scale * float(row["then_ms"])
        for row in made.parts.to_dict("records")
    }


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
    if not lines:
        return Text("*Losses are compared where runs are made in turns.*")
    return Text("\n".join(lines))


def differences_table(differences: pd.DataFrame, names: Sequence[str]) -> Table | Text:
    """Parameters, versions and machine, only where the runs differ."""
    if differences.empty:
        return Text("Parameters, versions and machine are the same.")
    rows = [
        (str(row["kind"]), str(row["name"]), *(_value(value) for value in row["values"]))
        for row in differences.to_dict("records")
    ]
    return Table(["of", "name", *names], rows)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {content}" for name, content in value.items()) or NOTHING
    return value_text(value)


def changes_table(changes: pd.DataFrame) -> Table | Text:
    """The nodes of the call tree whose own time changed most."""
    if changes.empty:
        return Text("No node of the call tree changed.")
    itself = aligned(changes["before_ms"], changes["after_ms"])
    cells = {
        "call": [short_name(row.label, 50) for row in rows_of(changes)],
        "called by": [
            " › ".join(short_name(name, 26) for name in row.path[:-1][-2:]) or NOTHING
            for row in rows_of(changes)
        ],
        "part": [part_label(row.component, row.phase) for row in rows_of(changes)],
        "itself before (ms)": itself[0],
        "itself after (ms)": itself[1],
        "difference (ms)": signed(changes["difference_ms"].tolist()),
        "": changes["state"].tolist(),
    }
    return Table.of(cells)
