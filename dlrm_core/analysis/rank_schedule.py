"""One iteration on one rank, as two lanes: what is computed, and what is exchanged meanwhile.

The order is that of a hybrid-parallel step (Naumov et al. 2019, section 4): indices change
hands, embeddings are looked up, pooled vectors are on their way while the bottom MLP runs;
backward, the top MLP's gradients are on their way while interaction and bottom MLP run, the
pooled gradients likewise. A collective waits for the one before it. What the compute lane
waits is exposed; of what could be hidden ``Overlap.hides`` says how much really is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrm_core.parts import COMPONENTS

BUCKET_BYTES = 25 << 20
"""Gradients that DistributedDataParallel gathers before it reduces them (its default)."""

Part = tuple[str, str]


@dataclass(frozen=True)
class Overlap:
    """What may run beside a collective, and how well it does.

    Attributes:
        pooled: the bottom MLP beside the exchange of pooled vectors and of their gradients.
        dense: backward beside the all-reduce of gradients.
        hides: share of the time behind which computing went on that was really saved: 1 where
            a device of its own moves the bytes, 0 where the ranks' own cores do.
    """

    pooled: bool = True
    dense: bool = True
    hides: float = 1.0


NO_OVERLAP = Overlap(pooled=False, dense=False, hides=0.0)


class Event(NamedTuple):
    """``lane`` is "compute" or "communication"."""

    lane: str
    name: str
    phase: str
    start_ms: float
    end_ms: float


@dataclass
class Schedule:
    """What ran when, and what was waited for."""

    events: list[Event] = field(default_factory=list)
    exposed: dict[str, float] = field(default_factory=dict)
    """Name of an exchange to the time for which the compute lane waited for it, ms."""
    end_ms: float = 0.0


class _Lanes:
    """Two clocks."""

    def __init__(self, hides: float) -> None:
        self.now = self.link = 0.0
        self.hides = hides
        self.made = Schedule()
        self._began: dict[str, float] = {}

    def compute(self, part: Part, ms: float) -> None:
        if ms > 0:
            self.made.events.append(Event("compute", *part, self.now, self.now + ms))
            self.now += ms

    def send(self, name: str, phase: str, ms: float, ready: float | None = None) -> None:
        """Put an exchange on its way; ``ready``: when its data began to be there."""
        if ms <= 0:
            return
        start = max(self.link, self.now if ready is None else ready)
        self.link = start + ms
        self._began[name] = ms
        self.made.events.append(Event("communication", name, phase, start, self.link))

    def wait(self, *names: str) -> None:
        """Until the exchanges are done; the part that was not really hidden is added."""
        for name in names:
            ms = self._began.pop(name, 0.0)
            end = next((e.end_ms for e in self.made.events if e.name == name), self.now)
            if ms <= 0:
                continue
            exposed = min(ms, max(0.0, end - self.now))
            lost = (ms - exposed) * (1 - self.hides)
            self.made.exposed[name] = self.made.exposed.get(name, 0.0) + exposed + lost
            self.now = max(self.now, end) + lost
            self.link = max(self.link, self.now if lost else 0.0)


def schedule(
    compute_ms: Mapping[Part, float],
    exchange_ms: Mapping[tuple[str, str], float],
    overlap: Overlap,
    bottom_share: float = 0.5,
    bucket_share: float = 1.0,
) -> Schedule:
    """Lay one iteration out on the two lanes.

    Args:
        compute_ms: time of each (component, phase) on this rank.
        exchange_ms: time of each (what, phase), as :func:`.communication.volumes` names them.
        bottom_share: share of the dense gradients' all-reduce that is the bottom MLP's.
        bucket_share: share of the top MLP's gradients that must be there before the first
            bucket of them leaves.
    """
    lanes = _Lanes(overlap.hides if overlap.pooled or overlap.dense else 0.0)

    def run(*parts: Part) -> None:
        for part in parts:
            lanes.compute(part, compute_ms.get(part, 0.0))

    def exchange(what: str, phase: str) -> float:
        return exchange_ms.get((what, phase), 0.0)

    run(("data", "forward"), ("transfer", "forward"))
    lanes.send("indices", "forward", exchange("indices", "forward"))
    lanes.wait("indices")
    run(("embedding", "forward"))
    lanes.send("pooled vectors", "forward", exchange("pooled vectors", "forward"))
    if not overlap.pooled:
        lanes.wait("pooled vectors")
    run(("bottom_mlp", "forward"))
    lanes.wait("pooled vectors")
    run(("interaction", "forward"), ("top_mlp", "forward"), ("loss", "forward"))
    run(("loss", "backward"))
    began = lanes.now
    run(("top_mlp", "backward"))
    dense = exchange("dense gradients", "backward")
    top = dense * (1 - bottom_share)
    if overlap.dense:
        first = began + (lanes.now - began) * min(1.0, bucket_share)
        # the last bucket leaves when the last gradient is there
        hidden = top * (1 - min(1.0, bucket_share))
        lanes.send("top MLP gradients", "backward", top, max(first, lanes.now - hidden))
    run(("interaction", "backward"))
    lanes.send("pooled gradients", "backward", exchange("pooled gradients", "backward"))
    if not overlap.pooled:
        lanes.wait("pooled gradients")
    run(("bottom_mlp", "backward"))
    if overlap.dense:
        lanes.send("bottom MLP gradients", "backward", dense * bottom_share)
        lanes.send("table gradients", "backward", exchange("table gradients", "backward"))
    lanes.wait("pooled gradients")
    run(("embedding", "backward"), ("embedding", "update"))
    if not overlap.dense:
        lanes.send("top MLP gradients", "backward", top)
        lanes.send("bottom MLP gradients", "backward", dense * bottom_share)
        lanes.send("table gradients", "backward", exchange("table gradients", "backward"))
    lanes.wait("top MLP gradients", "bottom MLP gradients", "table gradients")
    done = {(event.name, event.phase) for event in lanes.made.events}
    rest = [part for part in compute_ms if part not in done]
    run(*sorted(rest, key=lambda part: (COMPONENTS.index(part[0]), part[1])))
    made = lanes.made
    made.end_ms = lanes.now
    return made


def dense_exposed(made: Schedule) -> dict[str, float]:
    """Exposed time by what :func:`.communication.volumes` calls it."""
    total: dict[str, float] = {}
    for name, ms in made.exposed.items():
        what = "dense gradients" if name.endswith("MLP gradients") else name
        total[what] = total.get(what, 0.0) + ms
    return total
