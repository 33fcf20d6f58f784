"""One training step on several ranks, in an order that hides exchanges behind work.

::

    rank's thread                              under way meanwhile
    communication forward: indices             (nothing)
    embedding forward: sums for all samples
    communication forward: sums are sent
    bottom MLP forward                         pooled vectors
    communication forward: waits for them
    interaction, top MLP, loss; their backward
    top MLP's gradients are sent
    interaction backward                       top MLP's gradients
    gradients of its cross layers are sent
    bottom MLP backward                        these, pooled gradients
    bottom MLP's gradients are sent, the loss with them
    embedding backward and update              gradients of the dense part
    communication backward: waits for them
    updates of the MLPs and the cross layers

In bottom MLP's backward the exchange of pooled gradients begins and is waited for as well:
autograd runs it in one go with the MLP, first the sending, last the receiving. The loss is
divided by the number of ranks before backward, so gradients are summed everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_core.config import TrainingConfig
from dlrm_core.dense import (
    DensePart,
    bottom_mlp_forward,
    interaction_backward,
    interaction_forward,
    leaf_of,
    loss_backward,
    loss_forward,
    top_mlp_backward,
    top_mlp_forward,
)
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.tables import LocalBatch, ShardedTables
from dlrm_core.model import DLRM
from dlrm_core.parts import part
from dlrm_core.step import (
    Step,
    bottom_mlp_update,
    interaction_update,
    optimizer_of,
    optimizer_update,
    top_mlp_update,
)


def config_of_rank(config: TrainingConfig) -> tuple[TrainingConfig, list[str]]:
    """The settings of a rank, and a notice for each that has no effect on several ranks."""
    notices = []
    if config.dense_backend == "fused":
        notices.append(
            "training.dense_backend: fused has no effect on several ranks, torch does the dense "
            "part: exchanges run between its parts"
        )
    if config.cuda_graphs:
        notices.append(
            "training.cuda_graphs: true has no effect on several ranks: exchanges are not captured"
        )
    if config.embedding_update != "race_free":
        notices.append(
            f"training.embedding_update: {config.embedding_update} has no effect on several "
            "ranks: FBGEMM updates the tables, race-free"
        )
    # numbers made of bf16 ones are the fused dense part's
    matmul = "default" if config.fp32_matmul.startswith("bf16") else config.fp32_matmul
    return replace(
        config,
        embedding_backend="torch",
        embedding_update="race_free",
        dense_backend="torch",
        fp32_matmul=matmul,
        cuda_graphs=False,
    ), notices


class Bucket:
    """Gradients of some weights that are summed over the ranks in one all-reduce.

    Args:
        weights: of one part.
        numbers: how many float32 numbers are summed along.
    """

    def __init__(
        self,
        weights: list[nn.Parameter],
        collectives: Collectives,
        numbers: int = 0,
    ) -> None:
        self._weights = weights
        self._collectives = collectives
        size = sum(weight.numel() for weight in weights)
        self._flat = torch.empty(size + numbers, device=weights[0].device)
        views = self._flat[:size].split([weight.numel() for weight in weights])
        self._views = [v.view_as(weight) for v, weight in zip(views, weights, strict=True)]
        self.numbers = self._flat[size:]
        self._work: Any = None

    def send(self) -> None:
        """Begin to sum what the weights' ``grad`` and ``numbers`` hold."""
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        torch._foreach_copy_(self._views, gradients)
        with self._collectives.about("dense gradients"):
            self._work = dist.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        """Wait for the sums; they are the weights' ``grad`` then."""
        self._work.wait()
        self._work = None
        for weight, view in zip(self._weights, self._views, strict=True):
            weight.grad = view


class DistributedStep(Step):
    """Forward, backward and update of a rank's slice of a batch.

    Args:
        model: the MLPs and the interaction; its own tables are empty.
        ranks: how many the run has.
    """

    def __init__(
        self,
        model: DLRM,
        tables: ShardedTables,
        loss: nn.Module,
        config: TrainingConfig,
        ranks: int,
        collectives: Collectives,
    ) -> None:
        config, _ = config_of_rank(config)
        self.model = model
        self.tables = self.embedding_optimizer = tables
        self.dense = DensePart(model, loss, config)
        self._ranks = ranks
        self._collectives = collectives
        device = model.top_mlp.linears[0].weight.device
        self.bottom_optimizer = optimizer_of(config, model.bottom_mlp.parameters(), device)
        self.top_optimizer = optimizer_of(config, model.top_mlp.parameters(), device)
        self._top = Bucket(list(model.top_mlp.parameters()), collectives)
        own = list(model.interaction.parameters())
        self.interaction_optimizer = optimizer_of(config, own, device) if own else None
        self._interaction = Bucket(own, collectives) if own else None
        # the loss of all ranks, and how many of them were asked to stop
        self._bottom = Bucket(list(model.bottom_mlp.parameters()), collectives, numbers=2)

    def __call__(self, batch: LocalBatch, stop: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on a batch.

        Args:
            stop: whether this rank wants the run to end.

        Returns:
            the mean loss of the global batch, detached; how many ranks want the run to end.
        """
        optimizer_update(self._drop_gradients)
        context, received = communication_forward(lambda: self.tables.send_indices(batch.lookups))
        sums, leaves = embedding_forward(self.tables, context, received)
        sent = communication_forward(lambda: self.tables.send_pooled(context, leaves))
        with self.dense.precision.autocast():
            loss = self._dense_part(batch, sent)
        self._bottom.numbers.copy_(torch.stack([loss, loss.new_tensor(float(stop))]))
        communication_backward(self._bottom.send)
        with torch.autograd.set_multithreading_enabled(False):
            embedding_backward(sums, leaves)
        embedding_update(self.tables)
        communication_backward(self._top.receive)
        top_mlp_update(self.top_optimizer)
        if self._interaction is not None and self.interaction_optimizer is not None:
            communication_backward(self._interaction.receive)
            interaction_update(self.interaction_optimizer)
        communication_backward(self._bottom.receive)
        bottom_mlp_update(self.bottom_optimizer)
        numbers = self._bottom.numbers.clone()
        return numbers[0], numbers[1]

    def _dense_part(self, batch: LocalBatch, sent: Any) -> torch.Tensor:
        dense = self.dense
        x, x_leaf = bottom_mlp_forward(dense.bottom_mlp, batch.dense)
        pooled = communication_forward(lambda: self.tables.receive_pooled(sent))
        pooled_leaf = leaf_of(pooled)
        vectors = self.tables.by_table(pooled_leaf)
        z, z_leaf = interaction_forward(dense.interaction, x_leaf, vectors)
        p, p_leaf = top_mlp_forward(dense.top_mlp, z_leaf)
        with dense.precision.full(), torch.autograd.set_multithreading_enabled(False):
            loss = loss_forward(dense.loss, p_leaf, batch.targets)
            loss_backward(loss, 1.0 / self._ranks)
            top_mlp_backward(p, p_leaf)
            communication_backward(self._top.send)
            interaction_backward(z, z_leaf)
            if self._interaction is not None:
                communication_backward(self._interaction.send)
            with self._collectives.about("pooled gradients"):
                bottom_mlp_backward(x, x_leaf, pooled, pooled_leaf)
        return loss.detach().float() / self._ranks

    def predict(self, batch: LocalBatch) -> torch.Tensor:
        """Click probability (b, 1) float32 of this rank's samples; all ranks must ask."""
        with torch.no_grad():
            context, received = communication_forward(
                lambda: self.tables.send_indices(batch.lookups)
            )
            _, leaves = embedding_forward(self.tables, context, received)
            sent = communication_forward(lambda: self.tables.send_pooled(context, leaves))
            with self.dense.precision.autocast():
                x, _ = bottom_mlp_forward(self.model.bottom_mlp, batch.dense)
                pooled = communication_forward(lambda: self.tables.receive_pooled(sent))
                vectors = self.tables.by_table(pooled)
                z, _ = interaction_forward(self.model.interaction, x, vectors)
                return top_mlp_forward(self.model.top_mlp, z)[0]


@part("communication", "forward")
def communication_forward(work: Any) -> Any:
    """Drive an exchange, or wait for it."""
    return work()


@part("communication", "backward")
def communication_backward(work: Any) -> Any:
    """Drive an exchange of gradients, or wait for it."""
    return work()


@part("embedding", "forward")
def embedding_forward(
    tables: ShardedTables, context: Any, received: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return tables.look_up(context, received)


@part("bottom_mlp", "backward")
def bottom_mlp_backward(
    x: torch.Tensor, x_leaf: torch.Tensor, pooled: torch.Tensor, pooled_leaf: torch.Tensor
) -> None:
    """The MLP between the sending and the receiving of pooled gradients: autograd runs what
    was done last first, and the MLP's forward lay between their counterparts."""
    torch.autograd.backward([pooled, x], [pooled_leaf.grad, x_leaf.grad])


@part("embedding", "backward")
def embedding_backward(sums: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """Gradients and, inside the kernels, the update of the tables that one rank has."""
    torch.autograd.backward(sums, [leaf.grad for leaf in leaves])


@part("embedding", "update")
def embedding_update(tables: ShardedTables) -> None:
    """Update the tables that every rank has."""
    tables.update_replicated()
