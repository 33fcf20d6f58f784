"""In which precision, and by which library, matrices are multiplied; what that costs in error.

``training.precision`` is about the dense part's products: bf16 or fp16 by autocast,
the weights and their update stay fp32 (Micikevicius et al. 2018, arXiv:1710.03740).
``training.fp32_matmul`` and ``training.tf32`` are about products of fp32 numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dlrm_core.base.engines import engine
from dlrm_core.base.machine import cpu_flags
from dlrm_core.config import ModelConfig, TrainingConfig

MAX_RELATIVE_ERROR = 1e-5
"""Largest ||C - C64|| / ||C64|| accepted of an fp32 product; MKL's is about 2.5e-7."""

_LARGE_LAYER = (512, 512)
"""Input and output width for which every CPU with bf16 matrix units uses them."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""``training.precision`` to the type of the dense part's products."""

CPU_FLAGS = {
    "bf16": ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"),
    "fp16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}
"""Of /proc/cpuinfo (x86, Arm): without one of them products of that precision are emulated."""

GPU_CAPABILITY = {"bf16": (8, 0), "fp16": (7, 0), "tf32": (8, 0)}
"""Compute capability from which tensor cores multiply in it (CUDA C++ Programming Guide)."""


class DensePrecision:
    """The type of the dense part's products, and the loss scale that it needs.

    Args:
        config: ``precision``, ``loss_scale`` and ``skip_overflow`` are used, ``fp32_matmul`` is
            commented on.
        device: where the dense part runs.

    Attributes:
        dtype: of products and activations; weights and their gradients are fp32.
        scale: what the loss is multiplied by before backward: 1 but for fp16, whose
            smallest number (6e-8) is above many a gradient.
        skipped: steps not taken because a scaled gradient overflowed.
        notices: what is emulated or has no effect.
    """

    def __init__(self, config: TrainingConfig, device: torch.device) -> None:
        self.dtype = DTYPES[config.precision]
        self.scale = config.loss_scale if config.precision == "fp16" else 1.0
        self.skipped = 0
        self._may_skip = config.skip_overflow
        self.notices = _precision_notices(config, device)
        self._device = device

    def autocast(self, cache: bool = True) -> AbstractContextManager[Any]:
        """Products in ``dtype`` while open; with ``cache`` each weight is cast once."""
        if self.dtype == torch.float32:
            # opening one that does nothing takes a tenth of a millisecond in cold caches
            return nullcontext()
        return torch.autocast(self._device.type, self.dtype, cache_enabled=cache)

    def full(self) -> AbstractContextManager[Any]:
        """Inside :meth:`autocast`: every operator in the type of its inputs."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, enabled=False)

    def overflowed(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Whether a gradient is infinite or no number: a scalar on the device, not waited for."""
        largest = torch.stack([gradient.detach().abs().max() for gradient in gradients]).max()
        return ~torch.isfinite(largest)

    def skips(self, overflowed: torch.Tensor) -> bool:
        """Whether the step is to be skipped, which is counted; the host waits for a GPU here."""
        skipped = self._may_skip and bool(overflowed)
        self.skipped += skipped
        return skipped

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide gradients by the loss scale, in place."""
        torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def skipped_notice(self, steps: int) -> list[str]:
        """What to say after ``steps`` steps: nothing if none was skipped."""
        if not self.skipped:
            return []
        return [
            f"training.loss_scale: {self.skipped} of {steps} steps were skipped, because gradients "
            f"times {self.scale:g} exceed fp16's largest number, 65504; choose a smaller scale"
        ]


def _precision_notices(config: TrainingConfig, device: torch.device) -> list[str]:
    name = config.precision
    if name == "fp32":
        return []
    notices = []
    if device.type == "cuda":
        have, least = torch.cuda.get_device_capability(device), GPU_CAPABILITY[name]
        if have < least:
            notices.append(
                f"training.precision: {name} is emulated on this GPU (compute capability "
                f"{have[0]}.{have[1]}, tensor cores multiply it from {least[0]}.{least[1]}): "
                "slower than on newer GPUs"
            )
    else:
        flags = cpu_flags()
        if flags and not flags & set(CPU_FLAGS[name]):
            notices.append(
                f"training.precision: {name} is emulated on this CPU, which has none of "
                f"{', '.join(CPU_FLAGS[name])}: numbers are rounded to {name} as asked, but "
                "products take longer than in fp32, some in fp16 more than a hundred times as long"
            )
    for setting, without in (("fp32_matmul", "default"), ("tf32", False)):
        value = getattr(config, setting)
        if value != without:
            shown = str(value).lower()
            notices.append(
                f"training.{setting}: {shown} has no effect on the dense part: with "
                f"training.precision: {name} its products are not fp32"
            )
    return notices


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
    notices = []
    if choice.startswith("bf16"):
        reason = engine("matrix tiles").why_no_tiles() if device.type == "cpu" else ""
        kind = model.interaction_kind
        if device.type == "cpu" and "fused dense part" not in kind.engines:
            reason = f"the fused dense part has no {kind.layers} (model.interaction: {kind.kind})"
        if not reason and device.type == "cpu":
            return []
        if reason:
            notices = [f"training.fp32_matmul: {choice} cannot be done, onednn instead: {reason}"]
    if device.type != "cpu":
        return [f"training.fp32_matmul: {choice} has no effect on a GPU; it was ignored"]
    if not _has_switch():
        return [
            *notices,
            f"training.fp32_matmul: onednn needs torch 2.9 or newer, this is "
            f"{torch.__version__}; the default library is used",
        ]
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


def _matmul() -> Any:
    """torch's settings of oneDNN's products; without ``fp32_precision`` before torch 2.9."""
    return getattr(torch.backends.mkldnn, "matmul", None)


def _has_switch() -> bool:
    return hasattr(_matmul(), "fp32_precision")


def allow_onednn(allow: bool) -> None:
    """Let oneDNN make fp32 products, or leave them to MKL; nothing before torch 2.9."""
    if _has_switch():
        _matmul().fp32_precision = "bf16" if allow else "none"


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
