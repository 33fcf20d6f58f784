"""Findings as a whole: ranking, the limit's sentence, the document; and slow data."""

import dataclasses
import json
from typing import Any

import pandas as pd
import pytest
from finding_profiles import counters, found, listed, made, ordered
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.config import DataConfig, TrainingConfig
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.findings import _by_share, bottlenecks_json, limit
from dlrm_workbook.analysis.findings.finding import (
    LIMITS,
    SEVERITIES,
    Finding,
    amdahl,
    bounded,
    of_one_step,
    rank,
    removed,
)
from dlrm_workbook.recordings.profile import Profile

LOOP = {"data": {"generator": "facebook_loop", "loader": "synchronous"}}


def with_data(data: float, rest: float, **more: Any) -> Profile:
    parts = {("data", "forward", "loop"): data, ("interaction", "forward", "aten::cat"): rest}
    return made(parts, **more)


def probes(now: float, then: float) -> dict[str, Any]:
    base, parts = {"data": {"forward": now}}, {"data": {"forward": then}}
    probe = {"change": {"data.generator": "facebook"}, "base": base, "parts": parts, "spread": {}}
    return {"base": base, "changes": [probe]}


# ---- as a whole -------------------------------------------------------------------


def test_nothing_wrong_is_an_empty_list_and_a_sentence() -> None:
    profile = with_data(4, 96, parameters=LOOP)
    assert found(profile) == {}
    assert limit(profile, attribute(profile)) == (
        "The largest part of the step is interaction forward: 96.0 ms of 100 ms per iteration "
        "(96%)."
    )


def test_a_profile_of_another_program_is_told_apart() -> None:
    profile = with_data(4, 96)
    parts = attribute(profile).assign(component="other", phase="")
    assert "names no part of a model" in limit(profile, parts)
    assert "is interaction forward" in limit(profile, attribute(profile))


def test_an_empty_profile_says_that_nothing_was_measured() -> None:
    profile = made({("other", "", "main"): 0.0})
    attribution = attribute(profile)
    assert isinstance(attribution, pd.DataFrame)
    assert listed(profile) == []
    assert "Nothing was measured" in limit(profile, attribution)
    json.dumps(bottlenecks_json(profile, attribution), allow_nan=False)


def finding(name: str, mid: float, severity: str = "slows", share: float = 0.1) -> Finding:
    gain = {"low": 1.0, "mid": mid, "high": mid}
    return Finding(name, "", "other", share, "", "", {}, gain, severity)


def test_what_fails_comes_first_then_the_time_saved() -> None:
    given = [
        finding("a", 1.2),
        finding("b", 3.0),
        finding("c", 1.0, "fails"),
        finding("d", 1.2, share=0.5),
    ]
    assert [f.id for f in rank(given)] == ["c", "b", "d", "a"]


def test_pieces_of_one_idle_time_count_together() -> None:
    launches = finding("launch_bound", 1.3, share=0.36)
    rest, products = (
        finding("gpu_idle_otherwise", 1.1, share=0.3),
        finding("products", 1.2, "slows", 0.31),
    )
    assert [f.id for f in _by_share([products, rest])] == ["products", "gpu_idle_otherwise"]
    order = ["launch_bound", "products", "gpu_idle_otherwise"]
    assert [f.id for f in _by_share([products, rest, launches])] == order


def test_findings_of_the_same_time_say_what_is_counted_twice() -> None:
    dense = finding("dense_precision", 1.3, share=0.4), finding("dense_gemm", 1.2, share=0.4)
    concerns = {"concerns": ("bottom_mlp", "top_mlp")}
    first, second = (dataclasses.replace(each, **concerns) for each in dense)
    data = dataclasses.replace(finding("data", 1.1, share=0.3), concerns=("data",))
    anywhere = finding("other_processes", 1.1, share=0.4)
    shares = {"bottom_mlp": 0.1, "top_mlp": 0.35, "data": 0.3, "embedding": 0.25}
    told = of_one_step([first, second, data, anywhere], shares)
    assert [each.counted_above for each in told] == pytest.approx([0.0, 0.35, 0.0, 0.15])
    assert [each.part_of for each in told] == ["", "dense_precision", "", ""]
    assert told[1].evidence.endswith(
        f"35% of the step is counted by findings above as well (“{first.title}”)."
    )
    assert told[3].evidence.endswith("15% of the step is counted by findings above as well.")
    assert sum(each.share_of_step - each.counted_above for each in told) == pytest.approx(1.0)


@given(st.floats(0, 0.99), st.floats(1, 100))
def test_speedups_are_ordered_and_amdahls(share: float, gain: float) -> None:
    assert ordered(bounded(share))
    assert ordered(removed(share))
    assert removed(share)["mid"] == pytest.approx(1 / (1 - share))
    assert 1 <= amdahl(share, gain) <= 1 / (1 - share) + 1e-9
    assert amdahl(1.0, gain) == pytest.approx(gain)


def test_json_has_the_documented_keys_and_no_nan() -> None:
    passes = [{"name": "torch.profiler", "command": "dlrm record", "dilation": 1.02}, {"name": "x"}]
    profile = with_data(
        60,
        40,
        parameters=LOOP,
        engine="torch",
        passes=passes,
        not_measured={"gpu_time_ms": "the run used no GPU"},
    )
    document = bottlenecks_json(profile, attribute(profile))
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document
    assert set(document) >= {
        *("findings", "limit", "attribution", "coverage", "profiler", "passes", "not_measured")
    }
    first = document["findings"][0]
    assert set(first) == {
        *("id", "title", "component", "share_of_step", "severity", "limit", "evidence"),
        *("advice", "change", "predicted_speedup", "concerns", "part_of", "counted_above"),
        *("in_one", "felt", "timed_speedup"),
    }
    assert first["severity"] in SEVERITIES and first["limit"] in LIMITS
    assert set(document["attribution"][0]) == {"component", "phase", "time_ms", "share"}
    assert document["coverage"] == pytest.approx(1)
    assert [measured["dilation"] for measured in document["passes"]] == [1.02, None]
    assert document["not_measured"] == {"gpu_time_ms": "the run used no GPU"}


# ---- data -------------------------------------------------------------------------


def test_slow_data_with_a_probe_is_predicted_by_amdahl() -> None:
    profile = with_data(60, 40, parameters=LOOP, part_probes=probes(50.0, 1.0))
    slow = found(profile)["data_generation"]
    assert slow.share_of_step == pytest.approx(0.6)
    assert slow.component == "data" and slow.limit == "data generation"
    # 60 ms become 1.2 ms, under 5 % of what is left, so no need to overlap it.
    assert slow.change == {"data.generator": "facebook"}
    assert slow.predicted_speedup["mid"] == pytest.approx(100 / 41.2)
    assert ordered(slow.predicted_speedup)
    assert "50.0 ms per batch by facebook_loop, 1.00 ms by facebook" in slow.evidence

    # what stays slow is overlapped as well
    profile = with_data(60, 40, parameters=LOOP, part_probes=probes(60.0, 20.0))
    slow = found(profile)["data_generation"]
    assert slow.change == {"data.generator": "facebook", "data.loader": "prefetch"}
    assert slow.predicted_speedup["low"] == pytest.approx(100 / 60)
    assert slow.predicted_speedup["high"] == pytest.approx(100 / 40)
    sections = {"data": DataConfig, "training": TrainingConfig}
    for each in listed(profile):  # changes are real parameters
        for name, value in each.change.items():
            section, _, leaf = name.partition(".")
            sections[section](**{leaf: value})


def test_slow_data_without_a_probe_is_only_bounded() -> None:
    slow = found(with_data(60, 40, parameters=LOOP))["data_generation"]
    assert slow.change == {"data.generator": "facebook"}
    assert slow.predicted_speedup["low"] == 1
    assert slow.predicted_speedup["high"] == pytest.approx(2.5)
    assert "was not measured" in slow.evidence


def test_a_fast_generator_is_overlapped() -> None:
    parameters = {"data": {"generator": "facebook", "loader": "synchronous"}}
    slow = found(with_data(20, 80, parameters=parameters))["data_generation"]
    assert slow.change == {"data.loader": "prefetch"}
    assert slow.predicted_speedup["high"] == pytest.approx(100 / 80)
    # More data than compute: at best the data's own time remains.
    slow = found(with_data(80, 20, parameters=parameters))["data_generation"]
    assert slow.predicted_speedup["high"] == pytest.approx(100 / 80)


def test_data_that_is_overlapped_already_has_no_parameter_left_and_sleep_is_told() -> None:
    parameters = {"data": {"generator": "uniform", "loader": "prefetch"}}
    slow = found(with_data(20, 80, parameters=parameters))["data_generation"]
    assert slow.change == {}
    assert "no parameter" in slow.advice.lower()
    assert "waits for data" in slow.title
    more = {"counters": counters(blocked_ms=18.0), "part_probes": probes(1.0, 1.0)}
    slow = found(with_data(20, 80, parameters=parameters, **more))["data_generation"]
    assert "look at what making a batch waits for" in slow.advice.lower()
