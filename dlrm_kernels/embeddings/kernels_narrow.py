"""Rows of 2 bytes a number on the CPU: widened, summed, changed and rounded stochastically.

What :mod:`dlrm_kernels.embeddings.kernels` and ``kernels_sorted`` do with a row of float32
is done here with one of bf16 or fp16. The law of the random words is that of
:mod:`dlrm_core.rounding`: a block of words is drawn once for a group of rows or for a bag,
and a member of the group adds its multiple of the golden ratio.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

from dlrm_core.rounding import GOLDEN, LANES, MULTIPLIERS, PHILOX_ROUNDS, WEYL, WORDS
from dlrm_kernels.vectors import (
    add_words,
    compiled,
    from_bf16,
    from_half,
    inlined,
    item,
    lane_numbers,
    load_first,
    load_first_shorts,
    load_words,
    loads,
    multiply,
    multiply_high,
    multiply_low,
    owner,
    round_to_bf16,
    round_to_half,
    short_vector,
    splat,
    splat_word,
    store_first,
    store_first_shorts,
    store_shorts,
    store_vector,
    store_words,
    subtract,
    vector,
    xor_words,
)

FLOAT, BF16, HALF = 0, 1, 2
"""Formats of a table's numbers."""


class Lookups(NamedTuple):
    """Lookups of a bag, and how far before its use a row is fetched."""

    indices: int
    """Address of all lookups."""
    begin: int
    end: int
    last: int
    """The table's last lookup."""
    ahead: int
    step: int


class Share(NamedTuple):
    """Which of the slices of a table's rows a unit of work owns."""

    mine: int
    slices: int


@compiled
def fetched(lookups, i):
    """The row to fetch while that of lookup ``i`` is used."""
    return item(lookups.indices, min(i + lookups.ahead, lookups.last))


@compiled
def owns(share, row):
    """Whether a row belongs to a share."""
    return owner(row, share.slices) == share.mine


@compiled
def words_bytes(dim):
    """Bytes of the random words of a row."""
    return 4 * ((dim + 63) // 64 * 64)


@compiled
def draw_words(out, seed, group, table, update, dim):
    """Philox4x32 of all columns' counters (block, group, table, update) to ``out``."""
    for block in range((dim + 63) // 64):
        a = add_words(lane_numbers(), splat_word(block * LANES))
        b, c, d = splat_word(group), splat_word(table), splat_word(update)
        factor, other_factor = splat_word(MULTIPLIERS[0]), splat_word(MULTIPLIERS[1])
        key, other_key = seed, 0
        for _ in range(PHILOX_ROUNDS):
            high, low = multiply_high(a, factor), multiply_low(a, factor)
            a = xor_words(xor_words(multiply_high(c, other_factor), b), splat_word(key))
            b = multiply_low(c, other_factor)
            c, d = xor_words(xor_words(high, d), splat_word(other_key)), low
            key += WEYL[0]
            other_key += WEYL[1]
        at = out + 4 * LANES * WORDS * block
        store_words(at, a)
        store_words(at + 64, b)
        store_words(at + 128, c)
        store_words(at + 192, d)


@compiled
def widen(shorts, kind):
    """Sixteen numbers of 2 bytes as float32."""
    if kind == BF16:
        return from_bf16(shorts)
    return from_half(shorts)


def loading_numbers(registers: int, narrow: bool) -> Any:
    """Make (address, count, kind): so many vectors of float32 from a row of the tables' numbers.

    Of a single vector it is the first ``count`` numbers, at most; nothing else is read.

    Args:
        narrow: whether numbers have 2 bytes, of the format ``kind``.
    """
    load = loads(short_vector if narrow else vector, registers)
    load_part = load_first_shorts if narrow else load_first

    @inlined
    def load_numbers(address, count, kind):
        numbers = load(address) if registers > 1 or count >= LANES else load_part(address, count)
        return widen(numbers, kind) if narrow else numbers

    return load_numbers


@inlined
def store_16(address, value, count):
    """The first ``count`` of sixteen float32, at most; nothing else is written."""
    if count >= LANES:
        store_vector(address, value)
    else:
        store_first(address, value, count)


def changing_numbers(registers: int, narrow: bool) -> Any:
    """Make (address, change, words, count, kind): w - change in the place of those numbers.

    Numbers of 2 bytes are rounded by random words of 32 bits.
    """
    load = loading_numbers(registers, narrow)

    @inlined
    def change_numbers(address, change, words, count, kind):
        value = subtract(load(address, count, kind), change)
        if narrow:
            rounded = rounded_by(value, words, kind)
            if registers > 1 or count >= LANES:
                store_shorts(address, rounded)
            else:
                store_first_shorts(address, rounded, count)
        elif registers > 1:
            store_vector(address, value)
        else:
            store_16(address, value, count)

    return change_numbers


@inlined
def rounded_by(value, words, kind):
    """Vectors of float32 as numbers of 2 bytes, up or down by random words."""
    if kind == BF16:
        return round_to_bf16(value, words)
    return round_to_half(value, words)


change_64, change_16 = changing_numbers(4, True), changing_numbers(1, True)


@compiled
def change_row(row, gradient, scale, dim, drawn, member, kind):
    """w -= scale g of a whole row, rounded once; ``member`` of the group of ``drawn``."""
    scales, added = splat(scale), splat_word(member * GOLDEN)
    for column in range(0, dim, LANES):
        count = min(LANES, dim - column)
        change = multiply(scales, load_first(gradient + 4 * column, count))
        words = add_words(load_words(drawn + 4 * column), added)
        change_16(row + 2 * column, change, words, count, kind)
