"""The dense part of a step: bottom MLP, interaction, top MLP and loss, forward and backward.

The graph is cut where one part hands over to the next (see :mod:`dlrm_core.step`).
The options of ``training`` that make it faster act here: ``precision``,
``micro_batch``, ``compile``; with ``dense_backend: fused`` the package ``dlrm_kernels`` has
layers that take the place of the model's. What each brings: docs/precision.md.

Shapes: B samples, D dense features, T tables, d embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from dlrm_core.base.engines import PACKAGE, engine, find_engine
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.model import DLRM
from dlrm_core.parts import part
from dlrm_core.precision import DensePrecision

Layer = Callable[..., torch.Tensor]
"""A part of the model, or what stands for it: compiled, or fused kernels."""

Layers = tuple[Layer, Layer, Layer]
"""Bottom MLP, interaction, top MLP."""

DENSE_CHOICE = ("dense_backend", "fp32_matmul")
"""Leaves of ``training`` that are chosen together where one of them is ``auto``."""


def resolve_dense(parameters: Parameters, device: torch.device) -> tuple[Parameters, list[str]]:
    """The parameters with a back end and products in place of ``auto``, and the notice why."""
    training = parameters.training
    asked = [leaf for leaf in DENSE_CHOICE if getattr(training, leaf) == "auto"]
    if not asked:
        return parameters, []
    chooser = find_engine("choice of dense part")
    if chooser is not None:
        parameters, notices = chooser.resolve(parameters, device)
        return parameters, notices
    plain = {"dense_backend": "torch", "fp32_matmul": "default"}
    leaves = {leaf: plain[leaf] for leaf in asked}
    said = "; ".join(f"training.{leaf} auto: {value}" for leaf, value in leaves.items())
    return parameters.with_training(**leaves), [f"{said}; {PACKAGE}, which chooses, is not there"]


class DensePart:
    """Forward and backward of everything but the embeddings.

    Args:
        model: whose MLPs and interaction are used; their weights get gradients.
        loss: predictions (B, 1), targets (B, 1) to a scalar.
        config: the options above.

    Attributes:
        precision: type of the products, loss scale.
        notices: options that have no effect here, and why.
    """

    def __init__(self, model: DLRM, loss: nn.Module, config: TrainingConfig) -> None:
        weight = model.top_mlp.linears[0].weight
        self.precision = DensePrecision(config, weight.device)
        self.notices = list(self.precision.notices)
        self.loss = loss
        self.micro_batch = config.micro_batch
        self.weights = model.dense_weights()
        layers: Layers = (model.bottom_mlp, model.interaction, model.top_mlp)
        if config.dense_backend == "fused":
            gpu = " on a GPU" if weight.device.type == "cuda" else ""
            kernels = engine(f"fused dense part{gpu}")
            layers, notices = kernels.fuse(model, config, weight.device)
            self.notices += notices
        self.bottom_mlp, self.interaction, self.top_mlp = layers
        if config.compile:
            self._compile(weight.device)

    def __call__(
        self,
        dense: torch.Tensor,
        pooled: Sequence[torch.Tensor],
        targets: torch.Tensor,
        share: float = 1.0,
    ) -> torch.Tensor:
        """Forward and backward of a batch.

        Args:
            dense: (B, D).
            pooled: T leaves (B, d) float32; get their gradients.
            targets: (B, 1).
            share: what the loss counts of one that others add to: 1/R on each of R ranks.

        Returns:
            The mean loss, detached. Gradients are those of the loss times ``share`` and
            ``precision.scale``, added to what the weights' ``grad`` holds.
        """
        size = dense.shape[0]
        rows = min(self.micro_batch or size, size)
        with self.precision.autocast():
            if rows == size:
                return self._rows(dense, pooled, targets, share)
            gradients = [torch.zeros_like(vector) for vector in pooled]
            losses = []
            for start in range(0, size, rows):
                chunk = slice(start, min(start + rows, size))
                leaves = [leaf_of(vector[chunk]) for vector in pooled]
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    # backward adds to it in place: no copying together afterwards
                    leaf.grad = gradient[chunk]
                part = (chunk.stop - start) / size
                loss = self._rows(dense[chunk], leaves, targets[chunk], part * share)
                losses.append(part * loss)
        for vector, gradient in zip(pooled, gradients, strict=True):
            vector.grad = gradient
        return torch.stack(losses).sum()

    def _rows(
        self,
        dense: torch.Tensor,
        pooled: Sequence[torch.Tensor],
        targets: torch.Tensor,
        share: float,
    ) -> torch.Tensor:
        """Forward and backward of some rows, whose loss counts ``share`` of the batch's."""
        x, x_leaf = bottom_mlp_forward(self.bottom_mlp, dense)
        z, z_leaf = interaction_forward(self.interaction, x_leaf, pooled)
        p, p_leaf = top_mlp_forward(self.top_mlp, z_leaf)
        # CPU threads of autograd's own would take the work out of the functions below
        with self.precision.full(), torch.autograd.set_multithreading_enabled(False):
            loss = loss_forward(self.loss, p_leaf, targets)
            loss_backward(loss, self.precision.scale * share)
            top_mlp_backward(p, p_leaf)
            interaction_backward(z, z_leaf)
            bottom_mlp_backward(x, x_leaf)
        return loss.detach()

    def _compile(self, device: torch.device) -> None:
        reason = why_not_compile(device)
        if reason:
            self.notices.append(
                f"training.compile: torch.compile does not work here, the parts run as they are: "
                f"{reason}"
            )
            return
        # each on its own, so that its time stays its own; dynamic shapes would be slower, and
        # a batch has at most two (the last micro-batch may be smaller)
        self.bottom_mlp = torch.compile(self.bottom_mlp, dynamic=False)
        self.interaction = torch.compile(self.interaction, dynamic=False)
        self.top_mlp = torch.compile(self.top_mlp, dynamic=False)


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as the start of a new graph."""
    return tensor.detach().requires_grad_()


def why_not_compile(device: torch.device) -> str:
    """Why torch.compile fails on this machine (often: no C++ compiler); empty if it works."""
    try:
        torch.compile(_trial, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler, or its absence, may raise
        return " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
    return ""


def _trial(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2.0


@part("bottom_mlp", "forward")
def bottom_mlp_forward(bottom_mlp: Layer, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its result, and the leaf that the next part starts from: handing over is its time too."""
    x = bottom_mlp(dense)
    return x, leaf_of(x)


@part("interaction", "forward")
def interaction_forward(
    interaction: Layer, x: torch.Tensor, pooled: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    z = interaction(x, pooled)
    return z, leaf_of(z)


@part("top_mlp", "forward")
def top_mlp_forward(top_mlp: Layer, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = top_mlp(z)
    return p, leaf_of(p)


@part("loss", "forward")
def loss_forward(loss: nn.Module, p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss(p, targets)


@part("loss", "backward")
def loss_backward(loss: torch.Tensor, scale: float) -> None:
    loss.backward(torch.full_like(loss, scale))


@part("top_mlp", "backward")
def top_mlp_backward(p: torch.Tensor, p_leaf: torch.Tensor) -> None:
    p.backward(p_leaf.grad)


@part("interaction", "backward")
def interaction_backward(z: torch.Tensor, z_leaf: torch.Tensor) -> None:
    z.backward(z_leaf.grad)


@part("bottom_mlp", "backward")
def bottom_mlp_backward(x: torch.Tensor, x_leaf: torch.Tensor) -> None:
    x.backward(x_leaf.grad)
