"""The loop over Criteo's text, which dlrm_kernels compiles where numba is installed.

It is plain Python, so that it can be read, tested and run (slowly) without it, and four times
faster than pyarrow.csv (docs/datasets.md has the figures).
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
        fault: out, of the first faulty line: kind, line, field.
    """
    p = 0
    for r in range(rows):
        fault[1] = r
        c = data[p]
        if (c != ZERO and c != ZERO + 1) or data[p + 1] != TAB:
            fault[0], fault[2] = BAD_LABEL, 0
            return
        labels[r] = c - ZERO
        p += 2
        for j in range(COUNTS):
            c = data[p]
            if c == TAB:
                numbers[r, j] = MISSING
                p += 1
                continue
            if c == MINUS:
                p += 1
            value = np.int64(0)
            digits = p
            while ZERO <= data[p] <= NINE and p - digits < 11:
                value = value * 10 + (np.int64(data[p]) - ZERO)
                p += 1
            if p == digits or data[p] != TAB or value > 2147483647:
                fault[0], fault[2] = BAD_INTEGER, 1 + j
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
                fault[0], fault[2] = BAD_CATEGORY, 1 + COUNTS + t
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


PARSE_TYPES = (
    "void(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1], uint8[::1], int32[:, ::1], "
    "uint32[:, ::1], uint32[::1], int64[::1])",
)
"""The types that the loop is compiled for."""


def parser() -> Callable[..., Any]:
    """The machine code of :func:`parse_lines`, or the loop itself where there is none."""
    engine = machine_code()
    return parse_lines if engine is None else engine.compiled_loop(parse_lines, PARSE_TYPES)
