"""Whether this process may use matrix tiles, and the machine code that does."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dlrm_core.machine import cpu_flags
from dlrm_kernels.native import Kernel, compile_kernel

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""System call by which a process asks for the tiles (Linux, Documentation/arch/x86/xstate.rst)."""

L2_BYTES = 2 << 20
"""Assumed where the system does not say."""


@functools.cache
def why_no_tiles() -> str:
    """Why kernels with tiles cannot run here; empty if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"matrix tiles (AMX) are used on Linux x86-64 only, this is {platform.machine()}"
    missing = {"amx_tile", "amx_bf16", "avx512f"} - cpu_flags()
    if missing:
        return f"this CPU has no matrix tiles for bf16 (missing: {', '.join(sorted(missing))})"
    if reason := why_no_numba():
        return reason
    granted = ctypes.CDLL(None, use_errno=True).syscall(
        ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    )
    if granted != 0:
        return f"the system refuses matrix tiles (arch_prctl: error {ctypes.get_errno()})"
    return ""


@functools.cache
def why_no_numba() -> str:
    """Why kernels cannot be compiled here; empty if they can."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return f"numba, which compiles the kernels, is not installed ({error}): pip install numba"
    return ""


@functools.cache
def tile_config() -> np.ndarray:
    """The 64 bytes that give all eight tiles 16 rows of 64 bytes (Intel SDM, LDTILECFG)."""
    held = np.zeros(128, np.uint8)
    start = -held.ctypes.data % 64
    config = held[start : start + 64]
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:8] = 64
    config[48:56] = 16
    return config


def kernel_named(name: str) -> Kernel:
    """A kernel's machine code, compiled once and kept on disk."""
    return compile_kernel(_function_named(name))[0]


def compile_all() -> list[str]:
    """Compile every kernel now, not in the first step; notices (an unwritable cache)."""
    names = ("product", "pack", "dot_forward", "dot_backward")
    notices = [compile_kernel(_function_named(name))[1] for name in names]
    return sorted({notice for notice in notices if notice})


def _function_named(name: str) -> Callable[[int], None]:
    from dlrm_kernels.tiles import kernels, kernels_interaction

    module = kernels_interaction if hasattr(kernels_interaction, name) else kernels
    function: Callable[[int], None] = getattr(module, name)
    return function


@functools.cache
def second_level_cache() -> int:
    """Bytes of a core's second-level cache."""
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (folder / "level").read_text().strip() == "2":
                size = (folder / "size").read_text().strip()
                return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
        except (OSError, KeyError, ValueError):
            continue
    return L2_BYTES


def threads() -> int:
    """Threads that a kernel runs on: torch's."""
    return torch.get_num_threads()
