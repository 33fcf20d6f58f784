"""Random columns as pure functions of (seed, split, column, row).

Every value is a hash of its place (Steele, Lea, Flood 2014: SplitMix64), so any rows
can be made by any thread in any order, again after a kill, and are the same bytes
everywhere: only +, −, ×, / and shifts are used, whose results IEEE 754 fixes, never a
mathematical library's logarithm or power. numpy makes them here; dlrm_kernels.data_sets
does the same arithmetic in machine code, and tests hold the two together.
"""

from __future__ import annotations

import decimal
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_core.base.engines import optional_engine
from dlrm_core.base.errors import InputError

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1
TO_UNIT = 2.0**-53

# log2(m) = sum of LOG2_TERMS[k] s^(2k+1), s = (m−1)/(m+1), for m in [sqrt(1/2), sqrt(2)]
LOG2_TERMS = tuple(2.0 / math.log(2.0) / (2 * k + 1) for k in range(9))
# 2^f = sqrt(2) · sum of EXP2_TERMS[k] (f−1/2)^k, for f in [0, 1)
EXP2_TERMS = tuple(math.sqrt(2.0) * math.log(2.0) ** k / math.factorial(k) for k in range(13))
MANTISSA_HALF = 0x3FE6A09E667F3BCD
"""Bits of sqrt(1/2): what is subtracted before the exponent is read off."""


def mix(value: int) -> int:
    """SplitMix64's output function on one 64-bit integer."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def stream_key(*parts: int | str) -> int:
    """A 64-bit key of a stream, from numbers and names."""
    key = 0
    for part in parts:
        numbers = list(part.encode()) if isinstance(part, str) else [part]
        for number in [len(numbers), *numbers]:
            key = mix(key + GAMMA * (number + 1))
    return key


def stream_words(key: int, start: int, count: int) -> np.ndarray:
    """64 random bits for each of the places start, start + 1, ...: (count,) uint64."""
    places = np.arange(count, dtype=np.uint64)
    return mixed(places * np.uint64(GAMMA) + np.uint64((key + GAMMA * (start + 1)) & MASK))


def mixed(value: np.ndarray) -> np.ndarray:
    """Return what :func:`mix` gives for each of an array of uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX_2)
    return value ^ (value >> np.uint64(31))


@functools.cache
def machine_code() -> Any | None:
    """The engine of data sets; None where dlrm_kernels or numba is not installed."""
    return optional_engine("data kernels")


def fill_words(key: int, start: int, out: np.ndarray) -> None:
    """As :func:`words`, into ``out`` (uint64, contiguous), in machine code where there is any."""
    code = machine_code()
    if code is None:
        out[:] = stream_words(key, start, out.size)
    else:
        code.fill_words(key, start, out)


def uniform(bits: np.ndarray) -> np.ndarray:
    """U[0,1) on multiples of 2^-53, from 64 random bits each: float64."""
    return (bits >> np.uint64(11)).astype(np.float64) * TO_UNIT


def exp2(x: np.ndarray) -> np.ndarray:
    """2^x for x in [0, 62], relative error below 1e-13, the same bits everywhere."""
    whole = x.astype(np.int64)
    part = (x - whole.astype(np.float64)) - 0.5
    total = np.full_like(x, EXP2_TERMS[-1])
    for term in EXP2_TERMS[-2::-1]:
        total = total * part + term
    return total * (np.int64(1) << whole).astype(np.float64)


def log2(x: np.ndarray) -> np.ndarray:
    """log2 of positive normal numbers, absolute error below 1e-13, the same bits everywhere."""
    bits = x.view(np.int64) - np.int64(MANTISSA_HALF)
    exponent = bits >> np.int64(52)
    mantissa = (x.view(np.int64) - (exponent << np.int64(52))).view(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    total = np.full_like(x, LOG2_TERMS[-1])
    for term in LOG2_TERMS[-2::-1]:
        total = total * square + term
    return total * s + exponent.astype(np.float64)


@dataclass(frozen=True)
class PowerLaw:
    """The bounded power law of NVIDIA's generator, cut to whole numbers.

    The density x^-alpha on [1, R + 1): P(row i) = ((i+1)^g − (i+2)^g) / (1 − (R+1)^g),
    g = 1 − alpha, row 0 hottest. A row is exp2(slope · t) − 1 with t = log2(1 − scale · u),
    or, for alpha 1, t = scale · u.
    """

    rows: int
    alpha: float
    scale: float
    slope: float

    @classmethod
    def of(cls, rows: int, alpha: float) -> PowerLaw:
        """The law of a table; its two constants are correctly rounded on every machine.

        Raises:
            InputError: a table that does not fit in int32, or a negative exponent.
        """
        if not 1 <= rows < 2**31 - 1:
            raise InputError(
                f"a table has {rows} rows, expected 1 to {2**31 - 2} (indices are int32)"
            )
        if not 0.0 <= alpha <= 16.0:
            raise InputError(f"alpha is {alpha:g}, expected 0 to 16")
        with decimal.localcontext() as context:
            context.prec = 40
            g = 1 - decimal.Decimal(alpha)
            if g == 0:
                logarithm = decimal.Decimal(rows + 1).ln() / decimal.Decimal(2).ln()
                return cls(rows, alpha, float(logarithm), 1.0)
            return cls(rows, alpha, float(1 - decimal.Decimal(rows + 1) ** g), float(1 / g))

    def draw(self, bits: np.ndarray) -> np.ndarray:
        """A row for every 64 random bits: int64 in [0, rows)."""
        t = uniform(bits) * self.scale
        if self.alpha != 1.0:
            t = log2(1.0 - t) * self.slope
        # what rounding may leave outside the ends
        places = exp2(np.maximum(t, 0.0)).astype(np.int64) - 1
        return np.minimum(places, self.rows - 1)

    def fill(self, key: int, start: int, out: np.ndarray) -> None:
        """Rows of consecutive samples into ``out`` (int8, int16 or int32, contiguous)."""
        code = machine_code()
        if code is None:
            out[:] = self.draw(stream_words(key, start, out.size))
        else:
            code.fill_rows(self, key, start, out)

    def chances(self, count: int) -> np.ndarray:
        """P(row i) of the first ``count`` rows: float64."""
        edges = np.arange(1.0, count + 2.0)
        if self.alpha == 1.0:
            return np.diff(np.log2(edges)) / self.scale
        return np.diff(edges ** (1.0 - self.alpha)) / -self.scale


@functools.cache
def half_of_bits() -> np.ndarray:
    """float16 of k / 65536 for every 16 random bits k, rounded towards 0: U[0,1)."""
    exact = np.arange(65536, dtype=np.float32) / np.float32(65536)
    # clear the 13 bits that float16 has not; below 2^-14 float16's steps are 2^-24
    cut = (exact.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(exact < 2.0**-14, exact, cut).astype(np.float16)
