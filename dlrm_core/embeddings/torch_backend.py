"""torch's own embeddings and optimisers: the oracle that every other back end is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dlrm_core.embeddings.tables import EmbeddingTables

EPSILON = 1e-10
"""Added to the root in both Adagrads: torch's default, and facebook's for row-wise Adagrad."""


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row instead of one a weight.

    For a row with gradient g of width d (the sum over its lookups):
    s += mean(g^2); w -= rate g / (sqrt(s) + eps), as facebookresearch/dlrm's
    ``RWSAdagrad`` and FBGEMM's EXACT_ROWWISE_ADAGRAD define it. Gradients are sparse.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, eps: float = EPSILON) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = weight.new_zeros(weight.shape[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every row that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient = weight.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                total = self.state[weight]["sum"]
                total.index_add_(0, rows, values.square().mean(dim=1))
                scale = group["lr"] / (total[rows].sqrt() + group["eps"])
                weight.index_add_(0, rows, values * scale[:, None], alpha=-1.0)


def torch_optimizer(
    tables: EmbeddingTables, optimizer: str, learning_rate: float
) -> torch.optim.Optimizer:
    """torch's optimiser of the tables, for their sparse gradients."""
    weights = tables.weights
    if optimizer == "rowwise_adagrad":
        return RowwiseAdagrad(weights, learning_rate)
    # foreach and fused variants refuse sparse gradients
    if optimizer == "adagrad":
        return torch.optim.Adagrad(weights, learning_rate, eps=EPSILON, foreach=False)
    if optimizer == "adam":
        return torch.optim.SparseAdam(weights, learning_rate)
    return torch.optim.SGD(weights, learning_rate, foreach=False)
