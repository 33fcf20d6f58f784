"""Predicts the step time after a change of parameters, without running the changed step.

``then = sum over parts of now x ratio``: every part and phase that a change touches is
scaled by how its time alone changed in a probe (:mod:`dlrm_workbook.evidence.probes`); the others
stay as measured. Both are times of the step without a profiler
(:mod:`dlrm_workbook.analysis.reference`). Batches made by another thread are
in the step only for as long as the step waits for them (:class:`Overlap`). Where
no probe exists, the ratio of the least times that work and ceilings allow stands in, with
a wider range (:func:`work_ratios`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_core.interactions import INTERACTIONS
from dlrm_workbook.analysis.attribution import (
    PART,
    attribute,
    iteration_count,
    main_thread,
    step_contexts,
)
from dlrm_workbook.analysis.devices import device, device_of
from dlrm_workbook.analysis.reference import at_reference
from dlrm_workbook.analysis.roofline import least_times, profile_parameters
from dlrm_workbook.analysis.work import part_work
from dlrm_workbook.evidence.dependence import (
    NEUTRAL,
    affected_components,
    changed_leaves,
    changed_parameters,
    signature,
)
from dlrm_workbook.recordings.profile import Profile

MODEL_ERROR = 0.06
"""Relative error of a part's ratio that probes make however often they are repeated."""

ROOFLINE_ERROR = 0.25
"""Relative error of a ratio of least times."""

STEP_ERROR = 0.03
"""Relative error of the whole changed step: its parts disturb each other in caches and heap."""

OVERLAP_ERROR = 0.08
"""Relative error of a step beside which batches are made."""

COVER = 1.64
"""Half width of a range in standard errors: 90 % of a normal distribution."""

_LEAVES = """
training.batch_size training.precision training.optimizer data.indices_per_lookup
data.fixed_pooling data.multi_hot_sizes model.mlp_sizes model.dense_features model.bottom_mlp
model.top_mlp model.embedding_dim model.tables model.table_rows model.interaction
"""
KNOWN_BY_WORK = frozenset(
    [
        *_LEAVES.split(),
        *(f"model.{name}" for kind in INTERACTIONS.values() for name in kind.options),
    ]
)
"""Leaves whose effect is in the operations and bytes of the parts."""

WAITS = ("Synchronize", "cudaStreamWaitEvent", "cudaEventQuery", "_local_scalar_dense")
"""In the names of calls in which the host waits for the GPU."""

CHANGED_COLUMNS = [*PART, "now_ms", "then_ms", "low_ms", "high_ms", "method"]

PREDICTED = ["change", "now_ms", "low_ms", "mid_ms", "high_ms", "speedup_low", "speedup_mid"]
PREDICTED += ["speedup_high", "method", "note"]

# ---- the measured step -----------------------------------------------------------------------


def measured_parts(profile: Profile) -> pd.DataFrame:
    """``component``, ``phase``, ``now_ms``, ``device_ms``: parts of the step without a profiler.

    ``device_ms`` is the part of ``now_ms`` in which the GPU computed. An InputError says that the
    profile names no part of a model.
    """
    parts = attribute(at_reference(profile)).rename(columns={"time_ms": "now_ms"})
    if parts["component"].eq("other").all():
        raise InputError("the profile names no part of a model, so no change can be predicted")
    parts["device_ms"] = parts["now_ms"].where(parts["where"].eq("device"), 0.0)
    return parts.groupby(PART, as_index=False, sort=False)[["now_ms", "device_ms"]].sum()


# ---- batches made by another thread -----------------------------------------------------------


def contention(overlap: Mapping[str, Any]) -> tuple[float, float, float]:
    """How making a batch and the step slow each other down, by the ``overlap`` of a probe. Returns
    s, the step's time while batches are made over its time alone; g, a batch's time while the step
    runs over its time alone; the step's time alone, ms."""
    halves = overlap["halves"]
    alone = sum(half["alone_ms"] for half in halves.values())
    beside = sum(half["beside_ms"] for half in halves.values())
    made = sum(overlap["data_beside_ms"][name] * halves[name]["beside_ms"] for name in halves)
    slowed = made / beside / overlap["data_alone_ms"]
    return max(1.0, beside / alone), max(1.0, slowed), alone


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
        step, data = contention(after)[:2] if will and after else (1.0, 1.0)
        if not was or not before:
            return cls(will, step, data)
        step_before, data_before, step_alone = contention(before)
        data_alone = before["data_alone_ms"]
        parts = measured_parts(profile)
        now = float(parts["now_ms"].sum())
        rest = now - float(parts.loc[parts["component"].eq("data"), "now_ms"].sum())
        # the model's own figure for the measured step: what it misses, it misses afterwards too
        scale = now / together_ms(data_alone, step_alone, data_before, step_before)
        ratio = _probed_ratios(probe).get(("data", "forward"), (1.0, 0.0))[0] or 1.0
        return cls(will, step, data, step_alone * scale / rest, data_alone * ratio * scale)

    def step_ms(self, data_ms: float, rest_ms: float) -> float:
        """An iteration, ms. ``data_ms`` and ``rest_ms`` are either after the change, as parts of
        the measured step scaled."""
        data = data_ms if self.data_ms is None else self.data_ms
        rest = rest_ms * self.rest_scale
        return together_ms(data, rest, self.data, self.step) if self.beside else data + rest


def together_ms(data_ms: float, rest_ms: float, data_slow: float, rest_slow: float) -> float:
    """Time until a batch is made and the step is done, started together. ``data_ms`` and
    ``rest_ms`` are either alone, ``data_slow`` and ``rest_slow`` how many times as long each takes
    while both run."""
    if data_ms * data_slow <= rest_ms * rest_slow:
        both = data_ms * data_slow
        return both + rest_ms - both / rest_slow
    both = rest_ms * rest_slow
    return both + data_ms - both / data_slow


# ---- the probes that a recording carries -----------------------------------------------------


def find_probe(profile: Profile, change: Mapping[str, Any]) -> dict[str, Any] | None:
    """The probe of exactly this change, one put together from probes of its leaves, or None."""
    probes = probes_of(profile)
    exact = next((probe for probe in probes if _plain(probe["change"]) == _plain(change)), None)
    if exact is not None or len(change) < 2:
        return exact
    left, found = _plain(change), []
    for probe in sorted(probes, key=lambda probe: len(probe["change"]), reverse=True):
        own = _plain(probe["change"])
        if not probe.get("refused") and left | own == left:
            found.append(probe)
            left = {name: value for name, value in left.items() if name not in own}
    if left or sum("overlap" in probe for probe in found) > 1:
        return None
    return _joined(dict(change), found)


def _joined(change: dict[str, Any], probes: list[dict[str, Any]]) -> dict[str, Any]:
    """Several changes at once: the ratios of a part that more than one touches multiply."""
    parts: dict[str, dict[str, float]] = {}
    spread: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"change": change, "notices": ["put together from single probes"]}
    for probe in probes:
        result |= {key: probe[key] for key in ("overlap", "overlap_base") if key in probe}
        result["notices"] += probe.get("notices", [])
        for (component, phase), (ratio, error) in _probed_ratios(probe).items():
            ratios, errors = parts.setdefault(component, {}), spread.setdefault(component, {})
            if phase in ratios:
                error = math.hypot(error, errors[phase], MODEL_ERROR)
            ratios[phase] = ratios.get(phase, 1.0) * ratio
            errors[phase] = error
    base = {component: dict.fromkeys(phases, 1.0) for component, phases in parts.items()}
    return result | {"parts": parts, "base": base, "spread": spread}


def _probed_ratios(probe: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    """Component and phase to the time after over before, and its relative error."""
    base, spread = probe.get("base", {}), probe.get("spread", {})
    return {
        (component, phase): (then / now, spread.get(component, {}).get(phase, 0.0))
        for component, phases in probe.get("parts", {}).items()
        for phase, then in phases.items()
        if (now := base.get(component, {}).get(phase)) and then is not None
    }


def probes_of(profile: Profile) -> list[dict[str, Any]]:
    """All of them; none where the recording was made without."""
    return list((profile.meta.get("part_probes") or {}).get("changes") or [])


def _plain(change: Mapping[str, Any]) -> dict[str, Any]:
    """A change as JSON holds it."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in change.items()}


# ---- parts that nobody probed: ratios of least times -------------------------------------------


def work_ratios(profile: Profile, base: Parameters, changed: Parameters) -> pd.DataFrame:
    """``component``, ``phase``, ``ratio``: least time after over before, same machine.

    Where a ceiling is missing, the ratio of the operands' bytes.
    """
    statistics = profile.meta.get("data_statistics")
    if signature(base, "embedding") != signature(changed, "embedding"):
        # measured bags are of the unchanged run: both sides by the law
        statistics = None
    ceilings = profile.meta.get("ceilings") or {}
    tables = []
    for parameters in (base, changed):
        work = part_work(parameters, statistics, profile.device)
        least = least_times(parameters, ceilings, statistics, profile.device)
        tables.append(work.merge(least, on=PART, how="left"))
    both = tables[0].merge(tables[1], on=PART, suffixes=("_now", "_then"))
    least_ratio = both["ceiling_ms_then"] / both["ceiling_ms_now"].where(both["ceiling_ms_now"] > 0)
    now = both["read_bytes_now"] + both["written_bytes_now"]
    then = both["read_bytes_then"] + both["written_bytes_then"]
    ratio = least_ratio.fillna(then / now.where(now > 0)).fillna(1.0)
    return both[PART].assign(ratio=ratio)


def device_ratios(profile: Profile, base: Parameters, name: str) -> tuple[pd.DataFrame, str]:
    """``component``, ``phase``, ``ratio`` of device time on another GPU; which GPU was measured.

    Both sides by data sheets: a measured ceiling against a printed peak would compare how they were
    found. An InputError says that the profile is not of a listed GPU, or that the other one is not
    listed or too small.
    """
    other = device(name)
    if profile.device != "cuda":
        raise InputError(
            f"device={other.name} cannot be predicted from a profile of the CPU: how near the "
            "model comes to a GPU's ceilings is known only from a GPU; profile it on any GPU"
        )
    measured = device_of(profile.meta)
    if measured is None:
        names = [
            profile.meta.get("device_name"),
            *(profile.meta.get("machine") or {}).get("gpus", []),
        ]
        named = ", ".join(str(name) for name in names if name) or "unnamed"
        raise InputError(f"the measured GPU ({named}) is not listed")
    least = []
    for gpu in (measured, other):
        if base.training.precision not in gpu.tflops:
            raise InputError(
                f"training.precision is {base.training.precision!r}, "
                f"which {gpu.name} has no units for"
            )
        least.append(least_times(base, gpu.ceilings(), profile.meta.get("data_statistics"), "cuda"))
    both = least[0].merge(least[1], on=PART, suffixes=("_now", "_then"))
    ratio = both["ceiling_ms_then"] / both["ceiling_ms_now"].where(both["ceiling_ms_now"] > 0)
    by_memory = measured.memory_gb_per_s / other.memory_gb_per_s
    return both[PART].assign(ratio=ratio.fillna(by_memory)), measured.name


def host_ms(profile: Profile) -> float:
    """Host time of an iteration that is not waiting for the GPU, ms: no GPU makes it shorter."""
    if not profile.has("cpu_time_ms"):
        return 0.0
    waits = profile.which("name", lambda name: any(word in name for word in WAITS))
    counted = step_contexts(profile, other_threads=False) & ~waits
    rows = profile.values[profile.rows("cpu_time_ms", "exclusive")]
    rows = rows[rows["profile"].eq(main_thread(profile)) & counted[rows["context"]]]
    return float(rows["value"].sum()) / iteration_count(profile)


# ---- predictions ------------------------------------------------------------------------------


_PLAIN = ("change", "now_ms", "low_ms", "mid_ms", "high_ms", "method", "notices")
"""Fields of a prediction that are JSON values as they are."""


@dataclass(frozen=True)
class Prediction:
    """The step time that a change is expected to lead to, in ms per iteration."""

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
            **{name: getattr(self, name) for name in _PLAIN},
            "speedup": self.speedup,
            "parts": self.parts.to_dict("records"),
            "samples": [self.samples_now, self.samples_then],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Prediction:
        """What :meth:`to_dict` made, without the probe it rests on."""
        values = {name: document[name] for name in _PLAIN}
        samples = dict(zip(("samples_now", "samples_then"), document["samples"], strict=True))
        return cls(**values, parts=pd.DataFrame(document["parts"]), **samples)


def predict(
    profile: Profile, changes: Mapping[str, Any] | Iterable[Mapping[str, Any]]
) -> pd.DataFrame:
    """What the step would take after one change of parameters, or after each of several.

    Figures are NaN where the change cannot be predicted; ``note`` says why. ``profile`` is a
    measured run of this project's program; ``changes`` are dotted leaf to value,
    ``{"training.batch_size": 4096}``, or several of these.
    """
    asked = [changes] if isinstance(changes, Mapping) else list(changes)
    rows = []
    for change in asked:
        row: dict[str, Any] = {"change": spelt(change)}
        try:
            made = prediction(profile, change)
        except InputError as error:
            rows.append(row | {"note": str(error)})
            continue
        row |= {name: getattr(made, name) for name in ("now_ms", "low_ms", "mid_ms", "high_ms")}
        row |= {f"speedup_{end}": ratio for end, ratio in made.speedup.items()}
        rows.append(row | {"method": made.method, "note": "; ".join(made.notices)})
    return pd.DataFrame(rows, columns=PREDICTED)


def prediction(profile: Profile, change: Mapping[str, Any]) -> Prediction:
    """What the step would take after a change of any parameters, part by part.

    Args:
        profile: a measured run; its probes are used where they hold this change.
        change: dotted leaf to value, ``{"training.batch_size": 4096}``; ``device`` names
            another GPU (:mod:`dlrm_workbook.analysis.roofline`).

    Raises:
        InputError: the change is no valid one, or there is nothing to predict it from;
            the message says what is missing.
    """
    leaves = {name: value for name, value in change.items() if name != "device"}
    gpu = change.get("device")
    if gpu is not None and not isinstance(gpu, str):
        raise InputError(f"device is {gpu!r}, expected the name of a GPU such as H100-SXM")
    if gpu is None and not leaves:
        raise InputError("the change is empty; expected leaves such as training.batch_size")
    base = profile_parameters(profile)
    changed, notices = changed_parameters(base, leaves) if leaves else (base, [])
    parts = measured_parts(profile)
    touched = affected_components(base, changed)
    probe = find_probe(profile, leaves) if touched else None
    if probe is not None and not probe.get("refused"):
        notices += [text for text in probe.get("notices", []) if text not in notices]
        table = _probed(parts, probe)
    elif touched:
        refuse_without_work(profile, base, changed, probe)
        notices.append("not probed: predicted from work and ceilings")
        table = _by_work(parts, profile, base, changed)
    else:
        table = _measured(parts)
        if gpu is None:
            notices.append("the change touches no part of the step: its time stays")
    if gpu is not None:
        # the device's time goes by the data sheets, the host's stays
        ratios, measured = device_ratios(profile, changed, gpu)
        moved = _of_device(table, ratios, True)
        error = np.hypot(table["error"], _roofline_error(moved))
        table = table.assign(ratio=table["ratio"] * moved, error=error, method="roofline")
        notices.append(
            f"the share of its ceilings that {measured} reaches is carried over to {gpu}"
        )
    table = _then(table)
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

    Costs about ``seconds``, the time to make the tables, and their memory (twice where the change
    is of the tables). The profile must be of this machine and device. An InputError is raised as by
    :func:`prediction`.
    """
    from dlrm_workbook.evidence.probes import probe_changes

    probes = probe_changes(parameters, [change], seconds)
    return prediction(replace(profile, meta=profile.meta | {"part_probes": probes}), change)


def what_if_table(profile: Profile) -> pd.DataFrame:
    """Predictions of the changes that the profile has probes for, the largest speed-up first."""
    table = predict(at_reference(profile), [probe["change"] for probe in probes_of(profile)])
    return table.sort_values("speedup_mid", ascending=False, ignore_index=True)


def what_if_parts(profile: Profile) -> pd.DataFrame:
    """The parts of every predicted step, of the step as it is first.

    Changes without a prediction are left out; of the others the times sum to ``now_ms`` over the
    speedup. Empty if the profile names no parts.
    """
    profile = at_reference(profile)
    try:
        now = measured_parts(profile).rename(columns={"now_ms": "time_ms"})
    except InputError:
        return pd.DataFrame({name: [] for name in ("change", "component", "time_ms")})
    tables = [now.assign(change="as it is")]
    for probe in probes_of(profile):
        try:
            made = prediction(profile, probe["change"])
        except InputError:
            continue
        parts = made.parts.rename(columns={"then_ms": "time_ms"})
        samples = made.samples_now / made.samples_then
        parts["time_ms"] *= made.mid_ms * samples / parts["time_ms"].sum()
        tables.append(parts.assign(change=spelt(probe["change"])))
    return pd.concat(tables, ignore_index=True)[["change", "component", "time_ms"]]


def _measured(parts: pd.DataFrame) -> pd.DataFrame:
    """The parts unchanged: ``ratio`` (then over now), its relative ``error`` and ``method``."""
    return parts.assign(ratio=1.0, error=0.0, method="measured")


def _probed(parts: pd.DataFrame, probe: Mapping[str, Any]) -> pd.DataFrame:
    """By how each touched part's time alone changed."""
    table = _measured(parts)
    known = _probed_ratios(probe)
    for row, part in zip(table.index, map(tuple, table[PART].to_numpy()), strict=True):
        if part in known:
            ratio, spread = known[part]
            table.loc[row, ["ratio", "error"]] = ratio, math.hypot(spread, MODEL_ERROR)
            table.loc[row, "method"] = "probes"
    return table


def _by_work(
    parts: pd.DataFrame, profile: Profile, base: Parameters, changed: Parameters
) -> pd.DataFrame:
    """By the ratio of least times; on a GPU the host's share of a part stays."""
    ratio = _of_device(parts, work_ratios(profile, base, changed), profile.device == "cuda")
    differs = np.abs(ratio - 1) > 1e-9
    error = np.where(differs, _roofline_error(ratio), 0.0)
    method = np.where(differs, "roofline", "measured").astype(object)
    return parts.assign(ratio=ratio, error=error, method=method)


def _of_device(parts: pd.DataFrame, ratios: pd.DataFrame, on_gpu: bool) -> np.ndarray:
    """Ratio (n,) of each row of ``parts``, on a GPU of its device time alone; 1 where unknown."""
    ratio = parts[PART].merge(ratios, on=PART, how="left")["ratio"].fillna(1.0).to_numpy()
    if not on_gpu:
        return ratio
    share = (parts["device_ms"] / parts["now_ms"].where(parts["now_ms"] > 0)).fillna(0.0)
    return 1 + (ratio - 1) * share.to_numpy()


def _roofline_error(ratio: np.ndarray) -> np.ndarray:
    return ROOFLINE_ERROR * np.minimum(1.0, np.abs(np.log2(ratio)))


def _then(table: pd.DataFrame) -> pd.DataFrame:
    """The parts after the change, with their ranges."""
    then, reach = table["now_ms"] * table["ratio"], 1 + COVER * table["error"]
    return table.assign(then_ms=then, low_ms=then / reach, high_ms=then * reach)[CHANGED_COLUMNS]


def total(
    table: pd.DataFrame, overlap: Overlap, floor_ms: float = 0.0
) -> tuple[float, float, float]:
    """Low, mid and high of the whole step, ms.

    The parts' errors are partly the same (a warm cache serves all), partly their own: halfway
    between their sum and the root of their squares. ``table`` has ``component``, ``now_ms``,
    ``then_ms``, ``low_ms``, ``high_ms``; ``floor_ms`` is the host's own time, below which no GPU
    brings the step.
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
    profile: Profile, base: Parameters, changed: Parameters, probe: Mapping[str, Any] | None
) -> None:
    """Refuse what neither probes nor work can predict. The InputError names the leaves, and how
    they can be predicted."""
    known = KNOWN_BY_WORK | NEUTRAL
    unknown = [leaf for leaf in changed_leaves(base, changed) if leaf not in known]
    if not unknown:
        return
    if probe is not None and probe.get("refused"):
        raise InputError(f"{spelt(probe['change'])} cannot be predicted: {probe['refused']}")
    probed = "; ".join(spelt(each["change"]) for each in probes_of(profile))
    raise InputError(
        f"{', '.join(unknown)} cannot be predicted from this profile: its effect is not in the "
        "operations and bytes of the model, and it was not probed in this run "
        + (f"(probed were: {probed})" if probed else "(it holds no probes: profiling.probes)")
        + "; dlrm run compare probes any change before it runs it"
    )


def spelt(change: Mapping[str, Any]) -> str:
    """A change as one writes it behind -p."""

    def value(given: Any) -> str:
        if isinstance(given, bool):
            return str(given).lower()
        return "-".join(map(str, given)) if isinstance(given, list | tuple) else str(given)

    return ", ".join(f"{name}={value(given)}" for name, given in change.items())
