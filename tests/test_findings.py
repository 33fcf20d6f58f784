"""Each rule both ways: silent without its evidence, right with it."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
import pytest

from dlrm_core.analysis.attribution import attribute
from dlrm_core.analysis.findings import Finding, bottlenecks_json, findings, limit
from dlrm_core.config import DataConfig, TrainingConfig
from dlrm_core.profiling.profile import Profile

GEMM = {"default_ms": 4.0, "onednn_ms": 2.0, "max_relative_error": 1e-6}
SEED = {
    "data": {"generator": "facebook_loop", "loader": "synchronous"},
    "training": {"fp32_matmul": "default"},
}


def step(
    parts: dict[tuple[str, str, str], float],
    parameters: dict[str, Any] | None = None,
    probes: dict[str, Any] | None = None,
    **meta: Any,
) -> Profile:
    """One sampled iteration: (component, phase, operator) to exclusive ms."""
    rows = list(parts.items())
    return Profile.build(
        contexts={
            "context": range(len(rows)),
            "parent": -1,
            "kind": "operator",
            "name": [name for (_, _, name), _ in rows],
            "shapes": "",
            "file": "",
            "line": 0,
            "module": "",
            "component": [component for (component, _, _), _ in rows],
            "phase": [phase for (_, phase, _), _ in rows],
        },
        metrics=[{"metric": "cpu_time_ms", "unit": "ms", "meaning": "", "source": ""}],
        values=[
            {"profile": 0, "context": row, "metric": "cpu_time_ms", "scope": scope, "value": time}
            for row, (_, time) in enumerate(rows)
            for scope in ("exclusive", "inclusive")
        ],
        threads=[{"profile": 0, "kind": "cpu_thread", "name": "main", "rank": 0, "thread": 1}],
        meta={"device": "cpu", "parameters": parameters or {}, "probes": probes or {}, **meta},
    )


def found(profile: Profile) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings(profile, attribute(profile))}


def with_data(data: float, rest: float, **more: Any) -> Profile:
    parts = {("data", "forward", "loop"): data, ("interaction", "forward", "aten::cat"): rest}
    return step(parts, **more)


def ordered(speedup: dict[str, float]) -> bool:
    return 1 <= speedup["low"] <= speedup["mid"] <= speedup["high"] and math.isfinite(
        speedup["high"]
    )


def test_nothing_wrong_is_an_empty_list_and_a_sentence() -> None:
    profile = with_data(4, 96, parameters=SEED, probes={"gemm": GEMM})
    assert found(profile) == {}
    assert limit(profile, attribute(profile)) == (
        "The largest part of the step is interaction forward: 96.0 of 100.0 ms an iteration (96%)."
    )


def test_a_profile_of_another_program_is_told_apart() -> None:
    profile = with_data(4, 96, parameters=SEED)
    parts = attribute(profile).assign(component="other", phase="")
    assert "names no part of a model" in limit(profile, parts)
    assert "is interaction forward" in limit(profile, attribute(profile))


def test_slow_data_with_a_probe_is_predicted_by_amdahl() -> None:
    probes = {"data_ms_per_batch": {"facebook_loop": 50.0, "facebook": 1.0}}
    finding = found(with_data(60, 40, parameters=SEED, probes=probes))["data_generation"]
    assert finding.share_of_step == pytest.approx(0.6)
    assert finding.component == "data"
    # 60 ms become 1.2 ms, under 5 % of what is left, so no need to overlap it.
    assert finding.change == {"data.generator": "facebook"}
    assert finding.predicted_speedup["mid"] == pytest.approx(100 / 41.2)
    assert finding.predicted_speedup["high"] == pytest.approx(100 / 40)
    assert ordered(finding.predicted_speedup)
    assert "50.0 ms a batch by facebook_loop, 1.0 ms by facebook" in finding.evidence


def test_data_that_stays_slow_is_overlapped_as_well() -> None:
    probes = {"data_ms_per_batch": {"facebook_loop": 60.0, "facebook": 20.0}}
    finding = found(with_data(60, 40, parameters=SEED, probes=probes))["data_generation"]
    assert finding.change == {"data.generator": "facebook", "data.loader": "prefetch"}
    assert finding.predicted_speedup["low"] == pytest.approx(100 / 60)
    assert finding.predicted_speedup["high"] == pytest.approx(100 / 40)
    assert ordered(finding.predicted_speedup)


def test_slow_data_without_a_probe_is_only_bounded() -> None:
    finding = found(with_data(60, 40, parameters=SEED))["data_generation"]
    assert finding.change == {"data.generator": "facebook"}
    assert finding.predicted_speedup["low"] == 1
    assert finding.predicted_speedup["high"] == pytest.approx(2.5)
    assert ordered(finding.predicted_speedup)
    assert "was not measured" in finding.evidence


def test_a_fast_generator_is_overlapped() -> None:
    parameters = {"data": {"generator": "facebook", "loader": "synchronous"}}
    finding = found(with_data(20, 80, parameters=parameters))["data_generation"]
    assert finding.change == {"data.loader": "prefetch"}
    assert finding.predicted_speedup["high"] == pytest.approx(100 / 80)
    # More data than compute: at best the data's own time remains.
    finding = found(with_data(80, 20, parameters=parameters))["data_generation"]
    assert finding.predicted_speedup["high"] == pytest.approx(100 / 80)


def test_data_that_is_overlapped_already_has_no_parameter_left() -> None:
    parameters = {"data": {"generator": "uniform", "loader": "prefetch"}}
    finding = found(with_data(20, 80, parameters=parameters))["data_generation"]
    assert finding.change == {}
    assert "no parameter" in finding.advice.lower()


@pytest.mark.parametrize(("update", "fires"), [(4.0, False), (30.0, True)])
def test_embedding_update(update: float, fires: bool) -> None:
    parts = {
        ("embedding", "update", "aten::add_"): update,
        ("top_mlp", "forward", "aten::addmm"): 100 - update,
    }
    finding = found(step(parts)).get("embedding_update")
    assert (finding is not None) == fires
    if finding:
        assert finding.share_of_step == pytest.approx(0.3)
        assert "aten::add_ 30.0 ms" in finding.evidence
        assert finding.predicted_speedup["high"] == pytest.approx(1 / 0.7)
        assert ordered(finding.predicted_speedup)


GEMM_STEP = {
    ("top_mlp", "forward", "aten::addmm"): 30.0,
    ("bottom_mlp", "backward", "aten::mm"): 20.0,
    ("interaction", "forward", "aten::bmm"): 10.0,  # not a product of the MLPs
    ("loss", "forward", "aten::mean"): 40.0,
}


def test_slow_gemm_with_a_probe() -> None:
    finding = found(step(GEMM_STEP, parameters=SEED, probes={"gemm": GEMM}))["dense_gemm"]
    assert finding.share_of_step == pytest.approx(0.5)
    assert finding.component == "top_mlp"
    assert finding.change == {"training.fp32_matmul": "onednn"}
    assert finding.predicted_speedup["mid"] == pytest.approx(1 / (0.5 + 0.25))
    assert ordered(finding.predicted_speedup)
    assert "2.00x" in finding.evidence


@pytest.mark.parametrize(
    "more",
    [
        {"probes": {}},
        {"probes": {"gemm": {}}},
        {"probes": {"gemm": {**GEMM, "onednn_ms": 4.0}}},
        {"probes": {"gemm": {**GEMM, "max_relative_error": 2e-3}}},
        {"probes": {"gemm": {**GEMM, "max_relative_error": math.nan}}},
        {"parameters": {"training": {"fp32_matmul": "onednn"}}},
        {"device": "cuda"},
    ],
    ids=["no probe", "empty", "no gain", "rounds", "unknown error", "already", "gpu"],
)
def test_gemm_is_silent_without_a_proven_gain(more: dict[str, Any]) -> None:
    given = {"parameters": SEED, "probes": {"gemm": GEMM}, **more}
    assert "dense_gemm" not in found(step(GEMM_STEP, **given))


def test_worst_comes_first_and_changes_are_real_parameters() -> None:
    parts = {**GEMM_STEP, ("data", "forward", "loop"): 500.0}
    parts[("embedding", "update", "aten::add_")] = 60.0
    profile = step(parts, parameters=SEED, probes={"gemm": GEMM})
    listed = findings(profile, attribute(profile))
    assert [finding.id for finding in listed] == [
        "data_generation",
        "embedding_update",
        "dense_gemm",
    ]
    sections = {"data": DataConfig, "training": TrainingConfig}
    for finding in listed:
        for name, value in finding.change.items():
            section, _, leaf = name.partition(".")
            sections[section](**{leaf: value})


def test_json_has_the_documented_keys_and_no_nan() -> None:
    probes = {"gemm": GEMM}
    passes = [{"name": "torch.profiler", "command": "dlrm record", "dilation": 1.02}, {"name": "x"}]
    profile = with_data(
        60,
        40,
        parameters=SEED,
        probes=probes,
        engine="torch",
        passes=passes,
        not_measured={"gpu_time_ms": "the run used no GPU"},
    )
    document = bottlenecks_json(profile, attribute(profile))
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document
    assert set(document) >= {
        "findings",
        "attribution",
        "coverage",
        "profiler",
        "passes",
        "not_measured",
    }
    assert set(document["findings"][0]) == {
        "id",
        "title",
        "component",
        "share_of_step",
        "evidence",
        "advice",
        "change",
        "predicted_speedup",
    }
    assert set(document["attribution"][0]) == {"component", "phase", "time_ms", "share"}
    assert document["coverage"] == pytest.approx(1)
    assert [measured["dilation"] for measured in document["passes"]] == [1.02, None]
    assert document["not_measured"] == {"gpu_time_ms": "the run used no GPU"}


def test_an_empty_profile_says_that_nothing_was_measured() -> None:
    profile = step({("other", "", "main"): 0.0})
    attribution = attribute(profile)
    assert isinstance(attribution, pd.DataFrame)
    assert findings(profile, attribution) == []
    assert "Nothing was measured" in limit(profile, attribution)
    json.dumps(bottlenecks_json(profile, attribution), allow_nan=False)
