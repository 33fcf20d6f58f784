"""Gradients of the whole step against differences of the loss, in double precision."""

import pytest
import torch
from small_training import parameters

from dlrm_core.data.loader import make_generator
from dlrm_core.embeddings import RowwiseAdagrad, without_compiler
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.step import TrainingStep

CPU = torch.device("cpu")


def build(interaction, loss, itself=False, micro_batch=None):
    model = {"bottom_mlp": "5-7-4", "top_mlp": "6-1", "table_rows": [30, 3, 11]}
    model |= {"interaction": interaction, "interaction_itself": itself}
    model |= {"dcn_layers": 2, "dcn_rank": 3} if interaction == "dcn" else {}
    model |= {"loss": loss, "loss_weights": [0.3, 1.7]}
    chosen = parameters(model=model, batch_size=12, learning_rate=1.0, micro_batch=micro_batch)
    model = build_model(chosen.model, 3, CPU).double()
    batch = make_generator(chosen, CPU).next_batch()
    for name in ("dense", "targets"):
        object.__setattr__(batch, name, getattr(batch, name).double())
    # Probability computes in float32 whatever comes in; here it must not
    model.top_mlp[-1] = torch.nn.Sigmoid()
    # biases of cross layers begin at 0, where a wrong sign would not show
    for weight in model.interaction.parameters():
        weight.data.add_(0.1)
    loss_module = ClickLoss(loss, chosen.model.loss_weights)
    return chosen, model, batch, loss_module


@pytest.mark.parametrize(
    ("interaction", "loss", "itself", "micro_batch"),
    [
        ("dot", "mse", False, None),
        ("dot", "bce", True, None),
        ("dot", "wbce", False, 5),
        ("cat", "bce", False, None),
        ("dcn", "bce", False, None),
        ("dcn", "mse", False, 5),
    ],
)
def test_one_step_of_sgd_is_the_numerical_gradient(interaction, loss, itself, micro_batch):
    """SGD with rate 1 moves every weight by its gradient, part by part, tables included."""
    chosen, model, batch, loss_module = build(interaction, loss, itself, micro_batch)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def loss_at(weights):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(weights[name])
            return float(loss_module(model(batch), batch.targets))

    step = TrainingStep(model, loss_module, chosen.training)
    step(batch)
    gradient = {name: before[name] - weight.detach() for name, weight in model.named_parameters()}
    random = torch.Generator().manual_seed(1)
    for name in before:
        direction = torch.randn(before[name].shape, generator=random, dtype=torch.float64)
        direction /= direction.norm()
        slope = float((gradient[name] * direction).sum())
        # Differences over h err by h^2 times a third derivative and by rounding over h:
        # with h = 1e-5 about 1e-10 and 1e-16 / 1e-5 = 1e-11, and kinks of ReLU are rarely met.
        h = 1e-5
        ahead = loss_at(before | {name: before[name] + h * direction})
        behind = loss_at(before | {name: before[name] - h * direction})
        assert slope == pytest.approx((ahead - behind) / (2 * h), abs=1e-8), name
        assert abs(slope) > 1e-8, name


@pytest.mark.parametrize(
    ("optimizer", "sparse"),
    [
        (torch.optim.SGD, False),
        (torch.optim.Adam, False),
        (torch.optim.Adagrad, False),
        (torch.optim.SGD, True),
        (torch.optim.SparseAdam, True),
        (RowwiseAdagrad, True),
    ],
)
def test_an_optimizer_without_the_compiler_updates_to_the_same_bits(optimizer, sparse):
    """The bits are those of torch's own optimizer, under the same name for profilers."""
    found = {}
    for kind in (optimizer, without_compiler(optimizer)):
        torch.manual_seed(1)
        table = torch.nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse)
        own = kind(table.parameters(), lr=0.1)
        with torch.profiler.profile() as seen:
            for step in range(3):
                own.zero_grad()
                table(torch.arange(step, step + 6).view(2, 3)).square().sum().backward()
                own.step()
                assert torch.is_grad_enabled()
        names = {e.name for e in seen.events() if e.name.startswith("Optimizer.")}
        assert len(names) == 2
        found[kind] = table.weight.detach().clone(), names, own.state_dict()["param_groups"]
    plain, light = found.values()
    assert torch.equal(plain[0].view(torch.int32), light[0].view(torch.int32))
    assert plain[1:] == light[1:]
