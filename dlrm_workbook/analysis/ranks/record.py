"""What ranks measured of themselves: ``scaling.json`` as tables, and what follows from them.

The record's tables are defined in :mod:`.communication`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from dlrm_core.errors import InputError
from dlrm_core.files import read_json
from dlrm_workbook.analysis.intervals import undisturbed

TABLES: Mapping[str, tuple[str, ...]] = {
    "runs": ("run", "ranks", "batch_size", "sharding"),
    "placement": ("run", "table", "kind", "rank", "rows", "columns"),
    "iterations": ("run", "rank", "iteration", "time_ms"),
    "parts": ("run", "rank", "iteration", "component", "phase", "time_ms"),
    "collectives": ("run", "rank", "iteration", "kind", "what", "bytes", "time_ms", "exposed_ms"),
    "spans": ("run", "rank", "iteration", "component", "phase", "start_ms", "end_ms"),
    "link_probe": ("collective", "ranks", "bytes", "time_ms"),
    "compute_profile": ("concurrent", "batch_size", "component", "phase", "time_ms"),
}
"""Table to the columns that it must have where it has rows. ``spans``: when the step's thread
was in which part, of a few iterations."""


@dataclass(frozen=True)
class ScalingRecord:
    """The tables of one record; those not measured are empty.

    ``not_measured`` has name to reason.
    """

    tables: Mapping[str, pd.DataFrame]
    machine: Mapping[str, Any] = field(default_factory=dict)
    not_measured: Mapping[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name in TABLES:
            return self.tables[name]
        raise AttributeError(name)

    def of_run(self, name: str, run: int) -> pd.DataFrame:
        """The rows of a table that belong to one run."""
        table = self.tables[name]
        return table[table["run"] == run]

    def undisturbed(self, name: str) -> pd.DataFrame:
        """Rows of the faster half of every run's iterations (:mod:`.undisturbed`)."""
        keys = ["run", "iteration"]
        kept = undisturbed(self.tables["iterations"], keys[:1], keys[1])
        chosen = pd.MultiIndex.from_frame(kept[keys])
        table = self.tables[name]
        return table[pd.MultiIndex.from_frame(table[keys]).isin(chosen)]

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
    return ScalingRecord(
        tables, document.get("machine") or {}, dict(document.get("not_measured") or {})
    )


def _name_gradients(collectives: pd.DataFrame) -> None:
    """Name the exchange that autograd begins by itself, in the middle of a part's backward."""
    kinds = collectives["kind"].isin(["alltoall", "allgather"])
    collectives.loc[kinds & collectives["what"].eq("other"), "what"] = "pooled gradients"


def read_record(path: Path) -> ScalingRecord:
    """The record in a file.

    Raises:
        InputError: it cannot be read, or is none.
    """
    document = read_json(path)
    if not isinstance(document, Mapping):
        raise InputError(f"{path}: holds a {type(document).__name__}, expected a scaling record")
    return record_of(document, str(path))


def measured_iterations(record: ScalingRecord) -> pd.DataFrame:
    """Every run's time of an iteration, its speed-up and efficiency.

    An iteration's time is the mean over the ranks: they wait for each other, so one that is
    longer on a rank is made good by its next one there. A run's time is the mean of its faster
    half (:mod:`.undisturbed`), its range from the fastest to the upper quartile of all.

    Returns:
        The columns of ``runs`` and ``low_ms``, ``time_ms``, ``high_ms``, ``iterations``,
        ``samples_per_second``, ``speedup`` and ``efficiency`` (over ranks) against the run of
        one rank with the same batch (strong) or the same batch a rank (weak); NaN without one.
    """
    if record.iterations.empty or record.runs.empty:
        columns = [*record.runs.columns, *_MEASURED]
        return pd.DataFrame(columns=list(dict.fromkeys(columns)))
    each = record.iterations.groupby(["run", "iteration"])["time_ms"].mean()
    groups = each.groupby(level="run")
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
    base = [_base(table, row) for _, row in table.iterrows()]
    table["speedup"] = table["samples_per_second"] / np.array(base)
    table["efficiency"] = table["speedup"] / table["ranks"]
    return table.reset_index(drop=True)


_MEASURED = [
    *("low_ms", "time_ms", "high_ms", "iterations", "samples_per_second", "speedup", "efficiency")
]


def _base(table: pd.DataFrame, row: pd.Series) -> float:
    """Samples a second of the one-rank run that a run is compared with."""
    batch = row["batch_size"]
    if row.get("scaling") == "weak":
        batch = batch / row["ranks"]
    one = table[(table["ranks"] == 1) & (table["batch_size"] == batch)]
    return float(one["samples_per_second"].iloc[0]) if len(one) else math.nan


def shown_iteration(record: ScalingRecord, run: int) -> pd.DataFrame:
    """One iteration of a run, all ranks in one view: the fastest of those of which spans were kept.

    Returns:
        ``rank``, ``lane`` ("compute" or "communication"), ``name`` (component, or what is
        exchanged), ``phase``, ``start_ms``, ``end_ms``: since that rank's iteration began.
        Empty where no spans were kept.
    """
    columns = ["rank", "lane", "name", "phase", "start_ms", "end_ms"]
    spans = record.of_run("spans", run)
    if spans.empty:
        return pd.DataFrame(columns=columns)
    times = record.of_run("iterations", run).groupby("iteration")["time_ms"].mean()
    shown = times[times.index.isin(spans["iteration"])].idxmin()
    own = spans[spans["iteration"] == shown].rename(columns={"component": "name"})
    exchanged = record.of_run("collectives", run)
    tables = [own.assign(lane="compute")]
    if "start_ms" in exchanged.columns:
        sent = exchanged[exchanged["iteration"] == shown].rename(columns={"what": "name"})
        ends = sent["start_ms"] + sent["time_ms"]
        tables.append(sent.assign(lane="communication", phase="", end_ms=ends))
    return pd.concat([table[columns] for table in tables], ignore_index=True)


def parts_by_rank(record: ScalingRecord, run: int) -> pd.DataFrame:
    """Mean time of each part on each rank: ``rank``, ``component``, ``phase``, ``time_ms``.

    Of the iterations whose mean is the run's time, so that parts add up to it.
    """
    rows = record.undisturbed("parts")
    rows = rows[rows["run"] == run]
    keys = ["rank", "component", "phase"]
    count = rows.groupby("rank")["iteration"].nunique().rename("count")
    total = rows.groupby(keys)["time_ms"].sum().reset_index().join(count, on="rank")
    total["time_ms"] = total["time_ms"] / total["count"]
    return total[[*keys, "time_ms"]]


def imbalance(record: ScalingRecord) -> pd.DataFrame:
    """How uneven the ranks' own work is, communication left out.

    Returns:
        ``run``, ``ranks``, ``slowest_rank``, ``slowest_ms``, ``mean_ms``, ``share``
        ((slowest − mean) / slowest: what the others wait for), ``component`` (the part in which
        the slowest rank is furthest above the mean).
    """
    rows = []
    for run in record.runs["run"]:
        parts = parts_by_rank(record, int(run))
        own = parts[~parts["component"].isin(["communication"])]
        busy = own.groupby("rank")["time_ms"].sum()
        if len(busy) < 2:
            continue
        slowest = int(cast(int, busy.idxmax()))
        wide = own.pivot_table(
            "time_ms", "component", "rank", aggfunc="sum", fill_value=0.0, observed=True
        )
        above = wide[slowest] - wide.mean(axis=1)
        worst, mean = float(busy.max()), float(busy.mean())
        rows.append(
            {
                "run": int(run),
                "ranks": len(busy),
                "slowest_rank": slowest,
                "slowest_ms": worst,
                "mean_ms": mean,
                "share": (worst - mean) / worst if worst > 0 else 0.0,
                "component": str(above.idxmax()),
            }
        )
    columns = ["run", "ranks", "slowest_rank", "slowest_ms", "mean_ms", "share", "component"]
    return pd.DataFrame(rows, columns=columns)


def exchange_times(record: ScalingRecord) -> pd.DataFrame:
    """What each exchange of an iteration took, and how much of it was waited for.

    Returns:
        ``run``, ``kind``, ``what``, ``bytes`` (an iteration, mean over ranks), ``time_ms``
        (sum of an iteration's, mean over ranks), ``exposed_ms``, ``hidden_ms``, ``calls`` (an
        iteration), ``gb_per_s`` (payload over time), ``share`` (exposed time over the run's
        iteration).
    """
    columns = [
        *("run", "kind", "what", "bytes", "time_ms", "exposed_ms", "hidden_ms", "calls"),
        *("gb_per_s", "share"),
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
    return table[columns]


def exposed_shares(record: ScalingRecord) -> pd.DataFrame:
    """Part of every run's iteration that is communication nobody hides.

    Returns:
        ``run``, ``compute_ms``, ``exposed_ms``, ``share``: means over ranks of the parts, and
        of "communication" among them.
    """
    rows = []
    for run in record.runs["run"]:
        parts = parts_by_rank(record, int(run))
        if parts.empty:
            continue
        talks = parts["component"].eq("communication")
        ranks = parts["rank"].nunique()
        exposed = float(parts.loc[talks, "time_ms"].sum()) / ranks
        compute = float(parts.loc[~talks, "time_ms"].sum()) / ranks
        rows.append((int(run), compute, exposed, exposed / (compute + exposed)))
    return pd.DataFrame(rows, columns=["run", "compute_ms", "exposed_ms", "share"])


# What slow ranks cost: a synchronous step takes as long as its slowest rank.


@dataclass(frozen=True)
class Slowness:
    """How ranks differ, by chance.

    Attributes:
        jitter: relative standard deviation of a rank's compute from iteration to iteration
            (log-normal, of mean 1).
        spread: the same from rank to rank, for a whole run: uneven machines.
        hiccups: probability that a rank is held up in an iteration.
        hiccup: how many times as long its compute takes then.
    """

    jitter: float = 0.05
    spread: float = 0.0
    hiccups: float = 0.0
    hiccup: float = 2.0

    def __post_init__(self) -> None:
        for name, low in (("jitter", 0.0), ("spread", 0.0), ("hiccups", 0.0), ("hiccup", 1.0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least {low:g}")
        if self.hiccups > 1:
            raise InputError(f"hiccups is {self.hiccups}, expected a probability up to 1")


def simulate(
    compute_ms: float,
    exchange_ms: float,
    ranks: int,
    slowness: Slowness,
    iterations: int = 400,
    seed: int = 0,
) -> pd.DataFrame:
    """Iterations of ``ranks`` ranks that all compute, then wait for each other and exchange.

    Args:
        compute_ms: of one rank that nothing slows.
        exchange_ms: exposed time of the collectives once all ranks are there.

    Returns:
        ``iteration``, ``slowest_ms`` (compute of the slowest rank), ``mean_ms`` (of all),
        ``waited_ms`` (mean time a rank waits for the slowest), ``time_ms``, ``slowest_rank``.
    """
    if ranks < 1 or iterations < 1:
        raise InputError(f"ranks is {ranks}, iterations {iterations}; expected at least 1 each")
    rng = np.random.default_rng(seed)
    times = compute_ms * _log_normal(rng, slowness.jitter, (iterations, ranks))
    times *= _log_normal(rng, slowness.spread, (ranks,))
    if slowness.hiccups > 0:
        times *= np.where(rng.random((iterations, ranks)) < slowness.hiccups, slowness.hiccup, 1.0)
    slowest = times.max(axis=1)
    return pd.DataFrame(
        {
            "iteration": np.arange(iterations),
            "slowest_ms": slowest,
            "mean_ms": times.mean(axis=1),
            "waited_ms": slowest - times.mean(axis=1),
            "time_ms": slowest + exchange_ms,
            "slowest_rank": times.argmax(axis=1),
        }
    )


def _log_normal(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> np.ndarray:
    """Factors of mean 1 and this relative standard deviation."""
    if deviation == 0:
        return np.ones(shape)
    sigma = np.sqrt(np.log1p(deviation**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, shape)


def straggler_table(
    compute_ms: Sequence[float],
    exchange_ms: Sequence[float],
    rank_counts: Sequence[int],
    slowness: Slowness,
    iterations: int = 400,
    seed: int = 0,
) -> pd.DataFrame:
    """:func:`simulate` for several numbers of ranks, each with its own predicted times.

    Returns:
        ``ranks``, ``even_ms`` (no rank slower than another), ``mean_ms``, ``p95_ms``,
        ``waited_share`` (of the mean iteration, for the slowest rank), ``loss`` (mean over
        even, less 1).
    """
    rows = []
    for compute, exchange, ranks in zip(compute_ms, exchange_ms, rank_counts, strict=True):
        run = simulate(compute, exchange, ranks, slowness, iterations, seed)
        mean, even = float(run["time_ms"].mean()), compute + exchange
        rows.append(
            {
                "ranks": ranks,
                "even_ms": even,
                "mean_ms": mean,
                "p95_ms": float(run["time_ms"].quantile(0.95)),
                "waited_share": float(run["waited_ms"].mean()) / mean,
                "loss": mean / even - 1,
            }
        )
    return pd.DataFrame(rows)
