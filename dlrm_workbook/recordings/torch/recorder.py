"""Recording our own workload with torch.profiler, and what is found out about it beside that.

Needs torch, numpy and yaml only, so it runs on a bare GPU node; what it leaves is read by
:func:`dlrm_workbook.recordings.torch.trace.read_recording`, where pandas is. How iterations are
recorded, and what the folder holds: :mod:`dlrm_workbook.recordings.torch.session`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.files import read_json, require_new, write_json
from dlrm_core.base.machine import (
    available_memory,
    device_name,
    end_with_starter,
    keep_freed_memory,
    resolve_device,
    terminate_like_interrupt,
)
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.parts import log_spans
from dlrm_core.train import IMPORTING, Trainer
from dlrm_kernels.embeddings.choose import resolve_all
from dlrm_workbook.evidence.ceilings import measure_ceilings, model_shapes
from dlrm_workbook.evidence.data_statistics import run_statistics
from dlrm_workbook.evidence.probes import Tables, needs_huge_pages, probe_changes
from dlrm_workbook.evidence.together import time_together
from dlrm_workbook.ground.machine import memory_limit
from dlrm_workbook.ground.processes import Say, print_stage, say_nothing
from dlrm_workbook.ground.turns import threads_of
from dlrm_workbook.recordings.torch import RECORDED_KEY
from dlrm_workbook.recordings.torch.session import (
    USUAL_DETAIL,
    Detail,
    Lengths,
    Session,
    recorded_circumstances,
)

WAIT_S = 0.02
"""Seconds between two looks whether changes are asked for."""

NOT_PROBED = "profiling.probes is false"

SAMPLED_ITERATIONS = 3
"""Iterations whose Python stack is sampled, after those that are timed and recorded."""


def record_iterations(
    run_iteration: Callable[[int], object],
    folder: str | Path,
    lengths: Lengths,
    detail: Detail = USUAL_DETAIL,
    afterwards: Callable[[], dict[str, Any]] | None = None,
    **options: Any,
) -> Path:
    """Run iterations under torch.profiler and keep what it saw in a new folder.

    Args:
        run_iteration: Runs the iteration of that number (from 0, warm-up included)
            under the range ``parts.ITERATION_SPAN``, which it opens itself.
        afterwards: called after the last one; what it finds goes into ``recording.json`` too.
        folder, lengths, detail, options: as
            :class:`~dlrm_workbook.recordings.torch.session.Session` takes them.

    Raises:
        InputError: ``folder`` exists or cannot be written, or the device is a GPU that is not
            there.
    """
    with Session(folder, lengths, detail, **options) as session:
        for number in range(session.total):
            run_iteration(number)
            session.step()
        if afterwards is not None:
            session.information |= afterwards()
    return session.folder


def record_workload(
    parameters: Parameters,
    folder: Path,
    progress: Callable[[int, int], object] | None = None,
    say: Say = say_nothing,
    then: Callable[[Parameters, list[Tables]], object] = lambda parameters, tables: None,
) -> Path:
    """Train under torch.profiler as ``profiling`` says; a recording in a new folder. An InputError
    says that the run does not fit, that the device is not there, or that the folder exists or
    cannot be written.

    As many iterations as are recorded run without the profiler, in the same process, to state its
    dilation. Parts are probed after them, on the tables that were trained. ``then`` is called when
    the recording is whole, with the parameters as they ran and the tables that there are: the
    run's, and those that a probed change needed.
    """
    config = parameters.profiling
    require_new(folder, "recording")
    keep_freed_memory()
    # first, so that evidence, run and what the recording says are of one back end
    parameters, chosen = resolved(parameters)
    facts = evidence(parameters, say)
    missing = facts["not_measured"]
    # one core fills the tables
    with ThreadPoolExecutor(1) as beside:
        statistics = beside.submit(run_statistics, parameters)
        if not parameters.training.compile:  # else the trainer imports the same
            beside.submit(load_profiler)
        trainer = Trainer(parameters)
    facts["data_statistics"] = statistics.result()
    trainer.notices[:0] = chosen
    losses: list[torch.Tensor] = []
    plain: list[dict[str, float]] = []
    before = config.warmup + config.iterations - config.iterations // 2
    profiled = range(before, before + config.iterations)
    timed = range(config.warmup, config.warmup + 2 * config.iterations)
    on_cpu = trainer.device.type == "cpu"

    def iterate(iteration: int) -> None:
        with log_spans() as rows:
            losses.append(trainer.iterate())
        # a profiler's cost is not the same for every part, so they are timed without it too
        if on_cpu and iteration in timed and iteration not in profiled:
            times: dict[str, float] = {}
            for name, start, end in rows:
                times[name] = times.get(name, 0.0) + (end - start) / 1e6
            plain.append(times)

    tables: list[Tables] = [Tables(trainer.model, needs_huge_pages(parameters))]

    def afterwards() -> dict[str, Any]:
        trainer.close()
        return probed(parameters, missing, say, tables)

    try:
        path = record_iterations(
            iterate,
            folder,
            Lengths(config.iterations, config.warmup, config.iterations, SAMPLED_ITERATIONS),
            Detail(config.with_stack, config.record_shapes, config.profile_memory),
            afterwards,
            device=trainer.device,
            information=information(parameters, trainer.device, trainer.notices)
            | facts
            | {"command": "dlrm record", "unprofiled_parts_ms": plain},
            progress=progress,
        )
        then(parameters, tables)
        return path
    finally:
        trainer.close()


def load_profiler() -> None:
    """Import what torch.profiler imports when it starts, for about a second of processor time."""
    with IMPORTING:
        getattr(torch, "_inductor", None)


def resolved(parameters: Parameters) -> tuple[Parameters, list[str]]:
    """The parameters with back ends in place of ``auto``, and why those."""
    with threads_of(parameters.training.threads):
        return resolve_all(parameters, resolve_device(parameters.training))


def command_record(arguments: argparse.Namespace) -> int:
    """``dlrm record``: measure with torch.profiler; the last line is the folder.

    ``--together ASKED ANSWER`` is as :func:`answer_changes` takes it.
    """
    parameters = load_parameters(arguments.file, arguments.parameter)
    folder = Path(arguments.output)

    def then(parameters: Parameters, tables: list[Tables]) -> None:
        if arguments.together:
            answer_changes(folder, arguments.together, parameters, tables)

    with terminate_like_interrupt():
        record_workload(parameters, folder, print_progress, print_stage, then)
    print(folder, flush=True)
    return 0


def print_progress(done: int, total: int) -> None:
    """One JSON line an iteration, for whoever watches this process."""
    print(json.dumps({"iteration": done, "of": total}), flush=True)


def information(parameters: Parameters, device: torch.device, notices: list[str]) -> dict[str, Any]:
    """What every measured run says about itself."""
    return {
        "title": parameters.title,
        "parameters": parameters.to_sections(),
        "device_name": device_name(device),
        **recorded_circumstances(),
        "notices": list(notices),
    }


def evidence(parameters: Parameters, say: Say = say_nothing) -> dict[str, Any]:
    """What a measured run carries beside its times, found before it in its own process:
    ``memory_limit_bytes`` and ``available_bytes`` (of the device, before the run); with
    ``profiling.probes`` also ``ceilings``
    (:func:`dlrm_workbook.evidence.ceilings.measure_ceilings`); ``not_measured``, name to reason. An
    InputError says that the device is not there."""
    device = resolve_device(parameters.training)
    missing: dict[str, str] = {}
    facts: dict[str, Any] = {
        "memory_limit_bytes": torch.cuda.mem_get_info(device)[1]
        if device.type == "cuda"
        else memory_limit(),
        "available_bytes": available_memory(device),
        "not_measured": missing,
    }
    if not parameters.profiling.probes:
        missing["ceilings"] = NOT_PROBED
        return facts
    say("measuring this machine's limits", 0, 1)
    facts["ceilings"], late = measure_ceilings(model_shapes(parameters, device), device)
    missing |= late
    return facts


def probed(
    parameters: Parameters,
    missing: dict[str, str],
    say: Say = say_nothing,
    lenders: list[Tables] | None = None,
) -> dict[str, Any]:
    """The parts alone, as they are and under changes, as ``part_probes``; and ``not_measured``,
    with what else is ``missing``. ``lenders`` are as
    :func:`~dlrm_workbook.evidence.probes.probe_changes` takes them."""
    if not parameters.profiling.probes:
        return {"not_measured": missing | {"part_probes": NOT_PROBED}}
    if resolve_device(parameters.training).type != "cpu":
        return {"not_measured": missing | {"part_probes": "parts are probed on the CPU only"}}
    probes = probe_changes(parameters, say=say, lenders=lenders)
    return {"part_probes": probes, "not_measured": missing}


def answer_changes(
    written: Path, together: Sequence[str], parameters: Parameters, tables: list[Tables]
) -> None:
    """Time whole steps under the changes that whoever reads what was ``written`` asks for.

    A line says that it is whole. The process then waits with its tables until the first file of
    ``together`` is there, a list of changes (an empty one asks for none). The second one gets
    their times, as :func:`~dlrm_workbook.evidence.together.time_together` gives them.
    """
    print(json.dumps({RECORDED_KEY: str(written)}), flush=True)
    asked, answer = map(Path, together)
    while not asked.exists():
        time.sleep(WAIT_S)
    if changes := read_json(asked):
        print_stage("changes together", 0, 1)
        write_json(answer, time_together(parameters, changes, lenders=tables))


def main(arguments: list[str]) -> int:
    """Find the evidence of the parameters in ``FILE`` and write it to ``OUTPUT`` as one JSON
    object; ``--together ASKED ANSWER`` is as :func:`answer_changes` takes it."""
    end_with_starter()
    file, output, _, *together = arguments
    parameters = resolved(load_parameters(file))[0]
    facts = {**evidence(parameters, print_stage), "data_statistics": run_statistics(parameters)}
    tables: list[Tables] = []
    facts |= probed(parameters, facts["not_measured"], print_stage, tables)
    write_json(Path(output), facts)
    answer_changes(Path(output), together, parameters, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
