"""The dense part's options against the plain step: precision, micro-batches, compile, graphs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interaction_layers import dot_layer
from small_training import parameters_with

from dlrm_core.base.errors import InputError
from dlrm_core.dense import why_not_compile
from dlrm_core.parts import log_spans, parse_span
from dlrm_core.train import Trainer

SECTIONS = {
    "model": {
        "bottom_mlp": "32-64-16",
        "top_mlp": "64-32-1",
        "embedding_dim": 16,
        "table_rows": [1000, 50, 3, 1],
    },
    "data": {"indices_per_lookup": 10},
    "training": {
        "batch_size": 96,
        "learning_rate": 0.2,
        "seed": 5,
        "threads": 1,
        "device": "cpu",
        "batches": 20,
    },
}
LOSS_TOLERANCE = {"bf16": 2e-3, "fp16": 5e-4}
"""Largest difference from fp32's loss over 20 steps: docs/training.md."""


def trainer_of(model=None, **training):
    return Trainer(parameters_with(SECTIONS, model, **training))


def losses_of(model=None, **training):
    return torch.tensor(trainer_of(model, **training).train().losses)


def gradients_after_one_step(model=None, **training):
    trainer = trainer_of(model, **training)
    loss = trainer.iterate()
    dense = [weight.grad for weight in trainer.step.dense.weights]
    return [loss, *dense, *(w.grad.to_dense() for w in trainer.model.embeddings.weights)]


def plain_interaction(x, pooled, itself):
    features = torch.stack([x, *pooled], dim=1)
    rows, columns = torch.tril_indices(len(pooled) + 1, len(pooled) + 1, 0 if itself else -1)
    products = torch.bmm(features, features.transpose(1, 2))
    return torch.cat([x, products[:, rows, columns]], dim=1)


@given(
    size=st.integers(1, 9),
    tables=st.integers(1, 12),
    dim=st.integers(1, 20),
    itself=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_interaction_is_plain_indexing(size, tables, dim, itself, seed):
    random = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(size, dim, generator=random) for _ in range(tables + 1)]
    results = []
    fast = dot_layer(tables + 1, itself)
    for interaction in (fast, lambda x, pooled: plain_interaction(x, pooled, itself)):
        leaves = [vector.clone().requires_grad_() for vector in vectors]
        z = interaction(leaves[0], leaves[1:])
        z.backward(torch.sin(torch.arange(z.numel(), dtype=torch.float32)).view_as(z))
        results.append([z, *(leaf.grad for leaf in leaves)])
    (z, *gradients), (plain, *expected) = results
    assert torch.equal(z, plain)
    # the library adds the products of a gradient in an order of its own on some processors
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_interaction_in_low_precision_is_near_the_exact_one(itself, dtype):
    torch.manual_seed(0)
    vectors = [torch.randn(8, 16) for _ in range(6)]
    gradient = torch.randn(8, 16 + (21 if itself else 15))
    results = []
    for low in (True, False):
        leaves = [vector.clone().requires_grad_() for vector in vectors]
        x = leaves[0].to(dtype) if low else leaves[0]
        interaction = dot_layer(6, itself)
        z = interaction(x, leaves[1:])
        assert z.dtype == (dtype if low else torch.float32)
        z.backward(gradient.to(z.dtype))
        results.append([z.float(), *(leaf.grad for leaf in leaves)])
    for low, exact in zip(*results, strict=True):
        assert float((low - exact).detach().norm() / exact.detach().norm()) < 0.01


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_low_precision_trains_as_fp32_does(precision, interaction):
    model = {"interaction": interaction}
    exact = losses_of(model)
    low = losses_of(model, precision=precision)
    difference = float((low - exact).abs().max())
    # not zero: otherwise nothing was rounded, and this compares fp32 with itself
    assert 0 < difference < LOSS_TOLERANCE[precision]


@pytest.mark.parametrize("loss", ["bce", "wbce"])
def test_losses_that_need_fp32_get_it(loss):
    model = {"loss": loss, "loss_threshold": 0.01}
    assert torch.allclose(losses_of(model, precision="bf16"), losses_of(model), atol=5e-3)


def test_weights_gradients_and_update_stay_fp32():
    trainer = trainer_of(precision="bf16")
    before = [weight.detach().clone() for weight in trainer.step.dense.weights]
    trainer.iterate()
    for weight, old in zip(trainer.step.dense.weights, before, strict=True):
        assert weight.dtype == weight.grad.dtype == torch.float32
        # one rounding apart where the update is a fused multiply-add
        torch.testing.assert_close(weight, old - 0.2 * weight.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 32, 40, 96, 1000])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_give_the_gradients_of_the_whole_batch(rows, precision):
    whole = gradients_after_one_step(precision=precision)
    parts = gradients_after_one_step(precision=precision, micro_batch=rows)
    tolerance = 1e-5 if precision == "fp32" else 0.02
    for a, b in zip(whole, parts, strict=True):
        assert float((a - b).norm()) <= tolerance * float(a.norm())
    if rows >= 96:
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_micro_batches_keep_every_part_in_its_range():
    trainer = trainer_of(micro_batch=32)
    with log_spans() as rows:
        trainer.iterate()
    seen = [parse_span(name) for name, _, _ in rows]
    for component in ("bottom_mlp", "interaction", "top_mlp", "loss"):
        assert seen.count((component, "forward")) == seen.count((component, "backward")) == 3
    assert seen.count(("embedding", "forward")) == seen.count(("embedding", "backward")) == 1


def test_an_overflow_skips_the_whole_step_and_is_counted():
    trainer = trainer_of(precision="fp16", loss_scale=1e9, batches=4)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    result = trainer.train()
    assert trainer.step.dense.precision.skipped == 4
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    (notice,) = [n for n in result.notices if "loss_scale" in n]
    assert "4 of 4 steps" in notice


def test_the_loss_scale_rescues_small_gradients():
    """The same small gradients in fp16, without and with a scale, against fp32's."""
    errors = []
    model = {"loss": "wbce", "loss_weights": [1e-4, 1e-4]}
    exact = gradients_after_one_step(model)[1:]
    for scale in (1.0, 65536.0):
        low = gradients_after_one_step(model, precision="fp16", loss_scale=scale)[1:]
        errors.append(
            max(float((a - b).norm() / b.norm()) for a, b in zip(low, exact, strict=True))
        )
    assert errors[1] < 0.03 < 0.2 < errors[0]


def test_compiled_parts_train_as_plain_ones_or_say_why_not():
    reason = why_not_compile(torch.device("cpu"))
    trainer = trainer_of(compile=True, batches=3)
    assert any("training.compile" in notice for notice in trainer.notices) == bool(reason)
    assert trainer.train().losses == pytest.approx(losses_of(batches=3).tolist(), abs=1e-6)


def test_without_a_compiler_the_parts_run_as_they_are(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", broken)
    trainer = trainer_of(compile=True)
    (notice,) = [n for n in trainer.notices if "training.compile" in n]
    assert "No working C++ compiler" in notice
    assert torch.isfinite(trainer.iterate())


def test_gpu_options_are_announced_on_a_cpu_and_change_nothing():
    trainer = trainer_of(cuda_graphs=True, tf32=True, batches=3)
    assert {notice.split(":")[0] for notice in trainer.notices} == {
        "training.cuda_graphs",
        "training.tf32",
    }
    assert torch.equal(torch.tensor(trainer.train().losses), losses_of(batches=3))
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("other", [{"micro_batch": 8}, {"compile": True}, {"precision": "fp16"}])
def test_graphs_refuse_what_they_cannot_be_combined_with(other):
    with pytest.raises(InputError, match=rf"training\.cuda_graphs.*training\.{next(iter(other))}"):
        trainer_of(cuda_graphs=True, **other)
