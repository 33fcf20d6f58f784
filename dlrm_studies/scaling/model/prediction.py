"""What an iteration takes on any number of ranks, before it has run on more than one.

Three steps. A :class:`ComputeProfile` has what each part takes on one rank, for any number of
samples: measured (a process that exchanges nothing, at several batch sizes, alone or beside
others on the same cores), or the least times
that a machine's ceilings allow. A :class:`Schedule` lays one iteration out on two lanes,
what is computed and what is exchanged meanwhile. A :class:`Setting` joins both with a network,
and adds what ranks wait for the slowest one.

The schedule has the order of a hybrid-parallel step (Naumov et al. 2019, section 4): indices
change hands, embeddings are looked up, pooled vectors are on their way while the bottom MLP
runs; backward, the top MLP's gradients are on their way while interaction and bottom MLP run,
the pooled gradients likewise. A collective waits for the one before it. What the compute lane
waits is exposed: all of it where the ranks' own cores move the bytes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_core.parts import COMPONENTS
from dlrm_studies.scaling.model.communication import FLOAT_BYTES, Exchange, exchanges
from dlrm_studies.scaling.model.links import COVER, NOTHING, Network, Range, robust_line
from dlrm_studies.scaling.model.sharding import Plan
from dlrm_workbook.analysis.roofline import least_times
from dlrm_workbook.analysis.steady import undisturbed

Part = tuple[str, str]
"""Component and phase."""

# One iteration on one rank, as two lanes.

BUCKET_BYTES = 25 << 20
"""Gradients that DistributedDataParallel gathers before it reduces them (its default)."""


STRETCHES: tuple[tuple[str, frozenset[Part]], ...] = (
    ("indices", frozenset({("data", "forward"), ("communication", "forward")})),
    ("pooled vectors", frozenset({("embedding", "forward"), ("bottom_mlp", "forward")})),
    (
        "pooled gradients",
        frozenset(
            {
                *(("interaction", "forward"), ("top_mlp", "forward"), ("loss", "forward")),
                *(("loss", "backward"), ("top_mlp", "backward"), ("interaction", "backward")),
                ("bottom_mlp", "backward"),
            }
        ),
    ),
)
"""What ranks compute by themselves until an exchange brings them together; all other parts come
before the gradients' all-reduce."""


def deviation_ms(deviations: Mapping[Part, float], exchanged: Collection[str]) -> float:
    """Sum over the stretches of a step of each one's standard deviation.

    Args:
        deviations: of each part, ms; parts vary on their own, so variances add up.
        exchanged: what changes hands; where it does not, two stretches are one.
    """
    left, total, open_variance = dict(deviations), 0.0, 0.0
    for what, parts in STRETCHES:
        open_variance += sum(left.pop(part, 0.0) ** 2 for part in parts)
        if what in exchanged:
            total, open_variance = total + math.sqrt(open_variance), 0.0
    return total + math.sqrt(open_variance + sum(deviation**2 for deviation in left.values()))


DENSE_BUCKETS = ("top MLP gradients", "interaction gradients", "bottom MLP gradients")
"""Exchanges that together are the dense gradients' all-reduce, in the order of their start."""


class Event(NamedTuple):
    """``lane`` is "compute" or "communication"."""

    lane: str
    name: str
    phase: str
    start_ms: float
    end_ms: float


class Schedule:
    """One iteration on two lanes: what ran when, and what was waited for.

    Args:
        hidden: whether what is computed runs beside the exchanges on their way. Where the ranks'
            own cores move the bytes nothing is saved, and every exchange is waited for at once.
    """

    def __init__(self, hidden: bool) -> None:
        self.events: list[Event] = []
        self.exposed: dict[str, float] = {}
        """What is exchanged to the time for which the compute lane waited for it, ms."""
        self.end_ms = 0.0
        """End of what is computed so far."""
        self._hidden = hidden
        self._link_ms = 0.0
        self._sent: list[Event] = []

    def compute(self, part: Part, ms: float) -> None:
        """Run a part."""
        if ms > 0:
            self.events.append(Event("compute", *part, self.end_ms, self.end_ms + ms))
            self.end_ms += ms

    def send(self, name: str, phase: str, ms: float) -> None:
        """Put an exchange on its way, behind those that are under way."""
        if ms <= 0:
            return
        start = max(self._link_ms, self.end_ms)
        self._link_ms = start + ms
        self._sent.append(Event("communication", name, phase, start, self._link_ms))
        self.events.append(self._sent[-1])
        if not self._hidden:
            self.wait(name)

    def wait(self, *names: str) -> None:
        """Wait until these exchanges are done; the time is that of all under way meanwhile."""
        done = max(
            (exchange.end_ms for exchange in self._sent if exchange.name in names),
            default=self.end_ms,
        )
        for exchange in self._sent:
            waited = min(done, exchange.end_ms) - max(self.end_ms, exchange.start_ms)
            if waited > 0:
                what = "dense gradients" if exchange.name in DENSE_BUCKETS else exchange.name
                self.exposed[what] = self.exposed.get(what, 0.0) + waited
        self.end_ms = max(self.end_ms, done)


def schedule(
    compute_ms: Mapping[Part, float],
    exchange_ms: Mapping[tuple[str, str], float],
    hidden: bool = True,
    bottom_share: float = 0.5,
    bucket_share: float = 1.0,
    interaction_share: float = 0.0,
) -> Schedule:
    """Lay one iteration out on the two lanes.

    Args:
        compute_ms: time of each (component, phase) on this rank; that of "communication" is
            packing and unpacking.
        exchange_ms: time of each (what, phase), as :func:`.communication.volumes` names them.
        hidden: as :class:`Schedule` has it.
        bottom_share: share of the dense gradients' all-reduce that is the bottom MLP's.
        bucket_share: share of the top MLP's gradients that must be there before the first
            bucket of them leaves.
        interaction_share: share of the dense gradients' all-reduce that is the interaction's.
    """
    laid_out = Schedule(hidden)

    def run(*parts: Part) -> None:
        for part in parts:
            laid_out.compute(part, compute_ms.get(part, 0.0))

    def exchange(what: str, phase: str) -> None:
        laid_out.send(what, phase, exchange_ms.get((what, phase), 0.0))

    run(("data", "forward"), ("transfer", "forward"), ("communication", "forward"))
    exchange("indices", "forward")
    laid_out.wait("indices")
    run(("embedding", "forward"))
    exchange("pooled vectors", "forward")
    run(("bottom_mlp", "forward"))
    laid_out.wait("pooled vectors")
    run(("interaction", "forward"), ("top_mlp", "forward"), ("loss", "forward"))
    run(("loss", "backward"))
    dense = exchange_ms.get(("dense gradients", "backward"), 0.0)
    backward = compute_ms.get(("top_mlp", "backward"), 0.0)
    top, bucket = dense * (1 - bottom_share - interaction_share), min(1.0, bucket_share)
    # the first bucket leaves when it is full, the last when the last gradient is there
    laid_out.compute(("top_mlp", "backward"), backward * bucket)
    laid_out.send("top MLP gradients", "backward", top * (1 - bucket))
    laid_out.compute(("top_mlp", "backward"), backward * (1 - bucket))
    laid_out.send("top MLP gradients", "backward", top * bucket)
    run(("interaction", "backward"))
    laid_out.send("interaction gradients", "backward", dense * interaction_share)
    exchange("pooled gradients", "backward")
    run(("bottom_mlp", "backward"), ("communication", "backward"))
    laid_out.send("bottom MLP gradients", "backward", dense * bottom_share)
    exchange("table gradients", "backward")
    laid_out.wait("pooled gradients")
    run(("embedding", "backward"), ("embedding", "update"))
    laid_out.wait(*DENSE_BUCKETS, "table gradients")
    done = {(event.name, event.phase) for event in laid_out.events}
    rest = [part for part in compute_ms if part not in done]
    run(*sorted(rest, key=lambda part: (COMPONENTS.index(part[0]), part[1])))
    return laid_out


# What each part takes on one rank.

PART = ["component", "phase"]

PROFILE_COLUMNS = ("concurrent", "batch_size", "component", "phase", "time_ms")

LEAST_SCATTER = 0.03
"""A part's time differs as much between two processes of one program."""

CEILING_SCATTER = 0.5
"""A step takes up to half as long again as its ceilings allow, at best."""


@dataclass(frozen=True)
class PartCost:
    """A part's time: ``fixed_ms`` + samples x ``sample_ms``, or between measured points."""

    fixed_ms: float
    sample_ms: float
    scatter: float
    """Relative half width of nine cases of ten."""
    points: tuple[tuple[float, float], ...] = ()
    """Measured (samples, ms), samples ascending."""
    deviations: tuple[tuple[float, float], ...] = ()
    """The same for the standard deviation from iteration to iteration, ms."""

    def deviation_ms(self, samples: float) -> float:
        """Standard deviation of one iteration's time; 0 where it was not measured."""
        if not self.deviations or samples <= 0:
            return 0.0
        sizes, deviation = zip(*self.deviations, strict=True)
        return float(np.interp(samples, sizes, deviation))

    def time_ms(self, samples: float) -> Range:
        """Time of so many samples."""
        if samples <= 0:
            return NOTHING
        mid = self._mid(samples)
        return Range(mid / (1 + self.scatter), mid, mid * (1 + self.scatter))

    def _mid(self, samples: float) -> float:
        line = self.fixed_ms + samples * self.sample_ms
        if not self.points:
            return line
        (few, fast), (many, slow) = self.points[0], self.points[-1]
        if samples <= few:
            return fast - self.sample_ms * (few - samples) if fast > line else min(line, fast)
        for (x0, y0), (x1, y1) in itertools.pairwise(self.points):
            if samples <= x1:
                return y0 + (y1 - y0) * (samples - x0) / (x1 - x0)
        return slow + self.sample_ms * (samples - many)


@dataclass(frozen=True)
class ComputeProfile:
    """Costs of all parts of one rank.

    Attributes:
        costs: by number of processes that compute on the node at once, then by part.
        shares_node: whether ranks of one node share what they compute with (a CPU's cores).
        whole_batches: whether every rank makes the whole batch and takes its samples from it,
            as ours do; else it makes its own samples only.
    """

    costs: Mapping[int, Mapping[Part, PartCost]]
    shares_node: bool = True
    whole_batches: bool = True

    def at(self, concurrent: int) -> tuple[int, Mapping[Part, PartCost]]:
        """Costs beside so many processes, or the nearest number that is known (and which)."""
        if not self.shares_node:
            concurrent = min(self.costs)
        nearest = min(self.costs, key=lambda each: (abs(math.log(each / concurrent)), -each))
        return nearest, self.costs[nearest]

    def total_ms(self, samples: float, concurrent: int = 1) -> float:
        """Time of an iteration of one rank alone."""
        _, costs = self.at(concurrent)
        return sum(cost.time_ms(samples).mid for cost in costs.values())

    def with_costs(self, change: Callable[[PartCost], PartCost]) -> ComputeProfile:
        """The same with every cost changed."""
        return replace(
            self,
            costs={
                number: {part: change(cost) for part, cost in costs.items()}
                for number, costs in self.costs.items()
            },
        )


def measured_profile(table: pd.DataFrame) -> ComputeProfile:
    """Costs from a ``compute_profile`` table (``record.csv``).

    Its rows of "communication" are what a process without others spends on it all the same:
    packing, unpacking, a collective's own overhead. A cost is the mean of the faster half of
    the iterations (:mod:`dlrm_workbook.ground.intervals`), the same iterations for all parts.

    Raises:
        InputError: there are no rows, or a number of processes has one batch size only.
    """
    if table.empty:
        raise InputError("compute profile: no rows, expected at least two batch sizes")
    costs: dict[int, dict[Part, PartCost]] = {}
    for number, rows in table.groupby("concurrent"):
        concurrent = int(cast(int, number))
        if rows["batch_size"].nunique() < 2:
            raise InputError(
                f"compute profile: {rows['batch_size'].nunique()} batch size with "
                f"{concurrent} processes, expected at least 2: what an iteration costs without "
                "samples cannot be told from what a sample costs"
            )
        kept = dict(list(undisturbed(rows, ["batch_size"], "iteration").groupby(PART)))
        costs[concurrent] = {
            cast(Part, key): _cost(part, kept[key]) for key, part in rows.groupby(PART)
        }
    return ComputeProfile(costs)


def _cost(rows: pd.DataFrame, kept: pd.DataFrame) -> PartCost:
    """A part's cost from all its rows and those of undisturbed iterations."""
    means = kept.groupby("batch_size")["time_ms"].mean().sort_index()
    samples, times = means.index.to_numpy(float), means.to_numpy(float)
    if not (times > 0).all():
        return PartCost(float(times.mean()), 0.0, LEAST_SCATTER)
    fixed, slope = robust_line(samples, times)
    times_ms = kept["time_ms"].to_numpy(float)
    residuals = np.log(np.maximum(times_ms, 1e-9) / kept["batch_size"].map(means).to_numpy(float))
    # means of few repetitions: their own standard error
    count = max(1, len(times_ms) // len(means))
    error = 1.4826 * float(np.median(np.abs(residuals))) / math.sqrt(count)
    points = tuple(zip(samples.tolist(), times.tolist(), strict=True))
    return PartCost(fixed, slope, max(LEAST_SCATTER, COVER * error), points, _deviations(rows))


def _deviations(rows: pd.DataFrame) -> tuple[tuple[float, float], ...]:
    """Standard deviation at each batch size: half less one tenth of a normal distribution are
    1.28 of them, and disturbed iterations do not count."""
    deviations = []
    for size, times in rows.groupby("batch_size")["time_ms"]:
        if len(times) >= 5:
            spread = float(times.quantile(0.5) - times.quantile(0.1)) / 1.28
            deviations.append((float(cast(float, size)), spread))
    return tuple(deviations)


def steady(profile: ComputeProfile) -> ComputeProfile:
    """The same without deviations: ranks that nothing disturbs."""
    return profile.with_costs(lambda cost: replace(cost, deviations=()))


def ceiling_profile(
    parameters: Parameters,
    ceilings: Mapping[str, Any],
    batch_sizes: Sequence[int] = (64, 512, 4096),
) -> ComputeProfile:
    """Least times of a GPU by its ceilings, measured or of a data sheet, at several batches.

    Raises:
        InputError: no part has a ceiling.
    """
    rows = []
    for size in batch_sizes:
        times = least_times(parameters.with_training(batch_size=size), ceilings, device="cuda")
        listed = times.dropna(subset=["ceiling_ms"]).rename(columns={"ceiling_ms": "time_ms"})
        rows.append(listed.assign(concurrent=1, batch_size=size)[[*PROFILE_COLUMNS]])
    table = pd.concat(rows, ignore_index=True)
    if table.empty:
        raise InputError("ceilings: no part of the step has one that was measured or is listed")
    wide = measured_profile(table).with_costs(lambda cost: replace(cost, scatter=CEILING_SCATTER))
    return replace(wide, shares_node=False, whole_batches=False)


# Time of an iteration on several ranks.

MODEL_ERROR = 0.05
"""Relative error of the whole prediction beside those of its inputs: what is not modelled
(caches, other ranks' timing, a library's choice of algorithm)."""

PART_COLUMNS = ["component", "phase", "kind", "low_ms", "mid_ms", "high_ms"]

EXCHANGE_COLUMNS = [
    *("collective", "what", "phase", "bytes", "low_ms", "mid_ms", "high_ms", "link")
]

WAITING = "waiting for the slowest rank"


@dataclass(frozen=True)
class Prediction:
    """One iteration, in ms.

    Attributes:
        parts: ``component``, ``phase``, ``kind`` ("compute" or "exposed"), ``low_ms``,
            ``mid_ms``, ``high_ms``; rows of communication have what is exchanged as phase.
        exchanges: ``collective``, ``what``, ``phase``, ``bytes``, ``low_ms``, ``mid_ms``,
            ``high_ms`` (of the whole exchange, hidden or not), ``link``.
        schedule: the slowest rank's two lanes.
    """

    plan: Plan
    batch_size: int
    time_ms: Range
    parts: pd.DataFrame
    exchanges: pd.DataFrame
    schedule: Schedule
    notices: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return self.plan.ranks

    @property
    def low_ms(self) -> float:
        return self.time_ms.low

    @property
    def mid_ms(self) -> float:
        return self.time_ms.mid

    @property
    def high_ms(self) -> float:
        return self.time_ms.high

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


@dataclass(frozen=True)
class Setting:
    """What predictions are made from.

    Attributes:
        parameters: the model.
        network: what joins the ranks; also how many share a node.
        profile: costs on one rank.
        hidden: whether exchanges run beside what is computed (:class:`Schedule`).
        memory_bytes: of one rank; None: no limit.
        number_bytes: of a number that is exchanged; ours are all fp32.
        ahead: whether a batch and its indices arrive while the step before computes; ours do not.
    """

    parameters: Parameters
    network: Network
    profile: ComputeProfile
    hidden: bool = True
    memory_bytes: float | None = None
    number_bytes: int = FLOAT_BYTES
    ahead: bool = False

    def predict(self, plan: Plan, batch: int) -> Prediction:
        """What an iteration of ``batch`` samples over all ranks takes.

        Raises:
            InputError: fewer samples than ranks.
        """
        on_node = min(plan.ranks, self.network.ranks_per_node)
        processes, _ = self.profile.at(on_node)
        notices = []
        if self.profile.shares_node and processes != on_node:
            notices.append(
                f"{on_node} ranks share a node; computing was measured beside {processes - 1} "
                "others only"
            )
        compute = self._compute(plan, batch)
        table = self._exchanged(plan, batch)
        laid_out, low_end, high_end = (
            self._laid_out(compute, _times(table, column))
            for column in ("mid_ms", "low_ms", "high_ms")
        )
        rows = [
            (component, phase, "compute", *time) for (component, phase), time in compute.items()
        ]
        for what, mid in laid_out.exposed.items():
            low, high = (end.exposed.get(what, 0.0) for end in (low_end, high_end))
            rows.append(("communication", what, "exposed", min(low, mid), mid, max(mid, high)))
        wait = self._waiting(plan, batch, set(table["what"]))
        if wait > 0:
            rows.append(("communication", WAITING, "exposed", 0.5 * wait, wait, 2 * wait))
        parts = pd.DataFrame(rows, columns=PART_COLUMNS)
        return Prediction(plan, batch, _total(parts), parts, table, laid_out, tuple(notices))

    def step_ms(self, plan: Plan, batch: int) -> float:
        """The middle of :meth:`predict` without waiting: what a search among plans compares."""
        times: dict[Part, float] = {}
        for exchange in self._exchanges(plan, batch):
            time = self.network.calls_ms(
                exchange.collective, plan.ranks, exchange.payload, exchange.calls
            )
            times[exchange.what, exchange.phase] = (
                times.get((exchange.what, exchange.phase), 0.0) + time.mid
            )
        return self._laid_out(self._compute(plan, batch), times).end_ms

    def _compute(self, plan: Plan, batch: int) -> dict[Part, Range]:
        """Each part on the rank that has most of the tables."""
        _, costs = self.profile.at(min(plan.ranks, self.network.ranks_per_node))
        samples = self._samples(plan, batch)
        share = batch / plan.ranks
        return {
            part: cost.time_ms(samples.get(part[0], share))
            for part, cost in costs.items()
            if not (self.ahead and part[0] in ("data", "transfer"))
        }

    def _samples(self, plan: Plan, batch: int) -> dict[str, float]:
        """Samples of the components that have others than a rank's share of the batch."""
        whole = batch if self.profile.whole_batches else batch / plan.ranks
        return {"embedding": batch * float(plan.work().max()), "data": whole}

    def _waiting(self, plan: Plan, batch: int, exchanged: set[str]) -> float:
        """What a rank waits for the slowest one at the end of each stretch of the step, ms.

        Where the ranks of a node share its cores, the last one has them for itself: it goes on
        as fast as a process alone.
        """
        if plan.ranks < 2:
            return 0.0
        profile = self.profile
        processes, costs = profile.at(min(plan.ranks, self.network.ranks_per_node))
        samples, share = self._samples(plan, batch), batch / plan.ranks
        deviations = {
            part: cost.deviation_ms(samples.get(part[0], share)) for part, cost in costs.items()
        }
        wait = expected_largest(plan.ranks) * deviation_ms(deviations, exchanged)
        if 1 in profile.costs and profile.shares_node:
            wait *= min(1.0, profile.total_ms(share, 1) / profile.total_ms(share, processes))
        return wait

    def _exchanged(self, plan: Plan, batch: int) -> pd.DataFrame:
        rows = [
            (
                *(exchange.collective, exchange.what, exchange.phase, exchange.payload),
                *self.network.calls_ms(
                    exchange.collective, plan.ranks, exchange.payload, exchange.calls
                ),
                self.network.limit(plan.ranks),
            )
            for exchange in self._exchanges(plan, batch)
        ]
        return pd.DataFrame(rows, columns=EXCHANGE_COLUMNS)

    def _exchanges(self, plan: Plan, batch: int) -> list[Exchange]:
        """What changes hands and is waited for."""
        narrow = self.number_bytes / FLOAT_BYTES
        return [
            exchange
            if exchange.what == "indices"
            else replace(exchange, payload=narrow * exchange.payload)
            for exchange in exchanges(self.parameters, plan, batch)
            if not (self.ahead and exchange.what == "indices")
        ]

    def _laid_out(
        self, compute: Mapping[Part, Range], exchange_ms: Mapping[Part, float]
    ) -> Schedule:
        weights = self.parameters.model.dense_weights
        every = sum(weights.values())
        return schedule(
            {part: time.mid for part, time in compute.items()},
            exchange_ms,
            self.hidden,
            weights["bottom_mlp"] / every,
            BUCKET_BYTES / (FLOAT_BYTES * weights["top_mlp"]),
            weights.get("interaction", 0) / every,
        )


def _times(table: pd.DataFrame, column: str) -> dict[Part, float]:
    sums = table.groupby(["what", "phase"])[column].sum()
    return {cast(Part, key): float(ms) for key, ms in sums.items()}


def expected_largest(count: int) -> float:
    """Expected largest of ``count`` standard normal draws (Blom 1958: within 0.02 from 2 on)."""
    if count < 2:
        return 0.0
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _total(parts: pd.DataFrame) -> Range:
    """Sum of the parts, with its range.

    The parts' errors are partly the same, partly their own: halfway between their sum and the
    root of their squares, as in :mod:`dlrm_workbook.analysis.whatif`; the model's own error
    comes on top.
    """
    mid = float(parts["mid_ms"].sum())
    if mid <= 0:
        return NOTHING

    def joined(reach: pd.Series) -> float:
        return float(reach.sum() + math.sqrt((reach**2).sum())) / 2 / mid

    model_error = COVER * MODEL_ERROR
    down = math.hypot(joined(parts["mid_ms"] - parts["low_ms"]), model_error / (1 + model_error))
    up = math.hypot(joined(parts["high_ms"] - parts["mid_ms"]), model_error)
    return Range(mid * max(0.0, 1 - down), mid, mid * (1 + up))
