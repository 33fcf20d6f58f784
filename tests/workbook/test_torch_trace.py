"""torch.profiler's traces: nesting, agreement with key_averages, GPU work, bad input."""

import gzip
import json
import re
from pathlib import Path

import gpu_trace
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_program import SmallProgram
from torch.profiler import ProfilerActivity, profile

from dlrm_core.base.errors import InputError
from dlrm_workbook.recordings.nesting import innermost, nest, self_times
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.recorder import record_iterations
from dlrm_workbook.recordings.torch.session import Detail, Lengths
from dlrm_workbook.recordings.torch.stacks import _spans
from dlrm_workbook.recordings.torch.trace import join_unsteady, read_recording, read_trace

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 40), st.booleans()), min_size=1, max_size=40
)
"""(start, duration, soft): nested, overlapping, empty and equal ones alike."""


def columns(drawn: list[tuple[int, int, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    start = np.array([begin for begin, _, _ in drawn])
    end = start + np.array([length for _, length, _ in drawn])
    return start, end, np.array([soft for _, _, soft in drawn])


@settings(deadline=None)
@given(spans)
def test_any_spans_nest_with_self_times_that_are_never_negative(drawn) -> None:
    before_start, before_end, soft = columns(drawn)
    start, end, parent, order = nest(before_start, before_end, soft)
    assert sorted(order.tolist()) == list(range(len(drawn)))
    assert (end >= start).all()
    assert (start >= before_start).all()
    assert (end <= np.maximum(before_end, start)).all()
    seen = set()
    for span in order.tolist():
        above = parent[span]
        if above >= 0:
            assert above in seen
            assert start[above] <= start[span] <= end[span] <= end[above]
        seen.add(span)
    own = self_times(start, end, parent)
    assert (own >= 0).all()
    roots = parent < 0
    assert own.sum() == (end - start)[roots].sum()
    covered = {at for begin, finish in zip(start, end, strict=True) for at in range(begin, finish)}
    assert own.sum() == len(covered)


@settings(deadline=None)
@given(spans)
def test_operators_keep_their_times_whatever_python_frames_do(drawn) -> None:
    start, end, soft = columns(drawn)
    hard = ~soft
    alone = nest(start[hard], end[hard], soft[hard])
    together = nest(start, end, soft)
    np.testing.assert_array_equal(together[0][hard], alone[0])
    np.testing.assert_array_equal(together[1][hard], alone[1])


@settings(deadline=None)
@given(spans, st.lists(st.integers(-1, 110), max_size=20))
def test_innermost_agrees_with_a_plain_search(drawn, moments) -> None:
    start, end, parent, _ = nest(*columns(drawn))
    found = innermost(start, end, parent, np.array(moments, dtype=np.int64))
    for at, span in zip(moments, found, strict=True):
        is_open = [row for row in range(len(start)) if start[row] <= at < end[row]]
        if not is_open:
            assert span == -1
        else:
            assert span in is_open
            assert not set(np.flatnonzero(parent == span)) & set(is_open)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with_stack"])
def measured(request, tmp_path_factory) -> tuple[Profile, list]:
    """A real trace and torch's own averages of the same run."""
    program = SmallProgram()
    program()
    with profile(
        activities=[ProfilerActivity.CPU], with_stack=request.param, record_shapes=True
    ) as profiler:
        for number in range(6):
            program(number)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profiler.export_chrome_trace(str(path))
    return read_trace(path), list(profiler.key_averages())


def test_self_times_are_those_of_key_averages(measured) -> None:
    read, averages = measured
    table = read.contexts.assign(own=read.value_table("cpu_time_ms"))
    assert (table["own"] >= 0).all()
    operators = table[table["kind"].isin(["operator", "annotation"])]
    ours = operators.groupby("name")["own"].sum()
    for average in averages:
        if average.key in ours:
            theirs = average.self_cpu_time_total / 1e3
            assert ours[average.key] == pytest.approx(theirs, rel=1e-6), average.key
    named = {average.key for average in averages}
    assert set(ours.index) <= named
    # In total too: torch counts some Python frames negative, others twice; their sum agrees.
    total = sum(average.self_cpu_time_total for average in averages) / 1e3
    has_python = (table["kind"] == "python").any()
    if not has_python or any(re.search(r"\.py\(\d+\)", name) for name in named):
        assert table["own"].sum() == pytest.approx(total, rel=1e-6)


def test_exclusive_values_sum_to_the_roots(measured) -> None:
    read, _ = measured
    total = read.value_table("cpu_time_ms", "inclusive")
    roots = total[read.contexts["parent"] < 0]
    assert read.value_table("cpu_time_ms").sum() == pytest.approx(roots.sum(), rel=1e-9)


def test_parts_come_from_the_nearest_range(measured) -> None:
    read, _ = measured
    contexts = read.contexts
    assert len(read.iterations) == 6
    addmm = contexts[contexts["name"] == "aten::addmm"]
    assert set(zip(addmm["component"], addmm["phase"], strict=True)) == {("bottom_mlp", "forward")}
    assert addmm["shapes"].iloc[0].startswith("[[32], [8, 16], [16, 32]")
    iteration = contexts[contexts["name"] == "dlrm::iteration"]
    assert iteration["component"].tolist() == ["other"]
    backward = contexts[contexts["name"].str.startswith("autograd::engine")]
    assert set(backward["component"]) == {"loss"}


def test_python_frames_have_file_and_line(measured) -> None:
    read, _ = measured
    frames = read.contexts[read.contexts["kind"] == "python"]
    if frames.empty:
        pytest.skip("recorded without stacks")
    here = frames[frames["name"].str.endswith(": data_forward")]
    assert here["file"].iloc[0].endswith("small_program.py")
    assert here["line"].iloc[0] > 0
    assert not frames["name"].str.contains(" at 0x").any()


def test_recording_has_flops_times_memory_and_reasons(tmp_path: Path) -> None:
    program = SmallProgram()
    ticks: list[tuple[int, int]] = []
    numbers: list[int] = []

    def run(number: int) -> None:
        numbers.append(number)
        program(number)

    folder = record_iterations(
        run,
        tmp_path / "recording",
        Lengths(4, warmup=1, unprofiled=3),
        Detail(profile_memory=True),
        information={"parameters": {"data": {"generator": "uniform"}}, "command": "dlrm record"},
        progress=lambda done, total: ticks.append((done, total)),
    )
    assert numbers == list(range(8))
    assert ticks[-1] == (8, 8)
    assert sorted(path.name for path in folder.iterdir()) == [
        "key_averages.json",
        "recording.json",
        "trace.json.gz",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["recording"]
    read = read_recording(folder)
    assert len(read.iterations) == 4
    assert read.meta["engine"] == "torch"
    assert read.meta["parameters"]["data"]["generator"] == "uniform"
    assert read.meta["passes"][0]["dilation"] > 0
    assert read.meta["passes"][0]["command"] == "dlrm record"
    assert "GPU" in read.not_measured["gpu_time_ms"]
    assert not read.has("gpu_time_ms")
    flops = read.values[read.values["metric"] == "flops"].set_index("context")["value"]
    addmm = read.contexts.index[read.contexts["name"] == "aten::addmm"]
    assert flops[addmm].sum() == 4 * 2 * 8 * 16 * 32  # iterations x 2 m k n
    assert not set(read.contexts.index[read.contexts["name"] == "aten::sort"]) & set(flops.index)
    allocated = read.value_table("allocated_bytes", "inclusive")
    assert allocated[read.contexts["parent"] < 0].sum() > 0
    assert read.meta["memory"]["cpu"]["peak_bytes"] > 0
    # Everything survives a file.
    again = Profile.load(read.save(tmp_path / "profile"))
    pd.testing.assert_frame_equal(again.values, read.values)


def test_a_failing_iteration_leaves_no_recording(tmp_path: Path) -> None:
    def run(number: int) -> None:
        if number == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        record_iterations(run, tmp_path / "recording", Lengths(3, warmup=1))
    assert not list(tmp_path.iterdir())


def test_impossible_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="iterations >= 1"):
        record_iterations(print, tmp_path / "r", Lengths(0))
    (tmp_path / "r").mkdir()
    with pytest.raises(InputError, match="exists already"):
        record_iterations(print, tmp_path / "r", Lengths(1))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="torch sees no GPU"):
            record_iterations(print, tmp_path / "s", Lengths(1), device="cuda")


# ---- GPU work, in traces made by hand ---------------------------------------------


@pytest.fixture()
def gpu(tmp_path: Path) -> Profile:
    return gpu_trace.read(tmp_path, gpu_trace.events())


def value_by_name(read: Profile, metric: str, scope: str = "exclusive") -> dict[str, float]:
    table = read.contexts.assign(value=read.value_table(metric, scope))
    return table.groupby("name")["value"].sum().to_dict()


def test_kernels_belong_to_the_call_and_part_that_launched_them(gpu: Profile) -> None:
    contexts = gpu.contexts.set_index("name")
    for kernel, launcher, component in (
        ("gemm", "cudaLaunchKernel", "bottom_mlp"),
        ("side", "cuLaunchKernelEx", "bottom_mlp"),
        ("Memcpy DtoH", "cudaMemcpyAsync", "bottom_mlp"),
        ("reduce", "cudaLaunchKernel", "loss"),
    ):
        row = contexts.loc[kernel]
        assert gpu.contexts["name"][row["parent"]] == launcher
        assert row["component"] == component
    times = value_by_name(gpu, "gpu_time_ms")
    assert times["gemm"] == pytest.approx(0.020)
    assert times["Memcpy DtoH"] == pytest.approx(0.010)
    assert times["dlrm::bottom_mlp::forward"] == 0
    inclusive = value_by_name(gpu, "gpu_time_ms", "inclusive")
    assert inclusive["dlrm::bottom_mlp::forward"] == pytest.approx(0.020 + 0.015 + 0.010)
    assert inclusive["aten::addmm"] == pytest.approx(0.035)
    assert inclusive["dlrm::iteration"] == pytest.approx(0.070)
    assert value_by_name(gpu, "launches", "inclusive")["dlrm::iteration"] == 3
    assert value_by_name(gpu, "copy_bytes", "inclusive")["aten::copy_"] == 4096


def test_nothing_on_the_gpu_is_counted_twice(gpu: Profile) -> None:
    assert gpu.value_table("gpu_time_ms").sum() == pytest.approx(0.070)
    assert "Activity Buffer Request" not in set(gpu.contexts["name"])
    assert "Stream Sync" not in set(gpu.contexts["name"])


def test_streams_are_lines_of_the_trace(gpu: Profile) -> None:
    assert gpu.device == "cuda"
    streams = gpu.threads[gpu.threads["kind"] == "gpu_stream"]
    assert streams["thread"].tolist() == [7, 9]
    assert set(gpu.threads["rank"]) == {3}
    on_seven = gpu.trace[gpu.trace["profile"] == streams["profile"].iloc[0]]
    names = gpu.contexts["name"][on_seven["context"]].tolist()
    assert names == ["gemm", "Memcpy DtoH", "reduce"]
    assert (on_seven["end_ns"] - on_seven["start_ns"]).tolist() == [20_000, 10_000, 25_000]


def test_unknown_launchers_are_kept_apart(tmp_path: Path) -> None:
    events = gpu_trace.events()
    for event in events:
        if event["name"] == "gemm":
            event["args"] = {"device": 0, "stream": 7, "correlation": 4711}
    read = gpu_trace.read(tmp_path, events)
    row = read.contexts.set_index("name").loc["gemm"]
    assert (row["component"], row["phase"]) == ("other", "")
    assert read.contexts["name"][row["parent"]] == "launched before the trace"
    assert read.value_table("gpu_time_ms").sum() == pytest.approx(0.070)


def test_late_kernels_lengthen_the_iteration_that_launched_them(tmp_path: Path) -> None:
    events = gpu_trace.events()
    for event in events:
        if event["name"] == "reduce":
            event["dur"] = 50.0
    read = gpu_trace.read(tmp_path, events)
    assert read.iterations["end_ns"].tolist() == [120_000]


def test_iterations_of_a_gpu_that_lags_behind_are_those_of_its_own_work(tmp_path: Path) -> None:
    """Four steps of 30 us launch 100 us each, behind 50 us of before; then the profiler stops."""
    span, on_gpu = gpu_trace.span, gpu_trace.on_gpu
    events = [on_gpu("kernel", "gemm", 0, 50, 7, correlation=99)]
    for i in range(4):
        events += [
            span("user_annotation", f"ProfilerStep#{i}", 30 * i, 30 * i + 30),
            span("cuda_runtime", "cudaLaunchKernel", 30 * i + 5, 30 * i + 9, correlation=i),
            on_gpu("kernel", "gemm", 50 + 100 * i, 150 + 100 * i, 7, correlation=i),
        ]
    events.append(span("user_annotation", "ProfilerStep#4", 120, 121))
    read = gpu_trace.read(tmp_path, events)
    assert read.iterations["start_ns"].tolist() == [50_000, 150_000, 250_000, 350_000]
    assert read.iterations["end_ns"].tolist() == [150_000, 250_000, 350_000, 450_000]


def test_autograd_threads_have_the_part_that_waits_for_them(tmp_path: Path) -> None:
    span = gpu_trace.span
    events = [
        span("user_annotation", "dlrm::iteration", 0, 100),
        span("user_annotation", "dlrm::top_mlp::backward", 10, 60),
        span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 20, 50, tid=11),
        span("cpu_op", "aten::mm", 25, 45, tid=11),
        span("cpu_op", "aten::empty", 25, 45, tid=12),
    ]
    read = gpu_trace.read(tmp_path, events)
    parts = read.contexts.set_index("name")[["component", "phase"]]
    assert parts.loc["aten::mm"].tolist() == ["top_mlp", "backward"]
    assert parts.loc["aten::empty"].tolist() == ["other", ""]
    assert len(read.threads) == 3


# ---- size and bad input -----------------------------------------------------------


def test_a_trace_without_our_ranges_is_read_too(tmp_path: Path) -> None:
    span = gpu_trace.span
    events = [
        event
        for step in range(2)
        for event in (
            span("user_annotation", f"ProfilerStep#{step}", 100 * step, 100 * step + 90),
            span("cpu_op", "aten::mm", 100 * step + 5, 100 * step + 80),
        )
    ]
    read = gpu_trace.read(tmp_path, events)
    assert len(read.iterations) == 2
    assert "ProfilerStep*" in set(read.contexts["name"])


def test_sizes_that_change_every_call_do_not_split_an_operator() -> None:
    calls = [
        ("bag", "[[1000, 64], [17], [2048]]"),
        ("bag", "[[1000, 64], [23], [2048]]"),
        ("bag", "[[1000, 64], [5], [2048]]"),
        ("mm", "[[8, 4], [4, 8]]"),
        ("mm", "[[8, 4], [4, 8]]"),
        ("mm", "[[8, 4], [4, 8]]"),
        ("mm", "[[9, 4], [4, 8]]"),  # once only, but there is nothing to join it with
        ("dlrm::iteration", ""),
    ]
    names, shapes = (pd.Series(column) for column in zip(*calls, strict=True))
    joined = join_unsteady(names, shapes, 3)
    assert joined[:3].tolist() == ["[[1000, 64], [*], [2048]]"] * 3
    assert joined[3:].tolist() == shapes[3:].tolist()
    assert join_unsteady(names, shapes, 1).tolist() == shapes.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b'{"a": 1}', "no list 'traceEvents'"),
        (b'{"traceEvents": []}', "holds no operator"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1}]}', "an event has no .name"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12], "cut short"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"odd\.json.*{message}"):
        read_trace(path)


def test_incomplete_recordings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recording\.json: no such file"):
        read_recording(tmp_path)
    head = tmp_path / "recording.json"
    head.write_text(json.dumps({"format_version": 7}))
    with pytest.raises(InputError, match="format version 7; this version reads 1"):
        read_recording(tmp_path)
    head.write_text(json.dumps({"format_version": 1}))
    with pytest.raises(InputError, match=r"key_averages\.json: no such file"):
        read_recording(tmp_path)
    (tmp_path / "key_averages.json").write_text(json.dumps({"rows": [{"name": "aten::mm"}]}))
    with pytest.raises(InputError, match=r"key_averages\.json needs a list 'rows'"):
        read_recording(tmp_path)


def test_of_frames_that_run_as_long_the_caller_comes_first() -> None:
    stack = [("main.py:1", "main"), ("main.py:9", "called")]
    begin, end, marks = np.array([0, 10]), np.array([10, 20]), np.array([0])
    assert _spans(begin, end, [stack, stack], marks) == [(0, 20, "main"), (0, 20, "called")]
