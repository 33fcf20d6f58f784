"""Whole training steps under several changes at once, timed in turns with the step as it is.

Parts timed alone say what one change does to the parts that it touches. They do not say what
several changes bring together: a thread that makes batches competes with whatever computes then,
and parts leave each other another cache. So the step is timed as a run has it, with its loader
and its tables at full size, under all changes up to each one.

The process that recorded a run times them on its own tables, or the one that looked for evidence
beside HPCToolkit's (:mod:`dlrm_workbook.recordings.torch.recorder`).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from typing import Any, cast

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import keep_freed_memory
from dlrm_core.config import Parameters
from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import batches
from dlrm_core.embeddings import ROW_DTYPES
from dlrm_workbook.evidence.dependence import Change, changed_parameters
from dlrm_workbook.evidence.probes import (
    ReadyStep,
    Tables,
    apply_settings,
    needs_huge_pages,
    require_memory,
    undisturbed,
)
from dlrm_workbook.ground.turns import CPU, back_and_forth, elapsed_ms, take_turns

LEAST_ROUNDS, ROUNDS, MOST_ROUNDS = 4, 5, 12
"""Rounds of all steps: at least, where the machine is not too slow for it, and at most."""

TOGETHER_SECONDS = 6.0
"""After so many rounds no further one begins later than this, however slow the machine is; after
the least number none later than twice this."""

TURN_MS = 300.0
"""A turn counts iterations until they took so long, one at least: of the same number of long
iterations, many short turns leave a narrower range of the rounds' ratios than few long ones."""

TRIES = 2
"""A turn that waited for a core too long is repeated, so often in all."""


def may_use(parameters: Parameters, lender: Tables) -> bool:
    """Whether the tables of ``lender`` are all that a run with these parameters needs."""
    model, weights = parameters.model, lender.model.embeddings.weights
    needed = [(rows, model.embedding_dim) for rows in model.table_rows]
    alike = lender.huge_pages == needs_huge_pages(parameters)
    alike &= needed == [tuple(w.shape) for w in weights]
    return alike and all(w.dtype == ROW_DTYPES[model.embedding_precision] for w in weights)


class WholeStep(ReadyStep):
    """The step of a run, on the first of ``tables_from`` that are alike, to save their memory. An
    InputError says that tables of its own would not fit beside what is there."""

    def __init__(self, parameters: Parameters, tables_from: Iterable[Tables] = ()) -> None:
        # tables are lent, so that what one step learns should hardly change what another sees
        slow = parameters.with_training(seed=0, learning_rate=1e-4)
        lender = next((step for step in tables_from if may_use(slow, step)), None)
        if lender is None:
            require_memory(slow, "timing the whole step")
        super().__init__(slow, lender)

    def warm_up(self) -> None:
        """Run one iteration, which compiles, and touches memory for the first time."""
        apply_settings(self.parameters)
        self.step(self.generator.next_batch())

    def turn(self) -> float:
        """Mean milliseconds of an iteration, its batch included, while the loader keeps pace.

        A loader that works ahead starts with the turn, so the first iterations wait for it, or
        find what it made ahead, and are not counted. Where the step makes its own batch, the
        first iteration after another step's turn takes as long as the next ones (1.00 to 1.03
        times, measured at the experiment's shape).
        """
        data = self.parameters.data
        uncounted = data.prefetch_batches if data.loader == "prefetch" else 0
        apply_settings(self.parameters)
        stream = cast("Generator[Batch, None, None]", batches(self.parameters, CPU, self.generator))
        with closing(stream):
            for _ in range(uncounted):
                self.step(next(stream))
            times: list[float] = []
            while sum(times) < TURN_MS:
                times.append(elapsed_ms(lambda: self.step(next(stream))))
        return sum(times) / len(times)


def time_together(
    parameters: Parameters, changes: Sequence[Change], lenders: Sequence[Tables] = ()
) -> dict[str, Any]:
    """Time the whole step as it is and under each of several changes, in turns, on the tables of
    ``lenders`` where they are alike.

    Returns:
        ``base_ms``, the rounds' times of the step as it is (list); ``stages``, for each change a
        dict of ``change`` and ``ms`` (its times, round by round), or ``refused`` with the reason;
        ``seconds`` taken.
    """
    started = time.perf_counter()
    keep_freed_memory()
    steps: dict[int, WholeStep] = {}
    stages: list[dict[str, Any]] = [{"change": dict(change)} for change in changes]
    try:
        steps[-1] = WholeStep(parameters, lenders)
    except InputError as error:
        stages = [stage | {"refused": str(error)} for stage in stages]
        return {"base_ms": [], "stages": stages, "seconds": time.perf_counter() - started}
    for number, change in enumerate(changes):
        try:
            changed, _ = changed_parameters(parameters, change)
            steps[number] = WholeStep(changed, [*lenders, *steps.values()])
        except InputError as error:
            stages[number]["refused"] = str(error)
    times: dict[int, list[float]] = {number: [] for number in steps}
    for step in steps.values():
        step.warm_up()
    deadline = time.perf_counter() + TOGETHER_SECONDS

    def enough(done: int) -> bool:
        late = time.perf_counter() - deadline
        return (done >= ROUNDS and late > 0) or (done >= LEAST_ROUNDS and late > TOGETHER_SECONDS)

    for _, order in take_turns(list(steps), MOST_ROUNDS, back_and_forth, enough):
        for number in order:
            times[number].append(undisturbed(steps[number].turn, TRIES, deadline))
    for number, stage in enumerate(stages):
        if number in times:
            stage["ms"] = times[number]
    return {"base_ms": times[-1], "stages": stages, "seconds": time.perf_counter() - started}
