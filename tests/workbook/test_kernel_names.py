"""Short names of kernels, of real recordings and of other programs' libraries."""

import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_foreign_traces import BERT, GRAPHS, META, RESNET, V100, events_of

from dlrm_workbook.analysis.kernel_names import (
    LONGEST_NAME,
    computes_in_double,
    kernel_name,
    short_names,
)
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database

TABLE = Path(__file__).parents[1] / "data" / "kernel_names.csv"
NAMES = pd.read_csv(TABLE, dtype=str, keep_default_na=False)
H100 = Path(__file__).parents[3] / "shared" / "recordings" / "dlrm-h100-pc.d"


@cache
def kernels_of(recording: str) -> tuple[str, ...]:
    if recording.endswith(".d"):
        if not H100.is_dir():
            pytest.skip(f"{H100} is not there: the real recordings lie beside the project")
        contexts = profile_from_database(read_database(H100)).contexts
        return tuple(contexts.loc[contexts["kind"].eq("kernel"), "name"].unique())
    device = events_of(recording).device
    return tuple(device.loc[device["kind"].eq("kernel"), "name"].unique())


ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 3ul> >"
    "(int, at::native::{}, std::array<char*, 3ul>)"
)
REDUCE = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t"
    "<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::"
    "{lambda(float, float)#1}>, unsigned int, float, 4> >(at::native::ReduceOp<float>)"
)


def elementwise(functor: str) -> str:
    return ELEMENTWISE.replace("{}", functor)


@pytest.mark.parametrize(tuple(NAMES), NAMES.to_numpy().tolist())
def test_names_say_what_a_kernel_does(full, short, precision, tensor_cores) -> None:
    found = kernel_name(full)
    assert found.short == short
    if found.is_product:
        units = {"yes": True, "no": False, "": None}[tensor_cores]
        assert (found.precision, found.tensor_cores) == (precision, units)


OF_INDEX = (
    "void at::native::elementwise_kernel{}<128, 8, at::native::gpu_kernel_impl_nocast<{} >"
    "(at::TensorIteratorBase&, {} const&)::{lambda(int{})#1}>(int, at::native::{lambda(int{})#1})"
)
MUL = "at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, MulFunctor<float> >"
NSIGHT_MUL = (
    "void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl_nocast<"
    "at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::"
    "binary_internal::MulFunctor<float>>>(at::TensorIteratorBase &, const T1 &)::[lambda(int) "
    "(instance 1)]>(int, T3)"
)
ENGINE = "void cudnn::cnn::{}<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*)"
SOLVER = "void dag_lts_kernel<(int)1, (int)128>(const int *, const double *, double *, int)"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double, bool, "
    "float const*>(FusedOptimizerTensorListMetadata<4>, double, double, bool)"
)
B_ATTENTION = (
    "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<"
    "cutlass::arch::Sm80, float, true, false, false, 64, 64, 64, false>::Params)"
)

OPAQUE = (
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
    "index_put_kernel_impl<at::native::OpaqueType<2> >(at::TensorIterator&)::{lambda(char*, char "
    "const*, long)#1}>(at::TensorIteratorBase&)>(long)"
)


def of_index(functor: str, extra: str) -> str:
    name = OF_INDEX.replace("{}", "_manual_unroll" if extra else "", 1)
    return name.replace("int{}", f"int{extra}").replace("{}", functor)


@pytest.mark.parametrize(
    ("full", "short"),
    [
        (of_index(MUL, ", bool"), "elementwise mul bf16"),
        (of_index(MUL, ""), "elementwise mul bf16"),
        (NSIGHT_MUL, "elementwise mul bf16"),
        (elementwise("where_kernel_impl()::{lambda(bool, float, float)#1}"), "elementwise where"),
        (B_ATTENTION, "attention backward fmha cutlass f32 aligned 64x64 k64 sm80…"),
        (SOLVER, "dag lts"),
        ("Fan2(float *, float *, float *, int, int, int)", "Fan2"),
        (OPAQUE, "index put 2-byte"),  # the operator may be bf16, as well as int16
        ("triton_", "unnamed triton kernels"),
        ("triton__0d1d2d", "unnamed triton kernels 0d1d2d"),
    ],
)
def test_types_directions_and_letters_are_those_of_the_name(full: str, short: str) -> None:
    assert kernel_name(full).short == short


@pytest.mark.parametrize(
    ("full", "precision", "tensor_cores"),
    [
        (ENGINE.replace("{}", "dgrad_engine"), "fp32", False),
        (ENGINE.replace("{}", "wgrad_alg0_engine"), "fp32", False),
        (ENGINE.replace("{}", "dgrad2d_alg1_1"), "fp32", False),
        (ENGINE.replace("{}", "wgrad2d_grouped_direct_kernel"), "fp32", None),  # depthwise
        ("_5x_cudnn_volta_scudnn_128x64_relu_xregs_large_nn_v1", "fp32", False),
        ("void precomputed_convolve_sgemm<__nv_bfloat16, 1024, 5, 5>(int)", "bf16", None),
        ("igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt64x32x32", "bf16", True),
    ],
)
def test_convolutions_of_libraries_are_known_with_their_units(
    full: str, precision: str, tensor_cores: bool | None
) -> None:
    found = kernel_name(full)
    assert (found.is_product, found.precision) == (True, precision)
    assert found.tensor_cores is tensor_cores


@pytest.mark.parametrize(
    ("full", "double"),
    [
        (ADAM, False),
        (elementwise("nan_to_num_kernel(c10::optional<double>)::{lambda(float)#1}"), False),
        (elementwise("pow_kernel_impl<float, double>(double)::{lambda(float)#1}"), False),
        (elementwise("CUDAFunctor_add<double>"), True),
        (REDUCE.replace("float", "double"), True),
        ("void cunn_SoftMaxForward<2, double, double, double, Epilogue>(int)", True),
        (SOLVER, True),
        ("ampere_dgemm_128x64_nn", True),
        ("kernel_cutlass_mxfp8_gmmSm100GroupedBlockScaledGemmKernel_object_at__TiledMMA", False),
        ("GroupedBlockScaledGemm_float64_e4m3", False),
    ],
)
def test_scalar_arguments_in_double_are_no_arithmetic_in_double(full: str, double: bool) -> None:
    assert computes_in_double(full) is double


@pytest.mark.parametrize("recording", [BERT, META, RESNET, GRAPHS, V100, "dlrm-h100-pc.d"])
def test_kernels_of_real_recordings_are_told_apart(recording: str) -> None:
    full = kernels_of(recording)
    short = short_names(full)
    assert set(short) == set(full)
    assert all(0 < len(name) <= LONGEST_NAME for name in short.values())
    assert len(set(short.values())) == len(full)
    # those that only a number tells apart are few
    numbered = [n for n in short.values() if re.search(r" #\d+$", n) and "triton" not in n]
    assert len(numbered) <= 0.08 * len(full)
    # a product is known as such, and as one on tensor cores or not
    products = [kernel_name(name) for name in full if re.search("(?<!fb)gemm_(?!gpu)", name)]
    assert all(product.is_product for product in products)
    unclear = [p.short for p in products if not p.precision or p.tensor_cores is None]
    assert not unclear


@given(st.text(max_size=200))
def test_any_text_gets_a_name(text: str) -> None:
    assert 0 < len(kernel_name(text).short) <= LONGEST_NAME


@given(st.text(alphabet="ab<>(),:{}[] _1#~&*", max_size=120))
def test_brackets_that_do_not_match_do_no_harm(text: str) -> None:
    assert 0 < len(kernel_name(f"void at::native::{text}").short) <= LONGEST_NAME


@given(st.lists(st.text(min_size=1, max_size=90), unique=True, max_size=30))
def test_no_two_kernels_have_one_short_name(names: list[str]) -> None:
    short = short_names(names)
    assert len(set(short.values())) == len(names)
    assert all(len(name) <= LONGEST_NAME for name in short.values())
