"""The dense part by kernels of our own, on a CPU with matrix tiles (``dense_backend: fused``).

Without tiles the dot interaction alone has them (:mod:`dlrm_kernels.interaction_cpu`).

Each part is one node of torch's graph whose backward is written out, so that one process
(:mod:`dlrm_core.dense`) and ranks, with exchanges in between, call the parts as they call the
model's own. Products run on tiles (:mod:`dlrm_kernels.tiles`), in bf16 or, for
``precision: fp32``, in fp32 made of two or three bf16 numbers. Sums, biases, the gradients of
weights and of the embeddings are fp32 in each of them, the interaction's products of two bf16
numbers an entry at least.

Shapes: B samples, D dense features, T tables, d embedding width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.dense import Layers
from dlrm_core.interactions import DotInteraction, Interaction
from dlrm_core.model import DLRM
from dlrm_kernels.memory import DensePeak
from dlrm_kernels.native import why_no_numba
from dlrm_kernels.tiles.machine import why_no_tiles

if TYPE_CHECKING:
    from dlrm_kernels.tiles.mlp import TiledMLP

PARTS = {"bf16x2": 2, "bf16x3": 3}
"""``training.fp32_matmul`` to the bf16 numbers that an fp32 operand's entry is split into."""


def parts_of(config: TrainingConfig) -> int:
    """bf16 numbers an operand's entry is made of; 0 where products are no sums of bf16."""
    if config.precision == "bf16":
        return 1
    return PARTS.get(config.fp32_matmul, 0) if config.precision == "fp32" else 0


def why_not_fused(config: TrainingConfig, device: torch.device, interaction: Interaction) -> str:
    """Why the fused dense part cannot run here with this interaction; empty if it can."""
    if "fused dense part" not in interaction.engines:
        return f"it has no {interaction.layers} (model.interaction: {interaction.kind})"
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


def fuse(model: DLRM, config: TrainingConfig, device: torch.device) -> tuple[Layers, list[str]]:
    """Make the fused dense part where it can run here.

    Returns:
        what takes the place of the model's layers, by part; notices. Where the fused ones
        cannot run, only the interaction may have a replacement
        (:mod:`dlrm_kernels.interaction_cpu`).
    """
    reason = why_not_fused(config, device, model.interaction.kind)
    if reason:
        return without_tiles(model, config, device, reason)
    fused = FusedDense(model, config)
    return {
        "bottom_mlp": fused.bottom_mlp,
        "interaction": fused.interaction,
        "top_mlp": fused.top_mlp,
    }, fused.notices


def without_tiles(
    model: DLRM, config: TrainingConfig, device: torch.device, reason: str
) -> tuple[Layers, list[str]]:
    """The dot interaction by vector instructions where it can be; nothing else is replaced."""
    kind = model.interaction.kind
    if isinstance(kind, DotInteraction) and device.type == "cpu":
        other = why_no_numba()
        if not other:
            from dlrm_kernels import interaction_cpu

            dim = model.bottom_mlp.linears[-1].out_features
            other = interaction_cpu.why_not(dim, config.precision)
        if not other:
            notices = interaction_cpu.compile_all()
            said = f"training.dense_backend: fused computes the interaction only: {reason}"
            return {"interaction": interaction_cpu.vectorised(kind)}, [said, *notices]
        reason = f"{reason}; nor can the interaction's kernels: {other}"
    said = f"training.dense_backend: fused has no effect here, torch does it: {reason}"
    return {}, [said]


class FusedDense:
    """Bottom MLP, interaction and top MLP by fused kernels, each a node of torch's graph.

    An MLP keeps the memory of its activations and gradients: they are overwritten when it is
    called again, so its backward must have run by then. Gradients of weights are written to
    their ``grad``, or added to what is there.

    Args:
        model: whose weights are read and get gradients.
        config: ``precision`` and ``fp32_matmul`` are used.

    Raises:
        RuntimeError: this machine cannot; ask :func:`why_not_fused` first.
    """

    def __init__(self, model: DLRM, config: TrainingConfig) -> None:
        from dlrm_kernels.tiles import layout

        self.engine = layout.Engine()
        self.notices = layout.compile_all()
        self.parts = parts_of(config)
        self.model = model
        self._capacity = 0
        # a node has a backward if an input of it needs a gradient: no other input does
        self._root = torch.empty(0, requires_grad=True)

    def bottom_mlp(self, dense: torch.Tensor) -> torch.Tensor:
        """Compute x (B, d) from dense features (B, D) float32."""
        self._reserve(dense.shape[0])
        return _BottomMLP.apply(self.bottom, dense, self._root)

    def interaction(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the top MLP's input from x and T pooled vectors (B, d) float32.

        The values go into the top MLP's tiles at once; what is returned has the input's shape
        and NaN in every place.
        """
        return _Interaction.apply(self, x, *pooled)

    def top_mlp(self, z: torch.Tensor) -> torch.Tensor:
        """Compute predictions (B, 1) from the last :meth:`interaction`'s result."""
        return self.model.top_mlp[-1](_TopMLP.apply(self.top, z))

    def interact(self, features: list[torch.Tensor]) -> None:
        """Write the interaction's output into the top MLP's input."""
        target = self.top.input(features[0].shape[0])
        kind = self.model.interaction.kind
        if isinstance(kind, DotInteraction):
            self.engine.dot_forward(features, kind.interaction_itself, self.parts, target)
        else:
            self.engine.pack(torch.cat(features, dim=1), self.parts, target)

    def interaction_gradients(
        self, dz: torch.Tensor, features: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Compute the gradients of all features, given that of the interaction's output."""
        gradients = torch.empty(len(features), *features[0].shape).unbind()
        kind = self.model.interaction.kind
        if isinstance(kind, DotInteraction):
            itself = kind.interaction_itself
            self.engine.dot_backward(dz, features, itself, self.parts, gradients)
        else:
            columns = dz.split(features[0].shape[1], dim=1)
            for gradient, own in zip(gradients, columns, strict=True):
                gradient.copy_(own)
        return gradients

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


class _BottomMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: TiledMLP, dense: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        ctx.mlp = mlp
        mlp.engine.pack(dense, mlp.parts, mlp.input(dense.shape[0]))
        return mlp.forward(dense.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        ctx.mlp.backward(gradients[0])
        return None, None, None


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: FusedDense, *features: torch.Tensor) -> torch.Tensor:
        ctx.fused = fused
        ctx.save_for_backward(*features)
        fused.interact(list(features))
        return torch.tensor(torch.nan).expand(features[0].shape[0], fused.top.widths[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.fused.interaction_gradients(gradients[0], list(ctx.saved_tensors))


class _TopMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: TiledMLP, z: torch.Tensor) -> torch.Tensor:
        ctx.mlp = mlp
        return mlp.forward(z.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.mlp.backward(gradients[0])


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
