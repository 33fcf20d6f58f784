"""Machine code for data sets: the arithmetic of the core's draws, and loops it is given.

numba compiles them once and keeps them on disk between runs. Data sets do without
(:func:`dlrm_core.data.files.draws.machine_code`), slowly.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from dlrm_core.data.files import draws
from dlrm_core.data.files.draws import (
    EXP2_TERMS,
    GAMMA,
    LOG2_TERMS,
    MANTISSA_HALF,
    MIX_1,
    MIX_2,
    TO_UNIT,
    PowerLaw,
)
from dlrm_kernels.native import cache_folder, kernel_cache

DRAW_SOURCES = tuple(Path(str(file)) for file in (__file__, draws.__file__))
"""Files of the constants that are compiled in."""

# The arithmetic of ``draws`` in machine code, several rows a vector instruction.

_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_S11, _S27, _S30, _S31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
_LOG2_TERMS, _EXP2_TERMS = LOG2_TERMS[::-1], EXP2_TERMS[::-1]
"""The highest power's first; loops over them are unrolled."""
STRIP = 1024
"""Rows drawn between two looks at memory: their intermediate values stay in the cache."""


def words_kernel(first, out):
    """Hashes of consecutive places; ``first`` is key + GAMMA (start + 1)."""
    for i in range(out.size):
        z = np.uint64(i) * _GAMMA + first
        z = (z ^ (z >> _S30)) * _MIX_1
        z = (z ^ (z >> _S27)) * _MIX_2
        out[i] = z ^ (z >> _S31)


def rows_kernel(first, logarithmic, scale, slope, last, out):
    """Rows of a power law; as PowerLaw.draw, strip by strip."""
    x = np.empty(STRIP, np.float64)
    bits = x.view(np.int64)
    for begin in range(0, out.size, STRIP):
        count = min(STRIP, out.size - begin)
        for i in range(count):
            z = np.uint64(begin + i) * _GAMMA + first
            z = (z ^ (z >> _S30)) * _MIX_1
            z = (z ^ (z >> _S27)) * _MIX_2
            z = z ^ (z >> _S31)
            x[i] = float(np.int64(z >> _S11)) * TO_UNIT * scale
        if not logarithmic:
            for i in range(count):
                x[i] = 1.0 - x[i]
            # the exponent goes to t, the mantissa stays
            for i in range(count):
                b = bits[i]
                exponent = (b - MANTISSA_HALF) >> 52
                bits[i] = b - (exponent << 52)
                out[begin + i] = exponent
            for i in range(count):
                s = (x[i] - 1.0) / (x[i] + 1.0)
                q = s * s
                t = _LOG2_TERMS[0]
                for term in _LOG2_TERMS[1:]:
                    t = t * q + term
                x[i] = (t * s + float(out[begin + i])) * slope
        for i in range(count):
            t = max(x[i], 0.0)
            whole = np.int64(t)
            f = (t - float(whole)) - 0.5
            p = _EXP2_TERMS[0]
            for term in _EXP2_TERMS[1:]:
                p = p * f + term
            row = np.int64(p * float(np.int64(1) << whole)) - 1
            out[begin + i] = min(row, last)


WORDS_TYPES = ("void(uint64, uint64[::1])",)
ROWS_TYPES = tuple(
    f"void(uint64, boolean, float64, float64, int64, {kind}[::1])"
    for kind in ("int8", "int16", "int32")
)


def fill_words(key: int, start: int, out: np.ndarray) -> None:
    """As :func:`draws.stream_words`, into ``out`` (uint64, contiguous)."""
    compiled_loop(words_kernel, WORDS_TYPES)(_first(key, start), out)


def fill_rows(law: PowerLaw, key: int, start: int, out: np.ndarray) -> None:
    """Rows of consecutive samples into ``out`` (int8, int16 or int32, contiguous)."""
    draw = compiled_loop(rows_kernel, ROWS_TYPES)
    draw(_first(key, start), law.alpha == 1.0, law.scale, law.slope, law.rows - 1, out)


def _first(key: int, start: int) -> np.uint64:
    return np.uint64((key + GAMMA * (start + 1)) & ((1 << 64) - 1))


@functools.cache
def compiled_loop(function: Callable[..., Any], types: tuple[str, ...]) -> Callable[..., Any]:
    """Machine code of a loop for some types of its arguments, which frees Python's lock.

    Args:
        function: calls no other function and takes its constants from its own module,
            or from this one's sources.
        types: numba's signatures.
    """
    make = functools.partial(numba.njit, list(types), nogil=True, error_model="numpy")
    folder, _ = cache_folder("datasets", (*DRAW_SOURCES, Path(function.__code__.co_filename)))
    if folder is not None:
        # whatever a damaged file makes pickle raise: compile anew
        with contextlib.suppress(Exception), kernel_cache(folder):
            return make(cache=True)(function)
    return make()(function)
