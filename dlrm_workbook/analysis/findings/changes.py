"""Settings of ours that were timed beside the run and found faster.

A rule for each setting would say the same thing: it was probed, this is the gain. So there
is one rule and a table of what each setting means. A gain counts only if the what-if model
puts the whole of its range above 1 and its middle above 1.05.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_core.interactions import INTERACTIONS
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import Causes, Measured, is_worthwhile, predicted, rule
from dlrm_workbook.analysis.findings.where import part_name
from dlrm_workbook.analysis.roofline import MAX_RELATIVE_ERROR
from dlrm_workbook.ground.tables import rows_of
from dlrm_workbook.ground.units import milliseconds

TILE_ERRORS = {"bf16x2": 5e-6, "bf16x3": 2e-7}
"""Relative errors of fp32 products made of bf16 numbers; tests hold the kernels to them."""

PRECISION_ORDER = ("fp32", "bf16", "fp16")
"""Highest first. ``training.lowest_precision`` names the lowest that may be proposed."""


@dataclass(frozen=True)
class Setting:
    """What a faster setting is a finding of; ``settings.csv`` has a row for each."""

    id: str
    components: str
    """Names of parts of the model, a space between two."""
    limit: str
    title: str
    """With ``{share:.0%}`` for the share of the step in its components, ``{layers}`` for what of
    the dense part multiplies matrices."""
    advice: str


SETTINGS = {row.pop("setting"): Setting(**row) for row in rows_of(__file__, "settings.csv")}
"""Leaf to what it means; a setting that changes what is computed is not listed."""


@rule(
    "faster_settings",
    title="A setting that was timed beside the run is faster",
    evidence=("{timed}",),
    advice="Change it.",
    limit="arithmetic",
)
def faster_settings(evidence: Evidence, ledger: Causes) -> Iterable[Measured]:
    """Settings that were probed beside the run and are faster: the best of each kind."""
    best: dict[str, Measured] = {}
    for probe in evidence.probed:
        figures = _faster_setting(evidence, ledger, probe)
        if figures is None:
            continue
        so_far = best.setdefault(figures["id"], figures)
        if figures["speedup"]["mid"] > so_far["speedup"]["mid"]:
            best[figures["id"]] = figures
    return best.values()


def _faster_setting(
    evidence: Evidence, ledger: Causes, probe: Mapping[str, Any]
) -> Measured | None:
    change = dict(probe.get("change") or {})
    name, then = next(iter(change.items()), ("", None))
    setting = SETTINGS.get(name)
    # one leaf, or the fused dense part with the products that it needs
    if setting is None or (len(change) > 1 and name != "training.dense_backend"):
        return None
    if not all(_is_allowed(evidence, leaf, value) for leaf, value in change.items()):
        return None
    if setting.id == "embedding_update" and ledger.is_explained(("embedding", "backward")):
        return None  # what does not belong there was named, with this as its remedy
    speedup = predicted(evidence, change)
    if speedup is None or not is_worthwhile(speedup):
        return None
    components, layers = setting.components.split(), "the MLPs"
    kind = INTERACTIONS.get(evidence.parameter("model.interaction"))
    if kind is not None and kind.layers:
        # layers between those of the MLPs
        components += ["interaction"] if components[:2] == ["bottom_mlp", "top_mlp"] else []
        layers = f"MLPs and {kind.layers}"
    measured = [component for component in components if evidence.time(component) > 0]
    share = sum(evidence.share(component) for component in measured)
    now = evidence.parameter(name, "default")
    return {
        **{name: vars(setting)[name] for name in ("id", "title", "advice", "limit")},
        **{"now": now, "then": then, "layers": layers},
        "component": max(measured, key=evidence.time) if measured else "other",
        "share": share,
        "least": 0.0,
        "timed": _timed(evidence, probe, name, now, then),
        "change": change,
        "speedup": speedup,
        "concerns": tuple(measured),
    }


def _is_allowed(evidence: Evidence, name: str, then: Any) -> bool:
    """Whether the change keeps the accuracy that the run asks for."""
    if name == "training.precision":
        lowest = evidence.parameter("training.lowest_precision", "bf16")
        # fp16 keeps less range than bf16: it is only proposed where it is allowed by name
        order = {name: place for place, name in enumerate(PRECISION_ORDER)}
        return then in order and order[then] <= order.get(lowest, -1)
    if name == "training.fp32_matmul":
        error = TILE_ERRORS.get(then) or _library_error(evidence)
        return error is not None and error <= MAX_RELATIVE_ERROR
    return True


def _library_error(evidence: Evidence) -> float | None:
    """Relative error of oneDNN's fp32 products, as the ceilings measured it."""
    errors = [
        row["relative_error"]
        for row in evidence.ceiling("gemm") or []
        if row.get("precision") == "fp32_onednn" and row.get("relative_error") is not None
    ]
    return max(errors) if errors else None


def _timed(evidence: Evidence, probe: Mapping[str, Any], name: str, now: Any, then: Any) -> str:
    """What was timed, part by part, before and after."""
    lines = []
    for component, phases in (probe.get("parts") or {}).items():
        before = (probe.get("base") or {}).get(component) or {}
        for phase, after_ms in phases.items():
            before_ms = before.get(phase, evidence.alone(component, phase))
            if before_ms and after_ms and max(before_ms, after_ms) > 0.01 * evidence.total_ms:
                lines.append((before_ms - after_ms, component, phase, before_ms, after_ms))
    lines.sort(reverse=True)
    listed = "; ".join(
        f"{part_name(component, phase)} {milliseconds(before)} with {now}, "
        f"{milliseconds(after)} with {then}"
        for _, component, phase, before, after in lines[:4]
    )
    text = f"{name} is {now}. Timed beside this run, in turns: {listed or 'a small gain each'}."
    if name == "training.fp32_matmul":
        error = TILE_ERRORS.get(then) or _library_error(evidence)
        text += f" Relative error {error:.1e}."
    return text
