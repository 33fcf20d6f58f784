"""One training step, cut into the parts that profilers are to see.

``loss.backward()`` runs all of the backward pass as one block, on CUDA in
another thread and without Python frames, so a profiler cannot say whose time it
was. Here the graph is cut where one part hands over to the next: the next part
works on a detached leaf, and backward runs part by part, each with the gradient
that arrived at its leaf. The operations and their order are those of one
``loss.backward()``, so the gradients are bit-identical (tested); each call sits
in a function named after its part and phase (see :mod:`dlrm_core.parts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import Update, attach
from dlrm_core.model import DLRM
from dlrm_core.parts import part


class TrainingStep:
    """Forward, backward and update of one batch.

    Args:
        model: trained in place.
        loss: predictions (B, 1), targets (B, 1) to a scalar.
        config: optimiser settings.
    """

    def __init__(self, model: DLRM, loss: nn.Module, config: TrainingConfig) -> None:
        self.model = model
        self.loss = loss
        rate = config.learning_rate
        # A part's weights are updated by its own optimiser, so that the time of
        # the update is that part's. Neither SGD nor Adagrad has state that this would split.
        fused = config.fused_optimizer or None
        kind: type[torch.optim.Optimizer] = torch.optim.SGD
        if config.optimizer != "sgd":
            # row-wise state makes sense for tables only: their dense companion is plain Adagrad
            kind = torch.optim.Adagrad
            if next(model.parameters()).device.type != "cpu":
                fused = None  # torch fuses Adagrad on the CPU only
        settings: dict[str, Any] = {"lr": rate, "fused": fused}
        self.bottom_optimizer = kind(model.bottom_mlp.parameters(), **settings)
        self.top_optimizer = kind(model.top_mlp.parameters(), **settings)
        self.embedding_optimizer = attach(model.embeddings, config)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on a batch that is already on the model's device; its loss, detached."""
        model = self.model
        x = bottom_mlp_forward(model, batch)
        pooled = embedding_forward(model, batch)
        x_leaf = _leaf(x)
        pooled_leaves = [_leaf(vector) for vector in pooled]
        z = interaction_forward(model, x_leaf, pooled_leaves)
        z_leaf = _leaf(z)
        p = top_mlp_forward(model, z_leaf)
        p_leaf = _leaf(p)
        loss = loss_forward(self.loss, p_leaf, batch)

        optimizer_update(self)
        # CPU threads of autograd's own would take the work out of the functions below
        with torch.autograd.set_multithreading_enabled(False):
            loss_backward(loss)
            top_mlp_backward(p, p_leaf)
            interaction_backward(z, z_leaf)
            embedding_backward(pooled, pooled_leaves)
            bottom_mlp_backward(x, x_leaf)

        top_mlp_update(self.top_optimizer)
        embedding_update(self.embedding_optimizer)
        bottom_mlp_update(self.bottom_optimizer)
        return loss.detach()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as the start of a new graph."""
    return tensor.detach().requires_grad_()


@part("data", "forward")
def data_forward(batches: Iterator[Batch]) -> Batch:
    """Make the next batch, or wait for the prefetched one."""
    return next(batches)


@part("transfer", "forward")
def transfer_forward(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch from host memory to the device."""
    return batch.to(device)


@part("bottom_mlp", "forward")
def bottom_mlp_forward(model: DLRM, batch: Batch) -> torch.Tensor:
    return model.bottom_mlp(batch.dense)


@part("embedding", "forward")
def embedding_forward(model: DLRM, batch: Batch) -> list[torch.Tensor]:
    return model.embeddings(batch)


@part("interaction", "forward")
def interaction_forward(model: DLRM, x: torch.Tensor, pooled: list[torch.Tensor]) -> torch.Tensor:
    return model.interaction(x, pooled)


@part("top_mlp", "forward")
def top_mlp_forward(model: DLRM, z: torch.Tensor) -> torch.Tensor:
    return model.predict(z)


@part("loss", "forward")
def loss_forward(loss: nn.Module, p: torch.Tensor, batch: Batch) -> torch.Tensor:
    return loss(p, batch.targets)


@part("optimizer", "update")
def optimizer_update(step: TrainingStep) -> None:
    """Drop the gradients of the step before."""
    for optimizer in (step.top_optimizer, step.embedding_optimizer, step.bottom_optimizer):
        optimizer.zero_grad(set_to_none=True)


@part("loss", "backward")
def loss_backward(loss: torch.Tensor) -> None:
    loss.backward()


@part("top_mlp", "backward")
def top_mlp_backward(p: torch.Tensor, p_leaf: torch.Tensor) -> None:
    p.backward(p_leaf.grad)


@part("interaction", "backward")
def interaction_backward(z: torch.Tensor, z_leaf: torch.Tensor) -> None:
    z.backward(z_leaf.grad)


@part("embedding", "backward")
def embedding_backward(pooled: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    torch.autograd.backward(pooled, [leaf.grad for leaf in leaves])


@part("bottom_mlp", "backward")
def bottom_mlp_backward(x: torch.Tensor, x_leaf: torch.Tensor) -> None:
    x.backward(x_leaf.grad)


@part("top_mlp", "update")
def top_mlp_update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@part("embedding", "update")
def embedding_update(optimizer: Update) -> None:
    optimizer.step()


@part("bottom_mlp", "update")
def bottom_mlp_update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
