"""Wukong's interaction against the paper's formulas, and everything else that asks a kind."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest
import test_work
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import parameters_with, sections_with

from dlrm_core.base.errors import InputError
from dlrm_core.config import load_parameters
from dlrm_core.data.loader import batches
from dlrm_core.interactions import WukongInteraction
from dlrm_core.model import InteractionLayer, build_model
from dlrm_core.train import Trainer, train
from dlrm_kernels.memory import dense_peak, forecast_memory
from dlrm_workbook.analysis.capacity import capacity_of

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
WUKONG = {
    "interaction": "wukong",
    **{"wukong_layers": 2, "wukong_fmb": 2, "wukong_lcb": 3, "wukong_rank": 3, "wukong_hidden": 7},
}
LEAVES = {f"model__{leaf}": value for leaf, value in WUKONG.items()}


SECTIONS = {
    "model": {"bottom_mlp": "5-12-8", "top_mlp": "12-1", "embedding_dim": 8}
    | {"table_rows": [50, 3, 200], "loss": "bce"}
    | WUKONG,
    "data": {"indices_per_lookup": 4, "round_targets": True},
    "training": {"batch_size": 32, "batches": 3, "learning_rate": 0.1, "device": "cpu"}
    | {"threads": 1, "rank_timeout_s": 60.0},
}
sections, parameters = partial(sections_with, SECTIONS), partial(parameters_with, SECTIONS)


def plain(kind, weights, x):
    """Section 3 of the paper, formula by formula: X_0 (B, F, d) to the last X, flattened."""

    def normed(x, place):
        deviation = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        scaled = (x - x.mean(-1, keepdim=True)) / deviation
        return scaled * weights[f"{place}.weight"] + weights[f"{place}.bias"]

    def linear(x, place):
        return torch.einsum("bi,oi->bo", x, weights[f"{place}.weight"]) + weights[f"{place}.bias"]

    for number in range(kind.wukong_layers):
        place = f"blocks.{number}"
        y = weights[f"{place}.factors.weight"]
        # all pairs' products, by n k factors
        machine = torch.einsum("bid,bjd,kj->bik", x, x, y).flatten(1)
        hidden = linear(normed(machine, f"{place}.flat_norm"), f"{place}.hidden").clamp(min=0)
        fmb = linear(hidden, f"{place}.machine").reshape(len(x), -1, x.shape[2])
        lcb = torch.einsum("bid,oi->bod", x, weights[f"{place}.compression.weight"])
        residual = weights.get(f"{place}.residual.weight")
        if residual is not None:
            x = torch.einsum("bid,oi->bod", x, residual)
        x = normed(torch.cat([fmb, lcb], dim=1) + x, f"{place}.norm")
    return x.flatten(1)


few = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(few, st.integers(2, 6), few, few, few, few, few, few)
def test_forward_and_gradients_are_those_of_the_papers_formulas(
    size, features, dim, layers, fmb, lcb, rank, hidden
):
    torch.manual_seed(size)
    options = dict(zip(list(WUKONG)[1:], (layers, fmb, lcb, rank, hidden), strict=True))
    kind = WukongInteraction(features, dim, **options)
    layer = InteractionLayer(kind).double()
    weights = dict(layer.named_parameters())
    for weight in weights.values():
        torch.nn.init.normal_(weight)
    vectors = torch.randn(features, size, dim, dtype=torch.float64, requires_grad=True)
    result = layer(vectors[0], list(vectors[1:]))
    expected = plain(kind, weights, vectors.transpose(0, 1))
    assert result.shape == (size, kind.width) == (size, (fmb + lcb) * dim)
    torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-8)
    gradient, leaves = torch.randn_like(result), [vectors, *weights.values()]
    ours = torch.autograd.grad(result, leaves, gradient)
    theirs = torch.autograd.grad(expected, leaves, gradient)
    for mine, reference in zip(ours, theirs, strict=True):
        scale = float(reference.abs().max())
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-8 * (1 + scale))


@pytest.mark.parametrize("init", ["facebook", "torch"])
def test_weights_start_as_they_say_and_change_no_other(init):
    wide = {"wukong_hidden": 900, "wukong_rank": 40, "init": init}
    config = parameters(wide).model
    without = {leaf: None for leaf in WUKONG} | {"interaction": "cat", "init": init}
    before = dict(build_model(parameters(without).model, 3, CPU).named_parameters())
    weights = dict(build_model(config, 3, CPU).named_parameters())
    top = "top_mlp.0.weight"  # the only one of another shape
    assert weights[top].shape == (12, 5 * 8)
    kept = [name for name in before if not name.startswith("top_mlp")]
    assert all(torch.equal(weights[name], before[name]) for name in kept)
    own = {name: weight.detach() for name, weight in weights.items() if "interaction" in name}
    # 4 features to 5 vectors, and from then on 5 to 5
    assert len(own) == 11 + 10
    assert own["interaction.blocks.0.residual.weight"].shape == (5, 4)
    for name, weight in own.items():
        if weight.dim() == 1:
            start = 1.0 if "norm.weight" in name else 0.0
            assert (weight == start).all(), name
        elif weight.numel() > 5000:
            expected = (2 / sum(weight.shape)) ** 0.5
            assert float(weight.std()) == pytest.approx(expected, rel=0.05), name
        else:
            assert weight.any(), name


@pytest.fixture
def copies_count(monkeypatch):
    """Count copies of what is not in one piece; elsewhere only sparse gradients have any."""
    views = test_work.VIEWS.pattern.replace("|clone", "")
    monkeypatch.setattr(test_work, "VIEWS", re.compile(views))


WORK = [
    {},
    {"training__batch_size": 1},
    {"training__precision": "bf16"},
    {"training__micro_batch": 4},
    {"training__micro_batch": 4, "training__precision": "bf16", "training__optimizer": "adagrad"},
    {"model__wukong_fmb": 1, "model__wukong_lcb": 2},
    {"training__optimizer": "adagrad", "training__fused_optimizer": True},
    {"model__embedding_dim": 1, "model__bottom_mlp": [7, 1], "model__wukong_layers": 1},
    {"model__table_rows": [9], "model__wukong_lcb": 1, "model__wukong_rank": 1},
]


@pytest.mark.parametrize("changes", WORK, ids=lambda changes: str(changes)[:60])
def test_operators_and_bytes_are_those_of_a_real_step(changes, copies_count, monkeypatch):
    chosen = test_work.small(**LEAVES | changes)
    counted, batch = test_work.run_step(chosen, monkeypatch)
    work = test_work.expected(chosen, batch)
    work = work.rename(columns={"read_bytes": "read", "written_bytes": "written"})
    work["operator"] = work["operator"].str.rstrip("_")
    columns = ["operator", "read", "written"]
    listed, run = test_work.by_part(work, columns), test_work.by_part(counted, columns)
    for phase in ("forward", "backward", "update"):
        assert listed["interaction", phase] == run["interaction", phase]
    del listed["embedding", "backward"], run["embedding", "backward"]
    assert listed == run


@pytest.mark.parametrize("changes", WORK[:5], ids=lambda changes: str(changes)[:60])
def test_products_have_the_operations_that_torch_counts(changes):
    test_work.test_products_have_the_operations_that_torch_counts(LEAVES | changes)


def saved_bytes(kind, size, dtype):
    """Bytes that autograd keeps of a forward pass, weights and their copies included."""
    layer, saved = InteractionLayer(kind), {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(size, kind.dim, dtype=dtype, requires_grad=True)
    pooled = [torch.randn(size, kind.dim, requires_grad=True) for _ in range(kind.features - 1)]
    with (
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        assert layer(x, pooled).dtype == dtype
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [(6, 10), (13, 14)])
def test_what_backward_keeps_is_what_autograd_saves(dtype, blocks):
    options = {"wukong_layers": 3, "wukong_fmb": blocks[0], "wukong_lcb": blocks[1]}
    kind = WukongInteraction(27, 16, **options, wukong_rank=5, wukong_hidden=40)
    kept = saved_bytes(kind, 96, dtype) - saved_bytes(kind, 32, dtype)
    numbers, _, _ = kind.memory(dtype.itemsize, widens=dtype != torch.float32)
    assert 64 * dtype.itemsize * numbers == pytest.approx(kept, rel=0.03)


def test_the_memory_forecast_and_capacity_count_its_weights():
    found = parameters(precision="bf16", optimizer="adagrad")
    model = build_model(found.model, None, CPU)
    own = list(model.interaction.parameters())
    count = sum(weight.numel() for weight in own)
    norms = sum(w.numel() for n, w in model.interaction.named_parameters() if "norm." in n)
    items = {item.name: item for item in forecast_memory(found)}
    assert items["Wukong layers weights"].bytes == 4 * count + 2 * (count - norms)
    assert items["Wukong layers gradients"].bytes == 4 * count
    assert capacity_of(found).parameters["Wukong_layers"] == count
    assert "weights in Wukong layers" in set(capacity_of(found).weights()["what"])
    twice = dataclasses.replace(found, training=dataclasses.replace(found.training, batch_size=64))
    assert dense_peak(twice).activations == 2 * dense_peak(found).activations


def test_it_learns_one_batch_of_its_preset():
    preset = load_parameters(ROOT / "parameters" / "wukong.yaml")
    trainer = Trainer(preset.with_training(embedding_backend="torch", threads=1, device="cpu"))
    try:
        batch = next(batches(preset, CPU))
        losses = [float(trainer.step(batch)) for _ in range(3)]
    finally:
        trainer.close()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.005)])
def test_low_precision_and_micro_batches_train_as_fp32_does(precision, tolerance):
    given = {"batches": 6, "learning_rate": 0.02, "loss_scale": 1024.0}
    exact = train(parameters(**given)).losses
    low = train(parameters(**given, precision=precision, micro_batch=7)).losses
    assert low == pytest.approx(exact, abs=tolerance)


def test_torch_compile_takes_it_as_one_graph():
    torch.manual_seed(0)
    layer = InteractionLayer(WukongInteraction(4, 8, **dict(list(WUKONG.items())[1:])))
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    compiled = torch.compile(layer, dynamic=False, fullgraph=True, backend="aot_eager")
    x, *pooled = torch.randn(4, 6, 8)
    gradients = []
    for run in (layer, compiled):
        run(x, pooled).square().sum().backward()
        gradients.append([weight.grad for weight in layer.parameters()])
        layer.zero_grad()
    torch.testing.assert_close(*gradients)


def test_the_fused_dense_part_refuses_it_in_a_sentence():
    fused = parameters(dense_backend="fused", precision="bf16")
    trainer = Trainer(fused)
    trainer.close()
    refusal = "it has no Wukong layers (model.interaction: wukong)"
    assert sum(refusal in notice for notice in trainer.notices) == 1


@pytest.mark.parametrize("leaf", list(WUKONG)[1:])
def test_options_are_refused_beside_another_kind(leaf):
    without = dict.fromkeys(WUKONG) | {"interaction": "dcn", leaf: 4}
    with pytest.raises(InputError, match=f"{leaf} is 4.*only wukong has Wukong layers; leave it"):
        parameters(without)
    with pytest.raises(InputError, match=f"{leaf} is 0, expected .*at least 1"):
        parameters({leaf: 0})
