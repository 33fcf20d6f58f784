"""Batches made by another thread: how long the step then takes.

While both run, on cores, memory and a Python lock that they share, the step takes ``s``
times as long and a batch ``g`` times; both were timed on parts of the step
(:func:`dlrm_core.part_probes.probe_changes`). If the batch is done first, the rest of the
step runs at its own pace; if the step is done first, it waits for the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_core.analysis.whatif_parts import measured_parts
from dlrm_core.config import Parameters
from dlrm_core.profiling.profile import Profile


@dataclass(frozen=True)
class Contention:
    """How making a batch and the step slow each other down, and how long either takes alone."""

    step: float
    """s: the step's time while batches are made, over its time alone."""
    data: float
    """g: a batch's time while the step runs, over its time alone."""
    data_alone_ms: float
    step_alone_ms: float

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Contention:
        """From the ``overlap`` of a probe."""
        halves = found["halves"]
        alone = sum(half["alone_ms"] for half in halves.values())
        beside = sum(half["beside_ms"] for half in halves.values())
        made = sum(found["data_beside_ms"][name] * halves[name]["beside_ms"] for name in halves)
        return cls(
            step=max(1.0, beside / alone),
            data=max(1.0, made / beside / found["data_alone_ms"]),
            data_alone_ms=found["data_alone_ms"],
            step_alone_ms=alone,
        )


@dataclass(frozen=True)
class Overlap:
    """How an iteration comes about from making its batch and from the rest of the step."""

    beside: bool = False
    """Whether batches are made in another thread after the change."""
    step: float = 1.0
    data: float = 1.0
    """Slow-downs s and g."""
    rest_scale: float = 1.0
    """The rest alone over what was measured: less than 1 where that was slowed already."""
    data_ms: float | None = None
    """Making a batch alone after the change, where only the wait for it was measured."""

    @classmethod
    def of(
        cls, profile: Profile, probe: Mapping[str, Any], base: Parameters, changed: Parameters
    ) -> Overlap:
        """What the probe of a change says; the plain sum where nothing overlaps or was probed."""
        before, after = probe.get("overlap_base"), probe.get("overlap")
        was, will = (p.data.loader == "prefetch" for p in (base, changed))
        if not (was or will) or (was and not before) or (will and not after):
            return cls()
        new = Contention.of(after) if will and after else None
        step, data = (new.step, new.data) if new else (1.0, 1.0)
        if not was or not before:
            return cls(will, step, data)
        old = Contention.of(before)
        parts = measured_parts(profile)
        now = float(parts["now_ms"].sum())
        rest = now - float(parts.loc[parts["component"].eq("data"), "now_ms"].sum())
        # the model's own figure for the measured step: what it misses, it misses afterwards too
        scale = now / together_ms(old.data_alone_ms, old.step_alone_ms, old.data, old.step)
        made = probe.get("parts", {}).get("data", {}).get("forward")
        alone = probe.get("base", {}).get("data", {}).get("forward")
        ratio = made / alone if made and alone else 1.0
        return cls(
            will, step, data, old.step_alone_ms * scale / rest, old.data_alone_ms * ratio * scale
        )

    def step_ms(self, data_ms: float, rest_ms: float) -> float:
        """An iteration, ms.

        Args:
            data_ms, rest_ms: either after the change, as parts of the measured step scaled.
        """
        data = data_ms if self.data_ms is None else self.data_ms
        rest = rest_ms * self.rest_scale
        return together_ms(data, rest, self.data, self.step) if self.beside else data + rest


def together_ms(data_ms: float, rest_ms: float, data_slow: float, rest_slow: float) -> float:
    """Time until a batch is made and the step is done, started together.

    Args:
        data_ms, rest_ms: either alone.
        data_slow, rest_slow: how many times as long each takes while both run.
    """
    if data_ms * data_slow <= rest_ms * rest_slow:
        both = data_ms * data_slow
        return both + rest_ms - both / rest_slow
    both = rest_ms * rest_slow
    return both + data_ms - both / data_slow
