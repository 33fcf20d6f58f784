"""The ranks of a measurement: ``python -m dlrm_studies.scaling.worker JOB RESULT``.

JOB is a JSON file with ``rounds``, ``warmup``, ``iterations``, ``seconds`` and ``stretches``, one
for each number of ranks: ``{"ranks": R, "alone": {"sections", "sizes": [B, ...]} or null,
"probe": repetitions, "runs": [{"run", "sections"}]}``. As many processes as the largest of them
are started; the first R take part in a stretch, the others sleep. A round goes through all
stretches: what disturbs the machine for a while disturbs a round of everything, not all of one
thing. After every round rank 0 writes RESULT: the tables of
``scaling/model/record.csv``, ``rounds`` (how many there are) and the job's
``digest``.
A launch whose job has ``first_round`` adds to it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlrm_core.base.engines import engine
from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.base.machine import end_with_starter
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.data.batch import Share
from dlrm_core.data.loader import make_generator
from dlrm_core.model import fill_dense
from dlrm_core.parts import capturing
from dlrm_studies.scaling.collectives import TimedCollectives
from dlrm_workbook.ground.turns import elapsed_ms

if TYPE_CHECKING:
    from dlrm_ranks.step import DistributedStep
    from dlrm_ranks.tables import LocalBatch
    from dlrm_ranks.watch import Watch
    from dlrm_ranks.world import World

plan, steps, tables, watches, worlds = (
    engine(f"several ranks: {name}") for name in ("plan", "step", "tables", "watch", "world")
)

# Where processes of one node wait for each other.


class Meeting:
    """Where processes wait for each other, asleep: they must not take time from who computes."""

    def __init__(self, store: dist.TCPStore, collectives: TimedCollectives) -> None:
        self.store = store
        self._collectives = collectives
        self._met: dict[str, int] = {}

    def name(self, key: str) -> str:
        """A new one, the same in all processes that have asked for this key as often."""
        self._met[key] = self._met.get(key, 0) + 1
        return f"dlrm/{key}/{self._met[key]}"

    def of(self, key: str, count: int) -> None:
        """Return when so many processes have called it as often."""
        place = self.name(key)
        # as in a collective: who waits is not the one that the others wait for
        with self._collectives.waits():
            if self.store.add(place, 1) == count:
                self.store.set(f"{place}/all", "1")
            # the launcher and the watch end what takes too long
            self.store.wait([f"{place}/all"], datetime.timedelta(days=1))
        self._collectives.note_progress()


class Company:
    """So many processes that are timed together: they begin at once, and none ends early."""

    def __init__(self, meeting: Meeting, count: int) -> None:
        self._meeting, self._count = meeting, count
        self._key = f"beside/{count}"
        self._place = meeting.name(self._key + "/done")
        self._done = False

    def begin(self) -> None:
        """Return when all of them are ready to be timed."""
        self._meeting.of(self._key, self._count)

    def others_compute(self) -> bool:
        """Say that this one is done, and whether another is not."""
        done = self._meeting.store.add(self._place, 0 if self._done else 1)
        self._done = True
        return bool(done < self._count)


# How long the step's thread is in each part, exchanges taken out and given their own rows.


class PartClock:
    """When the step's thread was in which part, iteration by iteration.

    Put around every part by :func:`dlrm_core.parts.capturing`.

    Attributes:
        spans: of each iteration since :meth:`begin` (component, phase, start, end, of it in
            collectives) in seconds, as they came.
    """

    def __init__(self, collectives: TimedCollectives) -> None:
        self.spans: list[list[tuple[str, str, float, float, float]]] = []
        self._collectives = collectives

    def begin(self) -> None:
        """A new iteration begins here."""
        self.spans.append([])

    @contextlib.contextmanager
    def around(self, component: str, phase: str) -> Iterator[None]:
        """The context of one part."""
        driven, started = self._collectives.driven_s, time.perf_counter()
        try:
            yield
        finally:
            ended, exchanged = time.perf_counter(), self._collectives.driven_s - driven
            if self.spans:
                self.spans[-1].append((component, phase, started, ended, exchanged))

    def parts(self, iteration: int) -> dict[tuple[str, str], float]:
        """Seconds of an iteration by (component, phase).

        Time in which a part begins a collective or waits for one is ``communication`` of the same
        phase; a part of that name is so as a whole, packing and unpacking included.
        """
        seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
        for component, phase, start, end, exchanged in self.spans[iteration]:
            waited = end - start if component == "communication" else exchanged
            if component != "communication":
                seconds[component, phase] += end - start - exchanged
            if waited:
                seconds["communication", phase] += waited
        return seconds


# One rank's measurements of a run, and of what it would do alone, as rows of tables.

BATCHES = 8
"""Different ones that a measured run takes in turns."""

SHOWN = 3
"""Iterations whose spans are kept, for a timeline of all ranks."""

Row = dict[str, Any]


OF_RUNS = ("placement", "notices", "iterations", "parts", "collectives", "spans", "losses")

ROUND_BY_ROUND = ("link_probe", "compute_profile")

LAST_ROUND = ("placement", "notices", "spans", "losses")

SAME_EVERYWHERE = ("placement", "notices", "losses")


@dataclass(frozen=True)
class Rank:
    """One process of a launch, and what it measures with.

    Attributes:
        world: of all ranks; they have not joined.
        job: its ``warmup``, ``iterations`` and ``seconds`` (of these at most) are those of a run.
    """

    world: World
    collectives: TimedCollectives
    meeting: Meeting
    job: dict[str, Any]

    def stretch(self, stretch: dict[str, Any]) -> dict[str, list[Row]]:
        """Rows of one round of a stretch, those of all its ranks."""
        count, alone = stretch["ranks"], stretch["alone"]
        rows_of_stretch: dict[str, list[Row]] = {name: [] for name in (*OF_RUNS, *ROUND_BY_ROUND)}
        rows_alone = self.alone(alone["sections"], alone["sizes"], count) if alone else []
        store = dist.PrefixStore(self.meeting.name(f"group/{count}"), self.meeting.store)
        with first_ranks(self.world, count, store) as some:
            rows = itertools.chain(*worlds.gathered(some, rows_alone))
            rows_of_stretch["compute_profile"] = [{"concurrent": count} | row for row in rows]
            if stretch["probe"]:
                rows_of_stretch["link_probe"] = probe_link(some, stretch["probe"])
            for run in stretch["runs"]:
                parameters = parameters_from_sections(run["sections"])
                step = _make_step(parameters, some, self.collectives)
                measured = self.timed(step, parameters, some)
                names = ("table", "kind", "rank", "rows", "columns")
                measured["placement"] = [
                    {name: getattr(shard, name) for name in names} for shard in step.tables.shards
                ]
                measured["notices"] = [{"notice": notice} for notice in step.dense.notices]
                for name in OF_RUNS:
                    # every rank knows the whole placement, and the loss of all
                    by_rank = worlds.gathered(some, measured[name])
                    whole = by_rank[0] if name in SAME_EVERYWHERE else itertools.chain(*by_rank)
                    rows_of_stretch[name] += [row | {"run": run["run"]} for row in whole]
        return rows_of_stretch

    def alone(self, sections: dict[str, Any], sizes: Sequence[int], count: int) -> list[Row]:
        """Parts of one of so many processes of this node that exchange nothing.

        Args:
            sizes: batches of this process.

        Returns:
            this process's rows of ``compute_profile``, less ``concurrent``; "other" is the part
            of an iteration that lies in no part.
        """
        parameters = parameters_from_sections(sections)
        rows: list[Row] = []
        with by_itself(self.world) as alone:
            step = _make_step(parameters, alone, self.collectives)
            for size in sizes:
                sized = parameters.with_training(batch_size=size)
                measured = self.timed(step, sized, alone, Company(self.meeting, count))
                left = {row["iteration"]: row["time_ms"] for row in measured["iterations"]}
                for row in measured["parts"]:
                    left[row["iteration"]] -= row["time_ms"]
                measured["parts"] += [
                    {"iteration": iteration, "component": "other", "phase": "forward"}
                    | {"time_ms": max(0.0, time_ms)}
                    for iteration, time_ms in left.items()
                ]
                about = {"process": self.world.rank, "batch_size": size}
                names = ("iteration", "component", "phase", "time_ms")
                rows += [about | {name: row[name] for name in names} for row in measured["parts"]]
        return rows

    def timed(
        self,
        step: DistributedStep,
        parameters: Parameters,
        world: World,
        beside: Company | None = None,
    ) -> dict[str, list[Row]]:
        """Rows of so many steps; fewer if the seconds are over, on all ranks alike.

        Args:
            beside: who computes at the same time without exchanging anything; None: nobody.

        Returns:
            This rank's ``iterations``, ``parts``, ``collectives``, ``spans``, ``losses``.
        """
        warmup, count = self.job["warmup"], self.job["iterations"]
        stream = itertools.cycle(_batches(parameters, world, min(BATCHES, warmup + count)))
        begun = time.perf_counter()
        losses = [step(next(stream))[0] for _ in range(warmup)]
        if warmup:
            # the slowest rank's warm-up says how many iterations there is time for
            took = torch.tensor((time.perf_counter() - begun) / warmup, device=world.device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            count = max(3, min(count, int(self.job["seconds"] / max(float(took), 1e-6))))
        collectives, clock = self.collectives, PartClock(self.collectives)
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


def _make_step(
    parameters: Parameters, world: World, collectives: TimedCollectives
) -> DistributedStep:
    step = steps.DistributedStep(parameters, world, collectives)
    generator = torch.Generator(world.device)
    seed = parameters.training.seed
    # of the right size is enough: what is measured does not depend on them
    generator.manual_seed(seed)
    with torch.no_grad():
        for shard, memory in step.tables.local:
            bound = (1 / parameters.model.table_rows[shard.table]) ** 0.5
            memory.uniform_(-bound, bound, generator=generator)
    # the dense part's are alike on all ranks: training goes the same way everywhere
    fill_dense(step.model, generator.manual_seed(seed))
    return step


def _batches(parameters: Parameters, world: World, count: int) -> list[LocalBatch]:
    parameters, _ = plan.with_whole_batches(parameters)
    data = parameters.data
    if data.generator == "facebook_loop":
        # the same stream bit for bit, made faster
        data = dataclasses.replace(data, generator="facebook")
        parameters = dataclasses.replace(parameters, data=data)
    generator = make_generator(parameters, torch.device("cpu"), Share(world.rank, world.size))
    rows = parameters.model.table_rows
    return [tables.local_batch(generator.next_batch(), world, rows) for _ in range(count)]


def _rows(
    rank: int,
    times: list[tuple[float, float]],
    of_iteration: list[list[Any]],
    clock: PartClock,
) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {"iterations": [], "parts": [], "collectives": [], "spans": []}
    for i, (started, ended) in enumerate(times):
        of_rank: Row = {"rank": rank, "iteration": i}
        rows["iterations"].append(of_rank | {"time_ms": 1e3 * (ended - started)})
        for (component, phase), spent in clock.parts(i).items():
            part = {"component": component, "phase": phase, "time_ms": 1e3 * spent}
            rows["parts"].append(of_rank | part)
        for record in of_iteration[i]:
            done = record.ended if record.ended is not None else record.started + record.exposed
            exchange = {name: getattr(record, name) for name in ("kind", "what", "bytes")} | {
                "time_ms": 1e3 * (done - record.started),
                "exposed_ms": 1e3 * record.exposed,
                "start_ms": 1e3 * (record.started - started),
            }
            rows["collectives"].append(of_rank | exchange)
        for component, phase, begun, end, _ in clock.spans[i] if i >= len(times) - SHOWN else ():
            span = {"start_ms": 1e3 * (begun - started), "end_ms": 1e3 * (end - started)}
            rows["spans"].append(of_rank | {"component": component, "phase": phase} | span)
    return rows


# What the link can do: collectives of several sizes alone, in turns, each timed on all ranks.

SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 21, 22, 23, 24))
"""Payloads in bytes, 1 KiB to 16 MiB."""


def probe_link(world: World, repetitions: int) -> list[dict[str, Any]]:
    """Rows of ``link_probe``: the time of the slowest rank, from a barrier to its own end.

    Sizes and collectives take turns, so that what disturbs for a while disturbs all of them.
    Before the ``repetitions`` comes one that is not counted. Buffers are float32, of a multiple
    of the ranks. Every rank returns the same rows.
    """
    cases = [
        (name, 4 * numbers, call)
        for size in SIZES
        for numbers in [max(world.size, size // 4 // world.size * world.size)]
        for name, call in _collectives(numbers, world)
    ]
    rows: list[Row] = []
    measured: list[float] = []
    for repetition in range(repetitions + 1):
        for name, size, call in cases:
            dist.barrier()
            measured.append(elapsed_ms(call, 1, world.device))
            about = {"ranks": world.size, "bytes": size, "backend": world.backend}
            rows.append({"collective": name, "repetition": repetition} | about)
    slowest = torch.tensor(measured, dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    timed = zip(rows, slowest.tolist(), strict=True)
    return [row | {"time_ms": time_ms} for row, time_ms in timed if row["repetition"]]


def _collectives(numbers: int, world: World) -> list[tuple[str, Callable[[], Any]]]:
    whole = torch.ones(numbers, device=world.device)
    other = torch.empty_like(whole)
    share = torch.ones(numbers // world.size, device=world.device)
    return [
        ("allreduce", lambda: dist.all_reduce(other)),
        ("alltoall", lambda: dist.all_to_all_single(other, whole)),
        ("allgather", lambda: dist.all_gather_into_tensor(other, share)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(share, whole)),
        ("broadcast", lambda: dist.broadcast(other, 0)),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure what the job asks for."""
    job, result = read_json(Path(arguments[0])), Path(arguments[1])
    first = parameters_from_sections(job["stretches"][0]["runs"][0]["sections"])
    world, collectives = worlds.read_world(first.training), TimedCollectives()
    end_with_starter()
    watch = watches.Watch(world, collectives, first.training.rank_timeout_s)
    with collectives.installed(), watch:
        measure_job(job, result, world, collectives, watch)
    return 0


def measure_job(
    job: dict[str, Any], result: Path, world: World, collectives: TimedCollectives, watch: Watch
) -> None:
    """Write the tables of one launch, round by round.

    Args:
        world: of all ranks; they have not joined yet.
    """
    meeting = Meeting(worlds.launcher_store(), collectives)
    rank = Rank(world, collectives, meeting, job)
    first = job.get("first_round", 0)
    if first and world.first:
        tables_of_job = read_json(result)
    else:
        tables_of_job = {name: [] for name in (*OF_RUNS, *ROUND_BY_ROUND)}
        tables_of_job |= {"backend": world.backend, "host": world.host}
    for turn in range(first, job["rounds"]):
        for stretch in job["stretches"]:
            # who does not take part comes here at once
            meeting.of("stretch", world.size)
            watch.iteration += 1
            if world.rank < stretch["ranks"]:
                later = turn * max(job["iterations"], stretch["probe"] + 1)
                _add(tables_of_job, rank.stretch(stretch), later)
        if world.first:
            tables_of_job |= {"rounds": turn + 1, "digest": job.get("digest")}
            write_json(result, tables_of_job)
    meeting.of("end", world.size)


def _add(kept: dict[str, Any], more: dict[str, list[Row]], later: int) -> None:
    """Add another round; of some tables the last round's stay.

    Args:
        later: what its iterations and repetitions are counted on by.
    """
    runs = {row["run"] for row in more["iterations"]}
    for name, rows in more.items():
        if name in LAST_ROUND:
            kept[name] = [row for row in kept[name] if row["run"] not in runs]
        kept[name] += [
            row | {name: row[name] + later for name in ("iteration", "repetition") if name in row}
            for row in rows
        ]


def by_itself(world: World) -> contextlib.AbstractContextManager[World]:
    """This process as the only rank of a world of its own, while it has not joined others."""
    return first_ranks(dataclasses.replace(world, rank=0, backend="gloo"), 1, dist.HashStore())


@contextlib.contextmanager
def first_ranks(world: World, count: int, store: dist.Store) -> Iterator[World]:
    """The first ranks as a world of their own, while they have joined no other.

    Args:
        store: one that all of them reach and that no other meeting uses.
    """
    torch.set_num_threads(world.threads)
    dist.init_process_group(
        world.backend,
        store=store,
        rank=world.rank,
        world_size=count,
        device_id=world.device if world.backend == "nccl" else None,
    )
    try:
        yield dataclasses.replace(
            world,
            size=count,
            local_rank=min(world.local_rank, count - 1),
            local_size=min(count, world.local_size),
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        watches.leave(main(sys.argv[1:]))
    except InputError as error:
        print(f"dlrm scaling: {error}", file=sys.stderr)
        sys.exit(2)
