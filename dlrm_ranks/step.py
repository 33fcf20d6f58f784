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
    embedding backward and update              gradients of the dense part (fp16: waits first)
    communication backward: waits for them
    updates of the MLPs and the cross layers

In bottom MLP's backward the exchange of pooled gradients begins and is waited for as well:
autograd runs it in one go with the MLP, first the sending, last the receiving. With
``micro_batch`` all pooled vectors come before the first rows and go after the last. The loss is
divided by the number of ranks before backward, so gradients are summed everywhere. With fp16
each rank looks for overflow in the gradients of its own samples, and their number goes with the
loss: tables change inside embedding backward, so all ranks must know before it begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dlrm_core.base.machine import use_memory
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.dense import (
    DENSE_CHOICE,
    DensePart,
    bottom_mlp_forward,
    interaction_backward,
    interaction_forward,
    leaf_of,
    loss_backward,
    loss_forward,
    resolve_dense,
    top_mlp_backward,
    top_mlp_forward,
)
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.model import DLRM, ClickLoss, fill_dense_like_facebook, fill_dense_with_torch
from dlrm_core.parts import part
from dlrm_core.precision import set_fp32_products
from dlrm_core.step import (
    Step,
    bottom_mlp_update,
    interaction_update,
    optimizer_of,
    optimizer_update,
    top_mlp_update,
)
from dlrm_ranks.collectives import Collectives
from dlrm_ranks.tables import LocalBatch, ShardedTables
from dlrm_ranks.world import World, gathered


def config_of_rank(config: TrainingConfig) -> tuple[TrainingConfig, list[str]]:
    """The settings of a rank, and a notice for each that has no effect on several ranks."""
    notices = []
    if config.cuda_graphs:
        notices.append(
            "training.cuda_graphs: true has no effect on several ranks: exchanges are not captured"
        )
    if config.embedding_update != "race_free":
        notices.append(
            f"training.embedding_update: {config.embedding_update} has no effect on several "
            "ranks: their tables are updated race-free"
        )
    return replace(
        config, embedding_backend="torch", embedding_update="race_free", cuda_graphs=False
    ), notices


class Bucket:
    """Gradients of some weights that are summed over the ranks in one all-reduce.

    Args:
        weights: of one part.
        scale: what the gradients are divided by when they have arrived.
        numbers: how many float32 numbers are summed along.
    """

    def __init__(
        self,
        weights: list[nn.Parameter],
        collectives: Collectives,
        scale: float = 1.0,
        numbers: int = 0,
    ) -> None:
        self._weights = weights
        self._scale = scale
        self._collectives = collectives
        size = sum(weight.numel() for weight in weights)
        self._flat = torch.empty(size + numbers, device=weights[0].device)
        self._sums = self._flat[:size]
        views = self._sums.split([weight.numel() for weight in weights])
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
        """Wait for the sums; they are the weights' ``grad`` then. Later calls do nothing."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._scale != 1.0:
            self._sums.mul_(1.0 / self._scale)
        for weight, view in zip(self._weights, self._views, strict=True):
            weight.grad = view


class DistributedStep(Step):
    """Forward, backward and update of a rank's slice of a batch.

    Args:
        model: the MLPs and the interaction; its own tables are empty.
        config: a rank's (:func:`config_of_rank`).
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
        self.model = model
        self.tables = self.embedding_optimizer = tables
        self.dense = DensePart(model, loss, config)
        self._ranks = ranks
        self._collectives = collectives
        device = model.top_mlp.linears[0].weight.device
        self.bottom_optimizer = optimizer_of(config, model.bottom_mlp.parameters(), device)
        self.top_optimizer = optimizer_of(config, model.top_mlp.parameters(), device)
        scale = self.dense.precision.scale
        self._top = Bucket(list(model.top_mlp.parameters()), collectives, scale)
        own = list(model.interaction.parameters())
        self.interaction_optimizer = optimizer_of(config, own, device) if own else None
        self._interaction = Bucket(own, collectives, scale) if own else None
        self._scaled = scale != 1.0
        # the loss of all ranks, how many were asked to stop and, in fp16, how many overflowed
        numbers = 3 if self._scaled else 2
        self._bottom = Bucket(list(model.bottom_mlp.parameters()), collectives, scale, numbers)

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
            work = self._in_micro_batches if self.dense.micro_batch else self._dense_part
            loss, gradient = work(batch, sent)
        numbers = [loss, loss.new_tensor(float(stop))]
        if self._scaled:
            numbers.append(optimizer_update(lambda: self._overflowed(gradient)))
        self._bottom.numbers.copy_(torch.stack(numbers))
        communication_backward(self._bottom.send)
        if self._scaled:
            communication_backward(self._bottom.receive)
            if self.dense.precision.skips(self._bottom.numbers[2] > 0):
                self._receive_rest()
                return self._result()
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
        return self._result()

    def _result(self) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._bottom.numbers.clone()
        return numbers[0], numbers[1]

    def _overflowed(self, pooled_gradient: torch.Tensor) -> torch.Tensor:
        """Whether a gradient of this rank's samples is infinite or no number: 0 or 1."""
        found = [weight.grad for weight in self.dense.weights]
        gradients = [pooled_gradient, *(gradient for gradient in found if gradient is not None)]
        return self.dense.precision.overflowed(gradients).float()

    def _receive_rest(self) -> None:
        """Wait for the buckets that a skipped step has sent and will not use."""
        communication_backward(self._top.receive)
        if self._interaction is not None:
            communication_backward(self._interaction.receive)

    def _dense_part(self, batch: LocalBatch, sent: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, this rank's share of it, and the gradient (b, T d) of the pooled vectors."""
        dense = self.dense
        x, x_leaf = bottom_mlp_forward(dense.bottom_mlp, batch.dense)
        pooled = communication_forward(lambda: self.tables.receive_pooled(sent))
        pooled_leaf = leaf_of(pooled)
        vectors = self.tables.by_table(pooled_leaf)
        z, z_leaf = interaction_forward(dense.interaction, x_leaf, vectors)
        p, p_leaf = top_mlp_forward(dense.top_mlp, z_leaf)
        with dense.precision.full(), torch.autograd.set_multithreading_enabled(False):
            loss = loss_forward(dense.loss, p_leaf, batch.targets)
            loss_backward(loss, dense.precision.scale / self._ranks)
            top_mlp_backward(p, p_leaf)
            communication_backward(self._top.send)
            interaction_backward(z, z_leaf)
            if self._interaction is not None:
                communication_backward(self._interaction.send)
            gradient = pooled_leaf.grad
            assert gradient is not None
            if self._scaled:
                # in fp32, by who has the samples; what is infinite stays so
                optimizer_update(lambda: dense.precision.unscale([gradient]))
            with self._collectives.about("pooled gradients"):
                bottom_mlp_backward(x, x_leaf, pooled, gradient)
        return loss.detach().float() / self._ranks, gradient

    def _in_micro_batches(self, batch: LocalBatch, sent: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`_dense_part`, some rows at a time: no exchange overlaps with them."""
        dense = self.dense
        pooled = communication_forward(lambda: self.tables.receive_pooled(sent))
        pooled_leaf = leaf_of(pooled)
        vectors = self.tables.by_table(pooled_leaf)
        leaves = [leaf_of(vector) for vector in vectors]
        loss = dense(batch.dense, leaves, batch.targets, 1.0 / self._ranks)
        communication_backward(self._top.send)
        if self._interaction is not None:
            communication_backward(self._interaction.send)
        with dense.precision.full(), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(vectors, [leaf.grad for leaf in leaves])
            gradient = pooled_leaf.grad
            assert gradient is not None
            if self._scaled:
                optimizer_update(lambda: dense.precision.unscale([gradient]))
            with self._collectives.about("pooled gradients"):
                communication_backward(lambda: pooled.backward(gradient))
        return loss.float() / self._ranks, gradient

    def predict(self, batch: LocalBatch) -> torch.Tensor:
        """Click probability (b, 1) float32 of this rank's samples; all ranks must ask.

        Ranks may have different numbers of samples, or none, where all have as many bags.
        """
        with torch.no_grad():
            context, received = communication_forward(
                lambda: self.tables.send_indices(batch.lookups)
            )
            _, leaves = embedding_forward(self.tables, context, received)
            sent = communication_forward(lambda: self.tables.send_pooled(context, leaves))
            with self.dense.precision.autocast():
                x, _ = bottom_mlp_forward(self.model.bottom_mlp, batch.dense)
                pooled = communication_forward(lambda: self.tables.receive_pooled(sent))
                if not batch.size:
                    return pooled.new_empty(0, 1)
                vectors = self.tables.by_table(pooled[: batch.size])
                z, _ = interaction_forward(self.model.interaction, x, vectors)
                return top_mlp_forward(self.model.top_mlp, z)[0]


def resolve_together(parameters: Parameters, world: World) -> tuple[Parameters, list[str]]:
    """The parameters with what rank 0 chose in place of an ``auto`` of the dense part; notices.

    All ranks time the candidates at once, as they will train; every rank must ask.
    """
    found, notices = resolve_dense(parameters, world.device)
    if found is parameters:
        return parameters, []
    leaves = {leaf: getattr(found.training, leaf) for leaf in DENSE_CHOICE}
    leaves, notices = gathered(world, [leaves, notices])[0]
    return parameters.with_training(**leaves), notices


def make_step(parameters: Parameters, world: World, collectives: Collectives) -> DistributedStep:
    """A rank's part of the model; the weights' memory is there, not yet filled.

    ``step.dense.notices`` say what has no effect on several ranks, or was fallen back to.
    """
    model, dim = parameters.model, parameters.model.embedding_dim
    parameters, chosen = resolve_together(parameters, world)
    config, notices = config_of_rank(parameters.training)
    notices += chosen + use_memory(config)
    notices += set_fp32_products(config, model, world.device)
    tables = ShardedTables(parameters, world, collectives)
    step = DistributedStep(
        # its tables are elsewhere
        DLRM(model, make_tables=lambda: EmbeddingTables([], dim)).to(world.device),
        tables,
        ClickLoss(model.loss, model.loss_weights).to(world.device),
        config,
        world.size,
        collectives,
    )
    step.dense.notices = notices + tables.notices + step.dense.notices
    return step


def fill(step: DistributedStep, parameters: Parameters) -> None:
    """Fill the weights with the initial ones that one process has."""
    seed = parameters.training.seed
    if parameters.model.init == "facebook":
        random = np.random.RandomState(seed)
        step.tables.fill_like_facebook(random)
        fill_dense_like_facebook(step.model, random)
        return
    device = step.model.top_mlp.linears[0].weight.device
    generator = torch.Generator(device).manual_seed(seed)
    step.tables.fill_with_torch(generator)
    fill_dense_with_torch(step.model, generator)


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
    x: torch.Tensor, x_leaf: torch.Tensor, pooled: torch.Tensor, pooled_gradient: torch.Tensor
) -> None:
    """The MLP between the sending and the receiving of pooled gradients: autograd runs what
    was done last first, and the MLP's forward lay between their counterparts."""
    torch.autograd.backward([pooled, x], [pooled_gradient, x_leaf.grad])


@part("embedding", "backward")
def embedding_backward(sums: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """Gradients and, inside the kernels, the update of the tables that one rank has."""
    torch.autograd.backward(sums, [leaf.grad for leaf in leaves])


@part("embedding", "update")
def embedding_update(tables: ShardedTables) -> None:
    """Update the tables that every rank has."""
    tables.update_replicated()
