"""Puts torch.profiler around the workload: what ``dlrm record`` runs.

Imports no pandas: it must run on a bare GPU node.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.config import Parameters
from dlrm_core.data.loader import make_generator
from dlrm_core.doctor import machine_facts
from dlrm_core.part_probes import probe_changes
from dlrm_core.precision import probe_fp32_matmul
from dlrm_core.profiling.torch_recorder import record
from dlrm_core.training import Trainer, device_name, resolve_device

FACEBOOK_LAW = ("facebook_loop", "facebook")
"""Generators that make the same batches, so that one may stand in for the other."""


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
    probes = probe_alternatives(parameters)
    part_probes: dict[str, Any] = {}
    if getattr(config, "probes", False) and resolve_device(parameters.training).type == "cpu":
        part_probes["part_probes"] = probe_changes(parameters)
    trainer = Trainer(parameters)
    losses: list[torch.Tensor] = []
    try:
        return record(
            lambda iteration: losses.append(trainer.iterate()),
            config.iterations,
            folder,
            device=trainer.device,
            warmup=config.warmup,
            unprofiled=config.iterations,
            with_stack=config.with_stack,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            information=information(parameters, trainer.device, trainer.notices)
            | {"probes": probes, "command": "dlrm record"}
            | part_probes,
            progress=progress,
        )
    finally:
        trainer.close()


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


def probe_alternatives(parameters: Parameters) -> dict[str, Any]:
    """Time, beside the run, what the run could have used instead.

    Returns:
        data_ms_per_batch: generator to median milliseconds a batch, for the
            generators that make the very same batches;
        gemm: see :func:`dlrm_core.precision.probe_fp32_matmul`; empty on a GPU.
    """
    probes: dict[str, Any] = {"data_ms_per_batch": {}, "gemm": {}}
    device = resolve_device(parameters.training)
    threads = torch.get_num_threads()
    if parameters.training.threads is not None:
        torch.set_num_threads(parameters.training.threads)
    try:
        if parameters.data.generator in FACEBOOK_LAW:
            for generator in FACEBOOK_LAW:
                probes["data_ms_per_batch"][generator] = _ms_per_batch(parameters, generator)
        if device.type == "cpu":
            probes["gemm"] = probe_fp32_matmul(parameters.model, parameters.training.batch_size)
    finally:
        torch.set_num_threads(threads)
    return probes


def _ms_per_batch(parameters: Parameters, generator: str) -> float:
    """Median time of a batch, in milliseconds, after a first one that warms up."""
    data = dataclasses.replace(parameters.data, generator=generator, loader="synchronous")
    batches = make_generator(dataclasses.replace(parameters, data=data), torch.device("cpu"))
    times: list[float] = []
    started = time.perf_counter()
    # a few batches of either kind, but no more than a couple of seconds of the slow one
    while len(times) < 6 and not (len(times) >= 3 and time.perf_counter() - started > 2.0):
        before = time.perf_counter()
        batches.next_batch()
        times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times[1:]) if len(times) > 1 else math.nan
