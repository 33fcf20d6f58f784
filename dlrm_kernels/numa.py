"""Memory pages from all NUMA nodes in turn: ``training.interleave_memory``."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Collection

_MPOL_INTERLEAVE = 3  # linux/mempolicy.h
_NODE_WORDS = 16  # of 64 NUMA nodes each: more than any kernel is built for


def interleave_memory(nodes: Collection[int]) -> str:
    """Have the kernel take pages from these NUMA nodes in turn.

    The policy holds for pages that this thread, or one that it starts later, is the first to
    write to; ``numactl --interleave`` sets it for a whole program.

    Returns:
        why that cannot be done; empty if it is done.
    """
    if len(nodes) < 2:
        return "the CPUs that this process may use are on one NUMA node"
    number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())  # set_mempolicy
    if sys.platform != "linux" or number is None:
        here = f"{sys.platform} on {platform.machine()}"
        return f"it is made for Linux on x86_64 and aarch64, this is {here}"
    words = (ctypes.c_uint64 * _NODE_WORDS)()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # the system ignores the last of the bits that it is given
    bits = ctypes.c_ulong(64 * _NODE_WORDS + 1)
    if libc.syscall(number, _MPOL_INTERLEAVE, words, bits) == 0:
        return ""
    return f"the system refuses it (set_mempolicy: {os.strerror(ctypes.get_errno())})"
