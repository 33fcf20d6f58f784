"""What holds a training step back, each finding with its evidence and its remedy.

A rule looks at a profile and its attribution and either finds something or is silent;
nothing wrong is an empty list and a sentence (:func:`limit`). Gains are predicted by
Amdahl's law: a part that holds the share s of the step and becomes r times as fast
makes the step 1 / (1 − s + s / r) times as fast. Where r was measured (a probe timed
both ways on this machine) the prediction says so; where not, only the bound is known,
the part's time gone entirely, and the middle of that range is no more than its
geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from dlrm_core.analysis.attribution import coverage
from dlrm_core.analysis.operators import top_operators
from dlrm_core.profiling.profile import Profile

DATA_SHARE = 0.05
"""Data generation above this share of the step is a finding; the same limit as
TensorBoard's former profiler plugin had for the data loader."""

EMBEDDING_UPDATE_SHARE = 0.05
GEMM_SHARE = 0.05
"""Below this a remedy could not gain more than 5 %: not worth a reader's time."""

WORTHWHILE_GAIN = 1.05
"""A probe's ratio below this is within its noise."""

MAX_RELATIVE_ERROR = 1e-5
"""Of a GEMM that may replace fp32; true bf16 makes about 2e-3."""

GEMM_OPERATORS = frozenset({"aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"})
DENSE_PARTS = ("bottom_mlp", "top_mlp")


@dataclass(frozen=True)
class Finding:
    """One bottleneck. ``share_of_step`` is the share that it holds (0 to 1)."""

    id: str
    title: str
    component: str
    share_of_step: float
    evidence: str
    advice: str
    change: dict[str, Any] = field(default_factory=dict)
    """Parameter to the value to try, for ``compare``; empty if no parameter helps yet."""
    predicted_speedup: dict[str, float] = field(default_factory=dict)
    """``low``, ``mid``, ``high``: step time now over step time after ``change``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def findings(profile: Profile, attribution: pd.DataFrame) -> list[Finding]:
    """All bottlenecks that the rules see, the largest share of the step first."""
    found = [finding for rule in RULES if (finding := rule(profile, attribution)) is not None]
    return sorted(found, key=lambda finding: -finding.share_of_step)


def limit(profile: Profile, attribution: pd.DataFrame) -> str:
    """One sentence: which part the step's time goes to most."""
    named = attribution[attribution["time_ms"] > 0]
    if named.empty:
        return "Nothing was measured, so nothing can be said about limits."
    if named["component"].eq("other").all():
        return (
            "This profile names no part of a model: it is of another program, or was measured "
            "without Python frames. The call tree and the operators say where its time goes."
        )
    parts = named.groupby(["component", "phase"], as_index=False)[["time_ms", "share"]].sum()
    top = parts.loc[parts["time_ms"].idxmax()]
    name = f"{top['component'].replace('_mlp', ' MLP')} {top['phase']}".strip()
    total = named["time_ms"].sum()
    return (
        f"The largest part of the step is {name}: {top['time_ms']:.1f} of {total:.1f} ms "
        f"an iteration ({top['share']:.0%})."
    )


def bottlenecks_json(
    profile: Profile, attribution: pd.DataFrame, found: list[Finding] | None = None
) -> dict[str, Any]:
    """What ``bottlenecks.json`` says; plain JSON values, None for what was not measured."""
    if found is None:
        found = findings(profile, attribution)
    keys = ["component", "phase"]
    parts = attribution.groupby(keys, as_index=False, sort=False)[["time_ms", "share"]].sum()
    passes = [{"dilation": None, **measured} for measured in profile.meta.get("passes", [])]
    document = {
        "findings": [finding.to_dict() for finding in found],
        "limit": limit(profile, attribution),
        "attribution": parts.to_dict("records"),
        "coverage": coverage(attribution),
        "ms_per_iteration": float(attribution["time_ms"].sum()) if len(attribution) else None,
        "profiler": profile.meta.get("engine"),
        "device": profile.meta.get("device"),
        "passes": passes,
        "not_measured": profile.not_measured,
    }
    return _plain(document)


# ---- rules ----------------------------------------------------------------------


def data_generation(profile: Profile, attribution: pd.DataFrame) -> Finding | None:
    """Making a batch holds up the step."""
    total, time = _times(attribution, "data")
    if total <= 0 or time / total <= DATA_SHARE:
        return None
    share = time / total
    generator = _parameter(profile, "data", "generator")
    loader = _parameter(profile, "data", "loader")
    rest = total - time
    evidence = (
        f"Making a batch takes {time:.1f} of {total:.1f} ms an iteration ({share:.0%}); "
        f"the model takes the other {rest:.1f} ms."
    )
    change: dict[str, Any] = {}
    advice: list[str] = []
    made = time  # what making a batch will take after the change, ms
    measured = False
    if generator == "facebook_loop":
        change["data.generator"] = "facebook"
        advice.append("make the same batches, bit for bit, with vectorised numpy")
        probes = _probe(profile, "data_ms_per_batch")
        now, then = probes.get("facebook_loop"), probes.get("facebook")
        if now and then:
            measured = True
            made = time * then / now
            evidence += (
                f" Timed alone on this machine: {now:.1f} ms a batch by facebook_loop, "
                f"{then:.1f} ms by facebook."
            )
    # While the faster generator's gain is unknown, overlapping cannot be judged either.
    if loader == "synchronous" and (measured or not change) and made / (rest + made) > DATA_SHARE:
        change["data.loader"] = "prefetch"
        advice.append("make the next batch on another thread while the step computes")
    if measured:
        # Without overlap, and with all of it: what lies between depends on free cores.
        low = total / (rest + made)
        high = total / max(rest, made) if "data.loader" in change else total / rest
        if "data.loader" not in change:
            speedup = {"low": 1 + 0.9 * (low - 1), "mid": low, "high": max(low, high)}
        else:
            speedup = {"low": low, "mid": math.sqrt(low * high), "high": high}
    elif not change:
        advice.append("no parameter makes these batches faster without changing them")
        speedup = _bounded(share)
    elif "data.generator" in change:
        evidence += " How fast the other generator is here was not measured."
        speedup = _bounded(share)
    else:
        high = total / max(rest, made)
        speedup = {"low": 1.0, "mid": math.sqrt(high), "high": high}
    return Finding(
        id="data_generation",
        title=f"Data generation holds {share:.0%} of the step",
        component="data",
        share_of_step=share,
        evidence=evidence,
        advice=_sentence("; ".join(advice)),
        change=change,
        predicted_speedup=speedup,
    )


def embedding_update(profile: Profile, attribution: pd.DataFrame) -> Finding | None:
    """The sparse update of the embedding tables is a large part of the step."""
    total, time = _times(attribution, "embedding", "update")
    if total <= 0 or time / total <= EMBEDDING_UPDATE_SHARE:
        return None
    share = time / total
    evidence = f"Updating the embedding tables takes {time:.1f} of {total:.1f} ms ({share:.0%})."
    table = top_operators(profile, count=10_000)
    table = table[(table["component"] == "embedding") & (table["phase"] == "update")]
    column = "gpu_ms" if profile.has("gpu_time_ms") else "cpu_self_ms"
    heaviest = table.groupby("name")[column].sum().nlargest(3)
    if heaviest.gt(0).any():
        listed = ", ".join(f"{name} {value:.1f} ms" for name, value in heaviest.items() if value)
        evidence += f" Most of it: {listed}."
    return Finding(
        id="embedding_update",
        title=f"The sparse embedding update holds {share:.0%} of the step",
        component="embedding",
        share_of_step=share,
        evidence=evidence,
        advice=(
            "torch first builds a sparse gradient of every looked-up row and then applies it; "
            "an update fused into the backward pass touches each row once. No parameter of "
            "this version does that, so the range is only bounded by removing the update."
        ),
        change={},
        predicted_speedup=_bounded(share),
    )


def dense_gemm(profile: Profile, attribution: pd.DataFrame) -> Finding | None:
    """The MLPs' fp32 matrix products run in a slower library than this machine has."""
    probe = _probe(profile, "gemm")
    slow, fast = probe.get("default_ms"), probe.get("onednn_ms")
    error = probe.get("max_relative_error")
    if profile.device != "cpu" or not slow or not fast or error is None:
        return None
    if _parameter(profile, "training", "fp32_matmul") not in (None, "default"):
        return None
    gain = slow / fast
    if gain < WORTHWHILE_GAIN or not error <= MAX_RELATIVE_ERROR:
        return None
    total = float(attribution["time_ms"].sum())
    table = top_operators(profile, count=10_000)
    table = table[table["component"].isin(DENSE_PARTS) & table["name"].isin(GEMM_OPERATORS)]
    time = float(table["cpu_self_ms"].sum())
    if total <= 0 or not time / total > GEMM_SHARE:
        return None
    share = time / total
    return Finding(
        id="dense_gemm",
        title=f"Matrix products of the MLPs hold {share:.0%} of the step, in the slower library",
        component="top_mlp" if _heavier(table) == "top_mlp" else "bottom_mlp",
        share_of_step=share,
        evidence=(
            f"{', '.join(sorted(table['name'].unique()))} take {time:.1f} of {total:.1f} ms an "
            f"iteration. Timed on this machine on the largest layer: {slow:.2f} ms by the "
            f"default library, {fast:.2f} ms by oneDNN ({gain:.2f}x), relative error {error:.1e}."
        ),
        advice="Compute fp32 matrix products with oneDNN; the error is checked before training.",
        change={"training.fp32_matmul": "onednn"},
        # The probe is one product of one shape, alone on the machine; the others gain
        # from half as much to a quarter more.
        predicted_speedup={
            "low": _amdahl(share, 1 + 0.5 * (gain - 1)),
            "mid": _amdahl(share, gain),
            "high": _amdahl(share, 1 + 1.25 * (gain - 1)),
        },
    )


RULES: tuple[Callable[[Profile, pd.DataFrame], Finding | None], ...] = (
    data_generation,
    embedding_update,
    dense_gemm,
)


# ---- helpers --------------------------------------------------------------------


def _times(
    attribution: pd.DataFrame, component: str, phase: str | None = None
) -> tuple[float, float]:
    """(time of the step, time of the part in it), ms."""
    chosen = attribution["component"] == component
    if phase is not None:
        chosen &= attribution["phase"] == phase
    return float(attribution["time_ms"].sum()), float(attribution.loc[chosen, "time_ms"].sum())


def _amdahl(share: float, gain: float) -> float:
    return 1.0 / (1.0 - share + share / gain)


def _bounded(share: float) -> dict[str, float]:
    """Speedup when only the bound is known: the part's time gone entirely."""
    high = 1.0 / max(1.0 - share, 1e-9)
    return {"low": 1.0, "mid": math.sqrt(high), "high": high}


def _parameter(profile: Profile, section: str, name: str) -> Any:
    section_ = (profile.meta.get("parameters") or {}).get(section) or {}
    return section_.get(name)


def _probe(profile: Profile, name: str) -> dict[str, float]:
    return dict((profile.meta.get("probes") or {}).get(name) or {})


def _heavier(table: pd.DataFrame) -> str:
    return str(table.groupby("component")["cpu_self_ms"].sum().idxmax())


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _plain(value: Any) -> Any:
    """JSON values only: NaN (not measured) becomes None, numpy scalars Python's own."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
