"""Epochs: how the samples of a pass are cut into batches, and streams that begin again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dlrm_core.data.batch import Batch


@dataclass(frozen=True)
class Epoch:
    """The batches of a pass over a stream's samples; batches count from 0 over all passes."""

    samples: int | None  # of a pass; None: the stream has no end, and all batches are whole
    batch_size: int  # samples of every batch but, perhaps, the last of a pass
    drop_last: bool = True  # whether the samples that do not fill a batch are left out

    @property
    def full_batches(self) -> int | None:
        """Whole batches of a pass; None without an end."""
        return None if self.samples is None else self.samples // self.batch_size

    @property
    def batches(self) -> int | None:
        """Batches of a pass, the short one included; None without an end."""
        return None if self.full_batches is None else self.full_batches + (self._left > 0)

    @property
    def _left(self) -> int:
        """Samples of the short batch that ends a pass; 0: there is none."""
        return 0 if self.samples is None or self.drop_last else self.samples % self.batch_size

    def place(self, batch: int) -> tuple[int, int]:
        """Pass that a batch belongs to, and its number there."""
        return (0, batch) if self.batches is None else divmod(batch, self.batches)

    def size(self, batch: int) -> int:
        """Samples of a batch."""
        return self.samples_before(batch + 1) - self.samples_before(batch)

    def samples_before(self, batch: int) -> int:
        """Samples of all batches before this one."""
        passed, place = self.place(batch)
        if not passed:
            return place * self.batch_size
        assert self.full_batches is not None
        whole = self.full_batches * self.batch_size + self._left
        return passed * whole + place * self.batch_size


@runtime_checkable
class Generator(Protocol):
    """A stream of batches that can be left and taken up again."""

    def next_batch(self) -> Batch:
        """The next batch of the stream."""

    def state(self) -> dict[str, Any]:
        """Where the stream stands: the next batch is the one after this."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state()`` was called, on a generator made alike.

        Raises InputError if the generator cannot stand there.
        """


class RepeatedBatches:
    """A generated stream that begins again after each pass, as facebookresearch/dlrm's does.

    The ``generator`` is at its beginning and takes a size; the ``epoch`` has a number of samples.
    """

    def __init__(self, generator: Any, epoch: Epoch) -> None:
        self.epoch = epoch
        self.taken = 0
        self._generator = generator
        self._beginning = generator.state()

    def next_batch(self) -> Batch:
        """The next batch of the stream, the last of a pass as small as what is left."""
        passed, place = self.epoch.place(self.taken)
        if passed and not place:
            self._generator.restore(self._beginning)
        batch = self._generator.next_batch(self.epoch.size(self.taken))
        self.taken += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"batches": self.taken, "stream": self._generator.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._generator.restore(state["stream"])
        self.taken = int(state["batches"])
