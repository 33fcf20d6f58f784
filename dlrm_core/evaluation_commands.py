"""``dlrm evaluate`` and ``dlrm infer``: a checkpoint's quality, and how fast it predicts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlrm_core.capacity import require_memory
from dlrm_core.checkpoints import find_checkpoint, read_checkpoint
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.embeddings import attach
from dlrm_core.embeddings.choose import resolve
from dlrm_core.embeddings.host_tables import Places
from dlrm_core.errors import InputError
from dlrm_core.evaluation import HeldOut, held_out_batches
from dlrm_core.evaluation import evaluate as evaluate_batches
from dlrm_core.files import plain
from dlrm_core.inference import POOL_BATCHES, measure_latency, pool_of
from dlrm_core.model import DLRM, ClickLoss, build_model
from dlrm_core.precision import DensePrecision, set_fp32_matmul, set_tf32
from dlrm_core.progress import Bar
from dlrm_core.resuming import require_same_model, restore_weights, with_backend_of
from dlrm_core.training_host import device_name, resolve_device


@dataclass(frozen=True)
class Predictor:
    """A model that predicts, without anything that training needs."""

    parameters: Parameters
    model: DLRM
    loss: ClickLoss
    precision: DensePrecision
    device: torch.device
    iteration: int
    checkpoint: Path | None
    notices: list[str]


def evaluate(arguments: argparse.Namespace) -> int:
    """``dlrm evaluate``: the last line is one JSON object."""
    predictor = open_predictor(arguments)
    device = predictor.device
    with Bar("evaluating", "samples", shown=sys.stderr.isatty(), unit_scale=True) as bar:
        found = evaluate_batches(
            predictor.model,
            predictor.loss,
            HeldOut(predictor.parameters, device),
            predictor.precision,
            device,
            predictor.iteration,
            bar.add,
        )
    line = dataclasses.asdict(found) | _about(predictor, found.notices())
    print(json.dumps(plain(line)), flush=True)
    return 0


def infer(arguments: argparse.Namespace) -> int:
    """``dlrm infer``: a JSON line for each batch size, and a last one with all of them."""
    sizes = batch_sizes(arguments.batch_sizes)
    if arguments.steps < 1:
        raise InputError(f"--steps is {arguments.steps}, expected at least 1")
    seconds = time_limit(arguments.seconds)
    predictor = open_predictor(arguments, max(sizes, default=0))
    measured = []
    for size in sizes or [predictor.parameters.training.batch_size]:
        training = dataclasses.replace(predictor.parameters.training, batch_size=size)
        parameters = dataclasses.replace(predictor.parameters, training=training)
        stream = held_out_batches(parameters, predictor.device, POOL_BATCHES)
        pool = pool_of(stream, arguments.steps, pin=predictor.device.type == "cuda")
        latency = measure_latency(
            predictor.model,
            predictor.loss,
            pool,
            predictor.precision,
            predictor.device,
            arguments.steps,
            seconds,
            arguments.protocol,
        )
        measured.append(latency)
        print(json.dumps(plain(dataclasses.asdict(latency))), flush=True)
    first = measured[0]
    line = {
        "protocol": arguments.protocol,
        "batch_size": first.batch_size,
        "samples_per_second": first.samples_per_second,
        "ms_per_iteration": first.p50,
        "loss": first.loss,
        "latency_ms": first.percentiles(),
        "batch_sizes": [
            dataclasses.asdict(latency) | {"latency_ms": latency.percentiles()}
            for latency in measured
        ],
    }
    print(json.dumps(plain(line | _about(predictor, []))), flush=True)
    return 0


def time_limit(seconds: float) -> float:
    """``--seconds``, checked.

    Raises:
        InputError: it is no positive number.
    """
    if not seconds > 0:
        raise InputError(f"--seconds is {seconds:g}, expected a number above 0")
    return seconds


def open_predictor(arguments: argparse.Namespace, largest_batch: int = 0) -> Predictor:
    """The model of ``--file`` with the weights of ``--checkpoint``.

    Args:
        largest_batch: for which there must be room; 0: training.batch_size.

    Raises:
        InputError: the checkpoint is corrupted or of another model, or there is no room.
    """
    parameters = load_parameters(arguments.file, arguments.parameter)
    checkpoint = None
    notices = []
    if arguments.checkpoint:
        place = parameters.training.checkpoint_folder
        folder = find_checkpoint(arguments.checkpoint, Path(place) if place else None)
        checkpoint = read_checkpoint(folder)
        require_same_model(parameters.model, checkpoint)
        parameters = with_backend_of(checkpoint, parameters)
    else:
        notices.append("no --checkpoint was given: these are the model's initial weights")
    # nothing is updated: no optimiser's state is to take memory
    training = dataclasses.replace(
        parameters.training, optimizer="sgd", embedding_update="race_free"
    )
    parameters = dataclasses.replace(parameters, training=training)
    device = resolve_device(training)
    largest = dataclasses.replace(training, batch_size=largest_batch or training.batch_size)
    require_memory(dataclasses.replace(parameters, training=largest), device)
    if training.threads is not None:
        torch.set_num_threads(training.threads)
    notices += set_fp32_matmul(training.fp32_matmul, parameters.model, device)
    notices += set_tf32(training.tf32, device)
    seed = training.seed if checkpoint is None else None
    huge_pages = training.embedding_backend != "torch"
    places = Places(parameters, device)
    make_tables = places.make_tables
    model = build_model(parameters.model, seed, device, huge_pages, make_tables).eval()
    if checkpoint is not None:
        restore_weights(checkpoint, model)
    places.settle()
    notices += places.notices
    parameters, said = resolve(parameters, device, model.embeddings)
    attach(model.embeddings, parameters.training)
    precision = DensePrecision(parameters.training, device)
    notices += said + precision.notices + getattr(model.embeddings.backend, "notices", [])
    loss = ClickLoss(parameters.model.loss, parameters.model.loss_weights).to(device)
    return Predictor(
        parameters,
        model,
        loss,
        precision,
        device,
        checkpoint.step if checkpoint else 0,
        checkpoint.folder if checkpoint else None,
        notices,
    )


def _about(predictor: Predictor, notices: list[str]) -> dict[str, Any]:
    notices = predictor.notices + notices
    for notice in notices:
        print(notice, file=sys.stderr)
    return {
        "iteration": predictor.iteration,
        "checkpoint": str(predictor.checkpoint) if predictor.checkpoint else None,
        "precision": predictor.parameters.training.precision,
        "embedding_backend": predictor.parameters.training.embedding_backend,
        "device": device_name(predictor.device),
        "threads": torch.get_num_threads(),
        "notices": notices,
    }


def batch_sizes(given: str | None) -> list[int]:
    """Batch sizes of ``--batch-sizes``.

    Raises:
        InputError: one is no whole number above 0.
    """
    if not given:
        return []
    try:
        sizes = [int(word) for word in given.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise InputError(
            f"--batch-sizes is {given!r}, expected whole numbers above 0, as 1,64,2048"
        )
    return sizes
