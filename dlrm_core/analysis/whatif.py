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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.analysis.whatif_overlap import Overlap
from dlrm_core.analysis.whatif_parts import (
    KEYS,
    measured_parts,
    profile_parameters,
    unprofiled_ms,
)
from dlrm_core.analysis.whatif_probes import MODEL_ERROR, find_probe, probes_of
from dlrm_core.analysis.whatif_roofline import (
    device_ratios,
    host_ms,
    merged,
    plain_change,
    unknown_by_work,
    work_ratios,
)
from dlrm_core.config import Parameters
from dlrm_core.errors import InputError
from dlrm_core.profiling.profile import Profile
from dlrm_core.touched import NEUTRAL, changed_parameters, touched_components

ROOFLINE_ERROR = 0.25
"""Relative error of a ratio of least times."""

STEP_ERROR = 0.03
"""Relative error of the whole changed step: its parts disturb each other in caches and heap."""

OVERLAP_ERROR = 0.08
"""Relative error of a step beside which batches are made."""

COVER = 1.64
"""Half width of a range in standard errors: 90 % of a normal distribution."""

__all__ = [
    "Prediction",
    "find_probe",
    "measured_parts",
    "predict",
    "predict_change",
    "profile_parameters",
    "total",
    "unprofiled_ms",
    "what_if_parts",
    "what_if_table",
]

COLUMNS = ["component", "phase", "now_ms", "then_ms", "low_ms", "high_ms", "method"]


_NUMBERS_AND_WORDS = ("change", "now_ms", "low_ms", "mid_ms", "high_ms", "method", "notices")


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
    """'probes', 'roofline', 'probes and roofline', or 'measured' where nothing changes."""
    notices: list[str] = field(default_factory=list)
    samples_now: int = 0
    """Samples of an iteration as it is."""
    samples_then: int = 0
    probe: dict[str, Any] = field(default_factory=dict)
    """What the prediction rests on, an entry of ``meta["part_probes"]["changes"]``."""

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
            "samples": [self.samples_now, self.samples_then],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Prediction:
        """What :meth:`to_dict` made, without the probe it rests on."""
        values = {name: document[name] for name in _NUMBERS_AND_WORDS}
        samples = dict(zip(("samples_now", "samples_then"), document["samples"], strict=True))
        return cls(**values, parts=pd.DataFrame(document["parts"]), **samples)


def predict(profile: Profile, change: Mapping[str, Any]) -> Prediction:
    """What the step would take after a change of any parameters.

    Args:
        profile: a measured run; its probes are used where they hold this change.
        change: dotted leaf to value, ``{"training.batch_size": 4096}``; ``device`` names
            another GPU (:mod:`dlrm_core.analysis.devices`).

    Raises:
        InputError: the change is no valid one, or there is nothing to predict it from;
            the message says what is missing.
    """
    leaves, gpu = plain_change(change)
    if gpu is None and not leaves:
        raise InputError("the change is empty; expected leaves such as training.batch_size")
    base = profile_parameters(profile)
    changed, notices = changed_parameters(base, leaves) if leaves else (base, [])
    parts = measured_parts(profile)
    touched = touched_components(base, changed)
    probe = find_probe(profile, leaves) if touched else None
    if probe is not None and not probe.get("refused"):
        notices += [text for text in probe.get("notices", []) if text not in notices]
        ratio, error, method = _probed(parts, probe)
    elif touched:
        refuse_without_work(profile, base, changed, probe)
        notices.append("not probed: predicted from work and ceilings")
        ratio, error, method = _by_work(parts, profile, base, changed)
    else:
        ratio, error, method = np.ones(len(parts)), np.zeros(len(parts)), _same(parts)
        if gpu is None:
            notices.append("the change touches no part of the step: its time stays")
    if gpu is not None:
        ratio, error, method, measured = _on_other_gpu(parts, profile, changed, gpu, ratio, error)
        notices.append(
            f"the share of its ceilings that {measured} reaches is carried over to {gpu}"
        )
    table = _table(parts, ratio, error, method)
    floor = host_ms(profile) if profile.device == "cuda" else 0.0
    low, mid, high = total(table, Overlap.of(profile, probe or {}, base, changed), floor)
    used = sorted(set(table["method"]) - {"measured"}) or ["measured"]
    return Prediction(
        change=dict(change),
        now_ms=float(parts["now_ms"].sum()),
        low_ms=low,
        mid_ms=mid,
        high_ms=high,
        parts=table,
        method=" and ".join(used),
        notices=notices,
        samples_now=base.training.batch_size,
        samples_then=changed.training.batch_size,
        probe=dict(probe or {}),
    )


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
        changes = [probe["change"] for probe in probes_of(profile)]
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


def what_if_parts(
    profile: Profile, changes: Iterable[Mapping[str, Any]] | None = None
) -> pd.DataFrame:
    """The parts of every predicted step, of the step as it is first.

    Returns:
        ``change``, ``component``, ``time_ms``: for as many samples as an iteration has
        now, so they sum to ``now_ms`` over the speedup. Changes without a prediction
        are left out. Empty if the profile names no parts.
    """
    if changes is None:
        changes = [probe["change"] for probe in probes_of(profile)]
    try:
        now = measured_parts(profile).rename(columns={"now_ms": "time_ms"})
    except InputError:
        return pd.DataFrame({name: [] for name in ("change", "component", "time_ms")})
    tables = [("as it is", now)]
    for change in changes:
        try:
            made = predict(profile, change)
        except InputError:
            continue
        parts = made.parts.rename(columns={"then_ms": "time_ms"})
        samples = made.samples_now / made.samples_then
        parts["time_ms"] *= made.mid_ms * samples / parts["time_ms"].sum()
        tables.append((_spelt(change), parts))
    return pd.concat(
        [table[["component", "time_ms"]].assign(change=name) for name, table in tables],
        ignore_index=True,
    )[["change", "component", "time_ms"]]


Scaling = tuple[np.ndarray, np.ndarray, list[str]]
"""Ratio, its relative error and the method, of every row of the parts."""


def _same(parts: pd.DataFrame) -> list[str]:
    return ["measured"] * len(parts)


def _probed(parts: pd.DataFrame, probe: Mapping[str, Any]) -> Scaling:
    """By how each touched part's time alone changed."""
    ratio, error, method = np.ones(len(parts)), np.zeros(len(parts)), _same(parts)
    for row, (component, phase) in enumerate(parts[KEYS].to_numpy().tolist()):
        then = probe.get("parts", {}).get(component, {}).get(phase)
        now = probe.get("base", {}).get(component, {}).get(phase)
        if then is None or not now:
            continue
        spread = probe.get("spread", {}).get(component, {}).get(phase, 0.0)
        ratio[row], error[row] = then / now, math.hypot(spread, MODEL_ERROR)
        method[row] = "probes"
    return ratio, error, method


def _by_work(
    parts: pd.DataFrame, profile: Profile, base: Parameters, changed: Parameters
) -> Scaling:
    """By the ratio of least times; on a GPU the host's share of a part stays."""
    found = merged(parts, work_ratios(profile, base, changed))
    known = np.isfinite(found)
    ratio = np.where(known, found, 1.0)
    if profile.device == "cuda":
        share = (parts["device_ms"] / parts["now_ms"].where(parts["now_ms"] > 0)).fillna(0.0)
        ratio = 1 + (ratio - 1) * share.to_numpy()
    differs = known & (np.abs(ratio - 1) > 1e-9)
    error = np.where(differs, ROOFLINE_ERROR * np.minimum(1.0, np.abs(np.log2(ratio))), 0.0)
    return ratio, error, ["roofline" if there else "measured" for there in differs]


def _on_other_gpu(
    parts: pd.DataFrame,
    profile: Profile,
    changed: Parameters,
    gpu: str,
    ratio: np.ndarray,
    error: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, list[str], str]:
    """The device's time by the data sheets; the host's stays."""
    ratios, measured = device_ratios(profile, changed, gpu)
    there = np.nan_to_num(merged(parts, ratios), nan=1.0)
    share = (parts["device_ms"] / parts["now_ms"].where(parts["now_ms"] > 0)).fillna(0.0).to_numpy()
    moved = 1 + (there - 1) * share
    error = np.hypot(error, ROOFLINE_ERROR * np.minimum(1.0, np.abs(np.log2(moved))))
    return ratio * moved, error, ["roofline"] * len(parts), measured


def _table(
    parts: pd.DataFrame, ratio: np.ndarray, error: np.ndarray, method: list[str]
) -> pd.DataFrame:
    table = parts[[*KEYS, "now_ms"]].copy()
    table["then_ms"] = table["now_ms"] * ratio
    table["low_ms"] = table["then_ms"] / (1 + COVER * error)
    table["high_ms"] = table["then_ms"] * (1 + COVER * error)
    table["method"] = method
    return table[COLUMNS]


def total(
    table: pd.DataFrame, overlap: Overlap, floor_ms: float = 0.0
) -> tuple[float, float, float]:
    """Low, mid and high of the whole step, ms.

    The parts' errors are partly the same (a warm cache serves all), partly their own:
    halfway between their sum and the root of their squares.

    Args:
        table: ``component``, ``now_ms``, ``then_ms``, ``low_ms``, ``high_ms``.
        floor_ms: the host's own time, below which no GPU brings the step.
    """
    is_data = table["component"].eq("data")
    data, rest = table.loc[is_data, "then_ms"].sum(), table.loc[~is_data, "then_ms"].sum()

    def joined(reach: pd.Series) -> float:
        return float((reach.sum() + math.sqrt((reach**2).sum())) / 2 / (data + rest))

    mid = overlap.step_ms(float(data), float(rest))
    errors = [OVERLAP_ERROR] if overlap.beside else []
    if overlap.beside or not table["then_ms"].equals(table["now_ms"]):
        errors.append(STEP_ERROR)
    own = COVER * math.hypot(*errors)
    down = math.hypot(joined(table["then_ms"] - table["low_ms"]), own / (1 + own))
    up = math.hypot(joined(table["high_ms"] - table["then_ms"]), own)
    low, mid, high = (max(end, floor_ms) for end in (mid * (1 - down), mid, mid * (1 + up)))
    return low, mid, high


def refuse_without_work(
    profile: Profile,
    base: Parameters,
    changed: Parameters,
    probe: Mapping[str, Any] | None,
) -> None:
    """Refuse what neither probes nor work can predict.

    Raises:
        InputError: naming the leaves, and how they can be predicted.
    """
    unknown = [leaf for leaf in unknown_by_work(base, changed) if leaf not in NEUTRAL]
    if not unknown:
        return
    if probe is not None and probe.get("refused"):
        raise InputError(f"{_spelt(probe['change'])} cannot be predicted: {probe['refused']}")
    known = "; ".join(_spelt(each["change"]) for each in probes_of(profile))
    raise InputError(
        f"{', '.join(unknown)} cannot be predicted from this profile: its effect is not in the "
        "operations and bytes of the model, and it was not probed in this run "
        + (f"(probed were: {known})" if known else "(it holds no probes: profiling.probes)")
        + "; dlrm run compare probes any change before it runs it"
    )


def _spelt(change: Mapping[str, Any]) -> str:
    """A change as one writes it behind -p."""

    def value(given: Any) -> str:
        if isinstance(given, bool):
            return str(given).lower()
        return "-".join(map(str, given)) if isinstance(given, list | tuple) else str(given)

    return ", ".join(f"{name}={value(given)}" for name, given in change.items())
