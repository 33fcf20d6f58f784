"""Every collective of a rank: how many there were, and whether the step's thread waits in one.

TorchRec calls ``torch.distributed``'s functions by their module, DDP's hook and our own
buckets do so too, so inside :meth:`Collectives.installed` they are replaced there by ones
that take note and call the original. The watch of the ranks reads that; the scaling study
times them as well (:mod:`dlrm_studies.scaling.collectives`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

FUNCTIONS = (
    *("all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather"),
    *("reduce_scatter_tensor", "reduce_scatter", "broadcast"),
)

_NEWER_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


class Collectives:
    """What a rank exchanges.

    Attributes:
        calls: collectives begun so far: a sign of progress.
        waiting: whether the step's thread is in one, or waits for one.
        what: what the next ones carry.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.waiting = False
        self.what = "other"

    @contextlib.contextmanager
    def installed(self) -> Iterator[Collectives]:
        """Stand between all callers and ``torch.distributed`` while the context is open."""
        before = {name: getattr(dist, name) for name in FUNCTIONS}
        for name, original in before.items():
            # TorchRec calls two by names that newer releases of torch warn about, every time
            newer = getattr(dist, _NEWER_NAMES.get(name, name), original)
            setattr(dist, name, self.noted(name, newer))
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

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """The step's thread waits for others inside."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for the function of this name, and calls the original."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            with self.waits():
                work = original(*args, **kwargs)
            return None if work is None else NotedWork(work, self)

        return call


class NotedWork(dist.Work):
    """A collective under way whose waiting is noted."""

    def __init__(self, work: dist.Work, owner: Collectives) -> None:
        super().__init__()
        self._work = work
        self._owner = owner

    def wait(self, *timeout: Any) -> bool:
        with self._owner.waits():
            return self._work.wait(*timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()
