"""The fused dense part against the plain step: losses, gradients, ranges, fallbacks."""

import pytest
import torch
from slow_tiles import use_slow_tiles
from test_dense import LOSS_TOLERANCE, gradients_after_one_step, losses_of, trainer_of

from dlrm_core.base.errors import InputError
from dlrm_core.config import TrainingConfig, parameters_from_sections
from dlrm_core.interactions import DotInteraction
from dlrm_core.parts import log_spans, parse_span
from dlrm_kernels import dense as dense_fused
from dlrm_kernels import interaction_cpu
from dlrm_kernels.memory import dense_peak
from dlrm_kernels.products import set_fp32_matmul
from dlrm_workbook.analysis.work import operator_work
from dlrm_workbook.evidence.dependence import affected_components, changed_parameters
from dlrm_workbook.evidence.probes import default_changes

BF16X2 = {"dense_backend": "fused", "fp32_matmul": "bf16x2"}
BF16X3 = {"dense_backend": "fused", "fp32_matmul": "bf16x3"}
BF16 = {"dense_backend": "fused", "precision": "bf16"}


@pytest.fixture
def anywhere(monkeypatch):
    use_slow_tiles(monkeypatch.setattr)


@pytest.fixture
def nowhere(monkeypatch):
    for place in ("dlrm_kernels.dense", "dlrm_kernels.tiles.machine"):
        monkeypatch.setattr(f"{place}.why_no_tiles", lambda: "no such units")


@pytest.mark.parametrize("interaction", ["dot", "cat"])
@pytest.mark.parametrize("options", [BF16X2, BF16X3], ids=["bf16x2", "bf16x3"])
def test_fp32_losses_are_within_1e_5_of_the_plain_ones(anywhere, interaction, options):
    model = {"interaction": interaction}
    plain, fused = losses_of(model), losses_of(model, **options)
    assert torch.equal(plain, fused) is False  # other sums, so other roundings somewhere
    assert float((fused - plain).abs().max()) < 1e-5


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_bf16_trains_as_fp32_does(anywhere, interaction):
    model = {"interaction": interaction}
    difference = float((losses_of(model, **BF16) - losses_of(model)).abs().max())
    assert 0 < difference < LOSS_TOLERANCE["bf16"]


@pytest.mark.parametrize("model", [{}, {"interaction_itself": True}, {"loss": "wbce"}])
@pytest.mark.parametrize(("options", "most"), [(BF16X2, 2e-5), (BF16X3, 2e-6)])
def test_gradients_are_the_plain_ones(anywhere, model, options, most):
    if model.get("loss") == "wbce":
        model = model | {"loss_threshold": 0.01}
    plain = gradients_after_one_step(model)
    for a, b in zip(plain, gradients_after_one_step(model, **options), strict=True):
        assert float((a - b).norm()) <= most * float(a.norm())


@pytest.mark.parametrize("rows", [1, 32, 40, 1000])
def test_micro_batches_give_the_gradients_of_the_whole_batch(anywhere, rows):
    """Also where the last one is smaller, and where a block of 32 rows is not full."""
    whole = gradients_after_one_step(**BF16X3)
    for a, b in zip(whole, gradients_after_one_step(**BF16X3, micro_batch=rows), strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(a.norm())


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_it_works_with_every_optimiser_and_with_fused_embeddings(anywhere, optimizer):
    common = {"optimizer": optimizer, "learning_rate": 0.05}
    more = {"embedding_backend": "fused", "fused_optimizer": True}
    plain = losses_of(**common)
    assert float((losses_of(**common, **BF16X3, **more) - plain).abs().max()) < 1e-5


def test_gradients_that_are_still_there_are_added_to(anywhere):
    trainer = trainer_of(**BF16X3)
    step, weights = trainer.step, trainer.step.dense.weights
    batch = next(trainer.batches)
    pooled = [vector.detach().requires_grad_() for vector in trainer.model.embeddings(batch)]
    step.dense(batch.dense, pooled, batch.targets)
    once = [weight.grad.clone() for weight in weights]
    step.dense(batch.dense, pooled, batch.targets)
    for weight, gradient in zip(weights, once, strict=True):
        torch.testing.assert_close(weight.grad, 2 * gradient)


class Exchange(torch.autograd.Function):
    """Half an exchange between ranks, which notes when its backward runs."""

    @staticmethod
    def forward(ctx, x, name, log):
        ctx.note = lambda: log.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None, None


def test_pooled_gradients_are_under_way_while_the_bottom_mlp_runs_backward(anywhere, monkeypatch):
    """On ranks pooled vectors are sent before its forward, and received after it."""
    trainer, log = trainer_of(**BF16X2), []
    batch, bottom_mlp = next(trainer.batches), trainer.step.dense.layers["bottom_mlp"]
    vectors = torch.zeros(len(batch.dense), 16, requires_grad=True)
    sent = Exchange.apply(vectors, "gradients received", log)
    x = bottom_mlp(batch.dense)
    pooled = Exchange.apply(sent, "gradients sent", log)
    mlp = bottom_mlp.__self__.bottom
    own = mlp.backward
    monkeypatch.setattr(mlp, "backward", lambda g: log.append("bottom MLP") or own(g))
    torch.autograd.backward([pooled, x], [torch.ones_like(pooled), torch.ones_like(x)])
    assert log == ["gradients sent", "bottom MLP", "gradients received"]


def test_every_part_keeps_its_range(anywhere):
    trainer = trainer_of(**BF16X2, micro_batch=32)
    with log_spans() as rows:
        trainer.iterate()
    seen = [parse_span(name) for name, _, _ in rows]
    for component in ("bottom_mlp", "interaction", "top_mlp", "loss"):
        assert seen.count((component, "forward")) == seen.count((component, "backward")) == 3
    for component in ("bottom_mlp", "top_mlp"):
        assert seen.count((component, "update")) == 1


def test_without_tiles_torch_does_it_and_the_run_says_so(nowhere, monkeypatch):
    monkeypatch.setattr(interaction_cpu, "cpu_flags", set)
    trainer = trainer_of(**BF16X2, batches=3)
    starts = [notice.split(":")[0] for notice in trainer.notices if "no such units" in notice]
    assert set(starts) == {"training.dense_backend", "training.fp32_matmul"}
    assert trainer.train().losses == pytest.approx(losses_of(batches=3).tolist(), abs=1e-6)
    low = trainer_of(**BF16, batches=3)
    assert any("torch does it" in notice for notice in low.notices)
    assert low.train().losses == losses_of(batches=3, precision="bf16").tolist()


def test_cross_layers_are_left_to_torch_and_the_run_says_so(anywhere):
    dcn = {"interaction": "dcn", "dcn_rank": 4}
    for options in (BF16X2, BF16):
        trainer = trainer_of(dcn, **options, batches=3)
        said = [n for n in trainer.notices if "no cross layers (model.interaction: dcn)" in n]
        assert any("torch does it" in notice for notice in said)
        assert len(said) == (2 if options == BF16X2 else 1)  # and its products are oneDNN's
        plain = {name: value for name, value in options.items() if name == "precision"}
        expected = losses_of(dcn, batches=3, **plain).tolist()
        assert trainer.train().losses == pytest.approx(expected, abs=1e-6)
    proposed = default_changes(parameters_from_sections({"model": dcn}))
    assert proposed and not any("training.dense_backend" in change for change in proposed)


def test_what_it_cannot_do_is_said():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    dot = DotInteraction(4, 16)
    fused = TrainingConfig(dense_backend="fused")
    assert "bf16x2 or bf16x3, not default" in dense_fused.why_not_fused(fused, cpu, dot)
    half = TrainingConfig(dense_backend="fused", precision="fp16")
    assert "no fp16 products" in dense_fused.why_not_fused(half, cpu, dot)
    assert "cuda_graphs" in dense_fused.why_not_fused(TrainingConfig(**BF16), gpu, dot)
    (notice,) = set_fp32_matmul("bf16x2", parameters_from_sections({}).model, gpu)
    assert "bf16x2 has no effect on a GPU" in notice


def test_options_that_exclude_each_other_are_refused():
    for backend in ("torch", "auto"):
        with pytest.raises(InputError, match="only 'fused' has such products"):
            TrainingConfig(dense_backend=backend, fp32_matmul="bf16x2")
    with pytest.raises(InputError, match="compile is true"):
        TrainingConfig(**BF16, compile=True)


def shape(**training):
    model = {"bottom_mlp": "33-40-16", "top_mlp": "50-1", "embedding_dim": 16, "tables": 3}
    return parameters_from_sections(
        {"model": model | {"table_rows": 100}, "training": {"batch_size": 64} | training}
    )


def test_its_work_is_the_plain_products_work():
    """The same products, fewer operators: what torch does between them is in the kernels."""
    plain, fused = (operator_work(shape(**options)) for options in ({}, BF16X2))
    keys = ["component", "phase", "product", "layer", "m", "n", "k", "flops"]
    of_mlps = [
        table[table["product"].ne("") & table["component"].ne("interaction")][keys]
        .sort_values(keys)
        .reset_index(drop=True)
        for table in (plain, fused)
    ]
    assert of_mlps[0].equals(of_mlps[1])
    assert fused["count"].sum() < plain["count"].sum()
    two, three = (operator_work(shape(**options)) for options in (BF16X2, BF16X3))
    assert three["read_bytes"].sum() > two["read_bytes"].sum()
    # on a GPU, and in fp32 without products to do, it is torch that works
    assert operator_work(shape(dense_backend="fused")).equals(plain)


def test_a_change_to_it_touches_the_dense_part_and_is_proposed(anywhere, monkeypatch):
    base = shape()
    changed, _ = changed_parameters(base, {f"training.{k}": v for k, v in BF16X2.items()})
    dense_parts = {"bottom_mlp", "interaction", "top_mlp", "loss", "optimizer"}
    assert affected_components(base, changed) == dense_parts
    proposed = default_changes(base)
    assert {f"training.{k}": v for k, v in BF16X2.items()} in proposed
    assert {f"training.{k}": v for k, v in BF16.items()} in proposed
    assert {"training.dense_backend": "fused"} in default_changes(shape(precision="bf16"))
    strict = default_changes(shape(lowest_precision="fp32"))
    assert {f"training.{k}": v for k, v in BF16X3.items()} in strict
    for none in (changed, shape(compile=True), shape(precision="fp16")):
        assert not any("training.dense_backend" in change for change in default_changes(none))


@pytest.mark.parametrize("options", [BF16, BF16X2, {**BF16X3, "micro_batch": 40}], ids=str)
def test_the_forecast_of_its_memory_is_what_it_takes(anywhere, options):
    trainer = trainer_of(**options)
    trainer.iterate()
    found = trainer.step.dense.layers["top_mlp"].__self__
    taken = sum(mlp.arena.taken_bytes for mlp in (found.bottom, found.top))
    # gradients of weights are an item of their own in the forecast
    taken -= sum(weight.grad.nbytes for weight in trainer.step.dense.weights)
    peak = dense_peak(trainer.parameters)
    assert peak.activations + peak.gradients == pytest.approx(taken, rel=0.05)
