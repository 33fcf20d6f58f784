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

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from dlrm_core.base.engines import engine
from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.dense import Cuts, DensePart
from dlrm_core.embeddings import attach, set_rate, without_compiler
from dlrm_core.model import DLRM, inputs_of
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_core.parts import part, run_part

R = TypeVar("R")


class Step:
    """The model and its optimisers, as every training step has them."""

    model: DLRM  # trained in place
    dense: DensePart  # its notices and its precision tell what it could not do
    # of each part with weights, in the order of their updates: optimisers of torch, or of the
    # embeddings what has a learning_rate
    optimizers: dict[str, Any]

    @property
    def embedding_optimizer(self) -> Any:
        return self.optimizers["embedding"]

    @property
    def dense_optimizers(self) -> list[torch.optim.Optimizer]:
        """What updates everything but the tables, in the model's order."""
        parts = ("bottom_mlp", "interaction", "top_mlp")
        return [self.optimizers[name] for name in parts if name in self.optimizers]

    def make_dense_optimizers(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        """Give each dense part with weights an optimiser of its own.

        So the time of an update is its part's. No optimiser here has state that this would split.
        """
        for piece in reversed(self.dense.pieces):
            weights = list(getattr(self.model, piece.component).parameters())
            if weights:
                self.optimizers[piece.component] = make(weights, self.model.device)

    def set_learning_rate(self, rate: float) -> None:
        """Learning rate of all updates from the next one on (schedules)."""
        for optimizer in self.optimizers.values():
            set_rate(optimizer, rate)

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)


class TrainingStep(Step):
    """Forward, backward and update of one batch.

    The loss makes a scalar of predictions (B, 1) and targets (B, 1).
    """

    def __init__(self, model: DLRM, loss: nn.Module, config: TrainingConfig) -> None:
        self.model = model
        self.dense = DensePart(model, loss, config)
        self.optimizers = {}
        tables = attach(model.embeddings, config)
        self._graph: Callable[[Batch], torch.Tensor] | None = None
        if config.cuda_graphs:
            graphs, backend = engine("CUDA graphs"), model.embeddings.backend
            self._graph, reason = graphs.step_graph(self.run, config, model.device, backend)
            if reason:
                self.dense.notices.append(f"training.cuda_graphs: true was ignored: {reason}")
        make = optimizer_of if self._graph is None else graphs.captured_optimizer
        self.make_dense_optimizers(functools.partial(make, config))
        self.optimizers["embedding"] = tables

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on a batch that is already on the model's device; its loss, detached."""
        return self._graph(batch) if self._graph is not None else self.run(batch)

    def run(self, batch: Batch) -> torch.Tensor:
        """The same, operation by operation, without a captured graph."""
        optimizer_update(self._drop_gradients)
        values, cuts = inputs_of(batch), Cuts()
        for piece in self.model.lookups:
            cuts.forward(piece, values)
        loss = self.dense(batch.dense, values["pooled"], batch.targets)
        if not self._unscale(values["pooled"]):
            return loss
        # CPU threads of autograd's own would take the work out of the part's function
        with torch.autograd.set_multithreading_enabled(False):
            for piece in reversed(self.model.lookups):
                cuts.backward(piece)
        for component, optimizer in self.optimizers.items():
            run_part(component, "update", optimizer.step)
        return loss

    def _unscale(self, leaves: list[torch.Tensor]) -> bool:
        """Undo fp16's loss scale; False if a gradient overflowed and the step is to be skipped."""
        precision = self.dense.precision
        if precision.scale == 1.0:
            return True
        arrived = [leaf.grad for leaf in (*leaves, *self.dense.weights)]
        gradients = [gradient for gradient in arrived if gradient is not None]

        def unscaled() -> bool:
            if precision.skips(precision.overflowed(gradients)):
                return False
            precision.unscale(gradients)
            return True

        return optimizer_update(unscaled)


def optimizer_of(
    config: TrainingConfig, weights: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of dense weights that belongs to ``training.optimizer``."""
    kind = OPTIMIZERS[config.optimizer]
    fused = (config.fused_optimizer and device.type in kind.fused_on) or None
    optimizer: Any = without_compiler(getattr(torch.optim, kind.dense))
    return optimizer(weights, lr=config.learning_rate, fused=fused)


@part("data", "forward")
def data_forward(batches: Iterator[Batch]) -> Batch:
    """Make the next batch, or wait for the prefetched one."""
    return next(batches)


@part("transfer", "forward")
def transfer_forward(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch from host memory to the device."""
    return batch.to(device)


@part("optimizer", "update")
def optimizer_update(work: Callable[[], R]) -> R:
    """What an optimiser does that is no update of weights: gradients dropped or unscaled."""
    return work()
