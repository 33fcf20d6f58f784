"""Launches meet their kernels, the queue is counted, and a launch-bound GPU is named."""

import warnings
from pathlib import Path

import gpu_trace
import numpy as np
import pytest
from gpu_trace import launched, mark, operator, read

from dlrm_workbook.analysis.context_tree import reason_of
from dlrm_workbook.analysis.launches import (
    launch_cost_us,
    launch_summary,
    launched_operations,
    launches_by_part,
    operator_load,
    outermost_operators,
    queue_depth,
)
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show.tables import TextTable, show


@pytest.fixture()
def drawn(tmp_path: Path) -> Profile:
    return read(tmp_path, gpu_trace.events())


def test_each_operation_finds_its_launch(drawn: Profile) -> None:
    work = launched_operations(drawn)
    base = drawn.iterations["start_ns"][0]
    found = (work[["launch_start_ns", "launch_end_ns"]] - base) / 1e3
    assert found.to_numpy().tolist() == [[25, 30], [33, 35], [43, 50], [60.5, 61]]
    assert work["kind"].tolist() == ["kernel", "kernel", "copy", "kernel"]


def repeated(kernel_us: float, launch_us: float, count: int = 40) -> list:
    """A host that does nothing but launch, and kernels that take ``kernel_us`` each."""
    events = [mark("dlrm::loss::forward", 0, count * launch_us + 1)]
    now = free = 1.0
    for number in range(count):
        begin = max(now + launch_us + 2, free)
        times = (now, now + launch_us), "tiny", (begin, begin + kernel_us)
        events += launched(number, *times)
        now, free = now + launch_us, begin + kernel_us
    return [mark("dlrm::iteration", 0, max(now, free)), *events]


def test_repeated_launches_are_matched_in_order(tmp_path: Path) -> None:
    work = launched_operations(read(tmp_path, repeated(2.0, 6.0)))
    assert (work["launch_end_ns"] > 0).all()
    assert (work["start_ns"] - work["launch_end_ns"]).to_numpy() == pytest.approx(2000, abs=1)


@pytest.mark.parametrize(("kernel_us", "bound"), [(1.5, True), (50.0, False)])
def test_kernels_shorter_than_a_launch_bind_the_gpu(tmp_path, kernel_us, bound) -> None:
    profile = read(tmp_path, repeated(kernel_us, 6.0))
    row = launch_summary(profile).iloc[0]
    assert row["launch_bound"] == bound
    assert row["launches"] == 40 and row["launch_us"] == pytest.approx(6, rel=0.01)
    assert row["kernel_us"] == pytest.approx(kernel_us, rel=0.01)
    assert row["short_share"] == float(bound)
    if not bound:  # the host runs ahead: up to 40 kernels wait
        assert row["queue_depth"] > 15 and row["empty_share"] < 0.05
    # what was measured alone, before the run, goes before what the trace says
    profile.meta["ceilings"] = {"launch_us": 1.0}
    assert launch_cost_us(profile) == 1.0
    assert launch_summary(profile).iloc[0]["short_share"] == 0


def test_without_launches_in_the_trace_their_cost_is_not_known(tmp_path: Path) -> None:
    events = [event for event in repeated(2.0, 6.0) if event["cat"] != "cuda_runtime"]
    profile = read(tmp_path, events)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # noise on the page
        summary = launch_summary(profile)
        table = launches_by_part(profile)
    assert table["short_share"].isna().all()
    assert "shorter than a launch" not in repr(show(table))
    row = summary.iloc[0]
    assert row[["launch_us", "short_share", "queue_depth", "empty_share"]].isna().all()
    assert not row["launch_bound"]
    shown = show(summary)
    assert isinstance(shown, TextTable) and "launch-bound" not in shown.columns, "not known"
    assert "nan" not in repr(shown) and "%" not in repr(shown)


def test_queue_depth_is_a_count_over_time(drawn: Profile) -> None:
    depth = queue_depth(drawn)
    assert depth["time_ms"].iloc[0] == 0 and depth["depth"].iloc[0] == 0
    at = dict(zip((1e3 * depth["time_ms"]).round(3), depth["depth"], strict=True))
    assert at == {0: 0, 30: 1, 35: 2, 50: 3, 52: 2, 60: 1, 61: 2, 66: 1, 95: 0}
    bins = queue_depth(drawn, most=4)
    length = np.diff(np.append(depth["time_ms"], 0.1))
    assert len(bins) == 4
    assert bins["depth"].mean() == pytest.approx(np.average(depth["depth"], weights=length))


def test_launches_by_part(drawn: Profile) -> None:
    table = launches_by_part(drawn).set_index("component")
    assert table["launches"].to_dict() == {"bottom_mlp": 2, "loss": 1}
    assert table["kernel_us"]["bottom_mlp"] == pytest.approx(17.5)
    assert table["kernel_ms"]["bottom_mlp"] == pytest.approx(0.035)


def test_operators_against_the_cost_of_dispatch(drawn: Profile) -> None:
    drawn.meta["ceilings"] = {"dispatch_us": 3.0}
    table = operator_load(drawn).set_index("component")
    row = table.loc["bottom_mlp"]
    assert row["operators"] == 2 and row["operator_us"] == pytest.approx(16.5)
    assert row["dispatch_ms"] == pytest.approx(0.006)
    assert row["dispatch_share"] == pytest.approx(6 / 33)
    drawn.meta["ceilings"] = {"dispatch_us": 30.0}  # more than they take: called by C++
    assert operator_load(drawn).set_index("component").loc["bottom_mlp", "dispatch_ms"] <= 0.033
    del drawn.meta["ceilings"]
    assert operator_load(drawn)["dispatch_share"].isna().all()


def test_only_outermost_operators_count(tmp_path: Path) -> None:
    events = [
        *gpu_trace.events(),
        operator("aten::inner", 23, 24),
        operator("aten::later", 150, 160),
    ]
    assert len(outermost_operators(read(tmp_path, events))) == 2


def test_without_a_gpu_the_reason_is_given(tmp_path: Path) -> None:
    host_only = gpu_trace.host_events()
    profile = read(tmp_path, host_only)
    for table in (launch_summary(profile), launches_by_part(profile), queue_depth(profile)):
        assert table.empty and reason_of(table)
    lost = [e for e in gpu_trace.events() if not str(e.get("cat")).startswith("cuda")]
    unknown = read(tmp_path, [e | {"args": {**e.get("args", {}), "External id": -1}} for e in lost])
    assert (launched_operations(unknown)["launch_end_ns"] == -1).all()
    assert "which call launched" in reason_of(queue_depth(unknown))
