"""The ranks of a measurement: ``python -m dlrm_core.distributed.worker JOB RESULT``.

JOB is a JSON file with ``rounds``, ``warmup``, ``iterations``, ``seconds`` and ``stretches``, one
for each number of ranks: ``{"ranks": R, "alone": {"sections", "sizes": [B, ...]} or null,
"probe": repetitions, "runs": [{"run", "sections"}]}``. As many processes as the largest of them
are started; the first R take part in a stretch, the others sleep. A round goes through all
stretches: what disturbs the machine for a while disturbs a round of everything, not all of one
thing. After every round rank 0 writes RESULT: the tables of
:mod:`dlrm_core.analysis.communication`, ``rounds`` (how many there are) and the job's ``digest``.
A launch whose job has ``first_round`` adds to it.
"""

from __future__ import annotations

import datetime
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrm_core.config import parameters_from_sections
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.measure import Pace, measure_alone, measure_run
from dlrm_core.distributed.probes import probe_link
from dlrm_core.distributed.refusal import leave
from dlrm_core.distributed.watch import Watch
from dlrm_core.distributed.world import (
    World,
    first_ranks,
    gathered,
    launcher_store,
    read_world,
)
from dlrm_core.errors import InputError
from dlrm_core.files import read_json, write_json
from dlrm_core.parent_process import die_with_parent

OF_RUNS = ("placement", "iterations", "parts", "collectives", "spans", "losses")

ROUND_BY_ROUND = ("link_probe", "compute_profile")

LAST_ROUND = ("placement", "spans", "losses")

SAME_EVERYWHERE = ("placement", "losses")

Rows = list[dict[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Measure what the job asks for."""
    job, result = read_json(Path(arguments[0])), Path(arguments[1])
    first = parameters_from_sections(job["stretches"][0]["runs"][0]["sections"])
    world, collectives = read_world(first.training), Collectives()
    die_with_parent()
    watch = Watch(world, collectives, first.training.rank_timeout_s)
    with collectives.installed(), watch:
        measure_job(job, result, world, collectives, watch)
    return 0


def measure_job(
    job: dict[str, Any], result: Path, world: World, collectives: Collectives, watch: Watch
) -> None:
    """Write the tables of one launch, round by round.

    Args:
        world: of all ranks; they have not joined yet.
    """
    meeting = _Meeting(launcher_store(), collectives)
    pace = Pace(job["warmup"], job["iterations"], job["seconds"])
    first = job.get("first_round", 0)
    found: dict[str, Any] = read_json(result) if first and world.first else _nothing_yet(world)
    for turn in range(first, job["rounds"]):
        for stretch in job["stretches"]:
            # who does not take part comes here at once
            meeting.of("stretch", world.size)
            watch.iteration += 1
            if world.rank < stretch["ranks"]:
                own = _measured(stretch, world, collectives, pace, meeting)
                _add(found, own, turn * max(job["iterations"], stretch["probe"] + 1))
        if world.first:
            found |= {"rounds": turn + 1, "digest": job.get("digest")}
            write_json(result, found)
    meeting.of("end", world.size)


def _nothing_yet(world: World) -> dict[str, Any]:
    return {name: [] for name in (*OF_RUNS, *ROUND_BY_ROUND)} | {
        "backend": world.backend,
        "host": world.host,
    }


def _measured(
    stretch: dict[str, Any], world: World, collectives: Collectives, pace: Pace, meeting: _Meeting
) -> dict[str, Rows]:
    """Rows of one round of a stretch, those of all its ranks."""
    count, alone = stretch["ranks"], stretch["alone"]
    found: dict[str, Rows] = {name: [] for name in (*OF_RUNS, *ROUND_BY_ROUND)}
    own: Rows = []
    if alone:
        parameters = parameters_from_sections(alone["sections"])

        def beside() -> Company:
            return Company(meeting, count)

        own = measure_alone(parameters, alone["sizes"], world, collectives, pace, beside)
    with first_ranks(world, count, meeting.store, meeting.name(f"group/{count}")) as some:
        rows = itertools.chain(*gathered(some, own))
        found["compute_profile"] = [{"concurrent": count} | row for row in rows]
        if stretch["probe"]:
            found["link_probe"] = probe_link(some, stretch["probe"])
        for run in stretch["runs"]:
            made = measure_run(parameters_from_sections(run["sections"]), some, collectives, pace)
            for name in OF_RUNS:
                # every rank knows the whole placement, and the loss of all
                each = gathered(some, made[name])
                whole = each[0] if name in SAME_EVERYWHERE else itertools.chain(*each)
                found[name] += [row | {"run": run["run"]} for row in whole]
    return found


def _add(found: dict[str, Any], more: dict[str, Rows], later: int) -> None:
    """Add another round; of some tables the last round's stay.

    Args:
        later: what its iterations and repetitions are counted on by.
    """
    runs = {row["run"] for row in more["iterations"]}
    for name, rows in more.items():
        if name in LAST_ROUND:
            found[name] = [row for row in found[name] if row["run"] not in runs]
        found[name] += [
            row | {name: row[name] + later for name in ("iteration", "repetition") if name in row}
            for row in rows
        ]


class _Meeting:
    """Where processes wait for each other, asleep: they must not take time from who computes."""

    def __init__(self, store: dist.TCPStore, collectives: Collectives) -> None:
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
        self._collectives.waiting = True
        try:
            if self.store.add(place, 1) == count:
                self.store.set(f"{place}/all", "1")
            # the launcher and the watch end what takes too long
            self.store.wait([f"{place}/all"], datetime.timedelta(days=1))
        finally:
            self._collectives.waiting = False
            self._collectives.note_progress()


class Company:
    """So many processes that are timed together: they begin at once, and none ends early."""

    def __init__(self, meeting: _Meeting, count: int) -> None:
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


if __name__ == "__main__":
    try:
        leave(main(sys.argv[1:]))
    except InputError as error:
        print(f"dlrm scaling: {error}", file=sys.stderr)
        sys.exit(2)
