"""A benchmark's JSON (docs/benchmark.md) as tables: times, ratios, growth, options, shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_workbook.evidence.contestants import FIGURES, PEER, ratio
from dlrm_workbook.intervals import Interval, median_interval
from dlrm_workbook.studies.bench.cases import GOALS

Document = Mapping[str, Any]

BLANK = math.nan


def shapes(document: Document) -> list[dict[str, Any]]:
    """The cases that are shapes and in which something ran, in the order measured."""
    return _cases(document, "shape")


def times(document: Document) -> pd.DataFrame:
    """Medians of every contestant in every shape.

    Returns:
        ``case``, ``meaning``, ``threads``, ``contestant``, ``figure`` (``step_ms`` or
        ``end_to_end_ms``), ``low_ms``, ``mid_ms``, ``high_ms`` (over the rounds, intervals of
        the median), ``confidence``, ``rounds``, ``samples_per_second``.
    """
    rows = []
    for case in shapes(document):
        for name in case["contestants"]:
            runs = [row for row in case["runs"] if row["contestant"] == name]
            for figure in FIGURES:
                found = median_interval([row[figure] for row in runs])
                rows.append(
                    {
                        "case": case["case"],
                        "meaning": case["meaning"],
                        "threads": case["threads"],
                        "contestant": name,
                        "figure": figure,
                        "low_ms": found.low,
                        "mid_ms": found.mid,
                        "high_ms": found.high,
                        "confidence": found.confidence,
                        "rounds": len(runs),
                        "samples_per_second": 1e3 * case["batch_size"] / found.mid,
                    }
                )
    columns = [
        *("case", "meaning", "threads", "contestant", "figure", "low_ms", "mid_ms", "high_ms"),
        *("confidence", "rounds", "samples_per_second"),
    ]
    return pd.DataFrame(rows, columns=columns)


def ratios(document: Document) -> pd.DataFrame:
    """How many times as fast as ``against`` every contestant is, from the rounds' own ratios.

    Returns:
        ``case``, ``threads``, ``contestant``, ``against``, ``figure``, ``low``, ``mid``,
        ``high``, ``confidence``, ``rounds``, ``goal`` (NaN where there is none: goals are
        against facebookresearch/dlrm, on a CPU with one thread), ``loss_difference``.
    """
    rows = []
    for case in shapes(document):
        for name, found in case["ratios"].items():
            for figure in FIGURES:
                goal = BLANK
                if case["against"] == PEER and case["threads"] == 1:
                    goal = GOALS.get(case["case"], {}).get(name, {}).get(figure, BLANK)
                difference = case["loss_difference"].get(name, 0.0)
                rows.append(
                    {
                        "case": case["case"],
                        "threads": case["threads"],
                        "contestant": name,
                        "against": case["against"],
                        "figure": figure,
                        **{key: found[figure][key] for key in ("low", "mid", "high")},
                        "confidence": found[figure]["confidence"],
                        "rounds": found[figure]["rounds"],
                        "goal": goal,
                        "loss_difference": BLANK if difference is None else difference,
                    }
                )
    columns = [
        *("case", "threads", "contestant", "against", "figure", "low", "mid", "high"),
        *("confidence", "rounds", "goal", "loss_difference"),
    ]
    return pd.DataFrame(rows, columns=columns)


def growth(document: Document) -> pd.DataFrame:
    """Times along batch, tables, dim and pooling.

    Returns:
        ``quantity``, ``value``, ``threads``, ``contestant``, ``figure``, ``time_ms``,
        ``samples_per_second``; sorted by value.
    """
    rows = []
    for case in _cases(document, "growth"):
        for quantity, value in case["points"].items():
            for name, found in case["contestants"].items():
                for figure in FIGURES:
                    rows.append(
                        {
                            "quantity": quantity,
                            "value": value,
                            "threads": case["threads"],
                            "contestant": name,
                            "figure": figure,
                            "time_ms": found[figure],
                            "samples_per_second": 1e3 * case["batch_size"] / found[figure],
                        }
                    )
    columns = ["quantity", "value", "threads", "contestant", "figure", "time_ms"]
    table = pd.DataFrame(rows, columns=[*columns, "samples_per_second"])
    return table.sort_values("value", kind="stable").reset_index(drop=True)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """Mean slope of each curve in the log-log picture: doubling takes 2^slope times as long.

    Args:
        table: what :func:`growth` gives.

    Returns:
        ``quantity``, ``threads``, ``contestant``, ``figure``, ``smallest``, ``largest``,
        ``slope``.
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


def without(document: Document, threads: int | None = None) -> pd.DataFrame:
    """What each option brings: time without it over time with all.

    Returns:
        ``leaf``, ``value``, ``also`` (leaves that only work with it and were off too, joined),
        ``figure``, ``low``, ``mid``, ``high``, ``confidence``: 1.2 means that the run is 1.2
        times as fast with the option as without it.
    """
    rows = []
    for case in _ablations(document, threads):
        for variant in case["ablated"]["variants"]:
            if variant["kind"] != "without":
                continue
            for figure in FIGURES:
                found = ratio(case["runs"], variant["name"], case["ablated"]["all"], figure)
                if found is not None:
                    rows.append(
                        {
                            "leaf": variant["leaf"],
                            "value": variant["value"],
                            "also": ", ".join(variant.get("also") or []),
                            "figure": figure,
                            **found.to_dict(),
                        }
                    )
    columns = ["leaf", "value", "also", "figure", "low", "mid", "high", "confidence"]
    return pd.DataFrame(rows, columns=columns)


def ladder(document: Document, threads: int | None = None) -> pd.DataFrame:
    """From the plain contestant to the tuned one, an option more at each rung.

    Times are those of the plain one's median, divided by the rounds' own ratios, so that a
    machine that drifts between rounds does not show.

    Returns:
        ``rung`` (0 is plain), ``leaf`` ("" of plain), ``value``, ``figure``, ``time_ms``,
        ``low``, ``mid``, ``high`` (times as fast as plain).
    """
    rows = []
    for case in _ablations(document, threads):
        base = case["ablated"]["base"]
        steps = [v for v in case["ablated"]["variants"] if v["kind"] == "ladder"]
        if base not in case["contestants"]:
            continue
        for figure in FIGURES:
            plain_ms = case["contestants"][base][figure]
            one = Interval(1.0, 1.0, 1.0, 1.0)
            found = [("", None, one)]
            for step in steps:
                gain = ratio(case["runs"], base, step["name"], figure)
                if gain is not None:
                    found.append((step["leaf"], step["value"], gain))
            rows += [
                (rung, leaf, value, figure, plain_ms / gain.mid, gain.low, gain.mid, gain.high)
                for rung, (leaf, value, gain) in enumerate(found)
            ]
    columns = ["rung", "leaf", "value", "figure", "time_ms", "low", "mid", "high"]
    return pd.DataFrame(rows, columns=columns)


def shares(document: Document) -> pd.DataFrame:
    """Shares of this machine's limits.

    Returns:
        ``case``, ``contestant``, ``threads``, ``what``, ``ms``, ``ceiling_ms``, ``share``,
        ``low``, ``high``, ``reason`` (why it was not measured, else "").
    """
    columns = ["case", "contestant", "threads", "what", "ms", "ceiling_ms", "share", "low", "high"]
    rows = [
        {name: row.get(name, BLANK) for name in columns} | {"reason": row.get("reason") or ""}
        for row in document.get("shares", [])
    ]
    table = pd.DataFrame(rows, columns=[*columns, "reason"])
    numbers = ["ms", "ceiling_ms", "share", "low", "high"]
    return table.astype(dict.fromkeys(numbers, float))


def best(document: Document, case: Mapping[str, Any]) -> str:
    """The contestant of ours that is fastest end to end in a case; empty where none ran."""
    ours = {
        name: found["end_to_end_ms"]
        for name, found in case["contestants"].items()
        if name in document["settings"]["contestants"]
    }
    return min(ours, key=lambda name: ours[name]) if ours else ""


def losses(document: Document) -> pd.DataFrame:
    """Largest difference of each contestant's losses from the reference's.

    Returns:
        ``case``, ``threads``, ``contestant``, ``reference``, ``iterations`` (compared),
        ``difference``.
    """
    rows = []
    for case in document["cases"]:
        count = len(case["runs"][0]["losses"]) if case.get("runs") else 0
        for name, difference in (case.get("loss_difference") or {}).items():
            value = BLANK if difference is None else float(difference)
            reference = case["loss_reference"]
            rows.append((case["case"], case["threads"], name, reference, count, value))
    columns = ["case", "threads", "contestant", "reference", "iterations", "difference"]
    return pd.DataFrame(rows, columns=columns)


def unfinished(document: Document) -> list[str]:
    """Sentences on what was asked for and is not there: failures, and what was cut short."""
    said: list[str] = []
    for case in document["cases"]:
        if "contestants" not in case:
            said.append(f"{case['case']}: cut short after {len(case.get('runs') or [])} runs")
        for name, reason in (case.get("failures") or {}).items():
            said.append(f"{name} did not run ({case['case']}): {reason}")
    for name, reason in (document.get("not_measured") or {}).items():
        said.append(f"{name.upper() if len(name) < 4 else name}: not measured: {reason}")
    return list(dict.fromkeys(said))


def _cases(document: Document, kind: str) -> list[dict[str, Any]]:
    # one that was cut short has its runs, but nothing was judged
    return [
        case for case in document["cases"] if case.get("kind") == kind and case.get("contestants")
    ]


def _ablations(document: Document, threads: int | None) -> Sequence[dict[str, Any]]:
    """The ablation of so many threads, or the first that there is; as a list of at most one."""
    found = [
        case
        for case in _cases(document, "ablation")
        if threads is None or case["threads"] == threads
    ]
    return found[:1]
