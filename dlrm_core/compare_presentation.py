"""Tables and sentences of comparisons. Nothing is analysed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_core.analysis.intervals import Interval
from dlrm_core.change_options import change_text
from dlrm_core.comparison import Comparison, Outcome
from dlrm_core.figure_theme import digits, part_label, rows_of, short_name, signed_percent
from dlrm_core.notebook_parameters import value_text
from dlrm_core.page_tables import (
    NOT_MEASURED,
    NOTHING,
    Table,
    Text,
    aligned,
    column,
    from_to,
    known_or,
    signed,
    times_as_fast,
    with_signs,
    yes_or_no,
)


def times_faster(interval: Interval | None) -> str:
    """The measured speed-up with its interval."""
    if interval is None:
        return NOT_MEASURED
    return times_as_fast(interval.mid, interval.low, interval.high)


def foretold(outcome: Outcome) -> str:
    """The predicted speed-up with its range, or a dash."""
    if outcome.predicted is None:
        return NOTHING
    return times_as_fast(**outcome.predicted.speedup)


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
