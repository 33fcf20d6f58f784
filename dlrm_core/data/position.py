"""Where a stream of batches stands, so that a later process goes on with the next batch.

A generator that can be resumed has ``state()`` and ``restore(state)``; a state is a dict
of numbers, text, dicts and numpy arrays, without any object of ours. With a prefetching
loader the generator is ahead of the training: :class:`Followed` keeps the state behind
each batch until that batch has been used.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dlrm_core.data.batch import Batch
from dlrm_core.errors import InputError


@runtime_checkable
class Resumable(Protocol):
    """A stream of batches that can be left and taken up again."""

    def next_batch(self) -> Batch:
        """The next batch of the stream."""

    def state(self) -> dict[str, Any]:
        """Where the stream stands: the next batch is the one after this."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state()`` was called, on a generator made alike."""


class Followed:
    """A generator whose position is that of the batches used, not of those made ahead.

    Args:
        generator: asked for its state after each batch, in the thread that makes batches.
    """

    def __init__(self, generator: Resumable) -> None:
        self._generator = generator
        # appended to by the loader's thread, read by the loop's: a deque allows both
        self._states = collections.deque([generator.state()])

    def next_batch(self) -> Batch:
        """The next batch of the stream."""
        batch = self._generator.next_batch()
        self._states.append(self._generator.state())
        return batch

    def used(self) -> None:
        """The loop has taken the next batch."""
        self._states.popleft()

    def position(self) -> dict[str, Any]:
        """State after the last batch that was used."""
        return self._states[0]


def plain_state(state: Any) -> Any:
    """A state as JSON carries it: arrays become ``{"array": dtype, "values": [...]}``."""
    if isinstance(state, np.ndarray):
        return {"array": state.dtype.name, "values": state.reshape(-1).tolist()}
    if isinstance(state, Mapping):
        return {str(key): plain_state(value) for key, value in state.items()}
    if isinstance(state, np.generic):
        return state.item()
    return state


def state_from_plain(state: Any) -> Any:
    """The inverse of :func:`plain_state`.

    Raises:
        InputError: numbers that their type does not hold.
    """
    if not isinstance(state, Mapping):
        return state
    if set(state) == {"array", "values"}:
        try:
            return np.array(state["values"], np.dtype(state["array"]))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the position in the data is not valid: {error}") from None
    return {key: state_from_plain(value) for key, value in state.items()}
