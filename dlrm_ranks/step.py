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

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_core import dense
from dlrm_core.base.machine import keep_freed_memory
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.model import DLRM, ClickLoss, Piece
from dlrm_core.parts import run_part
from dlrm_core.step import Step, optimizer_of, optimizer_update
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
    return replace(config, embedding_backend="torch", cuda_graphs=False), notices


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
    """Forward, backward and update of a rank's slice of a batch; its weights are not yet filled.

    Attributes:
        parameters: of the run, with what rank 0 chose in place of ``auto``.
        model: the MLPs and the interaction; its own tables are empty.
        dense: its ``notices`` say what has no effect on several ranks, or was fallen back to.
    """

    def __init__(self, parameters: Parameters, world: World, collectives: Collectives) -> None:
        parameters, chosen = resolve_together(parameters, world)
        config, notices = config_of_rank(parameters.training)
        keep_freed_memory()
        notices += chosen
        notices += dense.set_fp32_products(replace(parameters, training=config), world.device)
        self.parameters, self.ranks, self.collectives = parameters, world.size, collectives
        self.tables = ShardedTables(parameters, world, collectives)
        no_tables = functools.partial(EmbeddingTables, [], parameters.model.embedding_dim)
        model = self.model = DLRM(parameters.model, make_tables=no_tables).to(world.device)
        loss = ClickLoss.of(parameters.model).to(world.device)
        self.dense = dense.DensePart(model, loss, config)
        self.dense.notices = notices + self.tables.notices + self.dense.notices
        self.optimizers = {}
        self.make_dense_optimizers(functools.partial(optimizer_of, config))
        scale = self.dense.precision.scale
        self.scaled = scale != 1.0
        # the loss of all ranks, how many were asked to stop and, in fp16, how many overflowed
        last, numbers = self.dense.pieces[0].component, 3 if self.scaled else 2
        self.buckets = {
            component: Bucket(
                list(getattr(model, component).parameters()),
                collectives,
                scale,
                numbers if component == last else 0,
            )
            for component in self.optimizers
        }
        self._last = self.buckets[last]
        self.optimizers["embedding"] = self.tables

    def __call__(self, batch: LocalBatch, stop: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on a batch.

        Args:
            stop: whether this rank wants the run to end.

        Returns:
            the mean loss of the global batch, detached; how many ranks want the run to end.
        """
        optimizer_update(self._drop_gradients)
        sums, leaves, sent = self._look_up(batch)
        with self.dense.precision.autocast():
            work = self._in_micro_batches if self.dense.micro_batch else self._dense_part
            loss, gradient = work(batch, sent)
        numbers = [loss, loss.new_tensor(float(stop))]
        if self.scaled:
            numbers.append(optimizer_update(lambda: self._overflowed(gradient)))
        self._last.numbers.copy_(torch.stack(numbers))
        communication_backward(self._last.send)
        if self.scaled:
            communication_backward(self._last.receive)
            if self.dense.precision.skips(self._last.numbers[2] > 0):
                for bucket in self.buckets.values():
                    # what a skipped step has sent and will not use
                    communication_backward(bucket.receive)
                return self._result()
        gradients = [leaf.grad for leaf in leaves]
        with torch.autograd.set_multithreading_enabled(False):
            # inside the kernels, the update of the tables that one rank has
            run_part("embedding", "backward", lambda: torch.autograd.backward(sums, gradients))
        run_part("embedding", "update", self.tables.update_replicated)
        for component, bucket in self.buckets.items():
            communication_backward(bucket.receive)
            run_part(component, "update", self.optimizers[component].step)
        return self._result()

    def _look_up(self, batch: LocalBatch) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        """Sums of this rank's rows, the leaves cut from them, and their exchange under way."""
        tables = self.tables
        context, received = communication_forward(lambda: tables.send_indices(batch.lookups))
        sums, leaves = run_part("embedding", "forward", lambda: tables.look_up(context, received))
        sent = communication_forward(lambda: tables.send_pooled(context, leaves))
        return sums, leaves, sent

    def _result(self) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._last.numbers.clone()
        return numbers[0], numbers[1]

    def _overflowed(self, pooled_gradient: torch.Tensor) -> torch.Tensor:
        """Whether a gradient of this rank's samples is infinite or no number: 0 or 1."""
        arrived = [weight.grad for weight in self.dense.weights]
        gradients = [pooled_gradient, *(gradient for gradient in arrived if gradient is not None)]
        return self.dense.precision.overflowed(gradients).float()

    def _dense_part(self, batch: LocalBatch, sent: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, this rank's share of it, and the gradient (b, T d) of the pooled vectors."""
        exchanges = _Exchanges(self, sent)
        with self.collectives.about("pooled gradients"):
            loss = self.dense.rows(
                {"dense": batch.dense}, batch.targets, 1.0 / self.ranks, exchanges
            )
        return loss.float() / self.ranks, exchanges.gradient()

    def _in_micro_batches(self, batch: LocalBatch, sent: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`_dense_part`, some rows at a time: no exchange overlaps with them."""
        dense_part = self.dense
        pooled = communication_forward(lambda: self.tables.receive_pooled(sent))
        pooled_leaf = dense.leaf_of(pooled)
        vectors = self.tables.by_table(pooled_leaf)
        leaves = dense.leaf_of(vectors)
        loss = dense_part(batch.dense, leaves, batch.targets, 1.0 / self.ranks)
        for bucket in self.buckets.values():
            if bucket is not self._last:
                communication_backward(bucket.send)
        with dense_part.precision.full(), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(vectors, [leaf.grad for leaf in leaves])
            gradient = pooled_leaf.grad
            assert gradient is not None
            if self.scaled:
                optimizer_update(lambda: dense_part.precision.unscale([gradient]))
            with self.collectives.about("pooled gradients"):
                communication_backward(lambda: pooled.backward(gradient))
        return loss.float() / self.ranks, gradient

    def predict(self, batch: LocalBatch) -> torch.Tensor:
        """Click probability (b, 1) float32 of this rank's samples; all ranks must ask.

        Ranks may have different numbers of samples, or none, where all have as many bags.
        """
        with torch.no_grad():
            _, _, sent = self._look_up(batch)
            if not batch.size:
                pooled = communication_forward(lambda: self.tables.receive_pooled(sent))
                return pooled.new_empty(0, 1)
            exchanges = _Exchanges(self, sent, batch.size)
            with self.dense.precision.autocast():
                return dense.predict_rows(
                    self.model.dense_pieces, {"dense": batch.dense}, exchanges
                )


class _Exchanges(dense.PieceHooks):
    """What is exchanged beside the dense part: pooled vectors, their and the weights' gradients.

    Args:
        sent: pooled vectors under way.
        size: samples of theirs that count.
    """

    def __init__(self, step: DistributedStep, sent: Any, size: int | None = None) -> None:
        self._step, self._sent, self._size = step, sent, size
        self._pooled = self._leaf = torch.empty(0)

    def gradient(self) -> torch.Tensor:
        """The gradient (b, T d) of the pooled vectors."""
        assert self._leaf.grad is not None
        return self._leaf.grad

    def before(self, piece: Piece, values: dense.Values) -> None:
        """Wait for the pooled vectors where a piece takes them."""
        if "pooled" not in piece.takes or "pooled" in values:
            return
        tables = self._step.tables
        self._pooled = communication_forward(lambda: tables.receive_pooled(self._sent))
        self._leaf = dense.leaf_of(self._pooled)
        rows = self._leaf if self._size is None else self._leaf[: self._size]
        values["pooled"] = tables.by_table(rows)

    def beside(self, piece: Piece) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """The first piece's backward runs while pooled gradients are under way.

        Autograd runs what was done last first, and that piece's forward lay between the sending
        and the receiving of pooled vectors.
        """
        if piece != self._step.dense.pieces[0]:
            return ()
        return [(self._pooled, self.gradient())]

    def after(self, piece: Piece) -> None:
        """Send the gradients of a piece's weights; those of the first go with the loss."""
        step = self._step
        if piece == step.dense.pieces[0]:
            return
        if piece.component in step.buckets:
            communication_backward(step.buckets[piece.component].send)
        if "pooled" in piece.takes and step.scaled:
            # in fp32, by who has the samples; what is infinite stays so
            optimizer_update(lambda: step.dense.precision.unscale([self.gradient()]))


def resolve_together(parameters: Parameters, world: World) -> tuple[Parameters, list[str]]:
    """The parameters with what rank 0 chose in place of an ``auto`` of the dense part; notices.

    All ranks time the candidates at once, as they will train; every rank must ask.
    """
    found, notices = dense.resolve_dense(parameters, world.device)
    if found is parameters:
        return parameters, []
    leaves = {leaf: getattr(found.training, leaf) for leaf in dense.DENSE_CHOICE}
    leaves, notices = gathered(world, [leaves, notices])[0]
    return parameters.with_training(**leaves), notices


def communication_forward(work: Callable[[], Any]) -> Any:
    """Drive an exchange, or wait for it."""
    return run_part("communication", "forward", work)


def communication_backward(work: Callable[[], Any]) -> Any:
    """Drive an exchange of gradients, or wait for it."""
    return run_part("communication", "backward", work)
