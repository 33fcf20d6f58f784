"""Predicted beside measured: every run of a record, from its one-rank profile and link probe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError
from dlrm_workbook.analysis.ranks.links import Network, calibrate
from dlrm_workbook.analysis.ranks.prediction import (
    ComputeProfile,
    Prediction,
    measured_profile,
    predict,
)
from dlrm_workbook.analysis.ranks.record import (
    ScalingRecord,
    exposed_shares,
    measured_iterations,
)
from dlrm_workbook.analysis.ranks.schedule import Overlap
from dlrm_workbook.analysis.ranks.sharding import Plan, make_plan, plan_of_placement

SHARED_CORES = Overlap(hides=0.0)
"""Ranks on CPUs move bytes with the cores that compute: nothing that is hidden is saved."""

COLUMNS = [
    *("run", "ranks", "batch_size", "sharding", "measured_ms", "low_ms", "predicted_ms", "high_ms"),
    *("error", "in_range", "measured_exposed_ms", "predicted_exposed_ms", "note"),
]


def predicted_and_measured(
    record: ScalingRecord, parameters: Parameters, overlap: Overlap | None = None
) -> pd.DataFrame:
    """Every run of two ranks or more, predicted from what was measured apart from it.

    The prediction knows the link probe and the compute profile, which took turns with the runs;
    nothing of the run itself but its settings.

    Args:
        parameters: of the record.
        overlap: ``SHARED_CORES`` if None and the ranks are joined by gloo.

    Returns:
        ``run``, ``ranks``, ``batch_size``, ``sharding``, ``measured_ms``, ``low_ms``,
        ``predicted_ms``, ``high_ms``, ``error`` (predicted over measured, less 1),
        ``in_range``, ``measured_exposed_ms`` and ``predicted_exposed_ms`` (the part
        "communication": exposed exchanges, packing and unpacking), ``note`` (why there is no
        prediction).

    Raises:
        InputError: link probe or compute profile are missing or cannot be used.
    """
    predictions = predictions_of(record, parameters, overlap)
    measured = measured_iterations(record).set_index("run")
    exposed = exposed_shares(record).set_index("run")["exposed_ms"].to_dict()
    times = measured["time_ms"].to_dict()
    rows = []
    for run, made in predictions.items():
        row: dict[str, Any] = {
            "run": run,
            **{name: measured.at[run, name] for name in ("ranks", "batch_size", "sharding")},
            "measured_ms": times[run],
            "measured_exposed_ms": exposed.get(run, float("nan")),
        }
        if isinstance(made, str):
            rows.append(row | {"note": made})
            continue
        row |= {"low_ms": made.low_ms, "predicted_ms": made.mid_ms, "high_ms": made.high_ms}
        row["error"] = made.mid_ms / row["measured_ms"] - 1
        row["in_range"] = made.low_ms <= row["measured_ms"] <= made.high_ms
        rows.append(
            row | {"predicted_exposed_ms": made.communication_ms, "note": "; ".join(made.notices)}
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def predictions_of(
    record: ScalingRecord, parameters: Parameters, overlap: Overlap | None = None
) -> dict[int, Prediction | str]:
    """Run to its prediction, or to why there is none."""
    for name in ("link_probe", "compute_profile"):
        if record.tables[name].empty:
            raise InputError(f"{name} was not measured: {record.reasons[name]}")
    network = Network(calibrate(record.link_probe, "gloo, measured"))
    profile = own_profile(record)
    if overlap is None:
        overlap = SHARED_CORES
    made: dict[int, Prediction | str] = {}
    for _, run in record.runs.iterrows():
        if run["ranks"] < 2:
            continue
        number = int(run["run"])
        try:
            plan = _plan(record, parameters, run)
            made[number] = predict(
                *(parameters, plan.ranks, plan, network, profile, int(run["batch_size"])),
                overlap=overlap,
            )
        except InputError as error:
            made[number] = str(error)
    return made


def own_profile(record: ScalingRecord) -> ComputeProfile:
    """Costs on one rank, as the record measured them."""
    return measured_profile(record.compute_profile, "measured here")


def _plan(record: ScalingRecord, parameters: Parameters, run: pd.Series) -> Plan:
    """As the run had it, else as its name says."""
    placed = record.of_run("placement", int(run["run"]))
    ranks = int(run["ranks"])
    if not placed.empty:
        return plan_of_placement(parameters, placed, ranks)
    return make_plan(parameters, ranks, str(run["sharding"]), idle=True)


def typical_error(table: pd.DataFrame) -> float:
    """Geometric mean of predicted over measured or its reverse, less 1; NaN without runs."""
    errors = table["error"].dropna()
    return float(np.expm1(np.abs(np.log1p(errors)).mean())) if len(errors) else float("nan")
