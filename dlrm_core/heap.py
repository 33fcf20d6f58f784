"""Bytes that the process has asked of its allocator and not given back.

Resident memory grows in steps of the allocator's own, and not at all while a leak uses up
what was free; the allocator's count is exact after every iteration.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


class _Info(ctypes.Structure):
    """glibc's ``struct mallinfo2`` (malloc.h, since glibc 2.33)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_bytes() -> int | None:
    """Bytes in use of all arenas and of blocks mapped one by one; None without glibc's count.

    Takes about a microsecond.
    """
    read = _mallinfo2()
    if read is None:
        return None
    info = read()
    return int(info.uordblks + info.hblkhd)


@functools.cache
def _mallinfo2() -> Callable[[], Any] | None:
    try:
        read: Any = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None  # another C library, or an older one
    read.restype = _Info
    return read
