"""Bytes and operations of operators by their shapes, against counts by hand and torch's own."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dlrm_workbook.recordings.torch.shape_work import (
    ASKED_FOR,
    AT_LEAST,
    EACH_ONCE,
    bytes_are,
    values_text,
    work_of_call,
)
from dlrm_workbook.recordings.torch.trace import read_trace

FLOAT, HALF, LONG = "'float'", "'c10::Half'", "'long int'"


@pytest.mark.parametrize(
    ("name", "shapes", "types", "size"),
    [
        # two operands are read, their broadcast is written
        ("aten::add", "[[64, 1], [32], []]", f"[{FLOAT}, {FLOAT}, 'Scalar']", 4 * (64 + 32 + 2048)),
        ("aten::mul", "[[8, 4], []]", f"[{HALF}, {FLOAT}]", 2 * 32 + 4 + 2 * 32),
        ("aten::add", "[[8], [8], []]", f"[{HALF}, {FLOAT}, 'Scalar']", 8 * (2 + 4 + 4)),
        ("aten::mul", "[[8], [8]]", f"[{LONG}, {LONG}]", 3 * 64),
        ("aten::mul", "[[8], [], [8]]", f"[{FLOAT}, 'Scalar', {FLOAT}]", 64),
        ("aten::eq", "[[8, 4], []]", f"[{FLOAT}, 'Scalar']", 32 * 4 + 32),
        ("aten::relu", "[[8, 4]]", f"[{FLOAT}]", 2 * 128),
        ("aten::add_", "[[8, 4], [4], []]", f"[{FLOAT}, {FLOAT}, 'Scalar']", 128 + 16 + 128),
        ("aten::addcmul_", "[[8], [8], [8], []]", f"[{FLOAT}, {FLOAT}, {FLOAT}, 'Scalar']", 128),
        ("aten::threshold_backward", "[[8], [8], []]", f"[{FLOAT}, {FLOAT}, 'Scalar']", 96),
        ("aten::copy_", "[[8, 4], [4], []]", f"[{HALF}, {FLOAT}, 'Scalar']", 64 + 16),
        ("aten::fill_", "[[8, 4], []]", f"[{FLOAT}, 'Scalar']", 128),
        ("aten::sum", "[[8, 4], [], [], []]", f"[{FLOAT}, 'ScalarList', 'Scalar', '']", 128),
        ("aten::_softmax", "[[8, 4], [], []]", f"[{FLOAT}, 'Scalar', 'Scalar']", 256),
        (
            "aten::native_layer_norm",
            "[[8, 4], [], [4], [4], []]",
            f"[{HALF}, 'ScalarList', {HALF}, {HALF}, 'Scalar']",
            2 * (32 + 4 + 4 + 32) + 4 * (8 + 8),
        ),
        (
            "aten::native_layer_norm_backward",
            "[[8, 4], [8, 4], [], [8, 1], [8, 1], [4], [4], []]",
            f"[{FLOAT}, {FLOAT}, 'ScalarList', {FLOAT}, {FLOAT}, {FLOAT}, {FLOAT}, '']",
            4 * (32 + 32 + 8 + 8 + 4) + 4 * (32 + 4 + 4),
        ),
        (
            "aten::gather",
            "[[8, 4], [], [8, 2], []]",
            f"[{FLOAT}, 'Scalar', {LONG}, 'Scalar']",
            16 * (8 + 4 + 4),
        ),
        (
            "aten::index_add_",
            "[[9, 4], [], [3], [3, 4], []]",
            f"[{FLOAT}, 'Scalar', {LONG}, {FLOAT}, 'Scalar']",
            3 * 8 + 3 * 12 * 4,
        ),
        ("aten::where", "[[8, 4], [], [8, 4]]", f"['bool', 'Scalar', {FLOAT}]", 32 * (1 + 4 + 4)),
        ("aten::bernoulli_", "[[8, 4], [], []]", f"[{FLOAT}, 'Scalar', '']", 256),
        ("aten::mse_loss", "[[8, 4], [8, 4], []]", f"[{FLOAT}, {FLOAT}, 'Scalar']", 256),
        (
            "aten::_index_put_impl_",
            "[[8, 9], [], [8, 4], [], []]",
            f"[{FLOAT}, '', {FLOAT}, 'Scalar', 'Scalar']",
            256,
        ),
        ("aten::sort", "[[8], [], []]", f"[{FLOAT}, 'Scalar', 'Scalar']", 8 * (4 + 4 + 8)),
        # 2021: gradient, input, ..., indices of the maxima; the input's gradient is written
        (
            "aten::max_pool2d_with_indices_backward",
            "[[1, 2, 2, 2], [1, 2, 4, 4], [], [], [], [], [], [1, 2, 2, 2]]",
            f"[{FLOAT}, {FLOAT}, '', '', '', '', 'Bool', {LONG}]",
            8 * 4 + 8 * 8 + 32 * 4,
        ),
    ],
)
def test_bytes_of_what_only_moves_them(name: str, shapes: str, types: str, size: int) -> None:
    assert work_of_call(name, shapes, types) == (0.0, size, "")


@pytest.mark.parametrize(
    ("name", "shapes", "types"),
    [
        ("aten::cudnn_convolution", "[[1, 3, 8, 8], [4, 3, 3, 3]]", "['float', 'float']"),
        ("aten::add", "[[3, 4], [4, 3], []]", "['float', 'float', 'Scalar']"),
        ("aten::add", "[[3, 4], [3, 4], []]", "['float', '', 'Scalar']"),
        ("aten::add", "[[3, 4], [3, 4], []]", "['c10::Half', 'c10::BFloat16', 'Scalar']"),
        ("aten::mul", "[[3, 4], []]", "['long int', 'Scalar']"),
        ("aten::div", "[[3, 4], [3, 4]]", "['long int', 'long int']"),
        ("aten::mul_", "[[4], [3, 4]]", "['float', 'float']"),
        ("aten::copy_", "[[4], [3, 4], []]", "['float', 'float', 'Scalar']"),
        ("aten::cat", "[[], []]", "['TensorList', 'Scalar']"),
        ("aten::index_select", "[[10, 4], [], [3]]", "['float', 'Scalar', 'long int']"),
        ("aten::fill_", "[[-3], []]", "['float', 'Scalar']"),
    ],
)
def test_what_inputs_do_not_tell_is_not_known(name: str, shapes: str, types: str) -> None:
    assert work_of_call(name, shapes, types) is None


def test_expanded_operands_are_read_once() -> None:
    args = {"Input Strides": [[0, 1], [32, 1], []], "Concrete Inputs": ["", "", "1"]}
    values = values_text("aten::add", args)
    types = "['float', 'float', 'Scalar']"
    found = work_of_call("aten::add", "[[64, 32], [64, 32], []]", types, values)
    assert found == (0.0, 4 * (32 + 2048 + 2048), "")
    assert values_text("aten::add", {"Input Strides": [[32, 1], [32, 1], []]}) == ""
    for nonsense in ({"Input Strides": 7}, {"Input Strides": [0]}, {"Concrete Inputs": "x"}):
        assert values_text("aten::add", nonsense) == ""


@given(rows=st.integers(1, 60), width=st.integers(1, 12), alpha=st.floats(-1.0, 1.0))
@settings(deadline=None, max_examples=10)
def test_a_sparse_gradient_is_added_row_by_row(tmp_path_factory, rows, width, alpha) -> None:
    """torch records a sparse gradient with the shape of its table and without strides.

    Its values have their own shape where the addition hands them on.
    """
    table = torch.zeros(100, width)
    index = torch.randint(0, 100, (1, rows))
    gradient = torch.sparse_coo_tensor(index, torch.ones(rows, width), (100, width))
    shapes, types = f"[[100, {width}], [100, {width}], []]", "['float', 'float', 'Scalar']"
    # a row of the gradient is read, one of the table is read and written, and an index is read
    sparse = (2.0 * rows * width, 3.0 * 4 * rows * width + 8 * rows, "fp32")
    dense = (0.0, 3.0 * 4 * 100 * width, "")
    for added, expected in ((gradient, sparse), (gradient.to_dense(), dense)):
        path = tmp_path_factory.mktemp("sparse") / "trace.json"
        with torch.profiler.profile(record_shapes=True) as profiler:
            table.add_(added, alpha=alpha)
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        (args,) = (event["args"] for event in events if event.get("name") == "aten::add_")
        assert str(args["Input Dims"]) == shapes and str(args["Input type"]) == types
        values = values_text("aten::add_", args)
        assert work_of_call("aten::add_", shapes, types, values) == (
            None if added is gradient else expected
        )
        profile = read_trace(path)
        operations = profile.value_table("operations:fp32").fillna(0.0).sum()
        assert operations == expected[0]
        assert profile.value_table("operand_bytes").sum() == expected[1]


def test_a_sum_into_a_table_of_its_own_is_not_known() -> None:
    shapes, types = "[[100, 8], [100, 8], []]", "['float', 'float', 'Scalar']"
    values = json.dumps([[], [[8, 1], [], []]])
    in_place = work_of_call("aten::add_", shapes, types, values, below="[[5, 8], []]")
    assert in_place == (80.0, 3 * 160 + 40.0, "fp32")
    other = "[[100, 8], [100, 8], [], [90, 8]]"
    assert work_of_call("aten::add", other, types, values, below="[[5, 8], []]") is None
    assert work_of_call("aten::add_", shapes, types, values, below="[[5, 7], []]") is None


def test_a_dense_gradient_of_rows_has_the_size_of_the_table() -> None:
    values = values_text(
        "aten::embedding_dense_backward", {"Concrete Inputs": ["", "", "100", "-1", "False"]}
    )
    types = "['float', 'long int', 'Scalar', 'Scalar', 'Scalar']"
    found = work_of_call(
        "aten::embedding_dense_backward", "[[5, 6, 8], [5, 6], [], [], []]", types, values
    )
    # each of 30 gradients is read and added; the gradients of 100 rows are written
    assert found == (30 * 8.0, 4 * 240 + 8 * 30 + 4 * 800.0, "fp32")


@given(st.lists(st.integers(1, 9), min_size=2, max_size=3))
@settings(deadline=None, max_examples=10)
def test_a_reduction_is_counted_although_it_fills_its_result_first(tmp_path_factory, shape) -> None:
    path = tmp_path_factory.mktemp("sum") / "trace.json"
    with torch.profiler.profile(record_shapes=True) as profiler:
        torch.ones(shape).sum(0)
    profiler.export_chrome_trace(str(path))
    profile = read_trace(path)
    size = profile.value_table("operand_bytes").to_numpy()
    by_name = dict(zip(profile.contexts["name"], size, strict=True))
    assert by_name["aten::sum"] == 4 * math.prod(shape)


def test_rows_that_are_selected_are_asked_for() -> None:
    values = values_text("aten::index_select", {"Concrete Inputs": ["", "0", ""]})
    types = "['float', 'Scalar', 'long int']"
    found = work_of_call("aten::index_select", "[[100, 8], [], [5]]", types, values)
    assert found == (0.0, 5 * 8 + 2 * 5 * 8 * 4, "")
    assert bytes_are("aten::index_select") == ASKED_FOR
    assert bytes_are("aten::sum") == AT_LEAST and bytes_are("aten::add") == EACH_ONCE


def test_a_result_is_known_by_its_backward_twin() -> None:
    types = "['TensorList', 'Scalar']"
    found = work_of_call("aten::cat", "[[], []]", types, output="[[16, 9]]\n['float']")
    assert found == (0.0, 2 * 16 * 9 * 4, "")
    listed = work_of_call(
        "aten::cat", "[[[16, 4], [16, 5]], []]", types, output="[[16, 9]]\n['c10::Half']"
    )
    assert listed == (0.0, 2 * 16 * 9 * 2, "")
    shapes, types = "[[2, 3, 8, 8], [4, 3, 3, 3], []]", "['float', 'float', '']"
    found = work_of_call("aten::cudnn_convolution", shapes, types, output="[[2, 4, 4, 4]]")
    assert found is not None and found[0] == 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(5, 9),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(1, 2),
)
@settings(max_examples=25, deadline=None)
def test_operations_of_convolutions_are_torchs(
    batch: int, into: int, out: int, side: int, kernel: int, stride: int, pad: int, dilation: int
) -> None:
    groups = math.gcd(into, out)
    image = torch.randn(batch, into, side, side, requires_grad=True)
    weight = torch.randn(out, into // groups, kernel, kernel, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        result = torch.conv2d(image, weight, None, stride, pad, dilation, groups)
    dims, types = f"{[list(image.shape), list(weight.shape), [], [], []]}", "['float', 'float']"
    lists = [f"[{n}, {n}]" for n in (pad, stride, dilation)]
    values = values_text("aten::cudnn_convolution", {"Concrete Inputs": ["", "", *lists]})
    found = work_of_call("aten::cudnn_convolution", dims, types, values)
    sizes = [image.numel(), weight.numel(), result.numel()]
    assert found == (forward.get_total_flops(), 4 * sum(sizes), "fp32")
    dims = str([list(t.shape) for t in (result, image, weight)] + [[]] * 8)
    concrete = ["", "", "", "[0]", *lists, "False", "[0, 0]", str(groups), "[True, True, False]"]
    values = values_text("aten::convolution_backward", {"Concrete Inputs": concrete})
    found = work_of_call("aten::convolution_backward", dims, "['float', 'float', 'float']", values)
    moved = result.numel() + 2 * weight.numel() + 2 * image.numel()
    # both gradients multiply the pairs that the forward multiplied
    assert found == (2 * forward.get_total_flops(), 4 * moved, "fp32")
    if groups == 1:  # torch's counter takes the input gradient's weights for ungrouped ones
        with FlopCounterMode(display=False) as backward:
            result.sum().backward()
        assert found[0] == backward.get_total_flops()
