"""The C library's heap, kept as a program has it by itself.

What a recording frees changes the program that it records: glibc adapts its thresholds to large
blocks that are freed, and the program's own blocks find room in the holes that are left. Either
spares it the page faults of memory that it asks for and gives back in each step, which are up to
a third of a step. All of it is of glibc and of Linux; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

from dlrm_core.base import machine

PIECES = (1 << 20, 128 << 10)
"""Sizes (bytes) in which holes are taken, largest first; smaller ones hold no block that the
system maps or trims."""

MOST_PIECES = 2_000

_held: list[tuple[int, int]] = []
"""Address and size of the pieces that keep what a recording freed from the program."""
_own: list[tuple[int, int]] | None = None
"""The program's own holes before the recording, in pieces; None before it."""


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2`` (malloc.h, since glibc 2.33)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _libc() -> Any:
    """glibc with ``mallinfo2`` and the types of what is called; None for another C library."""
    try:
        libc: Any = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo2
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    except (OSError, AttributeError, TypeError):
        return None  # another C library, or an older one
    return libc


def heap_bytes() -> int | None:
    """Bytes asked of the allocator and not given back; None without glibc's count.

    In use of all arenas, and of blocks mapped one by one. Takes about a microsecond.
    """
    if (libc := _libc()) is None:
        return None
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd) - sum(size for _, size in _held)


def keep() -> None:
    """Have glibc map and trim from the sizes that it has found so far on, and note its holes.

    Settings of the environment end the adapting by themselves, and stay.
    """
    global _own
    is_set = any(name in os.environ for name in (*machine.ALLOCATOR_SETTINGS, "MALLOC_TOP_PAD_"))
    if (libc := _libc()) is None or sys.platform != "linux":
        return
    if not is_set:
        libc.mallopt(machine._M_TOP_PAD, 128 << 10)  # its default; to set any ends the adapting
    if _own is None:
        _own = _holes(libc)
        for address, _ in _own:
            libc.free(address)


def restore() -> None:
    """Take the holes that were not there when :func:`keep` was called first, so that the program's
    blocks go where they went before."""
    if (libc := _libc()) is None or _own is None:
        return
    for address, size in _holes(libc):
        # holes of the program's are as they were
        covered = sum(
            max(min(address + size, begin + length) - max(address, begin), 0)
            for begin, length in _own
        )
        if covered > size // 2:
            libc.free(address)
        else:
            _held.append((address, size))


def release() -> None:
    """Give all of it back: nothing is measured any more."""
    global _own
    while _held:
        _libc().free(_held.pop()[0])
    _own = None


def _holes(libc: Any) -> list[tuple[int, int]]:
    """The free memory of the main heap below its end, allocated: addresses and sizes of pieces."""
    taken: list[tuple[int, int]] = []
    before = libc.mallinfo2()
    for size in PIECES:
        while len(taken) < MOST_PIECES:
            address, after = libc.malloc(size), libc.mallinfo2()
            of_hole = address and after.arena == before.arena and after.hblkhd == before.hblkhd
            if not of_hole or after.keepcost < before.keepcost:
                libc.free(address)
                break
            taken.append((address, size))
            before = after
        before = libc.mallinfo2()
    return taken
