"""Rows of 2 bytes a number on the CPU: widened, summed, changed and rounded stochastically.

What :mod:`dlrm_kernels.embeddings.kernels` and ``kernels_sorted`` do with a row of float32
is done here with one of bf16 or fp16. The law of the random words is that of
:mod:`dlrm_kernels.rounding`: a block of words is drawn once for a group of rows or for a bag,
and a member of the group adds its multiple of the golden ratio.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

from dlrm_kernels import vectors as v
from dlrm_kernels.rounding import GOLDEN, LANES, MULTIPLIERS, PHILOX_ROUNDS, WEYL, WORDS

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


@v.compiled
def fetched(lookups, i):
    """The row to fetch while that of lookup ``i`` is used."""
    return v.item(lookups.indices, min(i + lookups.ahead, lookups.last))


@v.compiled
def owns(share, row):
    return v.owner(row, share.slices) == share.mine


@v.compiled
def words_bytes(dim):
    """Bytes of the random words of a row."""
    return 4 * ((dim + 63) // 64 * 64)


@v.compiled
def draw_words(out, seed, group, table, update, dim):
    """Philox4x32 of all columns' counters (block, group, table, update) to ``out``."""
    for block in range((dim + 63) // 64):
        a = v.add_words(v.lane_numbers(), v.splat_word(block * LANES))
        b, c, d = v.splat_word(group), v.splat_word(table), v.splat_word(update)
        factor, other_factor = v.splat_word(MULTIPLIERS[0]), v.splat_word(MULTIPLIERS[1])
        key, other_key = seed, 0
        for _ in range(PHILOX_ROUNDS):
            high, low = v.multiply_high(a, factor), v.multiply_low(a, factor)
            a = v.xor_words(v.xor_words(v.multiply_high(c, other_factor), b), v.splat_word(key))
            b = v.multiply_low(c, other_factor)
            c, d = v.xor_words(v.xor_words(high, d), v.splat_word(other_key)), low
            key += WEYL[0]
            other_key += WEYL[1]
        at = out + 4 * LANES * WORDS * block
        v.store_words(at, a)
        v.store_words(at + 64, b)
        v.store_words(at + 128, c)
        v.store_words(at + 192, d)


@v.compiled
def widen(shorts, kind):
    """Sixteen numbers of 2 bytes as float32."""
    if kind == BF16:
        return v.from_bf16(shorts)
    return v.from_half(shorts)


def loading_numbers(registers: int, narrow: bool) -> Any:
    """Make (address, count, kind): so many vectors of float32 from a row of the tables' numbers.

    Of a single vector it is the first ``count`` numbers, at most; nothing else is read.

    Args:
        narrow: whether numbers have 2 bytes, of the format ``kind``.
    """
    load = v.loads(v.short_vector if narrow else v.vector, registers)
    load_part = v.load_first_shorts if narrow else v.load_first

    @v.inlined
    def load_numbers(address, count, kind):
        numbers = load(address) if registers > 1 or count >= LANES else load_part(address, count)
        return widen(numbers, kind) if narrow else numbers

    return load_numbers


@v.inlined
def store_16(address, value, count):
    """The first ``count`` of sixteen float32, at most; nothing else is written."""
    if count >= LANES:
        v.store_vector(address, value)
    else:
        v.store_first(address, value, count)


def changing_numbers(registers: int, narrow: bool) -> Any:
    """Make (address, change, words, count, kind): w - change in the place of those numbers.

    Numbers of 2 bytes are rounded by random words of 32 bits.
    """
    load = loading_numbers(registers, narrow)

    @v.inlined
    def change_numbers(address, change, words, count, kind):
        value = v.subtract(load(address, count, kind), change)
        if narrow:
            rounded = rounded_by(value, words, kind)
            if registers > 1 or count >= LANES:
                v.store_shorts(address, rounded)
            else:
                v.store_first_shorts(address, rounded, count)
        elif registers > 1:
            v.store_vector(address, value)
        else:
            store_16(address, value, count)

    return change_numbers


@v.inlined
def rounded_by(value, words, kind):
    """Vectors of float32 as numbers of 2 bytes, up or down by random words."""
    if kind == BF16:
        return v.round_to_bf16(value, words)
    return v.round_to_half(value, words)


def changing_rows(narrow: bool) -> Any:
    """Make (row, gradient, scale, dim, drawn, member, kind): w -= scale g of a whole row.

    Numbers of 2 bytes are rounded once, by the words of a ``member`` of the group of ``drawn``.
    """
    load, change_numbers = loading_numbers(1, False), changing_numbers(1, narrow)
    size = 2 if narrow else 4

    @v.compiled
    def change_row(row, gradient, scale, dim, drawn, member, kind):
        for column in range(0, dim, LANES):
            at, count = 4 * column, min(LANES, dim - column)
            change = v.multiply(v.splat(scale), load(gradient + at, count, FLOAT))
            words = member_words(v.load_words(drawn + at), member) if narrow else 0
            change_numbers(row + size * column, change, words, count, kind)

    return change_row


@v.inlined
def member_words(words, member):
    """A member's words, from those of its group."""
    return v.add_words(words, v.splat_word(member * GOLDEN))
