"""A recording on another GPU, by data sheets; held against recordings where they have a pair."""

import json
from pathlib import Path
from typing import Any

import gpu_trace
import pytest
from gpu_trace import call, launched, mark, on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import SEVERAL, TRACES, recording

from dlrm_core.base.errors import InputError
from dlrm_studies import other_gpu
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace

A100, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"


def recorded(
    folder: Path,
    gpu: str = A100,
    *,
    kernel: str = "elementwise_kernel",
    kernel_us: float = 400.0,
    blocks: int = 5000,
    operator: str = "aten::add",
    shapes: Any = None,
    copy: tuple[str, int, float] | None = None,
) -> Profile:
    """Three steps of 1000 us: one operator with one kernel, and maybe a copy (name, bytes, us)."""
    events = []
    for step in range(3):
        begin = 10_000.0 + 1000 * step
        args = {"External id": step, "Input Dims": shapes or [[1 << 20], [1 << 20]]}
        args |= {"Input type": ["c10::BFloat16"] * len(args["Input Dims"])}
        grid = {"grid": [blocks, 1, 1], "block": [128, 1, 1]}
        at = begin + 20
        events += [
            mark(f"ProfilerStep#{step}", begin, begin + 1000),
            mark("## forward:top_mlp ##", begin + 1, begin + 900),
            gpu_trace.operator(operator, begin + 2, begin + 12, **args),
            *launched(step, (begin + 3, begin + 8), kernel, (at, at + kernel_us), **grid),
        ]
        if copy:
            number, at = 100 + step, at + kernel_us + 10
            name, size, took = copy
            moved = {"correlation": number, "bytes": size}
            events.append(call("cudaMemcpyAsync", begin + 13, begin + 15, number))
            events.append(on_gpu("gpu_memcpy", name, at, at + took, 7, **moved))
    path = folder / f"{gpu.replace(' ', '')}-{kernel_us}.json"
    header = {"deviceProperties": [{"id": 0, "name": gpu, "numSms": 108}]}
    path.write_text(json.dumps({"traceEvents": events} | header))
    return read_trace(path)


def ratio(profile: Profile, gpu: str) -> tuple[str, float]:
    rows = other_gpu.kernel_ratios(profile, gpu)
    row = rows[profile.of_kind("kernel")[rows.index]].iloc[0]
    assert row["low"] <= row["ratio"] <= row["high"]
    return str(row["limit"]), float(row["ratio"])


def test_kernels_scale_by_what_limits_them(tmp_path: Path) -> None:
    bandwidth = device("A100-80GB").memory_gb_per_s / device("H100-SXM").memory_gb_per_s
    moved = ratio(recorded(tmp_path), "H100-SXM")
    assert moved == ("memory bandwidth", pytest.approx(bandwidth))
    assert ratio(recorded(tmp_path, kernel_us=4.0), "H100-SXM") == ("latency", 1.0)
    assert ratio(recorded(tmp_path, blocks=8), "H100-SXM") == ("latency", 1.0)
    # 2 x 4096^3 operations at 312 and 989.5 TFLOP/s: arithmetic, by far
    product = recorded(
        tmp_path,
        kernel=GEMM,
        kernel_us=600.0,
        operator="aten::mm",
        shapes=[[4096, 4096], [4096, 4096]],
    )
    assert ratio(product, "H100-SXM") == ("arithmetic", pytest.approx(312 / 989.5))
    # 2 x 2^20 x 16 x 16: bytes, by far
    thin = recorded(
        tmp_path, kernel=GEMM, kernel_us=60.0, operator="aten::mm", shapes=[[1 << 20, 16], [16, 16]]
    )
    assert ratio(thin, "H100-SXM") == ("memory bandwidth", pytest.approx(bandwidth))
    far = recorded(
        tmp_path, kernel=GEMM, kernel_us=60.0, operator="aten::mm", shapes=[[512, 512], [512, 512]]
    )
    assert ratio(far, "H100-SXM") == ("latency", 1.0), "it could take 1 us"
    with pytest.raises(InputError, match="no units for bf16"):
        other_gpu.kernel_ratios(product, "V100-32GB")
    exchange = recorded(tmp_path, kernel="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    assert ratio(exchange, "H100-SXM") == ("network", 1.0)


def test_copies_scale_by_the_link_if_it_limits_them(tmp_path: Path) -> None:
    def copied(name: str, size: int, took: float) -> tuple[str, float]:
        profile = recorded(tmp_path, copy=(name, size, took))
        rows = other_gpu.kernel_ratios(profile, "H100-SXM")
        row = rows[profile.of_kind("copy")[rows.index]].iloc[0]
        return str(row["limit"]), float(row["ratio"])

    pinned = "Memcpy HtoD (Pinned -> Device)"
    assert copied(pinned, 2_400_000, 100.0) == ("link", 0.5)  # 24 of 32 GB/s
    assert copied(pinned, 240_000, 100.0) == ("host", 1.0)
    pageable = "Memcpy HtoD (Pageable -> Device)"
    assert copied(pageable, 2_400_000, 100.0) == ("host", 1.0)
    limit, _ = copied("Memcpy DtoD (Device -> Device)", 2_400_000, 100.0)
    assert limit == "memory bandwidth"


def test_idle_time_stays_and_parts_add_up(tmp_path: Path) -> None:
    profile = recorded(tmp_path)
    table = other_gpu.predict_gpu(profile, "H100-SXM")
    assert table["now_ms"].sum() == pytest.approx(1.0)
    device_rows = table[table["where"] == "device"]
    assert device_rows["now_ms"].sum() == pytest.approx(0.4)
    assert device_rows["then_ms"].sum() == pytest.approx(0.4 * 2039 / 3350)
    idle = table[table["where"] != "device"]
    assert idle["then_ms"].tolist() == idle["now_ms"].tolist()
    assert "idle for 60%" in " ".join(table.attrs["notices"])
    others = other_gpu.other_gpus(profile)
    assert others["then_ms"].is_monotonic_increasing and "A100-80GB" not in set(others["gpu"])
    hopper = others.set_index("gpu").loc["H100-SXM"]
    assert hopper["then_ms"] == pytest.approx(0.6 + 0.4 * 2039 / 3350)
    assert hopper["speedup_low"] <= hopper["speedup_mid"] <= hopper["speedup_high"]
    assert hopper["speedup_high"] < 1 / 0.6, "no gain beyond the share of the device"


def test_a_pair_of_one_program_is_held_against_the_prediction(tmp_path: Path) -> None:
    before, after = recorded(tmp_path), recorded(tmp_path, H100, kernel_us=260.0)
    parts = other_gpu.parts_held_against(before, after)
    (row,) = parts.to_dict("records")
    assert row["after_ms"] == pytest.approx(0.26)
    assert row["error"] == pytest.approx(0.4 * 2039 / 3350 / 0.26 - 1) and row["in_range"]
    assert "A100-80GB to H100-SXM" in parts.attrs["sentence"]
    kernels = other_gpu.held_against(before, after)
    assert kernels["after_us"].tolist() == [260.0, 260.0]
    assert kernels["predicted_us"].iloc[0] == pytest.approx(400 * 2039 / 3350)
    other = recorded(tmp_path, H100, operator="aten::mul", kernel_us=250.0, blocks=77)
    assert other_gpu.parts_held_against(before, other).empty
    assert other_gpu.held_against(before, other).empty


def test_a_cpu_is_compared_by_arithmetic_and_by_bandwidth() -> None:
    profile = open_recording(Path(__file__).parents[2] / "dlrm_workbook/samples/seed-cpu").profile
    profile.meta["ceilings"] = {
        "gemm": [{"precision": "fp32", "ms": 1.0, "gflops": 157.0}],
        "stream": [{"bytes": 1 << 28, "read_gb_per_s": 20.0}],
    }
    volta = other_gpu.other_gpus(profile).set_index("gpu").loc["V100-32GB"]
    parts = attribute(profile)
    data = parts.loc[parts["component"] == "data", "time_ms"].sum()
    model = parts.loc[parts["component"].isin(other_gpu.OF_THE_MODEL), "time_ms"].sum()
    rest = parts["time_ms"].sum() - model
    assert rest >= data > 0 and volta["unchanged"] == pytest.approx(rest / parts["time_ms"].sum())
    # 15.7 TFLOP/s over 0.157, 900 GB/s over 20
    assert volta["low_ms"] == pytest.approx(rest + model / 100)
    assert volta["high_ms"] == pytest.approx(rest + model / 45)
    assert volta["low_ms"] < volta["then_ms"] < volta["high_ms"]


def test_what_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    unknown = other_gpu.other_gpus(recorded(tmp_path, "Some GPU 9000"))
    assert unknown.empty and "Some GPU 9000" in unknown.attrs["not_measured"]
    host = open_recording(recording("dlrm-h100-host.d")).profile
    assert "no GPU work" in other_gpu.other_gpus(host).attrs["not_measured"]


@settings(max_examples=25)
@given(st.floats(1.0, 900.0), st.integers(1, 10_000), st.sampled_from(other_gpu.SHOWN_GPUS))
def test_a_faster_memory_never_makes_a_kernel_slower(tmp_path_factory, micros, blocks, gpu) -> None:
    profile = recorded(tmp_path_factory.mktemp("g"), V100, kernel_us=micros, blocks=blocks)
    rows = other_gpu.kernel_ratios(profile, gpu)
    assert (rows["ratio"] <= 1).all() and (rows["ratio"] > 0).all()
    assert (rows["low"] <= rows["ratio"]).all() and (rows["ratio"] <= rows["high"]).all()


def test_real_recordings_of_one_gpu_repeat_and_of_two_have_their_error_told() -> None:
    ranks = open_recording(recording(SEVERAL)).ranks
    same = other_gpu.parts_held_against(ranks[0], ranks[7])
    # by the raw events 1.034 ms of kernels other than collectives, of which 0.1 are of the part
    # communication (they sort and join what is exchanged)
    assert 0.9 < same["before_ms"].sum() < 1.034
    assert same["error"].abs().max() < 0.25
    graphs = open_recording(recording(TRACES["torchrec-cuda-graphs-a100x16-rank0"])).profile
    held = other_gpu.held_against(graphs, ranks[7])
    assert len(held) >= 10 and held["in_range"].mean() > 0.5
    assert "A100-80GB to V100-32GB is off by" in held.attrs["sentence"]
    assert other_gpu.parts_held_against(graphs, ranks[7]).empty, "they are not of one program"
