"""The dense part by kernels of our own, on a CPU with matrix tiles (``dense_backend: fused``).

The same parts in the same functions as :mod:`dlrm_core.dense`, without autograd between
them: each part's backward is written out. Products run on tiles (:mod:`dlrm_kernels.tiles`), in
bf16 or, for ``precision: fp32``, in fp32 made of two or three bf16 numbers. Sums, biases,
the gradients of weights and of the embeddings are fp32 in each of them, the interaction's
products of two bf16 numbers an entry at least.

Shapes: B samples, D dense features, T tables, d embedding width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.memory import DensePeak
from dlrm_core.model import DLRM, CrossInteraction, DotInteraction
from dlrm_core.parts import part
from dlrm_kernels.tiles.machine import why_no_tiles

if TYPE_CHECKING:
    from dlrm_kernels.tiles.layout import Engine
    from dlrm_kernels.tiles.mlp import TiledMLP

PARTS = {"bf16x2": 2, "bf16x3": 3}
"""``training.fp32_matmul`` to the bf16 numbers that an fp32 operand's entry is split into."""


def parts_of(config: TrainingConfig) -> int:
    """bf16 numbers an operand's entry is made of; 0 where products are no sums of bf16."""
    if config.precision == "bf16":
        return 1
    return PARTS.get(config.fp32_matmul, 0) if config.precision == "fp32" else 0


def why_not_fused(config: TrainingConfig, device: torch.device, interaction: str) -> str:
    """Why the fused dense part cannot run here with this interaction; empty if it can."""
    if interaction == "dcn":
        return "it has no cross layers (model.interaction: dcn)"
    if device.type != "cpu":
        return "it is for CPUs; on a GPU there is training.cuda_graphs"
    if not parts_of(config):
        if config.precision == "fp16":
            return "it has no fp16 products; choose training.precision: bf16 or fp32"
        return (
            f"with training.precision: fp32 it needs training.fp32_matmul: bf16x2 or bf16x3, "
            f"not {config.fp32_matmul}"
        )
    return why_no_tiles()


def fuse(
    model: DLRM, loss: nn.Module, config: TrainingConfig
) -> tuple[FusedDense | None, list[str]]:
    """The fused dense part, or None where it cannot run; what a reader must know of it."""
    interaction = "dcn" if isinstance(model.interaction, CrossInteraction) else "dot"
    reason = why_not_fused(config, model.top_mlp.linears[0].weight.device, interaction)
    if reason:
        return None, [f"training.dense_backend: fused has no effect here, torch does it: {reason}"]
    fused = FusedDense(model, loss, config)
    return fused, fused.notices


class FusedDense:
    """Forward and backward of everything but the embeddings, by fused kernels.

    Called like :class:`dlrm_core.dense.DensePart`. Memory for activations and gradients is
    kept: the gradients that a step leaves are overwritten by the next one, unless they
    are still there, then it adds to them.

    Args:
        model: whose weights are read and get gradients.
        loss: predictions (B, 1), targets (B, 1) to a scalar.
        config: ``precision``, ``fp32_matmul``, ``micro_batch``, ``batch_size``.

    Raises:
        RuntimeError: this machine cannot; ask :func:`why_not_fused` first.
    """

    def __init__(self, model: DLRM, loss: nn.Module, config: TrainingConfig) -> None:
        from dlrm_kernels.tiles import layout

        self.engine = layout.Engine()
        self.notices = layout.compile_all()
        self.loss, self.output = loss, model.top_mlp[-1]
        self.micro_batch = config.micro_batch
        self.parts = parts_of(config)
        self.model = model
        self.interaction = model.interaction
        self._capacity = 0
        self._reserve(min(config.micro_batch or config.batch_size, config.batch_size))
        self._gradients = torch.empty(0)

    def __call__(
        self,
        dense: torch.Tensor,
        pooled: Sequence[torch.Tensor],
        targets: torch.Tensor,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Forward and backward of a batch.

        Args:
            dense: (B, D) float32.
            pooled: T leaves (B, d) float32; get their gradients, valid until the next call.
            targets: (B, 1).
            scale: what the loss is multiplied by before backward.

        Returns:
            The mean loss, detached.
        """
        size = dense.shape[0]
        rows = min(self.micro_batch or size, size)
        self._reserve(rows)
        shape = (len(pooled), size, self.bottom.widths[-1])
        if tuple(self._gradients.shape) != shape:
            self._gradients = torch.empty(shape)
        losses = []
        values = [vector.detach() for vector in pooled]
        for start in range(0, size, rows):
            stop = min(start + rows, size)
            chunk = slice(start, stop)
            share = (stop - start) / size
            loss = self._rows(
                dense[chunk],
                [vector[chunk] for vector in values],
                targets[chunk],
                share * scale,
                [gradient[chunk] for gradient in self._gradients],
                first=start == 0,
            )
            losses.append(share * loss)
        for vector, gradient in zip(pooled, self._gradients, strict=True):
            vector.grad = gradient
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _rows(
        self,
        dense: torch.Tensor,
        pooled: list[torch.Tensor],
        targets: torch.Tensor,
        scale: float,
        gradients: list[torch.Tensor],
        first: bool,
    ) -> torch.Tensor:
        x = bottom_mlp_forward(self.bottom, dense, first)
        interaction_forward(self.engine, self.interaction, [x, *pooled], self.top)
        p, logits = top_mlp_forward(self.top, self.output, x.shape[0], first)
        p_leaf = p.detach().requires_grad_()
        loss = loss_forward(self.loss, p_leaf, targets)
        # CPU threads of autograd's own would take the work out of the functions below
        with torch.autograd.set_multithreading_enabled(False):
            loss_backward(loss, scale)
            dz = top_mlp_backward(self.top, p, p_leaf, logits)
        dx = self._bottom_gradient[: x.shape[0]]
        features = [x, *pooled]
        interaction_backward(
            self.engine, self.interaction, self.parts, dz, features, [dx, *gradients]
        )
        bottom_mlp_backward(self.bottom, dx)
        return loss.detach()

    def _reserve(self, rows: int) -> None:
        """Make room for so many samples at once."""
        from dlrm_kernels.tiles.mlp import TiledMLP

        if rows <= self._capacity:
            return
        self._capacity = rows
        bottom, top = self.model.bottom_mlp.linears, self.model.top_mlp.linears
        self.bottom = TiledMLP(
            self.engine, bottom, self.parts, rows, relu_last=True, input_gradient=False
        )
        self.top = TiledMLP(
            self.engine, top, self.parts, rows, relu_last=False, input_gradient=True
        )
        self._bottom_gradient = torch.empty(rows, self.bottom.widths[-1])


@part("bottom_mlp", "forward")
def bottom_mlp_forward(mlp: TiledMLP, dense: torch.Tensor, first: bool) -> torch.Tensor:
    if first:
        mlp.read_weights()
    mlp.engine.pack(dense, mlp.parts, mlp.input(dense.shape[0]))
    return mlp.forward(dense.shape[0])


@part("interaction", "forward")
def interaction_forward(
    engine: Engine, interaction: nn.Module, features: list[torch.Tensor], top: TiledMLP
) -> None:
    """The interaction's output, straight into the top MLP's input."""
    target = top.input(features[0].shape[0])
    if isinstance(interaction, DotInteraction):
        engine.dot_forward(features, interaction.itself, top.parts, target)
    else:
        engine.pack(torch.cat(features, dim=1), top.parts, target)


@part("top_mlp", "forward")
def top_mlp_forward(
    mlp: TiledMLP, output: nn.Module, size: int, first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if first:
        mlp.read_weights()
    logits = mlp.forward(size).detach().requires_grad_()
    return output(logits), logits


@part("loss", "forward")
def loss_forward(loss: nn.Module, p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss(p, targets)


@part("loss", "backward")
def loss_backward(loss: torch.Tensor, scale: float) -> None:
    loss.backward(torch.full_like(loss, scale))


@part("top_mlp", "backward")
def top_mlp_backward(
    mlp: TiledMLP, p: torch.Tensor, p_leaf: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(p, logits, p_leaf.grad)
    dz = mlp.backward(gradient)
    assert dz is not None  # asked for when it was made
    return dz


@part("interaction", "backward")
def interaction_backward(
    engine: Engine,
    interaction: nn.Module,
    parts: int,
    dz: torch.Tensor,
    features: list[torch.Tensor],
    gradients: list[torch.Tensor],
) -> None:
    """Write the gradients of all features, given that of the interaction's output."""
    if isinstance(interaction, DotInteraction):
        engine.dot_backward(dz, features, interaction.itself, parts, gradients)
    else:
        dim = features[0].shape[1]
        for i, gradient in enumerate(gradients):
            gradient.copy_(dz[:, i * dim : (i + 1) * dim])


@part("bottom_mlp", "backward")
def bottom_mlp_backward(mlp: TiledMLP, gradient: torch.Tensor) -> None:
    mlp.backward(gradient)


def fused_peak(parameters: Parameters, rows: int) -> DensePeak:
    """The buffers that the fused dense part keeps for so many rows (:mod:`.tiles.mlp`).

    Matrices are padded to 32, an entry is 2 bytes a part, and activations, gradients and
    weights are there in two forms each; the weights' count as activations here.
    """
    model, parts = parameters.model, parts_of(parameters.training)
    activations = gradients = 0
    for widths, inputs in ((model.bottom_widths, 0), (model.top_widths, model.top_widths[0])):
        padded = [_padded(width) for width in widths]
        entries = _padded(rows) * (sum(padded) + sum(padded[:-1]))
        entries += 2 * sum(a * b for a, b in itertools.pairwise(padded))
        activations += 2 * parts * entries + 4 * rows * widths[-1]
        # those of two layers at a time, and in float32 that of the input
        gradients += 2 * parts * 4 * _padded(rows) * max(padded[1:]) + 4 * rows * inputs
    gradients += 4 * rows * model.embedding_dim
    return DensePeak(activations, gradients, "fused kernels")


def _padded(width: int) -> int:
    return -(-width // 32) * 32
