"""How long the step's thread is in each part, exchanges taken out and given their own rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from dlrm_core.distributed.collectives import Collectives


@dataclass
class PartClock:
    """Times of parts, iteration by iteration.

    Put around every part by :func:`dlrm_core.parts.capturing`. Time in which a part begins a
    collective or waits for one is ``communication`` of the same phase; a part of that name
    is so as a whole, packing and unpacking included.

    Attributes:
        iterations: of each iteration since :meth:`begin` its parts' seconds by
            (component, phase).
        spans: of each iteration (component, phase, start, end) in seconds, as they came.
    """

    collectives: Collectives
    iterations: list[dict[tuple[str, str], float]] = field(default_factory=list)
    spans: list[list[tuple[str, str, float, float]]] = field(default_factory=list)

    def begin(self) -> None:
        """A new iteration begins here."""
        self.iterations.append({})
        self.spans.append([])

    @contextlib.contextmanager
    def around(self, component: str, phase: str) -> Iterator[None]:
        """The context of one part."""
        driven = self.collectives.driven_s
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            spent = ended - started
            exchanged = self.collectives.driven_s - driven
            if self.iterations:
                row = self.iterations[-1]
                self.spans[-1].append((component, phase, started, ended))
                if component == "communication":
                    exchanged = spent
                else:
                    key = (component, phase)
                    row[key] = row.get(key, 0.0) + spent - exchanged
                if exchanged:
                    key = ("communication", phase)
                    row[key] = row.get(key, 0.0) + exchanged
