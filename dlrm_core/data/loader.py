"""From parameters to an iterator of batches: synchronous, or prefetched by a thread."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Generator as Generated
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from dlrm_core.base.engines import engine, find_engine
from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import LARGEST_INT, require_form
from dlrm_core.config import Parameters
from dlrm_core.data.batch import WHOLE, Batch, Share
from dlrm_core.data.epochs import Epoch, Generator, RepeatedBatches
from dlrm_core.data.synthetic import FacebookLoop, SyntheticBatches

T = TypeVar("T")


class PrefetchError(RuntimeError):
    """The background thread failed; the cause is chained."""


def make_generator(parameters: Parameters, device: torch.device, share: Share = WHOLE) -> Generator:
    """The generator that ``data.generator`` names, of a ``share`` of every batch.

    Several ranks make or read their shares on the host only.
    """
    model, data = parameters.model, parameters.data
    if data.one_hot:
        from dlrm_core.data.files.samples import make_batches

        return make_batches(parameters, share)
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
    stream: Any
    if data.generator == "facebook" and (replay := find_engine("facebook's random batches")):
        stream = replay.FacebookReplay(*shape, share=share)
    elif data.generator.startswith("facebook"):
        stream = FacebookLoop(*shape, share=share)
    else:
        stream = SyntheticBatches(
            *shape,
            share=share,
            multi_hot_sizes=data.multi_hot_sizes,
            zipf_exponent=data.zipf_exponent if data.generator == "zipf" else None,
            reuse=data.generator == "reuse",
            device=device if data.place == "device" else torch.device("cpu"),
            # the host would have to wait for the GPU to learn how many lookups a batch has
            padded=data.place == "device"
            and device.type == "cuda"
            and parameters.training.embedding_backend == "fused",
        )
    if data.samples is None:
        return stream
    epoch = Epoch(data.samples, parameters.training.batch_size, data.drop_last)
    return RepeatedBatches(stream, epoch)


def batches(
    parameters: Parameters,
    device: torch.device,
    generator: Generator | None = None,
    divide: Callable[[Batch], Batch] | None = None,
) -> Iterator[Batch]:
    """An endless stream of batches; close it to end the background thread.

    The ``generator`` makes them, or the one that the parameters name, at its beginning; ``divide``,
    if given, is what becomes of each before it is copied anywhere.
    """
    next_batch = (generator or make_generator(parameters, device)).next_batch

    def make() -> Batch:
        return next_batch() if divide is None else divide(next_batch())

    if parameters.data.loader == "prefetch":
        ahead = parameters.data.prefetch_batches
        if device.type == "cuda":
            return engine("staging of batches").staged(make, ahead, device)
        return prefetched(make, ahead)
    return (make() for _ in itertools.count())


def prefetched(make: Callable[[], T], ahead: int) -> Generated[T, None, None]:
    """Make things in a thread, at most ``ahead`` before they are wanted, and one more meanwhile.

    numpy's generator, sorting and rounding run outside Python's lock, so the
    thread really does work beside the step.
    """
    thread = ThreadPoolExecutor(1, "dlrm-prefetch")
    try:
        ready = collections.deque(thread.submit(make) for _ in range(ahead + 1))
        while True:
            future = ready.popleft()
            error = future.exception()
            if isinstance(error, InputError):
                raise error  # says by itself which value of which file is wrong
            if error is not None:
                raise PrefetchError(f"making a batch failed: {error}") from error
            ready.append(thread.submit(make))
            yield future.result()
    finally:
        thread.shutdown(cancel_futures=True)


class Followed:
    """A generator whose state is that of the batches used, not of those made ahead.

    The generator is asked for it after each batch, in the thread that makes batches.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        # appended to by the loader's thread, read by the loop's: a deque allows both
        self._states = collections.deque([generator.state()])

    def next_batch(self) -> Batch:
        batch = self._generator.next_batch()
        self._states.append(self._generator.state())
        return batch

    def used(self) -> None:
        """The loop has taken the next batch."""
        self._states.popleft()

    def state(self) -> dict[str, Any]:
        """State after the last batch that was used."""
        return self._states[0]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what was made ahead is forgotten."""
        self._generator.restore(state)
        self._states = collections.deque([self._generator.state()])


def plain_state(state: Any) -> Any:
    """A state as JSON carries it: arrays become ``{"array": dtype, "values": [...]}``."""
    if isinstance(state, np.ndarray):
        return {"array": state.dtype.name, "values": state.reshape(-1).tolist()}
    if isinstance(state, Mapping):
        return {str(key): plain_state(value) for key, value in state.items()}
    if isinstance(state, np.generic):
        return state.item()
    return state


_MOST = {"pos": 624, "has_gauss": 1, "has_uint32": 1, "uinteger": 2**32 - 1}
"""Largest values of the whole numbers in the states of numpy's generators."""


def state_from_plain(file: Any, state: Any, like: Any, where: str = "state.position") -> Any:
    """The inverse of :func:`plain_state`, for a state of a file that may have been edited.

    It must have the form of ``like``, a state of the generator that is to go on. Random generators
    take what they are given: a place beyond their block of numbers would be read as it is.
    """
    if isinstance(like, Mapping):
        require_form(file, state, dict.fromkeys(like, object), where)
        return {
            key: state_from_plain(file, state[key], part, f"{where}.{key}")
            for key, part in like.items()
        }
    if isinstance(like, np.ndarray):
        most = int(np.iinfo(like.dtype).max)
        require_form(file, state, {"array": (like.dtype.name,), "values": [most]}, where)
        if (count := len(state["values"])) != like.size:
            raise InputError(f"{file}: {where} has {count} values, expected {like.size}")
        return np.array(state["values"], like.dtype)
    form: Any = float if isinstance(like, float) else (like,)
    if isinstance(like, int | np.integer):
        form = _MOST.get(where.rpartition(".")[2], LARGEST_INT)
    require_form(file, state, form, where)
    return state
