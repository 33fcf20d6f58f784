"""Which sharding is fastest on so many ranks, and what follows: memory, scaling, slow ranks.

Every sharding by its name is predicted; from the fastest that fits, tables are then changed
one kind at a time (alike tables together, largest first) as long as the prediction gains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.text import counted, format_bytes
from dlrm_core.config import Parameters
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_kernels.memory import dense_peak
from dlrm_studies.scaling.model.communication import (
    FLOAT_BYTES,
    INDEX_BYTES,
    dense_parameters,
    kind_label,
)
from dlrm_studies.scaling.model.prediction import Prediction, Setting
from dlrm_studies.scaling.model.sharding import KINDS, SHARDINGS, Plan, make_plan
from dlrm_workbook.ground.units import milliseconds

# Memory of every rank: weights, optimiser state, gradients, activations, what is exchanged.


def rank_memory(parameters: Parameters, plan: Plan, batch_size: int) -> pd.DataFrame:
    """Bytes on each rank while an iteration of ``batch_size`` samples over all ranks runs.

    With B samples, R ranks, P dense weights: dense part 4 P of weights, 4 P of gradients and
    the optimiser's state; activations of B/R samples (:mod:`dlrm_kernels.memory`); pooled
    vectors and their gradients, those a rank makes (4 B times its columns) and those it
    receives (4 B/R T d), each twice; indices of its own samples and of its own tables, 8 bytes
    each; with replicated tables a dense gradient of their size. What allocators and libraries
    take is not in it.

    Returns:
        One row per rank; columns as :func:`memory_extremes`.
    """
    ranks, dim = plan.ranks, plan.dim
    tables = plan.table_bytes()
    dense = FLOAT_BYTES * dense_parameters(parameters)
    samples = -(-batch_size // ranks)
    local = parameters.with_training(batch_size=samples)
    peak = dense_peak(local, gpu=True)
    columns = plan.columns_sent() + dim * len(plan.of_kind("row_wise"))
    received = samples * dim * len(plan.tables)
    looked_up = sum(plan.lookups)
    share = _lookups_of_ranks(plan)
    indices = INDEX_BYTES * (samples * (looked_up + len(plan.tables)) + batch_size * share)
    copies = FLOAT_BYTES * dim * sum(table.rows for table in plan.of_kind("replicated"))
    frame = pd.DataFrame(
        {
            "rank": np.arange(ranks),
            "table_bytes": tables,
            "dense_bytes": dense,
            "state_bytes": _state(parameters, plan, tables, dense),
            "gradient_bytes": dense + copies,
            "activation_bytes": peak.activations + peak.gradients,
            "exchange_bytes": 2 * FLOAT_BYTES * (batch_size * columns + received) + indices,
        }
    ).astype(np.int64)
    frame["total_bytes"] = frame.drop(columns="rank").sum(axis=1)
    return frame


def _state(parameters: Parameters, plan: Plan, tables: np.ndarray, dense: int) -> np.ndarray:
    kind = OPTIMIZERS[parameters.training.optimizer]
    if kind.per_row:
        # a number a row; a column slice has as many rows as its table
        return FLOAT_BYTES * plan.on_ranks(lambda table: table.shard_rows, *KINDS) + dense
    return float(kind.row_state(plan.dim) // plan.dim) * tables + kind.dense_state * dense


def _lookups_of_ranks(plan: Plan) -> np.ndarray:
    """Indices and lengths that each rank gets for one sample of the global batch."""
    return plan.on_ranks(
        # of a row-wise table each owner gets the indices of its rows
        lambda table: (
            plan.lookups[table.table]
            * (table.shard_rows / table.rows if table.kind == "row_wise" else 1)
            + 1
        ),
        *("table_wise", "column_wise", "row_wise"),
    )


def memory_extremes(
    parameters: Parameters, plans: Mapping[str, Plan], batch_size: int
) -> pd.DataFrame:
    """Memory of the fullest and of the emptiest rank of each plan.

    Args:
        plans: name to plan.

    Returns:
        Columns as in ``dlrm help columns memory_extremes``.
    """
    tables = []
    for name, plan in plans.items():
        ranks = rank_memory(parameters, plan, batch_size)
        most, least = ranks["total_bytes"].idxmax(), ranks["total_bytes"].idxmin()
        ends = ranks.loc[[most, least]].assign(place=[f"fullest: {most}", f"emptiest: {least}"])
        if ends["total_bytes"].nunique() == 1:
            ends = ends.head(1).assign(place="every rank")
        tables.append(ends.assign(sharding=name))
    return pd.concat(tables, ignore_index=True)


LEAST_GAIN = 0.01
"""A change that gains less is not worth a plan with another kind in it."""


@dataclass(frozen=True)
class Choice:
    """The fastest plan that fits.

    Attributes:
        prediction: of that plan; None if none fits.
        candidates: ``sharding``, ``mid_ms``, ``low_ms``, ``high_ms``, ``exposed_ms``,
            ``memory_bytes`` (the fullest rank's), ``note`` (why it is out, or what it moves).
        reason: one sentence.
    """

    prediction: Prediction | None
    candidates: pd.DataFrame
    reason: str


def fullest(setting: Setting, plan: Plan, batch: int) -> float:
    """Bytes of the rank that needs most."""
    return float(rank_memory(setting.parameters, plan, batch)["total_bytes"].max())


def best_sharding(setting: Setting, ranks: int, batch_size: int | None = None) -> Choice:
    """The fastest sharding on so many ranks, and why.

    Raises:
        InputError: fewer samples than ranks.
    """
    batch = batch_size or setting.parameters.training.batch_size
    room = math.inf if setting.memory_bytes is None else setting.memory_bytes
    fitting: dict[str, Prediction] = {}
    rows = []
    for name in SHARDINGS:
        plan = make_plan(setting.parameters, ranks, name, idle=True)
        if plan.name != name and name == "mixed":
            continue  # it came out as one of the others
        prediction, needed = setting.predict(plan, batch), fullest(setting, plan, batch)
        if needed <= room:
            fitting[name] = prediction
            note = _moved(prediction)
        else:
            note = f"needs {format_bytes(needed)} on one rank, which has {format_bytes(room)}"
        rows.append(_candidate(name, prediction, needed, note))
    if not fitting:
        return Choice(None, pd.DataFrame(rows), f"No sharding fits on {ranks} ranks.")
    best = min(fitting.values(), key=lambda prediction: prediction.mid_ms)
    plan = _improved(setting, best.plan, batch, room)
    if plan is not best.plan:
        best = setting.predict(plan, batch)
        rows.append(_candidate(_spelt(plan), best, fullest(setting, plan, batch), _moved(best)))
    return Choice(best, pd.DataFrame(rows), _reason(best, fitting))


def _improved(setting: Setting, best: Plan, batch: int, room: float) -> Plan:
    """Greedy: the kind of alike tables changed, largest first, while it gains and fits."""
    if best.ranks == 1:
        return best
    least = setting.step_ms(best, batch)
    groups: dict[tuple[int, float], list[int]] = {}
    for table in best.tables:
        groups.setdefault((table.rows, best.lookups[table.table]), []).append(table.table)
    kinds = [table.kind for table in best.tables]
    for (rows, _), members in sorted(groups.items(), reverse=True):
        for kind in KINDS:
            changed = [kind if t in members else kinds[t] for t in range(len(kinds))]
            # no copies that are larger than memory by themselves
            if changed == kinds or (kind == "replicated" and FLOAT_BYTES * rows * best.dim > room):
                continue
            plan = make_plan(setting.parameters, best.ranks, changed, idle=True)
            time = setting.step_ms(plan, batch)
            if time < (1 - LEAST_GAIN) * least and fullest(setting, plan, batch) <= room:
                best, least, kinds = plan, time, changed
    return best


def _candidate(name: str, prediction: Prediction, needed: float, note: str) -> dict[str, object]:
    names = ("mid_ms", "low_ms", "high_ms", "exposed_ms")
    times = {figure: getattr(prediction, figure) for figure in names}
    return {"sharding": name, **times, "memory_bytes": needed, "note": note}


def _spelt(plan: Plan) -> str:
    counts = {kind: len(plan.of_kind(kind)) for kind in KINDS}
    return " and ".join(f"{count} {kind_label(kind)}" for kind, count in counts.items() if count)


def _moved(prediction: Prediction) -> str:
    if prediction.exchanges.empty:
        return "nothing is exchanged"
    most = prediction.exchanges.nlargest(1, "mid_ms").iloc[0]
    idle = prediction.plan.idle_ranks
    return (f"{_without_table(idle)}; " if idle else "") + (
        f"longest exchange: {kind_label(most['collective'])} of {most['what']}, "
        f"{format_bytes(most['bytes'])} per rank, {milliseconds(most['mid_ms'])}"
    )


def _without_table(ranks: int) -> str:
    return f"{counted(ranks, 'rank')} {'holds' if ranks == 1 else 'hold'} no table"


def _reason(best: Prediction, fitting: dict[str, Prediction]) -> str:
    if best.ranks == 1:
        return "One rank has everything: nothing is exchanged."
    others = {name: prediction for name, prediction in fitting.items() if prediction is not best}
    text = (
        f"{_spelt(best.plan)} {'table takes' if len(best.plan.tables) == 1 else 'tables take'} "
        f"{milliseconds(best.mid_ms)} per iteration, {milliseconds(best.exposed_ms)} of it "
        "exposed communication"
    )
    if others:
        near = min(others, key=lambda name: others[name].mid_ms)
        text += (
            f"; {kind_label(near)}, the next best, takes {milliseconds(others[near].mid_ms)} "
            f"({milliseconds(others[near].exposed_ms)} exposed)"
        )
    if best.plan.idle_ranks:
        text += f"; {_without_table(best.plan.idle_ranks)}"
    return text + "."


def scaling_table(
    setting: Setting,
    rank_counts: Sequence[int],
    scaling: str = "strong",
    sharding: str | None = None,
    batch_size: int | None = None,
) -> pd.DataFrame:
    """Predicted iterations on several numbers of ranks.

    Args:
        scaling: ``strong`` (``batch_size`` over all ranks) or ``weak`` (of each rank).
        sharding: a name; None: the best on each number.

    Returns:
        Columns as in ``dlrm help columns scaling_table``.

    Raises:
        InputError: ``scaling`` is neither.
    """
    if scaling not in ("strong", "weak"):
        raise InputError(f"scaling is {scaling!r}, expected strong or weak")
    base = batch_size or setting.parameters.training.batch_size
    one = setting.predict(make_plan(setting.parameters, 1, "table_wise"), base)
    rows = []
    for ranks in rank_counts:
        batch = base * ranks if scaling == "weak" else base
        row: dict[str, object] = {"ranks": ranks, "scaling": scaling, "batch_size": batch}
        try:
            prediction, note = _predicted(setting, ranks, batch, sharding)
        except InputError as error:
            rows.append(row | {"note": str(error), "why_not": str(error)})
            continue
        rows.append(
            row
            | {name: getattr(prediction, name) for name in PREDICTED_FIGURES}
            | {"sharding": prediction.plan.name, "note": note, "why_not": ""}
            | {"memory_bytes": fullest(setting, prediction.plan, batch)}
        )
    table = pd.DataFrame(rows, columns=SCALING_COLUMNS)
    table["exposed_share"] = table["exposed_ms"] / table["mid_ms"]
    table["speedup"] = table["samples_per_second"] / one.samples_per_second
    table["efficiency"] = table["speedup"] / table["ranks"]
    return table


PREDICTED_FIGURES = [
    *("low_ms", "mid_ms", "high_ms", "compute_ms", "exposed_ms", "samples_per_second")
]

SCALING_COLUMNS = [
    *("ranks", "scaling", "batch_size", "sharding", *PREDICTED_FIGURES, "exposed_share", "speedup"),
    *("efficiency", "memory_bytes", "note", "why_not"),
]


def _predicted(
    setting: Setting, ranks: int, batch: int, sharding: str | None
) -> tuple[Prediction, str]:
    if sharding is not None:
        return setting.predict(make_plan(setting.parameters, ranks, sharding), batch), ""
    if batch < ranks:
        raise InputError(f"{batch} samples cannot be divided among {ranks} ranks")
    choice = best_sharding(setting, ranks, batch)
    if choice.prediction is None:
        raise InputError(choice.reason)
    return choice.prediction, choice.reason


# What slow ranks cost: a synchronous step takes as long as its slowest rank.


@dataclass(frozen=True)
class Slowness:
    """How ranks differ, by chance.

    Attributes:
        jitter: relative standard deviation of a rank's compute from iteration to iteration
            (log-normal, of mean 1).
        hiccups: probability that a rank is held up in an iteration.
        hiccup: how many times as long its compute takes then.
    """

    jitter: float = 0.05
    hiccups: float = 0.0
    hiccup: float = 2.0

    def __post_init__(self) -> None:
        for name, low in (("jitter", 0.0), ("hiccups", 0.0), ("hiccup", 1.0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least {low:g}")
        if self.hiccups > 1:
            raise InputError(f"hiccups is {self.hiccups}, expected a probability up to 1")


def simulate(ranks: int, slowness: Slowness, iterations: int = 400, seed: int = 0) -> np.ndarray:
    """Compute of each rank in each iteration over that of one that nothing slows.

    Returns:
        (iterations, ranks), of mean 1 where there are no hiccups.
    """
    rng = np.random.default_rng(seed)
    times = np.ones((iterations, ranks))
    if slowness.jitter > 0:
        sigma = np.sqrt(np.log1p(slowness.jitter**2))
        times = rng.lognormal(-(sigma**2) / 2, sigma, times.shape)
    if slowness.hiccups > 0:
        times *= np.where(rng.random(times.shape) < slowness.hiccups, slowness.hiccup, 1.0)
    return times


def straggler_table(
    compute_ms: Sequence[float],
    exchange_ms: Sequence[float],
    rank_counts: Sequence[int],
    slowness: Slowness,
    iterations: int = 400,
    seed: int = 0,
) -> pd.DataFrame:
    """What ranks of several numbers wait for each other, each with its own predicted times.

    All ranks compute (:func:`simulate`), then wait for the slowest and exchange.

    Args:
        compute_ms: of one rank that nothing slows.
        exchange_ms: exposed time of the collectives once all ranks are there.

    Returns:
        Columns as in ``dlrm help columns straggler_table``.
    """
    rows = []
    for compute, exchange, ranks in zip(compute_ms, exchange_ms, rank_counts, strict=True):
        times = compute * simulate(ranks, slowness, iterations, seed)
        slowest = times.max(axis=1)
        mean, even = float(slowest.mean()) + exchange, compute + exchange
        waited = float((slowest - times.mean(axis=1)).mean())
        p95 = float(np.quantile(slowest, 0.95)) + exchange
        rows.append((ranks, even, mean, p95, waited / mean, mean / even - 1))
    columns = ["ranks", "even_ms", "mean_ms", "p95_ms", "waited_share", "slowdown"]
    return pd.DataFrame(rows, columns=columns)
