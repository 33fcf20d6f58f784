"""Latency of predictions: batch after batch, each waited for, warm-up left out.

Protocol ``nvidia`` is that of NVIDIA's DLRM (``--mode inference_benchmark``): 1000 steps, the
first 10 left out, mean and percentiles. Theirs does not wait for the device at the end of a
step; ours does, since a latency without that is the time of launching. Protocol ``steady``
finds the warm-up in the latencies.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dlrm_core.base.errors import InputError
from dlrm_core.commands import do_predicting, print_line
from dlrm_core.data.batch import Batch
from dlrm_core.parts import iteration
from dlrm_core.predict import Predictor
from dlrm_core.run.evaluate import held_out_batches
from dlrm_core.step import transfer_forward

Predict = Callable[[Batch], torch.Tensor]

NVIDIA_WARM_UP = 10
POOL_BATCHES, POOL_BYTES = 64, 256 << 20
"""Batches made beforehand and used in turns: as many as there are steps, but no more than this."""

_GROUP = 5
"""Latencies are judged by the medians of so many, which single stragglers do not move."""

LATENCIES = ("mean", "p50", "p90", "p95", "p99")


def measure_latency(
    predict: Predict,
    loss: nn.Module,
    batches: Sequence[Batch],
    device: torch.device,
    steps: int,
    seconds: float,
    protocol: str = "steady",
    agree: Callable[[float], float] = lambda seconds: seconds,
) -> dict[str, Any]:
    """Predict ``batches`` in turns.

    Args:
        predict: click probability (B, 1) of a batch on ``device``.
        batches: on the host, as requests arrive, of one size.
        steps: how many, warm-up included; none begins after ``seconds``.
        protocol: 'steady' or 'nvidia'.
        agree: makes of this process's seconds those of all that predict together.

    Returns:
        what :func:`latency_of` does, and ``loss``, the mean over the different batches.

    Raises:
        InputError: no step is left after the warm-up.
    """
    times_ms = time_predictions(predict, batches, device, steps, seconds, agree)
    latency = latency_of(times_ms, batches[0].size, len(batches), protocol)
    on_device = (batch.to(device) for batch in batches)
    losses = [float(loss(predict(batch), batch.targets)) for batch in on_device]
    return latency | {"loss": statistics.fmean(losses)}


def time_predictions(
    predict: Predict,
    batches: Sequence[Batch],
    device: torch.device,
    steps: int,
    seconds: float,
    agree: Callable[[float], float],
) -> list[float]:
    """Milliseconds of every step, warm-up included; see :func:`measure_latency`."""
    times_ms: list[float] = []
    started = time.perf_counter()
    while len(times_ms) < steps and (
        not times_ms or agree(time.perf_counter() - started) < seconds
    ):
        batch = batches[len(times_ms) % len(batches)]
        begun = time.perf_counter()
        _answer(predict, batch, device)
        times_ms.append(1e3 * (time.perf_counter() - begun))
    return times_ms


@iteration
def _answer(predict: Predict, batch: Batch, device: torch.device) -> None:
    """Predict a batch as it arrives, and wait until that is done."""
    if batch.dense.device != device:
        batch = transfer_forward(batch, device)
    predict(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def latency_of(times_ms: Sequence[float], size: int, batches: int, protocol: str) -> dict[str, Any]:
    """What a protocol makes of the times of ``size`` samples each. An InputError says that no step
    is left after the warm-up.

    It is ``batch_size``, ``steps`` (measured, without the warm-up), ``warm_up_steps``, ``batches``
    (different ones that were used in turns), :data:`LATENCIES` in milliseconds (transfer to the
    device, forward, waited for), ``samples_per_second`` (batch size over mean latency).
    """
    first = NVIDIA_WARM_UP if protocol == "nvidia" else warm_up_steps(times_ms)
    kept = times_ms[first:]
    if not kept:
        raise InputError(
            f"{len(times_ms)} steps were made in the time given, but the first {first} are left "
            "out: give more --steps or --seconds"
        )
    mean = statistics.fmean(kept)
    facts: dict[str, Any] = {"batch_size": size, "steps": len(kept), "warm_up_steps": first}
    facts |= {"batches": batches, "mean": mean}
    facts |= {f"p{share}": float(np.percentile(kept, share)) for share in (50, 90, 95, 99)}
    return facts | {"samples_per_second": 1e3 * size / mean}


def pool_of(stream: Iterable[Batch], steps: int, pin: bool) -> list[Batch]:
    """Batches for ``steps`` steps, made beforehand: making them is no part of a latency. An
    InputError says that there is no batch."""
    made: list[Batch] = []
    size = 0
    for batch in stream:
        if made and batch.size < made[0].size:
            break  # the last batch of a test split
        made.append(_pinned(batch) if pin and batch.dense.device.type == "cpu" else batch)
        size += sum(tensor.nbytes for tensor in (batch.dense, batch.indices, batch.offsets))
        if len(made) >= min(steps, POOL_BATCHES) or size >= POOL_BYTES:
            break
    if not made:
        raise InputError("the test data holds no samples, expected at least one batch")
    return made


def _pinned(batch: Batch) -> Batch:
    """In page-locked memory, as requests that a server received for a GPU."""
    names = ("dense", "indices", "offsets", "targets")
    return dataclasses.replace(batch, **{name: getattr(batch, name).pin_memory() for name in names})


def warm_up_steps(times_ms: Sequence[float]) -> int:
    """Leading steps that belong to a warm-up: those without which the mean is known best.

    MSER (White 1997, "An effective truncation heuristic"): of all places in the first half,
    cut where the squared standard error of the rest, its variance over its length, is
    least. Applied to medians of groups of 5, as MSER-5 is to means.
    """
    count = len(times_ms) // _GROUP
    if count < 2:
        return min(1, len(times_ms) - 1) if times_ms else 0
    groups = np.median(np.reshape(times_ms[: count * _GROUP], (count, _GROUP)), axis=1)
    left = count - np.arange(count // 2 + 1)
    # sums over the rest, from every possible beginning
    totals = np.cumsum(groups[::-1])[::-1][: left.size]
    squares = np.cumsum(np.square(groups - groups.mean())[::-1])[::-1][: left.size]
    shifted = totals - left * groups.mean()
    error = np.maximum(squares - shifted**2 / left, 0.0) / left**2
    # of places that differ by rounding only, the first
    return _GROUP * int(np.argmax(error <= error.min() + 1e-12 * error[0]))


# ``dlrm infer``


def command_infer(arguments: argparse.Namespace) -> int:
    """``dlrm infer``: a JSON line for each batch size, and a last one with all of them.

    Under torchrun all ranks answer each batch together, each a slice of it.
    """
    sizes = batch_sizes(arguments.batch_sizes)
    if arguments.steps < 1:
        raise InputError(f"--steps is {arguments.steps}, expected at least 1")
    time_limit(arguments.seconds)
    work = functools.partial(_infer, arguments=arguments, sizes=sizes)
    return do_predicting(work, arguments, "dlrm infer", max(sizes, default=0))


def _infer(predictor: Predictor, arguments: argparse.Namespace, sizes: list[int]) -> int:
    measured = []
    for size in sizes or [predictor.parameters.training.batch_size]:
        parameters = predictor.parameters.with_training(batch_size=size)
        stream = held_out_batches(parameters, predictor.device, POOL_BATCHES)
        pool = pool_of(stream, arguments.steps, pin=predictor.device.type == "cuda")
        latency = measure_latency(
            predictor.predict,
            predictor.loss,
            pool,
            predictor.device,
            arguments.steps,
            arguments.seconds,
            arguments.protocol,
            predictor.agree,
        )
        measured.append(latency)
        if predictor.prints:
            print_line(latency)
    rows = [row | {"latency_ms": {name: row[name] for name in LATENCIES}} for row in measured]
    line = {"protocol": arguments.protocol, "ms_per_iteration": rows[0]["p50"], "batch_sizes": rows}
    for name in ("batch_size", "samples_per_second", "loss", "latency_ms"):
        line[name] = rows[0][name]
    facts = predictor.facts([])
    if predictor.prints:
        print_line(line | facts)
    return 0


def time_limit(seconds: float) -> float:
    """``--seconds``; refuses (InputError) what is no positive number."""
    if not seconds > 0:
        raise InputError(f"--seconds is {seconds:g}, expected a number above 0")
    return seconds


def batch_sizes(given: str | None) -> list[int]:
    """Batch sizes of ``--batch-sizes``; refuses (InputError) what is no whole number above 0."""
    if not given:
        return []
    with contextlib.suppress(ValueError):
        sizes = [int(word) for word in given.split(",")]
        if min(sizes) > 0:
            return sizes
    raise InputError(f"--batch-sizes is {given!r}, expected whole numbers above 0, as 1,64,2048")
