"""Two precisions side by side, as NVIDIA's tables have them: throughput, latency, time to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_studies.columns import columns_of
from dlrm_studies.protocols import measure as protocols
from dlrm_studies.protocols.show import device_of
from dlrm_studies.published import published_runs
from dlrm_studies.time_to_train import measure as targets
from dlrm_workbook.ground.units import NOT_MEASURED, digits, known_or
from dlrm_workbook.show.tables import each_row

UNITS = {
    "training": "samples/s",
    "inference": "samples/s",
    "latency": "ms, mean",
    "time to train": "min",
    "AUC": "",
}
"""What is compared, and its unit; of the last no speed-up."""

LESS_IS_FASTER = ("latency", "time to train")

UNASKED = f"{NOT_MEASURED}: -p 'precisions=[bf16]' trains in a second one"


def side_by_side(
    parameters: Parameters,
    folder: Path,
    timed: Mapping[str, Any] | None,
    reached: Mapping[str, Any] | None,
    asked: Mapping[str, Any],
) -> pd.DataFrame:
    """Our training in its own precision and in others, and NVIDIA's published pairs.

    Args:
        folder: gets a folder for each further precision with its records.
        timed: the record of ``dlrm protocols`` in the parameters' own precision, if there is one.
        reached: the record of the training to a target, if there is one.
        asked: the notebook's ``precisions``, ``protocols``, ``batch_sizes``, ``target`` (of
            ``time_to_train``) and ``results``.

    Returns:
        ``source``, ``hardware``, ``model``, ``batch``, ``quantity`` (a key of :data:`UNITS`),
        ``first``, ``second`` (names of the precisions), ``in_first``, ``in_second``,
        ``speedup`` (of the second over the first; NaN of an AUC), ``why`` (the reason where
        ``in_second`` is NaN).
    """
    rows: list[dict[str, Any]] = []
    own = _figures(timed, reached)
    others: Sequence[str] = asked["precisions"] if own else ()
    for name in others:
        place, results = folder / name, asked["results"]
        if results:
            results = str(Path(results).expanduser().absolute().parent / name / "benchmark.json")
        else:
            place.mkdir(exist_ok=True)
        changed = parameters.with_training(precision=name)
        iterations = asked["protocols"] if timed else 0
        sizes, target = asked["batch_sizes"], asked["target"] if reached else targets.Target()
        why = f"{NOT_MEASURED} in {name}"
        try:
            second = _figures(
                protocols.measured_or_read(changed, place, iterations, sizes, results),
                targets.reached_or_read(changed, place, target, results),
            )
        except InputError as error:
            second, why = {}, f"{why}: {error}"
        rows += [
            row | {"why": why} for row in _pairs(own, second, parameters.training.precision, name)
        ]
    if own and not rows:
        own_rows = _pairs(own, {}, parameters.training.precision, "")
        rows += [row | {"why": UNASKED} for row in own_rows]
    for row in rows:
        about = device_of(timed) if timed else ""
        row |= {"source": "this run", "hardware": about, "model": parameters.title}
    return pd.DataFrame([*rows, *_published()], columns=FIELDS)


FIELDS = [
    *("source", "hardware", "model", "batch", "quantity", "first", "second"),
    *("in_first", "in_second", "speedup", "why"),
]

Figures = dict[tuple[str, int], float]
"""Quantity and batch to its figure."""


def _figures(timed: Mapping[str, Any] | None, reached: Mapping[str, Any] | None) -> Figures:
    figures: Figures = {}
    if timed:
        batch = timed["parameters"]["training"]["batch_size"]
        for one in timed["measured"]["training"]:
            if one["protocol"] == "nvidia":
                figures["training", batch] = one["samples_per_second"]
        for one in timed["measured"]["inference"]:
            if one["protocol"] == "nvidia":
                figures["inference", one["batch_size"]] = one["samples_per_second"]
                figures["latency", one["batch_size"]] = one["mean"]
    if reached and reached["result"]["reached_target"]:
        batch, result = reached["parameters"]["training"]["batch_size"], reached["result"]
        figures["time to train", batch] = result["elapsed_s"] / 60
        figures["AUC", batch] = result["auc"]
    return figures


def _pairs(own: Figures, other: Figures, first: str, second: str) -> list[dict[str, Any]]:
    rows = []
    for (quantity, batch), figure in own.items():
        found = other.get((quantity, batch), float("nan"))
        ratio = figure / found if quantity in LESS_IS_FASTER else found / figure
        rows.append(
            {"batch": batch, "quantity": quantity, "first": first, "second": second}
            | {"in_first": figure, "in_second": found}
            | {"speedup": float("nan") if quantity == "AUC" else ratio}
        )
    return rows


def _published() -> list[dict[str, Any]]:
    """NVIDIA's pairs: each training or inference of which both precisions are published."""
    runs = published_runs().query("protocol == 'nvidia' and precision != ''")
    keys = ["hardware", "model", "mode", "batch_samples"]
    is_mixed = runs["precision"] == "mixed"
    both = runs[~is_mixed].merge(runs[is_mixed], on=keys, suffixes=("_first", "_second"))
    rows: list[dict[str, Any]] = []
    for pair in both.to_dict("records"):
        batch = int(pair["batch_samples"])
        columns = {str(pair["mode"]): "samples_per_second", "latency": "latency_ms"}
        columns |= {"time to train": "minutes_to_train", "AUC": "auc"}
        first, second = (
            {(quantity, batch): pair[name + end] for quantity, name in columns.items()}
            for end in ("_first", "_second")
        )
        known = {key: value for key, value in first.items() if value == value}
        about = {"source": "NVIDIA (other hardware)"} | {n: pair[n] for n in ("hardware", "model")}
        full = str(pair["precision_first"])
        rows += [about | row for row in _pairs(known, second, full, "mixed")]
    return rows


def _named(value: float, name: str, why: str = "") -> str:
    text = known_or(value, lambda known: f"{known:.4f}" if known < 1 else digits(known))
    return f"{text} ({name})" if value == value else str(why)


COLUMNS = columns_of(
    "precisions",
    {
        "quantity": each_row(lambda name: f"{name}, {UNITS[name]}".strip(", "), words=True),
        "named": each_row(_named, words=True),
    },
)
