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
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dlrm_core.commands import batch_sizes, time_limit
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError
from dlrm_core.evaluate import held_out_batches
from dlrm_core.files import plain, write_json
from dlrm_core.inference import (
    POOL_BATCHES,
    Latency,
    latency_of,
    pool_of,
    time_predictions,
    warm_up_steps,
)
from dlrm_core.machine import device_name, machine_facts, peak_memory_by_device, versions
from dlrm_core.train import Trainer
from dlrm_workbook.evidence.power import power_meter
from dlrm_workbook.processes import python_module, run_child

TRAINING = ("steady", "nvidia", "facebook", "deepspark")
INFERENCE = ("steady", "nvidia")
DEEPSPARK_PRINTS = 100
"""DeepSpark's loop prints its running figure every so many iterations."""


@dataclass(frozen=True)
class Timings:
    """Iterations of a training, each waited for; milliseconds.

    Attributes:
        batch_size: samples an iteration.
        data_ms: in which the loop made its batch or waited for it.
        compute_ms: transfer, forward, backward, update.
    """

    batch_size: int
    data_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]

    @property
    def whole_ms(self) -> list[float]:
        """Of each iteration."""
        return [d + c for d, c in zip(self.data_ms, self.compute_ms, strict=True)]


@dataclass(frozen=True)
class Throughput:
    """What a protocol makes of the timings."""

    protocol: str
    samples_per_second: float
    ms_per_iteration: float
    iterations: int
    """Counted."""
    left_out: int
    """Iterations at the beginning that are not."""
    data_included: bool


def throughput(timings: Timings, protocol: str) -> Throughput:
    """One protocol's figure.

    Raises:
        InputError: no such protocol, or no iteration is left.
    """
    if protocol not in TRAINING:
        raise InputError(f"protocol is {protocol!r}, expected one of {', '.join(TRAINING)}")
    whole, compute, batch = timings.whole_ms, list(timings.compute_ms), timings.batch_size
    if len(whole) < 2:
        raise InputError(f"{len(whole)} iterations were timed, expected at least 2")
    if protocol == "deepspark":
        rate = _mean_of_running_rates(compute, batch)
        return Throughput(protocol, rate, 1e3 * batch / rate, len(compute), 0, False)
    first = {"steady": warm_up_steps(whole), "nvidia": len(whole) // 2, "facebook": 0}[protocol]
    data = protocol != "facebook"
    mean = statistics.fmean((whole if data else compute)[first:])
    return Throughput(protocol, 1e3 * batch / mean, mean, len(whole) - first, first, data)


def _mean_of_running_rates(compute_ms: Sequence[float], batch: int) -> float:
    """Mean of the samples a second so far, at every 100th iteration; at the end of fewer."""
    rates, total = [], 0.0
    for number, ms in enumerate(compute_ms, 1):
        total += ms
        if number % DEEPSPARK_PRINTS == 0:
            rates.append(1e3 * batch * number / total)
    return statistics.fmean(rates) if rates else 1e3 * batch * len(compute_ms) / total


def time_training(
    trainer: Trainer, iterations: int, on_iteration: Callable[[], None] = lambda: None
) -> Timings:
    """Train, and wait for the device before and after each iteration.

    Args:
        on_iteration: called after each.
    """
    data_ms, compute_ms = [], []
    _wait(trainer.device)
    for _ in range(iterations):
        begun = time.perf_counter()
        trainer.iterate()
        _wait(trainer.device)
        whole_ms = 1e3 * (time.perf_counter() - begun)
        data_ms.append(min(1e3 * trainer.data_seconds, whole_ms))
        compute_ms.append(whole_ms - data_ms[-1])
        on_iteration()
    return Timings(trainer.parameters.training.batch_size, tuple(data_ms), tuple(compute_ms))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Measured:
    """One run by all protocols.

    Attributes:
        training: a figure a protocol.
        inference: a latency a batch size and protocol: ``protocol``, and those of ``Latency``.
        power_w, samples_per_joule, power: while training, as in a training's result.
        peak_memory_by_device: bytes, of this process.
    """

    training: list[dict[str, Any]]
    inference: list[dict[str, Any]]
    timings: dict[str, Any]
    power_w: float | None
    samples_per_joule: float | None
    power: dict[str, Any]
    peak_memory_by_device: dict[str, int]
    device: str
    threads: int
    precision: str
    embedding_backend: str
    notices: list[str]

    def to_json(self) -> dict[str, Any]:
        """As ``dlrm protocols --json`` writes it."""
        return asdict(self)


def measure(
    parameters: Parameters,
    iterations: int,
    batch_sizes: Sequence[int],
    steps: int = 1000,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Train for ``iterations``, then predict with the weights that came of it.

    Args:
        batch_sizes: of inference; none: it is not measured.
        steps, seconds: of inference at most, for each batch size; warm-up included.
        on_progress: called with a word about each iteration and batch size.

    Raises:
        InputError: too few iterations, or the run does not fit in memory.
    """
    if iterations < 2:
        raise InputError(f"iterations is {iterations}, expected at least 2")
    trainer = Trainer(parameters)
    try:
        meter = power_meter(trainer.device).start()
        timings = time_training(trainer, iterations, lambda: on_progress("training"))
        power = meter.stop().figures(iterations * timings.batch_size)
        inference = []
        for size in batch_sizes:
            inference += _inference(trainer, size, steps, seconds)
            on_progress(f"inference, batch {size:,}")
        return Measured(
            training=[asdict(throughput(timings, protocol)) for protocol in TRAINING],
            inference=inference,
            timings=asdict(timings),
            **power,
            peak_memory_by_device=peak_memory_by_device(trainer.device),
            device=device_name(trainer.device),
            threads=torch.get_num_threads(),
            precision=trainer.parameters.training.precision,
            embedding_backend=trainer.parameters.training.embedding_backend,
            notices=trainer.notices,
        )
    finally:
        trainer.close()


def _inference(trainer: Trainer, size: int, steps: int, seconds: float) -> list[dict[str, Any]]:
    """Latencies of one batch size by both protocols, from the same steps, on the test data."""
    if size < 1:
        raise InputError(f"batch_sizes has {size}, expected whole numbers above 0")
    given, device = trainer.parameters, trainer.device
    parameters = replace(given, training=replace(given.training, batch_size=size))
    pool = pool_of(held_out_batches(parameters, device, POOL_BATCHES), steps, device.type == "cuda")
    times = time_predictions(trainer.predict, pool, device, steps, seconds)
    return [
        {"protocol": name} | _latency(latency_of(times, size, len(pool), math.nan, name))
        for name in INFERENCE
    ]


def _latency(found: Latency) -> dict[str, Any]:
    """Without the loss, which says nothing of a few iterations' training."""
    return {name: value for name, value in asdict(found).items() if name != "loss"}


# ``dlrm protocols``: one run's figures by the protocols that others publish by.

SCHEMA = 1

RECORD = "protocols.json"
"""Of a benchmark's folder."""


def protocols(arguments: argparse.Namespace) -> int:
    """A line a figure, and with ``--json`` the record."""
    parameters = load_parameters(arguments.file, arguments.parameter)
    found = measure(
        parameters,
        arguments.iterations,
        batch_sizes(arguments.batch_sizes),
        arguments.steps,
        time_limit(arguments.seconds),
    )
    for notice in found.notices:
        print(notice, file=sys.stderr)
    print(as_text(found), flush=True)
    if arguments.json:
        write_json(Path(arguments.json), plain(document(found, parameters.to_sections())))
    return 0


def document(found: Measured, sections: dict[str, Any], command: str = "") -> dict[str, Any]:
    """The record, with what it was measured on."""
    return {
        "schema": SCHEMA,
        "command": command or " ".join(["dlrm", *sys.argv[1:]]),
        "title": sections.get("title", ""),
        "parameters": sections,
        "measured": found.to_json(),
        "machine": machine_facts(),
        "versions": versions(),
    }


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
        beside = Path(results).expanduser().absolute().with_name(RECORD)
        return read_document(beside) if beside.exists() else None
    if not iterations:
        return None
    # without what belongs to a run of its own
    training = replace(parameters.training, resume="", checkpoint_every=None, checkpoint_folder="")
    record, given = folder / RECORD, folder / "protocols-parameters.json"
    write_json(given, replace(parameters, training=training, sweep={}).to_sections())
    command = python_module(
        *("dlrm_workbook", "protocols", "-f", given, "--json", record),
        *("--iterations", str(iterations), "--seconds", "4"),
        *("--batch-sizes", ",".join(map(str, batch_sizes))),
    )
    run_child(command, stage="protocols").require_success("dlrm protocols")
    return read_document(record)


def read_document(path: Path) -> dict[str, Any]:
    """A record of ``dlrm protocols --json``.

    Raises:
        InputError: the file is no such record.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["schema"] == SCHEMA:
            Measured(**tree["measured"])
            return dict(tree)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path}: is no record of dlrm protocols (schema {SCHEMA})")


def as_text(found: Measured) -> str:
    """For people."""
    lines = [f"{found.device}, {found.threads} threads, {found.precision}"]
    for one in found.training:
        data = "with data" if one["data_included"] else "without data"
        lines.append(
            f"training, {one['protocol']}: {one['samples_per_second']:,.0f} samples/s, "
            f"{one['ms_per_iteration']:.3f} ms/it {data} ({one['iterations']} iterations, "
            f"{one['left_out']} left out)"
        )
    for one in found.inference:
        lines.append(
            f"inference, {one['protocol']}, batch {one['batch_size']:,}: "
            f"{one['samples_per_second']:,.0f} samples/s, mean {one['mean']:.3f}, "
            f"p50 {one['p50']:.3f}, p90 {one['p90']:.3f}, p95 {one['p95']:.3f}, "
            f"p99 {one['p99']:.3f} ms ({one['steps']} steps, {one['warm_up_steps']} left out)"
        )
    if found.samples_per_joule is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.power["not_measured"].items())
        lines.append(f"power: not measured ({reasons})")
    else:
        lines.append(
            f"power: {found.power_w:,.1f} W, {found.samples_per_joule:,.1f} samples/s per watt"
        )
    for device, size in found.peak_memory_by_device.items():
        lines.append(f"peak memory, {device}: {size / 2**20:,.0f} MiB")
    return "\n".join(lines)
