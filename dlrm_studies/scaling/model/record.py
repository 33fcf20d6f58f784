"""What ranks measured of themselves: ``scaling.json`` as tables, and what follows from them.

The record's tables, keys of ``scaling.json``, are defined in ``record.csv``. At the end every run
of a record is predicted from its one-rank profile and link probe, beside what it measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.config import Parameters
from dlrm_studies.scaling.model.links import Link, Network, calibrate
from dlrm_studies.scaling.model.prediction import Setting, measured_profile
from dlrm_studies.scaling.model.sharding import make_plan, plan_of_placement
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.steady import undisturbed

FORMAT = "dlrm-scaling"
VERSION = 1

_LISTED = pd.read_csv(Path(__file__).with_name("record.csv"), keep_default_na=False)

TABLES: Mapping[str, tuple[str, ...]] = {
    str(name): tuple(rows["column"])
    for name, rows in _LISTED[_LISTED["needed"].eq("yes")].groupby("table", sort=False)
}
"""Table to the columns that it must have where it has rows."""


@dataclass(frozen=True)
class ScalingRecord:
    """The tables of one record; those not measured are empty.

    ``not_measured`` has name to reason.
    """

    tables: Mapping[str, pd.DataFrame]
    not_measured: Mapping[str, str] = field(default_factory=dict)
    checked: pd.DataFrame | None = None
    """Of a summary of several configurations: its runs beside their predictions, as
    :func:`predicted_and_measured` has them, with ``case`` in front."""

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name in TABLES:
            return self.tables[name]
        raise AttributeError(name)

    def of_run(self, name: str, run: int) -> pd.DataFrame:
        """The rows of a table that belong to one run."""
        table = self.tables[name]
        return table[table["run"] == run]

    def undisturbed(self, name: str) -> pd.DataFrame:
        """Rows of the faster half of every run's iterations."""
        keys = ["run", "iteration"]
        kept = undisturbed(self.tables["iterations"], keys[:1], keys[1])
        chosen = pd.MultiIndex.from_frame(kept[keys])
        table = self.tables[name]
        return table[pd.MultiIndex.from_frame(table[keys]).isin(chosen)]

    @property
    def last_of_several(self) -> int:
        """The last run of two ranks or more; -1 where there is none."""
        several = self.runs.loc[self.runs["ranks"] > 1, "run"].tolist()
        return int(several[-1]) if several else -1

    @property
    def reasons(self) -> dict[str, str]:
        """Every table without rows, with why."""
        return {
            name: self.not_measured.get(name, "the record has no rows of it")
            for name in TABLES
            if self.tables[name].empty
        }


def record_of(document: Mapping[str, Any], where: str = "scaling record") -> ScalingRecord:
    """The tables of a document.

    Raises:
        InputError: a table has rows without a column that it must have.
    """
    tables = {}
    for name, columns in TABLES.items():
        rows = document.get(name) or []
        table = pd.DataFrame(rows, columns=None if rows else list(columns))
        for column in columns:
            if column not in table.columns:
                raise InputError(f"{where}: {name} has no {column}, expected {', '.join(columns)}")
        tables[name] = table
    _name_gradients(tables["collectives"])
    return ScalingRecord(tables, dict(document.get("not_measured") or {}))


def _name_gradients(collectives: pd.DataFrame) -> None:
    """Name the exchange that autograd begins by itself, in the middle of a part's backward."""
    kinds = collectives["kind"].isin(["alltoall", "allgather"])
    collectives.loc[kinds & collectives["what"].eq("other"), "what"] = "pooled gradients"


def read_record(path: Path) -> ScalingRecord:
    """The record in a file.

    Raises:
        InputError: it cannot be read, is none, or of a newer version.
    """
    document = read_json(path)
    if isinstance(document, Mapping) and isinstance(document.get("cases"), Mapping):
        return _summary_of(document, str(path))
    if not isinstance(document, Mapping) or not any(name in document for name in TABLES):
        raise InputError(f"{path} is no record of {FORMAT}")
    version = document.get("version", VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise InputError(f"{path} has version {version}, this program reads up to {VERSION}")
    return record_of(document, str(path))


def _summary_of(document: Mapping[str, Any], where: str) -> ScalingRecord:
    """The record of a summary, such as ``benchmarks/results/scaling.json``.

    It has a run's time and its prediction, of several configurations; not what these rest on.

    Raises:
        InputError: a run lacks what it must have.
    """
    rows: list[dict[str, Any]] = []
    try:
        for case, measured in document["cases"].items():
            rows += [
                {"case": str(case), "run": len(rows) + i} | dict(run)
                for i, run in enumerate(measured["runs"])
            ]
        checked = pd.DataFrame(rows)[["case", *CHECK_COLUMNS]]
        first = next(iter(document["cases"].values()))
        base = len(first["runs"])
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        raise InputError(f"{where} is no summary of {FORMAT}") from None
    runs = checked.head(base)
    times = runs[["run", "measured_ms"]].rename(columns={"measured_ms": "time_ms"})
    why = f"{where} is a summary of {len(document['cases'])} configurations, without them"
    record = record_of(
        {
            "runs": runs[["run", "ranks", "batch_size", "sharding"]].to_dict("records"),
            "iterations": times.assign(rank=0, iteration=0).to_dict("records"),
            "not_measured": dict.fromkeys(TABLES, why),
        },
        where,
    )
    return replace(record, checked=checked)


def measured_iterations(record: ScalingRecord) -> pd.DataFrame:
    """Every run's time of an iteration, its speed-up and efficiency.

    An iteration's time is the mean over the ranks: they wait for each other, so one that is
    longer on a rank is made good by its next one there. A run's time is the mean of its faster
    half (:mod:`dlrm_workbook.ground.intervals`), its range from the fastest to the upper
    quartile of all.

    Returns:
        The columns of ``runs`` and those of ``dlrm help columns measured_iterations``.
    """
    if record.iterations.empty or record.runs.empty:
        measured = ("low_ms", "time_ms", "high_ms", "iterations")
        follows = ("samples_per_second", "speedup", "efficiency")
        return record.runs.reindex(columns=[*record.runs.columns, *measured, *follows]).head(0)
    means = record.iterations.groupby(["run", "iteration"])["time_ms"].mean()
    groups = means.groupby(level="run")
    times = pd.DataFrame(
        {
            "low_ms": groups.min(),
            "time_ms": record.undisturbed("iterations").groupby("run")["time_ms"].mean(),
            "high_ms": groups.quantile(0.75),
            "iterations": groups.size(),
        }
    )
    table = record.runs.merge(times, left_on="run", right_index=True, how="left")
    table["samples_per_second"] = 1e3 * table["batch_size"] / table["time_ms"]
    # the run of one rank with the same batch, or in weak scaling with the same batch on each
    weak = table.get("scaling", pd.Series("", table.index)).eq("weak")
    alike = table["batch_size"].where(~weak, table["batch_size"] / table["ranks"])
    alone = table[table["ranks"] == 1].drop_duplicates("batch_size").set_index("batch_size")
    table["speedup"] = table["samples_per_second"] / alike.map(alone["samples_per_second"])
    table["efficiency"] = table["speedup"] / table["ranks"]
    return table.reset_index(drop=True)


def shown_iteration(record: ScalingRecord, run: int) -> pd.DataFrame:
    """One iteration of a run, all ranks in one view: the fastest of those of which spans were kept.

    Returns:
        Columns as in ``dlrm help columns shown_iteration``; empty where no spans were kept.
    """
    columns = ["rank", "lane", "name", "phase", "start_ms", "end_ms"]
    spans = record.of_run("spans", run)
    if spans.empty:
        return pd.DataFrame(columns=columns)
    times = record.of_run("iterations", run).groupby("iteration")["time_ms"].mean()
    shown = times[times.index.isin(spans["iteration"])].idxmin()
    computed = spans[spans["iteration"] == shown].rename(columns={"component": "name"})
    exchanged = record.of_run("collectives", run)
    tables = [computed.assign(lane="compute")]
    if "start_ms" in exchanged.columns:
        sent = exchanged[exchanged["iteration"] == shown].rename(columns={"what": "name"})
        ends = sent["start_ms"] + sent["time_ms"]
        tables.append(sent.assign(lane="communication", phase="", end_ms=ends))
    return pd.concat([table[columns] for table in tables], ignore_index=True)


def parts_by_rank(record: ScalingRecord, run: int) -> pd.DataFrame:
    """Mean time of each part on each rank: ``rank``, ``component``, ``phase``, ``time_ms``.

    Of the iterations whose mean is the run's time, so that parts add up to it.
    """
    parts = _parts_of_ranks(record)
    return parts[parts["run"] == run].drop(columns="run").reset_index(drop=True)


def _parts_of_ranks(record: ScalingRecord) -> pd.DataFrame:
    """:func:`parts_by_rank` of all runs, with ``run`` in front."""
    rows = record.undisturbed("parts")
    count = rows.groupby(["run", "rank"])["iteration"].nunique().rename("count")
    keys = ["run", "rank", "component", "phase"]
    total = rows.groupby(keys)["time_ms"].sum().reset_index().join(count, on=["run", "rank"])
    return total[keys].assign(time_ms=total["time_ms"] / total["count"])


def imbalance(record: ScalingRecord) -> pd.DataFrame:
    """How uneven the ranks' own work is, communication left out.

    Returns:
        Columns as in ``dlrm help columns imbalance``.
    """
    parts = _parts_of_ranks(record)
    working = parts[parts["component"] != "communication"]
    rows = []
    for run, of_run in working.groupby("run"):
        wide = of_run.pivot_table("time_ms", "component", "rank", aggfunc="sum", fill_value=0.0)
        busy = wide.sum()
        if len(busy) < 2:
            continue
        slowest, worst, mean = busy.idxmax(), float(busy.max()), float(busy.mean())
        share = (worst - mean) / worst if worst > 0 else 0.0
        most = str((wide[slowest] - wide.mean(axis=1)).idxmax())
        rows.append((run, len(busy), slowest, worst, mean, share, most))
    columns = ["run", "ranks", "slowest_rank", "slowest_ms", "mean_ms", "share", "component"]
    return pd.DataFrame(rows, columns=columns)


def exchange_times(record: ScalingRecord) -> pd.DataFrame:
    """What each exchange of an iteration took, and how much of it was waited for.

    Returns:
        Columns as in ``dlrm help columns exchange_times``.
    """
    columns = [
        *("run", "ranks", "sharding", "kind", "what", "bytes", "time_ms", "exposed_ms"),
        *("hidden_ms", "calls", "gb_per_s", "share"),
    ]
    if record.collectives.empty:
        return pd.DataFrame(columns=columns)
    keys = ["run", "kind", "what"]
    rows = record.undisturbed("collectives")
    counted = rows.groupby("run")[["rank", "iteration"]].apply(lambda t: len(t.drop_duplicates()))
    sums = rows.groupby(keys)[["bytes", "time_ms", "exposed_ms"]].sum()
    sums["calls"] = rows.groupby(keys).size()
    table = sums.reset_index()
    per = table["run"].map(counted)
    for name in ("bytes", "time_ms", "exposed_ms", "calls"):
        table[name] = table[name] / per
    table["exposed_ms"] = table[["exposed_ms", "time_ms"]].min(axis=1)
    table["hidden_ms"] = table["time_ms"] - table["exposed_ms"]
    table["gb_per_s"] = 1e-6 * table["bytes"] / table["time_ms"].where(table["time_ms"] > 0)
    whole = measured_iterations(record).set_index("run")["time_ms"]
    table["share"] = table["exposed_ms"] / table["run"].map(whole)
    return table.merge(record.runs[["run", "ranks", "sharding"]], on="run", how="left")[columns]


def exposed_shares(record: ScalingRecord) -> pd.DataFrame:
    """Part of every run's iteration that is communication nobody hides.

    Returns:
        ``run``, ``compute_ms``, ``exposed_ms``, ``share``: means over ranks of the parts, and
        of "communication" among them.
    """
    parts = _parts_of_ranks(record)
    talks = parts["component"].eq("communication")
    ranks = parts.groupby("run")["rank"].nunique()
    exposed, compute = (
        parts["time_ms"].where(kind, 0.0).groupby(parts["run"]).sum() / ranks
        for kind in (talks, ~talks)
    )
    share = exposed / (compute + exposed)
    table = pd.DataFrame({"compute_ms": compute, "exposed_ms": exposed, "share": share})
    return table.reset_index()


# Predicted beside measured: every run of a record, from its one-rank profile and link probe.

CHECK_COLUMNS = [
    *("run", "ranks", "batch_size", "sharding", "measured_ms", "low_ms", "predicted_ms", "high_ms"),
    *("error", "in_range", "measured_exposed_ms", "predicted_exposed_ms", "note"),
]


def predicted_and_measured(record: ScalingRecord, parameters: Parameters) -> pd.DataFrame:
    """Every run of two ranks or more, predicted from what was measured apart from it.

    The prediction knows the link probe and the compute profile, which took turns with the runs;
    nothing of the run itself but its settings. Ranks on CPUs move bytes with the cores that
    compute, so that nothing is hidden.

    Args:
        parameters: of the record.

    Returns:
        Columns as in ``dlrm help columns predicted_and_measured``; empty, with the reason, where
        no link or no process was measured alone.

    Raises:
        InputError: link probe or compute profile cannot be used.
    """
    if record.checked is not None:
        return record.checked
    for name in ("link_probe", "compute_profile"):
        if record.tables[name].empty:
            return unmeasured(CHECK_COLUMNS, f"no {name.replace('_', ' ')}: {record.reasons[name]}")
    network = Network(calibrate(record.link_probe, "gloo, measured"))
    setting = Setting(parameters, network, measured_profile(record.compute_profile), hidden=False)
    exposed = exposed_shares(record).set_index("run")["exposed_ms"]
    rows = []
    for run in measured_iterations(record).to_dict("records"):
        if run["ranks"] < 2:
            continue
        measured = float(run["time_ms"])
        row = {name: run[name] for name in ("run", "ranks", "batch_size", "sharding")} | {
            "measured_ms": measured,
            "measured_exposed_ms": exposed.get(run["run"], math.nan),
        }
        try:
            # as the run had it, else as its name says
            placed, ranks = record.of_run("placement", int(run["run"])), int(run["ranks"])
            plan = (
                make_plan(parameters, ranks, str(run["sharding"]), idle=True)
                if placed.empty
                else plan_of_placement(parameters, placed, ranks)
            )
            prediction = setting.predict(plan, int(run["batch_size"]))
        except InputError as error:
            rows.append(row | {"note": str(error)})
            continue
        low, mid, high = prediction.time_ms
        rows.append(
            row
            | {"low_ms": low, "predicted_ms": mid, "high_ms": high}
            | {"error": mid / measured - 1, "in_range": low <= measured <= high}
            | {"predicted_exposed_ms": prediction.communication_ms}
            | {"note": "; ".join(prediction.notices)}
        )
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)


def own_link(record: ScalingRecord, name: str) -> Link | None:
    """The link between the record's ranks; None if too little of it was measured."""
    try:
        return calibrate(record.link_probe, name) if len(record.link_probe) else None
    except InputError:
        return None


def typical_error(table: pd.DataFrame) -> float:
    """Geometric mean of predicted over measured or its reverse, less 1; NaN without runs."""
    errors = table["error"].dropna()
    return float(np.expm1(np.abs(np.log1p(errors)).mean())) if len(errors) else float("nan")
