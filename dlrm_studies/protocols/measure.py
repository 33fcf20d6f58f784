"""Benchmark protocols by the names of those who publish figures by them.

The same iterations counted in each one's way, so that a figure can be set beside theirs:

* ``steady``: ours. The whole iteration, data included; the warm-up is found in the times;
* ``nvidia``: DeepLearningExamples, DLRM for PyTorch, ``--max_steps 500
  --benchmark_warmup_steps 250``: the whole iteration with its wait for data, device waited
  for, the first half left out;
* ``facebook``: facebookresearch/dlrm, ``ms/it``: without the making of data, device waited
  for, from the first iteration on;
* ``deepspark``: DeepSparkHub, DLRM (``FPS``, printed as ``speed``): samples over the time
  without the loader's, from the first iteration on, and of that running figure the mean over
  every 100th iteration. Theirs does not wait for the device; ours does.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.engines import engine
from dlrm_core.base.errors import InputError
from dlrm_core.base.files import plain, read_json, write_json
from dlrm_core.base.machine import device_name, peak_memory_by_device
from dlrm_core.commands import as_rank, started_by_torchrun
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.run.evaluate import held_out_batches
from dlrm_core.train import Trainer, TrainingLoop
from dlrm_studies.runs import Record, run_of_study
from dlrm_workbook.evidence.latency import (
    POOL_BATCHES,
    batch_sizes,
    latency_of,
    pool_of,
    time_limit,
    time_predictions,
    warm_up_steps,
)
from dlrm_workbook.evidence.power import power_meter
from dlrm_workbook.ground.machine import machine_facts, versions
from dlrm_workbook.ground.processes import python_module, run_child
from dlrm_workbook.ground.runs import runs_of
from dlrm_workbook.ground.turns import elapsed_ms

TRAINING = ("steady", "nvidia", "facebook", "deepspark")
INFERENCE = ("steady", "nvidia")
DEEPSPARK_PRINTS = 100
"""DeepSpark's loop prints its running figure every so many iterations."""

Timings = Mapping[str, Any]
"""Iterations of a training, each waited for, see :func:`time_training`."""


def throughput(timings: Timings, protocol: str) -> dict[str, Any]:
    """One protocol's figure.

    Args:
        timings: what :func:`time_training` gives.

    Returns:
        ``protocol``, ``samples_per_second``, ``ms_per_iteration``, ``iterations`` (counted),
        ``left_out`` (iterations at the beginning that are not), ``data_included``.

    Raises:
        InputError: no such protocol, or no iteration is left.
    """
    if protocol not in TRAINING:
        raise InputError(f"protocol is {protocol!r}, expected one of {', '.join(TRAINING)}")
    batch, data, compute = (timings[name] for name in ("batch_size", "data_ms", "compute_ms"))
    if len(compute) < 2:
        raise InputError(f"{len(compute)} iterations were timed, expected at least 2")
    first = 0
    if protocol == "deepspark":
        # the mean of the samples a second so far, at every 100th iteration; at the end of fewer
        ends = range(DEEPSPARK_PRINTS, len(compute) + 1, DEEPSPARK_PRINTS) or [len(compute)]
        totals = list(itertools.accumulate(compute))
        mean = batch / statistics.fmean(batch * end / totals[end - 1] for end in ends)
    else:
        times = compute
        if protocol != "facebook":
            times = [waited + computed for waited, computed in zip(data, compute, strict=True)]
            first = len(times) // 2 if protocol == "nvidia" else warm_up_steps(times)
        mean = statistics.fmean(times[first:])
    return {
        "protocol": protocol,
        "samples_per_second": 1e3 * batch / mean,
        "ms_per_iteration": mean,
        "iterations": len(compute) - first,
        "left_out": first,
        "data_included": protocol in ("steady", "nvidia"),
    }


def time_training(trainer: TrainingLoop[Any], iterations: int) -> Timings:
    """Train, and wait for the device before and after each iteration.

    Returns:
        ``batch_size``, and milliseconds of each iteration: ``data_ms`` in which the loop made
        its batch or waited for it, ``compute_ms`` of transfer, forward, backward, update.
    """
    data_ms, compute_ms = [], []
    for _ in range(iterations):
        whole_ms = elapsed_ms(trainer.iterate, 1, trainer.device)
        data_ms.append(min(1e3 * trainer.data_seconds, whole_ms))
        compute_ms.append(whole_ms - data_ms[-1])
    size = trainer.parameters.training.batch_size
    return {"batch_size": size, "data_ms": data_ms, "compute_ms": compute_ms}


def measure(
    trainer: TrainingLoop[Any],
    iterations: int,
    batch_sizes: Sequence[int],
    steps: int = 1000,
    seconds: float = 10.0,
) -> dict[str, Any]:
    """Train for ``iterations``, then predict with the weights that came of it.

    Args:
        trainer: not used before; on several ranks all must ask, and each has its own clock's
            figures. It is closed.
        batch_sizes: of inference; none: it is not measured.
        steps, seconds: of inference at most, for each batch size; warm-up included.

    Returns:
        ``training`` (a figure a protocol), ``inference`` (a latency a batch size and protocol),
        ``timings``, ``power_w``, ``samples_per_joule`` and ``power`` (while training, as in a
        training's result), ``peak_memory_by_device`` (bytes, of this process), ``device``,
        ``threads``, ``precision``, ``embedding_backend``, ``notices``.

    Raises:
        InputError: too few iterations.
    """
    try:
        if iterations < 2:
            raise InputError(f"iterations is {iterations}, expected at least 2")
        meter = power_meter(trainer.device).start()
        timings = time_training(trainer, iterations)
        power = meter.stop(iterations * timings["batch_size"])
        latencies = [_inference(trainer, size, steps, seconds) for size in batch_sizes]
        return {
            "training": [throughput(timings, protocol) for protocol in TRAINING],
            "inference": list(itertools.chain(*latencies)),
            "timings": timings,
            **power,
            "peak_memory_by_device": peak_memory_by_device(trainer.device),
            "device": device_name(trainer.device),
            "threads": torch.get_num_threads(),
            "precision": trainer.parameters.training.precision,
            "embedding_backend": trainer.embedding_backend,
            "notices": trainer.notices,
        }
    finally:
        trainer.close()


def _inference(
    trainer: TrainingLoop[Any], size: int, steps: int, seconds: float
) -> list[dict[str, Any]]:
    """Latencies of one batch size by both protocols, from the same steps, on the test data."""
    if size < 1:
        raise InputError(f"batch_sizes has {size}, expected whole numbers above 0")
    device, parameters = trainer.device, trainer.parameters.with_training(batch_size=size)
    pool = pool_of(held_out_batches(parameters, device, POOL_BATCHES), steps, device.type == "cuda")
    times = time_predictions(trainer.predict, pool, device, steps, seconds, trainer.agree)
    rows = []
    for name in INFERENCE:
        rows.append({"protocol": name} | latency_of(times, size, len(pool), name))
    return rows


# ``dlrm protocols``: one run's figures by the protocols that others publish by.

PROTOCOLS = Record("protocols.json", "record of dlrm protocols")


def protocols(arguments: argparse.Namespace) -> int:
    """A line a figure, and with ``--json`` the record; under torchrun rank 0's clock's."""
    sizes = batch_sizes(arguments.batch_sizes)
    effort = arguments.iterations, sizes, arguments.steps, time_limit(arguments.seconds)
    if started_by_torchrun():
        with as_rank("dlrm protocols"):
            parameters = load_parameters(arguments.file, arguments.parameter)
            ranks = engine("several ranks: trainer")
            with ranks.rank_trainer(parameters, "dlrm protocols") as trainer:
                measured = measure(trainer, *effort) | {"ranks": trainer.world.size}
                if trainer.world.first:
                    _report(arguments, parameters, measured)
            engine("several ranks: watch").leave(0)
    parameters = load_parameters(arguments.file, arguments.parameter)
    return _report(arguments, parameters, measure(Trainer(parameters), *effort) | {"ranks": 1})


def _report(arguments: argparse.Namespace, parameters: Parameters, measured: dict[str, Any]) -> int:
    for notice in measured["notices"]:
        print(notice, file=sys.stderr)
    print(as_text(measured), flush=True)
    if arguments.json:
        fields = {
            "command": " ".join(["dlrm", *sys.argv[1:]]),
            "title": parameters.title,
            "parameters": parameters.to_sections(),
            "measured": measured,
            "machine": machine_facts(),
            "versions": versions(),
        }
        PROTOCOLS.write(Path(arguments.json), fields)
    return 0


def measured_or_read(
    parameters: Parameters,
    folder: Path,
    iterations: int,
    batch_sizes: Sequence[int],
    results: str = "",
) -> dict[str, Any] | None:
    """The record that the ``benchmark`` notebook shows, measured now in a fresh process.

    Args:
        folder: gets ``protocols.json``.
        iterations: of training; 0: nothing is measured.
        batch_sizes: of inference.
        results: a finished benchmark: nothing is measured, the record beside it is read.

    Returns:
        None where nothing was measured.

    Raises:
        InputError: the run cannot be made; the message is the process's own.
    """
    if results:
        return PROTOCOLS.beside(results)
    if not iterations:
        return None
    record, given = folder / PROTOCOLS.name, folder / "protocols-parameters.json"
    write_json(given, run_of_study(parameters).to_sections())
    command = python_module(
        *("dlrm_workbook", "protocols", "-f", given, "--json", record),
        *("--iterations", str(iterations), "--seconds", "4"),
        *("--batch-sizes", ",".join(map(str, batch_sizes))),
    )
    run_child(command, stage="protocols").require_success("dlrm protocols")
    fields = PROTOCOLS.read(record) | {"scalability": scalability_of(parameters, folder.parents[1])}
    return PROTOCOLS.write(record, fields)


def scalability_of(parameters: Parameters, root: Path) -> dict[str, Any] | None:
    """Efficiency of the most ranks that the newest scaling run of this training measured.

    Args:
        root: of the dated folders in which ``dlrm run scaling`` left its record.

    Returns:
        ``ranks``, ``efficiency`` (speed-up over ranks, the batch divided among them) and ``run``
        (the folder's name); None where no such run is there.
    """
    sections = plain(parameters.to_sections())
    for run in runs_of(root, "scaling"):
        try:
            record = read_json(run / "scaling.json")
            same = all(record["parameters"][name] == sections[name] for name in ("model", "data"))
            batch = record["parameters"]["training"]["batch_size"]
            rows = [row for row in record["measured"] if row["scaling"] == "strong"]
        except (InputError, KeyError, TypeError):
            continue
        if same and rows and batch == sections["training"]["batch_size"]:
            most = max(rows, key=lambda row: row["ranks"])
            if most["efficiency"] is not None:
                return {name: most[name] for name in ("ranks", "efficiency")} | {"run": run.name}
    return None


def as_text(measured: Mapping[str, Any]) -> str:
    """For people."""
    ranks = measured.get("ranks", 1)
    of_each_rank = f"{ranks} ranks of " if ranks > 1 else ""
    who = f"{measured['device']}, {of_each_rank}{measured['threads']} threads"
    lines = [f"{who}, {measured['precision']}"]
    for one in measured["training"]:
        data = "with data" if one["data_included"] else "without data"
        lines.append(
            f"training, {one['protocol']}: {one['samples_per_second']:,.0f} samples/s, "
            f"{one['ms_per_iteration']:.3f} ms/it {data} ({one['iterations']} iterations, "
            f"{one['left_out']} left out)"
        )
    for one in measured["inference"]:
        lines.append(
            f"inference, {one['protocol']}, batch {one['batch_size']:,}: "
            f"{one['samples_per_second']:,.0f} samples/s, mean {one['mean']:.3f}, "
            f"p50 {one['p50']:.3f}, p90 {one['p90']:.3f}, p95 {one['p95']:.3f}, "
            f"p99 {one['p99']:.3f} ms ({one['steps']} steps, {one['warm_up_steps']} left out)"
        )
    if measured["samples_per_joule"] is None:
        missing = measured["power"]["not_measured"].items()
        reasons = "; ".join(f"{name}: {why}" for name, why in missing)
        lines.append(f"power: not measured ({reasons})")
    else:
        lines.append(
            f"power: {measured['power_w']:,.1f} W, "
            f"{measured['samples_per_joule']:,.1f} samples/s per watt"
        )
    for device, size in measured["peak_memory_by_device"].items():
        lines.append(f"peak memory, {device}: {size / 2**20:,.0f} MiB")
    return "\n".join(lines)
