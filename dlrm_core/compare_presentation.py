"""Tables and sentences of comparisons and sweeps. Nothing is analysed here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_core.analysis.ensemble import short_leaf
from dlrm_core.analysis.intervals import Interval
from dlrm_core.change_options import change_text
from dlrm_core.comparison import Comparison, Outcome
from dlrm_core.figure_theme import digits, part_label, percent, rows_of, short_name
from dlrm_core.notebook_parameters import value_text
from dlrm_core.presentation import NOT_MEASURED, Table, Text, column

NOTHING = "–"


def shown_if(there: object, draw: Callable[[Any], Any], data: Any, reason: str) -> Any:
    """What ``draw`` makes of the data where it is there; else the reason in its place."""
    return draw(data) if there and data is not None else Text(f"*{reason}*")


def aligned(*columns: Sequence[float] | pd.Series) -> list[list[str]]:
    """Several columns of one quantity with the same decimals."""
    cells = column([value for values in columns for value in values])
    starts = itertools.accumulate((len(values) for values in columns), initial=0)
    return [cells[start : start + len(values)] for start, values in zip(starts, columns)]  # noqa: B905


def signed(values: Sequence[float]) -> list[str]:
    """Differences of one column: a sign, and as many decimals as the largest needs."""
    return _signs(values, column([abs(value) for value in values]))


def _signs(values: Iterable[float], cells: Sequence[str]) -> list[str]:
    # "<0.01" with a sign would say two things
    cells = [cell if not cell.startswith("<") else cell[1:-1] + "0" for cell in cells]
    return [
        cell if not math.isfinite(value) or _is_zero(cell) else ("+" if value > 0 else "−") + cell
        for value, cell in zip(values, cells, strict=True)
    ]


def _is_zero(cell: str) -> bool:
    return cell.strip("0.") == ""


def times_faster(interval: Interval | None) -> str:
    """``1.25× (1.20 to 1.31)``."""
    if interval is None:
        return NOT_MEASURED
    if not math.isfinite(interval.low):
        return f"{interval.mid:.2f}×"
    return f"{interval.mid:.2f}× ({interval.low:.2f} to {interval.high:.2f})"


def foretold(outcome: Outcome) -> str:
    """The predicted speed-up with its range, or a dash."""
    if outcome.predicted is None:
        return NOTHING
    gain = outcome.predicted.speedup
    return f"{gain['mid']:.2f}× ({gain['low']:.2f} to {gain['high']:.2f})"


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
                _ms(outcome.before_ms),
                _ms(then, NOTHING),
                _ms(outcome.after_ms),
                foretold(outcome),
                times_faster(outcome.speedup),
                NOTHING if outcome.error is None else f"{outcome.error:+.1%}".replace("-", "−"),
                {None: NOTHING, True: "yes", False: "no"}[outcome.in_range],
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
                _ms(made.now_ms if made else None, NOTHING),
                _ms(made.mid_ms if made else None, NOTHING),
                f"{digits(made.low_ms)} to {digits(made.high_ms)}" if made else NOTHING,
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
    return Table(list(cells), zip(*cells.values(), strict=True))


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
    low = _signs(parts["low_ms"], low)
    high = _signs(parts["high_ms"], high)
    cells = {
        "part": [part_label(row.component) for row in rows],
        "phase": [row.phase or NOTHING for row in rows],
        "before (ms)": before,
        "after (ms)": after,
        "predicted (ms)": predicted,
        "difference (ms)": _signs(parts["difference_ms"], gap),
        "95 % interval": [
            f"{a} to {b}" if a != NOTHING else NOTHING for a, b in zip(low, high, strict=True)
        ],
        "verdict": parts["verdict"].tolist(),
    }
    if not then:
        del cells["predicted (ms)"]
    return Table(list(cells), zip(*cells.values(), strict=True))


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
    return Table(list(cells), zip(*cells.values(), strict=True))


def laws_table(laws: pd.DataFrame) -> Table | Text:
    """Fitted laws in words and numbers."""
    if laws.empty:
        return Text("*No law can be fitted: three runs or more that differ in a size are needed.*")
    cells = {
        "along": [short_leaf(leaf) for leaf in laws["leaf"]],
        "part": [part_label(c, p) for c, p in zip(laws["component"], laws["phase"], strict=True)],
        "with": [held or NOTHING for held in laws["held"]],
        "law": laws["sentence"].tolist(),
        "a (ms)": [digits(value) for value in laws["a_ms"]],
        "slope": [f"{value:.2f}" for value in laws["slope"]],
        "r²": [f"{value:.4f}" if math.isfinite(value) else NOTHING for value in laws["r2"]],
    }
    if set(cells["with"]) == {NOTHING}:
        del cells["with"]
    return Table(list(cells), zip(*cells.values(), strict=True))


# ---- sweeps ---------------------------------------------------------------------


def sweep_verdict(summary: pd.DataFrame, failures: str) -> Text:
    """How many points there are, and which is best."""
    done = summary[summary["status"] == "finished"]
    lines = [f"**{len(done)} of {len(summary)} points finished.**"]
    speed = done["samples_per_second"].dropna() if len(done) else done
    if len(speed):
        best, worst = speed.idxmax(), speed.idxmin()
        lines.append(
            f"Most samples a second: **{done['label'][best]}**, {speed[best]:,.0f} samples/s, "
            f"{speed[best] / speed[worst]:.2f} times those of {done['label'][worst]} "
            f"({speed[worst]:,.0f})."
        )
    if failures:
        lines.append("```\n" + failures + "\n```")
    return Text("\n\n".join(lines))


def points_table(summary: pd.DataFrame) -> Table:
    """Every point of a sweep with its figures."""
    best = summary["samples_per_second"].max()
    cells: dict[str, list[str]] = {
        "point": [str(number) for number in summary["number"]],
        "setting": summary["label"].tolist(),
        "status": summary["status"].tolist(),
        "iteration (ms)": column(summary["ms_per_iteration"]),
        "samples/s": [_count(value) for value in summary["samples_per_second"]],
        "of the best": [
            percent(value / best) if math.isfinite(value) else NOTHING
            for value in summary["samples_per_second"]
        ],
        "largest part": [part_label(str(name)) if name else NOTHING for name in summary["top"]],
        "its share": [
            percent(value) if math.isfinite(value) else NOTHING for value in summary["top_share"]
        ],
        "measured speed-up": [
            f"{value:.2f}×" if math.isfinite(value) else NOTHING for value in summary["speedup"]
        ],
    }
    if summary["speedup"].isna().all():
        del cells["measured speed-up"]
    return Table(list(cells), zip(*cells.values(), strict=True))


def findings_matrix(found: pd.DataFrame) -> Table | Text:
    """Which finding is there at which point, with its share of the step.

    Args:
        found: index the rule, a column a point, NaN where it did not fire.
    """
    if found.empty:
        return Text("No rule found a bottleneck at any point.")
    rows = [
        (
            str(title),
            *(percent(value) if math.isfinite(value) else NOTHING for value in values),
            _appearance(values),
        )
        for title, values in zip(found.index, found.to_numpy().tolist(), strict=True)
    ]
    return Table(["finding", *(f"at {number}" for number in found.columns), "along the grid"], rows)


def _appearance(values: Sequence[float]) -> str:
    there = [math.isfinite(value) for value in values]
    if all(there):
        return "everywhere"
    if not there[0] and there[-1]:
        return "appears"
    return "disappears" if there[0] and not there[-1] else "at some points"


# ---- helpers --------------------------------------------------------------------


def _ms(value: float | None, absent: str = NOT_MEASURED) -> str:
    return absent if value is None or not math.isfinite(value) else digits(value)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else NOTHING
