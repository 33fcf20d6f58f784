"""Facebook's random numbers in machine code: numpy's Mersenne Twister, and bags of rows.

The bits are those of ``RandomState``. A number took 1.1 ns instead of 3.7 (AMD EPYC with AVX-512,
one thread). Rows of a bag are sorted by counting for each how many are smaller, several at a time:
5x faster than by numba's sort for bags of up to 100 rows, as fast for bags of up to 1,000.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.data_sets import compiled_loop

STATE_WORDS = 624
"""Words of the generator's state (Matsumoto and Nishimura 1998, ACM TOMACS 8(1), 3-30)."""

_1, _7, _11, _15, _18 = (np.uint32(bits) for bits in (1, 7, 11, 15, 18))
_UPPER, _LOWER, _TWIST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_MASK_7, _MASK_15 = np.uint32(0x9D2C5680), np.uint32(0xEFC60000)
_UPPER_27, _21, _38 = np.uint64(0xFFFFFFE0), np.uint64(21), np.uint64(38)
_UNIT = 2.0**-53


def uniform_kernel(state, place, low, width, out):
    """Fill ``out`` from an even place of the state; what is left is the next place.

    Each number takes two words: 27 bits of the first and 26 of the second, as numpy does it.
    """
    words = np.empty(STATE_WORDS, np.uint32)
    pairs = words.view(np.uint64)
    done = 0
    while done < out.size:
        if place == STATE_WORDS:
            # two loops: each can be done several words at a time
            for i in range(227):
                y = (state[i] & _UPPER) | (state[i + 1] & _LOWER)
                state[i] = state[i + 397] ^ (y >> _1) ^ (_TWIST * (y & _1))
            for i in range(227, 623):
                y = (state[i] & _UPPER) | (state[i + 1] & _LOWER)
                state[i] = state[i - 227] ^ (y >> _1) ^ (_TWIST * (y & _1))
            y = (state[623] & _UPPER) | (state[0] & _LOWER)
            state[623] = state[396] ^ (y >> _1) ^ (_TWIST * (y & _1))
            place = 0
        for i in range(STATE_WORDS):
            # numba makes 64 bits of a shifted word; cut again, twice as many fit in a register
            x = np.uint32(state[i] ^ (state[i] >> _11))
            x = np.uint32(x ^ (np.uint32(x << _7) & _MASK_7))
            x = np.uint32(x ^ (np.uint32(x << _15) & _MASK_15))
            words[i] = x ^ (x >> _18)
        first = place // 2
        count = min(STATE_WORDS // 2 - first, out.size - done)
        for i in range(count):
            pair = pairs[first + i]
            whole = ((pair & _UPPER_27) << _21) | (pair >> _38)
            out[done + i] = low + width * (float(np.int64(whole)) * _UNIT)
        done += count
        place += 2 * count
    return place


UNIFORM_TYPES = tuple(
    f"int64(uint32[::1], int64, float64, float64, {kind}[::1])" for kind in ("float32", "float64")
)

LARGEST_BAG = 1000
"""Rows drawn for a bag, at most: the work of counting grows with their square."""

LARGEST_ROW = 2**31 - 1


def bags_kernel(draws, bound, fixed, last, progress, offsets, indices):
    """Fill bags until all are full or the draws run out.

    ``progress`` holds the full bags, the draws used and the indices written; ``fixed`` draws a bag
    or, if 0, as many as a draw of its own says, ``bound`` at most; rows are 0 to ``last``.
    """
    bag, place, written = progress
    drawn = np.empty(max(bound, fixed, 1), np.int32)
    ordered = np.empty(drawn.size, np.int32)
    while bag < offsets.size:
        begin, count = place, fixed
        if fixed == 0:
            if place >= draws.size:
                break
            # halves go to the even neighbour, as in numpy
            count = max(np.int64(np.rint(draws[place] * bound)), 1)
            begin += 1
        if begin + count > draws.size:
            break
        for i in range(count):
            drawn[i] = np.int32(np.rint(draws[begin + i] * last))
            ordered[i] = -1
        for i in range(count):
            row, smaller = drawn[i], np.int32(0)
            for j in range(count):
                smaller = np.int32(smaller + (drawn[j] < row))
            ordered[smaller] = row  # equal ones meet in one place, and leave others empty
        offsets[bag] = written
        for i in range(count):
            indices[written] = ordered[i]
            written += ordered[i] >= 0
        bag += 1
        place = begin + count
    progress[0], progress[1], progress[2] = bag, place, written


BAGS_TYPES = ("void(float64[::1], int64, int64, int64, int64[::1], int64[::1], int64[::1])",)


def uniform(random: np.random.RandomState, bound: float, out: np.ndarray) -> None:
    """Fill ``out`` (n,) float32 by U(-bound, bound), which ``random`` moves past."""
    if not _filled(random, -bound, bound + bound, out):
        out[:] = random.uniform(-bound, bound, out.size)


def random_sample(random: np.random.RandomState, count: int, kind: type[np.floating]) -> np.ndarray:
    """Numbers (count,) of U[0, 1), float64 or rounded to float32, which ``random`` moves past."""
    out = np.empty(count, kind)
    if not _filled(random, 0.0, 1.0, out):
        return random.random_sample(count).astype(kind)
    return out


def _filled(random: np.random.RandomState, low: float, width: float, out: np.ndarray) -> bool:
    """Fill ``out`` with the stream's next numbers; False, and nothing done, from an odd place."""
    state: dict[str, Any] = random.get_state(legacy=False)
    twister = state["state"]
    if twister["pos"] % 2:
        # numbers of one word were drawn before
        return False
    kernel = compiled_loop(uniform_kernel, UNIFORM_TYPES)
    twister["pos"] = kernel(twister["key"], twister["pos"], low, width, out)
    random.set_state(state)
    return True


def fill_bags(
    draws: np.ndarray,
    bound: int,
    fixed: int,
    rows: int,
    progress: np.ndarray,
    offsets: np.ndarray,
    indices: np.ndarray,
) -> None:
    """Fill bags of a table with sorted, different rows until all are full or the draws run out.

    Args:
        draws: (N,) float64 of U[0, 1).
        bound: rows drawn for a bag, at most :data:`LARGEST_BAG`; a draw before them says how many.
        fixed: instead, so many for every bag; 0 where their number is drawn.
        rows: of the table, at most :data:`LARGEST_ROW`.
        progress: (3,) int64, moved on: bags filled, draws used, indices written.
        offsets: (B,) int64; where each bag begins.
        indices: int64, room for every row that can be drawn.
    """
    compiled_loop(bags_kernel, BAGS_TYPES)(
        draws, bound, fixed, rows - 1, progress, offsets, indices
    )
