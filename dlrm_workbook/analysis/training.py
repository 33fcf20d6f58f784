"""A training run as DataFrames: what will run, what it allocates, how it went."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.interactions import INTERACTIONS
from dlrm_core.parts import part_label
from dlrm_core.run.reports import TrainingResult
from dlrm_core.run.schedules import learning_rate
from dlrm_core.train import Trainer
from dlrm_kernels.memory import ALWAYS, PLACES, MemoryItem, forecast_memory, total_bytes
from dlrm_workbook.analysis.work import operator_work
from dlrm_workbook.ground.units import milliseconds

ALLOCATED_BY = {
    "embedding": "embedding",
    "sparse embedding": "embedding",
    "bottom MLP": "bottom_mlp",
    **{kind.layers: "interaction" for kind in INTERACTIONS.values() if kind.layers},
    "top MLP": "top_mlp",
    "batches": "data",
    "making a batch": "data",
    "pooled vectors": "embedding",
    "sorted lookups": "embedding",
    "copies of pooled": "transfer",
    "optimiser": "optimizer",
}
"""How the name of an allocation begins, to the component that it belongs to."""

SHOWN_TABLES = 6
"""Kinds of embedding tables that a forecast lists; smaller ones are summed."""

SMALL_ROWS, SMALL_BATCH, SMALL_BAG = 1000, 64, 10
"""Rows of a table, samples of a batch, and most lookups of a sample, of a copy to try things on."""

SCHEDULE_PLACES = 400
"""Iterations at which a planned learning rate is shown."""


def planned_facts(parameters: Parameters) -> pd.DataFrame:
    """What is going to run, in words."""
    model, data, training = parameters.model, parameters.data, parameters.training
    rows = model.table_rows
    bag = f"{data.indices_per_lookup:,}"
    bag = f"{bag} each" if data.fixed_pooling else f"up to {bag}"
    if sizes := data.multi_hot_sizes:
        bag = f"{min(sizes)} to {max(sizes)} by table, {sum(sizes)} a sample"
    weights, kind = model.dense_weights, model.interaction_kind.described()
    words = {
        "bottom MLP": " → ".join(map(str, model.bottom_widths)),
        "top MLP": " → ".join(map(str, model.top_widths)),
        "embedding tables": f"{len(rows)} tables, {sum(rows):,} rows in all, "
        f"{model.embedding_dim} wide",
        "interaction": kind,
        "parameters of the model": f"{sum(rows) * model.embedding_dim:,} in tables, "
        + ", ".join(f"{count:,} in {part_label(part)}" for part, count in weights.items()),
        "data": f"{data.generator}, loaded by the {data.loader} loader",
        "indices per lookup": bag,
        "batch": f"{training.batch_size:,} samples, {training.batches:,} batches",
        "optimizer": f"{training.optimizer}, learning rate {training.learning_rate:g}",
        "device": training.device,
    }
    return pd.DataFrame(words.items(), columns=["what", "value"])


def boxes(parameters: Parameters) -> pd.DataFrame:
    """The model's parts from its inputs to the click probability, as a drawing has them.

    ``flops`` of one iteration are counted from the shapes: of a layer its products forward and
    backward, of tables and interaction all operators; 0 for inputs. Tables of one size are one row,
    and so are the smallest of many.
    """
    model, data, size = parameters.model, parameters.data, parameters.training.batch_size
    work, dim = operator_work(parameters), model.embedding_dim
    work["flops"] *= work["count"]
    by_part = work.groupby("component")["flops"].sum()
    by_layer = work[work["layer"] >= 0].groupby(["component", "layer"])["flops"].sum()
    by_table = work[work["table"] >= 0].groupby("table")["flops"].sum()
    rows: list[tuple[str, str, str, int, float]] = []

    def layers(component: str, widths: Sequence[int]) -> None:
        for layer, (inside, outside) in enumerate(itertools.pairwise(widths)):
            last = component == "top_mlp" and layer == len(widths) - 2
            ends = "sigmoid: click probability" if last else "ReLU"
            flops = float(by_layer.get((component, layer), 0.0))
            called = part_label(component)
            name = f"{called[0].upper()}{called[1:]} {layer + 1}, {ends}"
            shape = f"{inside:,} → {outside:,}"
            rows.append((component, name, shape, (inside + 1) * outside, flops))

    rows.append(("data", "Dense features", f"{size:,} x {model.dense_features}", 0, 0.0))
    layers("bottom_mlp", model.bottom_widths)
    bag = f"{'' if data.fixed_pooling else 'up to '}{data.indices_per_lookup:,}"
    if sizes := data.multi_hot_sizes:
        bag = f"{min(sizes)} to {max(sizes)}"
    bags = f"{size:,} x {len(model.table_rows)} bags of {bag} rows"
    rows.append(("data", "Categorical features", bags, 0, 0.0))
    groups: dict[int, list[int]] = {}
    for table in sorted(range(len(model.table_rows)), key=lambda t: -model.table_rows[t]):
        kept = model.table_rows[table] in groups or len(groups) < SHOWN_TABLES
        groups.setdefault(model.table_rows[table] if kept else 0, []).append(table)
    for count, tables in groups.items():
        total = sum(model.table_rows[table] for table in tables)
        name = f"{len(tables)} {'' if count else 'smaller '}tables" if tables[1:] else "Table"
        shape = f"{count:,} x {dim}" if count else f"{total:,} x {dim} in all"
        flops = float(by_table.reindex(tables).sum())
        rows.append(("embedding", name, shape, total * dim, flops))
    kind = model.interaction_kind
    shape = f"{len(model.table_rows) + 1} vectors of {dim} → {kind.width:,}"
    flops = float(by_part.get("interaction", 0.0))
    weights = model.dense_weights.get("interaction", 0)
    rows.append(("interaction", f"Interaction: {kind.described()}", shape, weights, flops))
    layers("top_mlp", model.top_widths)
    return pd.DataFrame(rows, columns=["component", "name", "shape", "weights", "flops"])


def small_copy(parameters: Parameters) -> Parameters:
    """The same model on small tables and a small batch, with plain options: to try a step by hand.

    Layers, loss, optimiser and learning rate are kept. Batches are random ones whatever the run
    reads, and everything is on the CPU.
    """
    sections = parameters.to_sections()
    model, training = sections["model"], sections["training"]
    rows = [min(count, SMALL_ROWS) for count in model["table_rows"]]
    bag = min(parameters.data.indices_per_lookup, SMALL_BAG)
    kept = {name: training[name] for name in ("learning_rate", "optimizer", "seed")}
    batch = min(parameters.training.batch_size, SMALL_BATCH)
    return parameters_from_sections(
        {
            "title": parameters.title,
            "model": model | {"table_rows": rows, "init": "torch"},
            "data": {"generator": "facebook", "indices_per_lookup": bag},
            "training": kept | {"batch_size": batch, "batches": 1, "device": "cpu"},
        }
    )


def weights(model: nn.Module) -> pd.DataFrame:
    """The weights of a model."""
    rows = [
        (name, "×".join(map(str, weight.shape)), weight.numel(), weight.nbytes)
        for name, weight in model.named_parameters()
    ]
    return pd.DataFrame(rows, columns=["name", "shape", "count", "bytes"])


def bags(batch: Batch) -> pd.DataFrame:
    """What a batch looks up in each table."""
    table = []
    for number in range(batch.tables):
        indices, starts = batch.table_indices(number), batch.offsets[number]
        ends = torch.cat([starts[1:], starts.new_tensor([len(indices)])])
        distinct = len(torch.unique(indices))
        table.append((number, batch.size, len(indices), distinct, int((ends - starts).max())))
    return pd.DataFrame(table, columns=["table", "samples", "lookups", "rows", "longest_bag"])


def one_step(trainer: Trainer, batch: Batch) -> pd.DataFrame:
    """Train one step on a batch, and what that does to its predictions, sample by sample."""
    columns = {"target": batch.targets, "before": trainer.predict(batch)}
    trainer.learn(batch)
    columns["after"] = trainer.predict(batch)
    return pd.DataFrame({name: v.detach().flatten().cpu() for name, v in columns.items()})


def memory_forecast(
    parameters: Parameters, items: Sequence[MemoryItem] | None = None
) -> pd.DataFrame:
    """What the run will allocate. Tables of one size are one row, and so are the smallest of many.
    ``items`` are the forecast's; left out, those of a run on the CPU."""
    table = pd.DataFrame([vars(item) for item in items or forecast_memory(parameters)])
    is_table = table["name"].str.startswith("embedding table")
    kinds = (
        table[is_table]
        .groupby(["shape", "place", "when"], sort=False, as_index=False)
        .agg(count=("bytes", "size"), bytes=("bytes", "sum"))
        .sort_values("bytes", ascending=False)
    )
    kinds["name"] = [
        f"embedding table{'s' * (count > 1)}, {count} of {shape.replace(' x ', ' × ')}"
        for count, shape in zip(kinds.pop("count"), kinds["shape"], strict=True)
    ]
    if len(kinds) > SHOWN_TABLES:
        rest = kinds[SHOWN_TABLES - 1 :]
        small = {"name": f"{len(rest)} smaller kinds of embedding tables", "shape": ""}
        small["place"] = " and ".join(place for place in PLACES if place in set(rest["place"]))
        joined = pd.DataFrame([small | {"bytes": rest["bytes"].sum(), "when": ALWAYS}])
        kinds = pd.concat([kinds[: SHOWN_TABLES - 1], joined])
    result = pd.concat([kinds, table[~is_table]], ignore_index=True)
    result["component"] = [
        next((part for start, part in ALLOCATED_BY.items() if name.startswith(start)), "other")
        for name in result["name"]
    ]
    result = result.sort_values("bytes", ascending=False, kind="stable", ignore_index=True)
    return result[["name", "shape", "component", "bytes", "place", "when"]]


def peak_memory(items: Sequence[MemoryItem]) -> pd.DataFrame:
    """How many bytes each place holds at once at most."""
    used = [place for place in PLACES if any(place in item.place for item in items)]
    peaks = [total_bytes([item for item in items if place in item.place]) for place in used]
    return pd.DataFrame({"place": used, "bytes": peaks})


def result_facts(result: TrainingResult) -> pd.DataFrame:
    """What a run amounted to; None: not measured."""
    median = (
        "another time: the median iteration, which a few slow ones (such as the first) move less "
        "than the mean; other pages name this run by it"
    )
    rows: list[tuple[str, Any, str]] = [
        ("iterations", f"{result.iterations:,} ({result.status})", ""),
        ("loss, mean over the last interval", f"{result.loss:.6f}", ""),
        ("time per iteration, mean, data included", result.mean_ms_per_iteration, "ms"),
        ("of it making the batch", result.data_ms_per_iteration, "ms"),
        ("of it computing", result.compute_ms_per_iteration, "ms"),
        ("throughput: samples of a batch over that time", result.samples_per_second, "samples/s"),
        (median, result.ms_per_iteration, "ms"),
        ("time of the whole loop", result.elapsed_s, "s"),
    ]
    if result.evaluations:
        rows.append(("of it evaluating", result.evaluation_s, "s"))
    if result.checkpoint_s:
        rows.append(("of it writing checkpoints", result.checkpoint_s, "s"))
    if result.auc is not None:
        best = "" if result.best_auc == result.auc else f" (best {result.best_auc:.5f})"
        rows.append(("AUC of the last evaluation", f"{result.auc:.5f}{best}", ""))
    if result.checkpoint is not None:
        rows.append(("last checkpoint", Path(result.checkpoint).name, ""))
    memory = "peak memory of the process, Python and its libraries included"
    rows += [
        (memory, result.peak_memory_bytes or None, "bytes"),
        ("power, mean", _power(result), ""),
        ("device", f"{result.device}, {result.threads} CPU threads", ""),
    ]
    return pd.DataFrame(rows, columns=["what", "value", "unit"])


def speed_headline(result: TrainingResult) -> str:
    """How fast the run trained, what an iteration took and the loss, in Markdown."""
    if result.ms_per_iteration is None or result.samples_per_second is None:
        return f"**{result.iterations:,} iterations ({result.status}): too few to time.**"
    split = ""
    if result.data_ms_per_iteration is not None and result.compute_ms_per_iteration is not None:
        split = (
            f", {milliseconds(result.data_ms_per_iteration)} of it making the batch and "
            f"{milliseconds(result.compute_ms_per_iteration)} computing"
        )
    mean = result.mean_ms_per_iteration or result.ms_per_iteration
    return (
        f"**{result.samples_per_second:,.0f} samples/s**: {milliseconds(mean)} per iteration "
        f"on average{split}.\n\nLoss {result.loss:.6f} after {result.iterations:,} iterations "
        f"({result.status})."
    )


def _power(result: TrainingResult) -> str:
    """Watts and samples per joule of what was measured, or why nothing was."""
    if result.power_w is None or result.samples_per_joule is None:
        reasons = result.power["not_measured"].items()
        return f"not measured ({'; '.join(f'{name}: {why}' for name, why in reasons)})"
    devices = ", ".join(reading["device"] for reading in result.power["readings"])
    return f"{result.power_w:,.1f} W, {result.samples_per_joule:,.1f} samples/J ({devices})"


def intervals(folder: Path) -> pd.DataFrame:
    """Intervals in metrics.jsonl of a run folder: a row each, the columns of ``Interval``."""
    return pd.DataFrame([line for line in _lines(folder) if "kind" not in line])


def evaluations(folder: Path, best: float | None = None) -> pd.DataFrame:
    """Evaluations in metrics.jsonl: a row each, the columns of ``Evaluation``; maybe none. ``best``
    is the best AUC that any model can have there; it gives the column ``below_best``."""
    lines = [line for line in _lines(folder) if line.get("kind") == "evaluation"]
    table = pd.DataFrame(lines).drop(columns="kind", errors="ignore")
    return table.assign(below_best=best - table["auc"]) if best and len(table) else table


def _lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def schedule(parameters: Parameters, iterations: int) -> pd.DataFrame:
    """The learning rate as the parameters plan it; empty if it is constant.

    The corners of the schedule are always among at most about :data:`SCHEDULE_PLACES` iterations.
    """
    config = parameters.training
    warmup, start, decay = config.lr_warmup_steps, config.lr_decay_start, config.lr_decay_steps
    if warmup <= 1 and decay == 0:
        return pd.DataFrame()
    places = {1, warmup, start, start + decay, iterations}
    places |= set(range(1, iterations + 1, max(1, -(-iterations // SCHEDULE_PLACES))))
    steps = sorted(step for step in places if 1 <= step <= iterations)
    rates = [learning_rate(config, step) for step in steps]
    return pd.DataFrame({"iteration": [float(step) for step in steps], "learning_rate": rates})


def losses(result: TrainingResult) -> pd.DataFrame:
    """``iteration`` (from 1, or after the checkpoint resumed from) and its ``loss``."""
    first = result.first_iteration
    places = range(first + 1, first + result.iterations + 1)
    return pd.DataFrame({"iteration": places, "loss": result.losses})
