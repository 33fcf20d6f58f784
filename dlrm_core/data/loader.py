"""From parameters to an iterator of batches: synchronous, or prefetched by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from dlrm_core.config import Parameters
from dlrm_core.data.batch import Batch
from dlrm_core.data.facebook import FacebookLoop, FacebookReplay
from dlrm_core.data.synthetic import SyntheticBatches


class Generator(Protocol):
    """Anything that makes batches."""

    def next_batch(self) -> Batch:
        """The next batch of the stream."""


class PrefetchError(RuntimeError):
    """The background thread failed; the cause is chained."""


def make_generator(parameters: Parameters, device: torch.device) -> Generator:
    """The generator that ``data.generator`` names."""
    model, data = parameters.model, parameters.data
    if data.one_hot:
        from dlrm_core.datasets.reader import make_batches

        return make_batches(parameters)
    assert model.dense_features is not None
    shape = (
        model.dense_features,
        model.table_rows,
        parameters.training.batch_size,
        data.indices_per_lookup,
        data.fixed_pooling,
        data.round_targets,
        parameters.training.seed,
    )
    if data.generator == "facebook_loop":
        return FacebookLoop(*shape)
    if data.generator == "facebook":
        return FacebookReplay(*shape)
    return SyntheticBatches(
        *shape,
        zipf_exponent=data.zipf_exponent if data.generator == "zipf" else None,
        device=device if data.place == "device" else torch.device("cpu"),
    )


def batches(
    parameters: Parameters, device: torch.device, generator: Generator | None = None
) -> Iterator[Batch]:
    """An endless stream of batches; close it to end the background thread.

    Args:
        generator: makes them; left out, the one that the parameters name, at its beginning.
    """
    generator = generator or make_generator(parameters, device)
    if parameters.data.loader == "prefetch":
        return _prefetched(generator, parameters.data.prefetch_batches, pin=device.type == "cuda")
    return _synchronous(generator)


def _synchronous(generator: Generator) -> Iterator[Batch]:
    while True:
        yield generator.next_batch()


def _prefetched(generator: Generator, ahead: int, pin: bool) -> Iterator[Batch]:
    """Make batches in a thread, at most ``ahead`` before they are wanted.

    numpy's generator, sorting and rounding run outside Python's lock, so the
    thread really does work beside the step.
    """
    ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def offer(item: Batch | BaseException) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        try:
            while not stop.is_set():
                batch = generator.next_batch()
                offer(batch.pin() if pin else batch)
        except BaseException as error:
            offer(error)

    thread = threading.Thread(target=produce, name="dlrm-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise PrefetchError(f"making a batch failed: {item}") from item
            yield item
    finally:
        stop.set()
        thread.join()
