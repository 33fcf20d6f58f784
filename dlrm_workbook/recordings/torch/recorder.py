"""Recording some training iterations with torch.profiler.

Needs torch, numpy and yaml only, so it runs on a bare GPU node; what it leaves is read by
:func:`dlrm_workbook.recordings.torch.trace.read_recording`, where pandas is. The folder holds

* ``trace.json.gz``: torch's chrome trace,
* ``key_averages.json``: per operator and shapes, with the FLOPs that no trace has,
* ``recording.json``: iteration times, the system's counters of each iteration, dilation,
  circumstances, what was not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError
from dlrm_core.files import whole_folder, write_json, write_text
from dlrm_core.machine import (
    available_memory,
    device_name,
    resolve_device,
    terminate_like_interrupt,
)
from dlrm_core.parts import log_spans
from dlrm_core.train import Trainer
from dlrm_kernels.embeddings.choose import resolve
from dlrm_workbook.evidence.ceilings import measure_ceilings
from dlrm_workbook.evidence.counters import IterationCounters
from dlrm_workbook.evidence.data_statistics import run_statistics
from dlrm_workbook.evidence.probes import probe_changes
from dlrm_workbook.machine import machine_facts, memory_limit
from dlrm_workbook.processes import Say, print_stage, say_nothing, settle_allocator
from dlrm_workbook.turns import threads_of

FORMAT_VERSION = 1

MAX_COUNTING_SHARE = 0.005
"""Profiled iterations are counted as long as that takes no larger share of their time."""


def record(
    run_iteration: Callable[[int], object],
    iterations: int,
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    warmup: int = 2,
    unprofiled: int = 0,
    with_stack: bool = False,
    record_shapes: bool = True,
    profile_memory: bool = False,
    information: dict[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Path:
    """Run iterations under torch.profiler and keep what it saw in a new folder.

    First ``warmup`` iterations run unmeasured, then ``iterations`` are recorded. Of
    ``unprofiled`` ones, half run before and half after those, timed without the
    profiler: against them its dilation is stated, and a machine that slows down or
    speeds up meanwhile does not pass for it. After each iteration, with the profiler and
    without, the system's counters are read (:mod:`dlrm_workbook.evidence.counters`).

    Args:
        run_iteration: Runs the iteration of that number (from 0, warm-up included)
            under the range ``parts.ITERATION_SPAN``, which it opens itself.
        folder: Must not exist. It appears only when whole.
        information: Goes into ``recording.json`` as it is: ``parameters``,
            ``machine``, ``versions``, ``probes``, ``command``, ...
        progress: Called with (iterations done, iterations in all) after each.

    Raises:
        InputError: a count is impossible, ``folder`` exists or cannot be written, or
            ``device`` is a GPU that is not there.
    """
    if iterations < 1 or warmup < 0 or unprofiled < 0:
        raise InputError(
            "a recording needs iterations >= 1, warmup >= 0 and unprofiled >= 0, "
            f"not {iterations}, {warmup} and {unprofiled}"
        )
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise InputError(f"cannot record on {device}: torch sees no GPU")
    target = Path(folder)
    total = warmup + unprofiled + iterations
    done = 0

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    def run(count: int, count_as: bool | None = None) -> tuple[list[float], float]:
        """(host milliseconds of each iteration, milliseconds of all with the device done).

        With ``count_as`` the system's counters are read, for iterations with a profiler or not.
        """
        nonlocal done
        each = []
        wait()
        read_before = sum(counters.cost_s)
        if count_as is not None:
            counters.start()
        begin = time.perf_counter()
        for _ in range(count):
            start = time.perf_counter()
            run_iteration(done)
            each.append((time.perf_counter() - start) * 1e3)
            if count_as is not None:
                counters.snapshot(done, profiled=count_as)
            done += 1
            if progress is not None:
                progress(done, total)
        # No waiting in between: work that the GPU does while the host runs ahead
        # would otherwise be profiled as if it could not.
        wait()
        total_s = time.perf_counter() - begin
        if not on_gpu:  # a GPU computes while its host reads counters
            total_s -= sum(counters.cost_s) - read_before
        return each, total_s * 1e3

    with whole_folder(target, "recording") as part, IterationCounters(device) as counters:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        run(warmup)
        plain, plain_all = run(unprofiled - unprofiled // 2, count_as=False)
        activities = [ProfilerActivity.CPU]
        if on_gpu:
            activities.append(ProfilerActivity.CUDA)
        threads = threading.active_count()
        cost_ms = counters.cost_ms()
        # whether reading the counters would not show in iterations of such length
        cheap = cost_ms is None or cost_ms <= MAX_COUNTING_SHARE * statistics.median(plain)
        with profile(
            activities=activities,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=True,
        ) as profiler:
            measured, measured_all = run(iterations, count_as=True if cheap else None)
        after, after_all = run(unprofiled // 2, count_as=False)
        plain, plain_all = plain + after, plain_all + after_all
        profiler.export_chrome_trace(str(part / "trace.json.gz"))
        averages = key_averages(profiler)
        missing = _not_measured(on_gpu, record_shapes, profile_memory, averages, bool(plain))
        if threads > 1:
            missing["other_threads"] = (
                "torch.profiler sees the thread that starts it and autograd's; what other "
                "Python threads do (making batches ahead) is not in the trace"
            )
        counted = counters.evidence()
        missing |= counted.pop("not_measured")
        if not cheap:
            missing["counters.profiled"] = (
                f"reading the counters takes {cost_ms:.3f} ms, more than "
                f"{MAX_COUNTING_SHARE:.1%} of an iteration, so it was left out under the profiler"
            )
        information = dict(information or {})
        head = {
            **information,
            **counted,
            "format_version": FORMAT_VERSION,
            "engine": "torch",
            "device": str(device),
            "torch": torch.__version__,
            "options": {
                "with_stack": with_stack,
                "record_shapes": record_shapes,
                "profile_memory": profile_memory,
                "warmup": warmup,
            },
            "passes": [
                *information.get("passes", []),
                {
                    "name": "torch.profiler",
                    "iterations": iterations,
                    "ms_per_iteration": measured_all / iterations,
                    "unprofiled_ms_per_iteration": plain_all / unprofiled if unprofiled else None,
                    # Medians: one disturbed iteration must not pass for the profiler's cost.
                    "dilation": (
                        statistics.median(measured) / statistics.median(plain) if plain else None
                    ),
                    "command": information.get("command", ""),
                },
            ],
            "iteration_ms": measured,
            "unprofiled_iteration_ms": plain,
            "not_measured": {**missing, **information.get("not_measured", {})},
        }
        if on_gpu:
            head["gpu_peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        averages_document = {"format_version": FORMAT_VERSION, "rows": averages}
        for name, document in (("key_averages", averages_document), ("recording", head)):
            write_text(part / f"{name}.json", json.dumps(document, indent=1, default=str) + "\n")
    return target


def key_averages(profiler: profile) -> list[dict[str, Any]]:
    """torch's own averages as plain rows, one per name and input shapes.

    ``self_cpu_ns`` and ``cpu_ns`` are totals over ``count`` calls. ``flops`` is 0
    where torch has no formula for the operator. ``shapes`` is spelt as in the trace.
    """
    return [
        {
            "name": average.key,
            "shapes": str(average.input_shapes) if average.input_shapes else "",
            "count": average.count,
            "device": str(average.device_type).rpartition(".")[2],
            "self_cpu_ns": round(average.self_cpu_time_total * 1e3),
            "cpu_ns": round(average.cpu_time_total * 1e3),
            "self_device_ns": round(average.self_device_time_total * 1e3),
            "device_ns": round(average.device_time_total * 1e3),
            "flops": average.flops or 0,
            "self_cpu_memory_bytes": average.self_cpu_memory_usage,
            "self_device_memory_bytes": average.self_device_memory_usage,
        }
        for average in profiler.key_averages(group_by_input_shape=True)
    ]


def _not_measured(
    on_gpu: bool,
    record_shapes: bool,
    profile_memory: bool,
    averages: list[dict[str, Any]],
    plain_timed: bool,
) -> dict[str, str]:
    """What this recording cannot tell, name to reason."""
    if on_gpu:
        missing = {
            "gpu_stall_reasons": "torch.profiler does not sample GPU instructions; "
            "HPCToolkit's gpu=nvidia,pc does"
        }
    else:
        absent = ("gpu_time_ms", "launches", "copy_bytes", "gpu_stall_reasons")
        missing = dict.fromkeys(absent, "the run used no GPU")
    if not record_shapes:
        missing["shapes"] = "input shapes were not recorded (record_shapes)"
    if not profile_memory:
        missing["allocated_bytes"] = "memory was not recorded (profile_memory)"
    if not any(row["flops"] for row in averages):
        missing["flops"] = "torch counted no floating point operations in this run"
    if not plain_timed:
        missing["dilation"] = "no iterations were timed without the profiler"
    return missing


def record_workload(
    parameters: Parameters,
    folder: Path,
    progress: Callable[[int, int], object] | None = None,
    say: Say = say_nothing,
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
    found = evidence(parameters, say)
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
            times: dict[str, float] = {}
            for name, start, end in rows:
                times[name] = times.get(name, 0.0) + (end - start) / 1e6
            plain.append(times)

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


def command_record(arguments: argparse.Namespace) -> int:
    """``dlrm record``: measure with torch.profiler; the last line is the folder."""
    parameters = load_parameters(arguments.file, arguments.parameter)
    with terminate_like_interrupt():
        folder = record_workload(parameters, Path(arguments.output), print_progress, print_stage)
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
        "threads": torch.get_num_threads(),
        "machine": machine_facts(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "notices": list(notices),
    }


def evidence(parameters: Parameters, say: Say = say_nothing) -> dict[str, Any]:
    """What a measured run carries beside its times, found before it in its own process.

    Returns:
        ``memory_limit_bytes`` and ``available_bytes`` (of the device, before the run),
        ``data_statistics``; with ``profiling.probes`` also ``ceilings``
        (:func:`dlrm_workbook.evidence.ceilings.measure_ceilings`) and ``part_probes``
        (:func:`dlrm_workbook.evidence.probes.probe_changes`); ``not_measured``, name to reason.

    Raises:
        InputError: the device is not there.
    """
    device = resolve_device(parameters.training)
    missing: dict[str, str] = {}
    found: dict[str, Any] = {
        "memory_limit_bytes": torch.cuda.mem_get_info(device)[1]
        if device.type == "cuda"
        else memory_limit(),
        "available_bytes": available_memory(device),
        "data_statistics": run_statistics(parameters),
        "not_measured": missing,
    }
    if not parameters.profiling.probes:
        why = "profiling.probes is false"
        missing |= {"ceilings": why, "part_probes": why}
        return found
    say("measuring this machine's limits", 0, 1)
    found["ceilings"], late = measure_ceilings(parameters, device)
    missing |= late
    if device.type == "cpu":
        found["part_probes"] = probe_changes(parameters, say=say)
    else:
        missing["part_probes"] = "parts are probed on the CPU only"
    return found


def main(arguments: list[str]) -> int:
    """Find the evidence of a parameters file and write it as one JSON object."""
    file, output = arguments
    write_json(Path(output), evidence(resolved(load_parameters(file))[0], print_stage))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
