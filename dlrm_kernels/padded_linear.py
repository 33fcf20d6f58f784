"""A first layer whose inputs are padded to what tensor cores want.

Products in 16 bits or TF32 run at full speed when rows begin at multiples of 16 bytes and
the widths are multiples of 8 (NVIDIA, "Matrix Multiplication Background User's Guide").
DLRM's first layers have neither: 13 dense features, 479 numbers out of the interaction of
27 features. Zeros beside both factors change no sum.

Shapes: B samples, n inputs, m outputs, N = n rounded up to a multiple of 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MULTIPLE = 8


def padded(width: int) -> int:
    """The least multiple of 8 that is not below."""
    return -(-width // MULTIPLE) * MULTIPLE


class PaddedMLP:
    """An MLP of the model, called with its first layer padded; weights and results are its own.

    Args:
        layers: linear layer first; shared, not copied.
        with_room: rows of the input lie N apart, with zeros between them (as those of
            :func:`dlrm_kernels.interaction_gpu.dot_interaction` do); else it is copied.
    """

    def __init__(self, layers: nn.Sequential, with_room: bool) -> None:
        self._layers = list(layers)
        self._with_room = with_room

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(B, n) to (B, last width), in the precision that autocast asks for."""
        first = self._layers[0]
        assert isinstance(first, nn.Linear)
        kind = x.device.type
        dtype = first.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        y = _PaddedLinear.apply(x, first.weight, first.bias, dtype, self._with_room)
        for layer in self._layers[1:]:
            y = layer(y)
        return y


class _PaddedLinear(torch.autograd.Function):
    """x W^T + b, forward and backward on padded factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        dtype: torch.dtype,
        with_room: bool,
    ) -> torch.Tensor:
        n = weight.shape[1]
        room = padded(n)
        if with_room and x.dtype == dtype and x.stride() == (room, 1):
            wide = x.as_strided((x.shape[0], room), (room, 1))
        else:
            wide = nn.functional.pad(x.to(dtype), (0, room - n))
        factor = nn.functional.pad(weight.to(dtype), (0, room - n))  # (m, N)
        ctx.save_for_backward(wide, factor)
        ctx.types = (x.dtype, weight.dtype, n)
        return torch.addmm(bias.to(dtype), wide, factor.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wide, factor = ctx.saved_tensors
        x_type, weight_type, n = ctx.types
        given = gradients[0]
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = torch.mm(given, factor)[:, :n].to(x_type)
        weight_gradient = torch.mm(given.t(), wide)[:, :n].to(weight_type)
        return x_gradient, weight_gradient, given.sum(0).to(weight_type), None, None
