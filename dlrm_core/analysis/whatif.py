"""Predicts the step time after a change of parameters, without running the changed step.

``then = sum over parts of now x ratio``: every part and phase that a change touches is
scaled by how its time alone changed in a probe (:mod:`dlrm_core.part_probes`); the others
stay as measured. What the profile says is measured under a profiler, so it is first
scaled to the median iteration that ran without one. Batches made by another thread are
in the step only for as long as the step waits for them (:mod:`.whatif_overlap`). Where
no probe exists, the ratio of the least times that work and ceilings allow stands in, with
a wider range (:mod:`.whatif_roofline`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.analysis.attribution import attribute
from dlrm_core.analysis.whatif_overlap import Overlap, step_ms
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.profiling.profile import Profile
from dlrm_core.touched import changed_parameters, touched_components

MODEL_ERROR = 0.06
"""Relative error of a part's ratio that probes make however often they are repeated."""

COVER = 1.64
"""Half width of a range in standard errors: 90 % of a normal distribution."""

COLUMNS = ["component", "phase", "now_ms", "then_ms", "low_ms", "high_ms", "method"]


@dataclass(frozen=True)
class Prediction:
    """The step time that a change is expected to lead to, in ms an iteration."""

    change: dict[str, Any]
    now_ms: float
    """Median iteration as it is, without a profiler."""
    low_ms: float
    mid_ms: float
    high_ms: float
    """The range holds the measured value in about nine cases of ten."""
    parts: pd.DataFrame
    """``component``, ``phase``, ``now_ms``, ``then_ms``, ``low_ms``, ``high_ms``, ``method``."""
    method: str
    """'probes', 'roofline', or 'probes and roofline'."""
    notices: list[str] = field(default_factory=list)
    samples_now: int = 0
    """Samples of an iteration as it is."""
    samples_then: int = 0

    @property
    def speedup(self) -> dict[str, float]:
        """Time a sample now over then: ``low``, ``mid``, ``high``."""
        more = self.samples_then / self.samples_now if self.samples_now else 1.0
        ends = {"low": self.high_ms, "mid": self.mid_ms, "high": self.low_ms}
        return {name: more * self.now_ms / then for name, then in ends.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "change": dict(self.change),
            "now_ms": self.now_ms,
            "low_ms": self.low_ms,
            "mid_ms": self.mid_ms,
            "high_ms": self.high_ms,
            "speedup": self.speedup,
            "method": self.method,
            "notices": list(self.notices),
            "parts": self.parts.to_dict("records"),
        }


def predict(profile: Profile, change: Mapping[str, Any]) -> Prediction:
    """What the step would take after a change of any parameters.

    Args:
        profile: a measured run; its probes are used where they hold this change.
        change: dotted leaf to value, ``{"training.batch_size": 4096}``.

    Raises:
        InputError: the change is no valid one, or there is nothing to predict it from;
            the message says what is missing.
    """
    base = profile_parameters(profile)
    changed, notices = changed_parameters(base, change)
    touched = touched_components(base, changed)
    parts = measured_parts(profile)
    now = float(parts["now_ms"].sum())
    sizes = (base.training.batch_size, changed.training.batch_size)
    if not touched:
        notices.append("the change touches no part of the step: its time stays")
        same = parts.assign(then_ms=parts["now_ms"], low_ms=parts["now_ms"])
        same = same.assign(high_ms=parts["now_ms"], method="measured")[COLUMNS]
        return Prediction(dict(change), now, now, now, now, same, "measured", notices, *sizes)
    probe = find_probe(profile, change)
    if probe is None:
        raise InputError(_without_probe(profile, change))
    if probe.get("refused"):
        raise InputError(f"{_spelt(change)} cannot be predicted: {probe['refused']}")
    notices += [text for text in probe.get("notices", []) if text not in notices]
    table = _scaled(parts, probe)
    low, mid, high = total(table, Overlap.of(profile, probe, base, changed))
    return Prediction(dict(change), now, low, mid, high, table, "probes", notices, *sizes)


def predict_change(
    parameters: Parameters, profile: Profile, change: Mapping[str, Any], seconds: float = 12.0
) -> Prediction:
    """Probe a change on this machine now, then predict it from the profile.

    Costs about ``seconds``, the time to make the tables, and their memory (twice where
    the change is of the tables). The profile must be of this machine and device.

    Raises:
        InputError: as :func:`predict`.
    """
    from dlrm_core.part_probes import probe_changes

    probes = probe_changes(parameters, [change], seconds)
    meta = profile.meta | {"part_probes": probes}
    probed = Profile(
        profile.contexts,
        profile.metrics,
        profile.values,
        profile.threads,
        profile.trace,
        profile.iterations,
        meta,
    )
    return predict(probed, change)


def what_if_table(
    profile: Profile, changes: Iterable[Mapping[str, Any]] | None = None
) -> pd.DataFrame:
    """Predictions, the largest speedup first.

    Args:
        changes: those that the profile has probes for if None.

    Returns:
        ``change`` (text), ``now_ms``, ``low_ms``, ``mid_ms``, ``high_ms`` (an
        iteration), ``speedup_low``, ``speedup_mid``, ``speedup_high`` (of a sample),
        ``method``, ``note`` (why there is no prediction, or what else changes); NaN
        where there is none.
    """
    if changes is None:
        changes = [probe["change"] for probe in _probes(profile)]
    rows = []
    for change in changes:
        row: dict[str, Any] = {"change": _spelt(change)}
        try:
            made = predict(profile, change)
        except InputError as error:
            rows.append(row | {"note": str(error)})
            continue
        row |= {name: getattr(made, name) for name in ("now_ms", "low_ms", "mid_ms", "high_ms")}
        row |= {f"speedup_{end}": ratio for end, ratio in made.speedup.items()}
        rows.append(row | {"method": made.method, "note": "; ".join(made.notices)})
    columns = ["change", "now_ms", "low_ms", "mid_ms", "high_ms", "speedup_low", "speedup_mid"]
    table = pd.DataFrame(rows, columns=[*columns, "speedup_high", "method", "note"])
    return table.sort_values("speedup_mid", ascending=False, ignore_index=True)


def profile_parameters(profile: Profile) -> Parameters:
    """The parameters that the profiled run had.

    Raises:
        InputError: the profile does not say.
    """
    sections = profile.meta.get("parameters")
    if not sections:
        raise InputError("the profile does not say with which parameters it ran")
    return parameters_from_sections(sections)


def unprofiled_ms(profile: Profile) -> float | None:
    """Median time of an iteration without the profiler, data included; None if unknown."""
    each = profile.meta.get("unprofiled_iteration_ms")
    if each:
        return statistics.median(each)
    for made in profile.meta.get("passes", []):
        if made.get("name") == "unprofiled" and made.get("ms_per_iteration"):
            return float(made["ms_per_iteration"])
        if made.get("unprofiled_ms_per_iteration"):
            return float(made["unprofiled_ms_per_iteration"])
    return None


def measured_parts(profile: Profile) -> pd.DataFrame:
    """``component``, ``phase``, ``now_ms``: the parts of the unprofiled median iteration.

    Raises:
        InputError: the profile names no part of a model.
    """
    found = attribute(profile)
    if found.empty or found["component"].eq("other").all():
        raise InputError("the profile names no part of a model, so no change can be predicted")
    keys = ["component", "phase"]
    parts = found.groupby(keys, as_index=False, sort=False)[["time_ms"]].sum()
    parts = parts.rename(columns={"time_ms": "now_ms"})
    whole = unprofiled_ms(profile)
    if whole is not None:
        parts["now_ms"] *= whole / parts["now_ms"].sum()
    return parts


def find_probe(profile: Profile, change: Mapping[str, Any]) -> dict[str, Any] | None:
    """The probe of exactly this change, or None."""
    wanted = {name: _plain(value) for name, value in change.items()}
    for probe in _probes(profile):
        if {name: _plain(value) for name, value in probe["change"].items()} == wanted:
            return probe
    return None


def _scaled(parts: pd.DataFrame, probe: Mapping[str, Any]) -> pd.DataFrame:
    """The parts after the change, each with its range."""
    table = parts.copy()
    then, error, method = [], [], []
    for component, phase, now_ms in table[["component", "phase", "now_ms"]].to_numpy().tolist():
        ratio, spread = _ratio(probe, component, phase)
        if ratio is None:
            then.append(now_ms)
            error.append(0.0)
            method.append("measured")
        else:
            then.append(now_ms * ratio)
            error.append(math.hypot(spread, MODEL_ERROR))
            method.append("probe")
    table["then_ms"], table["method"] = then, method
    reach = COVER * np.asarray(error)
    table["low_ms"] = table["then_ms"] / (1 + reach)
    table["high_ms"] = table["then_ms"] * (1 + reach)
    return table[COLUMNS]


def _ratio(probe: Mapping[str, Any], component: str, phase: str) -> tuple[float | None, float]:
    """How a part's time alone changed, and the relative error of that; None if untouched."""
    then = probe.get("parts", {}).get(component, {}).get(phase)
    now = probe.get("base", {}).get(component, {}).get(phase)
    if then is None or not now:
        return None, 0.0
    return then / now, probe.get("spread", {}).get(component, {}).get(phase, 0.0)


def total(table: pd.DataFrame, overlap: Overlap) -> tuple[float, float, float]:
    """Low, mid and high of the whole step.

    The parts' errors are partly the same (a warm cache serves all), partly their own:
    halfway between their sum and the root of their squares.
    """
    is_data = table["component"].eq("data")
    data, rest = table.loc[is_data, "then_ms"].sum(), table.loc[~is_data, "then_ms"].sum()
    mid, low_edge, high_edge = step_ms(overlap, float(data), float(rest))
    down = table["then_ms"] - table["low_ms"]
    up = table["high_ms"] - table["then_ms"]

    def joined(reach: pd.Series) -> float:
        return float((reach.sum() + math.sqrt((reach**2).sum())) / 2)

    return (
        min(low_edge, mid) - joined(down) * min(low_edge, mid) / (data + rest),
        mid,
        max(high_edge, mid) + joined(up) * max(high_edge, mid) / (data + rest),
    )


def _probes(profile: Profile) -> list[dict[str, Any]]:
    return list((profile.meta.get("part_probes") or {}).get("changes") or [])


def _without_probe(profile: Profile, change: Mapping[str, Any]) -> str:
    known = "; ".join(_spelt(probe["change"]) for probe in _probes(profile))
    return (
        f"{_spelt(change)} was not probed in this run, so it cannot be predicted from its profile"
        + (f"; probed were: {known}" if known else "; it holds no probes (profiling.probes)")
        + ". dlrm run compare probes any change before it runs it"
    )


def _spelt(change: Mapping[str, Any]) -> str:
    """A change as one writes it behind -p."""

    def value(given: Any) -> str:
        if isinstance(given, bool):
            return str(given).lower()
        return "-".join(map(str, given)) if isinstance(given, list | tuple) else str(given)

    return ", ".join(f"{name}={value(given)}" for name, given in change.items())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
