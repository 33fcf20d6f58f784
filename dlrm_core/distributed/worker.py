"""The ranks of a measurement: ``python -m dlrm_core.distributed.worker JOB RESULT``.

JOB is a JSON file ``{"runs": [{"run", "sections", ...}], "alone": [{"case", "sections",
"concurrent": [k, ...]}], "probe": repetitions, "rounds", "warmup", "iterations", "seconds"}``;
rank 0 writes RESULT with the tables of :mod:`dlrm_core.analysis.communication`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm_core.config import parameters_from_sections
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.measure import measure_alone, measure_run
from dlrm_core.distributed.probes import probe_link
from dlrm_core.distributed.watch import Watch
from dlrm_core.distributed.world import (
    World,
    die_with_parent,
    gathered,
    joined,
    launcher_store,
    leave,
    read_world,
)
from dlrm_core.errors import InputError
from dlrm_core.files import read_json, write_json

TABLES = ("placement", "iterations", "parts", "collectives", "spans")


def main(arguments: Sequence[str]) -> int:
    """Measure what the job asks for."""
    job, result = read_json(Path(arguments[0])), Path(arguments[1])
    first = parameters_from_sections([*job["runs"], *job["alone"]][0]["sections"])
    collectives = Collectives()
    die_with_parent()
    with collectives.installed():
        alone = measure_job_alone(job, read_world(first.training), collectives)
        with (
            joined(first.training) as world,
            Watch(world, collectives, first.training.rank_timeout_s) as watch,
        ):
            found = measure_job(job, world, collectives, watch, alone)
        if world.first:
            write_json(result, found)
    return 0


def measure_job_alone(
    job: dict[str, Any], world: World, collectives: Collectives
) -> list[dict[str, Any]]:
    """This rank's rows of what is measured before the ranks join."""
    store, met = launcher_store(), itertools.count()

    def meet() -> None:
        _meet(store, f"dlrm/meet/{next(met)}", world.size)

    def beside(count: int) -> Company:
        return Company(store, f"dlrm/beside/{next(met)}", count)

    effort = job["warmup"], job["iterations"], job["seconds"]
    rows: list[dict[str, Any]] = []
    for turn, case in itertools.product(range(job["rounds"]), job["alone"]):
        parameters = parameters_from_sections(case["sections"])
        name, numbers = case["case"], case["concurrent"]
        rows += _later(
            measure_alone(name, parameters, world, collectives, effort, numbers, meet, beside),
            turn * job["iterations"],
        )
    return rows


def _later(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Rows of another round: iterations are counted on."""
    return [
        row | {"iteration": row["iteration"] + count} if "iteration" in row else row for row in rows
    ]


def _meet(store: Any, key: str, count: int) -> None:
    """Return when so many processes have called it."""
    store.add(key, 1)
    while store.add(key, 0) < count:
        time.sleep(0.002)  # asleep: it must not take time from those who compute


class Company:
    """So many processes that are timed together: they begin at once, and none ends early."""

    def __init__(self, store: Any, key: str, count: int) -> None:
        self._store, self._key, self._count = store, key, count
        self._done = False

    def begin(self) -> None:
        """Return when all of them are ready to be timed."""
        _meet(self._store, f"{self._key}/begin", self._count)

    def others_compute(self) -> bool:
        """Say that this one is done, and whether another is not."""
        done = self._store.add(f"{self._key}/done", 0 if self._done else 1)
        self._done = True
        return bool(done < self._count)


def measure_job(
    job: dict[str, Any],
    world: World,
    collectives: Collectives,
    watch: Watch,
    alone: list[dict[str, Any]],
) -> dict[str, Any]:
    """The tables of one launch; every rank has all.

    Args:
        alone: what this rank measured before it joined (:func:`measure_job_alone`).
    """
    found: dict[str, Any] = {name: [] for name in TABLES} | {"compute_profile": [], "losses": []}
    # rounds, and the probe before each and after the last: the machine is busier at one time
    probed = []
    turns = list(itertools.product(range(job["rounds"]), enumerate(job["runs"])))
    for turn, (number, run) in turns:
        if job["probe"] and number == 0:
            probed += probe_link(world, job["probe"])
        watch.iteration += 1
        rows = measure_run(
            parameters_from_sections(run["sections"]),
            world,
            collectives,
            job["warmup"],
            job["iterations"],
            seconds=job["seconds"],
        )
        last = turn == job["rounds"] - 1
        for name in TABLES:
            if name in ("placement", "spans") and not last:
                continue
            own = [row | {"run": run["run"]} for row in rows[name]]
            everyone = gathered(world, _later(own, turn * job["iterations"]))
            # every rank knows the whole placement
            found[name] += everyone[0] if name == "placement" else itertools.chain(*everyone)
        if last:
            losses = [row["loss"] for row in rows["losses"]]
            found["losses"].append({"run": run["run"], "losses": losses})
    if job["probe"]:
        probed += probe_link(world, job["probe"])
    found["compute_profile"] = list(itertools.chain(*gathered(world, alone)))
    found["link_probe"] = probed
    found["threads"] = world.threads
    found["backend"] = world.backend
    found["host"] = world.host
    return found


if __name__ == "__main__":
    try:
        leave(main(sys.argv[1:]))
    except InputError as error:
        print(f"dlrm scaling: {error}", file=sys.stderr)
        sys.exit(2)
