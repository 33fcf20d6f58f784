"""Batches on their way to a GPU: pinned buffers used again and again, copies on a stream apart.

A batch is packed into one page-locked buffer and goes to the device in one copy, on a
stream of its own, while the step before computes. Nobody waits but for what it needs:

* the device waits for a batch's copy before its first use (an event, not the host);
* the copy into a buffer waits until the step that read it before is done with it;
* the thread that packs waits until the copy out of its buffer is done.

Shapes: B samples, T tables, N lookups of a batch.
"""

from __future__ import annotations

import dataclasses
import math
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrm_core.data.batch import Batch, extents_of
from dlrm_core.data.loader import prefetched

ALIGNMENT = 256
"""Bytes: each tensor in a buffer begins at a multiple, as an allocation of its own would."""

ROOM = 8
"""A buffer that has grown is 1/ROOM larger than the batch that it grew for."""


class CudaCopies:
    """Two streams of a GPU: one of its own copies, the other (the caller's) computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the copying stream; returns before it is done."""
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)

    def mark(self, copying: bool) -> torch.cuda.Event:
        """An event: all work so far of the copying stream, or of the computing one."""
        event = torch.cuda.Event()
        event.record(self._stream_of(copying))
        return event

    def wait(self, event: torch.cuda.Event, copying: bool) -> None:
        """Let the copying, or the computing, stream wait for an event; not the host."""
        self._stream_of(copying).wait_event(event)

    def join(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def _stream_of(self, copying: bool) -> torch.cuda.Stream:
        return self._stream if copying else torch.cuda.current_stream(self._device)


@dataclass
class Slot:
    """A pair of buffers and what they are waiting for."""

    host: torch.Tensor | None = None
    device: torch.Tensor | None = None
    copied: Any = None
    """The last copy out of ``host``."""
    used: Any = None
    """The last work that read ``device``."""


class Staging:
    """Moves batches to a device through slots that its user hands round.

    ``load`` is called by the thread that makes batches, ``wait`` and ``release`` by the one
    that computes; a slot is with one of them at a time.
    """

    def __init__(self, copies: CudaCopies) -> None:
        self._copies = copies

    def load(self, batch: Batch, slot: Slot) -> tuple[Batch, Slot]:
        """Pack a batch into a slot and begin its copy; the batch on the device, and the slot."""
        if slot.copied is not None:
            self._copies.join(slot.copied)
        tensors = _tensors(batch)
        places = _places(tensors)
        size = places[-1]
        if slot.host is None or slot.host.numel() < size:
            if slot.used is not None:
                # nobody may read a buffer that is given back
                self._copies.join(slot.used)
            room = size + size // ROOM
            slot.host = self._copies.host_buffer(room)
            slot.device = self._copies.device_buffer(room)
            # memory that another stream has just given back may still be read by it
            slot.used = self._copies.mark(copying=False)
        assert slot.device is not None
        for tensor, view in zip(tensors, _views(slot.host, tensors, places), strict=True):
            view.copy_(tensor)
        if slot.used is not None:
            self._copies.wait(slot.used, copying=True)
        self._copies.copy(slot.device[:size], slot.host[:size])
        slot.copied = self._copies.mark(copying=True)
        extents, offsets, dense, targets, indices = _views(slot.device, tensors, places)
        moved = dataclasses.replace(
            batch, dense=dense, indices=indices, offsets=offsets, targets=targets, extents=extents
        )
        return moved, slot

    def wait(self, slot: Slot) -> None:
        """Have what is computed next begin when the slot's copy is done."""
        self._copies.wait(slot.copied, copying=False)

    def release(self, slot: Slot) -> None:
        """All work on the batch has been given to the device: the slot may be loaded again."""
        slot.used = self._copies.mark(copying=False)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    """What is packed: what every batch has as much of first, the indices last."""
    extents = batch.extents if batch.extents is not None else extents_of(batch.table_starts)
    return [extents, batch.offsets, batch.dense, batch.targets, batch.indices]


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor begins in a buffer, in bytes, and where the last one ends."""
    places = [0]
    for tensor in tensors:
        places.append(places[-1] + math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT)
    return places


def _views(
    buffer: torch.Tensor, tensors: Sequence[torch.Tensor], places: Sequence[int]
) -> list[torch.Tensor]:
    """The tensors' places in a buffer, in their types and shapes."""
    return [
        buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, place in zip(tensors, places, strict=False)
    ]


def staged(
    make: Callable[[], Batch], ahead: int, device: torch.device, copies: CudaCopies | None = None
) -> Iterator[Batch]:
    """Batches on the device, made and copied there by a thread while the step computes.

    A batch that was handed over stays as it is until the next one is asked for.
    """
    staging = Staging(copies or CudaCopies(device))
    # those kept ready, one being computed with, one being loaded
    free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    for _ in range(ahead + 2):
        free.put(Slot())
    # one slot more than can wait in line, be used and be loaded: never empty for long
    stream = prefetched(lambda: staging.load(make(), free.get()), ahead)
    last: Slot | None = None
    try:
        for batch, slot in stream:
            if last is not None:
                staging.release(last)
                free.put(last)
            last = slot
            staging.wait(slot)
            yield batch
    finally:
        stream.close()
