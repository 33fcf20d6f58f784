"""Time of an iteration on any number of ranks, before it has run on more than one.

Computing: a part's cost on one rank (:mod:`.compute_profile`) for the samples it has there:
the dense part for its share of the batch, the tables for the work that the plan puts on the
rank with most. Exchanging: bytes (:mod:`.communication`) on a network (:mod:`.links`). Both
on two lanes (:mod:`.rank_schedule`); what is waited for is exposed. All ranks wait for the
slowest at the end of each stretch between exchanges: as long as the expected largest of R draws
of that stretch's own deviation.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import pandas as pd

from dlrm_core.analysis.communication import dense_parameters, exchanges
from dlrm_core.analysis.compute_profile import ComputeProfile
from dlrm_core.analysis.links import NOTHING, Network, Range
from dlrm_core.analysis.rank_schedule import (
    BUCKET_BYTES,
    Overlap,
    Schedule,
    dense_exposed,
    deviation_ms,
    schedule,
)
from dlrm_core.analysis.sharding import Plan, make_plan
from dlrm_core.config import Parameters

MODEL_ERROR = 0.05
"""Relative error of the whole prediction beside those of its inputs: what is not modelled
(caches, other ranks' timing, a library's choice of algorithm)."""

COVER = 1.64

Part = tuple[str, str]

PART_COLUMNS = ["component", "phase", "kind", "low_ms", "mid_ms", "high_ms"]

EXCHANGE_COLUMNS = [
    *("collective", "what", "phase", "bytes", "low_ms", "mid_ms", "high_ms", "link")
]

WAITING = "waiting for the slowest rank"


@dataclass(frozen=True)
class Prediction:
    """One iteration on ``ranks`` ranks, in ms.

    Attributes:
        parts: ``component``, ``phase``, ``kind`` ("compute" or "exposed"), ``low_ms``,
            ``mid_ms``, ``high_ms``; rows of communication have what is exchanged as phase.
        exchanges: ``collective``, ``what``, ``phase``, ``bytes``, ``low_ms``, ``mid_ms``,
            ``high_ms`` (of the whole exchange, hidden or not), ``link``.
        schedule: the slowest rank's two lanes.
    """

    ranks: int
    batch_size: int
    plan: Plan
    low_ms: float
    mid_ms: float
    high_ms: float
    parts: pd.DataFrame
    exchanges: pd.DataFrame
    schedule: Schedule
    notices: tuple[str, ...] = field(default=())

    @property
    def compute_ms(self) -> float:
        return float(self.parts.loc[self.parts["kind"].eq("compute"), "mid_ms"].sum())

    @property
    def exposed_ms(self) -> float:
        return float(self.parts.loc[self.parts["kind"].eq("exposed"), "mid_ms"].sum())

    @property
    def communication_ms(self) -> float:
        """Exposed exchanges, and packing and unpacking for them."""
        return float(self.parts.loc[self.parts["component"].eq("communication"), "mid_ms"].sum())

    @property
    def samples_per_second(self) -> float:
        return 1e3 * self.batch_size / self.mid_ms


def predict(
    parameters: Parameters,
    ranks: int,
    sharding: str | Sequence[str] | Plan,
    network: Network,
    profile: ComputeProfile,
    batch_size: int | None = None,
    overlap: Overlap | None = None,
) -> Prediction:
    """What an iteration takes on so many ranks.

    Args:
        parameters: the model; its batch size is that of all ranks unless ``batch_size`` is given.
        sharding: a name, a kind for each table, or a plan.
        network: what joins the ranks; also how many share a node.
        profile: costs on one rank.
        overlap: what runs beside collectives; all that can if None.

    Raises:
        InputError: fewer samples than ranks, or a sharding that does not reach so many.
    """
    batch = parameters.training.batch_size if batch_size is None else batch_size
    plan = sharding if isinstance(sharding, Plan) else make_plan(parameters, ranks, sharding)
    overlap = overlap or Overlap()
    on_node = min(ranks, network.ranks_per_node)
    known, _ = profile.at(on_node)
    notices = []
    if profile.shares_node and known != on_node:
        notices.append(
            f"{on_node} ranks share a node; computing was measured beside {known - 1} others only"
        )
    compute = _compute(plan, batch, network, profile)
    table = _exchanged(parameters, plan, batch, network)
    made = _laid_out(parameters, compute, _times(table, "mid_ms"), overlap)
    parts = _parts(parameters, compute, table, overlap, made)
    wait = _waiting(plan, batch, network, profile, set(table["what"]))
    if wait > 0:
        row = ("communication", WAITING, "exposed", 0.5 * wait, wait, 2 * wait)
        parts = pd.concat([parts, pd.DataFrame([row], columns=PART_COLUMNS)], ignore_index=True)
    low, mid, high = _total(parts)
    return Prediction(*(ranks, batch, plan, low, mid, high, parts, table, made, tuple(notices)))


def expected_largest(count: int) -> float:
    """Expected largest of ``count`` standard normal draws (Blom 1958: within 0.02 from 2 on)."""
    if count < 2:
        return 0.0
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def step_ms(
    parameters: Parameters,
    plan: Plan,
    network: Network,
    profile: ComputeProfile,
    batch: int,
    overlap: Overlap,
) -> float:
    """As :func:`predict`'s middle without waiting: what a search among plans compares."""
    compute = _compute(plan, batch, network, profile)
    times: dict[Part, float] = {}
    for each in exchanges(parameters, plan, batch):
        time = network.calls_ms(each.collective, plan.ranks, each.payload, each.calls)
        times[each.what, each.phase] = times.get((each.what, each.phase), 0.0) + time.mid
    return _laid_out(parameters, compute, times, overlap).end_ms


def _compute(
    plan: Plan, batch: int, network: Network, profile: ComputeProfile
) -> dict[Part, Range]:
    """Each part on the rank that has most of the tables."""
    _, costs = profile.at(min(plan.ranks, network.ranks_per_node))
    samples = _samples(plan, batch, profile)
    own = batch / plan.ranks
    return {part: cost.time_ms(samples.get(part[0], own)) for part, cost in costs.items()}


def _samples(plan: Plan, batch: int, profile: ComputeProfile) -> dict[str, float]:
    """Samples of the components that have others than a rank's share of the batch."""
    whole = batch if profile.whole_batches else batch / plan.ranks
    return {"embedding": batch * float(plan.work().max()), "data": whole}


def _waiting(
    plan: Plan, batch: int, network: Network, profile: ComputeProfile, exchanged: set[str]
) -> float:
    """What a rank waits for the slowest one at the end of each stretch of the step, ms.

    Where the ranks of a node share its cores, the last one has them for itself: it goes on as
    fast as a process alone.
    """
    if plan.ranks < 2:
        return 0.0
    known, costs = profile.at(min(plan.ranks, network.ranks_per_node))
    samples, own = _samples(plan, batch, profile), batch / plan.ranks
    each = {part: cost.deviation_ms(samples.get(part[0], own)) for part, cost in costs.items()}
    wait = expected_largest(plan.ranks) * deviation_ms(each, exchanged)
    if 1 in profile.costs and profile.shares_node:
        wait *= min(1.0, profile.total_ms(own, 1) / profile.total_ms(own, known))
    return wait


def _exchanged(parameters: Parameters, plan: Plan, batch: int, network: Network) -> pd.DataFrame:
    rows = [
        (
            *(each.collective, each.what, each.phase, each.payload),
            *network.calls_ms(each.collective, plan.ranks, each.payload, each.calls),
            network.limit(plan.ranks),
        )
        for each in exchanges(parameters, plan, batch)
    ]
    return pd.DataFrame(rows, columns=EXCHANGE_COLUMNS)


def _times(table: pd.DataFrame, column: str) -> dict[Part, float]:
    sums = table.groupby(["what", "phase"])[column].sum()
    return {cast(Part, key): float(ms) for key, ms in sums.items()}


def _laid_out(
    parameters: Parameters,
    compute: Mapping[Part, Range],
    exchange_ms: Mapping[Part, float],
    overlap: Overlap,
) -> Schedule:
    bottom, top = _gradient_bytes(parameters)
    return schedule(
        {part: time.mid for part, time in compute.items()},
        exchange_ms,
        overlap,
        bottom / (bottom + top),
        BUCKET_BYTES / max(top, 1),
    )


def _gradient_bytes(parameters: Parameters) -> tuple[int, int]:
    """Bytes of the bottom and of the top MLP's gradients."""
    widths = itertools.pairwise(parameters.model.bottom_widths)
    bottom = 4 * sum(n * m + m for n, m in widths)
    return bottom, 4 * dense_parameters(parameters) - bottom


def _parts(
    parameters: Parameters,
    compute: Mapping[Part, Range],
    table: pd.DataFrame,
    overlap: Overlap,
    made: Schedule,
) -> pd.DataFrame:
    rows: list[tuple[str, str, str, float, float, float]] = [
        (component, phase, "compute", *time) for (component, phase), time in compute.items()
    ]
    ends = [
        dense_exposed(_laid_out(parameters, compute, _times(table, f"{name}_ms"), overlap))
        for name in ("low", "high")
    ]
    for what, mid in dense_exposed(made).items():
        low, high = (end.get(what, 0.0) for end in ends)
        rows.append(("communication", what, "exposed", min(low, mid), mid, max(mid, high)))
    return pd.DataFrame(rows, columns=PART_COLUMNS)


def _total(parts: pd.DataFrame) -> Range:
    """The parts' errors are partly the same, partly their own: halfway between their sum and
    the root of their squares, as in :mod:`.whatif`; the model's own error on top."""
    mid = float(parts["mid_ms"].sum())
    if mid <= 0:
        return NOTHING

    def joined(reach: pd.Series) -> float:
        return float(reach.sum() + math.sqrt((reach**2).sum())) / 2 / mid

    own = COVER * MODEL_ERROR
    down = math.hypot(joined(parts["mid_ms"] - parts["low_ms"]), own / (1 + own))
    up = math.hypot(joined(parts["high_ms"] - parts["mid_ms"]), own)
    return Range(mid * max(0.0, 1 - down), mid, mid * (1 + up))
