"""One training step, cut into the parts that profilers are to see.

``loss.backward()`` runs all of the backward pass as one block, on CUDA in
another thread and without Python frames, so a profiler cannot say whose time it
was. Here the graph is cut where one part hands over to the next: the next part
works on a detached leaf, and backward runs part by part, each with the gradient
that arrived at its leaf. The operations and their order are those of one
``loss.backward()``, so the gradients are bit-identical (tested); each call sits
in a function named after its part and phase (see :mod:`dlrm_core.parts`). The
dense part's are in :mod:`dlrm_core.dense`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from dlrm_core.base.engines import engine
from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.dense import DensePart, leaf_of
from dlrm_core.embeddings import Update, attach, without_compiler
from dlrm_core.model import DLRM
from dlrm_core.parts import part

R = TypeVar("R")


class Step:
    """The model and its optimisers, as every training step has them.

    Attributes:
        model: trained in place.
        dense: the dense part; its ``notices`` and ``precision`` tell what it could not do.
        embedding_optimizer: updates the tables: an optimiser of torch, or what has a
            ``learning_rate``.
        interaction_optimizer: None where the interaction has no weights.
    """

    model: DLRM
    dense: DensePart
    bottom_optimizer: torch.optim.Optimizer
    top_optimizer: torch.optim.Optimizer
    interaction_optimizer: torch.optim.Optimizer | None
    embedding_optimizer: Any

    @property
    def dense_optimizers(self) -> list[torch.optim.Optimizer]:
        """What updates everything but the tables."""
        each = (self.bottom_optimizer, self.interaction_optimizer, self.top_optimizer)
        return [optimizer for optimizer in each if optimizer is not None]

    @property
    def _optimizers(self) -> list[Any]:
        return [*self.dense_optimizers, self.embedding_optimizer]

    def set_learning_rate(self, rate: float) -> None:
        """Learning rate of all updates from the next one on (schedules)."""
        for optimizer in self._optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                optimizer.learning_rate = rate
                continue
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)  # where captured graphs read it
                else:
                    group["lr"] = rate

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)


class TrainingStep(Step):
    """Forward, backward and update of one batch.

    Args:
        loss: predictions (B, 1), targets (B, 1) to a scalar.
        config: optimiser settings, back end of the embeddings, options of the dense part.
    """

    def __init__(self, model: DLRM, loss: nn.Module, config: TrainingConfig) -> None:
        self.model = model
        self.dense = DensePart(model, loss, config)
        self.embedding_optimizer = attach(model.embeddings, config)
        # of the dense part: tables may lie elsewhere
        device = model.top_mlp.linears[0].weight.device
        backend = model.embeddings.backend
        self._graph: Callable[[Batch], torch.Tensor] | None = None
        if config.cuda_graphs:
            graphs = engine("CUDA graphs")
            self._graph, reason = graphs.step_graph(self.run, config, device, backend)
            if reason:
                self.dense.notices.append(f"training.cuda_graphs: true was ignored: {reason}")
        make = optimizer_of if self._graph is None else graphs.captured_optimizer
        # A part's weights are updated by its own optimiser, so that the time of
        # the update is that part's. No optimiser here has state that this would split.
        self.bottom_optimizer = make(config, model.bottom_mlp.parameters(), device)
        self.top_optimizer = make(config, model.top_mlp.parameters(), device)
        own = list(model.interaction.parameters())
        self.interaction_optimizer = make(config, own, device) if own else None

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on a batch that is already on the model's device; its loss, detached."""
        return self._graph(batch) if self._graph is not None else self.run(batch)

    def run(self, batch: Batch) -> torch.Tensor:
        """The same, operation by operation, without a captured graph."""
        optimizer_update(self._drop_gradients)
        pooled, leaves = embedding_forward(self.model, batch)
        loss = self.dense(batch.dense, leaves, batch.targets)
        if not self._unscale(leaves):
            return loss
        # CPU threads of autograd's own would take the work out of the function below
        with torch.autograd.set_multithreading_enabled(False):
            embedding_backward(pooled, leaves)
        top_mlp_update(self.top_optimizer)
        if self.interaction_optimizer is not None:
            interaction_update(self.interaction_optimizer)
        embedding_update(self.embedding_optimizer)
        bottom_mlp_update(self.bottom_optimizer)
        return loss

    def _unscale(self, leaves: list[torch.Tensor]) -> bool:
        """Undo fp16's loss scale; False if a gradient overflowed and the step is to be skipped."""
        if self.dense.precision.scale == 1.0:
            return True
        found = [leaf.grad for leaf in (*leaves, *self.dense.weights)]
        gradients = [gradient for gradient in found if gradient is not None]
        return optimizer_update(lambda: self._unscaled(gradients))

    def _unscaled(self, gradients: list[torch.Tensor]) -> bool:
        precision = self.dense.precision
        if precision.skips(precision.overflowed(gradients)):
            return False
        precision.unscale(gradients)
        return True


def optimizer_of(
    config: TrainingConfig, weights: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of dense weights that belongs to ``training.optimizer``."""
    fused = config.fused_optimizer or None
    if config.optimizer == "sgd":
        return without_compiler(torch.optim.SGD)(weights, lr=config.learning_rate, fused=fused)
    if config.optimizer == "adam":
        return without_compiler(torch.optim.Adam)(weights, lr=config.learning_rate, fused=fused)
    # row-wise state makes sense for tables only: their dense companion is plain Adagrad,
    # which torch fuses on the CPU only
    fused = fused if device.type == "cpu" else None
    return without_compiler(torch.optim.Adagrad)(weights, lr=config.learning_rate, fused=fused)


@part("data", "forward")
def data_forward(batches: Iterator[Batch]) -> Batch:
    """Make the next batch, or wait for the prefetched one."""
    return next(batches)


@part("transfer", "forward")
def transfer_forward(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch from host memory to the device."""
    return batch.to(device)


@part("embedding", "forward")
def embedding_forward(model: DLRM, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pooled vectors of each table, and the leaves that the dense part starts from."""
    pooled = model.embeddings(batch)
    return pooled, [leaf_of(vector) for vector in pooled]


@part("optimizer", "update")
def optimizer_update(work: Callable[[], R]) -> R:
    """What an optimiser does that is no update of weights: gradients dropped or unscaled."""
    return work()


@part("embedding", "backward")
def embedding_backward(pooled: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    torch.autograd.backward(pooled, [leaf.grad for leaf in leaves])


@part("top_mlp", "update")
def top_mlp_update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@part("interaction", "update")
def interaction_update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@part("embedding", "update")
def embedding_update(optimizer: Update) -> None:
    optimizer.step()


@part("bottom_mlp", "update")
def bottom_mlp_update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
