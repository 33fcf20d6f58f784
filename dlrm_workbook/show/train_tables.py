"""Tables of a training run as a reader of a notebook wants them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.config import Parameters
from dlrm_core.memory import ALWAYS, PLACES, MemoryItem, forecast_memory, total_bytes
from dlrm_core.reports import TrainingResult
from dlrm_core.schedules import schedule_of
from dlrm_core.units import NOTHING, format_bytes, known_ms
from dlrm_workbook.show.tables import Table, column
from dlrm_workbook.show.theme import rows_of


def facts(parameters: Parameters) -> Table:
    """What is going to run, in the words of the field."""
    model, data, training = parameters.model, parameters.data, parameters.training
    rows = model.table_rows
    bag = f"{data.indices_per_lookup:,}"
    weights = sum(
        a * b + b for w in (model.bottom_widths, model.top_widths) for a, b in itertools.pairwise(w)
    )
    return Table(
        ["", "value"],
        [
            ("bottom MLP", " → ".join(map(str, model.bottom_widths))),
            ("top MLP", " → ".join(map(str, model.top_widths))),
            (
                "embedding tables",
                f"{len(rows)} tables, {sum(rows):,} rows in all, {model.embedding_dim} wide",
            ),
            ("interaction", model.interaction),
            (
                "parameters of the model",
                f"{sum(rows) * model.embedding_dim:,} in tables, {weights:,} in MLPs",
            ),
            ("data", f"{data.generator}, loaded by the {data.loader} loader"),
            ("indices per lookup", f"{bag} each" if data.fixed_pooling else f"up to {bag}"),
            ("batch", f"{training.batch_size:,} samples, {training.batches:,} batches"),
            ("optimizer", f"{training.optimizer}, learning rate {training.learning_rate:g}"),
            ("device", training.device),
        ],
    )


def memory_forecast(
    parameters: Parameters, items: Sequence[MemoryItem] | None = None
) -> pd.DataFrame:
    """What the run will allocate: ``name``, ``shape``, ``component``, ``bytes``, ``place``,
    ``when``.

    Tables of one size are one row, and so are the smallest of many.

    Args:
        items: of the forecast; left out, those of a run on the CPU.
    """
    table = pd.DataFrame([vars(item) for item in items or forecast_memory(parameters)])
    is_table = table["name"].str.startswith("embedding table")
    merged = (
        table[is_table]
        .groupby(["shape", "place", "when"], sort=False, as_index=False)
        .agg(count=("bytes", "size"), bytes=("bytes", "sum"))
    )
    names = [
        f"embedding table{'s' if row.count > 1 else ''}, {row.count} × {row.shape}"
        for row in rows_of(merged)
    ]
    tables = merged.assign(name=names).sort_values("bytes", ascending=False)
    if len(tables) > 6:
        rest = tables.iloc[5:]
        places = " and ".join(place for place in PLACES if place in set(rest["place"]))
        small = {
            "name": f"{len(rest)} smaller kinds of embedding tables",
            "shape": "",
            "bytes": rest["bytes"].sum(),
            "place": places,
            "when": ALWAYS,
        }
        tables = pd.concat([tables[:5], pd.DataFrame([small])])
    result = pd.concat([tables, table[~is_table]], ignore_index=True)
    result["component"] = [_component_of(name) for name in result["name"]]
    result = result.sort_values("bytes", ascending=False, kind="stable", ignore_index=True)
    return result[["name", "shape", "component", "bytes", "place", "when"]]


def forecast_table(forecast: pd.DataFrame) -> Table:
    """The forecast, and what is there at once at most."""
    rows = [
        (row.name, row.shape, format_bytes(row.bytes), row.place, row.when)
        for row in rows_of(forecast)
    ]
    totals = []
    for place in PLACES:
        items = [
            MemoryItem(row.name, row.shape, row.bytes, row.place, row.when)
            for row in rows_of(forecast[forecast["place"].str.contains(place)])
        ]
        if items:
            size = format_bytes(total_bytes(items))
            totals.append(("at the highest point", "", size, place, ""))
    return Table(["what", "shape", "size", "where", "when"], [*rows, *totals])


def training_result(result: TrainingResult) -> Table:
    """What a training run amounted to."""
    done = f"{result.iterations:,} ({result.status})"
    return Table(
        ["", "value"],
        [
            ("iterations", done),
            ("loss, mean over the last interval", f"{result.loss:.6f}"),
            ("time per iteration, median, data included", known_ms(result.ms_per_iteration)),
            ("of it making data, mean", known_ms(result.data_ms_per_iteration)),
            ("of it computing, mean", known_ms(result.compute_ms_per_iteration)),
            ("throughput, data included", f"{result.samples_per_second:,.0f} samples/s"),
            ("time of everything", f"{result.elapsed_s:,.1f} s"),
            *_evaluated(result),
            (
                "peak memory of the process",
                format_bytes(result.peak_memory_bytes)
                if result.peak_memory_bytes
                else "not measured",
            ),
            ("power, mean", _power(result)),
            ("device", f"{result.device}, {result.threads} CPU threads"),
        ],
    )


def _power(result: TrainingResult) -> str:
    """Watts and samples a joule of what was measured, or why nothing was."""
    missing = "; ".join(f"{name}: {why}" for name, why in result.power["not_measured"].items())
    if result.power_w is None or result.samples_per_joule is None:
        return f"not measured ({missing})"
    devices = ", ".join(reading["device"] for reading in result.power["readings"])
    return f"{result.power_w:,.1f} W, {result.samples_per_joule:,.1f} samples/J ({devices})"


def _evaluated(result: TrainingResult) -> list[tuple[str, str]]:
    """Lines about evaluations and checkpoints, where there were any."""
    rows = []
    if result.evaluations:
        rows.append(("of it evaluating", f"{result.evaluation_s:,.2f} s"))
    if result.checkpoint_s:
        rows.append(("of it writing checkpoints", f"{result.checkpoint_s:,.2f} s"))
    if result.auc is not None:
        best = "" if result.best_auc == result.auc else f" (best {result.best_auc:.5f})"
        rows.append(("AUC of the last evaluation", f"{result.auc:.5f}{best}"))
    if result.checkpoint is not None:
        rows.append(("last checkpoint", Path(result.checkpoint).name))
    return rows


def intervals(folder: Path) -> pd.DataFrame:
    """Intervals in metrics.jsonl of a run folder: a row each, the columns of ``Interval``."""
    return pd.DataFrame([line for line in _lines(folder) if "kind" not in line])


def evaluations(folder: Path) -> pd.DataFrame:
    """Evaluations in metrics.jsonl: a row each, the columns of ``Evaluation``; maybe none."""
    found = [line for line in _lines(folder) if line.get("kind") == "evaluation"]
    return pd.DataFrame(found).drop(columns="kind", errors="ignore")


def _lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def schedule(parameters: Parameters, iterations: int) -> pd.DataFrame:
    """``iteration``, ``learning_rate`` as the parameters plan them; empty if it is constant."""
    planned = schedule_of(parameters.training)
    return pd.DataFrame({} if planned.constant else planned.curve(iterations))


def iterations(result: TrainingResult) -> pd.DataFrame:
    """``iteration`` (from 1, or after the checkpoint resumed from) and its ``loss``."""
    first = result.first_iteration
    places = range(first + 1, first + result.iterations + 1)
    return pd.DataFrame({"iteration": places, "loss": result.losses})


def evaluation_table(table: pd.DataFrame, best: float | None = None) -> Table:
    """Evaluations, a line each.

    Args:
        best: the best AUC that any model can have there, if it is known.
    """
    aucs = list(table["auc"])
    below = [NOTHING if pd.isna(auc) else f"{best - auc:.5f}" for auc in aucs] if best else []
    cells = {
        "iteration": [f"{count:,}" for count in table["iteration"]],
        "AUC": ["none" if pd.isna(auc) else f"{auc:.5f}" for auc in aucs],
        **({f"below the best, {best:.5f}": below} if best else {}),
        "log loss": [f"{loss:.5f}" for loss in table["log_loss"]],
        "accuracy": [f"{share:.2%}" for share in table["accuracy"]],
        "samples": [f"{count:,}" for count in table["samples"]],
        "seconds": [f"{seconds:,.2f}" for seconds in table["seconds"]],
        "samples/s": [f"{rate:,.0f}" for rate in table["samples_per_second"]],
    }
    return Table.of(cells)


def interval_table(table: pd.DataFrame) -> Table:
    """metrics.jsonl, a line an interval; a median and two means, which do not add up to it."""
    cells = {
        "iteration": [f"{count:,}" for count in table["iteration"]],
        "loss": [f"{loss:.6f}" for loss in table["loss"]],
        "ms per iteration, median": column(table["ms_per_iteration"]),
        "data (ms), mean": column(table["data_ms_per_iteration"]),
        "compute (ms), mean": column(table["compute_ms_per_iteration"]),
        "samples/s": [f"{rate:,.0f}" for rate in table["samples_per_second"]],
    }
    return Table.of(cells)


def _component_of(name: str) -> str:
    kinds = {
        "embedding": "embedding",
        "sparse embedding": "embedding",
        "bottom MLP": "bottom_mlp",
        "top MLP": "top_mlp",
        "batches": "data",
        "making a batch": "data",
        "pooled vectors": "embedding",
        "sorted lookups": "embedding",
        "copies of pooled": "transfer",
        "optimiser": "optimizer",
    }
    return next((part for start, part in kinds.items() if name.startswith(start)), "other")
