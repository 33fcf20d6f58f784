"""Functions compiled by numba, kept on disk between runs; numpy does without them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    words,
)
from dlrm_kernels.native import kernel_cache


@functools.cache
def compile_function(
    function: Callable[..., Any], signatures: tuple[str, ...], source: Path
) -> Callable[..., Any] | None:
    """Machine code of a module-level function that frees Python's lock; None without numba.

    Args:
        signatures: numba's, one a combination of argument types.
        source: the file that the function is in; what is kept belongs to its present text.
    """
    try:
        from numba import njit
    except ImportError:
        return None
    make = functools.partial(njit, list(signatures), nogil=True, error_model="numpy")
    folder = _folder(source)
    if folder is not None:
        # whatever a damaged file makes pickle raise: compile anew
        with contextlib.suppress(Exception), kernel_cache(folder):
            return make(cache=True)(function)
    return make()(function)


@functools.cache
def _folder(source: Path) -> Path | None:
    """Where machine code is kept, or None where nothing can be."""
    import numba

    digest = hashlib.sha256(numba.__version__.encode() + source.read_bytes())
    # constants that the functions use are compiled in
    digest.update(Path(draws.__file__).read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
        folder = folder.absolute() / "dlrm-workbook" / f"datasets-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError):
        return None
    return folder


# The arithmetic of ``draws`` in machine code, several rows a vector instruction.

_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_S11, _S27, _S30, _S31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = LOG2_TERMS
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10, _E11, _E12 = EXP2_TERMS
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
                t = _L8
                t = t * q + _L7
                t = t * q + _L6
                t = t * q + _L5
                t = t * q + _L4
                t = t * q + _L3
                t = t * q + _L2
                t = t * q + _L1
                t = t * q + _L0
                x[i] = (t * s + float(out[begin + i])) * slope
        for i in range(count):
            t = max(x[i], 0.0)
            whole = np.int64(t)
            f = (t - float(whole)) - 0.5
            p = _E12
            p = p * f + _E11
            p = p * f + _E10
            p = p * f + _E9
            p = p * f + _E8
            p = p * f + _E7
            p = p * f + _E6
            p = p * f + _E5
            p = p * f + _E4
            p = p * f + _E3
            p = p * f + _E2
            p = p * f + _E1
            p = p * f + _E0
            row = np.int64(p * float(np.int64(1) << whole)) - 1
            out[begin + i] = min(row, last)


def _first(key: int, start: int) -> np.uint64:
    return np.uint64((key + GAMMA * (start + 1)) & ((1 << 64) - 1))


def fill_words(key: int, start: int, out: np.ndarray) -> None:
    """As :func:`draws.words`, into ``out`` (uint64, contiguous)."""
    kernel = compile_function(words_kernel, ("void(uint64, uint64[::1])",), Path(__file__))
    if kernel is None:
        out[:] = words(key, start, out.size)
    else:
        kernel(_first(key, start), out)


def fill_rows(law: PowerLaw, key: int, start: int, out: np.ndarray) -> None:
    """Rows of consecutive samples into ``out`` (int8, int16 or int32, contiguous)."""
    types = ("int8", "int16", "int32")
    signatures = tuple(
        f"void(uint64, boolean, float64, float64, int64, {kind}[::1])" for kind in types
    )
    kernel = compile_function(rows_kernel, signatures, Path(__file__))
    if kernel is None:
        out[:] = law.draw(words(key, start, out.size))
    else:
        kernel(_first(key, start), law.alpha == 1.0, law.scale, law.slope, law.rows - 1, out)


# Criteo's text and its vocabularies in machine code; plain loops, so Python can run them too.

DENSE = 13
TABLES = 26
MISSING = -(2**31)
"""Stands for an empty integer field; the files hold no such number."""
NO_FAULT, BAD_LABEL, BAD_INTEGER, BAD_CATEGORY, FEW_FIELDS, MANY_FIELDS = range(6)
TAB, NEWLINE, RETURN, MINUS, ZERO, NINE = 9, 10, 13, 45, 48, 57
NOT_HEX = 255
_HASH = np.uint64(0x9E3779B97F4A7C15)

HEX_VALUES = np.full(256, NOT_HEX, np.uint8)
for _digit in "0123456789abcdefABCDEF":
    HEX_VALUES[ord(_digit)] = int(_digit, 16)


def parse_kernel(data, rows, hex_values, labels, numbers, categories, missing, fault):
    """Lines of Criteo's text into columns.

    Args:
        data: bytes, the last a newline.
        rows: lines to parse.
        hex_values: value of each byte as a hexadecimal digit, 255 of none.
        labels: (rows,) uint8 out.
        numbers: (rows, 13) int32 out, MISSING where the field is empty.
        categories: (26, rows) uint32 out, 0 where the field is empty.
        missing: (rows,) uint32 out, bit t set where categorical field t is empty.
        fault: out, of the first faulty line: kind, line, field, place in data.
    """
    p = 0
    for r in range(rows):
        fault[1] = r
        c = data[p]
        if (c != ZERO and c != ZERO + 1) or data[p + 1] != TAB:
            fault[0], fault[2], fault[3] = BAD_LABEL, 0, p
            return
        labels[r] = c - ZERO
        p += 2
        for j in range(DENSE):
            c = data[p]
            if c == TAB:
                numbers[r, j] = MISSING
                p += 1
                continue
            first = p
            if c == MINUS:
                p += 1
            value = np.int64(0)
            digits = p
            while ZERO <= data[p] <= NINE and p - digits < 11:
                value = value * 10 + (np.int64(data[p]) - ZERO)
                p += 1
            if p == digits or data[p] != TAB or value > 2147483647:
                fault[0], fault[2], fault[3] = BAD_INTEGER, 1 + j, first
                if data[p] in (NEWLINE, RETURN):
                    fault[0] = FEW_FIELDS
                return
            numbers[r, j] = -value if c == MINUS else value
            p += 1
        mask = 0
        for t in range(TABLES):
            first = p
            value = np.int64(0)
            h = hex_values[data[p]]
            while h != NOT_HEX and p - first < 9:
                value = value * 16 + np.int64(h)
                p += 1
                h = hex_values[data[p]]
            digits = p - first
            if t == TABLES - 1 and data[p] == RETURN:
                p += 1
            c = data[p]
            if digits > 8 or c != (TAB if t < TABLES - 1 else NEWLINE):
                fault[0], fault[2], fault[3] = BAD_CATEGORY, 1 + DENSE + t, first
                if c in (NEWLINE, RETURN):
                    fault[0] = FEW_FIELDS
                elif c == TAB and digits <= 8:
                    fault[0] = MANY_FIELDS
                return
            if digits == 0:
                mask |= 1 << t
            categories[t, r] = value
            p += 1
        missing[r] = mask
    fault[0] = NO_FAULT


def count_kernel(keys, missing, bit, shift, limit, table_keys, table_counts, state):
    """Count keys in an open hash table until it is full.

    Args:
        keys: (N,) uint32.
        missing: (N,) uint32; keys with ``bit`` set are left out.
        shift: 64 − log2(slots).
        limit: entries at which to stop.
        state: in and out, the next key to count and the entries so far.
    """
    last = np.int64(table_keys.size - 1)
    i, used = state[0], state[1]
    while i < keys.size and used < limit:
        if (missing[i] >> bit) & 1 == 0:
            key = keys[i]
            slot = np.int64((np.uint64(key) * _HASH) >> shift)
            while table_counts[slot] != 0 and table_keys[slot] != key:
                slot = (slot + 1) & last
            if table_counts[slot] == 0:
                table_keys[slot] = key
                used += 1
            table_counts[slot] += 1
        i += 1
    state[0], state[1] = i, used


def insert_kernel(keys, values, shift, table_keys, table_values):
    """Put different keys with their values (never 0) into an open hash table with room."""
    last = np.int64(table_keys.size - 1)
    for i in range(keys.size):
        slot = np.int64((np.uint64(keys[i]) * _HASH) >> shift)
        while table_values[slot] != 0:
            slot = (slot + 1) & last
        table_keys[slot] = keys[i]
        table_values[slot] = values[i]


def look_up_kernel(keys, missing, bit, shift, table_keys, table_values, out):
    """Values of keys, where the table has them; other places of ``out`` stay as they are."""
    last = np.int64(table_keys.size - 1)
    for i in range(keys.size):
        if (missing[i] >> bit) & 1 == 0:
            key = keys[i]
            slot = np.int64((np.uint64(key) * _HASH) >> shift)
            while table_values[slot] != 0 and table_keys[slot] != key:
                slot = (slot + 1) & last
            if table_values[slot] != 0:
                out[i] = table_values[slot]


SIGNATURES = {
    parse_kernel: (
        "void(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1], uint8[::1], int32[:, ::1], "
        "uint32[:, ::1], uint32[::1], int64[::1])",
    ),
    count_kernel: (
        "void(Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), uint32, "
        "uint64, int64, uint32[::1], int64[::1], int64[::1])",
    ),
    insert_kernel: ("void(uint32[::1], int64[::1], uint64, uint32[::1], int64[::1])",),
    look_up_kernel: tuple(
        "void(Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), uint32, "
        f"uint64, uint32[::1], int64[::1], {kind}[::1])"
        for kind in ("int8", "int16", "int32")
    ),
}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's machine code, or (slow) the function itself without numba."""
    compiled = compile_function(function, SIGNATURES[function], Path(__file__))
    # numpy's scalars warn of what a hash is made of
    return compiled or np.errstate(over="ignore")(function)
