"""Every instant of an iteration goes to one part, and the sums hold."""

import sys
from pathlib import Path
from types import FrameType

import gpu_trace
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_rows import BOTH, profile_of_rows
from recordings import recording
from small_program import SmallProgram
from small_training import parameters
from torch.profiler import ProfilerActivity, profile

from dlrm_core.parts import parse_span
from dlrm_core.train import Trainer
from dlrm_workbook.analysis.attribution import (
    attribute,
    coverage,
    iteration_times_ms,
    per_iteration,
    recorded,
    segments,
    step_contexts,
    what_differed,
)
from dlrm_workbook.analysis.context_tree import context_at, enclosing, running
from dlrm_workbook.analysis.operators import (
    SMALL,
    call_tree,
    memory,
    memory_curve,
    timeline,
    top_operators,
)
from dlrm_workbook.analysis.steady import steady_state
from dlrm_workbook.recordings.foreign import is_iteration_function
from dlrm_workbook.recordings.nesting import nest, self_times
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive
from dlrm_workbook.recordings.torch.trace import read_trace


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with_stack"])
def measured(request, tmp_path_factory) -> Profile:
    """A run of which no iteration is left out: what else the machine runs may slow some."""
    for _ in range(5):
        run = _run(request.param, tmp_path_factory.mktemp("trace") / "trace.json.gz")
        if steady_state(iteration_times_ms(run)).steady.all():
            break
    return run


def _run(with_stack: bool, path: Path) -> Profile:
    program = SmallProgram()
    program()
    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=with_stack,
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for number in range(5):
            program(number)
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


@pytest.fixture()
def gpu(tmp_path: Path) -> Profile:
    return gpu_trace.read(tmp_path, gpu_trace.events())


def times(attribution: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    keys = zip(attribution["component"], attribution["phase"], attribution["where"], strict=True)
    return dict(zip(keys, attribution["time_ms"], strict=True))


def test_parts_sum_to_the_iteration(measured: Profile) -> None:
    attribution = attribute(measured)
    wall = iteration_times_ms(measured)
    assert attribution["time_ms"].sum() == pytest.approx(wall.mean(), rel=1e-9)
    assert attribution["share"].sum() == pytest.approx(1)
    assert set(attribution["where"]) == {"host"}
    each = per_iteration(measured).groupby("iteration")["time_ms"].sum()
    np.testing.assert_allclose(each, wall, rtol=1e-9)
    assert 0.3 < coverage(attribution) < 1  # small parts: a core taken away falls between them


def test_the_time_of_a_part_is_that_of_its_range(measured: Profile) -> None:
    contexts = measured.contexts.assign(
        total=measured.value_table("cpu_time_ms", "inclusive") / len(measured.iterations)
    )
    ranges = contexts[contexts["kind"] == "annotation"].groupby("name")["total"].sum()
    for row in attribute(measured).itertuples():
        if row.component != "other":
            expected = ranges[f"dlrm::{row.component}::{row.phase}"]
            assert row.time_ms == pytest.approx(expected, rel=1e-9)


def test_gpu_time_goes_to_the_running_kernel_and_idle_time_to_the_host(gpu: Profile) -> None:
    attribution = attribute(gpu)
    # See the drawing in gpu_trace: device busy 32..66 and 70..95.
    assert times(attribution) == pytest.approx(
        {
            ("data", "forward", "host"): 0.016,
            ("bottom_mlp", "forward", "device"): 0.034,
            ("bottom_mlp", "forward", "host"): 0.012,  # 20..32, before its first kernel
            ("loss", "forward", "device"): 0.025,
            ("loss", "forward", "host"): 0.007,  # 66..70 and 95..98
            ("other", "", "host"): 0.006,  # 0..2, 18..20, 98..100
        }
    )
    assert attribution["time_ms"].sum() == pytest.approx(0.1)
    assert coverage(attribution) == pytest.approx(1)  # of the GPU's time; 6 us of idle are other


def test_segments_have_neither_gaps_nor_overlaps(gpu: Profile, measured: Profile) -> None:
    for read in (gpu, measured):
        for number, pieces in segments(read).groupby("iteration"):
            step = read.iterations.set_index("iteration").loc[number]
            assert pieces["start_ns"].iloc[0] == step["start_ns"]
            assert pieces["end_ns"].iloc[-1] == step["end_ns"]
            assert (pieces["start_ns"].to_numpy()[1:] == pieces["end_ns"].to_numpy()[:-1]).all()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=30))
def test_enclosing_spans_are_those_of_nesting(drawn) -> None:
    start = np.array([begin for begin, _ in drawn])
    end = start + np.array([length for _, length in drawn])
    start, end, parent, order = nest(start, end, np.zeros(len(drawn), dtype=bool))
    depth = np.zeros(len(drawn), dtype=np.int64)
    for span in order:
        depth[span] = depth[parent[span]] + 1 if parent[span] >= 0 else 0
    full = np.flatnonzero(end > start)
    rows = full[np.lexsort((depth[full], start[full]))]
    found = enclosing(start[rows], end[rows])
    own = self_times(start[rows], end[rows], found)
    assert (own >= 0).all()
    assert own.sum() == self_times(start, end, parent).sum()


def sampled() -> Profile:
    """As HPCToolkit measures: no iterations, no trace, functions named after parts."""
    parent = [-1, 0, 1, 1, 0]
    own = np.array([1.0, 0.0, 6.0, 3.0, 10.0])
    total = inclusive_from_exclusive(np.array(parent), own)
    return profile_of_rows(
        {
            "parent": parent,
            "kind": "function",
            "name": ["main", "train", "top_mlp_forward", "data_forward", "import"],
            "component": ["other", "other", "top_mlp", "data", "other"],
            "phase": ["", "", "forward", "forward", ""],
        },
        [
            (0, row, "cpu_time_ms", scope, column[row])
            for scope, column in zip(BOTH, (own, total), strict=True)
            for row in range(5)
        ],
        engine="hpctoolkit",
        passes=[{"name": "time", "iterations": 2}],
    )


def test_a_sampled_profile_is_attributed_by_its_cpu_time() -> None:
    attribution = attribute(sampled())
    assert times(attribution) == pytest.approx(
        {
            ("data", "forward", "host"): 1.5,
            ("top_mlp", "forward", "host"): 3.0,
            ("other", "", "host"): 5.5,
        }
    )
    assert step_contexts(sampled()).all()


def functions_of_an_iteration() -> list[tuple[str, str]]:
    """Name and file of every Python function that one real iteration calls, outermost first."""
    trainer = Trainer(parameters())
    called: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.append((frame.f_code.co_qualname, frame.f_code.co_filename))

    sys.setprofile(note)
    try:
        trainer.iterate()
    finally:
        sys.setprofile(None)
        trainer.close()
    return called


def test_profilers_see_an_iteration_whatever_file_runs_it() -> None:
    called = functions_of_an_iteration()
    outermost, file = called[0]
    assert is_iteration_function(outermost, file)
    assert is_iteration_function(outermost, "/home/me/moved/elsewhere.py")
    parts = {parse_span(name.rpartition(".")[2]) for name, _ in called}
    assert {("data", "forward"), ("embedding", "backward"), ("embedding", "update")} <= parts


@pytest.mark.parametrize(
    ("name", "folder", "file", "expected"),
    [
        ("iterate", "/home/me/dlrm_core", "training.py", True),
        ("iterate", "dlrm_core", "training.py", True),
        ("iterate", "/home/me/dlrm_core", "training_loop.py", True),
        ("TrainingLoop.iterate", "/home/me/dlrm_core", "training_loop.py", True),
        ("iterate", "/home/me/program", "training.py", False),
        ("iterate", "/home/me/my_dlrm_core", "training.py", False),
        ("iterate", "", "", False),
        ("reiterate", "/home/me/dlrm_core", "training.py", False),
        ("train", "/home/me/dlrm_core", "training_loop.py", False),
    ],
)
def test_an_iteration_of_earlier_recordings_is_known_by_function_and_file(
    name: str, folder: str, file: str, expected: bool
) -> None:
    profile = sampled()
    profile.contexts.loc[1, ["name", "file"]] = [name, f"{folder}/{file}"]
    inside = [False, True, True, True, False] if expected else [True] * 5
    assert step_contexts(profile, other_threads=False).tolist() == inside


def test_a_sampled_step_is_what_runs_inside_the_iteration_function() -> None:
    profile = sampled()
    profile.contexts.loc[1, ["name", "file"]] = functions_of_an_iteration()[0]
    assert step_contexts(profile, other_threads=False).tolist() == [0, 1, 1, 1, 0]
    attribution = attribute(profile)
    assert times(attribution) == pytest.approx(
        {("data", "forward", "host"): 1.5, ("top_mlp", "forward", "host"): 3.0}
    )
    assert coverage(attribution) == pytest.approx(1)
    profile.meta = {
        "engine": "hpctoolkit",
        "passes": [{"name": "unprofiled"}],
        "parameters": {"profiling": {"warmup": 1, "iterations": 2}},
    }
    assert attribute(profile)["time_ms"].sum() == pytest.approx(3.0)


def test_step_contexts_leave_out_start_up(measured: Profile) -> None:
    inside = step_contexts(measured)
    names = measured.contexts["name"]
    assert inside[names == "aten::addmm"].all()
    assert not inside[measured.contexts["kind"] == "thread"].any()
    if (measured.contexts["kind"] == "python").any():
        assert not inside[names.str.endswith(": start_trace")].any()


def test_top_operators_hold_all_of_the_step(measured: Profile) -> None:
    table = top_operators(measured, count=10_000)
    assert table["share"].sum() == pytest.approx(1)
    assert table["share"].is_monotonic_decreasing
    wall = iteration_times_ms(measured).mean()
    assert table["cpu_self_ms"].sum() == pytest.approx(wall, rel=1e-9)
    assert table["gpu_ms"].isna().all()
    assert table["gflops_per_second"].isna().all()  # a plain trace has no FLOPs
    addmm = table[table["name"] == "aten::addmm"].iloc[0]
    assert addmm["calls"] == 1
    assert len(top_operators(measured, count=3)) == 3


def test_top_kernels_come_first_on_a_gpu(gpu: Profile) -> None:
    table = top_operators(gpu, count=3)
    assert table["name"].tolist() == ["reduce", "gemm", "side"]
    assert table["share"].tolist() == pytest.approx([25 / 70, 20 / 70, 15 / 70])
    assert table["component"].tolist() == ["loss", "bottom_mlp", "bottom_mlp"]


@pytest.mark.parametrize("smallest_share", [0.0, 0.01, 0.2, 1.1])
def test_pruned_call_trees_keep_their_sums(measured: Profile, smallest_share: float) -> None:
    tree = call_tree(measured, smallest_share=smallest_share)
    assert tree["id"].is_unique
    assert set(tree["parent"]) - {""} <= set(tree["id"])
    wall = iteration_times_ms(measured).mean()
    assert tree.loc[tree["parent"] == "", "value_ms"].sum() == pytest.approx(wall, rel=1e-9)
    children = tree.groupby("parent")["value_ms"].sum()
    for row in tree[tree["label"] != SMALL].itertuples():
        inner = children.get(row.id, 0.0)
        assert row.value_ms == pytest.approx(inner + row.self_ms, rel=1e-6, abs=1e-9)
    if smallest_share == 1.1:
        assert set(tree["label"]) == {"dlrm::iteration", SMALL}


def test_calls_that_only_hand_on_are_named_by_what_they_reach() -> None:
    profile = open_recording(recording("dlrm-h100-pc.d")).profile
    tree = call_tree(profile, "gpu_time_ms")
    assert len(tree) <= 300 and tree["through"].map(len).sum() > 500
    value = dict(zip(tree["id"], tree["value_ms"], strict=True))
    inner = tree.groupby("parent")["value_ms"].sum()
    for row in tree[tree["label"] != SMALL].itertuples():
        assert row.value_ms >= (inner.get(row.id, 0.0) + row.self_ms) * (1 - 1e-6)
        assert not row.parent or row.value_ms <= value[row.parent] * (1 + 1e-9)


def test_call_tree_of_gpu_time(gpu: Profile, measured: Profile) -> None:
    tree = call_tree(gpu, "gpu_time_ms", smallest_share=0)
    assert tree.loc[tree["parent"] == "", "value_ms"].sum() == pytest.approx(0.070)
    assert call_tree(measured, "gpu_time_ms").empty


def test_timeline_lies_inside_its_iterations(measured: Profile) -> None:
    table = timeline(measured, 2)
    assert table["iteration"].unique().tolist() == [0, 1]
    assert table["lane"].unique().tolist() == ["main thread"]
    first = table[table["iteration"] == 0]
    order = first["component"] + " " + first["phase"]
    assert order.tolist() == [
        "data forward",
        "bottom_mlp forward",
        "embedding forward",
        "loss forward",
        "loss backward",
        "optimizer update",
    ]
    wall = iteration_times_ms(measured)[0]
    assert (first["start_ms"] + first["duration_ms"] <= wall).all()


def test_timeline_has_a_lane_for_each_stream(gpu: Profile) -> None:
    table = timeline(gpu)
    lanes = table.groupby("lane")["component"].apply(list).to_dict()
    assert lanes == {
        "main thread": ["data", "bottom_mlp", "loss"],
        "GPU 0 stream 7": ["bottom_mlp", "bottom_mlp", "loss"],
        "GPU 0 stream 9": ["bottom_mlp"],
    }


def test_timeline_of_another_program_shows_its_operators_by_part() -> None:
    read = open_recording(recording("labelled/lab-t4-fp32.json.gz")).profile
    table = timeline(read)
    host = table[table["lane"].eq("main thread")]
    assert {"data", "optimizer"} <= set(host["component"]) and set(host["iteration"]) == {0, 1, 2}
    ends = host["start_ms"] + host["duration_ms"]
    within = host.groupby("iteration")["start_ms"].shift(-1).fillna(np.inf)
    assert (ends <= within + 1e-6).all()  # none lies over another
    first = read.iterations["start_ns"].to_numpy()[host["iteration"]]
    middle = first + 1e6 * (host["start_ms"] + host["duration_ms"] / 2).to_numpy()
    context = context_at(running(read, 0), middle.astype(np.int64))
    innermost = read.contexts["component"].to_numpy()[context] == host["component"]
    assert np.average(innermost, weights=host["duration_ms"]) > 0.9  # but for short ones between


def test_memory_is_told_by_part_or_not_at_all(measured: Profile, gpu: Profile) -> None:
    table = memory(measured)
    assert {"data", "bottom_mlp", "embedding"} <= set(table["component"])
    assert (table["allocated_mb"] > 0).all()
    curve = memory_curve(measured)
    peak = measured.meta["memory"]["cpu"]["peak_bytes"]
    assert curve["allocated_mb"].max() == pytest.approx(peak / 1e6)
    assert memory(gpu).empty
    assert memory_curve(gpu).empty
    assert "allocated_bytes" in gpu.not_measured


def long_run(times_ms: dict[str, list[float]]) -> Profile:
    """A profile of iterations whose parts took these times, one after the other."""
    parts = [name.split() for name in times_ms]
    spans, iterations, now = [], [], 0
    for number, lengths in enumerate(zip(*times_ms.values(), strict=True)):
        begin = now
        for part, length in enumerate(lengths):
            spans.append((0, now, now + round(length * 1e6), part + 1, 1))
            now += round(length * 1e6)
        spans.append((0, begin, now, 0, 0))
        iterations.append((number, begin, now))
    return profile_of_rows(
        {
            "parent": [-1] + [0] * len(parts),
            "name": ["dlrm::iteration", *(f"dlrm::{c}::{p}" for c, p in parts)],
            "component": ["other", *(c for c, _ in parts)],
            "phase": ["", *(p for _, p in parts)],
        },
        trace=spans,
        iterations=iterations,
    )


@pytest.fixture()
def disturbed() -> Profile:
    """30 iterations of 10 + 5 ms: three of warm-up in data, one straggler in the top MLP."""
    random = np.random.default_rng(1)
    data = 10 + 0.05 * random.normal(size=30)
    top = 5 + 0.05 * random.normal(size=30)
    data[:3] += 20
    top[17] += 30
    return long_run({"data forward": data.tolist(), "top_mlp forward": top.tolist()})


def test_attribution_is_of_the_steady_iterations_and_says_so(disturbed: Profile) -> None:
    steady = attribute(disturbed)
    assert times(steady) == pytest.approx(
        {("data", "forward", "host"): 10, ("top_mlp", "forward", "host"): 5}, rel=0.01
    )
    assert steady["share"].sum() == pytest.approx(1)
    warm, slow = steady.attrs["left_out"]
    assert warm.startswith("3 of 30 iterations are warm-up and left out (0, 1, 2; up to 35")
    assert slow.startswith("1 of 30 iterations are stragglers and left out (17; up to 45")
    kept = np.ones(30, dtype=bool)
    kept[[0, 1, 2, 17]] = False
    wall = iteration_times_ms(disturbed)
    assert steady["time_ms"].sum() == pytest.approx(wall[kept].mean(), rel=1e-9)


def test_what_differed_names_the_part_that_grew(disturbed: Profile) -> None:
    table = what_differed(disturbed)
    first = table.groupby("iteration").first()
    assert first["why"].tolist() == ["warm-up"] * 3 + ["straggler"]
    assert first["component"].tolist() == ["data"] * 3 + ["top_mlp"]
    assert first.loc[17, "grew_ms"] == pytest.approx(30, rel=0.02)
    assert first["share"].min() > 0.98
    grown = table.groupby("iteration")["grew_ms"].sum()
    np.testing.assert_allclose(grown, first["time_ms"] - first["usual_ms"], rtol=1e-9)
    quiet = long_run({"data forward": [10.0 + 0.01 * (row % 3) for row in range(20)]})
    assert what_differed(quiet).empty
    assert what_differed(sampled()).empty


def test_the_profilers_own_start_and_stop_are_left_out(tmp_path: Path) -> None:
    of_profiler = "torch/profiler/profiler.py(705): "
    events = [
        gpu_trace.span("python_function", "run.py(1): main", 0, 1000),
        gpu_trace.span("python_function", f"{of_profiler}start", 5, 800),
        gpu_trace.span("cpu_op", "aten::mm", 820, 860),
        gpu_trace.span("python_function", f"{of_profiler}step", 865, 870),
        gpu_trace.span("python_function", f"{of_profiler}stop", 900, 990),
    ]
    read = read_trace(gpu_trace.write(tmp_path / "trace.json", events))
    assert recorded(read) == (800_000, 900_000)
