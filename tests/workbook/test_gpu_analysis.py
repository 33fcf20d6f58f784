"""Kernels, copies, stalls, idleness with blame, lanes, and how they are drawn."""

from dataclasses import replace
from pathlib import Path

import gpu_database
import gpu_trace
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_rows import bare_profile
from recordings import database_profile

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis import lanes
from dlrm_workbook.analysis.context_tree import reason_of, running
from dlrm_workbook.analysis.gpu import (
    REASONS,
    copy_table,
    kernel_table,
    sampled_profile,
    stall_reasons,
    stall_table,
)
from dlrm_workbook.analysis.idleness import NOBODY, gpu_idleness, idle_blame
from dlrm_workbook.analysis.lanes import thread_timeline
from dlrm_workbook.analysis.views import bottom_up, flat, folded, top_down
from dlrm_workbook.recordings.hpctoolkit.metrics import STALLS, derive
from dlrm_workbook.recordings.nesting import overlap, union
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace
from dlrm_workbook.show import gpu as gpu_figures
from dlrm_workbook.show.tables import INDENT, Text, TextTable, show


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return gpu_database.made(tmp_path_factory.mktemp("made") / "made.d")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    path = tmp_path_factory.mktemp("traced") / "trace.json"
    return read_trace(gpu_trace.write(path, gpu_trace.events()))


# ---- kernels and copies -----------------------------------------------------------


def test_kernels_of_a_database(made: Profile) -> None:
    table = kernel_table(made).set_index("kernel")
    gemm = table.loc["void gemm<float, 4>(float*)"]
    assert gemm[["component", "phase"]].tolist() == ["bottom_mlp", "forward"]
    names = ["launches", "time_ms", "mean_us", "registers", "blocks", "threads_per_block"]
    names += ["shared_memory_bytes", "occupancy_percent"]
    expected = [4, 0.02, 5, 64, 100, 256, 1024, 25]
    assert gemm[names].astype(float).tolist() == pytest.approx(expected)
    # shared memory was measured of another kernel, so here it is really none
    assert table.loc["gather(long*)", "shared_memory_bytes"] == 0
    # kernels, copies and memory sets together are the device's time
    of_kernels = table["time_ms"].sum() / made.value_table("gpu_time_ms").sum()
    assert table["share_of_device"].sum() == pytest.approx(of_kernels)
    assert table["short_name"].is_unique


def test_kernels_of_a_real_database() -> None:
    table = kernel_table(database_profile("loops-cuda-nvidiapc-t"))
    assert table["kernel"].tolist() == ["kernmain()"]  # its twin without values is not there
    row = table.iloc[0]
    assert (row["launches"], row["registers"], row["occupancy_percent"]) == (100, 32, 12.5)
    assert np.isnan(row["shared_memory_bytes"])


def test_kernels_and_copies_of_a_torch_trace(traced: Profile) -> None:
    table = kernel_table(traced).set_index("kernel")
    assert table["time_ms"].to_dict() == pytest.approx(
        {"reduce": 0.025, "gemm": 0.02, "side": 0.015}
    )
    assert table["launches"].eq(1).all()
    assert table["registers"].isna().all()  # a torch trace's Profile does not hold them
    copies = copy_table(traced)
    assert copies["direction"].tolist() == ["device to host"]
    numbers = ["count", "bytes", "time_ms", "gb_per_s"]
    assert copies[numbers].iloc[0].tolist() == pytest.approx([1, 4096, 0.01, 0.4096])
    assert copies["share_of_link"].isna().all()  # no rate of the link was measured


def test_copies_of_a_database(made: Profile) -> None:
    table = copy_table(made).set_index("direction")
    table = table[["count", "bytes", "time_ms", "gb_per_s"]]
    assert table.loc["host to device"].tolist() == pytest.approx([2, 40_000, 0.01, 4])
    assert table.loc["device to host"].tolist() == pytest.approx([1, 10_000, 0.005, 2])
    # where a release collects them; this one does not
    waits = made.values[made.values["metric"].eq("GXCOPY:COUNT")].astype({"metric": "object"})
    waits = [waits.assign(metric=name) for name in ("GSYNC:COUNT", "GSYNC:STR (sec)")]
    names = [*made.metrics.to_dict("records"), *({"metric": w.metric.iloc[0]} for w in waits)]
    more = replace(made, values=pd.concat([made.values, *waits]), metrics=pd.DataFrame(names))
    table = copy_table(more).set_index("direction")
    assert table.loc["synchronisation, on streams", "count"] == 3


# ---- stalls -----------------------------------------------------------------------


def test_stalls_by_kernel_and_by_line(made: Profile) -> None:
    by_kernel = stall_table(made)
    assert by_kernel["warp_cycles"].sum() == 1000
    assert by_kernel["share_of_samples"].sum() == pytest.approx(1)
    assert by_kernel["share_of_stalls"].sum() == pytest.approx(1)
    by_line = stall_table(made, "line")
    lines = by_line.set_index(["place", "reason"])["warp_cycles"].to_dict()
    assert lines == {
        ("main.c:10", "NONE"): 300,
        ("main.c:10", "GMEM"): 200,
        ("main.c:10", "IDEP"): 100,
        ("main.c:20", "IDEP"): 150,
        ("main.c:20", "SYNC"): 50,
        ("main.c:30", "GMEM"): 150,
        ("main.c:30", "NONE"): 50,
    }
    reasons = stall_reasons(by_line)
    assert reasons["reason"].tolist()[:2] == ["GMEM", "NONE"]
    assert reasons["advice"].str.len().gt(10).all()
    with pytest.raises(InputError, match="by 'colour'"):
        stall_table(made, "colour")


def test_golden_figures_of_pc_sampling() -> None:
    profile = database_profile("loops-cuda-nvidiapc-t")
    rows = profile.values_of(lambda name: name.startswith("G"), "exclusive")
    measured = rows.groupby("metric")["value"].sum().to_dict()
    assert measured["GSAMP:TOT"] == 657_096
    assert measured["GINS"] == 4096 * 657_096 == 2_691_465_216
    facts = derive(measured, measured)
    assert round(facts["utilization_percent"], 1) == 92.2
    assert round(facts["stalled_percent"], 1) == 76.4
    assert facts["occupancy_percent"] == 12.5
    for by in ("kernel", "line"):
        table = stall_table(profile, by)
        assert table["warp_cycles"].sum() == 2_691_465_216
        shares = stall_reasons(table).set_index("reason")["share_of_stalls"]
        assert round(100 * shares["IDEP"], 1) == 91.5
        assert shares.sum() == pytest.approx(1)
    lines = stall_table(profile, "line")
    assert lines["place"].iloc[0] == "loops.cu:16"


def test_every_reason_has_advice_and_a_name() -> None:
    assert REASONS.keys() == STALLS.keys()
    assert all(row["words"] and row["advice"] for row in REASONS.values())


def test_stalls_come_from_their_own_pass(made: Profile, tmp_path: Path) -> None:
    times = gpu_database.made(tmp_path / "times.d", stalls=False)
    assert sampled_profile(times) is times
    gpu_database.made(tmp_path / "stalls.d")
    times.meta["passes"] = [
        {"name": "times", "database": str(tmp_path / "times.d")},
        {"name": "stalls", "database": str(tmp_path / "stalls.d")},
    ]
    pd.testing.assert_frame_equal(stall_table(sampled_profile(times)), stall_table(made))
    times.meta["passes"][1]["database"] = str(tmp_path / "gone.d")
    assert sampled_profile(times) is times


# ---- not measured -----------------------------------------------------------------


def test_what_was_not_measured_is_empty_and_says_why(traced: Profile, tmp_path: Path) -> None:
    cpu = database_profile("dlrm-cpu-python")
    empty = [
        kernel_table(cpu),
        copy_table(cpu),
        stall_table(cpu),
        stall_reasons(stall_table(cpu)),
        gpu_idleness(cpu),
        idle_blame(cpu),
        stall_table(traced),
        stall_table(gpu_database.made(tmp_path / "times.d", stalls=False), "line"),
        idle_blame(gpu_database.made(tmp_path / "gpu.d", cpu_trace=False)),
        idle_blame(database_profile("loops-cuda-nvidiapc-t")),
    ]
    for table in empty:
        assert table.empty
        assert len(reason_of(table)) > 10
        shown = show(table)
        assert isinstance(shown, Text)
        assert reason_of(table) in shown.markdown
    bare = bare_profile()
    for table in (
        *(kernel_table(bare), copy_table(bare), stall_table(bare)),
        *(gpu_idleness(bare), idle_blame(bare), thread_timeline(bare)),
    ):
        assert table.empty
        assert reason_of(table)


# ---- idleness ---------------------------------------------------------------------


def test_idleness_and_blame_of_a_database(made: Profile) -> None:
    row = gpu_idleness(made).iloc[0]
    assert row["streams"] == 2
    assert [row["span_ms"], row["busy_ms"], row["idle_ms"]] == pytest.approx([0.04, 0.035, 0.005])
    assert idle_blame(made)["name"].tolist() == ["embedding_forward"]

    trace = made.trace
    edges = {"start_ns": [trace["start_ns"].min()], "end_ns": [trace["end_ns"].max()]}
    whole = replace(made, iterations=pd.DataFrame({"iteration": [0], **edges}))
    run = gpu_idleness(whole).iloc[0]
    assert (run["idle_share"], run["gaps"]) == (pytest.approx(0.65), 3)
    # the thread that launches nothing is not charged
    blame = idle_blame(whole).set_index("name")["blamed_ms"].to_dict()
    expected = {"data_forward": 40, "bottom_mlp_forward": 10, "wait": 10, "embedding_forward": 5}
    assert blame == pytest.approx({name: time / 1e3 for name, time in expected.items()})
    # where nobody is known to launch, both share what they both ran
    times = made.values[made.values["metric"].eq("cpu_time_ms")]
    both = idle_blame(replace(whole, values=times)).set_index("name")["blamed_ms"].to_dict()
    assert both["prefetch"] == pytest.approx((10 + 10 + 5 + 10) / 2 / 1e3 - 0.005)
    assert sum(both.values()) == pytest.approx(0.065)
    launches = made.values.head(1).assign(metric="launches", profile=2)
    other = idle_blame(replace(whole, values=launches)).set_index("name")["blamed_ms"]
    assert other[NOBODY] == pytest.approx(0.065 - other["prefetch"])


def test_a_thread_that_waits_for_autograds_is_not_blamed(made: Profile) -> None:
    """Half of what autograd's thread did was charged to the range ``backward`` around its call."""
    waits = made.contexts["name"].eq("bottom_mlp_forward")
    contexts = made.contexts.assign(
        component=made.contexts["component"].mask(waits, "other"),
        kind=made.contexts["kind"].mask(waits, "annotation"),
    )
    edges = {"start_ns": [made.trace["start_ns"].min()], "end_ns": [made.trace["end_ns"].max()]}
    iterations = pd.DataFrame({"iteration": [0], **edges})
    values = made.values[made.values["metric"].eq("cpu_time_ms")]
    whole = replace(made, contexts=contexts, iterations=iterations, values=values)
    blame = idle_blame(whole).set_index("name")["blamed_ms"]
    assert "bottom_mlp_forward" not in blame
    assert blame["prefetch"] == pytest.approx((10 / 2 + 10 + 5 / 2) / 1e3)


def test_idleness_and_blame_of_a_torch_trace(traced: Profile) -> None:
    row = gpu_idleness(traced).iloc[0]
    assert [row["span_ms"], row["busy_ms"], row["idle_ms"]] == pytest.approx([0.1, 0.059, 0.041])
    blame = idle_blame(traced)
    assert blame["share"].sum() == pytest.approx(1)
    parts = blame.groupby("component")["blamed_ms"].sum().to_dict()
    expected = {"data": 0.016, "bottom_mlp": 0.012, "loss": 0.007, "other": 0.006}
    assert parts == pytest.approx(expected)


def test_pc_sampling_destroys_timing_on_real_databases() -> None:
    for name, share in (("nvidia", 0.049), ("nvidiapc", 0.78)):
        found = gpu_idleness(database_profile(f"loops-cuda-{name}-t"))["idle_share"][0]
        assert found == pytest.approx(share, abs=5e-4)


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(INTERVALS, INTERVALS)
def test_union_and_overlap_equal_counting(first, second) -> None:
    def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        start = np.array([a for a, _ in pairs], dtype=np.int64)
        return start, start + np.array([n for _, n in pairs], dtype=np.int64)

    start, end = union(*columns(first))
    covered = {t for a, n in first for t in range(a, a + n)}
    assert (end[:-1] < start[1:]).all()
    assert sum(end - start) == len(covered)
    asked = columns(second)
    expected = [len(covered & set(range(a, a + n))) for a, n in second]
    assert overlap(*asked, start, end).tolist() == expected


# ---- lanes ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dlrm-cpu-python", "loops-cuda-nvidia-t", "made", "traced"])
@pytest.mark.parametrize("by", ["component", "function"])
def test_a_coarse_timeline_keeps_every_share(name, by, request, monkeypatch) -> None:
    profile = (
        request.getfixturevalue(name) if name in ("made", "traced") else database_profile(name)
    )
    monkeypatch.setattr(lanes, "MOST_OF_ALL", 10**7)
    fine = thread_timeline(profile, by)
    most = 40 * fine["lane"].nunique()
    monkeypatch.setattr(lanes, "MOST_OF_ALL", most)
    coarse = thread_timeline(profile, by)
    assert len(coarse) <= most
    # what is drawn as one span was one, and the longest of a lane always is
    alone = coarse[coarse["spans"] == 1]
    pairs = [set(zip(t["lane"], t["duration_ms"], strict=True)) for t in (alone, fine)]
    assert pairs[0] <= pairs[1]
    assert fine["duration_ms"].max() in set(coarse["duration_ms"])
    for table in (fine, coarse):
        for lane, spans in table.groupby("lane", sort=False):
            end = (spans["start_ms"] + spans["duration_ms"]).to_numpy()
            assert (spans["start_ms"].to_numpy()[1:] >= end[:-1] - 1e-6).all(), lane
            assert spans["start_ms"].iloc[0] >= 0
    keys = ["lane", "label"]
    shares = [t.groupby(keys)["duration_ms"].sum().sort_index() for t in (fine, coarse)]
    pd.testing.assert_series_equal(*shares, rtol=1e-9)
    assert fine["spans"].sum() == coarse["spans"].sum()
    held = coarse.groupby("lane")["duration_ms"].sum()
    lanes_running = {
        spans["lane"].iloc[0]: np.subtract(*running(profile, number)[1::-1]).sum() / 1e6
        for number, spans in coarse.groupby("profile")
    }
    assert held.to_dict() == pytest.approx(lanes_running)


def test_lanes_of_a_database(made: Profile) -> None:
    table = thread_timeline(made)
    names = ["thread 0", "thread 1", "GPU 0 stream 7", "GPU 0 stream 9"]
    assert list(dict.fromkeys(table["lane"])) == names
    held = table.groupby("lane", sort=False)["duration_ms"].sum()
    assert (held / held.iloc[0]).tolist() == pytest.approx([1, 0.6, 0.3, 0.15])
    assert table.loc[table["lane"].eq(names[2]), "label"].mode()[0] == "bottom MLP forward"
    nothing = replace(made, trace=made.trace.assign(end_ns=made.trace["start_ns"]))
    assert "nothing ran" in reason_of(thread_timeline(nothing))
    with pytest.raises(InputError, match="by 'colour'"):
        thread_timeline(made, "colour")


def test_running_gives_nested_spans_to_the_innermost(traced: Profile) -> None:
    start, end, context = running(traced, 0)
    assert (start[1:] >= end[:-1]).all()
    assert (end - start).sum() == 100_000
    names = traced.contexts["name"].to_numpy()[context]
    held = pd.Series(end - start).groupby(names).sum()
    assert held["aten::addmm"] == 11_000  # 18 us without its two launches of 5 and 2 us


# ---- drawing ----------------------------------------------------------------------


def test_figures_and_tables_show_the_numbers(made: Profile, traced: Profile) -> None:
    for profile in (made, traced):
        kernels, idle = kernel_table(profile), gpu_idleness(profile)
        blame, spans = idle_blame(profile), thread_timeline(profile)
        bars = gpu_figures.kernel_bars(kernels)
        assert list(bars.data[0].x) == kernels["time_ms"].tolist()
        assert "launches" in bars.data[0].hovertext[0]
        assert sum(gpu_figures.blame_bars(blame).data[0].x) == pytest.approx(
            blame["blamed_ms"].sum()
        )
        assert len(gpu_figures.idleness_bars(idle).data) == 2
        by_function = thread_timeline(profile, "function")
        for drawn in (spans, by_function):
            figure = gpu_figures.lane_timeline(drawn)
            times = sum(sum(t.x) for t in figure.data if t.x[0] is not None)
            assert times == pytest.approx(drawn["duration_ms"].sum())
        for table in (
            show(kernels),
            show(copy_table(profile)),
            show(idle),
            show(blame),
            show(folded(top_down(profile, also=["gpu_time_ms"]))),
            show(bottom_up(profile, "gpu_time_ms")),
            *(show(flat(profile, by=by)) for by in ("function", "line")),
            *(show(flat(profile, by=by)) for by in ("file", "module")),
        ):
            assert isinstance(table, TextTable)
            assert table.rows
            assert "nan" not in repr(table)
    assert "registers per thread" in show(kernel_table(made)).columns
    assert "registers per thread" not in show(kernel_table(traced)).columns


def test_stalls_are_drawn_as_shares_of_all_samples(made: Profile) -> None:
    for by, rows in (("kernel", 2), ("line", 3)):
        figure = gpu_figures.stall_bars(stall_table(made, by))
        assert sum(sum(trace.x) for trace in figure.data) == pytest.approx(100)
        assert figure.data[-1].name == "issuing, no stall"
        assert len(figure.layout.yaxis.ticktext) == rows
    assert isinstance(show(stall_table(made)), TextTable)


def test_chains_of_calls_are_one_row() -> None:
    view = top_down(database_profile("loops-cuda-nvidiapc-t"), "GINS")
    table = show(folded(view), ["call"])
    assert isinstance(table, TextTable)
    calls = [row[0].strip(INDENT) for row in table.rows]
    assert calls == ["▸ <root>", "▸ … 7 calls … kernmain", "▸ func2"]
