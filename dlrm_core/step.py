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

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.dense import DensePart, leaf_of
from dlrm_core.engines import Update, attach
from dlrm_core.model import DLRM
from dlrm_core.parts import part
from dlrm_kernels.cuda_graphs import CudaRecorder, DeviceAdagrad, StepGraph, why_not_graphs
from dlrm_kernels.embeddings.fused_gpu import FusedGpu

R = TypeVar("R")


class TrainingStep:
    """Forward, backward and update of one batch.

    Args:
        model: trained in place.
        loss: predictions (B, 1), targets (B, 1) to a scalar.
        config: optimiser settings, back end of the embeddings, options of the dense part.

    Attributes:
        dense: the dense part; its ``notices`` and ``precision`` tell what it could not do.
    """

    def __init__(self, model: DLRM, loss: nn.Module, config: TrainingConfig) -> None:
        self.model = model
        self.dense = DensePart(model, loss, config)
        self.embedding_optimizer = attach(model.embeddings, config)
        # of the dense part: tables may lie elsewhere
        device = model.top_mlp.linears[0].weight.device
        backend = model.embeddings.backend
        self._graph: StepGraph | None = None
        if config.cuda_graphs:
            reason = why_not_graphs(config, device, backend)
            if isinstance(backend, FusedGpu) and not reason:
                self._graph = StepGraph(self.run, backend, CudaRecorder(device))
            else:
                self.dense.notices.append(f"training.cuda_graphs: true was ignored: {reason}")
        # A part's weights are updated by its own optimiser, so that the time of
        # the update is that part's. No optimiser here has state that this would split.
        kind, settings = optimizer_of(config, device, captured=self._graph is not None)
        self.bottom_optimizer = kind(model.bottom_mlp.parameters(), **settings())
        self.top_optimizer = kind(model.top_mlp.parameters(), **settings())

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
        embedding_update(self.embedding_optimizer)
        bottom_mlp_update(self.bottom_optimizer)
        return loss

    def set_learning_rate(self, rate: float) -> None:
        """Learning rate of all updates from the next one on (schedules)."""
        every: tuple[Any, ...] = (
            self.bottom_optimizer,
            self.top_optimizer,
            self.embedding_optimizer,
        )
        for optimizer in every:
            if isinstance(optimizer, torch.optim.Optimizer):
                for group in optimizer.param_groups:
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(rate)  # where captured graphs read it
                    else:
                        group["lr"] = rate
            else:
                optimizer.learning_rate = rate

    def _drop_gradients(self) -> None:
        for optimizer in (self.top_optimizer, self.embedding_optimizer, self.bottom_optimizer):
            optimizer.zero_grad(set_to_none=True)

    def _unscale(self, leaves: list[torch.Tensor]) -> bool:
        """Undo fp16's loss scale; False if a gradient overflowed and the step is to be skipped."""
        if self.dense.precision.scale == 1.0:
            return True
        found = [leaf.grad for leaf in (*leaves, *self.dense.weights)]
        gradients = [gradient for gradient in found if gradient is not None]
        return optimizer_update(lambda: self.dense.precision.unscale(gradients))


def optimizer_of(
    config: TrainingConfig, device: torch.device, captured: bool
) -> tuple[type[torch.optim.Optimizer], Callable[[], dict[str, Any]]]:
    """Optimiser of the dense weights, and what makes its settings.

    Those that are to be captured in a graph read their learning rate on the device.
    """
    fused = config.fused_optimizer or captured or None
    kind: type[torch.optim.Optimizer] = torch.optim.SGD
    if config.optimizer == "adam":
        kind = torch.optim.Adam
    elif config.optimizer != "sgd":
        # row-wise state makes sense for tables only: their dense companion is plain Adagrad
        kind = DeviceAdagrad if captured else torch.optim.Adagrad
        if device.type != "cpu":
            fused = None  # torch fuses Adagrad on the CPU only

    def settings() -> dict[str, Any]:
        if not captured:
            return {"lr": config.learning_rate, "fused": fused}
        rate = {"lr": torch.tensor(config.learning_rate, device=device)}
        return rate if kind is DeviceAdagrad else rate | {"fused": True}

    return kind, settings


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


@part("embedding", "update")
def embedding_update(optimizer: Update) -> None:
    optimizer.step()


@part("bottom_mlp", "update")
def bottom_mlp_update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
