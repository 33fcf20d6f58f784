"""A benchmark's JSON as tables: times, ratios, growth, options.

A table that is empty says in ``attrs["not_measured"]`` how to measure what it would hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.text import counted
from dlrm_studies.bench.bare import work_label
from dlrm_studies.bench.cases import GOALS
from dlrm_studies.bench.measure import BENCHMARK
from dlrm_workbook.evidence.contestants import FIGURES, PEER, round_ratio
from dlrm_workbook.ground.intervals import Interval, median_interval
from dlrm_workbook.ground.units import NOT_MEASURED, value_text

Document = Mapping[str, Any]


def read_benchmark(file: Path) -> dict[str, Any]:
    """The document of a benchmark.

    Raises:
        InputError: the file is none of this version's.
    """
    return BENCHMARK.read(file)


def judged(document: Document, kind: str) -> list[dict[str, Any]]:
    """Cases of a kind in which something ran, in the order measured.

    One that was cut short has its runs, but nothing was judged.
    """
    return [
        case for case in document["cases"] if case.get("kind") == kind and case.get("contestants")
    ]


def _table(rows: Sequence[Any], columns: str, not_measured: str = "") -> pd.DataFrame:
    """Rows under names of columns, and what measures them where there are none."""
    table = pd.DataFrame(rows, columns=columns.split())
    if not_measured:
        table.attrs["not_measured"] = not_measured
    return table


def times(document: Document) -> pd.DataFrame:
    """Medians of every contestant in every shape.

    Returns:
        Columns as in ``dlrm help columns times``.
    """
    rows = []
    for case in judged(document, "shape"):
        for name in case["contestants"]:
            runs = [row for row in case["runs"] if row["contestant"] == name]
            step, whole = (median_interval([row[figure] for row in runs]) for figure in FIGURES)
            rows.append(
                (
                    *(case["case"], case["meaning"], case["threads"], name),
                    *(step.mid, step.low, step.high, whole.mid, whole.low, whole.high),
                    *(whole.confidence, len(runs), 1e3 * case["batch_size"] / whole.mid),
                )
            )
    return _table(
        rows,
        "case meaning threads contestant step_ms step_low_ms step_high_ms end_to_end_ms "
        "end_to_end_low_ms end_to_end_high_ms confidence rounds samples_per_second",
    )


def ratios(document: Document) -> pd.DataFrame:
    """The speed-up of every contestant over ``against``, from the rounds' own ratios.

    Returns:
        Columns as in ``dlrm help columns ratios``.
    """
    rows = []
    for case in judged(document, "shape"):
        has_goals = case["against"] == PEER and case["threads"] == 1
        goals = GOALS.get(case["case"], {}) if has_goals else {}
        for name, intervals in case["ratios"].items():
            for figure in FIGURES:
                goal = goals.get(name, {}).get(figure, math.nan)
                mid = intervals[figure]["mid"]
                rows.append(
                    (
                        *(case["case"], case["threads"], name, case["against"], figure, mid),
                        *(
                            intervals[figure][key]
                            for key in ("low", "high", "confidence", "rounds")
                        ),
                        *(goal, None if math.isnan(goal) else mid >= goal),
                    )
                )
    columns = "case threads contestant against figure mid low high confidence rounds goal reached"
    return _table(rows, columns)


def growth(document: Document) -> pd.DataFrame:
    """Times along batch, tables, dim and pooling.

    Returns:
        Columns as in ``dlrm help columns growth``.
    """
    rows = [
        (quantity, value, case["threads"], name, figure, figures[figure])
        for case in judged(document, "growth")
        for quantity, value in case["points"].items()
        for name, figures in case["contestants"].items()
        for figure in FIGURES
    ]
    table = _table(
        rows,
        "quantity value threads contestant figure time_ms",
        "`dlrm run benchmark -f FILE -p 'growth=[batch, pooling]'`, or `dlrm bench --growth`, "
        "measures it",
    )
    return table.sort_values("value", kind="stable").reset_index(drop=True)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """Mean slope of each curve in the log-log picture: doubling takes 2^slope times as long.

    Args:
        table: what :func:`growth` gives.

    Returns:
        Columns as in ``dlrm help columns slopes``.
    """
    rows = []
    keys = ["quantity", "threads", "contestant", "figure"]
    for key, curve in table.groupby(keys, sort=False):
        first, last = curve.iloc[0], curve.iloc[-1]
        if len(curve) < 2 or first["value"] == last["value"]:
            continue
        slope = math.log(last["time_ms"] / first["time_ms"]) / math.log(
            last["value"] / first["value"]
        )
        rows.append((*key, first["value"], last["value"], slope))
    return pd.DataFrame(rows, columns=[*keys, "smallest", "largest", "slope"])


NO_ABLATION = (
    "`dlrm run benchmark -f FILE -p ablation=true`, or `dlrm bench --ablation`, measures it"
)


def without(document: Document) -> pd.DataFrame:
    """What each option brings, with the first count of threads: time without it over time with all.

    Returns:
        Columns as in ``dlrm help columns without``.
    """
    rows = []
    for case in judged(document, "ablation")[:1]:
        for variant in case["ablated"]["variants"]:
            if variant["kind"] != "without":
                continue
            for figure in FIGURES:
                gain = round_ratio(case["runs"], variant["name"], case["ablated"]["all"], figure)
                if gain is not None:
                    option = {name: variant[name] for name in ("leaf", "value")}
                    also = ", ".join(variant.get("also") or [])
                    rows.append(option | {"also": also, "figure": figure} | gain.to_dict())
    columns = "leaf value also figure low mid high confidence"
    rungs = ladder(document)[["leaf", "figure", "time_ms"]]
    table = _table(rows, columns, NO_ABLATION)
    return table.merge(rungs, how="left", on=["leaf", "figure"])


def ladder(document: Document) -> pd.DataFrame:
    """From the plain contestant to the tuned one, with the first count of threads.

    At each rung there is an option more. Times are those of the plain one's median, divided by
    the rounds' own ratios, so that a machine that drifts between rounds does not show.

    Returns:
        Columns as in ``dlrm help columns ladder``.
    """
    rows = []
    for case in judged(document, "ablation")[:1]:
        base = case["ablated"]["base"]
        steps = [v for v in case["ablated"]["variants"] if v["kind"] == "ladder"]
        if base not in case["contestants"]:
            continue
        for figure in FIGURES:
            plain_ms = case["contestants"][base][figure]
            one = Interval(1.0, 1.0, 1.0, 1.0)
            rungs = [("", None, one)]
            for step in steps:
                gain = round_ratio(case["runs"], base, step["name"], figure)
                if gain is not None:
                    rungs.append((step["leaf"], step["value"], gain))
            rows += [
                (rung, leaf, value, figure, plain_ms / gain.mid, gain.low, gain.mid, gain.high)
                for rung, (leaf, value, gain) in enumerate(rungs)
            ]
    return _table(rows, "rung leaf value figure time_ms low mid high", NO_ABLATION)


def bare(document: Document) -> pd.DataFrame:
    """Bare products and rows, as each round timed them in turn with the contestants.

    Returns:
        Columns as in ``dlrm help columns bare``.
    """
    rows = [
        (
            *(case["case"], case["threads"], work_label(name)),
            *(one[key] for key in ("mid", "low", "high", "confidence", "best_ms", "of_best")),
        )
        for case in judged(document, "shape")
        for name, one in (case.get("bare") or {"bare": {}})["bare"].items()
    ]
    columns = "case threads work ms low high confidence best_ms of_best"
    return _table(rows, columns, BARE_UNMEASURED)


def reached(document: Document) -> pd.DataFrame:
    """What share of each contestant's step the bare products and rows take, and their error.

    Returns:
        Columns as in ``dlrm help columns reached``.
    """
    rows = []
    for case in judged(document, "shape"):
        floor = case.get("bare") or {"contestants": {}}
        for name, one in floor["contestants"].items():
            if name not in case["contestants"]:
                continue
            share = (one["share"][key] for key in ("mid", "low", "high", "confidence"))
            error = floor["errors"].get(one["kind"])
            rows.append(
                (
                    *(case["case"], case["threads"], name, case["contestants"][name]["step_ms"]),
                    *(one["products_ms"], one["rows_ms"], *share),
                    math.nan if error is None else error,
                )
            )
    columns = "case threads contestant step_ms products_ms rows_ms share low high confidence error"
    return _table(rows, columns, BARE_UNMEASURED)


BARE_UNMEASURED = (
    "rounds of `dlrm bench` time the bare work of shapes on a CPU; this benchmark has none"
)


def best(document: Document, case: Mapping[str, Any]) -> str:
    """The contestant of ours that is fastest end to end in a case; empty where none ran."""
    ours = {
        name: figures["end_to_end_ms"]
        for name, figures in case["contestants"].items()
        if name in document["settings"]["contestants"]
    }
    return min(ours, key=lambda name: ours[name]) if ours else ""


def losses(document: Document) -> pd.DataFrame:
    """Largest difference of each contestant's losses from the reference's.

    Returns:
        Columns as in ``dlrm help columns losses``.
    """
    rows = []
    for case in document["cases"]:
        count = len(case["runs"][0]["losses"]) if case.get("runs") else 0
        for name, difference in (case.get("loss_difference") or {}).items():
            value = math.nan if difference is None else float(difference)
            reference = case["loss_reference"]
            rows.append((case["case"], case["threads"], name, reference, count, value))
    return _table(rows, "case threads contestant reference iterations difference")


def conditions(document: Document) -> pd.DataFrame:
    """How it was measured, equal for all contestants: ``setting`` and ``value``, texts."""
    if "settings" not in document:  # no round was asked for
        return pd.DataFrame(columns=["setting", "value"])
    settings, machine = document["settings"], document["machine"]
    cores = settings.get("cores")
    usable = settings.get("usable_cores", "?")
    conditions_by_name = {
        "processor": machine.get("cpu", ""),
        "cores": f"{cores} of them, each contestant" if cores else f"all {usable}",
        "memory": f"{machine.get('memory_gib', '?')} GiB",
        "GPU": ", ".join(machine.get("gpus") or []) or NOT_MEASURED,
        "software": ", ".join(f"{name} {v}" for name, v in document["versions"].items()),
        "date": document["date"],
        "warm-up iterations": str(settings["warmup"]),
        "counted iterations per run": str(settings["iterations"]),
    }
    for threads, environment in settings.get("environment", {}).items():
        text = ", ".join(f"{name}={value}" for name, value in environment.items())
        conditions_by_name[f"environment, {counted(int(threads), 'thread')}"] = text
    for name, change in settings["contestants"].items():
        text = ", ".join(f"{leaf}: {value_text(value)}" for leaf, value in change.items())
        conditions_by_name[f"contestant {name}"] = text or "no option for speed"
    rows = [
        *conditions_by_name.items(),
        *(("command", text) for text in document.get("commands", [])),
    ]
    return pd.DataFrame(rows, columns=["setting", "value"])


def unfinished(document: Document) -> list[str]:
    """Sentences on what was asked for and is not there: failures, and what was cut short."""
    sentences: list[str] = []
    for case in document["cases"]:
        if "contestants" not in case:
            sentences.append(f"{case['case']}: cut short after {len(case.get('runs') or [])} runs")
        for name, reason in (case.get("failures") or {}).items():
            sentences.append(f"{name} did not run ({case['case']}): {reason}")
    for name, reason in (document.get("not_measured") or {}).items():
        sentences.append(f"{name.upper() if len(name) < 4 else name}: not measured: {reason}")
    return list(dict.fromkeys(sentences))
