"""One rank's measurements of a run, and of what it would do alone, as rows of tables.

The rows are those that :mod:`dlrm_core.analysis.communication` defines. Batches are made
beforehand: what is measured is the step, from a batch in memory to updated weights.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dlrm_core.config import Parameters
from dlrm_core.data.loader import make_generator
from dlrm_core.distributed.clock import PartClock
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.local_batch import LocalBatch, local_batch
from dlrm_core.distributed.plan import require_possible
from dlrm_core.distributed.step import DistributedStep
from dlrm_core.distributed.tables import ShardedTables
from dlrm_core.distributed.trainer import make_model
from dlrm_core.distributed.world import World, by_itself
from dlrm_core.model import ClickLoss
from dlrm_core.parts import capturing

BATCHES = 8
"""Different ones that a measured run takes in turns."""

SHOWN = 3
"""Iterations whose spans are kept, for a timeline of all ranks."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pace:
    """Iterations of one run: to warm up, to count, and the seconds that these take at most."""

    warmup: int
    iterations: int
    seconds: float = 60.0


class Beside(Protocol):
    """Processes of one node that compute at the same time, each by itself."""

    def begin(self) -> None:
        """Return when all of them are ready to be timed."""

    def others_compute(self) -> bool:
        """Say that this one is done, and whether another is not."""


def measure_run(
    parameters: Parameters, world: World, collectives: Collectives, pace: Pace
) -> dict[str, list[Row]]:
    """Train for some iterations and time them.

    Returns:
        ``placement`` (of all ranks), and this rank's ``iterations``, ``parts``,
        ``collectives``, ``spans``, ``losses``.

    Raises:
        InputError: the run does not exist on several ranks.
    """
    require_possible(parameters, world.size)
    step, tables = _make_step(parameters, world, collectives)
    rows = _timed(step, parameters, world, collectives, pace)
    rows["placement"] = [
        {
            "table": shard.table,
            "kind": shard.kind,
            "rank": shard.rank,
            "rows": shard.rows,
            "columns": shard.columns,
        }
        for shard in tables.shards
    ]
    return rows


def measure_alone(
    parameters: Parameters,
    sizes: Sequence[int],
    world: World,
    collectives: Collectives,
    pace: Pace,
    beside: Callable[[], Beside],
) -> list[Row]:
    """Parts of one of several processes of this node that exchange nothing.

    Args:
        sizes: batches of this process.
        world: of all of them; they have not joined.
        beside: makes what the processes begin and end a batch size together by.

    Returns:
        this process's rows of ``compute_profile``, less ``case`` and ``concurrent``; "other"
        is what of an iteration no part has.
    """
    rows: list[Row] = []
    with by_itself(world) as alone:
        step, _ = _make_step(parameters, alone, collectives)
        for size in sizes:
            training = dataclasses.replace(parameters.training, batch_size=size)
            sized = dataclasses.replace(parameters, training=training)
            found = _timed(step, sized, alone, collectives, pace, beside())
            rows += [
                {
                    "process": world.rank,
                    "batch_size": size,
                    **{k: row[k] for k in ("iteration", "component", "phase", "time_ms")},
                }
                for row in found["parts"] + _outside_parts(found)
            ]
    return rows


def _timed(
    step: DistributedStep,
    parameters: Parameters,
    world: World,
    collectives: Collectives,
    pace: Pace,
    beside: Beside | None = None,
) -> dict[str, list[Row]]:
    """Rows of so many steps; fewer if the seconds are over, on all ranks alike.

    Args:
        beside: who computes at the same time without exchanging anything; None: nobody.
    """
    different = min(BATCHES, pace.warmup + pace.iterations)
    stream = itertools.cycle(_batches(parameters, world, different))
    losses = []
    begun = time.perf_counter()
    for _ in range(pace.warmup):
        losses.append(step(next(stream))[0])
    count = pace.iterations
    if pace.warmup:
        # the slowest rank's warm-up says how many iterations there is time for
        took = torch.tensor((time.perf_counter() - begun) / pace.warmup, device=world.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        count = max(3, min(count, int(pace.seconds / max(float(took), 1e-6))))
    clock = PartClock(collectives)
    times: list[tuple[float, float]] = []
    of_iteration: list[list[Any]] = []
    gc.collect()
    gc.disable()
    dist.barrier()
    if beside is not None:
        beside.begin()
    try:
        with capturing(clock.around):
            for _ in range(count):
                batch = next(stream)
                clock.begin()
                collectives.records = []
                started = time.perf_counter()
                loss, _ = step(batch)
                times.append((started, time.perf_counter()))
                of_iteration.append(collectives.records)
                losses.append(loss)
    finally:
        collectives.records = None
        gc.enable()
    while beside is not None and beside.others_compute():
        # what they measure must not become faster towards the end
        step(next(stream))
    dist.barrier()
    rows = _rows(world.rank, times, of_iteration, clock)
    rows["losses"] = [{"loss": float(loss)} for loss in losses]
    return rows


def _outside_parts(found: dict[str, list[Row]]) -> list[Row]:
    """A row an iteration for what lies between the parts."""
    left = {row["iteration"]: row["time_ms"] for row in found["iterations"]}
    for row in found["parts"]:
        left[row["iteration"]] -= row["time_ms"]
    other = {"component": "other", "phase": "forward"}
    return [
        other | {"iteration": iteration, "time_ms": max(0.0, time_ms)}
        for iteration, time_ms in left.items()
    ]


def _make_step(
    parameters: Parameters,
    world: World,
    collectives: Collectives,
) -> tuple[DistributedStep, ShardedTables]:
    model = make_model(parameters, world.device)
    tables = ShardedTables(parameters, world, collectives)
    # of the right size is enough: what is measured does not depend on them
    generator = torch.Generator(world.device).manual_seed(parameters.training.seed)
    with torch.no_grad():
        for shard, memory in tables.local:
            bound = (1 / parameters.model.table_rows[shard.table]) ** 0.5
            memory.uniform_(-bound, bound, generator=generator)
    # the dense part's are alike on all ranks: training goes the same way everywhere
    from dlrm_core.model import fill_dense_with_torch

    dense = torch.Generator(world.device).manual_seed(parameters.training.seed)
    fill_dense_with_torch(model, dense)
    loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(world.device)
    config = dataclasses.replace(parameters.training, embedding_backend="torch")
    return DistributedStep(model, tables, loss, config, world.size, collectives), tables


def _batches(parameters: Parameters, world: World, count: int) -> list[LocalBatch]:
    data = parameters.data
    if data.generator == "facebook_loop":
        # the same stream bit for bit, made faster
        parameters = dataclasses.replace(
            parameters, data=dataclasses.replace(data, generator="facebook")
        )
    generator = make_generator(parameters, torch.device("cpu"))
    rows = parameters.model.table_rows
    return [local_batch(generator.next_batch(), world, rows) for _ in range(count)]


def _rows(
    rank: int,
    times: list[tuple[float, float]],
    of_iteration: list[list[Any]],
    clock: PartClock,
) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {"iterations": [], "parts": [], "collectives": [], "spans": []}
    for i, (started, ended) in enumerate(times):
        rows["iterations"].append(
            {"rank": rank, "iteration": i, "time_ms": 1e3 * (ended - started)}
        )
        for (component, phase), spent in clock.iterations[i].items():
            about = {"component": component, "phase": phase, "time_ms": 1e3 * spent}
            rows["parts"].append({"rank": rank, "iteration": i, **about})
        for record in of_iteration[i]:
            done = record.ended if record.ended is not None else record.started + record.exposed
            rows["collectives"].append(
                {
                    "rank": rank,
                    "iteration": i,
                    "kind": record.kind,
                    "what": record.what,
                    "bytes": record.bytes,
                    "time_ms": 1e3 * (done - record.started),
                    "exposed_ms": 1e3 * record.exposed,
                    "start_ms": 1e3 * (record.started - started),
                }
            )
    for i in range(max(0, len(times) - SHOWN), len(times)):
        zero = times[i][0]
        for component, phase, begun, end in clock.spans[i]:
            rows["spans"].append(
                {
                    "rank": rank,
                    "iteration": i,
                    "component": component,
                    "phase": phase,
                    "start_ms": 1e3 * (begun - zero),
                    "end_ms": 1e3 * (end - zero),
                    # the kernel's clock since boot, the same for all processes of a node
                    "node_start_s": begun,
                }
            )
    return rows
