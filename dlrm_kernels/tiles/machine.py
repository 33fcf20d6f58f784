"""Whether this process may use matrix tiles, and their shapes."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path

import numpy as np

from dlrm_core.base.machine import cpu_flags
from dlrm_kernels.native import why_no_numba

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""System call by which a process asks for the tiles (Linux, Documentation/arch/x86/xstate.rst)."""


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
def tile_config() -> np.ndarray:
    """The 64 bytes that give all eight tiles 16 rows of 64 bytes (Intel SDM, LDTILECFG)."""
    held = np.zeros(128, np.uint8)
    start = -held.ctypes.data % 64
    config = held[start : start + 64]
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:8] = 64
    config[48:56] = 16
    return config


def cpu_caches() -> dict[int, int]:
    """Bytes of the first core's caches by level, instructions' aside; empty where nobody says."""
    levels: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        units = {"K": 10, "M": 20, "G": 30}
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in units:
            levels[int(level)] = int(size[:-1]) << units[size[-1]]
    return levels
