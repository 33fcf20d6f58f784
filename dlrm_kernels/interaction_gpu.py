"""The dot interaction on a GPU as one kernel forward and one backward.

The plain one (:class:`dlrm_core.interactions.DotInteraction`) is its oracle. That writes all
features side by side, all their products and then the chosen ones, 2 B F d + B F^2
numbers more than this, which reads each feature once and writes z.

Shapes: B samples, T tables, d embedding width, F = T + 1 features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from dlrm_core.config import TrainingConfig
from dlrm_core.dense import Layers
from dlrm_core.interactions import DotInteraction
from dlrm_core.model import DLRM
from dlrm_kernels.embeddings.fused_gpu import in_one
from dlrm_kernels.padded_linear import MULTIPLE, PaddedMLP, padded

MAX_FEATURES, MAX_DIM = 128, 256
"""Larger ones do not fit a program's registers: all of a sample's features are in them."""

_LEAST = 16
"""Smallest side of a matrix product in Triton."""


def why_not(features: int, dim: int, device: torch.device) -> str:
    """Why the kernels cannot be used; empty if they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, the kernels are for GPUs"
    if features > MAX_FEATURES or dim > MAX_DIM:
        return (
            f"{features} features of width {dim}, the kernels take {MAX_FEATURES} of at most "
            f"{MAX_DIM}"
        )
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return ""


def fuse(model: DLRM, config: TrainingConfig, device: torch.device) -> tuple[Layers, list[str]]:
    """Make the interaction one kernel, and products on tensor cores of factors of even widths.

    Returns:
        what takes the place of the model's layers, by part; notices.
    """
    layers: Layers = {}
    notices, fused, kind = [], False, model.interaction.kind
    if isinstance(kind, DotInteraction):
        reason = why_not(kind.features, kind.dim, device)
        fused = not reason
        kernel = functools.partial(dot_interaction, itself=kind.interaction_itself)
        model.interaction.kernel = kernel if fused else None
        if reason:
            notices = [f"training.dense_backend: fused leaves the interaction to torch: {reason}"]
    if config.precision != "fp32" or config.tf32:
        if model.bottom_mlp.linears[0].in_features % MULTIPLE:
            layers["bottom_mlp"] = PaddedMLP(model.bottom_mlp, with_room=False)
        if model.top_mlp.linears[0].in_features % MULTIPLE:
            layers["top_mlp"] = PaddedMLP(model.top_mlp, with_room=fused)
    return layers, notices


def dot_interaction(
    x: torch.Tensor, pooled: Sequence[torch.Tensor], itself: bool = False
) -> torch.Tensor:
    """x (B, d) and T pooled vectors (B, d) to (B, d + F(F-1)/2) in x's type, in fp32 sums.

    With ``itself`` (B, d + F(F+1)/2). Rows of the result begin at multiples of 16 bytes,
    as matrix products on tensor cores want them, with zeros between them.
    """
    return _Dot.apply(itself, x, *pooled)


class _Dot(torch.autograd.Function):
    """The kernels as a node of torch's graph."""

    @staticmethod
    def forward(ctx: Any, itself: bool, x: torch.Tensor, *pooled: torch.Tensor) -> torch.Tensor:
        from dlrm_kernels import interaction_kernels as k

        x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
        first, table_stride, bag_stride = in_one(list(pooled))
        size, dim = x.shape
        features = len(pooled) + 1
        width = dim + features * (features + (1 if itself else -1)) // 2
        room = padded(width)
        z = torch.empty(size, room, dtype=x.dtype, device=x.device)[:, :width]
        ctx.save_for_backward(x, first)
        ctx.rest = (itself, table_stride, bag_stride, len(pooled))
        if size:
            k.dot_forward[(size,)](
                *(x, first, z, x.stride(0), table_stride, bag_stride, z.stride(0)),
                **_shape(features, dim, itself, x),
                USED=width,
                ROOM=room,
            )
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from dlrm_kernels import interaction_kernels as k

        x, first = ctx.saved_tensors
        itself, table_stride, bag_stride, tables = ctx.rest
        given = gradients[0]
        given = given if given.stride(1) == 1 else given.contiguous()
        size, dim = x.shape
        x_gradient = torch.empty(size, dim, dtype=x.dtype, device=x.device)
        pooled_gradient = torch.empty(tables, size, dim, dtype=first.dtype, device=x.device)
        if size:
            k.dot_backward[(size,)](
                *(x, first, given, x_gradient, pooled_gradient),
                *(x.stride(0), table_stride, bag_stride, given.stride(0), size),
                **_shape(tables + 1, dim, itself, x),
            )
        return None, x_gradient, *pooled_gradient


def _shape(features: int, dim: int, itself: bool, x: torch.Tensor) -> dict[str, Any]:
    """What the kernels are compiled for, and on how many warps a sample is spread."""
    rows = max(_LEAST, 1 << (features - 1).bit_length())
    width = max(_LEAST, 1 << (dim - 1).bit_length())
    # three TF32 products make one as exact as fp32's, and need fewer registers than FMAs
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
    if x.dtype != torch.float32:
        precision = "ieee"  # says nothing about products of 16 bits
    warps = max(1, min(8, rows * (rows + width) // 2048))
    return {
        "FEATURES": features,
        "ROWS": rows,
        "DIM": dim,
        "WIDTH": width,
        "ITSELF": itself,
        "PRECISION": precision if x.is_cuda else "interpreted",
        "num_warps": 1 << (warps.bit_length() - 1),
    }
