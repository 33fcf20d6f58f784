"""Tables and sentences of a benchmark. Nothing is analysed here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlrm_core.units import NOT_MEASURED, NOTHING, counted, percent, speedup, value_text
from dlrm_workbook.evidence.contestants import PEER, difference_text
from dlrm_workbook.show.tables import Table, Text, aligned
from dlrm_workbook.show.theme import rows_of
from dlrm_workbook.studies.bench import analyse as analysis
from dlrm_workbook.studies.bench.cases import PLAIN, TORCHREC, TUNED

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


def verdict(document: Document) -> Text:
    """How many times as fast as whom, whether goals are met, whether the training is the same."""
    cases = analysis.shapes(document)
    if not cases:
        return Text("No shape was measured.")
    lines = [_case_verdict(document, case) for case in cases]
    table = analysis.ratios(document)
    goals = table[table["goal"].notna()]
    if len(goals):
        reached = goals[goals["mid"] >= goals["goal"]]
        missed = goals[goals["mid"] < goals["goal"]]
        text = f"**{len(reached)} of {len(goals)} goals against facebookresearch/dlrm reached**"
        if len(missed):
            text += "; furthest from its goal: " + _furthest(missed)
        lines.append(text + ".")
    lines.append(_same_training(document))
    return Text("\n\n".join(lines))


def _case_verdict(document: Document, case: Mapping[str, Any]) -> str:
    name = analysis.best(document, case)
    meaning = str(case["meaning"])
    where = f"{meaning[:1].upper()}{meaning[1:]}, {counted(case['threads'], 'thread')}"
    if not name or name not in case["ratios"]:
        return f"**{where}**: nothing to compare."
    found = case["ratios"][name]
    against = contestant_label(case["against"])
    sure = found["step_ms"]["confidence"]
    step, whole = (_times(found[figure]) for figure in ("step_ms", "end_to_end_ms"))
    rounds = found["step_ms"]["rounds"]
    how = f"{rounds} rounds, {sure:.0%} confidence" if rounds > 1 else "one round: no interval"
    return (
        f"**{where}: {contestant_label(name)} is {whole} as fast as {against} end to end**, "
        f"data included, and {step} a step ({how}"
        f"{'' if sure >= 0.95 else '; six rounds or more give 95 %'})."
    )


def _furthest(missed: pd.DataFrame) -> str:
    row = rows_of(missed.assign(short=missed["mid"] / missed["goal"]).nsmallest(1, "short"))[0]
    return (
        f"{contestant_label(row.contestant)} on {row.case}, "
        f"{FIGURE_NAMES[row.figure]}, {row.mid:.2f}× of {row.goal:g}×"
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


def times_table(times: pd.DataFrame) -> Table:
    """Step and whole iteration of every contestant in every shape."""
    step = times[times["figure"] == "step_ms"].reset_index(drop=True)
    whole = times[times["figure"] == "end_to_end_ms"].reset_index(drop=True)
    step_low, step_mid, step_high, low, mid, high = aligned(
        *(step[name] for name in ("low_ms", "mid_ms", "high_ms")),
        *(whole[name] for name in ("low_ms", "mid_ms", "high_ms")),
    )
    return Table(
        [
            *("shape", "threads", "contestant", "step (ms)", "from to"),
            *("end to end (ms)", "from to ", "samples/s"),
        ],
        zip(
            step["case"],
            step["threads"].astype(str),
            map(contestant_label, step["contestant"]),
            step_mid,
            map(interval_text, step["confidence"], step_low, step_high),
            mid,
            map(interval_text, whole["confidence"], low, high),
            [f"{value:,.0f}" for value in whole["samples_per_second"]],
            strict=True,
        ),
    )


def ratios_table(ratios: pd.DataFrame) -> Table:
    """Times as fast, with interval, goal, and the losses of the same runs."""
    rows = []
    for row in rows_of(ratios):
        goal = math.isfinite(row.goal)
        rows.append(
            (
                row.case,
                str(row.threads),
                contestant_label(row.contestant),
                contestant_label(row.against),
                FIGURE_NAMES[row.figure],
                f"{row.mid:.2f}×",
                interval_text(row.confidence, f"{row.low:.2f}", f"{row.high:.2f}"),
                f"{row.confidence:.0%}" if row.confidence > 0 else NOTHING,
                f"{row.goal:g}×" if goal else NOTHING,
                ("yes" if row.mid >= row.goal else "no") if goal else NOTHING,
            )
        )
    columns = ["shape", "threads", "contestant", "against", "of", "times as fast", "interval"]
    return Table([*columns, "confidence", "goal", "reached"], rows)


def losses_table(losses: pd.DataFrame) -> Table:
    """Largest difference of a loss, over all iterations and rounds."""
    return Table(
        ["case", "threads", "contestant", "against", "iterations", "largest difference"],
        [
            (
                row.case,
                str(row.threads),
                contestant_label(row.contestant),
                contestant_label(row.reference),
                str(row.iterations),
                difference_text(row.difference),
            )
            for row in rows_of(losses)
        ],
    )


def growth_table(slopes: pd.DataFrame) -> Table | None:
    """The mean slope of each curve; None where nothing grew."""
    if slopes.empty:
        return None
    of = {(r.quantity, r.threads, r.contestant, r.figure): r for r in rows_of(slopes)}
    rows = []
    for quantity, threads, name in dict.fromkeys(key[:3] for key in of):
        step, whole = (of[quantity, threads, name, figure] for figure in FIGURE_NAMES)
        rows.append(
            (
                quantity,
                f"{step.smallest:,.0f} to {step.largest:,.0f}",
                str(threads),
                contestant_label(name),
                f"{step.slope:.2f}",
                f"{whole.slope:.2f}",
            )
        )
    columns = ["growing", "from to", "threads", "contestant", "slope of step"]
    return Table([*columns, "slope end to end"], rows)


def options_table(without: pd.DataFrame, ladder: pd.DataFrame) -> Table | None:
    """What each option brings, alone and on the way from plain to tuned; None where unmeasured."""
    if without.empty:
        return None
    rungs = {(row.leaf, row.figure): row for row in rows_of(ladder)}
    rows = []
    for leaf, found in without.groupby("leaf", sort=False):
        of = {row.figure: row for row in rows_of(found)}
        cells = [option_label(rows_of(found)[0])]
        for figure in FIGURE_NAMES:
            row, rung = of.get(figure), rungs.get((leaf, figure))
            cells += [
                _gain(row) if row else NOTHING,
                f"{rung.time_ms:,.1f}" if rung else NOTHING,
            ]
        rows.append(cells)
    return Table(
        [
            "option",
            *("step, with over without", "step after adding it (ms)"),
            *("end to end, with over without", "end to end after adding it (ms)"),
        ],
        rows,
    )


def _gain(row: Any) -> str:
    """A ratio with its interval, or that one round gives none."""
    if row.confidence > 0:
        return speedup(row.mid, row.low, row.high)
    return f"{row.mid:.2f}× ({ONE_ROUND})"


def option_label(row: Any) -> str:
    """An option with its value, and what goes with it."""
    also = f", with {row.also}" if row.also else ""
    return f"{row.leaf}: {value_text(row.value)}{also}"


def shares_table(shares: pd.DataFrame) -> Table | None:
    """Shares of this machine's limits, measured beside them; None where there are none."""
    if shares.empty:
        return None
    ceilings = {"dense": "its matrix products alone", "embedding": "as many random rows gathered"}
    part, ceiling = aligned(shares["ms"], shares["ceiling_ms"])
    rows = []
    for row, ms, least in zip(rows_of(shares), part, ceiling, strict=True):
        known = math.isfinite(row.share)
        rows.append(
            (
                row.case,
                str(row.threads),
                contestant_label(row.contestant),
                f"{row.what} part",
                ms,
                ceilings[row.what],
                least,
                percent(row.share) if known else f"{NOT_MEASURED}: {row.reason}",
                f"{percent(row.low)} to {percent(row.high)}" if known else NOTHING,
            )
        )
    columns = ["shape", "threads", "contestant", "part", "time (ms)", "limit", "limit (ms)"]
    return Table([*columns, "share of the limit", "quartiles"], rows)


def best_speeds(times: pd.DataFrame) -> pd.DataFrame:
    """The end-to-end row of each shape's fastest contestant."""
    whole = times[times["figure"] == "end_to_end_ms"]
    if whole.empty:
        return whole
    fastest = whole.groupby(["case", "threads"], sort=False)["samples_per_second"].idxmax()
    return whole.loc[fastest]


def settings_table(document: Document) -> Table:
    """How it was measured: equal for all contestants."""
    settings, machine = document["settings"], document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    cores = settings.get("cores")
    usable = settings.get("usable_cores", "?")
    rows = [
        ("processor", machine.get("cpu", "")),
        ("cores", f"{cores} of them, each contestant" if cores else f"all {usable}"),
        ("memory", f"{machine.get('memory_gib', '?')} GiB"),
        ("GPU", ", ".join(machine.get("gpus") or []) or NOT_MEASURED),
        ("software", versions),
        ("date", document["date"]),
        ("warm-up iterations", str(settings["warmup"])),
        ("counted iterations a run", str(settings["iterations"])),
    ]
    for threads, environment in settings.get("environment", {}).items():
        said = ", ".join(f"{name}={value}" for name, value in environment.items())
        rows.append((f"environment, {counted(int(threads), 'thread')}", said))
    rows += [(contestant_label(n), _options(c)) for n, c in settings["contestants"].items()]
    rows += [("command", command) for command in document.get("commands", [])]
    return Table(["", "value"], rows)


def notices(document: Document) -> Text:
    """What contestants said, what failed, what was not measured."""
    lines = [f"- {text}." for text in analysis.unfinished(document)]
    for case in document["cases"]:
        for name, said in (case.get("notices") or {}).items():
            lines += [f"- {contestant_label(name)}: {text}." for text in said]
    return Text("\n".join(dict.fromkeys(lines)) or "Everything ran as the parameters say.")


def _options(change: Mapping[str, Any]) -> str:
    said = ", ".join(f"{leaf}: {value_text(value)}" for leaf, value in change.items())
    return said or "no option for speed"


def _times(found: Mapping[str, float]) -> str:
    if found["rounds"] == 1:
        return f"{found['mid']:.2f}×"
    return speedup(found["mid"], found["low"], found["high"])
