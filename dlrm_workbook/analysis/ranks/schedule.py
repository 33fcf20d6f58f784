"""One iteration on one rank, as two lanes: what is computed, and what is exchanged meanwhile.

The order is that of a hybrid-parallel step (Naumov et al. 2019, section 4): indices change
hands, embeddings are looked up, pooled vectors are on their way while the bottom MLP runs;
backward, the top MLP's gradients are on their way while interaction and bottom MLP run, the
pooled gradients likewise. A collective waits for the one before it. What the compute lane
waits is exposed; of what could be hidden ``Overlap.hides`` says how much really is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrm_core.parts import COMPONENTS

BUCKET_BYTES = 25 << 20
"""Gradients that DistributedDataParallel gathers before it reduces them (its default)."""

Part = tuple[str, str]


STRETCHES: tuple[tuple[str, frozenset[Part]], ...] = (
    ("indices", frozenset({("data", "forward"), ("communication", "forward")})),
    ("pooled vectors", frozenset({("embedding", "forward"), ("bottom_mlp", "forward")})),
    (
        "pooled gradients",
        frozenset(
            {
                *(("interaction", "forward"), ("top_mlp", "forward"), ("loss", "forward")),
                *(("loss", "backward"), ("top_mlp", "backward"), ("interaction", "backward")),
                ("bottom_mlp", "backward"),
            }
        ),
    ),
)
"""What ranks compute by themselves until an exchange brings them together; all other parts come
before the gradients' all-reduce."""


def deviation_ms(deviations: Mapping[Part, float], exchanged: Collection[str]) -> float:
    """Sum over the stretches of a step of each one's standard deviation.

    Args:
        deviations: of each part, ms; parts vary on their own, so variances add up.
        exchanged: what changes hands; where it does not, two stretches are one.
    """
    left, total, open_variance = dict(deviations), 0.0, 0.0
    for what, parts in STRETCHES:
        open_variance += sum(left.pop(part, 0.0) ** 2 for part in parts)
        if what in exchanged:
            total, open_variance = total + math.sqrt(open_variance), 0.0
    return total + math.sqrt(open_variance + sum(each**2 for each in left.values()))


@dataclass(frozen=True)
class Overlap:
    """What may run beside a collective, and how well it does.

    Attributes:
        pooled: the bottom MLP beside the exchange of pooled vectors and of their gradients.
        dense: backward beside the all-reduce of gradients.
        hides: rate of computing while the link is busy: 1 where a device of its own moves the
            bytes, 0 where the ranks' own cores do, so that nothing is saved.
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
    """Two clocks. While the link is busy, computing advances at the rate ``hides``: what runs
    beside an exchange is then saved to that share."""

    def __init__(self, hides: float) -> None:
        self.now = self.link = 0.0
        self.hides = hides
        self.made = Schedule()
        self._sent: list[Event] = []

    def compute(self, part: Part, ms: float) -> None:
        """Run a part; longer than ``ms`` where the link is busy beside it."""
        if ms <= 0:
            return
        busy = max(0.0, self.link - self.now)
        if ms <= self.hides * busy:
            end = self.now + ms / self.hides
        else:
            end = self.now + ms + (1 - self.hides) * busy
        self.made.events.append(Event("compute", *part, self.now, end))
        self._expose(end, 1 - self.hides)
        self.now = end

    def send(self, name: str, phase: str, ms: float) -> None:
        """Put an exchange on its way, behind those that are under way."""
        if ms <= 0:
            return
        start = max(self.link, self.now)
        self.link = start + ms
        self._sent.append(Event("communication", name, phase, start, self.link))
        self.made.events.append(self._sent[-1])

    def wait(self, *names: str) -> None:
        """Until these exchanges are done."""
        end = max((each.end_ms for each in self._sent if each.name in names), default=self.now)
        self._expose(end, 1.0)
        self.now = max(self.now, end)

    def _expose(self, until: float, share: float) -> None:
        """Charge ``share`` of the time from now on to the exchanges that are under way."""
        for each in self._sent:
            beside = min(until, each.end_ms) - max(self.now, each.start_ms)
            if beside > 0 and share > 0:
                exposed = self.made.exposed
                exposed[each.name] = exposed.get(each.name, 0.0) + share * beside


def schedule(
    compute_ms: Mapping[Part, float],
    exchange_ms: Mapping[tuple[str, str], float],
    overlap: Overlap,
    bottom_share: float = 0.5,
    bucket_share: float = 1.0,
) -> Schedule:
    """Lay one iteration out on the two lanes.

    Args:
        compute_ms: time of each (component, phase) on this rank; that of "communication" is
            packing and unpacking.
        exchange_ms: time of each (what, phase), as :func:`.communication.volumes` names them.
        bottom_share: share of the dense gradients' all-reduce that is the bottom MLP's.
        bucket_share: share of the top MLP's gradients that must be there before the first
            bucket of them leaves.
    """
    lanes = _Lanes(overlap.hides)

    def run(*parts: Part) -> None:
        for part in parts:
            lanes.compute(part, compute_ms.get(part, 0.0))

    def exchange(what: str, phase: str) -> float:
        return exchange_ms.get((what, phase), 0.0)

    run(("data", "forward"), ("transfer", "forward"), ("communication", "forward"))
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
    dense, backward = exchange("dense gradients", "backward"), ("top_mlp", "backward")
    top, bucket = dense * (1 - bottom_share), min(1.0, bucket_share)
    if overlap.dense:
        # the first bucket leaves when it is full, the last when the last gradient is there
        lanes.compute(backward, compute_ms.get(backward, 0.0) * bucket)
        lanes.send("top MLP gradients", "backward", top * (1 - bucket))
        lanes.compute(backward, compute_ms.get(backward, 0.0) * (1 - bucket))
        lanes.send("top MLP gradients", "backward", top * bucket)
    else:
        run(backward)
    run(("interaction", "backward"))
    lanes.send("pooled gradients", "backward", exchange("pooled gradients", "backward"))
    if not overlap.pooled:
        lanes.wait("pooled gradients")
    run(("bottom_mlp", "backward"), ("communication", "backward"))
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
