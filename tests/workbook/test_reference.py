"""One step on a page: parts, trees, tables and the timeline add up to it, and it says which."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from compare_profiles import make_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_rows import BOTH, profile_of_rows

from dlrm_core.parts import ITERATION_SPAN, span_name
from dlrm_workbook.analysis.attribution import (
    attribute,
    iteration_count,
    iteration_state,
    iteration_times_ms,
    per_iteration,
    step_contexts,
)
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.operators import call_tree, timeline, top_operators
from dlrm_workbook.analysis.reference import at_reference, other_times, reference, unprofiled_ms
from dlrm_workbook.analysis.views import flat
from dlrm_workbook.recordings.foreign import START_UP
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive
from tests.finding_profiles import counters, made

PARTS = {("data", "forward"): 40.0, ("embedding", "update"): 20.0, ("top_mlp", "forward"): 40.0}
COUNT = 10


def recorded(
    device_ms: float = 0.0, offset_ns: int = 1_700_000_000_000_000_000, **meta: Any
) -> Profile:
    """Ten iterations on one thread, 100 ms each; ``device_ms`` of each on a GPU meanwhile."""
    trace, iterations = [], []
    for number in range(COUNT):
        at = begin = offset_ns + number * 110_000_000
        for row, ms in enumerate(PARTS.values()):
            end = at + round(ms * 1e6)
            trace += [(0, at, end, 2 + row, 1), (0, at + 1_000_000, end - 1_000_000, 5 + row, 2)]
            at = end
        trace.append((0, begin, at, 1, 0))
        iterations.append((number, begin, at))
        if device_ms:
            trace.append((1, begin, begin + round(device_ms * 1e6), 8, 0))
    exclusive = {1: 0.0} | {2 + row: 2.0 for row in range(3)}
    exclusive |= {5 + row: ms - 2.0 for row, ms in enumerate(PARTS.values())}
    inclusive = {1: 100.0} | {2 + row: ms for row, ms in enumerate(PARTS.values())}
    inclusive |= {row: exclusive[row] for row in (5, 6, 7)}
    values = [
        (0, context, "cpu_time_ms", scope, COUNT * value)
        for scope, rows in (("exclusive", exclusive), ("inclusive", inclusive))
        for context, value in rows.items()
    ]
    if device_ms:
        values += [(0, 8, "gpu_time_ms", scope, COUNT * device_ms) for scope in BOTH]
    components, phases = zip(*PARTS, strict=True)
    return profile_of_rows(
        {
            "parent": [-1, 0, 1, 1, 1, 2, 3, 4, 4],
            "kind": ["thread"] + ["annotation"] * 4 + ["operator"] * 3 + ["kernel"],
            "name": [
                *("main", ITERATION_SPAN, *(span_name(*part) for part in PARTS)),
                *(["aten::work"] * 3 + ["kernel"]),
            ],
            "component": ["other", "other", *components, *components, "top_mlp"],
            "phase": ["", "", *phases, *phases, "forward"],
        },
        values,
        trace,
        iterations,
        streams=["s"] if device_ms else [],
        **{"device": "cuda" if device_ms else "cpu", "engine": "torch", **meta},
    )


def plain_parts(**ms: float) -> list[dict[str, float]]:
    """Six iterations without a profiler."""
    times = {"data_forward": 40.0, "embedding_update": 20.0, "top_mlp_forward": 40.0} | ms
    one = {span_name(*name.rsplit("_", 1)): time for name, time in times.items()}
    return [one | {ITERATION_SPAN: sum(times.values())}] * 6


def test_everything_on_a_page_adds_up_to_the_step_without_a_profiler() -> None:
    # the profiler doubled the embedding's update and left the rest as it is
    profile = recorded(
        unprofiled_iteration_ms=[90.0] * 6, unprofiled_parts_ms=plain_parts(embedding_update=10.0)
    )
    scaled = at_reference(profile)
    scaled.validate()
    step = reference(scaled)
    assert step is not None and step.ms == 90 and step.recorded_ms == pytest.approx(100)
    found = attribute(scaled).set_index(["component", "phase"])["time_ms"]
    assert found.sum() == pytest.approx(90)
    assert found["embedding", "update"] == pytest.approx(10)
    assert found["data", "forward"] == pytest.approx(40)
    tree = call_tree(scaled)
    assert tree.loc[tree["parent"] == "", "value_ms"].tolist() == pytest.approx([90])
    below = tree[tree["label"] == span_name("embedding", "update")]
    assert below["value_ms"].tolist() == pytest.approx([10])
    assert top_operators(scaled)["cpu_self_ms"].sum() == pytest.approx(90)
    table = flat(scaled, "cpu_time_ms", within=step_contexts(scaled))
    assert table["exclusive"].sum() / iteration_count(scaled) == pytest.approx(90)
    assert iteration_times_ms(scaled) == pytest.approx(90)
    drawn = timeline(scaled, 1)
    assert drawn["duration_ms"].tolist() == pytest.approx([40, 10, 40])
    assert at_reference(scaled) is scaled


@pytest.mark.parametrize("seed", range(6))
def test_the_recorded_step_is_that_of_the_iterations_which_are_steady_on_the_page(seed) -> None:
    rng = np.random.default_rng(seed)
    first, second = ("data", "forward"), ("top_mlp", "forward")
    # the profiler slows the part whose time is scattered, so the page has other outliers
    times = {first: rng.lognormal(2, 0.8, 30), second: rng.normal(20, 0.2, 30)}
    plain = {span_name(*first): 0.1, span_name(*second): 20.0, ITERATION_SPAN: 20.1}
    more = {"unprofiled_iteration_ms": [20.1] * 6, "unprofiled_parts_ms": [plain] * 6}
    profile = make_profile(times, more)
    scaled = at_reference(profile)
    step, state = reference(scaled), iteration_state(scaled)
    assert step is not None and state is not None
    assert step.recorded_iterations == state.steady.sum()
    assert step.left_out == (~state.steady).sum()
    assert step.recorded_ms == pytest.approx((times[first] + times[second])[state.steady].mean())


def test_parts_that_were_not_timed_alone_share_one_pace() -> None:
    scaled = at_reference(recorded(unprofiled_iteration_ms=[50.0] * 6))
    parts = attribute(scaled).set_index("component")["time_ms"]
    assert parts["data"] == pytest.approx(20) and parts["top_mlp"] == pytest.approx(20)


def with_laps(ends_ms: list[float], plain: list[list[float] | None], **meta: Any) -> Profile:
    """Ten recorded iterations that moments divide where laps end; some without the profiler."""
    laps = np.diff([0.0, *ends_ms]).tolist()
    document = {"between": [f"moment {n}" for n in range(len(ends_ms) - 1)]}
    document |= {"profiled": [laps] * COUNT, "unprofiled": plain}
    times = [sum(each or [60.0]) for each in plain]
    return recorded(laps_ms=document, unprofiled_iteration_ms=times, **meta)


def test_parts_of_other_programs_have_the_times_of_their_laps_without_the_profiler() -> None:
    """The profiler made 30 ms of the embedding's 40 ms; one pace for all would miss that."""
    profile = with_laps([40.0, 60.0, 100.0], [[35.0, 5.0, 20.0]] * 6)
    step = reference(profile)
    assert step is not None and step.laps == 3 and "each of 3 stretches" in step.sentence
    scaled = at_reference(profile)
    scaled.validate()
    found = attribute(scaled).set_index("component")["time_ms"]
    assert found.sum() == pytest.approx(60)
    assert found[["data", "embedding", "top_mlp"]].tolist() == pytest.approx([35, 5, 20])
    assert top_operators(scaled)["cpu_self_ms"].sum() == pytest.approx(60)
    # the same without laps: one pace
    alone = attribute(at_reference(recorded(unprofiled_iteration_ms=[60.0] * 6)))
    assert alone.set_index("component")["time_ms"]["embedding"] == pytest.approx(12)


def test_parts_share_a_lap_as_they_share_its_recording() -> None:
    # in the second lap data takes 10 ms, the embedding 20 ms and the MLP 10 ms
    scaled = at_reference(with_laps([30.0, 70.0, 100.0], [[10.0, 20.0, 30.0]] * 6))
    found = attribute(scaled).set_index("component")["time_ms"]
    expected = [10 + 5, 10, 30 + 5]
    assert found[["data", "embedding", "top_mlp"]].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_laps_add_up_to_the_step_however_they_cut_the_parts(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ends = [*np.sort(draw.uniform(1, 99, 12)).tolist(), 100.0]
    plain = [draw.uniform(1, 10, len(ends)).tolist() for _ in range(8)]
    profile = with_laps(ends, [*plain, None])
    step = reference(profile)
    scaled = at_reference(profile)
    assert step is not None
    assert attribute(scaled)["time_ms"].sum() == pytest.approx(step.ms)
    assert top_operators(scaled)["cpu_self_ms"].sum() == pytest.approx(step.ms)


def test_laps_that_do_not_fit_the_recording_are_not_used() -> None:
    profile = with_laps([40.0, 60.0, 100.0], [[35.0, 5.0, 20.0]] * 6)
    laps = profile.meta["laps_ms"]
    for spoilt in (
        laps | {"profiled": laps["profiled"][1:]},
        laps | {"between": ["one"]},
        laps | {"unprofiled": [None] * 6},
    ):
        profile = recorded(laps_ms=spoilt, unprofiled_iteration_ms=[50.0] * 6)
        step = reference(profile)
        assert step is not None and step.laps == 0 and "stretches" not in step.sentence
        parts = attribute(at_reference(profile)).set_index("component")["time_ms"]
        assert parts["embedding"] == pytest.approx(10)


def test_disturbed_iterations_are_no_reference() -> None:
    wall = [90.0] * 6 + [900.0] * 4
    counted = counters(count=10, wall_ms=90.0, run_queue_ms=[0.0] * 6 + [500.0] * 4)
    counted["wall_ms"] = wall
    profile = recorded(counters=counted, unprofiled_iteration_ms=wall)
    step = reference(profile)
    assert step is not None and (step.ms, step.iterations) == (90, 6)
    assert "4 more were left out" in step.source
    assert unprofiled_ms(profile) == 90
    times = other_times(at_reference(profile)).set_index("what")
    assert times.loc["the step", "time_ms"] == 90
    assert times.loc["mean of all iterations without a profiler", "time_ms"] == pytest.approx(414)
    assert times.loc["steady iteration under torch.profiler", "times_the_step"] == pytest.approx(
        100 / 90
    )


def test_a_gpus_kernels_keep_their_times_and_idle_time_gives_way() -> None:
    profile = recorded(30.0, unprofiled_iteration_ms=[65.0] * 6)
    scaled = at_reference(profile)
    table = attribute(scaled).groupby("where")["time_ms"].sum()
    assert table["device"] == pytest.approx(30, rel=1e-6)
    assert table["host"] == pytest.approx(35, rel=1e-6)
    work = scaled.trace[scaled.trace["profile"] == 1]
    assert (work["end_ns"] - work["start_ns"]).tolist() == pytest.approx([30e6] * COUNT)


def test_where_a_gpu_is_busy_for_longer_the_recorded_step_stays() -> None:
    step = reference(recorded(80.0, unprofiled_iteration_ms=[65.0] * 6))
    assert step is not None and not step.unprofiled and step.ms == pytest.approx(100)
    assert "No iteration was timed without the profiler" in step.sentence


def test_a_foreign_recording_keeps_its_times() -> None:
    profile = recorded()
    scaled = at_reference(profile)
    step = reference(scaled)
    assert step is not None and not step.unprofiled
    pd.testing.assert_frame_equal(scaled.trace, profile.trace)
    assert other_times(scaled)["what"].tolist() == ["the step"]


def test_a_recording_without_steps_has_no_reference() -> None:
    profile = made({("data", "forward", "work"): 5.0})
    assert reference(profile) is None and reference(at_reference(profile)) is None
    assert other_times(profile).empty


def test_a_recording_without_steps_names_the_times_of_its_parts_and_of_all_its_threads() -> None:
    """14,476 ms stood in the parts and 469,397 ms in the call tree, and no table had both."""
    profile = made({("other", "", "work"): 5.0, ("other", START_UP, "import"): 4.0})
    helper = profile.values.assign(profile=1, value=3 * profile.values["value"])
    threads = profile.threads.iloc[[0, 0]].assign(profile=[0, 1])
    profile = replace(
        profile,
        values=pd.concat([profile.values, helper], ignore_index=True),
        threads=threads.reset_index(drop=True),
        meta=profile.meta | {"engine": "hpctoolkit", "main_thread": 0},
        _known={},
    )
    table = other_times(profile)
    assert table["time_ms"].tolist() == pytest.approx([5.0, 20.0, 36.0])
    assert table["what"].tolist()[:2] == ["the parts", "the call tree"]
    assert table["times_the_step"].tolist() == pytest.approx([1.0, 4.0, 7.2])


def test_iterations_have_the_numbers_of_the_counters() -> None:
    counted = counters(count=COUNT + 12, wall_ms=90.0, run_queue_ms=0.0)
    counted["iteration"] = list(range(3, COUNT + 15))
    counted["profiled"] = [False] * 6 + [True] * COUNT + [False] * 6
    scaled = at_reference(recorded(counters=counted, unprofiled_iteration_ms=[90.0] * 12))
    assert scaled.iterations["iteration"].tolist() == list(range(9, 9 + COUNT))
    assert sorted(per_iteration(scaled)["iteration"].unique()) == list(range(9, 9 + COUNT))


def test_streams_that_run_at_once_are_one_of_the_times() -> None:
    profile = recorded(30.0)
    name = "GPU time of all streams, added up"
    assert name not in other_times(at_reference(profile))["what"].tolist(), "one stream"
    other = profile.trace[profile.trace["profile"] == 1].assign(profile=2)
    values = profile.values[profile.values["metric"] == "gpu_time_ms"].assign(profile=2)
    second = profile.threads[profile.threads["profile"] == 1].assign(profile=2, thread=3)
    both = replace(
        profile,
        trace=pd.concat([profile.trace, other], ignore_index=True),
        values=pd.concat([profile.values, values], ignore_index=True),
        threads=pd.concat([profile.threads, second], ignore_index=True),
        _known={},
    )
    scaled = at_reference(both)
    said = other_times(scaled).set_index("what").loc[name]
    assert said["time_ms"] == pytest.approx(60) and "busy for 30.0 ms" in said["why"]
    tree = call_tree(scaled, "gpu_time_ms")
    assert tree.loc[tree["parent"] == "", "value_ms"].sum() == pytest.approx(60)


@given(times=st.lists(st.floats(0.01, 1e3), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_call_tree_adds_up_to_the_step_without_what_lies_outside(times, data) -> None:
    count = len(times)
    above = [-1, *(data.draw(st.integers(0, row - 1)) for row in range(1, count))]
    outside = [data.draw(st.booleans()) and row > 0 for row in range(count)]
    for row in range(1, count):
        outside[row] |= outside[above[row]]
    inclusive = inclusive_from_exclusive(np.array(above), np.array(times))
    profile = profile_of_rows(
        {
            "parent": above,
            "kind": "function",
            "name": [f"f{row}" for row in range(count)],
            "phase": [START_UP if beyond else "" for beyond in outside],
        },
        [
            (0, row, "cpu_time_ms", scope, ms[row])
            for scope, ms in zip(BOTH, (times, inclusive), strict=True)
            for row in range(count)
        ],
        device="cpu",
        engine="hpctoolkit",
    )
    step = sum(ms for ms, beyond in zip(times, outside, strict=True) if not beyond)
    tree = call_tree(profile)
    assert tree.loc[tree["parent"] == "", "value_ms"].sum() == pytest.approx(step)
    assert tree["self_ms"].sum() == pytest.approx(step)
    below = tree.groupby("parent")["value_ms"].sum()
    for row in tree.itertuples():
        assert row.value_ms == pytest.approx(row.self_ms + below.get(row.id, 0.0))
    assert flat(profile, "cpu_time_ms", within=step_contexts(profile))[
        "exclusive"
    ].sum() == pytest.approx(step)


def test_the_iterations_that_counters_are_of_are_one_of_the_times() -> None:
    counted = counters(count=12, wall_ms=95.0, run_queue_ms=40.0)
    counted["profiled"] = [False] * 12
    profile = recorded(counters=counted, unprofiled_iteration_ms=[90.0] * 12)
    wall = Evidence(profile, attribute(profile)).wall_ms
    times = other_times(at_reference(profile)).set_index("what")
    named = times.loc["mean of all iterations without a profiler"]
    assert named["time_ms"] == wall == pytest.approx(95)
    assert "the system's counters are of these" in named["why"]


def test_a_pass_that_samples_the_stack_is_one_of_the_times() -> None:
    passes = [
        {"name": "torch.profiler", "iterations": 6, "ms_per_iteration": 100.0},
        {"name": "Python stack sampled", "iterations": 4, "ms_per_iteration": 108.0},
    ]
    profile = recorded(unprofiled_iteration_ms=[90.0] * 5 + [60.0], passes=passes)
    times = other_times(profile).set_index("what")
    assert times.index.is_unique and "pass torch.profiler" not in times.index
    sampled = times.loc["pass Python stack sampled"]
    assert sampled["time_ms"] == 108 and sampled["iterations"] == 4
    assert sampled["times_the_step"] == pytest.approx(1.2)
    # the mean may be the smaller one
    assert "slow" not in times.loc["the step", "why"]
    assert times.loc["mean of all iterations without a profiler", "time_ms"] == pytest.approx(85)


def test_the_newest_training_run_of_these_parameters_is_one_of_the_times(tmp_path: Path) -> None:
    sections = {"model": {"a": 1}, "data": {}, "training": {"batch_size": 4}}
    folder = tmp_path / "2026-01-01" / "120000-train-x"
    folder.mkdir(parents=True)
    run = {"status": "finished", "notebook": "train", "started": "2026-01-01T12:00:00+00:00"}
    (folder / "run.json").write_text(json.dumps(run | {"parameters": sections}))
    (folder / "result.json").write_text(
        json.dumps({"ms_per_iteration": 95.0, "iteration_ms": [95.0] * 7})
    )
    profile = recorded(parameters=sections, unprofiled_iteration_ms=[90.0] * 6)
    place = tmp_path / "2026-01-01" / "120100-profile-x"
    times = other_times(profile, place).set_index("what")
    assert (
        times.loc["the train run", "time_ms"] == 95
        and times.loc["the train run", "iterations"] == 7
    )
    profile.meta["parameters"] = sections | {"training": {"batch_size": 8}}
    assert "the train run" not in other_times(profile, place)["what"].tolist()


def test_moments_since_1970_keep_their_nanoseconds() -> None:
    scaled = at_reference(recorded(unprofiled_iteration_ms=[100.0] * 6))
    lengths = (scaled.trace["end_ns"] - scaled.trace["start_ns"]).to_numpy()
    assert np.abs(lengths - (recorded().trace["end_ns"] - recorded().trace["start_ns"])).max() <= 1
