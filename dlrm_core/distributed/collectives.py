"""Every collective of a rank: how many, whether it waits, and on request how long each takes.

TorchRec calls ``torch.distributed``'s functions by their module, DDP's hook and our own
buckets do so too, so inside :meth:`Collectives.installed` they are replaced there by ones
that note bytes and times and call the original.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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

_NEWER_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


@dataclass
class Collective:
    """One collective on one rank; times in seconds of ``time.perf_counter``."""

    kind: str
    what: str
    bytes: int
    """Payload, see :mod:`dlrm_workbook.analysis.ranks.communication`."""
    started: float
    ended: float | None = None
    exposed: float = 0.0
    """Seconds of it in which the step's thread did nothing but wait."""


class Collectives:
    """What a rank exchanges.

    Attributes:
        calls: collectives begun so far: a sign of progress.
        waiting: whether the step's thread is in one, or waits for one.
        what: what the next ones carry.
        driven_s: time the step's thread spent beginning collectives and waiting for them.
        records: of each since recording began; None: nothing is recorded.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.waiting = False
        self.what = "other"
        self.driven_s = 0.0
        self.records: list[Collective] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[Collectives]:
        """Stand between all callers and ``torch.distributed`` while the context is open."""
        before = {name: getattr(dist, name) for name in _KINDS}
        for name, original in before.items():
            # TorchRec calls two by names that newer releases of torch warn about, every time
            newer = getattr(dist, _NEWER_NAMES.get(name, name), original)
            setattr(dist, name, self._noted(newer, *_KINDS[name]))
        try:
            yield self
        finally:
            for name, original in before.items():
                setattr(dist, name, original)

    @contextlib.contextmanager
    def about(self, what: str) -> Iterator[None]:
        """Collectives begun inside carry ``what``."""
        before, self.what = self.what, what
        try:
            yield
        finally:
            self.what = before

    def note_progress(self) -> None:
        """Count something that went on and is no collective."""
        self.calls += 1

    def _noted(
        self, original: Callable[..., Any], kind: str, place: int, name: str
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            payload = args[place] if len(args) > place else kwargs[name]
            started = time.perf_counter()
            record = Collective(kind, self.what, _bytes(payload), started)
            if self.records is not None:
                self.records.append(record)
            self.waiting = True
            try:
                work = original(*args, **kwargs)
            finally:
                self.waiting = False
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
            return _NotedWork(work, record, self)

        return call


class _NotedWork(dist.Work):
    """A collective under way whose waiting is noted."""

    def __init__(self, work: dist.Work, record: Collective, owner: Collectives) -> None:
        super().__init__()
        self._work = work
        self._record = record
        self._owner = owner

    def wait(self, *timeout: Any) -> bool:
        owner, started = self._owner, time.perf_counter()
        owner.waiting = True
        try:
            return self._work.wait(*timeout)
        finally:
            owner.waiting = False
            now = time.perf_counter()
            owner.driven_s += now - started
            if self._record.ended is None or self._record.ended > started:
                # it is done when the thread that waits for it knows
                self._record.exposed += now - started
                self._record.ended = now

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()


def _end(record: Collective, future: Any) -> None:
    if record.ended is None:
        record.ended = time.perf_counter()


def _bytes(payload: Any) -> int:
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    return sum(tensor.nbytes for tensor in payload)
