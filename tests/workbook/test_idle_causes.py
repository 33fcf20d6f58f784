"""Each idle instant has one cause, and the causes add up."""

from pathlib import Path

import gpu_trace
import numpy as np
import pytest
from gpu_trace import call, kernel, launched, mark, on_gpu, read
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_workbook.analysis.context_tree import reason_of
from dlrm_workbook.analysis.idleness import (
    CAUSES,
    STATES,
    felt_share,
    idle_by_cause,
    idle_causes,
    outside_operators,
    thread_states,
)
from dlrm_workbook.analysis.launches import launched_operations
from dlrm_workbook.recordings.nesting import union
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show import idle as idle_figures
from dlrm_workbook.show.tables import show


def causes(profile: Profile) -> dict[str, float]:
    table = idle_by_cause(profile, idle_causes(profile))
    return dict(zip(table["cause"], (1e3 * table["idle_ms"]).round(3), strict=True))


def test_idle_time_of_the_drawn_trace_by_cause(tmp_path: Path) -> None:
    profile = read(tmp_path, gpu_trace.events())
    # kernels run 32..60 and 70..95; see the drawing in gpu_trace
    assert causes(profile) == {
        "data": 16.0,  # 2..18
        "python": 10.0,  # 0..2, 18..22, 96..100
        "operators": 3.0,  # 22..25
        "launching": 5.0,  # 25..30
        "start-up": 6.0,  # launched at 30, runs at 32; launched at 61, nothing runs 66..70
        "copies": 6.0,  # 60..66
        "synchronisation": 1.0,  # 95..96
    }
    table = idle_by_cause(profile, idle_causes(profile))
    assert table["share_of_idle"].sum() == pytest.approx(1)
    assert table["share_of_iteration"].sum() == pytest.approx(0.47)
    # the queue ran dry while the host waited: all after 66 is the synchronisation's doing
    assert table.set_index("cause")["after_sync_ms"]["python"] == pytest.approx(0.004)
    assert table["meaning"].tolist() == [CAUSES[cause] for cause in table["cause"]]


def long_trace(gap_us: float) -> list:
    """Two kernels launched at once; the second starts ``gap_us`` after the first has ended."""
    return [
        mark("dlrm::iteration", 0, 400),
        mark("dlrm::loss::forward", 0, 400),
        *launched(1, (1, 2), "first", (6, 100)),
        call("cudaLaunchKernelExC", 2, 3, 2),
        kernel("second", 100 + gap_us, 300, 2),
    ]


@pytest.mark.parametrize(
    ("gap_us", "cause"), [(0.02, "kernel gap"), (2.0, "start-up"), (90.0, "dependency")]
)
def test_a_gap_with_work_waiting_is_told_by_its_length(tmp_path, gap_us, cause) -> None:
    found = causes(read(tmp_path, long_trace(gap_us)))
    before = found.pop("start-up", 0.0) if cause != "start-up" else found["start-up"] - gap_us
    assert before == pytest.approx(4.0, abs=0.01)  # 2..6: launched and not begun
    assert found[cause] == pytest.approx(gap_us + (4.0 if cause == "start-up" else 0), abs=0.011)


@pytest.mark.parametrize(
    ("launched_us", "starts_us", "waits", "felt"),
    [
        (20, 114, False, 0.85),  # until 21 + 4 of start-up
        (90, 114, False, 0.15),
        (150, 155, False, 0.0),  # the host sets the pace
        (150, 155, True, 1.0),  # the host waited for the end of the kernel
    ],
)
def test_a_kernel_is_felt_as_far_as_the_next_launch_allows(
    tmp_path: Path, launched_us: float, starts_us: float, waits: bool, felt: float
) -> None:
    events = [
        mark("dlrm::iteration", 0, 400),
        mark("dlrm::loss::forward", 0, 400),
        *launched(1, (5, 6), "first", (10, 110)),
        *launched(2, (launched_us, launched_us + 1), "second", (starts_us, 300)),
    ]
    if waits:
        events.append(call("cudaDeviceSynchronize", 100, 111, 3))
    profile = read(tmp_path, events)
    first = np.flatnonzero(profile.contexts["name"].eq("first"))
    assert felt_share(profile, first) == pytest.approx(felt, abs=1e-3)
    both = np.flatnonzero(profile.contexts["kind"].eq("kernel"))
    rest = 300 - starts_us  # of the second kernel, after which nothing is launched
    expected = (100 * felt + rest) / (100 + rest)
    assert felt_share(profile, both) == pytest.approx(expected, abs=1e-3)


def test_cuda_calls_for_memory_and_pageable_copies_have_their_own_cause(tmp_path: Path) -> None:
    events = [
        mark("dlrm::iteration", 0, 100),
        mark("dlrm::transfer::forward", 0, 50),
        call("cudaMalloc", 5, 15, 1),
        call("cudaMemcpyAsync", 20, 40, 2),
        call("cudaEventSynchronize", 60, 65, 4),
        *launched(3, (70, 71), "gemm", (72, 90)),
        on_gpu("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 30, 39, 7, correlation=2),
    ]
    found = causes(read(tmp_path, events))
    assert found["allocation"] == 10.0
    assert found["copies"] == 20.0
    assert found["synchronisation"] == 5.0
    assert sum(found.values()) == pytest.approx(82.0, abs=0.01)


@settings(deadline=None, max_examples=40)
@given(
    kernels=st.lists(st.tuples(st.integers(0, 180), st.integers(1, 30)), min_size=1, max_size=12),
    calls=st.lists(
        st.sampled_from(["cudaMalloc", "cudaStreamSynchronize", "cudaFree"]), max_size=8
    ),
)
def test_causes_add_up_to_the_time_without_a_kernel(tmp_path_factory, kernels, calls) -> None:
    events = [mark("dlrm::iteration", 10 * n, 10 * n + 95) for n in (0, 10)]
    events += [mark("dlrm::data::forward", 12, 30)]
    events += [call(name, 31 + 8 * row, 36 + 8 * row, 100 + row) for row, name in enumerate(calls)]
    events += [
        kernel(f"k{row % 3}", start, start + length, row, 7 + row % 2)
        for row, (start, length) in enumerate(kernels)
    ]
    profile = read(tmp_path_factory.mktemp("trace"), events)
    work = launched_operations(profile)
    start, end = union(work["start_ns"].to_numpy(), work["end_ns"].to_numpy())
    each = idle_causes(profile).groupby("iteration")["idle_ms"].sum()
    for row in profile.iterations.itertuples():
        busy = np.clip(np.minimum(end, row.end_ns) - np.maximum(start, row.start_ns), 0, None).sum()
        idle = (row.end_ns - row.start_ns - busy) / 1e6
        assert each.get(row.iteration, 0.0) == pytest.approx(idle, abs=1e-9)


def test_without_a_gpu_or_counters_the_reason_is_given(tmp_path: Path) -> None:
    host_only = gpu_trace.host_events()
    profile = read(tmp_path, host_only)
    each = idle_causes(profile)
    assert each.empty and reason_of(each)
    assert idle_by_cause(profile, each).empty and reason_of(idle_by_cause(profile, each))
    assert "counters" in reason_of(thread_states(profile))


def test_thread_states_add_up_to_the_wall_time(tmp_path: Path) -> None:
    profile = read(tmp_path, gpu_trace.events())
    counters = {
        "iteration": [0, 1, 2],
        "profiled": [False, True, True],
        "wall_ms": [10.0, 10.0, 10.0],
        "thread_cpu_ms": [9.0, 10.001, 4.0],
        "run_queue_ms": [0.5, 0.002, 5.0],
    }
    profile.meta["counters"] = counters
    table = thread_states(profile).pivot_table(index="iteration", columns="state", values="time_ms")
    assert set(table.columns) <= set(STATES)
    assert table.sum(axis=1).tolist() == pytest.approx([10.0] * 3, rel=1e-12)
    assert table["blocked"].tolist() == pytest.approx([0.5, 0.0, 1.0])
    assert table["waiting for a core"].tolist() == pytest.approx([0.5, 0.0, 5.0])
    del counters["run_queue_ms"]
    two = thread_states(profile).pivot_table(index="iteration", columns="state", values="time_ms")
    assert two["off core"].tolist() == pytest.approx([1.0, 0.0, 6.0])
    assert (two.to_numpy() >= 0).all()


def test_time_outside_operators_is_the_rest_of_each_part(tmp_path: Path) -> None:
    table = outside_operators(read(tmp_path, gpu_trace.events())).set_index("component")
    parts = table[["part_ms", "operators_ms", "outside_ms"]] * 1e3
    # host only: addmm 22..40 and copy_ 42..57 in the bottom MLP's 20..58
    assert parts.loc["bottom_mlp"].tolist() == pytest.approx([38, 33, 5])
    assert parts.loc["data"].tolist() == pytest.approx([16, 0, 16])
    assert parts["part_ms"].sum() == pytest.approx(100)
    assert table["outside_share"]["data"] == 1


def test_figures_draw_all_of_the_table_in_units(tmp_path: Path) -> None:
    profile = read(tmp_path, gpu_trace.events())
    each = idle_causes(profile)
    summary = idle_by_cause(profile, each)
    stacked = idle_figures.idle_each(each)
    assert sum(sum(bar.y) for bar in stacked.data) == pytest.approx(0.047)
    assert [bar.name for bar in stacked.data] == [c for c in CAUSES if c in set(each["cause"])]
    assert stacked.layout.yaxis.title.text == "ms"
    shares = idle_figures.idle_shares(summary)
    assert sum(bar.x[0] for bar in shares.data) == pytest.approx(0.047)
    assert "47.0%" in shares.layout.title.text
    assert set(idle_figures.CAUSE_COLOURS) == set(CAUSES)
    assert set(idle_figures.STATE_COLOURS) == set(STATES)
    table = show(summary)
    assert table.rows[0][:2] == ["data", CAUSES["data"]] and "34.0%" in table.rows[0]
    reason = show(idle_causes(read(tmp_path, gpu_trace.events()[:3])))
    assert "Not measured" in repr(reason)
