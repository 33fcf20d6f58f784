"""The GPU's interaction kernels against the plain interaction, run by Triton's interpreter."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed: the GPU's kernels cannot run")

from interaction_layers import dot_layer

from dlrm_core.config import ModelConfig, TrainingConfig
from dlrm_core.model import DLRM, MLP, Probability
from dlrm_kernels.embeddings.fused_gpu import in_one
from dlrm_kernels.interaction_gpu import MAX_DIM, MAX_FEATURES, dot_interaction, fuse, why_not
from dlrm_kernels.padded_linear import PaddedMLP

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""A few roundings of each type: the interpreter cuts bf16 off where a GPU rounds."""


def difference(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6))


def assert_same(vectors, itself, dtype, pooled_dtype):
    results = []
    for fused in (True, False):
        interaction = dot_layer(len(vectors), itself).to(DEVICE)
        interaction.kernel = partial(dot_interaction, itself=itself) if fused else None
        x = vectors[0].to(dtype).requires_grad_()
        pooled = [vector.to(pooled_dtype).requires_grad_() for vector in vectors[1:]]
        z = interaction(x, pooled)
        assert z.dtype == dtype
        waves = torch.sin(torch.arange(z.numel(), device=DEVICE)).view(z.shape)
        z.backward(waves.to(dtype))
        assert [p.grad.dtype for p in pooled] == [pooled_dtype] * len(pooled)
        results.append([z.detach(), x.grad, *(p.grad for p in pooled)])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape and difference(a, b) < EPSILON[dtype]
    # x goes through untouched
    dim = vectors[0].shape[1]
    assert torch.equal(results[0][0][:, :dim], vectors[0].to(dtype))


@settings(max_examples=10)
@given(
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_fused_is_the_plain_interaction(size, tables, dim, itself, dtype, keep):
    random = torch.Generator().manual_seed(size + 100 * tables + 10_000 * dim)
    vectors = [torch.randn(size, dim, generator=random).to(DEVICE) for _ in range(tables + 1)]
    assert_same(vectors, itself, dtype, dtype if keep else torch.float32)


@pytest.mark.parametrize("itself", [False, True])
def test_features_may_be_views_of_wider_tensors(itself):
    wide = torch.randn(4, 60, device=DEVICE)
    vectors = [wide[:, 12 * i : 12 * i + 12] for i in (3, 1, 0, 2)]
    assert_same([v.contiguous() for v in vectors], itself, torch.float32, torch.float32)
    x = vectors[0].detach().requires_grad_()
    plain = dot_layer(4, itself).to(DEVICE)(x, vectors[1:])
    fused = dot_interaction(x, vectors[1:], itself)
    assert difference(fused.detach(), plain.detach()) < 1e-6
    # a gradient as a later part may hand it over: every second column of something
    gradient = torch.randn(4, 2 * plain.shape[1], device=DEVICE)[:, ::2]
    (expected,) = torch.autograd.grad(plain, x, gradient)
    (got,) = torch.autograd.grad(fused, x, gradient)
    assert difference(got, expected) < 1e-6


def test_rows_of_the_result_are_aligned_for_tensor_cores():
    x = torch.randn(3, 16, device=DEVICE).bfloat16()
    z = dot_interaction(x, [x, x], False)  # 16 + 3 columns
    assert z.shape == (3, 19) and z.stride() == (24, 1)
    assert not z.as_strided((3, 5), (24, 1), 19).any()  # zeros between the rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_room", [False, True])
def test_a_padded_first_layer_is_the_plain_one(dtype, with_room):
    torch.manual_seed(1)
    layers = MLP([19, 32, 1], Probability(0.0)).to(DEVICE)
    x = torch.randn(6, 16, device=DEVICE).to(dtype)
    z = dot_interaction(x, [x, x * 0.5], False)
    results = []
    for mlp in (layers, PaddedMLP(layers, with_room)):
        layers.zero_grad()
        leaf = (z if with_room else z.contiguous()).detach().requires_grad_()
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            mlp(leaf).sum().backward()
        gradients = [weight.grad.clone() for weight in layers.parameters()]
        results.append([mlp(leaf.detach().float()).detach(), leaf.grad, *gradients])
    for plain, other in zip(*results, strict=True):
        assert other.dtype == plain.dtype and other.shape == plain.shape
        assert difference(other, plain) < EPSILON[dtype]


def test_gradients_of_pooled_vectors_stay_in_one_piece():
    """What the embeddings' update reads without copying it together first."""
    pooled = torch.randn(5, 4, 8, device=DEVICE)
    leaves = [vector.detach().requires_grad_() for vector in pooled]
    x = torch.randn(4, 8, device=DEVICE).requires_grad_()
    dot_interaction(x, leaves).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    first, *strides = in_one(gradients)
    assert first.data_ptr() == gradients[0].data_ptr() and strides == [32, 8]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_fused_dense_part_pads_where_tensor_cores_multiply(precision, monkeypatch):
    monkeypatch.setattr("dlrm_kernels.interaction_gpu.why_not", lambda features, dim, device: "")
    config = ModelConfig(bottom_mlp=(13, 32, 16), top_mlp=(8, 1), embedding_dim=16, tables=2)
    config = dataclasses.replace(config, table_rows=(5, 3))
    model = DLRM(config).to(DEVICE)
    training = TrainingConfig(precision=precision)
    layers, _ = fuse(model, training, DEVICE)
    assert model.interaction.kernel.func is dot_interaction
    padded = [name for name, layer in layers.items() if isinstance(layer, PaddedMLP)]
    assert padded == (["bottom_mlp", "top_mlp"] if precision != "fp32" else [])


def test_an_empty_batch_has_empty_products():
    x = torch.randn(0, 16, device=DEVICE).requires_grad_()
    z = dot_interaction(x, [x.detach()] * 2, False)
    z.backward(torch.zeros_like(z))
    assert z.shape == (0, 19) and x.grad.shape == (0, 16)


def test_what_does_not_fit_is_said():
    assert "the kernels are for GPUs" in why_not(9, 64, torch.device("cpu"))
    gpu = torch.device("cuda")
    assert why_not(MAX_FEATURES, MAX_DIM, gpu) == ""
    assert "129 features" in why_not(129, 64, gpu)
    assert "width 257" in why_not(9, 257, gpu)
