"""Work of operators from their shapes, and how near a GPU's limits they and kernels run."""

import csv
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_foreign_traces import BERT, GRAPHS, META, RESNET, TRACES, V100, events_of
from torch.utils.flop_counter import FlopCounterMode

from dlrm_workbook.analysis.attribution import iteration_state
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.analysis.gpu import copy_table, kernel_table, waves
from dlrm_workbook.analysis.gpu_limits import (
    RATE_KNOWN,
    kernel_paces,
    kernel_work,
    operator_rates,
    peak_tflops,
    rate_coverage,
)
from dlrm_workbook.ground.units import digits
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.chrome_trace import Events
from dlrm_workbook.recordings.torch.shape_work import work_of_call
from dlrm_workbook.recordings.torch.trace import profile_of
from dlrm_workbook.show import gpu as gpu_figures
from dlrm_workbook.show.roofline import operator_roofline
from dlrm_workbook.show.tables import TextTable, show

EXPECTED = TRACES / "bert-small-h100-expected"


def read(recording: str) -> tuple[Events, Profile]:
    events = events_of(recording)
    return events, profile_of(events)


# ---- shapes ---------------------------------------------------------------------------


SIZE = st.integers(1, 9)


@given(SIZE, SIZE, SIZE, SIZE)
def test_operations_of_products_are_torchs(batch: int, m: int, n: int, k: int) -> None:
    a, b, many_a, many_b = (
        torch.empty(shape) for shape in ((m, k), (k, n), (batch, m, k), (batch, k, n))
    )
    for name, run, inputs in (
        ("aten::mm", torch.mm, (a, b)),
        ("aten::bmm", torch.bmm, (many_a, many_b)),
    ):
        with FlopCounterMode(display=False) as counter:
            result = run(*inputs)
        shapes, types = str([list(t.shape) for t in inputs]), "['float', 'float']"
        operations, moved, precision = work_of_call(name, shapes, types)
        assert (operations, precision) == (counter.get_total_flops(), "fp32")
        assert moved == 4 * (sum(t.numel() for t in inputs) + result.numel())


def test_what_is_added_counts_too() -> None:
    types = "['c10::BFloat16', 'c10::BFloat16', 'c10::BFloat16', 'Scalar', 'Scalar']"
    found = work_of_call("aten::addmm", "[[512], [141, 512], [512, 512], [], []]", types)
    assert found == (2 * 141 * 512 * 512 + 141 * 512, 2 * (512 + 2 * 141 * 512 + 512 * 512), "bf16")
    linear = work_of_call("aten::linear", "[[141, 512], [512, 512], [512]]", types)
    assert linear == found


def test_lookups_ask_for_rows_indices_and_offsets() -> None:
    shapes = "[[1000, 64], [5000], [128], [], [], [], [], [], []]"
    types = "['float', 'long int', 'long int', 'Bool', 'Int', 'Bool', '', 'Bool', 'Int']"
    operations, moved, precision = work_of_call("aten::_embedding_bag", shapes, types)
    assert (operations, precision) == (5000 * 64, "fp32")
    assert moved == 5000 * 64 * 4 + 5000 * 8 + 128 * 8 + 128 * 64 * 4


@pytest.mark.parametrize(
    ("name", "shapes", "types"),
    [
        ("aten::mm", "[[2, 3], [4, 5]]", "['float', 'float']"),
        ("aten::mm", "[[2, 3]]", "['float']"),
        ("aten::mm", "[[2, *], [3, 4]]", "['float', 'float']"),
        ("aten::mm", "", ""),
        ("aten::bmm", "[[2, 3], 7]", ""),
        ("aten::convolution", "[[1, 3, 8, 8], [4, 3, 3, 3]]", "['float', 'float']"),
        ("aten::_embedding_bag", "[[10, 4], [[3]], [2]]", ""),
    ],
)
def test_what_shapes_do_not_tell_is_not_known(name: str, shapes: str, types: str) -> None:
    assert work_of_call(name, shapes, types) is None


def test_bytes_need_types() -> None:
    operations, moved, precision = work_of_call("aten::mm", "[[2, 3], [3, 5]]", "")
    assert (operations, precision) == (60, "unknown") and math.isnan(moved)
    _, _, mixed = work_of_call("aten::mm", "[[2, 3], [3, 5]]", "['float', 'c10::Half']")
    assert mixed == "unknown"


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_for_shapes_does_no_harm(shapes: str, types: str) -> None:
    work_of_call("aten::addmm", shapes, types)


# ---- rates ----------------------------------------------------------------------------


def test_products_are_those_that_another_tool_computed() -> None:
    everything = operator_rates(read(BERT)[1])
    # it computes rates of products alone
    rates = everything[everything["name"].eq("aten::addmm")]
    assert len(rates) == 5
    # it does not tell the modules apart in which products of the same shapes are
    own = ["gpu_ms", "calls"]
    rates = rates.assign(**rates.groupby("shapes")[own].transform("sum")).drop_duplicates("shapes")
    with (EXPECTED / "GEMM.csv").open(newline="") as file:
        expected = {row["Input Dims_first"]: row for row in csv.DictReader(file)}
    assert len(rates) == len(expected) == 4
    for row in rates.itertuples():
        other = expected[row.shapes]
        assert row.name == other["name"]
        assert row.calls == int(other["name_count"])
        assert row.call_gflop == float(other["GFLOPS_first"])
        assert row.call_bytes == float(other["Data Moved (MB)_first"]) * 2**20
        assert row.intensity_flop_per_byte == pytest.approx(float(other["FLOPS/Byte_first"]))
        # times within a nanosecond a call: it adds up microseconds as floats of 32 bits
        mean_us = 1e3 * row.gpu_ms / row.calls
        assert mean_us == pytest.approx(float(other["Kernel Time (µs)_mean"]), abs=1e-3)
        # theirs is the mean of rates, ours the rate of the mean
        tflops = 1e3 * row.call_gflop / mean_us
        assert tflops == pytest.approx(float(other["TFLOPS/s_mean"]), rel=3e-3)
        assert row.tensor_cores == "yes" and row.precision == "bf16"
        assert row.peak_tflops_per_s == 989.5
    assert everything.attrs["device"] == "H100-SXM"


def test_kernels_are_those_that_another_tool_summed() -> None:
    table = kernel_table(read(BERT)[1]).groupby("kernel")[["launches", "time_ms"]].sum()
    with (EXPECTED / "kernel_summary.csv").open(newline="") as file:
        rows = pd.DataFrame(list(csv.DictReader(file)))
    rows["us"] = rows["Kernel duration (µs)_sum"].astype(float)
    rows["count"] = rows["Kernel duration (µs)_count"].astype(int)
    sums = rows.groupby("Kernel name")[["us", "count"]].sum()
    for name, row in table.iterrows():
        assert row["launches"] == sums.loc[name, "count"]
        assert 1e3 * row["time_ms"] == pytest.approx(sums.loc[name, "us"], abs=1e-3)


@pytest.mark.parametrize("recording", [BERT, META, RESNET, GRAPHS, V100])
def test_nothing_runs_faster_than_its_gpu_allows(recording: str) -> None:
    profile = read(recording)[1]
    for table in (operator_rates(profile), kernel_table(profile)):
        share = table["share_of_ceiling"].dropna()
        assert len(share) and share.between(0, 1).all()
    rates = operator_rates(profile)
    assert rates["tflops_per_s"].dropna().gt(0).all() and rates["gb_per_s"].gt(0).all()
    beyond = rates["tflops_per_s"] > rates["peak_tflops_per_s"]
    assert not beyond.any()
    # what the cache cannot hold comes from memory
    gpu = device(rates.attrs["device"])
    from_memory = rates["call_bytes"] - 1e6 * gpu.cache_mb
    assert (from_memory / rates["mean_us"] / 1e3 <= 1.05 * gpu.memory_gb_per_s).all()
    faster = rates["gb_per_s"] > gpu.memory_gb_per_s
    assert rates.loc[faster, "limit"].isin(["cache", ""]).all()
    assert rates.loc[faster, "share_of_ceiling"].isna().all()
    # fp32 products of a V100 use no tensor cores
    if recording in (RESNET, V100):
        assert set(rates["tensor_cores"]) <= {"no", "unknown", ""}


@pytest.mark.parametrize("recording", [META, RESNET, V100])
def test_an_iterations_kernels_are_those_that_start_in_it(recording: str) -> None:
    events, profile = read(recording)
    table = kernel_table(profile)
    state = iteration_state(profile)
    assert state is not None
    spans = profile.iterations[state.steady]
    kernels = events.device[events.device["kind"].eq("kernel")]
    inside = np.zeros(len(kernels), dtype=bool)
    for row in spans.itertuples():
        inside |= kernels["start"].between(row.start_ns, row.end_ns, inclusive="left").to_numpy()
    kept = kernels[inside]
    assert table["launches_per_iteration"].sum() == pytest.approx(len(kept) / len(spans))
    milliseconds = (kept["end"] - kept["start"]).sum() / 1e6 / len(spans)
    assert table["per_iteration_ms"].sum() == pytest.approx(milliseconds)
    step = float((spans["end_ns"] - spans["start_ns"]).mean()) / 1e6
    assert table["share_of_step"].sum() == pytest.approx(milliseconds / step)
    everything = (events.device["end"] - events.device["start"]).sum()
    part = (kernels["end"] - kernels["start"]).sum() / everything
    assert table["share_of_device"].sum() == pytest.approx(part)


def test_copies_from_pageable_and_from_pinned_memory_are_apart() -> None:
    events, profile = read(GRAPHS)
    table = copy_table(profile).set_index(["direction", "memory"])
    raw = events.device[events.device["name"].eq("Memcpy HtoD (Pinned -> Device)")]
    row = table.loc[("host to device", "pinned")]
    assert (row["count"], row["bytes"]) == (len(raw), raw["bytes"].sum())
    spent = (raw["end"] - raw["start"]).sum()
    assert row["gb_per_s"] == pytest.approx(raw["bytes"].sum() / spent)
    assert ("host to device", "pageable") in table.index
    assert table["share_of_link"].isna().all()


# ---- waves and peaks ------------------------------------------------------------------

H100 = {
    "sms": 132,
    "compute": "9.0",
    "threads_per_sm": 2048,
    "registers_per_sm": 65536,
    "shared_memory_per_sm": 233472,
}


@pytest.mark.parametrize(
    ("blocks", "threads", "registers", "shared", "resident"),
    [
        (16, 128, 255, 49152, 2),  # 4 warps of 8192 registers: 8 fit
        (240, 256, 230, 147456, 1),  # shared memory
        (141, 128, 24, 0, 16),  # threads
        (1000, 32, 16, 0, 32),  # blocks
    ],
)
def test_waves_count_blocks_that_fit(blocks, threads, registers, shared, resident) -> None:
    kernel = {
        "blocks": blocks,
        "threads_per_block": threads,
        "registers": registers,
        "shared_memory_bytes": shared,
    }
    assert waves(kernel, H100) == pytest.approx(blocks / (132 * resident))
    assert math.isnan(waves(kernel | {"registers": math.nan}, H100))
    assert math.isnan(waves(kernel, H100 | {"compute": "12.1"}))
    assert math.isnan(waves(kernel, {}))


def test_a_peak_is_of_a_precision_and_its_units() -> None:
    gpu = device("A100-80GB")
    assert peak_tflops(gpu, "tf32", True) == 156
    assert peak_tflops(gpu, "fp32", False) == 19.5
    assert math.isnan(peak_tflops(gpu, "fp32", True))
    assert math.isnan(peak_tflops(gpu, "bf16", False))
    assert peak_tflops(gpu, "bf16", None) == 312 and math.isnan(peak_tflops(gpu, "fp32", None))
    assert peak_tflops(device("MI300X"), "fp32", True) == 163.4  # nothing is cut there
    assert math.isnan(peak_tflops(device("V100-16GB"), "bf16", True))
    assert math.isnan(peak_tflops(None, "bf16", True))


# ---- pages ----------------------------------------------------------------------------


def test_a_page_names_the_data_sheet_and_shows_what_is_known() -> None:
    profile = read(BERT)[1]
    rates = operator_rates(profile)
    figure = operator_roofline(rates)
    assert "data sheet of H100-SXM" in figure.layout.title.text
    table, kernels = show(rates, "rates"), kernel_table(profile)
    assert isinstance(table, TextTable) and "nan" not in repr(table)
    for columns in ("kernels", "kernel_launches"):
        shown = show(kernels, columns)
        assert isinstance(shown, TextTable) and "nan" not in repr(shown)
        assert len(shown.columns) >= 8
    bars = gpu_figures.kernel_bars(kernels).data[0]
    assert "cutlass bf16 tensorop gemm 32x32 tn" in str(bars.customdata) + str(
        gpu_figures.kernel_bars(kernels).layout.yaxis.ticktext
    )
    profile.meta["device_name"] = "Chip of tomorrow"
    unknown = operator_rates(profile)
    assert unknown["share_of_ceiling"].isna().all()
    pd.testing.assert_series_equal(unknown["tflops_per_s"], rates["tflops_per_s"])
    assert "Chip of tomorrow" in operator_roofline(unknown).layout.title.text
    most = f"TFLOP/s of up to {digits(rates['tflops_per_s'].max())} that operators reach here"
    assert any(most in pace for _, pace in kernel_paces(profile).values())


@pytest.mark.parametrize(
    ("recording", "least"),
    [(BERT, 1.0), (META, 0.37), (RESNET, 0.84), (GRAPHS, 0.075), (V100, 0.1)],
)
def test_most_kernels_that_an_operator_launched_have_a_rate(recording: str, least: float) -> None:
    events, profile = read(recording)
    coverage = rate_coverage(profile)
    kernels = events.device[events.device["kind"].eq("kernel")]
    spent = (kernels["end"] - kernels["start"]).sum() / 1e6
    assert coverage["kernel_ms"].sum() == pytest.approx(spent)
    assert coverage["share_of_kernels"].sum() == pytest.approx(1)
    assert coverage["reason"].iloc[0] == RATE_KNOWN and coverage["reason"].is_unique
    assert coverage["share_of_kernels"].iloc[0] >= least - 1e-9
    # the same kernels that have a rate in the table of kernels
    places = np.flatnonzero(profile.of_kind("kernel"))
    known = kernel_work(profile, places)["bytes_ms"].sum()
    assert coverage["kernel_ms"].iloc[0] == pytest.approx(known)
    # no operator has more time than its kernels
    assert operator_rates(profile)["gpu_ms"].sum() <= spent * (1 + 1e-9)


def test_kernels_without_shapes_have_no_rate_and_say_why() -> None:
    events = events_of(BERT)
    events.host["shapes"] = ""
    for table in (operator_rates(profile_of(events)), rate_coverage(profile_of(events))):
        assert table.empty and "record_shapes" in table.attrs["not_measured"]
