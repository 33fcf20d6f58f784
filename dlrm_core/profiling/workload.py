"""Puts torch.profiler around the workload: what ``dlrm record`` runs.

Beside the trace a recording carries evidence: what the run's batches ask of the tables,
what the machine can do at best, what alternatives to each part would take.
``python -m dlrm_core.profiling.workload FILE OUTPUT`` leaves that evidence alone, for a
run that another tool measures. Imports no pandas: it must run on a bare GPU node.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.allocator import settle_allocator
from dlrm_core.capacity import available_memory
from dlrm_core.ceilings import measure_ceilings
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.data.statistics import run_statistics
from dlrm_core.doctor import machine_facts
from dlrm_core.embeddings.choose import resolve
from dlrm_core.files import write_json
from dlrm_core.memory_limit import memory_limit
from dlrm_core.part_probes import probe_changes
from dlrm_core.parts import SpanRow, log_spans
from dlrm_core.profiling.torch_recorder import record
from dlrm_core.timing import threads_of
from dlrm_core.training import Trainer, device_name, resolve_device


def record_workload(
    parameters: Parameters,
    folder: Path,
    progress: Callable[[int, int], object] | None = None,
) -> Path:
    """Train under torch.profiler as ``profiling`` says; a recording in a new folder.

    As many iterations as are recorded run before without the profiler, in the
    same process, to state its dilation.

    Raises:
        InputError: the run does not fit, the device is not there, or the folder
            exists or cannot be written.
    """
    config = parameters.profiling
    settle_allocator()
    # first, so that evidence, run and what the recording says are of one back end
    parameters, chosen = resolved(parameters)
    found = evidence(parameters)
    trainer = Trainer(parameters)
    trainer.notices[:0] = chosen
    losses: list[torch.Tensor] = []
    plain: list[dict[str, float]] = []
    before = config.warmup + config.iterations - config.iterations // 2
    profiled = range(before, before + config.iterations)
    on_cpu = trainer.device.type == "cpu"

    def iterate(iteration: int) -> None:
        with log_spans() as rows:
            losses.append(trainer.iterate())
        # a profiler's cost is not the same for every part, so they are timed without it too
        if on_cpu and iteration >= config.warmup and iteration not in profiled:
            plain.append(span_times(rows))

    try:
        return record(
            iterate,
            config.iterations,
            folder,
            device=trainer.device,
            warmup=config.warmup,
            unprofiled=config.iterations,
            with_stack=config.with_stack,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            information=information(parameters, trainer.device, trainer.notices)
            | found
            | {"command": "dlrm record", "unprofiled_parts_ms": plain},
            progress=progress,
        )
    finally:
        trainer.close()


def resolved(parameters: Parameters) -> tuple[Parameters, list[str]]:
    """With a back end in place of ``training.embedding_backend: auto``, and why that one."""
    with threads_of(parameters.training.threads):
        return resolve(parameters, resolve_device(parameters.training))


def span_times(rows: list[SpanRow]) -> dict[str, float]:
    """Milliseconds of every range of one iteration, by its name."""
    times: dict[str, float] = {}
    for name, start, end in rows:
        times[name] = times.get(name, 0.0) + (end - start) / 1e6
    return times


def print_progress(done: int, total: int) -> None:
    """One JSON line an iteration, for whoever watches this process."""
    print(json.dumps({"iteration": done, "of": total}), flush=True)


def information(parameters: Parameters, device: torch.device, notices: list[str]) -> dict[str, Any]:
    """What every measured run says about itself."""
    return {
        "title": parameters.title,
        "parameters": parameters.to_sections(),
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "machine": machine_facts(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "notices": list(notices),
    }


def evidence(parameters: Parameters) -> dict[str, Any]:
    """What a measured run carries beside its times, found before it in its own process.

    Returns:
        ``memory_limit_bytes`` and ``available_bytes`` (of the device, before the run),
        ``data_statistics``; with ``profiling.probes`` also ``ceilings``
        (:func:`dlrm_core.ceilings.measure_ceilings`) and ``part_probes``
        (:func:`dlrm_core.part_probes.probe_changes`); ``not_measured``, name to reason.

    Raises:
        InputError: the device is not there.
    """
    device = resolve_device(parameters.training)
    missing: dict[str, str] = {}
    found: dict[str, Any] = {
        "memory_limit_bytes": memory_limit(device),
        "available_bytes": available_memory(device),
        "data_statistics": run_statistics(parameters),
        "not_measured": missing,
    }
    if not parameters.profiling.probes:
        why = "profiling.probes is false"
        missing |= {"ceilings": why, "part_probes": why}
        return found
    found["ceilings"], late = measure_ceilings(parameters, device)
    missing |= late
    if device.type == "cpu":
        found["part_probes"] = probe_changes(parameters)
    else:
        missing["part_probes"] = "parts are probed on the CPU only"
    return found


def main(arguments: list[str]) -> int:
    """Find the evidence of a parameters file and write it as one JSON object."""
    file, output = arguments
    write_json(Path(output), evidence(resolved(load_parameters(file))[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
