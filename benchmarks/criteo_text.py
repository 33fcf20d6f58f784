"""Text in Criteo's layout, made fast: what benchmarks/datasets.py converts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlrm_core.data.files.draws import PowerLaw
from dlrm_workbook.datasets.generate import VARIANTS

BLOCK = 20_000
MISSING_NUMBER, MISSING_CATEGORY = 0.2, 0.1
HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
DENSE, LINE_BYTES = 13, 314
"""Bytes a line is given before its unused ones are taken out."""


def write_text(path: Path, size: int, seed: int = 1) -> int:
    """Write at least ``size`` bytes of lines: label, 13 counts, 26 hashes, some left empty.

    Categories follow the power law of NVIDIA's T15 data in tables of its sizes; counts have
    one to five digits. The same seed gives the same bytes.

    Returns:
        lines written.
    """
    laws = [PowerLaw.of(r, 1.1) for r in VARIANTS["criteo_t15_synthetic"].table_rows]
    random, rows, written = np.random.default_rng(seed), 0, 0
    with path.open("wb") as file:
        while written < size:
            written += file.write(_block(laws, random))
            rows += BLOCK
    return rows


def _block(laws: list[PowerLaw], random: np.random.Generator) -> bytes:
    lines = np.zeros((BLOCK, LINE_BYTES), np.uint8)
    lines[:, 0] = ord("0") + (random.random(BLOCK) < 0.25)
    place = 1
    for _ in range(DENSE):
        lines[:, place] = ord("\t")
        number = (10.0 ** (5.0 * random.random(BLOCK))).astype(np.int64)
        shown = random.random(BLOCK) >= MISSING_NUMBER
        for digit in range(5):
            power = 10 ** (4 - digit)
            digits = np.where(number >= power, ord("0") + number // power % 10, 0)
            lines[:, place + 1 + digit] = np.where(shown, digits, 0)
        place += 6
    for table, law in enumerate(laws):
        lines[:, place] = ord("\t")
        row = law.draw(random.integers(0, 1 << 64, BLOCK, np.uint64)).astype(np.uint64)
        # a hash of row and table: odd factors keep different rows different
        value = (row * np.uint64(0x9E3779B1) + np.uint64(table * 0x85EBCA77)) & np.uint64(2**32 - 1)
        shown = random.random(BLOCK) >= MISSING_CATEGORY
        for digit in range(8):
            nibble = (value >> np.uint64(28 - 4 * digit)) & np.uint64(15)
            lines[:, place + 1 + digit] = np.where(shown, HEX[nibble.astype(np.intp)], 0)
        place += 9
    lines[:, place] = ord("\n")
    return lines[lines != 0].tobytes()
