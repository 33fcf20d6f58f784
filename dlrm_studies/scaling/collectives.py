"""How long each collective of a rank takes, and how long the step's thread waits in it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlrm_core.base.engines import engine

if TYPE_CHECKING:
    from dlrm_ranks.collectives import Collectives, NotedWork
else:
    _ranks = engine("several ranks: collectives")
    Collectives, NotedWork = _ranks.Collectives, _ranks.NotedWork

_KINDS = {
    # function: its kind, and where its payload is: position and name of the argument
    "all_reduce": ("allreduce", 0, "tensor"),
    "all_to_all_single": ("alltoall", 1, "input"),
    "all_gather_into_tensor": ("allgather", 0, "output_tensor"),
    "all_gather": ("allgather", 0, "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "broadcast": ("broadcast", 0, "tensor"),
}


@dataclass
class Collective:
    """One collective on one rank; times in seconds of ``time.perf_counter``."""

    kind: str
    what: str
    bytes: int
    """Payload, see :mod:`dlrm_studies.scaling.model.communication`."""
    started: float
    ended: float | None = None
    exposed: float = 0.0
    """Seconds of it in which the step's thread did nothing but wait."""


class TimedCollectives(Collectives):
    """Collectives with their times.

    Attributes:
        driven_s: time the step's thread spent beginning collectives and waiting for them.
        records: of each since recording began; None: nothing is recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.driven_s = 0.0
        self.records: list[Collective] | None = None

    def noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for the function of this name, and calls the original."""
        begin = super().noted(name, original)
        kind, place, argument = _KINDS[name]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            payload = args[place] if len(args) > place else kwargs[argument]
            started = time.perf_counter()
            record = Collective(kind, self.what, _bytes(payload), started)
            if self.records is not None:
                self.records.append(record)
            try:
                work = begin(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self.driven_s += spent
            if work is None:
                record.ended = started + spent
                record.exposed = spent
                return None
            if self.records is not None:
                # gloo's reduce-scatter has none: it is done when it has been waited for
                with contextlib.suppress(RuntimeError):
                    work.get_future().add_done_callback(functools.partial(_end, record))
            return _TimedWork(work, self, record)

        return call


class _TimedWork(NotedWork):
    """A collective under way whose waiting is timed."""

    def __init__(self, work: dist.Work, owner: TimedCollectives, record: Collective) -> None:
        super().__init__(work, owner)
        self._timed = owner
        self._record = record

    def wait(self, *timeout: Any) -> bool:
        started = time.perf_counter()
        try:
            return super().wait(*timeout)
        finally:
            now = time.perf_counter()
            self._timed.driven_s += now - started
            if self._record.ended is None or self._record.ended > started:
                # it is done when the thread that waits for it knows
                self._record.exposed += now - started
                self._record.ended = now


def _end(record: Collective, future: Any) -> None:
    if record.ended is None:
        record.ended = time.perf_counter()


def _bytes(payload: Any) -> int:
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    return sum(tensor.nbytes for tensor in payload)
