"""Time to train: a training until its test AUC reaches a target, as MLPerf counts it.

The clock runs from the first iteration to the end of the evaluation that reaches the target;
data, evaluations and checkpoints are in it, loading and initial weights are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.base.settings import coerce_section, setting
from dlrm_core.config import Parameters
from dlrm_studies.runs import Record, run_of_study
from dlrm_workbook.ground.processes import python_module, run_child

TO_TARGET = Record("time_to_train.json", "record of a training to a target")

EVALUATIONS = 20
"""MLPerf's evaluations an epoch; of a stream without end, those of the whole run."""

KEPT = (
    *("status", "reached_target", "iterations", "samples", "elapsed_s", "evaluation_s"),
    *("auc", "best_auc", "samples_per_second", "power", "device", "threads", "notices"),
    "evaluations",
)
"""Fields that the record takes from the training's result.json."""


@dataclass(frozen=True)
class Target:
    """The notebook's parameter ``time_to_train``: what one more training is to reach.

    Raises:
        InputError: a number is out of its range, or there is no target to train to.
    """

    auc: float = setting(0.0, "test AUC that ends the training; 0: none runs", minimum=0, maximum=1)
    price_per_hour: float = setting(0.0, "of the machine, any currency; 0: not known", minimum=0)
    mllog: bool = setting(False, "write MLPerf's log of the training")

    def __post_init__(self) -> None:
        coerce_section(self, "time_to_train")
        if not self.auc and (self.mllog or self.price_per_hour):
            given = "mllog" if self.mllog else "price_per_hour"
            raise InputError(
                f"time_to_train.{given} is given, but time_to_train.auc is 0: nothing is trained "
                "to a target"
            )


def reached_or_read(
    parameters: Parameters, folder: Path, target: Target, results: str = ""
) -> dict[str, Any] | None:
    """The record that the ``benchmark`` notebook shows, of a training in a fresh process.

    Args:
        folder: gets ``time_to_train.json``, and a folder ``time_to_train`` with the training's
            metrics.jsonl and result.json.
        target: its log is ``time_to_train/mllog.txt``.
        results: a finished benchmark: nothing is trained, the record beside it is read.

    Returns:
        ``target``, ``price_per_hour``, ``parameters``, and of the training :data:`KEPT`; None
        where nothing was trained.

    Raises:
        InputError: the training did not end well; the message is the process's own.
    """
    if results:
        return TO_TARGET.beside(results)
    if not target.auc:
        return None
    chosen, place = to_target(parameters, target.auc), folder / "time_to_train"
    file = place / "parameters.json"
    write_json(file, chosen.to_sections())
    command = python_module("dlrm_workbook", "train", "-f", file, "--output", place)
    if target.mllog:
        command += ["--mllog", str(place / "mllog.txt")]
    run_child(command, stage="training to the target").require_success("dlrm train")
    result = read_json(place / "result.json")
    fields = {
        "title": parameters.title,
        "parameters": chosen.to_sections(),
        "target": target.auc,
        "price_per_hour": target.price_per_hour or None,
        "result": {name: result[name] for name in KEPT},
    }
    return TO_TARGET.write(folder / TO_TARGET.name, fields)


def to_target(parameters: Parameters, target: float) -> Parameters:
    """The parameters of a training that ends at the target.

    Where they do not say when to evaluate, it is done as often as MLPerf does.
    """
    training, often = parameters.training, {}
    if training.eval_every is None and training.evals_per_epoch is None:
        if parameters.data.generator == "dataset" or parameters.data.samples is not None:
            often = {"evals_per_epoch": EVALUATIONS}
        else:
            often = {"eval_every": max(1, training.batches // EVALUATIONS)}
    return run_of_study(parameters, auc_target=target, **often)


def time_to_auc(record: dict[str, Any] | None) -> pd.DataFrame:
    """Time, samples, energy and cost of the training: a row, or none.

    Returns:
        Columns as in ``dlrm help columns time_to_auc``.
    """
    rows = []
    if record is not None:
        result, price = record["result"], record["price_per_hour"]
        energy = result["power"]["energy_j"]
        training = record["parameters"]["training"]
        rows.append(
            {
                "run": f"{result['device']}, {training['precision']}",
                "target_auc": record["target"],
                "auc": np.nan if result["auc"] is None else result["auc"],
                "reached": result["reached_target"],
                "time_s": result["elapsed_s"],
                "evaluation_s": result["evaluation_s"],
                "iterations": result["iterations"],
                "samples": result["samples"],
                "energy_j": np.nan if energy is None else energy,
                "cost": np.nan if price is None else price * result["elapsed_s"] / 3600.0,
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


COLUMNS = (
    *("run", "target_auc", "auc", "reached", "time_s", "evaluation_s", "iterations", "samples"),
    *("energy_j", "cost"),
)


def auc_by_time(record: dict[str, Any] | None) -> pd.DataFrame:
    """Evaluations on the way.

    Returns:
        Columns as in ``dlrm help columns auc_by_time``.
    """
    columns = ["iteration", "time_s", "auc", "target_auc"]
    rows = []
    if record is not None:
        for one in record["result"]["evaluations"]:
            rows.append((one["iteration"], one["elapsed_s"], one["auc"], record["target"]))
    return pd.DataFrame(rows, columns=columns).astype({"auc": float})
