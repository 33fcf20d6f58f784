"""The CPU's interaction kernels against the plain interaction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interaction_layers import dot_layer
from test_dense import LOSS_TOLERANCE, losses_of, trainer_of

from dlrm_kernels import interaction_cpu

BF16 = {"dense_backend": "fused", "precision": "bf16"}
BF16X2 = {"dense_backend": "fused", "fp32_matmul": "bf16x2"}

needs_vectors = pytest.mark.skipif(
    bool(interaction_cpu.why_not(16, "fp32")), reason=interaction_cpu.why_not(16, "fp32") or "-"
)


@pytest.fixture
def nowhere(monkeypatch):
    for place in ("dlrm_kernels.dense", "dlrm_kernels.tiles.machine"):
        monkeypatch.setattr(f"{place}.why_no_tiles", lambda: "no such units")


def results_of(interact, vectors, dtype):
    """z and the gradients of all features, whose gradients of z are waves."""
    x = vectors[0].to(dtype, copy=True).requires_grad_()
    pooled = [vector.clone().requires_grad_() for vector in vectors[1:]]
    z = interact(x, pooled)
    z.backward(torch.sin(torch.arange(z.numel())).view(z.shape).to(z.dtype))
    return [z.detach(), x.grad, *(vector.grad for vector in pooled)]


@needs_vectors
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 33),
    st.sampled_from([16, 48, 64, 80, 128]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_vectors_make_the_plain_interaction(size, tables, dim, itself, dtype):
    random = torch.Generator().manual_seed(size + 100 * tables + 10_000 * dim)
    vectors = [torch.randn(size, dim, generator=random) for _ in range(tables + 1)]
    vectors[0] = vectors[0].to(dtype).float()
    plain = dot_layer(tables + 1, itself)
    fused = results_of(interaction_cpu.vectorised(plain.kind), vectors, dtype)
    exact = results_of(plain, [vector.double() for vector in vectors], torch.float64)
    for a, b in zip(fused, exact, strict=True):
        # products are never rounded but when they are written; z's gradient was rounded before
        most = 1e-6 if dtype == torch.float32 else 4e-3
        assert a.shape == b.shape and float((a - b).norm()) <= most * float(b.norm())
    assert torch.equal(fused[0][:, :dim].float(), vectors[0])
    assert fused[0].dtype == fused[1].dtype == dtype
    assert {gradient.dtype for gradient in fused[2:]} == {torch.float32}


@needs_vectors
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_may_lie_apart_and_columns_too(threads):
    random = torch.Generator().manual_seed(1)
    wide = [torch.randn(100, 40, generator=random) for _ in range(6)]
    apart = [vector[:, 3:19] for vector in wide]
    apart[0] = torch.randn(16, 100, generator=random).t()
    interact = interaction_cpu.vectorised(dot_layer(6, False).kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gradient = torch.ones(31, 100).t()
        results = []
        for vectors in (apart, [vector.contiguous() for vector in apart]):
            leaves = [vector.detach().requires_grad_() for vector in vectors]
            z = interact(leaves[0], leaves[1:])
            results.append([z, *torch.autograd.grad(z, leaves, gradient)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_vectors
def test_values_beyond_range_pass_through():
    """Infinity and NaN of one sample stay in that sample; bf16 keeps both."""
    interact = interaction_cpu.vectorised(dot_layer(3, False).kind)
    vectors = [torch.ones(3, 16) for _ in range(3)]
    vectors[1][1, 2], vectors[2][2, 5] = torch.inf, torch.nan
    z = interact(vectors[0].bfloat16(), vectors[1:])[:, 16:].float()
    assert torch.equal(z[0], torch.full((3,), 16.0))
    assert z[1].tolist() == [torch.inf, 16.0, torch.inf]
    assert z[2].isnan().tolist() == [False, True, True]


@needs_vectors
def test_the_step_takes_them_where_there_are_no_tiles(nowhere):
    for options, most in ((BF16X2, 1e-6), (BF16, LOSS_TOLERANCE["bf16"])):
        trainer = trainer_of(**options, batches=3)
        assert any("computes the interaction only: no such units" in n for n in trainer.notices)
        plain = {name: value for name, value in options.items() if name == "precision"}
        expected = losses_of(batches=3, **plain).tolist()
        assert trainer.train().losses == pytest.approx(expected, abs=most)


def test_what_they_cannot_do_is_said(monkeypatch):
    monkeypatch.setattr(interaction_cpu, "cpu_flags", lambda: {"avx512f", "avx512bw", "avx512vl"})
    assert interaction_cpu.why_not(64, "bf16") == ""
    assert "width 24, the kernels take multiples of 16" in interaction_cpu.why_not(24, "bf16")
    assert "not fp16" in interaction_cpu.why_not(16, "fp16")
    monkeypatch.setattr(interaction_cpu, "cpu_flags", lambda: {"avx512f"})
    assert "no avx512bw, avx512vl" in interaction_cpu.why_not(64, "bf16")
