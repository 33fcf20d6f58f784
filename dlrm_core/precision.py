"""In which precision the dense part multiplies (``training.precision``).

bf16 or fp16 by autocast; the weights and their update stay fp32 (Micikevicius et al. 2018,
arXiv:1710.03740). By which library fp32 numbers are multiplied: :mod:`dlrm_kernels.products`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dlrm_core.base.machine import cpu_flags
from dlrm_core.config import TrainingConfig

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
    elif (flags := cpu_flags()) and not flags & set(CPU_FLAGS[name]):
        notices.append(
            f"training.precision: {name} is emulated on this CPU, which has none of "
            f"{', '.join(CPU_FLAGS[name])}: numbers are rounded to {name} as asked, but "
            "products take longer than in fp32, some in fp16 more than a hundred times as long"
        )
    for setting, without in (("fp32_matmul", "default"), ("tf32", False)):
        if (value := getattr(config, setting)) != without:
            notices.append(
                f"training.{setting}: {str(value).lower()} has no effect on the dense part: with "
                f"training.precision: {name} its products are not fp32"
            )
    return notices
