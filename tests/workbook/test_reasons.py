"""The reason beside the kernel: work by shapes, limits of the device, hardware counters."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_foreign_traces import TRACES
from torch.utils.flop_counter import FlopCounterMode

from dlrm_workbook import explain
from dlrm_workbook.analysis.lanes import thread_timeline
from dlrm_workbook.recordings.torch.shape_work import notes_of_call, work_of_call
from dlrm_workbook.show.gpu import lane_timeline

ONE_OPERATION = TRACES.parent / "labelled" / "one-inefficiency"


def meta(*shape: int, **more: Any) -> torch.Tensor:
    return torch.empty(shape, device="meta", **more)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (1, 4, 4)])
def test_operations_of_convolutions_are_torchs(
    groups: int, transposed: bool, stride: int, padding: int, dilation: int
) -> None:
    image, weight = meta(2, 8, 17, 13), meta(8, 12 // groups, 3, 3)
    if not transposed:
        weight = meta(12, 8 // groups, 3, 3)
    lists = [[number, number] for number in (stride, padding, dilation)]
    more = [[1, 1] if transposed and stride > 1 else [0, 0], groups]
    with FlopCounterMode(display=False) as counter:
        result = torch.ops.aten.convolution(image, weight, None, *lists, transposed, *more)
    numbers = ["", "", "", *map(str, (*lists, transposed, *more))]
    for written in (numbers, [text.replace("[", "(").replace("]", ")") for text in numbers]):
        found = work_of_call(
            "aten::convolution",
            str([list(image.shape), list(weight.shape)]),
            "['Float', 'Float']",
            json.dumps([written, []]),
        )
        assert found is not None and found[0] == counter.get_total_flops() and found[2] == "fp32"
        assert found[1] == 4 * sum(t.numel() for t in (image, weight, result))
        notes = notes_of_call("aten::convolution", "[]", json.dumps([written, []]))
        assert notes == ({"dilated"} if dilation > 1 else set())


@pytest.mark.parametrize("keys", [96, 64])
def test_operations_of_attention_are_torchs_and_half_where_masked(keys: int) -> None:
    q, k = meta(2, 4, 64, 32), meta(2, 4, keys, 32)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
    whole = counter.get_total_flops()
    for name, place, turned, backward in (
        ("aten::_scaled_dot_product_flash_attention", 4, False, False),
        ("aten::_flash_attention_forward", 8, True, False),
        ("aten::_scaled_dot_product_flash_attention_backward", 11, False, True),
    ):
        shapes = (
            [[2, 64, 4, 32], *2 * [[2, keys, 4, 32]]] if turned else [q.shape, k.shape, k.shape]
        )
        shapes = [list(shape) for shape in ([shapes[0]] * backward + shapes)]
        types = str(["c10::BFloat16"] * len(shapes))
        for causal in ("False", "True"):
            values = json.dumps([[""] * place + [causal], []])
            found = work_of_call(name, str(shapes), types, values)
            share = 1.0 if causal == "False" else (65 / 128 if keys == 64 else 0.0)
            assert found is not None and found[0] == (2.5 if backward else 1) * whole * share
    assert work_of_call(name, str(shapes), types) is None  # nobody says whether it is masked


def test_grouped_and_scaled_products_count_their_operands() -> None:
    fp8 = "['c10::Float8_e4m3fn', 'c10::Float8_e4m3fn']"
    found = work_of_call("aten::_scaled_mm", "[[64, 32], [32, 16]]", fp8)
    assert found == (2 * 64 * 32 * 16, 64 * 32 + 32 * 16 + 2 * 64 * 16, "fp8")
    bf16 = "['c10::BFloat16', 'c10::BFloat16']"
    found = work_of_call("aten::_grouped_mm", "[[64, 32], [4, 32, 16]]", bf16)
    assert found == (2 * 64 * 32 * 16, 2 * (64 * 32 + 4 * 32 * 16 + 64 * 16), "bf16")


@pytest.mark.skipif(not ONE_OPERATION.is_dir(), reason="the recordings are not here")
@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("conv_02_small_spatial_many_ch", ["convolution`", "2.5% of an MI300X's rate of fp32"]),
        ("conv_04_depthwise", ["3.6% of an MI300X's memory bandwidth", "depthwise"]),
        ("conv_06_large_dilation", ["10.8% of an MI300X's rate of fp32", "dilation"]),
        (
            "gemm_01_compute_few_tiles",
            ["4.5% of the rate of bf16", "4 output tiles", "split along"],
        ),
        ("gemm_03_compute_misaligned", ["28.6% of the data sheet's", "misaligned", "4,097"]),
        ("elem_01_add_poor_bw", ["`aten::add` (8,192 x 8,192)", "36.1% of the memory bandwidth"]),
        ("moe_02_few_experts_many_tokens", ["fused_moe`", "cannot be judged"]),
        ("moe_04_top2_dense", ["idle 32%", "`aten::mul_`", "2.0% of an MI300X's memory"]),
        ("moe_06_tiny_batch_many_experts", ["idle 77%", "`aten::mul_`", "too few for 304"]),
        ("sdpa_02_very_long_seq_head_waste", ["65,536", "33.2% of the rate of bf16 products"]),
        ("sdpa_04_large_head_dim", ["heads of 256 numbers", "11.9% of the rate of bf16"]),
    ],
)
def test_a_headline_names_the_operator_and_the_reason(file: str, told: list[str]) -> None:
    headline = explain(ONE_OPERATION / f"{file}.json").headline
    assert [text for text in told if text not in headline] == []


def written(folder: Path, *events: dict[str, Any]) -> str:
    """A trace of one kernel of a device without a data sheet, and more events."""
    common = {"ph": "X", "pid": 1, "tid": 1}
    launch = [
        {"cat": "cpu_op", "name": "my::op", "ts": 0, "dur": 900} | common,
        {"cat": "acme_runtime", "name": "acmeLaunch", "ts": 10, "dur": 5} | common,
        {"cat": "acme_jobs", "name": "my_kernel", "ts": 50, "dur": 800} | common,
    ]
    launch[1]["args"] = {"correlation": 7}
    launch[2]["args"] = {"correlation": 7, "stream": 3}
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*launch, *events]}))
    return str(path)


def test_any_accelerator_whose_work_is_launched_has_its_own_name(tmp_path: Path) -> None:
    copy = {"direction": "HOST_TO_DEVICE", "size": 4096, "stream": 3, "correlation": -1}
    copied = {"ph": "X", "cat": "acme_jobs", "name": "dma", "pid": 1, "tid": 1, "ts": 860, "dur": 9}
    report = explain(written(tmp_path, copied | {"args": copy}))
    assert report.profile.meta["device_name"] == "ACME"
    assert "The ACME works 0.8" in report.headline and "GPU" not in report.headline
    kinds = report.profile.contexts.set_index("name")["kind"]
    assert kinds["my_kernel"] == "kernel" and kinds["Memcpy HtoD (dma)"] == "copy"


@pytest.mark.parametrize(
    ("memory", "arithmetic", "told"),
    [(80.0, 20.0, "memory bandwidth limits it"), (5.0, 9.0, "neither is busy")],
)
def test_sampled_counters_say_which_limit_a_kernel_meets(
    tmp_path: Path, memory: float, arithmetic: float, told: str
) -> None:
    units = {"dram__throughput.pct": memory, "sm__cycles_active.pct": arithmetic}
    samples: list[dict[str, Any]] = [
        {"ph": "C", "name": name, "pid": 0, "ts": ts, "args": {"value": value * (50 <= ts < 850)}}
        for name, value in units.items()
        for ts in range(0, 1000, 10)
    ]
    samples += [{"ph": "C", "name": "x", "ts": 5, "args": {"value": v}} for v in (math.nan, "n/a")]
    ranges = {"ph": "X", "cat": "cuda_profiler_range", "name": "k", "pid": 0, "tid": 0, "ts": 1}
    ranges |= {"dur": 2, "args": {"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 5}}
    report = explain(written(tmp_path, *samples, ranges))
    table = report.counters.set_index("counter")
    assert table.loc["dram__throughput.pct", "mean"] == pytest.approx(0.8 * memory)
    assert told in report.ranked_findings[0].title
    assert "of 10 floating-point operations" in report.headline
    assert any(
        "2 values of hardware counters are no numbers" in c for c in report.profile.meta["cautions"]
    )
    drawn = lane_timeline(thread_timeline(report.profile, "function"))
    lines = [trace for trace in drawn.data if (trace.name or "").split(" ")[0] in units]
    assert {line.yaxis for line in lines} == {"y2"}
    nothing = explain(written(tmp_path)).counters
    assert nothing.empty and "no hardware counters" in nothing.attrs["not_measured"]
