"""Loops over every value of a data set, which dlrm_kernels compiles where numba is installed.

They are plain Python, so that they can be read, tested and run (slowly) without it.
:func:`parse_lines` is four times faster than pyarrow.csv (docs/datasets.md has the figures).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlrm_core.data.files.draws import machine_code

COUNTS = 13
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


def parse_lines(data, rows, hex_values, labels, numbers, categories, missing, fault):
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
        for j in range(COUNTS):
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
                fault[0], fault[2], fault[3] = BAD_CATEGORY, 1 + COUNTS + t, first
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


def count_keys(keys, missing, bit, shift, limit, table_keys, table_counts, state):
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


def insert_keys(keys, values, shift, table_keys, table_values):
    """Put different keys with their values (never 0) into an open hash table with room."""
    last = np.int64(table_keys.size - 1)
    for i in range(keys.size):
        slot = np.int64((np.uint64(keys[i]) * _HASH) >> shift)
        while table_values[slot] != 0:
            slot = (slot + 1) & last
        table_keys[slot] = keys[i]
        table_values[slot] = values[i]


def look_up_keys(keys, missing, bit, shift, table_keys, table_values, out):
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


SIGNATURES: dict[Callable[..., Any], tuple[str, ...]] = {
    parse_lines: (
        "void(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1], uint8[::1], int32[:, ::1], "
        "uint32[:, ::1], uint32[::1], int64[::1])",
    ),
    count_keys: (
        "void(Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), uint32, "
        "uint64, int64, uint32[::1], int64[::1], int64[::1])",
    ),
    insert_keys: ("void(uint32[::1], int64[::1], uint64, uint32[::1], int64[::1])",),
    look_up_keys: tuple(
        "void(Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), uint32, "
        f"uint64, uint32[::1], int64[::1], {kind}[::1])"
        for kind in ("int8", "int16", "int32")
    ),
}
"""The types that each loop is compiled for."""


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The machine code of one of this module's loops, or the loop itself where there is none."""
    engine = machine_code()
    if engine is not None:
        return engine.compiled_loop(loop, SIGNATURES[loop])
    # numpy's scalars warn of the overflow that hashing rests on
    return np.errstate(over="ignore")(loop)
