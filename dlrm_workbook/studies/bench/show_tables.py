"""How a benchmark's tables are shown, and its sentences. Nothing is analysed here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlrm_core.units import NOTHING, counted, digits, speedup, value_text
from dlrm_core.units import ratio as ratio_text
from dlrm_workbook.evidence.contestants import PEER, certainty, difference_text
from dlrm_workbook.show.tables import Column, Text, Texts
from dlrm_workbook.show.theme import rows_of
from dlrm_workbook.studies.bench import analyse
from dlrm_workbook.studies.bench.cases import PLAIN, TORCHREC, TUNED
from dlrm_workbook.studies.bench.shares import CEILINGS

ONE_ROUND = "one round"
"""In the place of an interval where nothing was repeated."""

FIGURE_NAMES = {"step_ms": "step", "end_to_end_ms": "end to end"}

Document = Mapping[str, Any]


def contestant_label(name: str) -> str:
    """A contestant as a reader calls it."""
    if name == TUNED:
        return "ours, tuned fp32"
    names = {PEER: "facebookresearch/dlrm", PLAIN: "ours, plain", TORCHREC: "TorchRec"}
    return names.get(name, f"ours, {name}")


def interval_text(confidence: float, low: str, high: str) -> str:
    """``1.20 to 1.31``; one round has no interval: its ends would both be the number itself."""
    return f"{low} to {high}" if confidence > 0 else ONE_ROUND


def option_label(row: Any) -> str:
    """An option with its value, and what goes with it."""
    also = f", with {row.also}" if row.also else ""
    return f"{row.leaf}: {value_text(row.value)}{also}"


# Columns of the tables of :mod:`.analyse`.


def _contestants(names: pd.Series) -> Texts:
    return [contestant_label(name) for name in names], True


def _figures(names: pd.Series) -> Texts:
    return [FIGURE_NAMES[name] for name in names], True


def _time_ranges(confidences: pd.Series, lows: pd.Series, highs: pd.Series) -> Texts:
    ends = zip(confidences, lows.map(digits), highs.map(digits), strict=True)
    return [interval_text(*end) for end in ends], False


def _ratio_ranges(confidences: pd.Series, lows: pd.Series, highs: pd.Series) -> Texts:
    ends = zip(confidences, lows.map(ratio_text), highs.map(ratio_text), strict=True)
    return [interval_text(*end) for end in ends], False


def _confidences(values: pd.Series) -> Texts:
    return [f"{value:.0%}" if value > 0 else NOTHING for value in values], False


def _options(leaves: pd.Series, values: pd.Series, also: pd.Series) -> Texts:
    rows = pd.DataFrame({"leaf": leaves, "value": values, "also": also})
    return [option_label(row) for row in rows_of(rows)], True


_CONTESTANT = Column("contestant", _contestants)
_FIGURE = Column("of", _figures)
_RATIOS = Column("interval", _ratio_ranges, ("confidence", "low", "high"))

TIMES: dict[str, str | Column] = {
    "case": "shape",
    "threads": "threads",
    "contestant": _CONTESTANT,
    "step_ms": "step",
    "step_range": Column("from to", _time_ranges, ("confidence", "step_low_ms", "step_high_ms")),
    "end_to_end_ms": "end to end",
    "end_to_end_range": Column(
        "from to ", _time_ranges, ("confidence", "end_to_end_low_ms", "end_to_end_high_ms")
    ),
    "samples_per_second": Column("samples/s", "digits"),
}
RATIOS: dict[str, str | Column] = {
    "case": "shape",
    "threads": "threads",
    "contestant": _CONTESTANT,
    "against": Column("against", _contestants),
    "figure": _FIGURE,
    "mid": Column("times as fast", "ratio"),
    "interval": _RATIOS,
    "confidence": Column("confidence", _confidences),
    "goal": Column("goal", "ratio"),
    "reached": Column("reached", "judged"),
}
LOSSES: dict[str, str | Column] = {
    "case": "case",
    "threads": "threads",
    "contestant": _CONTESTANT,
    "reference": Column("against", _contestants),
    "iterations": "iterations",
    "difference": Column(
        "largest difference", lambda values: ([difference_text(v) for v in values], False)
    ),
}
SHARES: dict[str, str | Column] = {
    "case": "shape",
    "threads": "threads",
    "contestant": _CONTESTANT,
    "what": "part",
    "ms": "time",
    "limit": Column("limit", lambda what: ([CEILINGS[name] for name in what], True), ("what",)),
    "ceiling_ms": "limit alone",
    "share": "share of the limit",
    "low": Column("lower quartile", "share"),
    "high": Column("upper quartile", "share"),
    "reason": "not measured because",
}
SLOPES: dict[str, str | Column] = {
    "quantity": "growing",
    "smallest": Column("from", "count"),
    "largest": Column("to", "count"),
    "threads": "threads",
    "contestant": _CONTESTANT,
    "figure": _FIGURE,
    "slope": Column("slope", "number"),
}
OPTIONS: dict[str, str | Column] = {
    "option": Column("option", _options, ("leaf", "value", "also")),
    "figure": _FIGURE,
    "mid": Column("with it over without it", "ratio"),
    "interval": _RATIOS,
    "time_ms": "after adding it",
}


# Sentences.


def verdict(document: Document) -> Text:
    """How many times as fast as whom, whether goals are met, whether the training is the same."""
    cases = analyse.judged(document, "shape")
    if not cases:
        return Text("No shape was measured.")
    lines = [_case_verdict(document, case) for case in cases]
    table = analyse.ratios(document)
    goals = table[table["goal"].notna()]
    if len(goals):
        missed = goals[goals["mid"] < goals["goal"]]
        reached = len(goals) - len(missed)
        text = f"**{reached} of {len(goals)} goals against facebookresearch/dlrm reached**"
        if len(missed):
            text += "; furthest from its goal: " + _furthest(missed)
        lines.append(text + ".")
    lines.append(_same_training(document))
    return Text("\n\n".join(lines))


def _case_verdict(document: Document, case: Mapping[str, Any]) -> str:
    name = analyse.best(document, case)
    meaning = str(case["meaning"])
    where = f"{meaning[:1].upper()}{meaning[1:]}, {counted(case['threads'], 'thread')}"
    if not name or name not in case["ratios"]:
        return f"**{where}**: nothing to compare."
    found = case["ratios"][name]
    sure = found["step_ms"]["confidence"]
    step, whole = (_times(found[figure]) for figure in FIGURE_NAMES)
    return (
        f"**{where}: {contestant_label(name)} is {whole} as fast as "
        f"{contestant_label(case['against'])} end to end**, data included, and {step} per step "
        f"({certainty(found['step_ms'])}"
        f"{'' if sure >= 0.95 else '; six rounds or more give 95 %'})."
    )


def _times(found: Mapping[str, float]) -> str:
    if found["rounds"] == 1:
        return ratio_text(found["mid"])
    return speedup(found["mid"], found["low"], found["high"])


def _furthest(missed: pd.DataFrame) -> str:
    row = rows_of(missed.assign(short=missed["mid"] / missed["goal"]).nsmallest(1, "short"))[0]
    return (
        f"{contestant_label(row.contestant)} on {row.case}, {FIGURE_NAMES[row.figure]}, "
        f"{ratio_text(row.mid)} of {ratio_text(row.goal)}"
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
        ``on`` (who), ``model``, ``samples_per_second``.
    """
    if times.empty:
        return pd.DataFrame(columns=["on", "model", "samples_per_second"])
    fastest = times.groupby(["case", "threads"], sort=False)["samples_per_second"].idxmax()
    chosen = times.loc[fastest]
    return pd.DataFrame(
        {
            "on": chosen["contestant"].map(contestant_label),
            "model": chosen["case"].replace("given", "the model as given"),
            "samples_per_second": chosen["samples_per_second"].where(
                chosen["samples_per_second"].map(math.isfinite)
            ),
        }
    ).dropna()


def notices(document: Document) -> Text:
    """What contestants said, what failed, what was not measured."""
    lines = [f"- {text}." for text in analyse.unfinished(document)]
    for case in document["cases"]:
        for name, said in (case.get("notices") or {}).items():
            lines += [f"- {contestant_label(name)}: {text}." for text in said]
    return Text("\n".join(dict.fromkeys(lines)) or "Everything ran as the parameters say.")
