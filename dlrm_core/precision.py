"""Which library multiplies fp32 matrices, and the error it makes doing so."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from dlrm_core.config import ModelConfig

MAX_RELATIVE_ERROR = 1e-5
"""Largest ||C - C64|| / ||C64|| accepted of an fp32 product; MKL's is about 2.5e-7."""


def set_fp32_matmul(choice: str, model: ModelConfig, device: torch.device) -> list[str]:
    """Choose the library for fp32 products; what was fallen back to and why.

    torch sends a product to oneDNN when it may use bf16 inside. On a CPU
    without bf16 matrix units oneDNN still computes in fp32, and on AMD faster
    than MKL does; with such units (AMX) it really rounds to bf16. So the error is
    measured, and the choice taken back where it is too large.
    """
    _allow_onednn(False)
    if choice == "default":
        return []
    if device.type != "cpu":
        return ["training.fp32_matmul: onednn has no effect on a GPU; it was ignored"]
    if not _has_switch():
        return [
            f"training.fp32_matmul: onednn needs torch 2.9 or newer, this is "
            f"{torch.__version__}; the default library is used"
        ]
    _allow_onednn(True)
    error = _relative_error(*_largest_layer(model))
    if error > MAX_RELATIVE_ERROR:
        _allow_onednn(False)
        return [
            f"training.fp32_matmul: onednn makes a relative error of {error:.1e} on this CPU, "
            f"more than {MAX_RELATIVE_ERROR:.0e}; the default library is used"
        ]
    return []


def probe_fp32_matmul(model: ModelConfig, batch_size: int, repeats: int = 5) -> dict[str, float]:
    """Time the model's largest layer by both libraries, on this CPU, in turns.

    Returns:
        default_ms, onednn_ms: best of ``repeats`` products (batch_size, n) x (n, m);
        max_relative_error: of oneDNN's against float64. Empty where torch has no switch.
    """
    if not _has_switch():
        return {}
    matmul = _matmul()
    before = matmul.fp32_precision
    n, m = _largest_layer(model)
    weight, x = torch.randn(m, n), torch.randn(batch_size, n)
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        for _ in range(repeats + 1):
            for onednn in (False, True):
                _allow_onednn(onednn)
                started = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                times[onednn].append(1e3 * (time.perf_counter() - started))
        _allow_onednn(True)
        error = _relative_error(n, m)
    finally:
        matmul.fp32_precision = before
    # the first of each pays for packing and code generation
    return {
        "default_ms": min(times[False][1:]),
        "onednn_ms": min(times[True][1:]),
        "max_relative_error": error,
    }


def _matmul() -> Any:
    """torch's settings of oneDNN's products; without ``fp32_precision`` before torch 2.9."""
    return getattr(torch.backends.mkldnn, "matmul", None)


def _has_switch() -> bool:
    return hasattr(_matmul(), "fp32_precision")


def _allow_onednn(allow: bool) -> None:
    if _has_switch():
        _matmul().fp32_precision = "bf16" if allow else "none"


def _largest_layer(model: ModelConfig) -> tuple[int, int]:
    """Input and output width of the linear layer with the most weights."""
    layers = [
        pair
        for widths in (model.bottom_widths, model.top_widths)
        for pair in itertools.pairwise(widths)
    ]
    return max(layers, key=lambda layer: layer[0] * layer[1])


def _relative_error(n: int, m: int) -> float:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, n, generator=random)
    weight = torch.randn(m, n, generator=random)
    exact = x.double() @ weight.double().T
    return float((torch.nn.functional.linear(x, weight) - exact).norm() / exact.norm())
