"""The C library's allocator in a measuring process, brought to the state of a long plain run.

glibc maps allocations above a threshold anew each time, so that every page of them faults,
and gives the top of its heap back when more than twice that threshold is free, so that it
faults again. The threshold grows with what is freed, up to 32 MiB. A plain training run
gets there within a few iterations, and what lies above the freed tensors in its heap then
keeps it from shrinking. A process that also records or probes frees other things in
another order, and its heap may shrink every iteration: at the experiment's shape that made
the embeddings' backward pass two to four times as long as in a plain run.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""malloc.h"""

LARGEST_DYNAMIC = 32 << 20
"""Bytes up to which glibc raises its own threshold on 64-bit systems (malloc(3))."""

USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def settle_allocator() -> bool:
    """Fix glibc's thresholds where a long plain run would have them, for this process.

    Returns:
        Whether that was done: not with another C library, nor against settings that
        the environment makes.
    """
    if sys.platform != "linux" or any(name in os.environ for name in USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST_DYNAMIC)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
