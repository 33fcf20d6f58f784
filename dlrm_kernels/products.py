"""By which library fp32 numbers are multiplied, and what that costs in error.

``training.fp32_matmul`` and ``training.tf32``; the products of ``training.precision`` are
:class:`dlrm_core.precision.DensePrecision`'s.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from dlrm_core.base.engines import engine
from dlrm_core.config import ModelConfig, TrainingConfig
from dlrm_core.precision import GPU_CAPABILITY

MAX_RELATIVE_ERROR = 1e-5
"""Largest ||C - C64|| / ||C64|| accepted of an fp32 product; MKL's is about 2.5e-7."""

_LARGE_LAYER = (512, 512)
"""Input and output width for which every CPU with bf16 matrix units uses them."""


def set_fp32_products(
    config: TrainingConfig, model: ModelConfig, device: torch.device
) -> list[str]:
    """Set how this process multiplies fp32 numbers; what was fallen back to or has no effect."""
    return set_fp32_matmul(config.fp32_matmul, model, device) + set_tf32(config.tf32, device)


def set_tf32(allow: bool, device: torch.device) -> list[str]:
    """Let a GPU round the inputs of fp32 products to TF32 (10 bits of mantissa), or not.

    Returns:
        What has no effect, and why. Not measured on a GPU yet.
    """
    # the older of torch's two switches sets the newer one too; the reverse makes
    # torch.compile, which reads the older, raise an error
    torch.backends.cuda.matmul.allow_tf32 = allow and device.type == "cuda"
    if not allow:
        return []
    if device.type != "cuda":
        return ["training.tf32: true has no effect on a CPU; it was ignored"]
    have, least = torch.cuda.get_device_capability(device), GPU_CAPABILITY["tf32"]
    if have < least:
        return [
            f"training.tf32: true has no effect on this GPU: its compute capability is "
            f"{have[0]}.{have[1]}, TF32 needs {least[0]}.{least[1]}"
        ]
    return []


def set_fp32_matmul(choice: str, model: ModelConfig, device: torch.device) -> list[str]:
    """Choose the library for fp32 products; what was fallen back to and why.

    ``auto`` is the default library until :func:`dlrm_core.dense.resolve_dense` has chosen.
    torch sends a product to oneDNN when it may use bf16 inside. On a CPU
    without bf16 matrix units oneDNN still computes in fp32, and on AMD faster
    than MKL does; with such units (AMX) it really rounds to bf16. So the error is
    measured, and the choice taken back where it is too large.
    """
    allow_onednn(False)
    if choice in ("default", "auto"):
        return []
    if device.type != "cpu":
        return [f"training.fp32_matmul: {choice} has no effect on a GPU; it was ignored"]
    notices = []
    if choice.startswith("bf16"):
        reason, kind = engine("matrix tiles").why_no_tiles(), model.interaction_kind
        if "fused dense part" not in kind.engines:
            reason = f"the fused dense part has no {kind.layers} (model.interaction: {kind.kind})"
        if not reason:
            return []
        notices = [f"training.fp32_matmul: {choice} cannot be done, onednn instead: {reason}"]
    allow_onednn(True)
    # small products may be computed in fp32 where large ones are rounded
    error = max(_relative_error(*layer) for layer in (_largest_layer(model), _LARGE_LAYER))
    if error > MAX_RELATIVE_ERROR:
        allow_onednn(False)
        return [
            *notices,
            f"training.fp32_matmul: onednn makes a relative error of {error:.1e} on this CPU, "
            f"more than {MAX_RELATIVE_ERROR:.0e}; the default library is used",
        ]
    return notices


def allow_onednn(allow: bool) -> None:
    """Let oneDNN make fp32 products, or leave them to MKL."""
    switch: Any = torch.backends.mkldnn
    switch.matmul.fp32_precision = "bf16" if allow else "none"


def _largest_layer(model: ModelConfig) -> tuple[int, int]:
    """Input and output width of the linear layer with the most weights."""
    layers = [
        pair
        for widths in (model.bottom_widths, model.top_widths)
        for pair in itertools.pairwise(widths)
    ]
    layers += [w.shape[::-1] for w in model.interaction_kind.weights() if len(w.shape) == 2]
    return max(layers, key=lambda layer: layer[0] * layer[1])


def _relative_error(n: int, m: int) -> float:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, n, generator=random)
    weight = torch.randn(m, n, generator=random)
    exact = x.double() @ weight.double().T
    return float((torch.nn.functional.linear(x, weight) - exact).norm() / exact.norm())
